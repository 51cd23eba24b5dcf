"""Types of results: events, receipts, results of commits and descriptions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeVar

from anabranch.core.authorize import Right
from anabranch.core.hybrid_time import to_datetime
from anabranch.core.ids import hash_of, txn_text
from anabranch.core.legal_names import OPEN_LANE, check_type, state_stream
from anabranch.core.stream_states import ACTIVE
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import (
    AnabranchError,
    FixCallError,
    InvalidArgument,
    NotReady,
    ReservedByPrepared,
    TransactionAborted,
)
from anabranch.schemas import records as r
from anabranch.schemas.codec import decode_as, encode
from anabranch.schemas.records import QuarantineRow, SegmentRange, TxnState

log = logging.getLogger("anabranch.client")

Headers: TypeAlias = "Sequence[tuple[str, bytes | None]] | Mapping[str, bytes | None]"

T = TypeVar("T")
U = TypeVar("U")


class Listed(list[T]):
    """A list of what control partitions have. ``missing``: the partitions that did not answer, and why."""

    def __init__(
        self, found: Iterable[T] = (), missing: Mapping[int, AnabranchError] | None = None
    ) -> None:
        super().__init__(found)
        self.missing = dict(missing or {})

    def each(self, made: Callable[[T], U]) -> Listed[U]:
        """A list of what is made of each."""
        return Listed(map(made, self), self.missing)

    def check(self) -> Self:
        """The list, if no control partition is missing. Raises: NotReady."""
        for error in self.missing.values():
            lacking = ", ".join(map(str, sorted(self.missing)))
            raise NotReady(
                f"no answer of control partition {lacking}: the list lacks what it has ({error})"
            )
        return self


class Event(NamedTuple):
    """A committed event, as a reader sees it.

    ``timestamp``: Unix milliseconds, the event's own. ``txn_id``: None for a plain write. ``commit_timestamp``:
    hybrid time (microseconds << 12 | logical). ``offset`` and ``partition``: its place in the stream's topic.
    """

    stream: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int
    partition: int
    offset: int


class Events(Protocol):
    """The events of a transaction: iterate, as often as you like; ``len`` is their number."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Event]: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """A whole transaction in one stream; ``txn_id`` is None for plain writes.

    ``events``: up to 10,000 are in hand, more are read while you iterate. Events of one key are in order.
    """

    txn_id: bytes | None
    commit_timestamp: int
    stream: str
    events: Events


@dataclass(frozen=True, slots=True)
class Counts:
    """Events of a transaction: ``committed``; ``rejected`` (written too late or to the wrong place);
    ``left_out`` (of writers that the commit did not take).
    """

    committed: int
    rejected: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a commit; it never changes.

    ``txn_id`` is not the handle's if the name was committed before. ``commit_timestamp``: hybrid time. ``reason``:
    why it is not whole, if a stream of a prepared transaction was lost.
    """

    txn_id: bytes
    commit_timestamp: int
    counts: Counts
    name: str | None = None
    reason: str = ""

    @property
    def committed_at(self) -> datetime:
        """The moment of the commit timestamp, in UTC."""
        return to_datetime(self.commit_timestamp)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One writer's account of its events, to be given to the process that commits."""

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
        """Whether the writer is complete."""
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
        """The receipt of `to_bytes`. `InvalidArgument` if it is not one."""
        try:
            return cls(decode_as(r.Receipt, bytes(data)))
        except FixCallError as error:
            raise InvalidArgument(f"{data!r:.60} is no receipt of this version: {error}") from error


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transaction as the controller knows it.

    Times are Unix milliseconds (0: not yet), ``keepalive`` seconds, ``commit_timestamp`` hybrid time (0: not
    committed). ``streams`` and ``writers`` are empty in lists and for one-shots. ``owner``: the lane that began it.
    ``prepared_by``: SHA-256 of the secret of who alone may end it, or empty. ``snapshot``: hybrid time of its reads
    of tables; 0: it began without. ``broken``: the first registered lock of it that was broken.
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
        """When it was prepared, UTC; None: it was not."""
        return datetime.fromtimestamp(self.prepared_ms / 1000, UTC) if self.prepared_ms else None

    def __str__(self) -> str:
        return f"{txn_text(self.txn_id)} {self.state}"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction with what it holds and waits for, as its controller knows it.

    ``age``, ``silent`` (since something was heard of it) and ``left`` (of its keepalive; None: it does not run) are
    seconds. ``writers`` and ``staged_merges``, the segments of its staged merge, are empty in lists; so is
    ``journals``: by stream, bytes of the journal that stay for it. ``locks``: on tables; while they are ``frozen``,
    commits that would break one wait. ``waits``: for what its decided commit waits, with ``why``, ``stream``,
    ``text`` and ``age_ms`` (-1: not known). ``ends``: the command by which an operator ends it.
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


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream as it is now.

    ``segments``: the active ones, by key range. ``rejected``: journal records rejected, by reason, since the
    present controller began to lead. ``journal``: how far each journal partition is indexed. ``partitions``: their
    number, of the stream and of its journal. ``low_water``: offsets below which journal partitions may be cut.
    ``uncommitted_bytes``: of open transactions in the journal, about. ``state``: ACTIVE; CREATING; WAITING while it
    can't be read or written, and ``trouble`` says why; LOST once it is given up, as a topic of it is gone.
    ``foreign``: the least number of foreign records found in its topic since the present controller began to lead.
    ``base``: which a table begins at; with ``timestamp``, ``rows`` and ``txn_id``. ``oldest_snapshot``: hybrid time
    from which on a table is promised to be readable; 0: it is none. ``blockers``: what keeps it from being deleted
    or compacted, each with ``what``, ``name``, ``lane``, ``age_ms`` and the command that ``ends`` it; told by
    `Client.describe`, to a lane that may operate it.
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


@dataclass(frozen=True, slots=True)
class CommandsInfo:
    """A control partition's commands: those before ``position`` are dealt with, ``end`` is their end.

    ``quarantined``: those that could not be carried out, the oldest first, with ``offset``, ``at_ms`` (Unix
    milliseconds), ``what`` it was and the ``reason``. ``open_transactions``, ``outcomes``: kept numbers.
    """

    control_partition: int
    position: int
    end: int
    quarantined: tuple[QuarantineRow, ...]
    open_transactions: int
    outcomes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane, as all control partitions together see it.

    ``trouble``: why its commands are not read everywhere, if they should be. ``waiting``: commands that are not
    decided. ``topic_ids``: of its commands and its replies topic; empty: any.
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
    """A command of an operator: when (Unix milliseconds), by which lane, what, and where it was carried out."""

    at_ms: int
    lane: str
    command: str
    what: str
    control_partition: int


@dataclass(frozen=True)
class TaskOwnership:
    """The right to commit for tasks of a processor, until another one takes them. Plain data: it may be pickled.

    ``tasks``: by number, as they stood when they were taken. ``fencing_token``: 16 bytes that let their holder
    commit.
    ``stores``: the first one has number 2. ``incarnation``: stands in each key of its state.
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
        """The stream that is the processor's state."""
        return state_stream(self.processor)

    @property
    def scope(self) -> str:
        """The processor's scope, of which its transactions are."""
        return self.processor.partition("/")[0]

    @property
    def hash(self) -> bytes:
        """The hash by which `Begin` names it."""
        return hash_of(self.processor, self.fencing_token)


_RIGHTS = {(right.name or "").lower().replace("_", "-"): right for right in Right}


def right_words(bits: int) -> tuple[str, ...]:
    """Rights as words, in the order of the table in ``docs/security.md``."""
    return tuple(word for word, right in _RIGHTS.items() if bits & right)


def right_bits(words: Iterable[str]) -> int:
    """The bits of rights given as words. `InvalidArgument` for an unknown one."""
    bits = 0
    for word in [words] if isinstance(words, str) else words:
        if word not in _RIGHTS:
            raise InvalidArgument(f"{word!r} is no right: there are {', '.join(_RIGHTS)}")
        bits |= int(_RIGHTS[word])
    return bits


def info_of(outcome: r.Outcome) -> TransactionInfo:
    """An `Outcome` record for callers."""
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
    """An `OpenInfo` record for callers."""
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
    )


def counts_of(outcome: r.Outcome) -> Counts:
    """The counts of an `Outcome` record."""
    return Counts(outcome.committed, outcome.rejected, outcome.left_out)


def description_of(info: r.StreamInfo) -> StreamDescription:
    """A `StreamInfo` record for callers."""
    told = {name: getattr(info, name) for name in StreamDescription.__slots__}
    for name in ("journal", "low_water"):
        told[name] = {int(partition): offset for partition, offset in told[name].items()}
    return StreamDescription(**told)


def result_of(outcome: r.Outcome) -> Result:
    """The result in a COMMITTED `Outcome` record."""
    counts = counts_of(outcome)
    return Result(outcome.txn_id, outcome.commit_timestamp, counts, outcome.name, outcome.reason)


def committed(outcome: r.Outcome) -> r.Outcome:
    """The outcome if it is COMMITTED, else `TransactionAborted`; `ReservedByPrepared`: it is still to be ended."""
    if outcome.state == "PREPARED":
        raise ReservedByPrepared(
            f"transaction {txn_text(outcome.txn_id)}, which has the name, is prepared: it has to be ended first"
        )
    if outcome.state != "COMMITTED":
        why = f" ({outcome.reason})" if outcome.reason else ""
        text = f"transaction {txn_text(outcome.txn_id)} is aborted{why}: begin a new one"
        raise TransactionAborted(text) if outcome.broken is None else locks_broken(outcome.broken)
    return outcome


def warn_left_out(outcome: r.Outcome, receipts: object) -> None:
    """Warn of left-out events, unless the caller named the receipts to take."""
    if receipts is None and outcome.left_out:
        log.warning(
            "transaction %s is committed without %d events that were written: their writers were not taken",
            txn_text(outcome.txn_id),
            outcome.left_out,
        )


def receipt_records(
    receipts: Sequence[Receipt | bytes] | None, txn_id: bytes | None
) -> tuple[r.Receipt, ...] | None:
    """The records of receipts given as objects or bytes, all of one transaction."""
    if receipts is None:
        return None
    if isinstance(receipts, Receipt | bytes) or not isinstance(receipts, Iterable):
        raise InvalidArgument("receipts is a list of receipts")
    found = []
    for given in receipts:
        check_type("a receipt", given, Receipt, bytes)
        receipt = given if isinstance(given, Receipt) else Receipt.from_bytes(given)
        if receipt.txn_id != txn_id:
            other = txn_text(receipt.txn_id)
            raise InvalidArgument(f"a receipt is of transaction {other}, not of this one")
        found.append(receipt.record)
    return tuple(found)
