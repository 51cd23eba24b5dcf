"""Events as Arrow record batches: the one home of their schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.batches.columns_read import MAX_BYTES, MAX_ROWS, Binary, Columns, Longs
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.reading.commit_columns import Joined, Spans
from anabranch.reading.decoded import ColumnsBlock, Run
from anabranch.types import Event

_HEADER = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])

# The schema that Spark uses for the columns of docs/spark.md: it refuses any other.
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.field("element", _HEADER))),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("stream", pa.string()),
        ("segment", pa.int64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("txn_id", pa.binary()),
        ("commit_timestamp", pa.int64()),
    ]
)

# Columns that come from the history.
PLACES = ("stream", "segment", "partition", "offset", "txn_id", "commit_timestamp")

_US_PER_MS = 1000
_MOST_MS = ((1 << 63) - 1) // _US_PER_MS


class EventBatches:
    """Makes record batches of one partition of a stream."""

    def __init__(self, stream: str, partition: int) -> None:
        self.stream = stream
        self.partition = partition
        self._streams = pa.array([], pa.string())
        self._partitions = pa.array([], pa.int32())

    def of(
        self, columns: Columns, commits: Joined, left_out: NDArray[np.bool_] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches of at most `MAX_ROWS` rows and some megabytes; a bigger event comes alone.

        Events that no commit names, because the history is truncated, have no segment and no commit timestamp.
        """
        whole = self.whole(columns, commits)
        if left_out is not None:
            whole = whole.filter(pa.array(~left_out))
        rows = whole.num_rows
        size = sum(len(c.data) for c in (columns.keys, columns.values, columns.header_values))
        # A chunk ends with a whole batch, so it is a little more than full.
        parts = max(-(-rows * 2 // (3 * MAX_ROWS)), size // (2 * MAX_BYTES), 1)
        step = -(-rows // parts)
        for at in range(0, rows, step):
            yield whole.slice(at, step)

    def places(self, spans: Spans, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Batches of at most `MAX_ROWS` rows, with these of `PLACES`. ``offset`` is right where no marker is."""
        ends = np.cumsum(spans.counts)
        firsts = spans.firsts - (ends - spans.counts)
        for low in range(0, int(ends[-1]), MAX_ROWS):
            rows = np.arange(low, min(low + MAX_ROWS, int(ends[-1])))
            at = np.searchsorted(ends, rows, side="right")
            self._constant(len(rows))
            txns = np.stack((spans.txn_heads[at], spans.txn_tails[at]), axis=1)
            found = {
                "stream": self._streams.slice(0, len(rows)),
                "segment": _longs(spans.segments[at], pa.int64()),
                "partition": self._partitions.slice(0, len(rows)),
                "offset": _longs(firsts[at] + rows, pa.int64()),
                "txn_id": pa.Array.from_buffers(
                    pa.binary(TXN_ID_SIZE),
                    len(rows),
                    [_bits(np.any(txns != 0, axis=1)), pa.py_buffer(txns)],
                ).cast(pa.binary()),
                "commit_timestamp": _longs(spans.timestamps[at], pa.int64()),
            }
            yield pa.RecordBatch.from_pydict({name: found[name] for name in wanted})

    def _constant(self, rows: int) -> None:
        """Make the constant columns for this number of rows; batches are slices of them."""
        if len(self._streams) < rows:
            most = max(rows, MAX_ROWS)
            self._streams = pa.repeat(pa.scalar(self.stream, pa.string()), most)
            self._partitions = pa.repeat(pa.scalar(self.partition, pa.int32()), most)

    def whole(self, columns: Columns, commits: Joined) -> pa.RecordBatch:
        rows = len(columns)
        self._constant(rows)
        return pa.RecordBatch.from_arrays(
            [
                _binary(columns.keys),
                _binary(columns.values),
                _headers(columns),
                _times(columns.timestamps),
                self._streams.slice(0, rows),
                _longs(commits.segments, pa.int64(), commits.known),
                self._partitions.slice(0, rows),
                _longs(columns.offsets, pa.int64()),
                _binary(columns.txns),
                _longs(commits.timestamps, pa.int64(), commits.known),
            ],
            schema=SCHEMA,
        )


_batches = lru_cache(1024)(EventBatches)  # constant columns are made once


def batch_of_run(stream: str, run: Run, places: Longs | None) -> pa.RecordBatch:
    """The events of a run as a batch: all, or only those at ``places``."""
    block, (length, txn_id, timestamp, segment) = run.block, run.stretch
    if isinstance(block, ColumnsBlock):
        span = Spans(*(np.array([n]) for n in (0, 0, timestamp, segment, 0, 0, length)))
        at = np.zeros(len(block.columns), dtype=np.int64)
        found = _batches(stream, run.partition).whole(block.columns, Joined(span, at, None))
        found = found.slice(run.low, length)
        txns = found.column("txn_id")
        if txn_id is not None and txns.null_count:
            index = SCHEMA.get_field_index("txn_id")
            found = found.set_column(index, SCHEMA.field("txn_id"), txns.fill_null(txn_id))
    else:
        found = batch_of(list(run.events(stream)))
    return found if places is None else found.take(pa.array(places))


def batch_of(events: Sequence[Event]) -> pa.RecordBatch:
    columns = list(zip(*events, strict=True)) if events else [()] * len(Event._fields)
    found = dict(zip(Event._fields, columns, strict=True))
    headers = [[{"key": _utf8(k), "value": v} for k, v in pairs] for pairs in found["headers"]]
    arrays = []
    for field in SCHEMA:
        if field.name == "headers":
            arrays.append(pa.array(headers, field.type))
        elif field.name == "timestamp":
            arrays.append(_times(np.array(found["timestamp"], dtype=np.int64)))
        else:
            name = "segment_id" if field.name == "segment" else field.name
            arrays.append(pa.array(found[name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _utf8(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


def _times(unix_ms: Longs) -> pa.Array:
    """Times in microseconds. A time that doesn't fit in 64 bits becomes the nearest time that does."""
    times = np.clip(unix_ms, -_MOST_MS, _MOST_MS) * _US_PER_MS
    return _longs(times, SCHEMA.field("timestamp").type)


def _longs(values: Longs, kind: pa.DataType, known: NDArray[np.bool_] | None = None) -> pa.Array:
    nulls = 0 if known is None else len(known) - int(known.sum())
    return pa.Array.from_buffers(kind, len(values), [_bits(known), pa.py_buffer(values)], nulls)


def _binary(column: Binary) -> pa.Array:
    return _bytes(column, pa.binary())


def _bytes(column: Binary, kind: pa.DataType) -> pa.Array:
    buffers = [_bits(column.valid), pa.py_buffer(column.ends), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, len(column.ends) - 1, buffers, column.nulls)


def _headers(columns: Columns) -> pa.Array:
    names = _bytes(columns.names, pa.string()) if columns.ascii_names else _text(columns.names)
    pairs = pa.Array.from_buffers(
        _HEADER, len(names), [None], 0, children=[names, _binary(columns.header_values)]
    )
    lists = [None, pa.py_buffer(columns.header_ends)]
    kind = SCHEMA.field("headers").type
    return pa.Array.from_buffers(kind, len(columns), lists, 0, children=[pairs])


def _text(column: Binary) -> pa.Array:
    """Names as text; bytes that are not UTF-8 become U+FFFD."""
    names = _binary(column)
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())


def _bits(valid: NDArray[np.uint8] | NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
