"""The audit's eyes: topics read raw by Spark's tasks, range by range, into plain columns.

Nothing is judged here, and nothing is shared with the controllers but how a record batch is fetched and taken
apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from anabranch.errors import DeadlineExceeded
from anabranch.ports import CorruptBatch, OffsetOutOfRange, RawBatch, TopicPartition
from anabranch.spark.options import Connection
from anabranch.topics.batch import read_header
from anabranch.topics.kafka_log import KafkaLog
from anabranch.topics.records import Record, decode_records

SPAN_OFFSETS = 1 << 20  # of one task
_ROWS = 1 << 14  # of one Arrow batch
_FETCH_BYTES = 8 << 20
_FETCH_WAIT_S = 0.5

# Kinds of events and of journal records.
WRITE, PLAIN, OP, BAD = range(4)

RECORDS = (
    "stream string, partition int, offset long, batch long, native boolean, kind int, "
    "timestamp long, key binary, value binary, headers binary, txn binary"
)
_ARROW = pa.schema(
    [
        ("stream", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("batch", pa.int64()),
        ("native", pa.bool_()),
        ("kind", pa.int32()),
        ("timestamp", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.binary()),
        ("txn", pa.binary()),
    ]
)


class Span(NamedTuple):
    """What one task reads: offsets of a partition. ``stream``: how its rows are labelled."""

    stream: str
    topic: str
    partition: int
    first: int
    end: int
    committed: bool


def open_log(connection: Connection) -> KafkaLog:
    """A connection; close it."""
    return KafkaLog(connection.bootstrap, dict(connection.librdkafka))


def cut(span: Span, size: int = SPAN_OFFSETS) -> Iterator[Span]:
    """A span as several."""
    for first in range(span.first, span.end, size):
        yield span._replace(first=first, end=min(first + size, span.end))


def read_spans(
    spark: SparkSession,
    connection: Connection,
    spans: Sequence[Span],
    rows: Callable[[Span, Iterable[RawBatch]], Iterator[dict[str, Any]]],
    schema: str,
    arrow: pa.Schema,
) -> DataFrame:
    """A task for each span: its batches through ``rows``, a function of a module."""
    if not spans:
        return spark.createDataFrame([], schema)
    task = partial(_read_task, connection, tuple(spans), rows, arrow)
    return spark.range(0, len(spans), 1, len(spans)).mapInArrow(task, schema)


def read_records(spark: SparkSession, connection: Connection, spans: Sequence[Span]) -> DataFrame:
    """Events, or journal records (`RECORDS`)."""
    cuts = [piece for span in spans for piece in cut(span)]
    return read_spans(spark, connection, cuts, _record_rows, RECORDS, _ARROW)


def batches_of(log: KafkaLog, span: Span, timeout: float) -> Iterator[RawBatch]:
    """The batches with offsets of a span. What was deleted meanwhile is passed over.

    Raises:
        DeadlineExceeded: nothing came for so many seconds.
    """
    tp = TopicPartition(span.topic, span.partition)
    at = span.first
    until = time.monotonic() + timeout
    while at < span.end:
        try:
            got = log.fetch(
                {tp: at}, max_wait=_FETCH_WAIT_S, max_bytes=_FETCH_BYTES, committed=span.committed
            ).get(tp)
        except OffsetOutOfRange:
            at = max(at, log.start_offsets([tp])[tp])
            continue
        if got is not None:
            yield from (batch for batch in got.batches if batch.base_offset < span.end)
            at = got.next_offset
            until = time.monotonic() + timeout
        elif time.monotonic() > until:
            raise DeadlineExceeded(
                f"{span.topic}[{span.partition}] gave nothing at {at} for {timeout:g} s, and goes to "
                f"{span.end}: is a native transaction open there?"
            )


def records_of(span: Span, batches: Iterable[RawBatch]) -> Iterator[Record]:
    """The records of a span, in order. `CorruptBatch` if one can't be read."""
    for batch in batches:
        for record in decode_records(batch.data):
            if span.first <= record.offset < span.end:
                yield record


def _read_task(
    connection: Connection,
    spans: tuple[Span, ...],
    rows: Callable[[Span, Iterable[RawBatch]], Iterator[dict[str, Any]]],
    schema: pa.Schema,
    ids: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    log = open_log(connection)
    try:
        for numbers in ids:
            for number in numbers.column(0).to_pylist():
                span = spans[number]
                taken: list[dict[str, Any]] = []
                for row in rows(span, batches_of(log, span, connection.timeout)):
                    taken.append(row)
                    if len(taken) >= _ROWS:
                        yield pa.RecordBatch.from_pylist(taken, schema)
                        taken = []
                yield pa.RecordBatch.from_pylist(taken, schema)
    finally:
        log.close()


def _record_rows(span: Span, batches: Iterable[RawBatch]) -> Iterator[dict[str, Any]]:
    stream, place = span.stream, span.partition
    for batch in batches:
        base = batch.base_offset
        try:
            native = read_header(batch.data).is_transactional
            records = decode_records(batch.data)
        except CorruptBatch:
            yield _row(stream, place, base, base, False, BAD, 0, None, None, b"", None)
            continue
        for offset, timestamp, key, value, headers in records:
            if span.first <= offset < span.end:
                kind, own, txn = _judge(headers)
                yield _row(
                    stream, place, offset, base, native, kind, timestamp, key, value, own, txn
                )


def _row(*cells: Any) -> dict[str, Any]:
    return dict(zip(_ARROW.names, cells, strict=True))


def _judge(headers: Sequence[tuple[str, bytes | None]]) -> tuple[int, bytes, bytes | None]:
    """(kind, the user's headers in one piece, value of ab.txn). By docs/protocol.md, sections 8 and 14."""
    own = bytearray()
    txn: bytes | None = None
    ours = ops = 0
    for name, value in headers:
        if name.startswith("ab."):
            ours += 1
            if name == "ab.txn":
                txn = value or b""
            ops += name == "ab.op"
            continue
        text = name.encode()
        own += len(text).to_bytes(4, "big") + text
        own += (len(value) if value is not None else -1).to_bytes(5, "big", signed=True)
        own += value or b""
    if not ours:
        return PLAIN, bytes(own), None
    if ours == 1 and ops:
        return OP, bytes(own), None
    good = ours == 1 and txn is not None and len(txn) == 28
    return WRITE if good else BAD, bytes(own), txn
