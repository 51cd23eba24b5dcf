"""A table's replica beside a versioned store of Kafka Streams (KIP-889), on one broker, in turn, in one run.

Restore: 1,000,000 rows (``--quick``: a tenth) of a key of 16 bytes and a value of 100 that does not compress, in
four partitions: a replica from its making to its first snapshot, against the store from its changelog, by what its
restore listener tells, so without Java's start. Readable: one small transaction after the other, from its commit's
answer until the row is in the replica, or in the store: by a one-shot, against a native transaction of a librdkafka
producer into a topic that Kafka Streams reads with `exactly_once_v2` and `commit.interval.ms` 100. Reads: points at
a snapshot against ``get(key, asOf)`` in the store's own process.

Not equal: the store has a changelog to write, the replica none; the store is a JVM's, the replica in Python.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.client.replica import Replica
from bench.processing.peers import KAFKA_STREAMS, Job, Worker, working
from bench.setting import Place, noise_values, percentile

ROWS, QUICK_ROWS = 1_000_000, 100_000
COMMITS, QUICK_COMMITS, READS = 500, 100, 20_000
GOAL_RESTORE, GOAL_P50_MS, GOAL_P99_MS = 1.0, 10, 50
PARTITIONS = 4
TABLE, STORE = "bench/versioned", "rows"
_PATIENCE_S = 300.0
_STEP_S = 0.0002


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rates, times and ratios of both."""
    rows, commits = (QUICK_ROWS, QUICK_COMMITS) if quick else (ROWS, COMMITS)
    keys = [b"%016d" % i for i in np.random.default_rng(1).permutation(rows)]
    noise = noise_values(100)
    values = [noise[i % len(noise)] for i in range(rows)]
    with anabranch.connect(place.bootstrap, timeout=_PATIENCE_S) as client:
        client.create_table(TABLE, PARTITIONS)
        with client.begin("bench") as txn:
            for at in range(0, rows, 50_000):
                columns = {"key": keys[at : at + 50_000], "value": values[at : at + 50_000]}
                txn.write_batch(TABLE, pa.table(columns))
            txn.commit()
        began = time.perf_counter()
        with client.replica(TABLE, timeout=_PATIENCE_S) as replica:
            replica.snapshot().close()
            restore_s = time.perf_counter() - began
            ours = _readable(lambda i: _commit(client, i), lambda i: _laid(replica, i), commits)
            with replica.snapshot() as snapshot:
                read_us = _read_us(lambda key: snapshot.get(TABLE, key), keys)
    job = Job(place.bootstrap, "bench-versioned", place.new_topic(PARTITIONS), "", STORE, "")
    _fill(place, f"{job.name}-{STORE}-changelog", keys, values)
    with _worker(job) as worker:
        restored = _said(worker, "restored", PARTITIONS)
        first = _said(worker, "restoring", PARTITIONS)[0]["at"]
        peer_restore_s = (restored[-1]["at"] - first) / 1000
        _said(worker, "RUNNING", 1)
        producer = Producer({"bootstrap.servers": place.bootstrap, "transactional.id": "bench"})
        producer.init_transactions(60)
        theirs = _readable(
            lambda i: _commit_natively(producer, job.source, i),
            lambda i: _stored(worker, i),
            commits,
        )
        _commit_natively(producer, job.source, READS, key=b"read")
        peer_read_us = _said(worker, "read", 1)[0]["us"]
    return {
        "rows": rows,
        "restore_s": restore_s,
        "peer_restore_s": peer_restore_s,
        "of_peer": peer_restore_s / restore_s,
        "readable_ms": {"p50": percentile(ours, 0.5), "p99": percentile(ours, 0.99)},
        "peer_readable_ms": {"p50": percentile(theirs, 0.5), "p99": percentile(theirs, 0.99)},
        "read_us": read_us,
        "peer_read_us": peer_read_us,
        "peer": KAFKA_STREAMS.about(),
    }


def _fill(place: Place, topic: str, keys: list[bytes], values: list[bytes]) -> None:
    """The changelog of the peer's store: the same rows."""
    made = NewTopic(topic, PARTITIONS, 1, config={"cleanup.policy": "compact"})
    admin = AdminClient({"bootstrap.servers": place.bootstrap})
    admin.create_topics([made])[topic].result(30)
    settings = {"linger.ms": 50, "batch.size": 250_000, "compression.type": "lz4"}
    producer = Producer({"bootstrap.servers": place.bootstrap, **settings})
    for key, value in zip(keys, values, strict=True):
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(_PATIENCE_S)


@contextmanager
def _worker(job: Job) -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder:
        here = Job(job.bootstrap, job.name, job.source, job.target, job.work, str(Path(folder)))
        with working(KAFKA_STREAMS, here) as worker:
            yield worker


def _said(worker: Worker, what: str, count: int) -> list[dict[str, Any]]:
    """The first lines of this kind that a worker prints, once there are enough."""
    until = time.monotonic() + _PATIENCE_S
    while len(found := [line for line in worker.said() if line["said"] == what]) < count:
        if time.monotonic() > until:
            raise RuntimeError(f"the worker did not say {what!r} {count} times")
        time.sleep(0.05)
    return found[:count]


# -- commit to readable --------------------------------------------------------------------------------


def _readable(
    commit: Callable[[int], None], seen: Callable[[int], float], commits: int
) -> list[float]:
    """Milliseconds from a commit's answer until its row can be read, rising; the first few are left out."""
    took = []
    for i in range(commits + 10):
        commit(i)
        answered = time.time()
        took.append(max(0.0, seen(i) - answered) * 1000)
    return sorted(took[10:])


def _commit(client: anabranch.Client, number: int) -> None:
    with client.begin("bench") as txn:
        txn.write(TABLE, b"%d" % number, key=b"readable")
        txn.commit()


def _laid(replica: Replica, number: int) -> float:
    while True:
        with replica.snapshot(fresh=False) as snapshot:
            if snapshot.get(TABLE, b"readable") == b"%d" % number:
                return time.time()
        time.sleep(_STEP_S)


def _commit_natively(producer: Producer, topic: str, number: int, key: bytes = b"readable") -> None:
    producer.begin_transaction()
    producer.produce(topic, b"%d" % number, key)
    producer.commit_transaction(60)


def _stored(worker: Worker, number: int) -> float:
    found = _said(worker, "stored", number + 1)[number]
    return float(found["us"]) / 1e6


def _read_us(read: Callable[[bytes], object], keys: list[bytes]) -> float:
    """Microseconds a read, the median of some rounds."""
    took = []
    for _ in range(5):
        asked = random.sample(keys, READS // 10)
        began = time.perf_counter()
        for key in asked:
            read(key)
        took.append((time.perf_counter() - began) / len(asked) * 1e6)
    return statistics.median(took)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The figures as a table."""
    ours, peer = result["readable_ms"], result["peer_readable_ms"]
    rows = [
        [
            f"{result['rows']:,} rows from nothing",
            f"{result['restore_s']:.2f} s",
            f"{result['peer_restore_s']:.2f} s",
            f"{result['of_peer']:.2f} × as quick",
            f"≥ {GOAL_RESTORE} ×",
        ]
    ]
    for name, goal in (("p50", GOAL_P50_MS), ("p99", GOAL_P99_MS)):
        ratio = f"{ours[name] / peer[name]:.2f} ×" if peer[name] else ""
        times = (f"{ours[name]:.1f} ms", f"{peer[name]:.1f} ms")
        rows.append([f"answered to readable, {name}", *times, ratio, f"≤ {goal} ms, ≤ theirs"])
    reads = (f"{result['read_us']:.1f} µs", f"{result['peer_read_us']:.1f} µs")
    rows.append(["point read at a time", *reads, "", ""])
    return ["", "replica", "Kafka Streams, versioned", "", "goal"], rows
