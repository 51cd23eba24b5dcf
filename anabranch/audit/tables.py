"""History and status log as tables: a row for each history record, and for the newest record of each status key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.audit.log import (
    Span,
    batches_of,
    columns,
    cut,
    in_arrow,
    in_batches,
    open_log,
    read_spans,
    records_of,
)
from anabranch.core.history_records import OWN, ends_in
from anabranch.core.rows import (
    ROUND_KEY,
    Entry,
    forgotten_key,
    partition_of,
    scope_key,
    stream_key,
)
from anabranch.core.stream_states import ACTIVE, GIVEN_UP
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, UnknownScope
from anabranch.kafka.log import KafkaLog
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol.hybrid_time import MAX, from_us
from anabranch.protocol.ids import DIRECTORY
from anabranch.protocol.schemas.codec import decode, decode_as
from anabranch.protocol.schemas.records import (
    CommitRecord,
    CoordinatorRow,
    EpochRecord,
    ForgottenRow,
    LowWaterRow,
    ParticipantRow,
    PartitionRow,
    PlainRow,
    PreparedRow,
    RoundRow,
    ScopeRow,
    StreamRow,
    TxnRow,
    WriterRow,
)
from anabranch.spark.options import Connection
from anabranch.topics.names import status_topic

EPOCH, COMMIT, FOREIGN = range(3)
_TAIL_OFFSETS = 64
# How far commit timestamps may be ahead of Kafka's, as after a clock was set back.
_CLOCKS_MS = 3_600_000

_LISTS = {
    "segments": "id int64, partition int32, first int64, end int64, count int64",
    "layout": "id int64, low int64, high int64, partition int32, start int64",
    "sealed": "id int64, end int64",
    "vector": "partition int32, offset int64",
}
# ``vector``: the record's ends: of all partitions if ``vector_at`` is -1, else of the partitions that it moved.
HISTORY = pa.schema(
    [
        *columns(
            "stream string, offset int64, kind int32, txn_id binary, timestamp int64, "
            "previous int64, epoch int32, reference int32"
        ),
        *((name, pa.list_(pa.struct(columns(text)))) for name, text in _LISTS.items()),
        *columns("vector_at int64, problem string"),
    ]
)


def read_history(spark: SparkSession, connection: Connection, spans: list[Span]) -> DataFrame:
    """The history records of some streams (`HISTORY`)."""
    cuts = [piece for span in spans for piece in cut(span)]
    return read_spans(spark, connection, cuts, _history_batches, HISTORY)


def _history_batches(span: Span, batches: Iterable[RawBatch]) -> Iterator[pa.RecordBatch]:
    return in_batches(_history_rows(span, batches), HISTORY)


def _history_rows(span: Span, batches: Iterable[RawBatch]) -> Iterator[dict[str, Any]]:
    for record in records_of(span, batches):
        row: dict[str, Any] = {"stream": span.stream, "offset": record.offset, "kind": FOREIGN}
        try:
            found = decode(record.value or b"")
        except AnabranchError as error:
            yield row | {"problem": str(error)}
            continue
        if isinstance(found, EpochRecord):
            yield row | {
                "kind": EPOCH,
                "timestamp": found.timestamp,
                "previous": found.previous,
                "epoch": found.stream_epoch,
                "reference": found.reference_epoch,
                "layout": [
                    (s.segment_id, s.low, s.high, s.partition, s.start_offset)
                    for s in found.segments
                ],
                "sealed": [(s.segment_id, s.end_offset) for s in found.sealed],
                "vector": list(map(tuple, found.vector)),
                "vector_at": OWN,
                "problem": "an EPOCH record with a key" if record.key else None,
            }
        elif isinstance(found, CommitRecord):
            yield row | {
                "kind": COMMIT,
                "txn_id": found.txn_id,
                "timestamp": found.timestamp,
                "previous": found.previous,
                "epoch": found.stream_epoch,
                "segments": [
                    (s.segment_id, s.partition, s.first, s.end, s.count) for s in found.segments
                ],
                "vector": list({at.partition: tuple(at) for at in ends_in(found)}.values()),
                "vector_at": found.vector_at,
                "problem": None
                if record.key == found.txn_id
                else f"a COMMIT record with the key {(record.key or b'').hex() or 'null'}",
            }
        else:
            yield row | {"problem": f"a {type(found).__name__}"}


# -- status ----------------------------------------------------------------------------------------------

_RAW = columns("partition int32, offset int64, key binary, value binary, written int64")
# Each extent of a receipt is a row, with the highest time that its writer had seen as ``timestamp``. ``offset``: of
# low waters and plain writes. A PREPARED row has its secret's hash as ``writer``, and Unix milliseconds as
# ``timestamp``. A PARTITION row has the control partition of a participant, how many events that committed, and as
# ``reason`` what it said of its end. A COORDINATOR row is here if an operator ended the part: ``reason`` says so.
STATUS = columns(
    "entry int32, txn_id binary, scope string, state string, timestamp int64, committed int64, "
    "expired_ms int64, stream string, reference int32, writer binary, partition int32, "
    "first int64, end int64, count int64, crc int64, offset int64, reason string"
)
FORCED = "an operator ended a part of it alone"


def _hex(entry: Entry) -> str:
    return f"{entry:02X}"


_OF_INTEREST = tuple(
    map(
        _hex,
        (
            Entry.ROUND,
            Entry.LOW_WATER,
            Entry.PLAIN,
            Entry.TXN,
            Entry.PARTICIPANT,
            Entry.WRITER,
            Entry.PREPARED,
            Entry.PARTITION,
            Entry.COORDINATOR,
        ),
    )
)


def read_status(
    spark: SparkSession, connection: Connection, control_partition: int, end: int, before: int
) -> DataFrame:
    """The newest status rows of a control partition below ``end`` (`STATUS`).

    Plain writes are reported as of ``before``.
    """
    log = open_log(connection)
    try:
        tp = TopicPartition(status_topic(connection.prefix), control_partition)
        first = log.start_offsets([tp])[tp]
    finally:
        log.close()
    newest = F.max_by(F.struct("value"), "offset").alias("newest")
    entry = F.hex(F.substring("key", 17, 1))
    rows = (
        _raw_status(spark, connection, control_partition, first, end)
        .where(entry.isin(*_OF_INTEREST))
        .where((entry != _hex(Entry.PLAIN)) | (F.col("offset") < before))
        .groupBy("key")
        .agg(newest)
        .select("key", "newest.value")
        .where("value is not null")
    )
    return in_arrow(rows, _decode_status, STATUS)


def _raw_status(
    spark: SparkSession, connection: Connection, partition: int, first: int, end: int
) -> DataFrame:
    span = Span("", status_topic(connection.prefix), partition, first, end, committed=True)
    return read_spans(spark, connection, list(cut(span)), _raw_batches, _RAW)


def _raw_batches(span: Span, batches: Iterable[RawBatch]) -> Iterator[pa.RecordBatch]:
    return in_batches(_raw_rows(span, batches), _RAW)


def _raw_rows(span: Span, batches: Iterable[RawBatch]) -> Iterator[dict[str, Any]]:
    for record in records_of(span, batches):
        yield {
            "partition": span.partition,
            "offset": record.offset,
            "key": record.key or b"",
            "value": record.value,
            "written": record.timestamp_ms,
        }


def _decode_status(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows: list[dict[str, Any]] = []
        keys, values = batch.column(0).to_pylist(), batch.column(1).to_pylist()
        for key, value in zip(keys, values, strict=True):
            rows.extend(_status_rows(key, value))
        yield pa.RecordBatch.from_pylist(rows, STATUS)


def _status_rows(key: bytes, value: bytes) -> Iterator[dict[str, Any]]:
    entry = key[16]
    try:
        row = decode(value)
    except AnabranchError:
        return  # a check that needs the row reports a breach
    common: dict[str, Any] = {"entry": entry, "txn_id": key[:16]}
    if isinstance(row, TxnRow):
        yield common | {
            "scope": row.scope,
            "state": row.state,
            "timestamp": row.commit_timestamp,
            "committed": row.committed,
        }
    elif isinstance(row, ParticipantRow):
        yield common | {"stream": row.stream, "reference": row.reference_epoch}
    elif isinstance(row, WriterRow):
        writer = row.receipt.writer.to_bytes(8, "big", signed=True)
        for e in row.receipt.extents:
            yield common | {
                "stream": e.stream, "writer": writer, "partition": e.partition,
                "first": e.first, "end": e.end, "count": e.count, "crc": e.crc_sum,
                "timestamp": row.receipt.seen,
            }  # fmt: skip
    elif isinstance(row, LowWaterRow | PlainRow):
        yield common | {"stream": row.stream, "partition": row.partition, "offset": row.offset}
    elif isinstance(row, PreparedRow):
        yield common | {"writer": row.prepare.by, "timestamp": row.prepared_ms}
    elif isinstance(row, PartitionRow):
        yield common | {
            "partition": partition_of(key[17:]), "committed": row.committed, "reason": row.reason,
        }  # fmt: skip
    elif isinstance(row, CoordinatorRow):
        if row.forced:
            yield common | {"reason": FORCED}
    elif isinstance(row, RoundRow):
        yield common | {"timestamp": row.hybrid_time, "expired_ms": row.expired_ms}


class Scopes(NamedTuple):
    """Scopes: their control partition, its streams, and a time up to which all its commits are on the log.

    ``gone``: LOST or deleted stream -> the commit timestamp up to which it may have had events. ``again``: streams
    that were deleted, and created again. ``partitions``: of each stream, at least.
    """

    control_partition: int
    streams: tuple[str, ...]
    hybrid_time: int
    gone: dict[str, int]
    again: frozenset[str]
    partitions: dict[str, int]


def find_scopes(
    spark: SparkSession, connection: Connection, log: KafkaLog, scopes: Sequence[str]
) -> Scopes:
    """The status log's rows of some scopes.

    Raises: UnknownScope, InvalidArgument (they are on several control partitions), NotReady (no status log).
    """
    topic = status_topic(connection.prefix)
    found = log.describe_topics([topic]).get(topic)
    if found is None:
        raise NotReady(
            f"there is no topic {topic}: is the prefix right, and was there a controller?"
        )
    # Times are read first, so that the list has each stream with a commit up to these times.
    times = [_hybrid_time(connection, log, p) for p in range(found.partitions)]
    rows = _newest_rows(spark, connection, log, DIRECTORY)
    unknown = [scope for scope in scopes if scope_key(scope) not in rows]
    if unknown:
        raise UnknownScope(f"there is no scope {unknown[0]!r} in {topic}")
    served: dict[int, list[str]] = {}
    for scope in scopes:
        row = decode_as(ScopeRow, rows[scope_key(scope)][0])
        served.setdefault(row.control_partition, []).append(scope)
    if len(served) > 1:
        apart = "; ".join(
            f"{', '.join(its)} (on {number})" for number, its in sorted(served.items())
        )
        raise InvalidArgument(
            f"an audit reads the logs of one control partition: audit these scopes one after another: {apart}"
        )
    (control_partition,) = served
    if control_partition != DIRECTORY:
        rows = _newest_rows(spark, connection, log, control_partition)
    return scopes_of(control_partition, times[control_partition], rows.values())


def scopes_of(control_partition: int, now: int, rows: Iterable[tuple[bytes, int]]) -> Scopes:
    """The scopes in rows, which come with the time when they were written (Unix milliseconds)."""
    decoded = [(decode(value), written) for value, written in rows]
    found = {row.stream: row for row, _ in decoded if isinstance(row, StreamRow)}
    states = {stream: row.state for stream, row in found.items()}
    names = {stream for stream, state in states.items() if state == ACTIVE}
    before = {row.stream: at for row, at in decoded if isinstance(row, ForgottenRow)}
    ends = {stream: from_us((at + _CLOCKS_MS) * 1000) for stream, at in before.items()}
    ends |= dict.fromkeys((s for s, state in states.items() if state in GIVEN_UP), MAX)
    return Scopes(
        control_partition,
        tuple(sorted(names)),
        now,
        {stream: at for stream, at in ends.items() if stream not in names},
        frozenset(before.keys() & names),
        {stream: found[stream].partitions for stream in names},
    )


def _newest_rows(
    spark: SparkSession, connection: Connection, log: KafkaLog, partition: int
) -> dict[bytes, tuple[bytes, int]]:
    """The newest rows of a control partition's scopes, streams and deleted streams, by key, and their times."""
    tp = TopicPartition(status_topic(connection.prefix), partition)
    first, end = log.start_offsets([tp])[tp], log.end_offsets([tp], committed=True)[tp]
    scopes, streams, forgotten = (
        F.startswith(F.col("key"), F.lit(of(""))) for of in (scope_key, stream_key, forgotten_key)
    )
    rows = (
        _raw_status(spark, connection, partition, first, end)
        .where(scopes | streams | forgotten)
        .orderBy("offset")
        .collect()
    )
    newest = {bytes(row["key"]): (row["value"], row["written"]) for row in rows}
    return {key: (bytes(value), at) for key, (value, at) in newest.items() if value is not None}


def _hybrid_time(connection: Connection, log: KafkaLog, control_partition: int) -> int:
    """The hybrid time of the newest round; 0: there was none."""
    topic = status_topic(connection.prefix)
    tp = TopicPartition(topic, control_partition)
    start, end = log.start_offsets([tp])[tp], log.end_offsets([tp], committed=True)[tp]
    width = _TAIL_OFFSETS
    while True:
        span = Span("", topic, control_partition, max(start, end - width), end, committed=True)
        found = 0
        for record in records_of(span, batches_of(log, span, connection.timeout)):
            if record.key == ROUND_KEY and record.value is not None:
                found = decode_as(RoundRow, record.value).hybrid_time
        if found or span.first == start:
            return found
        width *= 8
