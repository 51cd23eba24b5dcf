"""Streaming source: committed events, micro-batch by micro-batch, in commit order.

The planner's process lives as long as the query, and reads the histories; tasks get offset ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from anabranch.errors import (
    InvalidArgument,
    NotReady,
    RetryError,
    SnapshotExpired,
    UnknownStream,
    UnsupportedSetting,
)
from anabranch.protocol.hybrid_time import from_datetime
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.history import Found
from anabranch.spark.api import (
    HAS_ADMISSION,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from anabranch.spark.columns import check_schema
from anabranch.spark.options import Options, moment
from anabranch.spark.source.admission import Limits, NotYet, admit
from anabranch.spark.source.histories import Histories
from anabranch.spark.source.plan import (
    Cutting,
    EventRange,
    codecs_of,
    read_range,
    streams_of,
    strict_of,
)
from anabranch.spark.source.positions import BEGIN, Position, from_json, is_new, raised, to_json

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("anabranch.spark")

_FAR = 20_000  # the most offsets of a history that are read to find a micro-batch's end; more are skipped
_NEAR = 2_000  # the most offsets of a history that each task reads for its commits; among more it searches


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a streaming query. Spark keeps one reader in the planner; tasks read by copies of another."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema, options)
        self._schema = schema
        self._connection = options.connection()
        self._streams = streams_of(options)
        start = options.text("start", "begin") or "begin"
        self._start = start if start in ("begin", "end") else _hybrid(moment("start", start))
        self._most = options.number("maxeventspertrigger", None)
        self._whole = options.choice("transactions", ("split", "whole"), "split") == "whole"
        self._by_epoch = options.choice("order", ("none", "epoch"), "none") == "epoch"
        self._codecs = codecs_of(options, self._streams)
        self._strict = strict_of(options)
        self._cutting = Cutting.of(options)
        options.check_all_used()
        if not HAS_ADMISSION and (self._most is not None or self._by_epoch):
            raise UnsupportedSetting(
                "options maxEventsPerTrigger and order=epoch need PySpark 4.2 or later: before, Spark tells no "
                "source where a micro-batch begins, so each takes all that is there; leave them out"
            )
        self._found: Histories | None = None
        self._target: dict[str, Found | None] | None = None  # of trigger availableNow
        self._latest: tuple[dict[str, tuple[int, int]], dict[str, Any]] | None = None
        # Ends of the histories, and positions from which there was nothing to read.
        self._nothing: tuple[dict[str, tuple[int, int]], dict[str, Position]] | None = None

    @property
    def _histories(self) -> Histories:
        if self._found is None:
            self._found = Histories(self._connection, self._streams)
        return self._found

    def _histories_of(self, positions: Mapping[str, Position]) -> Histories:
        """The histories of the current streams.

        If the positions belong to former streams of these names, all brokers have to agree that they do.
        """
        known = self._found
        if known is not None and not known.are_current():
            self.stop()
        found = self._histories
        if not all(at.is_of(found.ids[s]) for s, at in positions.items() if s in found.ids):
            self.stop()
            found = self._found = Histories(self._connection, self._streams, agreed=True)
        if found is not known and self._target is not None:
            self._target = found.heads()
        return found

    # -- called by Spark ------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """The start of a new query."""
        # The position is marked as new, so that `latestOffset` makes Spark store it at once.
        positions = self._histories.begin(self._start)
        return to_json(positions, new=self._start != "begin")

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._most is None else ReadMaxRows(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the current end the query's end."""
        self._target = self._histories.heads()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """The next micro-batch's end; ``start`` itself if there is nothing to read.

        Without arguments (before PySpark 4.2): the current end.
        """
        if start is None or limit is None:
            now = self._histories_of({}).ids
            begins = {stream: BEGIN._replace(ids=now[stream]) for stream in self._streams}
            return to_json(begins | self._ends())
        before = from_json(start)
        self._check_streams(before)
        histories = self._histories_of(before)
        positions, is_changed = {}, is_new(start)
        for stream in self._streams:
            at, ids = before.get(stream, BEGIN), histories.ids[stream]
            if not at.is_of(ids):
                self._lost(stream)
                at, is_changed = histories.first(stream), True
            positions[stream] = at._replace(ids=ids)
        end = self._admitted(positions, limit)
        if end == positions and not is_changed:
            return start
        return to_json(before | end)  # streams that are left out keep their position

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The streams' current ends, for the query's progress."""
        try:
            ends = self._histories.ends()
            if self._latest is None or self._latest[0] != ends:
                self._latest = ends, to_json(self._ends())
        except RetryError as error:
            log.info("where the streams end is not known: %s", error)
            return None
        return self._latest[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The offset ranges between two positions, for the tasks."""
        befores, afters = from_json(start), from_json(end)
        self._check_streams(befores)
        left_out = sorted(befores.keys() - afters.keys())
        if left_out:  # `latestOffset` keeps their positions if Spark passes it the start
            raise UnsupportedSetting(
                f"the checkpoint is of {', '.join(left_out)}, too: PySpark before 4.2 can't keep the place of "
                "streams that are left out: name them, or give another checkpoint"
            )
        histories = self._histories_of(afters)
        ranges: list[EventRange] = []
        for stream, after in afters.items():
            if stream in befores and not befores[stream].is_of(after.ids):
                self._lost(stream)
                del befores[stream]  # the new stream is read from its beginning
            if after.is_of(histories.ids.get(stream, after.ids)):
                ranges += _between(stream, befores.get(stream, BEGIN), after)
            else:
                self._lost(stream)
        ranges = still_there(histories, ranges, befores, strict=self._strict)
        if self._by_epoch:
            return list(ranges)
        return self._cutting.cut(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(
            self._connection, self._schema, self._codecs, partition, strict=self._strict
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint has the position, and streams keep events for other readers."""

    def stop(self) -> None:
        if self._found is not None:
            self._found.close()
            self._found = None

    def _check_streams(self, before: Mapping[str, Position]) -> None:
        if before and not before.keys() & set(self._streams):
            raise InvalidArgument(
                f"the checkpoint is of {', '.join(before)}, not of {', '.join(self._streams)}: give another one"
            )

    def _lost(self, stream: str) -> None:
        """Raise `UnknownStream`, or warn, because the checkpoint's position belongs to a former stream."""
        what = f"the checkpoint is of a former stream {stream}, which was deleted and made again"
        if self._strict:
            raise UnknownStream(
                f"{what}: give another checkpoint, or set option failOnDataLoss=false (export: --lossy) to "
                "continue from the new one's beginning"
            )
        log.warning("%s: the query continues from the new one's beginning", what)

    def _ends(self) -> dict[str, Position]:
        heads, ids = self._histories.heads(), self._histories.ids
        return {
            s: Position(at.offset, raised(at.vector(), {}), ids[s]) for s, at in heads.items() if at
        }

    # -- inside ---------------------------------------------------------------------------------------

    def _admitted(self, positions: dict[str, Position], limit: ReadLimit) -> dict[str, Position]:
        """The end of a micro-batch that begins at these positions; over several control partitions, a safe time."""
        histories, ends = self._histories, None
        try:
            target = self._target
            if target is None and histories.apart:
                ends = histories.ends()
                # Spark asks all the time: controllers are asked only if something was committed.
                if self._nothing == (ends, positions):
                    return positions
                target = histories.heads()
        except RetryError as error:
            log.warning("events wait, as no controller says which commits are complete: %s", error)
            return positions
        found = self._admitted_to(positions, limit, target)
        if ends is not None:
            self._nothing = (ends, positions) if found == positions else None
        return found

    def _admitted_to(
        self,
        positions: dict[str, Position],
        limit: ReadLimit,
        target: dict[str, Found | None] | None,
    ) -> dict[str, Position]:
        """``target``: the histories' last records that it may take; None: all that are there."""
        histories = self._histories
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if target is None:
            ends = histories.ends()
        else:
            ends = {s: (at.offset + 1,) * 2 if at else (0, 0) for s, at in target.items()}
        if all(ends[stream][0] <= at.after + 1 for stream, at in positions.items()):
            return positions
        if most is None and not self._by_epoch:
            far = sum(ends[stream][0] - at.after for stream, at in positions.items())
            if far > _FAR or self._target is not None:
                return _jumped(positions, target or histories.heads())
        fronts = {}
        for stream, at in positions.items():
            fronts[stream] = histories.tail(stream)
            fronts[stream].begin(at.after, *ends[stream])
        admitted = admit(positions, fronts, Limits(most, self._whole, self._by_epoch))
        if admitted.all and self._target is None:
            self._latest = ends, to_json(admitted.positions)
        return admitted.positions


def _hybrid(at: int | datetime) -> int:
    return at if isinstance(at, int) else from_datetime(at)


def _jumped(
    positions: Mapping[str, Position], heads: Mapping[str, Found | None]
) -> dict[str, Position]:
    """The current ends, found without reading each record. Positions move only if there are new events."""
    moved = {
        stream: at if head is None else at.moved(head.offset, head.vector())
        for stream, at in positions.items()
        for head in [heads[stream]]
    }
    same = all(moved[stream].vector == raised(at.vector, {}) for stream, at in positions.items())
    return dict(positions) if same else moved


def _between(stream: str, before: Position, after: Position) -> Iterator[EventRange]:
    """The ranges between two positions: whole commits, except for split commits."""
    history = (before.after + 1, None) if after.after - before.after <= _NEAR else None
    for partition, end in sorted(after.vector.items()):
        first = before.vector.get(partition, 0)
        if first < end:
            yield EventRange(stream, partition, first, end, history, ids=after.ids)


def still_there(
    histories: Histories,
    ranges: list[EventRange],
    befores: Mapping[str, Position],
    *,
    strict: bool,
) -> list[EventRange]:
    """The ranges, which begin at ``befores``, without removed events and removed history.

    Raises: SnapshotExpired (``strict``: events are gone), NotReady, DeadlineExceeded.
    """
    places = [(found.stream, found.partition) for found in ranges]
    firsts, begins = histories.starts(places) if places else ({}, {})
    left = []
    for found in ranges:
        if found.history is not None and found.history[0] < begins[found.stream]:
            found = replace(found, history=(begins[found.stream], found.history[1]))
        first = firsts[found.stream, found.partition]
        if found.first < first:
            # An added stream has no former position: its removed events are no loss to this query.
            before = befores.get(found.stream)
            event = first if before is None else _first_event(histories, found, before)
            if event < min(first, found.end):
                lost = (
                    f"{found.stream}, partition {found.partition}: retention removed offsets {event} to "
                    f"{min(first, found.end) - 1} before they were read"
                )
                if strict:
                    raise SnapshotExpired(
                        f"{lost}; set option failOnDataLoss=false to continue without them, and keep the stream "
                        "for longer"
                    )
                log.warning("%s", lost)
            found = replace(found, first=min(first, found.end))
        if found.first < found.end:
            left.append(found)
    return left


def _first_event(histories: Histories, found: EventRange, before: Position) -> int:
    """The offset of the range's first event: what retention removes before it are markers, and no loss.

    If the history no longer has that event's commit, this is the range's begin.
    """
    if histories.is_cut(found.stream, before.after):
        return found.first
    tail = histories.tail(found.stream)
    committed, _ = histories.ends()[found.stream]
    tail.begin(before.after, committed, committed)
    try:
        while (record := tail.peek(histories.timeout)) is not None:
            if isinstance(record.record, CommitRecord):
                stands = [
                    max(part.first, found.first)
                    for part in record.record.segments
                    if part.partition == found.partition and part.end > found.first
                ]
                if stands:
                    return min(stands)
            tail.pop()
    except NotYet as error:
        raise NotReady(str(error)) from error
    return found.end
