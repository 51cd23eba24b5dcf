"""Carried merges: what brokers refuse concerns their transactions alone, and threads carry one chunk at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from anabranch.batches.format import Buffer
from anabranch.controller.carrier import Carrier, Carriers, Job
from anabranch.ports import LogRefused, LogUncertain, Steps, TopicPartition
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import (
    Commit,
    GetState,
    Outcome,
    Refusal,
    Scale,
    StagedMergeRow,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.topics.names import journal_topic, stream_topic
from tests.controller.world import leading

STREAM = "nyc/flights"
FIRST = tuple(key for n in range(40) if position_of(key := b"k%d" % n) < 1 << 31)


class Broker:
    """Refuses data for some partitions of the stream while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: set[int] = set()
        self.refused = 0
        appending = MemoryProducer.appending

        def checked(
            producer: MemoryProducer, batches: Sequence[tuple[TopicPartition, Buffer]]
        ) -> Steps[list[int]]:
            if any(
                tp.topic == stream_topic(STREAM) and tp.partition in self.refuses
                for tp, _ in batches
            ):
                self.refused += 1
                raise LogRefused("refused for the test", 10)
            return (yield from appending(producer, batches))

        monkeypatch.setattr(MemoryProducer, "appending", checked)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


def test_an_open_transaction_is_not_silent_for_a_round_that_was_refused(broker: Broker) -> None:
    world, controller = leading(STREAM)
    world.clock.sleep(300)  # it leads for longer than the keepalive
    txn_id, _, _ = world.begin(controller, STREAM, name="night")
    broker.refuses = {0, 1}
    answer = world.ask(controller, world.one_shot(STREAM, FIRST[0], name="night"))
    assert isinstance(answer, Refusal)
    world.clock.sleep(1)
    world.steps(controller, 4)
    state = world.ask(controller, GetState(txn_id))
    assert (state.state, state.reason) == ("OPEN", "")


def test_a_staged_merge_that_the_broker_refuses_stops_no_other(broker: Broker) -> None:
    world, controller = leading(STREAM, chunk_bytes=2_000)
    txn_id, token, touched = world.begin(controller, STREAM)
    events = [(key, b"x" * 100) for key in FIRST for _ in range(4)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    assert world.ask(controller, Scale(STREAM, 3, (), ())) is not None
    broker.refuses = {3, 4, 5}
    commit = world.send(Commit(token, (receipt,), None, None, 10_000))
    world.steps(controller, 10, 0.1)
    assert broker.refused
    answer = world.ask(controller, world.one_shot(STREAM, FIRST[0]))
    assert answer.state == "COMMITTED"
    assert broker.refused < 5  # it is tried again, but not all the time
    assert "its merge makes no progress: " in world.ask(controller, GetState(txn_id)).reason
    broker.refuses = set()
    world.steps(controller, 200, 0.1)
    outcome = world.reply(commit)
    assert (outcome.state, outcome.committed) == ("COMMITTED", len(events))
    assert (outcome.reason, world.ask(controller, GetState(txn_id)).reason) == ("", "")


def test_a_staged_merge_whose_records_are_deleted_stops_no_other() -> None:
    """It was the end of leading, again and again: nothing else was committed either."""
    world, controller = leading(STREAM, chunk_bytes=2_000)
    txn_id, token, touched = world.begin(controller, STREAM)
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
    world.steps(controller, 10, 0.1)
    answer = world.ask(controller, world.one_shot(STREAM, FIRST[0]))
    assert answer.state == "COMMITTED"
    stands = world.ask(controller, GetState(txn_id))
    assert stands.state == "FINALIZE_IN_PROGRESS"
    assert "its merge makes no progress: a journal lost records of it" in stands.reason
    controller.update_metrics()
    assert controller.metrics.values["stuck_merges"] == {("torn",): 1, ("waiting",): 0}


def test_a_merge_that_the_broker_refuses_is_found_while_commands_come(broker: Broker) -> None:
    world, controller = leading(STREAM)
    second = tuple(key for n in range(40) if position_of(key := b"k%d" % n) >= 1 << 31)
    commits = []
    for keys in (FIRST, second):
        txn_id, token, touched = world.begin(controller, STREAM)
        receipt = world.write(txn_id, 1, STREAM, touched.segments, [(keys[0], b"v")])
        commits.append(Commit(token, (receipt,), None, None, 10_000))
    broker.refuses = {0}
    asked = [world.send(commit) for commit in commits]
    for _ in range(60):
        for _ in range(4):
            world.send(world.one_shot(STREAM, second[0]))
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
    world, controller = leading(STREAM, chunk_bytes=2_000)
    asked = 0
    add = MemoryLog.add_partitions

    def refused(log: MemoryLog, topic: str, partitions: int) -> None:
        nonlocal asked
        asked += 1
        raise LogRefused("no more partitions", 37)

    monkeypatch.setattr(MemoryLog, "add_partitions", refused)
    txn_id, token, touched = world.begin(controller, STREAM)
    events = [(key, b"x" * 100) for key in FIRST for _ in range(4)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    commit = world.send(Commit(token, (receipt,), None, None, 10_000))
    world.steps(controller, 100, 0.06)
    assert 0 < asked < 5
    monkeypatch.setattr(MemoryLog, "add_partitions", add)
    world.steps(controller, 300, 0.06)
    outcome = world.reply(commit)
    assert outcome.state == "COMMITTED"


# -- threads -------------------------------------------------------------------------------------------

CHUNKS = 4
DEADLINE_S = 10.0


class WatchedCarrier(Carrier):
    """A carrier without a log: it counts who carries beside it."""

    staging = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def chunk(self, job: Job, wall_ms: int) -> StagedMergeRow:
        with self.lock:
            WatchedCarrier.staging += 1
            WatchedCarrier.most = max(WatchedCarrier.most, WatchedCarrier.staging)
        time.sleep(0.01)
        with self.lock:
            WatchedCarrier.staging -= 1
        if self._fails:
            raise LogUncertain("the broker went away")
        count = job.row.count + 1
        job.row = replace(job.row, count=count, done=count == CHUNKS)
        return job.row

    def close(self) -> None:
        """It has no readers."""


@contextmanager
def staging(each: list[Carrier], jobs: int) -> Iterator[Carriers]:
    """Threads at work on so many jobs."""
    WatchedCarrier.staging = WatchedCarrier.most = 0
    carriers = Carriers(each, threads=True)
    try:
        for number in range(jobs):
            row = StagedMergeRow(
                b"t" * 16, "s/x", number, number, number + 2,
                cursor=0, first=-1, end=-1, count=0, done=False,
            )  # fmt: skip
            job = Job(row, deque(), 1_000_000)
            carriers._jobs[job.key] = job
            carriers._todo.put((job, 0))
        yield carriers
    finally:
        carriers.close()


def take_until(carriers: Carriers, count: int) -> list[StagedMergeRow]:
    rows: list[StagedMergeRow] = []
    until = time.monotonic() + DEADLINE_S
    while len(rows) < count:
        assert time.monotonic() < until, rows
        rows += carriers.take(0)
        time.sleep(0.001)
    return rows


def test_one_chunk_at_a_time() -> None:
    with staging([WatchedCarrier(), WatchedCarrier()], jobs=2) as carriers:
        rows = take_until(carriers, 2 * CHUNKS)
    assert WatchedCarrier.most == 1
    for number in range(2):
        mine = [row.count for row in rows if row.number == number]
        assert mine == list(range(1, CHUNKS + 1)), "each segment's chunks in order, none twice"
    assert sum(row.done for row in rows) == 2


def test_a_failure_does_not_hold_up_the_other_carrier() -> None:
    with staging([WatchedCarrier(fails=True), WatchedCarrier(fails=True)], jobs=2) as carriers:
        failures = 0
        until = time.monotonic() + DEADLINE_S
        while failures < 2:
            assert time.monotonic() < until
            try:
                carriers.take(0)
            except LogUncertain:
                failures += 1
            time.sleep(0.001)
