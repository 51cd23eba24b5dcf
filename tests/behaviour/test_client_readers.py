"""Readers of events and of whole transactions, on a real broker with a real controller."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import anabranch
from anabranch import errors
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.commit_feed import IN_HAND
from tests.aio.driven import blocking
from tests.behaviour.steps import commit
from tests.cluster import Cluster

pytestmark = pytest.mark.broker
OVER_ASYNCIO = pytest.mark.long

QUIET_S = 0.6


@pytest.fixture
def stream(client: anabranch.Client, scope: str) -> str:
    name = f"{scope}/events"
    client.create_stream(name, segments=3)
    return name


def commit_many(
    client: anabranch.Client, stream: str, count: int, start: int = 0
) -> list[anabranch.Result]:
    """Transactions of two events each: b"<i>a" and b"<i>b"."""
    numbers = range(start, start + count)
    return [commit(client, stream, b"%da" % i, b"%db" % i) for i in numbers]


def test_events_come_in_commit_order_and_name_their_transactions(
    client: anabranch.Client, stream: str
) -> None:
    results = commit_many(client, stream, 30)
    started = time.monotonic()
    events = list(client.read(stream, timeout=2.0))
    assert 1.9 < time.monotonic() - started < 15, "the timeout ends the iteration"
    assert len(events) == 60
    stamps = {result.txn_id: result.commit_timestamp for result in results}
    last: dict[int, int] = {}
    for event in events:
        assert event.txn_id is not None
        assert event.commit_timestamp == stamps[event.txn_id]
        assert event.headers == []
        assert event.segment_id == event.partition
        assert event.commit_timestamp >= last.get(event.partition, 0)
        last[event.partition] = event.commit_timestamp
    by_value = {event.value: event for event in events}
    for i, result in enumerate(results):
        assert by_value[b"%da" % i].txn_id == by_value[b"%db" % i].txn_id == result.txn_id
    assert len(list(client.read(stream, timeout=0))) in (0, 60)


def test_a_group_continues_where_it_stopped(
    client: anabranch.Client, stream: str, group: str
) -> None:
    commit_many(client, stream, 20)
    with client.read(stream, group=group, timeout=10) as reader:
        first = list(itertools.islice(reader, 12))
        first += [next(reader), *itertools.islice(reader, 2)]  # taken again, it continues
    second = [event.value for event in client.read(stream, group=group, timeout=QUIET_S)]
    # The last event given out was never asked beyond: it comes again. The others don't.
    assert second.count(first[-1].value) == 1
    assert not {event.value for event in first[:-1]} & set(second)
    assert len({event.value for event in first} | set(second)) == 40
    assert list(client.read(stream, group=group, timeout=QUIET_S)) == []
    late = commit(client, stream, b"late")
    (event,) = client.read(stream, group=group, timeout=QUIET_S)
    assert (event.value, event.txn_id) == (b"late", late.txn_id)


@pytest.mark.soak
def test_from_the_end_only_what_comes(client: anabranch.Client, stream: str) -> None:
    commit(client, stream, b"before")
    with client.read(stream, timeout=5, start="end") as reader, ThreadPoolExecutor(1) as pool:
        result = commit(client, stream, b"after")
        event = pool.submit(next, reader).result(20)
    assert (event.value, event.commit_timestamp) == (b"after", result.commit_timestamp)


def test_arguments_that_no_reader_takes(client: anabranch.Client, stream: str) -> None:
    wrong: list[dict[str, Any]] = [
        {"start": "middle"},
        {"start": 1_795_000_000},  # a Unix time
        {"group": ""},
        {"timeout": -1},
    ]
    for arguments in wrong:
        for read in (client.read, client.read_transactions):
            with pytest.raises(errors.InvalidArgument):
                read(stream, **arguments)
    for streams in (list[str](), "nostream"):
        with pytest.raises(errors.InvalidArgument):
            client.read(streams)
    with pytest.raises(errors.InvalidArgument, match="str, not list"):
        client.read_transactions([stream])  # type: ignore[call-overload]


@pytest.mark.soak
def test_a_closed_client_ends_its_readers(
    cluster: Cluster, stream: str, client: anabranch.Client
) -> None:
    commit(client, stream, b"v")
    other = anabranch.connect(cluster.bootstrap)
    reader = other.read(stream)
    next(reader)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(reader))
        time.sleep(0.5)
        other.close()
        assert waiting.result(20) == []
    with pytest.raises(errors.IllegalState):
        other.read(stream)


# -- whole transactions ---------------------------------------------------------------------------------


def test_transactions_come_whole_and_in_order(client: anabranch.Client, stream: str) -> None:
    results = commit_many(client, stream, 15)
    with client.begin(stream.partition("/")[0]) as left:
        left.token()
        left.write(stream, b"aborted", key=b"k")
    results += commit_many(client, stream, 15, start=15)
    found = list(client.read_transactions(stream, timeout=QUIET_S))
    assert [t.txn_id for t in found] == [result.txn_id for result in results]
    assert [t.commit_timestamp for t in found] == [result.commit_timestamp for result in results]
    for i, transaction in enumerate(found):
        assert transaction.stream == stream
        assert len(transaction.events) == 2
        assert {event.value for event in transaction.events} == {b"%da" % i, b"%db" % i}
        assert list(transaction.events) == list(transaction.events)


def test_a_group_repeats_only_the_transaction_in_hand(
    client: anabranch.Client, stream: str, group: str
) -> None:
    results = commit_many(client, stream, 10)
    with client.read_transactions(stream, group=group, timeout=10) as reader:
        first = list(itertools.islice(reader, 4))
    second = list(client.read_transactions(stream, group=group, timeout=3 * QUIET_S))
    assert [t.txn_id for t in first] == [r.txn_id for r in results[:4]]
    assert [t.txn_id for t in second] == [r.txn_id for r in results[3:]]
    assert list(client.read_transactions(stream, group=group, timeout=QUIET_S)) == []
    late = commit(client, stream, b"late")
    (transaction,) = client.read_transactions(stream, group=group, timeout=QUIET_S)
    assert transaction.txn_id == late.txn_id


def test_a_group_has_one_active_member(
    client: anabranch.Client, other: anabranch.Client, stream: str, group: str
) -> None:
    commit_many(client, stream, 5)

    def read(by: anabranch.Client) -> int:
        with by.read_transactions(stream, group=group, timeout=3) as reader:
            return len(list(reader))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(read, (client, other))) == [0, 5]


@pytest.mark.soak
def test_a_transaction_too_big_to_hold(client: anabranch.Client, stream: str, group: str) -> None:
    n = 3 * IN_HAND
    small = commit(client, stream, b"before")
    with client.begin(stream.partition("/")[0]) as txn:
        for i in range(n):
            # Lopsided: most of it lies in one segment.
            txn.write(stream, b"%d" % i, key=b"k%d" % (i if i % 10 == 0 else 0))
        big = txn.commit()
    last = commit(client, stream, b"after")
    with client.read_transactions(stream, group=group, timeout=QUIET_S) as reader:
        assert next(reader).txn_id == small.txn_id
        transaction = next(reader)
        assert transaction.txn_id == big.txn_id
        assert len(transaction.events) == n
        assert len(list(itertools.islice(transaction.events, 100))) == 100
        values = {int(event.value or b"") for event in transaction.events}
        assert values == set(range(n))
        assert next(reader).txn_id == last.txn_id
        # Going back is possible too.
        assert sum(1 for _ in transaction.events) == n


@pytest.mark.soak
def test_a_transaction_that_missed_its_deadline_is_given_by_the_next_call(
    client: anabranch.Client, stream: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = commit_many(client, stream, 4)
    with client.read_transactions(stream, group=group, timeout=QUIET_S) as reader:
        parts, calls = blocking(reader)._feed.parts, itertools.count()
        events = parts.events

        def late(record: CommitRecord) -> object:
            if next(calls) in (1, 3):
                raise errors.DeadlineExceeded("too late")
            return events(record)

        monkeypatch.setattr(parts, "events", late)
        given = [next(reader).txn_id]
        with pytest.raises(errors.DeadlineExceeded):
            next(reader)
        given.append(next(reader).txn_id)
        with pytest.raises(errors.DeadlineExceeded):
            list(reader)
        given += [transaction.txn_id for transaction in reader]
    assert given == [result.txn_id for result in results]
