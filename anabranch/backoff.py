"""Pauses for every loop that tries again: they grow while the tries keep failing."""

from __future__ import annotations

import math
from collections.abc import Callable

from anabranch.ports import Clock


class Backoff:
    """The pauses between tries of one call: each is ``growth`` times as long as the last, up to ``longest_s``.

    All times are seconds. ``next_s``: the length of the next pause. ``count``: the number of pauses since the last
    success; ``total_s``: their sum. ``until``: when the last pause ends, by the monotonic clock.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        clock: Clock,
        *,
        growth: float = 2.0,
        quiet_s: float = math.inf,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        """``quiet_s``: after this long without a pause, the next one has the first length again.

        ``jitter``: draws a number from 0 to 1. Each pause then takes 50 to 100 % of its length.
        """
        self._first_s, self._longest_s, self._growth = first_s, longest_s, growth
        self._clock, self._quiet_s, self._jitter = clock, quiet_s, jitter
        self.until = -math.inf
        self.reset()

    def reset(self) -> None:
        """Note a success: the next pause has the first length again."""
        self.next_s, self.count, self.total_s = self._first_s, 0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether the last pause has ended."""
        return self._clock.monotonic() >= self.until

    def ends_by(self, deadline: float) -> bool:
        """Whether the next pause would end before a deadline."""
        return self._clock.monotonic() + self.next_s < deadline

    def begin(self) -> float:
        """Begin a pause and return its length, for callers that wait in their own way."""
        now = self._clock.monotonic()
        if now - self.until > self._quiet_s:
            self.reset()
        pause_s = self.next_s * (1.0 if self._jitter is None else (1 + self._jitter()) / 2)
        self.next_s = min(self._growth * self.next_s, self._longest_s)
        self.until, self.count, self.total_s = now + pause_s, self.count + 1, self.total_s + pause_s
        return pause_s

    def sleep(self, deadline: float = math.inf) -> bool:
        """Sleep for the next pause. If it would not end before the deadline, return False at once."""
        if not self.ends_by(deadline):
            return False
        self._clock.sleep(self.begin())
        return True
