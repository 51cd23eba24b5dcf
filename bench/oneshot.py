"""Single-request transactions of 10 events, against transactions of Kafka's own with as many producers.

Ours: one client, 1, 8, 64 or 256 threads; a transaction is one command to a controller process and one reply.
Native: 1, 8 or 64 producers of librdkafka (``retry.backoff.ms=1``, without which they are far slower), a thread
each; the peer of 256 in flight is the number of producers with the best rate. Both on one broker, in turn, in one
run, once the broker is warm; all acks, replication factor 1. The figures are medians over rounds. CPU is that of a
commit, in the process of the clients, the controller, and the broker.

Not equal: native transactions span one process and 15 minutes and their outcome can't be asked for; ours
goes through one more process (the controller), which shares the two cores with broker and clients.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Producer

import anabranch
from bench.setting import WARM_S, Place, cpu_s, percentile

IN_FLIGHT = (1, 8, 64, 256)
MOST_PRODUCERS = 64
EVENTS = 10
VALUE = b"v" * 100
LEAST_RATE = {8: 1.5, 64: 2.6, 256: 4.0}  # ours / native, by transactions in flight
MOST_P50 = {1: 1.1}
MOST_CPU_US = {"client": 120, "controller": 90}  # at 64 in flight

Figures = dict[str, float]


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of interleaved rounds, and ratios ours / native."""
    rounds, seconds, warm_s = (1, 2.0, 5.0) if quick else (5, 8.0, WARM_S)
    stream = place.new_stream(segments=2)
    topic = place.new_topic(partitions=2)
    native_parts = {"client": os.getpid(), "broker": place.broker}
    parts = {**native_parts, "controller": place.controller}
    ours: dict[int, list[Figures]] = {n: [] for n in IN_FLIGHT}
    native: dict[int, list[Figures]] = {n: [] for n in IN_FLIGHT if n <= MOST_PRODUCERS}
    with anabranch.connect(place.bootstrap) as client:
        measure([_one_shot(client, stream)] * MOST_PRODUCERS, warm_s)
        for _ in range(rounds):
            for n in IN_FLIGHT:
                ours[n].append(measure([_one_shot(client, stream)] * n, seconds, parts))
                if n in native:
                    producers = [_native(place.bootstrap, topic, i) for i in range(n)]
                    native[n].append(measure(producers, seconds, native_parts))
    return {
        "events_per_transaction": EVENTS,
        "value_bytes": len(VALUE),
        "rounds": rounds,
        "seconds_each": seconds,
        "rows": _rows(
            {n: _medians(each) for n, each in ours.items()},
            {n: _medians(each) for n, each in native.items()},
        ),
        "goals": {
            "least_rate_ratio": LEAST_RATE,
            "most_p50_ratio": MOST_P50,
            "most_cpu_us_at_64": MOST_CPU_US,
        },
    }


def _medians(rounds: list[Figures]) -> Figures:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def _rows(ours: dict[int, Figures], native: dict[int, Figures]) -> list[dict[str, Any]]:
    best = max(native, key=lambda n: native[n]["per_s"])
    rows = []
    for n, figures in ours.items():
        producers = n if n in native else best
        peer = native[producers]
        ratios = {f"{key}_ratio": figures[key] / peer[key] for key in peer}
        row = {"in_flight": n, "producers": producers, "anabranch": figures, "native": peer}
        rows.append({**row, **ratios})
    return rows


def _one_shot(client: anabranch.Client, stream: str) -> Callable[[], None]:
    scope = stream.partition("/")[0]

    def commit() -> None:
        with client.begin(scope) as txn:
            for i in range(EVENTS):
                txn.write(stream, VALUE, key=b"key-%d" % i)
            txn.commit()

    return commit


def _native(bootstrap: str, topic: str, number: int) -> Callable[[], None]:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"native-{topic}-{number}",
            "linger.ms": 0,
            "retry.backoff.ms": 1,
        }
    )
    producer.init_transactions(30)

    def commit() -> None:
        producer.begin_transaction()
        for i in range(EVENTS):
            producer.produce(topic, VALUE, b"key-%d" % i)
        producer.commit_transaction(30)

    return commit


def measure(
    commits: list[Callable[[], None]], seconds: float, parts: Mapping[str, int] = {}
) -> Figures:
    """Run each in a thread of its own for a time; the rate of all and the latencies of each.

    ``parts``: processes whose CPU of a commit is measured, as ``cpu_us_…`` by their names.
    """
    took: list[list[float]] = [[] for _ in commits]
    for commit in commits:
        commit()  # connections and metadata are not timed
    spent = {part: -cpu_s(process) for part, process in parts.items()}
    start = time.perf_counter()
    end = start + seconds

    def work(i: int) -> None:
        while (begun := time.perf_counter()) < end:
            commits[i]()
            took[i].append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(commits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    every = sorted(t for one in took for t in one)
    cpu = {part: spent[part] + cpu_s(process) for part, process in parts.items()}
    return {
        "per_s": len(every) / elapsed,
        "p50_ms": percentile(every, 0.5) * 1000,
        "p99_ms": percentile(every, 0.99) * 1000,
        **{f"cpu_us_{part}": used / len(every) * 1e6 for part, used in cpu.items()},
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = []
    for row in result["rows"]:
        n, ours, native = row["in_flight"], row["anabranch"], row["native"]
        for key, title, unit, goals in (
            ("per_s", "commits", "/s", {at: f"≥ {least} ×" for at, least in LEAST_RATE.items()}),
            ("p50_ms", "p50", "ms", {at: f"≤ {most} ×" for at, most in MOST_P50.items()}),
            ("p99_ms", "p99", "ms", {}),
        ):
            figures = [f"{one[key]:,.1f} {unit}" for one in (ours, native)]
            ratio = f"{row[key + '_ratio']:.2f} ×"
            against = f" ({row['producers']})" if n != row["producers"] else ""
            rows.append([f"{n}{against} in flight, {title}", *figures, ratio, goals.get(n, "")])
        for part in ("client", "controller", "broker"):
            key = f"cpu_us_{part}"
            peer = f"{native[key]:,.0f} µs" if key in native else ""
            goal = f"≤ {MOST_CPU_US[part]} µs" if n == 64 and part in MOST_CPU_US else ""
            rows.append([f"… CPU of a commit, {part}", f"{ours[key]:,.0f} µs", peer, "", goal])
    return ["", "anabranch", "native", "ratio", "goal"], rows
