"""Streams into files as they are committed: each micro-batch once, made of whole transactions."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.spark.failures import named_failures
from anabranch.spark.pipelines.place import options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from anabranch.spark.options import Connection

log = logging.getLogger("anabranch.spark")

FORMATS = ("parquet", "delta")
DATE = "date"
_CHECKPOINT = "_checkpoint"
_TABLE = "_spark_metadata"
_LOOK_S = 1
# INT96, Spark's default, is long deprecated, and Delta lacks it.
_FILE_SETTINGS = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of the files.

    ``partition_by``: columns, or ``date``, the UTC date of the timestamp. ``schema``: values are JSON objects
    with these fields (DDL); column ``value`` is a struct of them. Any other value ends the query.
    """

    form: str = "parquet"
    partition_by: Sequence[str] = ()
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """The time and size of micro-batches.

    ``once``: all that is there now, then the end; else every ``interval`` seconds, until it is stopped.
    ``most_events``: in a micro-batch (None: no limit). ``whole``: a bigger transaction is a micro-batch of its
    own; else it is split. ``start``: of a new checkpoint: ``begin``, ``end``, a commit timestamp, or a time with
    its zone. ``strict``: `SnapshotExpired` where retention removed events (or their history) before they were
    exported; else the export goes on without them.
    """

    once: bool = True
    interval: float = 1.0
    most_events: int | None = None
    whole: bool = True
    start: str = "begin"
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """A finished micro-batch."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of one run. ``query_id``: of the checkpoint, the same in every run."""

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
    """Write committed events to files in folder ``to``, and go on there the next time.

    ``checkpoint``: the folder of the position; by default inside ``to``, so that both live and die together.
    ``progress`` is called after each micro-batch with rows.

    Parquet is exactly once for Spark's readers, which go by the folder's ``_spark_metadata``. Other readers may see
    files of a batch that was cut off, until the next run has rewritten it and removed them. Delta is exactly once
    for every reader.

    Raises:
        InvalidArgument: a wrong argument or value; ``to`` holds another checkpoint's output.
            UnknownStream. SnapshotExpired (`Pace`). NotInstalled: the package for Delta is missing.
            JobFailed: repeating is safe.
    """
    shape, pace = shape or Shape(), pace or Pace()
    if shape.form not in FORMATS:
        raise InvalidArgument(f"format {shape.form!r}: one of {', '.join(FORMATS)}")
    if not streams:
        raise InvalidArgument("no stream given")
    place = checkpoint or f"{to.rstrip('/')}/{_CHECKPOINT}"
    if not hasattr(spark, "_jsparkSession"):
        raise UnsupportedSetting(
            "an export looks into Hadoop's file systems by the driver's JVM, which Spark Connect does not give: "
            'use a session of the driver, or write spark.readStream.format("anabranch") as a query of your own'
        )
    with named_failures():
        _check_fresh(spark, to, place)
        frame = _shaped(_committed(spark, connection, streams, pace), shape)
        with _settings(spark, _FILE_SETTINGS):
            query = _writer(frame, to, place, shape, pace).start()
        try:
            return _follow(query, to, place, progress, partial(_remove_cut_off, spark, to, shape))
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
    query: StreamingQuery,
    to: str,
    place: str,
    progress: Callable[[Batch], None] | None,
    tidy: Callable[[float], None],
) -> Exported:
    """Wait until the query ends: by itself with ``once``, else by an error or an interrupt.

    ``tidy``: called once with the start time, after a batch with rows: then no other query writes older files.
    """
    done: dict[int, int] = {}
    began = time.time()
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(_LOOK_S))
        for batch in _finished(query.recentProgress):
            if batch.number not in done and progress is not None and batch.rows:
                progress(batch)
            if batch.rows and not any(done.values()):
                tidy(began)
            done[batch.number] = batch.rows
    batches = sum(1 for rows in done.values() if rows)
    return Exported(to, place, query.id, batches, sum(done.values()))


def _finished(reports: Sequence[Any]) -> Iterator[Batch]:
    for report in reports:
        yield Batch(int(report["batchId"]), int(report["numInputRows"]))


def _check_fresh(spark: SparkSession, to: str, place: str) -> None:
    """A new checkpoint counts batches from 0, and Spark's file sink leaves out numbers that it has already."""
    if _exists(spark, f"{to.rstrip('/')}/{_TABLE}") and not _exists(
        spark, f"{place.rstrip('/')}/metadata"
    ):
        raise InvalidArgument(
            f"{to} holds what another checkpoint has exported, and {place} has none: "
            "give that checkpoint, or another folder"
        )


def _remove_cut_off(spark: SparkSession, to: str, shape: Shape, before: float) -> None:
    """Remove files of micro-batches cut off ``before`` (Unix seconds): files that no table names."""
    if shape.form != "parquet":
        return
    files, table = _file_system(spark, f"{to.rstrip('/')}/{_TABLE}")
    read = spark._jvm.org.apache.commons.io.IOUtils.toString  # type: ignore[union-attr] # noqa: SLF001
    named = set()
    for entry in files.listStatus(table):
        if not entry.getPath().getName().startswith("."):
            stream = files.open(entry.getPath())
            version, *lines = read(stream, "UTF-8").splitlines()
            stream.close()
            if version != "v1":
                return  # of an unknown form
            named |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
    for status in _data_files(files, table.getParent()) if named else ():
        name = status.getPath().getName()  # holds an id that no other file has
        ours = name.startswith("part-") and name.endswith(".parquet")
        if ours and name not in named and status.getModificationTime() < before * 1000:
            files.delete(status.getPath(), False)
            log.info("removed %s, of a micro-batch that was cut off", status.getPath())


def _data_files(files: Any, folder: Any) -> Iterator[Any]:
    """Statuses of files under a folder, Spark's own folders left out: files of a running query vanish there."""
    for status in files.listStatus(folder):
        name = status.getPath().getName()
        if not status.isDirectory():
            yield status
        elif "=" in name or not name.startswith(("_", ".")):
            yield from _data_files(files, status.getPath())


def _exists(spark: SparkSession, path: str) -> bool:
    """Whether a path exists, on any file system of Hadoop's."""
    files, target = _file_system(spark, path)
    return bool(files.exists(target))


def _file_system(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Hadoop's objects for a path's file system and for the path."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other door to Hadoop's file systems
    target = jvm.org.apache.hadoop.fs.Path(path)
    configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return target.getFileSystem(configuration), target


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of the session while a query starts: the query takes a copy."""
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
