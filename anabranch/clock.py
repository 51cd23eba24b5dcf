"""The machine's clock and randomness as ports, and log lines that are kept rare by a clock."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from io import BytesIO

# bytes
_SMALL = 16
_AT_ONCE = 4096
_MINUTE_S = 60.0


class SystemClock:
    """`anabranch.ports.Clock` by the operating system."""

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SystemEntropy:
    """`anabranch.ports.Entropy` by the operating system; ids are pieces of what it draws at once.

    Each call of `os.urandom` releases the interpreter lock: with 64 threads that commit, a tenth of a client's time
    went into the switches between them. Longer pieces, as secrets are, are drawn when they are asked for.
    """

    def __init__(self) -> None:
        self._drawn, self._process = BytesIO(), 0

    def __call__(self, size: int) -> bytes:
        if size > _SMALL:
            return os.urandom(size)
        if self._process != os.getpid():  # a forked child must not give its parent's
            self._drawn, self._process = BytesIO(), os.getpid()
        found = self._drawn.read(size)  # one step, so no two threads get the same
        if len(found) < size:
            drawn = BytesIO(os.urandom(_AT_ONCE))
            found, self._drawn = drawn.read(size), drawn
        return found


class OnceAMinute:
    """Warnings about each kind of trouble at most once a minute: what is tried each second fails each second.

    A kind is a text without its values, and the types of these: of errors, too.
    """

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._last: dict[object, float] = {}

    def warning(self, what: str, *values: object) -> None:
        """Log it, unless there was a line within the last minute."""
        kind, now = (what, *map(type, values)), self._monotonic()
        if now - self._last.get(kind, -math.inf) >= _MINUTE_S:
            self._last[kind] = now
            self._log.warning(what, *values)
