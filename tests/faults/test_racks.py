"""Readers of a rack: followers serve them, and leaders what followers can't; a scan outlives its broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

import anabranch
from anabranch.errors import RetryError
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.kafka.calls import Api
from anabranch.kafka.fetch import Fetcher
from anabranch.kafka.log import KafkaLog
from anabranch.ports import OffsetOutOfRange, TopicPartition
from anabranch.reading import feed
from anabranch.reading.snapshot import take
from tests.client.written import WrittenStream

pytestmark = [pytest.mark.broker, pytest.mark.slow(30)]

RACKS = ("a", "b", "c")  # of brokers 1, 2, 3
MOVE = Api(45, "alter_partition_reassignments", "AlterPartitionReassignments", 0, 0, 0)
LONG_S = 60.0


@pytest.fixture(scope="module")
def brokers() -> Iterator[EmbeddedCluster]:
    # No lead moves when the machine stops for seconds.
    quiet = {"broker.session.timeout.ms": "10000"}
    with EmbeddedCluster(3, racks=RACKS, properties=quiet, quick_start=True) as embedded:
        yield embedded
        embedded.kill()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The brokers that answered fetches, one after the other."""
    nodes: list[int] = []
    real = Fetcher._take

    def spied(fetcher: Fetcher, one: Any, *more: Any) -> Any:
        nodes.append(one.node)
        return real(fetcher, one, *more)

    monkeypatch.setattr(Fetcher, "_take", spied)
    return nodes


def made(brokers: EmbeddedCluster, topic: str, replicas: list[int]) -> TopicPartition:
    """A topic with 4 MB in 40 records; the first replica leads."""
    admin = AdminClient({"bootstrap.servers": brokers.bootstrap})
    new = NewTopic(topic, 1, replica_assignment=[replicas], config={"min.insync.replicas": "1"})
    admin.create_topics([new])[topic].result(30)
    producer = Producer({"bootstrap.servers": brokers.bootstrap, "linger.ms": 0})
    for _ in range(40):
        producer.produce(topic, bytes(100_000), partition=0)
        producer.flush(30)
    return TopicPartition(topic, 0)


def read(log: KafkaLog, place: TopicPartition, end: int) -> list[int]:
    """The offsets up to an end."""
    position, found = 0, []
    until = time.monotonic() + LONG_S
    while position < end and time.monotonic() < until:
        some = log.fetch({place: position}, max_wait=0.5, max_bytes=200_000, committed=True)
        for fetched in some.values():
            found += [batch.base_offset for batch in fetched.batches]
            position = fetched.next_offset
    return found


@pytest.mark.soak
def test_the_nearest_replica_serves(brokers: EmbeddedCluster, asked: list[int]) -> None:
    place = made(brokers, "near", [1, 2])
    for rack, first, then in (
        ("b", [1, 2], {2}),
        ("a", [1, 1], {1}),
        ("c", [1, 1], {1}),
        ("", [1, 1], {1}),
    ):
        asked.clear()
        with closing(KafkaLog(brokers.bootstrap, {"client.rack": rack})) as log:
            assert read(log, place, 40) == list(range(40))
        assert (asked[:2], set(asked[2:])) == (first, then), rack


@pytest.mark.soak
def test_offsets_that_a_lagging_follower_lacks_are_read_from_the_leader(
    brokers: EmbeddedCluster, asked: list[int]
) -> None:
    """It says that an offset is out of range: its leader has it. So does one that is no replica at all."""
    place = made(brokers, "behind", [1])
    admin = AdminClient({"bootstrap.servers": brokers.bootstrap})
    rate = "follower.replication.throttled.rate"
    third = ConfigResource(ConfigResource.Type.BROKER, "3")
    for kind, name, setting, value in (
        (ConfigResource.Type.TOPIC, place.topic, "follower.replication.throttled.replicas", "*"),
        (ConfigResource.Type.BROKER, "3", rate, "1"),
    ):
        entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(kind, name, incremental_configs=[entry])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(30)
    until = time.monotonic() + LONG_S
    while (found := admin.describe_configs([third])[third].result(30).get(rate)) is None or (
        found.value != "1"
    ):  # the broker itself tells what it has applied, and has the topic's setting from before
        assert time.monotonic() < until
        time.sleep(0.05)
    with closing(KafkaLog(brokers.bootstrap, {"client.rack": "c"})) as log:
        cluster = log._cluster
        cluster.refresh([place.topic], cluster.deadline())
        with cluster.connection(None, cluster.deadline()) as connection:
            moved = [{"partition_index": 0, "replicas": (1, 3)}]
            topics = [{"name": place.topic, "partitions": moved}]
            connection.ask(MOVE, cluster.deadline(), timeout=timedelta(seconds=30), topics=topics)
        for follower in (2, 3):
            cluster.health.followers.named(place, follower)
            asked.clear()
            found = log.fetch({place: 39}, max_wait=5, max_bytes=1 << 20, committed=True)
            assert [batch.base_offset for batch in found[place].batches] == [39]
            assert asked == [follower, 1]
            assert read(log, place, 40) == list(range(40))
        with pytest.raises(OffsetOutOfRange):
            log.fetch({place: 50}, max_wait=1, max_bytes=1, committed=True)


@pytest.mark.soak
@pytest.mark.parametrize(("how", "rack"), [("kill", "b"), ("pause", "c")])
def test_a_scan_outlives_its_broker(
    brokers: EmbeddedCluster,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    rack: str,
    how: str,
) -> None:
    """No event comes twice, none is missing."""
    monkeypatch.setattr(feed, "FETCH_BYTES", 4000)
    written = WrittenStream(brokers.bootstrap, f"s/{how}", 2)
    options = {"client.rack": rack}
    with closing(written), anabranch.connect(brokers.bootstrap, config=options) as client:
        written.scale((0, 0, 4, 0), (1, 4, 8, 1))
        for number in range(60):
            written.commit([(b"k%d" % key, b"%d:%d" % (key, number)) for key in range(10)])
        with client._reading.readers().source() as source:
            plan = take(source, [written.stream], written.timestamp, time.monotonic() + LONG_S)
        node = None
        values = []
        try:
            with client.open_snapshot(plan).read(written.stream) as reader:
                while True:
                    try:
                        event = next(reader, None)
                    except RetryError:
                        continue
                    if event is None:
                        break
                    values.append(event.value or b"")
                    if len(values) == 100:
                        node = brokers.node(asked[-1])
                        getattr(node, how)()
        finally:
            if node is not None:
                node.resume() if how == "pause" else node.start()
    assert sorted(values) == sorted(b"%d:%d" % (k, n) for k in range(10) for n in range(60))
