"""The simulation finds planted bugs; `scripts/simulate --mutants` looks for all of them, for longer."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest

from tests.mutants.catalogue import CALM, Mutant
from tests.sim import simulation
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.picture import Picture
from tests.sim.world import Violation

MOST_SEEDS = 150
# Some that are found within two seconds, in the test command; scripts/soak looks for all quick ones.
FIRST = (
    "answer after an uncertain commit",
    "a merge is done twice",
    "messages leave before their round",
)


def by_tier() -> list[pytest.ParameterSet]:
    quick = [mutant for mutant in MUTANTS if mutant.quick]
    assert {mutant.name for mutant in quick} >= set(FIRST)
    return [
        pytest.param(m, id=m.name, marks=[] if m.name in FIRST else pytest.mark.soak) for m in quick
    ]


@pytest.mark.parametrize("mutant", by_tier())
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.seed, MOST_SEEDS) is not None, (
        f"{mutant.name}: not found in {MOST_SEEDS} seeds from {mutant.seed} on"
    )


def test_a_seed_that_fails_without_the_bug_finds_nothing() -> None:
    harmless = Mutant("nothing is wrong", nullcontext, weather=CALM | {"work_s": 2.0, "jobs": 1})

    def false_alarm(_: Picture) -> None:
        raise Violation("a false alarm")

    with patch.object(simulation, "check_log", false_alarm):
        assert hunt(harmless, 0, 1) is None
