"""The records of the wire protocol as frozen dataclasses, one for each ``*.avsc`` beside this file.

A test holds the two equal, field by field; what each field means stands in the schema's ``doc``. Those that
come in great numbers are named tuples: they are made four times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Literal, NamedTuple

TxnState = Literal[
    "OPEN",
    "COMMIT_IN_PROGRESS",
    "FINALIZE_IN_PROGRESS",
    "COMMITTED",
    "ABORT_IN_PROGRESS",
    "ABORTED",
]
ParticipantOp = Literal["BEGIN_TXN", "BEGIN_COMMIT", "FINALIZE_COMMIT", "ABORT_TXN"]


def is_record(cls: type) -> bool:
    """Whether a class of this module is a record of the protocol."""
    return is_dataclass(cls) or issubclass(cls, tuple)


@dataclass(frozen=True, slots=True)
class Extent:
    """What one writer wrote to one journal partition."""

    stream: str
    partition: int
    first: int
    end: int
    count: int
    crc_sum: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Cumulative account of one writer; of two, the one with the higher sequence wins."""

    txn_id: bytes
    writer: int
    sequence: int
    finished: bool
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A segment of a stream epoch and the keys it holds."""

    segment_id: int
    low: int
    high: int
    partition: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of key positions."""

    low: int
    high: int


class EventHeader(NamedTuple):
    """A header of an event."""

    key: str
    value: bytes | None


class Event(NamedTuple):
    """An event inside a one-shot commit."""

    stream: str
    segment_id: int
    key: bytes | None
    value: bytes | None
    headers: tuple[EventHeader, ...]
    timestamp: int


@dataclass(frozen=True, slots=True)
class FindScope:
    """Command to control partition 0, the directory: which control partition serves a scope?"""

    scope: str
    create: bool


@dataclass(frozen=True, slots=True)
class CreateStream:
    """Command: create a stream; answered again if it exists with equal settings."""

    stream: str
    segments: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scale:
    """Command: change the segments of a stream. A repeated command is answered as the first was."""

    stream: str
    segments: int
    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]


@dataclass(frozen=True, slots=True)
class DescribeStreams:
    """Command: describe one stream, or all of a scope, or all of this control partition."""

    scope: str | None
    stream: str | None


@dataclass(frozen=True, slots=True)
class Begin:
    """Command: begin a transaction under an id that the client made. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    keepalive_ms: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Command: register a stream with a transaction before the first write to it."""

    token: bytes
    stream: str


@dataclass(frozen=True, slots=True)
class Register:
    """Command: register a writer's receipt."""

    token: bytes
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Commit:
    """Command: commit. Repeating it is harmless."""

    token: bytes
    own: tuple[Receipt, ...]
    receipts: tuple[Receipt, ...] | None
    name: str | None
    wait_ms: int
    number: int | None = None


class OneShot(NamedTuple):
    """Command: a whole transaction in one command. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: abort. Repeating it is harmless."""

    token: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """Command: the outcome of a transaction; where there is none, it is aborted first."""

    txn_id: bytes


@dataclass(frozen=True, slots=True)
class GetState:
    """Command: the state of a transaction, changing nothing."""

    txn_id: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Command: these transactions live. Answered only if some of them is not open (any more)."""

    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AdoptScope:
    """Command from the directory (control partition 0) to the partition that serves a new scope."""

    scope: str


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """Command: list transactions."""

    scope: str | None
    include_finished: bool
    limit: int


@dataclass(frozen=True, slots=True)
class SafeTime:
    """Command: make a timestamp safe: all commits up to it are on the log, later ones exceed it."""

    scope: str
    at: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reply: refused, nothing changed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ScopeInfo:
    """Reply to FindScope."""

    scope: str
    control_partition: int


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as it is now."""

    stream: str
    state: str
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    settings: Mapping[str, str]
    rejected: Mapping[str, int]
    journal: Mapping[str, int]
    partitions: int
    low_water: Mapping[str, int]
    staged_bytes: int


@dataclass(frozen=True, slots=True)
class StreamList:
    """Reply to CreateStream and DescribeStreams."""

    streams: tuple[StreamInfo, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """Reply to Begin."""

    txn_id: bytes
    token: bytes
    keepalive_ms: int


@dataclass(frozen=True, slots=True)
class Touched:
    """Reply to Touch: where to write."""

    stream: str
    stream_epoch: int
    segments: tuple[SegmentRange, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """Reply to Register."""

    sequence: int


class Outcome(NamedTuple):
    """Reply to Commit, OneShot, Abort, Resolve, GetState, and to Begin on a committed name."""

    txn_id: bytes
    state: TxnState
    scope: str
    name: str | None
    commit_timestamp: int
    committed: int
    rejected: int
    left_out: int
    reason: str
    begun_ms: int
    finished_ms: int
    keepalive_ms: int
    streams: tuple[str, ...]
    writers: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """Reply to Heartbeat when some transaction is not open."""

    not_open: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class TransactionList:
    """Reply to ListTransactions."""

    transactions: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class SafeTimeIs:
    """Reply to SafeTime."""

    scope: str
    timestamp: int


class Reply(NamedTuple):
    """A controller's answer, on the replies topic."""

    correlation_id: bytes
    hybrid_time: int
    result: (
        Refusal
        | ScopeInfo
        | StreamList
        | Begun
        | Touched
        | Registered
        | Outcome
        | Alive
        | TransactionList
        | SafeTimeIs
    )


@dataclass(frozen=True, slots=True)
class TermRow:
    """Status row: who leads."""

    term: int
    leader: str
    since_ms: int
    key_id: bytes


@dataclass(frozen=True, slots=True)
class RoundRow:
    """Status row: how far the control partition has come; written by every round."""

    term: int
    hybrid_time: int
    commands_offset: int
    expired_ms: int


@dataclass(frozen=True, slots=True)
class ScopeRow:
    """Status row (control partition 0): a scope and its control partition."""

    scope: str
    control_partition: int


@dataclass(frozen=True, slots=True)
class Scaling:
    """A scaling that waits for partitions."""

    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]
    correlation_id: bytes
    reply_partition: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Status row: a stream."""

    stream: str
    state: str
    segment_count: int
    settings: Mapping[str, str]
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    next_number: int
    partitions: int
    wanted_partitions: int
    scaling: Scaling | None
    scaled_by: bytes
    correlation_id: bytes
    reply_partition: int


@dataclass(frozen=True, slots=True)
class EpochRow:
    """Status row: the layout of a reference epoch that may still be written to."""

    stream: str
    stream_epoch: int
    segments: tuple[SegmentRange, ...]


@dataclass(frozen=True, slots=True)
class LowWaterRow:
    """Status row: what may be deleted of a journal partition."""

    stream: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlainRow:
    """Status row: how far the plain writes of a journal partition are committed."""

    stream: str
    partition: int
    offset: int


class TxnRow(NamedTuple):
    """Status row: a transaction."""

    txn_id: bytes
    scope: str
    name: str | None
    state: TxnState
    keepalive_ms: int
    begun_ms: int
    finished_ms: int
    commit_timestamp: int
    committed: int
    rejected: int
    left_out: int
    reason: str


@dataclass(frozen=True, slots=True)
class ParticipantRow:
    """Status row: a stream of a transaction."""

    stream: str
    reference_epoch: int


@dataclass(frozen=True, slots=True)
class WriterRow:
    """Status row: a writer's receipt."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class NameRow:
    """Status row: a name and the transaction that holds it."""

    txn_id: bytes


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """Status row: the highest number of a series and the transaction that has it."""

    number: int
    txn_id: bytes
    earlier_number: int
    earlier_txn_id: bytes


@dataclass(frozen=True, slots=True)
class PendingCommitRow:
    """Status row: a commit that waits for the journal, or that is decided and not yet merged."""

    correlation_ids: tuple[bytes, ...]
    reply_partitions: tuple[int, ...]
    decided: bool
    writers: tuple[Receipt, ...]
    name: str | None
    number: int | None
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class YieldedRow:
    """Status row: what an aborted transaction's commit gave way to."""

    name: str
    number: int | None
    highest: int
    txn_id: bytes


@dataclass(frozen=True, slots=True)
class CarryRow:
    """Status row: a segment of a decided transaction that is carried aside."""

    txn_id: bytes
    stream: str
    number: int
    source: int
    partition: int
    cursor: int
    first: int
    end: int
    count: int
    done: bool


@dataclass(frozen=True, slots=True)
class MovedRun:
    """A run of a writer, and where its records stand now."""

    writer: int
    first: int
    end: int
    count: int
    crc_sum: int
    at: int
    batch_base: int
    batch_size: int
    pure: bool


@dataclass(frozen=True, slots=True)
class MovedRow:
    """Status row: runs of a transaction that were moved forward in the journal."""

    stream: str
    partition: int
    runs: tuple[MovedRun, ...]


@dataclass(frozen=True, slots=True)
class JournalOp:
    """A participant op in a journal, by the controller (header ab.op)."""

    op: ParticipantOp
    txn_id: bytes
    stream_epoch: int
    commit_timestamp: int


@dataclass(frozen=True, slots=True)
class EpochSegment:
    """A segment of a stream epoch in the history: its keys, and where it begins."""

    segment_id: int
    low: int
    high: int
    partition: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """A segment that a new epoch seals."""

    segment_id: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class SegmentCommit:
    """Where a transaction's events stand in a segment."""

    segment_id: int
    partition: int
    first: int
    end: int
    count: int


class Position(NamedTuple):
    """An end offset of a partition."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """History: a new stream epoch."""

    stream_epoch: int
    reference_epoch: int
    timestamp: int
    segments: tuple[EpochSegment, ...]
    sealed: tuple[SegmentEnd, ...]
    vector: tuple[Position, ...]
    previous: int


class CommitRecord(NamedTuple):
    """History: a transaction is committed in this stream."""

    txn_id: bytes
    stream_epoch: int
    timestamp: int
    segments: tuple[SegmentCommit, ...]
    vector: tuple[Position, ...]
    previous: int
