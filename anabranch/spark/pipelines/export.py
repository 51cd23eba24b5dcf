"""Streams into files as they are committed: each micro-batch once, and made of whole transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from anabranch.errors import InvalidArgument
from anabranch.spark.failures import named_failures
from anabranch.spark.pipelines.place import options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from anabranch.spark.options import Connection

FORMATS = ("parquet", "delta")
DATE = "date"
_CHECKPOINT = "_checkpoint"
_LOOK_S = 1
# INT96, Spark's default, is long deprecated, and Delta does not have it.
_FILE_SETTINGS = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the files look like.

    ``partition_by``: columns, or ``date``, the UTC date of the timestamp. ``schema``: values are JSON objects
    with these fields (DDL); column ``value`` is a struct of them. A value that is not ends the query.
    """

    form: str = "parquet"
    partition_by: Sequence[str] = ()
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """When a micro-batch is made, and how big it is.

    ``once``: all that is there now, then the end; else every ``interval`` seconds, until it is stopped.
    ``most_events``: in a micro-batch (None: no limit). ``whole``: a transaction bigger than that is a
    micro-batch of its own; else it is split. ``start``: of a new checkpoint: ``begin``, ``end``, a commit
    timestamp, or a time with its zone. ``strict``: `SnapshotExpired` where retention removed events, or what the
    history tells of them, before they were exported; else the export goes on without.
    """

    once: bool = True
    interval: float = 1.0
    most_events: int | None = None
    whole: bool = True
    start: str = "begin"
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch that is done."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True)
class Exported:
    """What one run did. ``query_id``: of the checkpoint, the same in every run."""

    to: str
    checkpoint: str
    query_id: str
    batches: int
    rows: int


def export(
    spark: SparkSession,
    connection: Connection,
    streams: Sequence[str],
    to: str,
    *,
    shape: Shape | None = None,
    pace: Pace | None = None,
    checkpoint: str | None = None,
    progress: Callable[[Batch], None] | None = None,
) -> Exported:
    """Write what is committed to files in folder ``to``, and go on there the next time.

    ``checkpoint``: where the position is kept; by default in the folder itself, so that both live and die together.
    ``progress`` is called after each micro-batch that had rows.

    Parquet is exactly once for Spark's readers, which go by the folder's ``_spark_metadata``; other readers may
    see files of a batch that was cut off and written anew. Delta is exactly once for every reader.

    Raises:
        InvalidArgument: the call or a value can't be that; ``to`` holds another checkpoint's output.
        UnknownStream. SnapshotExpired: see `Pace`. NoDelta: the package for Delta is missing.
        JobFailed: again is safe.
    """
    shape, pace = shape or Shape(), pace or Pace()
    if shape.form not in FORMATS:
        raise InvalidArgument(f"format {shape.form!r}: one of {', '.join(FORMATS)}")
    if not streams:
        raise InvalidArgument("no stream given")
    place = checkpoint or f"{to.rstrip('/')}/{_CHECKPOINT}"
    with named_failures():
        _check_fresh(spark, to, place)
        frame = _shaped(_committed(spark, connection, streams, pace), shape)
        with _settings(spark, _FILE_SETTINGS):
            query = _writer(frame, to, place, shape, pace).start()
        try:
            return _follow(query, to, place, progress)
        finally:
            query.stop()


def _committed(
    spark: SparkSession, connection: Connection, streams: Sequence[str], pace: Pace
) -> DataFrame:
    options = options_of(
        connection,
        streams=",".join(streams),
        transactions="whole" if pace.whole else "split",
        maxeventspertrigger=pace.most_events,
        start=pace.start,
        failondataloss=str(pace.strict).lower(),
    )
    return spark.readStream.format("anabranch").options(**options).load()


def _shaped(frame: DataFrame, shape: Shape) -> DataFrame:
    if shape.schema is not None:
        parsed = F.from_json(F.col("value").cast("string"), shape.schema, {"mode": "FAILFAST"})
        frame = frame.withColumn("value", parsed)
    if DATE in shape.partition_by:
        frame = frame.withColumn(DATE, F.to_date("timestamp"))
    unknown = [name for name in shape.partition_by if name not in frame.columns]
    if unknown:
        raise InvalidArgument(
            f"no column {', '.join(unknown)} to partition by; there are {', '.join(frame.columns)} "
            f"and {DATE}"
        )
    return frame


def _writer(frame: DataFrame, to: str, place: str, shape: Shape, pace: Pace) -> DataStreamWriter:
    writer = frame.writeStream.option("checkpointLocation", place).outputMode("append")
    if pace.once:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(pace.interval * 1000)} milliseconds")
    if shape.form == "delta":
        from anabranch.spark.pipelines.delta import DeltaFolder

        return writer.foreachBatch(DeltaFolder(to, tuple(shape.partition_by)).add)
    return writer.format("parquet").option("path", to).partitionBy(*shape.partition_by)


def _follow(
    query: StreamingQuery, to: str, place: str, progress: Callable[[Batch], None] | None
) -> Exported:
    """Until the query ends: by itself with ``once``, else by an error or by who interrupts us."""
    done: dict[int, int] = {}
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(_LOOK_S))
        for batch in _finished(query.recentProgress):
            if batch.number not in done and progress is not None and batch.rows:
                progress(batch)
            done[batch.number] = batch.rows
    batches = sum(1 for rows in done.values() if rows)
    return Exported(to, place, query.id, batches, sum(done.values()))


def _finished(reports: Sequence[Any]) -> Iterator[Batch]:
    for report in reports:
        yield Batch(int(report["batchId"]), int(report["numInputRows"]))


def _check_fresh(spark: SparkSession, to: str, place: str) -> None:
    """A new checkpoint counts its batches from 0, and Spark's file sink leaves out numbers that it has already."""
    if _exists(spark, f"{to.rstrip('/')}/_spark_metadata") and not _exists(
        spark, f"{place.rstrip('/')}/metadata"
    ):
        raise InvalidArgument(
            f"{to} holds what another checkpoint has exported, and {place} has none: "
            "give that checkpoint, or another folder"
        )


def _exists(spark: SparkSession, path: str) -> bool:
    """On whatever file system it is."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other door to Hadoop's file systems
    target = jvm.org.apache.hadoop.fs.Path(path)
    configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return bool(target.getFileSystem(configuration).exists(target))


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session for as long as a query starts: it takes a copy."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
