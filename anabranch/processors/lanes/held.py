"""Answers that wait until every clock is past their commit (commit wait). Nothing else waits with them.

They are of rounds that have happened, so each is true however late it is sent. With a process they are lost: their
clients ask again, and another leader holds the answer for as long as is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from anabranch.core import hybrid_time
from anabranch.core.round import Answer, Round
from anabranch.ports import TopicPartition
from anabranch.processors.durability import answers_of
from anabranch.processors.lanes.trouble import LaneTrouble
from anabranch.schemas.records import Outcome


@dataclass(slots=True)
class HeldAnswers:
    """Answers that are not due yet, the next one first; and how others are sent."""

    trouble: LaneTrouble
    _held: list[tuple[int, int, Answer, int]] = field(default_factory=list)
    _count: int = 0

    def sending(
        self, round_: Round, time: int
    ) -> Callable[[Iterable[tuple[TopicPartition, bytes]]], None]:
        """The way to send a round's answers once it has happened. Those that wait are taken out of it here.

        ``time``: the hybrid time of the round.
        """
        held: list[Answer] = []
        if any(to.held for to, _ in round_.replies):
            now_us = self._now_us()
            held = [answer for answer in round_.replies if self._due_us(answer) > now_us]
            round_.replies = [answer for answer in round_.replies if self._due_us(answer) <= now_us]

        def send(answers: Iterable[tuple[TopicPartition, bytes]]) -> None:
            self.trouble.send(answers)
            for answer in held:
                self._count += 1
                heappush(self._held, (self._due_us(answer), self._count, answer, time))

        return send

    def _due_us(self, answer: Answer) -> int:
        to, result = answer
        if not to.held or not isinstance(result, Outcome) or not result.commit_timestamp:
            return 0
        # Another controller's clock may be twice the error behind this one.
        error_us = 1000 * (self.trouble.settings.clock_error_ms or 0)
        return hybrid_time.to_us(result.commit_timestamp) + 1 + 2 * error_us

    def send_due(self) -> None:
        """Send those that have waited long enough."""
        now_us = self._now_us()
        while self._held and self._held[0][0] <= now_us:
            _, _, answer, time = heappop(self._held)
            prefix = self.trouble.settings.prefix
            self.trouble.send(answers_of(prefix, [answer], time, now_us // 1000))

    @property
    def wait_s(self) -> float:
        """Seconds until the next one is due."""
        return (self._held[0][0] - self._now_us()) / 1e6 if self._held else float("inf")

    def _now_us(self) -> int:
        return int(self.trouble.clock.wall() * 1_000_000)
