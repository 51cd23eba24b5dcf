"""Offset ranges of a stream's partitions as Arrow record batches, with the commit of each event, for Spark.

Batches are fetched raw and decoded by compiled code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from anabranch.batches import columns_read
from anabranch.batches.columns_read import MAX_BYTES, MAX_ROWS, Columns, ColumnsBuilder, Longs
from anabranch.errors import DeadlineExceeded, InvalidArgument
from anabranch.ports import CorruptBatch, Fetched, RawBatch, TopicPartition
from anabranch.protocol import defaults
from anabranch.reading import commit_columns as commits_module
from anabranch.reading.commit_columns import CommitColumns, CommitFilter
from anabranch.reading.committed_log import (
    UNKNOWN_IDS,
    Foreign,
    ReaderPorts,
    StreamIds,
    partitions_of,
    unreadable,
)
from anabranch.reading.event_columns import EventBatches
from anabranch.topics.names import stream_topic

FETCH_BYTES = 4 << 20
_LEAST_BYTES = 64 << 10
_LEAST_ROOM = 256 << 10
_EVENT_BYTES = 1 << 10


def warm() -> None:
    """Load the compiled code now, not for the first range (1 s; 15 s the first time on a machine)."""
    columns_read.warm()
    commits_module.warm()


class _Asked(NamedTuple):
    """Arguments of `RangeReader.read` except the offsets."""

    stream: str
    partition: int
    history: tuple[int, int | None] | None
    choice: CommitFilter


class RangeReader:
    """Reads ranges one after the other over the same connections. Close it, or use it as a context manager.

    One thread at a time. A reader can't be pickled, or used in a forked child: create it where it is used.
    """

    def __init__(self, ports: ReaderPorts, timeout: float = defaults.TIMEOUT_S) -> None:
        """``timeout``: seconds to wait without new records."""
        self._timeout = timeout
        self._foreign: dict[str, Foreign] = {}
        self._clock = ports.clock
        self._source = ports.committed_log(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all connections."""
        self._source.close()

    def read(
        self,
        stream: str,
        partition: int,
        first: int,
        end: int,
        *,
        history: tuple[int, int | None] | None = None,
        low: int | None = None,
        high: int | None = None,
        segments: Collection[int] | None = None,
        places: Collection[str] | None = None,
        ids: StreamIds = UNKNOWN_IDS,
    ) -> Iterator[pa.RecordBatch]:
        """Committed events at the offsets from ``first`` up to ``end`` (not included), in order.

        Batches have `anabranch.reading.event_columns.SCHEMA`, and about 10,000 rows or some megabytes; empty ones
        are not yielded.

        ``history``: (offset, end or None) of a part of the stream's history that has all commits of the range;
        None: it is searched. ``low``, ``high``: commit timestamps (hybrid time), both included; ``segments``:
        ids. Events outside of these filters are not fetched where they can be skipped. An event whose commit is not
        in the history any more matches no filter. Foreign records are skipped.

        ``places``: some of `anabranch.reading.event_columns.PLACES`, if no other columns are needed. Events are
        not fetched where the history has these columns. ``ids``: topic ids of the stream to which the offsets
        belong; another stream of its name raises `UnknownStream`.

        Raises: InvalidArgument, UnknownStream, SnapshotExpired (retention has removed a part), NotReady and
        DeadlineExceeded (nothing new came for the reader's timeout; repeating is safe), FixCallError.
        """
        if not 0 <= first <= end:
            raise InvalidArgument(f"offsets {first} to {end}: a range, from 0 on")
        self._source.expect(stream, ids)
        choice = CommitFilter(low, high, None if segments is None else frozenset(segments))
        asked = _Asked(stream, partition, history, choice)
        if places is None:
            return self._read(asked, first, end)
        return self._places(asked, first, end, places)

    def _places(
        self, asked: _Asked, first: int, end: int, wanted: Collection[str]
    ) -> Iterator[pa.RecordBatch]:
        commits, choice = self._commits(asked, first), asked.choice
        at = min(end, max(first, commits.known_from()))
        yield from self._read(asked, first, at)
        batches = EventBatches(asked.stream, asked.partition)
        while at < end:
            commits.cover(at + 1)
            until = min(end, commits.known_to)
            near = commits.spans.overlapping(at, until)
            near = near.those(near.taken(choice)).clipped(first, end)
            exact = (
                near.counts >= 0
                if "offset" not in wanted
                else near.counts == near.ends - near.firsts
            )
            borders = np.flatnonzero(exact[1:] != exact[:-1]) + 1
            for run in np.split(np.arange(len(near)), borders):
                if len(run) and exact[run[0]]:
                    yield from batches.places(near.those(run), wanted)
                elif len(run):
                    low, high = int(near.firsts[run[0]]), int(near.ends[run[-1]])
                    yield from self._read(asked, low, high)
            commits.drop(until)
            at = until

    def _commits(self, asked: _Asked, first: int) -> CommitColumns:
        """The commits from an offset on."""
        stream, partition, history, _ = asked
        if stream not in self._foreign:
            partitions_of(self._source, [stream], self._clock.monotonic() + self._timeout)
            self._foreign[stream] = Foreign(stream_topic(stream), self._clock)
        commits = CommitColumns(self._source, stream, partition, self._timeout)
        commits.begin(first, history)
        return commits

    def _read(self, asked: _Asked, first: int, end: int) -> Iterator[pa.RecordBatch]:
        if first == end:
            return
        stream, partition, _, choice = asked
        place = TopicPartition(stream_topic(stream), partition)
        commits = self._commits(asked, first)
        batches = EventBatches(stream, partition)
        # A short range gets small arrays: arrays have to be cleared for each range.
        size = min(MAX_BYTES, max(_LEAST_ROOM, (end - first) * _EVENT_BYTES))
        builder = ColumnsBuilder(min(MAX_ROWS, end - first), size)
        everything = np.array([[first], [end]], dtype=np.int64)
        position, limit = first, self._source.max_event_bytes
        while position < end:
            part = self._fetch(place, position, end)
            position = part.next_offset
            if part.batches:
                commits.cover(min(end, part.batches[-1].next_offset))
            wanted = everything if choice.is_open else commits.spans.wanted(choice, first, end)
            for batch in part.batches:
                if batch.base_offset < end and _meet(wanted, batch):
                    try:
                        columns = builder.add(batch, wanted, limit=limit)
                    except CorruptBatch as error:
                        raise unreadable(place, batch, error, limit) from error
                    if columns is not None:
                        yield from self._committed(columns, commits, batches)
                        commits.drop(int(columns.offsets[-1]) + 1)
            if not choice.is_open:
                position = self._skip(position, wanted, commits, choice, end)
                if builder.is_empty:
                    commits.drop(position)
        columns = builder.finish()
        if columns is not None:
            yield from self._committed(columns, commits, batches)

    def _committed(
        self, columns: Columns, commits: CommitColumns, batches: EventBatches
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of these columns, without foreign records."""
        joined = commits.spans.join(columns.offsets)
        foreign = commits.foreign(columns, joined)
        if foreign is not None:
            first, count = int(columns.offsets[foreign.argmax()]), int(foreign.sum())
            self._foreign[batches.stream].count_skipped(batches.partition, first, count)
        return batches.of(columns, joined, foreign)

    def _skip(
        self,
        position: int,
        wanted: Longs,
        commits: CommitColumns,
        choice: CommitFilter,
        end: int,
    ) -> int:
        """The offset from which to read on: ``position`` or later, and at most the next wanted event's offset.

        ``wanted``: offset ranges of the wanted commits that ``commits`` has read so far. Returns ``end`` if no
        wanted event is left below it.
        """
        at = int(np.searchsorted(wanted[1], position, side="right"))
        if at < wanted.shape[1]:
            return max(position, int(wanted[0, at]))
        if choice.high is not None and commits.last_timestamp > choice.high:
            return end
        return max(position, min(commits.known_to, end))

    def _fetch(self, place: TopicPartition, position: int, end: int) -> Fetched:
        deadline = self._clock.monotonic() + self._timeout
        while True:
            # Don't fetch records after a short range.
            most = min(FETCH_BYTES, max(_LEAST_BYTES, (end - position) * _EVENT_BYTES))
            part = self._source.fetch(place, position, deadline, most)
            if part is not None:
                return part
            if self._clock.monotonic() >= deadline:
                why = self._source.trouble or (
                    "a native transaction is open there, or the range ends too high"
                )
                raise DeadlineExceeded(
                    f"{place.topic}[{place.partition}] shows nothing from offset {position} on, up to {end}: "
                    f"{why}; call again with more time"
                )


def _meet(wanted: Longs, batch: RawBatch) -> bool:
    """Whether a batch has wanted offsets."""
    at = int(np.searchsorted(wanted[1], batch.base_offset, side="right"))
    return at < wanted.shape[1] and int(wanted[0, at]) < batch.next_offset
