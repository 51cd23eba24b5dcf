"""Transfers between one hot row and any other: 16 clients, and in PostgreSQL's ``select … for update``.

10,000 accounts. A transfer reads account 0 and another one with locks, and writes both: `Replica.transact` in 16
threads over one replica, then in 4 processes of 4 threads, each process with a client and replica of its own.
PostgreSQL of Debian: 16 connections, read committed, commits synced. In turn, in one run, medians of rounds once
the broker is warm (``--quick``: fewer and shorter). ``fewest``: transfers of the slowest client, of the mean.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import psycopg

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench.setting import WARM_S, Place, percentile, side_by_side
from tests.postgres import server

TABLE = "bench/accounts"
ROWS, CLIENTS, PROCESSES = 10_000, 16, 4
GOAL_RATE, GOAL_FEWEST = 400, 0.5
LIMIT_S = 60.0
_KEYS = [b"%08d" % i for i in range(ROWS)]
_READ = "select held from accounts where id = %s for update"
_WRITE = "update accounts set held = %s where id = %s"

Call = Callable[
    [int], int
]  # transfers between account 0 and this one; how often it had to begin again


class Took(NamedTuple):
    """The seconds of each transfer, by client, and how many had to begin again."""

    times: list[list[float]]
    again: int


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rates, times and fairness of the three."""
    rounds, seconds = (2, 4.0) if quick else (5, 10.0)
    with ExitStack() as stack:
        client = stack.enter_context(anabranch.connect(place.bootstrap, timeout=LIMIT_S))
        dsn = stack.enter_context(server()).dsn()
        with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        client.create_table(TABLE, 4)
        with client.begin("bench") as txn:
            txn.write_many(TABLE, [(b"1000", key) for key in _KEYS])
            txn.commit()
        _prepare(dsn)
        replica = stack.enter_context(client.replica(TABLE, timeout=LIMIT_S))
        replica.snapshot().close()  # it is loaded
        workers = stack.enter_context(_workers(place.bootstrap))
        ours, theirs = _ours(replica), _theirs(dsn)
        sides: dict[str, Callable[[float], Took]] = {
            "threads": lambda s: measure(ours, CLIENTS, s),
            "processes": lambda s: _by_workers(workers, s),
            "postgres": lambda s: measure(theirs, CLIENTS, s),
        }
        sides["threads"](WARM_S / 3 if quick else WARM_S)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, do in sides.items():
                found[side].append(_figures(do(seconds), seconds))
    return {
        "clients": CLIENTS,
        "goals": {"rate": GOAL_RATE, "fewest": GOAL_FEWEST},
        **{
            side: {name: statistics.median(each[name] for each in its) for name in its[0]}
            for side, its in found.items()
        },
    }


def _figures(took: Took, seconds: float) -> dict[str, float]:
    every = sorted(one for of in took.times for one in of)
    counts = [len(of) for of in took.times]
    return {
        "rate": len(every) / seconds,
        "fewest": min(counts) / (sum(counts) / len(counts)),
        "again": took.again / len(every),
        "p50_ms": percentile(every, 0.5) * 1000,
        "p99_ms": percentile(every, 0.99) * 1000,
        "slowest_ms": every[-1] * 1000,
    }


def measure(call: Call, clients: int, seconds: float) -> Took:
    """Transfers of threads that each begin the next one at once."""
    times: list[list[float]] = [[] for _ in range(clients)]
    again = [0] * clients
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        chance = random.Random(number)
        while (began := time.perf_counter()) < until:
            again[number] += call(chance.randrange(1, ROWS))
            times[number].append(time.perf_counter() - began)

    side_by_side(work, clients)
    return Took(times, sum(again))


def _ours(replica: Replica) -> Call:
    def transfer(other: int) -> int:
        begun = 0

        def move(txn: TableTransaction) -> None:
            nonlocal begun
            begun += 1
            held = [int(txn.get(TABLE, _KEYS[row]) or 0) for row in (0, other)]
            txn.put(TABLE, _KEYS[0], b"%d" % (held[0] - 1))
            txn.put(TABLE, _KEYS[other], b"%d" % (held[1] + 1))

        replica.transact(move, timeout=LIMIT_S)
        return begun - 1

    return transfer


@contextmanager
def _workers(bootstrap: str) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Processes that measure for as long as a line says, and answer with what they took."""
    command = [sys.executable, "-m", "bench.hot", bootstrap]
    pipe = subprocess.PIPE
    found = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(PROCESSES)
    ]
    try:
        for each in found:
            _line(each)
        yield found
    finally:
        for each in found:
            each.communicate()


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _by_workers(workers: Sequence[subprocess.Popen[str]], seconds: float) -> Took:
    for each in workers:
        assert each.stdin is not None
        print(seconds, file=each.stdin, flush=True)
    took = [Took(*_line(each)) for each in workers]
    return Took([of for one in took for of in one.times], sum(one.again for one in took))


def _work(bootstrap: str) -> None:
    """The process of `_workers`."""
    with anabranch.connect(bootstrap, timeout=LIMIT_S) as client, client.replica(TABLE) as replica:
        replica.snapshot(timeout=LIMIT_S).close()
        print(0, flush=True)
        for line in sys.stdin:
            took = measure(_ours(replica), CLIENTS // PROCESSES, float(line))
            print(json.dumps(took), flush=True)


def _prepare(dsn: str) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("create table accounts (id int primary key, held int not null)")
        cursor.execute("insert into accounts select i, 1000 from generate_series(0, %s) i", [ROWS])
        cursor.execute("analyze accounts")


def _theirs(dsn: str) -> Call:
    own = threading.local()

    def transfer(other: int) -> int:
        if not hasattr(own, "connection"):
            own.connection = psycopg.connect(dsn)
        with own.connection.transaction(), own.connection.cursor() as cursor:
            held = [_held(cursor, row) for row in (0, other)]
            cursor.execute(_WRITE, [held[0] - 1, 0])
            cursor.execute(_WRITE, [held[1] + 1, other])
        return 0

    return transfer


def _held(cursor: psycopg.Cursor[tuple[int]], row: int) -> int:
    found = cursor.execute(_READ, [row]).fetchone()
    assert found is not None
    return found[0]


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The figures as a table."""
    sides, goals = ("threads", "processes", "postgres"), result["goals"]
    rows = []
    for name, title, form, goal in (
        (
            "rate",
            f"transfers of {result['clients']} clients",
            "{:,.0f} /s",
            f"≥ {goals['rate']} /s",
        ),
        ("fewest", "… of the slowest client, of the mean", "{:.2f}", f"≥ {goals['fewest']}"),
        ("again", "… begun again", "{:.2f}", ""),
        ("p50_ms", "… p50", "{:,.1f} ms", ""),
        ("p99_ms", "… p99", "{:,.1f} ms", ""),
        ("slowest_ms", "… the slowest", "{:,.0f} ms", ""),
    ):
        rows.append([title, *(form.format(result[side][name]) for side in sides), goal])
    return ["", "16 threads", "4 processes of 4", "PostgreSQL, for update", "goal"], rows


if __name__ == "__main__":
    _work(sys.argv[1])
