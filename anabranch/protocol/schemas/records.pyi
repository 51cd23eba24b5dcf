"""Generated from the schemas by ``python -m tests.schemas.records_stub``: do not edit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Asks = Literal["VOTE", "TIMESTAMP", "REOPEN"]
ChangeKind = Literal["ADD", "MIN", "MAX"]
ParticipantOp = Literal["BEGIN_TXN", "BEGIN_COMMIT", "FINALIZE_COMMIT", "ABORT_TXN"]
ShownStreamState = Literal[
    "CREATING", "ACTIVE", "LOST", "RECOVERING", "FORGETTING", "FORGOTTEN", "WAITING"
]
StreamState = Literal["CREATING", "ACTIVE", "LOST", "RECOVERING", "FORGETTING", "FORGOTTEN"]
TxnState = Literal[
    "OPEN",
    "COMMIT_IN_PROGRESS",
    "FINALIZE_IN_PROGRESS",
    "COMMITTED",
    "ABORT_IN_PROGRESS",
    "ABORTED",
    "PREPARED",
]
Verdict = Literal["COMMIT", "ABORT"]
VoteAnswer = Literal["YES", "WAITING", "AGAIN", "NO"]

def is_record(cls: type) -> bool: ...

@dataclass(frozen=True, slots=True)
class Abort:
    """Command: abort a transaction. Repeating it is harmless."""

    token: bytes
    reason: str
    secret: bytes | None = None

@dataclass(frozen=True, slots=True)
class AdoptScope:
    """Message of the directory (control partition 0) to the control partition of a scope."""

    scope: str
    lane: str

@dataclass(frozen=True, slots=True)
class AlterProcessor:
    """Command: change the inputs of a processor, and keep its state. Repeating it is harmless."""

    processor: str
    resets: int
    drop: tuple[str, ...]
    add: tuple[ProcessorInput, ...]

@dataclass(frozen=True, slots=True)
class AlterStream:
    """Command: change settings, or the description, of a stream. Repeating it is harmless."""

    stream: str
    settings: Mapping[str, str]
    unset: tuple[str, ...]
    description: str | None = None

@dataclass(frozen=True, slots=True)
class AskDecision:
    """Message to a coordinator: a part of a one-shot is logged here, and no decision has come."""

    txn_id: bytes
    partition: int
    head: TxnHead

class AskVote(NamedTuple):
    """Message to a participant: can it commit? It is repeated until this round of votes has a vote."""

    txn_id: bytes
    head: TxnHead
    votes_round: int
    asks: Asks
    exactly: bool
    receipts: tuple[Receipt, ...] = ()
    prepare: Prepare | None = None

@dataclass(frozen=True, slots=True)
class Asker:
    """A command that waits for its answer."""

    correlation_id: bytes
    reply_partition: int
    command: bytes
    lane: str
    held: bool
    decided: bool = False

@dataclass(frozen=True, slots=True)
class AuditList:
    """Reply to ListAudit."""

    entries: tuple[AuditRow, ...]
    more: bytes | None = None

@dataclass(frozen=True, slots=True)
class AuditRow:
    """Status row: an admin command that was carried out."""

    at_ms: int
    lane: str
    command: str
    what: str

@dataclass(frozen=True, slots=True)
class BaseRow:
    """Status row: the base that a table begins at."""

    timestamp: int
    txn_id: bytes
    commit_timestamp: int
    rows: int
    position: int
    last: int

@dataclass(frozen=True, slots=True)
class Begin:
    """Command: begin a transaction under an id that the client made. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    keepalive_ms: int
    secret: bytes
    fencing_hash: bytes | None = None
    snapshot: int = 0

@dataclass(frozen=True, slots=True)
class Begun:
    """Reply to Begin."""

    txn_id: bytes
    keepalive_ms: int
    begun_ms: int

@dataclass(frozen=True, slots=True)
class Blocker:
    """A transaction or processor that blocks the deletion of a stream or the compaction of a table."""

    what: str
    name: str
    lane: str
    age_ms: int
    ends: str

@dataclass(frozen=True, slots=True)
class BrokenLock:
    """A registered lock that another transaction's commit broke."""

    table: str
    key: bytes
    range: LockedRange | None
    timestamp: int
    by: bytes

@dataclass(frozen=True, slots=True)
class ChangedRow:
    """Status row: the last change of something that commands set."""

    timestamp: int
    asker: bytes

@dataclass(frozen=True, slots=True)
class CommandList:
    """Reply to ListCommands."""

    position: int
    end: int
    quarantined: tuple[QuarantineRow, ...]
    open_transactions: int = 0
    outcomes: int = 0

@dataclass(frozen=True, slots=True)
class Commit:
    """Command: commit a transaction, or prepare it. Repeating it is harmless."""

    token: bytes
    own: tuple[Receipt, ...]
    receipts: tuple[Receipt, ...] | None
    name: str | None
    wait_ms: int
    number: int | None = None
    consumed: Consumed | None = None
    prepare: Prepare | None = None
    secret: bytes | None = None
    validated: tuple[Validated, ...] = ()

class CommitRecord(NamedTuple):
    """History: the commit of a transaction, or of plain writes, in this stream."""

    txn_id: bytes
    stream_epoch: int
    timestamp: int
    segments: tuple[SegmentCommit, ...]
    vector: tuple[Position, ...]
    previous: int
    vector_at: int = -1
    safe: int = 0

@dataclass(frozen=True, slots=True)
class Consumed:
    """Positions of tasks that a commit moves, together with its events."""

    processor: str
    fencing_token: bytes
    steps: tuple[TaskStep, ...]

class CoordinatorRow(NamedTuple):
    """Status row: what a participant has promised to the coordinator of a transaction."""

    votes_round: int
    prepare_timestamp: int = 0
    staged: bool = False
    forced: bool = False

@dataclass(frozen=True, slots=True)
class CopyProcessor:
    """Command: begin a copy of a processor under a new name, or end it. Repeating it is harmless."""

    processor: str
    origin: str
    origin_resets: int
    resets: int
    phase: str

@dataclass(frozen=True, slots=True)
class CreateProcessor:
    """Command: make a processor, or add stores to one with equal tasks and inputs. Repeating it is harmless."""

    processor: str
    tasks: int
    inputs: tuple[ProcessorInput, ...]
    stores: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    topology: str = ""

@dataclass(frozen=True, slots=True)
class CreateStream:
    """Command: create a stream. Repeating it with equal settings is harmless."""

    stream: str
    segments: int
    settings: Mapping[str, str]
    adopt: bool = False
    description: str = ""

class Decide(NamedTuple):
    """Message to a participant: the decision. It is repeated until `Done`."""

    txn_id: bytes
    head: TxnHead
    verdict: Verdict
    timestamp: int = 0
    reason: str = ""

@dataclass(frozen=True, slots=True)
class DeleteProcessor:
    """Command: delete a processor and its state. Repeating it is harmless."""

    processor: str
    resets: int

@dataclass(frozen=True, slots=True)
class DeleteStream:
    """Command: delete a stream with its topics and events, LOST or not. Repeating it is harmless."""

    stream: str
    despite: tuple[str, ...] = ()

class Derivation(NamedTuple):
    """A version of a derivation: of the function that makes a derived table's rows from a source's."""

    source: str
    name: str
    version: int

@dataclass(frozen=True, slots=True)
class DescribeLeader:
    """Command: who leads the control partition, and how much it does."""

@dataclass(frozen=True, slots=True)
class DescribeProcessors:
    """Command: list the processors of a scope, or describe one with its tasks."""

    scope: str
    processor: str | None = None
    after: str | None = None
    task: int = 0
    topology: bool = False

@dataclass(frozen=True, slots=True)
class DescribeStreams:
    """Command: describe one stream, all of a scope, or all of this control partition."""

    scope: str | None
    stream: str | None
    after: str | None = None
    rejected: bool = False

class Done(NamedTuple):
    """Message to a coordinator: a participant has carried out `Decide`."""

    txn_id: bytes
    partition: int
    committed: int
    left_out: int
    rejected: int
    reason: str

@dataclass(frozen=True, slots=True)
class Ended:
    """Reply to Heartbeat if some transactions are committed or aborted."""

    not_open: tuple[Outcome, ...]

@dataclass(frozen=True, slots=True)
class Enlist:
    """Message to a coordinator: a client touches a stream of another control partition. May it?"""

    txn_id: bytes
    partition: int
    scope: str
    token: bytes
    lane: str

@dataclass(frozen=True, slots=True)
class Enlisted:
    """Message to a participant: the answer to `Enlist`."""

    txn_id: bytes
    scope: str
    head: TxnHead | None = None
    refusal: Refusal | None = None

@dataclass(frozen=True, slots=True)
class EpochRecord:
    """History: a new stream epoch, or the present one again."""

    stream_epoch: int
    reference_epoch: int
    timestamp: int
    segments: tuple[EpochSegment, ...]
    sealed: tuple[SegmentEnd, ...]
    vector: tuple[Position, ...]
    previous: int
    safe: int = 0

@dataclass(frozen=True, slots=True)
class EpochRow:
    """Status row: the segments of a reference epoch that may still be written to."""

    stream: str
    stream_epoch: int
    segments: tuple[SegmentRange, ...]

@dataclass(frozen=True, slots=True)
class EpochSegment:
    """A segment of a stream epoch in the history: its keys, and where it begins."""

    segment_id: int
    low: int
    high: int
    partition: int
    start_offset: int

class Event(NamedTuple):
    """An event inside a one-shot commit."""

    stream: str
    segment_id: int
    key: bytes | None
    value: bytes | None
    headers: tuple[EventHeader, ...]
    timestamp: int

class EventHeader(NamedTuple):
    """A header of an event."""

    key: str
    value: bytes | None

@dataclass(frozen=True, slots=True)
class Extent:
    """One writer's records in one journal partition."""

    stream: str
    partition: int
    first: int
    end: int
    count: int
    crc_sum: int

@dataclass(frozen=True, slots=True)
class FeatureLevel:
    """Result: the feature level of the control partition."""

    level: int
    known: int
    control_partitions: int = 0

@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Status row: the feature level, up to which controllers write, and how many control partitions are in use."""

    level: int
    raised_ms: int
    control_partitions: int = 0

@dataclass(frozen=True, slots=True)
class FindScope:
    """Command to control partition 0, the directory: find the control partition of a scope."""

    scope: str
    create: bool
    near: str | None = None

class FollowedRows(NamedTuple):
    """Rows of a table, read as another transaction writes them, locked since then. Without a table: the order."""

    txn_id: bytes
    table: str
    points: tuple[int, ...]

@dataclass(frozen=True, slots=True)
class Force:
    """Command: abort a transaction whose merge can't finish, or end a PREPARED one. Repeating it is harmless."""

    token: bytes
    reason: str
    outcome: bool | None = None

@dataclass(frozen=True, slots=True)
class ForgetStream:
    """Command: delete a LOST stream with what is left of its topics. Repeating it is harmless."""

    stream: str

@dataclass(frozen=True, slots=True)
class ForgottenRow:
    """Status row: the name of a stream that was deleted, or is being deleted."""

    stream: str
    times: int

@dataclass(frozen=True, slots=True)
class FormerPendingCommitRow:
    """Status row: a `PendingCommitRow` as older builds wrote it. It is read, and not written any more."""

    correlation_ids: tuple[bytes, ...]
    reply_partitions: tuple[int, ...]
    lanes: tuple[str, ...]
    commands: tuple[bytes, ...]
    decided: bool
    writers: tuple[Receipt, ...]
    name: str | None
    number: int | None
    deadline_ms: int
    consumed: Consumed | None
    prepare: Prepare | None
    held: tuple[bytes, ...]

@dataclass(frozen=True, slots=True)
class FormerTableRow:
    """Status row: a table's newest commit, as older versions wrote it. Controllers only read it."""

    last: int

@dataclass(frozen=True, slots=True)
class GetState:
    """Command: the outcome of a transaction so far; changes nothing."""

    txn_id: bytes
    token: bytes | None = None
    after: int | None = None

@dataclass(frozen=True, slots=True)
class GrantList:
    """Reply to SetGrant and ListGrants."""

    grants: tuple[GrantRow, ...]

@dataclass(frozen=True, slots=True)
class GrantRow:
    """Status row: the rights of a lane on a pattern."""

    lane: str
    pattern: str
    rights: int

@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Command: keep transactions alive. Answered only if one is committed or aborted, or a token is refused."""

    tokens: tuple[bytes, ...]

@dataclass(frozen=True, slots=True)
class JournalOp:
    """Journal: what a controller did with a transaction (header ab.op)."""

    op: ParticipantOp
    txn_id: bytes
    stream_epoch: int
    commit_timestamp: int

@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of key positions."""

    low: int
    high: int

@dataclass(frozen=True, slots=True)
class LabelRow:
    """Status row: the label of a writer of an open transaction."""

    label: str

@dataclass(frozen=True, slots=True)
class LabelWriter:
    """Command: give a registered writer a label for people."""

    token: bytes
    writer: int
    label: str

@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A lane, its quotas and their usage."""

    lane: str
    blocked: bool
    trouble: str
    topic_ids: tuple[str, ...]
    quotas: Mapping[str, int]
    usage: Mapping[str, int]
    position: int
    end: int

@dataclass(frozen=True, slots=True)
class LaneList:
    """Reply to SetLane and ListLanes."""

    lanes: tuple[LaneInfo, ...]

class LanePositionRow(NamedTuple):
    """Status row: up to where the commands of a lane other than `open` are decided."""

    commands_offset: int

@dataclass(frozen=True, slots=True)
class LaneRow:
    """Status row: a lane, its topics and its quotas."""

    lane: str
    blocked: bool
    topic_ids: tuple[str, ...]
    quotas: Mapping[str, int]

@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """Reply to DescribeLeader."""

    term: int
    leader: str
    since_ms: int
    committed: int
    uncommitted_bytes: int
    busy_us: int = 0
    waiting: int = 0

@dataclass(frozen=True, slots=True)
class ListAudit:
    """Command: list what operators did, newest first."""

    before: bytes | None = None

@dataclass(frozen=True, slots=True)
class ListCommands:
    """Command: up to where a control partition's commands are decided, and which were quarantined."""

@dataclass(frozen=True, slots=True)
class ListGrants:
    """Command: list the grants."""

@dataclass(frozen=True, slots=True)
class ListLanes:
    """Command: list the lanes."""

@dataclass(frozen=True, slots=True)
class ListLocks:
    """Command: the next set of a writer's registered locks, to validate it in that writer's place."""

    token: bytes
    writer: int
    after: int

@dataclass(frozen=True, slots=True)
class ListOpen:
    """Command: list open transactions, oldest first, with what they occupy and wait for."""

    scope: str | None
    txn_id: bytes | None
    limit: int
    after: bytes | None = None

@dataclass(frozen=True, slots=True)
class ListRuns:
    """Command: where accepted records of writers are in a stream's journal, as a merge would take them."""

    token: bytes
    stream: str
    wanted: tuple[RunsWanted, ...]

@dataclass(frozen=True, slots=True)
class ListSeries:
    """Command: list the series of a scope, in falling order of names."""

    scope: str
    series: str | None
    before: str | None

@dataclass(frozen=True, slots=True)
class ListTableLocks:
    """Command: list registered locks by open transaction and table, and which transactions wait for which."""

    scope: str | None
    limit: int
    after: bytes | None = None

@dataclass(frozen=True, slots=True)
class ListTransactions:
    """Command: list transactions."""

    scope: str | None
    include_finished: bool
    limit: int
    before: bytes | None = None
    prepared: bool = False
    secret: bytes | None = None

@dataclass(frozen=True, slots=True)
class LockReads:
    """Command: register locks, which every later commit is checked against. Repeating it is harmless."""

    token: bytes
    writer: int
    sequence: int
    locks: tuple[TableLocks, ...] = ()
    read_from: tuple[WriterAt, ...] = ()
    validated: tuple[Validated, ...] = ()
    tables: tuple[str, ...] = ()

@dataclass(frozen=True, slots=True)
class LockedRange:
    """A range of a table's keys that a transaction read."""

    low: bytes
    high: bytes | None

@dataclass(frozen=True, slots=True)
class LockedSegment:
    """A segment of an exclusive stream, and the transaction that has locked it."""

    stream: str
    segment: int
    txn_id: bytes
    owner: str
    held_ms: int
    left_ms: int
    waiting: tuple[bytes, ...]

@dataclass(frozen=True, slots=True)
class LowWaterRow:
    """Status row: the offset below which a journal partition, or a history, may be truncated."""

    stream: str
    partition: int
    offset: int

@dataclass(frozen=True, slots=True)
class MovedRow:
    """Status row: runs of a transaction that were moved forward in the journal."""

    stream: str
    partition: int
    runs: tuple[MovedRun, ...]
    latest: int = 0

@dataclass(frozen=True, slots=True)
class MovedRun:
    """A run of a writer, and where its records are now."""

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
class NameRow:
    """Status row: the transaction that has a name."""

    txn_id: bytes

class OneShot(NamedTuple):
    """Command: commit a whole transaction. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    events: tuple[Event, ...]
    consumed: Consumed | None = None
    locks: tuple[TableLocks, ...] = ()
    changes: tuple[RowChange, ...] = ()
    follows: tuple[FollowedRows, ...] = ()
    turn_to: bytes | None = None
    derivations: tuple[Derivation, ...] = ()
    places: tuple[int, ...] = ()
    secret: bytes | None = None

@dataclass(frozen=True, slots=True)
class OpenInfo:
    """An open transaction: what it occupies and waits for."""

    outcome: Outcome
    uncommitted_bytes: int
    age_ms: int
    silent_ms: int
    left_ms: int
    writer_count: int
    writers: tuple[WriterInfo, ...]
    staged_merges: tuple[StagedMergeInfo, ...]
    journals: Mapping[str, int]
    locks: int = 0
    frozen: bool = False
    waits: WaitInfo | None = None
    ends: str = ""
    locked_segments: tuple[LockedSegment, ...] = ()
    asks: tuple[LockedSegment, ...] = ()
    partitions: tuple[PartInfo, ...] = ()

@dataclass(frozen=True, slots=True)
class OpenList:
    """Reply to ListOpen."""

    transactions: tuple[OpenInfo, ...]
    more: bytes | None = None

class Outcome(NamedTuple):
    """Reply to Commit, OneShot, PrepareEvents, Abort, Force, Resolve, GetState; to Begin if it is past OPEN."""

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
    owner: str
    prepared_ms: int = 0
    prepared_by: bytes = b""
    tables: tuple[TableTime, ...] = ()
    snapshot: int = 0
    broken: BrokenLock | None = None

@dataclass(frozen=True, slots=True)
class PartInfo:
    """A part of a transaction on another control partition than its coordinator, which knows this."""

    partition: int
    scopes: tuple[str, ...]
    state: TxnState
    votes_round: int
    vote: VoteAnswer | None
    waited_ms: int

@dataclass(frozen=True, slots=True)
class ParticipantRow:
    """Status row: a stream that a transaction has touched."""

    stream: str
    reference_epoch: int
    locked: tuple[int, ...] = ()
    locked_ms: int = 0

class PartitionRow(NamedTuple):
    """Status row: a participant of a transaction, at its coordinator."""

    scopes: tuple[str, ...]
    done: bool = False
    committed: int = 0
    left_out: int = 0
    rejected: int = 0
    reason: str = ""

class PendingCommitRow(NamedTuple):
    """Status row: a commit that waits for the journals, or is decided and not merged yet."""

    askers: tuple[Asker, ...]
    decided: bool
    writers: tuple[Receipt, ...]
    name: str | None
    number: int | None
    deadline_ms: int
    consumed: Consumed | None = None
    prepare: Prepare | None = None

@dataclass(frozen=True, slots=True)
class PlainRow:
    """Status row: up to where the plain writes of a journal partition are committed."""

    stream: str
    partition: int
    offset: int
    refused: int

class Position(NamedTuple):
    """An end offset of a partition."""

    partition: int
    offset: int

@dataclass(frozen=True, slots=True)
class Prepare:
    """How a transaction is prepared: by which coordinator, in which attempt."""

    by: bytes
    attempt: bytes

@dataclass(frozen=True, slots=True)
class PrepareEvents:
    """Command: prepare a whole transaction, whose events are placed when it commits. Repeating it is harmless."""

    txn_id: bytes
    scope: str
    name: str | None
    events: tuple[Event, ...]
    secret: bytes
    prepare: Prepare
    consumed: Consumed | None = None
    locks: tuple[TableLocks, ...] = ()
    derivations: tuple[Derivation, ...] = ()

@dataclass(frozen=True, slots=True)
class PreparedRow:
    """Status row: how a transaction was prepared; kept as long as its outcome."""

    prepare: Prepare
    prepared_ms: int
    events: tuple[Event, ...] = ()

@dataclass(frozen=True, slots=True)
class ProcessorInfo:
    """A processor as it is now."""

    processor: str
    task_count: int
    inputs: tuple[ProcessorInput, ...]
    incarnation: int
    tasks: tuple[TaskInfo, ...]
    more: int | None = None
    stores: tuple[str, ...] = ()
    resets: int = 0
    origin: str = ""
    phase: str = ""
    topology: str = ""

@dataclass(frozen=True, slots=True)
class ProcessorInput:
    """An input of a processor."""

    stream: str
    topic_id: str
    record: int
    timestamp: int

@dataclass(frozen=True, slots=True)
class ProcessorList:
    """Reply to the commands on processors and their tasks."""

    processors: tuple[ProcessorInfo, ...]
    more: str | None = None

@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """Status row: a processor."""

    processor: str
    tasks: int
    inputs: tuple[ProcessorInput, ...]
    incarnation: int
    owner: str
    stores: tuple[str, ...] = ()
    resets: int = 0
    first_term: int = 0
    kinds: tuple[str, ...] = ()
    origin: str = ""
    phase: str = ""
    topology: str = ""

@dataclass(frozen=True, slots=True)
class PublishBase:
    """Command: begin a table at a base, and delete what no promised snapshot needs. Repeating it is harmless."""

    table: str
    timestamp: int
    txn_id: bytes

@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """Status row: a command, or a record batch of commands, that was quarantined."""

    offset: int
    at_ms: int
    what: str
    reason: str
    lane: str

@dataclass(frozen=True, slots=True)
class ReadLockRow:
    """Status row: a set of registered locks of an open transaction."""

    locks: tuple[TableLocks, ...]
    read_from: tuple[WriterAt, ...] = ()

@dataclass(frozen=True, slots=True)
class ReadsLocked:
    """Reply to LockReads and ListLocks."""

    snapshot: int
    timestamp: int
    tables: tuple[TableTime, ...]
    broken: BrokenLock | None = None
    sequence: int = 0
    locks: tuple[TableLocks, ...] = ()

@dataclass(frozen=True, slots=True)
class ReadsRow:
    """Status row: tables that are kept readable at the snapshot of an open transaction."""

    tables: Mapping[str, str]

@dataclass(frozen=True, slots=True)
class Receipt:
    """What one writer wrote so far; the receipt with the highest sequence counts."""

    txn_id: bytes
    writer: int
    sequence: int
    finished: bool
    extents: tuple[Extent, ...]
    seen: int = 0

@dataclass(frozen=True, slots=True)
class RecoverStream:
    """Command: make a LOST stream ACTIVE again if its former topics exist. Repeating it is harmless."""

    stream: str

@dataclass(frozen=True, slots=True)
class Refusal:
    """Reply: the command was refused, and nothing changed."""

    code: str
    message: str

@dataclass(frozen=True, slots=True)
class Register:
    """Command: register a writer's receipt."""

    token: bytes
    receipt: Receipt

@dataclass(frozen=True, slots=True)
class Registered:
    """Reply to Register."""

    sequence: int

@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A journal record that was rejected after the broker had acknowledged it."""

    partition: int
    offset: int
    key: bytes | None
    reason: str
    at_ms: int

@dataclass(frozen=True, slots=True)
class RejectedRow:
    """Status row: the records of a stream's journal that were rejected."""

    counts: Mapping[str, int]
    until: Mapping[str, int]
    records: tuple[RejectedRecord, ...]

@dataclass(frozen=True, slots=True)
class ReleaseTasks:
    """Command: give up tasks. Repeating it is harmless."""

    processor: str
    fencing_token: bytes
    tasks: tuple[int, ...]

class Reply(NamedTuple):
    """The answer to a command, on a replies topic."""

    correlation_id: bytes
    command: bytes
    hybrid_time: int
    result: (
        Refusal
        | ScopeInfo
        | StreamList
        | Begun
        | Touched
        | Registered
        | Outcome
        | Ended
        | TransactionList
        | SafeTimeReply
        | SeriesList
        | CommandList
        | LaneList
        | GrantList
        | AuditList
        | ProcessorList
        | OpenList
        | Revalidate
        | ReadsLocked
        | RunList
        | TableLockList
        | FeatureLevel
        | LeaderInfo
    )

@dataclass(frozen=True, slots=True)
class ResetProcessor:
    """Command: end all task ownership of a processor, and restart it. Repeating it is harmless."""

    processor: str
    resets: int
    inputs: tuple[ProcessorInput, ...]
    keep_state: bool

@dataclass(frozen=True, slots=True)
class Resolve:
    """Command: the outcome of a transaction; an unknown one is aborted first."""

    txn_id: bytes
    scope: str
    token: bytes | None = None

@dataclass(frozen=True, slots=True)
class RetiredRow:
    """Status row: a partition with chunks of an aborted staged merge, which is not used again."""

    stream: str
    partition: int

@dataclass(frozen=True, slots=True)
class Revalidate:
    """Reply to OneShot, Commit: validate the locks, and send the command again; to TakeTurn: the turn has come."""

    timestamp: int
    tables: tuple[TableTime, ...]
    writers: tuple[int, ...] = ()
    decided: bool = False

@dataclass(frozen=True, slots=True)
class RoundRow:
    """Status row: up to where the control partition has come. Each round writes it."""

    term: int
    hybrid_time: int
    commands_offset: int
    control_offset: int
    expired_ms: int

class RowChange(NamedTuple):
    """A change to a row that commutes with others of its kind. The row is a decimal integer."""

    table: str
    key: bytes
    kind: ChangeKind
    number: int
    base: bytes | None

@dataclass(frozen=True, slots=True)
class RunList:
    """Reply to ListRuns."""

    runs: tuple[RunPlace, ...]
    more: tuple[RunsWanted, ...]

@dataclass(frozen=True, slots=True)
class RunPlace:
    """Consecutive records of one writer, and where they are now."""

    writer: int
    partition: int
    first: int
    end: int
    records: int
    at: int
    batch_base: int

@dataclass(frozen=True, slots=True)
class RunsWanted:
    """A writer's records between two offsets of a journal partition, as in its receipts."""

    writer: int
    partition: int
    first: int
    end: int

@dataclass(frozen=True, slots=True)
class SafeTime:
    """Command: make a time safe: all commits up to it are on the log, and later ones exceed it."""

    scope: str
    at: int | None
    tables: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()

@dataclass(frozen=True, slots=True)
class SafeTimeReply:
    """Reply to SafeTime."""

    scope: str
    timestamp: int
    tables: tuple[TableTime, ...] = ()
    safe: bool = True

@dataclass(frozen=True, slots=True)
class Scale:
    """Command: change the segments of a stream. Repeating it is harmless."""

    stream: str
    segments: int
    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]

@dataclass(frozen=True, slots=True)
class Scaling:
    """A scaling that waits for partitions."""

    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]
    correlation_id: bytes
    reply_partition: int
    reply_lane: str
    command: bytes

@dataclass(frozen=True, slots=True)
class ScopeInfo:
    """Reply to FindScope."""

    scope: str
    control_partition: int

@dataclass(frozen=True, slots=True)
class ScopeRow:
    """Status row: a scope and its control partition; the directory has those of all scopes."""

    scope: str
    control_partition: int
    owner: str
    floor: int = 0

@dataclass(frozen=True, slots=True)
class SegmentCommit:
    """Where a transaction's events are in a segment."""

    segment_id: int
    partition: int
    first: int
    end: int
    count: int

@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """A segment that a new epoch seals."""

    segment_id: int
    end_offset: int

@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A segment of a stream epoch, and its key range."""

    segment_id: int
    low: int
    high: int
    partition: int

@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """A series and its highest number."""

    series: str
    number: int
    txn_id: bytes
    runs: tuple[int, ...]
    owner: str = ""
    taken_ms: int = 0

@dataclass(frozen=True, slots=True)
class SeriesList:
    """Reply to ListSeries and SetSeries."""

    series: tuple[SeriesInfo, ...]
    more: bool

@dataclass(frozen=True, slots=True)
class SeriesRow:
    """Status row: the highest number of a series, and the transaction that has it."""

    number: int
    txn_id: bytes
    earlier_number: int
    earlier_txn_id: bytes
    runs: tuple[int, ...]
    owner: str

@dataclass(frozen=True, slots=True)
class SetFeatureLevel:
    """Command: raise the feature level, or the number of control partitions in use. Repeating it is harmless."""

    level: int | None
    control_partitions: int = 0

@dataclass(frozen=True, slots=True)
class SetGrant:
    """Command: set the rights of a lane on a pattern. Repeating it is harmless."""

    lane: str
    pattern: str
    rights: int

@dataclass(frozen=True, slots=True)
class SetLane:
    """Command: make or change a lane. Repeating it is harmless."""

    lane: str
    blocked: bool
    topic_ids: tuple[str, ...]
    quotas: Mapping[str, int]

@dataclass(frozen=True, slots=True)
class SetSeries:
    """Command: set the number or the owner of a series. Repeating it is harmless."""

    scope: str
    series: str
    expected: int | None
    number: int
    owner: str | None = None

@dataclass(frozen=True, slots=True)
class StagedMergeInfo:
    """A segment whose events are being staged for a decided transaction."""

    stream: str
    partition: int
    staged: int
    events: int
    chunks: int
    done: bool

@dataclass(frozen=True, slots=True)
class StagedMergeRow:
    """Status row: a segment whose events are being staged for a decided transaction."""

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
class StreamChange:
    """A change of a stream's topics that is under way."""

    settings: Mapping[str, str]
    until: int
    base: bytes | None = None
    description: str = ""

@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as it is now."""

    stream: str
    state: ShownStreamState
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    settings: Mapping[str, str]
    rejected: Mapping[str, int]
    journal: Mapping[str, int]
    partitions: int
    low_water: Mapping[str, int]
    uncommitted_bytes: int
    trouble: str
    foreign: int = 0
    base: BaseRow | None = None
    oldest_snapshot: int = 0
    blockers: tuple[Blocker, ...] = ()
    description: str = ""
    rejected_records: tuple[RejectedRecord, ...] = ()
    locked_segments: tuple[LockedSegment, ...] = ()

@dataclass(frozen=True, slots=True)
class StreamList:
    """Reply to commands about streams."""

    streams: tuple[StreamInfo, ...]
    more: str | None = None

@dataclass(frozen=True, slots=True)
class StreamRow:
    """Status row: a stream."""

    stream: str
    state: StreamState
    segment_count: int
    settings: Mapping[str, str]
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    next_number: int
    partitions: int
    wanted_partitions: int
    scaling: Scaling | None
    correlation_id: bytes
    reply_partition: int
    reply_lane: str
    command: bytes
    topic_ids: tuple[str, ...]
    owner: str
    adopt: bool = False
    change: StreamChange | None = None
    description: str = ""

@dataclass(frozen=True, slots=True)
class SuspectRow:
    """Status row: commands of a round that failed, which are decided alone."""

    offset: int
    end: int
    tries: int
    lane: str

@dataclass(frozen=True, slots=True)
class TableLockInfo:
    """The registered locks of an open transaction on a table."""

    txn_id: bytes
    table: str
    points: int
    ranges: int
    frozen: bool
    broken: bool
    waiting: tuple[bytes, ...]
    waits_for: tuple[bytes, ...]

@dataclass(frozen=True, slots=True)
class TableLockList:
    """Reply to ListTableLocks: locks by transaction and table."""

    locks: tuple[TableLockInfo, ...]
    more: bytes | None = None

class TableLocks(NamedTuple):
    """What a transaction read of a table, and through which time this is validated."""

    table: str
    since: int
    last: int
    points: tuple[int, ...]
    ranges: tuple[LockedRange, ...]

class TableRow(NamedTuple):
    """Status row: times of a table's newest commits."""

    last: int
    unknown: int = 0
    bounded: int = 0

class TableTime(NamedTuple):
    """A table and its newest commit."""

    table: str
    last: int

@dataclass(frozen=True, slots=True)
class TakeTasks:
    """Command: take tasks of a processor, so that no other owner commits for them. Repeating it is harmless."""

    processor: str
    fencing_token: bytes
    holder: str
    tasks: tuple[int, ...]
    terms: tuple[int, ...]
    copying: bool = False

@dataclass(frozen=True, slots=True)
class TakeTurn:
    """Command: ask for a turn at a row at which transactions conflict, or give it up. Repeating it is harmless."""

    txn_id: bytes
    former: bytes | None
    table: str
    point: int
    tables: tuple[str, ...]
    wait_ms: int

@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of a processor as it is now."""

    task: int
    term: int
    holder: str
    taken_ms: int
    sequence: int
    txn_id: bytes
    commit_timestamp: int
    in_progress: bytes | None
    positions: tuple[TaskPosition, ...]
    state_sequence: int = 0

class TaskPosition(NamedTuple):
    """Up to where a task has consumed an input of its processor."""

    input: int
    record: int
    timestamp: int
    segment: int = -1
    offset: int = -1

class TaskRow(NamedTuple):
    """Status row: a task of a processor."""

    term: int
    fencing_hash: bytes
    holder: str
    taken_ms: int
    sequence: int
    txn_id: bytes
    commit_timestamp: int
    committed: int
    in_progress: bytes | None
    positions: tuple[TaskPosition, ...]
    state_sequence: int = 0

@dataclass(frozen=True, slots=True)
class TaskStep:
    """A step of tasks that get the same positions by one commit."""

    tasks: tuple[int, ...]
    sequence: int
    positions: tuple[TaskPosition, ...]

@dataclass(frozen=True, slots=True)
class TermRow:
    """Status row: the leader and its term."""

    term: int
    leader: str
    since_ms: int
    resigned: bool

@dataclass(frozen=True, slots=True)
class Touch:
    """Command: add a stream to a transaction, before the first write to it. Repeating it is harmless."""

    token: bytes
    stream: str
    writer: int = 0
    derivations: tuple[Derivation, ...] = ()
    positions: tuple[int, ...] = ()
    wait_ms: int = 0

@dataclass(frozen=True, slots=True)
class Touched:
    """Reply to Touch: where to write."""

    stream: str
    stream_epoch: int
    segments: tuple[SegmentRange, ...]
    is_table: bool = False
    exclusive: bool = False
    locked: tuple[int, ...] = ()

@dataclass(frozen=True, slots=True)
class TransactionList:
    """Reply to ListTransactions."""

    transactions: tuple[Outcome, ...]
    more: bytes | None = None

@dataclass(frozen=True, slots=True)
class TruncateStream:
    """Command: delete a stream's oldest events, up to a commit timestamp. Repeating it is harmless."""

    stream: str
    until: int

class TxnHead(NamedTuple):
    """What a participant has to know of a transaction of another control partition."""

    scope: str
    owner: str
    keepalive_ms: int
    begun_ms: int
    secret: bytes
    snapshot: int

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
    secret: bytes | None
    owner: str
    consumes: bytes | None = None
    snapshot: int = 0
    broken: BrokenLock | None = None

@dataclass(frozen=True, slots=True)
class Validated:
    """Report that no commit up to a time broke the locks of some sets."""

    writer: int
    sequence: int
    validated_through: int

@dataclass(frozen=True, slots=True)
class ValidatedRow:
    """Status row: through which time the registered locks of a writer are validated."""

    sequence: int
    validated_through: int
    due: int

class Vote(NamedTuple):
    """Message to a coordinator: a participant's answer to `AskVote`, from its rows."""

    txn_id: bytes
    partition: int
    votes_round: int
    answer: VoteAnswer
    timestamp: int = 0
    stages: bool = False
    committed: int = 0
    left_out: int = 0
    error: Refusal | None = None
    revalidate: Revalidate | None = None

class VotesRow(NamedTuple):
    """Status row: the round of votes of a transaction with participants, at its coordinator."""

    votes_round: int
    asks: Asks
    own_merged: bool = False

@dataclass(frozen=True, slots=True)
class WaitInfo:
    """What the merge of a decided transaction waits for."""

    why: str
    stream: str
    text: str
    age_ms: int

@dataclass(frozen=True, slots=True)
class WriterAt:
    """A writer of a transaction, up to one of its receipts."""

    writer: int
    sequence: int

@dataclass(frozen=True, slots=True)
class WriterInfo:
    """A writer of an open transaction."""

    writer: int
    lane: str
    label: str
    events: int
    finished: bool

@dataclass(frozen=True, slots=True)
class WriterRow:
    """Status row: the latest receipt of a writer."""

    receipt: Receipt
    lane: str

@dataclass(frozen=True, slots=True)
class YieldedRow:
    """Status row: why a transaction was aborted by its own commit: an earlier one has the name or number."""

    name: str
    number: int | None
    highest: int
    txn_id: bytes
