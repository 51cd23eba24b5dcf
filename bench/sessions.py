"""A session that flushes in the background, against an idempotent producer: 1M rows of 100 bytes, one process each.

Ours: `apply` for each row, then `flush`: the clock stops when the last row is committed. Plain: `produce` for each
record with librdkafka's usual settings for throughput (idempotent, acks=all, lz4), then `flush`: the clock stops at
the last acknowledgement. Both on one broker, in turn, in one run; replication factor 1, 2 partitions. Half of each
value is noise. CPU is that of a row, in the process of the client, the controller, and the broker.

Not equal: ours goes through the log twice (as a command, then in the stream) and through one more process, which
shares the two cores; a row is refused by name where a record is lost in a callback, and has a commit timestamp.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from confluent_kafka import Producer

import anabranch
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from bench.bulk import TUNING
from bench.setting import Place, cpu_s, noise_values

ROWS = 1_000_000
SIZE = 100
KEYS = 10_000
GOAL = 0.5


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Rows a second of each, medians of rounds in turn, and the ratio ours / plain (goal at least 0.5)."""
    rows, rounds = (200_000, 1) if quick else (ROWS, 3)
    values, keys = noise_values(SIZE), [b"key-%d" % i for i in range(KEYS)]
    stream, topic = place.new_stream(segments=2), place.new_topic(partitions=2)
    with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
        operator.feature_level(raise_to=LEVEL)
    with anabranch.connect(place.bootstrap) as client:
        _session(client, stream, rows // 5, keys, values)
        _plain(place, topic, rows // 5, keys, values)
        ours, plain = [], []
        for _ in range(rounds):
            parts = {"client": os.getpid(), "controller": place.controller, "broker": place.broker}
            before, start = _cpu(parts), time.perf_counter()
            _session(client, stream, rows, keys, values)
            ours.append((rows / (time.perf_counter() - start), _each(parts, before, rows)))
            del parts["controller"]
            before, start = _cpu(parts), time.perf_counter()
            _plain(place, topic, rows, keys, values)
            plain.append((rows / (time.perf_counter() - start), _each(parts, before, rows)))
    rates = [statistics.median(rate for rate, _ in found) for found in (ours, plain)]
    return {
        "rows": rows,
        "value_bytes": SIZE,
        "rounds": rounds,
        "ours_per_s": round(rates[0]),
        "plain_per_s": round(rates[1]),
        "ratio": rates[0] / rates[1],
        "goal": GOAL,
        "ours_cpu_us": ours[0][1],
        "plain_cpu_us": plain[0][1],
    }


def _each(parts: dict[str, int], before: dict[str, float], rows: int) -> dict[str, float]:
    """CPU of a row in each process, µs."""
    return {name: round((at - before[name]) / rows * 1e6, 2) for name, at in _cpu(parts).items()}


def _cpu(parts: dict[str, int]) -> dict[str, float]:
    return {name: cpu_s(process) for name, process in parts.items()}


def _session(
    client: anabranch.Client, stream: str, rows: int, keys: list[bytes], values: list[bytes]
) -> None:
    with client.session() as session:
        apply, few, many = session.apply, len(keys), len(values)
        for i in range(rows):
            apply(stream, values[i % many], keys[i % few])


def _plain(place: Place, topic: str, rows: int, keys: list[bytes], values: list[bytes]) -> None:
    options = {"bootstrap.servers": place.bootstrap, "enable.idempotence": True, **TUNING}
    producer = Producer({**options, "queue.buffering.max.messages": 2_000_000})
    produce, few, many = producer.produce, len(keys), len(values)
    for i in range(rows):
        produce(topic, values[i % many], keys[i % few])
        if not i % 10_000:
            producer.poll(0)
    if producer.flush(120):
        raise RuntimeError("records are left")


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["", "rows/s", "CPU of a row, µs: client, controller, broker", "of plain", "goal"]
    ours, plain = result["ours_cpu_us"], result["plain_cpu_us"]
    return head, [
        [
            "session",
            f"{result['ours_per_s']:,}",
            f"{ours['client']}, {ours['controller']}, {ours['broker']}",
            f"{result['ratio']:.2f} ×",
            f"≥ {result['goal']} ×",
        ],
        [
            "producer",
            f"{result['plain_per_s']:,}",
            f"{plain['client']}, -, {plain['broker']}",
            "",
            "",
        ],
    ]
