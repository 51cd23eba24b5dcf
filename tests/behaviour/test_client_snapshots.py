"""Snapshots on a real cluster: whole, repeatable, a prefix of the commit order, whatever happens meanwhile."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import anabranch
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotReady,
    SnapshotExpired,
    UnknownScope,
    UnknownStream,
)
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import MAX, from_us, to_datetime
from anabranch.topics.names import history_topic, stream_topic
from tests.client.members import by_key
from tests.client.written import Keys
from tests.cluster import Cluster
from tests.contract.helpers import wait_stable

pytestmark = pytest.mark.broker
OVER_ASYNCIO = pytest.mark.long

LONG_S = 60.0


@pytest.fixture
def streams(client: anabranch.Client, scope: str) -> tuple[str, str]:
    names = f"{scope}/a", f"{scope}/b"
    for name in names:
        client.create_stream(name, segments=2)
    return names


@pytest.fixture
def one(client: anabranch.Client, scope: str) -> str:
    """A stream of one segment."""
    client.create_stream(f"{scope}/one")
    return f"{scope}/one"


def commit(client: anabranch.Client, *streams: str, value: bytes = b"v") -> anabranch.Result:
    """One transaction with an event in each stream."""
    with client.begin(streams[0].partition("/")[0]) as txn:
        for stream in streams:
            txn.write(stream, value, key=value)
        return txn.commit()


def commit_many(client: anabranch.Client, stream: str, count: int) -> list[anabranch.Result]:
    return [commit(client, stream, value=b"%d" % i) for i in range(count)]


def values(snapshot: anabranch.Snapshot, stream: str) -> list[bytes]:
    return sorted(event.value or b"" for event in snapshot.read(stream))


# -- at a time ------------------------------------------------------------------------------------------


def test_it_has_what_was_committed_until_then(
    client: anabranch.Client, streams: tuple[str, str]
) -> None:
    results = [commit(client, *streams, value=b"%d" % i) for i in range(4)]
    for i in (0, 2):
        snapshot = client.snapshot(streams, at=results[i].commit_timestamp)
        assert (snapshot.timestamp, snapshot.streams) == (results[i].commit_timestamp, streams)
        for stream in streams:
            assert values(snapshot, stream) == [b"%d" % n for n in range(i + 1)]
    before = client.snapshot(streams, at=results[0].commit_timestamp - 1)
    assert [values(before, stream) for stream in streams] == [[], []]
    moment = to_datetime(results[1].commit_timestamp) + timedelta(microseconds=1)
    of_one = client.snapshot(streams[0], at=moment)
    assert len(values(of_one, streams[0])) == 2
    # What a reader that starts there gets are the others.
    with client.read(streams[0], start=of_one.timestamp, timeout=LONG_S) as rest:
        assert {next(rest).value, next(rest).value} == {b"2", b"3"}


def test_now_is_after_all_that_anybody_committed(
    client: anabranch.Client, other: anabranch.Client, streams: tuple[str, str]
) -> None:
    done = commit(other, *streams, value=b"by another client")
    snapshot = client.snapshot(streams)
    idle = client.snapshot(streams)
    assert done.commit_timestamp <= snapshot.timestamp < idle.timestamp, (
        "time passes in an idle scope"
    )
    assert snapshot.plan().cuts == idle.plan().cuts
    later = commit(other, *streams, value=b"later")
    assert idle.timestamp < later.commit_timestamp
    for stream in streams:
        assert values(snapshot, stream) == [b"by another client"]
        assert values(snapshot, stream) == [b"by another client"], "the same at each reading"


def test_a_time_to_come_is_waited_for(client: anabranch.Client, one: str) -> None:
    at = from_us(time.time_ns() // 1000 + 1_000_000)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.snapshot, one, at=at, timeout=LONG_S)
        result = commit(client, one, value=b"meanwhile")
        snapshot = asked.result(LONG_S)
    assert from_us(time.time_ns() // 1000) >= at == snapshot.timestamp
    assert (values(snapshot, one) == [b"meanwhile"]) == (result.commit_timestamp <= at)


def test_a_stream_that_was_not_there_yet_is_empty(client: anabranch.Client, scope: str) -> None:
    client.create_stream(f"{scope}/old")
    at = client.snapshot(f"{scope}/old").timestamp
    client.create_stream(f"{scope}/new")
    commit(client, f"{scope}/new")
    snapshot = client.snapshot([f"{scope}/old", f"{scope}/new"], at=at)
    assert (snapshot.offsets(f"{scope}/new"), values(snapshot, f"{scope}/new")) == ({}, [])
    assert (snapshot.offsets(f"{scope}/old"), snapshot.history(f"{scope}/old")) == ({0: 0}, 1)


TOMORROW = datetime.now(UTC) + timedelta(days=1)
# Streams, where {} is the scope; what else is given; the error, and words of its message.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("", {}, InvalidArgument, "at least one stream"),
    ("nameless", {}, InvalidArgument, "nameless"),
    ("{}/one none{}/one", {}, UnknownScope, "none"),
    ("none{}/one", {}, UnknownScope, "none"),
    ("{}/one", {"at": -1}, InvalidArgument, "at -1"),
    ("{}/one", {"at": True}, InvalidArgument, "at True"),
    ("{}/one", {"at": "now"}, InvalidArgument, "at 'now'"),
    ("{}/one", {"at": datetime(2026, 1, 1)}, InvalidArgument, "time zone"),  # noqa: DTZ001
    ("{}/one", {"at": 1_795_000_000_000_000_000}, InvalidArgument, "give a datetime"),
    ("{}/one", {"at": TOMORROW, "timeout": 2.0}, NotReady, "is not reached yet"),
    ("{}/one", {"at": TOMORROW}, NotReady, "not reached yet.*ask later"),
    ("{}/one", {"at": MAX}, NotReady, "not reached yet"),
    ("{}/one", {"at": 5 << 60, "since": 6 << 60}, InvalidArgument, "later than"),
    ("{}/one", {"since": TOMORROW}, InvalidArgument, "later than"),
    ("{}/one", {"since": datetime(2026, 1, 1)}, InvalidArgument, "time zone"),  # noqa: DTZ001
    ("{}/one", {"since": "then"}, InvalidArgument, "since 'then'"),
    ("{}/one", {"since": True}, InvalidArgument, "since True"),
    ("{}/one", {"mode": "newest"}, InvalidArgument, "mode 'newest'"),
    ("{}/one", {"mode": "latest", "since": MAX}, InvalidArgument, "later than"),
    ("{}/one", {"mode": "latest", "at": MAX}, NotReady, "have commits up to"),
]


def test_what_is_refused(
    client: anabranch.Client, scope: str, one: str, subtests: pytest.Subtests
) -> None:
    """At once, with all the client's time left."""
    for streams, given, error, text in REFUSED:
        with subtests.test(f"{streams} {given}"):
            began = time.monotonic()
            with pytest.raises(error, match=text):
                client.snapshot([name.format(scope) for name in streams.split()], **given)
            assert time.monotonic() - began < 10
    assert client.snapshot(one, since=datetime.now(UTC) - timedelta(hours=1)).since is not None


@pytest.mark.unsecured
@pytest.mark.usefixtures("one")
def test_an_unknown_stream_is_refused(client: anabranch.Client, scope: str) -> None:
    with pytest.raises(UnknownStream, match="two"):
        client.snapshot(f"{scope}/two")


# -- as data --------------------------------------------------------------------------------------------


def test_a_plan_is_read_elsewhere(
    cluster: Cluster, client: anabranch.Client, streams: tuple[str, str]
) -> None:
    commit(client, *streams, value=b"in")
    snapshot = client.snapshot(streams)
    data = pickle.dumps(snapshot.plan())
    commit(client, *streams, value=b"out")
    with pytest.raises(TypeError, match="open_snapshot"):
        pickle.dumps(snapshot)
    with anabranch.connect(cluster.bootstrap) as other:
        opened = other.open_snapshot(pickle.loads(data))
        left = opened.read(streams[0])
        assert opened.plan() == snapshot.plan()
        assert [values(opened, stream) for stream in streams] == [[b"in"], [b"in"]]
        with pytest.raises(InvalidArgument, match="not in this snapshot"):
            opened.offsets("other/stream")
        with pytest.raises(InvalidArgument, match="open_snapshot takes"):
            other.open_snapshot(data)  # type: ignore[arg-type]
    assert list(left) == [], "its client has closed it"
    with pytest.raises(IllegalState):
        opened.read(streams[0])


def test_a_reader_continues_until_it_is_closed(client: anabranch.Client, one: str) -> None:
    commit_many(client, one, 5)
    snapshot = client.snapshot(one)
    with snapshot.read(one) as reader:
        first = [next(reader), next(reader)]
        assert [e.value for e in [*first, *reader]] == [b"%d" % i for i in range(5)]
        assert list(reader) == []
    with snapshot.read(one) as closed:
        next(closed)
    assert list(closed) == []


# -- while much happens ---------------------------------------------------------------------------------


@pytest.mark.soak
def test_while_transactions_commit_streams_scale_and_a_controller_dies(
    own_cluster: Cluster, scope: str
) -> None:
    own, streams = own_cluster, (f"{scope}/a", f"{scope}/b")
    keys = Keys(6)
    stopping = threading.Event()
    results: list[anabranch.Result] = []
    taken: list[tuple[anabranch.SnapshotPlan, dict[str, list[anabranch.Event]]]] = []
    between: list[tuple[str, dict[str, list[anabranch.Event]]]] = []

    def write() -> None:
        """Events of every key, the same ones in both streams; now and then over the journals."""
        with anabranch.connect(own.bootstrap, prefix=own.prefix, timeout=LONG_S) as writer:
            while not stopping.is_set():
                with writer.begin(scope) as txn:
                    if len(results) % 10 == 0:
                        txn.token()
                    for key, value in keys.events():
                        for stream in streams:
                            txn.write(stream, value, key=key)
                    results.append(txn.commit())
                stopping.wait(0.01)

    def take() -> None:
        snapshot = client.snapshot(streams)
        if taken:
            since = client.snapshot(streams, at=snapshot.timestamp, since=taken[-1][0].timestamp)
            between.append((since.position(), {s: list(since.read(s)) for s in streams}))
        taken.append((snapshot.plan(), {s: list(snapshot.read(s)) for s in streams}))

    with (
        anabranch.connect(own.bootstrap, prefix=own.prefix, timeout=LONG_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for stream in streams:
            client.create_stream(stream, segments=2)
        old = client.begin(scope)
        old.token()
        for stream in streams:
            old.write(stream, b"old:0", key=b"old")
        old.flush()
        writing = pool.submit(write)
        try:
            take()
            client.scale(streams[0], segments=5)
            take()
            rolled = old.commit()
            at = rolled.commit_timestamp
            for snapshot in (client.snapshot(streams, at=at), client.snapshot(streams)):
                for stream in streams:
                    (found,) = [e for e in snapshot.read(stream) if e.key == b"old"]
                    assert found.commit_timestamp == at
            client.scale(streams[0], segments=1)
            take()
            own.controller.kill()
            own.controller.start()
            take()  # waits for the successor
            take()
            stopping.set()
            writing.result(LONG_S)
        finally:
            stopping.set()
        results.append(rolled)
        given: list[tuple[Any, dict[str, list[anabranch.Event]]]] = [*taken, *between]
        for plan, seen in given:
            again = client.open_snapshot(plan)
            for stream, events in seen.items():
                assert by_key(again.read(stream)) == by_key(events), "again the same"
    before = 0
    for plan, seen in taken:
        assert plan.timestamp > before
        before = plan.timestamp
        due = {r.txn_id for r in results if r.commit_timestamp <= plan.timestamp}
        for events in seen.values():
            assert {event.txn_id for event in events} == due, "all until then, nothing later"
            for numbers in by_key(events).values():
                assert numbers == list(range(len(numbers))), "each key from its beginning, in order"
    for stream in streams:  # what came between makes the last one of the first
        pieced = [e for _, seen in (taken[0], *between) for e in seen[stream]]
        assert by_key(pieced) == by_key(taken[-1][1][stream])
    assert len(taken[-1][1][streams[0]]) > len(taken[0][1][streams[0]])


# -- retention ------------------------------------------------------------------------------------------


def test_what_retention_has_left(client: anabranch.Client, one: str, log: KafkaLog) -> None:
    place = TopicPartition(stream_topic(one), 0)
    results = commit_many(client, one, 5)
    whole = client.snapshot(one)
    (third,) = [e for e in whole.read(one) if e.value == b"2"]
    log.delete_records({place: third.offset})
    later = client.snapshot(one)
    assert (whole.start_offsets(one), later.start_offsets(one)) == ({0: 0}, {0: third.offset})
    assert later.offsets(one) == whole.offsets(one)
    assert values(later, one) == [b"2", b"3", b"4"]
    with pytest.raises(SnapshotExpired, match="deleted events"):
        list(whole.read(one))
    with pytest.raises(SnapshotExpired, match="deleted all that"):
        client.snapshot(one, at=results[0].commit_timestamp)
    at_third = client.snapshot(one, at=results[2].commit_timestamp)
    assert values(at_third, one) == [b"2"]


@pytest.mark.parametrize("marker", [False, True], ids=["its events", "its last marker too"])
def test_all_of_it_is_gone(client: anabranch.Client, one: str, log: KafkaLog, marker: bool) -> None:
    """Retention may have emptied a stream of old: that is no error, until something came after."""
    place = TopicPartition(stream_topic(one), 0)
    commit_many(client, one, 2)
    old = client.snapshot(one)
    end = old.offsets(one)[0] + marker
    wait_stable(log, {place})  # a commit is answered before its markers are written
    log.delete_records({place: end})
    empty = client.snapshot(one)
    assert (values(empty, one), empty.start_offsets(one)) == ([], empty.offsets(one))
    commit(client, one, value=b"new")
    assert values(client.snapshot(one), one) == [b"new"]
    assert values(empty, one) == [], "what was planned is the same"
    with pytest.raises(SnapshotExpired):
        list(old.read(one))
    with pytest.raises(SnapshotExpired, match="on partition 0"):
        client.snapshot(one, at=old.timestamp)


def test_the_history_is_cut(client: anabranch.Client, one: str, log: KafkaLog) -> None:
    results = commit_many(client, one, 3)
    snapshot = client.snapshot(one, at=results[1].commit_timestamp)
    log.delete_records({TopicPartition(history_topic(one), 0): snapshot.history(one)})
    with pytest.raises(SnapshotExpired, match="history"):
        list(snapshot.read(one))
    with pytest.raises(SnapshotExpired, match="history"):
        client.snapshot(one, at=results[1].commit_timestamp)
    assert values(client.snapshot(one), one) == [b"0", b"1", b"2"]
