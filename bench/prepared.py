"""What scopes together and prepared transactions cost, each beside the same without, in turn, in one run.

One-shots of 10 events over two streams of two scopes against two of one; prepare and commit against a commit alone,
of a transaction that is open and flushed; one-shots and scalings beside 1,000 prepared ones of one event each
(``--quick``: 100) against beside none, and the way to a plain reader. ``--minutes M`` holds them so long instead
(`hold`). All acks, replication factor 1, one controller on the same two cores.
"""

from __future__ import annotations

import itertools
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

from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch import Transaction
from anabranch.infra.broker import EmbeddedBroker
from bench.oneshot import EVENTS, VALUE, measure
from bench.setting import Place, controller, percentile

PREPARED, QUICK_PREPARED = 1_000, 100
GOALS = {"two scopes": 1.1, "prepare + commit": 2.2, "beside prepared": 1.05}
_numbers = itertools.count()


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
    return _medians(found[0]), _medians(found[1])


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(m[key] for m in found) for key in found[0]}


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
    _grow(client, stream)

    def measured(prepared: int) -> dict[str, float]:
        handles = [_prepared(client, stream) for _ in range(prepared)]
        found = _loaded(place.bootstrap, client, stream, seconds)
        for txn in handles:
            txn.abort()
        return found

    beside, alone = _in_turn(rounds, measured, held, 0)
    return _rows(beside, alone, f"beside {held:,} prepared")


def _rows(beside: dict[str, float], alone: dict[str, float], where: str) -> list[dict[str, Any]]:
    return [
        _row(f"{name}, {where}", beside[key], alone[key], GOALS["beside prepared"])
        for name, key in (
            ("16 one-shots, p50", "p50_ms"),
            ("… p99", "p99_ms"),
            ("to a plain reader, p99", "read_ms"),
            ("a scaling, p50", "scale_ms"),
        )
    ]


def _grow(client: anabranch.Client, stream: str) -> None:
    for segments in (4, 3, 2):  # its topics get their partitions
        client.scale(stream, segments)


def _prepared(client: anabranch.Client, stream: str, *, flushed: bool = False) -> Transaction:
    txn = client.begin(stream.partition("/")[0])
    txn.write(stream, VALUE, key=b"key-%d" % next(_numbers))
    if flushed:
        txn.flush()
    txn.prepare()
    return txn


def _loaded(
    bootstrap: str, client: anabranch.Client, stream: str, seconds: float
) -> dict[str, float]:
    """One-shots, scalings and a plain reader for a while."""
    scaled: list[float] = []
    read: list[float] = []
    stop = threading.Event()

    def scale() -> None:
        while not stop.wait(0.5):
            before = time.perf_counter()
            client.scale(stream, 2 + next(_numbers) % 3)
            scaled.append(time.perf_counter() - before)

    def follow(consumer: Consumer) -> None:
        while not stop.is_set():
            for message in consumer.consume(1000, 0.1):
                read.append(time.perf_counter() - float((message.value() or b"").split()[0]))
        consumer.close()

    def commit() -> None:
        with client.begin(stream.partition("/")[0]) as txn:
            for i in range(EVENTS):
                txn.write(stream, b"%.6f " % time.perf_counter() + VALUE, key=b"key-%d" % i)
            txn.commit()

    threads = [threading.Thread(target=scale)]
    threads.append(threading.Thread(target=follow, args=(_follower(bootstrap, stream),)))
    for thread in threads:
        thread.start()
    found = measure([commit] * 16, seconds)
    stop.set()
    for thread in threads:
        thread.join()
    found["scale_ms"] = statistics.median(scaled) * 1000
    found["read_ms"] = percentile(sorted(read), 0.99) * 1000
    return found


def _follower(bootstrap: str, stream: str) -> Consumer:
    """A plain consumer at the ends of a stream's topic."""
    topic = stream.replace("/", ".")
    settings = {"bootstrap.servers": bootstrap, "group.id": topic, "enable.auto.commit": False}
    consumer = Consumer(settings)
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    places = [TopicPartition(topic, p) for p in partitions]
    ends = [consumer.get_watermark_offsets(place, timeout=30)[1] for place in places]
    consumer.assign(
        [TopicPartition(topic, p, end) for p, end in zip(partitions, ends, strict=True)]
    )
    return consumer


# -- held for long ---------------------------------------------------------------------------------------

STAGES = "at first", "after a takeover", "without the RocksDB folder"


def hold(minutes: float, *, quick: bool = False) -> dict[str, Any]:
    """Rows as of `run`, measured beside prepared ones that are held so long, and on another cluster beside none.

    Two clusters on one broker, in turn. Their controllers are killed, and later lose their folders. One of the
    prepared is in a journal. In the end all are committed.
    """
    count, seconds = (QUICK_PREPARED, 2.0) if quick else (PREPARED, 5.0)
    rows: list[dict[str, Any]] = []
    rounds = 0
    with ExitStack() as whole:
        bootstrap = whole.enter_context(EmbeddedBroker()).bootstrap
        folder = Path(whole.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-")))
        clients = {
            name: whole.enter_context(
                anabranch.connect(bootstrap, prefix=f"of-{name}", timeout=60.0)
            )
            for name in ("held", "bare")
        }
        handles: list[Transaction] = []
        for number, stage in enumerate(STAGES):
            until = time.monotonic() + minutes * 60 / len(STAGES)
            with ExitStack() as stack:
                pids = [
                    stack.enter_context(
                        controller(
                            bootstrap,
                            folder / f"{name}{number // 2}",
                            ("--cluster-prefix", f"of-{name}"),
                        )
                    )
                    for name in clients
                ]
                for name, client in clients.items() if number == 0 else ():
                    client.create_stream(f"{name}/s", segments=2)
                    _grow(client, f"{name}/s")
                if number == 0:
                    handles = [
                        _prepared(clients["held"], "held/s", flushed=i == 0)
                        for i in range(count + 1)
                    ]
                for name, client in clients.items():  # caches and connections
                    _loaded(bootstrap, client, f"{name}/s", 2.0)
                found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
                while time.monotonic() < until or not found["bare"]:
                    for name, client in clients.items():
                        found[name].append(_loaded(bootstrap, client, f"{name}/s", seconds))
                rounds += len(found["bare"])
                rows += _rows(_medians(found["held"]), _medians(found["bare"]), stage)
                if stage == STAGES[-1]:
                    left = len(clients["held"].prepared())
                    committed = sum(txn.commit().counts.committed for txn in handles)
                    if (left, committed) != (count + 1, count + 1):
                        raise RuntimeError(f"{left} were prepared, {committed} events committed")
                if number == 0:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
    return {"rounds": rounds, "prepared": count + 1, "minutes": minutes, "rows": rows}


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
