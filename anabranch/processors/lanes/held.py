"""Answers that wait until every clock is past their commit (commit wait). Nothing else waits with them.

They are of rounds that have happened, so each is true however late it is sent. A leader that ends drops them: their
clients ask again, and its successor holds the answer for as long as is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from anabranch.core import hybrid_time
from anabranch.core.round import ReplyTo, Round
from anabranch.ports import Clock
from anabranch.schemas.records import Outcome

Answer = tuple[ReplyTo, Any]


@dataclass(slots=True)
class HeldAnswers:
    """``error_ms``: of each controller's clock, at most: another one may be twice as far behind."""

    clock: Clock
    error_ms: int
    send: Callable[[list[Answer], int], None]  # answers, and the hybrid time of their round
    _held: list[tuple[int, int, Answer, int]] = field(default_factory=list)
    _count: int = 0

    def take(self, round_: Round) -> list[Answer]:
        """Take out of a round the answers that have to wait. `keep` them once it has happened."""
        now_us = self._now_us()
        waits = [to.held and self._due_us(result) > now_us for to, result in round_.replies]
        if not any(waits):
            return []
        answers, round_.replies = round_.replies, []
        for answer, later in zip(answers, waits, strict=True):
            if not later:
                round_.replies.append(answer)
        return [answer for answer, later in zip(answers, waits, strict=True) if later]

    def _due_us(self, result: Any) -> int:
        if not isinstance(result, Outcome) or not result.commit_timestamp:
            return 0
        return hybrid_time.to_us(result.commit_timestamp) + 1 + 2000 * self.error_ms

    def keep(self, answers: list[Answer], time: int) -> None:
        """Send them when they are due. ``time``: the hybrid time of their round."""
        for answer in answers:
            self._count += 1
            heappush(self._held, (self._due_us(answer[1]), self._count, answer, time))

    def send_due(self) -> None:
        """Send those that have waited long enough."""
        now_us = self._now_us()
        while self._held and self._held[0][0] <= now_us:
            _, _, answer, time = heappop(self._held)
            self.send([answer], time)

    @property
    def wait_s(self) -> float:
        """Seconds until the next one is due."""
        return (self._held[0][0] - self._now_us()) / 1e6 if self._held else float("inf")

    def clear(self) -> None:
        """Drop all."""
        self._held.clear()

    def _now_us(self) -> int:
        return int(self.clock.wall() * 1_000_000)
