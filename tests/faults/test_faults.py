"""Faults on the real thing: three brokers, controllers, writers and readers, killed, frozen and restarted.

Kafka's own matrix (its system test ``transactions_test.py``): what is bounced, how, and whether who reads is in a
group; and a mixed run, where all of it happens. The history of what everybody asked and was told is judged by the
checker, which knows nothing of the product. The default is a few cells and a short mixed run; ``scripts/soak``
takes all of them, for as long as one likes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import checker
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.topics.kafka_log import KafkaLog
from anabranch.topics.records import Record, decode_records, encode_batch
from tests.crash.zygote import Zygote
from tests.faults.faults import HOWS, WHOMS, How, Whom, fault, schedule
from tests.faults.team import Team

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
MIXED_S = float(os.environ.get("ANABRANCH_FAULTS_S", "20"))
ALL: list[tuple[How, Whom, bool]] = [
    (how, whom, group) for how in HOWS for whom in WHOMS for group in (False, True)
]
IS_LONG = os.environ.get("ANABRANCH_FAULTS") == "all"
# Else the mixed run draws from the same faults; a cell takes 45 s.
CELLS: list[tuple[How, Whom, bool]] = ALL if IS_LONG else []
CELL_FAULTS = 2
pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    """Three brokers, for the tests of this file."""
    with EmbeddedCluster(3, quick_start=True) as embedded:
        yield embedded
        embedded.kill()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks clients; they end with it."""
    with Zygote() as warm:
        yield warm


def judged(team: Team, measured: Callable[[str], None], name: str, seconds: float) -> None:
    """No anomaly, and enough was done that there could have been some."""
    report = checker.judge(team.history)
    measured(
        f"{name}: {team.told} commits told, {team.scalings} scalings, faults {dict(team.done)} in "
        f"{seconds:.0f} s; troubles {dict(team.troubles)}; {dict(report.counts)}; seed {SEED}"
    )
    assert not team.defects, team.defects[:3]
    assert not report.anomalies, "\n".join(map(str, report.anomalies[:5]))
    assert team.told > 3, "too little was done under the faults"


def leader_of(cluster: EmbeddedCluster, topic: str) -> int:
    """The node that leads its only partition."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    return int(admin.list_topics(topic, timeout=20).topics[topic].partitions[0].leader)


@pytest.mark.slow(20)
def test_the_log_follows_leaders(cluster: EmbeddedCluster, unique: str) -> None:
    """A leader that is dead, and one that takes requests but answers none, are left for the next one."""
    log = KafkaLog(cluster.bootstrap)
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
    dead = cluster.node(leader_of(cluster, place.topic))
    dead.kill()
    assert values(1) == [b"1"]
    append(b"2")
    dead.start()
    frozen = cluster.node(leader_of(cluster, place.topic))
    frozen.pause()
    try:
        assert values(2) == [b"1", b"2"]
    finally:
        frozen.resume()
    log.close()


@pytest.mark.slow(25)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("how", "whom", "grouped"), CELLS)
def test_cell(
    how: How,
    whom: Whom,
    grouped: bool,
    cluster: EmbeddedCluster,
    zygote: Zygote,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    """One thing is bounced, while transactions are written and read."""
    chance = random.Random(f"{SEED}/{how}/{whom}/{grouped}")
    readers = [("ordered", grouped), ("transactions", grouped), ("raw", False)]
    if grouped:
        readers.insert(0, ("ordered", True))
    team = Team(zygote, cluster, tmp_path, chance, readers)
    faults = [fault(chance, how, whom) for _ in range(CELL_FAULTS)]
    print(f"ANABRANCH_SEED={SEED}", *faults, sep="\n")
    began = time.monotonic()
    try:
        team.start()
        for one in faults:
            team.suffer(one)
        team.finish()
    finally:
        team.close()
    judged(
        team,
        measured,
        f"{how} {whom} {'grouped' if grouped else 'ordered'}",
        time.monotonic() - began,
    )


@pytest.mark.slow(45)
@pytest.mark.timeout(300 + 3 * MIXED_S)
def test_mixed(
    cluster: EmbeddedCluster,
    zygote: Zygote,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    """Brokers, and the processes beside them, each as the schedule says, while a stream is scaled."""
    chance = random.Random(f"{SEED}/mixed")
    readers = [
        *[("ordered", True)] * 2,
        *[("transactions", True)] * 2,
        ("ordered", False),
        ("transactions", False),
        ("raw", False),
        ("snapshots", False),
    ]
    team = Team(zygote, cluster, tmp_path, chance, readers)
    plans = [
        schedule(random.Random(f"{SEED}/{w}"), w) for w in (("broker",), ("controller", "client"))
    ]
    print(f"ANABRANCH_SEED={SEED}")
    problems: list[BaseException] = []
    began = time.monotonic()

    def work(plan: Iterator[object]) -> None:
        try:
            for one in plan:
                if time.monotonic() - began > MIXED_S or problems:
                    break
                print(one)
                team.suffer(one)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)

    try:
        team.start()
        began = time.monotonic()
        scaler = threading.Thread(target=team.scale)
        threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
        for thread in (*threads, scaler):
            thread.start()
        for thread in threads:
            thread.join()
        team.over()
        scaler.join()
        if problems:
            raise problems[0]
        team.finish()
    finally:
        team.close()
    judged(team, measured, "mixed", time.monotonic() - began)
