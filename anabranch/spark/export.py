"""Exports streams to files, also while they are written: each micro-batch once, made of whole transactions."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as F

from anabranch.errors import InvalidArgument, InvariantViolation, UnsupportedSetting
from anabranch.extras import need
from anabranch.spark.api import arrow_schema
from anabranch.spark.failures import named_failures
from anabranch.spark.jobs import options_of

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from anabranch.spark.options import Connection

log = logging.getLogger("anabranch.spark")

FORMATS = ("parquet", "delta")
DATE = "date"
# The name of a file in an export's folder begins so, and ends with the query's id. Each start writes it.
_OWNER = "_export-"
_CHECKPOINT = "_checkpoint"
_TABLE = "_spark_metadata"
_TABLES = {_TABLE, "_delta_log"}
_POLL_S = 1
_DAY_S = 86_400
_QUERY_ID = "sql.streaming.queryId"
_NULL = "__HIVE_DEFAULT_PARTITION__"
# INT96, Spark's default, is long deprecated, and Delta lacks it.
_FILE_SETTINGS = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of the files.

    ``partition_by``: columns, or ``date``, the UTC date of the timestamp. ``schema``: fields (DDL) of the values,
    which have to be JSON objects; column ``value`` is a struct of them. Any other value ends the query.
    """

    form: str = "parquet"
    partition_by: Sequence[str] = ()
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """The time and size of micro-batches.

    ``once``: export the present events, and end; otherwise export every ``interval`` seconds, until it is stopped.
    ``most_events``: limit of a micro-batch; None: no limit. ``whole``: a bigger transaction is a micro-batch of its
    own; otherwise it is split. ``start``: where a new checkpoint begins: ``begin``, ``end``, a commit timestamp, or
    a time with its zone. ``strict``: raise `SnapshotExpired` if retention removed events (or their history) before
    they were exported; otherwise continue without them.
    """

    once: bool = True
    interval: float = 1.0
    most_events: int | None = None
    whole: bool = True
    start: str = "begin"
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    rows: int


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of one run. ``query_id``: the checkpoint's id, the same in every run."""

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
    """Write committed events to files in folder ``to``. The next call resumes where this one ends.

    ``checkpoint``: the folder of the position; by default it is inside ``to``, so that both are deleted together.
    ``progress``: called after each micro-batch with rows.

    A folder belongs to one checkpoint: the file ``_export-``, followed by the query's id, in the folder binds them.

    Parquet is exactly once for Spark's readers, which read the folder's ``_spark_metadata``. Other readers may see
    files of an interrupted batch, until the next run has rewritten the batch and removed them. Delta is exactly
    once for every reader.

    Raises:
        InvalidArgument: a wrong argument or value; or ``to`` has other files, or another checkpoint's output.
        UnknownStream: a stream does not exist.
        SnapshotExpired: see `Pace`.
        NotInstalled: the package for Delta is missing.
        UnsupportedSetting: the session is one of Spark Connect.
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
        frame = _shaped(_committed(spark, connection, streams, pace), shape)
        writer = _writer(frame, to, place, shape, pace)
        query_id, began = _bind(spark, to, place)
        if shape.form == "parquet":  # for Delta, `_DeltaFolder` checks
            files, table = _file_system(spark, f"{to.rstrip('/')}/{_TABLE}")
            files.mkdirs(table)
            if f"{_OWNER}{query_id}" not in _names(files, table.getParent()):
                raise _another_export(to)
        with _settings(spark, _FILE_SETTINGS):
            query = writer.start()
        tidy = partial(_remove_cut_off, spark, to, shape, began)
        try:
            return _follow(query, to, place, progress, tidy)
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
        days = F.floor(F.unix_seconds("timestamp") / _DAY_S).cast("int")
        frame = frame.withColumn(DATE, F.date_from_unix_date(days))
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
        return writer.foreachBatch(_DeltaFolder(to, tuple(shape.partition_by)).add)
    return writer.format("parquet").option("path", to).partitionBy(*shape.partition_by)


def _follow(
    query: StreamingQuery,
    to: str,
    place: str,
    progress: Callable[[Batch], None] | None,
    tidy: Callable[[], None],
) -> Exported:
    """Wait until the query ends: by itself with ``once``, otherwise by an error or an interrupt.

    ``tidy``: called after the first batch with rows, since when no other query writes older files.
    """
    done: dict[int, int] = {}
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(_POLL_S))
        for batch in _finished(query.recentProgress):
            if batch.number not in done and progress is not None and batch.rows:
                progress(batch)
            if batch.rows and not any(done.values()):
                tidy()
            done[batch.number] = batch.rows
    batches = sum(1 for rows in done.values() if rows)
    return Exported(to, place, query.id, batches, sum(done.values()))


def _finished(reports: Sequence[Any]) -> Iterator[Batch]:
    for report in reports:
        yield Batch(int(report["batchId"]), int(report["numInputRows"]))


def _bind(spark: SparkSession, to: str, place: str) -> tuple[str, int]:
    """Bind folder and checkpoint by the query's id, before anything is written.

    Spark's file sink skips batch numbers that it has, so batches of another checkpoint would be lost.
    Returns the query's id, and the time of this start by the file system's clock, which also stamps its files.
    """
    files, folder = _file_system(spark, to)
    places, metadata = _file_system(spark, f"{place.rstrip('/')}/metadata")
    known = _text(spark, places, metadata) if places.exists(metadata) else ""
    names = _names(files, folder)
    owners = [name.removeprefix(_OWNER) for name in names if name.startswith(_OWNER)]
    table = not _TABLES.isdisjoint(names)

    def path_of(owner: str) -> Any:
        return _file_system(spark, f"{to.rstrip('/')}/{_OWNER}{owner}")[1]

    if known:
        query = json.loads(known)["id"]
        # Folders of earlier versions have no owner.
        inside = place.startswith(f"{to.rstrip('/')}/")
        if owners != [query] and (owners or not (table or inside)):
            raise InvalidArgument(
                f"{place} is not the checkpoint of {to}, and a folder belongs to one: "
                "give its own checkpoint, or another folder with a new one"
            )
    elif table or _holds_data(files, folder):
        raise InvalidArgument(
            f"{to} holds what another checkpoint has exported, or other files, and {place} has "
            "exported nothing: give the folder's checkpoint, or another folder"
        )
    else:
        ours = [one for one in owners if _text(spark, files, path_of(one)) == f"{place}\n"]
        query = ours[0] if ours else str(uuid.uuid4())
    _write(files, path_of(query), f"{place}\n")
    for owner in set(owners) - {query}:  # a checkpoint that has exported nothing, but may begin
        files.delete(path_of(owner), False)
    # Another export may begin now. Each writes its file, then checks the folder, also once it has a table.
    names = [] if table else _names(files, folder)
    found = [name for name in names if name in _TABLES or name.startswith(_OWNER)]
    if not table and found != [f"{_OWNER}{query}"]:
        if query not in owners:
            files.delete(path_of(query), False)
        raise _another_export(to)
    if not known:
        _write(places, metadata, json.dumps({"id": query}))  # as Spark does
    return query, int(files.getFileStatus(path_of(query)).getModificationTime())


def _another_export(to: str) -> InvalidArgument:
    """The error for an export whose `_OWNER` file in folder ``to`` is missing: another export took the folder."""
    return InvalidArgument(
        f"another export into {to} begins at this moment: run this one again, by the checkpoint that the folder has"
    )


def _remove_cut_off(spark: SparkSession, to: str, shape: Shape, before: int) -> None:
    """Remove files of micro-batches interrupted before a time (Unix ms): the table does not name them."""
    if shape.form != "parquet":
        return
    files, table = _file_system(spark, f"{to.rstrip('/')}/{_TABLE}")
    named = set()
    for entry in files.listStatus(table):
        if not entry.getPath().getName().startswith("."):
            version, *lines = _text(spark, files, entry.getPath()).splitlines()
            if version != "v1":
                return  # the form is unknown
            named |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
    for status in _data_files(files, table.getParent(), shape.partition_by) if named else ():
        name = status.getPath().getName()  # has an id that no other file has
        ours = name.startswith("part-") and name.endswith(".parquet")
        if ours and name not in named and status.getModificationTime() < before:
            files.delete(status.getPath(), False)
            log.info("removed %s, of a micro-batch that was cut off", status.getPath())


def _data_files(files: Any, folder: Any, partition_by: Sequence[str]) -> Iterator[Any]:
    """Statuses of the files in an export's own folders: of its partitions, without tables inside them."""
    for status in files.listStatus(folder):
        if not status.isDirectory():
            if not partition_by:
                yield status
        elif partition_by and status.getPath().getName().startswith(f"{partition_by[0]}="):
            path = status.getPath()
            if _TABLES.isdisjoint(below.getPath().getName() for below in files.listStatus(path)):
                yield from _data_files(files, path, partition_by[1:])


def _holds_data(files: Any, folder: Any) -> bool:
    """Whether there is any file in a folder or its subfolders, apart from hidden files."""
    return any(
        not status.getPath().getName().startswith(("_", "."))
        and (not status.isDirectory() or _holds_data(files, status.getPath()))
        for status in _listed(files, folder)
    )


def _names(files: Any, folder: Any) -> list[str]:
    return [status.getPath().getName() for status in _listed(files, folder)]


def _listed(files: Any, folder: Any) -> Sequence[Any]:
    return files.listStatus(folder) if files.exists(folder) else ()


def _text(spark: SparkSession, files: Any, path: Any) -> str:
    stream = files.open(path)
    try:
        return str(spark._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))  # type: ignore[union-attr] # noqa: SLF001
    finally:
        stream.close()


def _write(files: Any, path: Any, text: str) -> None:
    stream = files.create(path, True)
    stream.write(text.encode())
    stream.close()


def _file_system(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Hadoop's objects for a path's file system and for the path."""
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other door to Hadoop's file systems
    target = jvm.org.apache.hadoop.fs.Path(path)
    configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return target.getFileSystem(configuration), target


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of the session while a query starts, because the query takes a copy."""
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


@dataclass(frozen=True)
class _DeltaFolder:
    """A Delta table in a folder, for ``foreachBatch(_DeltaFolder(...).add)``: writes each micro-batch exactly once.

    Delta's jars are not needed. Spark's executors write the batch's Parquet files into the table's folder. Then one
    commit of the table's log adds them, and records the query and the batch number (Delta's transaction
    identifiers); a number that the log has is skipped. An interrupted batch leaves files that the log does not
    name; a vacuum removes them.

    Raises:
        NotInstalled: the package ``deltalake`` is missing.
        UnsupportedSetting: the folder is not in this machine's file system.
    """

    to: str
    partition_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need("deltalake")  # before anything runs
        if urlsplit(self.to).scheme not in ("", "file"):
            raise UnsupportedSetting(
                f"{self.to}: Delta tables go to folders of this machine, so far"
            )

    @property
    def folder(self) -> Path:
        return Path(urlsplit(self.to).path)

    def add(self, frame: DataFrame, number: int) -> None:
        """Add micro-batch ``number`` of the running query, unless the table has it."""
        from deltalake import CommitProperties, Transaction

        session = frame.sparkSession
        query = session.sparkContext.getLocalProperty(_QUERY_ID)
        if query is None:
            raise InvariantViolation("a micro-batch does not know its query")
        table = self._table(frame)
        if not (self.folder / f"{_OWNER}{query}").exists():
            raise _another_export(self.to)
        known = table.transaction_version(query)
        if known is not None and known >= number:
            return
        part = self.folder / f"batch-{number}-{uuid.uuid4().hex}"
        frame.write.partitionBy(*self.partition_by).parquet(str(part))
        table.create_write_transaction(
            list(self._added(part)),
            mode="append",
            schema=table.schema(),
            partition_by=list(self.partition_by),
            commit_properties=CommitProperties(app_transactions=[Transaction(query, number)]),
        )

    def _table(self, frame: DataFrame) -> DeltaTable:
        """The table, created if it does not exist."""
        from deltalake import DeltaTable, Schema

        # Parquet files don't record that a column can't be null.
        schema = Schema.from_arrow(_nullable(arrow_schema(frame.schema)))
        return DeltaTable.create(
            self.folder, schema, mode="ignore", partition_by=list(self.partition_by)
        )

    def _added(self, part: Path) -> Iterator[AddAction]:
        """The files of a batch, as the log names them."""
        import pyarrow.parquet as pq
        from deltalake.transaction import AddAction

        for path in sorted(part.rglob("part-*.parquet")):
            rows = pq.read_metadata(path).num_rows
            if not rows:
                continue
            stat = path.stat()
            yield AddAction(
                path=str(path.relative_to(self.folder)),
                size=stat.st_size,
                partition_values=dict(map(_partition, path.relative_to(part).parts[:-1])),
                modification_time=stat.st_mtime_ns // 1_000_000,
                data_change=True,
                stats=json.dumps({"numRecords": rows}),
            )


def _partition(folder: str) -> tuple[str, str | None]:
    name, _, value = folder.partition("=")
    return unquote(name), None if value == _NULL else unquote(value)


def _nullable(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema([field.with_nullable(True) for field in schema])
