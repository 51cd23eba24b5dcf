"""Safe times under every fault that the simulation knows; and that it finds what breaks them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.mutants.decisions import wall_clock_only
from tests.mutants.rounds import safe_ahead, safe_unlogged
from tests.sim.simulation import simulate
from tests.sim.weather import CLEAR

SEEDS = 6
MOST_SEEDS = 60
OFTEN_S = 0.3


@pytest.mark.slow(8)
def test_what_was_answered_stays_safe() -> None:
    for seed in range(SEEDS):
        report = simulate(seed, safe_s=OFTEN_S, readers=0, workers=0)
        assert not report.violation, str(report)


@pytest.mark.parametrize(
    "plant",
    [
        safe_unlogged,
        *(pytest.param(plant, marks=pytest.mark.soak) for plant in (safe_ahead, wall_clock_only)),
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[], AbstractContextManager[object]]) -> None:
    for seed in range(MOST_SEEDS):
        weather: dict[str, Any] = {**CLEAR, "jump_s": 0.5, "jump_by_s": 5.0}
        report = simulate(seed, bug=plant(), safe_s=OFTEN_S, readers=0, **weather)
        if report.violation.startswith("safe time"):
            return
    pytest.fail(f"not found in {MOST_SEEDS} seeds")
