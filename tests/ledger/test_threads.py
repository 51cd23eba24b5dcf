"""Threads of one process that share a ledger and a client: none waits for another one's database."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import psycopg
import pytest

import anabranch
from anabranch.ledger import Ledger
from tests.ledger.places import PostgresPlace
from tests.postgres import Postgres

OTHERS, EACH = 8, 5
WAITS_S = 60.0


@pytest.mark.broker
def test_no_transaction_waits_for_another_one_s_database_commit(
    client: anabranch.Client, postgres: Postgres, unique: str
) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"create database t{unique}")
    dsn = postgres.dsn(f"t{unique}")
    place = PostgresPlace(dsn).made()
    place.run("create table once (id int unique deferrable initially deferred)")
    scope, stream = f"shop{unique}", f"shop{unique}/orders"
    client.create_stream(stream, segments=1)
    ledger = Ledger(lambda: psycopg.connect(dsn))
    ledger.create(client)
    done: list[str] = []

    def order(name: str, statement: str) -> None:
        with client.begin(scope) as txn, ledger.commit(txn, timeout=WAITS_S) as cursor:
            txn.write(stream, name.encode(), key=b"k")
            cursor.execute(statement.encode())
        assert txn.result is not None
        done.append(name)

    def several(name: str) -> None:
        for number in range(EACH):
            order(f"{name}{number}", "insert into orders values (gen_random_uuid()::text, 1)")

    with closing(psycopg.connect(dsn)) as holder:
        holder.execute("insert into once values (1)")
        slow = threading.Thread(target=order, args=("slow", "insert into once values (1)"))
        slow.start()
        _until_a_commit_waits(dsn)
        others = [threading.Thread(target=several, args=(f"o{n}-",)) for n in range(OTHERS)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join(WAITS_S)
        assert len(done) == OTHERS * EACH
        assert slow.is_alive()
        assert client.prepared(scope).check() != [], "it has prepared, and its database commits"
        holder.rollback()
    slow.join(WAITS_S)
    assert done[-1] == "slow"
    assert len(place.orders()) == OTHERS * EACH


def _until_a_commit_waits(dsn: str) -> None:
    waits = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query ilike 'commit%' "
        "and datname = current_database()"
    )
    until = time.monotonic() + WAITS_S
    with closing(psycopg.connect(dsn, autocommit=True)) as observer:
        while observer.execute(waits).fetchone() == (0,):
            assert time.monotonic() < until, "no commit waits"
            time.sleep(0.02)
