"""Reads at one instant: differences, what the histories have, positions of a scan, and how whole a copy is."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import anabranch
from anabranch.errors import InvalidArgument, NotReady, SnapshotExpired, UnknownStream
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.topics.names import history_topic, stream_topic
from tests.cluster import Cluster

pytestmark = pytest.mark.broker

LONG_S = 60.0


@pytest.fixture
def streams(client: anabranch.Client, unique: str) -> tuple[str, str]:
    """Of two scopes."""
    names = f"s{unique}/a", f"t{unique}/b"
    for name in names:
        client.create_stream(name, segments=2)
    return names


def put(client: anabranch.Client, stream: str, **values: str | None) -> anabranch.Result:
    with client.begin(stream.partition("/")[0]) as txn:
        for key, value in values.items():
            txn.write(stream, None if value is None else value.encode(), key=key.encode())
        return txn.commit()


def seen(events: Any) -> list[tuple[str, str | None]]:
    """Keys and values, sorted."""
    return sorted((e.key.decode(), None if e.value is None else e.value.decode()) for e in events)


# -- differences ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_difference_is_what_one_has_and_the_other_has_not(
    client: anabranch.Client, streams: tuple[str, str]
) -> None:
    """Also across a scaling, and over scopes; each two instants of five."""
    one, two = streams
    stamps = [client.snapshot(streams).timestamp]
    for number in range(4):
        with client.begin(one.partition("/")[0]) as txn:
            for stream in streams:
                for key in "abcdef":
                    txn.write(stream, b"%d" % number, key=key.encode())
            stamps.append(txn.commit().commit_timestamp)
        if number in (0, 2):
            client.scale(one, segments=3 if number == 0 else 1)
            stamps[-1] = client.snapshot(streams).timestamp
    whole = {
        (at, s): list(client.snapshot(streams, at=at).read(s)) for at in stamps for s in streams
    }
    for i, since in enumerate(stamps):
        for at in stamps[i:]:
            found = client.snapshot(streams, at=at, since=since)
            assert (found.timestamp, found.since) == (at, since)
            for stream in streams:
                older = set(map(_at, whole[since, stream]))
                due = [event for event in whole[at, stream] if _at(event) not in older]
                got = list(found.read(stream))
                assert sorted(map(_at, got)) == sorted(map(_at, due))
                for key in "abcdef":  # each key in commit order
                    mine = [e.value for e in got if e.key == key.encode()]
                    assert mine == sorted(mine, key=lambda v: v or b"")
    assert list(client.snapshot(two, since=client.snapshot(two).timestamp).read(two)) == []


def _at(event: anabranch.Event) -> tuple[int, int]:
    return event.partition, event.offset


def test_changes_are_the_last_event_of_each_key(
    client: anabranch.Client, streams: tuple[str, str]
) -> None:
    stream, _ = streams
    first = put(client, stream, a="1", b="1", c="1")
    put(client, stream, a="2", b="2")
    put(client, stream, a="3", c=None, d="3")
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, b"without a key")
        txn.commit()
    since = client.snapshot(stream, since=first.commit_timestamp)
    assert seen(since.changes(stream)) == [("a", "3"), ("b", "2"), ("c", None), ("d", "3")]
    again = client.snapshot(stream, at=first.commit_timestamp, since=0)
    assert seen(again.changes(stream)) == [("a", "1"), ("b", "1"), ("c", "1")]


@pytest.mark.soak
def test_a_difference_of_which_retention_took_something(
    client: anabranch.Client, unique: str, log: KafkaLog
) -> None:
    stream = f"s{unique}/one"
    client.create_stream(stream)
    before, *results = [put(client, stream, a=str(n)) for n in range(4)]
    place = TopicPartition(stream_topic(stream), 0)
    offsets = [event.offset for event in client.snapshot(stream).read(stream)]
    log.delete_records({place: offsets[1]})  # the first commit, and its marker
    stamps = [r.commit_timestamp for r in results]
    assert seen(client.snapshot(stream, since=before.commit_timestamp).read(stream)) == [
        ("a", "1"), ("a", "2"), ("a", "3")
    ]  # fmt: skip
    log.delete_records({place: offsets[1] + 1})
    with pytest.raises(SnapshotExpired, match=r"from after .* on partition 0"):
        client.snapshot(stream, since=before.commit_timestamp)
    assert seen(client.snapshot(stream, since=stamps[0]).read(stream)) == [("a", "2"), ("a", "3")]
    whole = client.snapshot(stream)
    log.delete_records({TopicPartition(history_topic(stream), 0): whole.history(stream) - 1})
    with pytest.raises(SnapshotExpired, match="history"):
        client.snapshot(stream, since=stamps[0])


# -- what the histories have -----------------------------------------------------------------------------


@pytest.mark.soak
def test_the_latest_without_a_controller(own_cluster: Cluster) -> None:
    """Of transactions over two scopes all or nothing, by a client that never asked a controller."""
    own, streams = own_cluster, ("x/a", "y/b")
    with anabranch.connect(own.bootstrap, prefix=own.prefix) as client:
        for stream in streams:
            client.create_stream(stream)
        stamps = []
        for number in range(5):
            with client.begin("x") as txn:
                for stream in streams[: 1 + number % 2]:
                    txn.write(stream, b"%d" % number, key=b"k")
                stamps.append(txn.commit().commit_timestamp)
            found = client.snapshot(streams, mode="latest")
            assert found.timestamp == stamps[-1], "all that was told before the call"
    own.controller.kill()
    with anabranch.connect(own.bootstrap, prefix=own.prefix, timeout=LONG_S) as reader:
        latest = reader.snapshot(streams, mode="latest")
        assert latest.timestamp == stamps[-1]
        assert [len(list(latest.read(stream))) for stream in streams] == [5, 2]
        then = reader.snapshot(streams, at=stamps[2], since=stamps[0], mode="latest")
        assert [len(list(then.read(stream))) for stream in streams] == [2, 1]
        with pytest.raises(NotReady, match="have commits up to"):
            reader.snapshot(streams, at=stamps[-1] + 1, mode="latest")
        with pytest.raises(UnknownStream):
            reader.snapshot("x/none", mode="latest")
        with pytest.raises(NotReady):
            reader.snapshot(streams, timeout=1.0)


# -- a scan goes on elsewhere ----------------------------------------------------------------------------


@pytest.mark.soak
def test_a_scan_continues_from_its_position_in_another_process(
    cluster: Cluster, client: anabranch.Client, streams: tuple[str, str]
) -> None:
    """After each number of events, over a scaling: none comes twice, none is missing, each key in order."""
    one, two = streams
    for number in range(6):
        put(client, one, **dict.fromkeys("abcdefgh", str(number)))
        put(client, two, z=str(number))
        if number == 2:
            client.scale(one, segments=3)
    snapshot = client.snapshot(streams)
    put(client, one, a="later")
    text = snapshot.position()
    whole = [_at(event) for event in snapshot.read(one)]
    with anabranch.connect(cluster.bootstrap) as other:
        for count in range(0, 49, 4):
            with snapshot.read(one) as reader:
                begun = list(islice(reader, count))
                text = snapshot.position()
            assert len(text) < 400
            rest = other.open_snapshot(text)
            assert (rest.timestamp, rest.streams) == (snapshot.timestamp, streams)
            events = begun + list(rest.read(one))
            assert sorted(map(_at, events)) == sorted(whole)
            for key in "abcdefgh":
                assert [e.value for e in events if e.key == key.encode()] == [
                    b"%d" % n for n in range(6)
                ]
            assert seen(rest.read(two)) == [("z", str(n)) for n in range(6)]
            assert list(other.open_snapshot(rest.position()).read(one)) == []
        for damage in (
            text[:-5],
            "[" * 100_000,
            text.replace("1", "2", 1),
            text.replace("[2,", "[1,", 1),
            "[]",
            "7",
            "",
            text.replace(one, two),
        ):
            with pytest.raises(InvalidArgument, match="is no position"):
                other.open_snapshot(damage)


# -- copies ----------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_how_whole_a_copy_is(client: anabranch.Client, streams: tuple[str, str]) -> None:
    one, two = streams
    group = f"copy-{one}"
    with pytest.raises(InvalidArgument, match="no offset"):
        client.progress(streams, group)
    results = [put(client, streams[n % 2], **dict.fromkeys("abcd", str(n))) for n in range(6)]
    stamps = [result.commit_timestamp for result in results]
    with client.read(streams, group=group, timeout=1.0) as reader:
        copied: list[anabranch.Event] = []
        last = 0
        for event in islice(reader, 24):
            copied.append(event)
            reader.commit()  # all but this one
            at = client.progress(streams, group)
            done = {_where(e) for e in copied[:-1]}
            short = [
                stamp
                for stamp, result in zip(stamps, results, strict=True)
                if sum(e.txn_id == result.txn_id for e in copied[:-1]) < 4
            ]
            assert at == min(short) - 1, "the highest"
            for stream in streams:
                assert {_where(e) for e in client.snapshot(streams, at=at).read(stream)} <= done
            assert at >= last
            last = at
        assert next(reader, None) is None
    now = client.snapshot(streams).timestamp
    assert now < client.progress(streams, group)
    put(client, two, a="more")
    assert stamps[-1] < client.progress(streams, group) < client.snapshot(two).timestamp
    with pytest.raises(InvalidArgument, match="name"):
        client.progress(streams, "")


def _where(event: anabranch.Event) -> tuple[str, int, int]:
    return event.stream, event.partition, event.offset
