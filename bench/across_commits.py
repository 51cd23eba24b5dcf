"""Single-request transactions over two control partitions, against those within one: two streams, ten events.

In turn, in one run, by one client: one at a time (answered when merged, and when decided), and 64 in flight. Then
transactions of one stream, one at a time, alone and beside such transactions without a pause, at their coordinator
and at their participant: on a stream that these write, and on another one, where only the machine and the rounds
are shared. At the coordinator they hold no stream, because its part votes last. Then transfers between rows of two
tables of 10,000 rows, by `Replica.transact` over one replica: one at a time, and 64 in flight. Each of two
controllers leads one control partition; they share two cores with the client and the broker.

Not equal: a transaction over two control partitions is logged at both, three times at its coordinator and twice
elsewhere, and takes two messages before its decision.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import anabranch
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench import setting
from bench.oneshot import EVENTS, VALUE, Figures, measure

WITHIN, OVER = ("across-0/a", "across-0/b"), ("across-0/a", "across-1/a")
# Streams of transactions that such ones run beside; the first and third are written by these, too.
BESIDE = {
    "alone": OVER[0],
    "other alone": "across-0/c",
    "there alone": OVER[1],
    "there other alone": "across-1/c",
}
IN_FLIGHT = 64
PARTITIONS = "--control-partitions", "2"
GOALS = {
    "merged, p50": "≤ 4 ×",
    "decided, p50": "≤ 3 ×",
    "64 in flight, commits/s": "≥ 0.25 ×, ≥ 500/s",
    "a stream that they write, p50": "≤ 1.5 ×",
    "… p99": "≤ 2 ×",
    "at the participant: a stream that they write, p50": "≤ 1.5 ×",
    "transfers, 64 in flight, commits/s": "≥ 0.25 ×",
}
TABLES_WITHIN, TABLES_OVER = ("across-0/t", "across-0/u"), ("across-0/t", "across-1/t")
KEYS = [b"%08d" % i for i in range(10_000)]


def run(*, quick: bool = False) -> dict[str, Any]:
    """A row for each figure: over two control partitions or beside such commits, and within one or alone."""
    rounds, seconds = (1, 2.0) if quick else (5, 6.0)
    found: dict[str, list[Figures]] = {}
    with (
        setting.place(*PARTITIONS) as place,
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
        setting.controller(place.bootstrap, Path(folder), PARTITIONS, leads=None),
        anabranch.connect(place.bootstrap, timeout=60) as client,
        ExitStack() as stack,
    ):
        with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        for stream in sorted({*WITHIN, *BESIDE.values()}):
            client.create_stream(stream, 2)
        served = [control_partition_of(client.transact(_write([s])).txn_id) for s in OVER]
        if len(set(served)) != 2:
            raise RuntimeError(f"the streams are on control partitions {served}")
        for table in {*TABLES_WITHIN, *TABLES_OVER}:
            client.create_table(table, 4)
        here = stack.enter_context(client.replica(*TABLES_WITHIN, timeout=60))
        both = stack.enter_context(client.replica(*TABLES_OVER, timeout=60))
        kinds = {
            "transfer within": [_transfer(here, TABLES_WITHIN)],
            "transfer": [_transfer(both, TABLES_OVER)],
            "64 transfers within": [_transfer(here, TABLES_WITHIN)] * IN_FLIGHT,
            "64 transfers": [_transfer(both, TABLES_OVER)] * IN_FLIGHT,
            "within": [_commit(client, WITHIN)],
            "merged": [_commit(client, OVER)],
            "decided": [_commit(client, OVER, "decided")],
            "64 within": [_commit(client, WITHIN)] * IN_FLIGHT,
            "64 over": [_commit(client, OVER)] * IN_FLIGHT,
        } | {kind: [_commit(client, [stream])] for kind, stream in BESIDE.items()}
        measure(kinds["64 over"], 1.0 if quick else setting.WARM_S)
        for _ in range(rounds):
            for kind, commits in kinds.items():
                found.setdefault(kind, []).append(measure(commits, seconds))
            with _beside(_commit(client, OVER)):
                for kind in BESIDE:
                    beside = found.setdefault(kind.replace("alone", "beside"), [])
                    beside.append(measure(kinds[kind], seconds))
    medians = {
        kind: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for kind, each in found.items()
    }
    return {"rounds": rounds, "seconds_each": seconds, "figures": medians}


def _write(streams: Sequence[str]) -> Callable[[anabranch.Transaction], None]:
    def write(txn: anabranch.Transaction) -> None:
        for number in range(EVENTS):
            txn.write(streams[number % len(streams)], VALUE, key=b"key-%d" % number)

    return write


def _commit(
    client: anabranch.Client, streams: Sequence[str], wait: Literal["merged", "decided"] = "merged"
) -> Callable[[], None]:
    write = _write(streams)

    def commit() -> None:
        client.transact(write, wait=wait)

    return commit


def _transfer(replica: Replica, tables: Sequence[str]) -> Callable[[], None]:
    """Move something from a random row of the one table to one of the other."""

    def commit() -> None:
        rows = [(table, random.choice(KEYS)) for table in tables]

        def move(txn: TableTransaction) -> None:
            for (table, key), by in zip(rows, (-1, 1), strict=True):
                txn.put(table, key, b"%d" % (int(txn.get(table, key) or b"1000") + by))

        replica.transact(move)

    return commit


@contextmanager
def _beside(commit: Callable[[], None]) -> Iterator[None]:
    """Commit without a pause during the block."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            commit()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = []
    for name, kind, peer, key in (
        ("merged, p50", "merged", "within", "p50_ms"),
        ("decided, p50", "decided", "within", "p50_ms"),
        ("64 in flight, commits/s", "64 over", "64 within", "per_s"),
        ("… p50", "64 over", "64 within", "p50_ms"),
        ("a stream that they write, p50", "beside", "alone", "p50_ms"),
        ("… p99", "beside", "alone", "p99_ms"),
        ("… another stream, p50", "other beside", "other alone", "p50_ms"),
        ("… p99", "other beside", "other alone", "p99_ms"),
        (
            "at the participant: a stream that they write, p50",
            "there beside",
            "there alone",
            "p50_ms",
        ),
        ("… p99", "there beside", "there alone", "p99_ms"),
        ("… another stream, p50", "there other beside", "there other alone", "p50_ms"),
        ("… p99", "there other beside", "there other alone", "p99_ms"),
        ("transfers between tables, p50", "transfer", "transfer within", "p50_ms"),
        ("transfers, 64 in flight, commits/s", "64 transfers", "64 transfers within", "per_s"),
    ):
        figure, against = (result["figures"][each][key] for each in (kind, peer))
        unit = "/s" if key == "per_s" else " ms"
        ratio = f"{figure / against:.2f} ×"
        goal = GOALS.get(name, "") if not kind.startswith("64") or key == "per_s" else ""
        rows.append([name, f"{figure:,.1f}{unit}", f"{against:,.1f}{unit}", ratio, goal])
    return ["", "over two, or beside these", "within one, or alone", "ratio", "goal"], rows
