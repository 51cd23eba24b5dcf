"""The quick way through records agrees with the general one, or leaves them to it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches import records as module
from anabranch.batches.format import HEADER_SIZE, BatchHeader, read_header
from anabranch.batches.records import Record, decode_body, encode_batch
from anabranch.ports import CorruptBatch
from tests.batches.strategies import mutated, records
from tests.batches.test_format import edited
from tests.batches.test_records import MALFORMED
from tests.conftest import some

COMMAND = [
    Record(
        i,
        1_795_000_000_000 + i,
        (None, b"", b"key")[i % 3],
        b"v" * (1275, 0, 70_000)[i % 3],
        (("ab.cid", b"c" * 16), ("ab.reply", bytes(4))) * (i % 2),
    )
    for i in range(200)
]


def quickly(body: bytes, header: BatchHeader) -> list[Record] | None:
    """The result of the quick way; None where it leaves the records to the other."""
    try:
        return module._decode_usual(body, header)
    except (module._Unusual, IndexError):
        return None


def generally(body: bytes, header: BatchHeader) -> list[Record] | None:
    """The result of the general way; None for a corrupt batch."""
    try:
        return module._decode_any(body, header)
    except CorruptBatch:
        return None


def parts(data: bytes) -> tuple[bytes, BatchHeader]:
    return data[HEADER_SIZE:], read_header(data)


def test_the_usual_records_are_read_quickly() -> None:
    assert quickly(*parts(encode_batch(COMMAND))) == COMMAND


@settings(deadline=None)
@given(records())
def test_both_ways_agree(made: list[Record]) -> None:
    body, header = parts(encode_batch(made))
    found = quickly(body, header)
    assert generally(body, header) == made
    assert found is None or found == made


@settings(max_examples=some(500), deadline=None)
@given(records(4), st.data())
def test_of_mutated_bytes_nothing_is_accepted_that_the_general_way_refuses(
    made: list[Record], data: st.DataObject
) -> None:
    body, header = parts(encode_batch(made))
    other = mutated(body, data)
    found = quickly(other, header)
    assert found is None or found == generally(other, header)


@settings(max_examples=some(500), deadline=None)
@given(st.binary(max_size=60), st.integers(1, 8), st.integers(-1, 9))
def test_of_random_bytes_nothing_is_accepted_that_the_general_way_refuses(
    body: bytes, count: int, last_delta: int
) -> None:
    header = read_header(encode_batch(COMMAND[:1]))
    header = header._replace(record_count=count, last_offset_delta=last_delta)
    found = quickly(body, header)
    assert found is None or found == generally(body, header)


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_what_is_malformed_is_left_to_the_general_way(name: str) -> None:
    body, header = parts(MALFORMED[name])
    if generally(body, header) is None:  # else it is malformed in its header
        assert quickly(body, header) is None


def test_times_near_the_end_of_64_bits_are_left_to_the_general_way() -> None:
    body, header = parts(edited(encode_batch(COMMAND[:2]), base_timestamp=(1 << 63) - 1))
    assert quickly(body, header) is None
    with pytest.raises(CorruptBatch, match="64 bits"):
        decode_body(body, header)


def test_log_append_time_counts() -> None:
    data = edited(encode_batch(COMMAND[:3]), attributes=0x08, max_timestamp=777)
    found = quickly(*parts(data))
    assert found is not None
    assert [record.timestamp_ms for record in found] == [777] * 3
    assert found == generally(*parts(data))


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7E, 0x80, 0xFE, 0xFF])
def test_a_megabyte_of_one_byte_is_declined_at_once(byte: int) -> None:
    header = read_header(encode_batch(COMMAND[:1]))._replace(record_count=1 << 17)
    began = time.process_time()
    assert quickly(bytes((byte,)) * (1 << 20), header) is None
    assert time.process_time() - began < 2
