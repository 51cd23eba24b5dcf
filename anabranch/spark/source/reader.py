"""Batch source: a snapshot of streams, taken once when Spark plans, read by many tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, get_args

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from anabranch.core.history_records import NO_PREVIOUS
from anabranch.errors import InvalidArgument
from anabranch.protocol.ids import segment_epoch
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.history import Found, HistorySearch
from anabranch.reading.snapshot import Mode
from anabranch.spark.clients import client_of
from anabranch.spark.columns import check_schema
from anabranch.spark.options import Options, moment
from anabranch.spark.source.filters import Selection
from anabranch.spark.source.histories import Histories
from anabranch.spark.source.plan import (
    Cutting,
    EventRange,
    codecs_of,
    read_range,
    streams_of,
    strict_of,
    unknown_commit,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter  # 4.0 has none

    from anabranch.reading.snapshot import Snapshot

_MANY = 8  # the most segments for which a search of the history costs less than it saves
_OPEN = 1 << 62


class SnapshotReader(DataSourceReader):
    """Reader of a snapshot. Spark makes it in a planner to get partitions; copies of it read in the tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema, options)
        self._schema = schema
        self._connection = options.connection()
        self._streams = streams_of(options)
        self._at = _either(options, "at", "end", "now")
        self._since = _either(options, "since", "start", "begin")
        self._mode = options.choice("mode", get_args(Mode), "snapshot")
        self._codecs = codecs_of(options, self._streams)
        self._strict = strict_of(options)
        self._cutting = Cutting.of(options)
        options.check_all_used()
        self._selection = Selection()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply filters; returns the filters that Spark has to check."""
        return [given for given in filters if not self._selection.take(given)]

    def partitions(self) -> list[InputPartition]:
        """Take the snapshot, and plan ranges for what the filters select."""
        snapshot = client_of(self._connection).snapshot(
            list(self._streams),
            self._at,
            self._since,
            self._mode,  # type: ignore[arg-type]
            timeout=self._connection.timeout,
        )
        streams = [stream for stream in self._streams if self._selection.has(stream)]
        ranges = [found for stream in streams for found in self._ranges(snapshot, stream)]
        if ranges and self._selection.prunes:
            ranges = self._pruned(ranges, snapshot.timestamp)
        return self._cutting.cut(ranges)

    def _ranges(self, snapshot: Snapshot, stream: str) -> Iterator[EventRange]:
        """The selected offsets in the snapshot's part of each partition."""
        selection = self._selection
        starts, ids = snapshot.start_offsets(stream), snapshot.plan().cuts[stream].ids
        for partition, end in sorted(snapshot.offsets(stream).items()):
            first = max(starts.get(partition, 0), selection.offsets.low or 0)
            high = selection.offsets.high
            end = end if high is None else min(end, high + 1)
            if first < end and selection.has(stream, partition):
                yield EventRange(
                    stream,
                    partition,
                    first,
                    end,
                    low=selection.commits.low,
                    high=selection.commits.high,
                    segments=selection.segments,
                    ids=ids,
                )

    def _pruned(self, ranges: list[EventRange], timestamp: int) -> list[EventRange]:
        """The parts of the ranges that can have selected commits."""
        streams = {found.stream for found in ranges}
        with closing(Histories(self._connection, streams)) as histories:
            histories.expect({found.stream: found.ids for found in ranges})
            places = {
                stream: _Places(histories.search(stream), self._selection, timestamp, self._strict)
                for stream in sorted(streams)
            }
        narrowed = (places[found.stream].narrow(found) for found in ranges)
        return [found for found in narrowed if found.first < found.end]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(
            self._connection, self._schema, self._codecs, partition, strict=self._strict
        )


def _either(options: Options, name: str, other: str, word: str) -> int | datetime | None:
    """A time given by one of two options; None if neither is given, or if it is ``word``, which means no limit."""
    given = [(key, text) for key in (name, other) if (text := options.text(key)) is not None]
    if len(given) > 1:
        raise InvalidArgument(f"options {name} and {other} mean the same: give one of them")
    return next((moment(key, text) for key, text in given if text != word), None)


class _Places:
    """The offsets of the selected commits in one stream, found in its history."""

    def __init__(
        self, search: HistorySearch, selection: Selection, timestamp: int, strict: bool
    ) -> None:
        """``timestamp``: the snapshot's; later records are not read."""
        low, high = selection.commits.low, selection.commits.high
        # Partition -> offset below which the history lacks commits that the filters may select.
        self._unknown_below = unknown_below(search.oldest_whole(), low) if strict else {}
        before = search.as_of(min(low - 1, timestamp)) if low is not None and low > 0 else None
        self._lows = before.vector() if before is not None else {}
        self._highs: Mapping[int, int] | None = None
        if high is not None and high < timestamp:
            last = search.as_of(high) if high >= 0 else None
            self._highs = last.vector() if last is not None else {}
        self._segments: dict[int, tuple[int, int]] | None = None  # partition -> first, end
        if selection.segments is not None and len(selection.segments) <= _MANY:
            self._segments = _segments(search, selection.segments)

    def narrow(self, found: EventRange) -> EventRange:
        """The selected part of a range, perhaps empty. Raises: SnapshotExpired (the history is truncated in it)."""
        if found.first < min(found.end, self._unknown_below.get(found.partition, 0)):
            raise unknown_commit(found.stream, found.partition, found.first)
        first = max(found.first, self._lows.get(found.partition, 0))
        end = found.end
        if self._highs is not None:
            end = min(end, self._highs.get(found.partition, 0))
        if self._segments is not None:
            begins, ends = self._segments.get(found.partition, (0, 0))
            first, end = max(first, begins), min(end, ends)
        return replace(found, first=first, end=end)


def unknown_below(oldest: Found | None, low: int | None) -> dict[int, int]:
    """Partition -> the first offset whose commit is in a history that begins with this record.

    Empty if the history has all commits from timestamp ``low`` on.
    """
    if oldest is None or oldest.record.previous == NO_PREVIOUS:
        return {}
    if low is not None and low >= oldest.record.timestamp:
        return {}
    parts = oldest.record.segments if isinstance(oldest.record, CommitRecord) else ()
    return oldest.vector() | {part.partition: part.first for part in reversed(parts)}


def _segments(search: HistorySearch, wanted: Iterable[int]) -> dict[int, tuple[int, int]] | None:
    """Partition -> first offset and end of the wanted segments. None if a wanted segment is unknown."""
    found: dict[int, tuple[int, int]] = {}
    for segment_id in wanted:
        record = search.epoch_record(segment_epoch(segment_id))
        if record is None and search.is_cut():
            return None
        for segment in record.segments if record is not None else ():
            if segment.segment_id == segment_id:
                first, end = found.get(segment.partition, (_OPEN, 0))
                sealed = _end(search, segment_epoch(segment_id) + 1, segment_id)
                found[segment.partition] = min(first, segment.start_offset), max(end, sealed)
    return found


def _end(search: HistorySearch, epoch: int, segment_id: int) -> int:
    """A segment's end, if this epoch seals it; `_OPEN` otherwise: later epochs are not searched."""
    record = search.epoch_record(epoch)
    ends = [s.end_offset for s in record.sealed if s.segment_id == segment_id] if record else []
    return ends[0] if ends else _OPEN
