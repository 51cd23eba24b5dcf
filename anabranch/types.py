"""Types of results (events, receipts, results of commits, descriptions), and the functions that make them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from anabranch.core.authorize import Right
from anabranch.core.stream_states import ACTIVE
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    MalformedRecord,
    NotReady,
    ReservedByPrepared,
    TransactionAborted,
    UnsupportedVersion,
)
from anabranch.protocol.hybrid_time import to_datetime
from anabranch.protocol.ids import hash_of, txn_text
from anabranch.protocol.legal_names import OPEN_LANE, check_type, state_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode_as, encode, name_of
from anabranch.protocol.schemas.records import QuarantineRow, SegmentRange, TxnState

log = logging.getLogger("anabranch.client")

Headers: TypeAlias = "Sequence[tuple[str, bytes | None]] | Mapping[str, bytes | None]"

T = TypeVar("T")
U = TypeVar("U")
# The types of an event's key and value. Only Python 3.13 has defaults of them, and only type checkers need these.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    K = DefaultTypeVar("K", default=bytes)
    V = DefaultTypeVar("V", default=bytes)
else:
    K = TypeVar("K")
    V = TypeVar("V")


class Listed(list[T]):
    """A list from all control partitions. ``missing``: control partition that did not answer -> the reason."""

    def __init__(
        self, found: Iterable[T] = (), missing: Mapping[int, AnabranchError] | None = None
    ) -> None:
        super().__init__(found)
        self.missing = dict(missing or {})

    def each(self, made: Callable[[T], U]) -> Listed[U]:
        """The list with ``made`` applied to each element."""
        return Listed(map(made, self), self.missing)

    def check(self) -> Self:
        """The list, if it is complete. Raises: NotReady."""
        for error in self.missing.values():
            lacking = ", ".join(map(str, sorted(self.missing)))
            raise NotReady(
                f"no answer of control partition {lacking}, so the list is incomplete ({error})"
            )
        return self


class Event(NamedTuple, Generic[K, V]):
    """A committed event, as a reader sees it. Key and value are bytes, or as the codecs of `Client.stream` decode.

    ``timestamp``: Unix milliseconds, the event's own. ``txn_id``: 16 bytes; None for a plain write.
    ``commit_timestamp``: hybrid time (Unix microseconds << 12 | a counter). ``offset`` and ``partition``: its place
    in the stream's topic.
    """

    stream: str
    key: K | None
    value: V | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int
    partition: int
    offset: int


class RejectedRecord(NamedTuple):
    """A record of a stream's journal that is in no commit, though the broker had acknowledged it.

    ``partition``, ``offset``: its place in the journal's topic; of a batch that can't be read, that of its first
    record. ``key``: the first 64 bytes; None if it has none, or can't be read. ``reason``: docs/operations.md
    explains it. ``timestamp``: when a controller read it, Unix milliseconds.
    """

    partition: int
    offset: int
    key: bytes | None
    reason: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The rejected records of a stream's journal. ``counts``: by reason, since the stream was made.

    ``records``: the newest first: at most 1,000, of the last 7 days.
    """

    counts: Mapping[str, int]
    records: Sequence[RejectedRecord]


class RowError(NamedTuple):
    """A row that a session could not commit. ``number``: as `WriteSession.apply` returned it; ``error``: why.

    If ``error`` is `OutcomeUnknown`, the row may be committed. ``key``: as its codec encoded it, its first 8,192
    bytes.
    """

    number: int
    stream: str
    key: bytes | None
    error: AnabranchError


class Events(Protocol[K, V]):
    """The events of a transaction: iterate over them any number of times; ``len`` is their number."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Event[K, V]]: ...


@dataclass(frozen=True, slots=True)
class Committed(Generic[K, V]):
    """A whole transaction in one stream; ``txn_id`` is None for plain writes.

    ``events``: up to 10,000 are in memory, further events are read while you iterate. Events of one key are in
    order.
    """

    txn_id: bytes | None
    commit_timestamp: int
    stream: str
    events: Events[K, V]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a transaction's events.

    ``rejected``: written too late or to the wrong place. ``left_out``: of writers that the commit did not take.
    """

    committed: int
    rejected: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a commit, which never changes.

    ``txn_id``: 16 bytes; not the id of the handle if another transaction of the name was committed before.
    ``commit_timestamp``: hybrid time. ``reason``: the stream whose events are missing, if it was lost while the
    transaction was prepared. ``is_merged``: False after `commit` with ``wait="decided"`` whose events are still
    being merged: it will commit, and its timestamp, 0 here, is not chosen yet.
    """

    txn_id: bytes
    commit_timestamp: int
    counts: Counts
    name: str | None = None
    reason: str = ""
    is_merged: bool = True

    @property
    def committed_at(self) -> datetime:
        """The moment of the commit timestamp, in UTC. Raises: IllegalState (it is not merged yet)."""
        if not self.is_merged:
            raise IllegalState("the transaction has no commit timestamp before it is merged")
        return to_datetime(self.commit_timestamp)


@dataclass(frozen=True, slots=True)
class Transacted(Result, Generic[T]):
    """The outcome of `transact`. ``value``: what the function returned when it was last called."""

    value: T = field(kw_only=True)

    @classmethod
    def of(cls, result: Result, value: T) -> Transacted[T]:
        """The outcome of a commit, with this value."""
        its = result
        return cls(
            its.txn_id,
            its.commit_timestamp,
            its.counts,
            its.name,
            its.reason,
            its.is_merged,
            value=value,
        )


@dataclass(frozen=True, slots=True)
class FeatureLevel:
    """Up to which feature level a cluster's records may go. The lowest of all control partitions.

    ``known``: the level up to which it can be raised, as far as the present leaders know.
    """

    level: int
    known: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """A summary of what one writer wrote: pass it, or its bytes, to the process that commits."""

    record: r.Receipt

    @property
    def txn_id(self) -> bytes:
        """The transaction, 16 bytes."""
        return self.record.txn_id

    @property
    def writer(self) -> int:
        """The writer: 64 random bits, as a signed number."""
        return self.record.writer

    @property
    def finished(self) -> bool:
        """Whether the writer has written all its events."""
        return self.record.finished

    @property
    def events(self) -> int:
        """The number of its events."""
        return sum(extent.count for extent in self.record.extents)

    def to_bytes(self) -> bytes:
        """The receipt as bytes, the same in every language."""
        return encode(self.record)

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """The receipt that `to_bytes` encoded.

        Raises: UnsupportedVersion (a newer release made it), InvalidArgument (other bytes).
        """
        try:
            return cls(decode_as(r.Receipt, bytes(data)))
        except (MalformedRecord, UnsupportedVersion) as error:
            if isinstance(error, UnsupportedVersion) and name_of(data) == "Receipt":
                raise
            raise InvalidArgument(
                f"{data!r:.60} is not a receipt of this version: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transaction as the controller knows it.

    Fields that end with ``_ms`` are Unix milliseconds (0: not yet), ``keepalive`` seconds. Hybrid times are
    ``commit_timestamp`` (0: not committed) and ``snapshot``, that of its reads of tables (0: it reads none).
    ``streams`` and ``writers`` are empty in lists and for one-shots. ``owner``: the lane that began it.
    ``prepared_by``: SHA-256 of the secret without which it can't be ended, or empty. ``broken``: its first
    registered lock that broke.
    """

    txn_id: bytes
    state: TxnState
    scope: str
    name: str | None
    commit_timestamp: int
    counts: Counts
    reason: str
    begun_ms: int
    finished_ms: int
    keepalive: float
    streams: tuple[str, ...]
    writers: tuple[Receipt, ...]
    owner: str = OPEN_LANE
    prepared_ms: int = 0
    prepared_by: bytes = b""
    snapshot: int = 0
    broken: r.BrokenLock | None = None

    @property
    def prepared_at(self) -> datetime | None:
        """When it was prepared, in UTC; None if it was not prepared."""
        return datetime.fromtimestamp(self.prepared_ms / 1000, UTC) if self.prepared_ms else None

    def __str__(self) -> str:
        return f"{txn_text(self.txn_id)} {self.state}"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is not over, as its controller knows it: its resources, and why it waits.

    - Seconds: ``age``; ``silent``, since its last request or heartbeat; ``left``, of its keepalive (None while that
      is suspended).
    - Empty in lists: ``writers``; ``staged_merges``, the segments of its staged merge; ``journals``, the bytes of
      each stream's journal that are kept for it.
    - ``locks``: the number of its registered locks; while they are ``frozen``, commits that would break one wait.
    - ``waits``: why its decided commit waits, with ``why``, ``stream``, ``text`` and ``age_ms`` (-1: not known).
    - ``ends``: the command by which an operator ends it.
    - ``locked_segments``: the segments of exclusive streams that it has locked; ``asks``: those that it waits for;
      at most 100 each, 10 in lists. They have ``stream``, ``segment``, ``txn_id`` (who has it), ``owner``,
      ``held_ms``, ``left_ms`` (until the hold limit; -1: it is committing, or prepared) and ``waiting`` (ids; empty
      in lists, and in ``asks`` this transaction alone).
    - ``partitions``: its parts on other control partitions than its coordinator's, also once it has ended. They
      have ``partition``, ``scopes`` (empty for a transaction of one request), ``state``, ``votes_round``, ``vote``
      (None: none that counts), and ``waited_ms``, for which the coordinator has been waiting for an answer (-1: it
      waits for none).
    """

    info: TransactionInfo
    uncommitted_bytes: int
    age: float
    silent: float
    left: float | None
    writer_count: int
    writers: tuple[r.WriterInfo, ...]
    staged_merges: tuple[r.StagedMergeInfo, ...]
    locks: int = 0
    frozen: bool = False
    journals: Mapping[str, int] = field(default_factory=dict)
    waits: r.WaitInfo | None = None
    ends: str = ""
    locked_segments: tuple[r.LockedSegment, ...] = ()
    asks: tuple[r.LockedSegment, ...] = ()
    partitions: tuple[r.PartInfo, ...] = ()


class TimelineStep(NamedTuple):
    """A step of a transaction. ``at_ms``: Unix milliseconds by the clock of the client that made the id, of the
    controller that decided, or of the broker that ended the round; ``clock`` says which.

    ``what``: id made, leader, begun, touched, joined, receipt, locked, prepared, commit asked, decided, staging,
    staged, merged, readable or aborted; of a transaction over several control partitions also part opened, votes
    asked, votes taken back and part ended. ``about``: the stream, writer, leader or reason. ``waited_for``: what
    had to happen between the step before and this one; empty if the logs do not say.
    """

    at_ms: int
    clock: Literal["client", "controller", "broker"]
    what: str
    about: str = ""
    waited_for: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of a transaction, in the order in which they happened.

    ``waits``: what its decided commit waits for now; empty if it waits for nothing. ``gaps``: why steps may be
    missing.
    """

    txn_id: bytes
    steps: tuple[TimelineStep, ...]
    waits: str = ""
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream as it is now.

    - ``segments``: the active ones, by key range. ``partitions``: as many in the stream as in its journal.
    - ``journal``: the end of each journal partition's index. ``low_water``: offsets below which journal partitions
      may be truncated. ``uncommitted_bytes``: uncommitted bytes in the journal, approximately.
    - ``rejected``: rejected journal records by reason; ``foreign``: the least number of foreign records in the
      topic; both since the present leader's term began.
    - ``state``: ACTIVE; CREATING; WAITING while it can't be read or written (``trouble`` says why); LOST once a
      topic of it is gone.
    - ``base``: a table's base, with ``timestamp``, ``rows`` and ``txn_id``. ``oldest_snapshot``: the hybrid time
      from which a table is sure to be readable; 0 for other streams.
    - ``blockers``: what prevents its deletion or compaction, each with ``what``, ``name``, ``lane``, ``age_ms`` and
      the command that ``ends`` it. Only `Client.describe` has them, for a lane with the right `operate`.
    - ``description``: text for people, as `Client.create_stream` got it; empty: none.
    - ``locked_segments``: of an exclusive stream, as `OpenTransaction` has them. `Client.describe` alone has them,
      for a lane with the right `operate`.
    """

    stream: str
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    settings: Mapping[str, str]
    rejected: Mapping[str, int]
    journal: Mapping[int, int]
    partitions: int
    low_water: Mapping[int, int]
    uncommitted_bytes: int
    state: r.ShownStreamState = ACTIVE
    trouble: str = ""
    foreign: int = 0
    base: r.BaseRow | None = None
    oldest_snapshot: int = 0
    blockers: tuple[r.Blocker, ...] = ()
    description: str = ""
    locked_segments: tuple[r.LockedSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandsInfo:
    """A control partition's commands: those before offset ``position`` are processed; ``end``: the topic's end.

    ``quarantined``: quarantined commands, the oldest first, with ``offset``, ``at_ms`` (Unix milliseconds),
    ``what`` and ``reason``. ``open_transactions``, ``outcomes``: how many it keeps.
    """

    control_partition: int
    position: int
    end: int
    quarantined: tuple[QuarantineRow, ...]
    open_transactions: int
    outcomes: int


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """The leader of a control partition: its ``term``, which rises with each takeover, and since when it leads.

    ``leader``: host, process and start time. ``since_ms``: Unix milliseconds. ``committed``: transactions committed
    since some time of the term: only the difference of two answers means anything. ``uncommitted_bytes``: of open
    transactions in journals. From feature level 4 on: ``busy_us``: microseconds of processor time of the leader's
    thread, of which again only differences mean anything; ``waiting``: commands not decided yet.
    """

    control_partition: int
    term: int
    leader: str
    since_ms: int
    committed: int
    uncommitted_bytes: int
    busy_us: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane, in all control partitions together.

    ``trouble``: why some control partition does not read its commands, though it is not blocked. ``waiting``: the
    number of its commands that are not decided yet. ``topic_ids``: of its command and reply topics; empty: any
    topics of these names.
    """

    name: str
    blocked: bool
    trouble: str
    quotas: Mapping[str, int]
    usage: Mapping[str, int]
    waiting: int
    topic_ids: tuple[str, ...]


class Grant(NamedTuple):
    """The ``rights`` of a lane, as words, on a ``pattern`` (``scope/stream``, ``scope/*``, ``*``)."""

    lane: str
    pattern: str
    rights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A command of an operator: when (Unix milliseconds), from which lane, and what it did."""

    at_ms: int
    lane: str
    command: str
    what: str
    control_partition: int


@dataclass(frozen=True)
class TaskOwnership:
    """Task ownership: the right to commit for tasks of a processor, until another worker takes them.

    ``tasks``: by number, with their positions when they were taken. ``fencing_token``: 16 secret bytes. ``stores``:
    the first one has number 2. ``incarnation``: a part of each key of the processor's state.
    """

    processor: str
    task_count: int
    inputs: tuple[r.ProcessorInput, ...]
    tasks: Mapping[int, r.TaskInfo]
    fencing_token: bytes = field(repr=False)
    stores: tuple[str, ...] = ()
    incarnation: int = 0

    @property
    def state(self) -> str:
        """The processor's state stream."""
        return state_stream(self.processor)

    @property
    def scope(self) -> str:
        """The processor's scope, which is also that of its transactions."""
        return self.processor.partition("/")[0]

    @property
    def hash(self) -> bytes:
        """The hash that a `Begin` record contains."""
        return hash_of(self.processor, self.fencing_token)


_RIGHTS = {(right.name or "").lower().replace("_", "-"): right for right in Right}


def right_words(bits: int) -> tuple[str, ...]:
    """Rights as words, in the order of the table in ``docs/security.md``."""
    return tuple(word for word, right in _RIGHTS.items() if bits & right)


def right_bits(words: Iterable[str]) -> int:
    """The bits of rights. Raises `InvalidArgument` for a word that is no right."""
    bits = 0
    for word in [words] if isinstance(words, str) else words:
        if word not in _RIGHTS:
            raise InvalidArgument(f"{word!r} is not a right; use some of {', '.join(_RIGHTS)}")
        bits |= int(_RIGHTS[word])
    return bits


def info_of(outcome: r.Outcome) -> TransactionInfo:
    """The result for callers of an `Outcome` record."""
    return TransactionInfo(
        txn_id=outcome.txn_id,
        state=outcome.state,
        scope=outcome.scope,
        name=outcome.name,
        commit_timestamp=outcome.commit_timestamp,
        counts=counts_of(outcome),
        reason=outcome.reason,
        begun_ms=outcome.begun_ms,
        finished_ms=outcome.finished_ms,
        keepalive=outcome.keepalive_ms / 1000,
        streams=outcome.streams,
        writers=tuple(Receipt(receipt) for receipt in outcome.writers),
        owner=outcome.owner,
        prepared_ms=outcome.prepared_ms,
        prepared_by=outcome.prepared_by,
        snapshot=outcome.snapshot,
        broken=outcome.broken,
    )


def open_of(info: r.OpenInfo) -> OpenTransaction:
    """The result for callers of an `OpenInfo` record."""
    return OpenTransaction(
        info_of(info.outcome),
        info.uncommitted_bytes,
        info.age_ms / 1000,
        info.silent_ms / 1000,
        None if info.left_ms < 0 else info.left_ms / 1000,
        info.writer_count,
        info.writers,
        info.staged_merges,
        info.locks,
        info.frozen,
        info.journals,
        info.waits,
        info.ends,
        info.locked_segments,
        info.asks,
        info.partitions,
    )


def counts_of(outcome: r.Outcome) -> Counts:
    """The counts of an `Outcome` record."""
    return Counts(outcome.committed, outcome.rejected, outcome.left_out)


def description_of(info: r.StreamInfo) -> StreamDescription:
    """The result for callers of a `StreamInfo` record."""
    fields = {name: getattr(info, name) for name in StreamDescription.__slots__}
    for name in ("journal", "low_water"):
        fields[name] = {int(partition): offset for partition, offset in fields[name].items()}
    return StreamDescription(**fields)


def result_of(outcome: r.Outcome) -> Result:
    """The result in an `Outcome` record that is COMMITTED, or decided."""
    counts, is_merged = counts_of(outcome), outcome.state == "COMMITTED"
    reason = outcome.reason if is_merged else ""  # before, what its merge waits for
    return Result(outcome.txn_id, outcome.commit_timestamp, counts, outcome.name, reason, is_merged)


def committed(outcome: r.Outcome) -> r.Outcome:
    """The outcome, if it is COMMITTED. Raises: ReservedByPrepared if it is PREPARED, else TransactionAborted."""
    if outcome.state == "PREPARED":
        raise ReservedByPrepared(
            f"transaction {txn_text(outcome.txn_id)} of this name is prepared: end it first"
        )
    if outcome.state != "COMMITTED":
        why = f" ({outcome.reason})" if outcome.reason else ""
        text = f"transaction {txn_text(outcome.txn_id)} is aborted{why}: begin a new one"
        raise TransactionAborted(text) if outcome.broken is None else locks_broken(outcome.broken)
    return outcome


def warn_left_out(outcome: r.Outcome, receipts: object) -> None:
    """Log a warning if events were left out, unless the caller chose the receipts."""
    if receipts is None and outcome.left_out:
        log.warning(
            "transaction %s was committed without %d events, because the commit did not take their writers",
            txn_text(outcome.txn_id),
            outcome.left_out,
        )


def receipt_records(
    receipts: Sequence[Receipt | bytes] | None, txn_id: bytes | None
) -> tuple[r.Receipt, ...] | None:
    """The records of receipts, which may be bytes, and are all of one transaction. Raises: InvalidArgument."""
    if receipts is None:
        return None
    if isinstance(receipts, Receipt | bytes) or not isinstance(receipts, Iterable):
        raise InvalidArgument("receipts must be a list of receipts")
    found = []
    for given in receipts:
        check_type("a receipt", given, Receipt, bytes)
        receipt = given if isinstance(given, Receipt) else Receipt.from_bytes(given)
        if receipt.txn_id != txn_id:
            other = txn_text(receipt.txn_id)
            raise InvalidArgument(f"a receipt belongs to another transaction, {other}")
        found.append(receipt.record)
    return tuple(found)
