"""Faults on the real thing: three brokers, controllers, writers and readers, killed, frozen and restarted.

All of it mixed; `test_cells.py` has each kind by itself. The checker, which imports nothing of the product, judges
the history.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition, TopicSpec
from tests.faults.faults import WHOMS, Faults, schedule
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Services
from tests.workload.readers import MODES
from tests.workload.zygote import Zygote

SOON_S = 10.0
MIXED_S = float(os.environ.get("ANABRANCH_FAULTS_S", "180"))
pytestmark = pytest.mark.broker


def leader_of(cluster: EmbeddedCluster, topic: str) -> int:
    """The node that leads its only partition."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    return int(admin.list_topics(topic, timeout=20).topics[topic].partitions[0].leader)


@pytest.mark.soak
def test_the_log_follows_leaders(three_brokers: EmbeddedCluster, unique: str) -> None:
    """A leader that is dead, and one that takes requests but answers none, are left for the next one."""
    log = KafkaLog(three_brokers.bootstrap)
    place = TopicPartition(f"t-{unique}", 0)
    log.create_topics([TopicSpec(place.topic, 1, {"min.insync.replicas": "2"})])
    info = log.describe_topics([place.topic])[place.topic]
    assert (info.replication_factor, info.config["min.insync.replicas"]) == (3, "2")

    def append(value: bytes) -> None:
        producer = log.producer(f"id-{unique}", timeout=60)
        producer.append([(place, encode_batch([Record(0, int(time.time() * 1000), b"k", value)]))])
        producer.commit()
        producer.close()

    def values(count: int) -> list[bytes | None]:
        """So many, read through one log all the time; the end is seen a little after the commit."""
        until = time.monotonic() + 60
        at = 0
        found: list[bytes | None] = []
        while len(found) < count:
            assert time.monotonic() < until, f"{found} of {count}"
            for fetched in log.fetch(
                {place: at}, max_wait=0.5, max_bytes=1 << 20, committed=True
            ).values():
                found += [r.value for b in fetched.batches for r in decode_records(b.data)]
                at = fetched.next_offset
        end = log.end_offsets([place], committed=False)[place]
        assert at <= end
        return found

    append(b"1")
    assert values(1) == [b"1"]
    dead = three_brokers.node(leader_of(three_brokers, place.topic))
    dead.kill()
    # By the leader known so far, which is gone; fetching looks for another one by itself.
    assert log.end_offsets([place], committed=False)[place] >= 1
    assert values(1) == [b"1"]
    append(b"2")
    dead.start()
    frozen = three_brokers.node(leader_of(three_brokers, place.topic))
    frozen.pause()
    try:
        assert values(2) == [b"1", b"2"]
    finally:
        frozen.resume()
    log.close()


@pytest.mark.timeout(300 + 3 * MIXED_S)
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SOON_S, marks=pytest.mark.long),
        pytest.param(MIXED_S, marks=pytest.mark.soak),
    ],
)
def test_no_promise_breaks_under_mixed_faults(
    three_brokers: EmbeddedCluster,
    zygote: Zygote,
    tmp_path: Path,
    measured: Callable[[str], None],
    seconds: float,
) -> None:
    """Brokers and processes, each as the schedule says, while a stream is scaled."""
    crew = Crew(zygote, three_brokers.bootstrap, tmp_path, random.Random(f"{SEED}/mixed"))
    services = Services(crew.bootstrap, tmp_path, crew.prefix)
    faults = Faults(crew, three_brokers, services)
    readers = [
        *[crew.reader("ordered", grouped=True)] * 2,
        *[crew.reader("transactions", grouped=True)] * 2,
        *[crew.reader(mode) for mode in MODES],
    ]
    plans = [schedule(random.Random(f"{SEED}/{whoms}"), whoms) for whoms in (WHOMS[:3], WHOMS[3:])]
    print(f"ANABRANCH_SEED={SEED}")
    try:
        crew.start(services, [*crew.writers(2, 2), *readers])
        faults.endure(plans, seconds)
        crew.finish()
    finally:
        crew.close()
    crew.judged(measured, f"mixed, {faults.figures()}")
