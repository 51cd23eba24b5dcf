"""Commits that move positions, against the same without, and against Kafka's own consume-transform-produce.

*rate*: one-shots of one event, 64 in flight, by 64 processors of one task each, as a task has one commit at a time;
the same without positions. One process asks for all, with one producer and one consumer of answers.

*loop*: an event a commit. From the input's commit, answered, to the output readable (read_committed), p50 and p99
in milliseconds: a reader of owned tasks and a one-shot with positions, against a confluent-kafka consumer and a
transactional producer with `send_offsets_to_transaction` (KIP-447). Both commit each event at once; acks=all, one
broker, one replica. Not equal: our input is a transaction, Kafka's a plain record; a second process decides ours.
"""

from __future__ import annotations

import secrets
import statistics
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

import anabranch
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER, make_marked_id, make_txn_id
from anabranch.protocol.schemas.codec import decode_as, encode
from anabranch.protocol.schemas.records import (
    Consumed,
    Event,
    OneShot,
    Outcome,
    Reply,
    TaskPosition,
    TaskStep,
)
from anabranch.topics.names import commands_topic, replies_topic, stream_topic
from bench.setting import Place, percentile

PROCESSORS = 64
PAUSE_S = 0.05  # between the inputs of the loop
GOAL_RATE, GOAL_LOOP = 0.9, 2.0


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of rounds."""
    rounds, seconds, events = (1, 2.0, 60) if quick else (3, 5.0, 300)
    stream = place.new_stream(segments=2)
    with anabranch.connect(place.bootstrap, timeout=60) as client:
        ownerships = []
        for number in range(PROCESSORS):
            client.create_processor(f"bench/p{number}-{uuid.uuid4().hex[:6]}", stream, tasks=1)
        for info in client.processors("bench"):
            ownerships.append(client.take_tasks(info.processor))
        rates: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
        askers = {
            name: _Asker(place.bootstrap, stream, ownerships, moving=name == "with")
            for name in rates
        }
        for asker in askers.values():
            asker.run(1.0)
        for _ in range(rounds):
            for name, asker in askers.items():
                rates[name].append(asker.run(seconds))
        for asker in askers.values():
            asker.close()
        loops = {"ours": _our_loop(place, client, events), "native": _native_loop(place, events)}
    middle = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in rates.items()
    }
    return {"processors": PROCESSORS, "rates": middle, "loops_ms": loops}


class _Asker:
    """One-shots, as many in flight as there are processors; each of a processor once its last one is answered."""

    def __init__(
        self,
        bootstrap: str,
        stream: str,
        ownerships: list[anabranch.TaskOwnership],
        *,
        moving: bool,
    ) -> None:
        self._stream, self._ownerships, self._moving = stream, ownerships, moving
        self._sequences = [0] * len(ownerships)
        self._idle = deque(range(len(ownerships)))
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "fetch.wait.max.ms": 100}
        )
        place = TopicPartition(replies_topic(), 0)
        place.offset = self._consumer.get_watermark_offsets(place, timeout=30)[1]
        self._consumer.assign([place])
        self._began: dict[bytes, tuple[int, float]] = {}

    def run(self, seconds: float) -> dict[str, float]:
        """Rate, and latencies, of the one-shots that are answered in this time."""
        start = time.monotonic()
        taken: list[float] = []
        while (now := time.monotonic()) < start + seconds:
            while self._idle:
                self._send(self._idle.popleft())
            self._producer.poll(0)
            self._hear(taken)
        while self._began:
            self._hear([])
        taken.sort()
        ms = {f"p{p}_ms": 1000 * percentile(taken, p / 100) for p in (50, 99)}
        return {"per_s": len(taken) / (now - start), **ms}

    def _hear(self, taken: list[float]) -> None:
        for message in self._consumer.consume(PROCESSORS, 0.05):
            asked = self._began.pop(message.key() or b"", None)
            if asked is None:
                continue
            result = decode_as(Reply, message.value() or b"").result
            if not isinstance(result, Outcome) or result.state != "COMMITTED":
                raise RuntimeError(f"a one-shot was answered by {result}")
            self._idle.append(asked[0])
            taken.append(time.monotonic() - asked[1])

    def _send(self, number: int) -> None:
        make = make_marked_id if self._moving else make_txn_id
        txn_id = make(0, int(time.time() * 1000), secrets.randbits(63))
        consumed = None
        if self._moving:
            self._sequences[number] += 1
            at = self._sequences[number]
            ownership = self._ownerships[number]
            step = TaskStep((0,), at, (TaskPosition(0, at, 0),))
            consumed = Consumed(ownership.processor, ownership.fencing_token, (step,))
        events = (Event(self._stream, -1, b"key-%d" % number, b"v" * 100, (), -1),)
        asked = secrets.token_bytes(16)
        headers: Any = [(CORRELATION_HEADER, asked), (REPLY_HEADER, bytes(4))]
        command = encode(OneShot(txn_id, "bench", None, events, consumed))
        self._producer.produce(commands_topic(), command, partition=0, headers=headers)
        self._began[asked] = number, time.monotonic()

    def close(self) -> None:
        self._producer.flush(10)
        self._consumer.close()


# -- the loop -----------------------------------------------------------------------------------------


def _our_loop(place: Place, client: anabranch.Client, events: int) -> dict[str, float]:
    source, target = place.new_stream(segments=1), place.new_stream(segments=1)
    name = f"bench/loop-{uuid.uuid4().hex[:6]}"
    client.create_processor(name, source, tasks=1)
    ownership = client.take_tasks(name)

    def work() -> None:
        with client.read(source, timeout=5, ownership=ownership) as reader:
            for event in reader:
                with client.begin("bench", ownership=ownership) as txn:
                    txn.write(target, event.value, key=event.key)
                    txn.commit(consumed=reader.consumed())

    def send(value: bytes) -> None:
        with client.begin("bench") as txn:
            txn.write(source, value, key=b"k")
            txn.commit()

    return _timed(place, stream_topic(target), work, send, events)


def _native_loop(place: Place, events: int) -> dict[str, float]:
    source, target = place.new_topic(1), place.new_topic(1)
    common = {"bootstrap.servers": place.bootstrap}

    def work() -> None:
        consumer = Consumer(
            {**common, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest",
             "enable.auto.commit": False, "isolation.level": "read_committed", "fetch.wait.max.ms": 100}
        )  # fmt: skip
        consumer.subscribe([source])
        producer = Producer({**common, "transactional.id": uuid.uuid4().hex, "linger.ms": 0})
        producer.init_transactions(30)
        quiet = 0
        while quiet < 50:
            message = consumer.poll(0.1)
            quiet = quiet + 1 if message is None else 0
            if message is None or message.error():
                continue
            producer.begin_transaction()
            producer.produce(target, message.value(), key=message.key())
            offsets = [TopicPartition(source, 0, (message.offset() or 0) + 1)]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
            producer.commit_transaction(30)
        consumer.close()

    plain = Producer({**common, "linger.ms": 0})

    def send(value: bytes) -> None:
        plain.produce(source, value, key=b"k")
        plain.flush(10)

    return _timed(place, target, work, send, events)


def _timed(
    place: Place, target: str, work: Callable[[], None], send: Callable[[bytes], None], events: int
) -> dict[str, float]:
    """From each input's answer to its output, once one has come through; the first fifth is to get warm."""
    seen: dict[bytes, float] = {}
    consumer = Consumer(
        {"bootstrap.servers": place.bootstrap, "group.id": "bench", "isolation.level": "read_committed",
         "fetch.wait.max.ms": 100}
    )  # fmt: skip
    consumer.assign([TopicPartition(target, 0, 0)])
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                seen[message.value() or b""] = time.monotonic()

    threads = [threading.Thread(target=one) for one in (work, watch)]
    for thread in threads:
        thread.start()
    sent: dict[bytes, float] = {}
    send(b"first")
    ready_by = time.monotonic() + 30
    while not seen and time.monotonic() < ready_by:
        time.sleep(0.05)
    for number in range(events):
        value = b"%d" % number
        send(value)
        sent[value] = time.monotonic()
        time.sleep(PAUSE_S)
    deadline = time.monotonic() + 20
    while len(seen) <= events and time.monotonic() < deadline:
        time.sleep(0.05)
    threads[0].join()
    stop.set()
    threads[1].join()
    consumer.close()
    if len(seen) <= events:
        raise RuntimeError(f"{events + 1 - len(seen)} outputs of {events} are missing")
    taken = sorted(1000 * (seen[v] - at) for v, at in list(sent.items())[events // 5 :])
    return {"p50": percentile(taken, 0.5), "p99": percentile(taken, 0.99)}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    head = ["what", "ours", "peer", "ratio", "goal"]
    with_, without = result["rates"]["with"], result["rates"]["without"]
    ours, native = result["loops_ms"]["ours"], result["loops_ms"]["native"]
    rows = [
        [
            f"one-shots /s, {result['processors']} in flight; peer: without positions",
            f"{with_['per_s']:,.0f}",
            f"{without['per_s']:,.0f}",
            f"{with_['per_s'] / without['per_s']:.2f} ×",
            f"≥ {GOAL_RATE} ×",
        ]
    ]
    for p in ("p50", "p99"):
        rows.append(
            [
                f"input committed to output readable, {p} ms; peer: Kafka's own",
                f"{ours[p]:.1f}",
                f"{native[p]:.1f}",
                f"{ours[p] / native[p]:.2f} ×",
                f"≤ {GOAL_LOOP} ×",
            ]
        )
    return head, rows
