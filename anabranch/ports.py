"""The ports: protocols for all I/O of a controller or a client, with their errors.

Every port has two implementations: the real one (Kafka, RocksDB, the machine's clock), and an in-memory one with
which the simulator runs whole clusters in one thread from one seed. One contract suite tests both. Implementations
make no decisions, and callers do no other I/O. Calls block; in-memory ones hand over to the simulator's scheduler,
which may end the process in the middle of a call. Record batches are raw RecordBatch v2 bytes (KIP-98) in both.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from anabranch.errors import AnabranchError, NotReady

Entropy: TypeAlias = Callable[[int], bytes]  # returns as many random bytes as it is asked for
Failed: TypeAlias = "MutableMapping[TopicPartition, LogError]"  # a call adds each partition's error
T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # a call in steps, with its result


def all_steps(steps: Steps[T]) -> T:
    """Take all steps of a call, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class RawBatch(NamedTuple):
    """One RecordBatch v2 as it is in the log, CRC checked.

    ``data`` is the whole batch with its header (`anabranch.batches.format`); ``next_offset`` its last offset + 1.
    """

    base_offset: int
    next_offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch of one partition.

    ``batches`` hold data: no control batches, none below the requested offset, and none of an aborted native
    transaction if the fetch was read_committed. ``next_offset``: where to fetch next, after batches that are left
    out.
    """

    batches: Sequence[RawBatch]
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create. ``config``: topic-level settings, with Kafka's names."""

    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)
    replication_factor: int = -1


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it is, with its effective settings: defaults of the broker included."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    topic_id: str = ""  # differs once a topic is replaced
    leaderless: tuple[int, ...] = ()  # partitions without a leader now
    in_sync: int = -1  # the least number of in-sync replicas of any partition; -1: not known


class Clock(Protocol):
    """The clock. Wall time may jump; monotonic time doesn't."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait; other processes continue."""


class Producer(Protocol):
    """An initialised producer with a transactional id. After an error that `append` does not name, don't use it."""

    def append(self, batches: Sequence[tuple[TopicPartition, bytes | memoryview]]) -> list[int]:
        """Append batches inside the current native transaction, which begins by itself.

        ``batches``: (partition, RecordBatch v2 bytes with any base offset), appended to a partition in this order.
        Producer id, epoch, sequence, the transactional bit and the CRC are set here. Returns the base offsets, in
        the same order.

        `LogRefused`: the broker refuses the content, or a control batch or one with gaps in its offsets was given.
        `LogUnavailable`: a partition can't be reached; a request on its way is harmless once the abort is done.
        After these, abort the native transaction; the producer can then be used again.
        """
        return all_steps(self.appending(batches))

    def appending(
        self, batches: Sequence[tuple[TopicPartition, bytes | memoryview]]
    ) -> Steps[list[int]]:
        """Do the same as `append` in steps: each sends a request, and the next one waits for the answer.

        Take all steps before any other call; in between, only `is_answered` may be called.
        """

    def append_stream(
        self, batches: Iterable[tuple[TopicPartition, bytes | memoryview]]
    ) -> list[int]:
        """Like `append`, for long lists: a batch is made while those before it are sent."""

    def commit(self) -> None:
        """Commit the native transaction: all that was appended in it becomes visible at once.

        If nothing was appended, no request is sent. `LogUncertain`: the commit may or may not have happened.
        """
        all_steps(self.committing())

    def committing(self) -> Steps[None]:
        """Do the same as `commit` in steps, as `appending` does."""

    def is_answered(self) -> bool:
        """Whether the answer to the last step's request has arrived, so that the next step need not wait for it."""

    def abort(self) -> None:
        """End the native transaction without effect."""

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """End former native transactions of this id that are open in these partitions because a marker was lost.

        Call it outside a native transaction. `append` does the same for partitions where markers may be lost.
        `LogUnavailable`: how such a transaction ended is not known any more, or a partition can't be reached.
        """

    def close(self) -> None:
        """Close connections. An open native transaction is ended by the broker's timeout or by fencing."""


class Log(Protocol):
    """The brokers' topics and records. All errors derive from `LogError`."""

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: Failed | None = None,
    ) -> dict[TopicPartition, Fetched]:
        """Fetch from several partitions at once. Returns as soon as any of them has new records.

        ``failed``: gets the error of each partition that can't be read now; other partitions are read without
        waiting for it. Without ``failed``, the call waits for leaders, and raises the first such error.
        ``max_wait``: seconds; 0: don't wait. ``max_bytes``: about the size of the result; a bigger single batch is
        returned all the same.
        ``committed``: True for read_committed. Partitions without new records may be missing from the result. The
        batch that contains the position is returned whole. `OffsetOutOfRange`: the position is below the log's
        start, or beyond its end.
        """

    def end_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        committed: bool,
        failed: Failed | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        """High watermarks. ``committed``: last stable offsets instead. ``failed``: as in `fetch`.

        ``sure``: make sure that no former leader of a partition answers.
        """

    def start_offsets(
        self, partitions: Iterable[TopicPartition], *, failed: Failed | None = None
    ) -> dict[TopicPartition, int]:
        """Log start offsets. ``failed``: as in `fetch`."""

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        """By partition, the first offset with a timestamp of ``timestamp_ms`` or later, or None."""

    def producer(self, transactional_id: str, *, timeout: float) -> Producer:
        """Initialise a transactional id. This fences every former producer of the id.

        An open native transaction of a former producer is aborted first. ``timeout``: the broker's limit for one
        native transaction, in seconds.

        `LogBusy`: the markers of the id's last native transaction can't be written.
        """

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        """Append batches outside of native transactions, without waiting. Some may get lost, or be appended twice.

        ``failed``: gets errors, including errors of earlier batches. Returns whether to call again soon, even
        without new batches.
        """

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete all records below these offsets. An offset at or below the log's start changes nothing.

        `LogRefused` with `OFFSET_OUT_OF_RANGE`: an offset is beyond the high watermark.
        """

    def create_topics(self, specs: Sequence[TopicSpec]) -> dict[str, str]:
        """Create topics; existing ones are not changed. Returns the ids of new ones (empty if brokers have no ids).

        If a `LogError` is raised, its ``made`` has the topics that were created all the same. New topics may have
        no leaders yet.
        """

    def delete_topics(self, topics: Sequence[TopicInfo]) -> None:
        """Delete these topics; missing ones are fine. If brokers have ids, new topics of the same names stay.

        Brokers may still know the topics for a while. `LogRefused`: the brokers don't delete them.
        """

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Grow a topic to ``partitions``. A topic that has as many or more is not changed.

        Returns when all partitions have leaders and can be used. Safe to repeat, and to call from several processes
        at once. `LogRefused` with `UNKNOWN_TOPIC_OR_PARTITION`: there is no such topic.
        """

    def alter_topics(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        """Change settings of topics. None: to the brokers' default. `LogRefused`: usually nothing was changed."""

    def replicas_of_new(self, topic: str, factor: int = -1) -> int | None:
        """The number of replicas of a new topic that is created with this replication factor (-1: the default).

        ``topic``: the name of that topic, or of a similar topic. None: this client may not ask. 0: brokers don't
        report the number.
        `LogRefused`: the brokers don't create topics with this factor.
        """

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """The existing topics of these names, as one broker knows them. Its metadata may lag."""

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        """The numbers of partitions of existing topics, as `describe_topics`. Needs the right Describe alone."""

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """The ids of existing topics, as `describe_topics`; empty if brokers have no ids."""

    def is_known(self, topic: str) -> bool:
        """Whether any broker knows the topic. Needs Describe alone. `LogUnavailable`: a broker can't be asked."""

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        """Whether every broker knows the topic, by this id if brokers have ids. `LogUnavailable`: as `is_known`."""

    def id_read(self, topic: str) -> str:
        """The topic's id in the last `fetch`; empty: not known. No request is made."""

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        """Whether the topic surely does not exist, has fewer partitions, or has another id than ``topic_id``.

        The first two are answered by the brokers' quorum, with a dry run of a creation or growth. The id, if
        ``topic_id`` is not empty, is asked of every broker; brokers that don't answer soon are left out.
        """

    def close(self) -> None:
        """Close all connections."""


# Codes by which a broker refuses, as `LogRefused` has them (``org.apache.kafka.common.protocol.Errors``).
OFFSET_OUT_OF_RANGE = 1
CORRUPT_MESSAGE = 2
UNKNOWN_TOPIC_OR_PARTITION = 3
MESSAGE_TOO_LARGE = 10
NOT_ENOUGH_REPLICAS = 19
TOPIC_AUTHORIZATION_FAILED = 29
INVALID_TIMESTAMP = 32
UNSUPPORTED_COMPRESSION_TYPE = 76
INVALID_RECORD = 87
# Codes for a missing right: on a topic, a group, the cluster, a transactional id.
NOT_AUTHORIZED = frozenset((TOPIC_AUTHORIZATION_FAILED, 30, 31, 53))


class LogError(Exception):
    """A call of `Log` or `Producer` failed. ``topics``: the topics for which it failed; empty if not known."""

    made: Mapping[str, str] = MappingProxyType({})  # topics that the call created, and their ids

    def __init__(self, message: str, topics: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.topics = frozenset(topics)

    __reduce__ = AnabranchError.__reduce__


class LogUnavailable(LogError):
    """The brokers can't be reached, or a partition has no leader now; nothing is known to have happened."""


class LogDenied(LogUnavailable):
    """The brokers refuse this client's identity. Each call raises it at once, until an operator changes that."""


class LogBusy(LogUnavailable):
    """The markers of a transactional id's last native transaction are not written; nothing was appended."""


class LogUncertain(LogError):
    """The answer was lost: the append or commit may have happened. Drop unlogged state and become leader again."""


class LogFenced(LogError):
    """Another process initialised this transactional id, so this one is not leader any more."""


class LogRefused(LogError):
    """The broker refused a request: too large, too old a timestamp, … ``error``: the broker's code."""

    to_do = ""  # what an operator should do about it, if known

    def __init__(self, message: str, error: int, topics: Iterable[str] = ()) -> None:
        super().__init__(message, topics)
        self.error = error

    @property
    def forbidden(self) -> bool:
        """Whether a right is missing."""
        return self.error in NOT_AUTHORIZED


class TopicGone(LogRefused):
    """A topic, or a partition of it, does not exist, or was replaced. Nothing happened.

    ``lost``: its records are known to be gone; otherwise the topic may still be found. ``certain``: known from an
    append that all in-sync replicas acknowledged, not from reads alone.
    """

    def __init__(
        self, message: str, topic: str, *, lost: bool = False, certain: bool = False
    ) -> None:
        super().__init__(message, UNKNOWN_TOPIC_OR_PARTITION, (topic,))
        self.topic, self.lost, self.certain = topic, lost, certain

    @classmethod
    def replaced(cls, place: TopicPartition, end: int, known: int, *, certain: bool) -> TopicGone:
        """The error for a partition that ends before records known to be in it: its topic was replaced."""
        return cls(
            f"{place.topic}[{place.partition}] ends at {end} and was known up to {known}: it was replaced",
            place.topic,
            lost=True,
            certain=certain,
        )


class RecordsGone(LogRefused):
    """Journal records that a merge needs were deleted for good. Other merges are not affected."""

    def __init__(self, why: object) -> None:
        super().__init__(f"its journal records are gone: {why}", OFFSET_OUT_OF_RANGE)


class OffsetOutOfRange(LogError):
    """The requested position is not in the log (any more)."""

    def __init__(self, partition: TopicPartition, position: int) -> None:
        what = f"{partition.topic}[{partition.partition}] has no offset {position}"
        super().__init__(what, (partition.topic,))
        self.partition, self.position = partition, position


class CorruptBatch(LogError):
    """A batch's CRC does not match, its bytes are not a RecordBatch v2, or its records are malformed."""


class UnpacksToMore(CorruptBatch):
    """A batch decompresses to more bytes than its reader allows."""


def answered(question: Callable[[Failed], T]) -> T:
    """Make a call with a ``failed`` mapping, and raise its first error, if any.

    Unlike a call without ``failed``, it does not wait for leaders, so partitions in trouble don't delay others.
    """
    failed: dict[TopicPartition, LogError] = {}
    answer = question(failed)
    for error in failed.values():
        raise error
    return answer


class GroupMember(Protocol):
    """A member of a consumer group: its partitions, and the group's offsets. Only one thread at a time may use it.

    Errors are those of `anabranch.errors`.
    """

    def join(
        self,
        topics: Sequence[str],
        gained: Callable[[list[TopicPartition]], None],
        lost: Callable[[list[TopicPartition], bool], None],
    ) -> None:
        """Join the group. Later calls of `serve` call ``gained`` with all partitions of this member, or ``lost``.

        The second argument of ``lost``: whether offsets can still be committed. Both have to be bound methods; only
        weak references to them are kept.
        """

    def serve(self, wait: float) -> None:
        """Handle events of the group for ``wait`` seconds. Raises: NotAuthorized, FixCallError."""

    def look(self) -> None:
        """Fetch the topics' metadata now: a group assigns new partitions once a member knows them."""

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The group's committed offsets, for partitions that have one. Raises: NotReady, NotAuthorized."""

    def commit(self, offsets: Mapping[TopicPartition, int], *, wait: bool) -> bool:
        """Commit offsets in one request. False, with ``wait`` only: not all were accepted, which is logged."""

    def close(self) -> None:
        """Leave the group and free everything."""

    def leak(self) -> None:
        """Never free anything: for a forked child, whose parent still uses it."""


class Table(Protocol):
    """A sorted table of bytes. All writes are atomic. Errors are `TableError`."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) whose key starts with ``prefix``, in key order, from a stable view.

        ``first``: start at this key. This saves the time of skipping deleted rows before it.
        """

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) whose key is below ``before``, in descending order, from a stable view."""

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put all values, and delete keys whose value is None, atomically."""

    def close(self) -> None:
        """Release the table."""


class TableError(Exception):
    """The table can't be read or written: disk full, or broken. Its folder can be deleted, and is then rebuilt."""


RecordHeaders: TypeAlias = Sequence[tuple[str, bytes | None]]
# Partition, key, value, headers, timestamp in Unix milliseconds (0: now).
JournalRecord: TypeAlias = tuple[int, bytes | None, bytes | None, RecordHeaders, int]


class JournalMissing(NotReady):
    """The brokers say that a journal does not exist (any more): the caller has to ask for its stream's state."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"the brokers know no topic {topic}: call again later")
        self.topic = topic


@dataclass(frozen=True, slots=True)
class Opened:
    """Journal partitions ready for writes. ``first``: for each, an offset not above that of the next record."""

    first: dict[int, int]
    max_event_bytes: int
