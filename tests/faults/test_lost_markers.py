"""Brokers lose the markers of a partition without a leader (KAFKA-20734): what stays open is ended as decided."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.kafka.coordinator import coordinator_of
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import TopicPartition, TopicSpec
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.timeout(240)]

PLACE = TopicPartition("solo", 0)
# (who comes after, how the native transaction ends while its partition has no leader)
CASES = [
    (after, end) for after in ("the same", "another one") for end in ("commit", "abort", "not")
]


def batch(value: str) -> bytes:
    return encode_batch([Record(0, int(time.time() * 1000), b"k", value.encode())])


def read(log: KafkaLog) -> list[str]:
    """What is committed, in order."""
    seen, position = [], 0
    while found := log.fetch({PLACE: position}, max_wait=1, max_bytes=1 << 20, committed=True):
        position = found[PLACE].next_offset
        seen += [
            r.value.decode()
            for b in found[PLACE].batches
            for r in decode_records(b.data)
            if r.value
        ]
    return seen


def wait_for(log: KafkaLog, *, leader: bool) -> None:
    wait_until(lambda: leader != bool(log.describe_topics([PLACE.topic])[PLACE.topic].leaderless))


def test_what_lacks_a_marker_is_ended_as_it_was_decided() -> None:
    with EmbeddedCluster(3, quick_start=True) as cluster, ExitStack() as opened:

        def connect() -> KafkaLog:
            log = KafkaLog(cluster.bootstrap)
            opened.callback(log.close)
            return log

        def producer(source: KafkaLog, name: str) -> KafkaProducer:
            made = source.producer(name, timeout=60)
            opened.callback(made.close)
            return made

        log = connect()
        spec = TopicSpec(PLACE.topic, 1, {"min.insync.replicas": "1"}, replication_factor=1)
        log.create_topics([spec])
        deadline = log._cluster.deadline()
        node = log._cluster.leaders([PLACE], deadline)[PLACE].node
        address = log._cluster.address(node)
        names = (f"id{n}" for n in range(1000))
        # Coordinators that outlive the partition's leader.
        ids = [
            next(n for n in names if coordinator_of(log._cluster, n, deadline) != address)
            for _ in CASES
        ]
        producers: list[KafkaProducer] = []
        expected = []
        for (after, end), name in zip(CASES, ids, strict=True):
            producers.append(producer(log, name))
            producers[-1].append([(PLACE, batch(f"{name} first"))])
            producers[-1].commit()
            producers[-1].append([(PLACE, batch(f"{after}, {end}"))])
            expected += [f"{name} first"] + [f"{after}, {end}"] * (
                end == "commit" or (after, end) == ("the same", "not")
            )
        cluster.node(node).kill()
        wait_for(log, leader=False)
        for i, (after, end) in enumerate(CASES):
            if end == "commit":
                producers[i].commit()
            if end == "abort":
                producers[i].abort()
            if after == "another one":
                producers[i].close()
                producers[i] = producer(connect(), ids[i])
        cluster.node(node).start()
        wait_for(log, leader=True)
        time.sleep(1)
        for (after, end), one in zip(CASES, producers, strict=True):
            if (after, end) != ("the same", "not"):
                one.append([(PLACE, batch(f"{after}, {end}, later"))])
                expected.append(f"{after}, {end}, later")
            one.commit()
        wait_until(lambda: sorted(read(log)) == sorted(expected), 10, what=lambda: read(log))
