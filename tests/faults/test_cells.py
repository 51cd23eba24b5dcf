"""Every kind of fault by itself: what is struck, how, and whether the readers are in a group.

Kafka's own matrix (its system test ``transactions_test.py``) is {hard, clean} x {client, broker} x {ordered,
grouped}. Here there are frozen ones, brokers that have transactions or groups in hand, all brokers at once and
our controllers, too. A cell takes half a minute; the mixed run (`test_faults.py`) draws from the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.infra.cluster import EmbeddedCluster
from tests.faults.faults import HOWS, WHOMS, Faults, How, Whom, fault
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Services
from tests.workload.zygote import Zygote

CELLS = [(how, whom, group) for whom in WHOMS for how in HOWS for group in ("ordered", "grouped")]
CELL_FAULTS = 2
CELL_COMMITS = 10  # answered before each of them
pytestmark = [pytest.mark.broker, pytest.mark.soak]


@pytest.mark.timeout(
    400
)  # start, faults and end have their own deadlines, which say what they waited for
@pytest.mark.parametrize(("how", "whom", "reading"), CELLS)
def test_no_promise_breaks_in_each_cell_of_faults(
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
    crew = Crew(zygote, three_brokers.bootstrap, tmp_path, chance)
    services = Services(crew.bootstrap, tmp_path, crew.prefix)
    faults = Faults(crew, three_brokers, services)
    grouped = reading == "grouped"
    readers = [crew.reader(mode, grouped=grouped) for mode in ("ordered", "transactions")]
    readers += [crew.reader("raw"), *[crew.reader("ordered", grouped=True)] * grouped]
    print(f"ANABRANCH_SEED={SEED}")
    try:
        crew.start(services, [*crew.writers(2, 2), *readers])
        for one in [fault(chance, how, whom) for _ in range(CELL_FAULTS)]:
            crew.work_on(CELL_COMMITS, 30.0)
            faults.suffer(one)
        crew.finish()
    finally:
        crew.close()
    crew.judged(measured, f"{how} {whom} {reading}, {faults.figures()}")
    if whom == "coordinator":
        assert set(faults.struck) - {"idle"}, "no coordinator was struck while it had work in hand"
