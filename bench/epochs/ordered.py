"""Reading in stream order (``client.read(stream, group=…)``) against a plain consumer of the same topic.

Ours: `Event` by `Event`, each with its transaction, commit time and segment; positions are committed every second.
Plain: confluent-kafka, read_committed, ``consume(1000)``, key and value of each message, with the same fetch
settings, also in a new group; and once more with every field that an `Event` takes from the message (headers,
timestamp, partition, offset). Times run from the first event to the last, after joining the group. In turn, in one
run, medians. Goal: at least 0.8 of plain.

Two streams of the same events: one epoch, and about fifty (a scaling between two and three segments after
each fiftieth of the events). Batches are those of a bulk writer.

Not equal: plain reads segments in any order, so after a scaling it may give a key's later event first.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, Message

import anabranch
from bench.setting import Place, epochs_of, noise_values, write_events

VALUE_BYTES = 100
EPOCHS = (1, 50)
GOAL = 0.8
WAIT_S = 60.0
# Equal to the options of anabranch's readers.
TUNING = {
    "fetch.wait.max.ms": 100,
    "fetch.queue.backoff.ms": 2,
    "queued.min.messages": 200_000,
}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Events a second of each, for each stream."""
    events, rounds = (200_000, 1) if quick else (1_000_000, 3)
    values = noise_values(VALUE_BYTES)
    rows = []
    with anabranch.connect(place.bootstrap) as client:
        for epochs in EPOCHS:
            stream = place.new_stream(segments=2)
            _fill(client, stream, events, epochs, values)
            rows.append(_measure(place, client, stream, events, rounds))
    return {
        "events": events,
        "value_bytes": VALUE_BYTES,
        "rounds": rounds,
        "rows": rows,
        "goal_of_plain_at_least": GOAL,
    }


def _fill(
    client: anabranch.Client, stream: str, events: int, epochs: int, values: list[bytes]
) -> None:
    for number in range(epochs):
        if number:
            client.scale(stream, 2 + number % 2)
        token, receipts = write_events(client, stream, events // epochs, values)
        client.commit(token, receipts=receipts, timeout=120)


def _measure(
    place: Place, client: anabranch.Client, stream: str, events: int, rounds: int
) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "ordered": lambda: _ordered(client, stream, events),
        "plain": lambda: _plain(place, stream, events, _key_and_value),
        "plain_same_fields": lambda: _plain(place, stream, events, _all_fields),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            took[name].append(events / ways[name]())
    rates = {name: statistics.median(some) for name, some in took.items()}
    return {
        "epochs": epochs_of(client, stream),
        "events_per_s": rates,
        "all_per_s": took,
        "of_plain": rates["ordered"] / rates["plain"],
        "of_plain_same_fields": rates["ordered"] / rates["plain_same_fields"],
    }


def _group() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"


def _ordered(client: anabranch.Client, stream: str, events: int) -> float:
    start = 0.0
    size = count = 0
    with client.read(stream, group=_group(), timeout=WAIT_S) as reader:
        for event in reader:
            if not count:
                start = time.perf_counter()
            size += len(event.key or b"") + len(event.value or b"")
            count += 1
            if count == events:
                break
        seconds = time.perf_counter() - start
    if count != events:
        raise RuntimeError(f"{count} of {events} events were read in order")
    return seconds


def _key_and_value(message: Message) -> int:
    return len(message.key() or b"") + len(message.value() or b"")


def _all_fields(message: Message) -> int:
    fields = message.headers(), message.timestamp(), message.partition(), message.offset()
    return len(message.key() or b"") + len(message.value() or b"") + len(fields)


def _plain(place: Place, stream: str, events: int, use: Callable[[Message], int]) -> float:
    consumer = Consumer(
        {
            "bootstrap.servers": place.bootstrap,
            "group.id": _group(),
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": True,
            "auto.commit.interval.ms": 1000,
            **TUNING,
        }
    )
    consumer.subscribe([stream.replace("/", ".")])
    start = 0.0
    size = count = 0
    until = time.monotonic() + WAIT_S
    while count < events and time.monotonic() < until:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                if not count:
                    start = time.perf_counter()
                size += use(message)
                count += 1
    seconds = time.perf_counter() - start
    consumer.close()
    if count != events:
        raise RuntimeError(f"{count} of {events} events were read plainly")
    return seconds


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "epochs",
        "ordered /s",
        "plain /s",
        "of plain",
        "plain, same fields /s",
        "of that",
        "goal",
    ]
    rows = []
    for row in result["rows"]:
        rates = row["events_per_s"]
        rows.append(
            [
                str(row["epochs"]),
                f"{rates['ordered']:,.0f}",
                f"{rates['plain']:,.0f}",
                f"{row['of_plain']:.2f} ×",
                f"{rates['plain_same_fields']:,.0f}",
                f"{row['of_plain_same_fields']:.2f} ×",
                f"≥ {GOAL}",
            ]
        )
    return head, rows
