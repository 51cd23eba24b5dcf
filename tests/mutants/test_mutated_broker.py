"""On a real broker the checker finds planted bugs in what clients recorded; `scripts/mutants` looks for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Broker
from tests.mutants.catalogue import named
from tests.mutants.workload import TRIALS, Workload
from tests.workload.zygote import Zygote

MOST_RUNS = 4
WORK_S = 2.5


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["a merge is dropped", "plain writes are committed twice"])
def test_a_planted_bug_is_found(
    broker: Broker, zygote: Zygote, tmp_path: Path, measured: Callable[[str], None], name: str
) -> None:
    mutant = named(name)
    trial = replace(TRIALS[mutant.broker], work_s=WORK_S)
    for seed in range(MOST_RUNS):
        folder = tmp_path / str(seed)
        verdict = Workload(zygote, broker.bootstrap, folder, mutant, trial, seed).run()
        if verdict.found:
            measured(f"{name}: found by run {seed + 1}: {verdict}")
            return
    pytest.fail(f"{name}: not found in {MOST_RUNS} runs")
