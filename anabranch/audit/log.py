"""Reads topics in Spark's tasks, by ranges of offsets, into columns of the records' raw contents.

Nothing is checked here. Only the fetching and splitting of record batches is shared with the controllers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from anabranch.batches.compression import decompress
from anabranch.batches.format import HEADER_SIZE, BatchHeader, read_header
from anabranch.batches.records import Record, decode_records
from anabranch.errors import DeadlineExceeded
from anabranch.kafka.log import KafkaLog
from anabranch.ports import CorruptBatch, OffsetOutOfRange, RawBatch, TopicPartition
from anabranch.spark.options import Connection

SPAN_OFFSETS = 1 << 20  # offsets of one task, about
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]

TASKS_A_CORE = 2  # the least number, so that a slow task delays little
_SMALL = 256  # the most records of a batch that plain Python reads
_ROWS = 1 << 14  # rows of one Arrow batch
_FETCH_BYTES = 8 << 20
_FETCH_WAIT_S = 0.5

# Kinds of events and of journal records.
WRITE, PLAIN, OP, BAD = range(4)


def columns(text: str) -> pa.Schema:
    """Columns, given as ``name type, …`` with Arrow's names of types."""
    pairs = (column.split() for column in text.split(","))
    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in pairs])


RECORDS = columns(
    "stream string, partition int32, offset int64, batch int64, native bool, kind int32, "
    "timestamp int64, key binary, value binary, headers binary, txn binary"
)
_OWN = RECORDS.names[2:]  # the columns that the partition does not give


class Span(NamedTuple):
    """Offsets of a partition, for one task. ``stream``: the value of its rows' column ``stream``."""

    stream: str
    topic: str
    partition: int
    first: int
    end: int
    committed: bool


# A function from a span's batches to Arrow batches.
Reading = Callable[[Span, Iterable[RawBatch]], Iterator[pa.RecordBatch]]


def open_log(connection: Connection) -> KafkaLog:
    """A connection to the brokers, which the caller closes."""
    return KafkaLog(connection.bootstrap, dict(connection.librdkafka))


def cut(span: Span, size: int = SPAN_OFFSETS) -> Iterator[Span]:
    """A span divided into spans of ``size`` offsets."""
    for first in range(span.first, span.end, size):
        yield span._replace(first=first, end=min(first + size, span.end))


def share(spans: Sequence[Span], least: int) -> tuple[tuple[Span, ...], ...]:
    """The spans of each task, about `SPAN_OFFSETS` offsets; small spans share a task.

    ``least``: the least number of tasks, if there are this many spans.
    """
    total = sum(span.end - span.first for span in spans)
    count = min(len(spans), max(least, -(-total // SPAN_OFFSETS)))
    tasks: list[list[Span]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for span in sorted(spans, key=lambda span: span.first - span.end):
        size, number = heappop(lightest)
        tasks[number].append(span)
        heappush(lightest, (size + span.end - span.first, number))
    return tuple(map(tuple, tasks))


def read_spans(
    spark: SparkSession,
    connection: Connection,
    spans: Sequence[Span],
    read: Reading,
    schema: pa.Schema,
) -> DataFrame:
    """The rows of all spans, read in tasks by ``read``, a function of a module (Spark pickles it)."""
    if not spans:
        return spark.createDataFrame([], from_arrow_schema(schema))
    shares = share(spans, TASKS_A_CORE * spark.sparkContext.defaultParallelism)
    task = partial(_read_task, connection, shares, read)
    return in_arrow(spark.range(0, len(shares), 1, len(shares)), task, schema)


def in_arrow(
    rows: DataFrame,
    task: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """``mapInArrow`` without PySpark's warning about pandas, which this does not use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return rows.mapInArrow(task, from_arrow_schema(schema))


def read_records(spark: SparkSession, connection: Connection, spans: Sequence[Span]) -> DataFrame:
    """Events or journal records, with the columns `RECORDS`."""
    cuts = [piece for span in spans for piece in cut(span)]
    return read_spans(spark, connection, cuts, _record_batches, RECORDS)


def batches_of(log: KafkaLog, span: Span, timeout: float) -> Iterator[RawBatch]:
    """The batches with offsets of a span. Batches deleted meanwhile are skipped.

    Raises: DeadlineExceeded (nothing came for ``timeout`` seconds).
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
            start = log.start_offsets([tp])[tp]
            if start > at:
                at = start
                continue
            got = None  # the broker has not caught up
            time.sleep(_FETCH_WAIT_S)
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
    """The records of a span, in order. Raises: CorruptBatch."""
    for batch in batches:
        for record in decode_records(batch.data):
            if span.first <= record.offset < span.end:
                yield record


def _read_task(
    connection: Connection,
    shares: tuple[tuple[Span, ...], ...],
    read: Reading,
    ids: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    log = open_log(connection)
    try:
        for numbers in ids:
            for number in numbers.column(0).to_pylist():
                for span in shares[number]:
                    yield from read(span, batches_of(log, span, connection.timeout))
    finally:
        log.close()


def in_batches(rows: Iterable[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    taken: list[dict[str, Any]] = []
    for row in rows:
        taken.append(row)
        if len(taken) >= _ROWS:
            yield pa.RecordBatch.from_pylist(taken, schema)
            taken = []
    yield pa.RecordBatch.from_pylist(taken, schema)


def _record_batches(span: Span, batches: Iterable[RawBatch]) -> Iterator[pa.RecordBatch]:
    """The records of a span as Arrow batches: big batches by compiled code, one by one; small batches together."""
    small: list[tuple[Any, ...]] = []
    for batch in batches:
        header = read_header(batch.data)
        if header.record_count > _SMALL:
            if small:
                yield _from_rows(span, small)
                small = []
            yield _walked(span, batch, header)
            continue
        small.extend(_rows_of(span, batch, native=header.is_transactional))
        if len(small) >= _ROWS:
            yield _from_rows(span, small)
            small = []
    if small:
        yield _from_rows(span, small)


def _rows_of(span: Span, batch: RawBatch, *, native: bool) -> Iterator[tuple[Any, ...]]:
    """The columns of `_OWN`, record by record."""
    base = batch.base_offset
    try:
        records = decode_records(batch.data)
    except CorruptBatch:
        yield base, base, native, BAD, 0, None, None, b"", None
        return
    for offset, timestamp, key, value, headers in records:
        if span.first <= offset < span.end:
            kind, own, txn = _judge(headers)
            yield offset, base, native, kind, timestamp, key, value, own, txn


def _from_rows(span: Span, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(_OWN)
    kinds = [RECORDS.field(name).type for name in _OWN]
    return _labelled(span, [pa.array(c, kind) for c, kind in zip(columns, kinds, strict=True)])


def _labelled(span: Span, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    count = len(columns[0])
    labels = [
        pa.repeat(pa.scalar(span.stream, pa.string()), count),
        pa.repeat(pa.scalar(span.partition, pa.int32()), count),
    ]
    return pa.RecordBatch.from_arrays([*labels, *columns], schema=RECORDS)


def _walked(span: Span, batch: RawBatch, header: BatchHeader) -> pa.RecordBatch:
    from anabranch.audit import kernel

    body = decompress(header.compression, memoryview(batch.data)[HEADER_SIZE:])
    room = kernel.room(min(header.record_count, len(body)), len(body))
    count = kernel.walk(
        np.frombuffer(body, dtype=np.uint8),
        header.record_count,
        header.base_offset,
        header.base_timestamp,
        span.first,
        span.end,
        *room,
    )
    if count < 0:
        rows = _rows_of(span, batch, native=header.is_transactional)
        return _from_rows(span, list(rows))
    numbers, ends, flags, *data = room
    stamps = numbers[kernel.TIMESTAMP, :count]
    if header.is_log_append_time:
        stamps[:] = header.max_timestamp
    return _labelled(
        span,
        [
            pa.array(numbers[kernel.OFFSET, :count]),
            pa.repeat(pa.scalar(batch.base_offset, pa.int64()), count),
            pa.repeat(pa.scalar(header.is_transactional, pa.bool_()), count),
            pa.array(numbers[kernel.KIND, :count].astype(np.int32)),
            pa.array(stamps),
            *(
                _binary(ends[column, : count + 1], flags[column, :count], data[column])
                for column in range(len(data))
            ),
        ],
    )


def _binary(ends: Longs, flags: Bytes, data: Bytes) -> pa.Array:
    valid = pa.py_buffer(np.packbits(flags, bitorder="little"))
    offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.Array.from_buffers(
        pa.binary(), len(flags), [valid, offsets, pa.py_buffer(data[: ends[-1]])]
    )


def _judge(headers: Sequence[tuple[str, bytes | None]]) -> tuple[int, bytes, bytes | None]:
    """(kind, the user's headers as bytes, value of ab.txn), by docs/protocol.md, sections 8 and 14."""
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
        text = name.encode("utf-8", "surrogateescape")
        own += len(text).to_bytes(4, "big") + text
        own += (len(value) if value is not None else -1).to_bytes(5, "big", signed=True)
        own += value or b""
    if not ours:
        return PLAIN, bytes(own), None
    if ours == 1 and ops:
        return OP, bytes(own), None
    good = ours == 1 and txn is not None and len(txn) == 28
    return WRITE if good else BAD, bytes(own), txn
