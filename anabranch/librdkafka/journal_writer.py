"""Journal writers on confluent-kafka. Each open writer has its own idempotent producers, which are reused later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from anabranch.errors import (
    AnabranchError,
    DeadlineExceeded,
    FixCallError,
    NotAuthorized,
    NotReady,
    RetryError,
    WriteFailed,
)
from anabranch.librdkafka.admin import DEFAULT_MAX_MESSAGE_BYTES, KafkaAdmin
from anabranch.librdkafka.handles import HandleHealth, drop, leak, make
from anabranch.librdkafka.options import Options
from anabranch.ports import (
    TOPIC_AUTHORIZATION_FAILED,
    UNSUPPORTED_COMPRESSION_TYPE,
    Clock,
    JournalMissing,
    JournalRecord,
    LogDenied,
    LogError,
    LogRefused,
    Opened,
    RecordHeaders,
    TopicPartition,
)
from anabranch.waits import here

if TYPE_CHECKING:
    from anabranch.batches.columns_write import Counted, EventColumns, Placing
    from anabranch.librdkafka.column_journal import ColumnJournal, ColumnJournals

log = logging.getLogger("anabranch.client")

_SPARE = 4  # producers kept for the next writers
_POLL_EVERY = 1000  # writes between polls: delivery reports are freed while their memory is warm
_FULL_POLL_S = 0.05
_SLICE_S = 0.2
_STUCK_S = 1.0  # silence after which to check that the topics still exist
_METADATA_S = 5.0
_PAUSE_S = 0.05


class KafkaJournals:
    """Makes journal writers, and keeps spare producers for them."""

    def __init__(self, options: Options, admin: KafkaAdmin, clock: Clock, timeout: float) -> None:
        self._options = options
        self._admin = admin
        self._clock = clock
        self._timeout = timeout
        self._lock = here().lock()
        self._spare: list[Channel] = []
        self._used: set[Channel] = set()
        self._likely_bytes = DEFAULT_MAX_MESSAGE_BYTES
        self._closed = False
        self._columns: ColumnJournals | None = None

    @property
    def message_max_bytes(self) -> int:
        """The caller's own limit for a batch."""
        return self._options.message_max_bytes

    def writer(self) -> KafkaJournal:
        """A writer, which takes producers once it knows its topics.

        One producer is made now, because librdkafka's idempotent producer sends nothing in its first half second.
        """
        with self._lock:
            if not self._spare and not self._closed:
                # If there is no token now, the transaction is not affected.
                with contextlib.suppress(NotReady):
                    self._spare.append(Channel(self._options, self._likely_bytes))
        return KafkaJournal(self, self._admin, self._clock, self._timeout)

    def columns(self) -> ColumnJournal:
        """The part of a writer that writes columns."""
        from anabranch.librdkafka.column_journal import ColumnJournal, ColumnJournals  # loads numpy

        with self._lock:
            if self._columns is None:
                self._columns = ColumnJournals(self._options, self._clock)
                if self._closed:
                    self._columns.close()
            return ColumnJournal(self._columns)

    def refused_codec(self, codec: str) -> str:
        """As `Options.replace_codec`."""
        return self._options.replace_codec(codec)

    def take(self, max_bytes: int) -> Channel:
        """A producer for topics with this size limit."""
        with self._lock:
            if self._closed:
                raise WriteFailed("the client is closed")
            self._likely_bytes = max_bytes
            kind = max_bytes, self._options.codec
            for channel in [spare for spare in self._spare if spare.kind == kind]:
                self._spare.remove(channel)
                channel.poll(0)
                if channel.failure is None and not channel.health.complained:
                    self._used.add(channel)
                    return channel
                channel.close()
            channel = Channel(self._options, max_bytes)
            self._used.add(channel)
            return channel

    def give_back(self, channel: Channel, *, keep: bool = True) -> None:
        """Keep a producer for reuse if it is flushed and has never failed; otherwise drop it with its records."""
        with self._lock:
            self._used.discard(channel)
            channel.poll(0)
            keep &= not self._closed and channel.failure is None and len(self._spare) < _SPARE
            if keep and not len(channel.producer):
                self._spare.append(channel)
                return
        channel.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = [*self._spare, *self._used]
            self._spare.clear()
            self._used.clear()
        for channel in channels:
            channel.fail("the client was closed")
            channel.close()
        if self._columns is not None:
            self._columns.close()

    def after_fork(self) -> None:
        if self._columns is not None:
            self._columns.after_fork()
        for channel in [*self._spare, *self._used]:
            leak(channel.producer)


class KafkaJournal:
    """One writer's journal records, queued in the producers of `KafkaJournals`."""

    def __init__(
        self, pool: KafkaJournals, admin: KafkaAdmin, clock: Clock, timeout: float
    ) -> None:
        self._pool = pool
        self._admin = admin
        self._clock = clock
        self._timeout = timeout
        self._channels: dict[int, Channel] = {}
        self._by_topic: dict[str, Channel] = {}
        self._produce: dict[str, Callable[..., None]] = {}  # looked up once, not for each event
        self._countdown = _POLL_EVERY
        self._failure: str | None = None
        self._columns: ColumnJournal | None = None
        self._missing: str | None = None  # the topic that was missing at the last check

    def open(self, topic: str, partitions: Sequence[int], deadline: float) -> Opened:
        limit = self._admin.max_message_bytes([topic], deadline)[topic]
        limit = min(limit, self._pool.message_max_bytes)
        ends = self._admin.end_offsets({(topic, p): 0 for p in partitions}, deadline)
        channel = self._channels.get(limit)
        count = max(partitions, default=-1) + 1
        if channel is None:
            channel = self._pool.take(limit)
            try:
                channel.learn(topic, count, self._clock, deadline)
            except NotReady:
                # Perhaps only this producer finds no brokers.
                self._pool.give_back(channel, keep=False)
                raise
            self._channels[limit] = channel
        else:
            channel.learn(topic, count, self._clock, deadline)
        self._by_topic[topic] = channel
        self._produce[topic] = channel.producer.produce
        return Opened({p: ends[topic, p] for p in partitions}, limit)

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        timestamp_ms: int,
    ) -> None:
        try:
            # By position, as keywords take a third of the call's time.
            self._produce[topic](topic, value, key, partition, None, None, timestamp_ms, headers)
        except BufferError:
            record = topic, value, key, partition, None, None, timestamp_ms, headers
            self._write_when_room(self._by_topic[topic], record)
        except KeyError:
            self._back_to_events(topic)
            self.write(topic, partition, key, value, headers, timestamp_ms)
            return
        except (KafkaException, RuntimeError) as error:
            raise self._fail(f"a write to {topic}[{partition}] failed: {error}") from error
        self._countdown -= 1
        if not self._countdown:
            self._countdown = _POLL_EVERY
            self._by_topic[topic].poll(0)
            self._check()

    def write_many(self, topic: str, records: Iterable[JournalRecord]) -> None:
        if topic not in self._produce:
            self._back_to_events(topic)
        channel, produce = self._by_topic[topic], self._produce[topic]
        for partition, key, value, headers, timestamp_ms in records:
            try:
                produce(topic, value, key, partition, None, None, timestamp_ms, headers)
            except BufferError:
                record = topic, value, key, partition, None, None, timestamp_ms, headers
                self._write_when_room(channel, record)
            except (KafkaException, RuntimeError) as error:
                raise self._fail(f"a write to {topic}[{partition}] failed: {error}") from error
        channel.poll(0)
        self._check()

    def _write_when_room(self, channel: Channel, record: tuple[Any, ...]) -> None:
        """Wait for room in a full queue, then write. ``record``: the arguments of `produce`.

        `DeadlineExceeded`: there was no room in time, so nothing was written.
        """
        deadline = self._clock.monotonic() + self._timeout
        while True:
            channel.poll(_FULL_POLL_S)
            channel.watch()
            self._check()
            try:
                channel.producer.produce(*record)
            except BufferError:
                if self._clock.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"the brokers took nothing for {self._timeout:g} s; this event was not written"
                    ) from None
            except (KafkaException, RuntimeError) as error:
                raise self._fail(f"a write to {record[0]}[{record[3]}] failed: {error}") from error
            else:
                return

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        self._flush_events(deadline)
        self._flush_columns(deadline)
        while True:
            until = self._clock.monotonic() + _STUCK_S
            # The last flush takes all remaining time, and its error is raised.
            if until + _STUCK_S > deadline:
                until = deadline
            try:
                ends = self._admin.end_offsets(written, until)
            except AnabranchError as error:
                if isinstance(error, FixCallError) or until >= deadline:
                    raise DeadlineExceeded(
                        f"flushed, but the journal's ends are not known: {error}"
                    ) from error
                self._check_topics(deadline)
            else:
                return {place: ends[place] for place in written}

    def _flush_events(self, deadline: float) -> None:
        for channel in self._channels.values():
            left_over = len(channel.producer)
            stuck_at = self._clock.monotonic() + _STUCK_S
            while len(channel.producer):
                now = self._clock.monotonic()
                if now >= deadline:
                    if self._missing is not None:
                        raise JournalMissing(self._missing)
                    n = len(channel.producer)
                    raise self._fail(f"{n} writes were not acknowledged before the deadline")
                if now >= stuck_at:
                    self._check_topics(deadline)
                channel.poll(min(deadline - now, _SLICE_S), flush=True)
                channel.watch()
                self._check()
                if len(channel.producer) < left_over or now >= stuck_at:
                    left_over = len(channel.producer)
                    stuck_at = self._clock.monotonic() + _STUCK_S
            channel.poll(0)
        self._check()

    def _check_topics(self, deadline: float) -> None:
        """Raise `JournalMissing` if the brokers report that one of the topics does not exist."""
        topics = list(self._by_topic)
        try:
            found = self._admin.partition_counts(
                topics, min(deadline, self._clock.monotonic() + _STUCK_S)
            )
        except RetryError as error:
            log.debug("journals can't be looked for now: %s", error)
            return
        self._missing = next((topic for topic in topics if topic not in found), None)
        if self._missing is not None:
            raise JournalMissing(self._missing)

    def _flush_columns(self, deadline: float) -> None:
        if self._columns is None:
            return
        try:
            self._columns.flush(deadline)
        except LogError as error:
            raise self._refused("a write", error) from error

    def write_columns(
        self, topic: str, placing: Placing, columns: EventColumns
    ) -> Sequence[Counted] | None:
        """Flush the events written before, so that keys keep their order, then write the rows."""
        self._check()
        if self._columns is None:
            self._columns = self._pool.columns()
        if not self._columns.takes(columns.rows):
            return None
        deadline = self._clock.monotonic() + self._timeout
        self._flush_events(deadline)
        self._produce.clear()  # so that the next event comes by `_back_to_events`
        limit = self._by_topic[topic].max_bytes
        try:
            return self._columns.write(topic, limit, placing, columns, deadline)
        except LogError as error:
            raise self._refused(f"a write to {topic}", error) from error

    def _back_to_events(self, topic: str) -> None:
        """Prepare for events after columns were written. Raises if the writer has failed."""
        self._check()
        if topic not in self._by_topic:
            raise KeyError(topic)
        self._flush_columns(self._clock.monotonic() + self._timeout)
        self._produce = {name: one.producer.produce for name, one in self._by_topic.items()}

    def _check(self) -> None:
        if self._failure is None:
            for channel in self._channels.values():
                if channel.failure is not None:
                    self._failure = channel.failure
                if channel.forbidden is not None:
                    raise _forbidden(channel.forbidden)
        if self._failure is not None:
            raise WriteFailed(f"{self._failure}; join again and rewrite")

    def _refused(self, what: str, error: LogError) -> AnabranchError:
        if isinstance(error, LogDenied):
            return NotAuthorized(str(error))
        if isinstance(error, LogRefused) and error.error == TOPIC_AUTHORIZATION_FAILED:
            return _forbidden(str(error))
        refused = error.error if isinstance(error, LogRefused) else 0
        if refused == UNSUPPORTED_COMPRESSION_TYPE and self._columns is not None:
            return self._fail(f"{what} failed: {self._pool.refused_codec(self._columns.codec)}")
        return self._fail(f"{what} failed: {error}")

    def _fail(self, reason: str) -> WriteFailed:
        if self._failure is None:
            self._failure = reason
        return WriteFailed(f"{self._failure}; join again and rewrite")

    def discard(self) -> None:
        self._fail("the writer was discarded")
        self._produce.clear()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            self._pool.give_back(channel)
        if self._columns is not None:
            self._columns.end()


def _forbidden(what: str) -> NotAuthorized:
    return NotAuthorized(f"the right Write on the topic is missing: {what}")


class Channel:
    """A journal writer's producer on confluent-kafka, and its first error."""

    def __init__(self, options: Options, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kind = max_bytes, options.codec
        self._options = options
        self.failure: str | None = None
        self.forbidden: str | None = None  # a topic that refuses writes
        config = options.journal(max_bytes) | {"on_delivery": self._undelivered}
        self.producer: Producer = make(Producer, config, self._on_error)
        self.health = HandleHealth(self.producer, options.admin())
        self._unsent = 0  # records that waited when `watch` was called last
        self._known: dict[str, int] = {}  # topic -> partitions that the producer knows, at least
        self._closing = here().lock()
        self._closed = False

    def _undelivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                self.forbidden = message.topic()
            why = error.str()
            if self.failure is None and error.code() == KafkaError.UNSUPPORTED_COMPRESSION_TYPE:
                why = self._options.replace_codec(self.kind[1])
            self.fail(f"a write to {message.topic()}[{message.partition()}] failed: {why}")

    def _on_error(self, error: KafkaError) -> None:
        self.health.complaint(error)
        if error.fatal():
            self.fail(f"the producer failed: {error.str()}")
        else:
            log.debug("journal writes: %s", error)

    def fail(self, reason: str) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure = reason

    def learn(self, topic: str, partitions: int, clock: Clock, deadline: float) -> None:
        """Wait until the producer knows this many partitions of a topic.

        librdkafka refreshes its metadata only every few minutes, and refuses records for newer partitions. Brokers
        may learn of new partitions a little late, too.
        """
        self.health.topic = topic
        trouble = "they know fewer"
        while self._known.get(topic, 0) < partitions:
            left = deadline - clock.monotonic()
            if left <= 0:
                raise NotReady(
                    f"the brokers were asked in vain for {partitions} partitions of {topic}: {trouble}"
                )
            try:
                ask = partial(self.producer.list_topics, topic, timeout=min(left, _METADATA_S))
                found = here().run(ask)
            except KafkaException as error:
                trouble = error.args[0].str()
            except RuntimeError as error:
                if not self._closed:  # otherwise another thread has closed the client
                    raise
                raise WriteFailed("the client was closed") from error
            else:
                self._known[topic] = len(found.topics[topic].partitions)
            if self._known.get(topic, 0) < partitions:
                clock.sleep(min(_PAUSE_S, max(0.0, deadline - clock.monotonic())))

    def poll(self, seconds: float, *, flush: bool = False) -> None:
        """Serve delivery reports. ``flush``: send waiting records now, and wait for the reports of all."""
        try:
            serve = self.producer.flush if flush else self.producer.poll
            if seconds:
                here().served(serve, lambda: not len(self.producer), seconds)
            else:
                serve(seconds)
        except RuntimeError:
            if not self._closed:  # otherwise another thread has closed the client
                raise
            self.fail("the client was closed")

    def watch(self) -> None:
        """Fail the writer early if this producer finds no brokers, and others do. Call it while records wait."""
        unsent = len(self.producer)
        if unsent < self._unsent:
            self.health.answered()
        elif here().run(self.health.lost):
            self.fail("the producer has lost the brokers")
        self._unsent = unsent

    def close(self) -> None:
        """Free the producer. Its unsent records are purged; records in flight may still be written."""
        with self._closing:
            if not self._closed:
                self._closed = True
                here().run(lambda: drop(self.producer))
