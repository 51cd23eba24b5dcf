"""The order of a round's writes: history with guessed offsets, and what happens when they are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from anabranch.batches.format import Buffer
from anabranch.batches.records import Record, encode_batch
from anabranch.controller import durability
from anabranch.controller.background import ForeignRecordScan
from anabranch.controller.controller import Controller
from anabranch.controller.durability import MOST_SKIPPED, Appended, OffsetGuess
from anabranch.controller.jobs import Jobs
from anabranch.ports import Log, LogRefused, Steps, TopicPartition
from anabranch.protocol.ids import TXN_HEADER, unpack_txn_header
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    CreateStream,
    DescribeStreams,
    EpochRecord,
    Event,
    OneShot,
    Outcome,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.topics.creation import create_stream_topics
from anabranch.topics.names import history_topic, stream_topic
from tests.controller.world import World, leading

STREAM = "nyc/flights"
DATA = TopicPartition(stream_topic(STREAM), 0)
HISTORY = TopicPartition(history_topic(STREAM), 0)


class Calls:
    """Counts what all producers do, and may refuse an append."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.appends = 0
        self.aborts = 0
        self.refuse = 0
        appending, abort = MemoryProducer.appending, MemoryProducer.abort

        def counted(
            producer: MemoryProducer, batches: Sequence[tuple[TopicPartition, Buffer]]
        ) -> Steps[list[int]]:
            self.appends += 1
            if self.refuse:
                self.refuse -= 1
                yield from appending(producer, batches[:1])
                raise LogRefused("refused for the test", 87)
            return (yield from appending(producer, batches))

        def aborted(producer: MemoryProducer) -> None:
            self.aborts += 1
            abort(producer)

        monkeypatch.setattr(MemoryProducer, "appending", counted)
        monkeypatch.setattr(MemoryProducer, "abort", aborted)

    def take(self) -> tuple[int, int]:
        """(appends, aborts) since the last call."""
        found = self.appends, self.aborts
        self.appends = self.aborts = 0
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def commit(world: World, controller: Controller, events: int = 3) -> Outcome:
    shot = tuple(Event(STREAM, -1, b"key-%d" % i, b"value", (), -1) for i in range(events))
    outcome = world.ask(controller, OneShot(world.txn_id(), "nyc", None, shot))
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"
    return outcome


def check_history(world: World, commits: int, segments: int = 1) -> None:
    """Every COMMIT record names exactly the events of its transaction; the records form a chain."""
    events: dict[tuple[int, int], bytes] = {}
    for partition in range(segments):
        for record in world.committed(TopicPartition(stream_topic(STREAM), partition)):
            header = dict(record.headers).get(TXN_HEADER)
            if header is not None:
                events[partition, record.offset] = unpack_txn_header(header)[0]
    records = world.committed(HISTORY)
    named: dict[tuple[int, int], bytes] = {}
    before = None
    found = 0
    for record in records:
        history = decode(record.value or b"")
        assert isinstance(history, CommitRecord | EpochRecord)
        if before is not None:
            assert history.previous in (before, -2)
        before = record.offset
        if isinstance(history, CommitRecord):
            found += 1
            for at in history.segments:
                assert at.end - at.first == at.count
                assert dict(history.vector)[at.partition] == at.end
                for offset in range(at.first, at.end):
                    named[at.partition, offset] = history.txn_id
    assert named == events
    assert found == commits
    timestamps = [decode(record.value or b"").timestamp for record in records]
    assert timestamps == sorted(set(timestamps))


def test_data_and_history_go_in_one_append_where_the_offsets_are_guessed(calls: Calls) -> None:
    world, controller = leading(STREAM, 2)
    calls.take()
    commit(world, controller, 20)
    assert calls.take() == (2, 0), "the first round of a partition waits for its offsets"
    for _ in range(3):
        commit(world, controller, 20)
        assert calls.take() == (1, 0)
    check_history(world, 4, 2)


def test_what_was_guessed_wrong_is_never_seen(calls: Calls) -> None:
    world, controller = leading(STREAM, 1)
    commit(world, controller)
    world.cluster.produce(DATA, [Record(0, 0, b"of", b"somebody else", ())])
    calls.take()
    outcome = commit(world, controller)
    assert calls.take() == (3, 1)
    check_history(world, 2)
    values = [record.value for record in world.committed(DATA)]
    assert values == [b"value"] * 3 + [b"somebody else"] + [b"value"] * 3
    assert controller.state.txn_row(outcome.txn_id) is not None
    waited = appends = 0
    while appends != 1:  # soon it is right again
        commit(world, controller)
        appends, aborts = calls.take()
        assert aborts == 0
        waited += 1
        assert waited < 10
    check_history(world, 2 + waited)


def test_a_late_marker_is_guessed_wrong(calls: Calls) -> None:
    """The data of the next round lands before the marker of the last one."""
    world, controller = leading(STREAM, 1)
    commit(world, controller)
    world.cluster.marker_delay = 0.5
    commits = 1
    seen = 0
    for _ in range(6):
        world.send(world.one_shot(STREAM, b"key", b"value"))
        controller.step(0)
        commits += 1
        seen += calls.take()[1]
    world.clock.sleep(5)
    assert seen > 0
    check_history(world, commits)


def test_a_refusal_of_a_guessed_round_leaves_nothing(calls: Calls) -> None:
    world, controller = leading(STREAM, 1)
    commit(world, controller)
    calls.refuse = 1
    commit(world, controller)
    check_history(world, 2)
    commit(world, controller)
    check_history(world, 3)


def test_a_successor_guesses_no_offset_of_its_forerunner(calls: Calls) -> None:
    world, first = leading(STREAM, 1)
    commit(world, first)
    second = world.led("d")
    commit(world, second)
    calls.take()
    commit(world, second)
    assert calls.take() == (1, 0)
    check_history(world, 3)


def test_a_former_leader_guesses_wrong_after_another_one(calls: Calls) -> None:
    """Its offsets are from before theirs: no sign of a topic that was made anew."""
    world, first = leading(STREAM, 1)
    commit(world, first)
    second = world.led("d")
    for _ in range(3):
        commit(world, second)
    first.lead()
    calls.take()
    commit(world, first)
    assert calls.take() == (3, 1)
    assert first.state.streams[STREAM].state == "ACTIVE"
    check_history(world, 5)


def test_after_big_data_nothing_is_guessed(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    world, controller = leading(STREAM, 1)
    commit(world, controller)
    with monkeypatch.context() as big:
        big.setattr(durability, "SMALL_BYTES", 1)
        commit(world, controller)
    calls.take()
    commit(world, controller)
    assert calls.take() == (2, 0)
    check_history(world, 3)


def batch(records: int) -> bytes:
    return encode_batch([Record(i, 0, b"k", b"v", ()) for i in range(records)])


def test_several_batches_of_a_partition_follow_each_other() -> None:
    offsets = OffsetGuess()
    other = TopicPartition("t", 1)
    assert offsets.guess([(DATA, batch(2))]) is None
    offsets.committed([(DATA, batch(2)), (DATA, batch(3)), (other, batch(1))], [10, 12, 7])
    assert offsets.guess([(DATA, batch(4)), (other, batch(1)), (DATA, batch(1))]) == [16, 9, 20]
    assert offsets.guess([(DATA, batch(4)), (TopicPartition("t", 2), batch(1))]) is None
    offsets.committed([], [])
    assert offsets.guess([(other, batch(1))]) is None


def test_where_it_keeps_failing_attempts_get_rare() -> None:
    offsets = OffsetGuess()
    one = [(DATA, batch(1))]
    offsets.committed(one, [0])
    attempts = 0
    for _ in range(20_000):
        if offsets.guess(one) is not None:
            attempts += 1
            offsets.miss()
    assert attempts <= 11 + 20_000 // MOST_SKIPPED
    while offsets.guess(one) is None:
        pass
    offsets.hit()
    assert offsets.guess(one) is not None


def test_records_of_others_are_counted_and_nothing_else(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """Not markers, however late, nor what was aborted, nor rounds of other leaders."""
    world, controller = leading(STREAM, 1)

    def found() -> int:
        world.clock.sleep(1)
        (info,) = world.ask(controller, DescribeStreams(None, STREAM)).streams
        controller.update_metrics()
        shown = controller.metrics.values["foreign_records"]
        assert shown == ({(STREAM,): info.foreign} if info.foreign else {})
        return int(info.foreign)

    for strays in (1, 0, 2, 0, 1):
        before = found()
        if strays:
            world.cluster.produce(DATA, [Record(0, 0, b"k", b"stray")] * strays)
            theirs = world.cluster.log("x").producer("theirs", timeout=60)
            theirs.append([(DATA, batch(3))])
            theirs.abort()
        calls.refuse = 1
        for _ in range(3):
            commit(world, controller)
        assert [found() - before for _ in range(8)][-1] == strays
        if strays == 2:
            controller = world.led("d")
    assert len([r for r in caplog.records if "records of others" in r.getMessage()]) == 2


def test_markers_may_come_late() -> None:
    """They are owed until they come; only what is too much is looked into."""
    looked: list[dict[TopicPartition, int]] = []

    class Empty:
        def fetch(self, positions: dict[TopicPartition, int], **_: object) -> dict[Any, Any]:
            looked.append(positions)
            return {}

    scan = ForeignRecordScan(cast("Log", Empty()), Jobs(threads=False))
    known = 10
    for gap in (1, 0, 0, 3, 1, 0, 2, 1):
        scan.appended([Appended(STREAM, 0, known, known + gap)])
        known += gap + 5
        scan.look(known * 1000)
    assert looked == []
    scan.appended([Appended(STREAM, 0, known, known + 2)])
    scan.look(known * 1000)
    assert looked == [{DATA: known}]


@pytest.mark.parametrize("end", [0, 2, 4], ids=["of another", "without commits", "not the last"])
def test_a_history_whose_end_was_answered_from_the_past(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands there is not passed over, and it is not taken for empty."""
    world = World()
    if end:
        world.stream(controller := world.led(), STREAM, 1)
        for _ in range(2):
            commit(world, controller)
    else:
        create_stream_topics(world.cluster.log("setup"), STREAM, segments=1, settings={})
        world.cluster.produce(HISTORY, [Record(0, 0, b"", b"of another stream", ())])
    past, end_offsets = {HISTORY: end}, MemoryLog.end_offsets

    def ended(log: MemoryLog, places: Any, **how: Any) -> dict[TopicPartition, int]:
        found = end_offsets(log, places, **how)
        return found | {place: past[place] for place in found if place in past}

    monkeypatch.setattr(MemoryLog, "end_offsets", ended)
    controller = world.led("d")
    before = len(world.committed(HISTORY))
    told = "history was read from a broker that lags"
    if not end:
        with pytest.raises(AssertionError, match="no answer"):  # it is tried again
            world.stream(controller, STREAM, 1)
    else:
        with pytest.raises(AssertionError, match=f"NotReady.*{told}"):
            commit(world, controller)
    assert controller.lease is not None, "the stream waits, and nobody else"
    assert len(world.committed(HISTORY)) == before
    past.clear()
    if end:
        for _ in range(10):
            world.clock.sleep(1)
            controller.step(0)
        commit(world, controller)
        check_history(world, 3)
    else:
        world.clock.sleep(1)
        controller.step(0)
        assert world.ask(controller, CreateStream(STREAM, 1, {})).code == "UnsupportedVersion"
