"""The controller's records in a stream's history and journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


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
    """The place of a transaction's events in a segment."""

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
    vector_at: int = -1


ParticipantOp = Literal["BEGIN_TXN", "BEGIN_COMMIT", "FINALIZE_COMMIT", "ABORT_TXN"]


@dataclass(frozen=True, slots=True)
class JournalOp:
    """A participant op in a journal, by the controller (header ab.op)."""

    op: ParticipantOp
    txn_id: bytes
    stream_epoch: int
    commit_timestamp: int
