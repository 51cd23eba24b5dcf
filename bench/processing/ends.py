"""Where a job reads and writes: two topics, or two streams. Inputs are JSON of 100 bytes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

import anabranch
from anabranch.topics.names import stream_topic
from bench.setting import Place

PARTITIONS = 2
VALUE_BYTES = 100
COMMIT = 10_000  # inputs of one of our commits
_SENDERS = 16
# Kafka Streams places keys likewise.
_PLACING = {"partitioner": "murmur2_random"}
_NOISE = [random.Random(n).randbytes(20).hex().encode() for n in range(1000)]

Acked = Callable[[int], None]


@dataclass(frozen=True)
class Ends:
    """``source``, ``other``, ``target``: names for the worker. ``output``: the topic that has the outputs."""

    place: Place
    source: str
    target: str
    output: str
    streams: bool
    other: str  # a second source, for joins

    def fill(self, count: int, keys: int, source: str | None = None) -> None:
        """Write so many inputs, n from 0, keys in turn. ``source``: `source` by default."""
        source = source or self.source
        events = ((_value(n), b"key-%07d" % (n % keys)) for n in range(count))
        if self.streams:
            with (
                anabranch.connect(self.place.bootstrap, timeout=120) as client,
            ):
                for some in iter(lambda: list(islice(events, COMMIT)), []):
                    with client.begin("bench") as txn:
                        txn.write_many(source, some)
                        txn.commit()
        else:
            produce(self.place, source, events)

    @contextmanager
    def sending(self, acked: Acked) -> Iterator[Callable[[int], None]]:
        """A call that writes input n, a commit of its own, and does not wait; ``acked(n)`` comes at the answer."""
        if self.streams:
            with (
                anabranch.connect(self.place.bootstrap, timeout=60) as client,
                ThreadPoolExecutor(_SENDERS) as pool,
            ):

                def commit(n: int) -> None:
                    with client.begin("bench") as txn:
                        txn.write(self.source, _value(n), key=b"key-%07d" % (n % 10_000))
                        txn.commit()
                    acked(n)

                def send(n: int) -> None:
                    pool.submit(commit, n)

                yield send
        else:
            settings: dict[str, Any] = {"bootstrap.servers": self.place.bootstrap, "linger.ms": 0}
            producer = Producer(settings | _PLACING)

            stop = threading.Event()

            def produce_one(n: int) -> None:
                key = b"key-%07d" % (n % 10_000)
                producer.produce(self.source, _value(n), key, on_delivery=lambda *_: acked(n))

            def hear() -> None:
                while not stop.is_set() or len(producer):
                    producer.poll(0.05)

            thread = threading.Thread(target=hear)
            thread.start()
            try:
                yield produce_one
            finally:
                stop.set()
                thread.join()


def ends(place: Place, *, streams: bool) -> Ends:
    """Fresh ones, of two partitions or segments each."""
    if streams:
        source, other, target = (place.new_stream(PARTITIONS) for _ in range(3))
        return Ends(place, source, target, stream_topic(target), streams, other)
    source, other, target = (place.new_topic(PARTITIONS) for _ in range(3))
    return Ends(place, source, target, target, streams, other)


def produce(place: Place, topic: str, events: Iterator[tuple[bytes, bytes]]) -> None:
    """Write values and keys straight into a topic."""
    producer = Producer(
        {"bootstrap.servers": place.bootstrap, "linger.ms": 50, "batch.size": 250_000,
         "compression.type": "lz4", "queue.buffering.max.messages": 2_000_000, **_PLACING}
    )  # fmt: skip
    for value, key in events:
        producer.produce(topic, value, key)
    if left := producer.flush(120):
        raise RuntimeError(f"{left} inputs were not taken")


class Readable:
    """How many outputs are readable, asked for at little cost: transactions' markers count, too."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 3})
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._wanted = {TopicPartition(topic, p): latest for p in range(PARTITIONS)}

    def __call__(self) -> int:
        """The sum of the last stable offsets."""
        level = IsolationLevel.READ_COMMITTED
        found = self._admin.list_offsets(self._wanted, isolation_level=level, request_timeout=30)
        return sum(future.result(30).offset for future in found.values())


@contextmanager
def outputs(place: Place, topic: str) -> Iterator[Consumer]:
    """A consumer, read_committed, of all of a topic."""
    consumer = Consumer(
        {"bootstrap.servers": place.bootstrap, "group.id": "bench", "fetch.wait.max.ms": 50,
         "isolation.level": "read_committed"}
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    try:
        yield consumer
    finally:
        consumer.close()


def counted(place: Place, topic: str, wanted: int, patience: float = 20.0) -> int:
    """Outputs that a read_committed consumer finds, until there are enough, or none come for so many seconds."""
    count, until = 0, time.monotonic() + patience
    with outputs(place, topic) as consumer:
        while time.monotonic() < until:
            found = [m for m in consumer.consume(10_000, 0.2) if not m.error()]
            count += len(found)
            if found:
                until = time.monotonic() + (patience if count < wanted else 1.0)
    return count


def _value(n: int) -> bytes:
    head = b'{"n":%d,"pad":"' % n + _NOISE[n % 1000]
    return head + b"0" * (VALUE_BYTES - 2 - len(head)) + b'"}'
