"""Simulated runs with transactions over two control partitions, and planted bugs that such runs find."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.mutants.catalogue import OVER, named
from tests.sim.simulation import Report, simulate
from tests.sim.weather import CLEAR

ACROSS: dict[str, Any] = {**CLEAR, **OVER}


def run(seed: int, bug: AbstractContextManager[object] | None = None) -> Report:
    return simulate(seed, bug=bug, **ACROSS)


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="one"),
        pytest.param(range(100), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_transaction_over_two_control_partitions_has_one_outcome(seeds: range) -> None:
    """One outcome and one timestamp, though controllers die, and messages are lost, late or doubled."""
    for seed in seeds:
        report = run(seed)
        assert not report.violation, str(report)


# Two that are found soon; `test_mutants` has others. `scripts/mutants seeds` lists those whose seeds have moved.
@pytest.mark.parametrize(
    "name", ["messages leave before their round", "a participant's time counts"]
)
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = named(name)
    assert run(mutant.seed, mutant.plant()).violation
