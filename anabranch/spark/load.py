"""Loading files into a stream in one transaction: all rows that Spark reads, or none."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import NumericType, StringType

from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import split_stream
from anabranch.spark.clients import connect
from anabranch.spark.failures import named_failures
from anabranch.spark.jobs import committed_under, options_of, saved

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from anabranch import Result
    from anabranch.spark.options import Connection

FORMATS = ("csv", "json", "parquet", "orc", "text")
# A malformed row ends the job: otherwise its event would lack fields.
_STRICT: dict[str, dict[str, str]] = {
    "csv": {
        "header": "true",
        "mode": "FAILFAST",
        "escape": '"',
        "enforceSchema": "false",
        "multiLine": "true",  # a line end in quotes does not end a row
    },
    "json": {"mode": "FAILFAST"},
}
_TEXTS = ("csv", "json", "text")
_REPLACED = "\ufffd"  # in place of bytes that are not UTF-8
# Numbers from here on are milliseconds since 1970, lower ones seconds (until the year 5138).
_LEAST_MS = 100_000_000_000
_NUMBER = r"^\s*\d{9,}(\.\d+)?\s*$"  # fewer digits may be a year or a day


@dataclass(frozen=True, slots=True)
class Reading:
    """Spark's format, schema (DDL; by default inferred from the files) and further options of its reader."""

    form: str = "csv"
    schema: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """How rows become events.

    ``encoding``: as for the sink: ``json`` and ``avro`` make a value of the whole row, ``raw`` takes columns key,
    value, … unchanged. ``key``: columns of the key. ``timestamp``: a column with the events' time; texts and
    numbers (seconds or milliseconds since 1970) become timestamps. ``order_by``: columns that order the rows of
    each key; by default the order is undefined.
    """

    encoding: str = "json"
    key: Sequence[str] = ()
    timestamp: str | None = None
    order_by: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result. ``txn_id``, ``commit_timestamp``: None if there was no row. ``rows``: events written."""

    stream: str
    name: str | None
    already_committed: bool
    rows: int
    txn_id: bytes | None
    commit_timestamp: int | None


def load(
    spark: SparkSession,
    connection: Connection,
    files: Sequence[str],
    stream: str,
    *,
    reading: Reading | None = None,
    events: Events | None = None,
    name: str | None = None,
    segments: int | None = None,
) -> Loaded:
    """Load files (paths or patterns, as Spark takes them) into a stream, in one transaction.

    ``name``: unique in the stream's scope; one name is loaded once. ``segments``: create the stream first, with
    this number of segments.

    Raises:
        InvalidArgument: wrong files, data or columns; nothing is written.
        UnknownStream, UnknownScope: create it first, or give ``segments``.
        JobFailed: nothing is committed.
        OutcomeUnknown: repeat the call with the name in the message.
    """
    reading, events = reading or Reading(), events or Events()
    scope, _ = split_stream(stream)
    given = name if name is not None else f"load-{uuid.uuid4().hex}"
    with connect(connection) as client:
        if segments is not None:
            client.create_stream(stream, segments=segments)
        else:
            client.describe(stream)
        before = committed_under(client, scope, name) if name is not None else None
        if before is not None:
            return _loaded(stream, name, before, already=True)
        options = options_of(
            connection,
            stream=stream,
            name=given,
            encoding=events.encoding,
            keycolumn=",".join(events.key) or None,
            timestampcolumn=events.timestamp,
        )
        with named_failures():
            rows = _prepared(_read(spark, files, reading), events)
            writer = rows.write.format("anabranch").options(**options).mode("append")
        result, _ = saved(client, scope, given, writer.save)
    if result is None:  # no row: nothing to commit, and the name is free
        return Loaded(stream, name, False, 0, None, None)
    return _loaded(stream, name, result, already=False)


def _loaded(stream: str, name: str | None, result: Result, *, already: bool) -> Loaded:
    rows = result.counts.committed
    return Loaded(stream, name, already, rows, result.txn_id, result.commit_timestamp)


def _read(spark: SparkSession, files: Sequence[str], reading: Reading) -> DataFrame:
    if reading.form not in FORMATS:
        raise InvalidArgument(f"format {reading.form!r}: one of {', '.join(FORMATS)}")
    if not files:
        raise InvalidArgument("no files given")
    reader = spark.read.format(reading.form)
    reader = reader.options(**(_STRICT.get(reading.form, {}) | dict(reading.options)))
    if reading.schema is not None:
        reader = reader.schema(reading.schema)
    rows = reader.load(list(files))
    given = {name.lower() for name in reading.options}
    return rows if reading.form not in _TEXTS or given & {"encoding", "charset"} else _utf8(rows)


def _utf8(rows: DataFrame) -> DataFrame:
    """The rows. Text that was not UTF-8 ends the job."""
    wrong = "not UTF-8, or it has U+FFFD: say what it is, as --read-option encoding=ISO-8859-1, or UTF-8"
    if any(_REPLACED in name for name in rows.columns):
        raise InvalidArgument(f"a column's name is {wrong}")
    texts = [f.name for f in rows.schema.fields if isinstance(f.dataType, StringType)]
    checked = {
        name: F.when(
            _column(name).contains(_REPLACED),
            F.raise_error(
                F.lit(f"anabranch.errors.InvalidArgument: a text of column {name} is {wrong}")
            ),
        ).otherwise(_column(name))
        for name in texts
    }
    return rows.withColumns(checked)


def _prepared(rows: DataFrame, events: Events) -> DataFrame:
    """Rows in the requested order, with timestamps from the column that has them."""
    wanted = [*events.key, *events.order_by, *([events.timestamp] if events.timestamp else [])]
    missing = sorted({name for name in wanted if name not in rows.columns})
    if missing:
        raise InvalidArgument(
            f"no column {', '.join(missing)}; there are {', '.join(rows.columns)}"
        )
    if events.timestamp is not None:
        rows = rows.withColumn(events.timestamp, _time_of(rows, events.timestamp))
    if events.order_by:
        # One task writes all rows of a key, which keeps their order.
        key = [_column(name) for name in events.key]
        rows = rows.repartition(*key) if key else rows.repartition(1)
        rows = rows.sortWithinPartitions(*(_column(name) for name in events.order_by))
    return rows


def _column(name: str) -> Column:
    """A top-level column, even if its name has dots."""
    return F.col("`" + name.replace("`", "``") + "`")


def _time_of(rows: DataFrame, name: str) -> Column:
    column = _column(name)
    kind = rows.schema[name].dataType
    if isinstance(kind, NumericType):
        return _time_of_number(column)
    if isinstance(kind, StringType):
        is_number = column.rlike(_NUMBER)
        number = _time_of_number(F.when(is_number, column))
        return F.when(is_number, number).otherwise(column.cast("timestamp"))
    return column.cast("timestamp")


def _time_of_number(column: Column) -> Column:
    number = column.cast("double")
    seconds = F.when(F.abs(number) >= _LEAST_MS, number / 1000).otherwise(number)
    return seconds.cast("timestamp")
