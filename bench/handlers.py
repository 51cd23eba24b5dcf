"""Handlers that fail, and handlers that wait, against handlers that do neither.

*bad*: one-event transactions whose handler always raises, which become dead letters after two retries, against the
same number of good ones. *async*: events of as many keys, each awaited for 50 ms, 64 concurrently, in a transaction
each against all in one. The input is there before. From the first step of a worker without tasks to the last
commit, so the pauses of the first bad event and the take of the tasks count in each. Medians.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import anabranch
from anabranch.processing.worker import AllTasks, Worker
from bench.setting import Place

WAIT_S = 0.05
GOAL_BAD, GOAL_ASYNC = 0.5, 0.7


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Events per second, medians of rounds."""
    logging.getLogger("anabranch.processor").setLevel(logging.ERROR)  # a line for each bad event
    rounds = 3 if quick else 7
    with anabranch.connect(place.bootstrap, timeout=60) as client:
        found: dict[str, list[float]] = {}
        for _ in range(rounds + 1):
            for name, rate in _round(place, client, quick).items():
                found.setdefault(name, []).append(rate)
    # The first round compiles code.
    return {name: round(statistics.median(rates[1:]), 1) for name, rates in found.items()}


def _round(place: Place, client: anabranch.Client, quick: bool) -> dict[str, float]:
    many = 500 if quick else 2000
    return {
        "good 200": _rate(place, client, 200, bad=False),
        "bad 200": _rate(place, client, 200, bad=True),
        "good many": _rate(place, client, many, bad=False),
        "bad many": _rate(place, client, many, bad=True),
        "async in one": _rate(place, client, 300, waits=True, each=300),
        "async in 300": _rate(place, client, 300, waits=True),
    }


def _rate(
    place: Place, client: anabranch.Client, count: int, *, bad: bool = False, waits: bool = False,
    each: int = 1,
) -> float:  # fmt: skip
    source, target, dead = (place.new_stream(2) for _ in range(3))
    for first in range(0, count, each):
        with client.begin("bench") as txn:
            txn.write_many(source, [(b"v", b"%d" % (first + at)) for at in range(each)])
            txn.commit()
    name = f"bench/h{uuid.uuid4().hex[:8]}"
    app = anabranch.Processor(name, tasks=4, commit_interval=0.1, dead_letter=dead)
    out, given = app.output(target), app.input(source)

    if waits:

        @app.on(given)
        async def handle(event: Any) -> None:
            await asyncio.sleep(WAIT_S)
            out.write(event.value, key=event.key)

    else:

        @app.on(given)
        def copy(event: Any) -> None:
            if bad:
                raise ValueError(event.value)
            out.write(event.value, key=event.key)

    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
        closing(Worker(app, client, Path(folder), tasks=AllTasks(range(4)))) as worker,
    ):
        begun, consumed = time.monotonic(), 0.0
        while consumed < count:
            worker.step()
            consumed = worker.metrics.total("processor_events_in")
        seconds = time.monotonic() - begun
        dead_letters = worker.metrics.total("processor_dead_letters")
    if dead_letters != (count if bad else 0):
        raise RuntimeError(f"{dead_letters} dead letters of {count}")
    return count / seconds


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    rows = []
    for what, slow, quick, goal in (
        ("200 bad events", "bad 200", "good 200", GOAL_BAD),
        ("many bad events", "bad many", "good many", GOAL_BAD),
        ("300 async events in 300 transactions", "async in 300", "async in one", GOAL_ASYNC),
    ):
        rates = result[slow], result[quick]
        ratio = f"{rates[0] / rates[1]:.2f} ×"
        rows.append([what, f"{rates[0]:,}/s", f"{rates[1]:,}/s", ratio, f"≥ {goal} ×"])
    return ["what", "rate", "good, or in one", "of it", "goal"], rows
