"""Processes, controllers and the database are killed: the database's word wins, and no money is made or lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import IO

import psycopg
import pytest

import anabranch
from anabranch.ledger import Ledger
from tests.cluster import Cluster, start_cluster
from tests.conftest import Broker
from tests.ledger.child import START, STEPS
from tests.ledger.places import PostgresPlace
from tests.owned import start_module
from tests.postgres import Postgres, server

STRIKES = "child", "child", "frozen", "frozen", "controller", "database"
SECONDS = float(os.environ.get("ANABRANCH_MONEY_S", "300"))


def child(
    cluster: Cluster, place: PostgresPlace, scopes: str, output: IO[bytes], *words: str
) -> subprocess.Popen[bytes]:
    arguments = [cluster.bootstrap, cluster.prefix, place.dsn, scopes, *words]
    return start_module("tests.ledger.child", arguments, output=output, environment=os.environ)


def end(client: anabranch.Client, ledger: Ledger) -> None:
    """Recover until nothing is prepared; sessions of killed processes end soon."""
    until = time.monotonic() + 60
    while True:
        found = ledger.recover(client, older_than=0.0)
        assert found.alarms == {}
        if not found.held and not ledger.rows():
            return
        assert time.monotonic() < until, found
        time.sleep(0.1)


def events(client: anabranch.Client, scopes: str) -> list[anabranch.Event]:
    names = [f"{scope}/postings" for scope in scopes.split(",")]
    snapshot = client.snapshot(names)
    return [event for name in names for event in snapshot.read(name)]


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


@pytest.mark.broker
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(10.0, marks=pytest.mark.slow(30)),
        pytest.param(
            SECONDS, marks=[pytest.mark.soak, pytest.mark.timeout(SECONDS * 3 + 120)], id="soak"
        ),
    ],
)
def test_money(broker: Broker, unique: str, tmp_path: Path, seconds: float) -> None:
    """Clients, the controller, the recovery service and the database are killed; totals hold at every timestamp."""
    chance = random.Random(unique)
    scopes = "shop,bank"
    settings = ("--session-timeout", "2")
    cluster = start_cluster(broker.bootstrap, tmp_path, f"m{unique}", settings)
    with (
        anabranch.connect(cluster.bootstrap, prefix=cluster.prefix) as client,
        server() as database,
        (tmp_path / "children").open("wb") as output,
    ):
        place = PostgresPlace(database.dsn())
        place.made()
        with closing(place.connect()) as connection:
            connection.execute("create table account as select %s::bigint as balance", (START,))
            connection.commit()
        for scope in scopes.split(","):
            client.create_stream(f"{scope}/postings", segments=2)
        Ledger(place.connect).create(client)

        def start(number: int) -> subprocess.Popen[bytes]:
            if number:
                return child(cluster, place, scopes, output, f"child {number}")
            words = [
                "--bootstrap",
                cluster.bootstrap,
                "--prefix",
                cluster.prefix,
                "--database",
                place.dsn,
            ]
            words = ["ledger", "recover", *words, "--older-than", "1s", "--every", "1s"]
            return start_module("anabranch.cli", words, output=output, environment=os.environ)

        children = [start(number) for number in range(3)]
        until, strikes = time.monotonic() + seconds, 0
        while strikes < 6 or time.monotonic() < until:
            grow(place, (tmp_path / "children"))
            time.sleep(chance.uniform(0.0, 0.3))
            strikes += 1
            strike = "database" if strikes == 2 else chance.choice(STRIKES)
            number = chance.randrange(3)
            if strike == "child":
                children[number].kill()
                children[number].wait()
                children[number] = start(number)
            elif strike == "controller":
                cluster.controller.kill()
                cluster.controller.start()
            elif strike == "frozen":
                pid = chance.choice([children[number].pid, cluster.controller.pid])
                os.kill(pid, signal.SIGSTOP)
                time.sleep(chance.uniform(0.5, 4.0))
                os.kill(pid, signal.SIGCONT)
            else:
                database.kill()
                database.start()
        for process in children:
            process.kill()
            process.wait()
        cluster.controller.wait_leading()
        end(client, Ledger(place.connect))
        judge(client, place, scopes)
        cluster.controller.stop()


def grow(place: PostgresPlace, said: Path) -> None:
    """Until some more orders are there: each strike meets processes at work."""
    goal, until = len(place.orders()) + 3, time.monotonic() + 60
    while len(place.orders()) < goal:
        assert time.monotonic() < until, said.read_text()[-3000:]
        time.sleep(0.02)


def judge(client: anabranch.Client, place: PostgresPlace, scopes: str) -> None:
    """At every commit timestamp: table and streams together have all the money, and are equal to each other."""
    moved = {row[0]: row[1] for row in place.all("select id, amount from orders")}
    shares: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events(client, scopes):
        assert event.txn_id is not None
        shares[event.commit_timestamp, event.txn_id.hex()].append(int(event.value or b"0"))
    assert len(shares) >= 10
    table, streams = START, 0
    for (_, txn_id), found in sorted(shares.items()):
        table -= moved.pop(txn_id)
        streams += sum(found)
        assert len(found) == 2
        assert table + streams == START, txn_id
    assert moved == {}
    assert place.all("select balance from account") == [(table,)]
