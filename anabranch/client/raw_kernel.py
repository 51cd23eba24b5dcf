"""Compiled code of bulk writers: hashes events, chooses their segments, and frames them as Kafka records.

Import it only through `anabranch.client.raw_encoding`: numba takes a second to load. The oracle in plain Python
is there: change both.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numba
import numpy as np
from numba import types

_U32 = np.uint32
_U64 = np.uint64
_BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_I32S_IN = types.Array(types.int32, 1, "C", readonly=True)
_I64S_IN = types.Array(types.int64, 1, "C", readonly=True)
_inline = numba.njit(inline="always", nogil=True)

# Columns of a slot's state.
NEXT_DELTA, BASE_TIMESTAMP, MAX_TIMESTAMP, EVENTS, CRC_SUM, BYTES, START = range(7)
COLUMNS = 7


def _crc_tables():
    """Slicing-by-8 tables of the CRC-32 of zlib (polynomial 0xEDB88320, reflected)."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        tables[0, byte] = crc
    for k in range(1, 8):
        for byte in range(256):
            before = int(tables[k - 1, byte])
            tables[k, byte] = before >> 8 ^ int(tables[0, before & 0xFF])
    return tables.reshape(-1)


_T = _crc_tables()


@_inline
def _crc(data, start, stop, crc):
    """Continue a CRC (kept inverted) over data[start:stop]."""
    i = _U64(start)
    end = _U64(stop)
    low = _U64(0xFF)
    crc = _U64(crc)
    while end - i >= _U64(8):
        a = crc ^ (
            _U64(data[i])
            | _U64(data[i + _U64(1)]) << _U64(8)
            | _U64(data[i + _U64(2)]) << _U64(16)
            | _U64(data[i + _U64(3)]) << _U64(24)
        )
        crc = _U64(
            _T[_U64(7 * 256) + (a & low)]
            ^ _T[_U64(6 * 256) + ((a >> _U64(8)) & low)]
            ^ _T[_U64(5 * 256) + ((a >> _U64(16)) & low)]
            ^ _T[_U64(4 * 256) + ((a >> _U64(24)) & low)]
            ^ _T[_U64(3 * 256) + _U64(data[i + _U64(4)])]
            ^ _T[_U64(2 * 256) + _U64(data[i + _U64(5)])]
            ^ _T[_U64(1 * 256) + _U64(data[i + _U64(6)])]
            ^ _T[_U64(data[i + _U64(7)])]
        )
        i += _U64(8)
    while i < end:
        crc = _U64(_T[(crc ^ _U64(data[i])) & low]) ^ (crc >> _U64(8))
        i += _U64(1)
    return crc


@_inline
def _mix(crc):
    h = _U32(crc)
    h = _U32(h ^ (h >> _U32(16)))
    h = _U32(h * _U32(0x85EBCA6B))
    h = _U32(h ^ (h >> _U32(13)))
    h = _U32(h * _U32(0xC2B2AE35))
    return np.int64(_U32(h ^ (h >> _U32(16))))


@_inline
def _varint_size(value):
    raw = _U64((value << 1) ^ (value >> 63))
    size = 1
    while raw >= _U64(0x80):
        raw >>= _U64(7)
        size += 1
    return size


@_inline
def _put_varint(out, at, value):
    raw = _U64((value << 1) ^ (value >> 63))
    while raw >= _U64(0x80):
        out[at] = np.uint8(raw & _U64(0x7F)) | np.uint8(0x80)
        raw >>= _U64(7)
        at += 1
    out[at] = np.uint8(raw)
    return at + 1


@_inline
def _size_of(stamp, delta, key_size, value_size, head_size):
    """Bytes of a record after its own length."""
    size = 1 + _varint_size(stamp) + _varint_size(delta) + head_size
    size += _varint_size(np.int64(key_size)) + max(key_size, 0)
    return size + _varint_size(np.int64(value_size)) + max(value_size, 0)


def _encode(
    keys,
    key_sizes,
    values,
    value_sizes,
    heads,
    head_sizes,
    stamps,
    lows,
    slots,
    keyless,
    state,
    where,
    out,
):
    """Append events to the open batches of their slots.

    keys, values: all bytes in a row, with sizes (-1: null). heads: the encoded headers, one for all if
    head_sizes is empty. lows, slots: lower bound and slot of each key range. keyless: the slot of events without
    a key. state: a row a slot, brought forward; BYTES and START say where a slot's new records stand in out.
    where: room for a number an event. Returns the bytes written, or -1 if out is too small.
    """
    count = key_sizes.shape[0]
    state[:, BYTES] = 0
    key_at = 0
    value_at = 0
    shared = head_sizes.shape[0] == 0
    for i in range(count):
        slot = keyless
        crc = _U64(0xFFFFFFFF)
        key_size = np.int64(key_sizes[i])
        value_size = np.int64(value_sizes[i])
        if key_size >= 0:
            crc = _crc(keys, key_at, key_at + key_size, crc)
            position = _mix(crc ^ _U64(0xFFFFFFFF))
            key_at += key_size
            low = 0
            high = lows.shape[0]
            while high - low > 1:
                middle = (low + high) >> 1
                if lows[middle] <= position:
                    low = middle
                else:
                    high = middle
            slot = slots[low]
        if value_size > 0:
            crc = _crc(values, value_at, value_at + value_size, crc)
            value_at += value_size
        where[i] = slot
        stamp = stamps[i]
        delta = state[slot, NEXT_DELTA]
        if delta == 0:
            state[slot, BASE_TIMESTAMP] = stamp
            state[slot, MAX_TIMESTAMP] = stamp
        elif stamp > state[slot, MAX_TIMESTAMP]:
            state[slot, MAX_TIMESTAMP] = stamp
        head_size = heads.shape[0] if shared else np.int64(head_sizes[i])
        size = _size_of(stamp - state[slot, BASE_TIMESTAMP], delta, key_size, value_size, head_size)
        state[slot, BYTES] += size + _varint_size(np.int64(size))
        state[slot, NEXT_DELTA] = delta + 1
        state[slot, EVENTS] += 1
        state[slot, CRC_SUM] = (state[slot, CRC_SUM] + np.int64(crc ^ _U64(0xFFFFFFFF))) & np.int64(
            0x7FFFFFFFFFFFFFFF
        )

    total = np.int64(0)
    for slot in range(state.shape[0]):
        state[slot, START] = total
        total += state[slot, BYTES]
    if total > out.shape[0]:
        return np.int64(-1)
    cursors = state[:, START].copy()
    deltas = state[:, NEXT_DELTA].copy()
    for i in range(count):
        deltas[where[i]] -= 1
    key_at = 0
    value_at = 0
    head_at = 0
    for i in range(count):
        slot = where[i]
        at = cursors[slot]
        delta = deltas[slot]
        deltas[slot] = delta + 1
        key_size = np.int64(key_sizes[i])
        value_size = np.int64(value_sizes[i])
        head_size = heads.shape[0] if shared else np.int64(head_sizes[i])
        stamp = stamps[i] - state[slot, BASE_TIMESTAMP]
        size = _size_of(stamp, delta, key_size, value_size, head_size)
        at = _put_varint(out, at, np.int64(size))
        out[at] = 0
        at = _put_varint(out, at + 1, stamp)
        at = _put_varint(out, at, delta)
        at = _put_varint(out, at, key_size)
        for j in range(max(key_size, 0)):
            out[_U64(at + j)] = keys[_U64(key_at + j)]
        at += max(key_size, 0)
        key_at += max(key_size, 0)
        at = _put_varint(out, at, value_size)
        for j in range(max(value_size, 0)):
            out[_U64(at + j)] = values[_U64(value_at + j)]
        at += max(value_size, 0)
        value_at += max(value_size, 0)
        start = 0 if shared else head_at
        for j in range(head_size):
            out[_U64(at + j)] = heads[_U64(start + j)]
        at += head_size
        head_at += head_size
        cursors[slot] = at
    return total


# Compiled at import, from the cache if there.
encode = numba.njit(
    types.int64(
        _BYTES_IN,
        _I32S_IN,
        _BYTES_IN,
        _I32S_IN,
        _BYTES_IN,
        _I32S_IN,
        _I64S_IN,
        _I64S_IN,
        _I64S_IN,
        types.int64,
        types.int64[:, ::1],
        types.int64[::1],
        _BYTES_OUT,
    ),
    cache=True,
    nogil=True,
)(_encode)
