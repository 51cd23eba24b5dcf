"""RecordBatch v2 (KIP-98): reading the header, checking the CRC, framing records, and patching for splicing.

Layout, big endian: base offset i64, length i32 (of all that follows it), leader epoch i32, magic i8,
CRC-32C u32 (of all that follows it), attributes i16, last offset delta i32, base timestamp i64, max
timestamp i64, producer id i64, producer epoch i16, base sequence i32, record count i32, records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from anabranch.ports import INVALID_RECORD, CorruptBatch, LogRefused, RawBatch

HEADER_SIZE = 61
MAGIC = 2
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1
MAX_SEQUENCE = (1 << 31) - 1

COMPRESSION_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20

Buffer = bytes | bytearray | memoryview

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AND_MAGIC = struct.Struct(">iib")
_OFFSET = struct.Struct(">q")
# The part that the CRC does not cover (21 bytes), and the rest of the header (40 bytes).
_UNCOVERED = struct.Struct(">qiibI")
_COVERED = struct.Struct(">hiqqqhii")
_CRC_FROM = _UNCOVERED.size
_LENGTH_FROM = 12


class BatchHeader(NamedTuple):
    """The header of a RecordBatch v2; timestamps in Unix milliseconds. A batch has ``length`` + 12 bytes."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        """Whether it was written inside a native transaction."""
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether it is a marker of the broker (commit or abort), not data."""
        return bool(self.attributes & CONTROL)

    @property
    def is_log_append_time(self) -> bool:
        """Whether all records have the batch's max timestamp."""
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_dense(self) -> bool:
        """Whether no record is missing (compaction leaves gaps). Only dense batches can be produced as they are."""
        return self.record_count >= 1 and self.last_offset_delta == self.record_count - 1

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1


def read_header(data: Buffer, *, whole: bool = True) -> BatchHeader:
    """The header at the start of ``data``. Raises `CorruptBatch` if that is not a RecordBatch v2.

    ``data`` must be exactly one batch, unless ``whole`` is False.
    """
    if len(data) < HEADER_SIZE:
        raise CorruptBatch(
            f"{len(data)} bytes are no record batch: its header alone has {HEADER_SIZE}"
        )
    header = tuple.__new__(BatchHeader, _HEADER.unpack_from(data))
    if header.magic != MAGIC:
        raise CorruptBatch(f"a batch of magic {header.magic}; only RecordBatch v2 is supported")
    if whole and header.length != len(data) - _LENGTH_FROM:
        raise CorruptBatch(
            f"the batch says it has {header.length + _LENGTH_FROM} bytes, not {len(data)}"
        )
    return header


def compute_crc(data: Buffer) -> int:
    """The CRC-32C that the batch should have."""
    return crc32c(memoryview(data)[_CRC_FROM:])


def crc_of(data: Buffer) -> int:
    """The CRC-32C in a batch's header, right or wrong."""
    crc: int = _UNCOVERED.unpack_from(data)[4]
    return crc


def check_crc(data: Buffer) -> None:
    """Raise `CorruptBatch` unless the batch's CRC-32C matches its bytes."""
    if compute_crc(data) != crc_of(data):
        base = _OFFSET.unpack_from(data)[0]
        raise CorruptBatch(f"the batch at offset {base} does not match its CRC-32C")


def split_batches(blob: Buffer) -> Iterator[RawBatch]:
    """The batches of a fetched blob, also control batches; a partial last one is dropped.

    Raises `CorruptBatch` if a CRC does not match, or a batch is not RecordBatch v2.
    """
    view = memoryview(blob)
    at, end = 0, len(view)
    while end - at >= HEADER_SIZE:
        length, _, magic = _LENGTH_AND_MAGIC.unpack_from(view, at + 8)
        if magic != MAGIC:
            raise CorruptBatch(f"a batch of magic {magic}; only RecordBatch v2 is supported")
        if length < HEADER_SIZE - _LENGTH_FROM:
            raise CorruptBatch(f"a batch of {length} bytes is shorter than its own header")
        stop = at + _LENGTH_FROM + length
        if stop > end:
            return
        data = view[at:stop]
        check_crc(data)
        header = _HEADER.unpack_from(data)
        base, last_delta = header[0], header[6]
        if last_delta < 0 or base < 0:
            raise CorruptBatch(f"a batch at offset {base} with a last offset delta of {last_delta}")
        yield RawBatch(base, base + last_delta + 1, data)
        at = stop


def patch_parts(
    data: Buffer,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    *,
    transactional: bool = True,
) -> tuple[bytes, memoryview]:
    """The batch for another producer, as two buffers to be sent one after the other: header, records.

    The records are not copied: ``data`` must stay unchanged until both buffers are sent. The header has base offset
    0 and no leader epoch, as the broker requires. The bits for LogAppendTime, a delete horizon and transactions are
    set for the new log, as the broker would store wrong ones silently. The old CRC is checked, then a new one
    computed.

    Raises:
        LogRefused: (87) a control batch, or a batch with gaps in its offsets. The broker refuses both. With a
            corrected header, a batch with gaps would be stored with broken offsets: encode its records again.
        CorruptBatch: not one RecordBatch v2, or its CRC is wrong.
    """
    header = read_header(data)
    view = memoryview(data)
    records = view[HEADER_SIZE:]
    if crc32c(view[_CRC_FROM:]) != header.crc:
        # A new CRC would hide damage.
        raise CorruptBatch(f"the batch at offset {header.base_offset} does not match its CRC-32C")
    if header.is_control:
        raise LogRefused("a control batch can't be appended", INVALID_RECORD)
    if not header.is_dense:
        raise LogRefused(
            f"a batch of {header.record_count} records over {header.last_offset_delta + 1} offsets "
            "can't be appended as it is: re-encode it",
            INVALID_RECORD,
        )
    covered = _COVERED.pack(
        header.attributes & COMPRESSION_MASK | (TRANSACTIONAL if transactional else 0),
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        header.record_count,
    )
    crc = crc32c(records, crc32c(covered))
    return _UNCOVERED.pack(0, header.length, NO_LEADER_EPOCH, MAGIC, crc) + covered, records


def frame(
    body: Buffer,
    *,
    compression: int,
    last_offset_delta: int,
    count: int,
    base_timestamp: int,
    max_timestamp: int,
    base_offset: int = 0,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
) -> bytes:
    """A whole batch from its (compressed) records."""
    covered = b"".join(
        (
            _COVERED.pack(
                attributes | compression,
                last_offset_delta,
                base_timestamp,
                max_timestamp,
                producer_id,
                producer_epoch,
                base_sequence,
                count,
            ),
            body,
        )
    )
    length = _UNCOVERED.size - _LENGTH_FROM + len(covered)
    crc = crc32c(covered)
    return _UNCOVERED.pack(base_offset, length, NO_LEADER_EPOCH, MAGIC, crc) + covered


class Packed(NamedTuple):
    """A batch without its header: ``rows`` records, compressed; timestamps in Unix milliseconds."""

    records: bytes
    codec: int
    rows: int
    base_timestamp: int
    max_timestamp: int

    def frame(
        self,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        base_sequence: int = NO_SEQUENCE,
    ) -> bytes:
        """The batch, outside of native transactions, of a producer or of none."""
        return frame(
            self.records,
            compression=self.codec,
            last_offset_delta=self.rows - 1,
            count=self.rows,
            base_timestamp=self.base_timestamp,
            max_timestamp=self.max_timestamp,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )


def next_sequence(sequence: int, count: int) -> int:
    """The sequence after ``count`` records from ``sequence``; 2^31-1 is followed by 0."""
    return (sequence + count) & MAX_SEQUENCE
