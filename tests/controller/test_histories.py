"""Histories of wide streams, in which few records have a vector, and histories that are cut."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from anabranch.batches.records import decode_records
from anabranch.controller import durability
from anabranch.controller.controller import Controller
from anabranch.core import history_records
from anabranch.core.history_records import has_vector, vector_place
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import make_marked_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import HistorySearch
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import history_topic, stream_topic
from tests.controller.world import World

STREAM = "nyc/wide"
HISTORY = TopicPartition(history_topic(STREAM), 0)
SEGMENTS = 5
OFTEN: dict[str, Any] = {"epoch_again": 6, "clean_ms": 0, "clean_history_ms": 0}
Records = list[tuple[int, r.EpochRecord | r.CommitRecord]]


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of five partitions is a wide one."""
    monkeypatch.setattr(history_records, "FEW", 1)
    monkeypatch.setattr(history_records, "EVERY", 4)


def leading(world: World, name: str = "c", *, create: bool = False, **settings: Any) -> Controller:
    """A controller without a table."""
    controller = world.led(name, store=MemoryStore(), **settings)
    if create:
        world.stream(controller, STREAM, SEGMENTS)
    return controller


def commit(world: World, controller: Controller, *sizes: int) -> None:
    """One-shots of one round, of so many events each."""
    chance = random.Random(world.clock.now)
    for size in sizes:
        events = tuple(r.Event(STREAM, -1, chance.randbytes(4), b"v", (), -1) for _ in range(size))
        world.send(r.OneShot(world.txn_id(), "nyc", None, events))
    world.clock.sleep(0.3)
    while controller.step(0):
        pass


def history_of(world: World) -> Records:
    found: Records = []
    for record in world.committed(HISTORY):
        value = decode(record.value or b"")
        assert isinstance(value, r.EpochRecord | r.CommitRecord)
        found.append((record.offset, value))
    return found


def ends_of(history: Records) -> dict[int, dict[int, int]]:
    """Offset -> the vector as of the record there, by the commits' ranges alone."""
    ends: dict[int, int] = {}
    found = {}
    for offset, record in history:
        if isinstance(record, r.EpochRecord):
            ends |= {
                s.partition: max(s.start_offset, ends.get(s.partition, 0)) for s in record.segments
            }
        else:
            ends |= {part.partition: part.end for part in record.segments}
        found[offset] = dict(ends)
    return found


def search_of(world: World) -> HistorySearch:
    return HistorySearch(CommittedLog(world.cluster.log("reader"), world.clock), STREAM, 1.0)


def test_every_vector_is_found_by_the_last_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "HISTORY_BYTES", 400)
    world = World()
    controller = leading(world, create=True)
    chance = random.Random(7)
    for number in range(12):
        commit(world, controller, *(chance.randint(1, 6) for _ in range(chance.randint(1, 20))))
        if number % 4 == 3:  # the successor finds the vector where its leader left it
            controller = leading(world, f"c{number}")
    history = history_of(world)
    assert sum(has_vector(record) for _, record in history) < len(history) / 2
    whole = -1
    for (before, _), (offset, record) in pairwise([(-1, history[0][1]), *history]):
        whole = offset if has_vector(record) else whole
        assert vector_place(offset, record) == whole
        assert (offset - 1 if record.previous == -2 else record.previous) == before
    batches = [
        batch
        for found in [
            world.cluster.log("r").fetch(
                {HISTORY: 0}, max_wait=0, max_bytes=1 << 24, committed=True
            )
        ]
        for batch in found[HISTORY].batches
    ]
    assert max(len(batch.data) for batch in batches) < 800
    assert len(batches) > 12 + 1, "rounds of several batches"
    assert sum(len(decode_records(batch.data)) for batch in batches) == len(history)

    ends = ends_of(history)
    search = search_of(world)
    for offset, record in history:
        found = search.as_of(record.timestamp)
        assert found is not None
        assert (found.offset, found.vector()) == (offset, ends[offset])
    for offset, _ in chance.sample(history, 40):
        positions = {p: end + chance.randint(-2, 2) for p, end in ends[offset].items()}
        found = search.not_beyond(positions)
        assert found is not None
        below = [ends[at] for at in ends if at < found.offset]
        assert all(end <= positions[p] for each in below for p, end in each.items())
        partition = chance.choice(list(positions))
        first = search.passing(partition, positions[partition])
        assert all(ends[at][partition] <= positions[partition] for at in ends if at < first)


def cut_stream(world: World, vector: dict[int, int], *partitions: int) -> None:
    """Delete events below a vector, of some partitions, as retention does."""
    topic = stream_topic(STREAM)
    world.cluster.log("retention").delete_records(
        {TopicPartition(topic, p): vector[p] for p in partitions}
    )


def start_of(world: World) -> int:
    return world.cluster.log("reader").start_offsets([HISTORY])[HISTORY]


def test_a_history_is_cut_only_after_its_events_are_deleted() -> None:
    world = World()
    controller = leading(world, create=True, **OFTEN)
    for _ in range(10):
        commit(world, controller, 5, 5, 5)
    assert start_of(world) == 0, "nothing is deleted"
    assert not controller.state.low_water
    history = history_of(world)
    ends = ends_of(history)
    epochs = [at for at, record in history if isinstance(record, r.EpochRecord)]
    assert len(epochs) == 1 + 30 // 6
    commits = [at for at, record in history if isinstance(record, r.CommitRecord)]
    gone = ends[commits[15]]  # retention stands in the middle, between two EPOCH records
    cut_stream(world, gone, *range(SEGMENTS - 1))
    commit(world, controller, 1)
    commit(world, controller, 1)
    assert start_of(world) == 0, "a partition still has all of its events"
    cut_stream(world, gone, SEGMENTS - 1)
    for _ in range(3):
        commit(world, controller, 1)
    expected = max(at for at in epochs if all(ends[at][p] <= end for p, end in gone.items()))
    assert start_of(world) == expected > 0

    # From there on all is told, to readers and to a successor without a table.
    search = search_of(world)
    oldest = search.oldest_whole()
    assert oldest is not None
    assert (oldest.offset, oldest.vector()) == (expected, ends[expected])
    assert isinstance(oldest.record, r.EpochRecord)
    assert search.is_cut()
    assert search.as_of(history[1][1].timestamp) is None
    for at in commits:
        if at > expected:
            found = search.as_of(dict(history)[at].timestamp)
            assert found is not None
            assert found.vector() == ends[at]
            epoch = search.epoch(found)
            assert epoch is not None
            assert epoch.segments == oldest.record.segments
    successor = leading(world, "c2")
    commit(world, successor, 5)
    last = search.as_of("end")
    assert last is not None
    log_ends = world.cluster.log("reader").end_offsets(
        [TopicPartition(stream_topic(STREAM), p) for p in range(SEGMENTS)], committed=True
    )
    # A marker stands behind the last event.
    assert last.vector() == {place.partition: end - 1 for place, end in log_ends.items()}


def test_a_history_is_cut_though_no_leader_lasts_for_many_commits() -> None:
    world = World()
    controller = leading(world, create=True, **OFTEN)
    for term in range(6):
        commit(world, controller, 5, 5)
        controller = leading(world, f"c{term}", **OFTEN)
    cut_stream(world, ends_of(history_of(world))[history_of(world)[-1][0]], *range(SEGMENTS))
    for _ in range(3):
        commit(world, controller, 1)
    assert start_of(world) > 10


def test_a_states_history_is_short_though_its_rows_stay() -> None:
    world = World()
    controller = leading(world, create=True, **OFTEN)
    secret, name = bytes(16), "nyc/p"
    inputs = (r.ProcessorInput(STREAM, "", 0, 0),)
    world.ask(controller, r.CreateProcessor(name, 2, inputs, ("s",)))
    made = world.ask(controller, r.CreateStream(f"{name}.state", 2, {"processor": name}))
    assert isinstance(made, r.StreamList)
    world.ask(controller, r.TakeTasks(name, secret, "me", (0, 1), (0, 0)))
    history = TopicPartition(history_topic(f"{name}.state"), 0)
    for sequence in range(1, 31):
        if sequence == 20:
            controller = leading(world, "successor", **OFTEN)
        row = r.Event(f"{name}.state", sequence % 2, b"\0\0\0\0", b"%d" % sequence, (), -1)
        consumed = r.Consumed(name, secret, (r.TaskStep((0, 1), sequence, ()),))
        txn_id = make_marked_id(0, int(world.clock.wall() * 1000), sequence)
        answer = world.ask(controller, r.OneShot(txn_id, "nyc", None, (row,), consumed))
        assert isinstance(answer, r.Outcome)
        world.clock.sleep(0.3)
        controller.step(0)
    begins = world.cluster.log("r").start_offsets([history])[history]
    assert begins > 15
    for task in (0, 1):
        rows = world.committed(TopicPartition(stream_topic(f"{name}.state"), task))
        assert [int(row.value or b"") % 2 for row in rows] == [task] * 15, "all are there"
