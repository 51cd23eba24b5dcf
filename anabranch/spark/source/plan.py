"""Offset ranges for Spark's tasks, and how a task reads one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from anabranch.client.calls.reading import dead_letter
from anabranch.errors import InvalidArgument, SnapshotExpired, UndecodableValue
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import split_stream
from anabranch.reading.committed_log import UNKNOWN_IDS, StreamIds
from anabranch.spark.api import arrow_schema
from anabranch.spark.clients import client_of
from anabranch.spark.codecs import NONE, Codecs, Decoding
from anabranch.spark.options import Connection, Options
from anabranch.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("anabranch.spark")


@dataclass(frozen=True)
class EventRange(InputPartition):
    """Offsets [first, end) of a partition of a stream, for one task.

    ``history``: offsets (first, end or None) of the history that have the range's commits; None: the task searches
    them. ``low``, ``high``: commit timestamps to read, both included; ``segments``: ids; None: all. ``ids``: of the
    stream's topics.
    """

    stream: str
    partition: int
    first: int
    end: int
    history: tuple[int, int | None] | None = None
    low: int | None = None
    high: int | None = None
    segments: frozenset[int] | None = None
    ids: StreamIds = UNKNOWN_IDS


def streams_of(options: Options) -> tuple[str, ...]:
    """The streams of option ``stream`` or ``streams``, separated by commas."""
    one, many = options.words("stream"), options.words("streams")
    if bool(one) == bool(many):
        raise InvalidArgument("give option stream=scope/name, or streams=scope/one,scope/two")
    streams = tuple(dict.fromkeys(one or many))
    for stream in streams:
        split_stream(stream)
    return streams


def strict_of(options: Options) -> bool:
    """Option ``failOnDataLoss``: whether removed events are an error."""
    return options.choice("failondataloss", ("true", "false"), "true") == "true"


@dataclass(frozen=True)
class Cutting:
    """How ranges are split: into pieces of at most ``rows`` offsets, and at least ``least`` pieces in all, if there
    are enough offsets."""

    rows: int
    least: int

    @staticmethod
    def of(options: Options) -> Cutting:
        rows = options.number("rowsperpartition", defaults.SPARK_TASK_ROWS)
        least = options.number("minpartitions", 1)
        return Cutting(rows or defaults.SPARK_TASK_ROWS, least or 1)

    def cut(self, ranges: Sequence[EventRange]) -> list[InputPartition]:
        """The pieces, in order."""
        total = sum(found.end - found.first for found in ranges)
        size = max(1, min(self.rows, total // self.least))
        return [piece for found in ranges for piece in _pieces(found, size)]


def _pieces(whole: EventRange, size: int) -> Iterator[EventRange]:
    length = whole.end - whole.first
    count = -(-length // size)
    for i in range(count):
        first = whole.first + length * i // count
        end = whole.first + length * (i + 1) // count
        yield replace(whole, first=first, end=end)


def codecs_of(options: Options, streams: Sequence[str]) -> Codecs:
    """Options ``key``, ``value`` and ``undecodable``. Raises: InvalidArgument."""
    codecs = Codecs.of(options)
    if undecodable := options.text("undecodable"):
        if codecs == NONE:
            raise InvalidArgument(
                "option undecodable needs option key or value: bytes are not decoded"
            )
        codecs = replace(codecs, undecodable=undecodable)
    for stream in streams:
        codecs.handle(stream)
    return codecs


def read_range(
    connection: Connection,
    schema: StructType,
    codecs: Codecs,
    found: InputPartition,
    *,
    strict: bool,
) -> Iterator[pa.RecordBatch]:
    """A task's work: the events of its range, as Arrow batches.

    Raises: SnapshotExpired (``strict``: the history no longer has the commit of an event), UndecodableValue.
    """
    if not isinstance(found, EventRange):  # Spark's own, if no range was planned
        return
    from anabranch.reading.event_columns import PLACES, SCHEMA
    from anabranch.reading.ranges import RangeReader

    def bury(stream: str, event: Event, error: UndecodableValue) -> None:
        dead_letter(client_of(connection).begin, stream, event, error)

    wanted = arrow_schema(schema)
    decoding = Decoding(codecs, found.stream, schema, bury)
    with RangeReader(connection.reader_ports(), connection.timeout) as reader:
        for batch in reader.read(
            found.stream,
            found.partition,
            found.first,
            found.end,
            history=found.history,
            low=found.low,
            high=found.high,
            segments=found.segments,
            ids=found.ids,
            places=schema.names if set(schema.names) <= set(PLACES) else None,
        ):
            if strict and batch.schema.equals(SCHEMA):
                _check_commits(found, batch)
            chosen = decoding(batch).select(schema.names)
            yield chosen if chosen.schema.equals(wanted) else chosen.cast(wanted)
    if decoding.skipped:
        log.warning(
            "%s, partition %d: %d events of offsets %d to %d are left out: codecs do not decode them",
            found.stream,
            found.partition,
            decoding.skipped,
            found.first,
            found.end - 1,
        )


def _check_commits(found: EventRange, batch: pa.RecordBatch) -> None:
    """Raise `SnapshotExpired` if the history was truncated, and has no commit of some of the events."""
    known = batch.column("commit_timestamp")
    if known.null_count:
        offset = batch.column("offset").filter(known.is_null())[0].as_py()
        raise unknown_commit(found.stream, found.partition, offset)


def unknown_commit(stream: str, partition: int, offset: int) -> SnapshotExpired:
    """The error for an event whose commit is not in the history."""
    return SnapshotExpired(
        f"{stream}, partition {partition}: the history does not tell segment and commit timestamp of offset "
        f"{offset}: it was cut, or the event was there before the stream; set option "
        "failOnDataLoss=false to read such events with nulls there, or begin after them"
    )
