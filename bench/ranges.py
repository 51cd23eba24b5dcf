"""Offset ranges as Arrow batches (`anabranch.reading.ranges`) against a plain consumer of the same topic.

Ours: every partition from its beginning to its end, one after the other, each event with its transaction, commit
time and segment, as columns, not Python objects. Times run from the call to the last batch, after a first read of
everything.
Plain: as in `bench.epochs.ordered`, from its first event on, key and value of each message; and all its fields.
Both have one working thread; librdkafka has one more that fetches. In turn, in one run, medians.

Events of 100 bytes and of 1 KB in batches of a bulk writer, and small transactions of 50 events each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.client.connect import reader_ports
from anabranch.reading.ranges import RangeReader
from bench.epochs import ordered
from bench.setting import Place, noise_values, write_events

SEGMENTS = 2
SMALL = 50  # events of a small transaction
TIMEOUT_S = 60.0


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Events a second of each, for each workload."""
    rounds = 2 if quick else 3
    scale = 5 if quick else 1
    workloads = {
        "100 B": (100, 1_000_000 // scale, 1),
        "1 KB": (1000, 200_000 // scale, 1),
        "100 B, small transactions": (100, 100_000 // scale, 100_000 // scale // SMALL),
    }
    rows = {}
    with anabranch.connect(place.bootstrap) as client:
        for name, (size, events, commits) in workloads.items():
            stream = place.new_stream(segments=SEGMENTS)
            values = noise_values(size)
            for _ in range(commits):
                token, receipts = write_events(client, stream, events // commits, values)
                client.commit(token, receipts=receipts, timeout=120)
            rows[name] = _measure(place, stream, events, rounds)
    return {"rounds": rounds, "rows": rows}


def _measure(place: Place, stream: str, events: int, rounds: int) -> dict[str, Any]:
    ends = _ends(place, stream)
    ways: dict[str, Callable[[], float]] = {
        "ranges": lambda: _ranges(place, stream, ends, events),
        "plain": lambda: ordered._plain(place, stream, events, ordered._key_and_value),
        "plain_same_fields": lambda: ordered._plain(place, stream, events, ordered._all_fields),
    }
    _ranges(place, stream, ends, events)  # waits for the last markers, and warms up
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took[name].append(events / ways[name]())
    rates = {name: statistics.median(some) for name, some in took.items()}
    return {
        "events": events,
        "events_per_s": rates,
        "all_per_s": took,
        "of_plain": rates["ranges"] / rates["plain"],
        "of_plain_same_fields": rates["ranges"] / rates["plain_same_fields"],
    }


def _ends(place: Place, stream: str) -> list[int]:
    topic = stream.replace("/", ".")
    # A commit is answered before its markers are everywhere, so the ends are those of all records.
    config = {"group.id": "bench-ends", "isolation.level": "read_uncommitted"}
    consumer = Consumer({"bootstrap.servers": place.bootstrap, **config})
    try:
        # A big transaction may lie on partitions of its own.
        partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        places = [TopicPartition(topic, partition) for partition in sorted(partitions)]
        return [consumer.get_watermark_offsets(one, timeout=TIMEOUT_S)[1] for one in places]
    finally:
        consumer.close()


def _ranges(place: Place, stream: str, ends: list[int], events: int) -> float:
    with RangeReader(reader_ports(place.bootstrap, {}), TIMEOUT_S) as reader:
        start = time.perf_counter()
        count = sum(
            batch.num_rows
            for partition, end in enumerate(ends)
            for batch in reader.read(stream, partition, 0, end)
        )
        seconds = time.perf_counter() - start
    if count != events:
        raise RuntimeError(f"{count} of {events} events are in the ranges")
    return seconds


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "events",
        "ranges /s",
        "plain /s",
        "of plain",
        "plain, same fields /s",
        "of that",
    ]
    rows = []
    for name, row in result["rows"].items():
        rates = row["events_per_s"]
        rows.append(
            [
                name,
                f"{rates['ranges']:,.0f}",
                f"{rates['plain']:,.0f}",
                f"{row['of_plain']:.1f} ×",
                f"{rates['plain_same_fields']:,.0f}",
                f"{row['of_plain_same_fields']:.1f} ×",
            ]
        )
    return head, rows
