"""Groups that read streams which scale, roll and carry."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.batches import columns_read
from anabranch.errors import NotReady
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading import ordered_reader as client_reader
from tests.client.members import LONG_S, Members, by_key
from tests.client.written import ONE, Keys, WrittenStream, scaled
from tests.conftest import Broker

pytestmark = pytest.mark.broker

QUIET_S = 1.0


def committed(broker: Broker, group: str, places: list[tuple[str, int]]) -> list[int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    try:
        found = consumer.committed([TopicPartition(*place) for place in places], timeout=LONG_S)
        return [place.offset for place in found]
    finally:
        consumer.close()


@pytest.fixture
def members(broker: Broker, written: WrittenStream, group: str) -> Iterator[Members]:
    found = Members(broker.bootstrap, written.stream, group)
    yield found
    found.close()


def test_three_members_keep_the_order(written: WrittenStream, members: Members) -> None:
    keys = Keys()
    written.scale((0, 0, 2, 0), (1, 2, 5, 1), (2, 5, 8, 2))
    for _ in range(3):
        members.join()

    def all_read() -> bool:
        written.commit(keys.events())
        return members.reading == {0, 1, 2}

    members.wait_for(all_read)
    scaled(written, keys)
    members.wait_for(lambda: members.by_key() == keys.expected)


def test_members_come_and_go_in_mid_epoch(written: WrittenStream, members: Members) -> None:
    keys = Keys()
    first = written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    members.join()
    written.commit(keys.events(5))
    members.wait_for(lambda: members.by_key() == keys.expected)
    members.join()
    written.commit(keys.events(5))
    written.scale((2, 0, 8, 2))
    written.commit(keys.events(5))
    written.roll(first, keys.events())
    members.wait_for(lambda: members.by_key() == keys.expected)
    written.commit(keys.events(5))
    members.leave(0)
    written.scale((3, 0, 2, 1), (4, 2, 8, 0))
    written.commit(keys.events(5))
    written.roll(first, keys.events())
    members.join()
    written.commit(keys.events(5))
    members.wait_for(lambda: members.by_key() == keys.expected)


@pytest.mark.soak
def test_what_is_taken_away_within_a_step_is_given_no_more(
    broker: Broker, written: WrittenStream, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of a partition is one step, for more than half a minute.
    monkeypatch.setattr(client_reader, "_FIRST_STEP", 5000)
    columns_read.warm()  # or steps are shorter
    keys = Keys(12)
    written.scale((0, 0, 1, 0), (1, 1, 6, 1), (2, 6, 8, 2))
    for _ in range(20):
        written.commit(keys.events(30))
    seen: list[tuple[int, anabranch.Event]] = []
    lock = threading.Lock()
    stop = threading.Event()
    lost = client_reader.Reader._lost
    lost_at: list[int] = []

    def losing(reader: client_reader.Reader, *args: Any) -> None:
        lost_at.append(len(seen))
        lost(reader, *args)

    monkeypatch.setattr(client_reader.Reader, "_lost", losing)

    def read(who: int) -> None:
        quick = {"heartbeat.interval.ms": 200}  # to hear of others
        with (
            anabranch.connect(broker.bootstrap, config=quick) as client,
            client.read(written.stream, group=group, timeout=0.2) as reader,
        ):
            while not stop.is_set():
                for event in reader:
                    with lock:
                        seen.append((who, event))
                    if stop.wait(0.02):
                        break

    def count(who: int) -> int:
        with lock:
            return sum(by == who for by, _ in seen)

    with ThreadPoolExecutor(2) as pool:
        try:
            running = []
            deadline = time.monotonic() + LONG_S
            for who in (0, 1):
                running.append(pool.submit(read, who))
                while count(who) < 20:
                    assert time.monotonic() < deadline
                    assert not any(one.done() for one in running)
                    time.sleep(0.02)
            with lock:
                until = len(seen)  # then they leave, and partitions move once more
        finally:
            stop.set()
        for one in running:
            one.result(LONG_S)
    seen = seen[:until]
    partitions = [event.partition for _, event in seen]
    first = next(i for i, (who, _) in enumerate(seen) if who == 1)
    after = [who for who, event in seen[first:] if event.partition == partitions[first]]
    assert set(after) == {1}
    # The other one did not come to the end of the step that it had in hand, which had all of a partition.
    commits = [record for _, record in written.records if isinstance(record, CommitRecord)]
    parts = [part for commit in commits for part in commit.segments]
    in_hand = sum(part.count for part in parts if part.partition == partitions[0])
    assert set(partitions[: lost_at[0]]) == {partitions[0]}
    assert lost_at[0] < in_hand


@pytest.mark.soak
def test_a_dead_group_goes_on_epochs_later(
    client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    keys = Keys(8)
    first = written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    for _ in range(12):
        written.commit(keys.events())
    with client.read(written.stream, group=group, timeout=LONG_S) as reader:
        before = list(itertools.islice(reader, 50))
        next(reader)  # given, not processed: it comes again
    for i in range(12):
        written.scale((10 + i, 0, 8, (i + 2) % 3))
        written.commit(keys.events())
        written.roll(first, keys.events())
        written.commit(keys.events())
    after = list(client.read(written.stream, group=group, timeout=QUIET_S))
    assert by_key([*before, *after]) == keys.expected


@pytest.mark.soak
def test_a_member_without_partition_0_waits_for_the_group_to_be_made(
    broker: Broker, written: WrittenStream, group: str
) -> None:
    written.scale(ONE)
    plain = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "client.id": "a-comes-first",  # so that partition 0 is its
            "enable.auto.commit": False,
        }
    )
    try:
        plain.subscribe([written.topic])
        while not plain.assignment():
            plain.poll(0.1)
        with (
            anabranch.connect(broker.bootstrap, timeout=2) as client,
            client.read(written.stream, group=group) as reader,
            ThreadPoolExecutor(1) as pool,
        ):
            asking = pool.submit(next, reader)
            while not asking.done():
                plain.poll(0.1)
            with pytest.raises(NotReady, match="partition 0"):
                asking.result()
            plain.close()
            written.commit([(b"k", b"k:0")])  # the group is the reader's now, and it goes on
            assert next(reader).value == b"k:0"
    finally:
        plain.close()


def test_a_new_group_is_made_with_a_whole_vector(
    broker: Broker, client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    written.commit(Keys().events())
    (_, record) = written.records[-1]
    with client.read(written.stream, group=group, timeout=QUIET_S, start="end") as reader:
        assert list(reader) == []
        places = [(written.topic, p) for p in range(3)]
        vector = {position.partition: position.offset for position in record.vector}
        assert committed(broker, group, places) == [vector[0], vector[1], 0]


@pytest.mark.soak
def test_partitions_that_come_later_are_read_from_their_beginning(
    broker: Broker, client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    """Positions in the stream are all that is left of a group: offsets that no member subscribes to expire."""
    keys = Keys()
    written.scale(ONE)
    written.commit(keys.events())
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    places = [TopicPartition(written.topic, p, 24 if p == 0 else 0) for p in range(3)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()
    written.add_partitions(5)
    written.scale((1, 0, 4, 3), (2, 4, 8, 4))
    written.commit(keys.events())
    rest = by_key(client.read(written.stream, group=group, timeout=QUIET_S, start="end"))
    assert rest == {key: [1] for key in keys.expected}


def test_offsets_of_a_plain_group_are_kept(
    broker: Broker, client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    keys = Keys()
    written.scale(ONE)
    written.commit(keys.events(2))
    plain = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    plain.subscribe([written.topic])
    while (message := plain.poll(0.1)) is None or (message.offset() or 0) < 23:
        pass
    plain.commit(asynchronous=False)
    plain.close()
    rest = by_key(client.read(written.stream, group=group, timeout=QUIET_S, start="end"))
    assert rest == {key: [1] for key in keys.expected}
