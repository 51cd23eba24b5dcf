"""A compiled walk over history records (`CommitRecord`, `EpochRecord`), for one partition of the stream.

Only `anabranch.reading.commit_columns` imports it. Everything is checked against the record's bounds. Any other
record gives a negative result, and the codec says what is wrong with it. The oracle is
`anabranch.protocol.schemas.codec.decode`.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from numba import types

from anabranch.batches.kernels.parts import _MAX_I32, _U, MALFORMED_RESULT, _inline, _long, compiled
from anabranch.protocol.ids import TXN_ID_SIZE

# Rows of the spans; a transaction id is two numbers, its halves in memory order.
FIRST, END, TIMESTAMP, SEGMENT, TXN_HEAD, TXN_TAIL, COUNT = range(7)
SPAN_ROWS = 7
# The state: the number of spans, the end of the partition as of the last record that names it, and the timestamp
# of the last record.
SPANS, REACHED, LAST_TIMESTAMP = range(3)
STATE_SIZE = 3
MIN_SPAN_BYTES = 5

_EPOCH_RECORD = 0x61
_COMMIT_RECORD = 0x62
_OWN = -1


@_inline
def _int(data, at, end):
    """`_long`, of a number that has to fit 32 bits."""
    value, at = _long(data, at, end)
    if value < -_MAX_I32 - 1 or value > _MAX_I32:
        at = np.int64(-1)
    return value, at


@_inline
def _block(data, at, end):
    """(number of items, next) of an array's next block."""
    number, at = _long(data, at, end)
    if number < 0:
        number = -number
        size, at = _long(data, at, end)
        if size < 0:
            at = np.int64(-1)
    if number < 0 or number > end - at:
        at = np.int64(-1)
    return number, at


@_inline
def _skip(data, at, end, numbers, narrow):
    """The place after an array. Each item has ``numbers`` numbers; the one at ``narrow`` has to fit 32 bits."""
    while at >= 0:
        number, at = _block(data, at, end)
        if number == 0:
            break
        for i in range(number * numbers):
            if i % numbers == narrow:
                _, at = _int(data, at, end)
            else:
                _, at = _long(data, at, end)
            if at < 0:
                break
    return at


@_inline
def _half(data, at):
    """8 bytes as a number, the lowest first."""
    value = np.uint64(0)
    for i in range(8):
        value |= np.uint64(data[_U(at + i)]) << np.uint64(8 * i)
    return np.int64(value)


def _commits(data, ends, partition, spans, state):
    """Append the spans of a partition; ``ends``: the end of each record in ``data``, after a 0.

    ``spans`` has room for as many spans as the bytes can have. Returns 0, or a negative result.
    """
    count = state[SPANS]
    for record in range(ends.shape[0] - 1):
        at = np.int64(ends[record])
        end = np.int64(ends[record + 1])
        if at < 0 or end - at < 2 or end > data.shape[0] or data[_U(at)] != 1:
            return MALFORMED_RESULT
        kind = data[_U(at + 1)]
        at += 2
        first = count
        named = moved = state[REACHED]
        if kind == _COMMIT_RECORD:
            txn = at
            at += TXN_ID_SIZE
            _, at = _int(data, at, end)
            timestamp, at = _long(data, at, end)
            while at >= 0:
                number, at = _block(data, at, end)
                if number == 0:
                    break
                for _ in range(number):
                    segment, at = _long(data, at, end)
                    where, at = _int(data, at, end)
                    begins, at = _long(data, at, end)
                    stops, at = _long(data, at, end)
                    events, at = _long(data, at, end)
                    if at < 0:
                        break
                    if where == partition:
                        moved = stops
                        spans[COUNT, _U(count)] = events
                        spans[FIRST, _U(count)] = begins
                        spans[END, _U(count)] = stops
                        spans[SEGMENT, _U(count)] = segment
                        spans[TXN_HEAD, _U(count)] = _half(data, txn)
                        spans[TXN_TAIL, _U(count)] = _half(data, txn + 8)
                        count += 1
        elif kind == _EPOCH_RECORD:
            _, at = _int(data, at, end)
            _, at = _int(data, at, end)
            timestamp, at = _long(data, at, end)
            at = _skip(data, at, end, 5, 3)
            at = _skip(data, at, end, 2, -1)
        else:
            return MALFORMED_RESULT
        while at >= 0:
            number, at = _block(data, at, end)
            if number == 0:
                break
            for _ in range(number):
                where, at = _int(data, at, end)
                offset, at = _long(data, at, end)
                if at < 0:
                    break
                if where == partition:
                    named = offset
        _, at = _long(data, at, end)
        if kind == _COMMIT_RECORD:
            vector_at, at = _long(data, at, end)
            if vector_at != _OWN:
                named = moved  # the record has its own ends only
        state[REACHED] = named
        if at != end:
            return MALFORMED_RESULT
        for i in range(first, count):
            spans[TIMESTAMP, _U(i)] = timestamp
        state[LAST_TIMESTAMP] = timestamp
    state[SPANS] = count
    return 0


commits = compiled(
    types.int64(
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int32, 1, "C", readonly=True),
        types.int64,
        types.int64[:, ::1],
        types.int64[::1],
    )
)(_commits)
