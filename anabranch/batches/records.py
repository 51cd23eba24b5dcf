"""Records of a RecordBatch v2 in plain Python, for small batches; also the oracle of the compiled code.

A record (KIP-98): length, attributes i8, timestamp delta, offset delta, key, value, headers. All numbers are zigzag
varints; a length of -1 means null.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from anabranch.batches.compression import CODECS, MAX_UNPACKED_BYTES, compress, decompress
from anabranch.batches.format import HEADER_SIZE, BatchHeader, Buffer, frame, read_header
from anabranch.errors import InvalidArgument
from anabranch.ports import CorruptBatch

Headers = Sequence[tuple[str, bytes | None]]

# Seven one-byte fields: length, attributes, two deltas, key, value, number of headers.
MIN_RECORD_BYTES = 7
_MAX_VARINT_BITS = 32
_MAX_VARLONG_BITS = 64
_I64 = 1 << 63
_USUAL_TIME = 1 << 62
_CODEC_NUMBERS: dict[str, int] = dict(CODECS.items())


class Record(NamedTuple):
    """One record of the log. ``timestamp_ms``: Unix milliseconds. Null keys and values are None."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def decode_records(data: Buffer, *, limit: int = MAX_UNPACKED_BYTES) -> list[Record]:
    """All records of one batch; their offsets are those of the log.

    Raises `CorruptBatch` if it is malformed in any way, or unpacks to more than ``limit`` bytes.
    """
    header = read_header(data)
    if header.record_count == 0 and len(data) == HEADER_SIZE:
        # Compaction keeps a producer's last batch, for its sequence, even without records.
        return []
    body = decompress(header.compression, memoryview(data)[HEADER_SIZE:], limit=limit)
    return decode_body(body, header)


def decode_body(body: bytes, header: BatchHeader) -> list[Record]:
    """`decode_records` of an unpacked body."""
    if not 0 <= header.record_count <= len(body) // MIN_RECORD_BYTES:
        raise CorruptBatch(f"{header.record_count} records don't fit into {len(body)} bytes")
    try:
        return _decode_usual(body, header)
    except (_Unusual, IndexError):
        return _decode_any(body, header)


class _Unusual(Exception):
    """A form that `_decode_usual` does not know."""


def _decode_usual(body: bytes, header: BatchHeader) -> list[Record]:
    """Decode records without rare forms (numbers of more than 28 bits, most nulls) in a quarter of the time.

    Rare forms and broken bytes raise `_Unusual` or IndexError. No field can go beyond its record: sizes are never
    negative, and each record must end where its length says.
    """
    first, last_delta, stop = header.base_offset, -1, header.last_offset_delta
    base = header.base_timestamp
    if not -_USUAL_TIME < base < _USUAL_TIME:
        raise _Unusual
    records: list[Record] = []
    new, add = tuple.__new__, records.append
    at = 0
    for _ in range(header.record_count):
        size, at = _usual_size(body, at)
        end = at + size
        shift, delta = body[at + 1], body[at + 2]
        if (shift | delta) & 0x80:
            shift, at = _usual_number(body, at + 1)
            delta, at = _usual_number(body, at)
        else:
            at += 3
        timestamp = base + (shift >> 1 ^ -(shift & 1))
        delta = delta >> 1 ^ -(delta & 1)
        if not last_delta < delta <= stop:
            raise _Unusual
        last_delta = delta
        key: bytes | None = None
        value: bytes | None = None
        size = body[at]
        if size == 1:
            at += 1
        else:
            size, start = _usual_size(body, at) if size & 0x81 else (size >> 1, at + 1)
            at = start + size
            key = body[start:at]
        size = body[at]
        if size == 1:
            at += 1
        else:
            size, start = _usual_size(body, at) if size & 0x81 else (size >> 1, at + 1)
            at = start + size
            value = body[start:at]
        if body[at]:
            headers, at = _usual_headers(body, at)
        else:
            headers = ()
            at += 1
        if at != end:
            raise _Unusual
        add(new(Record, (first + delta, timestamp, key, value, headers)))
    if at != len(body):
        raise _Unusual
    if header.is_log_append_time:
        return [record._replace(timestamp_ms=header.max_timestamp) for record in records]
    return records


def _usual_number(body: bytes, at: int) -> tuple[int, int]:
    """A number of up to four bytes, still zigzag-encoded, and its end."""
    number = body[at]
    at += 1
    if number & 0x80:
        for shift in (7, 14, 21):
            byte = body[at]
            at += 1
            # Subtract the bit that marks the byte before as not the last.
            number += (byte << shift) - (1 << shift)
            if byte < 0x80:
                break
        else:
            raise _Unusual
    return number, at


def _usual_size(body: bytes, at: int) -> tuple[int, int]:
    size = body[at]
    at += 1
    if size & 0x80:
        more = body[at]
        if more & 0x80:
            size, at = _usual_number(body, at - 1)
        else:
            size += (more << 7) - 0x80
            at += 1
    if size & 1:
        raise _Unusual
    return size >> 1, at


def _usual_headers(body: bytes, at: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, at = _usual_size(body, at)
    headers = []
    for _ in range(count):
        size, start = body[at], at + 1
        if size & 0x81:
            raise _Unusual
        at = start + (size >> 1)
        name = header_name(body[start:at])
        size, start = body[at], at + 1
        if size & 0x81:
            size, start = _usual_size(body, at)
        else:
            size >>= 1
        at = start + size
        headers.append((name, body[start:at]))
    return tuple(headers), at


@lru_cache(1024)
def header_name(name: bytes) -> str:
    """A header's name as text: bytes that are not UTF-8 become surrogates."""
    return name.decode("utf-8", "surrogateescape")


def _decode_any(body: bytes, header: BatchHeader) -> list[Record]:
    reader = Reader(body)
    records: list[Record] = []
    last_delta = -1
    for _ in range(header.record_count):
        reader.enter_record()
        timestamp = header.base_timestamp + reader.varlong()
        if not -_I64 <= timestamp < _I64:
            raise CorruptBatch("a timestamp of more than 64 bits")
        delta = reader.varint()
        if not last_delta < delta <= header.last_offset_delta:
            raise CorruptBatch(f"offset delta {delta} after {last_delta}")
        last_delta = delta
        key = reader.nullable()
        value = reader.nullable()
        headers = reader.headers()
        reader.leave_record()
        if header.is_log_append_time:
            timestamp = header.max_timestamp
        records.append(Record(header.base_offset + delta, timestamp, key, value, headers))
    if reader.at != len(body):
        raise CorruptBatch("bytes after the last record")
    return records


def encode_batch(records: Sequence[Record], compression: str | None = None) -> bytes:
    """A batch with base offset 0 and no producer; the records' own offsets don't matter.

    Raises `InvalidArgument` without records, or for a codec that does not exist.
    """
    if not records:
        raise InvalidArgument("a batch has at least one record")
    number = codec_number(compression)
    base_timestamp = records[0].timestamp_ms
    body = bytearray()
    for delta, record in enumerate(records):
        encode_record(body, record, delta, record.timestamp_ms - base_timestamp)
    return frame(
        compress(number, body),
        compression=number,
        last_offset_delta=len(records) - 1,
        count=len(records),
        base_timestamp=base_timestamp,
        max_timestamp=max(record.timestamp_ms for record in records),
    )


def codec_number(name: str | None) -> int:
    """The number of a codec's name; None is no compression."""
    number = _CODEC_NUMBERS.get(name or "none")
    if number is not None:
        return number
    raise InvalidArgument(f"compression {name!r}: one of {', '.join(CODECS)}")


def encode_record(body: bytearray, record: Record, offset_delta: int, timestamp_delta: int) -> None:
    """Append one record to ``body``."""
    out = bytearray(b"\x00")
    put_varint(out, timestamp_delta)
    put_varint(out, offset_delta)
    _put_nullable(out, record.key)
    _put_nullable(out, record.value)
    put_varint(out, len(record.headers))
    for name, value in record.headers:
        _put_nullable(out, name.encode("utf-8", "surrogateescape"))
        _put_nullable(out, value)
    put_varint(body, len(out))
    body += out


def put_varint(out: bytearray, value: int) -> None:
    """Append a zigzag varint of up to 64 bits."""
    value = (value << 1) ^ (value >> 63)
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_nullable(out: bytearray, data: bytes | None) -> None:
    if data is None:
        put_varint(out, -1)
    else:
        put_varint(out, len(data))
        out += data


class Reader:
    """Reads a batch's body strictly: never beyond ``end``, the end of the current record."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0
        self.end = len(body)

    def enter_record(self) -> None:
        """Read a record's length and attributes; the record's end bounds all further reading."""
        size = self.varint()
        if size < 0 or self.at + size > len(self.body):
            raise CorruptBatch("a record goes beyond the end of its batch")
        self.end = self.at + size
        self.skip(1)

    def leave_record(self) -> None:
        """Raise `CorruptBatch` unless the record was read to its end."""
        if self.at != self.end:
            raise CorruptBatch("a record's length and its content disagree")
        self.end = len(self.body)

    def skip(self, count: int) -> None:
        if self.at + count > self.end:
            raise CorruptBatch("a record ends in the middle of a field")
        self.at += count

    def _unsigned(self, bits: int) -> int:
        value = shift = 0
        while True:
            if self.at >= self.end:
                raise CorruptBatch("a record ends in the middle of a number")
            byte = self.body[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift >= bits:
                raise CorruptBatch("a number of too many bytes")
        if value >> bits:
            raise CorruptBatch("a number of too many bits")
        return value

    def varint(self) -> int:
        """A zigzag varint of 32 bits."""
        value = self._unsigned(_MAX_VARINT_BITS)
        return value >> 1 ^ -(value & 1)

    def varlong(self) -> int:
        """A zigzag varint of 64 bits."""
        value = self._unsigned(_MAX_VARLONG_BITS)
        return value >> 1 ^ -(value & 1)

    def nullable(self) -> bytes | None:
        """A length, and as many bytes; None for the length -1."""
        size = self.varint()
        if size == -1:
            return None
        if size < 0:
            raise CorruptBatch(f"a field of {size} bytes")
        start = self.at
        self.skip(size)
        return self.body[start : self.at]

    def header_count(self) -> int:
        count = self.varint()
        # Each header takes at least two bytes: the lengths of its name and its value.
        if not 0 <= count <= (self.end - self.at) // 2:
            raise CorruptBatch(f"{count} headers don't fit")
        return count

    def header_place(self) -> tuple[bytes, int, int]:
        """A header's name, and its value's place: (offset, size or -1 for null)."""
        name = self.nullable()
        if name is None:
            raise CorruptBatch("a header without a name")
        value = self.nullable()
        size = -1 if value is None else len(value)
        return name, self.at - max(size, 0), size

    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        return tuple(self._header() for _ in range(self.header_count()))

    def _header(self) -> tuple[str, bytes | None]:
        name, at, size = self.header_place()
        value = self.body[at : at + size] if size >= 0 else None
        return name.decode("utf-8", "surrogateescape"), value
