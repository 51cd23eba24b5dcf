"""How far a replica is behind, and the threads that wait until it has come to a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from anabranch.core.hybrid_time import to_us


class Lag(NamedTuple):
    """How far a table is behind: history records that brokers told of, and the seconds since it was complete.

    Infinite ``seconds``: nothing of it is here yet, and perhaps no broker was asked.
    """

    records: int
    seconds: float

    @classmethod
    def of(cls, records: int, complete: int, now: float) -> Lag:
        """``complete``: hybrid time, 0: nothing is here. ``now``: Unix seconds."""
        return cls(records, max(0.0, now - to_us(complete) / 1e6) if complete else inf)


class _Waiting(NamedTuple):
    """A thread that waits for a time. ``number``: by which equal ones differ."""

    timestamp: int
    number: int
    wake: threading.Lock


@contextmanager
def in_turn(lock: threading.RLock, seconds: float) -> Iterator[None]:
    """Hold a lock; after so many seconds of waiting for it, go on without."""
    held = lock.acquire(timeout=seconds)
    try:
        yield
    finally:
        if held:
            lock.release()


class Waiters:
    """Threads that wait for a time, the first one first.

    With a condition each commit would wake all of them: 64 threads that transfer had a fifth of their time for it.
    """

    def __init__(self, lock: threading.Condition) -> None:
        """``lock``: guards what the threads wait for."""
        self._lock = lock
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    def wait(self, timestamp: int, seconds: float, is_over: Callable[[], bool]) -> None:
        """Sleep until somebody wakes those of ``timestamp``, or all; not at all if ``is_over`` already."""
        wake = threading.Lock()
        wake.acquire()  # given back by who wakes this thread
        own = _Waiting(timestamp, next(self._numbers), wake)
        with self._lock:
            if is_over():
                return
            heappush(self._waiting, own)
        if not wake.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            with self._lock:
                if own in self._waiting:
                    self._waiting.remove(own)
                    heapify(self._waiting)

    def wake(self, is_reached: Callable[[int], bool]) -> None:
        """Wake those whose time is reached. The caller holds the lock."""
        while self._waiting and is_reached(self._waiting[0].timestamp):
            heappop(self._waiting).wake.release()

    def wake_all(self) -> None:
        """Wake them all: there is news of another kind. The caller holds the lock."""
        self.wake(lambda _: True)
