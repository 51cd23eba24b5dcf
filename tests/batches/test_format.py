"""RecordBatch v2: headers, CRC, patching."""

from __future__ import annotations

import contextlib
import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.batches.format import (
    HEADER_SIZE,
    BatchHeader,
    check_crc,
    compute_crc,
    frame,
    next_sequence,
    patch_parts,
    read_header,
    split_batches,
)
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.ports import CorruptBatch, LogRefused
from anabranch.testing.memory.partition import patch, with_base_offset
from tests.batches.strategies import CODECS, records

PLAIN = encode_batch([Record(i, 1000 + i, b"k", b"v%d" % i) for i in range(5)])


def edited(data: bytes, **fields: int) -> bytes:
    """The batch with header fields replaced and the CRC made right again."""
    header = read_header(data)._replace(**fields)
    out = bytearray(struct.pack(">qiibIhiqqqhii", *header) + data[HEADER_SIZE:])
    if "crc" not in fields:
        struct.pack_into(">I", out, 17, google_crc32c.value(bytes(out[21:])))
    return bytes(out)


def test_a_header_is_read_field_by_field() -> None:
    # Written by hand from KIP-98's layout.
    body = b"\x10\x00\x00\x00\x02k\x02v\x00"
    data = b"".join(
        (
            (77).to_bytes(8, "big"),
            (49 + len(body)).to_bytes(4, "big"),
            (5).to_bytes(4, "big"),
            b"\x02",
            b"\x00\x00\x00\x00",
            (0x1B).to_bytes(2, "big"),
            (0).to_bytes(4, "big"),
            (1111).to_bytes(8, "big"),
            (2222).to_bytes(8, "big"),
            (42).to_bytes(8, "big"),
            (3).to_bytes(2, "big"),
            (9).to_bytes(4, "big"),
            (1).to_bytes(4, "big"),
            body,
        )
    )
    header = read_header(data)
    assert header == BatchHeader(77, 49 + len(body), 5, 2, 0, 0x1B, 0, 1111, 2222, 42, 3, 9, 1)
    assert header.compression == 3
    assert header.is_transactional
    assert header.is_log_append_time
    assert not header.is_control
    assert header.is_dense
    assert header.next_offset == 78


@pytest.mark.parametrize("cut", [0, 1, 60, len(PLAIN) - 1])
def test_a_cut_batch_is_corrupt(cut: int) -> None:
    with pytest.raises(CorruptBatch):
        read_header(PLAIN[:cut])


def test_bytes_after_a_batch_are_corrupt() -> None:
    with pytest.raises(CorruptBatch, match="says it has"):
        read_header(PLAIN + b"x")
    assert read_header(PLAIN + b"x", whole=False).record_count == 5


@pytest.mark.parametrize("magic", [0, 1, 3, -1])
def test_other_formats_are_refused_by_name(magic: int) -> None:
    data = edited(PLAIN, magic=magic)
    with pytest.raises(CorruptBatch, match=f"magic {magic}"):
        read_header(data)
    with pytest.raises(CorruptBatch, match=f"magic {magic}"):
        list(split_batches(data))


@pytest.mark.parametrize("at", [17, 20, 21, 40, 60, 61, len(PLAIN) - 1])
def test_any_changed_byte_is_found(at: int) -> None:
    changed = bytearray(PLAIN)
    changed[at] ^= 4
    with pytest.raises(CorruptBatch, match="CRC"):
        check_crc(changed)
    with pytest.raises(CorruptBatch, match="CRC"):
        list(split_batches(changed))
    with pytest.raises(CorruptBatch, match="CRC"):
        patch(bytes(changed), 1, 0, 0)


def test_a_blob_is_split_and_its_partial_end_dropped() -> None:
    second = with_base_offset(PLAIN, 5)
    third = with_base_offset(PLAIN, 12)
    blob = PLAIN + second + third
    for cut in range(len(third) + 1):
        found = list(split_batches(blob[: len(blob) - cut]))
        wanted = [(0, 5), (5, 10), (12, 17)][: 3 if cut == 0 else 2]
        assert [(raw.base_offset, raw.next_offset) for raw in found] == wanted
        assert bytes(found[1].data) == second
    assert list(split_batches(b"")) == []


def test_impossible_lengths_end_in_an_error_not_a_loop() -> None:
    for length in (-1, 0, 48, -(1 << 31)):
        data = bytearray(PLAIN)
        struct.pack_into(">i", data, 8, length)
        with pytest.raises(CorruptBatch, match="shorter"):
            list(split_batches(data))
    for delta, base in ((-1, 0), (0, -5)):
        with pytest.raises(CorruptBatch, match="at offset"):
            list(split_batches(edited(PLAIN, last_offset_delta=delta, base_offset=base)))


@given(st.binary(max_size=300))
def test_any_bytes_are_split_or_refused_by_name(blob: bytes) -> None:
    with contextlib.suppress(CorruptBatch):
        list(split_batches(blob))


@given(
    records(),
    st.sampled_from(CODECS),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 15) - 1),
    st.integers(0, (1 << 31) - 1),
    st.booleans(),
)
def test_patching_changes_the_producer_alone(
    made: list[Record],
    codec: str | None,
    producer_id: int,
    epoch: int,
    sequence: int,
    transactional: bool,
) -> None:
    given_ = edited(
        encode_batch(made, codec),
        base_offset=123456,
        leader_epoch=9,
        attributes=read_header(encode_batch(made, codec)).attributes | 0x40,
        producer_id=5,
        producer_epoch=6,
        base_sequence=7,
    )
    data = patch(memoryview(given_), producer_id, epoch, sequence, transactional=transactional)
    check_crc(data)
    before, after = read_header(given_), read_header(data)
    assert after == before._replace(
        base_offset=0,
        leader_epoch=-1,
        crc=after.crc,
        attributes=before.compression | (0x10 if transactional else 0),
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    assert data[HEADER_SIZE:] == given_[HEADER_SIZE:]
    assert [r._replace(offset=0) for r in decode_records(data)] == [
        r._replace(offset=0) for r in made
    ]


def test_patched_parts_are_header_and_records() -> None:
    head, body = patch_parts(PLAIN, 1, 2, 3)
    assert len(head) == HEADER_SIZE
    assert head + body == patch(PLAIN, 1, 2, 3)
    assert compute_crc(head + body) == read_header(head + body).crc


def test_what_a_broker_refuses_is_not_patched() -> None:
    for fields in (
        {"attributes": 0x20},
        {"last_offset_delta": 9},
        {"record_count": 0},
        {"record_count": 0, "last_offset_delta": -1},
    ):
        with pytest.raises(LogRefused) as caught:
            patch(edited(PLAIN, **fields), 1, 0, 0)
        assert caught.value.error == 87


def test_a_framed_batch_can_be_read() -> None:
    data = frame(
        PLAIN[HEADER_SIZE:],
        compression=0,
        last_offset_delta=4,
        count=5,
        base_timestamp=1000,
        max_timestamp=1004,
        base_offset=3,
        attributes=0x10,
        producer_id=8,
        producer_epoch=7,
        base_sequence=6,
    )
    check_crc(data)
    header = read_header(data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (8, 7, 6)
    assert [r.offset for r in decode_records(data)] == [3, 4, 5, 6, 7]


def test_sequences_wrap_to_zero() -> None:
    assert next_sequence(0, 5) == 5
    assert next_sequence((1 << 31) - 1, 1) == 0
    assert next_sequence((1 << 31) - 3, 10) == 7
