"""Handwritten codecs of the most frequent records: small transactions, and the records about them.

A controller reads and writes their commands, replies and rows for each small commit, and fastavro's general code
would be most of that commit's cost. So `anabranch.protocol.schemas.codec` tries these functions first, then those
that `forms` makes from the schemas, then fastavro. `forms` would take two to four times as long to write the
records that have functions here.

These functions read and write the common form of a record. For any other form (long forms of numbers, arrays in
several blocks, values of other types, truncated bytes) they raise one of `DECLINED`; then fastavro reads or writes
the record, or raises the error. So only fastavro decides what is accepted, and results equal its, byte for byte.

Sizes that a hostile sender claims cost no more than the bytes that are there: every step takes at least one byte
and never goes back, and the last step has to end where the data ends.

The file is long because each of these records has a writer and a reader, which share their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, get_args

from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r

# The most items of a list, of events or of headers in a record that any program may send.
LIST = limits.LIST.value
EVENTS = limits.EVENTS.value
DECLINED = (AttributeError, IndexError, KeyError, TypeError, ValueError)

_ONE_SHOT = b"\x01\x08"
_ONE_SHOT_3 = b"\x03\x08"  # with the fields of feature level 3
_ONE_SHOT_4 = b"\x04\x08"  # … and those of level 4
_PREPARE_EVENTS = b"\x01\x25"
_REPLY = b"\x01\x20"
_TXN_ROW = b"\x01\x44"
_PREPARED_ROW = b"\x01\x5a"
_COMMIT_RECORD = b"\x01\x62"
_OUTCOME = 6  # index in the union of a reply's results
_TXN_ID_SIZE = 16
_CORRELATION_ID_SIZE = 16
_DIGEST_SIZE = 8
_AT_DIGEST = 3 + _CORRELATION_ID_SIZE  # the place of a reply's digest
_SECRET_SIZE = 32
_T = TypeVar("_T")
# Takes a command, the place of its events and their number; returns the events, and the end of their array.
EventsReader = Callable[[bytes, int, int], tuple[Any, int]]
_MAX_NAME = 256  # longer strings are not cached
_NULL = b"\x00"
_END = b"\x00"  # ends an array; an empty array is only this
_NO_READS = b"\x00\x00"  # last fields of an outcome: no snapshot, no broken lock
_UNREAD = bytes(3)  # fields of a transaction: no positions, no snapshot, no broken lock
_PLAIN_TAIL = b"\x00\x01"  # an event without headers, with timestamp -1
_STATES: tuple[r.TxnState, ...] = get_args(r.TxnState)
_STATE_BYTES = {state: bytes((2 * i,)) for i, state in enumerate(_STATES)}
_KINDS: tuple[r.ChangeKind, ...] = get_args(r.ChangeKind)
_KIND_BYTES = {kind: bytes((2 * i,)) for i, kind in enumerate(_KINDS)}


class Unusual(ValueError):
    """A form that these functions don't handle."""


class EncodedEvents(Sequence[r.Event]):
    """Events that are still as commands and rows have them, one after the other: ``payload``."""

    __slots__ = ()
    payload: bytes


def _once(value: int) -> bytes:
    """A long that seldom repeats, so it is not cached."""
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Unusual
    return _varint(value << 1 ^ value >> 63)


# An int or long. Times and offsets often repeat in the records of a round.
write_long = lru_cache(1 << 12, typed=True)(_once)


@lru_cache(1 << 6, typed=True)  # few entries, as most commits lose no event
def _losses(rejected: int, left_out: int, reason: str) -> bytes:
    return write_long(rejected) + write_long(left_out) + _string(reason)


@lru_cache(1 << 10, typed=True)
def write_int(value: int) -> bytes:
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
    low = (number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14 & 0x7F | 0x80)
    return bytes(low) + _high_varint(number >> 21)


_high_varint = lru_cache(1 << 10)(_varint)  # of times, which are often nearly the same


_SIZES = 4096
_SOME = tuple(b"\x02" + _varint(2 * size) for size in range(_SIZES))


def _some(size: int) -> bytes:
    """The bytes before a nullable field that has ``size`` bytes."""
    return _SOME[size] if size < _SIZES else b"\x02" + _varint(2 * size)


def _string(text: str) -> bytes:
    if type(text) is not str:
        raise Unusual
    data = text.encode()
    return _varint(2 * len(data)) + data


_known_string = lru_cache(1 << 10, typed=True)(_string)


def write_name(text: str) -> bytes:
    """A string that often repeats, so it is cached."""
    return _known_string(text) if len(text) <= _MAX_NAME else _string(text)


def _optional_string(text: str | None) -> bytes:
    return _NULL if text is None else b"\x02" + _string(text)


def _txn_id(value: bytes) -> bytes:
    if type(value) is not bytes or len(value) != _TXN_ID_SIZE:
        raise Unusual
    return value


def _optional_secret(value: bytes | None) -> bytes:
    if value is None:
        return _NULL
    if type(value) is not bytes or len(value) != _SECRET_SIZE:
        raise Unusual
    return b"\x02" + value


def _write_one_shot(record: r.OneShot) -> bytes:
    changes, follows, heir, derivations, places, secret = record[6:]
    across = bool(places or secret is not None)
    more = bool(across or changes or follows or heir is not None or derivations)
    begin = _ONE_SHOT_4 if across else _ONE_SHOT_3 if more else _ONE_SHOT
    out = _whole_transaction(begin, record)
    consumed = _NULL if record.consumed is None else _consumed(record.consumed)
    out.append(_END + consumed + write_all(record.locks, _table_locks))
    if more:
        out.append(write_all(changes, _row_change))
        out.append(write_all(follows, _followed_rows))
        out.append(_NULL if heir is None else b"\x02" + _txn_id(heir))
        out.append(write_all(derivations, _derivation))
    if across:
        out += (write_all(places, write_int), _optional_secret(secret))
    return b"".join(out)


def _whole_transaction(begin: bytes, record: r.OneShot | r.PrepareEvents) -> list[bytes]:
    """The fields that both commands begin with, in pieces; the events lack the end of their array."""
    out = [begin, _txn_id(record.txn_id), write_name(record.scope), _optional_string(record.name)]
    if record.events:
        out.append(_varint(2 * len(record.events)))
        _add_events(out, record.events)
    return out


def write_events(events: Iterable[r.Event]) -> tuple[bytes, list[int]]:
    """Events as commands have them, one after the other, and where each one starts."""
    out: list[bytes] = []
    firsts = []
    for event in events:
        firsts.append(len(out))
        _add_events(out, (event,))
    ends = [0, *accumulate(map(len, out))]
    return b"".join(out), [ends[first] for first in firsts]


def event_head(stream: str, segment_id: int) -> bytes:
    """The first fields of an event: `encoded_event` takes them."""
    return write_name(stream) + write_long(segment_id)


def encoded_event(
    head: bytes,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] | None,
    timestamp: int,
) -> bytes:
    """One event, as commands have it. The caller has checked the fields. ``timestamp``: Unix ms, or -1."""
    if key is None or value is None or headers or timestamp != -1:
        keyed = _NULL if key is None else _some(len(key)) + key
        valued = _NULL if value is None else _some(len(value)) + value
        return b"".join((head, keyed, valued, _headers(headers or ()), write_long(timestamp)))
    # The usual form, without further calls.
    key_size, size = len(key), len(value)
    before_key = _SOME[key_size] if key_size < _SIZES else _some(key_size)
    before_value = _SOME[size] if size < _SIZES else _some(size)
    return b"".join((head, before_key, key, before_value, value, _PLAIN_TAIL))


def _add_events(out: list[bytes], events: Iterable[r.Event]) -> None:
    add = out.append
    if isinstance(events, EncodedEvents):
        add(events.payload)
        return
    former = None
    head = b""
    tail_of: tuple[r.EventHeader, ...] | None = None  # whose bytes ``tail`` is
    tail = b""
    for stream, segment_id, key, value, headers, timestamp in events:
        if (stream, segment_id) != former:
            head = write_name(stream) + write_long(segment_id)
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
            if headers is not tail_of:  # events of a trace share their headers
                tail_of, tail = headers, _headers(headers)
            add(tail)
            add(write_long(timestamp))
        else:
            add(_PLAIN_TAIL)


def _write_prepare_events(record: r.PrepareEvents) -> bytes:
    out = _whole_transaction(_PREPARE_EVENTS, record)
    if type(record.secret) is not bytes or len(record.secret) != _SECRET_SIZE:
        raise Unusual
    if record.consumed is not None or record.locks or record.derivations:
        raise Unusual
    out += (_END, record.secret, _prepare(record.prepare))
    return b"".join(out)


def _prepare(prepare: r.Prepare) -> bytes:
    return write_bytes(prepare.by) + write_bytes(prepare.attempt)


def write_bytes(data: bytes) -> bytes:
    if not isinstance(data, bytes):
        raise Unusual
    return _varint(2 * len(data)) + data


def _write_prepared_row(row: r.PreparedRow) -> bytes:
    out = [_PREPARED_ROW, _prepare(row.prepare), write_long(row.prepared_ms)]
    if row.events:
        out.append(_varint(2 * len(row.events)))
        _add_events(out, row.events)
    out.append(_END)
    return b"".join(out)


def write_all(records: tuple[_T, ...], write: Callable[[_T], bytes]) -> bytes:
    if not records:
        return _END
    return b"".join((_varint(2 * len(records)), *map(write, records), _END))


def _consumed(consumed: r.Consumed) -> bytes:
    token = consumed.fencing_token
    if type(token) is not bytes:
        raise Unusual
    head = b"\x02" + write_name(consumed.processor)
    return head + _varint(2 * len(token)) + token + write_all(consumed.steps, _task_step)


def _task_step(step: r.TaskStep) -> bytes:
    return b"".join(
        (
            write_all(step.tasks, write_int),
            _once(step.sequence),
            write_all(step.positions, _task_position),
        )
    )


def _task_position(position: r.TaskPosition) -> bytes:
    return write_int(position.input) + b"".join(map(_once, position[1:]))


def _table_locks(locks: r.TableLocks) -> bytes:
    return b"".join(
        (
            write_name(locks.table),
            write_long(locks.since),
            write_long(locks.last),
            write_all(locks.points, _once),
            write_all(locks.ranges, _range),
        )
    )


def _followed_rows(rows: r.FollowedRows) -> bytes:
    return _txn_id(rows.txn_id) + write_name(rows.table) + write_all(rows.points, _once)


def _range(locked: r.LockedRange) -> bytes:
    low, high = locked.low, locked.high
    if type(low) is not bytes or not (high is None or type(high) is bytes):
        raise Unusual
    end = _NULL if high is None else _some(len(high)) + high
    return _varint(2 * len(low)) + low + end


def _row_change(change: r.RowChange) -> bytes:
    base = change.base
    found = _NULL if base is None else b"\x02" + write_bytes(base)
    head = write_name(change.table) + write_bytes(change.key) + _KIND_BYTES[change.kind]
    return head + _once(change.number) + found


def _derivation(derivation: r.Derivation) -> bytes:
    source, name, version = derivation
    return write_name(source) + write_name(name) + write_int(version)


def _table_time(time: r.TableTime) -> bytes:
    return write_name(time.table) + write_long(time.last)


def _headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    if not headers:
        return _END
    out = [_varint(2 * len(headers))]
    for key, value in headers:
        out.append(write_name(key))
        if value is None:
            out.append(_NULL)
        elif type(value) is bytes:
            out += (_some(len(value)), value)
        else:
            raise Unusual
    out.append(_END)
    return b"".join(out)


def _write_reply(record: r.Reply) -> bytes:
    found = record.result
    if type(found) is not r.Outcome or found.writers:
        raise Unusual
    if found[-2:] != (0, None):
        raise Unusual
    if type(record.correlation_id) is not bytes or type(record.command) is not bytes:
        raise Unusual
    streams = b""
    if found.streams:
        streams = _varint(2 * len(found.streams)) + b"".join(map(write_name, found.streams))
    return b"".join(
        (
            _REPLY,
            _varint(2 * len(record.correlation_id)),
            record.correlation_id,
            _varint(2 * len(record.command)),
            record.command,
            write_long(record.hybrid_time),
            bytes((2 * _OUTCOME,)) + _txn_id(found.txn_id),
            _STATE_BYTES[found.state],
            write_name(found.scope),
            _optional_string(found.name),
            write_long(found.commit_timestamp),
            write_long(found.committed),
            _losses(found.rejected, found.left_out, found.reason),
            write_long(found.begun_ms),
            write_long(found.finished_ms),
            write_int(found.keepalive_ms),
            streams,
            _END
            + _END
            + write_name(found.owner)
            + write_long(found.prepared_ms)
            + write_bytes(found.prepared_by),
            write_all(found.tables, _table_time) + _NO_READS,
        )
    )


def _write_txn_row(row: r.TxnRow) -> bytes:
    if row[-3:] != (None, 0, None):
        raise Unusual
    return b"".join(
        (
            _TXN_ROW,
            _txn_id(row.txn_id),
            write_name(row.scope),
            _optional_string(row.name),
            _STATE_BYTES[row.state],
            write_int(row.keepalive_ms),
            write_long(row.begun_ms),
            write_long(row.finished_ms),
            write_long(row.commit_timestamp),
            write_long(row.committed),
            _losses(row.rejected, row.left_out, row.reason),
            _optional_secret(row.secret) + write_name(row.owner) + _UNREAD,
        )
    )


def _write_commit_record(record: r.CommitRecord) -> bytes:
    if record.safe:  # a field of level 4
        raise Unusual
    out = [_COMMIT_RECORD, _txn_id(record.txn_id), write_int(record.stream_epoch)]
    out.append(write_long(record.timestamp))
    if record.segments:
        out.append(_varint(2 * len(record.segments)))
        for at in record.segments:
            out += (write_long(at.segment_id), write_int(at.partition))
            out += (write_long(at.first), write_long(at.end), write_long(at.count))
    out.append(_END)
    if record.vector:
        out.append(_varint(2 * len(record.vector)))
        for partition, offset in record.vector:
            out += (write_int(partition), write_long(offset))
    out += (_END, write_long(record.previous), write_long(record.vector_at))
    return b"".join(out)


WRITERS: dict[type, Callable[[Any], bytes]] = {
    r.OneShot: _write_one_shot,
    r.PrepareEvents: _write_prepare_events,
    r.PreparedRow: _write_prepared_row,
    r.Reply: _write_reply,
    r.TxnRow: _write_txn_row,
    r.CommitRecord: _write_commit_record,
}


_SHIFTS = tuple(range(7, 64, 7))  # for a number's bytes after the first
_NO_LOSSES = b"\x00\x00\x00"  # nothing rejected or left out, no reason
_new = tuple.__new__  # makes a named tuple without its checks, in half the time
_STATE_OF = {2 * i: state for i, state in enumerate(_STATES)}
_KIND_OF = {2 * i: kind for i, kind in enumerate(_KINDS)}


def read_long(data: bytes, at: int) -> tuple[int, int]:
    """A long, and its end."""
    value = data[at]
    at += 1
    if value > 0x7F:
        for shift in _SHIFTS:
            byte = data[at]
            at += 1
            # One less, because of the bit that marks the previous byte as not the last.
            value += byte - 1 << shift
            if byte < 0x80:
                break
        else:
            raise Unusual
        if value >> 64:
            raise Unusual
    return value >> 1 ^ -(value & 1), at


def read_int(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value >> 1 ^ -(value & 1), at + 1
    value, at = read_long(data, at)
    if not -(1 << 31) <= value < 1 << 31:
        raise Unusual
    return value, at


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    """A size, and its end. A negative size is `Unusual`."""
    size = data[at]
    if size & 0x80:
        more = data[at + 1]
        if more & 0x80:
            size, at = read_long(data, at)
            if size < 0:
                raise Unusual
            return size, at
        size += (more << 7) - 0x80
        at += 1
    if size & 1:
        raise Unusual
    return size >> 1, at + 1


def _read_string(data: bytes, at: int) -> tuple[str, int]:
    size, start = _read_size(data, at)
    at = start + size
    return data[start:at].decode(), at


_known_text = lru_cache(1 << 10)(bytes.decode)


def read_name(data: bytes, at: int) -> tuple[str, int]:
    """A string, which is cached because it often repeats, and its end."""
    size, start = _read_size(data, at)
    if size > _MAX_NAME:
        return _read_string(data, at)
    at = start + size
    return _known_text(data[start:at]), at


def _read_optional_string(data: bytes, at: int) -> tuple[str | None, int]:
    tag = data[at]
    if not tag:
        return None, at + 1
    if tag != 2:
        raise Unusual
    return _read_string(data, at + 1)


def _read_events(data: bytes, at: int, count: int) -> tuple[tuple[r.Event, ...], int]:
    """The events of an array's only block, and the end of the array."""
    events, at = read_events(data, at, count)
    return events, _after_array(data, at)


def _read_array_of_events(data: bytes, at: int, read_events: EventsReader) -> tuple[Any, int]:
    count, at = _read_size(data, at)
    if count > EVENTS:
        raise Unusual
    return read_events(data, at, count) if count else ((), at)


def _read_one_shot(data: bytes, read_events: EventsReader = _read_events) -> r.OneShot:
    txn_id, scope, name, events, at = _read_whole_transaction(data, read_events)
    consumed, at = _read_consumed(data, at)
    locks, at = read_all(data, at, _read_table_locks)
    changes: tuple[r.RowChange, ...] = ()
    follows: tuple[r.FollowedRows, ...] = ()
    turn_to = None
    derivations: tuple[r.Derivation, ...] = ()
    places: tuple[int, ...] = ()
    secret = None
    if not data.startswith(_ONE_SHOT):
        changes, at = read_all(data, at, _read_row_change)
        follows, at = read_all(data, at, _read_followed_rows)
        turn_to, at = _read_optional_txn_id(data, at)
        derivations, at = read_all(data, at, _read_derivation)
    if data.startswith(_ONE_SHOT_4):
        places, at = read_all(data, at, read_int)
        secret, at = _read_optional_secret(data, at)
    if at != len(data):
        raise Unusual
    return r.OneShot(
        txn_id,
        scope,
        name,
        events,
        consumed,
        locks,
        changes,
        follows,
        turn_to,
        derivations,
        places,
        secret,
    )


def _read_whole_transaction(
    data: bytes, read_events: EventsReader
) -> tuple[bytes, str, str | None, Any, int]:
    """The fields that `OneShot` and `PrepareEvents` begin with, and their end."""
    scope, at = read_name(data, 2 + _TXN_ID_SIZE)
    name, at = _read_optional_string(data, at)
    events, at = _read_array_of_events(data, at, read_events)
    return data[2 : 2 + _TXN_ID_SIZE], scope, name, events, at


def _read_prepare_events(data: bytes, read_events: EventsReader = _read_events) -> r.PrepareEvents:
    txn_id, scope, name, events, at = _read_whole_transaction(data, read_events)
    secret = data[at : at + _SECRET_SIZE]
    prepare, at = _read_prepare(data, at + _SECRET_SIZE)
    if at != len(data):
        raise Unusual
    return r.PrepareEvents(txn_id, scope, name, events, secret, prepare)


def _read_prepare(data: bytes, at: int) -> tuple[r.Prepare, int]:
    by, at = read_bytes(data, at)
    attempt, at = read_bytes(data, at)
    return r.Prepare(by, attempt), at


def read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, start = _read_size(data, at)
    at = start + size
    return data[start:at], at


def _read_prepared_row(data: bytes, read_events: EventsReader = _read_events) -> r.PreparedRow:
    prepare, at = _read_prepare(data, 2)
    prepared_ms, at = read_long(data, at)
    events, at = _read_array_of_events(data, at, read_events)
    if at != len(data):
        raise Unusual
    return r.PreparedRow(prepare, prepared_ms, events)


def read_all(
    data: bytes, at: int, read: Callable[[bytes, int], tuple[_T, int]], most: int = LIST
) -> tuple[tuple[_T, ...], int]:
    """An array of one block, and its end. ``most``: items."""
    count, at = _read_size(data, at)
    if not count:
        return (), at
    if count > most:
        raise Unusual
    found = []
    for _ in range(count):
        one, at = read(data, at)
        found.append(one)
    return tuple(found), _after_array(data, at)


def _read_consumed(data: bytes, at: int) -> tuple[r.Consumed | None, int]:
    tag = data[at]
    if not tag:
        return None, at + 1
    if tag != 2:
        raise Unusual
    processor, at = read_name(data, at + 1)
    size, start = _read_size(data, at)
    at = start + size
    steps, end = read_all(data, at, _read_task_step)
    return r.Consumed(processor, data[start:at], steps), end


def _read_task_step(data: bytes, at: int) -> tuple[r.TaskStep, int]:
    tasks, at = read_all(data, at, read_int)
    sequence, at = read_long(data, at)
    positions, at = read_all(data, at, _read_task_position)
    return r.TaskStep(tasks, sequence, positions), at


def _read_task_position(data: bytes, at: int) -> tuple[r.TaskPosition, int]:
    number, at = read_int(data, at)
    record, at = read_long(data, at)
    timestamp, at = read_long(data, at)
    segment, at = read_long(data, at)
    offset, at = read_long(data, at)
    return _new(r.TaskPosition, (number, record, timestamp, segment, offset)), at


def _read_table_locks(data: bytes, at: int) -> tuple[r.TableLocks, int]:
    table, at = read_name(data, at)
    since, at = read_long(data, at)
    last, at = read_long(data, at)
    points, at = read_all(data, at, read_long)
    ranges, at = read_all(data, at, _read_range)
    return _new(r.TableLocks, (table, since, last, points, ranges)), at


def _read_followed_rows(data: bytes, at: int) -> tuple[r.FollowedRows, int]:
    end = at + _TXN_ID_SIZE
    table, after = read_name(data, end)
    points, after = read_all(data, after, read_long)
    return _new(r.FollowedRows, (data[at:end], table, points)), after


def _read_optional_txn_id(data: bytes, at: int) -> tuple[bytes | None, int]:
    return _read_optional_fixed(data, at, _TXN_ID_SIZE)


def _read_optional_secret(data: bytes, at: int) -> tuple[bytes | None, int]:
    return _read_optional_fixed(data, at, _SECRET_SIZE)


def _read_optional_fixed(data: bytes, at: int, size: int) -> tuple[bytes | None, int]:
    if not data[at]:
        return None, at + 1
    end = at + 1 + size
    if data[at] != 2 or end > len(data):
        raise Unusual
    return data[at + 1 : end], end


def _read_range(data: bytes, at: int) -> tuple[r.LockedRange, int]:
    low, at = read_bytes(data, at)
    high, at = _read_optional_bytes(data, at)
    return r.LockedRange(low, high), at


def _read_row_change(data: bytes, at: int) -> tuple[r.RowChange, int]:
    table, at = read_name(data, at)
    key, at = read_bytes(data, at)
    kind = _KIND_OF[data[at]]
    number, at = read_long(data, at + 1)
    base, at = _read_optional_bytes(data, at)
    return _new(r.RowChange, (table, key, kind, number, base)), at


def _read_derivation(data: bytes, at: int) -> tuple[r.Derivation, int]:
    source, at = read_name(data, at)
    name, at = read_name(data, at)
    version, at = read_int(data, at)
    return _new(r.Derivation, (source, name, version)), at


def _read_table_time(data: bytes, at: int) -> tuple[r.TableTime, int]:
    table, at = read_name(data, at)
    last, at = read_long(data, at)
    return r.TableTime(table, last), at


def read_events(data: bytes, at: int, count: int) -> tuple[tuple[r.Event, ...], int]:
    """Events, one after the other, and their end.

    Most events begin like the previous one, and have short fields, no headers and no timestamp of their own.
    """
    events: list[r.Event] = []
    new, add = _new, events.append
    begins_with = data.startswith
    stream, segment_id, head, head_size = "", 0, b"", 0
    for _ in range(count):
        if head_size and begins_with(head, at):
            at += head_size
        else:
            start = at
            stream, at = read_name(data, at)
            segment_id, at = read_long(data, at)
            head = data[start:at]
            head_size = at - start
        size = data[at + 1]
        if data[at] == 2 and not size & 0x81:
            start = at + 2
            at = start + (size >> 1)
            key: bytes | None = data[start:at]
        else:
            key, at = _read_optional_bytes(data, at)
        if data[at] == 2:
            size, more = data[at + 1], data[at + 2]
            if size & 0x80 and not (size | more << 7) & 0x4001:
                start = at + 3
                at = start + (size + (more << 7) - 0x80 >> 1)
            else:
                size, start = _read_size(data, at + 1)
                at = start + size
            value: bytes | None = data[start:at]
        else:
            value, at = _read_optional_bytes(data, at)
        if begins_with(_PLAIN_TAIL, at):
            at += 2
            add(new(r.Event, (stream, segment_id, key, value, (), -1)))
        else:
            headers, at = _read_headers(data, at)
            timestamp, at = read_long(data, at)
            add(new(r.Event, (stream, segment_id, key, value, headers, timestamp)))
    return tuple(events), at


def read_key(data: bytes, at: int) -> bytes | None:
    """The key of the event that starts there."""
    size, at = _read_size(data, at)
    _, at = read_long(data, at + size)
    return _read_optional_bytes(data, at)[0]


def _after_array(data: bytes, at: int) -> int:
    """The end of an array. Another block is `Unusual`."""
    if data[at]:
        raise Unusual
    return at + 1


def _read_optional_bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    tag = data[at]
    if not tag:
        return None, at + 1
    if tag != 2:
        raise Unusual
    size, start = _read_size(data, at + 1)
    at = start + size
    return data[start:at], at


def _read_headers(data: bytes, at: int) -> tuple[tuple[r.EventHeader, ...], int]:
    count, at = _read_size(data, at)
    if not count:
        return (), at
    headers = []
    for _ in range(count):
        key, at = read_name(data, at)
        value, at = _read_optional_bytes(data, at)
        headers.append(r.EventHeader(key, value))
    return tuple(headers), _after_array(data, at)


def _read_reply(data: bytes) -> r.Reply:
    if data[2] != 2 * _CORRELATION_ID_SIZE or data[_AT_DIGEST] != 2 * _DIGEST_SIZE:
        raise Unusual
    correlation_id = data[3:_AT_DIGEST]
    at = _AT_DIGEST + 1 + _DIGEST_SIZE
    command = data[_AT_DIGEST + 1 : at]
    hybrid_time, at = read_long(data, at)
    if data[at] != 2 * _OUTCOME:
        raise Unusual
    txn_id = data[at + 1 : at + 1 + _TXN_ID_SIZE]
    at += 1 + _TXN_ID_SIZE
    state = _STATE_OF[data[at]]
    scope, at = read_name(data, at + 1)
    name, at = _read_optional_string(data, at)
    commit_timestamp, at = read_long(data, at)
    committed, at = read_long(data, at)
    if data.startswith(_NO_LOSSES, at):
        rejected, left_out, reason = 0, 0, ""
        at += len(_NO_LOSSES)
    else:
        rejected, at = read_long(data, at)
        left_out, at = read_long(data, at)
        reason, at = _read_string(data, at)
    begun_ms, at = read_long(data, at)
    finished_ms, at = read_long(data, at)
    keepalive_ms, at = read_int(data, at)
    rest = data[at:]
    read_rest = _known_rest if len(rest) <= _MAX_NAME else _read_rest
    streams, owner, prepared_ms, prepared_by, tables = read_rest(rest)
    outcome = r.Outcome(
        txn_id, state, scope, name, commit_timestamp, committed, rejected, left_out, reason, begun_ms,
        finished_ms, keepalive_ms, streams, (), owner, prepared_ms, prepared_by, tables,
    )  # fmt: skip
    return r.Reply(correlation_id, command, hybrid_time, outcome)


def _read_rest(data: bytes) -> tuple[tuple[str, ...], str, int, bytes, tuple[r.TableTime, ...]]:
    """The last fields of an outcome, from its streams on."""
    streams, at = read_all(data, 0, read_name)
    if data[at]:  # it has writers
        raise Unusual
    owner, at = read_name(data, at + 1)
    prepared_ms, at = read_long(data, at)
    prepared_by, at = read_bytes(data, at)
    tables, at = read_all(data, at, _read_table_time)
    if data[at:] != _NO_READS:
        raise Unusual
    return streams, owner, prepared_ms, prepared_by, tables


_known_rest = lru_cache(1 << 8)(_read_rest)  # most replies to a client end alike


def _read_commit_record(data: bytes) -> r.CommitRecord:
    at = 2 + _TXN_ID_SIZE
    stream_epoch, at = read_int(data, at)
    timestamp, at = read_long(data, at)
    segments, at = read_all(data, at, _read_segment)
    vector, at = read_all(data, at, _read_position)
    previous, at = read_long(data, at)
    vector_at, at = read_long(data, at)
    if at != len(data):
        raise Unusual
    txn_id = data[2 : 2 + _TXN_ID_SIZE]
    return r.CommitRecord(txn_id, stream_epoch, timestamp, segments, vector, previous, vector_at)


def _read_segment(data: bytes, at: int) -> tuple[r.SegmentCommit, int]:
    segment_id, at = read_long(data, at)
    partition, at = read_int(data, at)
    first, at = read_long(data, at)
    end, at = read_long(data, at)
    count, at = read_long(data, at)
    return r.SegmentCommit(segment_id, partition, first, end, count), at


def _read_position(data: bytes, at: int) -> tuple[r.Position, int]:
    partition, at = read_int(data, at)
    offset, at = read_long(data, at)
    return _new(r.Position, (partition, offset)), at


READERS: dict[type, Callable[[bytes], Any]] = {
    r.OneShot: _read_one_shot,
    r.PrepareEvents: _read_prepare_events,
    r.PreparedRow: _read_prepared_row,
    r.Reply: _read_reply,
    r.CommitRecord: _read_commit_record,
}

# By the first bytes of a record: readers of records with events, which take a function that reads these.
WITH_EVENTS: dict[bytes, Callable[[bytes, EventsReader], Any]] = {
    _ONE_SHOT: _read_one_shot,
    _ONE_SHOT_3: _read_one_shot,
    _ONE_SHOT_4: _read_one_shot,
    _PREPARE_EVENTS: _read_prepare_events,
    _PREPARED_ROW: _read_prepared_row,
}
