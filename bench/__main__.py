"""``python -m bench [splice|oneshot|bulk …] [--quick] [--json FILE]``: without names, all but big_table,
growth, builds and processors.

``epochs`` runs rolling, scaling, ordered and beside in turn; each has its own name, too.

Each starts its own broker (``trouble``: three) and controller, so nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import (
    across,
    across_big,
    across_commits,
    adds,
    aio,
    big_table,
    builds,
    bulk,
    clients,
    derived,
    deriving,
    driver,
    exclusive,
    growth,
    handlers,
    hot,
    lanes,
    leading,
    ledger,
    locked_rows,
    locking,
    lookups,
    many,
    oneshot,
    partitions,
    pipelines,
    prepared,
    processing,
    ranges,
    sessions,
    setting,
    slow_events,
    spark,
    splice,
    starting,
    tables,
    tasks,
    tracing,
    transfers,
    trouble,
    values,
    versioned,
    web,
)
from bench.epochs import beside, ordered, rolling, scaling

Rows = tuple[list[str], list[list[str]]]


def _splice(quick: bool) -> tuple[dict[str, Any], Rows]:
    with setting.place() as place:
        result = splice.run_on(place.bootstrap, quick=quick)
    head = ["workload", "splice /s", "raw produce /s", "of raw", "goal", "of a copy"]
    rows = []
    for name, found in result["workloads"].items():
        rates = found["records_per_s"]
        rows.append(
            [
                name,
                f"{rates['splice']:,}",
                f"{rates['raw']:,}",
                f"{found['of_raw']:.2f} ×",
                f"≥ {found['goal_of_raw']} ×",
                f"{found['of_copy']:.1f} ×",
            ]
        )
    return result, (head, rows)


def _growth(commits: int) -> Callable[[bool], tuple[dict[str, Any], Rows]]:
    def run(quick: bool) -> tuple[dict[str, Any], Rows]:
        result = growth.run(commits=commits // 10 if quick else commits)
        return result, growth.table(result)

    return run


def _builds(other: Path | None, pairs: int) -> Callable[[bool], tuple[dict[str, Any], Rows]]:
    def run(quick: bool) -> tuple[dict[str, Any], Rows]:
        if other is None:
            raise SystemExit("builds needs --other FOLDER: an unpacked wheel, or another checkout")
        result = builds.run(other, pairs=pairs, quick=quick)
        return result, builds.table(result)

    return run


def _held(minutes: float) -> Callable[[bool], tuple[dict[str, Any], Rows]]:
    def run(quick: bool) -> tuple[dict[str, Any], Rows]:
        result = prepared.hold(minutes, quick=quick)
        return result, prepared.table(result)

    return run


def _on_cluster(bench: Any, **more: Any) -> Callable[[bool], tuple[dict[str, Any], Rows]]:
    """Run a bench's module on a cluster of its own. ``more``: arguments of its ``run``."""

    def run(quick: bool) -> tuple[dict[str, Any], Rows]:
        with setting.place() as place:
            result = bench.run(place, quick=quick, **more)
        return result, bench.table(result)

    return run


def _processors(quick: bool) -> tuple[dict[str, Any], Rows]:
    with setting.place() as place:
        result = processing.run_many(place, quick=quick)
    return result, processing.table_of_many(result)


def _on_own(bench: Any) -> Callable[[bool], tuple[dict[str, Any], Rows]]:
    """Run a bench's module that starts brokers itself."""

    def run(quick: bool) -> tuple[dict[str, Any], Rows]:
        result = bench.run(quick=quick)
        return result, bench.table(result)

    return run


BENCHES: dict[str, tuple[str, Callable[[bool], tuple[dict[str, Any], Rows]]]] = {
    "splice": ("merge by splicing, framing checked, against raw produce and a copy", _splice),
    "oneshot": (
        "one-shot commits of 10 events against native Kafka transactions",
        _on_cluster(oneshot),
    ),
    "clients": (
        "one-shots by the Python, Go and JVM client, 64 in flight",
        _on_cluster(clients),
    ),
    "adds": ("64 clients that add to one row, against PostgreSQL", _on_cluster(adds)),
    "aio": ("the asyncio client against the blocking one", _on_cluster(aio)),
    "bulk": (
        "a transaction by 2 writers, begin to last event readable, against none",
        _on_cluster(bulk),
    ),
    "sessions": (
        "a session's rows, flushed in the background, against an idempotent producer",
        _on_cluster(sessions),
    ),
    "rolling": ("rolling against regular commits of the same data", _on_cluster(rolling)),
    "scaling": (
        "scale calls with transactions open; epochs of collated commits",
        _on_cluster(scaling),
    ),
    "values": ("typed values against bytes", _on_cluster(values)),
    "starting": ("import and connect, and --help", _on_cluster(starting)),
    "ordered": ("reading in stream order against a plain consumer", _on_cluster(ordered)),
    "ranges": ("offset ranges as Arrow batches against a plain consumer", _on_cluster(ranges)),
    "beside": (
        "small commits while a big one is written, and while it is staged",
        _on_cluster(beside),
    ),
    "prepared": (
        "two scopes at once, and prepared transactions, against without",
        _on_cluster(prepared),
    ),
    "leading": ("leading with many finished transactions and names", _on_own(leading)),
    "derived": ("writes with derived tables, and look-ups in them", _on_cluster(derived)),
    "deriving": (
        "how far a derived table that a worker writes is behind, at 2,000 commits/s",
        _on_cluster(deriving),
    ),
    "across": (
        "one snapshot of three control partitions against one of a single one",
        _on_own(across),
    ),
    "across_commits": (
        "short transactions over two control partitions against those within one",
        _on_own(across_commits),
    ),
    "across_big": (
        "a big transaction over two control partitions against two single ones",
        _on_own(across_big),
    ),
    "partitions": (
        "controllers' CPU of a commit with 1, 2 and 4 control partitions",
        _on_own(partitions),
    ),
    "lookups": ("snapshots of the past, by the length of the history", _on_cluster(lookups)),
    "trouble": ("small commits while other streams are in trouble", _on_own(trouble)),
    "lanes": ("one-shots by 1, 20 and 200 lanes; grants and tokens", _on_cluster(lanes)),
    "ledger": (
        "a row in PostgreSQL and its event, against an outbox and against the row alone",
        _on_cluster(ledger),
    ),
    "tasks": ("commits that move positions of tasks", _on_cluster(tasks)),
    "locked_rows": (
        "processors with a locked row of a table for each event, against a store",
        _on_cluster(locked_rows),
    ),
    "processing": (
        "map and count by peers: rates, latency, restore, failover",
        _on_cluster(processing),
    ),
    "processors": (
        "commits of 64 processors on one machine, against one",
        _processors,
    ),
    "handlers": ("handlers that fail or wait, against others", _on_cluster(handlers)),
    "big_table": (
        "memory, disk and start of four workers over a big table (--rows)",
        _on_cluster(big_table),
    ),
    "slow_events": (
        "what one slow or bad event costs the events of other tasks",
        _on_cluster(slow_events),
    ),
    "driver": ("handlers by a driver of tests, without a broker", _on_own(driver)),
    "many": ("small commits among many streams, and to many segments", _on_own(many)),
    "web": ("one-shots beside the web page and ten browsers; page loads", _on_cluster(web)),
    "tracing": ("CPU of one-shots that OpenTelemetry traces, or not", _on_own(tracing)),
    "spark": ("Spark's sink and source against its own Kafka connector", _on_cluster(spark)),
    "tables": (
        "a replica from nothing, and its reads against bare rocksdict",
        _on_cluster(tables),
    ),
    "transfers": (
        "transfers in a table beside blind one-shots and PostgreSQL",
        _on_cluster(transfers),
    ),
    "exclusive": ("transactions to an exclusive stream and to another one", _on_own(exclusive)),
    "hot": ("transfers of 16 clients on one row, and in PostgreSQL", _on_cluster(hot)),
    "locking": ("what tables and locks cost others", _on_cluster(locking)),
    "versioned": (
        "a replica beside a versioned store of Kafka Streams",
        _on_cluster(versioned),
    ),
    "growth": ("what is kept of one-shots, with short retentions", _growth(growth.COMMITS)),
    "builds": ("CPU of a commit by this build and another one (--other)", _builds(None, 7)),
    "pipelines": ("audit, export, compact and load of millions of events", _on_cluster(pipelines)),
}
NOT_BY_DEFAULT = "growth", "builds", "big_table", "processors"  # processing has the last one
BY_DEFAULT = [name for name in BENCHES if name not in NOT_BY_DEFAULT]
GROUPS = {"epochs": ("rolling", "scaling", "ordered", "beside")}


def main() -> int:
    """Run the named benches; JSON goes to a file or, with ``-``, to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*BENCHES, *GROUPS]))
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument(
        "--json", metavar="FILE", help="where the figures go; - for standard output"
    )
    parser.add_argument(
        "--commits", type=int, default=growth.COMMITS, metavar="N", help="of growth: so many"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="of prepared: hold them for so long, through takeovers",
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="FOLDER",
        help="of builds: a folder that holds another anabranch",
    )
    parser.add_argument(
        "--pairs", type=int, default=7, metavar="N", help="of builds: turns of each"
    )
    parser.add_argument(
        "--rows", type=int, default=big_table.ROWS, metavar="N", help="of big_table: its rows"
    )
    options = parser.parse_args()
    if options.minutes is not None:
        BENCHES["prepared"] = "prepared ones, held, against none", _held(options.minutes)
    BENCHES["growth"] = BENCHES["growth"][0], _growth(options.commits)
    BENCHES["big_table"] = BENCHES["big_table"][0], _on_cluster(big_table, rows=options.rows)
    BENCHES["builds"] = BENCHES["builds"][0], _builds(options.other, options.pairs)
    names = [one for name in options.names or BY_DEFAULT for one in GROUPS.get(name, (name,))]
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"no bench {', '.join(unknown)}; there are {', '.join([*BENCHES, *GROUPS])}")
    console = Console(stderr=options.json == "-")
    report: dict[str, Any] = {"machine": setting.machine(), "quick": options.quick}
    load = report["load_of_machine"] = [os.getloadavg()[0]]  # before the first, then after each
    for name in dict.fromkeys(names):
        title, run = BENCHES[name]
        result, (head, rows) = run(options.quick)
        report[name] = result
        load.append(os.getloadavg()[0])
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if options.json:
        text = json.dumps(report, indent=2)
        if options.json == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(options.json).write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
