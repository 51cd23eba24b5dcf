"""A broker behind the faulty network, and a consumer that knows nothing of the product."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, TopicPartition

from anabranch.infra.broker import EmbeddedBroker
from tests.faults.proxy import HOST, Proxy

DEADLINE_S = 60.0


@dataclass
class Network:
    """``proxied``: where what is under test comes in; ``direct``: past the proxy, for those who check."""

    broker: EmbeddedBroker
    proxy: Proxy

    @property
    def proxied(self) -> str:
        return self.proxy.bootstrap

    @property
    def direct(self) -> str:
        return self.broker.bootstrap


@contextmanager
def start_network(transaction_version: int = 2) -> Iterator[Network]:
    """A broker of its own, which sends every client that comes through the proxy back there."""
    with (
        Proxy() as proxy,
        EmbeddedBroker(
            transaction_version=transaction_version, quick_start=True, proxy=proxy.bootstrap
        ) as broker,
    ):
        proxy.target = (HOST, broker.proxied_port)
        yield Network(broker, proxy)
        proxy.policy = None
        broker.kill()  # its data is not needed: quicker than a shutdown


def read_committed(
    bootstrap: str, topic: str, partitions: Iterable[int]
) -> dict[int, list[tuple[int, bytes]]]:
    """(offset, value) of all that is committed, partition by partition, as any consumer reads it."""
    numbers = list(partitions)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "nobody",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    found: dict[int, list[tuple[int, bytes]]] = {number: [] for number in numbers}
    left = {(topic, number) for number in numbers}
    until = time.monotonic() + DEADLINE_S
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        while left:
            assert time.monotonic() < until, f"{left} can't be read to the end"
            message = consumer.poll(0.2)
            if message is None:
                continue
            where = (message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is None:
                found[where[1]].append((message.offset() or 0, message.value() or b""))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                left.discard(where)
    finally:
        consumer.close()
    return found
