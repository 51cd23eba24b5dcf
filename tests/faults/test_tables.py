"""Money in tables, while brokers, controllers and processes with replicas are killed and frozen, and streams scale.

Commits are replayed by their timestamps from the log alone; every read of every process is held against that.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import anabranch
from anabranch.core.ids import NO_TXN
from anabranch.infra.cluster import EmbeddedCluster
from tests.crash.load import read_diaries
from tests.crash.zygote import Child, Zygote
from tests.faults.crew import READY_S
from tests.faults.faults import Whom, schedule
from tests.faults.judging import SEED
from tests.faults.moving_money import PAIR, TOTAL, Move, tables_of
from tests.faults.team import Team

SECONDS = float(os.environ.get("ANABRANCH_FAULTS_S", "180"))
MOVERS = 3
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
                client.create_table(table, 2, timeout=READY_S)
            with client.begin(self.scope) as txn:
                for n in range(8):
                    txn.write(self.streams[0], b"%d" % (TOTAL // 8), key=b"a%02d" % n)
                for table in self.streams:
                    txn.write(table, b"50", key=PAIR.encode())
                txn.commit()
        for slot in range(MOVERS):
            self._move(slot)
        for child in self.clients:
            child.wait_said("works", READY_S)
        self.note("all work")

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

    def finish(self) -> None:
        """All end what is under way; no transaction stays open."""
        self._over.set()
        self._finish_by = time.monotonic() + 240.0
        self._restart_ended()
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


Row = tuple[int, str | None]


@dataclass
class Truth:
    """All versions of all rows, by what the log has."""

    rows: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    by: dict[str, int] = field(default_factory=dict)  # transaction -> timestamp
    times: dict[str, list[int]] = field(default_factory=dict)

    def read(self, client: anabranch.Client, table: str) -> None:
        rows = self.rows[table] = {}
        times = self.times[table] = []
        with client.read_transactions(table, timeout=5.0) as reader:
            for committed in reader:
                last = {event.key: event.value for event in committed.events}
                times.append(committed.commit_timestamp)
                if committed.txn_id is not None:
                    self.by[committed.txn_id.hex()] = committed.commit_timestamp
                for key, value in last.items():
                    text = None if value is None else value.decode()
                    rows.setdefault((key or b"").decode(), []).append((times[-1], text))

    def value(self, table: str, key: str, at: int) -> str | None:
        found = self.rows[table].get(key, [])
        place = bisect_right(found, at, key=lambda row: row[0])
        return found[place - 1][1] if place else None

    def scan(self, table: str, low: str, high: str, at: int) -> dict[str, str]:
        keys = sorted(key for key in self.rows[table] if low <= key < high)
        found = {key: self.value(table, key, at) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def wrong(self, entry: dict[str, Any], at: int) -> Iterator[str]:
        """What was read otherwise than it stood at a time."""
        for table, key, row in entry["gets"]:
            due = self.value(table, key, at)
            if due != row:
                yield f"{key} of {table} was read as {row}, and is {due} at {at}: {entry}"
        for table, low, high, rows in entry["scans"]:
            if (then := self.scan(table, low, high, at)) != rows:
                yield f"{table} was read as {rows}, and is {then} at {at}: {entry}"


def judged(team: Movers) -> tuple[list[str], Counter[str]]:
    """What is wrong, and how much was looked at."""
    accounts, limits = team.streams
    truth, wrong, counts = Truth(), [], Counter[str]()
    with team.connect() as client:
        for table in team.streams:
            truth.read(client, table)
        for at in sorted({*truth.times[accounts], *truth.times[limits]}):
            total = sum(map(int, truth.scan(accounts, "a", "b", at).values()))
            both = sum(int(truth.value(table, PAIR, at) or "0") for table in team.streams)
            counts["instants"] += 1
            if total != TOTAL or both < 0:
                wrong.append(f"at {at}: a total of {total}, a pair of {both}")
        for entry in read_diaries(team.history):
            counts[entry["what"]] += 1
            if entry["what"] == "broken":
                written = (row[0] for row in truth.rows[entry["table"]].get(entry["key"], []))
                if entry["ts"] <= entry["at"] or entry["ts"] not in written:
                    wrong.append(f"no such write: {entry}")
                continue
            wrong += truth.wrong(entry, entry["at"])
            if entry["txn"] not in ("", NO_TXN.hex()):
                if truth.by.get(entry["txn"], entry["ts"]) != entry["ts"]:
                    wrong.append(f"committed at {truth.by[entry['txn']]}: {entry}")
                wrong += truth.wrong(entry, entry["ts"] - 1)
        # Each process's folder, as it was left; and a new one.
        for slot in range(MOVERS + 1):
            folder = team.history / f"{slot}.rows"
            with client.replica(*team.streams, folder=folder) as bank:
                now = bank.snapshot(timeout=60.0)
                times = [now.timestamp, *team.chance.sample(truth.times[accounts], 5)]
                now.close()
                for at in times:
                    with bank.snapshot(at=at) as then:
                        for table in team.streams:
                            found = {k.decode(): v.decode() for k, v in then.scan(table)}
                            if found != truth.scan(table, "", "~", at):
                                wrong.append(f"folder {slot} at {at}: {table} is {found}")
    return wrong, counts


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
        team.finish()
        wrong, counts = judged(team)
    finally:
        team.close()
    measured(
        f"money in tables: {dict(counts)}, {team.scalings} scalings, faults {dict(team.done)} in {SECONDS:.0f} s; "
        f"troubles {dict(team.troubles)}; seed {SEED}"
    )
    assert not team.defects, team.defects[:3]
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"
    assert counts["done"] > SECONDS, counts  # else too little was done under the faults
    shutil.rmtree(folder, ignore_errors=True)
