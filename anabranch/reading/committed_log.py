"""The log as readers see it: what is committed, questions that last until a deadline, errors of the client."""

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
from anabranch.core.limits import READ
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
from anabranch.topics.names import history_topic, stream_topic

log = logging.getLogger("anabranch.client")

_TELL_EVERY_S = 60.0

T = TypeVar("T")

_ANSWER_S = 5.0  # the longest that one answer of a broker is waited for
_SLICE_S = 0.5  # an answer without news comes after so long
_BEHIND_S = 0.2  # before a broker that is behind, or has no leader, is asked again
_MISSING_S = 1.0  # brokers may be behind: so long none of them need know a topic
_LOOK_S = 0.5  # after so long they are asked again who knows it
_UNKNOWN_S = 2.0  # so long a broker that can't be asked may know a topic that no other one knows
_FIRST_PAUSE_S = 0.02  # between tries of a question
_LONGEST_PAUSE_S = 0.5


class Groups(Protocol):
    """Consumer groups as an operator sees them. `NotAuthorized`, `NotReady`; deadlines are monotonic seconds."""

    def names(self, deadline: float) -> list[str]:
        """All groups that this client may see."""

    def state(self, group: str, deadline: float) -> tuple[str, tuple[str, ...]]:
        """A group's state in Kafka's words, such as stable, empty or (it is not there) dead; its members."""

    def offsets(self, group: str, deadline: float) -> dict[TopicPartition, int]:
        """All its offsets."""

    def move(self, group: str, offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        """Set offsets in one request. `IllegalState` while members are in it."""


@dataclass(frozen=True, slots=True)
class ReaderPorts:
    """The ports of a reader.

    ``open_log``: makes a log of the reader's own, of which one answer takes at most so many seconds. ``member``:
    makes a member of the group with this name; a session's seconds may be given, too. ``groups``: for operators.
    ``max_event_bytes``: the most bytes that a batch of events may unpack to.
    """

    open_log: Callable[[float], Log]
    member: Callable[..., GroupMember]
    clock: Clock
    groups: Groups | None = None
    max_event_bytes: int = READ

    def committed_log(self, timeout: float) -> CommittedLog:
        """A log of the reader's own; the reader closes it. ``timeout``: seconds that a question may take."""
        raw = self.open_log(min(timeout, _ANSWER_S))
        return CommittedLog(raw, self.clock, self.max_event_bytes)


@contextmanager
def client_errors(right: str = "Read") -> Iterator[None]:
    """Errors of the log, raised again as those that say what to do. ``right``: what is needed on the topics."""
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
    """The error for a batch that can't be decoded. ``limit``: the bytes that it may unpack to."""
    what = f"{place.topic}[{place.partition}]"
    if not isinstance(error, UnpacksToMore):
        return MalformedRecord(f"{what}: {error}")
    return BatchTooLarge(
        f"{what}: the batch of the offsets {batch.base_offset} to {batch.next_offset - 1} has {len(batch.data):,} "
        f"bytes and unpacks to more than {limit:,}: to read it, set the option max.event.bytes above that size (it "
        f"takes several times as much memory); or begin at offset {batch.next_offset}"
    )


class StreamIds(NamedTuple):
    """The ids of two topics of a stream, which say which stream of a name a position belongs to. Empty: not known.

    A stream that is deleted and made again has other ids, and so has its copy in another cluster.
    """

    stream: str = ""
    history: str = ""


UNKNOWN_IDS = StreamIds()


class CommittedLog:
    """A `Log` and a clock, for one thread. Deadlines are monotonic seconds of that clock."""

    def __init__(self, raw: Log, clock: Clock, max_event_bytes: int = READ) -> None:
        self.raw = raw
        self.clock = clock
        self.max_event_bytes = max_event_bytes
        self.trouble = ""  # why the last fetch brought nothing, if the brokers said so
        self.closed = False
        self.is_gone = False
        self._ids: dict[str, str] = {}  # of topics, as they were read first
        self._missing: dict[str, float] = {}  # topic -> since when no broker knows it
        self._doubted: dict[
            str, float
        ] = {}  # topic -> since when a broker knows another one of its name
        self._asked: dict[str, float] = {}  # topic -> when brokers were asked for it
        # The answers of `wait_for`, with the positions that were asked for, and places without news.
        self._ahead: dict[TopicPartition, tuple[int, Fetched]] = {}
        self._idle: dict[TopicPartition, int] = {}

    def close(self) -> None:
        """Close all connections, perhaps from another thread; a call under way ends soon."""
        self.closed = True
        self.raw.close()

    def _check_open(self) -> None:
        if self.closed:
            raise NotReady("the reader is closed")

    # -- records --------------------------------------------------------------------------------------

    def fetch(
        self, place: TopicPartition, position: int, deadline: float, max_bytes: int
    ) -> Fetched | None:
        """Committed batches from a position on; None: nothing came until the deadline, or for half a second.

        Raises: SnapshotExpired (retention has removed the position), NotAuthorized, FixCallError, MalformedRecord.
        """
        self._check_open()
        left = max(0.0, deadline - self.clock.monotonic())
        self.trouble = ""
        ahead = self.take_ahead({place: position})
        if ahead:
            return ahead[place]
        if not left and self._idle.pop(place, None) == position:
            return None  # brokers have just said so
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
        """Accept only these topics of a stream, those of a position; others of their names: `UnknownStream`."""
        topics = zip(_read_topics(stream), ids, strict=True)
        self._ids |= {topic: topic_id for topic, topic_id in topics if topic_id}

    def check_read(
        self, found: Iterable[TopicPartition], asked: Iterable[TopicPartition] = ()
    ) -> None:
        """Raise `UnknownStream` if a topic that was just read is a new one, not the one that was read before.

        ``found``: what was read; if nothing was, ``asked`` is checked. Raises `LogUnavailable` if brokers don't
        agree: one may have old metadata.
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
        """Raise what `check_read` says, as a broker has another topic of the name."""
        since = self._doubted.setdefault(topic, self.clock.monotonic())
        if self._is_agreed(topic, topic_id, since + _UNKNOWN_S):
            raise self.gone(
                f"{topic} was deleted, and is another one now: positions in the former one mean nothing in it; "
                "open a new reader, or take a new snapshot, and start again"
            )
        self.raw.topic_ids([topic])  # perhaps another broker answers this
        raise _unsure(topic)

    def _is_agreed(self, topic: str, topic_id: str, until: float) -> bool:
        """Whether all brokers know the topic by this id; from ``until`` on, all brokers that can be asked."""
        try:
            return self.raw.is_agreed(topic, topic_id)
        except LogUnavailable as error:
            if isinstance(error, LogDenied) or self.clock.monotonic() < until:
                raise
            return True

    def may_pass(self, topic: str, error: LogError) -> bool:
        """Whether what a fetch met passes by waiting. `UnknownStream` if no broker knows the topic for a while."""
        unknown = isinstance(error, LogRefused) and error.error == UNKNOWN_TOPIC_OR_PARTITION
        if not (unknown or isinstance(error, LogUnavailable)) or isinstance(error, LogDenied):
            return False
        now = self.clock.monotonic()
        if not topic or now - self._asked.get(topic, -_LOOK_S) < _LOOK_S:
            return True  # no broker answered; or it was asked for another partition
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
        """The error for a topic that was deleted. From now on `is_gone`: positions there mean nothing more."""
        self.is_gone = True
        return UnknownStream(why)

    def wait_for(
        self, positions: Mapping[TopicPartition, int], deadline: float, max_bytes: int = 1
    ) -> bool:
        """Wait until one of these partitions has something from its position on, or a bit less. Whether one has.

        The answer is kept, up to ``max_bytes`` and a batch, and the next `fetch` from there gives it: so one
        question brings a commit's history and its events. A partition of which something is kept is not waited for.
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
        """Answers of `wait_for` from exactly these positions; each is given once."""
        found = {}
        for place, position in positions.items():
            if place in self._ahead and self._ahead[place][0] == position:
                found[place] = self._ahead.pop(place)[1]
        return found

    def _unread(self, topic: str, error: LogError, left: float) -> None:
        """Wait a little after what may pass, for at most ``left`` seconds. Raises what does not."""
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
            # Else its broker is behind, or the range ends too high.
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
        """How many partitions each of these topics has; those that don't exist are left out.

        ``patience``: seconds for which brokers are asked again that can't be asked, before a topic counts as
        missing that no other one knows. 0: one broker's word is enough.
        """
        return self._all(topics, deadline, lambda: self.raw.partition_counts(topics), patience)

    def topic_ids(
        self, topics: Sequence[str], deadline: float, *, agreed: bool = False
    ) -> dict[str, str]:
        """The ids of these topics, empty if brokers have none; those that don't exist are left out.

        ``agreed``: all brokers that can be asked have to agree; one of them may still report former ids.
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
        """One broker's answer; another one is asked if it lacks a topic that some broker knows."""
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
        """The first offsets that are still there."""
        asked = list(places)
        return self._ask(
            deadline, lambda failed: self._same(self.raw.start_offsets(asked, failed=failed))
        )

    def end_offsets(
        self, places: Iterable[TopicPartition], deadline: float, *, committed: bool = False
    ) -> dict[TopicPartition, int]:
        """The high watermarks, which prove that all is read; ``committed``: the last stable offsets, which do not.

        Up to these all is decided; an old leader that is cut off may tell them.
        """
        asked = list(places)
        return self._ask(
            deadline,
            lambda failed: self._same(
                self.raw.end_offsets(asked, committed=committed, failed=failed, sure=not committed)
            ),
        )

    def offset_for_time(self, place: TopicPartition, unix_ms: int, deadline: float) -> int | None:
        """The first offset at or after a millisecond, None if there is none."""
        found = self._ask(
            deadline, lambda _: self._same(self.raw.offsets_for_time([place], unix_ms))
        )
        return found[place]

    def _same(self, answer: dict[TopicPartition, T]) -> dict[TopicPartition, T]:
        """The answer, if it is about the topics that were read before or are expected. Raises: as `check_read`."""
        self.check_read((), answer)
        return answer

    def _ask(self, deadline: float, question: Callable[[Failed], T]) -> T:
        """Ask until there is an answer: leaders may be moving. `NotReady` at the deadline; `NotAuthorized`."""
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
    """The error for an offset that is not there any more."""
    return SnapshotExpired(f"{what}: retention has removed it; read what is newer, or keep more")


def partitions_of(source: CommittedLog, streams: Sequence[str], deadline: float) -> dict[str, int]:
    """Topic -> number of partitions of each stream. `UnknownStream`."""
    counts = source.partition_counts([stream_topic(stream) for stream in streams], deadline)
    _check_there({stream: stream_topic(stream) for stream in streams}, counts)
    return counts


def ids_of(
    source: CommittedLog, streams: Sequence[str], deadline: float, *, agreed: bool = False
) -> dict[str, StreamIds]:
    """Stream -> the ids of its topics; ``agreed``: as of `CommittedLog.topic_ids`. `UnknownStream`."""
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
    """Counts records in a stream's topic that no controller put there; readers leave them out."""

    def __init__(self, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._next = 0.0
        self.records = 0

    def passed_over(self, partition: int, offset: int, records: int) -> None:
        """So many, from this offset on. The log tells of it once a minute."""
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
