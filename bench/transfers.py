"""Transfers between rows of a table beside blind one-shots of the same writes, and PostgreSQL's `SERIALIZABLE`.

10,000 accounts. A transfer reads two of them and writes both: `Replica.transact` over one replica, in 64
threads of one process. Blind: the same two events by `Client.begin`, and no look. PostgreSQL of Debian: 64
connections, serializable, commits synced, conflicts tried again; a broker alone acknowledges from its page
cache, PostgreSQL after an fsync: told, not levelled. Then one at a time, and 16 clients that all change one
row. In turn, in one run, medians of rounds once the broker is warm (``--quick``: fewer and shorter).
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from bench.setting import WARM_S, Place, percentile, side_by_side
from tests.postgres import server

TABLE = "bench/accounts"
ROWS, IN_FLIGHT, CONTENDERS = 10_000, 64, 16
GOALS = {"blind": 0.7, "postgres": 0.5, "one": 1.3}
LIMIT_S = 60.0
KEYS = [b"%08d" % i for i in range(ROWS)]
_READ = "select held from accounts where id = %s"
_WRITE = "update accounts set held = held + %s where id = %s"
_AMOUNTS = (-1, 1)
_CONFLICTS = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)

Call = Callable[
    [Sequence[int]], int
]  # reads and writes these rows; how many times it had to begin again


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rates, times and conflicts of the three."""
    rounds, seconds = (3, 3.0) if quick else (5, 10.0)
    with ExitStack() as stack:
        client = stack.enter_context(anabranch.connect(place.bootstrap, timeout=LIMIT_S))
        dsn = stack.enter_context(server()).dsn()
        client.create_table(TABLE, 4)
        with client.begin("bench") as txn:
            txn.write_many(TABLE, [(b"1000", key) for key in KEYS])
            txn.commit()
        _prepare(dsn)
        replica = stack.enter_context(client.replica(TABLE, timeout=LIMIT_S))
        replica.snapshot().close()  # it is loaded
        sides = {"table": _ours(replica), "blind": _blind(client), "postgres": _theirs(dsn)}
        _measure(sides["blind"], IN_FLIGHT, WARM_S, 2)
        many: dict[str, list[_Took]] = {side: [] for side in sides}
        single: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, call in sides.items():
                many[side].append(_measure(call, IN_FLIGHT, seconds, 2))
                single[side].append(_measure(call, 1, seconds / 3, 2).p50_ms)
        result: dict[str, Any] = {"rows": ROWS, "in_flight": IN_FLIGHT, "goals": GOALS}
        for side, call in sides.items():
            result[side] = {
                "rate": statistics.median(took.rate for took in many[side]),
                "again": statistics.median(took.again for took in many[side]),
                "p50_ms": statistics.median(single[side]),
            }
            if side != "blind":
                hot = _measure(call, CONTENDERS, seconds, 1)
                result[side] |= {
                    "hot_rate": hot.rate,
                    "hot_again": hot.again,
                    "hot_slowest_ms": hot.slowest_ms,
                    "hot_fewest": hot.fewest,
                }
    return result


def _prepare(dsn: str) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("create table accounts (id int primary key, held int not null)")
        cursor.execute("insert into accounts select i, 1000 from generate_series(0, %s) i", [ROWS])
        cursor.execute("analyze accounts")  # else it reads, and so locks, the whole table


def _ours(replica: Replica) -> Call:
    def transfer(rows: Sequence[int]) -> int:
        begun = 0

        def move(txn: TableTransaction) -> None:
            nonlocal begun
            begun += 1
            for row, amount in zip(rows, _AMOUNTS, strict=False):
                held = int(txn.get(TABLE, KEYS[row]) or 0) + amount
                txn.put(TABLE, KEYS[row], b"%d" % held)

        replica.transact(move, timeout=LIMIT_S)
        return begun - 1

    return transfer


def _blind(client: anabranch.Client) -> Call:
    def write(rows: Sequence[int]) -> int:
        with client.begin("bench") as txn:
            for row in rows:
                txn.write(TABLE, b"1000", key=KEYS[row])
            txn.commit()
        return 0

    return write


def _theirs(dsn: str) -> Call:
    own = threading.local()

    def transfer(rows: Sequence[int]) -> int:
        if not hasattr(own, "connection"):
            own.connection = psycopg.connect(dsn)
            own.connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        again = 0
        while True:
            try:
                with own.connection.transaction(), own.connection.cursor() as cursor:
                    for row in rows:
                        cursor.execute(_READ, [row]).fetchone()
                    for row, amount in zip(rows, _AMOUNTS, strict=False):
                        cursor.execute(_WRITE, [amount, row])
                return again
            except _CONFLICTS:
                again += 1

    return transfer


class _Took:
    """What some clients did in some seconds. ``fewest``: transfers of the client that had the fewest."""

    def __init__(self, times: list[list[float]], again: int, seconds: float) -> None:
        every = sorted(one for of in times for one in of)
        self.rate = len(every) / seconds
        self.again = again / max(1, len(every))
        self.p50_ms = percentile(every, 0.5) * 1000
        self.slowest_ms = percentile(every, 1.0) * 1000
        self.fewest = min(map(len, times))


def _measure(call: Call, clients: int, seconds: float, rows: int) -> _Took:
    """``rows``: that each call changes: any two, or always the same one."""
    times: list[list[float]] = [[] for _ in range(clients)]
    again = [0] * clients
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        chance = random.Random(number)
        while (began := time.perf_counter()) < until:
            again[number] += call(chance.sample(range(ROWS), 2) if rows == 2 else (0,))
            times[number].append(time.perf_counter() - began)

    side_by_side(work, clients)
    return _Took(times, sum(again), seconds)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The figures as a table."""
    ours, goals = result["table"], result["goals"]
    rows = []
    for side, title in (("blind", "blind one-shots"), ("postgres", "PostgreSQL, serializable")):
        peer = result[side]
        ratio = f"{ours['rate'] / peer['rate']:.2f} ×"
        rates = (f"{ours['rate']:,.0f} /s", f"{peer['rate']:,.0f} /s")
        rows.append([f"{IN_FLIGHT} in flight, {title}", *rates, ratio, f"≥ {goals[side]} ×"])
        again = (f"{ours['again']:.3f}", f"{peer['again']:.3f}")
        rows.append(["… begun again, a transfer", *again, "", ""])
        ratio = f"{ours['p50_ms'] / peer['p50_ms']:.2f} ×"
        times = (f"{ours['p50_ms']:.1f} ms", f"{peer['p50_ms']:.1f} ms")
        goal = f"≤ {goals['one']} ×" if side == "blind" else ""
        rows.append(["one at a time, p50", *times, ratio, goal])
    peer = result["postgres"]
    for name, title, form in (
        ("hot_rate", f"{CONTENDERS} clients, one row", "{:,.0f} /s"),
        ("hot_again", "… begun again, a transfer", "{:.2f}"),
        ("hot_slowest_ms", "… the slowest transfer", "{:,.0f} ms"),
        ("hot_fewest", "… of the client with the fewest", "{:,}"),
    ):
        rows.append([title, form.format(ours[name]), form.format(peer[name]), "", ""])
    return ["", "table", "peer", "ratio", "goal"], rows
