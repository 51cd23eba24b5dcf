"""One-shot commits of 10 events at 1, 8 and 64 in flight, against native Kafka transactions.

Ours: one client, as many threads; a whole transaction is one command to a controller process and one reply.
Native: as many transactional producers (librdkafka, ``retry.backoff.ms=1``, without which they are far slower)
in as many threads. Both on one broker, in turn, in one run; all acks, replication factor 1.

Not equal: native transactions span one process and 15 minutes and their outcome can't be asked for; ours
goes through one more process (the controller), which shares the two cores with broker and clients.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Producer

import anabranch
from bench.setting import Place, percentile

IN_FLIGHT = (1, 8, 64)
EVENTS = 10
VALUE = b"v" * 100
GOALS = {"p50 at 1": ("at most", 2.0), "rate at 64": ("at least", 2.0)}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of interleaved rounds, and ratios ours / native."""
    rounds, seconds = (1, 2.0) if quick else (3, 5.0)
    stream = place.new_stream(segments=2)
    topic = place.new_topic(partitions=2)
    ours: dict[int, list[dict[str, float]]] = {n: [] for n in IN_FLIGHT}
    native: dict[int, list[dict[str, float]]] = {n: [] for n in IN_FLIGHT}
    with anabranch.connect(place.bootstrap) as client:
        _one_shot(client, stream)()
        for _ in range(rounds):
            for n in IN_FLIGHT:
                ours[n].append(measure([_one_shot(client, stream) for _ in range(n)], seconds))
                producers = [_native(place.bootstrap, topic, i) for i in range(n)]
                native[n].append(measure(producers, seconds))
    rows = []
    for n in IN_FLIGHT:
        row: dict[str, Any] = {"in_flight": n}
        for name, measured in (("anabranch", ours[n]), ("native", native[n])):
            row[name] = {key: statistics.median(m[key] for m in measured) for key in measured[0]}
        row["rate_ratio"] = row["anabranch"]["per_s"] / row["native"]["per_s"]
        row["p50_ratio"] = row["anabranch"]["p50_ms"] / row["native"]["p50_ms"]
        row["p99_ratio"] = row["anabranch"]["p99_ms"] / row["native"]["p99_ms"]
        rows.append(row)
    return {
        "events_per_transaction": EVENTS,
        "value_bytes": len(VALUE),
        "rounds": rounds,
        "seconds_each": seconds,
        "rows": rows,
        "goals": {
            "p50_at_1_at_most_2": rows[0]["p50_ratio"],
            "rate_at_64_at_least_2": rows[-1]["rate_ratio"],
        },
    }


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


def measure(commits: list[Callable[[], None]], seconds: float) -> dict[str, float]:
    """Run each in a thread of its own for a time; the rate of all and the latencies of each."""
    took: list[list[float]] = [[] for _ in commits]
    for commit in commits:
        commit()  # connections and metadata are not timed
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
    return {
        "per_s": len(every) / elapsed,
        "p50_ms": percentile(every, 0.5) * 1000,
        "p99_ms": percentile(every, 0.99) * 1000,
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["in flight", "anabranch /s", "p50 / p99 ms", "native /s", "p50 / p99 ms", "rate", "p50"]
    rows = []
    for row in result["rows"]:
        ours, native = row["anabranch"], row["native"]
        rows.append(
            [
                str(row["in_flight"]),
                f"{ours['per_s']:,.0f}",
                f"{ours['p50_ms']:.1f} / {ours['p99_ms']:.1f}",
                f"{native['per_s']:,.0f}",
                f"{native['p50_ms']:.1f} / {native['p99_ms']:.1f}",
                f"{row['rate_ratio']:.2f} ×",
                f"{row['p50_ratio']:.2f} ×",
            ]
        )
    return head, rows
