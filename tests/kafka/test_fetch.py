"""Whose records a fetch brings when there are more than it may."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer

from anabranch.kafka import data, fetch
from anabranch.kafka.log import KafkaLog
from anabranch.ports import Fetched, LogError, LogUnavailable, TopicPartition, TopicSpec
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


def test_a_session_brings_what_fetches_without_one_bring(broker: Broker, unique: str) -> None:
    """The set of partitions and their positions change at random, topics are made, and the broker forgets."""
    chance = random.Random(5)
    places = [TopicPartition(f"session-{unique}-{n % 2}", n // 2) for n in range(8)]
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    with (
        closing(KafkaLog(broker.bootstrap, in_sessions=True)) as log,
        closing(KafkaLog(broker.bootstrap)) as plain,
    ):
        log.create_topics([TopicSpec(name, 4) for name in sorted({p.topic for p in places})])
        positions = dict.fromkeys(places, 0)
        in_one = 0
        for step in range(60):
            for place in chance.sample(places, 2):
                producer.produce(place.topic, b"v", partition=place.partition)
            producer.flush(20)
            if step == 20:  # as after a broker's restart
                next(iter(log._fetcher._sessions.values())).id += 1
            if step == 40:
                log.create_topics([TopicSpec(f"session-{unique}-more", 1)])
            wanted = dict(chance.sample(sorted(positions.items()), chance.randint(2, 8)))
            found = _fetch(log, wanted)
            assert _contents(found) == _contents(_fetch(plain, wanted))
            positions |= {p: got.next_offset for p, got in found.items() if chance.random() < 0.7}
            in_one += all(one.id and one.epoch > 1 for one in log._fetcher._sessions.values())
        assert in_one > 50


def test_a_session_asks_for_what_has_changed(
    broker: Broker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    request = data.fetch_request

    def record(
        version: int,
        positions: Mapping[TopicPartition, data.FetchPosition],
        *rest: Any,
        **more: Any,
    ) -> Any:
        asked.append(set(positions))
        return request(version, positions, *rest, **more)

    monkeypatch.setattr(data, "fetch_request", record)
    places = [TopicPartition(f"changed-{unique}", n) for n in range(5)]
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    with closing(KafkaLog(broker.bootstrap, in_sessions=True)) as log:
        log.create_topics([TopicSpec(places[0].topic, 5)])
        positions = dict.fromkeys(places, 0)
        for number in (3, 1, 1):
            producer.produce(places[0].topic, b"v", partition=number)
            producer.flush(20)
            found = _fetch(log, positions, 5.0)
            assert found.keys() == {places[number]}
            positions |= {place: got.next_offset for place, got in found.items()}
    assert asked == [set(places), {places[3]}, {places[1]}]


def test_a_request_that_was_not_waited_for_is_used_by_the_next_fetch(
    broker: Broker, unique: str
) -> None:
    places = [TopicPartition(f"under-way-{unique}", n) for n in range(2)]
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    log = KafkaLog(broker.bootstrap, in_sessions=True)
    with closing(log):
        log.create_topics([TopicSpec(places[0].topic, 2)])
        positions = dict.fromkeys(places, 0)
        assert _fetch(log, positions) == {}
        fetcher = log._fetcher
        (session,) = fetcher._sessions.values()
        # A broker answers in its time if others answer first.
        wanted = fetch._Wanted(
            positions, time.monotonic(), time.monotonic() + 9, 1 << 20, False, {}, True
        )
        session.under_way = fetcher._ask(
            1, places, 9.0, wanted._replace(give_up=wanted.give_up + 9)
        )
        under_way = session.under_way
        assert _fetch(log, positions) == {}
        assert session.under_way is under_way
        producer.produce(places[1].topic, b"v", partition=1)
        producer.flush(20)
        found = _fetch(log, positions, 5.0)
        assert found.keys() == {places[1]}
        assert under_way.is_read
        (session,) = fetcher._sessions.values()
        assert session.under_way is None
        session.under_way = fetcher._ask(
            1, places, 9.0, wanted._replace(give_up=wanted.give_up + 9)
        )
        last = session.under_way.connection
    assert last.broken


def _fetch(
    log: KafkaLog, positions: Mapping[TopicPartition, int], max_wait: float = 0.0
) -> dict[TopicPartition, Fetched]:
    failed: dict[TopicPartition, LogError] = {}
    found = log.fetch(
        positions, max_wait=max_wait, max_bytes=1 << 20, committed=False, failed=failed
    )
    assert not failed
    return found


def _contents(
    found: Mapping[TopicPartition, Fetched],
) -> dict[TopicPartition, tuple[int, list[bytes]]]:
    return {
        place: (got.next_offset, [bytes(batch.data) for batch in got.batches])
        for place, got in found.items()
    }
