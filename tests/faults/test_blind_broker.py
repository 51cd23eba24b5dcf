"""A broker that has just started names no brokers: clients ask again, and go on.

Not in the test command, but in `scripts/soak`: librdkafka 2.12 to 2.16 sometimes never connects again after such
answers, and 2.11 in other cases (docs/decisions/0010-brokers-that-know-nobody.md).
"""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

import anabranch
from anabranch.topics.names import stream_topic
from tests.cluster import Cluster
from tests.faults.blind_broker import BlindBroker

__test__ = os.environ.get("ANABRANCH_FAULTS") == "all"
_DEADLINE_S = 30.0
pytestmark = [pytest.mark.broker, pytest.mark.slow(3)]


def _commit(client: anabranch.Client, stream: str, value: bytes) -> None:
    """Through the journal, so that all of a client's producers are used."""
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, value)
        txn.token()
        txn.commit(timeout=_DEADLINE_S)


def test_a_client_outlives_it(cluster: Cluster, unique: str) -> None:
    """Commands, replies and reading: all of a client's handles on librdkafka are told, and go on."""
    stream = f"b{unique}/events"
    host, port = cluster.bootstrap.split(",")[0].split(":")
    with BlindBroker((host, int(port))) as network:
        often = {"topic.metadata.refresh.interval.ms": 200, "metadata.max.age.ms": 1000}
        with anabranch.connect(network.bootstrap, prefix=cluster.prefix, config=often) as client:
            client.create_stream(stream)
            _commit(client, stream, b"before")
            network.blind.set()
            assert network.told.wait(_DEADLINE_S), "nobody asked"
            time.sleep(0.5)  # every handle asks each 0.2 s
            network.blind.clear()
            _commit(client, stream, b"after")
            with client.read(stream, timeout=_DEADLINE_S) as reader:
                events = iter(reader)
                assert [next(events).value, next(events).value] == [b"before", b"after"]


def test_a_plain_consumer_outlives_it(cluster: Cluster, unique: str) -> None:
    """What any reader of a stream rests on."""
    stream = f"b{unique}/events"
    topic = stream_topic(stream)
    host, port = cluster.bootstrap.split(",")[0].split(":")
    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix) as client:
        client.create_stream(stream)
        _commit(client, stream, b"before")
        with BlindBroker((host, int(port))) as network:
            consumer = Consumer(
                {
                    "bootstrap.servers": network.bootstrap,
                    "group.id": unique,
                    "topic.metadata.refresh.interval.ms": 1000,
                }
            )
            consumer.assign([TopicPartition(topic, 0, 0)])
            until = time.monotonic() + _DEADLINE_S
            values: list[bytes | None] = []

            def take() -> None:
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    values.append(message.value())

            while not values:
                assert time.monotonic() < until
                take()
            network.blind.set()
            looks = time.monotonic() + 1.0
            while not network.told.is_set() or time.monotonic() < looks:
                assert time.monotonic() < until
                consumer.poll(0.1)
                with contextlib.suppress(KafkaException):
                    consumer.list_topics(topic, timeout=1)
            network.blind.clear()
            _commit(client, stream, b"after")
            while len(values) < 2:
                assert time.monotonic() < until, "it never connected again"
                take()
            consumer.close()
    assert values == [b"before", b"after"]
