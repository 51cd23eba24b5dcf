"""A clock that stands still until a test moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SteppedClock:
    """A clock that only sleeping, or the test, moves."""

    now: float = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
