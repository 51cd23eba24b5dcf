"""Which commit put an offset there: spans of one partition, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.records import CommitRecord
from anabranch.topics.columns_read import Longs
from anabranch.topics.history_record import HistoryRecord

_EMPTY: Longs = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """Which commits are wanted: timestamps from ``low`` to ``high``, both included; segments by id. None: all."""

    low: int | None = None
    high: int | None = None
    segments: frozenset[int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether everything is wanted."""
        return self.low is None and self.high is None and self.segments is None


class Joined(NamedTuple):
    """Of each offset asked for, segment and commit timestamp; ``known`` is None if all are."""

    segments: Longs
    timestamps: Longs
    known: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Spans:
    """Commits in order: each put what lies at offsets [first, end) of the partition there, markers apart."""

    firsts: Longs
    ends: Longs
    timestamps: Longs
    segments: Longs

    def __len__(self) -> int:
        return len(self.firsts)

    def join(self, offsets: Longs) -> Joined:
        """The commits of rising offsets."""
        if not len(offsets):
            return Joined(_EMPTY, _EMPTY, None)
        near = self.overlapping(int(offsets[0]), int(offsets[-1]) + 1)
        counts = np.searchsorted(offsets, near.ends) - np.searchsorted(offsets, near.firsts)
        if int(counts.sum()) == len(offsets):
            return Joined(
                np.repeat(near.segments, counts), np.repeat(near.timestamps, counts), None
            )
        if not len(near):
            nothing = np.zeros(len(offsets), dtype=np.int64)
            return Joined(nothing, nothing, np.zeros(len(offsets), dtype=np.bool_))
        at = np.searchsorted(near.firsts, offsets, side="right") - 1
        known = (at >= 0) & (offsets < near.ends[at])
        return Joined(near.segments[at], near.timestamps[at], known)

    def overlapping(self, first: int, end: int) -> Spans:
        """Those that reach into [first, end)."""
        low = int(np.searchsorted(self.ends, first, side="right"))
        return self._cut(low, int(np.searchsorted(self.firsts, end)))

    def _cut(self, low: int, high: int) -> Spans:
        cut = slice(low, max(low, high))
        return Spans(self.firsts[cut], self.ends[cut], self.timestamps[cut], self.segments[cut])

    def plus(self, others: list[Spans]) -> Spans:
        """These, and then the others."""
        return Spans(
            np.concatenate([self.firsts, *(o.firsts for o in others)]),
            np.concatenate([self.ends, *(o.ends for o in others)]),
            np.concatenate([self.timestamps, *(o.timestamps for o in others)]),
            np.concatenate([self.segments, *(o.segments for o in others)]),
        )

    def wanted(self, choice: CommitFilter, first: int, end: int) -> Longs:
        """The offsets within [first, end) of the commits that a filter takes: ranges, firsts above ends."""
        near = self.overlapping(first, end)
        taken = np.ones(len(near), dtype=np.bool_)
        if choice.low is not None:
            taken &= near.timestamps >= choice.low
        if choice.high is not None:
            taken &= near.timestamps <= choice.high
        if choice.segments is not None:
            taken &= np.isin(near.segments, list(choice.segments))
        # A range begins where the commit before is not taken; what lies between two commits is markers.
        before = np.concatenate(([False], taken[:-1]))
        after = np.concatenate((taken[1:], [False]))
        firsts, ends = near.firsts[taken & ~before], near.ends[taken & ~after]
        return np.stack((np.maximum(firsts, first), np.minimum(ends, end)))


NO_SPANS = Spans(_EMPTY, _EMPTY, _EMPTY, _EMPTY)


def spans_of(records: Iterable[HistoryRecord], partition: int) -> Spans:
    """The spans on a partition that history records name."""
    found = [
        (part.first, part.end, record.timestamp, part.segment_id)
        for record in records
        if isinstance(record, CommitRecord)
        for part in record.segments
        if part.partition == partition
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return Spans(table[0], table[1], table[2], table[3])
