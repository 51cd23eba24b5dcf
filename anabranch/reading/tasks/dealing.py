"""Which task of a processor an event belongs to: the same for each reader."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from anabranch.batches.columns_read import Longs
from anabranch.core.partitioner import SPACE
from anabranch.errors import SnapshotExpired
from anabranch.reading.history_search import HistorySearch
from anabranch.schemas.records import EpochRecord

_KEPT = 64  # layouts; readers of a stream's tasks are rarely more epochs apart


class Dealing:
    """Deals the events of one stream out to so many tasks, each an equal range of the key positions.

    A keyed event goes to the task of its key. One without a key goes by its offset to one of the tasks whose ranges
    its segment meets; so does one whose key lies outside of its segment's range, as a foreign client may hash it:
    readers of the key's own partitions would never see it.
    """

    def __init__(self, search: HistorySearch, tasks: int) -> None:
        self._search = search
        self._tasks = tasks
        self.misplaced = 0  # events whose key lies outside of their segment's range
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}  # stream epoch -> segment -> keys

    def note(self, epoch: EpochRecord) -> None:
        """Take in the layout of an epoch."""
        ranges = {segment.segment_id: (segment.low, segment.high) for segment in epoch.segments}
        self._ranges[epoch.stream_epoch] = ranges
        if len(self._ranges) > _KEPT:
            del self._ranges[next(iter(self._ranges))]

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

    def tasks_of(
        self, keys: Sequence[bytes | None], offsets: Sequence[int], within: tuple[int, int]
    ) -> Longs:
        """The tasks of events of one segment. ``within``: its keys, in the epoch that they were committed in."""
        low, high = within
        positions = _positions(keys)
        first, last = low * self._tasks // SPACE, (high - 1) * self._tasks // SPACE
        tasks: Longs = positions * self._tasks // SPACE
        elsewhere = np.flatnonzero((positions < low) | (positions >= high))
        if len(elsewhere):
            self.misplaced += int(np.count_nonzero(positions[elsewhere] >= 0))
            tasks[elsewhere] = first + np.array(offsets)[elsewhere] % (last - first + 1)
        return tasks


def _positions(keys: Sequence[bytes | None]) -> Longs:
    """`position_of` of keys; -1: null."""
    nulls: list[int] = []
    try:
        crcs = np.fromiter(map(crc32, keys), np.uint32, len(keys))  # type: ignore[arg-type]
    except TypeError:
        nulls = [at for at, key in enumerate(keys) if key is None]
        crcs = np.fromiter((crc32(key or b"") for key in keys), np.uint32, len(keys))
    crcs ^= crcs >> 16
    crcs *= np.uint32(0x85EBCA6B)
    crcs ^= crcs >> 13
    crcs *= np.uint32(0xC2B2AE35)
    crcs ^= crcs >> 16
    found = crcs.astype(np.int64)
    found[nulls] = -1
    return found
