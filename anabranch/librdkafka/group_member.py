"""A confluent-kafka consumer of committed data, with what all readers need around it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, cast

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from anabranch.errors import (
    AnabranchError,
    FixCallError,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownStream,
)
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import leak, make_consumer
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from anabranch.topics.names import stream_topic

log = logging.getLogger("anabranch.client")

NO_GROUP = "anabranch-reader"  # never joined: partitions are assigned by hand
_SLICE_S = 0.5
_ASK_S = 30.0
_LEARN_S = 5.0
_REFRESH_MS = 2000  # a group's members find new partitions within this

HOPELESS = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._FATAL,  # noqa: SLF001
        KafkaError.INVALID_GROUP_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    )
)
_FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
}
_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
_NOT_THERE = KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001
_ASIDE_S = 0.5  # a partition whose broker is behind is looked at again after so long
_LOOK_S = 2.0


class CommittedMessage(Protocol):
    """A `confluent_kafka.Message` that is no error."""

    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...  # bytes of the value


class CommittedConsumer:
    """Reads committed messages in batches. One thread at a time."""

    def __init__(
        self,
        options: Options,
        *,
        group: str | None,
        eof: bool = False,
        special: Mapping[str, str | int] | None = None,
    ) -> None:
        """``eof``: `ended_at` is kept. ``special``: librdkafka's options that differ from a reader's."""
        # By itself librdkafka would go back to the beginning whenever a broker is behind.
        config = options.reader(group or NO_GROUP, "error") | dict(special or {})
        if eof:
            config["enable.partition.eof"] = True
        if group is not None:
            config.setdefault("topic.metadata.refresh.interval.ms", _REFRESH_MS)
        self.native = make_consumer(options, config, _on_error)
        self.group = group or NO_GROUP
        self._size = 100
        self._asked_at = 0.0
        self._at_end = False
        self._stopped: dict[tuple[str, int], float] = {}  # their offsets were not there; look when
        self.ended_at = -1  # where the end of a partition was last met

    def assign(self, places: Mapping[tuple[str, int], int]) -> None:
        """Read exactly these (topic, partition), from these offsets on, whatever was paused before."""
        self._resume_all()
        self._stopped.clear()
        self.ended_at = -1
        self.native.assign([TopicPartition(t, p, offset) for (t, p), offset in places.items()])

    def unassign(self) -> None:
        """Read nothing."""
        self._resume_all()
        self.native.unassign()

    def _resume_all(self) -> None:
        """A pause outlives an assignment."""
        before = self.native.assignment()
        if before:
            self.native.resume(before)

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Read partitions too (partition -> offset) that may be new. Not in a group, which is given its own."""
        self.learn(topic)
        self.native.incremental_assign([TopicPartition(topic, p, o) for p, o in offsets.items()])

    def learn(self, topic: str | None = None) -> None:
        """Ask what partitions there are now. Of all topics: then a group takes its new ones too."""
        try:
            if topic is None:
                self.native.list_topics(timeout=_LEARN_S)
            else:
                self.native.list_topics(topic, timeout=_LEARN_S)
        except KafkaException as error:
            log.info("metadata: %s", error)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """The offset after the last message that `next_batch` gave, of partitions that gave some."""
        found = self.native.position([TopicPartition(topic, p) for p in partitions])
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def offset_for_time(self, topic: str, unix_ms: int, timeout: float) -> int | None:
        """The first offset of partition 0 at or after a millisecond, None if there is none. `NotReady`."""
        place = TopicPartition(topic, 0, unix_ms)
        try:
            (found,) = self.native.offsets_for_times([place], timeout=timeout)
        except KafkaException as error:
            raise NotReady(f"{topic} can't be searched by time: {error}") from error
        if found.error is not None:
            raise NotReady(f"{topic} can't be searched by time: {found.error}")
        return found.offset if found.offset >= 0 else None

    def next_batch(self, deadline: float, limit: int = 2000) -> list[CommittedMessage]:
        """Messages, at least one unless the deadline (monotonic seconds) passes or a partition's end is met.

        The size follows the caller's pace: what it holds should be worked off in about a second.
        """
        now = time.monotonic()
        spent = now - self._asked_at
        if spent > 1.0:
            self._size = max(1, self._size // 2)
        elif spent < 0.2:
            self._size = min(limit, self._size * 2)
        self._at_end = False
        batch: list[Message] = []
        while not batch and not self._at_end:
            self._go_on()
            left = deadline - time.monotonic()
            message = self.native.poll(max(0.0, min(left, _SLICE_S)))
            if message is not None:
                found = [message]
                if self._size > 1:
                    found += self.native.consume(self._size - 1, 0)
                batch = [m for m in found if m.error() is None or self._pass_over(m)]
            elif left <= 0:
                break
        self._asked_at = time.monotonic()
        return cast("list[CommittedMessage]", batch)

    def serve(self, wait: float) -> None:
        """Hear what is new in the group (seconds), while nothing is fetched here."""
        message = self.native.poll(wait)
        if message is not None and message.error() is not None:
            self._pass_over(message)

    def _pass_over(self, message: Message) -> bool:
        """Judge a message that is an error: raise what can't mend itself, leave out the rest."""
        error = message.error()
        if error is not None:
            if error.code() == _EOF:
                self._at_end = True
                self.ended_at = cast("int", message.offset())
            elif error.code() == _NOT_THERE:
                self._stopped.setdefault((message.topic() or "", message.partition() or 0), 0.0)
            elif error.code() in _FORBIDDEN:
                raise self._forbidden(error, message.topic() or "")
            elif error.fatal() or error.code() in HOPELESS:
                raise FixCallError(f"can't read {message.topic()}: {error}")
            else:
                log.info("reading: %s", error)
        return False

    def _forbidden(self, error: KafkaError, topic: str) -> NotAuthorized:
        what = _FORBIDDEN[error.code()]
        where = self.group if what == "group" else topic
        return NotAuthorized(f"the right Read on the {what} {where} is missing")

    def _unread(self, error: KafkaError, topic: str = "") -> AnabranchError:
        if error.code() in _FORBIDDEN:
            return self._forbidden(error, topic)
        return NotReady(f"the group's offsets can't be read: {error}")

    def _go_on(self) -> None:
        """Read stopped partitions on where they begin, if that is ahead. Else the broker is behind: no way back."""
        for place in [p for p, when in self._stopped.items() if when <= time.monotonic()]:
            position = self.native.stands_at(*place)
            if position is None:
                del self._stopped[place]
                continue
            place_at = TopicPartition(*place, position)
            try:
                start, end = self.native.bounds(place_at, _LOOK_S)
                if position < start:
                    self._gone(place_at, start)
                if position <= end:
                    self.native.seek(TopicPartition(*place, max(start, position)))
                    del self._stopped[place]
                    continue
                log.warning(
                    "%s: it ends at %d: its broker is behind, or has lost it", place_at, end
                )
            except KafkaException as error:
                log.info("reading: %s", error)
            self._stopped[place] = time.monotonic() + _ASIDE_S

    def _gone(self, place: TopicPartition, start: int) -> None:
        """Retention has taken what would be read next."""
        log.warning("%s is not there any more: reading goes on at offset %d", place, start)

    def subscribe(
        self,
        topics: list[str],
        gained: Callable[[list[TopicPartition]], None],
        lost: Callable[[list[TopicPartition], bool], None],
    ) -> None:
        """Join the group. ``lost`` is told whether commits are still possible.

        Both are bound methods, held weakly: a reader that nobody holds any more is freed at once.
        """
        gain, lose = weakref.WeakMethod(gained), weakref.WeakMethod(lost)

        def on_assign(_: LastingConsumer, partitions: list[TopicPartition]) -> None:
            method = gain()
            if method is not None:
                method(partitions)

        def on_gone(partitions: list[TopicPartition], may_commit: bool) -> None:
            method = lose()
            if method is not None:
                method(partitions, may_commit)

        self.native.subscribe(
            topics,
            on_assign=on_assign,
            on_revoke=lambda _, partitions: on_gone(partitions, True),
            on_lost=lambda _, partitions: on_gone(partitions, False),
        )

    def committed(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The group's committed offsets, where there are any. `NotReady`, `NotAuthorized`."""
        try:
            found = self.native.committed([TopicPartition(t, p) for t, p in places], timeout=_ASK_S)
        except KafkaException as error:
            raise self._unread(error.args[0]) from error
        for place in found:
            if place.error is not None:  # there may be an offset all the same
                raise self._unread(place.error, place.topic)
        return {(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def commit_all(self, offsets: Mapping[tuple[str, int], int]) -> bool:
        """Commit offsets in the group, in one request. Whether all were taken; else it may be tried again."""
        wanted = [TopicPartition(t, p, offset) for (t, p), offset in offsets.items()]
        try:
            taken = self.native.commit(offsets=wanted, asynchronous=False) or []
        except KafkaException as error:
            log.info("offsets were not committed: %s", error)
            return False
        return all(place.error is None for place in taken)

    def commit(self, offsets: dict[tuple[str, int], int], *, wait: bool) -> None:
        """Commit positions in the group. A failure is only logged: it means events come again."""
        if not offsets:
            return
        wanted = [TopicPartition(t, p, offset) for (t, p), offset in offsets.items()]
        try:
            self.native.commit(offsets=wanted, asynchronous=not wait)
        except (KafkaException, RuntimeError) as error:
            log.warning("positions were not committed, some events will come again: %s", error)

    def close(self) -> None:
        """Leave the group and free everything."""
        self.native.close()

    def leak(self) -> None:
        """In a forked child: free nothing, ever."""
        leak(self.native.native)


def _on_error(error: KafkaError) -> None:
    log.debug("reading: %s", error)


def check_group(group: str | None) -> str | None:
    """A group's name is not empty."""
    if group == "":
        raise InvalidArgument(f"group {group!r}: a name, or None")
    return group


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, or None for ever."""
    if timeout is not None and not 0 <= timeout < 1e9:
        raise InvalidArgument(f"timeout {timeout!r}: seconds, or None for ever")
    return timeout


def partitions_of(admin: KafkaAdmin, streams: list[str], deadline: float) -> dict[str, int]:
    """Topic -> number of partitions of each stream. `UnknownStream`."""
    topics = {stream_topic(stream): stream for stream in streams}
    counts = admin.partition_counts(list(topics), deadline)
    for topic, stream in topics.items():
        if topic not in counts:
            raise UnknownStream(f"there is no stream {stream!r}: create it first")
    return {topic: counts[topic] for topic in topics}
