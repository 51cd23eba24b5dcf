"""Stream order on a real broker: readers of streams that scale, roll and carry, written by the tests themselves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.client import ordered
from anabranch.client import reader as client_reader
from anabranch.core.hybrid_time import to_datetime
from anabranch.errors import NotReady
from anabranch.ports import TopicPartition as Partition
from anabranch.schemas.records import CommitRecord
from anabranch.topics import columns_read
from anabranch.topics.names import history_topic
from tests.client.members import LIBRDKAFKA, LONG_S, Members, by_key
from tests.client.written import Keys, WrittenStream
from tests.conftest import Broker

pytestmark = pytest.mark.broker

QUIET_S = 1.5
ONE = (0, 0, 8, 0)


@pytest.fixture
def group(unique: str) -> str:
    return f"g{unique}"


@pytest.fixture
def client(broker: Broker) -> Iterator[anabranch.Client]:
    with anabranch.connect(broker.bootstrap) as connected:
        yield connected


@pytest.fixture(params=["raw", "librdkafka"])
def either(broker: Broker, request: pytest.FixtureRequest) -> Iterator[anabranch.Client]:
    """A client whose readers fetch over connections of their own, or by way of librdkafka."""
    given = LIBRDKAFKA if request.param == "librdkafka" else {}
    with anabranch.connect(broker.bootstrap, config=given) as connected:
        yield connected


@pytest.fixture
def written(broker: Broker, unique: str) -> Iterator[WrittenStream]:
    stream = WrittenStream(broker.bootstrap, f"w{unique}/events", 3)
    yield stream
    stream.close()


def scaled(written: WrittenStream, keys: Keys) -> None:
    """Split, scaled, rolled and merged back, on partitions that are used again and again."""
    first = written.scale(ONE)
    written.commit(keys.events(3))
    two = written.scale((1, 0, 4, 1), (2, 4, 8, 2))
    written.commit(keys.events(3))
    written.roll(first, keys.events(2), keys.events())
    written.commit(keys.events())
    written.scale((1, 0, 4, 1), (3, 4, 6, 0), (4, 6, 8, 2))
    written.roll(two, keys.events())
    written.roll(first, keys.events())
    written.scale((5, 0, 8, 2))
    written.commit(keys.events(2))
    written.add_partitions(5)
    written.scale((6, 0, 2, 3), (7, 2, 6, 4), (8, 6, 8, 0))
    written.commit(keys.events(2))


def committed(broker: Broker, group: str, places: list[tuple[str, int]]) -> list[int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    try:
        found = consumer.committed([TopicPartition(*place) for place in places], timeout=LONG_S)
        return [place.offset for place in found]
    finally:
        consumer.close()


# -- one reader -----------------------------------------------------------------------------------------


def test_alone_every_key_comes_in_order(either: anabranch.Client, written: WrittenStream) -> None:
    keys = Keys()
    scaled(written, keys)
    events = list(either.read(written.stream, timeout=QUIET_S))
    assert by_key(events) == keys.expected
    assert {event.value: event.segment_id for event in events} == written.where


def test_a_member_alone_too(either: anabranch.Client, written: WrittenStream, group: str) -> None:
    keys = Keys()
    scaled(written, keys)
    assert by_key(either.read(written.stream, group=group, timeout=QUIET_S)) == keys.expected
    assert list(either.read(written.stream, group=group, timeout=QUIET_S)) == []


@pytest.mark.parametrize("in_group", [False, True])
def test_new_partitions_are_read_while_reading(
    client: anabranch.Client, written: WrittenStream, group: str, in_group: bool
) -> None:
    keys = Keys()
    written.scale(ONE)
    written.commit(keys.events())
    chosen = group if in_group else None
    with client.read(written.stream, group=chosen, timeout=LONG_S) as reader:
        seen = list(itertools.islice(reader, 24))
        written.add_partitions(6)
        written.scale((1, 0, 4, 5), (2, 4, 8, 4))
        written.commit(keys.events())
        started = time.monotonic()
        seen += itertools.islice(reader, 24)
        assert time.monotonic() - started < 10
    assert by_key(seen) == keys.expected
    assert {event.partition for event in seen[24:]} == {4, 5}


def test_what_is_carried_aside_waits_for_its_commit(
    client: anabranch.Client, written: WrittenStream, group: str
) -> None:
    keys = Keys()
    reference = written.scale(ONE)
    written.commit(keys.events())
    carried_events = [(key, key + b":0") for key in (b"c1", b"c2")]
    carried = written.carry(2, carried_events[:1], carried_events[1:])
    with (
        client.read(written.stream, timeout=LONG_S) as alone,
        client.read(written.stream, group=group, timeout=LONG_S) as member,
    ):
        for reader in (alone, member):
            assert by_key(itertools.islice(reader, 24)) == keys.expected
        written.commit(keys.events())
        for reader in (alone, member):
            assert by_key(itertools.islice(reader, 24)) == {key: [1] for key in keys.expected}
        written.roll(reference, carried)
        written.commit([(b"c1", b"c1:1"), (b"c2", b"c2:1")])
        for reader in (alone, member):
            events = list(itertools.islice(reader, 4))
            assert by_key(events) == {b"c1": [0, 1], b"c2": [0, 1]}
            assert {e.txn_id for e in events[:2]} == {carried.txn_id}
            assert [e.segment_id >> 32 for e in events] == [1, 1, 2, 2]


def test_plain_writes_have_no_transaction(client: anabranch.Client, written: WrittenStream) -> None:
    written.scale(ONE)
    record = written.commit([(b"p", b"p:0")], plain=True)
    (event,) = client.read(written.stream, timeout=QUIET_S)
    assert (event.txn_id, event.commit_timestamp) == (None, record.timestamp)
    (transaction,) = client.read_transactions(written.stream, timeout=QUIET_S)
    assert transaction.txn_id is None
    assert [event.txn_id for event in transaction.events] == [None]


def test_whole_transactions_over_epochs(client: anabranch.Client, written: WrittenStream) -> None:
    keys = Keys()
    with client.read_transactions(written.stream, timeout=LONG_S) as reader:
        reference = written.scale(ONE)
        record = written.commit(keys.events())
        assert next(reader).commit_timestamp == record.timestamp
        carried = written.carry(1, [(b"c", b"c:0")], [(b"c", b"c:1")])
        written.add_partitions(5)
        written.scale((1, 0, 4, 3), (2, 4, 8, 4))
        written.commit(keys.events())
        written.roll(reference, carried)
        written.commit(keys.events())
        found = list(itertools.islice(reader, 3))
    assert [t.commit_timestamp for t in found] == sorted(t.commit_timestamp for t in found)
    assert [len(t.events) for t in found] == [24, 2, 24]
    events = [event for transaction in found for event in transaction.events]
    assert by_key(events)[b"c"] == [0, 1]
    for event in events:
        if event.key != b"c":
            assert event.segment_id == written.where[event.value or b""]


# -- groups ---------------------------------------------------------------------------------------------


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
    (offset, record) = written.records[-1]
    with client.read(written.stream, group=group, timeout=QUIET_S, start="end") as reader:
        assert list(reader) == []
        places = [(written.topic, p) for p in range(3)] + [(history_topic(written.stream), 0)]
        vector = {position.partition: position.offset for position in record.vector}
        assert committed(broker, group, places) == [vector[0], vector[1], 0, offset]


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


# -- where to start -------------------------------------------------------------------------------------


def test_start_at_a_timestamp(client: anabranch.Client, written: WrittenStream, group: str) -> None:
    keys = Keys(8)
    before = written.timestamp
    first = written.scale(ONE)
    for i in range(10):
        written.commit(keys.events())
        written.roll(first, keys.events())
        written.scale((10 + i, 0, 4, i % 3), (30 + i, 4, 8, (i + 1) % 3))
    written.carry(2, [(b"never", b"never:0")])
    for i, (_, record) in enumerate(written.records):
        if i % 13 and i < len(written.records) - 2:
            continue
        below = {p.partition: p.offset for p in record.vector}
        # Just before the next record, and exactly at this one.
        for start in (record.timestamp, record.timestamp + 999_999):
            with client.read(written.stream, timeout=0, start=start) as reader:
                at = reader._streams[written.topic]._begun
                assert at is not None
                assert {p: at[p] for p in below} == below
    middle = written.records[30][1]
    expected = sum(isinstance(r, CommitRecord) for _, r in written.records[:31])
    numbers = {key: list(range(expected, 20)) for key in keys.expected}
    moment = to_datetime(middle.timestamp) + timedelta(microseconds=1)
    for exact in (middle.timestamp, moment):
        assert by_key(client.read(written.stream, timeout=QUIET_S, start=exact)) == numbers
    with client.read(
        written.stream, group=group, timeout=QUIET_S, start=middle.timestamp
    ) as member:
        assert by_key(member) == numbers
    transactions = list(
        client.read_transactions(written.stream, timeout=QUIET_S, start=middle.timestamp)
    )
    assert [t.commit_timestamp > middle.timestamp for t in transactions] == [True] * (20 - expected)
    assert by_key(client.read(written.stream, timeout=QUIET_S, start=before)) == keys.expected
    assert list(client.read(written.stream, timeout=QUIET_S, start="end")) == []


# -- retention ------------------------------------------------------------------------------------------


def test_what_retention_deleted_is_not_waited_for(
    either: anabranch.Client, written: WrittenStream, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "_STARTS_EVERY_S", 0.3)
    keys = Keys(8)
    written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    written.commit(keys.events())
    with either.read(written.stream, group=group, timeout=LONG_S) as reader:
        list(itertools.islice(reader, 8))
        next_events = keys.events()
        fetch = reader._feed.next
        stopped = {(written.topic, partition): 1 << 62 for partition in (0, 1)}
        monkeypatch.setattr(reader._feed, "next", lambda d, waiting: fetch(d, waiting | stopped))
        written.commit(next_events)
        written.scale((2, 0, 8, 2))
        written.commit(keys.events())
        written.log.delete_records({Partition(written.topic, p): written.vector[p] for p in (0, 1)})
        left = list(itertools.islice(reader, 8))
        assert by_key(left) == {key: [2] for key in keys.expected}
    # The same for who comes later.
    assert by_key(either.read(written.stream, timeout=QUIET_S)) == by_key(left)
