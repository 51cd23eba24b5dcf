"""Spans: the offset ranges of commits on one partition, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.batches.columns_read import Bytes, Longs
from anabranch.reading.history import HistoryRecord
from anabranch.schemas.records import CommitRecord

_HALVES = Struct("<qq")
_EMPTY: Longs = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """The wanted commits: timestamps from ``low`` to ``high``, both included; segments by id. None: no filter."""

    low: int | None = None
    high: int | None = None
    segments: frozenset[int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether everything is wanted."""
        return self.low is None and self.high is None and self.segments is None


class Joined(NamedTuple):
    """The commit of each requested offset; ``known`` is None if all commits are known."""

    spans: Spans
    at: Longs  # index of the span
    known: NDArray[np.bool_] | None

    @property
    def segments(self) -> Longs:
        """Segment ids."""
        return self.spans.segments[self.at]

    @property
    def timestamps(self) -> Longs:
        """Commit timestamps."""
        return self.spans.timestamps[self.at]

    def of_txns(self, ids: Bytes) -> NDArray[np.bool_]:
        """Whether each commit belongs to the given transaction; ``ids``: concatenated, zeros for none."""
        given = ids.view(np.int64)
        spans = self.spans
        heads, tails = spans.txn_heads[self.at], spans.txn_tails[self.at]
        return np.asarray((given[::2] == heads) & (given[1::2] == tails))


@dataclass(frozen=True, slots=True)
class Spans:
    """Commits in order: the events at offsets [first, end) of the partition belong to one commit; markers may be
    among them.

    A transaction id is two numbers, its halves in memory order. ``counts``: numbers of events.
    """

    firsts: Longs
    ends: Longs
    timestamps: Longs
    segments: Longs
    txn_heads: Longs
    txn_tails: Longs
    counts: Longs

    def __len__(self) -> int:
        return len(self.firsts)

    def join(self, offsets: Longs) -> Joined:
        """The commits of rising offsets."""
        if not len(offsets):
            return Joined(NO_SPANS, _EMPTY, None)
        near = self.overlapping(int(offsets[0]), int(offsets[-1]) + 1)
        counts = np.searchsorted(offsets, near.ends) - np.searchsorted(offsets, near.firsts)
        if int(counts.sum()) == len(offsets):
            return Joined(near, np.repeat(np.arange(len(near)), counts), None)
        if not len(near):
            nothing = np.zeros(len(offsets), dtype=np.int64)
            return Joined(_NO_COMMIT, nothing, np.zeros(len(offsets), dtype=np.bool_))
        at = np.searchsorted(near.firsts, offsets, side="right") - 1
        known = (at >= 0) & (offsets < near.ends[at])
        return Joined(near, at, known)

    def overlapping(self, first: int, end: int) -> Spans:
        """The spans that overlap [first, end)."""
        low = int(np.searchsorted(self.ends, first, side="right"))
        return self._cut(low, int(np.searchsorted(self.firsts, end)))

    def _cut(self, low: int, high: int) -> Spans:
        cut = slice(low, max(low, high))
        return Spans(*(column[cut] for column in self.columns))

    def those(self, which: NDArray[np.bool_] | Longs) -> Spans:
        """Some of the spans, by index or by mask."""
        return Spans(*(column[which] for column in self.columns))

    def clipped(self, first: int, end: int) -> Spans:
        """The parts within [first, end). A count of -1 is unknown, because markers may be among the events."""
        firsts, ends = np.maximum(self.firsts, first), np.minimum(self.ends, end)
        dense = self.counts == self.ends - self.firsts
        whole = (firsts == self.firsts) & (ends == self.ends) & (self.counts <= ends - firsts)
        counts = np.where(dense, ends - firsts, np.where(whole, self.counts, -1))
        return replace(self, firsts=firsts, ends=ends, counts=counts)

    def plus(self, others: list[Spans]) -> Spans:
        """These spans, followed by the others."""
        columns = zip(self.columns, *(o.columns for o in others), strict=True)
        return Spans(*map(np.concatenate, columns))

    @property
    def columns(self) -> tuple[Longs, ...]:
        """All columns."""
        txns = self.txn_heads, self.txn_tails
        return self.firsts, self.ends, self.timestamps, self.segments, *txns, self.counts

    def taken(self, choice: CommitFilter) -> NDArray[np.bool_]:
        """A mask of the commits that a filter takes."""
        taken = np.ones(len(self), dtype=np.bool_)
        if choice.low is not None:
            taken &= self.timestamps >= choice.low
        if choice.high is not None:
            taken &= self.timestamps <= choice.high
        if choice.segments is not None:
            taken &= np.isin(self.segments, list(choice.segments))
        return taken

    def wanted(self, choice: CommitFilter, first: int, end: int) -> Longs:
        """The offset ranges within [first, end) of the commits that a filter takes: a row of firsts above a row
        of ends.
        """
        near = self.overlapping(first, end)
        taken = near.taken(choice)
        # A range begins where the commit before is not taken; between two commits there are only markers.
        before = np.concatenate(([False], taken[:-1]))
        after = np.concatenate((taken[1:], [False]))
        firsts, ends = near.firsts[taken & ~before], near.ends[taken & ~after]
        return np.stack((np.maximum(firsts, first), np.minimum(ends, end)))


NO_SPANS = Spans(*[_EMPTY] * 7)
_NO_COMMIT = Spans(*[np.zeros(1, dtype=np.int64)] * 7)


def spans_of(records: Iterable[HistoryRecord], partition: int) -> Spans:
    """The spans on a partition that history records name."""
    found = [
        (
            *(part.first, part.end, record.timestamp, part.segment_id),
            *_HALVES.unpack(record.txn_id),
            part.count,
        )
        for record in records
        if isinstance(record, CommitRecord)
        for part in record.segments
        if part.partition == partition
    ]
    return Spans(*np.array(found, dtype=np.int64).reshape(-1, 7).T)
