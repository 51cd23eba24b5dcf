"""A segment's recent load: counts by buckets of time. Pure: time is given, as the number of a bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

HISTORY = 32  # whole buckets that are kept
_SAMPLES = 256


class Load(NamedTuple):
    """The load of one segment. Both series are of whole buckets, oldest first, `HISTORY` of them.

    ``taken_bytes``: since it was opened, as far as known. ``positions``: some of the keys' positions.
    """

    age_ms: int
    taken_bytes: int
    events: Sequence[int]
    sizes: Sequence[int]
    positions: Sequence[int] = ()

    def plus(self, other: Load) -> Load:
        """The load of both as one segment, without positions."""
        return Load(
            min(self.age_ms, other.age_ms),
            self.taken_bytes + other.taken_bytes,
            [a + b for a, b in zip(self.events, other.events, strict=True)],
            [a + b for a, b in zip(self.sizes, other.sizes, strict=True)],
        )


class Gauge:
    """One segment's counts; the last bucket is the one that is being filled."""

    __slots__ = ("_bucket", "_events", "_since_ms", "_sizes", "_taken", "positions")

    def __init__(self, now_ms: int, bucket: int) -> None:
        self._since_ms = now_ms
        self._bucket = bucket
        self._taken = 0
        self._events = deque([0] * (HISTORY + 1), HISTORY + 1)
        self._sizes = deque([0] * (HISTORY + 1), HISTORY + 1)
        self.positions: deque[int] = deque(maxlen=_SAMPLES)

    def add(self, events: int, size: int, bucket: int) -> None:
        """Count events and bytes in a bucket; if that one is over, in the present one."""
        self._reach(bucket)
        self._events[-1] += events
        self._sizes[-1] += size
        self._taken += size

    def load(self, now_ms: int, bucket: int) -> Load:
        """The counts of the buckets before this one."""
        self._reach(bucket)
        return Load(
            now_ms - self._since_ms,
            self._taken,
            tuple(self._events)[:-1],
            tuple(self._sizes)[:-1],
            tuple(self.positions),
        )

    def _reach(self, bucket: int) -> None:
        passed = min(bucket - self._bucket, HISTORY + 1)
        if passed > 0:
            self._events.extend([0] * passed)
            self._sizes.extend([0] * passed)
            self._bucket = bucket
