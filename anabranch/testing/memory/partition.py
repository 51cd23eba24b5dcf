"""A partition of the in-memory log: raw batches with transactions, markers and compaction, as Kafka's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.batches.compression import compress
from anabranch.batches.format import (
    CONTROL,
    TRANSACTIONAL,
    Buffer,
    check_crc,
    frame,
    patch_parts,
    read_header,
)
from anabranch.batches.records import Record, codec_number, decode_records, encode_record
from anabranch.ports import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    MESSAGE_TOO_LARGE,
    OFFSET_OUT_OF_RANGE,
    CorruptBatch,
    Fetched,
    LogRefused,
    OffsetOutOfRange,
    RawBatch,
    TopicPartition,
)

_CONTROL_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")
_ABORT = 0
_COMMIT = 1


def _marker(kind: int) -> bytes:
    body = bytearray()
    marker = Record(0, 0, _CONTROL_KEY.pack(0, kind), _MARKER_VALUE.pack(0, 0))
    encode_record(body, marker, 0, 0)
    return bytes(body)


_MARKERS = _marker(_ABORT), _marker(_COMMIT)


@dataclass(slots=True)
class Entry:
    """A batch as it lies in the partition."""

    base_offset: int
    next_offset: int
    data: bytes
    producer_id: int = -1
    producer_epoch: int = -1
    is_transactional: bool = False
    is_control: bool = False
    is_aborted: bool = False
    max_timestamp: int = -1
    _records: list[Record] | None = None

    @property
    def records(self) -> list[Record]:
        """Its records, decoded once. Don't change the list."""
        if self._records is None:
            self._records = decode_records(self.data)
        return self._records


@dataclass(slots=True)
class Partition:
    """One partition; ``config`` are its topic's effective settings."""

    name: TopicPartition
    config: dict[str, str]
    entries: list[Entry] = field(default_factory=list)
    start_offset: int = 0
    end_offset: int = 0
    # Producer id -> first offset of its open native transaction.
    open: dict[int, int] = field(default_factory=dict)

    @property
    def stable_offset(self) -> int:
        """The last stable offset: where the first open native transaction starts, or the start offset."""
        return max(min(self.open.values(), default=self.end_offset), self.start_offset)

    def check(self, data: bytes, now_ms: int) -> list[Record]:
        """A broker's checks of a batch before it takes it: `LogRefused` with the broker's code."""
        try:
            header = read_header(data)
            check_crc(data)
        except CorruptBatch as error:
            raise self._refuse(str(error), CORRUPT_MESSAGE) from error
        if header.is_control or not header.is_dense:
            raise self._refuse("a control batch, or one with gaps", INVALID_RECORD)
        if len(data) > int(self.config["max.message.bytes"]):
            raise self._refuse(f"{len(data)} bytes in a batch", MESSAGE_TOO_LARGE)
        try:
            records = decode_records(data)
        except CorruptBatch as error:
            raise self._refuse(str(error), INVALID_RECORD) from error
        latest = now_ms + int(self.config["message.timestamp.after.max.ms"])
        earliest = now_ms - int(self.config["message.timestamp.before.max.ms"])
        for record in records:
            if not earliest <= record.timestamp_ms <= latest:
                raise self._refuse(f"timestamp {record.timestamp_ms}", INVALID_TIMESTAMP)
            if record.key is None and "compact" in self.config["cleanup.policy"]:
                raise self._refuse("a record without a key in a compacted topic", INVALID_RECORD)
        return records

    def _refuse(self, message: str, code: int) -> LogRefused:
        what = f"{self.name.topic}[{self.name.partition}]: {message}"
        return LogRefused(what, code, (self.name.topic,))

    def append(
        self, data: bytes, producer_id: int, epoch: int, sequence: int, *, transactional: bool
    ) -> int:
        """Store a checked batch; its base offset."""
        base = self.end_offset
        stored = with_base_offset(
            patch(data, producer_id, epoch, sequence, transactional=transactional), base
        )
        header = read_header(stored)
        self.entries.append(
            Entry(
                base,
                header.next_offset,
                stored,
                producer_id,
                epoch,
                transactional,
                max_timestamp=header.max_timestamp,
            )
        )
        self.end_offset = header.next_offset
        if transactional:
            self.open.setdefault(producer_id, base)
        return base

    def mark(self, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """End a producer's native transaction here with a marker."""
        first = self.open.pop(producer_id, None)
        if not commit and first is not None:
            for entry in self.entries:
                if (
                    entry.base_offset >= first
                    and entry.producer_id == producer_id
                    and entry.is_transactional
                ):
                    entry.is_aborted = True
        data = frame(
            _MARKERS[commit],
            compression=0,
            last_offset_delta=0,
            count=1,
            base_timestamp=now_ms,
            max_timestamp=now_ms,
            base_offset=self.end_offset,
            attributes=TRANSACTIONAL | CONTROL,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
        self.entries.append(
            Entry(
                self.end_offset,
                self.end_offset + 1,
                data,
                producer_id,
                epoch,
                is_transactional=True,
                is_control=True,
                max_timestamp=now_ms,
            )
        )
        self.end_offset += 1

    def read(
        self, position: int, *, committed: bool, max_bytes: int, limit: int | None = None
    ) -> Fetched | None:
        """A fetch's batches; None if there is nothing new. ``limit``: the log's end, as far as is known."""
        known = self.end_offset if limit is None else min(limit, self.end_offset)
        if not self.start_offset <= position <= known:
            raise OffsetOutOfRange(self.name, position)
        end = min(self.stable_offset, known) if committed else known
        batches: list[RawBatch] = []
        after, size = position, 0
        for index in range(self._index_of(position), len(self.entries)):
            entry = self.entries[index]
            if entry.base_offset >= end or entry.next_offset > known or size >= max_bytes:
                break
            after = entry.next_offset
            size += len(entry.data)
            if not entry.is_control and not (committed and entry.is_aborted):
                batches.append(
                    RawBatch(entry.base_offset, entry.next_offset, memoryview(entry.data))
                )
        if after == position:
            return None
        stable = min(self.stable_offset, known)
        return Fetched(batches, after, known, stable, self.start_offset)

    def _index_of(self, position: int) -> int:
        """The first batch that ends above ``position``."""
        low, high = 0, len(self.entries)
        while low < high:
            middle = (low + high) // 2
            if self.entries[middle].next_offset <= position:
                low = middle + 1
            else:
                high = middle
        return low

    def offset_for_time(self, timestamp_ms: int) -> int | None:
        """The first offset with a timestamp at or above (markers have timestamps too, as in Kafka)."""
        for entry in self.entries:
            if entry.max_timestamp >= timestamp_ms:
                for record in entry.records:
                    if record.timestamp_ms >= timestamp_ms and record.offset >= self.start_offset:
                        return record.offset
        return None

    def delete_below(self, offset: int) -> None:
        """Move the start offset up; whole batches below it go."""
        if offset > self.end_offset:
            raise self._refuse(f"no offset {offset} to delete up to", OFFSET_OUT_OF_RANGE)
        self.start_offset = max(self.start_offset, offset)
        del self.entries[: self._index_of(self.start_offset)]

    def compact(self, *, drop_tombstones: bool) -> None:
        """Keep the newest decided record of each key; offsets stay, with gaps.

        As Kafka's cleaner does: batches keep their bounds, aborted data goes, and a producer's last batch
        stays even if it is empty.
        """
        stable = self.stable_offset
        newest: dict[bytes, int] = {}
        for entry in self.entries:
            if entry.next_offset <= stable and not entry.is_control and not entry.is_aborted:
                for record in entry.records:
                    newest[record.key or b""] = record.offset
        last_of = {e.producer_id: e.base_offset for e in self.entries if not e.is_control}
        kept: list[Entry] = []
        for entry in self.entries:
            if entry.next_offset > stable or entry.is_control:
                kept.append(entry)
                continue
            records = [
                record
                for record in entry.records
                if newest.get(record.key or b"") == record.offset
                and not (drop_tombstones and record.value is None)
                and not entry.is_aborted
            ]
            needed = entry.producer_id >= 0 and last_of[entry.producer_id] == entry.base_offset
            if records or needed:
                kept.append(self._rewritten(entry, records))
        self.entries = kept

    def _rewritten(self, entry: Entry, records: Sequence[Record]) -> Entry:
        old = read_header(entry.data)
        sparse = encode_sparse(
            records, base_offset=entry.base_offset, next_offset=entry.next_offset
        )
        new = read_header(sparse)
        data = frame(
            sparse[61:],
            compression=new.compression,
            last_offset_delta=new.last_offset_delta,
            count=new.record_count,
            base_timestamp=new.base_timestamp,
            max_timestamp=new.max_timestamp,
            base_offset=entry.base_offset,
            attributes=old.attributes & (TRANSACTIONAL | CONTROL),
            producer_id=old.producer_id,
            producer_epoch=old.producer_epoch,
            base_sequence=old.base_sequence,
        )
        return Entry(
            entry.base_offset,
            entry.next_offset,
            data,
            entry.producer_id,
            entry.producer_epoch,
            entry.is_transactional,
            max_timestamp=new.max_timestamp,
        )


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
