"""A stream's history for ordered readers: the commit of each offset, and when a segment may be read.

A *history* has a COMMIT record for each commit to a stream, with the offsets of its events, and an EPOCH record for
each stream epoch. COMMIT records are in commit order, and so are the offsets on every partition, so history and
events are read in parallel. A COMMIT record is in the same native transaction as its data, so both arrive together.
Only the data of a staged merge arrives long before its record, and waits for it. For offset ranges,
`anabranch.reading.commit_columns` has the same commits as arrays.

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
from collections.abc import Container, Iterable, Mapping, Set
from typing import NamedTuple

from anabranch.core.history_records import NO_PREVIOUS, ends_in
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, EpochSegment
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import Found, HistoryCursor, HistorySearch

MOST_SPANS = 100_000  # commits known ahead of the events; the history is not read further than that
NO_SEGMENT = -1  # the segment of events that were in the topic before the stream was created
FOREIGN = -2  # the segment of records that no controller wrote
DELETED = -3  # the segment of events that retention has deleted, with the history records of them


# -- which segments may be read ----------------------------------------------------------------------------


class _End:
    """Events of the keys [low, high) before this offset of a partition, which have to be read first.

    ``before``: the ends before this end; readers wait for these instead if the events were deleted unread.
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
        """The ends that a segment waits for; a read or deleted end is replaced by the unread ends before it."""
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
        """Whether a segment on an own partition may be read now. Once true, the answer stays true."""
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


# -- the commit of an offset -------------------------------------------------------------------------------


class Span(NamedTuple):
    """The offsets [first, end) of one commit on a partition."""

    first: int
    end: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int


class CommitIndex:
    """The commits and epochs of one stream, from given positions on. Used by one thread."""

    def __init__(self, source: CommittedLog, stream: str, timeout: float) -> None:
        """``timeout``: seconds until a search in the history gives up (`NotReady`)."""
        self._clock = source.clock
        self._cursor = HistoryCursor(source, stream)
        self.search = HistorySearch(source, stream, timeout)
        self._own: Container[int] = ()
        self._read: Mapping[int, int] = {}  # partition -> offset below which all is consumed
        self._spans: dict[int, deque[Span]] = {}
        self._ahead = 0
        self._vector: dict[int, int] = {}
        self._last: int | None = None  # offset of the record that was read last
        # Partition -> end of the events that no record names, and their highest possible timestamp.
        self._adopted: dict[int, tuple[int, int]] = {}  # in the topic when the stream was created
        self._cut: dict[int, tuple[int, int]] = {}  # the history records of them are deleted
        self.order = StreamOrder(())

    def cover(self, positions: Mapping[int, int], own: Container[int]) -> None:
        """Prepare to find every offset on the own partitions from the positions on, which are of all partitions.

        Offsets before the positions count as read.
        """
        order = StreamOrder(own)
        order.moved(positions)
        begin = self.search.not_beyond(positions)
        if begin is not None and isinstance(begin.record, CommitRecord):
            epoch = self.search.epoch(begin)
            if epoch is not None:
                order.add(epoch)
        self._spans = {}
        self._own = own
        self._read = positions
        self._ahead = 0
        self._vector = {}
        self._last = None
        self._adopted = {}
        self._cut = {}
        self.order = order
        self._cursor.seek(begin.offset if begin else 0)

    @property
    def partitions(self) -> Set[int]:
        """The partitions that the history has named since `cover`, also before they have events."""
        return self._vector.keys()

    def find(self, partition: int, offset: int, wait: float) -> Span | None:
        """The commit of an offset. Offsets have to rise from call to call on each partition.

        None: the history does not show the commit yet; the same offset may be asked for again. ``wait``: seconds to
        wait for the history.
        """
        spans = self._spans.setdefault(partition, deque())
        deadline = self._clock.monotonic() + wait
        while True:
            self.drop(partition, offset)
            if spans and spans[0].first <= offset:
                return spans[0]
            end = spans[0].first if spans else self._vector.get(partition, 0)
            if end > offset:
                return self._unnamed(partition, offset, end)
            if not self.read_on(deadline):
                return None

    def _unnamed(self, partition: int, offset: int, end: int) -> Span:
        """The span of offsets from this one to ``end`` at most that the history has passed without naming them."""
        for known, segment in ((self._adopted, NO_SEGMENT), (self._cut, DELETED)):
            until, timestamp = known.get(partition, (0, 0))
            if offset < until:
                return Span(offset, min(end, until), None, timestamp, segment)
        return Span(offset, end, None, 0, FOREIGN)

    def keep(self, partition: int) -> None:
        """Let readers get events whose history records are deleted, as if the stream had adopted them."""
        self._adopted[partition] = self._cut.pop(partition)

    def drop(self, partition: int, offset: int) -> None:
        """Forget offsets below this one, which are not needed any more."""
        spans = self._spans.setdefault(partition, deque())
        while spans and spans[0].end <= offset:
            spans.popleft()
            self._ahead -= 1

    def read_on(self, deadline: float = 0.0) -> bool:
        """Read the history further, up to `MOST_SPANS`. False if nothing came until the deadline (monotonic)."""
        if self._ahead > MOST_SPANS:
            return False
        found = self._cursor.next(deadline)
        for at in found:
            record = at.record
            if at.before == NO_PREVIOUS:  # the stream's very first
                self._adopted = _ends(at)
            elif at.before != self._last:  # the history may be truncated up to here
                self._cut |= _ends(at)
            self._last = at.offset
            if isinstance(record, EpochRecord):
                self.order.add(record)
            else:
                self._note(record)
            self._vector.update(ends_in(record))
        return bool(found)

    def _note(self, record: CommitRecord) -> None:
        txn_id = None if record.txn_id == NO_TXN else record.txn_id
        for part in record.segments:
            if part.partition in self._own and part.end > self._read.get(part.partition, 0):
                spans = self._spans.setdefault(part.partition, deque())
                spans.append(Span(part.first, part.end, txn_id, record.timestamp, part.segment_id))
                self._ahead += 1


def _ends(at: Found) -> dict[int, tuple[int, int]]:
    """Partition -> its end as of a record, and the record's timestamp."""
    return {partition: (end, at.record.timestamp) for partition, end in at.vector().items()}
