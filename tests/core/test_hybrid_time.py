"""Hybrid time: strictly monotone, near the clock, and turned into other units exactly."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InvalidArgument, InvariantViolation
from anabranch.protocol import hybrid_time as ht

MAX_US = (1 << 51) - 1
us_values = st.integers(0, MAX_US)
logicals = st.integers(0, 4095)
timestamps = st.integers(0, (1 << 63) - 1)


@given(st.integers(0, (1 << 63) - 2), us_values)
def test_next_is_above_the_previous_and_not_below_the_clock(previous: int, now_us: int) -> None:
    after = ht.next_after(previous, now_us)
    assert after > previous
    assert after >= now_us << 12
    assert after in (previous + 1, now_us << 12)  # and no further than it must be


@given(us_values, st.lists(st.integers(-5, 5), min_size=1, max_size=200))
def test_a_clock_that_jumps_about_never_breaks_the_order(start: int, steps: list[int]) -> None:
    now, last, seen = start, 0, []
    for step in steps:
        now = min(MAX_US - 1, max(0, now + step))
        last = ht.next_after(last, now)
        seen.append(last)
    assert seen == sorted(set(seen))


def test_a_full_logical_part_carries() -> None:
    full = ht.from_us(1_000_000, 4095)
    assert ht.next_after(full, 1_000_000) == ht.from_us(1_000_001, 0)
    assert ht.next_after(full, 0) == ht.from_us(1_000_001, 0)
    assert ht.next_after(ht.from_us(7, 12), 7) == ht.from_us(7, 13)
    assert ht.next_after(ht.from_us(7, 12), 8) == ht.from_us(8)


@given(us_values, logicals)
def test_parts_come_back(us: int, logical: int) -> None:
    stamp = ht.from_us(us, logical)
    assert 0 <= stamp <= ht.MAX == (1 << 63) - 1
    assert (ht.to_us(stamp), ht.logical_of(stamp)) == (us, logical)
    assert ht.to_ms(stamp) == us // 1000


@given(timestamps, timestamps)
def test_order_is_that_of_the_parts(a: int, b: int) -> None:
    assert (a < b) == ((ht.to_us(a), ht.logical_of(a)) < (ht.to_us(b), ht.logical_of(b)))


@given(st.integers(0, MAX_US // 1000 - 1))
def test_a_millisecond_has_a_first_and_a_last(ms: int) -> None:
    first, last = ht.from_us(ms * 1000), ht.from_us(ms * 1000 + 999, 4095)
    assert ht.to_ms(first) == ht.to_ms(last) == ms
    assert ht.to_ms(last + 1) == ms + 1
    assert first == 0 or ht.to_ms(first - 1) == ms - 1


@given(us_values)
def test_datetimes_are_exact(us: int) -> None:
    moment = ht.to_datetime(ht.from_us(us, 9))
    assert moment.tzinfo is UTC
    assert ht.from_datetime(moment) == ht.from_us(us)
    elsewhere = moment.astimezone(timezone(timedelta(hours=-7)))
    assert ht.from_datetime(elsewhere) == ht.from_us(us)


def test_known_values() -> None:
    stamp = ht.from_datetime(datetime(2025, 3, 1, 12, 30, 15, 123456, tzinfo=UTC))
    assert stamp == 1_740_832_215_123_456 << 12
    assert ht.to_ms(stamp + 4095) == 1_740_832_215_123
    assert ht.to_text(stamp) == "2025-03-01T12:30:15.123456Z"
    assert ht.to_text(stamp + 7) == "2025-03-01T12:30:15.123456Z+7"
    assert ht.read_moment(ht.to_text(stamp + 7)) == stamp + 7
    assert ht.to_datetime(ht.MAX).year == 2041


def test_what_is_out_of_range_is_refused() -> None:
    for previous, now in [(-1, 0), (ht.MAX, 0), (0, -1), (0, MAX_US + 1)]:
        with pytest.raises(InvariantViolation):
            ht.next_after(previous, now)
    assert ht.next_after(ht.MAX - 1, 0) == ht.MAX
    for us, logical in [(-1, 0), (MAX_US + 1, 0), (0, -1), (0, 4096)]:
        with pytest.raises(InvalidArgument):
            ht.from_us(us, logical)
    with pytest.raises(InvalidArgument, match="time zone"):
        ht.from_datetime(datetime(2025, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidArgument):
        ht.from_datetime(datetime(1969, 12, 31, tzinfo=UTC))
