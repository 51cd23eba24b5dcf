"""Epochs on the in-memory log: what the broker refuses stays with whom it concerns; where segments begin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from anabranch.batches.format import Buffer
from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.ports import LogRefused, TopicPartition, TopicSpec
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import (
    Begin,
    Commit,
    CreateStream,
    EpochRecord,
    Event,
    FindScope,
    GetState,
    OneShot,
    Outcome,
    Refusal,
    Scale,
    StreamList,
    Touch,
    Touched,
)
from anabranch.topics import declarations
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.world import World
from tests.core.labels import SECRET, Begun
from tests.memory.log import MemoryLog
from tests.memory.producer import MemoryProducer

STREAM = "nyc/flights"
FIRST = tuple(key for n in range(40) if position_of(key := b"k%d" % n) < 1 << 31)


class Broker:
    """Refuses data for some partitions of the stream while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: set[int] = set()
        self.refused = 0
        append = MemoryProducer.append

        def checked(
            producer: MemoryProducer, batches: Iterable[tuple[TopicPartition, Buffer]]
        ) -> list[int]:
            listed = list(batches)
            if any(
                tp.topic == stream_topic(STREAM) and tp.partition in self.refuses
                for tp, _ in listed
            ):
                self.refused += 1
                raise LogRefused("refused for the test", 10)
            return append(producer, listed)

        monkeypatch.setattr(MemoryProducer, "append", checked)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


def leading(world: World, segments: int = 2, **settings: Any) -> Controller:
    controller = world.controller(**settings)
    controller.lead()
    world.stream(controller, STREAM, segments)
    return controller


def begun(
    world: World, controller: Controller, *, name: str | None = None
) -> tuple[bytes, bytes, Touched]:
    """(id, token, where to write) of a transaction that touched the stream."""
    txn_id = world.txn_id()
    answer = world.ask(controller, Begin(txn_id, "nyc", name, 60_000, SECRET))
    assert isinstance(answer, Begun)
    touched = world.ask(controller, Touch(answer.token, STREAM))
    assert isinstance(touched, Touched)
    return txn_id, answer.token, touched


def one_shot(world: World, key: bytes = FIRST[0], name: str | None = None) -> OneShot:
    return OneShot(world.txn_id(), "nyc", name, (Event(STREAM, -1, key, b"v", (), -1),))


def test_an_open_transaction_is_not_silent_for_a_round_that_was_refused(broker: Broker) -> None:
    world = World()
    controller = leading(world)
    world.clock.sleep(300)  # it leads for longer than the keepalive
    txn_id, _, _ = begun(world, controller, name="night")
    broker.refuses = {0, 1}
    answer = world.ask(controller, one_shot(world, name="night"))
    assert isinstance(answer, Refusal)
    world.clock.sleep(1)
    for _ in range(4):
        controller.step(0)
    state = world.ask(controller, GetState(txn_id))
    assert isinstance(state, Outcome)
    assert (state.state, state.reason) == ("OPEN", "")


def test_a_carried_merge_that_the_broker_refuses_stops_nobody_else(broker: Broker) -> None:
    world = World()
    controller = leading(world, chunk_bytes=2_000)
    txn_id, token, touched = begun(world, controller)
    events = [(key, b"x" * 100) for key in FIRST for _ in range(4)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    assert world.ask(controller, Scale(STREAM, 3, (), ())) is not None
    broker.refuses = {3, 4, 5}
    commit = world.send(Commit(token, (receipt,), None, None, 10_000))
    for _ in range(10):
        controller.step(0)
        world.clock.sleep(0.1)
    assert broker.refused
    answer = world.ask(controller, one_shot(world))
    assert isinstance(answer, Outcome)
    assert answer.state == "COMMITTED"
    assert broker.refused < 5  # it is tried again, but not all the time
    assert "its merge makes no progress: " in world.ask(controller, GetState(txn_id)).reason
    broker.refuses = set()
    for _ in range(200):
        controller.step(0)
        world.clock.sleep(0.1)
    outcome = world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.committed) == ("COMMITTED", len(events))
    assert (outcome.reason, world.ask(controller, GetState(txn_id)).reason) == ("", "")


def test_a_carried_merge_whose_records_somebody_deleted_stops_nobody_else() -> None:
    """It was the end of leading, again and again: nothing else was committed either."""
    world = World()
    controller = leading(world, chunk_bytes=2_000)
    txn_id, token, touched = begun(world, controller)
    events = [(key, b"x" * 100) for key in FIRST for _ in range(4)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    assert world.ask(controller, Scale(STREAM, 3, (), ())) is not None
    world.send(Commit(token, (receipt,), None, None, 10_000))
    while not (merges := controller.state.open[txn_id].staged_merges):
        controller.step(0)
        world.clock.sleep(0.1)
    assert not all(staged.done for staged in merges.values())
    log = world.cluster.log("somebody")
    journals = [TopicPartition(journal_topic(STREAM), p) for p in range(3)]
    log.delete_records(log.end_offsets(journals, committed=False))
    for _ in range(10):
        controller.step(0)
        world.clock.sleep(0.1)
    answer = world.ask(controller, one_shot(world))
    assert isinstance(answer, Outcome)
    assert answer.state == "COMMITTED"
    stands = world.ask(controller, GetState(txn_id))
    assert stands.state == "FINALIZE_IN_PROGRESS"
    assert "its merge makes no progress: a journal lost records of it" in stands.reason
    controller.update_metrics()
    assert controller.metrics.values["stuck_merges"] == {("torn",): 1, ("waiting",): 0}


def test_segments_begin_behind_what_a_partition_had_before() -> None:
    world = World()
    topic = stream_topic(STREAM)
    specs = [
        TopicSpec(name, 3, {s.name: s.value for s in settings}, 1)
        for name, settings in (
            (topic, declarations.STREAM),
            (journal_topic(STREAM), declarations.JOURNAL),
        )
    ]
    world.cluster.log("operator").create_topics(specs)
    for partition in range(3):
        world.cluster.produce(
            TopicPartition(topic, partition), [Record(0, 1, b"k", b"old", ())] * 5
        )
    controller = world.controller()
    controller.lead()
    world.ask(controller, FindScope("nyc", True))
    assert world.ask(controller, CreateStream(STREAM, 2, {})).code == "TopicNotEmpty"
    assert isinstance(world.ask(controller, CreateStream(STREAM, 2, {}, adopt=True)), StreamList)
    answer = world.ask(controller, Scale(STREAM, 3, (), ()))
    assert isinstance(answer, StreamList)
    epochs = [
        decode(r.value or b"") for r in world.committed(TopicPartition(history_topic(STREAM), 0))
    ]
    last = epochs[-1]
    assert isinstance(last, EpochRecord)
    assert {s.partition: s.start_offset for s in last.segments} == {0: 5, 1: 5, 2: 5}


def test_a_merge_that_the_broker_refuses_is_found_while_commands_come(broker: Broker) -> None:
    world = World()
    controller = leading(world)
    second = tuple(key for n in range(40) if position_of(key := b"k%d" % n) >= 1 << 31)
    commits = []
    for keys in (FIRST, second):
        txn_id, token, touched = begun(world, controller)
        receipt = world.write(txn_id, 1, STREAM, touched.segments, [(keys[0], b"v")])
        commits.append(Commit(token, (receipt,), None, None, 10_000))
    broker.refuses = {0}
    asked = [world.send(commit) for commit in commits]
    for _ in range(60):
        for _ in range(4):
            world.send(one_shot(world, second[0]))
        controller.step(0)
        world.clock.sleep(0.05)
    states = [
        answer.state if isinstance(answer, Outcome) else answer
        for answer in map(world.reply, asked)
    ]
    assert isinstance(states[0], Refusal)
    assert states[1] == "COMMITTED"


def test_partitions_that_the_broker_does_not_add_are_not_asked_for_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    controller = leading(world, chunk_bytes=2_000)
    asked = 0
    add = MemoryLog.add_partitions

    def refused(log: MemoryLog, topic: str, partitions: int) -> None:
        nonlocal asked
        asked += 1
        raise LogRefused("no more partitions", 37)

    monkeypatch.setattr(MemoryLog, "add_partitions", refused)
    txn_id, token, touched = begun(world, controller)
    events = [(key, b"x" * 100) for key in FIRST for _ in range(4)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    commit = world.send(Commit(token, (receipt,), None, None, 10_000))
    for _ in range(100):
        controller.step(0)
        world.clock.sleep(0.06)
    assert 0 < asked < 5
    monkeypatch.setattr(MemoryLog, "add_partitions", add)
    for _ in range(300):
        controller.step(0)
        world.clock.sleep(0.06)
    outcome = world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"


def test_a_leadership_that_fails_leaves_no_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    open_now = 0
    begin, close = MemoryLog.producer, MemoryProducer.close

    def counted(log: MemoryLog, transactional_id: str, *, timeout: float) -> MemoryProducer:
        nonlocal open_now
        open_now += 1
        return begin(log, transactional_id, timeout=timeout)

    def closed(producer: MemoryProducer) -> None:
        nonlocal open_now
        open_now -= 1
        close(producer)

    monkeypatch.setattr(MemoryLog, "producer", counted)
    monkeypatch.setattr(MemoryProducer, "close", closed)
    first = world.controller("first")
    first.lead()
    first.resign()
    second = world.controller("second")

    def check(*_: object) -> None:
        raise LogRefused("a broker that does not know it", 3)

    monkeypatch.setattr(MemoryProducer, "check", check)
    with pytest.raises(LogRefused):
        second.lead()
    assert open_now == 0
