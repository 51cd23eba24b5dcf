"""What one commit round puts on the log: rows, replies, journal ops, merges and history records.

A `Round` is data. The shell appends it in one native transaction (`processors.durability` says in which
order) and tells where the merged events landed; `history_records` then makes the COMMIT and EPOCH records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.journal_index import StoredRun
from anabranch.schemas.records import (
    CommitRecord,
    EpochRecord,
    Event,
    JournalOp,
    Position,
    SegmentCommit,
)

NO_PREVIOUS = -1
DIRECTLY_BEFORE = -2


class Part(NamedTuple):
    """A transaction's events for one segment: runs of a journal partition, or events of a one-shot."""

    segment_id: int
    partition: int
    runs: tuple[StoredRun, ...] = ()
    events: tuple[Event, ...] = ()


class StreamCommit(NamedTuple):
    """A transaction's merge into one stream."""

    txn_id: bytes
    stream: str
    stream_epoch: int
    timestamp: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """An epoch to write to a stream's history; its previous and vector are filled in by the shell."""

    stream: str
    record: EpochRecord


class Landed(NamedTuple):
    """Where a part's events stand in the stream's partition."""

    first: int
    end: int
    records: int


@dataclass(slots=True)
class Tail:
    """The end of a stream's history: what the next record continues."""

    vector: dict[int, int] = field(default_factory=dict)
    last: int = NO_PREVIOUS


class ReplyTo(NamedTuple):
    """Who waits for an answer: the command's correlation id and its partition of replies."""

    correlation_id: bytes
    partition: int


@dataclass(slots=True)
class Round:
    """Everything that a pass of the controller decided, in order."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    replies: list[tuple[ReplyTo, Any]] = field(default_factory=list)
    ops: list[tuple[str, int, JournalOp]] = field(default_factory=list)  # stream, partition, op
    epochs: list[NewEpoch] = field(default_factory=list)
    commits: list[StreamCommit] = field(default_factory=list)
    commands: list[tuple[int, Any]] = field(default_factory=list)  # to other control partitions

    @property
    def streams(self) -> set[str]:
        """The streams whose history this round continues."""
        return {new.stream for new in self.epochs} | {commit.stream for commit in self.commits}

    @property
    def empty(self) -> bool:
        """Nothing to say: no native transaction is needed."""
        return not (self.rows or self.replies or self.commands)


def history_records(
    round_: Round,
    landed: Mapping[tuple[int, int], Landed],
    tails: Mapping[str, Tail],
) -> dict[str, list[EpochRecord | CommitRecord]]:
    """The history records of a round, by stream, in commit order. Moves the tails' vectors forward.

    ``landed``: (index of the commit in the round, index of its part) -> where it stands.
    """
    out: dict[str, list[EpochRecord | CommitRecord]] = {}
    for new in round_.epochs:
        tail = tails[new.stream]
        for segment in new.record.segments:
            tail.vector.setdefault(segment.partition, segment.start_offset)
        out.setdefault(new.stream, []).append(
            EpochRecord(
                stream_epoch=new.record.stream_epoch,
                reference_epoch=new.record.reference_epoch,
                timestamp=new.record.timestamp,
                segments=new.record.segments,
                sealed=new.record.sealed,
                vector=_positions(tail.vector),
                previous=_previous(out.get(new.stream, ()), tail),
            )
        )
    for i, commit in enumerate(round_.commits):
        tail = tails[commit.stream]
        where = []
        for j, part in enumerate(commit.parts):
            at = landed[i, j]
            where.append(
                SegmentCommit(part.segment_id, part.partition, at.first, at.end, at.records)
            )
            tail.vector[part.partition] = at.end
        out.setdefault(commit.stream, []).append(
            CommitRecord(
                txn_id=commit.txn_id,
                stream_epoch=commit.stream_epoch,
                timestamp=commit.timestamp,
                segments=tuple(where),
                vector=_positions(tail.vector),
                previous=_previous(out.get(commit.stream, ()), tail),
            )
        )
    return out


def _previous(before: Sequence[object], tail: Tail) -> int:
    return DIRECTLY_BEFORE if before else tail.last


def _positions(vector: Mapping[int, int]) -> tuple[Position, ...]:
    return tuple(Position(p, vector[p]) for p in sorted(vector))
