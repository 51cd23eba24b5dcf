"""Which commit put an offset there: spans of one partition from its stream's history, as arrays."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.client.history_search import (
    HistoryConsumer,
    HistoryEnds,
    HistoryRecord,
    HistorySearch,
    history_record,
)
from anabranch.errors import InvalidArgument, NotReady
from anabranch.schemas.records import CommitRecord
from anabranch.topics.columns_read import Longs
from anabranch.topics.names import history_topic

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
        taken = np.ones(len(self), dtype=np.bool_)
        if choice.low is not None:
            taken &= self.timestamps >= choice.low
        if choice.high is not None:
            taken &= self.timestamps <= choice.high
        if choice.segments is not None:
            taken &= np.isin(self.segments, list(choice.segments))
        # A range begins where the commit before is not taken; what lies between two commits is markers.
        before = np.concatenate(([False], taken[:-1]))
        after = np.concatenate((taken[1:], [False]))
        firsts, ends = self.firsts[taken & ~before], self.ends[taken & ~after]
        return np.stack((np.maximum(firsts, first), np.minimum(ends, end)))


NO_SPANS = Spans(_EMPTY, _EMPTY, _EMPTY, _EMPTY)


def spans_of(records: list[HistoryRecord], partition: int) -> Spans:
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


class CommitHistory:
    """The commits of one partition from an offset on, read from the history as they are needed. One thread."""

    def __init__(
        self,
        consumer: HistoryConsumer,
        ends: HistoryEnds,
        stream: str,
        partition: int,
        timeout: float,
    ) -> None:
        """``timeout``: seconds that the history may take to show the next commit."""
        self._consumer = consumer
        self._search = HistorySearch(consumer, ends, stream, timeout)
        self._topic = history_topic(stream)
        self._partition = partition
        self._timeout = timeout
        self._end: int | None = None
        self._read_to = 0
        self.known_to = 0  # the commits of all offsets below are known
        self.last_timestamp = -1  # of the history as far as it was read
        self.spans = NO_SPANS

    def begin(self, first: int, history: tuple[int, int | None] | None) -> None:
        """Be able to tell the commits of the offsets from ``first`` on.

        ``history``: where they stand in the history (first offset, end or None), if that is known; else it is
        searched. `NotReady`.
        """
        if history is None:
            self._read_to, self._end = self._search.passing(self._partition, first), None
        else:
            self._read_to, self._end = history
        self.spans = NO_SPANS
        self.known_to = first
        self.last_timestamp = -1
        self._consumer.assign({(self._topic, 0): self._read_to})

    def cover(self, offset: int) -> None:
        """Know the commits of all offsets below this one.

        Raises: NotReady (the history does not show them yet), InvalidArgument (not in the part that was given).
        """
        deadline = time.monotonic() + self._timeout
        found: list[Spans] = []
        while self.known_to < offset:
            if self._end is not None and self._read_to >= self._end:
                raise InvalidArgument(
                    f"the history up to {self._end} does not reach offset {offset} of partition {self._partition}"
                )
            batch = self._consumer.next_batch(deadline)
            if batch:
                deadline = time.monotonic() + self._timeout
                self._read_to = batch[-1].offset() + 1
                found.append(self._take([history_record(message) for message in batch]))
            elif time.monotonic() >= deadline:
                raise NotReady(
                    f"{self._topic} does not show the commits up to offset {offset} of partition "
                    f"{self._partition}; call again, or see that a controller leads"
                )
        if found:
            self.spans = self.spans.plus(found)

    def _take(self, records: list[HistoryRecord]) -> Spans:
        last = records[-1]
        self.last_timestamp = last.timestamp
        for position in last.vector:
            if position.partition == self._partition:
                self.known_to = max(self.known_to, position.offset)
        return spans_of(records, self._partition)

    def drop(self, offset: int) -> None:
        """Nothing below this offset will be asked for."""
        self.spans = self.spans.overlapping(offset, 1 << 62)
