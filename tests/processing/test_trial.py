"""Processors under SIGKILLs, zombies and scalings: outputs and stores are a plain fold of the input."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Broker
from tests.processing.trial import Plan, Trial

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
SOAK = Plan(seed=SEED)
QUICK = Plan(events=24_000, kills=3, zombies=1, scalings=2, seconds=6.0, session=2.0, seed=SEED)
JOINED = Plan(
    events=150_000,
    kills=12,
    zombies=3,
    scalings=10,
    seconds=60.0,
    session=3.0,
    seed=SEED,
    tables=True,
)


@pytest.mark.soak
@pytest.mark.broker
@pytest.mark.slow(30)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", [QUICK, JOINED, SOAK])
def test_a_processor_under_kills_is_a_fold_of_its_input(
    broker: Broker, tmp_path: Path, measured: Callable[[str], None], plan: Plan
) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    measured(Trial(broker.bootstrap, tmp_path, plan).run().told())
