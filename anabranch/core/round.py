"""One commit round, as it goes on the log: rows, replies, journal ops, merges and history records.

A `Round` is data. The shell appends it in one native transaction (`processors.durability` has the order) and
tells where the merged events landed. `history_records` then makes the COMMIT and EPOCH records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from anabranch.core import vectors
from anabranch.core.journal.runs import StoredRun
from anabranch.errors import check
from anabranch.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Event,
    JournalOp,
    SegmentCommit,
    SegmentEnd,
    SegmentRange,
)

NO_PREVIOUS = -1
DIRECTLY_BEFORE = -2


class Landed(NamedTuple):
    """The place of a part's events in the stream's partition: first offset, last offset + 1, number of records.

    An empty part has all 0. Offsets in between may be markers, never another part's.
    """

    first: int
    end: int
    records: int


class PlainWrites(NamedTuple):
    """Plain writes that a commit takes from a journal partition: whole runs, in order."""

    source: int
    runs: tuple[StoredRun, ...]


class Part(NamedTuple):
    """A transaction's events for one segment: runs of a journal partition, or events of a one-shot.

    ``source``: the journal partition of the runs. ``carried``: the events are in the stream already.
    """

    segment_id: int
    partition: int
    runs: tuple[StoredRun, ...] = ()
    events: tuple[Event, ...] = ()
    source: int = -1
    carried: Landed | None = None


class StreamCommit(NamedTuple):
    """A transaction's merge into one stream, or a commit of plain writes.

    ``plain``: writes without a transaction id. Their records are placed by key into ``layout``, which has an empty
    part for each of its segments; only parts that got records come into the history.
    """

    txn_id: bytes
    stream: str
    stream_epoch: int
    timestamp: int
    parts: tuple[Part, ...]
    plain: tuple[PlainWrites, ...] = ()
    layout: tuple[SegmentRange, ...] = ()


class NewEpoch(NamedTuple):
    """An epoch to write to a stream's history.

    ``starts``: partition -> offset where it begins, unless that is the known end. ``again``: this is the active
    epoch, logged once more so that a history may begin there.
    """

    stream: str
    stream_epoch: int
    reference_epoch: int
    timestamp: int
    segments: tuple[SegmentRange, ...]
    sealed: tuple[SegmentRange, ...] = ()
    starts: Mapping[int, int] = {}
    again: bool = False


Step = NewEpoch | StreamCommit


@dataclass(slots=True)
class Tail:
    """The end of a stream's history: what the next record continues.

    ``vector``: partition -> end offset. ``starts``: open segment's id -> start offset. ``last``: offset of
    the last record. ``vector_at``: offset of the last one with a vector; ``since``: how many records follow that.
    ``read_to``: how far the history was read to find this, until its next record is written.
    """

    vector: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    last: int = NO_PREVIOUS
    vector_at: int = NO_PREVIOUS
    since: int = 0
    read_to: int | None = None

    def copy(self) -> Tail:
        """For a round to move on, which may come to nothing."""
        return Tail(
            dict(self.vector), self.starts, self.last, self.vector_at, self.since, self.read_to
        )

    def stands(self, offsets: Sequence[int]) -> None:
        """Take in where a round's records stand now."""
        self.last = offsets[-1]
        self.read_to = None
        if self.since < len(offsets):
            self.vector_at = offsets[-1 - self.since]


class ReplyTo(NamedTuple):
    """The asker of a command: its correlation id, its partition of replies, and the command's digest."""

    correlation_id: bytes
    partition: int
    command: bytes


@dataclass(slots=True)
class Round:
    """Everything that a pass of the controller decided, in order."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    replies: list[tuple[ReplyTo, Any]] = field(default_factory=list)
    ops: list[tuple[str, int, JournalOp]] = field(default_factory=list)  # stream, partition, op
    history: list[Step] = field(default_factory=list)  # all streams', by rising timestamps
    commands: list[tuple[int, Any]] = field(default_factory=list)  # to other control partitions

    @property
    def streams(self) -> list[str]:
        """The streams whose history this round continues, in order."""
        return list(dict.fromkeys([step.stream for step in self.history]))

    @property
    def touched(self) -> list[str]:
        """The streams to whose topics this round writes, in order."""
        return list(dict.fromkeys([*self.streams, *[stream for stream, _, _ in self.ops]]))

    @property
    def commits(self) -> list[StreamCommit]:
        """The merges."""
        return [step for step in self.history if isinstance(step, StreamCommit)]

    @property
    def epochs(self) -> list[NewEpoch]:
        """The new stream epochs."""
        return [step for step in self.history if isinstance(step, NewEpoch)]

    @property
    def merged(self) -> set[bytes]:
        """The transactions that this round merges."""
        return {commit.txn_id for commit in self.commits if not commit.plain}

    @property
    def plain_runs(self) -> int:
        """The number of runs of plain writes that this round commits."""
        return sum(len(writes.runs) for commit in self.commits for writes in commit.plain)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to log: no native transaction is needed."""
        return not (self.rows or self.replies or self.commands)


def history_records(
    round_: Round,
    landed: Mapping[tuple[int, int], Landed],
    tails: Mapping[str, Tail],
) -> dict[str, list[EpochRecord | CommitRecord]]:
    """The history records of a round, by stream, in order. Moves the tails' vectors forward.

    ``landed``: (index of the commit in the round's history, index of its part) -> its place. References
    between these records hold within one batch; `anchored` adapts them to several.
    """
    out: dict[str, list[EpochRecord | CommitRecord]] = {}
    for i, step in enumerate(round_.history):
        tail = tails[step.stream]
        before = out.setdefault(step.stream, [])
        if isinstance(step, NewEpoch):
            before.append(_epoch_record(step, tail, before))
        else:
            before.append(_commit_record(i, step, tail, before, landed))
    return out


def _epoch_record(step: NewEpoch, tail: Tail, before: Sequence[object]) -> EpochRecord:
    """Sealed segments end at the last event on their partitions; new ones begin there."""
    sealed = tuple(SegmentEnd(s.segment_id, tail.vector.get(s.partition, 0)) for s in step.sealed)
    starts = {
        s.segment_id: tail.starts[s.segment_id]
        if s.segment_id in tail.starts
        else step.starts.get(s.partition, tail.vector.get(s.partition, 0))
        for s in step.segments
    }
    for partition, at in step.starts.items():
        tail.vector.setdefault(partition, at)  # also where segments will be opened later
    for s in step.segments:
        tail.vector.setdefault(s.partition, starts[s.segment_id])
    tail.starts = starts
    tail.since = 0
    return EpochRecord(
        stream_epoch=step.stream_epoch,
        reference_epoch=step.reference_epoch,
        timestamp=step.timestamp,
        segments=tuple(
            EpochSegment(s.segment_id, s.low, s.high, s.partition, starts[s.segment_id])
            for s in step.segments
        ),
        sealed=sealed,
        vector=vectors.positions(tail.vector),
        previous=_previous(before, tail),
    )


def _commit_record(
    index: int,
    commit: StreamCommit,
    tail: Tail,
    before: Sequence[object],
    landed: Mapping[tuple[int, int], Landed],
) -> CommitRecord:
    where = []
    for j, part in enumerate(commit.parts):
        at = part.carried or landed.get((index, j))
        if at is None:
            check(bool(commit.plain), "it is not known where a part landed")
            continue
        where.append(SegmentCommit(part.segment_id, part.partition, at.first, at.end, at.records))
        tail.vector[part.partition] = at.end
    whole = len(tail.vector) <= vectors.FEW or tail.since + 1 >= vectors.EVERY
    tail.since = 0 if whole else tail.since + 1
    earlier = vectors.OWN - tail.since if tail.since <= len(before) else tail.vector_at
    return CommitRecord(
        txn_id=commit.txn_id,
        stream_epoch=commit.stream_epoch,
        timestamp=commit.timestamp,
        segments=tuple(where),
        vector=vectors.positions(tail.vector) if whole else (),
        previous=_previous(before, tail),
        vector_at=earlier,
    )


def _previous(before: Sequence[object], tail: Tail) -> int:
    return DIRECTLY_BEFORE if before else tail.last


def anchored(
    record: EpochRecord | CommitRecord, number: int, offsets: Sequence[int]
) -> EpochRecord | CommitRecord:
    """A record of a round for a batch of its own, behind others that stand at ``offsets``.

    ``number``: its place among the stream's records of the round.
    """
    if not offsets:
        return record
    if number == len(offsets):
        previous = offsets[-1]
        if isinstance(record, EpochRecord):
            return replace(record, previous=previous)
        record = record._replace(previous=previous)
    if isinstance(record, CommitRecord) and record.vector_at < vectors.OWN:
        at = number + record.vector_at - vectors.OWN
        if at < len(offsets):
            record = record._replace(vector_at=offsets[at])
    return record
