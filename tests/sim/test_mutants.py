"""The simulation finds planted bugs; `scripts/simulate --mutants` looks for all of them, for longer."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import Mutant
from tests.sim.mutants import MUTANTS, hunt

MOST_SEEDS = 150


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.quick], ids=lambda m: m.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.seed, MOST_SEEDS) is not None, (
        f"{mutant.name}: not found in {MOST_SEEDS} seeds from {mutant.seed} on"
    )
