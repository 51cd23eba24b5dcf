"""Writes to tables with derived tables, and look-ups in them, against writes and reads without.

*writes*: one client process with one replica of all tables; each transaction puts one row of a random key, with a
number and a city of its own, and commits. One at a time, and 16 threads; in turn, medians of rounds.

*look-ups*: a transaction of one `get`, `lookup` (of one row, by an index and by a unique one) or `total`; it writes
nothing, and so ends without a round trip. And 100 such calls within one transaction. In random order, p50 of the
thread's processor time: none of these calls waits, and other processes on the same cores do not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import check
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench.oneshot import Figures, measure
from bench.setting import WARM_S, Place, percentile

KEYS = 10**6
ROWS = 1_000  # that look-ups find
THREADS = (1, 16)
KINDS = ("without", "index and unique", "totals")
CALLS = 100  # within one transaction
GOAL_WRITES, GOAL_LOOKUPS = 0.6, 1.5


def city(_: bytes, row: bytes) -> bytes:
    """The city of a row; each row has one of its own."""
    return row.split(b" ")[0]


def number(_: bytes, row: bytes) -> bytes:
    """The number of a row; each row has one of its own."""
    return row.split(b" ")[1]


def total(_: bytes, row: bytes) -> tuple[bytes, int]:
    """A number in the total of one of 1,000 groups."""
    return row.split(b" ")[0][:7], int(row.split(b" ")[1])


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rates of writes by kind and threads, and p50 of look-ups."""
    rounds, seconds, warm_s = (1, 2.0, 5.0) if quick else (7, 4.0, WARM_S)
    with (
        anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as admin,
        anabranch.connect(place.bootstrap, timeout=60) as client,
    ):
        admin.feature_level(raise_to=LEVEL)
        tables = {kind: place.new_stream(1, table=True) for kind in KINDS}
        admin.grant("open", "bench/*", "operate")
        client.derive(tables["index and unique"], "by-city", city)
        client.derive(tables["index and unique"], "by-number", number, unique=True)
        client.derive(tables["totals"], "totals", total, totals=True)
        with client.replica(*tables.values()) as rows:
            writes: dict[tuple[str, int], list[Figures]] = defaultdict(list)
            measure([_writing(rows, tables[KINDS[0]])] * max(THREADS), warm_s)
            for _ in range(rounds):
                for threads in THREADS:
                    for kind, table in tables.items():
                        work = [_writing(rows, table)] * threads
                        writes[kind, threads].append(measure(work, seconds))
            for table in tables.values():
                _fill(rows, table)
            reads = _reads(rows, tables, rounds)
        for name in ("by-city", "by-number"):
            check(not client.check_derivation(tables["index and unique"], name), f"{name} differs")
    found = {
        f"{kind}, {threads}": statistics.median(each["per_s"] for each in its)
        for (kind, threads), its in writes.items()
    }
    return {
        "rounds": rounds,
        "writes_per_s": found,
        "reads_us": reads,
        "goals": {"writes_of_without": GOAL_WRITES, "lookup_of_get": GOAL_LOOKUPS},
    }


def _row(key: int) -> bytes:
    return b"city%06d %d" % (key, key)


def _writing(rows: Replica, table: str) -> Callable[[], None]:
    def commit() -> None:
        key = random.randrange(KEYS)
        rows.transact(lambda txn: txn.put(table, b"%d" % key, _row(key)), timeout=60)

    return commit


def _fill(rows: Replica, table: str) -> None:
    with rows.begin() as txn:
        for key in range(0, KEYS, KEYS // ROWS):
            txn.put(table, b"%d" % key, _row(key))
        txn.commit()


def _reads(rows: Replica, tables: dict[str, str], rounds: int) -> dict[str, float]:
    """p50 of each call by itself, and of one of many within a transaction, microseconds."""
    table = tables["index and unique"]
    calls: dict[str, Callable[[TableTransaction, int], object]] = {
        "get": lambda txn, key: txn.get(table, b"%d" % key),
        "lookup, unique": lambda txn, key: list(txn.lookup("by-number", b"%d" % key)),
        "lookup, index": lambda txn, key: list(txn.lookup("by-city", b"city%06d" % key)),
        "total": lambda txn, key: txn.total("totals", b"city%03d" % (key // 1_000)),
    }
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds * 100):
        for name, call in random.sample([*calls.items()], len(calls)):
            began = time.thread_time()
            with rows.begin(fresh=False) as txn:
                call(txn, random.randrange(0, KEYS, KEYS // ROWS))
                txn.commit()
            took[f"{name}, alone"].append(time.thread_time() - began)
        with rows.begin(fresh=False) as txn:
            for name, call in calls.items():
                keys = [random.randrange(0, KEYS, KEYS // ROWS) for _ in range(CALLS)]
                began = time.thread_time()
                for key in keys:
                    call(txn, key)
                took[f"{name}, of many"].append((time.thread_time() - began) / CALLS)
    return {name: percentile(sorted(its), 0.5) * 1e6 for name, its in took.items()}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    writes, reads = result["writes_per_s"], result["reads_us"]
    rows = []
    for threads in THREADS:
        for kind in KINDS:
            ours, without = writes[f"{kind}, {threads}"], writes[f"without, {threads}"]
            goal = f"≥ {GOAL_WRITES} ×" if kind == "index and unique" else ""
            what = f"writes, {threads} at a time, {kind}"
            rows.append([what, f"{ours:,.0f} /s", f"{ours / without:.2f} ×", goal])
    for name, ours in reads.items():
        call, _, how = name.rpartition(", ")
        goal = f"≤ {GOAL_LOOKUPS} ×" if call.startswith("lookup") else ""
        rows.append([name, f"{ours:,.1f} us", f"{ours / reads[f'get, {how}']:.2f} ×", goal])
    return ["what", "figure", "of without, or of get", "goal"], rows
