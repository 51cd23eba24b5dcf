"""The events of some tasks of a processor, where most events are of others."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from anabranch.batches.records import Record
from anabranch.errors import IllegalState, SnapshotExpired, UnknownStream
from anabranch.ports import LogUnavailable, TopicPartition, TopicSpec
from anabranch.processing.plain import PlainReader
from anabranch.protocol.legal_names import PLAIN
from anabranch.protocol.partitioner import SPACE, task_of
from anabranch.protocol.schemas.records import (
    CreateProcessor,
    EpochRecord,
    ProcessorInput,
    TaskInfo,
    TaskPosition,
)
from anabranch.reading import history
from anabranch.reading import task_reader as reader_module
from anabranch.reading.committed_log import CommittedLog, ReaderPorts
from anabranch.reading.slices import Piece, Place
from anabranch.reading.task_reader import Assignment, Input, TaskReader
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import TaskOwnership
from tests.client.doubles import NEVER_ASKED
from tests.client.world import World

FETCH_S, TIMEOUT_S = 0.3, 1.0


def test_a_long_history_of_other_tasks_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader with few tasks came to no event of theirs within its time-out, and took that for the end."""
    monkeypatch.setattr(history, "_MANY_BYTES", 1)
    world = World()
    client, clock = world.client, world.clock
    client.create_stream("nyc/a", 1)
    for number in range(20):
        with client.begin("nyc") as txn:
            txn.write("nyc/a", b"%d" % number, key=b"mine" if number == 19 else b"another's")
            txn.commit()
    make = CreateProcessor("nyc/p", 2, (ProcessorInput("nyc/a", "", 0, 0),))
    client._processors.ask("nyc/p", make, clock.monotonic() + 10)
    log = world.cluster.log("reader")
    fetch = log.fetch

    def slow(*asked: Any, **how: Any) -> Any:
        clock.sleep(FETCH_S)
        return fetch(*asked, **how)

    monkeypatch.setattr(log, "fetch", slow)
    ports: Any = ReaderPorts(lambda _: log, None, clock)  # type: ignore[arg-type]
    given = {}
    for task in (0, 1):
        ownership = client.take_tasks("nyc/p", [task])
        with TaskReader(ports, ["nyc/a"], ownership, TIMEOUT_S, 30.0, NEVER_ASKED) as reader:
            given[task] = [event.value for event in reader]
    assert sorted(map(len, given.values())) == [1, 19], given


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("cut", ["events", "history"])
def test_transactions_that_retention_left_whole_are_taken(
    cut: str, first: str, most_bytes: int
) -> None:
    """Transactions 0 and 1 are gone in a, 2 in part, and all are there in b; or a's history is cut behind 2."""
    world = World()
    client = world.client
    second = "b" if first == "a" else "a"
    streams = [f"nyc/{name}" for name in (first, second)]
    for stream in streams:
        client.create_stream(stream)
    make = CreateProcessor("nyc/p", 2, tuple(ProcessorInput(s, "", 0, 0) for s in streams))
    client._processors.ask("nyc/p", make, world.clock.monotonic() + 10)
    events, history = (TopicPartition(topic("nyc/a"), 0) for topic in (stream_topic, history_topic))
    log = world.cluster.log("retention")

    def write(*numbers: int) -> None:
        for number in numbers:
            with client.begin("nyc") as txn:
                for stream in streams:
                    txn.write_many(stream, [(b"%d" % number, b"%d" % key) for key in range(8)])
                txn.commit()

    write(0, 1, 2)
    ends = log.end_offsets([events, history], committed=True)
    client.scale("nyc/a", segments=2)  # the layout of what is left is in the history
    write(3, 4)
    log.delete_records({events: ends[events] - 3})
    if cut == "history":
        log.delete_records({history: ends[history]})
    ownership = client.take_tasks("nyc/p")
    lost: Counter[str] = Counter()
    ports: Any = ReaderPorts(lambda _: world.cluster.log("reader"), None, world.clock)  # type: ignore[arg-type]
    found: Counter[tuple[str, bytes | None]] = Counter()

    def read(reader: TaskReader) -> None:
        for _ in range(5):
            pieces = reader.cut(world.clock.monotonic() + 1, most_bytes, 1 << 20)
            found.update((e.stream, e.value) for piece in pieces for e in piece.events)

    with (
        TaskReader(ports, streams, ownership, None, 30.0, NEVER_ASKED) as reader,
        pytest.raises(SnapshotExpired),
    ):
        read(reader)
    assert not found
    with TaskReader(ports, streams, ownership, None, 30.0, NEVER_ASKED) as reader:
        reader.on_lost = lambda stream, count, _: lost.update({stream: count})
        read(reader)
        assert found == {(s, b"%d" % number): 8 for s in streams for number in (3, 4)}
        assert (lost["nyc/b"], lost["nyc/a"] >= 3) == (3, True), lost
        with client.begin("nyc", ownership=ownership) as txn:
            txn.commit(consumed=reader.consumed())
    lost.clear()
    with TaskReader(ports, streams, client.take_tasks("nyc/p"), None, 30.0, NEVER_ASKED) as reader:
        reader.on_lost = lambda stream, count, _: lost.update({stream: count})
        read(reader)
    assert (len(found), sum(lost.values())) == (4, 0), "its positions are behind that"


def test_a_task_ahead_of_others_is_not_moved_back() -> None:
    """Found by the simulator: its place in a record was judged before the record's segments were known."""
    nothing: Any = None
    stands = {
        0: TaskPosition(0, 1, 0),
        1: TaskPosition(0, 5, 9, 50, 2),
    }  # in segment 50 of record 5
    one = Input(0, "nyc/a", nothing, nothing, Place(1), stands)
    at = [  # the place up to which all was given, the segments of its record; whom it moves
        (Place(3), {7: 0}, [0]),
        (Place(5, 0, 4, 48), {48: 0, 49: 1, 50: 2}, [0]),
        (Place(5, 1, 9, 49), {48: 0, 49: 1, 50: 2}, [0]),
        (Place(5, 2, 3, 50), {48: 0, 49: 1, 50: 2}, [0, 1]),
    ]
    for one.at, one.order, moved in at:
        assert [task for task in stands if list(one.moved(task))] == moved, one.at
        one.reported.update(dict.fromkeys(stands, one.place()[:3]))


def test_a_plain_topic_s_old_leader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is below what is consumed. One that stays so ends the worker, which would pass over records."""
    world, place = World(), TopicPartition("orders", 0)
    log, clock = world.cluster.log("r"), world.clock
    log.create_topics([TopicSpec("orders", 1)])
    for number in range(3):
        log.produce(place, [Record(0, 1, b"k", b"%d" % number, ())])
    begin = ProcessorInput(PLAIN + "orders", log.topic_ids(["orders"])["orders"], 0, 0)
    task = TaskInfo(0, 1, "h", 0, 3, b"", 0, None, (TaskPosition(0, 2, 0),), 0)
    ownership = TaskOwnership("nyc/p", 1, (begin,), {0: task}, b"s", (), 0)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "end_offsets", lambda *_, **__: {place: 1})
        with pytest.raises(IllegalState, match=r"ends at 1, and offset 2 is consumed"):
            PlainReader(CommittedLog(log, clock), ownership, 5.0, single=False)
        patched.setattr(clock, "on_sleep", patched.undo)
        reader = PlainReader(CommittedLog(log, clock), ownership, 5.0, single=False)
    pieces = reader.cut(clock.monotonic() + 5, 1 << 20)
    assert [event.value for piece in pieces for event in piece.events] == [b"2"]
    clock.sleep(60)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "partition_counts", lambda *_: {})
        patched.setattr(MemoryLog, "is_known", Mock(side_effect=LogUnavailable("away")))
        again = clock.now + 4
        patched.setattr(clock, "on_sleep", lambda: patched.undo() if clock.now > again else None)
        assert reader.cut(clock.monotonic() + 1, 1 << 20) == []
    log.delete_topics(list(log.describe_topics(["orders"]).values()))
    clock.sleep(60)
    with pytest.raises(UnknownStream, match="there is no topic orders"):
        reader.cut(clock.monotonic() + 1, 1 << 20)


def test_a_limited_number_of_layouts_is_kept() -> None:
    """A stream that rolls each second has 100,000 epochs a day; an older one is looked up again."""
    search = Mock()
    search.epoch_record = lambda epoch: EpochRecord(epoch, 0, 0, (), (), (), -1)
    assignment = Assignment(search, 2)
    for epoch in range(1000):
        assignment.note(search.epoch_record(epoch))
    assert assignment.ranges(3) == {}
    assert len(assignment._ranges) == reader_module._KEPT


class _Filled:
    """An input with records of these timestamps."""

    def __init__(self, *times: int) -> None:
        self.feed = self
        self.records = [SimpleNamespace(record=SimpleNamespace(timestamp=time)) for time in times]

    @property
    def first(self) -> Any:
        return self.records[0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_input_that_is_filled_while_another_is_checked_counts(order: tuple[int, int]) -> None:
    """Else a newer record of the other would be taken before its own: a cut would tear a transaction of both."""
    early: Any = _Filled(7)
    late: Any = _Filled()

    class Reader(TaskReader):
        def __init__(self) -> None:
            self._inputs: Any = [(late, early)[each] for each in order]

        def __del__(self) -> None:
            pass

        def _is_complete(self, one: Any, until: float, asks: bool) -> bool:
            late.feed.records[:] = _Filled(3, 7).feed.records
            return True

    assert Reader()._ready(0.0) is late


def test_a_small_commit_and_its_events_come_with_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    client, clock = world.client, world.clock
    client.create_stream("nyc/a", 1)
    make = CreateProcessor("nyc/p", 1, (ProcessorInput("nyc/a", "", 0, 0),))
    client._processors.ask("nyc/p", make, clock.monotonic() + 10)
    log = world.cluster.log("reader")
    asked = list[int]()
    fetch = log.fetch

    def counted(places: Any, **how: Any) -> Any:
        asked.append(len(places))
        return fetch(places, **how)

    monkeypatch.setattr(log, "fetch", counted)
    ports: Any = ReaderPorts(lambda _: log, None, clock)  # type: ignore[arg-type]
    ownership = client.take_tasks("nyc/p")
    with TaskReader(ports, ["nyc/a"], ownership, None, 30.0, NEVER_ASKED) as reader:
        for number in range(3):
            with client.begin("nyc") as txn:
                txn.write("nyc/a", b"%d" % number)
                txn.commit()
            pieces = list[Piece]()
            while not pieces:
                asked.clear()
                pieces = reader.cut(clock.monotonic() + 1, 1 << 20)
            assert [event.value for piece in pieces for event in piece.events] == [b"%d" % number]
    assert asked == [2], "the history, and the events' partition"


@pytest.mark.parametrize("high", [SPACE, SPACE // 2])
def test_a_piece_says_whether_each_task_is_that_of_the_key(
    monkeypatch: pytest.MonkeyPatch, high: int
) -> None:
    """Stores believe it. Keys above ``high`` are outside of their segment, as another client hashed them."""
    world = World()
    client, clock = world.client, world.clock
    client.create_stream("nyc/a", 1)
    make = CreateProcessor("nyc/p", 2, (ProcessorInput("nyc/a", "", 0, 0),))
    client._processors.ask("nyc/p", make, clock.monotonic() + 10)
    monkeypatch.setattr(Assignment, "ranges", lambda self, _: defaultdict(lambda: (0, high)))
    ports: Any = ReaderPorts(lambda _: world.cluster.log("reader"), None, clock)  # type: ignore[arg-type]
    ownership = client.take_tasks("nyc/p")
    with TaskReader(ports, ["nyc/a"], ownership, None, 30.0, NEVER_ASKED) as reader:
        with client.begin("nyc") as txn:
            txn.write_many("nyc/a", [(b"", b"%d" % number) for number in range(20)])
            txn.commit()
        pieces = reader.cut(clock.monotonic() + 1, 1 << 20)
    wanted = [task_of(event.key or b"", 2) for piece in pieces for event in piece.events]
    found = [task for piece in pieces for task in piece.tasks]
    assert sum(found) == (sum(wanted) if high == SPACE else 0)
    assert sum(wanted) > 0
    assert [piece.placed for piece in pieces] == [found == wanted]
