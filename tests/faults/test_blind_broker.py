"""A broker that has just started names no brokers: clients ask again, and go on.

Not in the test command, but in `scripts/soak`: librdkafka 2.12 to 2.16 sometimes never connects again after such
answers, and 2.11 in other cases (docs/decisions/0010-brokers-that-know-nobody.md).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

import anabranch
from anabranch.topics.names import stream_topic
from tests.cluster import ControllerProcess
from tests.faults.blind_broker import Blindness
from tests.faults.network_proxy import Network, start_network

__test__ = os.environ.get("ANABRANCH_FAULTS") == "all"
_DEADLINE_S = 30.0
pytestmark = [pytest.mark.broker, pytest.mark.slow(3)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A broker behind the proxy, and a controller that is always told the truth."""
    folder = tmp_path_factory.mktemp("blind")
    with (
        start_network() as made,
        ControllerProcess(made.direct, folder, folder / "key") as controller,
    ):
        controller.wait_leading()
        yield made


@pytest.fixture
def blindness(network: Network) -> Blindness:
    """Of this test alone."""
    network.proxy.policy = made = Blindness()
    return made


def _commit(client: anabranch.Client, stream: str, value: bytes) -> None:
    """Through the journal, so that all of a client's producers are used."""
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, value)
        txn.token()
        txn.commit(timeout=_DEADLINE_S)


def test_a_client_outlives_it(network: Network, blindness: Blindness, unique: str) -> None:
    """Commands, replies and reading: all of a client's handles on librdkafka are told, and go on."""
    stream = f"b{unique}/events"
    often = {"topic.metadata.refresh.interval.ms": 200, "metadata.max.age.ms": 1000}
    with anabranch.connect(network.proxied, config=often) as client:
        client.create_stream(stream)
        _commit(client, stream, b"before")
        blindness.blind.set()
        assert blindness.told.wait(_DEADLINE_S), "nobody asked"
        time.sleep(0.5)  # every handle asks each 0.2 s
        blindness.blind.clear()
        _commit(client, stream, b"after")
        with client.read(stream, timeout=_DEADLINE_S) as reader:
            events = iter(reader)
            assert [next(events).value, next(events).value] == [b"before", b"after"]


def test_a_plain_consumer_outlives_it(network: Network, blindness: Blindness, unique: str) -> None:
    """What any reader of a stream rests on."""
    stream = f"b{unique}/events"
    topic = stream_topic(stream)
    often = {"topic.metadata.refresh.interval.ms": 1000}
    consumer = Consumer({"bootstrap.servers": network.proxied, "group.id": unique, **often})
    until = time.monotonic() + _DEADLINE_S
    values: list[bytes | None] = []

    def take() -> None:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            values.append(message.value())

    with anabranch.connect(network.direct) as client:
        client.create_stream(stream)
        _commit(client, stream, b"before")
        consumer.assign([TopicPartition(topic, 0, 0)])
        while not values:
            assert time.monotonic() < until
            take()
        blindness.blind.set()
        looks = time.monotonic() + 1.0
        while not blindness.told.is_set() or time.monotonic() < looks:
            assert time.monotonic() < until
            consumer.poll(0.1)
            with contextlib.suppress(KafkaException):
                consumer.list_topics(topic, timeout=1)
        blindness.blind.clear()
        _commit(client, stream, b"after")
        while len(values) < 2:
            assert time.monotonic() < until, "it never connected again"
            take()
    consumer.close()
    assert values == [b"before", b"after"]
