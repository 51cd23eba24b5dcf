"""64 clients that add 1 to one row, against PostgreSQL's ``UPDATE … SET n = n + 1``.

Ours: one client process with one replica, 64 threads; each transaction is `txn.add` and a commit. `get` and `put`,
which lock the row, show what it replaces. PostgreSQL: a connection for each of 64 threads of one process, one
prepared statement a commit. All on one machine, in turn, medians of rounds. The row is the number of commits.

Durability is not the same. PostgreSQL's default forces its log to the disk before a commit is answered (*fsync*).
Kafka answers when its replicas have the batch in memory (acks=all; here one replica), and leaves the disk to the
operating system: *async* is PostgreSQL with ``synchronous_commit=off``, which loses the last commits if it crashes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import check
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench.oneshot import Figures, measure
from bench.setting import WARM_S, Place
from tests.postgres import server

CLIENTS = 64
KEY = b"n"
KINDS = ("add", "get and put", "fsync", "async")
LEAST_PER_S, LEAST_RATIO = 2_000, 1.0  # of add; the ratio to fsync


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Figures of each of `KINDS`, and goals."""
    rounds, seconds, warm_s = (1, 3.0, 5.0) if quick else (5, 8.0, WARM_S)
    found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        admin = stack.enter_context(anabranch.connect(place.bootstrap, lane=ADMIN_LANE))
        admin.feature_level(raise_to=LEVEL)
        table, locked = (place.new_stream(1, table=True) for _ in range(2))
        client = stack.enter_context(anabranch.connect(place.bootstrap))
        rows = stack.enter_context(client.replica(table, locked))
        database = stack.enter_context(server())
        connections = [
            stack.enter_context(psycopg.connect(database.dsn(), autocommit=True))
            for _ in range(CLIENTS)
        ]
        connections[0].execute("create table counters (key text primary key, n bigint)")
        connections[0].execute("insert into counters values ('n', 0)")
        done: list[None] = []
        kinds: dict[str, list[Callable[[], None]]] = {
            "add": [_adding(rows, table, done)] * CLIENTS,
            "get and put": [_locking(rows, locked)] * CLIENTS,
            "fsync": [_updating(each) for each in connections],
            "async": [_updating(each) for each in connections],
        }
        measure(kinds["add"], warm_s)
        for _ in range(rounds):
            for kind in KINDS:
                if kind in ("fsync", "async"):
                    for each in connections:
                        each.execute(
                            f"set synchronous_commit to {'on' if kind == 'fsync' else 'off'}"
                        )
                found[kind].append(measure(kinds[kind], seconds))
        with rows.snapshot() as view:
            check(view.get(table, KEY) == b"%d" % len(done), "the row is not the number of commits")
    medians = {
        kind: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for kind, each in found.items()
    }
    return {
        "clients": CLIENTS,
        "rounds": rounds,
        "seconds_each": seconds,
        "rows": medians,
        "goals": {
            "add_per_s_at_least": LEAST_PER_S,
            "add_of_fsync_at_least": LEAST_RATIO,
            "add_of_fsync": medians["add"]["per_s"] / medians["fsync"]["per_s"],
            "add_of_async": medians["add"]["per_s"] / medians["async"]["per_s"],
        },
    }


def _adding(rows: Replica, table: str, done: list[None]) -> Callable[[], None]:
    def commit() -> None:
        with rows.begin(fresh=False) as txn:
            txn.add(table, KEY, 1)
            txn.commit()
        done.append(None)

    return commit


def _locking(rows: Replica, table: str) -> Callable[[], None]:
    def raised(txn: TableTransaction) -> None:
        txn.put(table, KEY, b"%d" % (int(txn.get(table, KEY) or b"0") + 1))

    def commit() -> None:
        rows.transact(raised, timeout=60)

    return commit


def _updating(own: psycopg.Connection[Any]) -> Callable[[], None]:
    def commit() -> None:
        own.execute("update counters set n = n + 1 where key = 'n'", prepare=True)

    return commit


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    shown = {"add": f"≥ {LEAST_PER_S:,} /s, ≥ {LEAST_RATIO} × fsync"}
    rows = [
        [
            kind,
            f"{one['per_s']:,.0f} /s",
            f"{one['per_s'] / result['rows']['fsync']['per_s']:.2f} ×",
            f"{one['p50_ms']:.1f} ms",
            f"{one['p99_ms']:.1f} ms",
            shown.get(kind, ""),
        ]
        for kind, one in result["rows"].items()
    ]
    return ["64 clients, one row", "commits", "of fsync", "p50", "p99", "goal"], rows
