"""The pauses of all loops that try again, as a table."""

from __future__ import annotations

import math

import pytest

from anabranch.backoff import Backoff
from anabranch.testing.memory.cluster import SteppedClock


@pytest.mark.parametrize(
    ("first", "longest", "growth", "pauses"),
    [
        (1.0, 8.0, 2.0, [1, 2, 4, 8, 8]),
        (1.0, 3.0, 2.0, [1, 2, 3, 3]),
        (1.0, 10.0, 10.0, [1, 10, 10]),
        (0.0, 0.0, 2.0, [0, 0]),
    ],
)
def test_pauses_grow_up_to_the_longest(
    first: float, longest: float, growth: float, pauses: list[float]
) -> None:
    clock = SteppedClock(100.0)
    backoff = Backoff(first, longest, clock, growth=growth)
    assert backoff.is_over
    for count, pause in enumerate(pauses):
        assert (backoff.count, backoff.total_s) == (count, sum(pauses[:count]))
        before = clock.now
        assert backoff.sleep()
        assert clock.now - before == pause
    backoff.reset()
    assert (backoff.begin(), backoff.count, backoff.total_s) == (first, 1, first)


def test_a_pause_that_would_outlast_the_deadline_is_not_begun() -> None:
    clock = SteppedClock(100.0)
    backoff = Backoff(1.0, 8.0, clock)
    assert backoff.sleep(101.5)
    for deadline in (102.0, 103.0):  # the pause would end at 103
        assert not backoff.ends_by(deadline)
        assert not backoff.sleep(deadline)
        assert (clock.now, backoff.count) == (101.0, 1)
    assert backoff.sleep(103.5)
    assert clock.now == 103.0


def test_a_pause_that_was_begun_is_over_at_its_end() -> None:
    clock = SteppedClock(100.0)
    backoff = Backoff(1.0, 8.0, clock)
    for pause in (1.0, 2.0, 4.0):
        assert backoff.begin() == pause
        assert backoff.until == clock.now + pause
        clock.sleep(pause / 2)
        assert not backoff.is_over
        clock.sleep(pause / 2)
        assert backoff.is_over


def test_a_long_time_without_a_pause_makes_the_next_one_short() -> None:
    clock = SteppedClock(100.0)
    backoff = Backoff(1.0, 8.0, clock, quiet_s=10.0)
    for idle, pause in ((0.0, 1), (10.0, 2), (10.0, 4), (10.5, 1), (0.0, 2)):
        clock.now = max(clock.now, backoff.until) + idle
        assert backoff.begin() == pause


@pytest.mark.parametrize(("drawn", "pause"), [(0.0, 2.0), (0.5, 3.0), (1.0, 4.0)])
def test_jitter_takes_up_to_half_of_a_pause(drawn: float, pause: float) -> None:
    backoff = Backoff(4.0, math.inf, SteppedClock(100.0), jitter=lambda: drawn)
    assert (backoff.begin(), backoff.next_s) == (pause, 8.0)
