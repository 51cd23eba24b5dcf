"""The plain decoder and encoder of records."""

from __future__ import annotations

import contextlib
import threading

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.batches import compression
from anabranch.batches.format import HEADER_SIZE, check_crc, frame, read_header
from anabranch.batches.records import (
    Record,
    decode_records,
    encode_batch,
    put_varint,
)
from anabranch.errors import InvalidArgument
from anabranch.ports import CorruptBatch
from anabranch.testing.memory.partition import encode_sparse
from tests.batches.strategies import CODECS, mutated, records
from tests.batches.test_format import edited


def body_batch(body: bytes, count: int, last_delta: int | None = None) -> bytes:
    """A batch with a right CRC around any body."""
    return frame(
        body,
        compression=0,
        last_offset_delta=count - 1 if last_delta is None else last_delta,
        count=count,
        base_timestamp=0,
        max_timestamp=0,
    )


@given(records(), st.sampled_from(CODECS))
def test_what_is_encoded_is_decoded(made: list[Record], codec: str | None) -> None:
    data = encode_batch(made, codec)
    check_crc(data)
    header = read_header(data)
    assert header.record_count == len(made)
    assert header.max_timestamp == max(record.timestamp_ms for record in made)
    assert decode_records(data) == made


@given(records(), st.integers(0, 1 << 40), st.integers(0, 5), st.data())
def test_offsets_with_gaps_stay(
    made: list[Record], base: int, behind: int, data: st.DataObject
) -> None:
    kept = [r._replace(offset=base + r.offset) for r in made if data.draw(st.booleans())]
    end = base + len(made) + behind
    batch = encode_sparse(kept, base_offset=base, next_offset=end)
    header = read_header(batch)
    assert header.base_offset == base
    assert header.next_offset == end
    assert decode_records(batch) == kept


def test_the_bytes_of_a_record() -> None:
    # KIP-98's layout, by hand: length, attributes, two deltas, key, value, one header.
    record = Record(0, 500, b"key", None, (("h", b"x"),))
    body = encode_batch([record])[HEADER_SIZE:]
    assert body == b"\x1a\x00\x00\x00\x06key\x01\x02\x02h\x02x"[:1] + bytes(body[1:])
    assert bytes(body[1:]) == b"\x00\x00\x00\x06key\x01\x02\x02h\x02x"
    assert body[0] == (len(body) - 1) * 2


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, b"\x00"),
        (-1, b"\x01"),
        (1, b"\x02"),
        (63, b"\x7e"),
        (-64, b"\x7f"),
        (64, b"\x80\x01"),
        (2**31 - 1, b"\xfe\xff\xff\xff\x0f"),
        (-(2**31), b"\xff\xff\xff\xff\x0f"),
        (-(2**63), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
    ],
)
def test_a_varint_has_the_bytes_of_the_protocol(value: int, wanted: bytes) -> None:
    out = bytearray()
    put_varint(out, value)
    assert bytes(out) == wanted


def test_log_append_time_gives_all_records_the_batchs_time() -> None:
    made = [Record(i, 100 + i, None, b"v") for i in range(3)]
    data = edited(encode_batch(made), attributes=0x08, max_timestamp=777)
    assert [r.timestamp_ms for r in decode_records(data)] == [777] * 3


def test_header_names_that_are_no_utf8_survive() -> None:
    made = [Record(0, 0, b"k", b"v", (("\udcff\udcfe", b"x"),))]
    assert decode_records(encode_batch(made)) == made


def framed(content: bytes) -> bytes:
    """A record with this content and its length in front."""
    out = bytearray()
    put_varint(out, len(content))
    return bytes(out) + content


# Attributes, two deltas, no key, no value, no headers.
GOOD = framed(b"\x00\x00\x00\x01\x01\x00")

MALFORMED = {
    "a count without records": body_batch(b"", 1, 0),
    "more records than fit": body_batch(GOOD, 2),
    "more records than there are": body_batch(GOOD + framed(GOOD[1:] + b"1234567"), 3),
    "a negative count": edited(body_batch(GOOD, 1), record_count=-1),
    "bytes behind the last record": body_batch(GOOD + b"\x00", 1),
    "a record beyond the end": body_batch(b"\x0e" + GOOD[1:], 1),
    "a negative length": body_batch(b"\x01" + GOOD[1:], 1),
    "no room for attributes": body_batch(b"\x00" + GOOD[1:], 1),
    "a length and content that disagree": body_batch(framed(b"\x00\x00\x00\x01\x01\x00\x00"), 1),
    "a key beyond the record": body_batch(framed(b"\x00\x00\x00\x08\x01\x00"), 1),
    "a key of -2 bytes": body_batch(framed(b"\x00\x00\x00\x03\x01\x00"), 1),
    "a value of -2 bytes": body_batch(framed(b"\x00\x00\x00\x01\x03\x00"), 1),
    "a value beyond the record": body_batch(framed(b"\x00\x00\x00\x01\x08\x00"), 1),
    "headers that don't fit": body_batch(framed(b"\x00\x00\x00\x01\x01\x02\x00"), 1),
    "a negative number of headers": body_batch(framed(b"\x00\x00\x00\x01\x01\x01"), 1),
    "a header without a name": body_batch(framed(b"\x00\x00\x00\x01\x01\x02\x01\x01"), 1),
    "a header of -2 bytes": body_batch(framed(b"\x00\x00\x00\x01\x01\x02\x00\x03"), 1),
    "a header's value beyond the record": body_batch(
        framed(b"\x00\x00\x00\x01\x01\x02\x02h\x08"), 1
    ),
    "no headers": body_batch(framed(b"\x00\x00\x00\x01\x01"), 1),
    "a number of six bytes": body_batch(framed(b"\x00\x00\x80\x80\x80\x80\x80\x00\x01\x01\x00"), 1),
    "a number of 33 bits": body_batch(framed(b"\x00\x00\x80\x80\x80\x80\x10\x01\x01\x00"), 1, 9),
    "a number of eleven bytes": body_batch(
        framed(b"\x00" + b"\x80" * 10 + b"\x00" + b"\x00\x01\x01\x00"), 1
    ),
    "a number of 65 bits": body_batch(
        framed(b"\x00" + b"\x80" * 9 + b"\x02" + b"\x00\x01\x01\x00"), 1
    ),
    "an offset twice": body_batch(GOOD * 2, 2),
    "an offset beyond the last": body_batch(framed(b"\x00\x00\x02\x01\x01\x00"), 1),
    "a negative offset": body_batch(framed(b"\x00\x00\x01\x01\x01\x00"), 1),
    "a timestamp of 65 bits": edited(
        body_batch(framed(b"\x00\x02\x00\x01\x01\x00"), 1), base_timestamp=(1 << 63) - 1
    ),
    "an unknown codec": edited(body_batch(GOOD, 1), attributes=5),
    "no gzip": edited(body_batch(GOOD, 1), attributes=1),
    "no snappy": edited(body_batch(GOOD, 1), attributes=2),
    "no lz4": edited(body_batch(GOOD, 1), attributes=3),
    "no zstd": edited(body_batch(GOOD, 1), attributes=4),
}


def test_the_template_of_the_malformed_is_well_formed() -> None:
    assert decode_records(body_batch(GOOD, 1)) == [Record(0, 0, None, None)]


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_batches_are_refused_by_name(case: str) -> None:
    with pytest.raises(CorruptBatch):
        decode_records(MALFORMED[case])


@given(records(max_size=4), st.data())
def test_mutated_batches_are_decoded_or_refused_by_name(
    made: list[Record], data: st.DataObject
) -> None:
    body = mutated(encode_batch(made)[HEADER_SIZE:], data)
    with contextlib.suppress(CorruptBatch):
        decode_records(body_batch(body, len(made)))


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_bomb_is_refused_before_it_unfolds(codec: str) -> None:
    made = [Record(0, 0, None, b"\x00" * 3_000_000)]
    data = encode_batch(made, codec)
    assert len(data) < 300_000
    with pytest.raises(CorruptBatch, match="more than 1,000,000 bytes"):
        decode_records(data, limit=1_000_000)
    assert decode_records(data) == made


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_a_bomb_takes_little_memory(codec: str) -> None:
    data = encode_batch([Record(0, 0, None, b"\x00" * 30_000_000)], codec)
    rooms: list[int] = []

    def unpack() -> None:
        with pytest.raises(CorruptBatch, match="more than"):
            decode_records(data, limit=2_000_000)
        rooms.append(len(compression._scratch.room))

    # A thread of its own has a buffer of its own.
    thread = threading.Thread(target=unpack)
    thread.start()
    thread.join()
    assert rooms[0] <= 4_000_000


def test_a_snappy_claim_alone_takes_no_memory() -> None:
    # A raw block that says it unpacks to 4 GiB.
    claim = b"\xff\xff\xff\xff\x0f\x00"
    with pytest.raises(CorruptBatch, match="more than"):
        decode_records(edited(body_batch(claim, 1), attributes=2))


def test_javas_snappy_framing_is_read() -> None:
    made = [Record(i, 0, b"k", b"v" * 1000) for i in range(100)]
    body = encode_batch(made)[HEADER_SIZE:]
    blocks = [
        bytes(cramjam.snappy.compress_raw(body[i : i + 32768])) for i in range(0, len(body), 32768)
    ]
    framed = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01" + b"".join(
        len(block).to_bytes(4, "big") + block for block in blocks
    )
    assert len(blocks) > 1
    assert decode_records(edited(body_batch(framed, 100), attributes=2)) == made
    for cut in (9, 15, 18, len(framed) - 1):
        with pytest.raises(CorruptBatch):
            decode_records(edited(body_batch(framed[:cut], 100), attributes=2))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        encode_batch([])
    with pytest.raises(InvalidArgument, match="gzip"):
        encode_batch([Record(0, 0, b"", b"")], "brotli")


def test_a_batch_that_compaction_emptied_has_no_records() -> None:
    assert decode_records(encode_sparse([], base_offset=5, next_offset=9)) == []
