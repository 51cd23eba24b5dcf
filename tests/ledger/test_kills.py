"""Processes, controllers and the database are killed: the database's word wins, and no money is made or lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psycopg
import pytest

import anabranch
from anabranch.errors import RetryError
from anabranch.ledger import Ledger
from anabranch.ports import Log
from tests import shifted
from tests.cluster import START_DEADLINE_S, Cluster, ControllerProcess
from tests.conftest import Broker
from tests.crash.oracle import check_epochs, check_stream, figures, read_stream
from tests.ledger.child import START, STEPS, TABLE
from tests.ledger.places import PostgresPlace
from tests.owned import send_signal, start_module
from tests.postgres import Postgres, server
from tests.waiting import wait_until
from tests.workload.crew import SEED

SCOPES = "shop", "bank", "till"
STREAMS = [f"{scope}/postings" for scope in SCOPES]
FEW_STRIKES = ["child", "leader", "frozen", "killed_database", "scaled", "look"]
STRIKES = [*FEW_STRIKES, "child", "frozen", "frozen_database", "scaled", "look"]
SECONDS = float(os.environ.get("ANABRANCH_MONEY_S", "180"))
APART_S = 300.0  # that clocks are apart
SETTINGS = ("--session-timeout", "2", "--max-clock-skew", "600", "--chunk-bytes", "4096")
Place = tuple[str, int, int, bytes | None]


def child(
    cluster: Cluster, place: PostgresPlace, scopes: str, output: IO[bytes], *words: str
) -> subprocess.Popen[bytes]:
    arguments = [cluster.bootstrap, cluster.prefix, place.dsn, scopes, *words]
    return start_module("tests.ledger.child", arguments, output=output, environment=os.environ)


def end(client: anabranch.Client, ledger: Ledger) -> None:
    """Recover until nothing is prepared; sessions of killed processes end soon."""
    until = time.monotonic() + 60
    while True:
        found = ledger.recover(client, older_than=-APART_S)
        assert found.alarms == {}
        if not found.held and not ledger.rows():
            return
        assert time.monotonic() < until, found
        time.sleep(0.1)


def events(client: anabranch.Client, scopes: str) -> list[anabranch.Event]:
    names = [f"{scope}/postings" for scope in scopes.split(",")]
    snapshot = client.snapshot(names)
    return [event for name in names for event in snapshot.read(name)]


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.slow(10)
def test_killed_at_each_step(
    cluster: Cluster, client: anabranch.Client, postgres: Postgres, unique: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"create database k{unique}")
    place = PostgresPlace(postgres.dsn(f"k{unique}"))
    place.made()
    scopes = f"shop{unique},bank{unique}"
    for scope in scopes.split(","):
        client.create_stream(f"{scope}/postings", segments=1)
    ledger = Ledger(place.connect)
    ledger.create(client)
    with (tmp_path / "children").open("wb") as output:
        children = [child(cluster, place, scopes, output, step, step) for step in STEPS]
        assert {process.wait(60) for process in children} == {-9}, (
            tmp_path / "children"
        ).read_text()
    end(client, ledger)
    # The transaction that died in its block was never prepared: silence aborts it.
    expected = sorted(step for step, committed in STEPS.items() if committed)
    assert place.orders() == expected
    assert sorted((event.value or b"").decode() for event in events(client, scopes)) == sorted(
        2 * expected
    )


@dataclass
class Money:
    """Controllers, clients, recovery and the database, each by a clock of its own, and what strikes them."""

    broker: Broker
    folder: Path
    place: PostgresPlace
    database: Postgres
    chance: random.Random
    client: anabranch.Client
    prefix: str
    output: IO[bytes]
    looks: list[tuple[int, set[Place]]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.controllers = [self.controller(number) for number in range(2)]
        self.children: list[subprocess.Popen[bytes]] = []

    def clock(self) -> dict[str, str]:
        return shifted.environment(self.chance.uniform(-APART_S / 2, APART_S / 2))

    def controller(self, number: int) -> ControllerProcess:
        return ControllerProcess(
            self.broker.bootstrap, self.folder / f"c{number}", self.prefix, SETTINGS, self.clock(), "tests.shifted"
        )  # fmt: skip

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """The recovery service, or a client that moves money."""
        words = [self.broker.bootstrap, self.prefix, self.place.dsn]
        if number:
            module, words = "tests.ledger.child", [*words, ",".join(SCOPES), f"child {number}"]
        else:
            named = zip(("--bootstrap", "--cluster-prefix", "--database"), words, strict=True)
            words = [word for pair in named for word in pair]
            words = ["ledger", "recover", *words, "--older-than", "1s", "--every", "1s"]
            module = "tests.shifted"
        environment = os.environ | self.clock()
        return start_module(module, words, output=self.output, environment=environment)

    def run(self, seconds: float) -> None:
        self.children = [self.start(number) for number in range(3)]
        until = time.monotonic() + seconds
        turn = itertools.chain(self.chance.sample(FEW_STRIKES, 6), iter(self.draw, None))
        while sum(self.done.values()) < 6 or time.monotonic() < until:
            self.grow()
            time.sleep(self.chance.uniform(0.0, 0.3))
            strike = next(turn)
            getattr(self, strike)()
            self.done[strike] += 1
        for process in self.children:
            process.kill()
            process.wait()

    def draw(self) -> str:
        return self.chance.choice(STRIKES)

    def grow(self) -> None:
        """Until some more parts are there: each strike meets processes at work."""
        goal, until = len(self.place.orders()) + 9, time.monotonic() + 60
        while len(self.place.orders()) < goal:
            assert time.monotonic() < until, (self.folder / "children").read_text()[-3000:]
            time.sleep(0.02)

    @contextmanager
    def troubled(self) -> Iterator[None]:
        """Controllers may be away."""
        try:
            yield
        except RetryError as error:
            self.refused[type(error).__name__] += 1

    # -- strikes ------------------------------------------------------------------------------------------

    def child(self) -> None:
        number = self.chance.randrange(3)
        self.children[number].kill()
        self.children[number].wait()
        self.children[number] = self.start(number)

    def leading(self) -> ControllerProcess:
        leading = [each for each in self.controllers if each.leading()]
        return self.chance.choice(leading or self.controllers)

    def leader(self) -> None:
        """Another one leads, by another clock."""
        killed = self.leading()
        killed.kill()
        killed.environment = self.clock()
        killed.start()

    def frozen(self) -> None:
        pid = self.chance.choice([*(child.pid for child in self.children), self.leading().pid])
        send_signal(pid, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.5, 4.0))
        os.kill(pid, signal.SIGCONT)

    def killed_database(self) -> None:
        self.database.kill()
        self.database.start()

    def frozen_database(self) -> None:
        self.database.freeze(self.chance.uniform(0.2, 2.0))

    def scaled(self) -> None:
        stream = self.chance.choice(STREAMS)
        with self.troubled():
            now = len(self.client.describe(stream, timeout=10.0).segments)
            wanted = self.chance.choice([n for n in (1, 2, 3) if n != now])
            self.client.scale(stream, wanted, timeout=10.0)

    def look(self) -> None:
        """A snapshot; what it has now it has in the end, too."""
        with self.troubled():
            snapshot = self.client.snapshot(
                STREAMS, mode=self.chance.choice(("snapshot", "latest"))
            )
            self.looks.append((snapshot.timestamp, placed(read(snapshot), snapshot.timestamp)))

    # -- judging ------------------------------------------------------------------------------------------

    def judge(self) -> Counter[str]:
        """At every commit timestamp: streams and table have all the money, and the same parts of transactions."""
        rows: dict[str, dict[str, int]] = defaultdict(dict)
        for key, amount in self.place.all("select id, amount from orders"):
            txn_id, _, account = key.partition("/")
            rows[txn_id][account] = amount
        found = read(self.client.snapshot(STREAMS))
        parts: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for event in found:
            assert event.txn_id is not None
            scope, amount = event.stream.partition("/")[0], int((event.value or b"").split()[0])
            parts[event.commit_timestamp, event.txn_id.hex()][scope].append(amount)
        assert len(parts) >= 10
        table, streams, kinds = START, 0, Counter[str]()
        for (_, txn_id), by_scope in sorted(parts.items()):
            expected = rows.pop(txn_id)
            own = expected.pop(TABLE, 0)
            assert {scope: sum(some) for scope, some in by_scope.items()} == expected, txn_id
            table, streams = table + own, streams + sum(map(sum, by_scope.values()))
            assert table + streams == START, txn_id
            kinds["big" if max(map(len, by_scope.values())) > 1 else "small"] += 1
        assert rows == {}
        assert self.place.all("select balance from account") == [(table,)]
        stamps = sorted({stamp for stamp, _ in parts})
        for at in self.chance.sample(stamps, 5):
            self.looks.append((at, placed(read(self.client.snapshot(STREAMS, at)), at)))
        for at, then in self.looks:
            assert then == placed(found, at)
        return kinds


def read(snapshot: anabranch.Snapshot) -> list[anabranch.Event]:
    return [event for name in STREAMS for event in snapshot.read(name)]


def placed(found: list[anabranch.Event], at: int) -> set[Place]:
    """Events up to a timestamp."""
    return {(e.stream, e.partition, e.offset, e.value) for e in found if e.commit_timestamp <= at}


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 3 + 120)
def test_no_money_is_lost_when_processes_are_killed(
    broker: Broker,
    log: Log,
    unique: str,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    """All are killed and frozen, by clocks minutes apart, while streams scale; totals hold at every timestamp."""
    print(f"ANABRANCH_SEED={SEED}")
    with (
        anabranch.connect(broker.bootstrap, prefix=f"m{unique}") as client,
        server() as database,
        (tmp_path / "children").open("wb") as output,
    ):
        place = PostgresPlace(database.dsn())
        place.made()
        chance, prefix = random.Random(SEED), f"m{unique}"
        money = Money(broker, tmp_path, place, database, chance, client, prefix, output)
        place.run(f"create table account as select {START}::bigint as balance")
        with ExitStack() as stack:
            for each in money.controllers:
                stack.enter_context(each)
            wait_until(lambda: any(each.leading() for each in money.controllers), START_DEADLINE_S)
            for stream in STREAMS:
                client.create_stream(stream, segments=2)
            ledger = Ledger(place.connect)
            ledger.create(client)
            money.run(SECONDS)
            end(client, ledger)
            kinds = money.judge()
        told = [read_stream(log, stream) for stream in STREAMS]
        for each_told in told:
            check_stream(each_told)
            check_epochs(each_told)
        strikes = f"{dict(money.done)}, {dict(money.refused)}"
        measured(
            f"money, seed {SEED}: {dict(kinds)} transfers, {strikes}; {[figures(s) for s in told]}"
        )
