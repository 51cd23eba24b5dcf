"""Handwritten decoders of the most frequent records: a one-shot, and the records about it.

`anabranch.schemas.codec` tries these functions first. They decode the common form of a few records. Any other form
(long forms of numbers, arrays in several blocks, values of other types, truncated bytes) raises one of `DECLINED`;
then fastavro reads or writes the record, or raises the error. So only fastavro decides what is accepted, and
results here equal fastavro's, byte for byte.

Sizes that a hostile sender claims cost no more than the bytes that are there: every step takes at least one byte
and never goes back, and the last one has to end where the data ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from anabranch.schemas import records as r
from anabranch.schemas.fast_writing import (
    END,
    MAX_NAME,
    NO_READS,
    NOT_PREPARED,
    OUTCOME,
    PLAIN_TAIL,
    STATES,
    TXN_ID_SIZE,
    WRITERS,
    Unusual,
)

__all__ = ["DECLINED", "EVENTS", "LIST", "READERS", "WRITERS", "Unusual"]

# The most items of a list, of events or of headers in a record that any program may send.
LIST = 20_000
EVENTS = 5_000
DECLINED = (AttributeError, IndexError, KeyError, TypeError, ValueError)

T = TypeVar("T")
_SHIFTS = tuple(range(7, 64, 7))  # for a number's bytes after the first
_NO_LOSSES = b"\x00\x00\x00"  # nothing rejected or left out, no reason
_new = tuple.__new__  # makes a named tuple without its checks, in half the time
_STATE_OF = {2 * i: state for i, state in enumerate(STATES)}


def _read_long(data: bytes, at: int) -> tuple[int, int]:
    """A long, and its end."""
    value = data[at]
    at += 1
    if value > 0x7F:
        for shift in _SHIFTS:
            byte = data[at]
            at += 1
            # Subtract the bit that marks the previous byte as not the last.
            value += (byte << shift) - (1 << shift)
            if byte < 0x80:
                break
        else:
            raise Unusual
        if value >> 64:
            raise Unusual
    return value >> 1 ^ -(value & 1), at


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value >> 1 ^ -(value & 1), at + 1
    value, at = _read_long(data, at)
    if not -(1 << 31) <= value < 1 << 31:
        raise Unusual
    return value, at


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    """A size, and its end. A negative size is `Unusual`."""
    size = data[at]
    if size & 0x80:
        more = data[at + 1]
        if more & 0x80:
            size, at = _read_long(data, at)
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


def _read_name(data: bytes, at: int) -> tuple[str, int]:
    """A string that often repeats, so it is cached; and its end."""
    size, start = _read_size(data, at)
    if size > MAX_NAME:
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


def _read_one_shot(data: bytes) -> r.OneShot:
    scope, at = _read_name(data, 2 + TXN_ID_SIZE)
    name, at = _read_optional_string(data, at)
    count, at = _read_size(data, at)
    if count > EVENTS:
        raise Unusual
    events: list[r.Event] = []
    at = _read_events(data, at, count, events) if count else at
    if data[at]:  # the one-shot moves positions of tasks
        raise Unusual
    locks, at = _read_all(data, at + 1, _read_table_locks)
    if at != len(data):
        raise Unusual
    return r.OneShot(data[2 : 2 + TXN_ID_SIZE], scope, name, tuple(events), None, locks)


def _read_all(
    data: bytes, at: int, read: Callable[[bytes, int], tuple[T, int]]
) -> tuple[tuple[T, ...], int]:
    """An array of one block, and its end."""
    count, at = _read_size(data, at)
    if not count:
        return (), at
    if count > LIST:
        raise Unusual
    found = []
    for _ in range(count):
        one, at = read(data, at)
        found.append(one)
    return tuple(found), _after_array(data, at)


def _read_table_locks(data: bytes, at: int) -> tuple[r.TableLocks, int]:
    table, at = _read_name(data, at)
    since, at = _read_long(data, at)
    last, at = _read_long(data, at)
    points, at = _read_all(data, at, _read_long)
    ranges, at = _read_all(data, at, _read_range)
    return r.TableLocks(table, since, last, points, ranges), at


def _read_range(data: bytes, at: int) -> tuple[r.LockedRange, int]:
    size, start = _read_size(data, at)
    at = start + size
    low = data[start:at]
    high, at = _read_optional_bytes(data, at)
    return r.LockedRange(low, high), at


def _read_table_time(data: bytes, at: int) -> tuple[r.TableTime, int]:
    table, at = _read_name(data, at)
    last, at = _read_long(data, at)
    return r.TableTime(table, last), at


def _read_events(data: bytes, at: int, count: int, events: list[r.Event]) -> int:
    """Read the events of an array's only block. Returns the end of the array.

    Most events begin like the previous one, and have short fields, no headers and no timestamp of their own.
    """
    new, add = _new, events.append
    begins_with = data.startswith
    stream, segment_id, head, head_size = "", 0, b"", 0
    for _ in range(count):
        if head_size and begins_with(head, at):
            at += head_size
        else:
            start = at
            stream, at = _read_name(data, at)
            segment_id, at = _read_long(data, at)
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
        if begins_with(PLAIN_TAIL, at):
            at += 2
            add(new(r.Event, (stream, segment_id, key, value, (), -1)))
        else:
            headers, at = _read_headers(data, at)
            timestamp, at = _read_long(data, at)
            add(new(r.Event, (stream, segment_id, key, value, headers, timestamp)))
    return _after_array(data, at)


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
        key, at = _read_name(data, at)
        value, at = _read_optional_bytes(data, at)
        headers.append(r.EventHeader(key, value))
    return tuple(headers), _after_array(data, at)


def _read_reply(data: bytes) -> r.Reply:
    size, at = _read_size(data, 2)
    correlation_id = data[at : at + size]
    size, at = _read_size(data, at + size)
    command = data[at : at + size]
    hybrid_time, at = _read_long(data, at + size)
    if data[at] != 2 * OUTCOME:
        raise Unusual
    txn_id = data[at + 1 : at + 1 + TXN_ID_SIZE]
    at += 1 + TXN_ID_SIZE
    state = _STATE_OF[data[at]]
    scope, at = _read_name(data, at + 1)
    name, at = _read_optional_string(data, at)
    commit_timestamp, at = _read_long(data, at)
    committed, at = _read_long(data, at)
    if data.startswith(_NO_LOSSES, at):
        rejected, left_out, reason = 0, 0, ""
        at += len(_NO_LOSSES)
    else:
        rejected, at = _read_long(data, at)
        left_out, at = _read_long(data, at)
        reason, at = _read_string(data, at)
    begun_ms, at = _read_long(data, at)
    finished_ms, at = _read_long(data, at)
    keepalive_ms, at = _read_int(data, at)
    owner, end = _read_name(data, at + 2)
    # The usual form: no streams, no writers, not prepared.
    usual = data.startswith(END + END, at) and data.startswith(NOT_PREPARED, end)
    tables, end = _read_all(data, end + len(NOT_PREPARED), _read_table_time)
    if not usual or data[end:] != NO_READS:
        raise Unusual
    outcome = r.Outcome(
        txn_id, state, scope, name, commit_timestamp, committed, rejected, left_out, reason, begun_ms,
        finished_ms, keepalive_ms, (), (), owner, 0, b"", tables,
    )  # fmt: skip
    return r.Reply(correlation_id, command, hybrid_time, outcome)


def _read_commit_record(data: bytes) -> r.CommitRecord:
    at = 2 + TXN_ID_SIZE
    stream_epoch, at = _read_int(data, at)
    timestamp, at = _read_long(data, at)
    segments, at = _read_all(data, at, _read_segment)
    vector, at = _read_all(data, at, _read_position)
    previous, at = _read_long(data, at)
    vector_at, at = _read_long(data, at)
    if at != len(data):
        raise Unusual
    txn_id = data[2 : 2 + TXN_ID_SIZE]
    return r.CommitRecord(txn_id, stream_epoch, timestamp, segments, vector, previous, vector_at)


def _read_segment(data: bytes, at: int) -> tuple[r.SegmentCommit, int]:
    segment_id, at = _read_long(data, at)
    partition, at = _read_int(data, at)
    first, at = _read_long(data, at)
    end, at = _read_long(data, at)
    count, at = _read_long(data, at)
    return r.SegmentCommit(segment_id, partition, first, end, count), at


def _read_position(data: bytes, at: int) -> tuple[r.Position, int]:
    partition, at = _read_int(data, at)
    offset, at = _read_long(data, at)
    return _new(r.Position, (partition, offset)), at


READERS: dict[type, Callable[[bytes], Any]] = {
    r.OneShot: _read_one_shot,
    r.Reply: _read_reply,
    r.CommitRecord: _read_commit_record,
}
