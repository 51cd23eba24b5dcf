"""Readers at edges: deletion ends at an event or its marker, a history is cut, a segment is closed."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock
from zlib import crc32

import pytest

from anabranch.client.client import Client
from anabranch.controller.cleanup import Histories
from anabranch.errors import NotReady, SnapshotExpired, UnknownStream
from anabranch.ports import LogUnavailable, TopicPartition
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas.records import CreateProcessor
from anabranch.reading.committed_log import CommittedLog, ReaderPorts, StreamIds, partitions_of
from anabranch.reading.group_lag import groups_of, lags_behind
from anabranch.reading.history import HistorySearch
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.positions import first_inputs
from anabranch.reading.ranges import RangeReader
from anabranch.reading.snapshot import Snapshot, SnapshotReader, take
from anabranch.reading.task_reader import TaskReader
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.partition import Partition
from anabranch.topics.names import history_topic, stream_topic
from tests.client.doubles import NEVER_ASKED
from tests.client.world import World
from tests.reading.test_ordered_reader import Member
from tests.tables.worlds import operator, reader_ports

A, B = "nyc/a", "nyc/b"
HIGH = next(k for k in map(str.encode, map(str, range(99))) if position_of(k) >= SPACE // 2)


class Taken(NamedTuple):
    """A stream of three commits, of which positions are taken."""

    world: World
    client: Client
    first: int  # commit timestamp
    snapshot: Snapshot


def ports_of(world: World, member: Member | None = None) -> Any:
    return ReaderPorts(lambda _: world.cluster.log("reader"), lambda _: member, world.clock)  # type: ignore[arg-type, return-value]


def started(world: World, streams: list[str], start: str) -> TaskReader:
    """The reader of a new processor, or of the one that is there."""
    client, deadline = world.client, world.clock.monotonic() + 10
    with closing(ports_of(world).committed_log(30.0)) as source:
        inputs = first_inputs(source, streams, start, 30.0, deadline)
    make = CreateProcessor("nyc/p", 1, inputs)
    client._processors.ask("nyc/p", make, world.clock.monotonic() + 10)
    return TaskReader(ports_of(world), streams, client.take_tasks("nyc/p"), None, 30.0, NEVER_ASKED)


def write(world: World, number: int, *streams: str, key: bytes = b"key") -> int:
    """Its commit timestamp."""
    with world.client.begin("nyc") as txn:
        for stream in streams:
            txn.write(stream, b"%d" % number, key=key)
        return txn.commit().commit_timestamp


def delete_all(world: World, *partitions: int) -> None:
    """Delete what partitions of A have by now."""
    log = world.cluster.log("r")
    places = [TopicPartition(stream_topic(A), p) for p in partitions]
    log.delete_records(log.end_offsets(places, committed=True))


def cuts(world: World, reader: TaskReader) -> list[tuple[str, bytes | None]]:
    pieces = [p for _ in range(4) for p in reader.cut(world.clock.monotonic() + 1, 1 << 20)]
    return [(event.stream, event.value) for piece in pieces for event in piece.events]


@pytest.mark.parametrize("taken", [0, 1, 2, 4])
def test_a_processor_begins_with_whole_transactions(taken: int) -> None:
    """Retention has taken some events of a. Transactions 1 and 2 are of both streams, 3 and 5 are of b alone."""
    world, (a, b) = World(), ("nyc/a", "nyc/b")
    for stream in (a, b):
        world.client.create_stream(stream)
    parts = {0: (b,), 1: (a, b), 2: (a, b), 3: (b,), 4: (a,), 5: (b,)}
    places = {}
    for number, streams in parts.items():
        write(world, number, *streams)
        place = TopicPartition(stream_topic(a), 0)
        places[number] = world.cluster.log("r").end_offsets([place], committed=True)
    if taken:
        world.cluster.log("r").delete_records(places[taken])
    left = {0: 0, 1: 2, 2: 3, 4: 3}[taken]  # no transaction is half, and nothing else is left out
    found = [(s, b"%d" % n) for n, streams in parts.items() if n >= left for s in streams]
    with started(world, [a, b], "begin") as reader:
        assert cuts(world, reader) == [one for one in found if one != (a, b"4") or taken != 4]


def test_a_processor_begins_at_one_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction commits in both streams when the end of the first one was looked for."""
    world, streams = World(), ["nyc/a", "nyc/b"]
    for stream in streams:
        world.client.create_stream(stream)
    write(world, 0, *streams)
    as_of, looked = HistorySearch.as_of, []

    def late(self: HistorySearch, start: str | int) -> Any:
        found = as_of(self, start)
        looked.append(found)
        if len(looked) == 1:
            write(world, 1, *streams)
        return found

    monkeypatch.setattr(HistorySearch, "as_of", late)
    with started(world, streams, "end") as reader:
        write(world, 2, *streams)
        values = [value for _, value in cuts(world, reader)]
    assert values in ([b"1", b"1", b"2", b"2"], [b"2", b"2"])


def test_a_history_that_is_cut_at_idle_epochs_loses_nothing() -> None:
    """Nothing was committed between two scalings: the processor has consumed all that was cut."""
    world, stream = World(), "nyc/a"
    world.client.create_stream(stream)
    write(world, 0, stream)
    with started(world, [stream], "end") as reader:
        for segments in (2, 1):
            world.client.scale(stream, segments=segments)
        log = world.cluster.log("r")
        places = [TopicPartition(stream_topic(stream), p) for p in range(2)]
        log.delete_records(log.end_offsets(places, committed=True))
        spare = Histories(log).spare({stream: 2})[stream]
        assert spare > 0
        log.delete_records({TopicPartition(history_topic(stream), 0): spare})
        write(world, 1, stream)
        assert cuts(world, reader) == [(stream, b"1")]


@pytest.mark.parametrize("unread", [False, True])
def test_a_reader_of_all_transactions_distinguishes_a_deleted_marker_from_a_record(
    unread: bool,
) -> None:
    world, stream, member = World(), "nyc/a", Member()
    world.client.create_stream(stream)
    history = TopicPartition(history_topic(stream), 0)
    ports = ports_of(world, member)

    def values() -> list[bytes | None]:
        with TransactionReader(ports, stream, "g", 1.0, "begin", 5.0, whole=True) as reader:
            member.news.append(lambda: member.gained([history]))
            return [event.value for found in reader for event in found.events]

    write(world, 0, stream)
    assert values() == [b"0"]
    if unread:
        write(world, 1, stream)
    log = world.cluster.log("r")
    end = log.end_offsets([history], committed=True)
    assert member.offsets[history] < end[history]
    world.client.scale(stream, segments=2)
    log.delete_records(end)
    write(world, 2, stream)
    if unread:
        for _ in range(2):
            with pytest.raises(SnapshotExpired):
                values()
    else:
        assert values() == [b"2"]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("group", [None, "g"])
def test_a_reader_of_transactions_raises_when_its_stream_is_deleted(
    group: str | None, anew: bool
) -> None:
    """A stream that was made again may be shorter: its offsets do not show that it is another one."""
    world, member = World(), Member()
    world.client.create_stream(A)
    write(world, 0, A)
    write(world, 1, A)
    with TransactionReader(ports_of(world, member), A, group, 9.0, "begin", 5.0) as reader:
        member.news.append(lambda: member.gained([TopicPartition(history_topic(A), 0)]))
        assert len([next(reader), next(reader)]) == 2
        operator(world).delete_stream(A)
        if anew:
            world.client.create_stream(A)
        with pytest.raises(UnknownStream, match="another one" if anew else "not there any more"):
            next(reader)


def rest_of_a_position(taken: Taken) -> Callable[[], list[Any]]:
    with taken.snapshot.read(A) as reader:
        next(reader)
        text = taken.snapshot.position()
    return lambda: list(taken.client.open_snapshot(text).read(A))


def difference(taken: Taken) -> Callable[[], list[Any]]:
    text = taken.client.snapshot(A, since=taken.first).position()
    return lambda: list(taken.client.open_snapshot(text).read(A))


def plan(taken: Taken) -> Callable[[], list[Any]]:
    data = pickle.dumps(taken.snapshot.plan())
    return lambda: list(taken.client.open_snapshot(pickle.loads(data)).read(A))


def changes(taken: Taken) -> Callable[[], list[Any]]:
    return lambda: list(taken.snapshot.changes(A))


def open_reader(taken: Taken) -> Callable[[], list[Any]]:
    return partial(list, taken.snapshot.read(A))


def offsets(taken: Taken) -> Callable[[], list[Any]]:
    cut, ports = taken.snapshot.plan().cuts[A], reader_ports(taken.world)

    def use() -> list[Any]:
        with RangeReader(ports, 30.0) as ranges:
            return list(ranges.read(A, 0, 1, cut.offsets[0], ids=cut.ids))

    return use


@pytest.mark.parametrize(
    "events", [None, 0, 2, 3, 9], ids=["deleted", "empty", "shorter", "equal", "longer"]
)
@pytest.mark.parametrize(
    "kind", [rest_of_a_position, difference, plan, changes, open_reader, offsets]
)
def test_a_position_is_of_its_own_stream_alone(
    kind: Callable[[Taken], Callable[[], list[Any]]], events: int | None
) -> None:
    """A stream that is made again under the name is not read, however long it is; the reader reports it at once."""
    world = World()
    client = operator(world)
    client.create_stream(A)
    first, *_ = [write(world, number, A) for number in range(3)]
    use = kind(Taken(world, client, first, client.snapshot(A)))
    client.delete_stream(A)
    if events is not None:
        client.create_stream(A)
        for number in range(events):
            write(world, number, A)
    began = world.clock.monotonic()
    with pytest.raises(UnknownStream, match=r"nyc[./]a" if events is None else "another one"):
        use()
    assert world.clock.monotonic() - began < 2 or events is None


@pytest.mark.parametrize("named", [True, False], ids=["named", "of an older version"])
def test_a_position_outlives_all_but_a_deletion(named: bool) -> None:
    """A scaling, an alteration, and a truncation of what it has given out."""
    world = World()
    client = operator(world)
    client.create_stream(A)
    at = [write(world, number, A) for number in range(3)]
    plan = client.snapshot(A).plan()
    snapshot = client.open_snapshot(
        plan if named else plan._replace(cuts={A: plan.cuts[A]._replace(ids=StreamIds())})
    )
    with snapshot.read(A) as reader:
        next(reader)
        text = snapshot.position()
    if not named:  # as the version before wrote it
        version, _, *body = json.loads(text)
        ((*ids, history), *places) = body[2][A]
        assert (version, ids) == (2, ["", ""])
        body[2][A] = [history, *places]
        text = json.dumps([1, crc32(json.dumps(body, separators=(",", ":")).encode()), *body])
    client.scale(A, segments=2)
    client.alter_stream(A, {"retention.ms": 10**10})
    client.truncate_stream(A, at[0])
    assert [event.value for event in client.open_snapshot(text).read(A)] == [b"1", b"2"]


@pytest.mark.parametrize("away", [False, True])
def test_one_broker_s_answer_does_not_make_it_another_stream(away: bool) -> None:
    """One broker may know only the former topics. If a broker can't be asked, the others' answers count."""
    world = World()
    client = operator(world)
    client.create_stream(A)
    log = world.cluster.log("reader")
    former = log.topic_ids([stream_topic(A), history_topic(A)])
    client.delete_stream(A)
    client.create_stream(A)
    write(world, 0, A)
    plan = client.snapshot(A).plan()
    told: list[str] = []

    class Behind:
        close = Mock()

        def __getattr__(self, name: str) -> Any:
            return getattr(log, name)

        def id_read(self, topic: str) -> str:
            return former[topic] if away or told.count(topic) < 3 else log.id_read(topic)

        def topic_ids(self, topics: list[str]) -> dict[str, str]:
            told.extend(topics)
            return log.topic_ids(topics)

        def is_agreed(self, topic: str, topic_id: str) -> bool:
            if away:
                raise LogUnavailable("a broker is away")
            return log.is_agreed(topic, topic_id)

    ports = ReaderPorts(lambda _: Behind(), lambda _: None, world.clock)  # type: ignore[arg-type, return-value]
    began = world.clock.monotonic()
    if away:
        with pytest.raises(UnknownStream, match="another one"):
            SnapshotReader(ports, A, plan.cuts[A], 30.0)
        assert 2 <= world.clock.monotonic() - began < 4
        Behind.close.assert_called_once()
    else:
        found = list(SnapshotReader(ports, A, plan.cuts[A], 30.0))
        assert [event.value for event in found] == [b"0"]
        assert told.count(history_topic(A)) == told.count(stream_topic(A)) == 3


@pytest.mark.parametrize("position", [0, 9])
def test_another_stream_of_the_name_raises_while_a_broker_is_away(position: int) -> None:
    """That the others know the topic must not begin the wait for that broker again, at each fetch."""
    world = World()
    client = operator(world)
    client.create_stream(A)
    cut = client.snapshot(A).plan().cuts[A]
    client.delete_stream(A)
    client.create_stream(A)
    log: Any = world.cluster.log("reader")
    log.is_agreed = Mock(side_effect=LogUnavailable("a broker is away"))
    source = CommittedLog(log, world.clock)
    source.expect(A, cut.ids)
    began = world.clock.monotonic()

    def fetch() -> None:
        while world.clock.monotonic() < began + 20:
            source.fetch(TopicPartition(history_topic(A), 0), position, began + 30, 1 << 20)

    with pytest.raises(UnknownStream, match="another one"):
        fetch()
    assert 2 <= world.clock.monotonic() - began < 4


def test_the_lag_after_a_truncation_counts_the_events_that_are_left() -> None:
    world = World()
    world.client.create_stream(A)
    for number in range(5):
        write(world, number, A)
    world.client.scale(A, segments=2)
    log, history = world.cluster.log("r"), TopicPartition(history_topic(A), 0)
    delete_all(world, 0, 1)
    cut = Histories(log).spare({A: 2})[A]
    log.delete_records({history: cut})
    for number in range(3):
        write(world, number, A)
    search = HistorySearch(CommittedLog(log, world.clock), A, 1.0)
    for place in (0, cut, cut + 1):
        exact, guessed = (lags_behind(search, {place}, counted)[place] for counted in (100, 1))
        assert (exact.events, guessed.oldest_ms) == (3, exact.oldest_ms)
        assert guessed.events == 3 + 3, "with the three markers before"


@pytest.mark.parametrize("skew_ms", [0, 5000, -5000])
def test_commits_of_a_time_though_brokers_have_another_one(
    skew_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Partition.mark

    def late(self: Partition, *whose: Any, now_ms: int, **how: Any) -> Any:
        return mark(self, *whose, now_ms=now_ms + skew_ms, **how)

    monkeypatch.setattr(Partition, "mark", late)
    world = World()
    world.client.create_stream(A)
    times = [write(world, number, A) for number in range(5)]
    search = HistorySearch(CommittedLog(world.cluster.log("r"), world.clock), A, 1.0)
    for number, until in enumerate(times):
        found = [commit.timestamp for commit in search.commits(0, until, 3)]
        assert found == times[: number + 1][-3:]


# -- snapshots ------------------------------------------------------------------------------------------


def snapshot(world: World, at: int) -> Mapping[int, int]:
    """The partitions' ends of a snapshot of A."""
    deadline = world.clock.monotonic() + 10
    with closing(ports_of(world).committed_log(30.0)) as source:
        return take(source, [A], at, deadline).cuts[A].offsets


def test_a_snapshot_of_a_deleted_segment_with_later_events_elsewhere_is_expired() -> None:
    """The segment was closed, and its keys went on in another partition."""
    world = World()
    world.client.create_stream(A)
    before = write(world, 0, A, key=HIGH)
    world.client.scale(A, segments=2)
    delete_all(world, 0)
    assert snapshot(world, before) == {0: 1}, "nothing came after"
    after = write(world, 1, A, key=HIGH)
    with pytest.raises(SnapshotExpired, match="on partition 0"):
        snapshot(world, before)
    assert snapshot(world, after) == {0: 1, 1: 1}


@pytest.mark.parametrize("asked", [MemoryLog.topic_ids, MemoryLog.partition_counts])
def test_a_processor_is_made_once_a_broker_knows_its_stream(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[..., dict[str, Any]]
) -> None:
    """The broker that was asked was behind: the stream was unknown, or an id was missing for good."""
    world = World()
    world.client.create_stream(A)
    due = world.clock.now + 3

    def late(log: MemoryLog, names: list[str]) -> dict[str, Any]:
        return asked(log, names) if world.clock.now >= due else {}

    monkeypatch.setattr(MemoryLog, asked.__name__, late)
    source = ports_of(world).committed_log(30.0)
    (made,) = first_inputs(source, [A], "begin", 30.0, due + 7)
    assert made.topic_id == world.cluster.topics[history_topic(A)].topic_id
    due = world.clock.now + 30
    with pytest.raises(NotReady, match="does not know"):
        first_inputs(source, [A], "begin", 30.0, due - 20)


def test_a_stream_is_missing_though_a_broker_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question lasted to its deadline. The inputs of running workers are waited for."""
    world, asked = World(), []
    source = CommittedLog(world.cluster.log("r"), world.clock)

    def away(*_: object) -> bool:
        asked.append(world.clock.now)
        raise LogUnavailable("broker 2 can't be asked")

    monkeypatch.setattr(MemoryLog, "is_known", away)
    begun = world.clock.now
    with pytest.raises(UnknownStream):
        partitions_of(source, [A], begun + 30)
    assert (world.clock.now - begun < 4, len(asked) < 20) == (True, True)
    with pytest.raises(NotReady, match="broker 2"):
        source.partition_counts(["orders"], world.clock.now + 9, math.inf)


def test_groups_of_others_cost_no_question_to_every_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    world, groups = World(), Mock(names=lambda _: ["g"], state=lambda *_: ("empty", ()))
    groups.offsets = lambda *_: dict.fromkeys([TopicPartition("app.t", 0)], 5)
    monkeypatch.setattr(MemoryLog, "is_known", asked := Mock())
    assert (groups_of(ports_of(world), groups, None, 5.0), asked.called) == ([], False)


@pytest.mark.parametrize(("group", "start"), [(None, "end"), ("g", "end"), (None, "begin")])
def test_a_broker_that_does_not_show_a_new_partition_hides_no_event(
    monkeypatch: pytest.MonkeyPatch, group: str | None, start: str
) -> None:
    world, member = World(), Member()
    world.client.create_stream(A, segments=2)
    seal = [s.segment_id for s in world.client.describe(A).segments if s.low == 0]
    world.client.scale(A, seal=seal, ranges=[(0, 1), (1, SPACE // 2)])  # the latter on partition 2
    low = next(k for k in map(b"%d".__mod__, range(99)) if 0 < position_of(k) < SPACE // 2)
    for number in range(20):
        write(world, number, A, key=low if start == "end" else HIGH)
    delete_all(world, 1)  # so that "begin" is behind the scaling
    old, all_ = ([TopicPartition(stream_topic(A), p) for p in range(n)] for n in (2, 3))
    with monkeypatch.context() as lagging:
        lagging.setattr(MemoryLog, "partition_counts", lambda *_: {stream_topic(A): 2})
        reader = Reader(ports_of(world, member), [A], group, 0.5, start, 5.0)
        member.news.append(lambda: member.gained(old))
        assert list(reader) == []
    member.news += [lambda: member.lost(old, True), lambda: member.gained(all_)]
    write(world, 20, A, key=low)
    assert [event.value for _ in range(4) for event in reader] == [b"20"]


def test_a_cut_waits_for_what_an_old_leader_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader of b's history is cut off from its peers, and answers the reader."""
    world, place = World(), TopicPartition(history_topic(B), 0)
    for stream in (A, B):
        world.client.create_stream(stream)
    write(world, 0, A, B)
    ends, fetch = MemoryLog.end_offsets, MemoryLog.fetch
    old = world.cluster.log("r").end_offsets([place], committed=False)

    def old_ends(log: MemoryLog, places: Any, *, sure: bool = False, **how: Any) -> Any:
        found = ends(log, places, **how)
        return found if sure else found | {p: old[p] for p in found if p == place}

    def old_fetch(log: MemoryLog, positions: Mapping[TopicPartition, int], **how: Any) -> Any:
        shown = {p: at for p, at in positions.items() if at < old.get(p, at + 1)}
        if shown:
            return fetch(log, shown, **how)
        world.clock.sleep(how["max_wait"])
        return {}

    with started(world, [A, B], "begin") as reader:
        assert cuts(world, reader) == [(A, b"0"), (B, b"0")]
        with monkeypatch.context() as cut_off:
            cut_off.setattr(MemoryLog, "end_offsets", old_ends)
            cut_off.setattr(MemoryLog, "fetch", old_fetch)
            write(world, 1, A, B)
            assert cuts(world, reader) == []
        assert cuts(world, reader) == [(A, b"1"), (B, b"1")]
