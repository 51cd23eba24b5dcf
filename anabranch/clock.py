"""The machine's clock and randomness as ports, and warnings that are logged at most once a minute."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from io import BytesIO

from anabranch.waits import here

# bytes
_SMALL = 16
_AT_ONCE = 4096
_MINUTE_S = 60.0


class SystemClock:
    """`anabranch.ports.Clock` by the operating system."""

    def wall(self) -> float:
        return time.time()

    monotonic = staticmethod(time.monotonic)  # a C function: workers call it after each event

    def sleep(self, seconds: float) -> None:
        here().sleep(seconds)


class SystemEntropy:
    """`anabranch.ports.Entropy` by the operating system. Bytes for ids are drawn in advance, many at a time.

    Each call of `os.urandom` releases the interpreter lock: with 64 committing threads, the switches between them
    took a tenth of a client's time. Longer pieces, such as secrets, are not drawn in advance.
    """

    def __init__(self) -> None:
        self._drawn, self._process = BytesIO(), 0

    def __call__(self, size: int) -> bytes:
        if size > _SMALL:
            return os.urandom(size)
        if self._process != os.getpid():  # a forked child must not use its parent's bytes
            self._drawn, self._process = BytesIO(), os.getpid()
        found = self._drawn.read(size)  # one atomic step, so no two threads get the same bytes
        if len(found) < size:
            drawn = BytesIO(os.urandom(_AT_ONCE))
            found, self._drawn = drawn.read(size), drawn
        return found


class OnceAMinute:
    """Logs a warning of each kind at most once a minute: a call that is tried each second may fail each second.

    Warnings are of one kind if they have the same text, before values are put in, and values of the same types.
    """

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._last: dict[object, float] = {}

    def warning(self, what: str, *values: object) -> None:
        """Log a warning, unless one of its kind was logged within the last minute."""
        kind, now = (what, *map(type, values)), self._monotonic()
        if now - self._last.get(kind, -math.inf) >= _MINUTE_S:
            self._last[kind] = now
            self._log.warning(what, *values)
