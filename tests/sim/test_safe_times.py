"""Safe times under every fault that the simulation knows; and that it finds what breaks them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest

from anabranch.core import decide, decide_time
from anabranch.core.plan import ReplyTo
from anabranch.core.turn import Turn
from anabranch.schemas.records import SafeTime, SafeTimeIs
from tests.sim.mutants import _answer_early, _wall_clock_only
from tests.sim.simulation import simulate

SEEDS = 12
MOST_SEEDS = 60
OFTEN_S = 0.3


@pytest.mark.slow(8)
def test_what_was_answered_stays_safe() -> None:
    for seed in range(SEEDS):
        report = simulate(seed, safe_s=OFTEN_S)
        assert not report.violation, str(report)


def _unlogged() -> AbstractContextManager[object]:
    """The time is answered, and hybrid time is left where it was."""
    real = decide_time.safe_time

    def forgetful(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
        before = turn.hybrid_time
        real(turn, command, to)
        turn.hybrid_time = before

    return patch.dict(decide._DECISIONS, {SafeTime: forgetful})


def _ahead() -> AbstractContextManager[object]:
    """A time to come is answered at once."""

    def hasty(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
        turn.reply(to, SafeTimeIs(command.scope, command.at or turn.hybrid_time))

    return patch.dict(decide._DECISIONS, {SafeTime: hasty})


@pytest.mark.parametrize("plant", [_unlogged, _ahead, _answer_early, _wall_clock_only])
def test_a_planted_bug_is_found(plant: Callable[[], AbstractContextManager[object]]) -> None:
    for seed in range(MOST_SEEDS):
        report = simulate(seed, bug=plant(), safe_s=OFTEN_S)
        if report.violation.startswith("safe time"):
            return
    pytest.fail(f"not found in {MOST_SEEDS} seeds")
