"""A 1M-event transaction by 2 writer processes, begin to last event readable, against the same events with no
transaction.

Ours: begin, two processes join by token, `write_many` or `write_batch` (journal, ab.txn header; Arrow batches of
10,000 rows, as Spark makes them), finish; commit with their receipts. The clock stops when a read_committed
consumer at the end of the stream has the last event. Plain: two processes produce the same events straight into a
topic with the same librdkafka settings (idempotent, acks=all, lz4), until a consumer has the last one. They call
`produce` for each event: `produce_batch` takes more time (a dict for each). Connections and producers are ready
before the clock starts. Both on one broker, in turn, in one run; replication factor 1.

Not equal: ours writes everything twice (journal, then stream).
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Iterable
from multiprocessing.synchronize import Event as Signal
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

import anabranch
from bench.setting import Place

WRITERS = 2
VALUE = b"v" * 100
KEYS = 10_000
BATCH_ROWS = 10_000
CALLS = ("write_many", "write_batch")
# Equal to the options of anabranch's writers.
TUNING = {
    "linger.ms": 50,
    "batch.size": 250_000,
    "batch.num.messages": 100_000,
    "compression.type": "lz4",
}


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Seconds of each, medians of interleaved rounds, and the ratios plain / ours (goal at least 0.5)."""
    events, rounds = (200_000, 1) if quick else (1_000_000, 3)
    seconds: dict[str, list[float]] = {name: [] for name in (*CALLS, "plain")}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in CALLS}
    for _ in range(rounds):
        for call in CALLS:
            whole, phase = transaction(place, events, call)
            seconds[call].append(whole)
            phases[call].append(phase)
        seconds["plain"].append(_plain(place, events))
    plain = statistics.median(seconds["plain"])
    result = {
        "events": events,
        "value_bytes": len(VALUE),
        "writers": WRITERS,
        "rounds": rounds,
        "plain_s": plain,
        "plain_all_s": seconds["plain"],
    }
    for call in CALLS:
        taken = seconds[call]
        result[call] = {
            "anabranch_s": statistics.median(taken),
            "anabranch_all_s": taken,
            "phases_s": phases[call][taken.index(min(taken))],
            "ratio": plain / statistics.median(taken),
        }
    return result


def transaction(
    place: Place, events: int, call: str, *, table: bool = False
) -> tuple[float, dict[str, float]]:
    """Seconds from begin to the last event readable, and those of its phases; into a new stream or table."""
    stream = place.new_stream(segments=2, table=table)
    scope = stream.partition("/")[0]
    ctx = mp.get_context("spawn")
    go, ready, receipts = ctx.Event(), ctx.Semaphore(0), ctx.Queue()
    with anabranch.connect(place.bootstrap) as client:
        txn = client.begin(scope, keepalive=120)
        start = time.perf_counter()
        token = txn.token()
        begun = time.perf_counter() - start
        share = events // WRITERS
        workers = [
            ctx.Process(
                target=_write_share,
                args=(place.bootstrap, token, stream, call, i, share, ready, go, receipts),
            )
            for i in range(WRITERS)
        ]
        for worker in workers:
            worker.start()
        for _ in workers:
            ready.acquire(timeout=60)
        end = _Ends(place.bootstrap, stream.replace("/", "."))
        start = time.perf_counter() - begun
        go.set()
        taken = [anabranch.Receipt.from_bytes(receipts.get(timeout=120)) for _ in workers]
        written = time.perf_counter()
        result = txn.commit(receipts=taken)
        committed = time.perf_counter()
        end.wait_for(events)
        readable = time.perf_counter()
        for worker in workers:
            worker.join(60)
    if result.counts.committed != events:
        raise RuntimeError(f"{result.counts} instead of {events} events")
    return readable - start, {
        "write": written - start,
        "commit": committed - written,
        "readable": readable - committed,
    }


def _write_share(
    bootstrap: str,
    token: bytes,
    stream: str,
    call: str,
    number: int,
    share: int,
    ready: Any,
    go: Signal,
    receipts: Any,
) -> None:
    with anabranch.connect(bootstrap) as client, client.join(token) as writer:
        keys = [b"key-%d" % i for i in range(KEYS)]
        first = number * share
        batches = _batches(keys, first, share) if call == "write_batch" else []
        client.describe(stream)  # connections are not timed on either side
        ready.release()
        go.wait(60)
        if call == "write_many":
            events = ((VALUE, keys[i % KEYS]) for i in range(first, first + share))
            writer.write_many(stream, events)
        for batch in batches:
            writer.write_batch(stream, batch)
        receipts.put(writer.finish().to_bytes())


def _batches(keys: list[bytes], first: int, share: int) -> list[Any]:
    """The same events as Arrow batches; loads compiled code, too."""
    import pyarrow as pa

    from anabranch.batches import columns_write

    columns_write.warm()
    table = pa.table(
        {
            "value": pa.array([VALUE] * share),
            "key": pa.array([keys[i % KEYS] for i in range(first, first + share)]),
        }
    )
    return list(table.to_batches(max_chunksize=BATCH_ROWS))


def _plain(place: Place, events: int) -> float:
    topic = place.new_topic(partitions=2)
    ctx = mp.get_context("spawn")
    go, ready, done = ctx.Event(), ctx.Semaphore(0), ctx.Queue()
    share = events // WRITERS
    workers = [
        ctx.Process(target=_produce_share, args=(place.bootstrap, topic, i, share, ready, go, done))
        for i in range(WRITERS)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire(timeout=60)
    end = _Ends(place.bootstrap, topic)
    start = time.perf_counter()
    go.set()
    for _ in workers:
        done.get(timeout=120)
    end.wait_for(events)
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join(60)
    return seconds


def _produce_share(
    bootstrap: str, topic: str, number: int, share: int, ready: Any, go: Signal, done: Any
) -> None:
    failed: list[str] = []

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "delivery.report.only.error": True,
            "on_delivery": report,
            **TUNING,
        }
    )
    keys = [b"key-%d" % i for i in range(KEYS)]
    producer.list_topics(topic, timeout=10)
    first = number * share
    ready.release()
    go.wait(60)
    for i in range(first, first + share):
        while True:
            try:
                producer.produce(topic, VALUE, keys[i % KEYS])
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush(60)
    if failed:
        raise RuntimeError(failed[0])
    done.put(number)


class _Ends:
    """A read_committed consumer that looks only at the end of a topic.

    The end that a read_committed consumer sees (the last stable offset) passes an event only when all events
    before it are decided: so everything below it is readable.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "bench-ends",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._topic = topic
        self._start = self._sum(self._places())

    def _places(self) -> list[TopicPartition]:
        partitions = (
            self._consumer.list_topics(self._topic, timeout=10).topics[self._topic].partitions
        )
        return [TopicPartition(self._topic, partition) for partition in partitions]

    def _sum(self, places: Iterable[TopicPartition]) -> int:
        return sum(
            self._consumer.get_watermark_offsets(one, timeout=10, cached=False)[1] for one in places
        )

    def wait_for(self, events: int, deadline_s: float = 120.0) -> None:
        """Wait until the end has moved by so many offsets (markers may add a few)."""
        until = time.monotonic() + deadline_s
        places = self._places()  # a big transaction may lie on partitions of its own
        while self._sum(places) - self._start < events:
            if time.monotonic() > until:
                raise TimeoutError(f"the last of {events} events is not readable")
            time.sleep(0.005)
        self._consumer.close()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["events, by", "anabranch s", "write / commit / readable s", "plain s", "ratio"]
    rows = []
    for call in CALLS:
        found = result[call]
        rows.append(
            [
                f"{result['events']:,} {call}",
                f"{found['anabranch_s']:.2f}",
                " / ".join(f"{found['phases_s'][p]:.2f}" for p in ("write", "commit", "readable")),
                f"{result['plain_s']:.2f}",
                f"{found['ratio']:.2f} ×",
            ]
        )
    return head, rows
