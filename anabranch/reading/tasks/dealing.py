"""Which task of a processor an event belongs to: the same for each reader."""

from __future__ import annotations

from anabranch.core.partitioner import SPACE, position_of
from anabranch.errors import SnapshotExpired
from anabranch.reading.history_search import HistorySearch
from anabranch.schemas.records import EpochRecord
from anabranch.types import Event

_KNOWN_KEYS = 20_000


class Dealing:
    """Deals the events of one stream out to so many tasks, each an equal range of the key positions.

    A keyed event goes to the task of its key. One without a key goes by its offset to one of the tasks whose ranges
    its segment meets; so does one whose key lies outside of its segment's range, as a foreign client may hash it:
    readers of the key's own partitions would never see it.
    """

    def __init__(self, search: HistorySearch, tasks: int) -> None:
        self._search = search
        self._tasks = tasks
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}  # stream epoch -> segment -> keys
        self._known: dict[bytes, int] = {}  # the positions of the first so many keys
        self.misplaced = 0

    def note(self, epoch: EpochRecord) -> None:
        """Take in the layout of an epoch."""
        ranges = {segment.segment_id: (segment.low, segment.high) for segment in epoch.segments}
        self._ranges[epoch.stream_epoch] = ranges

    def ranges(self, epoch: int) -> dict[int, tuple[int, int]]:
        """Segment -> its keys, of a stream epoch. `SnapshotExpired` if its record is cut off."""
        if epoch not in self._ranges:
            found = self._search.epoch_record(epoch)
            if found is None:
                raise SnapshotExpired(
                    f"the layout of stream epoch {epoch} is not in the history any more"
                )
            self.note(found)
        return self._ranges[epoch]

    def task_of(self, event: Event, ranges: dict[int, tuple[int, int]]) -> int:
        """The task of an event. ``ranges``: of the epoch that it was committed in."""
        low, high = ranges[event.segment_id]
        if event.key is not None:
            position = self._known.get(event.key, -1)
            if position < 0:
                position = position_of(event.key)
                if len(self._known) < _KNOWN_KEYS:
                    self._known[event.key] = position
            if low <= position < high:
                return position * self._tasks // SPACE
            self.misplaced += 1
        first, last = low * self._tasks // SPACE, (high - 1) * self._tasks // SPACE
        return first + event.offset % (last - first + 1)
