"""Money in tables, while brokers, controllers and processes with replicas are killed and frozen, and streams scale.

All that processes read is recorded; the checker replays the commits by their timestamps, from the log alone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable

import pytest

import anabranch
from anabranch.errors import RetryError
from anabranch.infra.cluster import EmbeddedCluster
from checker.recorder import SUFFIX, Recorder
from tests.crash.children import wait_more
from tests.crash.zygote import Child, Zygote
from tests.faults.crew import READY_S
from tests.faults.faults import Whom, schedule
from tests.faults.judging import SEED, judged
from tests.faults.last import Log, read_events, record_log
from tests.faults.moving_money import PAIR, TOTAL, Move, tables_of
from tests.faults.team import Team
from tests.tables.recorded import RecordedTables, RecordedWrites, id_of, text

SECONDS = float(os.environ.get("ANABRANCH_FAULTS_S", "180"))
MOVERS = 3
FEW = 20  # fewer commits show nothing; how many there are is the machine's speed
pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(300 + 3 * SECONDS)]


class Movers(Team):
    """Controllers, and processes that move money."""

    @property
    def streams(self) -> list[str]:
        return list(tables_of(self.scope))

    def start(self) -> None:
        self._start_controllers()
        with self.connect() as client:
            for table in self.streams:
                self._create(client, table)
            recorder = Recorder(self.history / f"start{SUFFIX}")
            with client.begin(self.scope) as begun:
                txn = RecordedWrites(recorder, begun, self.scope, "start")
                for n in range(8):
                    row = b"%d/start.%d" % (TOTAL // 8, n)
                    txn.write(self.streams[0], row, b"a%02d" % n)
                for table in self.streams:
                    txn.write(table, f"50/start.{table}".encode(), PAIR.encode())
                txn.commit()
        for slot in range(MOVERS):
            self._move(slot)
        for child in self.clients:
            child.wait_said("works", READY_S)
        self.note("all work")

    def _create(self, client: anabranch.Client, table: str) -> None:
        """As soon as a controller has made its topics."""
        until = time.monotonic() + READY_S
        while True:
            try:
                client.create_table(table, 2, timeout=READY_S)
                return
            except RetryError:
                if time.monotonic() > until:
                    raise

    def _move(self, slot: int) -> None:
        where = {"scope": self.scope, "spool": str(self.history), "slot": slot}
        seed = self.chance.randrange(1 << 30)
        bootstrap, prefix = self.cluster.bootstrap, self.prefix
        self._fork(Move(bootstrap, prefix, self._name("mover"), **where, seed=seed))  # type: ignore[arg-type]

    def _again(self, child: Child) -> None:
        self.clients.remove(child)
        self._gone.append(child)
        assert isinstance(child.spec, Move)
        self._move(child.spec.slot)

    def commits(self) -> int:
        """Those told so far."""
        return sum(len(child.said("told")) for child in (*self.clients, *self._gone))

    def finish(self) -> None:
        """All end what is under way; no transaction stays open."""
        self._over.set()
        self._finish_by = time.monotonic() + 240.0
        self._check_running()
        for child in list(self.clients):
            child.wait_said("works", READY_S)
            child.signal(signal.SIGTERM)
            child.wait_ended(120.0)
            if child.status != 0:
                self.defects.append(f"{child.spec.name}: {child.status} {child.events[-3:]}")
        for child in [*self.clients, *self._gone]:
            self._count(child)
        with self.connect() as client:
            self._wait_ended(client)


def look(team: Movers, client: anabranch.Client, recorder: Recorder) -> None:
    """Each process's folder, as it was left, and a new one: now, and at times that others read at."""
    times: list[int] = []
    for slot in range(MOVERS + 1):
        with client.replica(*team.streams, folder=team.history / f"{slot}.rows") as rows:
            bank = RecordedTables(lambda: recorder, rows, team.scope, f"folder {slot}")
            for at in (None, *team.chance.sample(times, min(5, len(times)))):
                with bank.snapshot(at=at, timeout=60.0) as view:
                    times += [] if at else [view.timestamp]
                    for table in team.streams:
                        for _ in view.scan(table):
                            pass
    for table in team.streams:
        with recorder.asking("changes", table=table, start=0, before=True) as told:
            rows_before = team.history / f"{table.partition('/')[2]}.changes"
            told["rows"] = [
                [
                    text(c.key),
                    id_of(c.before),
                    id_of(c.after),
                    c.commit_timestamp,
                    c.txn_id and c.txn_id.hex(),
                ]
                for c in client.changes(table, until="end", before=True, folder=rows_before)
            ]
            told["until"] = max((row[3] for row in told["rows"]), default=0)


def test_money(
    three_brokers: EmbeddedCluster,
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
    measured: Callable[[str], None],
) -> None:
    """The total is right at every timestamp; all that was read stood so, at the snapshot and below the commit."""
    print(f"ANABRANCH_SEED={SEED}")
    chance = random.Random(f"{SEED}/tables")
    folder = tmp_path_factory.mktemp("tables")
    team = Movers(zygote, three_brokers, folder, chance, [])
    try:
        team.start()
        whoms: list[tuple[Whom, ...]] = [("broker",), ("controller", "client")]
        team.endure([schedule(random.Random(f"{SEED}/{w}"), w) for w in whoms], SECONDS)
        wait_more(team.commits)
        team.finish()
        recorder = Recorder(team.history / f"last{SUFFIX}")
        with team.connect() as client:
            look(team, client, recorder)
        log = Log(three_brokers.bootstrap)
        record_log(recorder, log, read_events(log, team.streams, tables=True), table=True)
        log.close()
        team.told = team.commits()
        judged(team, measured, "money in tables", SECONDS)
    finally:
        team.close()
    assert team.told > FEW, "too little was done under the faults"
    shutil.rmtree(folder, ignore_errors=True)
