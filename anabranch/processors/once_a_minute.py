"""Log lines of a trouble that lasts: one a minute at most, as what is tried again each second fails each second."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

log = logging.getLogger("anabranch.controller")

MINUTE_S = 60.0


class OnceAMinute:
    """Warnings about one trouble. After `over` the next one is logged at once."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = -math.inf

    def warning(self, what: str, *values: object) -> None:
        """Log it, unless there was a line within the last minute."""
        now = self._monotonic()
        if now - self._last >= MINUTE_S:
            self._last = now
            log.warning(what, *values)

    def over(self) -> None:
        """The trouble is over."""
        self._last = -math.inf
