"""The log for readers: committed records, questions that are repeated until a deadline, and the client's errors.

`CommittedLog` also notices when a topic was deleted and created again, so that no reader takes the new topic's
offsets for the old one's. All of a reader's fetches and questions pass through it.
"""

from __future__ import annotations

import logging
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Never, Protocol, TypeVar

from anabranch.backoff import Backoff
from anabranch.errors import (
    BatchTooLarge,
    FixCallError,
    MalformedRecord,
    NotAuthorized,
    NotReady,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.ports import (
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
    Clock,
    CorruptBatch,
    Failed,
    Fetched,
    GroupMember,
    Log,
    LogDenied,
    LogError,
    LogRefused,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    TopicPartition,
    UnpacksToMore,
    answered,
)
from anabranch.protocol.limits import READ
from anabranch.topics.names import history_topic, stream_topic

log = logging.getLogger("anabranch.client")

_TELL_EVERY_S = 60.0

T = TypeVar("T")

_ANSWER_S = 5.0  # the longest wait for one answer of a broker
_SLICE_S = 0.5  # a fetch without new records is answered after this time
_BEHIND_S = 0.2  # pause before a broker that lags, or a partition without a leader, is asked again
_MISSING_S = 1.0  # brokers may lag: a topic counts as missing only after this time
_LOOK_S = 0.5  # pause before brokers are asked again for such a topic
_UNKNOWN_S = (
    2.0  # unreachable brokers are tried for this time before a topic counts as missing or replaced
)
_FIRST_PAUSE_S = 0.02  # between tries of a question
_LONGEST_PAUSE_S = 0.5


class Groups(Protocol):
    """Consumer groups as an operator sees them. Deadlines are monotonic seconds. Raises NotAuthorized, NotReady."""

    def names(self, deadline: float) -> list[str]:
        """All groups that this client may see."""

    def state(self, group: str, deadline: float) -> tuple[str, tuple[str, ...]]:
        """A group's state in Kafka's words (stable, empty; dead: there is no such group), and its members."""

    def offsets(self, group: str, deadline: float) -> dict[TopicPartition, int]:
        """All offsets of a group."""

    def move(self, group: str, offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        """Set a group's offsets in one request. Raises `IllegalState` while it has members."""


@dataclass(frozen=True, slots=True)
class ReaderPorts:
    """The ports of a reader.

    ``open_log``: opens a log for one reader; its argument bounds the seconds of one answer. ``member``: joins the
    group with this name, with an optional session timeout in seconds. ``groups``: for operators.
    ``max_event_bytes``: the most bytes that a batch of events may unpack to.
    """

    open_log: Callable[[float], Log]
    member: Callable[..., GroupMember]
    clock: Clock
    groups: Groups | None = None
    max_event_bytes: int = READ

    def committed_log(self, timeout: float) -> CommittedLog:
        """A log for one reader, which closes it. ``timeout``: seconds that a question may take."""
        raw = self.open_log(min(timeout, _ANSWER_S))
        return CommittedLog(raw, self.clock, self.max_event_bytes)


@contextmanager
def client_errors(right: str = "Read") -> Iterator[None]:
    """Convert errors of the log into errors that say what to do. ``right``: the right needed on the topics."""
    try:
        yield
    except LogDenied as error:
        raise NotAuthorized(str(error)) from error
    except LogRefused as error:
        if error.error == UNKNOWN_TOPIC_OR_PARTITION:
            raise UnknownStream(f"{error}: create the stream first") from error
        if error.error == TOPIC_AUTHORIZATION_FAILED:
            topics = ", ".join(sorted(error.topics))
            raise NotAuthorized(f"the right {right} on the topic {topics} is missing") from error
        raise FixCallError(f"the brokers refuse: {error}") from error
    except CorruptBatch as error:
        raise MalformedRecord(str(error)) from error
    except LogError as error:
        raise NotReady(f"the brokers can't be read: {error}") from error


def unreadable(
    place: TopicPartition, batch: RawBatch, error: CorruptBatch, limit: int
) -> BatchTooLarge | MalformedRecord:
    """The error for a batch that can't be decoded. ``limit``: the most bytes that it may unpack to."""
    what = f"{place.topic}[{place.partition}]"
    if not isinstance(error, UnpacksToMore):
        return MalformedRecord(f"{what}: {error}")
    return BatchTooLarge(
        f"{what}: the batch of the offsets {batch.base_offset} to {batch.next_offset - 1} has {len(batch.data):,} "
        f"bytes and unpacks to more than {limit:,}: to read it, set the option max.event.bytes above that size (it "
        f"takes several times as much memory); or begin at offset {batch.next_offset}"
    )


class StreamIds(NamedTuple):
    """The ids of a stream's two topics, empty if not known. The ids tie a position to one stream of that name.

    A stream that is deleted and created again has other ids. So does the stream's copy in another cluster.
    """

    stream: str = ""
    history: str = ""


UNKNOWN_IDS = StreamIds()


class CommittedLog:
    """A reader's `Log` and clock. Deadlines are monotonic seconds of that clock. One thread, except for `close`."""

    def __init__(self, raw: Log, clock: Clock, max_event_bytes: int = READ) -> None:
        self.raw = raw
        self.clock = clock
        self.max_event_bytes = max_event_bytes
        self.trouble = ""  # why the last fetch brought nothing, if the brokers gave a reason
        self.closed = False
        self.is_gone = False
        self._ids: dict[str, str] = {}  # topic -> its id at the first read
        self._missing: dict[str, float] = {}  # topic -> since when it seems to be missing
        # Topic -> since when a broker reports another id for its name.
        self._doubted: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # topic -> when brokers were last asked for it
        # By `wait_for`: its answers, with the positions asked for, and positions without new records.
        self._ahead: dict[TopicPartition, tuple[int, Fetched]] = {}
        self._idle: dict[TopicPartition, int] = {}

    def close(self) -> None:
        """Close all connections. Another thread may call it: then a call under way ends soon."""
        self.closed = True
        self.raw.close()

    def _check_open(self) -> None:
        if self.closed:
            raise NotReady("the reader is closed")

    # -- records --------------------------------------------------------------------------------------

    def fetch(
        self, place: TopicPartition, position: int, deadline: float, max_bytes: int
    ) -> Fetched | None:
        """Committed batches from a position on; None if nothing came by the deadline, or within half a second.

        Raises: SnapshotExpired (retention has removed the position), NotAuthorized, FixCallError, MalformedRecord.
        """
        self._check_open()
        left = max(0.0, deadline - self.clock.monotonic())
        self.trouble = ""
        ahead = self.take_ahead({place: position})
        if ahead:
            return ahead[place]
        if not left and self._idle.pop(place, None) == position:
            return None  # `wait_for` has just found nothing here
        try:
            found = answered(
                lambda failed: self.raw.fetch(
                    {place: position},
                    max_wait=min(left, _SLICE_S),
                    max_bytes=max_bytes,
                    committed=True,
                    failed=failed,
                )
            )
            self.check_read(found, (place,))
            return found.get(place)
        except LogError as error:
            self._unread(place.topic, error, left)
            return None

    def expect(self, stream: str, ids: StreamIds) -> None:
        """Accept only these topics of a stream: reading other topics of the same names raises `UnknownStream`."""
        topics = zip(_read_topics(stream), ids, strict=True)
        self._ids |= {topic: topic_id for topic, topic_id in topics if topic_id}

    def check_read(
        self, found: Iterable[TopicPartition], asked: Iterable[TopicPartition] = ()
    ) -> None:
        """Raise `UnknownStream` if a topic that was just read is not the earlier, or not the expected topic.

        ``found``: what was read; if nothing was read, ``asked`` is checked. Raises `LogUnavailable` while brokers
        disagree, because one of the brokers may have old metadata.
        """
        topics = {topic for topic, _ in found}
        for topic in topics or {topic for topic, _ in asked if topic in self._ids}:
            known = self.raw.id_read(topic)
            if known and self._ids.setdefault(topic, known) != known:
                self._replaced(topic, known)
            if self._doubted:
                self._doubted.pop(topic, None)
        if self._missing:
            for topic in topics:
                self._missing.pop(topic, None)

    def _replaced(self, topic: str, topic_id: str) -> Never:
        """Raise the error of `check_read` for a topic that a broker reports with another id."""
        since = self._doubted.setdefault(topic, self.clock.monotonic())
        if self._is_agreed(topic, topic_id, since + _UNKNOWN_S):
            raise self.gone(
                f"{topic} was deleted, and is another one now: positions in the former one mean nothing in it; "
                "open a new reader, or take a new snapshot, and start again"
            )
        self.raw.topic_ids([topic])  # the next answer may come from another broker
        raise _unsure(topic)

    def _is_agreed(self, topic: str, topic_id: str, until: float) -> bool:
        """Whether all brokers report this id of the topic. From ``until`` on, unreachable brokers are left out."""
        try:
            return self.raw.is_agreed(topic, topic_id)
        except LogUnavailable as error:
            if isinstance(error, LogDenied) or self.clock.monotonic() < until:
                raise
            return True

    def may_pass(self, topic: str, error: LogError) -> bool:
        """Whether a fetch error is transient. Raises `UnknownStream` if the topic was missing for a while."""
        unknown = isinstance(error, LogRefused) and error.error == UNKNOWN_TOPIC_OR_PARTITION
        if not (unknown or isinstance(error, LogUnavailable)) or isinstance(error, LogDenied):
            return False
        now = self.clock.monotonic()
        if not topic or now - self._asked.get(topic, -_LOOK_S) < _LOOK_S:
            return True  # no broker answered, or the error belongs to another partition
        self._asked[topic] = now
        try:
            known = self.raw.is_known(topic)
        except LogUnavailable as unavailable:
            log.info("reading: %s", unavailable)
            return True
        if known:
            self._missing.pop(topic, None)
        elif now - self._missing.setdefault(topic, now) >= _MISSING_S:
            raise self.gone(f"{topic} is not there any more: the stream was deleted, or is lost")
        return True

    def gone(self, why: str) -> UnknownStream:
        """The error for a topic that was deleted. From now on the log `is_gone`: commit no more positions."""
        self.is_gone = True
        return UnknownStream(why)

    def wait_for(
        self, positions: Mapping[TopicPartition, int], deadline: float, max_bytes: int = 1
    ) -> bool:
        """Wait until one of these partitions has records from its position on. Returns whether a partition has.

        The wait may end a little early. The answer is kept, up to ``max_bytes`` and a batch. The next `fetch` from
        that position returns the answer, so that one request brings a commit's history and its events. Partitions
        with a kept answer are not waited for.
        """
        self._check_open()
        left = max(0.0, deadline - self.clock.monotonic())
        self._ahead = {p: kept for p, kept in self._ahead.items() if positions.get(p) == kept[0]}
        asked = {place: at for place, at in positions.items() if place not in self._ahead}
        self._idle = {}
        failed: dict[TopicPartition, LogError] = {}
        topic = ""
        try:
            found = self.raw.fetch(
                asked,
                max_wait=min(left, _SLICE_S),
                max_bytes=max_bytes,
                committed=True,
                failed=failed,
            )
            self.check_read(found, asked)
            if failed and not found:
                (topic, _), error = next(iter(failed.items()))
                raise error
        except LogError as error:
            self._unread(topic, error, left)
            return False
        self._ahead |= {place: (asked[place], fetched) for place, fetched in found.items()}
        self._idle = {p: at for p, at in asked.items() if p not in found and p not in failed}
        return bool(found)

    def take_ahead(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Fetched]:
        """The kept answers of `wait_for` from exactly these positions; each is returned once."""
        found = {}
        for place, position in positions.items():
            if place in self._ahead and self._ahead[place][0] == position:
                found[place] = self._ahead.pop(place)[1]
        return found

    def _unread(self, topic: str, error: LogError, left: float) -> None:
        """Wait a little after a transient error, for at most ``left`` seconds. Raises other errors."""
        with client_errors():
            if isinstance(error, OffsetOutOfRange):
                try:
                    start = self.raw.start_offsets([error.partition])[error.partition]
                    self.check_read((error.partition,))
                except LogUnavailable as unavailable:
                    error = unavailable
                else:
                    if error.position < start:
                        raise expired(str(error)) from error
            # An offset that is too high: its broker lags, or the requested range ends too high.
            if not isinstance(error, OffsetOutOfRange) and not self.may_pass(topic, error):
                raise error
        self.trouble = str(error)
        if self.closed:
            return
        log.info("reading: %s", error)
        self.clock.sleep(min(left, _BEHIND_S))

    # -- questions ------------------------------------------------------------------------------------

    def partition_counts(
        self, topics: Sequence[str], deadline: float, patience: float = _UNKNOWN_S
    ) -> dict[str, int]:
        """The number of partitions of each of these topics, without topics that don't exist.

        ``patience``: seconds in which unreachable brokers are tried again before a topic that no other broker knows
        counts as missing. 0: one broker's answer is enough.
        """
        return self._all(topics, deadline, lambda: self.raw.partition_counts(topics), patience)

    def topic_ids(
        self, topics: Sequence[str], deadline: float, *, agreed: bool = False
    ) -> dict[str, str]:
        """The ids of these topics, without topics that don't exist; empty if brokers have no ids.

        ``agreed``: all reachable brokers have to agree, because a broker may still report former ids.
        """
        until = self.clock.monotonic() + _UNKNOWN_S

        def question() -> dict[str, str]:
            found = self.raw.topic_ids(topics)
            for topic, topic_id in found.items():
                if agreed and topic_id and not self._is_agreed(topic, topic_id, until):
                    raise _unsure(topic)
            return found

        return self._all(topics, deadline, question, _UNKNOWN_S)

    def _all(
        self,
        topics: Sequence[str],
        deadline: float,
        question: Callable[[], dict[str, T]],
        patience: float,
    ) -> dict[str, T]:
        """One broker's answer. If the answer lacks a topic that some broker knows, another broker is asked."""
        until = self.clock.monotonic() + patience

        def known(topic: str) -> bool:
            try:
                return self.raw.is_known(topic)
            except LogUnavailable as error:
                if isinstance(error, LogDenied) or self.clock.monotonic() < until:
                    raise
                return False

        def asked(_: Failed) -> dict[str, T]:
            found = question()
            for topic in topics if patience else ():
                if topic not in found and known(topic):
                    raise LogUnavailable(f"the broker asked does not know {topic} (yet)", (topic,))
            return found

        return self._ask(deadline, asked)

    def start_offsets(
        self, places: Iterable[TopicPartition], deadline: float
    ) -> dict[TopicPartition, int]:
        """The first offsets that are not deleted."""
        asked = list(places)
        return self._ask(
            deadline, lambda failed: self._same(self.raw.start_offsets(asked, failed=failed))
        )

    def end_offsets(
        self, places: Iterable[TopicPartition], deadline: float, *, committed: bool = False
    ) -> dict[TopicPartition, int]:
        """The high watermarks: all earlier commits are below them. ``committed``: the last stable offsets.

        All records below a last stable offset are decided. But the offset may be too low: an isolated former leader
        may report it.
        """
        asked = list(places)
        return self._ask(
            deadline,
            lambda failed: self._same(
                self.raw.end_offsets(asked, committed=committed, failed=failed, sure=not committed)
            ),
        )

    def offset_for_time(self, place: TopicPartition, unix_ms: int, deadline: float) -> int | None:
        """The first offset at or after a millisecond; None if there is no such record."""
        found = self._ask(
            deadline, lambda _: self._same(self.raw.offsets_for_time([place], unix_ms))
        )
        return found[place]

    def _same(self, answer: dict[TopicPartition, T]) -> dict[TopicPartition, T]:
        """The answer, after `check_read`."""
        self.check_read((), answer)
        return answer

    def _ask(self, deadline: float, question: Callable[[Failed], T]) -> T:
        """Ask until there is an answer, because leaders may be moving. Raises `NotReady` at the deadline."""
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self.clock)
        with client_errors("Describe"):
            while True:
                self._check_open()
                try:
                    return answered(question)
                except LogUnavailable as error:
                    if isinstance(error, LogDenied) or not pauses.sleep(deadline):
                        raise


def _unsure(topic: str) -> LogUnavailable:
    return LogUnavailable(f"brokers don't agree which topic {topic} is", (topic,))


def expired(what: str) -> SnapshotExpired:
    """The error for an offset that retention has removed."""
    return SnapshotExpired(f"{what}: retention has removed it; read what is newer, or keep more")


def partitions_of(source: CommittedLog, streams: Sequence[str], deadline: float) -> dict[str, int]:
    """Topic -> number of partitions of each stream. Raises `UnknownStream`."""
    counts = source.partition_counts([stream_topic(stream) for stream in streams], deadline)
    _check_there({stream: stream_topic(stream) for stream in streams}, counts)
    return counts


def places_of(
    source: CommittedLog, stream: str, deadline: float, least: int = 0
) -> list[TopicPartition]:
    """All partitions of a stream, at least this many. Raises `UnknownStream`."""
    topic = stream_topic(stream)
    count = partitions_of(source, [stream], deadline)[topic]
    return [TopicPartition(topic, partition) for partition in range(max(count, least))]


def first_offsets(
    source: CommittedLog, stream: str, deadline: float, least: int = 0
) -> dict[int, int]:
    """Partition -> its first offset that is not deleted, for all partitions of a stream. `UnknownStream`.

    ``least``: the number of partitions that there are, if a broker does not know all of them yet.
    """
    found = source.start_offsets(places_of(source, stream, deadline, least), deadline)
    return {place.partition: offset for place, offset in found.items()}


def ids_of(
    source: CommittedLog, streams: Sequence[str], deadline: float, *, agreed: bool = False
) -> dict[str, StreamIds]:
    """Stream -> the ids of its topics. ``agreed``: as for `CommittedLog.topic_ids`. Raises `UnknownStream`."""
    topics = {stream: _read_topics(stream) for stream in streams}
    names = [topic for both in topics.values() for topic in both]
    ids = source.topic_ids(names, deadline, agreed=agreed)
    for both in zip(*topics.values(), strict=True):
        _check_there(dict(zip(topics, both, strict=True)), ids)
    return {stream: StreamIds(*(ids[topic] for topic in both)) for stream, both in topics.items()}


def _read_topics(stream: str) -> tuple[str, str]:
    """The topics that readers read, in the order of `StreamIds`."""
    return stream_topic(stream), history_topic(stream)


def _check_there(topics: Mapping[str, str], found: Container[str]) -> None:
    for stream, topic in topics.items():
        if topic not in found:
            raise UnknownStream(f"there is no stream {stream!r}: create it first")


class Foreign:
    """Counts records in a stream's topic that no controller wrote; readers skip them."""

    def __init__(self, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._next = 0.0
        self.records = 0

    def count_skipped(self, partition: int, offset: int, records: int) -> None:
        """Count skipped records from this offset on. The count is logged once a minute."""
        self.records += records
        now = self._clock.monotonic()
        if now >= self._next:
            self._next = now + _TELL_EVERY_S
            log.warning(
                "%s[%d] has records of others at offset %d, %d so far: they are left out; let only controllers "
                "write there",
                self._topic,
                partition,
                offset,
                self.records,
            )
