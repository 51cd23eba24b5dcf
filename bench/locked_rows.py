"""Processors that read and write a row of a table with a lock for each event, against the same with a store.

*rate*: 64 tasks, of eight processors with a worker each, in threads of one process; single-event transactions come
as fast as four clients write them, commits at once. Commits a second, and events a second.

*alone*: one event at a time. From its transaction's answer to the output readable: p50 and p99 in milliseconds.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.processing.app import Processor
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import stream_topic
from bench.setting import Place, percentile

PROCESSORS, TASKS = 8, 8
WRITERS = 4
KEYS = 1000
GOAL_RATE, GOAL_ALONE = 0.6, 1.5


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Both kinds."""
    seconds, events = (3.0, 40) if quick else (10.0, 200)
    with anabranch.connect(place.bootstrap, lane="admin") as operator:
        operator.feature_level(raise_to=LEVEL)
    found: dict[str, Any] = {}
    for kind in ("store", "table"):
        found[kind] = _rate(place, kind, seconds) | _alone(place, kind, events)
    return found


class _Works:
    """Workers of some processors in threads, on one input."""

    def __init__(self, place: Place, kind: str, processors: int) -> None:
        self._stack = ExitStack()
        self.source, self.target = place.new_stream(segments=4), place.new_stream(segments=4)
        self.client = self._stack.enter_context(anabranch.connect(place.bootstrap, timeout=60))
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-"))
        self.workers = []
        for number in range(processors):
            app = self._program(place, kind)
            tasks = AllTasks(range(app.tasks))
            worker = Worker(app, self.client, Path(folder, str(number)), tasks=tasks)
            thread = threading.Thread(target=worker.run)
            self._stack.callback(worker.close)
            self._stack.callback(thread.join)
            self._stack.callback(worker.stop.set)
            thread.start()
            self.workers.append(worker)

    def _program(self, place: Place, kind: str) -> Processor:
        app = Processor(f"bench/p{uuid.uuid4().hex[:6]}", tasks=TASKS, commit_interval=0)
        rows: Any = (
            app.store("rows", value=json)
            if kind == "store"
            else app.table(place.new_stream(1, table=True), value=json)
        )
        out = app.output(self.target)

        @app.on(app.input(self.source))
        def add(event: anabranch.Event) -> None:
            rows[event.key] = rows.get(event.key, 0) + 1
            out.write(event.value, key=event.key)

        return app

    def commits(self) -> float:
        return sum(w.metrics.values["processor_commits"].get((), 0) for w in self.workers)

    def events(self) -> float:
        return sum(sum(w.metrics.values["processor_events_in"].values()) for w in self.workers)

    def close(self) -> None:
        self._stack.close()


def _write(client: anabranch.Client, stream: str, number: int) -> None:
    with client.begin("bench") as txn:
        txn.write(stream, b"%d" % number, key=b"key-%d" % (number % KEYS))
        txn.commit()


def _rate(place: Place, kind: str, seconds: float) -> dict[str, float]:
    over = threading.Event()
    with closing(_Works(place, kind, PROCESSORS)) as works, ExitStack() as stack:

        def write(first: int) -> None:
            number = first
            while not over.is_set():
                _write(works.client, works.source, number)
                number += WRITERS

        for number in range(WRITERS):
            thread = threading.Thread(target=write, args=(number,))
            stack.callback(thread.join)
            thread.start()
        stack.callback(over.set)
        while works.events() < PROCESSORS * KEYS / 10:  # it is warm
            time.sleep(0.1)
        began, commits, events = time.monotonic(), works.commits(), works.events()
        time.sleep(seconds)
        took = time.monotonic() - began
        return {
            "commits_per_s": (works.commits() - commits) / took,
            "events_per_s": (works.events() - events) / took,
        }


def _alone(place: Place, kind: str, events: int) -> dict[str, float]:
    taken: list[float] = []
    consumer = Consumer(
        {
            "bootstrap.servers": place.bootstrap, "group.id": "bench", "isolation.level": "read_committed",
            "fetch.wait.max.ms": 100,
        }
    )  # fmt: skip
    with closing(_Works(place, kind, 1)) as works, closing(consumer):
        topic = stream_topic(works.target)
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        for number in range(events):
            _write(works.client, works.source, number)
            began = time.monotonic()
            while (message := consumer.poll(0.1)) is None or message.error():
                if time.monotonic() > began + 60:
                    raise RuntimeError("no output came")
            taken.append(time.monotonic() - began)
            time.sleep(0.02)
    warm = sorted(taken[events // 5 :])
    return {f"p{p}_ms": 1000 * percentile(warm, p / 100) for p in (50, 99)}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = [
        _row(result, "commits_per_s", "commits a second, 64 tasks", f"≥ {GOAL_RATE} ×"),
        _row(result, "events_per_s", "events a second, 64 tasks", ""),
        _row(result, "p50_ms", "one event at a time, p50 ms", f"≤ {GOAL_ALONE} ×"),
        _row(result, "p99_ms", "one event at a time, p99 ms", ""),
    ]
    return ["what", "locked row", "store", "ratio", "goal"], rows


def _row(result: dict[str, Any], name: str, what: str, goal: str) -> list[str]:
    ours, store = result["table"][name], result["store"][name]
    return [what, f"{ours:,.1f}", f"{store:,.1f}", f"{ours / store:.2f} ×", goal]
