"""Journal writes of columns, without librdkafka; `KafkaJournal.write_columns` uses them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from anabranch.batches.columns_write import ColumnEncoder, Counted, EventColumns, Placing, worth_it
from anabranch.batches.records import codec_number
from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.settings import parse_settings
from anabranch.librdkafka.options import Options
from anabranch.ports import Clock, LogUnavailable, TopicPartition

log = logging.getLogger("anabranch.client")

_CLOSED = "the client was closed"
_SPARE = 4  # producers kept for the next writers


class ColumnJournals:
    """The raw producers of a client, which writers use one after the other. The first use connects."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self.clock = clock
        self._lock = threading.Lock()
        self._known = False
        self._cluster: Cluster | None = None
        self._spare: list[JournalProducer] = []
        self._used: set[JournalProducer] = set()
        self._closed = False

    def available(self) -> bool:
        """Whether raw connections support all options of the client."""
        with self._lock:
            if not self._known:
                self._known = True
                try:
                    settings = parse_settings(self._options.bootstrap, self._options.raw())
                    codec_number(self._options.codec)
                except (UnsupportedSetting, InvalidArgument) as error:
                    log.info("write_batch goes by way of librdkafka: %s", error)
                else:
                    self._cluster = Cluster(settings)
            return self._cluster is not None

    @property
    def codec(self) -> str:
        """The codec of new writers."""
        return self._options.codec

    def encoder(self, placing: Placing, max_bytes: int, codec: str) -> ColumnEncoder:
        """An encoder for a topic with this size limit."""
        size = self._options.column_batch_bytes(max_bytes)
        return ColumnEncoder(placing, batch_bytes=size, codec=codec_number(codec))

    def take(self, deadline: float) -> JournalProducer:
        """A producer. Raises `LogError`."""
        with self._lock:
            if self._closed or self._cluster is None:
                raise LogUnavailable(_CLOSED)
            cluster = self._cluster
            producer = self._spare.pop() if self._spare else None
        if producer is None:
            producer = JournalProducer(cluster, deadline)
        self._use(producer)
        return producer

    def _use(self, producer: JournalProducer) -> None:
        with self._lock:
            self._used.add(producer)
            if self._closed:
                producer.interrupt(_CLOSED)

    def give_back(self, producer: JournalProducer) -> None:
        """Keep a producer for the next writer if all its records are stored; otherwise close it."""
        with self._lock:
            self._used.discard(producer)
            good = producer.failure is None and not producer.waiting
            if good and not self._closed and len(self._spare) < _SPARE:
                producer.forget()
                self._spare.append(producer)
                return
        producer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            producers = [*self._spare, *self._used]
            self._spare.clear()
            self._used.clear()
            cluster = self._cluster
        for producer in producers:
            producer.interrupt(_CLOSED)
            producer.close()
        if cluster is not None:
            cluster.close()

    def after_fork(self) -> None:
        """Called in a forked child, which closes its copies of the sockets."""
        for producer in [*self._spare, *self._used]:
            producer.after_fork()
        if self._cluster is not None:
            self._cluster.after_fork()


class ColumnJournal:
    """Writes the columns of one writer. Errors are `LogError`, which the caller turns into `WriteFailed`."""

    def __init__(self, pool: ColumnJournals) -> None:
        self._pool = pool
        self._producer: JournalProducer | None = None
        self._encoders: dict[tuple[str, tuple[int, ...]], ColumnEncoder] = {}  # by partitions
        self.codec = pool.codec
        self.queued = False  # whether something was written since the last flush

    def takes(self, rows: int) -> bool:
        """Whether to write this many rows as columns: the rows are enough, and `ColumnJournals.available`."""
        return worth_it(rows) and self._pool.available()

    def write(
        self, topic: str, max_bytes: int, placing: Placing, columns: EventColumns, deadline: float
    ) -> Sequence[Counted]:
        """Encode the rows, and send the batches that are full. ``max_bytes``: the topic's limit."""
        if self._producer is None:
            self._producer = self._pool.take(deadline)
        where = topic, tuple(placing.partitions)
        encoder = self._encoders.get(where)
        if encoder is None:
            encoder = self._encoders[where] = self._pool.encoder(placing, max_bytes, self.codec)
        self.queued = True
        now_ms = int(self._pool.clock.wall() * 1000)
        for partition, batch in encoder.encode(columns, now_ms):
            self._producer.append(TopicPartition(topic, partition), batch, deadline)
        return encoder.counted()

    def flush(self, deadline: float) -> None:
        """Send the remaining rows, and wait until everything is acknowledged."""
        if self._producer is None or not self.queued:
            return
        for (topic, _), encoder in self._encoders.items():
            for partition, batch in encoder.rest():
                self._producer.append(TopicPartition(topic, partition), batch, deadline)
        self._producer.flush(deadline)
        self.queued = False

    def end(self) -> None:
        """Free everything; unflushed rows are dropped."""
        self._encoders.clear()
        producer, self._producer = self._producer, None
        if producer is not None:
            if producer.waiting:
                producer.interrupt("the writer was discarded")
            self._pool.give_back(producer)
