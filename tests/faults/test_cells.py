"""Every kind of fault by itself: what is struck, how, and whether who reads is in a group.

Kafka's own matrix (its system test ``transactions_test.py``) is {hard, clean} x {client, broker} x {ordered,
grouped}. Here there are frozen ones, brokers that have transactions or groups in hand, all brokers at once and
our controllers, too. A cell takes half a minute; the mixed run (`test_faults.py`) draws from the same faults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.infra.cluster import EmbeddedCluster
from tests.crash.zygote import Zygote
from tests.faults.faults import HOWS, WHOMS, How, Whom, fault
from tests.faults.judging import SEED, judged
from tests.faults.team import Team

CELLS = [(how, whom, group) for whom in WHOMS for how in HOWS for group in ("ordered", "grouped")]
CELL_FAULTS = 2
CELL_COMMITS = 10  # told before each of them
pytestmark = [pytest.mark.broker, pytest.mark.soak]


@pytest.mark.timeout(
    400
)  # start, faults and end have their own deadlines, which say what they waited for
@pytest.mark.parametrize(("how", "whom", "reading"), CELLS)
def test_cell(
    how: How,
    whom: Whom,
    reading: str,
    three_brokers: EmbeddedCluster,
    zygote: Zygote,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    """One thing is struck, while transactions are written and read."""
    chance = random.Random(f"{SEED}/{how}/{whom}/{reading}")
    grouped = reading == "grouped"
    readers = [("ordered", grouped), ("transactions", grouped), ("raw", False)]
    if grouped:
        readers.insert(0, ("ordered", True))
    team = Team(zygote, three_brokers, tmp_path, chance, readers)
    faults = [fault(chance, how, whom) for _ in range(CELL_FAULTS)]
    print(f"ANABRANCH_SEED={SEED}")
    began = time.monotonic()
    try:
        team.start()
        for one in faults:
            team.work_on(CELL_COMMITS, 30.0)
            team.suffer(one)
        team.finish()
    finally:
        team.close()
    judged(team, measured, f"{how} {whom} {reading}", time.monotonic() - began)
    if whom == "coordinator":
        assert set(team.struck) - {"idle"}, "no coordinator was struck while it had work in hand"
