"""Handwritten encoders of the most frequent records. `anabranch.schemas.fast` has the decoders, and the rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, get_args

from anabranch.schemas import records as r

_ONE_SHOT = b"\x01\x08"
_REPLY = b"\x01\x20"
_ROUND_ROW = b"\x01\x41"
_TXN_ROW = b"\x01\x44"
_TABLE_ROW = b"\x01\x6c"
_COMMIT_RECORD = b"\x01\x62"
OUTCOME = 6  # index in the union of a reply's results
TXN_ID_SIZE = 16
_SECRET_SIZE = 32
T = TypeVar("T")
MAX_NAME = 256  # longer strings are not cached
_NULL = b"\x00"
END = b"\x00"  # ends an array; an empty array is only this
NOT_PREPARED = b"\x00\x00"  # fields of an outcome: 0, no bytes
NO_READS = b"\x00\x00"  # last fields of an outcome: no snapshot, no broken lock
_UNREAD = bytes(3)  # fields of a transaction: no positions, no snapshot, no broken lock
PLAIN_TAIL = b"\x00\x01"  # an event without headers, with timestamp -1
STATES: tuple[r.TxnState, ...] = get_args(r.TxnState)
_STATE_BYTES = {state: bytes((2 * i,)) for i, state in enumerate(STATES)}


class Unusual(ValueError):
    """Raised for a form that these functions don't handle."""


def _once(value: int) -> bytes:
    """A long that seldom repeats, so it is not cached."""
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Unusual
    return _varint(value << 1 ^ value >> 63)


# An int or long. Times and offsets often repeat in the records of a round.
_long = lru_cache(1 << 12, typed=True)(_once)


@lru_cache(1 << 6, typed=True)  # mostly nothing is lost
def _losses(rejected: int, left_out: int, reason: str) -> bytes:
    return _long(rejected) + _long(left_out) + _string(reason)


@lru_cache(1 << 10, typed=True)
def _int(value: int) -> bytes:
    if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
        raise Unusual
    return _varint(value << 1 ^ value >> 63)


_BYTES = tuple(bytes((number,)) for number in range(0x80))


def _varint(number: int) -> bytes:
    if number <= 0x7F:
        return _BYTES[number]
    if number <= 0x3FFF:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number <= 0x1FFFFF:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SOME = tuple(b"\x02" + _varint(2 * size) for size in range(4096))


def _some(size: int) -> bytes:
    """The bytes before a nullable field that has ``size`` bytes."""
    return _SOME[size] if size < len(_SOME) else b"\x02" + _varint(2 * size)


def _string(text: str) -> bytes:
    if type(text) is not str:
        raise Unusual
    data = text.encode()
    return _varint(2 * len(data)) + data


_known_string = lru_cache(1 << 10, typed=True)(_string)


def _name(text: str) -> bytes:
    """A string that often repeats, so it is cached."""
    return _known_string(text) if len(text) <= MAX_NAME else _string(text)


def _optional_string(text: str | None) -> bytes:
    return _NULL if text is None else b"\x02" + _string(text)


def _txn_id(value: bytes) -> bytes:
    if type(value) is not bytes or len(value) != TXN_ID_SIZE:
        raise Unusual
    return value


def _optional_secret(value: bytes | None) -> bytes:
    if value is None:
        return _NULL
    if type(value) is not bytes or len(value) != _SECRET_SIZE:
        raise Unusual
    return b"\x02" + value


def _write_one_shot(record: r.OneShot) -> bytes:
    out = [_ONE_SHOT, _txn_id(record.txn_id), _name(record.scope), _optional_string(record.name)]
    if record.events:
        out.append(_varint(2 * len(record.events)))
    add = out.append
    former = None
    head = b""
    for stream, segment_id, key, value, headers, timestamp in record.events:
        if (stream, segment_id) != former:
            head = _name(stream) + _long(segment_id)
            former = (stream, segment_id)
        add(head)
        for data in (key, value):
            if type(data) is bytes:
                size = len(data)
                add(_SOME[size] if size < 4096 else _some(size))
                add(data)
            elif data is None:
                add(_NULL)
            else:
                raise Unusual
        if headers or timestamp != -1:
            add(_headers(headers))
            add(_long(timestamp))
        else:
            add(PLAIN_TAIL)
    if record.consumed is not None:
        raise Unusual
    add(END + _NULL + _all(record.locks, _table_locks))
    return b"".join(out)


def _all(records: tuple[T, ...], write: Callable[[T], bytes]) -> bytes:
    """An array."""
    if not records:
        return END
    return b"".join((_varint(2 * len(records)), *map(write, records), END))


def _table_locks(locks: r.TableLocks) -> bytes:
    return b"".join(
        (
            _name(locks.table),
            _long(locks.since),
            _long(locks.last),
            _all(locks.points, _once),
            _all(locks.ranges, _range),
        )
    )


def _range(locked: r.LockedRange) -> bytes:
    low, high = locked.low, locked.high
    if type(low) is not bytes or not (high is None or type(high) is bytes):
        raise Unusual
    end = _NULL if high is None else _some(len(high)) + high
    return _varint(2 * len(low)) + low + end


def _table_time(time: r.TableTime) -> bytes:
    return _name(time.table) + _long(time.last)


def _headers(headers: tuple[r.EventHeader, ...]) -> bytes:
    if not headers:
        return END
    out = [_varint(2 * len(headers))]
    for key, value in headers:
        out.append(_name(key))
        if value is None:
            out.append(_NULL)
        elif type(value) is bytes:
            out += (_some(len(value)), value)
        else:
            raise Unusual
    out.append(END)
    return b"".join(out)


def _write_reply(record: r.Reply) -> bytes:
    found = record.result
    if type(found) is not r.Outcome or found.writers:
        raise Unusual
    if found[-5:-3] != (0, b"") or found[-2:] != (0, None):
        raise Unusual
    if type(record.correlation_id) is not bytes or type(record.command) is not bytes:
        raise Unusual
    streams = b""
    if found.streams:
        streams = _varint(2 * len(found.streams)) + b"".join(map(_name, found.streams))
    return b"".join(
        (
            _REPLY,
            _varint(2 * len(record.correlation_id)),
            record.correlation_id,
            _varint(2 * len(record.command)),
            record.command,
            _long(record.hybrid_time),
            bytes((2 * OUTCOME,)) + _txn_id(found.txn_id),
            _STATE_BYTES[found.state],
            _name(found.scope),
            _optional_string(found.name),
            _long(found.commit_timestamp),
            _long(found.committed),
            _losses(found.rejected, found.left_out, found.reason),
            _long(found.begun_ms),
            _long(found.finished_ms),
            _int(found.keepalive_ms),
            streams,
            END + END + _name(found.owner) + NOT_PREPARED,
            _all(found.tables, _table_time) + NO_READS,
        )
    )


def _write_txn_row(row: r.TxnRow) -> bytes:
    if row[-3:] != (None, 0, None):
        raise Unusual
    return b"".join(
        (
            _TXN_ROW,
            _txn_id(row.txn_id),
            _name(row.scope),
            _optional_string(row.name),
            _STATE_BYTES[row.state],
            _int(row.keepalive_ms),
            _long(row.begun_ms),
            _long(row.finished_ms),
            _long(row.commit_timestamp),
            _long(row.committed),
            _losses(row.rejected, row.left_out, row.reason),
            _optional_secret(row.secret) + _name(row.owner) + _UNREAD,
        )
    )


def _write_round_row(row: r.RoundRow) -> bytes:
    rest = row.commands_offset, row.control_offset, row.expired_ms
    return b"".join((_ROUND_ROW, *map(_long, (row.term, row.hybrid_time, *rest))))


def _write_table_row(row: r.TableRow) -> bytes:
    return b"".join((_TABLE_ROW, _long(row.last), _long(row.unknown), _long(row.bounded)))


def _write_commit_record(record: r.CommitRecord) -> bytes:
    out = [_COMMIT_RECORD, _txn_id(record.txn_id), _int(record.stream_epoch)]
    out.append(_long(record.timestamp))
    if record.segments:
        out.append(_varint(2 * len(record.segments)))
        for at in record.segments:
            out += (_long(at.segment_id), _int(at.partition))
            out += (_long(at.first), _long(at.end), _long(at.count))
    out.append(END)
    if record.vector:
        out.append(_varint(2 * len(record.vector)))
        for partition, offset in record.vector:
            out += (_int(partition), _long(offset))
    out += (END, _long(record.previous), _long(record.vector_at))
    return b"".join(out)


WRITERS: dict[type, Callable[[Any], bytes]] = {
    r.OneShot: _write_one_shot,
    r.Reply: _write_reply,
    r.RoundRow: _write_round_row,
    r.TableRow: _write_table_row,
    r.TxnRow: _write_txn_row,
    r.CommitRecord: _write_commit_record,
}
