"""A stream is in trouble for long: nothing that never touched it waits, but for what `tests/sim/hour.py` names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mutants.catalogue import CALM
from tests.sim.simulation import simulate
from tests.sim.weather import CLEAR, HOUR


@pytest.mark.slow(60)
@pytest.mark.timeout(300)
def test_nothing_waits_for_a_stream_that_it_never_touched() -> None:
    weather: dict[str, Any] = {**CLEAR, **CALM, **HOUR, "hour_s": 600.0, "lose_s": 0, "lag_s": 0}
    report = simulate(1, **weather)
    assert not report.violation, str(report)
