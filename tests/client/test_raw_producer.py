"""The idempotent producer against brokers that lose, refuse and move: in order, exactly once, or not at all."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.client import raw_producer
from anabranch.client.raw_producer import ProducerFailed, RawProducer
from anabranch.ports import LogUnavailable, TopicPartition
from anabranch.topics.batch import read_header
from anabranch.topics.wire import calls as wire_calls
from anabranch.topics.wire import data as wire_data
from anabranch.topics.wire.connection import ConnectionBroken
from anabranch.topics.wire.data import Produced

PLACES = [TopicPartition("t", p) for p in range(3)]
NOT_LEADER, TIMED_OUT, NOT_ENOUGH, OUT_OF_ORDER, TOO_LARGE = 6, 7, 19, 45, 10


@dataclass
class Brokers:
    """Two brokers that keep the rules of idempotence, and a network between that keeps none."""

    random: random.Random
    trouble: float
    leaders: dict[TopicPartition, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    log: dict[TopicPartition, list[bytes]] = field(default_factory=dict)
    offsets: dict[TopicPartition, list[tuple[int, int, int]]] = field(default_factory=dict)
    next_sequence: dict[TopicPartition, int] = field(default_factory=dict)
    refuse: int = 0
    topic_ids: dict[str, bytes] = field(default_factory=lambda: {"t": bytes(16)})
    topic_names: dict[bytes, str] = field(default_factory=dict)
    settings: Any = field(default_factory=lambda: SimpleNamespace(request_timeout=0.05))
    known: dict[TopicPartition, int] = field(default_factory=dict)

    def troubled(self) -> bool:
        return self.random.random() < self.trouble

    def handle(
        self, node: int, batches: Mapping[TopicPartition, Any]
    ) -> dict[TopicPartition, Produced]:
        """What a broker does with a request."""
        return {place: self._append(node, place, parts[0]) for place, parts in batches.items()}

    def _append(self, node: int, place: TopicPartition, data: bytes) -> Produced:
        if self.refuse:
            return Produced(self.refuse, -1, "no")
        if self.troubled():
            self.leaders[place] = 1 - self.leaders[place]
        if self.leaders[place] != node:
            return Produced(NOT_LEADER, -1, None)
        if self.troubled():
            return Produced(NOT_ENOUGH, -1, None)
        header = read_header(data)
        stored = self.offsets.setdefault(place, [])
        for sequence, _, base in stored[-5:]:
            if sequence == header.base_sequence:
                return Produced(0, base, None)
        if any(sequence == header.base_sequence for sequence, _, _ in stored):
            return Produced(46, -1, None)
        if header.base_sequence != self.next_sequence.get(place, 0):
            return Produced(OUT_OF_ORDER, -1, None)
        base = sum(count for _, count, _ in stored)
        stored.append((header.base_sequence, header.record_count, base))
        self.next_sequence[place] = header.base_sequence + header.record_count
        self.log.setdefault(place, []).append(data[61:])
        return Produced(TIMED_OUT if self.troubled() else 0, base, None)

    # -- what the producer knows of a cluster -----------------------------------------------------------

    def repeat(self, what: str, deadline: float, attempt: Any) -> Any:
        return attempt()

    @contextmanager
    def connection(self, node: object, deadline: float) -> Iterator[Any]:
        yield SimpleNamespace(version=lambda api: 4, call=lambda *_: b"")

    def by_leader(self, places: Any, deadline: float) -> dict[int, list[TopicPartition]]:
        if self.troubled():
            raise LogUnavailable("no leader now")
        groups: dict[int, list[TopicPartition]] = {}
        for place in places:
            node = self.known.setdefault(place, self.leaders[place])
            groups.setdefault(node, []).append(place)
        return groups

    def forget(self, names: object) -> None:
        self.known.clear()

    def address(self, node: int) -> tuple[str, int]:
        return (f"node{node}", node)

    def take(self, address: tuple[str, int], deadline: float) -> Link:
        if self.troubled():
            raise ConnectionBroken("refused", sent=False)
        return Link(self, address[1])

    def give(self, connection: Link, address: object) -> None:
        connection.close()


class Link:
    """A connection to a broker."""

    def __init__(self, brokers: Brokers, node: int) -> None:
        self._brokers = brokers
        self._node = node
        self._ours, self._theirs = socket.socketpair()
        self._answers: dict[int, Any] = {}
        self._correlation = 0
        self._broken = False

    def fileno(self) -> int:
        return self._ours.fileno()

    def buffered(self) -> bool:
        return False

    def version(self, api: object) -> int:
        return 9

    def send(self, key: int, version: int, parts: Any, **_: Any) -> int:
        if self._broken:
            raise ConnectionBroken("broken")
        brokers = self._brokers
        self._correlation += 1
        if brokers.troubled():
            self._break()  # before it arrived
        else:
            answer = brokers.handle(self._node, parts[0])
            if brokers.troubled():
                self._break()  # after
            elif not brokers.troubled():  # else the answer never comes
                self._answers[self._correlation] = answer
                self._theirs.send(b"x")
        return self._correlation

    def _break(self) -> None:
        self._broken = True
        self._theirs.send(b"x")  # readable: its end

    def receive(self, correlation: int, deadline: float) -> Any:
        if correlation not in self._answers:
            if not self._broken:
                time.sleep(0.001)
            raise ConnectionBroken("no answer")
        self._ours.recv(1)
        return self._answers.pop(correlation)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture(autouse=True)
def objects_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and answers go as they are."""
    monkeypatch.setattr(wire_data, "produce_request", lambda v, t, ms, batches, ids: [batches])
    monkeypatch.setattr(wire_data, "produce_answer", lambda v, body, names: body)
    monkeypatch.setattr(wire_calls, "request", lambda *_, **__: b"")
    answer = SimpleNamespace(error_code=0, producer_id=7, producer_epoch=0)
    monkeypatch.setattr(wire_calls, "answer", lambda *_: answer)
    monkeypatch.setattr(raw_producer, "_FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(raw_producer, "_LAST_PAUSE_S", 0.001)


def producer_of(brokers: Brokers) -> RawProducer:
    return RawProducer(brokers, time.monotonic() + 5)  # type: ignore[arg-type]


def add(producer: RawProducer, place: TopicPartition, body: bytes, count: int) -> None:
    producer.add(place, bytearray(body), codec=0, count=count, base_timestamp=1, max_timestamp=1)


@pytest.mark.parametrize("seed", range(60))
def test_in_order_and_exactly_once_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    brokers = Brokers(chance, trouble=chance.choice([0.0, 0.02, 0.1]))
    producer = producer_of(brokers)
    acknowledged: dict[TopicPartition, int] = {}
    offsets: dict[TopicPartition, list[int]] = {}

    def note(place: TopicPartition, base: int, count: int) -> None:
        acknowledged[place] = acknowledged.get(place, 0) + count
        offsets.setdefault(place, []).append(base)

    producer.acknowledged = note
    written: dict[TopicPartition, list[bytes]] = {}
    counts: dict[TopicPartition, int] = {}
    for i in range(60):
        place = chance.choice(PLACES)
        count = chance.randint(1, 9)
        body = b"batch %d" % i
        add(producer, place, body, count)
        written.setdefault(place, []).append(body)
        counts[place] = counts.get(place, 0) + count
        if chance.random() < 0.5:
            producer.pump(None if chance.random() < 0.5 else time.monotonic() + 0.01)
    deadline = time.monotonic() + 30
    while producer.unacknowledged:
        assert time.monotonic() < deadline
        producer.pump(time.monotonic() + 0.05)
    assert brokers.log == written
    assert acknowledged == counts
    assert producer.queued_bytes == 0
    for place, bases in offsets.items():
        stored = {base for _, _, base in brokers.offsets[place]}
        assert {base for base in bases if base >= 0} <= stored
    producer.close()


@pytest.mark.parametrize("code", [TOO_LARGE, OUT_OF_ORDER, 47, 59, 87, 29, 999])
def test_a_refusal_ends_the_producer(code: int) -> None:
    brokers = Brokers(random.Random(0), trouble=0, refuse=code)
    producer = producer_of(brokers)
    add(producer, PLACES[0], b"x", 1)
    with pytest.raises(ProducerFailed, match=str(code)):
        producer.pump(time.monotonic() + 1)
    assert producer.unacknowledged == 1
    producer.close()


def test_a_topic_made_anew_ends_the_producer() -> None:
    brokers = Brokers(random.Random(0), trouble=0)
    producer = producer_of(brokers)
    add(producer, PLACES[0], b"x", 1)
    producer.pump(time.monotonic() + 1)
    brokers.topic_ids = {"t": bytes(15) + b"\1"}
    add(producer, PLACES[0], b"y", 1)
    with pytest.raises(ProducerFailed, match="anew"):
        producer.pump(time.monotonic() + 1)
    producer.close()


def test_nothing_that_grows_by_compression_is_compressed() -> None:
    brokers = Brokers(random.Random(0), trouble=0)
    producer = producer_of(brokers)
    for body in (random.Random(1).randbytes(1000), bytes(1000)):
        producer.add(
            PLACES[0], bytearray(body), codec=3, count=1, base_timestamp=1, max_timestamp=1
        )
        producer.pump(time.monotonic() + 1)
    plain, packed = brokers.log[PLACES[0]]
    assert len(plain) == 1000
    assert len(packed) < 100
    producer.close()
