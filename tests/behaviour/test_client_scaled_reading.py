"""Reading streams that are scaled and rolled by a real controller: every reader, every key in commit order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
from confluent_kafka import Consumer

import anabranch
from anabranch.protocol.hybrid_time import to_datetime
from anabranch.topics.names import stream_topic
from tests.client.members import LONG_S, Members, by_key
from tests.client.written import Keys
from tests.cluster import Cluster

pytestmark = pytest.mark.broker

QUIET_S = 1.0


def commit(client: anabranch.Client, stream: str, keys: Keys) -> anabranch.Result:
    """One transaction: an event of every key."""
    with client.begin(stream.partition("/")[0]) as txn:
        for key, value in keys.events():
            txn.write(stream, value, key=key)
        return txn.commit()


@dataclass(frozen=True)
class Scenario:
    """A stream that was scaled up and down, with transactions that had begun before."""

    stream: str
    keys: Keys
    rolled: Keys
    results: list[anabranch.Result]


@pytest.fixture(scope="module")
def scenario(client: anabranch.Client) -> Scenario:
    scope = "scaledreading"
    stream = f"{scope}/events"
    client.create_stream(stream, segments=2)
    keys, rolled = Keys(), Keys()
    rolled._next = {b"r" + key: 0 for key in rolled._next}
    results = []
    for segments in (5, 1, 3):
        old = client.begin(scope)
        old.token()
        results.append(commit(client, stream, keys))
        old.write_many(stream, [(value, key) for key, value in rolled.events(2)])
        old.flush()
        client.scale(stream, segments=segments)
        results.append(commit(client, stream, keys))
        results.append(old.commit())
        results += [commit(client, stream, keys) for _ in range(2)]
    return Scenario(stream, keys, rolled, results)


def check(scenario: Scenario, events: Iterable[anabranch.Event], from_result: int = 0) -> None:
    """All events of the results from this one on, each key in the order it was written and committed."""
    found = list(events)
    stamps = {result.txn_id: result.commit_timestamp for result in scenario.results[from_result:]}
    last: dict[bytes | None, int] = {}
    for event in found:
        assert event.commit_timestamp == stamps[event.txn_id or b""]
        assert event.commit_timestamp >= last.get(event.key, 0)
        last[event.key] = event.commit_timestamp
    expected = scenario.keys.expected | scenario.rolled.expected
    if from_result == 0:
        assert by_key(found) == expected
    else:
        counts = [result.counts.committed for result in scenario.results[from_result:]]
        assert len(found) == sum(counts)
        for key, numbers in by_key(found).items():
            assert numbers == expected[key][-len(numbers) :]


@pytest.mark.long
def test_alone_and_in_a_group(client: anabranch.Client, scenario: Scenario, group: str) -> None:
    check(scenario, client.read(scenario.stream, timeout=QUIET_S))
    with client.read(scenario.stream, group=group, timeout=LONG_S) as reader:
        first = list(itertools.islice(reader, 150))
        next(reader)
    rest = client.read(scenario.stream, group=group, timeout=QUIET_S)
    check(scenario, [*first, *rest])


def test_segments_of_events_are_those_of_their_epochs(
    client: anabranch.Client, scenario: Scenario
) -> None:
    events = list(client.read(scenario.stream, timeout=QUIET_S))
    assert len({event.segment_id >> 32 for event in events}) >= 7
    active = {segment.segment_id for segment in client.describe(scenario.stream).segments}
    newest = scenario.results[-1].txn_id
    assert {event.segment_id for event in events if event.txn_id == newest} == active


def test_whole_transactions(client: anabranch.Client, scenario: Scenario) -> None:
    found = list(client.read_transactions(scenario.stream, timeout=QUIET_S))
    assert [t.txn_id for t in found] == [result.txn_id for result in scenario.results]
    assert [len(t.events) for t in found] == [r.counts.committed for r in scenario.results]
    check(scenario, [event for transaction in found for event in transaction.events])


@pytest.mark.parametrize(
    "number", [3, *(pytest.param(number, marks=pytest.mark.soak) for number in (0, 7))]
)
def test_start_at_a_result(
    client: anabranch.Client, scenario: Scenario, group: str, number: int
) -> None:
    at = scenario.results[number].commit_timestamp
    for chosen in (None, group):
        events = client.read(scenario.stream, group=chosen, timeout=QUIET_S, start=at)
        check(scenario, events, number + 1)
    moment = to_datetime(at) + timedelta(microseconds=1)
    found = client.read_transactions(scenario.stream, timeout=QUIET_S, start=moment)
    assert [t.txn_id for t in found] == [r.txn_id for r in scenario.results[number + 1 :]]


def test_a_plain_consumer_gets_everything(
    cluster: Cluster, scenario: Scenario, unique: str
) -> None:
    plain = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": f"p{unique}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    wanted = sum(result.counts.committed for result in scenario.results)
    seen: list[bytes | None] = []
    try:
        plain.subscribe([stream_topic(scenario.stream)])
        while len(seen) < wanted:
            message = plain.poll(LONG_S)
            assert message is not None
            assert message.error() is None
            seen.append(message.value())
        assert plain.poll(0.5) is None
    finally:
        plain.close()
    assert len(seen) == wanted


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    found = threading.Event()
    yield found
    found.set()


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 3])
def test_members_while_it_is_scaled(
    cluster: Cluster,
    client: anabranch.Client,
    unique: str,
    stopping: threading.Event,
    count: int,
) -> None:
    stream = f"s{unique}/live"
    client.create_stream(stream, segments=3)
    keys = Keys()
    members = Members(cluster.bootstrap, stream, f"g{unique}")
    results = []

    def write() -> None:
        while not stopping.is_set():
            results.append(commit(client, stream, keys))
            stopping.wait(0.02)

    def got_on() -> None:
        """Wait until all members read events written from now on."""
        done = len(members.seen)
        members.wait_for(lambda: len(members.seen) > done + 100)

    with ThreadPoolExecutor(1) as pool:
        try:
            for _ in range(count):
                members.join()
            writing = pool.submit(write)
            members.wait_for(lambda: members.reading == set(range(count)))
            old = client.begin(f"s{unique}")
            old.token()
            old.write_many(stream, [(b"old:%d" % i, b"old") for i in range(50)])
            old.flush()
            client.scale(stream, segments=6)
            got_on()
            members.join()  # in mid-epoch
            old.commit()
            client.scale(stream, segments=2)
            got_on()
            members.leave(0)
            client.scale(stream, segments=4)
            got_on()
            stopping.set()
            writing.result(LONG_S)
            expected = keys.expected | {b"old": list(range(50))}
            members.wait_for(lambda: members.by_key() == expected)
        finally:
            stopping.set()
            members.close()
    stamps = {result.txn_id: result.commit_timestamp for result in results}
    for event in members.events:
        if event.key != b"old":
            assert event.commit_timestamp == stamps[event.txn_id or b""]
