"""Making and growing the topics of a stream: brokers that are away, foreign partitions, and the limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.cleanup import Truncator
from anabranch.controller.controller import Controller
from anabranch.controller.jobs import Jobs
from anabranch.controller.stream_topics import StreamTopics
from anabranch.core.decisions import scale
from anabranch.core.decisions.streams import prove_leadership, stream_recovered
from anabranch.core.rows import stream_key
from anabranch.core.state import State
from anabranch.errors import InvalidArgument, NotReady, TopicMisconfigured
from anabranch.kafka.codes import CREATE_CODES, GROW_CODES, Act, meaning
from anabranch.ports import LogRefused, LogUnavailable, TopicPartition, TopicSpec
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.schemas.codec import decode_as
from anabranch.protocol.schemas.records import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EpochRecord,
    FindScope,
    KeyRange,
    Refusal,
    Scale,
    Scaling,
    StreamChange,
    StreamRow,
    TruncateStream,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics import declarations
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.world import World, leading

INVALID_REPLICATION_FACTOR, POLICY = 38, 44


def test_too_few_brokers_for_a_new_partition_may_pass() -> None:
    """The topic has its replicas, so that there were brokers enough; for a new topic nobody knows."""
    assert meaning(GROW_CODES, INVALID_REPLICATION_FACTOR).act is Act.RETRY
    assert meaning(CREATE_CODES, INVALID_REPLICATION_FACTOR).act is Act.REFUSED


@pytest.mark.parametrize("error", [LogUnavailable("two of three"), TopicMisconfigured("set 1")])
def test_topics_that_have_grown_though_it_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The journal has the partitions: plain writes that come to them must not wait for the next scaling."""
    asked, add = 0, MemoryLog.add_partitions

    def away(log: MemoryLog, topic: str, partitions: int) -> None:
        nonlocal asked
        add(log, topic, partitions)
        if topic == journal_topic("s/a"):
            asked += 1
            raise error

    world, controller = leading("s/a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "add_partitions", away)
        refusal = world.ask(controller, Scale("s/a", 3, (), ()))
        assert refusal.code in (NotReady.__name__, TopicMisconfigured.__name__)
        row, rounds = controller.state.streams["s/a"], controller.rounds
        assert (row.scaling, row.partitions, row.wanted_partitions) == (None, 1, 3)
        world.cluster.produce(TopicPartition(journal_topic("s/a"), 2), [Record(0, 0, b"k", b"v")])
        world.steps(controller, 40, 1)
        assert controller.rounds == rounds, "what is tried again is not logged again"
        assert 4 < asked < 12
    world.steps(controller, 12, 1)
    assert controller.state.streams["s/a"].partitions == 3
    (told,) = world.committed(TopicPartition(stream_topic("s/a"), 0))
    assert told.value == b"v"


@pytest.mark.parametrize("later", [journal_topic, stream_topic])
@pytest.mark.parametrize("grown", [journal_topic, stream_topic])
def test_a_refused_growth_keeps_what_the_journal_has(
    monkeypatch: pytest.MonkeyPatch, grown: Callable[[str], str], later: Callable[[str], str]
) -> None:
    """A first scaling breaks off behind one topic, a bigger one is refused for good at one."""
    add, most = MemoryLog.add_partitions, 3

    def limited(log: MemoryLog, topic: str, partitions: int) -> None:
        if topic == later("s/a") and partitions > most:
            raise LogRefused("too many", POLICY)
        add(log, topic, partitions)
        if topic == grown("s/a") and most == 3:
            raise LogUnavailable("two of three")

    world, controller = leading("s/a", 1)
    monkeypatch.setattr(MemoryLog, "add_partitions", limited)
    assert world.ask(controller, Scale("s/a", 3, (), ())).code == NotReady.__name__
    most = 4
    world.clock.sleep(1)  # its pause
    journal = world.cluster.topics[journal_topic("s/a")].partitions
    assert world.ask(controller, Scale("s/a", 9, (), ())).code == InvalidArgument.__name__
    world.cluster.produce(
        TopicPartition(journal_topic("s/a"), journal - 1), [Record(0, 0, b"k", b"v")]
    )
    world.steps(controller, 12, 1)
    row = controller.state.streams["s/a"]
    assert (
        row.partitions
        == row.wanted_partitions
        == world.cluster.topics[journal_topic("s/a")].partitions
    )
    (told,) = world.committed(TopicPartition(stream_topic("s/a"), 0))
    assert told.value == b"v"
    assert len(world.ask(controller, Scale("s/a", 4, (), ())).streams[0].segments) == 4


def test_a_former_leader_does_not_wait_for_brokers_that_are_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would lead all scopes again that much later."""
    back, came = threading.Event(), threading.Event()

    def away(log: MemoryLog, topic: str, partitions: int) -> None:
        came.set()
        assert back.wait(30)
        raise LogUnavailable("two of three")

    world, controller = leading("s/a", 1)
    monkeypatch.setattr(MemoryLog, "add_partitions", away)
    state = State(controller.table)
    state.apply(stream_key("s/a"), replace(state.streams["s/a"], wanted_partitions=3))
    growth, jobs = topics_of_world(world, controller, threads=True)
    assert list(growth.step(state)) == []
    assert came.wait(30)
    closing = threading.Thread(target=jobs.close)
    closing.start()
    closing.join(60)
    waits = closing.is_alive()
    back.set()
    assert not waits


def test_a_lost_stream_grows_no_more() -> None:
    world, controller = leading("s/a", 1)
    state = State(controller.table)
    row = state.streams["s/a"]
    growth, jobs = topics_of_world(world, controller, threads=False)
    state.apply(stream_key("s/a"), replace(row, wanted_partitions=3))
    steps = growth.step(state)
    jobs.begin("growth", "s/a", lambda: 3)
    state.apply(stream_key("s/a"), replace(row, state="LOST"))
    assert (growth.busy, jobs.is_under_way("growth", "s/a")) == (True, True)
    assert list(steps) == []
    assert (growth.busy, jobs.is_under_way("growth", "s/a")) == (False, False)


def test_too_few_brokers_for_a_new_stream_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_few(log: MemoryLog, specs: Sequence[TopicSpec]) -> None:
        raise LogRefused("only 1 broker(s) are registered", INVALID_REPLICATION_FACTOR)

    world = World()
    controller = world.led()
    world.ask(controller, FindScope("s", True))
    create = CreateStream("s/a", 1, {"replication.factor": "3"})
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "create_topics", too_few)
        refusal = world.ask(controller, create)
    assert refusal.code == NotReady.__name__
    assert "too few brokers are up: only 1 broker" in refusal.message
    assert world.ask(controller, create).streams[0].state == "ACTIVE"


def last_epoch(world: World) -> EpochRecord:
    history = world.committed(TopicPartition(history_topic("s/a"), 0))
    return decode_as(EpochRecord, history[-1].value or b"")


def test_records_in_partitions_added_by_hand_are_not_the_streams() -> None:
    world, controller = leading("s/a", 1)
    topic = stream_topic("s/a")
    for name in (topic, journal_topic("s/a")):
        world.cluster.log("hand").add_partitions(name, 3)
    world.cluster.produce(TopicPartition(topic, 1), [Record(i, 0, b"k", b"v") for i in range(5)])
    for segments in (2, 3):
        world.ask(controller, Scale("s/a", segments, (), ()))
        epoch = last_epoch(world)
        starts = {s.partition: s.start_offset for s in epoch.segments}
        assert all(start == (5 if partition == 1 else 0) for partition, start in starts.items())
        vector = {p.partition: p.offset for p in epoch.vector}
        assert all(vector[partition] == start for partition, start in starts.items())


def test_segments_begin_after_the_records_of_an_adopted_topic() -> None:
    world = World()
    kinds = (stream_topic, declarations.STREAM), (journal_topic, declarations.JOURNAL)
    world.cluster.log("operator").create_topics(
        [TopicSpec(topic("s/a"), 3, {s.name: s.value for s in kind}, 1) for topic, kind in kinds]
    )
    for partition in range(3):
        place = TopicPartition(stream_topic("s/a"), partition)
        world.cluster.produce(place, [Record(0, 1, b"k", b"old", ())] * 5)
    controller = world.led()
    world.ask(controller, FindScope("s", True))
    assert world.ask(controller, CreateStream("s/a", 2, {})).code == "TopicNotEmpty"
    for command in (CreateStream("s/a", 2, {}, adopt=True), Scale("s/a", 3, (), ())):
        assert not isinstance(world.ask(controller, command), Refusal)
    starts = {s.partition: s.start_offset for s in last_epoch(world).segments}
    assert starts == {0: 5, 1: 5, 2: 5}


def test_more_partitions_than_a_stream_may_have_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, controller = leading("s/a", 2)
    monkeypatch.setattr(scale, "MAX_PARTITIONS", 2)
    turn = controller._turn()
    row = turn.state.streams["s/a"]
    scale.want_partitions(turn, "s/a", 3)
    assert turn.state.streams["s/a"] == row
    assert turn.merging.may_grow_ms.get("s/a", 0) > turn.now_ms, (
        "checked again later, not in each round"
    )
    # A scaling whose partitions others took meanwhile.
    waits = Scaling(
        (0,), (KeyRange(0, 7), KeyRange(8, (1 << 32) - 1)), b"c" * 16, 0, "open", b"d" * 8
    )
    turn.put(stream_key("s/a"), replace(row, scaling=waits, wanted_partitions=3))
    scale.partitions_added(turn, "s/a", 2)
    assert turn.state.streams["s/a"] == replace(row, wanted_partitions=2)
    ((_, refusal),) = turn.round.replies
    assert refusal.code == InvalidArgument.__name__
    assert "at most 2 partitions" in refusal.message


@pytest.mark.parametrize(
    ("slow", "command"),
    [
        ("create_topics", CreateStream("s/b_c", 1, {})),
        ("delete_topics", DeleteStream("s/b")),
        ("alter_topics", AlterStream("s/b", {"retention.ms": "1000"}, ())),
        ("delete_records", TruncateStream("s/b", from_us(1))),
    ],
)
def test_others_commit_while_brokers_work_on_topics(
    monkeypatch: pytest.MonkeyPatch, slow: str, command: Any
) -> None:
    """Who asks for the stream that is made has to ask again; a name that Kafka takes for equal is refused."""
    came, back, call = threading.Event(), threading.Event(), getattr(MemoryLog, slow)

    def slowly(log: MemoryLog, *given: Any) -> None:
        came.set()
        assert back.wait(30)
        call(log, *given)

    world = World()
    controller = world.controller()
    controller.threads = True
    controller.lead()
    for stream in ("s/a", "s/b", "s_b/other"):
        until_answered(world, controller, FindScope(stream.partition("/")[0], True))
        until_answered(world, controller, CreateStream(stream, 1, {}))
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, slow, slowly)
        asked = world.send(command)
        until(world, controller, came.is_set)
        outcome = world.ask(controller, world.one_shot("s/a"))
        assert outcome.state == "COMMITTED"
        if isinstance(command, CreateStream):
            refusal = world.ask(controller, CreateStream("s_b/c", 1, {}))
            assert "differ in . and _ alone" in refusal.message
            for other in (command, DeleteStream(command.stream)):
                assert world.ask(controller, other).code == NotReady.__name__
        assert world.reply(asked) is None
    back.set()
    until(world, controller, lambda: world.reply(asked) is not None)
    assert not isinstance(world.reply(asked), Refusal)
    assert controller._background is not None
    assert not controller._background.topics.busy
    controller.resign()


def until_answered(world: World, controller: Controller, command: Any) -> None:
    asked = world.send(command)
    until(world, controller, lambda: world.reply(asked) is not None)


def until(world: World, controller: Controller, is_so: Callable[[], bool]) -> None:
    """Step until something is so; helper threads work at their own pace."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        controller.step(0)
        world.clock.sleep(0.001)
        time.sleep(0.001)


def test_a_result_counts_for_what_it_was_done_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is given up, and taken back, while brokers alter its topics."""
    came, back = threading.Event(), threading.Event()

    def slowly(*_: object) -> None:
        came.set()
        assert back.wait(30)

    monkeypatch.setattr(MemoryLog, "alter_topics", slowly)
    state, topics, jobs, row = stream_topics(threads=True)
    change = StreamChange(row.settings, 0)
    altered = replace(row, settings={"retention.ms": "1000"}, change=change)
    state.apply(stream_key("s/a"), altered)
    assert list(topics.step(state)) == []
    assert came.wait(30)
    state.apply(stream_key("s/a"), replace(row, state="RECOVERING"))
    back.set()
    end = time.monotonic() + 30
    while not (found := results(topics, state)):
        assert time.monotonic() < end
        time.sleep(0.001)
    jobs.close()
    assert found == [stream_recovered]


def test_topics_are_deleted_only_after_a_written_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not taken up again is of a round that was not written."""
    deleted: list[object] = []
    monkeypatch.setattr(MemoryLog, "delete_topics", lambda _, given: deleted.append(given))
    state, topics, jobs, row = stream_topics(threads=False)
    state.apply(stream_key("s/a"), replace(row, state="FORGETTING"))
    for _ in range(3):
        _, done = next(topics.step(state))
        assert getattr(done, "func", None) is prove_leadership
    assert not deleted
    assert results(topics, state) == [prove_leadership]
    assert results(topics, state) == [prove_leadership]  # they are still there
    assert len(deleted) == 1
    jobs.close()


def stream_topics(*, threads: bool) -> tuple[State, StreamTopics, Jobs, StreamRow]:
    """A state with the stream s/a, whose topics are there, and its row."""
    world, controller = leading("s/a", 1)
    state = State(controller.table)
    topics, jobs = topics_of_world(world, controller, threads=threads)
    return state, topics, jobs, state.streams["s/a"]


def topics_of_world(
    world: World, controller: Controller, *, threads: bool
) -> tuple[StreamTopics, Jobs]:
    log, jobs, trouble = world.cluster.log("t"), Jobs(threads=threads), controller._trouble
    truncator = Truncator(log, jobs, trouble, histories_ms=1)
    return StreamTopics(log, world.clock, jobs, trouble, truncator), jobs


def results(topics: StreamTopics, state: State) -> list[object]:
    """The kinds of results of a step, each logged."""
    return [getattr(done, "func", None) for _, done in topics.step(state)]
