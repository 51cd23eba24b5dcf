"""What tables and locks cost others, each beside the same without, in turn, in one run; medians of rounds
after one that warms up.

64 one-shots of 10 events into a table and into a stream; 2M rows (``--quick``: 200,000) by two writers with
Arrow batches, begin to last row readable, into both; 16 one-shots beside 1,000 registered locks of an open
transaction and beside none; a table's changes from its beginning, without and with the row before, which takes
a replica. Then a leader that is killed under 32 clients: each moves money between two rows of its own, so that none
has a reason to begin again. And a leader's window alone, in process: an hour of 2,000 commits of two rows a second.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.recent_writes import RecentWrites
from anabranch.core.locks.table_writes import Write, fingerprint
from anabranch.errors import AnabranchError
from anabranch.infra.broker import EmbeddedBroker
from anabranch.protocol.hybrid_time import from_us
from bench.bulk import transaction
from bench.oneshot import measure
from bench.setting import WARM_S, Place, controller, one_shots

SCOPE = "bench"
TABLE, STREAM = f"{SCOPE}/guarded", f"{SCOPE}/plain"
BULK_ROWS, QUICK_BULK_ROWS = 2_000_000, 200_000
LOCKS, CLIENTS = 1_000, 32
RATE, HOUR_S = 2_000, 3_600
GOALS = {"one-shots": 0.95, "bulk": 0.9, "beside": 1.05, "changes": 100_000}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rows of (what, with, without, ratio, goal)."""
    rounds, seconds = (3, 3.0) if quick else (5, 10.0)
    rows: list[dict[str, Any]] = []
    with anabranch.connect(place.bootstrap, timeout=120) as client:
        client.create_table(TABLE, 4)
        client.create_stream(STREAM, 4)
        names = TABLE, STREAM
        shots = {
            name: [one_shots(client, [name], n * 1_000_003) for n in range(64)] for name in names
        }
        measure(shots[STREAM], WARM_S)
        count = QUICK_BULK_ROWS if quick else BULK_ROWS

        def bulk(table: bool) -> float:
            return count / transaction(place, count, "write_batch", table=table)[0]

        def add(
            what: str, measured: Callable[[Any], float], ours: Any, bare: Any, goal: str
        ) -> None:
            took = [(measured(ours), measured(bare)) for _ in range(1 + rounds)]
            found, without = map(statistics.median, zip(*took[1:], strict=True))  # it is warm then
            ratio = found / without
            row = {"what": what, "with": found, "without": without, "ratio": ratio, "goal": goal}
            rows.append(row)

        goal = f"≥ {GOALS['one-shots']} ×"
        what = "64 one-shots, into a table and a stream, /s"
        add(what, lambda name: measure(shots[name], seconds)["per_s"], *names, goal)
        goal = f"≥ {GOALS['bulk']} ×"
        add(f"{count:,} rows, into a table and a stream, /s", bulk, True, False, goal)
        with client.replica(TABLE, timeout=120) as bank:
            bank.snapshot().close()  # it is loaded
            goal = f"≤ {GOALS['beside']} ×"
            what = f"16 one-shots beside {LOCKS:,} locks and none, p50, ms"
            add(what, lambda locks: _beside(client, bank, locks, seconds), LOCKS, 0, goal)
        goal = f"≥ {GOALS['changes']:,} /s"
        what = "changes with the row before and without, /s"
        add(what, lambda before: _changes(client, before), True, False, goal)
    whole = {"takeover": _takeover(seconds), "window": _window(quick)}
    return {"rounds": rounds, "rows": rows} | whole


def _beside(client: anabranch.Client, bank: Replica, locks: int, seconds: float) -> float:
    """Milliseconds of a commit beside a transaction that read so many rows, which nobody writes."""
    with bank.begin(keepalive=300) as txn:
        for n in range(locks):
            txn.get(TABLE, b"locked-%d" % n)
        txn.flush()
        commits = [one_shots(client, [TABLE], n * 1_000_003) for n in range(16)]
        return measure(commits, seconds)["p50_ms"]


def _changes(client: anabranch.Client, before: bool) -> float:
    """Changes a second, from the beginning to now."""
    began, count = time.perf_counter(), 0
    with client.changes(TABLE, until="end", before=before) as changes:
        for _ in changes:
            count += 1
    return count / (time.perf_counter() - began)


def _takeover(seconds: float) -> dict[str, Any]:
    """A leader is killed under transfers, and another one starts on its folder."""
    again, done, failed, waits = [0] * CLIENTS, [0] * CLIENTS, [0] * CLIENTS, [0.0] * CLIENTS
    stop = threading.Event()
    with ExitStack() as stack:
        bootstrap = stack.enter_context(EmbeddedBroker()).bootstrap
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-")))
        pid = stack.enter_context(controller(bootstrap, folder, ()))
        client = stack.enter_context(anabranch.connect(bootstrap, timeout=60))
        client.create_table(TABLE, 4)
        bank = stack.enter_context(client.replica(TABLE))

        def work(number: int) -> None:
            keys = [b"%d-%d" % (number, side) for side in range(2)]
            begun = 0

            def move(txn: TableTransaction) -> None:
                nonlocal begun
                begun += 1
                for key in keys:
                    txn.put(TABLE, key, b"%d" % (int(txn.get(TABLE, key) or 0) + 1))

            while not stop.is_set():
                begun, before = 0, time.perf_counter()
                try:
                    bank.transact(move, timeout=60)
                    done[number] += 1
                except AnabranchError:
                    failed[number] += 1
                again[number] += begun - 1
                waits[number] = max(waits[number], time.perf_counter() - before)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        stack.enter_context(controller(bootstrap, folder, ()))
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
    told = {"transfers": sum(done), "again": sum(again), "failed": sum(failed)}
    return told | {"clients": CLIENTS, "longest_s": max(waits)}


def _window(quick: bool) -> dict[str, Any]:
    """The size of a leader's window over an hour of commits (``quick``: a tenth), and the time of one."""
    commits = RATE * HOUR_S // (10 if quick else 1)
    windows, sizes = RecentWrites(), []
    began, last = time.process_time(), 0
    for n in range(1, commits + 1):
        at = from_us(n * (1_000_000 // RATE))
        keys = tuple(sorted(b"%016d" % (2 * n + side) for side in range(2)))
        draft = windows.draft()
        draft.add(TABLE, Write(at, sorted(map(fingerprint, keys)), keys), last)
        windows.follow(draft)
        last = at
        if n % (commits // 10) == 0:
            sizes.append(windows.size)
    taken = time.process_time() - began
    return {"commits": commits, "sizes": sizes, "limit": windows.limit, "us": taken / commits * 1e6}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = [
        [row["what"], f"{row['with']:,.1f}", f"{row['without']:,.1f}", f"{row['ratio']:.2f} ×", row["goal"]]
        for row in result["rows"]
    ]  # fmt: skip
    told, window = result["takeover"], result["window"]
    ended = told["again"] + told["failed"]
    what = f"a takeover under {told['clients']} clients: ended without a conflict, of all transfers"
    rows.append(
        [
            what,
            f"{ended:,}",
            f"{told['transfers']:,}",
            f"{told['longest_s']:.1f} s the longest",
            "0",
        ]
    )
    tenths = window["sizes"]
    what = f"the window of {window['commits']:,} commits, MB: the greatest tenth, and the last"
    sizes = (f"{max(tenths) / 1e6:.1f}", f"{tenths[-1] / 1e6:.1f}")
    rows.append(
        [what, *sizes, f"{window['us']:.1f} µs a commit", f"≤ {window['limit'] / 1e6:.0f} MB"]
    )
    return ["what", "with", "without", "ratio", "goal"], rows
