"""Stream order: which segments may be read now, by the EPOCH records of the history and the readers' positions.

A segment may be read when every earlier segment with events of its keys is read to its end. A scaling opens a
segment and seals all segments that it overlaps, so its EPOCH record has the ends to wait for. No segment waits for
an empty one: instead it waits for the segments before the empty one that overlap its own keys. So the positions
(the offsets up to which partitions are read) alone decide, and no other state has to be stored or shared. Earlier
segments on the same partition need no rule: a partition is read in the order of its offsets.

If a segment was read to its end, the segments before it were read. But retention may have deleted a segment and
kept older events on a partition with fewer writes: then readers wait for these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping

from anabranch.protocol.schemas.records import EpochRecord, EpochSegment


class _End:
    """Events of the keys [low, high) before this offset of a partition, which have to be read first.

    ``before``: the ends before this one; readers wait for them instead if these events were deleted unread.
    """

    __slots__ = ("before", "high", "low", "offset", "partition")

    def __init__(self, segment: EpochSegment, offset: int, before: list[_End]) -> None:
        self.low = segment.low
        self.high = segment.high
        self.partition = segment.partition
        self.offset = offset
        self.before = before


class _Segment:
    """A segment of the newest epoch, and the ends to wait for."""

    __slots__ = ("awaits", "end", "segment")

    def __init__(self, segment: EpochSegment, awaits: list[_End]) -> None:
        self.segment = segment
        self.awaits = awaits
        self.end: _End | None = None  # when sealed


class StreamOrder:
    """The rule for one stream, from an epoch on; everything before it is read.

    ``own``: the partitions that this reader reads; it only waits for segments on others. `add` takes the epochs in
    order, and `moved` the positions as they become known.
    """

    def __init__(self, own: Container[int]) -> None:
        self._own = own
        self._layout: list[_Segment] = []  # the newest epoch, by keys
        self._positions: dict[int, int] = {}
        self._closed: dict[int, _Segment] = {}  # own segments that wait
        # Own partition -> ends of sealed segments, not read yet.
        self._ends: dict[int, deque[int]] = {}
        self._finished = False
        self.epoch = -1

    def add(self, record: EpochRecord) -> None:
        """Add the next epoch; the first one may be read at once. A known epoch changes nothing."""
        if record.stream_epoch <= self.epoch:
            return
        known = {old.segment.segment_id: old for old in self._layout}
        for sealed in record.sealed:
            old = known.get(sealed.segment_id)
            if old is not None:
                self._seal(old, sealed.end_offset)
        layout = []
        at = 0
        for segment in sorted(record.segments, key=lambda s: s.low):
            kept = known.get(segment.segment_id)
            if kept is None:
                while at < len(self._layout) and self._layout[at].segment.high <= segment.low:
                    at += 1
                kept = _Segment(segment, self._before(segment, at))
                if kept.awaits and segment.partition in self._own:
                    self._closed[segment.segment_id] = kept
            layout.append(kept)
        self._layout = layout
        self.epoch = record.stream_epoch

    def _seal(self, old: _Segment, end: int) -> None:
        segment = old.segment
        if end <= segment.start_offset:
            self._closed.pop(segment.segment_id, None)
            return
        # Ends on the same partition are read, or deleted, together with it: replace them by the ends before them.
        before: list[_End] = []
        for one in self._unread(old.awaits, segment):
            before += one.before if one.partition == segment.partition else [one]
        overlapping = [
            one
            for one in dict.fromkeys(before)
            if one.low < segment.high and segment.low < one.high
        ]
        old.end = _End(segment, end, overlapping)
        if segment.partition in self._own:
            if end <= self._positions.get(segment.partition, 0):
                self._finished = True
            else:
                self._ends.setdefault(segment.partition, deque()).append(end)

    def _before(self, segment: EpochSegment, at: int) -> list[_End]:
        """The ends to wait for before a new segment; ``at``: the first of the old layout that may overlap it."""
        ends: list[_End] = []
        while at < len(self._layout) and self._layout[at].segment.low < segment.high:
            old = self._layout[at]
            at += 1
            ends += old.awaits if old.end is None else [old.end]
        return self._unread(ends, segment)

    def _unread(self, ends: Iterable[_End], segment: EpochSegment) -> list[_End]:
        """The ends among these that a segment waits for; instead of a read or deleted one, the unread before it."""
        found: list[_End] = []
        gone: list[_End] = []
        seen: set[_End] = set()
        left = list(ends)
        while left:
            end = left.pop()
            if end in seen or end.low >= segment.high or end.high <= segment.low:
                continue
            seen.add(end)
            if not self._is_read(end):
                found.append(end)
            elif end.before:
                gone.append(end)
                left += end.before
        for end in reversed(gone):  # so that later calls need not repeat the search
            end.before = [one for one in end.before if one.before or not self._is_read(one)]
        return found

    def _is_read(self, end: _End) -> bool:
        return self._positions.get(end.partition, 0) >= end.offset

    def moved(self, positions: Mapping[int, int]) -> None:
        """Note known positions (partition -> offset). Positions lower than before are ignored."""
        for partition, position in positions.items():
            if position > self._positions.get(partition, 0):
                self._positions[partition] = position
                ends = self._ends.get(partition)
                if ends is not None:
                    while ends and ends[0] <= position:
                        ends.popleft()
                        self._finished = True
                    if not ends:
                        del self._ends[partition]

    def readable(self, segment_id: int) -> bool:
        """Whether a segment on an own partition may be read now. From then on it always may."""
        segment = self._closed.get(segment_id)
        if segment is None:
            return True
        segment.awaits = self._unread(segment.awaits, segment.segment)
        if segment.awaits:
            return False
        del self._closed[segment_id]
        return True

    def awaited(self, segment_id: int) -> set[int]:
        """The partitions that this segment waits for."""
        segment = self._closed.get(segment_id)
        return set() if segment is None else {e.partition for e in segment.awaits}

    @property
    def watched(self) -> set[int]:
        """Own partitions with a sealed segment that is not read to its end: others may wait for their positions."""
        return set(self._ends)

    def take_finished(self) -> bool:
        """Whether this reader read a sealed segment, for which others may wait, to its end since the last call."""
        finished, self._finished = self._finished, False
        return finished
