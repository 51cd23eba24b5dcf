"""What scopes together and prepared transactions cost, each beside the same without, in turn, in one run.

One-shots of 10 events over two streams of two scopes against two of one; prepare and commit against a commit alone,
of a transaction that is open and flushed; one-shots and scalings beside 1,000 prepared ones of one event each
(``--quick``: 100) against beside none. All acks, replication factor 1, one controller on the same two cores.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import anabranch
from bench.oneshot import EVENTS, VALUE, measure
from bench.setting import Place, percentile

PREPARED, QUICK_PREPARED = 1_000, 100
GOALS = {"two scopes": 1.1, "prepare + commit": 2.2, "beside prepared": 1.05}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rows of (what, ours, without, ratio, goal); times are milliseconds."""
    rounds, seconds, held = (2, 2.0, QUICK_PREPARED) if quick else (5, 5.0, PREPARED)
    one, two = place.new_stream(segments=2), "beside/s"
    same = place.new_stream(segments=2)
    rows: list[dict[str, Any]] = []
    with anabranch.connect(place.bootstrap) as client:
        client.create_stream(two, segments=2, near=one.partition("/")[0])
        for in_flight in (1, 64):
            both = [_over(client, (one, two)) for _ in range(in_flight)]
            alone = [_over(client, (one, same)) for _ in range(in_flight)]
            with_two, with_one = _in_turn(rounds, lambda c: measure(c, seconds), both, alone)
            name = f"one-shot over two scopes, {in_flight} in flight, p50"
            rows.append(_row(name, with_two["p50_ms"], with_one["p50_ms"], GOALS["two scopes"]))
        count = 100 if quick else 400
        prepared, plain = _in_turn(
            rounds, lambda twice: _commits(client, one, count, twice=twice), True, False
        )
        rows.append(
            _row(
                "prepare + commit, p50",
                prepared["p50_ms"],
                plain["p50_ms"],
                GOALS["prepare + commit"],
            )
        )
        rows += _beside(place, client, held, rounds, seconds)
    return {"rounds": rounds, "prepared": held, "rows": rows}


def _in_turn(
    rounds: int, measured: Callable[[Any], dict[str, float]], first: Any, second: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of both over the rounds."""
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for _ in range(rounds):
        for into, given in zip(found, (first, second), strict=True):
            into.append(measured(given))
    medians = [{key: statistics.median(m[key] for m in one) for key in one[0]} for one in found]
    return medians[0], medians[1]


def _row(name: str, ours: float, without: float, goal: float) -> dict[str, Any]:
    return {"what": name, "ms": ours, "without_ms": without, "ratio": ours / without, "goal": goal}


def _over(client: anabranch.Client, streams: tuple[str, ...]) -> Callable[[], None]:
    scope = streams[0].partition("/")[0]

    def commit() -> None:
        with client.begin(scope) as txn:
            for i in range(EVENTS):
                txn.write(streams[i % len(streams)], VALUE, key=b"key-%d" % i)
            txn.commit()

    return commit


def _commits(client: anabranch.Client, stream: str, count: int, *, twice: bool) -> dict[str, float]:
    """The time of the ends alone: what was written is flushed before."""
    took = []
    for _ in range(count):
        with client.begin(stream.partition("/")[0]) as txn:
            for i in range(EVENTS):
                txn.write(stream, VALUE, key=b"key-%d" % i)
            txn.flush()
            before = time.perf_counter()
            if twice:
                txn.prepare()
            txn.commit()
            took.append(time.perf_counter() - before)
    return {"p50_ms": percentile(sorted(took), 0.5) * 1000}


def _beside(
    place: Place, client: anabranch.Client, held: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """The same beside prepared transactions and beside none: each round prepares them, and aborts them again."""
    stream = place.new_stream(segments=2)
    scope = stream.partition("/")[0]
    numbers = itertools.count()
    for segments in (4, 3, 2):  # its topics get their partitions
        client.scale(stream, segments)

    def measured(prepared: int) -> dict[str, float]:
        handles = []
        for _ in range(prepared):
            txn = client.begin(scope)
            txn.write(stream, VALUE, key=b"key-%d" % next(numbers))
            txn.prepare()
            handles.append(txn)
        scaled: list[float] = []
        stop = threading.Event()

        def scale() -> None:
            while not stop.wait(0.5):
                before = time.perf_counter()
                client.scale(stream, 2 + next(numbers) % 3)
                scaled.append(time.perf_counter() - before)

        scaling = threading.Thread(target=scale)
        scaling.start()
        found = measure([_over(client, (stream,)) for _ in range(16)], seconds)
        stop.set()
        scaling.join()
        for txn in handles:
            txn.abort()
        found["scale_ms"] = statistics.median(scaled) * 1000
        return found

    beside, alone = _in_turn(rounds, measured, held, 0)
    return [
        _row(f"{name}, beside {held:,} prepared", beside[key], alone[key], GOALS["beside prepared"])
        for name, key in (
            ("16 one-shots, p50", "p50_ms"),
            ("… p99", "p99_ms"),
            ("a scaling, p50", "scale_ms"),
        )
    ]


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = [
        [
            row["what"], f"{row['ms']:.1f}", f"{row['without_ms']:.1f}", f"{row['ratio']:.2f} ×",
            f"≤ {row['goal']} ×",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return ["what", "ms", "without, ms", "ratio", "goal"], rows
