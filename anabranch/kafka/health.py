"""Brokers that did not answer, which are skipped for a while."""

from __future__ import annotations

from anabranch.backoff import Backoff
from anabranch.clock import SystemClock

_LEFT_ALONE_S = 1.0  # how long a silent broker is skipped at first
_LONGEST_ALONE_S = 16.0


class SilentBrokers:
    """Brokers that failed to answer. Each is skipped for a second, and longer if it fails again."""

    def __init__(self) -> None:
        self._pauses: dict[int, Backoff] = {}

    def failed(self, node: int) -> None:
        """Skip a broker for a while."""
        pauses = self._pauses.get(node)
        if pauses is None:
            pauses = self._pauses[node] = Backoff(_LEFT_ALONE_S, _LONGEST_ALONE_S, SystemClock())
        pauses.begin()

    def answered(self, node: int) -> None:
        """Trust a broker again."""
        self._pauses.pop(node, None)

    def has(self, node: int, now: float) -> bool:
        """Whether a broker is skipped. ``now``: monotonic seconds."""
        return node in self._pauses and now < self._pauses[node].until
