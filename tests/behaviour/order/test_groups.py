"""Groups that read streams which scale, roll and carry."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.errors import NotReady
from tests.client.members import LONG_S, Members, by_key
from tests.client.written import ONE, Keys, WrittenStream
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
