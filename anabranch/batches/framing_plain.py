"""The walk of `anabranch.batches.kernels.scan` in plain Python, for small batches while the kernels are not loaded.

Tests compare the compiled walk with it: change both.
"""

from __future__ import annotations

from zlib import crc32

from anabranch.batches.format import Buffer
from anabranch.batches.records import MIN_RECORD_BYTES, Reader
from anabranch.ports import CorruptBatch
from anabranch.protocol.ids import OP_HEADER, TXN_HEADER, TXN_HEADER_SIZE
from anabranch.protocol.limits import HEADERS, NO_TIME, ROW_KEY, Room
from anabranch.protocol.partitioner import mix

_TXN = TXN_HEADER.encode()
_OP = OP_HEADER.encode()
_RESERVED_PREFIX = b"ab."
_CHECKSUM_MASK = (1 << 63) - 1
_I64 = 1 << 63
MOST_KEY = ROW_KEY.value
MOST_HEADERS = HEADERS.value  # besides ab.txn

WRITE, PLAIN, OP, MALFORMED, DOUBLE_TXN, TXN_AND_OP, DOUBLE_OP, TXN_LENGTH, RESERVED, NO_TEXT = (
    range(10)
)
BAD_KEY, BAD_TIME, TOO_LARGE = range(10, 13)


def scan(
    body: Buffer, count: int, last_offset_delta: int, base_timestamp: int, rules: Room
) -> list[list[int]] | None:
    """Rows of runs, in the columns of the compiled walk; None for a malformed body."""
    try:
        return _scan(bytes(body), count, last_offset_delta, base_timestamp, rules)
    except CorruptBatch:
        return None


def _scan(
    body: bytes, count: int, last_offset_delta: int, base_timestamp: int, rules: Room
) -> list[list[int]]:
    if not 0 <= count <= len(body) // MIN_RECORD_BYTES:
        raise CorruptBatch(f"{count} records don't fit into {len(body)} bytes")
    reader = Reader(body)
    rows: list[list[int]] = []
    txn_before = b""
    last_delta = -1
    for _ in range(count):
        start = reader.at
        reader.enter_record()
        time = base_timestamp + reader.varlong()
        if not -_I64 <= time < _I64:
            raise CorruptBatch("a timestamp of more than 64 bits")
        delta = reader.varint()
        if not last_delta < delta <= last_offset_delta:
            raise CorruptBatch(f"offset delta {delta} after {last_delta}")
        last_delta = delta
        key = reader.nullable()
        value = reader.nullable()
        key_crc = crc32(key or b"")
        checksum = crc32(value or b"", key_crc)
        position = -1 if key is None else mix(key_crc)
        kind, txn_at, header_bytes = _kind(reader)
        reader.leave_record()
        if kind <= PLAIN:
            if rules.is_table and not 0 < len(key or b"") <= MOST_KEY:
                kind, txn_at = BAD_KEY, -1
            elif kind == PLAIN and not NO_TIME <= time <= rules.latest:
                kind = BAD_TIME
            elif len(key or b"") + len(value or b"") + header_bytes > (rules.most or 0):
                kind, txn_at = TOO_LARGE, -1

        txn = body[txn_at : txn_at + TXN_HEADER_SIZE] if txn_at >= 0 else b""
        if not rows or rows[-1][9] != kind or txn != txn_before:
            rows.append([delta, delta, 0, 0, txn_at, -1, -1, 0, 0, kind, time, time])
            txn_before = txn
        row = rows[-1]
        row[1] = delta
        row[2] += 1
        row[3] = (row[3] + checksum) & _CHECKSUM_MASK
        if key is None:
            row[7] += 1
        else:
            row[5] = position if row[5] < 0 else min(row[5], position)
            row[6] = max(row[6], position)
        row[8] += reader.at - start
        row[10], row[11] = min(row[10], time), max(row[11], time)
    if reader.at != len(body):
        raise CorruptBatch("bytes after the last record")
    return rows


def _kind(reader: Reader) -> tuple[int, int, int]:
    """A record's kind by its headers, the place of its ab.txn value (-1 unless a WRITE), other headers' bytes."""
    txns = ops = others = no_text = size = 0
    txn_at, txn_size = -1, -1
    count = reader.header_count()
    for _ in range(count):
        name, value_at, value_size = reader.header_place()
        size += 0 if name == _TXN else len(name) + max(value_size, 0)
        if name == _TXN:
            txns += 1
            txn_at, txn_size = value_at, value_size
        elif name == _OP:
            ops += 1
        elif name.startswith(_RESERVED_PREFIX):
            others += 1
        elif not (name.isascii() or _is_utf8(name)):
            no_text += 1
    if txns > 1:
        return DOUBLE_TXN, -1, size
    if txns and ops:
        return TXN_AND_OP, -1, size
    if ops > 1:
        return DOUBLE_OP, -1, size
    if txns and txn_size != TXN_HEADER_SIZE:
        return TXN_LENGTH, -1, size
    if others or count - txns > MOST_HEADERS:
        return RESERVED, -1, size
    if no_text:
        return NO_TEXT, -1, size
    if txns:
        return WRITE, txn_at, size
    return (OP if ops else PLAIN), -1, size


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
