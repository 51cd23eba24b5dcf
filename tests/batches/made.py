"""Batches as brokers store them and compaction leaves them."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.batches.compression import compress
from anabranch.batches.format import Buffer, frame, patch_parts
from anabranch.batches.records import Record, codec_number, encode_record


def with_base_offset(data: Buffer, base_offset: int) -> bytes:
    """The same batch at another offset (the CRC does not cover it)."""
    return base_offset.to_bytes(8, "big", signed=True) + bytes(memoryview(data)[8:])


def patch(
    data: Buffer, producer_id: int, epoch: int, sequence: int, *, transactional: bool = True
) -> bytes:
    """`patch_parts` in one piece."""
    return b"".join(patch_parts(data, producer_id, epoch, sequence, transactional=transactional))


def encode_sparse(
    records: Sequence[Record], *, base_offset: int, next_offset: int, compression: str | None = None
) -> bytes:
    """A batch whose records keep their own offsets: with gaps, or without any record."""
    number = codec_number(compression)
    times = [record.timestamp_ms for record in records] or [-1]
    body = bytearray()
    for record in records:
        encode_record(body, record, record.offset - base_offset, record.timestamp_ms - times[0])
    return frame(
        compress(number, body) if records else b"",
        compression=number,
        last_offset_delta=next_offset - 1 - base_offset,
        count=len(records),
        base_timestamp=times[0],
        max_timestamp=max(times),
        base_offset=base_offset,
    )
