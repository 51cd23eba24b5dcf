"""A compiled walk over columns that places each row by its key, and encodes its record of RecordBatch v2.

Only `anabranch.batches.columns_write` imports it, and checks the arrays: this code does not check whether a field
is within its data. The oracle is `anabranch.client.receipts.StreamLane` with
`anabranch.batches.builder.BatchBuilder`.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from numba import types

from anabranch.batches.kernels.parts import (
    _U,
    _crc,
    _inline,
    _move,
    _position,
    _put_varint,
    _varint_size,
    compiled,
)

# A journal partition's slot is a row of an array: the places in the room where its batch begins, where the next
# record goes, and where the slot ends; the batch's number of records, base and highest timestamp; and, since
# `counted` was last called, the records laid out and the sum of their checksums (below 2^63: 2^31 rows of 32 bits).
BASE, AT, STOP, COUNT, BASE_TIMESTAMP, MAX_TIMESTAMP, ROWS, CRC_SUM = range(8)
SLOT_SIZE = 8

# The walk: the next row; the range to which rows without a key go now, and the bytes that it still takes; and
# the size of the record that had no room.
ROW, STICKY, STICKY_LEFT, NEEDED = range(4)

# The result when all rows are laid out. Another result is the slot in which the next row has no room.
DONE = -1

_MOST_RECORDS = (1 << 31) - 1


@_inline
def _put_bytes(room, at, data, start, size):
    """Write a field after its length; a size below 0 is null."""
    if size < 0:
        room[_U(at)] = np.uint8(1)
        return at + 1
    at = _put_varint(room, at, size)
    _move(room, at, data, start, size)
    return at + size


@_inline
def _bytes_size(size):
    return np.int64(1) if size < 0 else _varint_size(size) + size


def _lay(
    key_starts,
    key_sizes,
    key_data,
    value_starts,
    value_sizes,
    value_data,
    timestamps,
    now,
    header_starts,
    header_counts,
    name_starts,
    name_sizes,
    name_data,
    content_starts,
    content_sizes,
    content_data,
    constant,
    lows,
    slots_of,
    sticky_bytes,
    overhead,
    room,
    slots,
    walk,
):
    """Lay out rows from ``walk[ROW]`` on, until all are laid out, or one has no room in its slot.

    A column is starts, sizes (-1: null) and data. A missing column has no sizes (keys: all null).
    ``timestamps``: 0, or an empty column, is ``now``. ``constant``: the encoded ab.txn header. ``lows``:
    the beginnings of key ranges, rising, the first 0; ``slots_of``: the slot of each range.
    """
    rows = value_sizes.shape[0]
    ranges = lows.shape[0]
    keyed = key_sizes.shape[0] > 0
    timed = timestamps.shape[0] > 0
    headed = header_counts.shape[0] > 0
    tail = np.int64(constant.shape[0])
    row = walk[ROW]
    sticky = walk[STICKY]
    sticky_left = walk[STICKY_LEFT]
    result = np.int64(DONE)
    while row < rows:
        key_size = np.int64(-1)
        key_start = np.int64(0)
        if keyed:
            key_size = key_sizes[row]
            key_start = key_starts[row]
        value_size = value_sizes[row]
        value_start = value_starts[row]

        crc = _U(0xFFFFFFFF)
        next_sticky = sticky
        next_left = sticky_left
        place = np.int64(0)
        if key_size >= 0:
            crc = _crc(key_data, key_start, key_start + key_size, crc)
            if ranges > 1:
                position = _position(crc)
                high = ranges
                while high - place > 1:
                    middle = (place + high) // 2
                    if lows[middle] <= position:
                        place = middle
                    else:
                        high = middle
        else:
            next_left -= max(value_size, np.int64(0)) + overhead
            if next_left < 0:
                next_sticky = (sticky + 1) % ranges
                next_left = sticky_bytes
            place = next_sticky
        slot = slots_of[place]

        timestamp = now
        if timed and timestamps[row] != 0:
            timestamp = timestamps[row]
        number = slots[slot, COUNT]
        shift = np.int64(0)
        if number > 0:
            shift = timestamp - slots[slot, BASE_TIMESTAMP]
        headers = np.int64(0)
        first_header = np.int64(0)
        size = 1 + _varint_size(shift) + _varint_size(number)
        size += _bytes_size(key_size) + _bytes_size(value_size) + tail
        if headed:
            headers = header_counts[row]
            first_header = header_starts[row]
            for i in range(first_header, first_header + headers):
                size += _bytes_size(name_sizes[i]) + _bytes_size(content_sizes[i])
        size += _varint_size(headers + 1)

        at = slots[slot, AT]
        needed = size + _varint_size(size)
        if slots[slot, STOP] - at < needed or number >= _MOST_RECORDS:
            walk[NEEDED] = needed
            result = np.int64(slot)
            break
        at = _put_varint(room, at, size)
        room[_U(at)] = np.uint8(0)
        at = _put_varint(room, at + 1, shift)
        at = _put_varint(room, at, number)
        at = _put_bytes(room, at, key_data, key_start, key_size)
        at = _put_bytes(room, at, value_data, value_start, value_size)
        at = _put_varint(room, at, headers + 1)
        for i in range(first_header, first_header + headers):
            at = _put_bytes(room, at, name_data, name_starts[i], name_sizes[i])
            at = _put_bytes(room, at, content_data, content_starts[i], content_sizes[i])
        _move(room, at, constant, np.int64(0), tail)

        if value_size > 0:
            crc = _crc(value_data, value_start, value_start + value_size, crc)
        slots[slot, AT] = at + tail
        slots[slot, COUNT] = number + 1
        slots[slot, ROWS] += 1
        slots[slot, CRC_SUM] += np.int64(crc ^ _U(0xFFFFFFFF))
        if number == 0:
            slots[slot, BASE_TIMESTAMP] = timestamp
            slots[slot, MAX_TIMESTAMP] = timestamp
        elif timestamp > slots[slot, MAX_TIMESTAMP]:
            slots[slot, MAX_TIMESTAMP] = timestamp
        sticky = next_sticky
        sticky_left = next_left
        row += 1
    walk[ROW] = row
    walk[STICKY] = sticky
    walk[STICKY_LEFT] = sticky_left
    return result


_I64 = types.int64
_NUMBERS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)

lay = compiled(
    types.int64(
        *(_NUMBERS, _NUMBERS, _BYTES),  # keys
        *(_NUMBERS, _NUMBERS, _BYTES),  # values
        *(_NUMBERS, _I64),  # timestamps
        *(_NUMBERS, _NUMBERS),  # headers: lists,
        *(_NUMBERS, _NUMBERS, _BYTES),  # their names
        *(_NUMBERS, _NUMBERS, _BYTES),  # and values
        _BYTES,
        *(_NUMBERS, _NUMBERS, _I64, _I64),  # places
        types.Array(types.uint8, 1, "C"),
        types.int64[:, ::1],
        types.int64[::1],
    ),
)(_lay)
