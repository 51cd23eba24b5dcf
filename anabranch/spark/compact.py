"""A job that writes the latest value of each key of a stream, as of a commit timestamp."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import Observation
from pyspark.sql import functions as F

from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import split_stream
from anabranch.spark.clients import connect
from anabranch.spark.failures import named_failures
from anabranch.spark.jobs import committed_under, options_of, saved

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from anabranch import Result
    from anabranch.spark.options import Connection

# The last event of a key: by commit, then by place in its segment.
_ORDER = ("commit_timestamp", "segment", "offset")
_KEPT = ("value", "headers", "timestamp", "segment", "offset", "txn_id", "commit_timestamp")


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result. ``at``: the commit timestamp. ``keys``: how many keys have a value.

    ``events``: how many events the stream had at that timestamp. ``keyless``: how many of them were skipped because
    they have no key. Both are 0 if ``already_committed``: earlier, or by this job, which then failed.
    """

    stream: str
    at: int
    to: str
    events: int
    keyless: int
    keys: int
    txn_id: bytes | None = None
    already_committed: bool = False


def latest(events: DataFrame) -> DataFrame:
    """The last event of each key, with the same columns. Keys whose last value is null are left out."""
    last = F.max_by(F.struct(*_KEPT), F.struct(*_ORDER)).alias("last")
    found = events.where(F.col("key").isNotNull()).groupBy("key").agg(last)
    return found.where(F.col("last.value").isNotNull()).select("key", "last.*")


def compact(
    spark: SparkSession,
    connection: Connection,
    stream: str,
    *,
    to: str | None = None,
    into: str | None = None,
    at: int | datetime | None = None,
    overwrite: bool = False,
    name: str | None = None,
    segments: int | None = None,
) -> Compacted:
    """Write the latest value of each key to a folder as Parquet, or into another stream in one transaction.

    A null value deletes its key. ``at``: the commit timestamp or time to read as of; by default now. ``overwrite``:
    replace an existing folder. ``name``: of the transaction, which is committed once. ``segments``: create the
    other stream first, with this number of segments.

    Raises:
        InvalidArgument: no target, or two; or the folder exists.
        UnknownStream: one of the streams does not exist.
        SnapshotExpired: retention has removed events as of ``at``.
        JobFailed: repeating is safe.
        OutcomeUnknown: repeat the call with the name in the message.
    """
    if (to is None) == (into is None):
        raise InvalidArgument("give a folder or a stream to write to, one of them")
    if into == stream:
        raise InvalidArgument(f"{stream} can't be compacted into itself")
    with connect(connection) as client:
        moment = client.snapshot([stream], at=at).timestamp
        if into is not None and segments is not None:
            client.create_stream(into, segments=segments)
        elif into is not None:
            client.describe(into)
        target = split_stream(into)[0] if into is not None else ""
        given = name if name is not None else f"compact-{uuid.uuid4().hex}"
        if into is not None and name is not None:
            before = committed_under(client, target, name)
            if before is not None:
                return _before(stream, moment, into, before)
        with named_failures():
            rows, counts = _observed(spark, connection, stream, moment)
            if into is None:
                rows.write.mode("overwrite" if overwrite else "errorifexists").parquet(str(to))
                return Compacted(stream, moment, str(to), *counts())
            sink = options_of(connection, stream=into, name=given)
            # The other columns describe the event's place in the old stream.
            rows = rows.select("key", "value", "headers", "timestamp")
            writer = rows.write.format("anabranch").options(**sink).mode("append")
        result, failed = saved(client, target, given, writer.save)
        if result is not None and failed:  # the job counted nothing
            return _before(stream, moment, into, result)
        with named_failures():
            txn_id = result.txn_id if result is not None else None
            return Compacted(stream, moment, into, *counts(), txn_id)


def _before(stream: str, moment: int, into: str, result: Result) -> Compacted:
    return Compacted(stream, moment, into, 0, 0, result.counts.committed, result.txn_id, True)


def _observed(
    spark: SparkSession, connection: Connection, stream: str, moment: int
) -> tuple[DataFrame, Callable[[], tuple[int, int, int]]]:
    """The rows to write; and the counts of events, events without a key, and keys, known once rows are written."""
    read, kept = Observation("read"), Observation("kept")
    source = options_of(connection, stream=stream, at=moment)
    events = spark.read.format("anabranch").options(**source).load()
    events = events.observe(
        read, F.count(F.lit(1)).alias("events"), F.count_if(F.col("key").isNull()).alias("keyless")
    )
    rows = latest(events).observe(kept, F.count(F.lit(1)).alias("keys"))
    return rows, lambda: (read.get["events"], read.get["keyless"], kept.get["keys"])
