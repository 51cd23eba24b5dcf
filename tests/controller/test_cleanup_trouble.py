"""Leaders that die at every step of moving and cutting journals, and logs that refuse it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from anabranch.controller.controller import Controller
from anabranch.ports import LogRefused, LogUnavailable
from anabranch.protocol.schemas.records import Commit
from tests.controller.cleanup_play import (
    ENOUGH,
    OLD,
    STREAM,
    Killed,
    Play,
    long_after,
    old_transaction,
)
from tests.controller.world import World


@dataclass
class At:
    """Kills at the n-th call of a name, once, as soon as ``armed``."""

    name: str
    number: int
    phase: str
    armed: bool = False
    seen: int = 0
    struck: bool = False

    def __call__(self, name: str, phase: str) -> None:
        if self.armed and not self.struck and (name, phase) == (self.name, self.phase):
            self.seen += 1
            if self.seen == self.number:
                self.struck = True
                raise Killed(name)


def calls_of_a_move() -> list[tuple[str, int]]:
    """The calls of a leader from the first copy until the cut behind the last one, numbered by name."""
    calls: list[str] = []
    play = Play(hook=lambda name, phase: calls.append(name) if phase == "before" else None)
    old_transaction(play)
    calls.clear()
    long_after(play)
    first = calls.index("append:stream")
    last = len(calls) - 1 - calls[::-1].index("append:stream")
    until = calls.index("delete_records", last) + 1
    seen: Counter[str] = Counter()
    found = []
    for i, name in enumerate(calls[:until]):
        seen[name] += 1
        if i >= first and not name.startswith("fetch"):
            found.append((name, seen[name]))
    return found


MOVE = calls_of_a_move()


def test_the_steps_of_a_move() -> None:
    names = {name for name, _ in MOVE}
    assert {"append:stream", "append:status", "end:commit", "table:rows", "delete_records"} <= names
    assert len(MOVE) < 80


# Each call before and after, one of them with the table kept and the other one without.
STEPS = [
    (name, number, phase, (at + (phase == "after")) % 2 == 0)
    for at, (name, number) in enumerate(MOVE)
    for phase in ("before", "after")
]


@pytest.mark.parametrize(
    ("name", "number", "phase", "keeps_table"),
    [
        step if n % 4 in (0, 3) else pytest.param(*step, marks=pytest.mark.soak)
        for n, step in enumerate(STEPS)
    ],
)
def test_killed_at_a_step_of_a_move(name: str, number: int, phase: str, keeps_table: bool) -> None:
    hook = At(name, number, phase)
    play = Play(keeps_table, hook)
    old = old_transaction(play)
    hook.armed = True
    middle = long_after(play)
    assert hook.struck, "the call was made"
    assert play.deaths
    play.come_and_go(ENOUGH)
    play.steps(10)
    assert play.start > middle, "a successor goes on with it"
    play.write((old, 1, b"a-late"))
    assert play.commit(old).committed == OLD + 1
    assert play.committed(old) == play.written[old], "whole, once, and in order"
    play.steps(3)
    assert not any(play.controller.table.scan(b"i"))


def test_nothing_is_deleted_above_what_is_logged() -> None:
    """Nor before: not while the round of the row is open, and not if it comes to nothing."""
    logged: list[int] = []
    play = Play()

    def hook(name: str, phase: str) -> None:
        if phase == "after" and name == "end:commit":
            logged.append(play.controller.state.low_water.get((STREAM, 0), 0))
        if phase == "after":
            assert play.start <= max(logged, default=0), name

    play.hook = hook
    old = old_transaction(play)
    long_after(play)
    assert play.commit(old).state == "COMMITTED"
    play.steps(5)
    assert play.start == logged[-1] > 0


# -- trouble -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LogUnavailable("away"), LogRefused("no such offset", 1)])
def test_that_records_cannot_be_deleted_ends_nothing(error: Exception) -> None:
    play = Play()
    broken = True

    def hook(name: str, phase: str) -> None:
        if broken and name == "delete_records" and phase == "before":
            raise error

    play.hook = hook
    play.come_and_go(10)
    play.steps(3)
    assert play.start == 0
    assert play.controller.state.low_water[STREAM, 0] > 0
    broken = False
    play.world.clock.now += 31
    play.come_and_go(1)
    play.steps(3)
    assert play.start == play.controller.state.low_water[STREAM, 0]


def step_on(controller: Controller, world: World) -> None:
    for _ in range(20):
        controller.step(0)
        world.clock.now += 0.3


def test_a_successor_deletes_what_was_logged() -> None:
    play = Play()

    def hook(name: str, phase: str) -> None:
        if name == "delete_records" and phase == "before":
            raise Killed

    play.come_and_go(3)
    txn_id = play.begin()
    play.write((txn_id, 1, b"v"))
    play.hook = hook
    correlation_id = play.world.send(Commit(play.tokens[txn_id], (), (), None, 1000))
    with pytest.raises(Killed):
        step_on(play.controller, play.world)
    low = play.controller.state.low_water[STREAM, 0]
    assert play.start < low
    play.hook = lambda name, phase: None
    play.deaths += 1
    play.lead()
    play.step()
    assert play.start >= low
    assert play.world.reply(correlation_id) is not None


def test_a_move_that_the_broker_refuses_is_left_for_later() -> None:
    play = Play()
    old = old_transaction(play)
    refusing = True

    def hook(name: str, phase: str) -> None:
        if refusing and name == "append:stream" and phase == "before":
            raise LogRefused("too large", 10)

    play.hook = hook
    long_after(play)
    assert not play.controller.state.open[old].moved
    refusing = False
    play.come_and_go(1)
    play.steps(10)
    assert play.controller.state.open[old].moved, "after a while it is tried again"
    assert play.commit(old).committed == OLD
    assert play.committed(old) == play.written[old]
