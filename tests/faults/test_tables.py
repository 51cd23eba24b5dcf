"""Money in tables, while brokers, controllers and processes with replicas are killed and frozen, and streams scale.

All that processes read is recorded; the checker replays the commits by their timestamps, from the log alone.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable

import pytest

import anabranch
from anabranch.infra.cluster import EmbeddedCluster
from checker.recorder import SUFFIX, Recorder
from tests.faults.faults import Faults, Whom, schedule
from tests.tables.recorded import RecordedTables, RecordedWrites, id_of, text
from tests.workload.children import wait_more
from tests.workload.crew import READY_S, SEED, Crew
from tests.workload.leaders import Services
from tests.workload.money import PAIR, TOTAL, Move
from tests.workload.zygote import Zygote

SECONDS = float(os.environ.get("ANABRANCH_FAULTS_S", "180"))
MOVERS = 3
FEW = 20  # fewer commits show nothing; how many there are is the machine's speed
pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(300 + 3 * SECONDS)]


def begin(crew: Crew) -> None:
    """Tables with their first rows, and processes that move money."""
    with crew.connect() as client:
        for table in crew.streams:
            crew.until_ready(lambda table=table: client.create_table(table, 2, timeout=READY_S))  # type: ignore[misc]
        recorder = Recorder(crew.history / f"start{SUFFIX}")
        with client.begin(crew.scope) as begun:
            txn = RecordedWrites(recorder, begun, crew.scope, "start")
            for n in range(8):
                row = b"%d/start.%d" % (TOTAL // 8, n)
                txn.write(crew.streams[0], row, b"a%02d" % n)
            for table in crew.streams:
                txn.write(table, f"50/start.{table}".encode(), PAIR.encode())
            txn.commit()
    what = {"streams": crew.streams, "spool": str(crew.history)}
    movers = [Move(crew.bootstrap, crew.prefix, slot=slot, **what) for slot in range(MOVERS)]  # type: ignore[arg-type]
    crew.begin(movers)


def look(crew: Crew, client: anabranch.Client, recorder: Recorder) -> None:
    """Each process's folder, as it was left, and a new one: now, and at times that others read at."""
    times: list[int] = []
    for slot in range(MOVERS + 1):
        with client.replica(*crew.streams, folder=crew.history / f"{slot}.rows") as rows:
            bank = RecordedTables(lambda: recorder, rows, crew.scope, f"folder {slot}")
            for at in (None, *crew.chance.sample(times, min(5, len(times)))):
                with bank.snapshot(at=at, timeout=60.0) as view:
                    times += [] if at else [view.timestamp]
                    for table in crew.streams:
                        for _ in view.scan(table):
                            pass
    for table in crew.streams:
        with recorder.asking("changes", table=table, start=0, before=True) as answer:
            rows_before = crew.history / f"{table.partition('/')[2]}.changes"
            answer["rows"] = [
                [
                    text(c.key),
                    id_of(c.before),
                    id_of(c.after),
                    c.commit_timestamp,
                    c.txn_id and c.txn_id.hex(),
                ]
                for c in client.changes(table, until="end", before=True, folder=rows_before)
            ]
            answer["until"] = max((row[3] for row in answer["rows"]), default=0)


def test_no_money_is_lost_under_faults(
    three_brokers: EmbeddedCluster,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    measured: Callable[[str], None],
) -> None:
    """The total is right at every timestamp; each read has what the log had then, and at its commit."""
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(f"{SEED}/tables")
    folder = tmp_path_factory.mktemp("tables")
    crew = Crew(zygote, three_brokers.bootstrap, folder, chance, ("accounts", "limits"))
    services = Services(crew.bootstrap, folder, crew.prefix)
    faults = Faults(crew, three_brokers, services)
    try:
        crew.leaders = services
        services.start()
        begin(crew)
        whoms: list[tuple[Whom, ...]] = [("broker",), ("controller", "client")]
        faults.endure([schedule(random.Random(f"{SEED}/{w}"), w) for w in whoms], SECONDS)
        wait_more(crew.commits)
        crew.finish_tables(lambda client, recorder: look(crew, client, recorder))
        crew.judged(measured, f"money in tables, {faults.figures()}")
    finally:
        crew.close()
    assert crew.commits() > FEW, "too little was done under the faults"
    shutil.rmtree(folder, ignore_errors=True)
