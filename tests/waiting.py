"""Waiting for a state in place of a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 60.0


def wait_until(
    holds: Callable[[], object],
    seconds: float = SOON_S,
    *,
    pause: float = 0.05,
    what: Callable[[], object] = lambda: "what was waited for did not happen",
) -> None:
    """Return when the condition holds; AssertionError with ``what`` after some seconds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what()
        time.sleep(pause)
