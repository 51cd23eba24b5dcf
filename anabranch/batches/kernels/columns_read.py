"""A compiled walk over a record batch's body that puts its records into columns.

Only `anabranch.batches.columns_read` imports it. Everything is checked against the body's bounds before it is read;
the caller has made room in the columns. Malformed data gives a negative result, never an exception. The oracle is
`anabranch.batches.records.decode_records`.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anabranch.batches.kernels.parts import (
    _BYTES_IN,
    _BYTES_OUT,
    _LONG,
    _LONGS,
    _MIN_RECORD,
    _U,
    MALFORMED_RESULT,
    NO_ROOM,
    _byte,
    _inline,
    _move,
    _varint,
    _varlong,
    compiled,
)
from anabranch.protocol.ids import TXN_ID_SIZE

# Counts in the state: rows and bytes that are filled.
ROWS, KEY_BYTES, VALUE_BYTES, HEADERS, NAME_BYTES, HEADER_BYTES = range(6)
# Counts of nulls: keys, values, transaction ids and headers' values. Then: whether a header's name is not ASCII.
NULL_KEYS, NULL_VALUES, NULL_TXNS, NULL_HEADERS, NOT_ASCII = range(6, 11)
STATE_SIZE = 11

# Rows of the 2-dimensional columns.
OFFSET, TIMESTAMP = range(2)  # rows of ``longs``
KEY, VALUE, TXN = range(3)  # rows of ``flags`` (1: there is one); KEY and VALUE also of ``ends``
HEADER_LIST = 2  # a row of ``ends``
HEADER_NAME, HEADER_VALUE = range(2)  # rows of ``header_ends``


@intrinsic
def _move16(context, target, target_at, source, source_at):
    """`_move` of 16 bytes, without a call."""

    def generate(context, builder, signature, arguments):
        into = context.make_array(signature.args[0])(context, builder, arguments[0])
        out_of = context.make_array(signature.args[2])(context, builder, arguments[2])
        wide = ir.IntType(128).as_pointer()
        place = builder.gep(out_of.data, [arguments[3]])
        loaded = builder.load(builder.bitcast(place, wide))
        loaded.align = 1
        place = builder.gep(into.data, [arguments[1]])
        stored = builder.store(loaded, builder.bitcast(place, wide))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at), generate


@_inline
def _is_ours(body, at, size):
    """Whether a header's name is ``ab.txn`` or ``ab.op``."""
    if size < 5 or size > 6:
        return False
    if _byte(body, at) != 97 or _byte(body, at + 1) != 98 or _byte(body, at + 2) != 46:
        return False
    if size == 5:
        return _byte(body, at + 3) == 111 and _byte(body, at + 4) == 112
    return _byte(body, at + 3) == 116 and _byte(body, at + 4) == 120 and _byte(body, at + 5) == 110


@_inline
def _is_txn(body, at, size):
    """Whether a header's name is ``ab.txn``, if `_is_ours` is true of that name."""
    return size == 6


def _columns(
    body,
    count,
    last_offset_delta,
    base_offset,
    base_timestamp,
    fixed,
    append_time,
    wanted,
    longs,
    ends,
    flags,
    keys,
    values,
    txns,
    header_ends,
    header_flags,
    names,
    header_values,
    state,
):
    """Append the records of a body whose offsets are wanted to the columns.

    ``wanted``: rising ranges of offsets, a row of firsts and a row of ends. ``fixed``: the timestamp of all, if
    ``append_time``. All columns except the headers' have room for ``count`` more rows, or for the body's bytes.
    Returns 0, or a negative result (then ``state`` is as it was).
    """
    end = np.int64(body.shape[0])
    if count < 0 or count > end // _MIN_RECORD:
        return MALFORMED_RESULT
    row = state[ROWS]
    key_at = state[KEY_BYTES]
    value_at = state[VALUE_BYTES]
    header = state[HEADERS]
    name_at = state[NAME_BYTES]
    header_at = state[HEADER_BYTES]
    null_keys = state[NULL_KEYS]
    null_values = state[NULL_VALUES]
    null_txns = state[NULL_TXNS]
    null_headers = state[NULL_HEADERS]
    high_bits = np.int64(0)
    headers_room = np.int64(header_flags.shape[0])
    ranges = np.int64(wanted.shape[1])
    place = np.int64(0)
    at = np.int64(0)
    last_delta = np.int64(-1)
    for _ in range(count):
        size, at = _varint(body, at, end)
        if at < 0 or size <= 0 or size > end - at:
            return MALFORMED_RESULT
        stop = at + size
        at += 1
        shift, at = _varlong(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        timestamp = base_timestamp + shift
        if ((base_timestamp ^ timestamp) & (shift ^ timestamp)) < 0:
            return MALFORMED_RESULT
        delta, at = _varint(body, at, stop)
        if at < 0 or delta <= last_delta or delta > last_offset_delta:
            return MALFORMED_RESULT
        last_delta = delta
        offset = base_offset + delta
        while place < ranges and wanted[1, _U(place)] <= offset:
            place += 1
        take = place < ranges and wanted[0, _U(place)] <= offset

        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        key_size = length
        key_from = at
        at += max(length, 0)
        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        value_size = length
        value_from = at
        at += max(length, 0)

        number, at = _varint(body, at, stop)
        if at < 0 or number < 0 or number > (stop - at) // 2:
            return MALFORMED_RESULT
        txn_at = np.int64(-1)
        for _ in range(number):
            length, at = _varint(body, at, stop)
            if at < 0 or length < 0 or length > stop - at:
                return MALFORMED_RESULT
            name_from = at
            name_size = length
            at += length
            length, at = _varint(body, at, stop)
            if at < 0 or length < -1 or length > stop - at:
                return MALFORMED_RESULT
            if _is_ours(body, name_from, name_size):
                if _is_txn(body, name_from, name_size) and length >= TXN_ID_SIZE:
                    txn_at = at
            elif take:
                if header == headers_room:
                    return NO_ROOM
                for i in range(name_size):
                    byte = body[_U(name_from + i)]
                    high_bits |= np.int64(byte)
                    names[_U(name_at + i)] = byte
                name_at += name_size
                if length >= 0:
                    _move(header_values, header_at, body, at, length)
                    header_at += length
                    header_flags[_U(header)] = 1
                else:
                    header_flags[_U(header)] = 0
                    null_headers += 1
                header += 1
                header_ends[HEADER_NAME, _U(header)] = name_at
                header_ends[HEADER_VALUE, _U(header)] = header_at
            at += max(length, 0)
        if at != stop:
            return MALFORMED_RESULT
        if not take:
            continue

        here = _U(row)
        longs[OFFSET, here] = offset
        longs[TIMESTAMP, here] = fixed if append_time else timestamp
        flags[KEY, here] = key_size >= 0
        flags[VALUE, here] = value_size >= 0
        flags[TXN, here] = txn_at >= 0
        if key_size > 0:
            _move(keys, key_at, body, key_from, key_size)
            key_at += key_size
        elif key_size < 0:
            null_keys += 1
        if value_size > 0:
            _move(values, value_at, body, value_from, value_size)
            value_at += value_size
        elif value_size < 0:
            null_values += 1
        if txn_at >= 0:
            _move16(txns, row * TXN_ID_SIZE, body, txn_at)
        else:
            for i in range(TXN_ID_SIZE):
                txns[_U(row * TXN_ID_SIZE + i)] = 0
            null_txns += 1
        row += 1
        here = _U(row)
        ends[KEY, here] = key_at
        ends[VALUE, here] = value_at
        ends[HEADER_LIST, here] = header
    if at != end:
        return MALFORMED_RESULT
    state[ROWS] = row
    state[KEY_BYTES] = key_at
    state[VALUE_BYTES] = value_at
    state[HEADERS] = header
    state[NAME_BYTES] = name_at
    state[HEADER_BYTES] = header_at
    state[NULL_KEYS] = null_keys
    state[NULL_VALUES] = null_values
    state[NULL_TXNS] = null_txns
    state[NULL_HEADERS] = null_headers
    state[NOT_ASCII] |= high_bits >> 7
    return 0


columns = compiled(
    _LONG(
        *(_BYTES_IN, _LONG, _LONG, _LONG, _LONG, _LONG, types.boolean, types.int64[:, ::1]),
        *(types.int64[:, ::1], types.int32[:, ::1], types.uint8[:, ::1]),  # longs, ends, flags
        *(_BYTES_OUT, _BYTES_OUT, _BYTES_OUT),  # keys, values, transaction ids
        *(types.int32[:, ::1], _BYTES_OUT, _BYTES_OUT, _BYTES_OUT),  # headers
        _LONGS,
    )
)(_columns)
