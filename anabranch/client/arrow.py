"""Arrow tables as checked columns of events, for `write_batch`: its first call imports this module and pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.batches.columns_write import Bytes, BytesColumn, EventColumns, HeadersColumn, Numbers
from anabranch.errors import InvalidArgument
from anabranch.protocol.limits import HEADERS, LATEST, RESERVED, bad_time, check_header_name

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 65_536
_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)
_COLUMNS = ("value", "key", "headers", "timestamp")
_OURS = RESERVED.encode()
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def columns_of(batch: pa.RecordBatch | pa.Table) -> list[EventColumns]:
    """Split a batch or table into pieces of limited size, without a copy; empty pieces are dropped.

    Raises `InvalidArgument`, which names the column, type or field that `Transaction.write_batch` does not take.
    """
    import pyarrow as pa

    if isinstance(batch, pa.RecordBatch):
        batch = pa.Table.from_batches([batch])
    if not isinstance(batch, pa.Table):
        raise InvalidArgument(
            f"a batch is a pyarrow.RecordBatch or Table, not {type(batch).__name__}"
        )
    names = batch.schema.names
    for name in names:
        if name not in _COLUMNS:
            raise InvalidArgument(f"column {name!r}: only {', '.join(_COLUMNS)} are written")
        if names.count(name) > 1:
            raise InvalidArgument(f"column {name!r} is there twice")
    if "value" not in names:
        raise InvalidArgument("there is no column 'value'")
    # Check the types first, because a table may have no rows.
    _piece(pa.RecordBatch.from_pylist([], batch.schema), names)
    pieces = batch.to_batches(max_chunksize=_ROWS_AT_ONCE)
    return [_piece(piece, names) for piece in pieces if piece.num_rows]


def _piece(piece: pa.RecordBatch, names: list[str]) -> EventColumns:
    given: dict[str, Any] = {"values": _bytes(piece.column("value"), "value")}
    if "key" in names:
        given["keys"] = _bytes(piece.column("key"), "key")
    if "headers" in names:
        given["headers"] = _headers(piece.column("headers"))
    if "timestamp" in names:
        given["timestamps"] = _timestamps(piece.column("timestamp"))
    return EventColumns(**given)


def _plain(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _bytes(array: pa.Array, name: str, *, text_only: bool = False) -> BytesColumn:
    import pyarrow as pa

    is_a = pa.types
    array = _plain(array)
    kind = array.type
    text = is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind)
    data = is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_binary_view(kind)
    if not (text or is_a.is_null(kind) or (data and not text_only)):
        allowed = "string" if text_only else "binary or string"
        raise InvalidArgument(f"column {name!r} is {kind}; {allowed} is needed")
    if is_a.is_string_view(kind) or is_a.is_binary_view(kind) or is_a.is_null(kind):
        array = array.cast(pa.large_binary())
        kind = array.type
    wide = is_a.is_large_binary(kind) or is_a.is_large_string(kind)
    _, offsets, content = array.buffers()
    starts, sizes = _spans(array, offsets, wide, name)
    bytes_in = _NO_BYTES if content is None else np.frombuffer(content, dtype=np.uint8)
    if len(sizes) and int((starts + np.maximum(sizes, 0)).max()) > len(bytes_in):
        raise InvalidArgument(f"column {name!r} has offsets beyond its data")
    return BytesColumn(starts, sizes, bytes_in)


def _spans(array: pa.Array, buffer: Any, wide: bool, name: str) -> tuple[Numbers, Numbers]:
    """The start and size of each row's bytes; the size of a null is -1."""
    if not len(array):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    whole = np.frombuffer(buffer, dtype=np.int64 if wide else np.int32)
    offsets = whole[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)
    sizes = np.diff(offsets)
    if len(offsets) != len(array) + 1 or int(offsets[0]) < 0 or int(sizes.min()) < 0:
        raise InvalidArgument(f"column {name!r} has offsets that go back")
    if array.null_count:
        sizes[~_valid(array)] = -1
    return offsets[:-1], sizes


def _valid(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    valid: np.ndarray[tuple[int], np.dtype[np.bool_]] = array.is_valid().to_numpy(
        zero_copy_only=False
    )
    return valid


def _headers(array: pa.Array) -> HeadersColumn:
    import pyarrow as pa

    kind = array.type
    if pa.types.is_null(kind):
        return HeadersColumn()
    wide = pa.types.is_large_list(kind)
    if (
        not (wide or pa.types.is_list(kind))
        or not pa.types.is_struct(kind.value_type)
        or sorted(field.name for field in kind.value_type.fields) != ["key", "value"]
    ):
        raise InvalidArgument(
            f"column 'headers' is {kind}; list<struct<key: string, value: binary>> is needed"
        )
    starts, counts = _spans(array, array.buffers()[1], wide, "headers")
    counts = np.maximum(counts, 0)
    pairs = array.values
    HEADERS.check(int(counts.max(initial=0)), "an event")
    if len(counts) and int((starts + counts).max()) > len(pairs):
        raise InvalidArgument("column 'headers' has offsets beyond its data")
    names = _bytes(pairs.field("key"), "headers.key", text_only=True)
    values = _bytes(pairs.field("value"), "headers.value")
    taken = np.zeros(len(pairs), dtype=np.bool_)
    if array.null_count:
        # The bytes of a null are undefined.
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            taken[start : start + count] = True
    elif len(starts):
        taken[starts[0] : starts[-1] + counts[-1]] = True
    if pairs.null_count and not _valid(pairs)[taken].all():
        raise InvalidArgument("column 'headers': a header is null")
    _check_names(names, taken)
    return HeadersColumn(starts, counts, names, values)


def _check_names(names: BytesColumn, taken: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Raise `InvalidArgument` for a header name that is null, not UTF-8, or reserved."""
    starts, sizes = names.starts[taken], names.sizes[taken]
    if (sizes < 0).any():
        raise InvalidArgument("column 'headers': a header without a key")
    long = starts[sizes >= len(_OURS)]
    reserved = np.ones(len(long), dtype=np.bool_)
    for i, byte in enumerate(_OURS):
        reserved &= names.data[long + i] == byte
    if reserved.any():
        check_header_name(names.at(int(np.flatnonzero(taken)[sizes >= len(_OURS)][reserved][0])))
    if names.data.max(initial=0) > 127:  # arrays made from raw bytes may not be UTF-8
        for row in np.flatnonzero(taken).tolist():
            name = names.at(row) or b""
            check_header_name(name.decode(errors="surrogateescape"))


def _timestamps(array: pa.Array) -> Numbers:
    """Unix milliseconds; 0, in place of a null, means now."""
    import pyarrow as pa

    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return np.empty(0, dtype=np.int64)
    is_timestamp = pa.types.is_timestamp(kind)
    if not is_timestamp and not pa.types.is_int64(kind):
        raise InvalidArgument(
            f"column 'timestamp' is {kind}; timestamp, or int64 in Unix milliseconds, is needed"
        )
    if not len(array):
        return np.empty(0, dtype=np.int64)
    whole = np.frombuffer(array.buffers()[1], dtype=np.int64)
    stamps: Numbers = whole[array.offset : array.offset + len(array)]
    per_second = _PER_SECOND[kind.unit] if is_timestamp else 1000
    nulls = ~_valid(array) if array.null_count else None
    if nulls is not None:
        stamps = np.where(nulls, np.int64(per_second), stamps)
    if per_second > 1000:
        stamps = stamps // (per_second // 1000)
    low, high = int(stamps.min()), int(stamps.max())
    if low <= 0 or high > (LATEST // 1000 if per_second == 1 else LATEST):
        raise InvalidArgument(bad_time(low if low <= 0 else high))
    if per_second == 1:
        stamps = stamps * 1000
    if nulls is not None:
        stamps[nulls] = 0
    return stamps
