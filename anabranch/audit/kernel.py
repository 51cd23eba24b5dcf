"""Compiled code that turns big batches into columns, by docs/protocol.md and KIP-98 alone.

`anabranch.audit.log` does the same for small batches in plain Python; a test compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.batches.kernels.parts import compiled

Bytes = NDArray[np.uint8]
Longs = NDArray[np.int64]

MALFORMED = -1
# Rows of `walk`'s numbers, and of its ends and flags.
OFFSET, TIMESTAMP, KIND = range(3)
KEY, VALUE, HEADERS, TXN = range(4)
_WRITE, _PLAIN, _OP, _BAD = range(4)  # as `anabranch.audit.log` has them
_TXN_SIZE = 28
_VARINT_BYTES = 10
# Besides name and value, a header has at least two bytes in a batch, and nine in `walk`'s form.
HEADER_ROOM = 5


@compiled()
def _number(body: Bytes, at: int, end: int) -> tuple[int, int]:
    """(zigzag varint, the position after it); the position is MALFORMED if the number does not end."""
    value = np.uint64(0)
    for i in range(_VARINT_BYTES):
        if at + i >= end:
            return 0, MALFORMED
        byte = np.uint64(body[at + i])
        value |= (byte & np.uint64(0x7F)) << np.uint64(7 * i)
        if byte < np.uint64(0x80):
            return int(
                np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))
            ), at + i + 1
    return 0, MALFORMED


@compiled()
def _big_endian(out: Bytes, at: int, value: int, size: int) -> None:
    for i in range(size):
        out[at + i] = np.uint8((value >> (8 * (size - 1 - i))) & 0xFF)


@compiled()
def walk(
    body: Bytes,
    count: int,
    base_offset: int,
    base_timestamp: int,
    first: int,
    end: int,
    numbers: Longs,
    ends: Longs,
    flags: Bytes,
    keys: Bytes,
    values: Bytes,
    headers: Bytes,
    txns: Bytes,
) -> int:
    """Write the records with offsets in [first, end) to the arrays. Returns how many, or MALFORMED.

    ``numbers``: offset, timestamp and kind of each. ``ends``, ``flags``: for each key, value, headers and ab.txn,
    its end in ``keys``, ``values``, ``headers`` or ``txns``, and whether it is there.
    """
    at = 0
    row = 0
    size = len(body)
    used = np.zeros(4, dtype=np.int64)
    for _ in range(count):
        length, at = _number(body, at, size)
        if at < 0 or length < 0 or at + length > size:
            return MALFORMED
        stop = at + length
        stamp, at = _number(body, at + 1, stop)
        if at < 0:
            return MALFORMED
        delta, at = _number(body, at, stop)
        if at < 0:
            return MALFORMED
        key_size, at = _number(body, at, stop)
        if at < 0 or at + max(key_size, 0) > stop:
            return MALFORMED
        key_at = at
        at += max(key_size, 0)
        value_size, at = _number(body, at, stop)
        if at < 0 or at + max(value_size, 0) > stop:
            return MALFORMED
        value_at = at
        at += max(value_size, 0)
        many, at = _number(body, at, stop)
        if at < 0 or many < 0:
            return MALFORMED
        ours = ops = 0
        txn_at = txn_size = -1
        blob = used[HEADERS]
        for _header in range(many):
            name_size, at = _number(body, at, stop)
            if at < 0 or name_size < 0 or at + name_size > stop:
                return MALFORMED
            name_at = at
            at += name_size
            data_size, at = _number(body, at, stop)
            if at < 0 or at + max(data_size, 0) > stop:
                return MALFORMED
            data_at = at
            at += max(data_size, 0)
            # The name begins with ab.
            if name_size >= 3 and (
                body[name_at] == 97 and body[name_at + 1] == 98 and body[name_at + 2] == 46
            ):
                ours += 1
                # … and is ab.txn.
                if name_size == 6 and (
                    body[name_at + 3] == 116
                    and body[name_at + 4] == 120
                    and body[name_at + 5] == 110
                ):
                    txn_at, txn_size = data_at, max(data_size, 0)
                elif name_size == 5 and (body[name_at + 3] == 111 and body[name_at + 4] == 112):
                    ops += 1  # op
                continue
            _big_endian(headers, blob, name_size, 4)
            headers[blob + 4 : blob + 4 + name_size] = body[name_at : name_at + name_size]
            blob += 4 + name_size
            _big_endian(headers, blob, max(data_size, -1), 5)
            blob += 5
            if data_size > 0:
                headers[blob : blob + data_size] = body[data_at : data_at + data_size]
                blob += data_size
        if at != stop:
            return MALFORMED
        offset = base_offset + delta
        if offset < first or offset >= end:
            continue
        if ours == 0:
            kind = _PLAIN
        elif ours == 1 and ops == 1:
            kind = _OP
        elif ours == 1 and txn_size == _TXN_SIZE:
            kind = _WRITE
        else:
            kind = _BAD
        numbers[OFFSET, row] = offset
        numbers[TIMESTAMP, row] = base_timestamp + stamp
        numbers[KIND, row] = kind
        if key_size > 0:
            keys[used[KEY] : used[KEY] + key_size] = body[key_at : key_at + key_size]
            used[KEY] += key_size
        if value_size > 0:
            values[used[VALUE] : used[VALUE] + value_size] = body[value_at : value_at + value_size]
            used[VALUE] += value_size
        if txn_size > 0:
            txns[used[TXN] : used[TXN] + txn_size] = body[txn_at : txn_at + txn_size]
            used[TXN] += txn_size
        used[HEADERS] = blob
        flags[KEY, row] = key_size >= 0
        flags[VALUE, row] = value_size >= 0
        flags[HEADERS, row] = True
        flags[TXN, row] = txn_size >= 0
        row += 1
        for column in range(4):
            ends[column, row] = used[column]
    return row if at == size else MALFORMED


def room(count: int, size: int) -> tuple[Any, ...]:
    """The last arguments of `walk`, for ``count`` records of ``size`` bytes. Untouched pages cost nothing."""
    ends = np.empty((4, count + 1), dtype=np.int64)
    ends[:, 0] = 0
    return (
        np.empty((3, count), dtype=np.int64),
        ends,
        np.empty((4, count), dtype=np.uint8),
        np.empty(size, dtype=np.uint8),
        np.empty(size, dtype=np.uint8),
        np.empty(HEADER_ROOM * size, dtype=np.uint8),
        np.empty(size, dtype=np.uint8),
    )
