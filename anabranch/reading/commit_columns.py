"""The commits of a partition's offsets, in columns: for readers of offset ranges.

`CommitColumns` reads the history as far as a range needs it, by compiled code. `Spans` are the offset ranges of its
commits as arrays, so that millions of events get their commits by a few array operations. Ordered readers ask for
one offset at a time, need no numpy, and use `anabranch.reading.commit_index`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.batches.columns_read import Bytes, Columns, ColumnsBuilder, Longs
from anabranch.batches.records import decode_records
from anabranch.core.history_records import ends_in
from anabranch.errors import InvalidArgument, MalformedRecord, NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.reading.history import HistoryRecord, HistorySearch, history_record
from anabranch.topics.names import history_topic

_HALVES = Struct("<qq")
_EMPTY: Longs = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """Which commits are wanted, by timestamp (``low`` to ``high``, both included) and segment id. None: all."""

    low: int | None = None
    high: int | None = None
    segments: frozenset[int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether everything is wanted."""
        return self.low is None and self.high is None and self.segments is None


class Joined(NamedTuple):
    """For each of some offsets, its commit. ``known``: whether the commit is known; None: all commits are known."""

    spans: Spans
    at: Longs  # index of the span
    known: NDArray[np.bool_] | None

    @property
    def segments(self) -> Longs:
        return self.spans.segments[self.at]

    @property
    def timestamps(self) -> Longs:
        return self.spans.timestamps[self.at]

    def of_txns(self, ids: Bytes) -> NDArray[np.bool_]:
        """Whether each commit is of the transaction with the id at its place in ``ids``; zeros: no transaction."""
        given = ids.view(np.int64)
        spans = self.spans
        heads, tails = spans.txn_heads[self.at], spans.txn_tails[self.at]
        return np.asarray((given[::2] == heads) & (given[1::2] == tails))


@dataclass(frozen=True, slots=True)
class Spans:
    """Commits in order: the events at offsets [first, end) of the partition, between which may be markers.

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
        """For each of these rising offsets, the commit that contains it."""
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
        """The parts of the spans within [first, end). A count is -1 where markers make it unknown."""
        firsts, ends = np.maximum(self.firsts, first), np.minimum(self.ends, end)
        dense = self.counts == self.ends - self.firsts
        whole = (firsts == self.firsts) & (ends == self.ends) & (self.counts <= ends - firsts)
        counts = np.where(dense, ends - firsts, np.where(whole, self.counts, -1))
        return replace(self, firsts=firsts, ends=ends, counts=counts)

    def plus(self, others: list[Spans]) -> Spans:
        """These spans, followed by the other spans."""
        columns = zip(self.columns, *(o.columns for o in others), strict=True)
        return Spans(*map(np.concatenate, columns))

    @property
    def columns(self) -> tuple[Longs, ...]:
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
        """The offset ranges in [first, end) of the commits that a filter takes: a row of firsts, a row of ends."""
        near = self.overlapping(first, end)
        taken = near.taken(choice)
        # Ranges of consecutive taken commits are joined: only markers are between them.
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


_FETCH_BYTES = 1 << 20
_NO_END = (1 << 63) - 1


def warm() -> None:
    from anabranch.batches.kernels import history  # noqa: F401


class Part(NamedTuple):
    """A partition's commits, from consecutive history records.

    ``reached``: the partition's end in the last record that names it; -1 if no record names it. ``timestamp``: the
    last record's; -1 without records.
    """

    spans: Spans
    reached: int
    timestamp: int


def _walk(columns: Columns, partition: int) -> Part | None:
    """A part of history records in columns; None if a record is foreign, or has a rare form."""
    from anabranch.batches.kernels import history as kernel  # imported only where spans are needed

    values = columns.values
    most = len(values.data) // kernel.MIN_SPAN_BYTES + 1
    spans = np.empty((kernel.SPAN_ROWS, most), dtype=np.int64)
    state = np.full(kernel.STATE_SIZE, -1, dtype=np.int64)
    state[kernel.SPANS] = 0
    if kernel.commits(values.data, values.ends, partition, spans, state) != 0:
        return None
    count, reached, timestamp = (int(number) for number in state)
    rows = (row[:count].copy() for row in spans)  # a copy: the arrays are mostly unused
    return Part(Spans(*rows), reached, timestamp)


def _part(records: list[HistoryRecord], partition: int) -> Part:
    reached = -1
    for record in records:
        for position in ends_in(record):
            if position.partition == partition:
                reached = position.offset
    timestamp = records[-1].timestamp if records else -1
    return Part(spans_of(records, partition), reached, timestamp)


class CommitColumns:
    """The commits of one partition from an offset on, read as far as needed. One thread at a time."""

    def __init__(self, source: CommittedLog, stream: str, partition: int, timeout: float) -> None:
        """``timeout``: seconds to wait for something new in the history."""
        self._source = source
        self._search = HistorySearch(source, stream, timeout)
        self._place = TopicPartition(history_topic(stream), 0)
        self._partition = partition
        self._timeout = timeout
        self._end = _NO_END
        self._read_to = 0
        self._floor: int | None = None
        self.known_to = 0  # the commits of all offsets below are known
        self.last_timestamp = -1  # of the last history record that was read
        self.spans = NO_SPANS

    def begin(self, first: int, history: tuple[int, int | None] | None) -> None:
        """Prepare for the commits of the offsets from ``first`` on.

        ``history``: their place in the history (first offset, end or None); None: it is searched. Raises: NotReady.
        """
        begin, end = history or (self._search.passing(self._partition, first), None)
        self._read_to, self._end = begin, _NO_END if end is None else end
        self.spans = NO_SPANS
        self.known_to = first
        self.last_timestamp = -1

    def cover(self, offset: int) -> None:
        """Read the commits of all offsets below this one.

        Raises: NotReady (the history does not show them yet), InvalidArgument (they are not in the part of the
        history that `begin` got), MalformedRecord (a record in the history is not a controller's).
        """
        deadline = self._source.clock.monotonic() + self._timeout
        found: list[Spans] = []
        while self.known_to < offset:
            if self._read_to >= self._end:
                raise InvalidArgument(
                    f"the history up to {self._end} does not reach offset {offset} of partition {self._partition}"
                )
            parts = self._next(deadline)
            if parts is not None:
                deadline = self._source.clock.monotonic() + self._timeout
                for part in parts:
                    self.known_to = max(self.known_to, part.reached)
                    self.last_timestamp = max(self.last_timestamp, part.timestamp)
                    found.append(part.spans)
            elif self._source.clock.monotonic() >= deadline:
                raise NotReady(
                    f"{self._place.topic} does not show the commits up to offset {offset} of partition "
                    f"{self._partition}; call again, or see that a controller leads"
                )
        if found:
            self.spans = self.spans.plus(found)
            self._check_once()

    def _next(self, deadline: float) -> list[Part] | None:
        """Read the next records, and return their commits; None if nothing new came."""
        begin, end = self._read_to, self._end
        found = self._source.fetch(self._place, begin, deadline, _FETCH_BYTES)
        if found is None:
            return None
        wanted = np.array([[begin], [end]], dtype=np.int64)
        builder = ColumnsBuilder(size=_FETCH_BYTES)
        with client_errors():
            chunks = [builder.add(batch, wanted) for batch in found.batches]
        chunks.append(builder.finish())
        walked = [_walk(chunk, self._partition) for chunk in chunks if chunk is not None]
        parts = [part for part in walked if part is not None]
        if len(parts) < len(walked):
            # The codec names the error, or knows a form that the compiled code does not.
            records = [
                history_record(self._place.topic, record)
                for batch in found.batches
                for record in decode_records(batch.data)
                if begin <= record.offset < end
            ]
            parts = [_part(records, self._partition)]
        self._read_to = found.next_offset
        return parts

    def _check_once(self) -> None:
        """Raise `MalformedRecord` if the history names an offset twice."""
        again = np.flatnonzero(self.spans.firsts[1:] < self.spans.ends[:-1])
        if len(again):
            raise MalformedRecord(
                f"{self._place.topic} names offset {self.spans.firsts[again[0] + 1]} of partition "
                f"{self._partition} twice: a COMMIT record was put there again. Only controllers may write to that "
                "topic; `anabranch spark audit` finds the record"
            )

    def foreign(self, columns: Columns, commits: Joined) -> NDArray[np.bool_] | None:
        """A mask of foreign records; None if no record is known to be foreign, as far back as the history goes.

        ``commits``: the commits of their offsets, from `spans`.
        """
        found = ~commits.of_txns(columns.txns.data)
        if commits.known is not None:
            found &= commits.known
            found |= ~commits.known & (columns.offsets >= self.known_from())
        return found if found.any() else None

    def known_from(self) -> int:
        """The partition's end in the history's first record: the history does not know events below it."""
        if self._floor is None:
            oldest = self._search.not_beyond({})
            self._floor = oldest.vector().get(self._partition, 0) if oldest is not None else 0
        return self._floor

    def drop(self, offset: int) -> None:
        """Forget offsets below this one, which are not needed any more."""
        self.spans = self.spans.overlapping(offset, _NO_END)
