"""A consumer and a command bus get new handles and lose nothing; how handles die: faults/test_blind_broker.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.librdkafka import reconnecting_consumer
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.handles import HandleHealth, drop
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer
from tests.cluster import Cluster
from tests.conftest import Broker

DEADLINE_S = 30.0
pytestmark = pytest.mark.broker


@pytest.fixture
def topic(broker: Broker, unique: str) -> str:
    """Two partitions with ten messages each."""
    name = f"lasting-{unique}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(DEADLINE_S)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for partition in (0, 1):
        for number in range(10):
            producer.produce(name, b"%d" % number, partition=partition)
    assert not producer.flush(DEADLINE_S)
    return name


@contextmanager
def lasting(broker: Broker, group: str) -> Iterator[LastingConsumer]:
    common = {"bootstrap.servers": broker.bootstrap}
    config = common | {
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 6000,
    }
    consumer = LastingConsumer(config, common)
    try:
        yield consumer
    finally:
        consumer.close()


class Reading:
    """Offsets read, by partition."""

    def __init__(self, consumer: LastingConsumer) -> None:
        self.consumer = consumer
        self.found: dict[int, list[int]] = {0: [], 1: []}

    def until(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until, self.found
            message = self.consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.found[message.partition() or 0].append(message.offset() or 0)


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[LastingConsumer], None]:
    """Makes a consumer believe, once, that it has lost the brokers."""

    def once(consumer: LastingConsumer) -> None:
        before = consumer.native
        with monkeypatch.context() as patch:
            patch.setattr(HandleHealth, "lost", lambda _: True)
            until = time.monotonic() + DEADLINE_S
            while consumer.native is before:
                assert time.monotonic() < until
                assert consumer.poll(0.0) is None

    return once


def test_what_is_assigned_is_read_on(
    broker: Broker, topic: str, lose: Callable[[LastingConsumer], None]
) -> None:
    with lasting(broker, "nobody") as consumer:
        reading = Reading(consumer)
        consumer.assign([TopicPartition(topic, 0, 2)])
        reading.until(lambda: len(reading.found[0]) == 5)
        consumer.pause([TopicPartition(topic, 0)])
        consumer.incremental_assign([TopicPartition(topic, 1, 8)])
        consumer.pause([TopicPartition(topic, 1)])
        lose(consumer)
        reading.until(lambda: sum(map(len, reading.found.values())) == 10)
        assert reading.found == {0: [2, 3, 4, 5, 6, 7, 8, 9], 1: [8, 9]}


def test_a_member_loses_all_and_joins_anew(
    broker: Broker, topic: str, unique: str, lose: Callable[[LastingConsumer], None]
) -> None:
    told: list[tuple[str, list[int]]] = []

    def tell(what: str) -> Callable[[LastingConsumer, list[TopicPartition]], None]:
        return lambda _, places: told.append((what, sorted(p.partition for p in places)))

    with lasting(broker, f"g-{unique}") as consumer:
        reading = Reading(consumer)
        consumer.subscribe([topic], tell("gained"), tell("revoked"), tell("lost"))
        reading.until(lambda: len(reading.found[0]) == len(reading.found[1]) == 10)
        consumer.commit([TopicPartition(topic, 0, 10)], asynchronous=False)
        lose(consumer)
        assert told == [("gained", [0, 1]), ("lost", [0, 1])]
        reading.until(lambda: len(reading.found[1]) == 20)
        assert told == [("gained", [0, 1]), ("lost", [0, 1]), ("gained", [0, 1])]
        assert reading.found == {0: list(range(10)), 1: [*range(10), *range(10)]}
    assert told[-1] == ("revoked", [0, 1])


@pytest.mark.long
def test_a_handle_that_does_not_close_is_left(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As seen in a rebalance; what a callback raises while it closes is raised."""
    given = {"bootstrap.servers": broker.bootstrap, "group.id": "g", "log_level": 0}
    over = threading.Event()
    stuck, failing = (LastingConsumer(given, given) for _ in range(2))
    monkeypatch.setattr(reconnecting_consumer, "_CLOSE_S", 0.1)
    monkeypatch.setattr(stuck, "native", Mock(close=over.wait))
    stuck.close()
    assert "it is left" in caplog.text
    over.set()
    monkeypatch.setattr(
        failing, "native", Mock(close=Mock(side_effect=ValueError("in a callback")))
    )
    with pytest.raises(ValueError, match="in a callback"):
        failing.close()


class Overtaken:
    """The producer of a thread that is about to send, while another thread replaces and frees it."""

    def __init__(self, bus: KafkaBus, freed: Producer) -> None:
        self.bus = bus
        self.freed = freed
        self.successor = bus._producer
        self.refusals = 0

    def produce(self, *what: Any, **how: Any) -> None:
        """As the freed one does it; then the thread looks again which one it is."""
        self.bus._producer = self.successor
        with pytest.raises(RuntimeError) as caught:
            self.freed.produce(*what, **how)
        self.refusals += 1
        raise caught.value

    def poll(self, timeout: float) -> int:
        """Nothing was queued."""
        return 0

    def __len__(self) -> int:
        return 0


@pytest.mark.long
def test_a_command_sent_through_a_freed_producer_is_sent_again(
    cluster: Cluster, unique: str
) -> None:
    with anabranch.connect(cluster.bootstrap) as client:
        client.create_stream(f"{unique}/events")
        bus = client._session._bus
        assert isinstance(bus, KafkaBus)
        lost = bus._producer
        assert lost is not None
        assert bus._renew_producer(lost)
        drop(lost)
        assert not bus._renew_producer(lost), "replaced already: it must not be freed twice"
        late = Overtaken(bus, lost)
        bus._producer = late  # type: ignore[assignment]
        with client.begin(unique) as txn:
            txn.write(f"{unique}/events", b"v")
            txn.commit()
        assert late.refusals == 1
        assert bus._producer is late.successor
    assert not bus._renew_producer(late.successor), "closed: nobody would free the new one"  # type: ignore[arg-type]
