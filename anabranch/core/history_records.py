"""The COMMIT and EPOCH records that a round adds to the histories of its streams, and how readers complete them.

A *history* is a stream's topic with one record for each commit and stream epoch. A *vector* has the end offset of
each partition as of a record (`docs/protocol.md`, section 13). In a stream with few partitions each record has its
vector. In a wider stream, EPOCH records and one of `EVERY` records have a vector. A COMMIT record between them has
the ends of its own events, and the place of the last record with a vector. A reader starts with that vector and
adds the ends in the records after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.core.round import Landed, NewEpoch, Round, StreamCommit
from anabranch.errors import check
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
    SegmentEnd,
)

Record = EpochRecord | CommitRecord

FEW = 16  # up to this many partitions, each record has its vector
EVERY = 64  # with more partitions, one of this many consecutive records has its vector
OWN = -1  # ``vector_at`` of a record with a vector; OWN - n: n records before, in the same batch
NO_PREVIOUS = -1
DIRECTLY_BEFORE = -2


@dataclass(slots=True)
class Tail:
    """The end of a stream's history, after which the next record is written.

    ``vector``: partition -> end offset. ``starts``: open segment's id -> start offset. ``last``: offset of the last
    record. ``vector_at``: offset of the last one with a vector; ``since``: the number of records after that.
    ``read_to``: the offset up to which the history was read to find these values; None once a record was written.
    """

    vector: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    last: int = NO_PREVIOUS
    vector_at: int = NO_PREVIOUS
    since: int = 0
    read_to: int | None = None

    def copy(self) -> Tail:
        """A copy for a round to change, as the round may fail."""
        return Tail(
            dict(self.vector), self.starts, self.last, self.vector_at, self.since, self.read_to
        )

    def place(self, offsets: Sequence[int]) -> None:
        """Note the offsets that the records of a round got."""
        self.last = offsets[-1]
        self.read_to = None
        if self.since < len(offsets):
            self.vector_at = offsets[-1 - self.since]


def history_records(
    round_: Round, landed: Mapping[tuple[int, int], Landed], tails: Mapping[str, Tail]
) -> dict[str, list[EpochRecord | CommitRecord]]:
    """The history records of a round, by stream, in order. Moves the tails' vectors forward.

    ``landed``: (index of the commit in the round's history, index of its part) -> the place of its events.
    References between these records are valid within one batch; `anchored` adapts them to several.
    """
    out: dict[str, list[EpochRecord | CommitRecord]] = {}
    for i, step in enumerate(round_.history):
        tail = tails[step.stream]
        before = out.setdefault(step.stream, [])
        safe = round_.safe if round_.safe < step.timestamp else 0
        if isinstance(step, NewEpoch):
            record = _epoch_record(step, tail, before)
            before.append(replace(record, safe=safe) if safe else record)
        else:
            before.append(_commit_record(i, step, tail, before, landed, safe))
    return out


def _epoch_record(step: NewEpoch, tail: Tail, before: Sequence[object]) -> EpochRecord:
    """Sealed segments end at the last event on their partitions; new ones begin there."""
    sealed = tuple(SegmentEnd(s.segment_id, tail.vector.get(s.partition, 0)) for s in step.sealed)
    starts = {
        s.segment_id: tail.starts[s.segment_id]
        if s.segment_id in tail.starts
        else max(step.starts.get(s.partition, 0), tail.vector.get(s.partition, 0))
        for s in step.segments
    }
    for partition, at in step.starts.items():
        tail.vector.setdefault(partition, at)  # also for partitions whose segments are opened later
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
        vector=positions(tail.vector),
        previous=_previous(before, tail),
    )


def _commit_record(
    index: int,
    commit: StreamCommit,
    tail: Tail,
    before: Sequence[object],
    landed: Mapping[tuple[int, int], Landed],
    safe: int,
) -> CommitRecord:
    where = []
    for j, part in enumerate(commit.parts):
        at = part.staged or landed.get((index, j))
        if at is None:
            check(bool(commit.plain), "it is not known where a part landed")
            continue
        where.append(SegmentCommit(part.segment_id, part.partition, at.first, at.end, at.records))
        tail.vector[part.partition] = at.end
    whole = len(tail.vector) <= FEW or tail.since + 1 >= EVERY
    tail.since = 0 if whole else tail.since + 1
    earlier = OWN - tail.since if tail.since <= len(before) else tail.vector_at
    return CommitRecord(
        txn_id=commit.txn_id,
        stream_epoch=commit.stream_epoch,
        timestamp=commit.timestamp,
        segments=tuple(where),
        vector=positions(tail.vector) if whole else (),
        previous=_previous(before, tail),
        vector_at=earlier,
        safe=safe,
    )


def _previous(before: Sequence[object], tail: Tail) -> int:
    return DIRECTLY_BEFORE if before else tail.last


def anchored(
    record: EpochRecord | CommitRecord, number: int, offsets: Sequence[int]
) -> EpochRecord | CommitRecord:
    """A record of a round, adapted for a batch of its own after the records at ``offsets``.

    ``number``: its index among the stream's records of the round.
    """
    if not offsets:
        return record
    if number == len(offsets):
        previous = offsets[-1]
        if isinstance(record, EpochRecord):
            return replace(record, previous=previous)
        record = record._replace(previous=previous)
    if isinstance(record, CommitRecord) and record.vector_at < OWN:
        at = number + record.vector_at - OWN
        if at < len(offsets):
            record = record._replace(vector_at=offsets[at])
    return record


# -- vectors --------------------------------------------------------------------------------------------


def has_vector(record: Record) -> bool:
    """Whether the record has the ends of all partitions."""
    return isinstance(record, EpochRecord) or record.vector_at == OWN


def vector_place(offset: int, record: Record) -> int:
    """The offset of the last record with a vector, at or before this record at ``offset``."""
    at = OWN if isinstance(record, EpochRecord) else record.vector_at
    return at if at >= 0 else offset + at - OWN


def ends_in(record: Record) -> Iterable[Position]:
    """The ends in the record itself: of all partitions, or of those that its commit wrote to."""
    if isinstance(record, EpochRecord) or record.vector_at == OWN:
        return record.vector
    return [Position(part.partition, part.end) for part in record.segments]


def positions(vector: dict[int, int]) -> tuple[Position, ...]:
    """A vector (partition -> end offset) as history records store it: `Position`s in the order of partitions."""
    new = tuple.__new__
    return tuple([new(Position, place) for place in sorted(vector.items())])


def completed(record: Record, since: Iterable[Record]) -> Record:
    """The record with its vector. ``since``: the records from its `vector_place` up to itself."""
    if isinstance(record, EpochRecord):
        return record
    vector: dict[int, int] = {}
    for one in since:
        vector.update(ends_in(one))
    return record._replace(vector=positions(vector), vector_at=OWN)
