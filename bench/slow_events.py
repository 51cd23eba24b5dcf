"""What one slow or bad event costs the events of other tasks.

A worker of 8 tasks, 4 threads; single-event transactions of seven tasks at a constant rate; commits each 100 ms.
From a transaction's answer to its output readable: p50 and p99 of those, with one event of the eighth task in each
period that is slow in some way, against none. A period is 20 seconds; a slow event takes 2. The worker is a process
of its own. The first period, in which code is compiled, does not count.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import signal
import tempfile
import threading
import time
import uuid
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.processing.threads import ThreadedWorker
from anabranch.processing.worker import AllTasks
from anabranch.protocol.partitioner import task_of
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import stream_topic
from bench.setting import Place, percentile

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.pool import Pool

TASKS = 8
THREADS = 4
SLOW_S = 2.0
PAUSE_S = 0.02
BIG = 900_000
GOAL = 2.0
KEYS = [next(b"%d" % n for n in range(999) if task_of(b"%d" % n, TASKS) == t) for t in range(TASKS)]
SLOW = KEYS[0]
OTHERS = KEYS[1:]
# Kind of slow event -> the program that it is for.
KINDS = {
    "none (def)": "def",
    "slow def, waits": "def",
    "slow def, computes": "def",
    "slow def, computes in a process": "def",
    "big event": "def",
    "bad event": "def",
    "none (async)": "async",
    "slow async": "async",
    "none (timers)": "timers",
    "slow timer": "timers",
    "slow window": "timers",
    "none (table)": "table",
    "row in conflict": "table",
}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """p50 and p99 in milliseconds, by kind."""
    periods, seconds = (2, 8.0) if quick else (3, 20.0)
    with anabranch.connect(place.bootstrap, lane="admin") as operator:
        operator.feature_level(raise_to=LEVEL)
    return {kind: _measured(place, kind, periods, seconds) for kind in KINDS}


def _measured(place: Place, kind: str, periods: int, seconds: float) -> dict[str, float]:
    source, target, dead = (place.new_stream(2) for _ in range(3))
    rows = place.new_stream(1, table=True)
    arguments = (place.bootstrap, kind, source, target, dead, rows)
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=arguments)
    worker.start()
    try:
        with _Watch(place.bootstrap, target) as watch, anabranch.connect(place.bootstrap) as client:
            for _ in range(periods):
                _write(client, source, kind, watch, seconds)
            taken = watch.taken(periods)
    finally:
        worker.terminate()
        worker.join()
    return {"p50_ms": 1000 * percentile(taken, 0.5), "p99_ms": 1000 * percentile(taken, 0.99)}


def _write(client: anabranch.Client, source: str, kind: str, watch: _Watch, seconds: float) -> None:
    """A period: events of other tasks, and after a quarter of it a slow one."""

    def send(key: bytes, value: bytes, *, at: int | None = None) -> None:
        with client.begin("bench") as txn:
            txn.write(source, value, key=key, timestamp=at)
            txn.commit()

    begun, number, is_slow = time.monotonic(), 0, kind.startswith("none")
    while (now := time.monotonic()) < begun + seconds:
        if not is_slow and now >= begun + seconds / 4:
            is_slow = True
            big = b"x" * BIG if kind == "big event" else b""
            send(SLOW, kind.encode() + big)
            if KINDS[kind] == "timers":  # event time moves on
                send(SLOW, b"", at=int(time.time() * 1000) + 2000)
        value = uuid.uuid4().bytes
        watch.sent[value] = time.monotonic(), watch.period
        send(OTHERS[number % len(OTHERS)], value)
        watch.sent[value] = time.monotonic(), watch.period
        number += 1
        time.sleep(PAUSE_S)
    watch.period += 1


class _Watch:
    """When outputs become readable."""

    def __init__(self, bootstrap: str, target: str) -> None:
        self.sent: dict[bytes, tuple[float, int]] = {}
        self.period = 0
        self._seen: dict[bytes, float] = {}
        self._over = threading.Event()
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "isolation.level": "read_committed",
             "fetch.wait.max.ms": 20}
        )  # fmt: skip
        topic = stream_topic(target)
        partitions = self._consumer.list_topics(topic, timeout=30).topics[topic].partitions
        self._consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and not message.error():
                self._seen[message.value() or b""] = time.monotonic()

    def taken(self, periods: int) -> list[float]:
        """Seconds of each event after the first period, in order of size."""
        until = time.monotonic() + 60
        while self.sent.keys() - self._seen.keys():
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{len(self.sent.keys() - self._seen.keys())} outputs are missing"
                )
            time.sleep(0.1)
        counted = ((v, at) for v, (at, period) in self.sent.items() if period or periods == 1)
        return sorted(max(0.0, self._seen[value] - at) for value, at in counted)


def _work(bootstrap: str, kind: str, source: str, target: str, dead: str, rows: str) -> None:
    """The process of a worker."""
    logging.getLogger("anabranch").setLevel(logging.ERROR)
    name = f"bench/p{uuid.uuid4().hex[:6]}"
    app = anabranch.Processor(name, tasks=TASKS, threads=THREADS, dead_letter=dead)
    given, out = app.input(source), app.output(target)
    with anabranch.connect(bootstrap) as client, tempfile.TemporaryDirectory() as folder:
        program = {"def": _plain, "async": _async, "timers": _timers, "table": _table}
        program[KINDS[kind]](app, given, out, partial(_stop, client, rows), rows)
        tasks = AllTasks(range(TASKS))
        with closing(ThreadedWorker(app, client, Path(folder), tasks=tasks)) as worker:
            signal.signal(
                signal.SIGTERM, lambda *_: worker.stop.set()
            )  # its own processes end, too
            worker.run()


def _stop(client: anabranch.Client, rows: str, kind: bytes) -> None:
    """Be slow, or bad, in one way."""
    if kind == b"bad event":
        raise ValueError("bad")
    if kind == b"row in conflict":
        with client.outside(), client.begin("bench") as txn:
            txn.write(rows, b"1", key=SLOW)
            txn.commit()
    elif kind == b"slow def, computes":
        _compute()
    elif kind == b"slow def, computes in a process":
        _pool().apply_async(_compute).get(60)
    elif kind.startswith(b"slow"):
        time.sleep(SLOW_S)


@cache
def _pool() -> Pool:
    return multiprocessing.get_context("spawn").Pool(1)


def _compute() -> None:
    until = time.monotonic() + SLOW_S
    while time.monotonic() < until:
        sum(range(1000))


def _plain(
    app: anabranch.Processor, given: Any, out: Any, stop: Callable[[bytes], None], _: str
) -> None:
    @app.on(given)
    def copy(event: anabranch.Event) -> None:
        if event.key == SLOW:
            stop(event.value or b"")
        else:
            out.write(event.value, key=event.key)


def _async(app: anabranch.Processor, given: Any, out: Any, _: object, __: str) -> None:
    @app.on(given)
    async def copy(event: anabranch.Event) -> None:
        if event.key == SLOW:
            await asyncio.sleep(SLOW_S)
        else:
            out.write(event.value, key=event.key)


def _timers(
    app: anabranch.Processor, given: Any, out: Any, stop: Callable[[bytes], None], _: str
) -> None:
    windows = app.windows("w", 1)

    @app.timer("t")
    def fired(key: bytes, _: int) -> None:
        stop(b"slow")

    @windows.on_close
    def closed(window: Any) -> None:
        stop(window.value)

    @app.on(given)
    def copy(event: anabranch.Event) -> None:
        if event.key != SLOW:
            out.write(event.value, key=event.key)
        elif event.value == b"slow timer":
            fired.set(event.key, at=event.timestamp)
        elif event.value:
            for window in windows.of(event):
                window.value = b"slow"


def _table(
    app: anabranch.Processor, given: Any, out: Any, stop: Callable[[bytes], None], name: str
) -> None:
    rows, since = app.table(name, value=json), list[float]()

    @app.on(given)
    def count(event: anabranch.Event) -> None:
        rows[event.key] = rows.get(event.key, 0) + 1
        if event.key == SLOW:
            since.append(time.monotonic())
            if since[-1] < since[0] + SLOW_S:
                stop(event.value or b"")
            else:
                since.clear()
        else:
            out.write(event.value, key=event.key)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    base = {program: result[kind] for kind, program in KINDS.items() if kind.startswith("none")}
    rows = []
    for kind, found in result.items():
        ratio = found["p99_ms"] / base[KINDS[kind]]["p99_ms"]
        is_base = kind.startswith("none")
        rows.append(
            [
                kind,
                f"{found['p50_ms']:.0f}",
                f"{found['p99_ms']:.0f}",
                "" if is_base else f"{ratio:.2f} ×",
                "" if is_base else f"≤ {GOAL:.0f} ×",
            ]
        )
    return ["one event in a period", "p50 ms", "p99 ms", "of none", "goal"], rows
