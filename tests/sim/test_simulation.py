"""As many seeds as fit into half a minute. A failing one is printed with the command that replays it."""

from __future__ import annotations

import time

import pytest

from tests.sim.simulation import simulate

BUDGET_S = 30.0
LEAST_SEEDS = 30


@pytest.mark.slow(30)
@pytest.mark.timeout(300)
def test_what_must_hold_holds_under_every_seed() -> None:
    began = time.monotonic()
    seed = commits = 0
    while seed < LEAST_SEEDS or time.monotonic() - began < BUDGET_S:
        report = simulate(seed)
        assert not report.violation, str(report)
        commits += report.commits
        seed += 1
    assert commits > 5 * seed, "too little happens in these runs"


def test_a_seed_replays_exactly() -> None:
    for seed in (1, 2, 3):
        lines: list[str] = []
        first = simulate(seed, trace=lines.append)
        again = simulate(seed)
        assert len(lines) > 500
        assert (first.digest, first.steps) == (again.digest, again.steps)
