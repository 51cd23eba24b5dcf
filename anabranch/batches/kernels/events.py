"""Compiled walks over the events of a command, which are Avro: one finds what decisions need, one copies the events
into a record batch.

Only `anabranch.batches.framing` imports it. The first walk checks everything against the bounds before it reads it.
Malformed data, and unusual forms of Avro, give a negative result, never an exception. The second walk trusts the
first one. Its oracle is `anabranch.batches.builder.BatchBuilder.add_all`.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numba
import numpy as np

from anabranch.batches.kernels.copy import (
    BASE_TIMESTAMP,
    COPIED,
    MAX_TIMESTAMP,
    NEXT_DELTA,
    SOURCE_AT,
    TARGET_AT,
)
from anabranch.batches.kernels.parts import (
    _BYTES_IN,
    _BYTES_OUT,
    _LONG,
    _LONGS,
    _U,
    MALFORMED_RESULT,
    NO_ROOM,
    _byte,
    _crc,
    _inline,
    _is_text,
    _load64,
    _move,
    _position,
    _put_varint,
    _varint,
    _varint_size,
    _varlong,
    compiled,
)
from anabranch.core.command_events import COLUMNS, RUN_COLUMNS
from anabranch.protocol.ids import TXN_HEADER, TXN_HEADER_SIZE

# Columns of `scan`, each with a number for every event: ``starts``, ``places`` and ``sizes`` of
# `anabranch.core.command_events.CommandEvents`.
START, PLACE, SIZE = range(3)
# A run's row: the fields of `anabranch.core.command_events.EventRun` after the stream.
END, HEADERS, MOST_HEADERS, BIGGEST, EARLIEST, LATEST, SHORTEST_KEY, LONGEST_KEY, RESERVED = range(
    9
)
# `copy` needs three numbers for each part of a commit: the number of the event after its last one, the place of its
# command, and the commit's time, Unix milliseconds.
PART_END, PART_AT, PART_TIME = range(3)
PART_COLUMNS = 3
# The header ab.txn in a record is these bytes, and its value: two sizes, which are zigzag, with the name between.
TXN_START = bytes((2 * len(TXN_HEADER),)) + TXN_HEADER.encode() + bytes((2 * TXN_HEADER_SIZE,))
TXN_BYTES = len(TXN_START) + TXN_HEADER_SIZE
MOST_FRAMING = 80  # bytes that a copied event may need besides its bytes in the command

_MIN_EVENT = 6  # six fields of one byte
_called = numba.njit(nogil=True)  # inlining them by numba would double the time to compile


@_called
def _size(data, at, end):
    """(size, place of its bytes) of a string or of bytes; the place is -1 if they are malformed."""
    size, at = _varint(data, at, end)
    if at < 0 or size < 0 or size > end - at:
        return np.int64(0), np.int64(-1)
    return size, at


@_called
def _nullable(data, at, end):
    """As `_size`, of bytes or null, which has the size -1."""
    if at >= end:
        return np.int64(0), np.int64(-1)
    tag = _byte(data, at)
    if tag == 0:
        return np.int64(-1), at + 1
    if tag != 2:
        return np.int64(0), np.int64(-1)
    size, at = _varint(data, at + 1, end)
    if at < 0 or size < 0 or size > end - at:
        return np.int64(0), np.int64(-1)
    return size, at


@_called
def _same(data, left, right, size):
    i = np.int64(0)
    while size - i >= 8:
        if _load64(data, _U(left + i)) != _load64(data, _U(right + i)):
            return False
        i += 8
    while i < size:
        if _byte(data, left + i) != _byte(data, right + i):
            return False
        i += 1
    return True


@_inline
def _is_reserved(data, at, size):
    """Whether a header's name starts with ``ab.`` (`anabranch.protocol.limits.RESERVED`)."""
    return (
        size >= 3
        and _byte(data, at) == 97
        and _byte(data, at + 1) == 98
        and _byte(data, at + 2) == 46
    )


def _scan(data, at, count, found):
    """Walk an array's only block, of ``count`` events. Returns the end of the array, or `MALFORMED_RESULT`.

    ``found`` gets the number of runs, the columns, and a row for each run of events of one stream.
    """
    end = np.int64(data.shape[0])
    if count < 1 or count > (end - at) // _MIN_EVENT:
        return MALFORMED_RESULT
    runs = np.int64(0)
    row = 1 + COLUMNS * count - RUN_COLUMNS
    stream_at = stream_size = np.int64(-1)
    for number in range(count):
        found[1 + START * count + number] = at
        size, at = _size(data, at, end)
        if at < 0:
            return MALFORMED_RESULT
        if size != stream_size or not _same(data, at, stream_at, size):
            stream_at, stream_size = at, size
            runs += 1
            row += RUN_COLUMNS
            found[row + HEADERS] = 0
            found[row + MOST_HEADERS] = 0
            found[row + BIGGEST] = 0
            found[row + EARLIEST] = (1 << 63) - 1
            found[row + LATEST] = -(1 << 63)
            found[row + SHORTEST_KEY] = end
            found[row + LONGEST_KEY] = 0
            found[row + RESERVED] = 0
        segment, at = _varlong(data, at + size, end)
        if at < 0:
            return MALFORMED_RESULT
        key_size, at = _nullable(data, at, end)
        if at < 0:
            return MALFORMED_RESULT
        if key_size >= 0:
            place = _position(_crc(data, at, at + key_size, _U(0xFFFFFFFF)))
            at += key_size
        else:
            place = ~(segment & 0xFFFFFFFF)
            key_size = np.int64(0)
        value_size, at = _nullable(data, at, end)
        if at < 0:
            return MALFORMED_RESULT
        value_size = max(value_size, 0)
        at += value_size
        event = key_size + value_size
        headers, at = _varint(data, at, end)
        if at < 0 or headers < 0:
            return MALFORMED_RESULT
        for _ in range(headers):
            size, at = _size(data, at, end)
            if at < 0 or not _is_text(data, at, at + size):
                return MALFORMED_RESULT
            if _is_reserved(data, at, size):
                found[row + RESERVED] = 1
            event += size
            size, at = _nullable(data, at + size, end)
            if at < 0:
                return MALFORMED_RESULT
            size = max(size, 0)
            event += size
            at += size
        if headers:
            if at >= end or _byte(data, at) != 0:  # the end of the headers
                return MALFORMED_RESULT
            at += 1
        timestamp, at = _varlong(data, at, end)
        if at < 0:
            return MALFORMED_RESULT
        found[1 + PLACE * count + number] = place
        found[1 + SIZE * count + number] = key_size + value_size
        found[row + END] = number + 1
        found[row + HEADERS] += headers
        found[row + MOST_HEADERS] = max(found[row + MOST_HEADERS], headers)
        found[row + BIGGEST] = max(found[row + BIGGEST], event)
        found[row + EARLIEST] = min(found[row + EARLIEST], timestamp)
        found[row + LATEST] = max(found[row + LATEST], timestamp)
        found[row + SHORTEST_KEY] = min(found[row + SHORTEST_KEY], key_size)
        found[row + LONGEST_KEY] = max(found[row + LONGEST_KEY], key_size)
    found[0] = runs
    if at >= end or _byte(data, at) != 0:  # the end of the events
        return MALFORMED_RESULT
    return at + 1


@_called
def _put_nullable(out, target, data, at, size):
    """Copy bytes, or null for the size -1; returns the end of the copy."""
    target = _put_varint(out, target, size)
    if size > 0:
        _move(out, target, data, at, size)
        target += size
    return target


def _copy(data, starts, parts, txns, full, limit, out, state):
    """Copy events into ``out``, from event number ``state[SOURCE_AT]`` on, each with the header of its commit.

    Stops when ``out`` has ``full`` bytes, and before an event that would be beyond ``limit``, unless it is the
    first one of the batch. ``parts``: three numbers for each part. ``txns``: that header for each part.
    Returns 0, or `NO_ROOM` (then ``state`` is as it was).
    """
    end = np.int64(data.shape[0])
    room = np.int64(out.shape[0])
    number = state[SOURCE_AT]
    target = state[TARGET_AT]
    next_delta = state[NEXT_DELTA]
    base = state[BASE_TIMESTAMP]
    highest = state[MAX_TIMESTAMP]
    part = np.int64(0)
    while number < starts.shape[0]:
        while parts[part * PART_COLUMNS + PART_END] <= number:
            part += 1
        at = parts[part * PART_COLUMNS + PART_AT] + starts[number]
        size, at = _size(data, at, end)
        _, at = _varlong(data, at + size, end)
        key_size, key_at = _nullable(data, at, end)
        value_size, value_at = _nullable(data, key_at + max(key_size, 0), end)
        headers, at = _varint(data, value_at + max(value_size, 0), end)
        headers_at = at
        headers_size = np.int64(0)
        for _ in range(headers):
            size, at = _size(data, at, end)
            headers_size += _varint_size(size) + size
            size, at = _nullable(data, at + size, end)
            headers_size += _varint_size(size) + max(size, 0)
            at += max(size, 0)
        timestamp, _ = _varlong(data, at + 1 if headers else at, end)
        if timestamp < 0:
            timestamp = parts[part * PART_COLUMNS + PART_TIME]
        first = next_delta == 0
        shift = np.int64(0) if first else timestamp - base
        length = (
            1
            + _varint_size(shift)
            + _varint_size(next_delta)
            + _varint_size(key_size)
            + max(key_size, 0)
            + _varint_size(value_size)
            + max(value_size, 0)
            + _varint_size(headers + 1)
            + headers_size
            + TXN_BYTES
        )
        if not first and target + _varint_size(length) + length > limit:
            break
        if room - target < length + 5:
            return NO_ROOM
        if first:
            base = timestamp
            highest = timestamp
        if timestamp > highest:
            highest = timestamp
        target = _put_varint(out, target, length)
        out[target] = 0
        target = _put_varint(out, target + 1, shift)
        target = _put_varint(out, target, next_delta)
        target = _put_nullable(out, target, data, key_at, key_size)
        target = _put_nullable(out, target, data, value_at, value_size)
        target = _put_varint(out, target, headers + 1)
        at = headers_at
        for _ in range(headers):
            size, at = _size(data, at, end)
            target = _put_nullable(out, target, data, at, size)
            size, at = _nullable(data, at + size, end)
            target = _put_nullable(out, target, data, at, size)
            at += max(size, 0)
        _move(out, target, txns, part * TXN_BYTES, TXN_BYTES)
        target += TXN_BYTES
        next_delta += 1
        number += 1
        if target >= full:
            break
    state[COPIED] = number - state[SOURCE_AT]
    state[SOURCE_AT] = number
    state[TARGET_AT] = target
    state[NEXT_DELTA] = next_delta
    state[BASE_TIMESTAMP] = base
    state[MAX_TIMESTAMP] = highest
    return 0


_PARTS = (_LONGS, _LONGS, _BYTES_IN)  # starts, parts, txns
scan = compiled(_LONG(_BYTES_IN, _LONG, _LONG, _LONGS), nogil=False)(_scan)
copy = compiled(_LONG(_BYTES_IN, *_PARTS, _LONG, _LONG, _BYTES_OUT, _LONGS), nogil=False)(_copy)
