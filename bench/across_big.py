"""A big transaction over two control partitions, staged at both, against two single ones.

A transaction has been written through journals, half of its events to a stream of each control partition. Then it
is committed: the clock runs from the call to its answer. Against it: two transactions of half as many events, one
at each control partition, committed at the same time, until both are answered. In turn, into new streams.
Meanwhile another process commits one-shots to both streams, one at a time: the longest one beside each of the two
says how long the commit blocks others. ``blocked``: how much longer beside the one over two control partitions than
beside the two single ones. One controller process leads both control partitions, and all share two cores.

Not equal: a transaction over two control partitions takes three more messages than the single ones.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anabranch
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench import setting
from bench.partitions import streams_apart

EVENTS, QUICK_EVENTS = 1_000_000, 300_000
QUICK_CHUNK = 4 << 20  # so that the few events are staged, too
SIZE = 100
GOAL, GOAL_BLOCKED_MS = 1.2, 50.0
Found = dict[str, list[float]]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Seconds of each, medians of rounds in turn; the longest one-shots beside them."""
    events, rounds = (QUICK_EVENTS, 2) if quick else (EVENTS, 5)
    chunks = ("--chunk-bytes", str(QUICK_CHUNK)) if quick else ()
    seconds: Found = {"over": [], "singles": []}
    longest: Found = {"over": [], "singles": []}
    with (
        setting.place("--control-partitions", "2", *chunks) as place,
        anabranch.connect(place.bootstrap, timeout=120) as client,
    ):
        with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        for number in range(rounds + 1):
            for kind in ("over", "singles") if number % 2 else ("singles", "over"):
                streams = streams_apart(client, 2, f"{kind}{number}")
                commits = _written(client, kind, streams, events)
                with _beside(place, streams) as beside:
                    start = time.perf_counter()
                    setting.side_by_side(lambda i, its=commits: its[i](), len(commits))  # type: ignore[misc]
                    took = time.perf_counter() - start
                if number:  # the first round warms up
                    seconds[kind].append(took)
                    longest[kind].append(max(beside))
    medians = {kind: statistics.median(its) for kind, its in seconds.items()}
    waits = {kind: statistics.median(its) for kind, its in longest.items()}
    return {
        "events": events,
        "rounds": rounds,
        "seconds": seconds,
        "median_s": medians,
        "ratio": medians["over"] / medians["singles"],
        "goal_at_most": GOAL,
        "longest_ms": longest,
        "median_longest_ms": waits,
        "blocked_ms": waits["over"] - waits["singles"],
        "goal_blocked_ms": GOAL_BLOCKED_MS,
    }


def _written(
    client: anabranch.Client, kind: str, streams: Sequence[str], events: int
) -> list[Callable[[], object]]:
    """Write the events; the calls that commit them."""
    values = setting.noise_values(SIZE)
    parts = [streams] if kind == "over" else [[stream] for stream in streams]
    calls: list[Callable[[], object]] = []
    for its in parts:
        txn = client.begin(its[0].partition("/")[0], keepalive=600)
        with client.join(txn.token()) as writer:
            for stream in its:
                writer.write_many(
                    stream,
                    (
                        (values[i % len(values)], b"key-%d" % (i % 10_000))
                        for i in range(events // 2)
                    ),
                )
            receipts = [writer.finish()]
        calls.append(lambda txn=txn, receipts=receipts: txn.commit(receipts=receipts, timeout=120))  # type: ignore[misc]
    return calls


@contextmanager
def _beside(place: setting.Place, streams: Sequence[str]) -> Iterator[list[float]]:
    """One-shots to these streams by another process; at the end of the block the list has their times, ms."""
    ctx = mp.get_context("spawn")
    stop, ready, out = ctx.Event(), ctx.Event(), ctx.Queue()
    process = ctx.Process(
        target=_one_shots, args=(place.bootstrap, list(streams), stop, ready, out), daemon=True
    )
    process.start()
    ready.wait(60)
    found: list[float] = []
    try:
        yield found
    finally:
        stop.set()
        found += out.get(timeout=120)
        process.join(30)


def _one_shots(bootstrap: str, streams: list[str], stop: Any, ready: Any, out: Any) -> None:
    took: list[float] = []
    with anabranch.connect(bootstrap, timeout=60) as client:
        commit = setting.one_shots(client, streams)
        until = time.perf_counter() + 1.0
        while not stop.is_set() or not took:
            before = time.perf_counter()
            commit()
            if before > until:
                ready.set()
                took.append((time.perf_counter() - before) * 1000)
    out.put(took)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [f"{result['events']:,} events, staged", "over two", "two single ones", "", "goal"]
    median, longest = result["median_s"], result["median_longest_ms"]
    return head, [
        [
            "commit",
            f"{median['over']:.2f} s",
            f"{median['singles']:.2f} s",
            f"{result['ratio']:.2f} ×",
            f"≤ {GOAL} ×",
        ],
        [
            "longest one-shot on these streams",
            f"{longest['over']:.0f} ms",
            f"{longest['singles']:.0f} ms",
            f"{result['blocked_ms']:+.0f} ms",
            f"≤ {GOAL_BLOCKED_MS:.0f} ms",
        ],
    ]
