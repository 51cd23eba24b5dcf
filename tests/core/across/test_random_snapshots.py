"""Snapshots over several control partitions, by the leaders' real answers, in the random histories.

A client asks each leader for a safe time of now, takes the highest answer, and asks again for that until it is safe
everywhere (T2). What it reads then never changes, and has each commit that the client was told of before it asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import SCOPES
from tests.core.across.test_random_leaders import Play


@dataclass
class Ask:
    """A question for a snapshot of streams of these control partitions. ``known``: commits that it must have."""

    numbers: list[int]
    known: set[str]
    at: int | None = None
    early: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class Reading(Play):
    """A random history in which clients read."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asks: list[Ask] = []
        self.read: list[tuple[Ask, dict[str, list[tuple[str, int]]]]] = []

    def step(self) -> None:
        if self.rnd.random() < 0.15:
            known = {label for label, text in self.told.items() if "COMMITTED" in text}
            self.asks.append(Ask(sorted(self.rnd.sample(range(3), self.rnd.randint(2, 3))), known))
        if self.rnd.random() < 0.3:
            self.ask_on()
        super().step()

    def ask_on(self) -> None:
        for ask in list(self.asks):
            for number in ask.numbers if ask.at is None else sorted(ask.left):
                answer = self.safe(number, ask.at)
                if answer is None:
                    continue
                if ask.at is None:
                    ask.early[number] = answer.timestamp
                elif answer.safe:
                    ask.left.discard(number)
            if ask.at is None and ask.early.keys() == set(ask.numbers):
                ask.at, ask.left = max(ask.early.values()), set(ask.numbers)
            elif ask.at is not None and not ask.left:
                self.asks.remove(ask)
                self.read.append((ask, self.content(ask)))

    def safe(self, number: int, at: int | None) -> r.SafeTimeReply | None:
        leader = self.leaders[number]
        stream = f"{SCOPES[number]}/a"
        leader.said = []  # else a leader that dies now leaves its last answer there
        self.note(leader.ask("safe", r.SafeTime(SCOPES[number], at, (), (stream,))))
        answers = [result for to, result in leader.said if to.correlation_id == b"safe"]
        return answers[0] if answers and isinstance(answers[0], r.SafeTimeReply) else None

    def content(self, ask: Ask) -> dict[str, list[tuple[str, int]]]:
        merges = self.leaders.merges()
        streams = [f"{SCOPES[number]}/a" for number in ask.numbers]
        assert ask.at is not None
        until = ask.at
        return {s: [one for one in merges.get(s, []) if one[1] <= until] for s in streams}

    def check(self) -> None:
        super().check()
        for _ in range(3):
            self.ask_on()
            self.leaders.wait(3_000)  # until the slowest clock is there
        assert not self.asks, "a fixed time is safe in the end"
        for ask, content in self.read:
            assert self.content(ask) == content, "a snapshot has changed"
            for stream, its in content.items():
                # What an operator ended alone, or a lost stream had, is left out.
                known = set() if stream == self.lost else ask.known - self.forced
                wrote = {label for label in known if stream in self.wrote[label]}
                assert wrote <= {label for label, _ in its}, "what was told before is not in it"


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]
)
def test_a_snapshot_never_changes(seed: int) -> None:
    play = Reading(seed)
    play.run()
    assert play.read
