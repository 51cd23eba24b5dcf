"""Compiled walks over a record batch's body that copy its records into new ones: a run's, or those of some keys.

Only `anabranch.batches.framing` imports it. Everything is checked against the body's bounds before it is read.
Malformed data gives a negative result, never an exception. The oracle is `anabranch.batches.builder.BatchBuilder`
without compiled code.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from numba import types

from anabranch.batches.kernels.parts import (
    _BYTES_IN,
    _BYTES_OUT,
    _LONG,
    _LONGS,
    _MAX_I32,
    _MIN_RECORD,
    _U,
    MALFORMED_RESULT,
    NO_ROOM,
    _crc,
    _move,
    _position,
    _put_varint,
    _varint,
    _varint_size,
    _varlong,
    compiled,
)

# A copy's state is an array: the next place in the source and in the target, the next offset delta, the number
# of records copied, the base and the highest timestamp of the target.
SOURCE_AT, TARGET_AT, NEXT_DELTA, COPIED, BASE_TIMESTAMP, MAX_TIMESTAMP = range(6)
STATE_SIZE = 6


def _copy(body, first_delta, last_delta, base_timestamp, fixed, append_time, out, state):
    """Copy the records with these offset deltas; ``fixed`` is their timestamp if ``append_time``.

    Starts from ``state`` and advances it; a fresh batch has NEXT_DELTA 0 and takes its base timestamp from the
    first record. Returns 0, or a negative result (then ``state`` is as it was).
    """
    end = np.int64(body.shape[0])
    room = np.int64(out.shape[0])
    at = state[SOURCE_AT]
    target = state[TARGET_AT]
    next_delta = state[NEXT_DELTA]
    copied = np.int64(0)
    base = state[BASE_TIMESTAMP]
    highest = state[MAX_TIMESTAMP]
    while at < end:
        start = at
        size, at = _varint(body, at, end)
        if at < 0 or size <= 0 or size > end - at:
            return MALFORMED_RESULT
        stop = at + size
        at += 1
        timestamp, at = _varlong(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        delta, at = _varint(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        if delta > last_delta:
            at = start
            break
        if delta >= first_delta:
            timestamp = fixed if append_time else base_timestamp + timestamp
            if next_delta == 0:
                base = timestamp
                highest = timestamp
            if timestamp > highest:
                highest = timestamp
            tail = stop - at
            shift = timestamp - base
            length = 1 + _varint_size(shift) + _varint_size(next_delta) + tail
            if room - target < length + 5 or next_delta > _MAX_I32:
                return NO_ROOM
            target = _put_varint(out, target, length)
            out[target] = 0
            target = _put_varint(out, target + 1, shift)
            target = _put_varint(out, target, next_delta)
            _move(out, target, body, at, tail)
            target += tail
            next_delta += 1
            copied += 1
        at = stop
    state[SOURCE_AT] = at
    state[TARGET_AT] = target
    state[NEXT_DELTA] = next_delta
    state[COPIED] = copied
    state[BASE_TIMESTAMP] = base
    state[MAX_TIMESTAMP] = highest
    return 0


def _place(body, count, lows, places_of, keyless, starts, deltas, places):
    """Write each record's start, its offset delta, and the place of its key.

    ``lows``: the beginnings of key ranges, rising, the first 0; ``places_of``: the place of each range;
    ``keyless``: the place of records without a key. ``starts`` is longer by one: it ends with the body's end.
    Returns 0, or `MALFORMED_RESULT`.
    """
    end = np.int64(body.shape[0])
    if count < 0 or count > end // _MIN_RECORD:
        return MALFORMED_RESULT
    at = np.int64(0)
    for number in range(count):
        starts[number] = at
        size, at = _varint(body, at, end)
        if at < 0 or size <= 0 or size > end - at:
            return MALFORMED_RESULT
        stop = at + size
        _, at = _varlong(body, at + 1, stop)
        if at < 0:
            return MALFORMED_RESULT
        delta, at = _varint(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        found = np.int64(keyless)
        if length >= 0:
            position = _position(_crc(body, at, at + length, _U(0xFFFFFFFF)))
            low = 0
            high = lows.shape[0]
            while high - low > 1:
                middle = (low + high) // 2
                if lows[middle] <= position:
                    low = middle
                else:
                    high = middle
            found = places_of[low]
        deltas[number] = delta
        places[number] = found
        at = stop
    starts[count] = at
    if at != end:
        return MALFORMED_RESULT
    return 0


def _copy_placed(
    body, starts, places, wanted, stop_at, base_timestamp, fixed, append_time, out, state
):
    """Copy the records of one place, up to record number ``stop_at``. Stops before a record that ``out`` has no
    room for.

    Arguments and result are as for `_copy`, but SOURCE_AT counts records. ``starts`` and ``places`` are as `_place`
    left them.
    """
    room = np.int64(out.shape[0])
    number = state[SOURCE_AT]
    target = state[TARGET_AT]
    next_delta = state[NEXT_DELTA]
    copied = np.int64(0)
    base = state[BASE_TIMESTAMP]
    highest = state[MAX_TIMESTAMP]
    while number < stop_at:
        if places[number] != wanted:
            number += 1
            continue
        stop = starts[number + 1]
        _, at = _varint(body, starts[number], stop)
        if at < 0:
            return MALFORMED_RESULT
        timestamp, at = _varlong(body, at + 1, stop)
        if at < 0:
            return MALFORMED_RESULT
        _, at = _varint(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        timestamp = fixed if append_time else base_timestamp + timestamp
        first = next_delta == 0
        shift = np.int64(0) if first else timestamp - base
        tail = stop - at
        length = 1 + _varint_size(shift) + _varint_size(next_delta) + tail
        if room - target < length + 5 or next_delta > _MAX_I32:
            break
        if first:
            base = timestamp
            highest = timestamp
        if timestamp > highest:
            highest = timestamp
        target = _put_varint(out, target, length)
        out[target] = 0
        target = _put_varint(out, target + 1, shift)
        target = _put_varint(out, target, next_delta)
        _move(out, target, body, at, tail)
        target += tail
        next_delta += 1
        copied += 1
        number += 1
    state[SOURCE_AT] = number
    state[TARGET_AT] = target
    state[NEXT_DELTA] = next_delta
    state[COPIED] = copied
    state[BASE_TIMESTAMP] = base
    state[MAX_TIMESTAMP] = highest
    return 0


copy = compiled(_LONG(_BYTES_IN, _LONG, _LONG, _LONG, _LONG, types.boolean, _BYTES_OUT, _LONGS))(
    _copy
)
place = compiled(_LONG(_BYTES_IN, _LONG, _LONGS, _LONGS, _LONG, _LONGS, _LONGS, _LONGS))(_place)
copy_placed = compiled(
    _LONG(_BYTES_IN, _LONGS, _LONGS, _LONG, _LONG, _LONG, _LONG, types.boolean, _BYTES_OUT, _LONGS)
)(_copy_placed)
