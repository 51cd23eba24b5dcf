"""How far a derived table that a worker writes is behind its source, at 2,000 commits/s.

Single-row commits (`Client.begin`) of several processes, at a constant rate, to a table of 10,000 rows; each
changes the row's value. One worker process derives, and a replica here reads. The lag of a commit: from its commit
timestamp, the time of the controller's decision, to the moment at which the replica is complete through it. All
processes, broker and controller share the machine. The first seconds, in which code is compiled, do not count.

While other programs keep the machine busy, the lag is mostly due to them. So the processor time of each process is
measured, too. Its sum for a commit says how many commits a second two cores can take; above that, commits queue.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import anabranch
from anabranch.processing.run import spare_collections
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.hybrid_time import from_us, to_us
from anabranch.protocol.schemas.codec import LEVEL
from bench.setting import WARM_S, Place, percentile

RATE, GOAL_MS = 2_000, 100
PROCESSES, THREADS = 2, 32
KEYS, CITIES, SEGMENTS = 10_000, 100, 4
SECONDS, QUICK_SECONDS = 30.0, 8.0
INTERVALS = (0.02, 0.0)  # seconds between a worker's commits
_POLL_S = 0.002  # a shorter pause takes a noticeable part of a core


def city(_: bytes, row: bytes) -> bytes:
    """The value of a row."""
    return row.partition(b" ")[0]


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """The rate that was reached, and the lag in milliseconds, by commit interval."""
    with anabranch.connect(place.bootstrap, lane="admin") as operator:
        operator.feature_level(raise_to=LEVEL)
    seconds = QUICK_SECONDS if quick else SECONDS
    return {str(interval): _measured(place, interval, seconds) for interval in INTERVALS}


def _measured(place: Place, interval: float, seconds: float) -> dict[str, Any]:
    source, spawn = place.new_stream(SEGMENTS, table=True), multiprocessing.get_context("spawn")
    ready = spawn.Event()
    worker = spawn.Process(target=_work, args=(place.bootstrap, source, interval, ready))
    worker.start()
    try:
        if not ready.wait(120):
            raise RuntimeError("the worker does not start")
        pipes, writers = [], []
        for number in range(PROCESSES):
            here, there = spawn.Pipe()
            arguments = place.bootstrap, source, number, WARM_S + seconds, there
            writers.append(spawn.Process(target=_write, args=arguments))
            pipes.append(here)
        with (
            anabranch.connect(place.bootstrap) as client,
            client.replica(f"{source}-by-city-v1") as replica,
            _Watch(replica) as watch,
        ):
            for one in writers:
                one.start()
            cpu = _Cpu(
                controller=[place.controller],
                broker=[place.broker],
                worker=[worker.pid],
                writers=[one.pid for one in writers],
                reader=[os.getpid()],
            )
            time.sleep(WARM_S)
            since, before = from_us(time.time_ns() // 1_000), cpu.seconds()
            committed = sorted(at for pipe in pipes for at in pipe.recv())
            used = {role: spent - before[role] for role, spent in cpu.seconds().items()}
            counted = sum(at > since for at in committed)
            for one in writers:
                one.join()
            lags = watch.lags(
                [at for at in committed if at > committed[0] + from_us(int(WARM_S * 1e6))]
            )
    finally:
        worker.terminate()
        worker.join()
    lasted = (to_us(committed[-1]) - to_us(committed[0])) / 1e6 - WARM_S
    return {
        "commits_per_s": len(lags) / lasted,
        "p50_ms": 1000 * percentile(lags, 0.5),
        "p99_ms": 1000 * percentile(lags, 0.99),
        "most_ms": 1000 * lags[-1],
        "cpu_us": {role: 1e6 * spent / counted for role, spent in used.items()},
    }


class _Cpu:
    """The processor time of some processes, by role."""

    def __init__(self, **roles: Sequence[int | None]) -> None:
        self._roles = {role: [psutil.Process(pid) for pid in its] for role, its in roles.items()}

    def seconds(self) -> dict[str, float]:
        """The seconds so far."""
        return {
            role: sum(sum(one.cpu_times()[:2]) for one in its) for role, its in self._roles.items()
        }


class _Watch:
    """When a replica becomes complete through which time."""

    def __init__(self, replica: Any) -> None:
        self._replica, self._over = replica, threading.Event()
        self._times, self._walls = list[int](), list[float]()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before = 0
        while not self._over.is_set():
            if (now := self._replica.timestamp) > before:
                before = now
                self._times.append(now)
                self._walls.append(time.time())
            time.sleep(_POLL_S)

    def lags(self, committed: list[int]) -> list[float]:
        """Seconds of each commit, in order of size, once the replica has all of them."""
        until = time.monotonic() + 60
        while not self._times or self._times[-1] < committed[-1]:
            if time.monotonic() > until:
                raise RuntimeError("the derived table does not come to the last commit")
            time.sleep(0.05)
        found = (self._walls[bisect_left(self._times, at)] - to_us(at) / 1e6 for at in committed)
        return sorted(found)


def _work(bootstrap: str, source: str, interval: float, ready: Any) -> None:
    """The process of the worker."""
    logging.getLogger("anabranch").setLevel(logging.ERROR)
    app = anabranch.DerivedTable(source, "by-city", city, commit_interval=interval)
    with anabranch.connect(bootstrap) as client, tempfile.TemporaryDirectory() as folder:
        tasks = AllTasks(range(app.tasks))
        with closing(Worker(app, client, Path(folder), tasks=tasks)) as worker:
            ready.set()
            spare_collections()  # as of `run_worker`
            worker.run()


def _write(bootstrap: str, source: str, number: int, seconds: float, pipe: Connection) -> None:
    """A process of writers: commits of single rows at its part of the rate. Sends their timestamps."""
    chance, lock, committed = random.Random(number), threading.Lock(), list[int]()
    scope = source.partition("/")[0]
    with anabranch.connect(bootstrap) as client:
        begun, apart, due = time.monotonic(), PROCESSES / RATE, 0

        def commit() -> None:
            nonlocal due
            while True:
                with lock:
                    at = begun + due * apart
                    due += 1
                    key, row = chance.randrange(KEYS), chance.randrange(CITIES)
                if at > begun + seconds:
                    return
                time.sleep(max(0.0, at - time.monotonic()))
                with client.begin(scope) as txn:
                    txn.write(source, b"city-%d some more of a row" % row, key=b"key-%d" % key)
                    done = txn.commit(timeout=60).commit_timestamp
                with lock:
                    committed.append(done)

        threads = [threading.Thread(target=commit) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pipe.send(committed)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    head = ["commit interval, s", "commits/s", "of", "lag p50, ms", "p99", "most", "goal, p99"]
    head.append(f"CPU of a commit, us: {', '.join(next(iter(result.values()))['cpu_us'])}")
    rows = [
        [
            interval,
            f"{found['commits_per_s']:,.0f}",
            f"{RATE:,}",
            f"{found['p50_ms']:.0f}",
            f"{found['p99_ms']:.0f}",
            f"{found['most_ms']:.0f}",
            f"≤ {GOAL_MS}",
            ", ".join(f"{spent:,.0f}" for spent in found["cpu_us"].values()),
        ]
        for interval, found in result.items()
    ]
    return head, rows
