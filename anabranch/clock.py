"""The machine's clock as a port."""

from __future__ import annotations

import time


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
