"""Hybrid time: 64 bits, microseconds since the Unix epoch << 12 | a logical counter.

A commit timestamp is both a moment and a place in an order: it follows the wall clock while that advances, and
rises by one while the clock stops or goes back. Values are plain ints that compare as they are, and fit a signed
64-bit long until 2041-05-10 (`MAX`). No function reads a clock.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from anabranch.errors import InvalidArgument, InvariantViolation

LOGICAL_BITS = 12
MAX = (1 << 63) - 1
_MAX_US = MAX >> LOGICAL_BITS
_LOGICAL_MASK = (1 << LOGICAL_BITS) - 1
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US_PER_MS = 1000
_MOST_DIGITS = 100  # of a number in a text


def next_after(previous: int, now_us: int, number: int | None = None) -> int:
    """The next hybrid time: later than ``previous``, not earlier than the clock (``now_us``, Unix µs).

    While the clock stops or lags, the logical part counts up; when it is full, it carries into the microseconds.
    ``number``: the logical part that it has to have, so that times of different numbers are never equal.
    `InvariantViolation` if out of range.
    """
    if not 0 <= previous < MAX:
        raise InvariantViolation(f"hybrid time {previous} has no successor")
    if not 0 <= now_us <= _MAX_US:
        raise InvariantViolation(f"time {now_us} us is not within 0..{_MAX_US}")
    found = max(previous + 1, now_us << LOGICAL_BITS)
    if number is not None:
        found += (number - found) & _LOGICAL_MASK
    return found


def from_us(unix_us: int, logical: int = 0) -> int:
    """The hybrid time of Unix microseconds; `InvalidArgument` if out of range."""
    if not 0 <= unix_us <= _MAX_US:
        raise InvalidArgument(f"time {unix_us} us is not within 0..{_MAX_US}")
    if not 0 <= logical <= _LOGICAL_MASK:
        raise InvalidArgument(f"logical time {logical} is not within 0..{_LOGICAL_MASK}")
    return unix_us << LOGICAL_BITS | logical


def from_s(unix_s: int) -> int:
    """The hybrid time at which a second begins. A base is as of such a time, and its number is the second."""
    return from_us(unix_s * 1_000_000)


def to_s(timestamp: int) -> int:
    """The Unix seconds of a hybrid time, rounded down."""
    return to_us(timestamp) // 1_000_000


def to_bytes(timestamp: int) -> bytes:
    """The 8 bytes of a hybrid time in a header."""
    return timestamp.to_bytes(8, "big")


def parse(data: bytes | None) -> int:
    """The hybrid time in a header. `InvalidArgument` unless it is 8 bytes, big endian, and within `MAX`."""
    if data is None or len(data) != 8 or data[0] > MAX >> 56:
        raise InvalidArgument(f"a hybrid time is 8 bytes, big endian, 0 to 2^63 - 1, not {data!r}")
    return int.from_bytes(data, "big")


def to_us(timestamp: int) -> int:
    """The Unix microseconds of a hybrid time, rounded down."""
    return timestamp >> LOGICAL_BITS


def logical_of(timestamp: int) -> int:
    """The logical part of a hybrid time, 0..4095."""
    return timestamp & _LOGICAL_MASK


def to_ms(timestamp: int) -> int:
    """The Unix milliseconds of a hybrid time, rounded down: the Kafka timestamp of its record."""
    return (timestamp >> LOGICAL_BITS) // _US_PER_MS


def to_datetime(timestamp: int) -> datetime:
    """The moment of a hybrid time, in UTC; the logical part is dropped."""
    return _UNIX_EPOCH + timedelta(microseconds=to_us(timestamp))


def from_datetime(moment: datetime) -> int:
    """The lowest hybrid time of a moment; `InvalidArgument` without a time zone or out of range."""
    if moment.utcoffset() is None:
        raise InvalidArgument(f"{moment.isoformat()} has no time zone")
    us = (moment - _UNIX_EPOCH) // timedelta(microseconds=1)
    if not 0 <= us <= _MAX_US:
        last = to_datetime(MAX).isoformat()
        raise InvalidArgument(f"{moment.isoformat()}: commit timestamps are from 1970 to {last}")
    return from_us(us)


def read_moment(text: str) -> int | datetime | None:
    """A moment in a text of a user: a commit timestamp (a number), a time in ISO 8601, or a text of `to_text`.

    None for any other text. `InvalidArgument` if a text of `to_text` is out of range.
    """
    if text.isdecimal() and len(text) < _MOST_DIGITS:
        return int(text)
    moment, _, logical = text.partition("Z+")
    try:
        if logical.isdecimal() and len(logical) < _MOST_DIGITS:
            return from_us(to_us(from_datetime(datetime.fromisoformat(f"{moment}Z"))), int(logical))
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def to_text(timestamp: int) -> str:
    """A hybrid time for people: UTC to the microsecond, and the logical part unless it is 0."""
    moment = to_datetime(timestamp).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    logical = logical_of(timestamp)
    return f"{moment}+{logical}" if logical else moment
