"""Rows of the status table, on the status topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.schemas.records.parts import (
    Consumed,
    KeyRange,
    ProcessorInput,
    Receipt,
    SegmentRange,
    StreamState,
    TaskPosition,
    TxnState,
)


@dataclass(frozen=True, slots=True)
class TermRow:
    """Status row: the leader, and its term."""

    term: int
    leader: str
    since_ms: int
    resigned: bool


@dataclass(frozen=True, slots=True)
class RoundRow:
    """Status row: how far the control partition has come; written by every round."""

    term: int
    hybrid_time: int
    commands_offset: int
    control_offset: int
    expired_ms: int


@dataclass(frozen=True, slots=True)
class ScopeRow:
    """Status row (control partition 0): a scope and its control partition."""

    scope: str
    control_partition: int
    owner: str


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
    scaled_by: bytes
    correlation_id: bytes
    reply_partition: int
    reply_lane: str
    command: bytes
    topic_ids: tuple[str, ...]
    owner: str
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class EpochRow:
    """Status row: the layout of a reference epoch that may still be written to."""

    stream: str
    stream_epoch: int
    segments: tuple[SegmentRange, ...]


@dataclass(frozen=True, slots=True)
class LowWaterRow:
    """Status row: the offset below which a journal partition, or a history, may be cut."""

    stream: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlainRow:
    """Status row: how far the plain writes of a journal partition are committed."""

    stream: str
    partition: int
    offset: int
    refused: int


@dataclass(frozen=True, slots=True)
class ForgottenRow:
    """Status row: a name whose stream was taken away, or is being taken away."""

    stream: str
    times: int
    forgotten_by: bytes


@dataclass(frozen=True, slots=True)
class RetiredRow:
    """Status row: a partition with stray chunks of an aborted transaction, used no more."""

    stream: str
    partition: int


@dataclass(frozen=True, slots=True)
class SuspectRow:
    """Status row: commands that are about to be decided alone, as rounds with them may fail."""

    offset: int
    end: int
    tries: int
    lane: str


@dataclass(frozen=True, slots=True)
class SetAsideRow:
    """Status row: a command, or a record batch of commands, that was passed over."""

    offset: int
    at_ms: int
    what: str
    reason: str
    lane: str


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

    def __repr__(self) -> str:
        return f"<TxnRow {self.txn_id.hex()} {self.state}>"  # without its secret


@dataclass(frozen=True, slots=True)
class ParticipantRow:
    """Status row: a stream of a transaction."""

    stream: str
    reference_epoch: int


@dataclass(frozen=True, slots=True)
class WriterRow:
    """Status row: a writer's receipt."""

    receipt: Receipt
    lane: str


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
    runs: tuple[int, ...]
    owner: str


@dataclass(frozen=True, slots=True)
class PendingCommitRow:
    """Status row: a commit that waits for the journal, or that is decided and not yet merged."""

    correlation_ids: tuple[bytes, ...]
    reply_partitions: tuple[int, ...]
    lanes: tuple[str, ...]
    commands: tuple[bytes, ...]
    decided: bool
    writers: tuple[Receipt, ...]
    name: str | None
    number: int | None
    deadline_ms: int
    consumed: Consumed | None = None


@dataclass(frozen=True, slots=True)
class YieldedRow:
    """Status row: the claim that an aborted transaction's commit gave way to."""

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
    """A run of a writer, and the place of its records now."""

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
class LaneRow:
    """Status row: a lane, its topics and its quotas."""

    lane: str
    blocked: bool
    topic_ids: tuple[str, ...]
    quotas: Mapping[str, int]


class LanePositionRow(NamedTuple):
    """Status row: how far the commands of a lane other than `open` are decided."""

    commands_offset: int


@dataclass(frozen=True, slots=True)
class GrantRow:
    """Status row: what a lane may do where."""

    lane: str
    pattern: str
    rights: int


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Status row: an admin command that was carried out."""

    at_ms: int
    lane: str
    command: str
    what: str


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
    reset_by: bytes = b""
    first_term: int = 0


class TaskRow(NamedTuple):
    """Status row: a task of a processor."""

    term: int
    tenure: bytes
    holder: str
    taken_ms: int
    sequence: int
    txn_id: bytes
    commit_timestamp: int
    committed: int
    in_progress: bytes | None
    positions: tuple[TaskPosition, ...]
    state_sequence: int = 0
