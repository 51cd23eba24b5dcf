"""A stream whose topics and history a test writes itself, as a controller would: any layout, any order of steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.batches.records import Record, encode_batch
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.ids import NO_TXN, TXN_HEADER, make_txn_id, pack_txn_header, segment_id
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
    SegmentEnd,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.creation import create_stream_topics
from anabranch.topics.names import history_topic, stream_topic

Events = Sequence[tuple[bytes, bytes]]  # key, value
STRAY = b"stray:0"
VECTOR_EVERY = 4  # records
ONE = (0, 0, 8, 0)  # a segment of all keys, on partition 0


@dataclass(frozen=True)
class Carried:
    """Events that stand on a partition already, of which the history says nothing yet."""

    partition: int
    txn_id: bytes
    first: int
    end: int
    count: int


class WrittenStream:
    """Each method is one step of the history, and one native transaction. Names of segments are their numbers."""

    def __init__(self, where: str | MemoryLog, stream: str, partitions: int) -> None:
        """``where``: host:port of a broker, or a log in memory."""
        self.stream = stream
        self.topic = stream_topic(stream)
        self.log: KafkaLog | MemoryLog = KafkaLog(where) if isinstance(where, str) else where
        create_stream_topics(self.log, stream, segments=partitions, settings={})
        self.producer = self.log.producer(f"written-{self.topic}", timeout=60)
        self.layout: list[EpochSegment] = []
        self.epoch = -1
        self.vector: dict[int, int] = {}
        # Their offsets, and they as readers understand them: all with their vectors.
        self.records: list[tuple[int, EpochRecord | CommitRecord]] = []
        self.where: dict[bytes, int] = {}  # value -> segment id
        self._whole = 0  # the last record with a vector: its place among all
        self._numbers = itertools.count()
        self._time = from_us(time.time_ns() // 1000 - 3_600_000_000)

    def close(self) -> None:
        self.producer.close()
        self.log.close()

    @property
    def timestamp(self) -> int:
        """The flags of the last record."""
        return self._time

    def add_partitions(self, partitions: int) -> None:
        self.log.add_partitions(self.topic, partitions)

    def scale(self, *layout: tuple[int, int, int, int]) -> EpochRecord:
        """A new epoch: (number, low, high, partition) of its segments, keys in eighths of the key space.

        Segments of the last epoch with the same number, keys and partition go on under their ids.
        """
        going_on = {(s.segment_id & 0xFFFFFFFF, s.low, s.high, s.partition): s for s in self.layout}
        epoch = self.epoch + 1
        segments = []
        for number, low, high, partition in layout:
            place = (number, SPACE * low // 8, SPACE * high // 8, partition)
            segments.append(going_on.get(place) or self._segment(epoch, *place))
        record = self._epoch(epoch, segments)
        self._write(record)
        return record

    def roll(self, reference: EpochRecord, *steps: Events | Carried, spares: int = 0) -> None:
        """A rolling commit: an epoch that duplicates another one, commits in it, and the active one again.

        ``spares``: partition of a carried segment, if there is one.
        """
        active = self.layout
        native: list[EpochRecord | CommitRecord] = []
        carried = {step.partition for step in steps if isinstance(step, Carried)}
        for copied in (list(reference.segments), active):
            epoch = self.epoch + 1
            taken: set[int] = set()
            segments = []
            for old in copied:
                partition = old.partition
                if copied is not active and carried and old is copied[spares]:
                    (partition,) = carried
                taken.add(partition)
                number = old.segment_id & 0xFFFFFFFF
                segments.append(self._segment(epoch, number, old.low, old.high, partition))
            native.append(self._epoch(epoch, segments))
            if copied is not active:
                native += [self._commit(step) for step in steps]
        self._write(*native)

    def commit(self, events: Events, *, plain: bool = False) -> CommitRecord:
        """A transaction, or plain writes."""
        record = self._commit(events, plain=plain)
        self._write(record)
        return record

    def stray(self, partition: int, txn_id: bytes = NO_TXN) -> None:
        """A record that no controller put there."""
        self._append(partition, [(b"k0", STRAY)], txn_id)
        self.producer.commit()

    def carry(self, partition: int, *chunks: Events, strays: bool = False) -> Carried:
        """Events of one transaction that are staged, chunk after chunk, each visible at once.

        ``strays``: others write between them.
        """
        txn_id = self._txn_id()
        offsets: list[int] = []
        for chunk in chunks:
            if strays and offsets:
                self.stray(partition)
                self.stray(partition, self._txn_id())
            offsets += self._append(partition, chunk, txn_id)
            self.producer.commit()
        count = sum(len(chunk) for chunk in chunks)
        return Carried(partition, txn_id, offsets[0], offsets[-1] + 1, count)

    # -- records --------------------------------------------------------------------------------------

    def _segment(
        self, epoch: int, number: int, low: int, high: int, partition: int
    ) -> EpochSegment:
        start = self.vector.get(partition, 0)
        return EpochSegment(segment_id(epoch, number), low, high, partition, start)

    def _epoch(self, epoch: int, segments: list[EpochSegment]) -> EpochRecord:
        ids = {s.segment_id for s in segments}
        sealed = [s for s in self.layout if s.segment_id not in ids]
        ends = tuple(SegmentEnd(s.segment_id, self.vector.get(s.partition, 0)) for s in sealed)
        self.layout, self.epoch = segments, epoch
        for s in segments:
            self.vector.setdefault(s.partition, s.start_offset)
        return EpochRecord(epoch, epoch, self._tick(), tuple(segments), ends, self._positions(), -1)

    def _commit(self, step: Events | Carried, *, plain: bool = False) -> CommitRecord:
        txn_id = NO_TXN if plain else self._txn_id()
        parts = []
        if isinstance(step, Carried):
            txn_id = step.txn_id
            (segment,) = [s for s in self.layout if s.partition == step.partition]
            parts.append(
                SegmentCommit(segment.segment_id, step.partition, step.first, step.end, step.count)
            )
            self.vector[step.partition] = step.end
        else:
            for segment in self.layout:
                mine = [e for e in step if segment.low <= position_of(e[0]) < segment.high]
                if mine:
                    offsets = self._append(segment.partition, mine, txn_id)
                    self.where |= {value: segment.segment_id for _, value in mine}
                    first, end = offsets[0], offsets[-1] + 1
                    parts.append(
                        SegmentCommit(segment.segment_id, segment.partition, first, end, len(mine))
                    )
                    self.vector[segment.partition] = end
        return CommitRecord(txn_id, self.epoch, self._tick(), tuple(parts), self._positions(), -1)

    def _append(self, partition: int, events: Events, txn_id: bytes) -> range:
        headers = (
            () if txn_id == NO_TXN else ((TXN_HEADER, pack_txn_header(txn_id, 7, self.epoch)),)
        )
        records = [Record(i, 1_700_000_000_000, k, v, headers) for i, (k, v) in enumerate(events)]
        place = TopicPartition(self.topic, partition)
        (base,) = self.producer.append([(place, encode_batch(records))])
        return range(base, base + len(events))

    def _write(self, *records: EpochRecord | CommitRecord) -> None:
        """Append to the history and commit the native transaction, data and all."""
        place = TopicPartition(history_topic(self.stream), 0)
        linked = []
        for i, record in enumerate(records):
            previous = -2 if i else self.records[-1][0] if self.records else -1
            linked.append(
                EpochRecord(
                    record.stream_epoch,
                    record.reference_epoch,
                    record.timestamp,
                    record.segments,
                    record.sealed,
                    record.vector,
                    previous,
                )
                if isinstance(record, EpochRecord)
                else record._replace(previous=previous)
            )
        rows = [
            Record(
                i,
                (record.timestamp >> 12) // 1000,
                record.txn_id if isinstance(record, CommitRecord) else b"",
                encode(self._lean(record, i)),
            )
            for i, record in enumerate(linked)
        ]
        (base,) = self.producer.append([(place, encode_batch(rows))])
        self.records += [(base + i, record) for i, record in enumerate(linked)]
        self.producer.commit()

    def _lean(self, record: EpochRecord | CommitRecord, number: int) -> EpochRecord | CommitRecord:
        """As it is written: a vector is only in EPOCH records and the fewest of the others.

        ``number``: its place in the batch.
        """
        ordinal = len(self.records) + number
        if isinstance(record, EpochRecord) or ordinal - self._whole >= VECTOR_EVERY:
            self._whole = ordinal
            return record
        back = ordinal - self._whole
        at = -1 - back if back <= number else self.records[self._whole][0]
        return record._replace(vector=(), vector_at=at)

    def _positions(self) -> tuple[Position, ...]:
        return tuple(Position(p, o) for p, o in sorted(self.vector.items()))

    def _tick(self) -> int:
        self._time += 1_000_000  # a quarter of a millisecond: records share milliseconds
        return self._time

    def _txn_id(self) -> bytes:
        return make_txn_id(0, 1_700_000_000_000, next(self._numbers) + 1)


class Keys:
    """Numbered events: b"key:3" is the key's fourth."""

    def __init__(self, count: int = 24) -> None:
        self._next = {b"k%d" % i: 0 for i in range(count)}

    def events(self, rounds: int = 1) -> list[tuple[bytes, bytes]]:
        """The next events of every key."""
        found = []
        for _ in range(rounds):
            for key in self._next:
                found.append((key, b"%s:%d" % (key, self._next[key])))
                self._next[key] += 1
        return found

    @property
    def expected(self) -> dict[bytes, list[int]]:
        """All so far."""
        return {key: list(range(count)) for key, count in self._next.items()}


def scaled(written: WrittenStream, keys: Keys) -> None:
    """Split, scaled, rolled and merged back, on partitions that are used again and again."""
    first = written.scale(ONE)
    written.commit(keys.events(3))
    two = written.scale((1, 0, 4, 1), (2, 4, 8, 2))
    written.commit(keys.events(3))
    written.roll(first, keys.events(2), keys.events())
    written.commit(keys.events())
    written.scale((1, 0, 4, 1), (3, 4, 6, 0), (4, 6, 8, 2))
    written.roll(two, keys.events())
    written.roll(first, keys.events())
    written.scale((5, 0, 8, 2))
    written.commit(keys.events(2))
    written.add_partitions(5)
    written.scale((6, 0, 2, 3), (7, 2, 6, 4), (8, 6, 8, 0))
    written.commit(keys.events(2))
