"""The segments of a one-shot's events: by key, among the active segments of their streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from anabranch.core.ids import segment_number
from anabranch.core.keyspace import position_of
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import Event, SegmentRange


class Layout:
    """The active segments of a stream, ready for finding the one that holds a key."""

    __slots__ = ("_by_number", "_lows", "_order", "segments")

    def __init__(self, segments: Sequence[SegmentRange]) -> None:
        self.segments = segments
        self._order = sorted(range(len(segments)), key=lambda i: segments[i].low)
        self._lows = [segments[i].low for i in self._order]
        self._by_number = {segment_number(s.segment_id): i for i, s in enumerate(segments)}

    def find(self, key: bytes) -> int:
        """The index of the segment that holds a key."""
        position = position_of(key)
        at = bisect_right(self._lows, position) - 1
        index = self._order[at] if at >= 0 else -1
        if index < 0 or position >= self.segments[index].high:
            raise InvalidArgument("the stream's segments do not hold this key")
        return index

    def index_of(self, segment_id: int) -> int:
        """The index of the segment with that number, which a client chose for events without a key; else 0."""
        return self._by_number.get(segment_number(segment_id), 0)

    def spread(self, events: Sequence[Event]) -> list[tuple[SegmentRange, list[Event]]]:
        """Events by segment, in the order of the segments and of the events."""
        lists: dict[int, list[Event]] = {}
        find = self.find
        for event in events:
            key = event.key
            index = find(key) if key is not None else self.index_of(event.segment_id)
            if index in lists:
                lists[index].append(event)
            else:
                lists[index] = [event]
        return [(self.segments[index], lists[index]) for index in sorted(lists)]
