"""Where readers get records from: the raw log, or a confluent-kafka consumer with the same result.

Batches that are fetched raw are decoded in compiled code. Where an option can't be honoured there (Kerberos, say),
librdkafka fetches. Either way a group's member is one of librdkafka's consumers: it is told which partitions are
its own, and keeps the group's offsets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from confluent_kafka import TopicPartition as Place

from anabranch.batches.records import Record
from anabranch.errors import UnsupportedSetting
from anabranch.librdkafka.group_member import CommittedConsumer, CommittedMessage
from anabranch.librdkafka.options import Options
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    Log,
    LogDenied,
    LogError,
    LogRefused,
    LogUnavailable,
    OffsetOutOfRange,
    TopicPartition,
)
from anabranch.reading.fetched import Portion, portion_of_batches, portion_of_records
from anabranch.reading.headers import headers_of
from anabranch.reading.log_consumer import named_errors, raw_log

log = logging.getLogger("anabranch.client")

FETCH_BYTES = 4 << 20
_ANSWER_S = 5.0
_WAIT_S = 0.1  # a member's fetch waits no longer for something new: the group may have news, too
_ASIDE_S = 0.5  # what can't be read now is asked for again after so long
_MUCH = 16 << 20  # bytes of a partition that wait: then librdkafka pauses it
_MESSAGE_BYTES = 1600  # of each message, beside its value; so 10,000 are much too

Gone = Callable[[TopicPartition, int], None]


class Feed(Protocol):
    """Committed records of some partitions, from given offsets on. One thread at a time, but for `close`."""

    def assign(self, places: Mapping[tuple[str, int], int]) -> None:
        """Read exactly these (topic, partition), from these offsets on."""

    def stop(self) -> None:
        """The partitions are gone. What the consumer is to be told of that is the caller's."""

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Read partitions too (partition -> offset), which may be new. Not in a group."""

    def next(self, deadline: float, waiting: Mapping[tuple[str, int], int]) -> list[Portion]:
        """What is there next; nothing if nothing came until the deadline (monotonic seconds), or a bit before.

        ``waiting``: (topic, partition) -> bytes of what was given already and has to wait; no more is needed of it.

        Raises: FixCallError.
        """

    def serve(self) -> None:
        """Hear what is new in the group, if that does not bring records: call it every second or so."""

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Where the next record is expected, of partitions of which that is known."""

    def close(self) -> None:
        """Free everything but the consumer."""


def make_feed(
    options: Options, group: str | None, timeout: float
) -> tuple[Feed, CommittedConsumer | None]:
    """A feed, and the consumer that is in the group, or is fetched by; None: none is needed.

    ``timeout``: seconds that an answer may take.
    """
    member = None if group is None else CommittedConsumer(options, group=group)
    raw = make_raw_feed(options, timeout, member)
    if raw is not None:
        return raw, member
    consumer = member or CommittedConsumer(options, group=None)
    return KafkaFeed(consumer), consumer


def make_raw_feed(
    options: Options,
    timeout: float,
    member: CommittedConsumer | None = None,
    gone: Gone | None = None,
) -> RawFeed | None:
    """A feed over connections of our own; None: an option can't be honoured there. See `RawFeed`."""
    try:
        raw = raw_log(options, min(timeout, _ANSWER_S))
    except UnsupportedSetting as error:
        log.info("reading through librdkafka: %s", error)
        return None
    return RawFeed(raw, member, gone)


class RawFeed:
    """Over connections of our own. Fetches when it is asked, and only of partitions of which nothing waits."""

    def __init__(
        self, raw: Log, member: CommittedConsumer | None = None, gone: Gone | None = None
    ) -> None:
        """``gone``: called when an offset is not there any more; it may raise. Else the log's beginning is next."""
        self._log = raw
        self._member = member
        self._gone = gone
        self._positions: dict[TopicPartition, int] = {}
        self._aside: dict[TopicPartition, float] = {}  # until when; they can't be read now
        self._term = 0
        self._closed = threading.Event()

    def assign(self, places: Mapping[tuple[str, int], int]) -> None:
        """See `Feed.assign`. The group's member itself fetches nothing."""
        self._term += 1
        self._aside = {}
        self._positions = {TopicPartition(*place): offset for place, offset in places.items()}

    def stop(self) -> None:
        self.assign({})

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        self._positions |= {TopicPartition(topic, p): offset for p, offset in offsets.items()}

    def next(self, deadline: float, waiting: Mapping[tuple[str, int], int]) -> list[Portion]:
        """See `Feed.next`. A partition that can't be read costs the others nothing; it is asked for again soon."""
        self.serve()
        now = time.monotonic()
        self._aside = {place: until for place, until in self._aside.items() if until > now}
        left = max(0.0, min([deadline, *self._aside.values()]) - now)
        wanted = {
            place: at
            for place, at in self._positions.items()
            if place not in waiting and place not in self._aside
        }
        if not wanted:
            self._rest(left)
            return []
        term = self._term
        failed: dict[TopicPartition, LogError] = {}
        wait = left if self._member is None else min(left, _WAIT_S)
        with named_errors():
            try:
                found = self._log.fetch(
                    wanted, max_wait=wait, max_bytes=FETCH_BYTES, committed=True, failed=failed
                )
            except LogDenied:
                raise
            except LogUnavailable as error:
                log.info("reading: %s", error)
                self._rest(min(left, _ASIDE_S))
                return []
            if term != self._term:
                return []
            for place, problem in failed.items():
                self._wait_for(place, problem)
        portions = []
        for place, fetched in found.items():
            first = self._positions[place]
            self._positions[place] = fetched.next_offset
            if fetched.batches:
                portions.append(portion_of_batches(place, fetched.batches, first))
        return portions

    def _wait_for(self, place: TopicPartition, error: LogError) -> None:
        """Set a partition aside that can't be read now. Raises what no waiting mends."""
        log.info("reading %s[%d]: %s", place.topic, place.partition, error)
        if isinstance(error, OffsetOutOfRange):
            if self._pass_over(error):
                return
        elif not isinstance(error, LogUnavailable) and not (
            isinstance(error, LogRefused) and error.error == UNKNOWN_TOPIC_OR_PARTITION
        ):
            raise error
        self._aside[place] = time.monotonic() + _ASIDE_S

    def _pass_over(self, error: OffsetOutOfRange) -> bool:
        """Go on where the log begins now, if that is ahead. Else the broker is behind: there is no way back."""
        place = error.partition
        try:
            start = self._log.start_offsets([place])[place]
        except LogUnavailable as unavailable:
            log.info("reading: %s", unavailable)
            return False
        if start <= error.position:
            log.warning("%s, and begins at %d: its broker is behind, or has lost it", error, start)
            return False
        if self._gone is not None:
            self._gone(place, error.position)
        self._positions[place] = start
        log.warning("%s: reading goes on at offset %d", error, start)
        return True

    def _rest(self, seconds: float) -> None:
        if self._member is not None:
            self._member.serve(seconds)
        else:
            self._closed.wait(seconds)

    def serve(self) -> None:
        if self._member is not None:
            self._member.serve(0.0)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        places = [TopicPartition(topic, partition) for partition in partitions]
        return {p.partition: self._positions[p] for p in places if p in self._positions}

    def close(self) -> None:
        """See `Feed.close`: a fetch under way ends soon."""
        self._closed.set()
        self._log.close()


class KafkaFeed:
    """Over librdkafka, which fetches ahead."""

    def __init__(self, consumer: CommittedConsumer) -> None:
        self._consumer = consumer
        self._paused: set[tuple[str, int]] = set()

    def assign(self, places: Mapping[tuple[str, int], int]) -> None:
        self._paused.clear()
        self._consumer.assign(places)

    def stop(self) -> None:
        self._paused.clear()

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        self._consumer.add(topic, offsets)

    def next(self, deadline: float, waiting: Mapping[tuple[str, int], int]) -> list[Portion]:
        self._pause({place for place, size in waiting.items() if size >= _MUCH}, waiting)
        messages: dict[tuple[str, int], list[CommittedMessage]] = {}
        for message in self._consumer.next_batch(deadline):
            messages.setdefault((message.topic(), message.partition()), []).append(message)
        return [
            portion_of_records(
                TopicPartition(*place),
                [_record(m) for m in some],
                sum(len(m) + _MESSAGE_BYTES for m in some),
            )
            for place, some in messages.items()
        ]

    def _pause(self, much: set[tuple[str, int]], waiting: Mapping[tuple[str, int], int]) -> None:
        """Pause what has much waiting, and resume what waits no more: to resume costs a new fetch."""
        pause = much - self._paused
        resume = self._paused - waiting.keys()
        if pause:
            self._consumer.native.pause([Place(*place) for place in pause])
        if resume:
            self._consumer.native.resume([Place(*place) for place in resume])
        self._paused = (self._paused | pause) - resume

    def serve(self) -> None:
        """See `Feed.serve`: to ask here would bring records."""

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        return self._consumer.positions(topic, partitions)

    def close(self) -> None:
        """See `Feed.close`."""


def _record(message: CommittedMessage) -> Record:
    return Record(
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers_of(message),
    )
