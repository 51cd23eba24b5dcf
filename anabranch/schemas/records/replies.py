"""Replies, on the replies topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.schemas.records.parts import (
    ProcessorInput,
    Receipt,
    SegmentRange,
    ShownStreamState,
    TaskPosition,
    TxnState,
)
from anabranch.schemas.records.rows import AuditRow, GrantRow, SetAsideRow


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
    state: ShownStreamState
    stream_epoch: int
    reference_epoch: int
    segments: tuple[SegmentRange, ...]
    settings: Mapping[str, str]
    rejected: Mapping[str, int]
    journal: Mapping[str, int]
    partitions: int
    low_water: Mapping[str, int]
    staged_bytes: int
    trouble: str
    foreign: int = 0


@dataclass(frozen=True, slots=True)
class StreamList:
    """Reply to CreateStream and DescribeStreams."""

    streams: tuple[StreamInfo, ...]
    more: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """Reply to Begin."""

    txn_id: bytes
    keepalive_ms: int
    begun_ms: int


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
    owner: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Reply to Heartbeat when some transaction is not open."""

    not_open: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class TransactionList:
    """Reply to ListTransactions."""

    transactions: tuple[Outcome, ...]
    more: bytes | None = None


@dataclass(frozen=True, slots=True)
class SafeTimeIs:
    """Reply to SafeTime."""

    scope: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """A series and its highest number."""

    series: str
    number: int
    txn_id: bytes
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeriesList:
    """Reply to ListSeries and SetSeries."""

    series: tuple[SeriesInfo, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class CommandList:
    """Reply to ListCommands."""

    position: int
    end: int
    set_aside: tuple[SetAsideRow, ...]
    open_transactions: int = 0
    outcomes: int = 0


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A lane, and what it has now."""

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


@dataclass(frozen=True, slots=True)
class GrantList:
    """Reply to SetGrant and ListGrants."""

    grants: tuple[GrantRow, ...]


@dataclass(frozen=True, slots=True)
class AuditList:
    """Reply to ListAudit."""

    entries: tuple[AuditRow, ...]
    more: bytes | None = None


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of a processor as it stands."""

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


@dataclass(frozen=True, slots=True)
class ProcessorInfo:
    """A processor as it stands."""

    processor: str
    task_count: int
    inputs: tuple[ProcessorInput, ...]
    incarnation: int
    tasks: tuple[TaskInfo, ...]
    more: int | None = None
    stores: tuple[str, ...] = ()
    resets: int = 0


@dataclass(frozen=True, slots=True)
class ProcessorList:
    """Reply to CreateProcessor, DescribeProcessors, Take, Release, ResetProcessor, DeleteProcessor."""

    processors: tuple[ProcessorInfo, ...]
    more: str | None = None


class Reply(NamedTuple):
    """A controller's answer, on the replies topic."""

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
        | Alive
        | TransactionList
        | SafeTimeIs
        | SeriesList
        | CommandList
        | LaneList
        | GrantList
        | AuditList
        | ProcessorList
    )
