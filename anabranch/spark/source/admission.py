"""Chooses the end of the next micro-batch from the streams' histories, by commit timestamp, without I/O.

A *history* has one record for each commit to a stream. The record's *vector* is the end offset of each partition.
Between the vectors of two history records there are only whole commits: every partition has its commits in the
history's order, and no vector points into a commit (chunks of a staged merge are after all vectors, until its
COMMIT record). So tasks need only the offset ranges between two positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from anabranch.core.history_records import ends_in
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, SegmentCommit
from anabranch.reading.history import Found
from anabranch.spark.source.positions import Position


class NotYet(Exception):
    """A history can't be read to its end now."""


class Front(Protocol):
    """The records of a history that are not taken yet."""

    @property
    def bound(self) -> int:
        """The offset below which records may be taken now. Other streams may lack later transactions' records."""

    def peek(self) -> Found | None:
        """The next record, or None if the history has no more now. Raises: NotYet (that is not known)."""

    def pop(self) -> None:
        """Take the next record."""


class Limits(NamedTuple):
    """Limits of a micro-batch. ``events``: None: any number. ``whole``: split no transaction. ``by_epoch``: take no
    events of one key from two segments."""

    events: int | None = None
    whole: bool = False
    by_epoch: bool = False


class Admitted(NamedTuple):
    """A micro-batch's end. ``events``: the most events that it has. ``all``: whether no more are there now."""

    positions: dict[str, Position]
    events: int
    all: bool


def admit(start: Mapping[str, Position], fronts: Mapping[str, Front], limits: Limits) -> Admitted:
    """Take records in the order of their timestamps, until the limits.

    Commits of one transaction in several streams are taken together. Positions move only if there are events.
    """
    batch = _Batch(start, limits)
    complete = True
    while True:
        try:
            peeked = {stream: front.peek() for stream, front in fronts.items()}
        except NotYet:  # a record that is not known may be older than the other streams' records
            complete = False
            break
        heads = {stream: head for stream, head in peeked.items() if head is not None}
        if not heads:
            break
        first = min(heads, key=lambda stream: (heads[stream].record.timestamp, stream))
        if heads[first].offset >= fronts[first].bound:
            break  # the other streams may lack a record of the same transaction, or of an older one
        group = [s for s in heads if s == first or _siblings(heads[first], heads[s])]
        taken = batch.take({stream: heads[stream] for stream in group})
        for stream in taken:
            fronts[stream].pop()
        if len(taken) < len(group):
            complete = False
            break
    moved = batch.positions() if batch.events else dict(start)
    return Admitted(moved, batch.events, complete)


def _siblings(one: Found, other: Found) -> bool:
    """Whether two records are commits of one transaction."""
    a, b = one.record, other.record
    return (
        isinstance(a, CommitRecord)
        and isinstance(b, CommitRecord)
        and a.txn_id == b.txn_id != NO_TXN
        and a.timestamp == b.timestamp
    )


class _Batch:
    def __init__(self, start: Mapping[str, Position], limits: Limits) -> None:
        self.events = 0
        self._start = start
        self._limits = limits
        self._last: dict[str, Found] = {}  # the last taken record, by stream
        self._ends: dict[str, dict[int, int]] = {}  # of the partitions, from the taken records
        # By stream: partition -> offset inside the next record.
        self._parts: dict[str, dict[int, int]] = {}
        self._written: set[tuple[str, int]] = set()  # (stream, segment) with events in this batch

    def positions(self) -> dict[str, Position]:
        return {stream: self._position(stream) for stream in self._start}

    def _position(self, stream: str) -> Position:
        at, last = self._start[stream], self._last.get(stream)
        if last is not None:
            at = at.moved(last.offset, self._ends[stream])
        return at.moved(at.after, self._parts.get(stream, {}))

    def take(self, group: Mapping[str, Found]) -> list[str]:
        """Take one record, or a transaction's commits. Returns the streams in which all of it was taken."""
        if any(self._must_wait(stream, found) for stream, found in group.items()):
            return []
        left = {stream: self._left(stream, found) for stream, found in group.items()}
        size = sum(count for parts in left.values() for _, _, count in parts)
        room = None if self._limits.events is None else self._limits.events - self.events
        if room is not None and size > room:
            if self.events:
                return []
            if not self._limits.whole:
                return self._take_part(group, left, size, room)
        for stream in group:
            self._written |= {(stream, part.segment_id) for part, _, count in left[stream] if count}
        self.events += size
        for stream, found in group.items():
            self._take_whole(stream, found)
        return list(group)

    def _take_whole(self, stream: str, found: Found) -> None:
        self._last[stream] = found
        self._ends.setdefault(stream, {}).update(ends_in(found.record))

    def _must_wait(self, stream: str, found: Found) -> bool:
        """Whether an epoch seals a segment with events in this batch, so that its successors have to wait."""
        return (
            self._limits.by_epoch
            and isinstance(found.record, EpochRecord)
            and any((stream, sealed.segment_id) in self._written for sealed in found.record.sealed)
        )

    def _left(self, stream: str, found: Found) -> list[tuple[SegmentCommit, int, int]]:
        """The unread parts of a commit: (part, first offset, most events)."""
        vector = self._start[stream].vector  # records before this one end below it
        record = found.record
        parts = record.segments if isinstance(record, CommitRecord) else ()
        out = []
        for part in parts:
            first = max(part.first, vector.get(part.partition, 0))
            if first < part.end:
                # Because of markers between events, a range may have fewer events than offsets.
                out.append((part, first, min(part.count, part.end - first)))
        return out

    def _take_part(
        self,
        group: Mapping[str, Found],
        left: Mapping[str, list[tuple[SegmentCommit, int, int]]],
        size: int,
        room: int,
    ) -> list[str]:
        """Take from each part in proportion to its size, so that many tasks have work."""
        before = given = 0
        done = []
        for stream, found in group.items():
            reached = self._parts[stream] = {}
            for part, first, count in left[stream]:
                before += count
                share = room * before // size - given
                given += share
                reached[part.partition] = min(first + share, part.end)
            if all(reached[part.partition] == part.end for part, _, _ in left[stream]):
                self._take_whole(stream, found)
                done.append(stream)
        self.events += given
        return done
