"""Journal writers on raw connections: whole batches are made here, several times quicker than one by one.

Used where every option of the client is one that raw connections can honour; else `kafka_journal` is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.options import Options
from anabranch.client.ports import RecordHeaders, WriteFunction
from anabranch.client.raw_encoding import Chunk, ChunkEncoder, Slot
from anabranch.client.raw_producer import MAX_QUEUED_BYTES, ProducerFailed, RawProducer
from anabranch.client.writing import (
    RECORD_OVERHEAD,
    check_event,
    headers_size,
    too_large,
)
from anabranch.core.ids import TXN_HEADER, pack_txn_header
from anabranch.errors import AnabranchError, DeadlineExceeded, NotReady, WriteFailed
from anabranch.ports import LogError, TopicPartition
from anabranch.schemas.records import Extent, Touched
from anabranch.topics.names import journal_topic
from anabranch.topics.settings import Settings
from anabranch.topics.wire.cluster import Cluster

CHUNK_BYTES = 256 << 10
_EVENT_COST = 72  # more than the framing and the ab.txn header of a record take
_MOST_OPEN_BYTES = 64 << 20  # of all open batches of a lane
_SPARE = 4
_FORGOTTEN_S = 600.0  # brokers forget producers that are silent for long


class RawJournals:
    """See `Journals`."""

    def __init__(
        self, settings: Settings, options: Options, admin: KafkaAdmin, timeout: float
    ) -> None:
        self._cluster = Cluster(settings)
        self._admin = admin
        self._timeout = timeout
        self._codec, self._batch_bytes = options.raw_batches()
        self._lock = threading.Lock()
        self._spare: list[tuple[float, RawProducer]] = []
        self._closed = False

    def writer(self) -> RawJournal:
        """See `Journals`."""
        return RawJournal(self, self._admin, self._codec, self._batch_bytes, self._timeout)

    def take(self, deadline: float) -> RawProducer:
        """A producer."""
        with self._lock:
            if self._closed:
                raise WriteFailed("the client is closed")
            while self._spare:
                since, producer = self._spare.pop()
                if time.monotonic() - since < _FORGOTTEN_S:
                    return producer
                producer.close()
        try:
            return RawProducer(self._cluster, deadline)
        except LogError as error:
            raise NotReady(f"the brokers can't be asked: {error}") from error

    def give_back(self, producer: RawProducer, *, clean: bool) -> None:
        """Keep a producer that has everything acknowledged; drop any other."""
        producer.acknowledged = None
        with self._lock:
            keep = clean and not producer.unacknowledged and not self._closed
            if keep and len(self._spare) < _SPARE:
                self._spare.append((time.monotonic(), producer))
                return
        producer.close()

    def close(self) -> None:
        """See `Journals`."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for _, producer in spare:
            producer.close()
        self._cluster.close()

    def after_fork(self) -> None:
        """See `Journals`. Sockets may be freed: the parent has its own."""


class RawJournal:
    """See `BulkJournalWriter`."""

    def __init__(
        self, pool: RawJournals, admin: KafkaAdmin, codec: int, batch_bytes: int, timeout: float
    ) -> None:
        self._pool = pool
        self._admin = admin
        self.codec = codec
        self.batch_bytes = batch_bytes
        self._timeout = timeout
        self._producer: RawProducer | None = None
        self._lanes: dict[str, RawLane] = {}
        self._failure: str | None = None

    def lane(self, touched: Touched, txn_id: bytes, writer: int, deadline: float) -> RawLane:
        """See `BulkJournalWriter`."""
        self.check()
        topic = journal_topic(touched.stream)
        limit = self._admin.max_message_bytes([topic], deadline)[topic]
        if self._producer is None:
            self._producer = self._pool.take(deadline)
            self._producer.acknowledged = self._acknowledged
        header = pack_txn_header(txn_id, writer, touched.stream_epoch)
        lane = self._lanes[topic] = RawLane(self, touched, (TXN_HEADER, header), limit, writer)
        return lane

    def _acknowledged(self, partition: TopicPartition, base_offset: int, count: int) -> None:
        self._lanes[partition.topic].stored(partition.partition, base_offset, count)

    @property
    def producer(self) -> RawProducer:
        """The producer. `WriteFailed` if there is none any more."""
        self.check()
        if self._producer is None:
            raise self.fail("the writer is closed")
        return self._producer

    def wait_for_room(self) -> None:
        """Until batches may be queued. `DeadlineExceeded`: the brokers took nothing for the client's timeout."""
        producer = self.producer
        deadline = time.monotonic() + self._timeout
        while producer.queued_bytes > MAX_QUEUED_BYTES:
            before = producer.queued_bytes
            self.pump(deadline)
            if producer.queued_bytes < before:
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the brokers took nothing for {self._timeout:g} s; this event was not written"
                )

    def pump(self, deadline: float | None) -> None:
        """`RawProducer.pump`. `WriteFailed`."""
        try:
            self.producer.pump(deadline)
        except ProducerFailed as error:
            raise self.fail(f"a write failed: {error}") from error

    def flush_lanes(self, deadline: float) -> None:
        """See `BulkJournalWriter`."""
        self.check()
        if self._producer is None:
            return
        for lane in self._lanes.values():
            lane.ship_all()
        while self._producer.unacknowledged:
            if time.monotonic() >= deadline:
                n = self._producer.unacknowledged
                raise self.fail(f"{n} batches were not acknowledged before the deadline")
            self.pump(deadline)
        for lane in self._lanes.values():
            self._find_ends(lane, deadline)

    def _find_ends(self, lane: RawLane, deadline: float) -> None:
        """The ends of partitions where a repeated batch was stored at an offset that nobody told."""
        unknown = [(lane.topic, p) for p in lane.loose]
        if not unknown:
            return
        try:
            ends = self._admin.end_offsets(unknown, deadline)
        except AnabranchError as error:
            raise DeadlineExceeded(
                f"flushed, but the journal's ends are not known: {error}"
            ) from error
        for (_, partition), end in ends.items():
            lane.ends[partition] = max(end, lane.ends.get(partition, 0))
            lane.loose.discard(partition)

    def check(self) -> None:
        """`WriteFailed` if this writer has failed."""
        if self._failure is not None:
            raise WriteFailed(f"{self._failure}; join again and rewrite")

    def fail(self, reason: str) -> WriteFailed:
        """The first failure stays."""
        if self._failure is None:
            self._failure = reason
        return WriteFailed(f"{self._failure}; join again and rewrite")

    def discard(self) -> None:
        """See `JournalWriter`."""
        self._end("the writer was discarded", clean=self._failure is None)

    def release(self) -> None:
        """See `JournalWriter`."""
        self._end("the writer was released", clean=self._failure is None)

    def _end(self, why: str, *, clean: bool) -> None:
        self.fail(why)
        producer, self._producer = self._producer, None
        if producer is not None:
            self._pool.give_back(producer, clean=clean)


class RawLane:
    """See `Lane`."""

    def __init__(
        self,
        journal: RawJournal,
        touched: Touched,
        header: tuple[str, bytes],
        limit: int,
        writer: int,
    ) -> None:
        self.stream = touched.stream
        self.topic = journal_topic(touched.stream)
        self._journal = journal
        self._room = limit - RECORD_OVERHEAD
        self._target = min(journal.batch_bytes, limit - RECORD_OVERHEAD)
        self._chunk_bytes = max(1, min(CHUNK_BYTES, self._target // 4))
        ordered = sorted(touched.segments, key=lambda segment: segment.low)
        self._slots = {s.partition: Slot(s.partition) for s in ordered}
        self._encoder = ChunkEncoder(
            [s.low for s in ordered], [self._slots[s.partition] for s in ordered], header
        )
        self._by_turn = list(self._slots.values())
        self._turn = writer % len(self._by_turn)
        self._chunk = Chunk()
        self.firsts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.loose: set[int] = set()  # partitions where an offset is not known
        self.write = self._make_write()

    def check_size(
        self, key: bytes | None, value: bytes | None, headers: RecordHeaders | None
    ) -> None:
        """See `Lane`."""
        size = len(key or b"") + len(value or b"") + headers_size(headers)
        if size > self._room:
            raise too_large(self.topic, size, self._room)

    def _make_write(self) -> WriteFunction:
        """The function that writes an event: (key, value, headers, timestamp)."""
        chunk, room, now = self._chunk, self._room, time.time
        add_key, add_value, add_stamp = chunk.keys.append, chunk.values.append, chunk.stamps.append
        keys, special = chunk.keys, chunk.special
        counted, most = 0, self._chunk_bytes

        def write(
            key: bytes | None,
            value: bytes | None,
            headers: RecordHeaders | None,
            timestamp: int | None,
        ) -> None:
            nonlocal counted
            if key.__class__ is bytes and value.__class__ is bytes and headers is None:
                size = len(key) + len(value)
            else:
                check_event(key, value, timestamp)
                size = len(key or b"") + len(value or b"") + headers_size(headers)
            if size > room:
                self.check_size(key, value, headers)
            if not keys:
                counted = 0
            elif counted > most:
                self._ship_chunk(counted)
                counted = 0
            counted += size + _EVENT_COST
            if headers is not None or timestamp is not None:
                special[len(keys)] = (headers, timestamp)
            if key is None or value is None:
                chunk.nulls = True
            add_key(key)
            add_value(value)
            add_stamp(now())

        return write

    def _ship_chunk(self, size: int) -> None:
        """Frame the chunk, which has at most ``size`` bytes; queue the batches that are full."""
        self._journal.wait_for_room()
        for slot in self._by_turn:
            if slot.count and len(slot.body) + size > self._target:
                self._queue(slot)
        keyless = self._by_turn[self._turn]
        self._turn = (self._turn + 1) % len(self._by_turn)
        self._encoder.encode(self._chunk, keyless)
        self._chunk.clear()
        open_bytes = sum(len(slot.body) for slot in self._by_turn)
        for slot in self._by_turn:
            big = len(slot.body) * len(self._by_turn) >= open_bytes > _MOST_OPEN_BYTES
            if slot.count and (big or len(slot.body) >= self._target):
                self._queue(slot)
        self._journal.pump(None)

    def ship_all(self) -> None:
        """Queue everything."""
        if self._chunk.keys:
            self._ship_chunk(self._target)
        for slot in self._by_turn:
            if slot.count:
                self._queue(slot)

    def _queue(self, slot: Slot) -> None:
        self._journal.producer.add(
            TopicPartition(self.topic, slot.partition),
            slot.body,
            codec=self._journal.codec,
            count=slot.count,
            base_timestamp=slot.base_timestamp,
            max_timestamp=slot.max_timestamp,
        )
        slot.body = bytearray()
        slot.count = 0

    def stored(self, partition: int, base_offset: int, count: int) -> None:
        """A batch is acknowledged; base offset -1: it is not known where it lies."""
        if base_offset < 0:
            self.loose.add(partition)
            self.firsts[partition] = 0  # certainly not above it
            return
        first = self.firsts.get(partition, base_offset)
        self.firsts[partition] = min(first, base_offset)
        self.ends[partition] = max(self.ends.get(partition, 0), base_offset + count)

    def extents(self) -> Sequence[Extent]:
        """See `Lane`."""
        return [
            Extent(
                stream=self.stream,
                partition=slot.partition,
                first=self.firsts[slot.partition],
                end=self.ends[slot.partition],
                count=slot.events,
                crc_sum=slot.crc_sum,
            )
            for slot in self._by_turn
            if slot.events
        ]
