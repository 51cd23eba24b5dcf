"""Compiled walks over a record batch's body that divide it into runs.

Only `anabranch.batches.framing` imports it. Everything is checked against the body's bounds before it is read.
Malformed data gives a negative result, never an exception. The oracle, `anabranch.batches.framing_plain`, is the
same walk in plain Python: change both.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from numba import types

from anabranch.batches.kernels.parts import (
    _BYTES_IN,
    _LONG,
    _LONGS,
    _MIN_RECORD,
    _U,
    MALFORMED_RESULT,
    NO_ROOM,
    _byte,
    _crc,
    _crc32c,
    _inline,
    _is_text,
    _load64,
    _position,
    _varint,
    _varlong,
    compiled,
)
from anabranch.protocol.ids import TXN_HEADER_SIZE
from anabranch.protocol.limits import HEADERS, NO_TIME, ROW_KEY

# Columns of a run's row. Positions are -1 if no record has a key. TXN_AT is the place of the ab.txn
# header's 28 bytes in the body, -1 without one. EARLIEST, LATEST: times of records, Unix milliseconds.
FIRST, LAST, COUNT, CHECKSUM, TXN_AT, LOW, HIGH, KEYLESS, BYTES, KIND, EARLIEST, LATEST = range(12)
COLUMNS = 12
MOST_KEY = ROW_KEY.value
MOST_HEADERS = HEADERS.value  # besides ab.txn
# Rows of `keys`, of each keyed record: fingerprint (`anabranch.core.locks.table_writes`) and place in the body.
POINT, KEY_AT, KEY_SIZE = range(3)
# The stream's rules: the most bytes of an event, whether the stream is a table, the latest time of a plain record.
MOST, IS_TABLE, LATEST_PLAIN = range(3)
# Columns of `bounds`: the places in the body of a run's least and greatest key, in byte order.
LEAST_AT, LEAST_SIZE, GREATEST_AT, GREATEST_SIZE = range(4)

# Kinds, in the order in which bad ones are found.
WRITE, PLAIN, OP, MALFORMED, DOUBLE_TXN, TXN_AND_OP, DOUBLE_OP, TXN_LENGTH, RESERVED, NO_TEXT = (
    range(10)
)
BAD_KEY, BAD_TIME, TOO_LARGE = range(10, 13)

_CHECKSUM_MASK = (1 << 63) - 1


@_inline
def _is_name(body, at, last):
    """The kind of a header, by its name: 1 ab.txn, 2 ab.op, 3 another one that starts with ab., 0 any other."""
    size = last - at
    if size < 3:
        return 0
    if _byte(body, at) != 97 or _byte(body, at + 1) != 98 or _byte(body, at + 2) != 46:
        return 0
    if (
        size == 6
        and _byte(body, at + 3) == 116
        and _byte(body, at + 4) == 120
        and _byte(body, at + 5) == 110
    ):
        return 1
    if size == 5 and _byte(body, at + 3) == 111 and _byte(body, at + 4) == 112:
        return 2
    return 3


@_inline
def _ordered(word):
    """Eight bytes as a number that compares as they do in byte order."""
    word = (word & _U(0x00FF00FF00FF00FF)) << _U(8) | (word >> _U(8)) & _U(0x00FF00FF00FF00FF)
    word = (word & _U(0x0000FFFF0000FFFF)) << _U(16) | (word >> _U(16)) & _U(0x0000FFFF0000FFFF)
    return word << _U(32) | word >> _U(32)


@_inline
def _is_less(body, left, left_size, right, right_size):
    """Whether one key comes before the other, in byte order."""
    both = min(left_size, right_size)
    i = np.int64(0)
    while both - i >= 8:
        one, other = _load64(body, _U(left + i)), _load64(body, _U(right + i))
        if one != other:
            return _ordered(one) < _ordered(other)
        i += 8
    while i < both:
        one_byte, other_byte = _byte(body, left + i), _byte(body, right + i)
        if one_byte != other_byte:
            return one_byte < other_byte
        i += 1
    return left_size < right_size


def _scan(body, count, last_offset_delta, base_timestamp, rules, rows, keys, bounds):
    """Fill ``rows`` with the runs of a body; returns their number, or a negative result.

    ``keys``, ``bounds``: filled if ``keys`` has room, which then has to suffice for all keys.
    """
    most, is_table, latest_plain = rules[MOST], rules[IS_TABLE] != 0, rules[LATEST_PLAIN]
    end = np.int64(body.shape[0])
    if count < 0 or count > end // _MIN_RECORD:
        return MALFORMED_RESULT
    at = np.int64(0)
    runs = 0
    last_delta = np.int64(-1)
    wanted = keys.shape[1] > 0
    found = np.int64(0)
    least = least_size = greatest = greatest_size = np.int64(0)
    for _ in range(count):
        start = at
        size, at = _varint(body, at, end)
        if at < 0 or size < 0 or size > end - at or size == 0:
            return MALFORMED_RESULT
        stop = at + size
        at += 1
        timestamp, at = _varlong(body, at, stop)
        if at < 0:
            return MALFORMED_RESULT
        absolute = base_timestamp + timestamp
        if ((base_timestamp ^ absolute) & (timestamp ^ absolute)) < 0:
            return MALFORMED_RESULT
        delta, at = _varint(body, at, stop)
        if at < 0 or delta <= last_delta or delta > last_offset_delta:
            return MALFORMED_RESULT
        last_delta = delta

        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        keyed = length >= 0
        bad_key = is_table and (length < 1 or length > MOST_KEY)
        event = max(length, 0)
        key, key_size = at, length
        crc = _U(0xFFFFFFFF)
        position = np.int64(-1)
        if keyed:
            crc = _crc(body, at, at + length, crc)
            position = _position(crc)
            at += length
        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        if length > 0:
            crc = _crc(body, at, at + length, crc)
            at += length
            event += length
        checksum = np.int64(crc ^ _U(0xFFFFFFFF))

        headers, at = _varint(body, at, stop)
        if at < 0 or headers < 0 or headers > (stop - at) // 2:
            return MALFORMED_RESULT
        txns = 0
        ops = 0
        others = 0
        no_text = 0
        txn_at = np.int64(-1)
        txn_size = np.int64(-1)
        for _ in range(headers):
            length, at = _varint(body, at, stop)
            if at < 0 or length < 0 or length > stop - at:
                return MALFORMED_RESULT
            name = _is_name(body, at, at + length)
            if name == 0 and not _is_text(body, at, at + length):
                no_text += 1
            if name != 1:
                event += length
            at += length
            length, at = _varint(body, at, stop)
            if at < 0 or length < -1 or length > stop - at:
                return MALFORMED_RESULT
            if name == 1:
                txns += 1
                txn_at = at
                txn_size = length
            elif name == 2:
                ops += 1
            elif name == 3:
                others += 1
            if length > 0:
                at += length
                if name != 1:
                    event += length
        if at != stop:
            return MALFORMED_RESULT

        if txns > 1:
            kind = DOUBLE_TXN
        elif txns and ops:
            kind = TXN_AND_OP
        elif ops > 1:
            kind = DOUBLE_OP
        elif txns and txn_size != TXN_HEADER_SIZE:
            kind = TXN_LENGTH
        elif others or headers - txns > MOST_HEADERS:
            kind = RESERVED
        elif no_text:
            kind = NO_TEXT
        elif txns:
            kind = WRITE
        elif ops:
            kind = OP
        else:
            kind = PLAIN
        if kind <= PLAIN:
            if bad_key:
                kind = BAD_KEY
            elif kind == PLAIN and (absolute < NO_TIME or absolute > latest_plain):
                kind = BAD_TIME
            elif event > most:
                kind = TOO_LARGE
        if kind != WRITE:
            txn_at = np.int64(-1)

        same = runs > 0 and rows[runs - 1, KIND] == kind
        if same and kind == WRITE:
            before = rows[runs - 1, TXN_AT]
            same = (
                _load64(body, _U(before)) == _load64(body, _U(txn_at))
                and _load64(body, _U(before + 8)) == _load64(body, _U(txn_at + 8))
                and _load64(body, _U(before + 16)) == _load64(body, _U(txn_at + 16))
                and _load64(body, _U(before + 20)) == _load64(body, _U(txn_at + 20))
            )
        if not same:
            if runs == rows.shape[0]:
                return NO_ROOM
            rows[runs, FIRST] = delta
            rows[runs, COUNT] = 0
            rows[runs, CHECKSUM] = 0
            rows[runs, TXN_AT] = txn_at
            rows[runs, LOW] = -1
            rows[runs, HIGH] = -1
            rows[runs, KEYLESS] = 0
            rows[runs, BYTES] = 0
            rows[runs, KIND] = kind
            rows[runs, EARLIEST] = absolute
            rows[runs, LATEST] = absolute
            runs += 1
        run = runs - 1
        rows[run, LAST] = delta
        rows[run, COUNT] += 1
        rows[run, CHECKSUM] = (rows[run, CHECKSUM] + checksum) & _CHECKSUM_MASK
        rows[run, BYTES] += stop - start
        if absolute < rows[run, EARLIEST]:
            rows[run, EARLIEST] = absolute
        elif absolute > rows[run, LATEST]:
            rows[run, LATEST] = absolute
        if keyed and wanted:
            if rows[run, LOW] < 0:
                least, least_size, greatest, greatest_size = key, key_size, key, key_size
            elif _is_less(body, key, key_size, least, least_size):
                least, least_size = key, key_size
            elif _is_less(body, greatest, greatest_size, key, key_size):
                greatest, greatest_size = key, key_size
            bounds[run, LEAST_AT] = least
            bounds[run, LEAST_SIZE] = least_size
            bounds[run, GREATEST_AT] = greatest
            bounds[run, GREATEST_SIZE] = greatest_size
            other = _crc32c(body, key, key + key_size, _U(0xFFFFFFFF)) ^ _U(0xFFFFFFFF)
            keys[POINT, _U(found)] = np.int64(_U(position) << _U(32) | other)
            keys[KEY_AT, _U(found)] = key
            keys[KEY_SIZE, _U(found)] = key_size
            found += 1
        if keyed:
            if rows[run, LOW] < 0 or position < rows[run, LOW]:
                rows[run, LOW] = position
            if position > rows[run, HIGH]:
                rows[run, HIGH] = position
        else:
            rows[run, KEYLESS] += 1
    if at != end:
        return MALFORMED_RESULT
    return runs


_GRID = types.int64[:, ::1]
scan = compiled(_LONG(_BYTES_IN, _LONG, _LONG, _LONG, _LONGS, _GRID, _GRID, _GRID))(_scan)
