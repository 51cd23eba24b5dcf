"""Segments and their operations: create, seal, duplicate, merge (Pravega, PDP-24).

A layout is a sequence of `SegmentRange`, the open segments of a stream epoch. The functions make new layouts and
check the rules of `docs/inside/epochs.md` (E1, …). A user's mistake is `InvalidArgument`, a broken rule is
`InvariantViolation`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from anabranch.errors import InvalidArgument, InvariantViolation, check
from anabranch.protocol import limits
from anabranch.protocol.ids import segment_epoch, segment_id, segment_number
from anabranch.protocol.partitioner import even_ranges, tiles
from anabranch.protocol.schemas.records import KeyRange, SegmentRange

MAX_SEGMENTS = limits.SEGMENTS.value


class TxnSegment(NamedTuple):
    """A transaction's data for one segment."""

    number: int
    sealed: bool  # its commit is decided, so nothing can be added
    whole: bool  # nothing of it was deleted from the journal


def check_layout(segments: Sequence[SegmentRange]) -> None:
    """Check E1: the segments tile the key space, each on a partition of its own, no number twice."""
    check(tiles([(s.low, s.high) for s in segments]), "an epoch's segments do not tile the keys")
    check(
        len({s.partition for s in segments}) == len(segments),
        "two segments of an epoch lie on one partition",
    )
    check(
        len({segment_number(s.segment_id) for s in segments}) == len(segments),
        "an epoch has a segment number twice",
    )


def create(count: int) -> tuple[SegmentRange, ...]:
    """The first layout of a stream: even ranges, numbered from 0, on the partitions of these numbers."""
    made = tuple(
        SegmentRange(segment_id(0, number), low, high, number)
        for number, (low, high) in enumerate(even_ranges(count))
    )
    check_layout(made)
    return made


def even_plan(
    segments: Sequence[SegmentRange], count: int
) -> tuple[tuple[int, ...], tuple[KeyRange, ...]]:
    """(numbers to seal, ranges to open) for ``count`` even segments. Segments that have such a range stay open."""
    wanted = set(even_ranges(count))
    here = {(s.low, s.high) for s in segments}
    seal = tuple(segment_number(s.segment_id) for s in segments if (s.low, s.high) not in wanted)
    return seal, tuple(KeyRange(low, high) for low, high in sorted(wanted - here))


def hand_plan(
    segments: Sequence[SegmentRange], seal: Sequence[int], ranges: Sequence[KeyRange]
) -> tuple[tuple[int, ...], tuple[KeyRange, ...]]:
    """(numbers to seal, ranges to open) for segment ids and ranges that a user gave.

    `InvalidArgument` if the ids and ranges don't fit each other and the active layout.
    """
    limits.SEGMENTS.check(len(seal), "what is to be sealed")
    limits.SEGMENTS.check(len(ranges), "what is to be opened")
    by_id = {s.segment_id: s for s in segments}
    sealed = set(seal)
    unknown = [id_ for id_ in seal if id_ not in by_id]
    if unknown:
        named = ", ".join(f"{segment_number(i)}@{segment_epoch(i)}" for i in unknown)
        raise InvalidArgument(f"not an active segment: {named}; describe the stream again")
    if len(sealed) != len(seal) or not seal:
        raise InvalidArgument("name at least one segment to seal, and none twice")
    kept = [(s.low, s.high) for s in segments if s.segment_id not in sealed]
    if not tiles([*kept, *((r.low, r.high) for r in ranges)]):
        raise InvalidArgument(
            "the ranges to open must cover exactly the keys of the segments to seal"
        )
    if len(kept) + len(ranges) > MAX_SEGMENTS:
        raise InvalidArgument(f"a stream has at most {MAX_SEGMENTS:,} segments")
    return tuple(segment_number(id_) for id_ in seal), tuple(ranges)


def scale(
    segments: Sequence[SegmentRange],
    seal: Collection[int],
    ranges: Sequence[KeyRange],
    *,
    epoch: int,
    next_number: int,
    idle: Sequence[int],
) -> tuple[SegmentRange, ...] | None:
    """The layout after a scaling; None if there are too few partitions for it.

    ``seal``: numbers of active segments. New segments get their partitions first, then the ``idle`` ones.
    """
    seal = set(seal)
    numbers = {segment_number(s.segment_id) for s in segments}
    check(seal <= numbers, "a segment to seal is not active")
    kept = [s for s in segments if segment_number(s.segment_id) not in seal]
    freed = sorted(s.partition for s in segments if segment_number(s.segment_id) in seal)
    places = [*freed, *sorted(set(idle).difference(freed))]
    if len(places) < len(ranges):
        return None
    opened = [
        SegmentRange(segment_id(epoch, next_number + i), r.low, r.high, places[i])
        for i, r in enumerate(sorted(ranges, key=lambda r: r.low))
    ]
    made = tuple(sorted((*kept, *opened), key=lambda s: s.low))
    check_layout(made)
    return made


def duplicate(
    segments: Sequence[SegmentRange], epoch: int, places: Mapping[int, int]
) -> tuple[SegmentRange, ...]:
    """A copy of a layout for a new epoch. ``places``: segment number -> partition."""
    made = tuple(
        replace(
            s,
            segment_id=segment_id(epoch, segment_number(s.segment_id)),
            partition=places[segment_number(s.segment_id)],
        )
        for s in segments
    )
    check_layout(made)
    return made


def place(
    segments: Sequence[SegmentRange],
    fixed: Mapping[int, int],
    reserved: Collection[int],
    partitions: int,
) -> dict[int, int] | None:
    """Segment number -> partition for a duplicate; None if there are too few partitions.

    ``fixed``: segment number -> partition, of segments whose data is on a partition already. Each other segment
    keeps its partition unless that is taken or ``reserved``; then it gets the lowest free partition.
    """
    places = dict(fixed)
    taken = set(fixed.values()) | set(reserved)
    homeless = []
    for s in segments:
        number = segment_number(s.segment_id)
        if number in places:
            continue
        if s.partition in taken:
            homeless.append(number)
        else:
            places[number] = s.partition
            taken.add(s.partition)
    free = [p for p in range(partitions) if p not in taken]
    if len(free) < len(homeless):
        return None
    places.update(zip(homeless, free, strict=False))
    return places


def merge(into: Sequence[SegmentRange], source: TxnSegment) -> SegmentRange:
    """The open segment that a transaction segment merges into: the open segment of its number (E4, E5)."""
    check(source.sealed, "a transaction segment is merged before its commit was decided")
    check(source.whole, "a transaction segment is merged after a part of it was deleted")
    for segment in into:
        if segment_number(segment.segment_id) == source.number:
            return segment
    raise InvariantViolation(f"no open segment has the number {source.number}")
