"""Compiled walks over a record batch's body: cutting it into runs, and copying runs into a new one.

Import it only through `anabranch.topics.framing`: numba takes a second to load. Everything is checked
against the body's bounds before it is read; what does not fit gives a negative result, never an
exception. The oracle in plain Python is `anabranch.topics.framing_oracle`: change both.

One file, though a long one: numba's cache does not see changes in others.
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Columns of a run's row. Positions are -1 where no record has a key; TXN_AT is where the 28 bytes of the
# ab.txn header stand in the body, -1 if there is none.
FIRST, LAST, COUNT, CHECKSUM, TXN_AT, LOW, HIGH, KEYLESS, BYTES, KIND = range(10)
COLUMNS = 10
# Without sums, CHECKSUM, LOW and HIGH mean nothing, and the walk takes half the time.

# Kinds; the order of the BAD ones is the order in which they are looked for.
WRITE, PLAIN, OP, MALFORMED, DOUBLE_TXN, TXN_AND_OP, DOUBLE_OP, TXN_LENGTH, RESERVED, NO_TEXT = (
    range(10)
)

MALFORMED_RESULT = -1
NO_ROOM = -2

_TXN_SIZE = 28
_MIN_RECORD = 7
_MAX_I32 = (1 << 31) - 1
_CHECKSUM_MASK = (1 << 63) - 1


def _crc_tables() -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """Slicing-by-16 tables of the CRC-32 of zlib (polynomial 0xEDB88320, reflected)."""
    tables = np.zeros((16, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        tables[0, byte] = crc
    for k in range(1, 16):
        for byte in range(256):
            before = int(tables[k - 1, byte])
            tables[k, byte] = before >> 8 ^ int(tables[0, before & 0xFF])
    return tables


_T = _crc_tables().reshape(-1)
_U = np.uint64
_inline = numba.njit(inline="always", nogil=True)
_BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")


@intrinsic
def _load64(context, array, index):
    """Eight bytes at any address as a little-endian number (of a little-endian machine)."""

    def generate(context, builder, signature, arguments):
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(made.data, [arguments[1]])
        loaded = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(array, index), generate


@intrinsic
def _move(context, target, target_at, source, source_at, size):
    """memcpy between two byte arrays; the caller has checked the bounds."""

    def generate(context, builder, signature, arguments):
        into = context.make_array(signature.args[0])(context, builder, arguments[0])
        out_of = context.make_array(signature.args[2])(context, builder, arguments[2])
        cgutils.raw_memcpy(
            builder,
            builder.gep(into.data, [arguments[1]]),
            builder.gep(out_of.data, [arguments[3]]),
            arguments[4],
            1,
        )
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at, size), generate


@_inline
def _byte(body, at):
    # An unsigned index saves numba's handling of negative ones.
    return np.int64(body[_U(at)])


@_inline
def _crc(body, start, stop, crc):
    i = _U(start)
    end = _U(stop)
    low = _U(0xFF)
    while end - i >= _U(16):
        a = _load64(body, i) ^ crc
        b = _load64(body, i + _U(8))
        crc = _U(
            _T[_U(15 * 256) + (a & low)]
            ^ _T[_U(14 * 256) + ((a >> _U(8)) & low)]
            ^ _T[_U(13 * 256) + ((a >> _U(16)) & low)]
            ^ _T[_U(12 * 256) + ((a >> _U(24)) & low)]
            ^ _T[_U(11 * 256) + ((a >> _U(32)) & low)]
            ^ _T[_U(10 * 256) + ((a >> _U(40)) & low)]
            ^ _T[_U(9 * 256) + ((a >> _U(48)) & low)]
            ^ _T[_U(8 * 256) + (a >> _U(56))]
            ^ _T[_U(7 * 256) + (b & low)]
            ^ _T[_U(6 * 256) + ((b >> _U(8)) & low)]
            ^ _T[_U(5 * 256) + ((b >> _U(16)) & low)]
            ^ _T[_U(4 * 256) + ((b >> _U(24)) & low)]
            ^ _T[_U(3 * 256) + ((b >> _U(32)) & low)]
            ^ _T[_U(2 * 256) + ((b >> _U(40)) & low)]
            ^ _T[_U(1 * 256) + ((b >> _U(48)) & low)]
            ^ _T[b >> _U(56)]
        )
        i += _U(16)
    if end - i >= _U(8):
        a = _load64(body, i) ^ crc
        crc = _U(
            _T[_U(7 * 256) + (a & low)]
            ^ _T[_U(6 * 256) + ((a >> _U(8)) & low)]
            ^ _T[_U(5 * 256) + ((a >> _U(16)) & low)]
            ^ _T[_U(4 * 256) + ((a >> _U(24)) & low)]
            ^ _T[_U(3 * 256) + ((a >> _U(32)) & low)]
            ^ _T[_U(2 * 256) + ((a >> _U(40)) & low)]
            ^ _T[_U(1 * 256) + ((a >> _U(48)) & low)]
            ^ _T[a >> _U(56)]
        )
        i += _U(8)
    while i < end:
        crc = _U(_T[(crc ^ _U(body[i])) & low]) ^ (crc >> _U(8))
        i += _U(1)
    return crc


@_inline
def _position(crc):
    """The position of a key, of the CRC's running value."""
    mixed = np.uint32(crc ^ _U(0xFFFFFFFF))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    mixed = np.uint32(mixed * np.uint32(0x85EBCA6B))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(13)))
    mixed = np.uint32(mixed * np.uint32(0xC2B2AE35))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    return np.int64(mixed)


@_inline
def _varint(body, at, end):
    """(value, next) of a zigzag varint of 32 bits; next is -1 if it is none."""
    if at < end and _byte(body, at) < 0x80:
        raw = _byte(body, at)
        return (raw >> 1) ^ -(raw & 1), at + 1
    if at + 1 < end and _byte(body, at + 1) < 0x80:
        raw = (_byte(body, at) & 0x7F) | _byte(body, at + 1) << 7
        return (raw >> 1) ^ -(raw & 1), at + 2
    raw = np.int64(0)
    shift = 0
    while shift < 35:
        if at >= end:
            return np.int64(0), np.int64(-1)
        byte = _byte(body, at)
        at += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            if raw >> 32 != 0:
                return np.int64(0), np.int64(-1)
            return (raw >> 1) ^ -(raw & 1), at
        shift += 7
    return np.int64(0), np.int64(-1)


@_inline
def _varlong(body, at, end):
    """(value, next) of a zigzag varint of 64 bits; next is -1 if it is none."""
    if at < end and _byte(body, at) < 0x80:
        raw = _byte(body, at)
        return (raw >> 1) ^ -(raw & 1), at + 1
    if at + 1 < end and _byte(body, at + 1) < 0x80:
        raw = (_byte(body, at) & 0x7F) | _byte(body, at + 1) << 7
        return (raw >> 1) ^ -(raw & 1), at + 2
    bits = np.uint64(0)
    shift = 0
    while shift < 70:
        if at >= end:
            return np.int64(0), np.int64(-1)
        byte = np.uint64(body[_U(at)])
        at += 1
        if shift == 63 and byte > 1:
            return np.int64(0), np.int64(-1)
        bits |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        if byte < 0x80:
            half = np.int64(bits >> np.uint64(1))
            if bits & np.uint64(1):
                return ~half, at
            return half, at
        shift += 7
    return np.int64(0), np.int64(-1)


@numba.njit(nogil=True)
def _is_utf8(body, at, last):
    """Whether bytes are UTF-8, as Python and the standard have it: nothing overlong, no surrogates."""
    while at < last:
        byte = _byte(body, at)
        at += 1
        if byte < 0x80:
            continue
        if byte < 0xC2 or byte > 0xF4:
            return False
        more = 1
        low = 0x80
        high = 0xBF
        if byte >= 0xF0:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        elif byte >= 0xE0:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        if last - at < more:
            return False
        for _ in range(more):
            byte = _byte(body, at)
            if byte < low or byte > high:
                return False
            low = 0x80
            high = 0xBF
            at += 1
    return True


@_inline
def _is_text(body, at, last):
    """`_is_utf8`, quick where all is ASCII."""
    high = np.int64(0)
    for i in range(at, last):
        high |= _byte(body, i)
    return high < 0x80 or _is_utf8(body, at, last)


@_inline
def _is_name(body, at, last):
    """What a header of six bytes is: 1 ab.txn; five: 2 ab.op; else starting with ab.: 3; 0 not ours."""
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


def _scan(body, count, last_offset_delta, base_timestamp, sums, rows):
    end = np.int64(body.shape[0])
    if count < 0 or count > end // _MIN_RECORD:
        return MALFORMED_RESULT
    at = np.int64(0)
    runs = 0
    last_delta = np.int64(-1)
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
        crc = _U(0xFFFFFFFF)
        position = np.int64(-1)
        if keyed and not sums:
            at += length
        elif keyed:
            crc = _crc(body, at, at + length, crc)
            at += length
            position = _position(crc)
        length, at = _varint(body, at, stop)
        if at < 0 or length < -1 or length > stop - at:
            return MALFORMED_RESULT
        if length > 0:
            if sums:
                crc = _crc(body, at, at + length, crc)
            at += length
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
        if at != stop:
            return MALFORMED_RESULT

        if txns > 1:
            kind = DOUBLE_TXN
        elif txns and ops:
            kind = TXN_AND_OP
        elif ops > 1:
            kind = DOUBLE_OP
        elif txns and txn_size != _TXN_SIZE:
            kind = TXN_LENGTH
        elif others:
            kind = RESERVED
        elif no_text:
            kind = NO_TEXT
        elif txns:
            kind = WRITE
        elif ops:
            kind = OP
        else:
            kind = PLAIN
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
            runs += 1
        run = runs - 1
        rows[run, LAST] = delta
        rows[run, COUNT] += 1
        rows[run, CHECKSUM] = (rows[run, CHECKSUM] + checksum) & _CHECKSUM_MASK
        rows[run, BYTES] += stop - start
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


# What every record of a batch ends in that was written without headers of the user's: one header, ab.txn,
# 28 bytes.
_TAIL_SIZE = 9 + _TXN_SIZE


def _same_txn(body, count, base_timestamp):
    """Where the ab.txn value stands that all records have, if ab.txn is their only header; else -1.

    Looks at the framing of each record as `_scan` does, without gaps in the offsets; -1 says nothing
    about the batch but that `_scan` has to be asked.
    """
    end = np.int64(body.shape[0])
    if count < 1 or count > end // _MIN_RECORD:
        return np.int64(-1)
    at = np.int64(0)
    a = _U(0)
    b = _U(0)
    c = _U(0)
    d = _U(0)
    e = _U(0)
    for number in range(count):
        size, at = _varint(body, at, end)
        if at < 0 or size <= _TAIL_SIZE or size > end - at:
            return np.int64(-1)
        tail = at + size - _TAIL_SIZE
        at += 1
        timestamp, at = _varlong(body, at, tail)
        if at < 0:
            return np.int64(-1)
        absolute = base_timestamp + timestamp
        if ((base_timestamp ^ absolute) & (timestamp ^ absolute)) < 0:
            return np.int64(-1)
        delta, at = _varint(body, at, tail)
        if at < 0 or delta != number:
            return np.int64(-1)
        length, at = _varint(body, at, tail)
        if at < 0 or length < -1 or length > tail - at:
            return np.int64(-1)
        at += max(length, 0)
        length, at = _varint(body, at, tail)
        if at < 0 or length < -1 or at + max(length, 0) != tail:
            return np.int64(-1)
        at = tail + _TAIL_SIZE
        if number == 0:
            if (
                _byte(body, tail) != 2  # one header,
                or _byte(body, tail + 1) != 12  # whose name has 6 bytes
                or _is_name(body, tail + 2, tail + 8) != 1
                or _byte(body, tail + 8) != 2 * _TXN_SIZE
            ):
                return np.int64(-1)
            a = _load64(body, _U(tail))
            b = _load64(body, _U(tail + 8))
            c = _load64(body, _U(tail + 16))
            d = _load64(body, _U(tail + 24))
            e = _load64(body, _U(tail + _TAIL_SIZE - 8))
        elif (
            (_load64(body, _U(tail)) ^ a)
            | (_load64(body, _U(tail + 8)) ^ b)
            | (_load64(body, _U(tail + 16)) ^ c)
            | (_load64(body, _U(tail + 24)) ^ d)
            | (_load64(body, _U(tail + _TAIL_SIZE - 8)) ^ e)
        ) != _U(0):
            return np.int64(-1)
    if at != end:
        return np.int64(-1)
    return end - _TXN_SIZE


@_inline
def _put_varint(out, at, value):
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    while raw > np.uint64(0x7F):
        out[at] = np.uint8((raw & np.uint64(0x7F)) | np.uint64(0x80))
        at += 1
        raw >>= np.uint64(7)
    out[at] = np.uint8(raw)
    return at + 1


@_inline
def _varint_size(value):
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    size = 1
    while raw > np.uint64(0x7F):
        size += 1
        raw >>= np.uint64(7)
    return size


# Of a copy's state, an array: where to go on in the source, in the target, the next offset delta, the
# number of records copied, the base and the highest timestamp of the target.
SOURCE_AT, TARGET_AT, NEXT_DELTA, COPIED, BASE_TIMESTAMP, MAX_TIMESTAMP = range(6)
STATE_SIZE = 6


def _copy(body, first_delta, last_delta, base_timestamp, fixed, append_time, out, state):
    """Copy the records with these offset deltas; ``fixed`` is their timestamp if ``append_time``.

    From ``state`` on, which is brought forward; a fresh batch has NEXT_DELTA 0 and takes its base
    timestamp from the first record. Returns 0, or a negative result (then ``state`` is as it was).
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
    """Where each record stands, its offset delta, and the place of its key.

    ``lows``: rising, the first 0: where key ranges begin; ``places_of``: the place of each of them;
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
    """Copy the records of one place, up to record number ``stop_at``, as far as they fit into ``out``.

    As `_copy`, but SOURCE_AT counts records, and where there is no room it stops before the record.
    ``starts`` and ``places`` are as `_place` left them.
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


# Compiled at import, from the cache if there: callers never wait in mid-round.
scan = numba.njit(
    types.int64(
        _BYTES_IN, types.int64, types.int64, types.int64, types.boolean, types.int64[:, ::1]
    ),
    cache=True,
    nogil=True,
)(_scan)
same_txn = numba.njit(
    types.int64(_BYTES_IN, types.int64, types.int64),
    cache=True,
    nogil=True,
)(_same_txn)
copy = numba.njit(
    types.int64(
        _BYTES_IN,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.boolean,
        _BYTES_OUT,
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
)(_copy)
place = numba.njit(
    types.int64(
        _BYTES_IN,
        types.int64,
        types.int64[::1],
        types.int64[::1],
        types.int64,
        types.int64[::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
)(_place)
copy_placed = numba.njit(
    types.int64(
        _BYTES_IN,
        types.int64[::1],
        types.int64[::1],
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.boolean,
        _BYTES_OUT,
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
)(_copy_placed)
