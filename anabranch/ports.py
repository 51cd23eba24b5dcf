"""The ports: all calls of a controller or a client to the world outside.

Every port has two makes: the real one (Kafka, RocksDB, the machine's clock) and the in-memory one that runs whole
clusters in one thread under one seed. One contract suite runs over both. Nothing behind a port decides anything;
nothing in front of one does I/O. Calls block; in-memory ones let a scheduler go on, which may stop the process.
Record batches travel as raw RecordBatch v2 bytes (KIP-98) in both makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from anabranch.errors import AnabranchError, NotReady

Entropy: TypeAlias = Callable[[int], bytes]  # a number of random bytes
Failed: TypeAlias = "MutableMapping[TopicPartition, LogError]"  # what could not be done, and why
T = TypeVar("T")


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class RawBatch(NamedTuple):
    """One RecordBatch v2 as it lies in the log, CRC checked.

    ``data`` is the whole batch with its header (`anabranch.batches.format`); ``next_offset`` its last offset + 1.
    """

    base_offset: int
    next_offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch of one partition.

    ``batches`` hold data (no control batches, none below the asked offset, none of an aborted native
    transaction if the fetch was read_committed). ``next_offset``: where to fetch next, behind what was left out.
    """

    batches: Sequence[RawBatch]
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create. ``config`` are topic-level settings as Kafka spells them."""

    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)
    replication_factor: int = -1


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it is: effective settings included (defaults of the broker too)."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    topic_id: str = ""  # tells a replaced topic from the old one
    leaderless: tuple[int, ...] = ()  # partitions without a leader now
    in_sync: int = -1  # replicas in sync of the partition with the fewest; -1: not known


class Clock(Protocol):
    """Time from outside. Wall seconds may jump; monotonic ones don't."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait; other processes go on."""


class Producer(Protocol):
    """One transactional id's producer, initialised. All errors end its use but those that `append` names."""

    def append(self, batches: Sequence[tuple[TopicPartition, bytes | memoryview]]) -> list[int]:
        """Append batches inside the current native transaction (which begins by itself).

        ``batches``: (partition, RecordBatch v2 bytes with any base offset); appended in the order given for each
        partition. Producer id, epoch, sequence, the transactional bit and the CRC are patched in here. Returns the
        base offsets, in the same order.

        `LogRefused`: the broker does not take the content (or a control batch, or one with gaps in its offsets, was
        given). `LogUnavailable`: a partition can't be reached; what is on its way is harmless behind an abort. The
        native transaction has to be aborted, then the producer goes on.
        """

    def append_stream(
        self, batches: Iterable[tuple[TopicPartition, bytes | memoryview]]
    ) -> list[int]:
        """Like `append`, for long lists: making a batch overlaps with sending those before it."""

    def commit(self) -> None:
        """End the native transaction: all appended since the last end becomes visible at once.

        With nothing appended, no request is sent. `LogUncertain`: it may have happened or not.
        """

    def abort(self) -> None:
        """End the native transaction without effect."""

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """End former native transactions of this id there that are open, as brokers lost their markers.

        Call it outside a native transaction. `append` does the same for partitions where markers may be lost.
        `LogUnavailable`: the end of one is not known any more, or the partition can't be reached.
        """

    def close(self) -> None:
        """Free connections. An open native transaction is left to the broker's timeout or to fencing."""


class Log(Protocol):
    """The log. All errors derive from `LogError`."""

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: Failed | None = None,
    ) -> dict[TopicPartition, Fetched]:
        """Fetch from several partitions at once; answers as soon as any has new records.

        ``failed`` takes the error of each partition that can't be read now; the others are read without waiting
        for it. Without ``failed`` the first such error is raised, and leaders are waited for. ``max_wait`` in
        seconds (0: don't wait). ``max_bytes``: of an answer, about; a bigger single batch comes all the same.
        ``committed``: the isolation level. Partitions with nothing new may be missing. A batch around the position
        comes whole. A position below the log's start raises `OffsetOutOfRange`, and so does one beyond its end.
        """

    def end_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        committed: bool,
        failed: Failed | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        """High watermarks; ``committed``: stable offsets; ``sure``: no old leader's; ``failed``: as in `fetch`."""

    def start_offsets(
        self, partitions: Iterable[TopicPartition], *, failed: Failed | None = None
    ) -> dict[TopicPartition, int]:
        """Log start offsets. ``failed``: as in `fetch`."""

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        """The first offset with a timestamp at or above ``timestamp_ms``; None: there is none."""

    def producer(self, transactional_id: str, *, timeout: float) -> Producer:
        """Initialise a transactional id: fences every producer that had it before.

        An ongoing native transaction of the predecessor is aborted first. ``timeout`` in seconds is the
        broker's limit for one native transaction.

        `LogBusy`: the markers of the id's last native transaction can't be written.
        """

    def send(self, batches: Sequence[tuple[TopicPartition, bytes]], failed: Failed) -> bool:
        """Append batches outside of native transactions, without waiting: some may get lost, or come twice.

        ``failed`` takes errors, of earlier batches too. Returns whether to call again soon, if with nothing new.
        """

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete all records below these offsets; one at or below the log's start changes nothing.

        `LogRefused` (1): beyond the high watermark.
        """

    def create_topics(self, specs: Sequence[TopicSpec]) -> dict[str, str]:
        """Create topics; one that exists is left as it is. Returns the ids of new ones, empty if brokers have none.

        A `LogError` has in ``made`` those that were created all the same; they may have no leaders yet.
        """

    def delete_topics(self, topics: Sequence[TopicInfo]) -> None:
        """Delete these very topics, and no new ones of the same names, if brokers know ids; a missing one is fine.

        Brokers may know them for a while after this. `LogRefused`: they don't delete them.
        """

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Grow a topic to ``partitions``; one that has as many or more is left as it is.

        Returns when all are led and served. Safe to repeat, by several at once. `LogRefused` (3): no such topic.
        """

    def alter_topics(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        """Change settings of topics; None: to the brokers' own value. `LogRefused`: as a rule, none is changed."""

    def default_replication_factor(self, topic: str) -> int | None:
        """The replicas of this topic if it is made with a factor of -1.

        None: we are not allowed to know. 0: the brokers don't tell.
        """

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """The topics of these names that exist, as one broker knows them: it may be behind."""

    def partition_counts(self, names: Sequence[str]) -> dict[str, int]:
        """Likewise, but only how many partitions each has: that takes no more right than Describe."""

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Likewise their ids; empty if brokers have none."""

    def is_known(self, topic: str) -> bool:
        """Whether any broker knows the topic: that takes Describe alone. `LogUnavailable`: one can't be asked."""

    def is_agreed(self, topic: str, topic_id: str) -> bool:
        """Whether every broker knows the topic, by that id if it tells ids. `LogUnavailable`: as `is_known`."""

    def id_read(self, topic: str) -> str:
        """The id under which `fetch` read this topic last; empty: none is known. No request is made."""

    def is_gone(self, topic: str, partitions: int, topic_id: str) -> bool:
        """Whether the topic does not exist, or has fewer partitions, by the word of the brokers' quorum.

        Or whether it has another id than ``topic_id`` (if that is known): by the word of every broker. Creation, or
        growth, is asked for as a dry run. Brokers that don't answer soon are not waited for.
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
# … for want of a right: on a topic, a group, the cluster, a transactional id.
NOT_AUTHORIZED = frozenset((TOPIC_AUTHORIZATION_FAILED, 30, 31, 53))


class LogError(Exception):
    """A port call to the log failed. ``topics``: those it failed for, as far as that is known."""

    made: Mapping[str, str] = MappingProxyType({})  # topics that the call created, and their ids

    def __init__(self, message: str, topics: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.topics = frozenset(topics)

    __reduce__ = AnabranchError.__reduce__


class LogUnavailable(LogError):
    """The brokers can't be reached or have no leader right now; nothing is known to have happened."""


class LogDenied(LogUnavailable):
    """The brokers refuse our identity: raised at once, and at each call until an operator changes that."""


class LogBusy(LogUnavailable):
    """The markers of a transactional id's last native transaction are not written; nothing was appended."""


class LogUncertain(LogError):
    """The broker's answer was lost; the append or commit may have happened. Drop unlogged state, lead again."""


class LogFenced(LogError):
    """Another process initialised this transactional id: this one leads no more."""


class LogRefused(LogError):
    """The broker refused a request (too large, too old a timestamp, …): ``error`` is its code."""

    to_do = ""  # what an operator does about it, where that is known

    def __init__(self, message: str, error: int, topics: Iterable[str] = ()) -> None:
        super().__init__(message, topics)
        self.error = error

    @property
    def forbidden(self) -> bool:
        """Whether a right is missing."""
        return self.error in NOT_AUTHORIZED


class TopicGone(LogRefused):
    """A topic, or a partition of it, does not exist, or was replaced. Nothing happened.

    ``lost``: its records are known to be gone; else it may yet be found. ``certain``: known by an append that all
    replicas in sync took, not by reading alone.
    """

    def __init__(
        self, message: str, topic: str, *, lost: bool = False, certain: bool = False
    ) -> None:
        super().__init__(message, UNKNOWN_TOPIC_OR_PARTITION, (topic,))
        self.topic, self.lost, self.certain = topic, lost, certain

    @classmethod
    def replaced(cls, place: TopicPartition, end: int, known: int, *, certain: bool) -> TopicGone:
        """The error for a partition that ends before records known there: another one of the same name."""
        return cls(
            f"{place.topic}[{place.partition}] ends at {end} and was known up to {known}: it was replaced",
            place.topic,
            lost=True,
            certain=certain,
        )


class RecordsGone(LogRefused):
    """Journal records that a merge needs were deleted, for good; other merges are not concerned."""

    def __init__(self, why: object) -> None:
        super().__init__(f"its journal records are gone: {why}", OFFSET_OUT_OF_RANGE)


class OffsetOutOfRange(LogError):
    """The position asked for is not in the log (any more)."""

    def __init__(self, partition: TopicPartition, position: int) -> None:
        what = f"{partition.topic}[{partition.partition}] has no offset {position}"
        super().__init__(what, (partition.topic,))
        self.partition, self.position = partition, position


class CorruptBatch(LogError):
    """A batch's CRC does not match, or its bytes are no RecordBatch v2, or its records are malformed."""


class UnpacksToMore(CorruptBatch):
    """A batch unpacks to more bytes than its reader allows."""


def answered(question: Callable[[Failed], T]) -> T:
    """The answer to a question that puts failures into a mapping. Raises the first of them.

    Such a question does not wait for leaders, so a partition in trouble does not delay the others.
    """
    failed: dict[TopicPartition, LogError] = {}
    answer = question(failed)
    for error in failed.values():
        raise error
    return answer


class GroupMember(Protocol):
    """A member of a consumer group: its part of the partitions, and the group's offsets. One thread at a time.

    Errors are the client's (`anabranch.errors`).
    """

    def join(
        self,
        topics: Sequence[str],
        gained: Callable[[list[TopicPartition]], None],
        lost: Callable[[list[TopicPartition], bool], None],
    ) -> None:
        """Join the group. Later calls of `serve` call back with all partitions of this member, and when all go.

        ``lost`` is told whether offsets can still be committed. Both are bound methods, and are held weakly.
        """

    def serve(self, wait: float) -> None:
        """Hear what is new in the group, for so many seconds. `NotAuthorized`, `FixCallError`."""

    def look(self) -> None:
        """Ask for the topics' partitions now: a group shares new ones out once a member knows them."""

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The group's offsets, where there are any. `NotReady`, `NotAuthorized`."""

    def commit(self, offsets: Mapping[TopicPartition, int], *, wait: bool) -> bool:
        """Commit offsets in one request. False: not all were taken (known with ``wait`` only); that is logged."""

    def close(self) -> None:
        """Leave the group and free everything."""

    def leak(self) -> None:
        """In a forked child: free nothing, ever."""


class Table(Protocol):
    """A sorted table of bytes. All writes are atomic. Errors are `TableError`."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) whose key starts with ``prefix``, in key order; a stable view.

        ``first``: only from this key on, so that deleted rows before it are not walked over.
        """

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) whose key is below ``before``, from the highest down; a stable view."""

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put, or delete where the value is None, all at once."""

    def close(self) -> None:
        """Release the table."""


class TableError(Exception):
    """The table can't be read or written (disk full, broken): its folder can be deleted and rebuilt."""


RecordHeaders: TypeAlias = Sequence[tuple[str, bytes | None]]
# Partition, key, value, headers, timestamp in Unix milliseconds (0: now).
JournalRecord: TypeAlias = tuple[int, bytes | None, bytes | None, RecordHeaders, int]


class JournalMissing(NotReady):
    """The brokers say that a journal does not exist (any more): ask what became of its stream."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"the brokers know no topic {topic}: call again later")
        self.topic = topic


@dataclass(frozen=True, slots=True)
class Opened:
    """Journal partitions made ready: for each an offset not above the first record to come; and the size limit."""

    first: dict[int, int]
    max_event_bytes: int
