"""Whose records a fetch brings when there are more than it may."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from confluent_kafka import Producer

from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogUnavailable, TopicPartition, TopicSpec
from tests.conftest import Broker

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("quiet", range(3))
def test_a_flood_keeps_no_other_partition_waiting(broker: Broker, unique: str, quiet: int) -> None:
    """Whatever is fetched in between: so the turns of partitions may come out even."""
    places = [TopicPartition(f"fetched-{unique}", n) for n in range(3)]
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    with closing(KafkaLog(broker.bootstrap)) as log:
        log.create_topics([TopicSpec(places[0].topic, 3)])

        def write(place: TopicPartition, size: int) -> None:
            producer.produce(place.topic, bytes(size), partition=place.partition)
            producer.flush(20)

        for _ in range(12):
            write(places[(quiet + 1) % 3], 50_000)
        positions = dict.fromkeys(places, 0)
        for _ in range(4):
            write(places[quiet], 10)
            seen = set()
            for _ in range(2):
                found = log.fetch(positions, max_wait=1, max_bytes=60_000, committed=False)
                positions |= {place: got.next_offset for place, got in found.items()}
                seen |= set(found)
                for _ in range(2):
                    between = {places[2]: positions[places[2]]}
                    log.fetch(between, max_wait=0, max_bytes=1, committed=False)
            assert places[quiet] in seen
        assert positions[places[(quiet + 1) % 3]] >= 3


def test_closing_ends_a_fetch_that_waits(broker: Broker, unique: str) -> None:
    place = TopicPartition(f"closed-{unique}", 0)
    log = KafkaLog(broker.bootstrap)
    log.create_topics([TopicSpec(place.topic, 1)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(log.fetch, {place: 0}, max_wait=30, max_bytes=1, committed=False)
        while not log._cluster.pool._waiting:
            assert not waiting.done()
        log.close()
        with pytest.raises(LogUnavailable, match="closed"):
            waiting.result(20)
