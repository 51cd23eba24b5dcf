"""Topics of a stream are deleted or made again by hand: it is given up, and may be taken back; others commit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.stream_topics import TRIES
from anabranch.core.stream_states import ACTIVE, LOST, WAITING
from anabranch.ports import (
    Failed,
    LogRefused,
    LogUnavailable,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.protocol.schemas.records import (
    Abort,
    AlterStream,
    CreateStream,
    DeleteStream,
    DescribeStreams,
    RecoverStream,
    Scale,
    StreamList,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.names import history_topic, journal_topic, stream_topic, topics_of
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play

TOPIC_AUTHORIZATION_FAILED = 29
each_topic = pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])


@each_topic
def test_a_stream_without_a_topic_is_lost_in_time_and_stops_no_other(topic: str) -> None:
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    play.world.cluster.delete_topic(topic)
    commit = play.send_commit(token, receipt)
    play.play(10, 1.0)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.stream_state(GONE) == WAITING
    assert play.one_shot(GONE) == "NotReady"
    assert play.world.reply(commit) is None
    play.play(20, 1.2 * LOST_S)
    refusal = play.world.reply(commit)
    assert refusal.code == "TransactionAborted"
    assert "nyc/gone is lost: there is no topic" in refusal.message
    assert play.state(txn_id)[0] == "ABORTED"
    assert play.stream_state(GONE) == LOST
    assert play.one_shot(GONE) == "StreamLost"
    assert play.ask(CreateStream(GONE, 2, {})).code == "StreamLost"
    assert play.ask(Scale(GONE, 3, (), ())).code == "StreamLost"
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.events(OTHER) == 3, "one-shots only: nothing of what was aborted"


@each_topic
def test_an_idle_stream_is_lost_within_two_minutes(topic: str) -> None:
    """Nothing is written to the stream, and no client asks for it."""
    play = Play()
    play.play(10, 10.0)
    play.world.cluster.delete_topic(topic)
    play.play(240, 120.0)
    assert play.stream_state(GONE) == LOST
    assert play.ask(CreateStream(GONE, 2, {})).code == "StreamLost"
    assert play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("topic", [stream_topic(GONE), history_topic(GONE)])
def test_an_idle_stream_is_not_lost_for_a_broker_that_does_not_know_it(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other brokers, and the quorum, do."""
    play = Play()
    play.play(10, 10.0)
    describe, starts = MemoryLog.describe_topics, MemoryLog.start_offsets

    def described(log: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        return describe(log, [name for name in names if name != topic])

    def started(
        log: MemoryLog, places: Iterable[TopicPartition], *, failed: Failed | None = None
    ) -> dict[TopicPartition, int]:
        known = [place for place in places if place.topic != topic]
        if failed is not None and known != list(places):
            failed[TopicPartition(topic, 0)] = LogUnavailable("is not found", (topic,))
        return starts(log, known, failed=failed)

    with monkeypatch.context() as lagging:
        lagging.setattr(MemoryLog, "describe_topics", described)
        lagging.setattr(MemoryLog, "start_offsets", started)
        play.play(240, 240.0)
        assert play.stream_state(GONE) == WAITING
    play.play(20, 20.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize("says", ["no topic", "another id"])
def test_one_brokers_word_gives_nothing_up(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the status topic, and no later one, or a former stream of that name: the quorum knows better."""
    play, topic = Play(), stream_topic(GONE)
    txn_id, _, _ = play.begun(GONE)
    describe = MemoryLog.describe_topics

    def described(self: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        found = describe(self, names)
        former = replace(found.pop(topic), topic_id="x") if topic in found else None
        return found | ({topic: former} if former and says == "another id" else {})

    monkeypatch.setattr(MemoryLog, "describe_topics", described)
    play.controller._trouble.look(play.controller.state, {GONE})
    play.play(50, 200.0)
    assert play.stream_state(GONE) == WAITING
    assert play.state(txn_id)[0] == "OPEN"
    monkeypatch.undo()
    play.play(10, 20.0)
    assert play.one_shot(GONE) == "COMMITTED"


@each_topic
@pytest.mark.parametrize("keeps_table", [True, False])
def test_a_new_leader_finds_the_topic_missing(topic: str, keeps_table: bool) -> None:
    play = Play()
    txn_id, token, _ = play.begun(GONE)
    play.world.cluster.delete_topic(topic)
    play.lead_anew(keeps_table=keeps_table)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.one_shot(GONE) == "NotReady"
    play.play(20, LOST_S)
    assert play.state(txn_id)[0] == "ABORTED"
    play.lead_anew()  # it is on the log
    assert play.stream_state(GONE) == LOST
    assert play.one_shot(OTHER) == "COMMITTED"
    aborted = play.ask(Abort(token, ""))
    assert aborted.state == "ABORTED"


@each_topic
@pytest.mark.parametrize("leader", ["same", "new"])
def test_a_topic_made_anew_is_another_one(topic: str, leader: str) -> None:
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    play.make_anew(topic)
    if leader == "new":
        play.lead_anew()
    play.send_commit(token, receipt)
    play.play(20, 0.5 * LOST_S)
    # What brokers took there is proof; what one tells a new leader, which looks first, may be old.
    certain = leader == "same" and topic in (stream_topic(GONE), history_topic(GONE))
    assert play.stream_state(GONE) == (LOST if certain else WAITING)
    play.play(20, LOST_S)
    assert play.stream_state(GONE) == LOST
    state, reason = play.state(txn_id)
    assert state == "ABORTED"
    assert "created again" in reason
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.events(OTHER) == 2


@each_topic
def test_a_broker_that_knows_no_topics_yet_gives_nothing_up(topic: str) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    topics = dict(play.world.cluster.topics)
    bring_back = play.world.take_away(topic)
    play.world.cluster.topics.clear()
    commit = play.send_commit(token, receipt)
    play.play(20, 3 * LOST_S)
    assert play.world.reply(commit) is None
    play.world.cluster.topics.update(topics)
    bring_back()
    play.play(10, 5.0)
    play.check_committed(commit, 2 * len(KEYS))
    assert play.stream_state(GONE) == ACTIVE
    assert play.events(GONE) == play.events(OTHER) == len(KEYS) + 1


@each_topic
def test_a_staged_merge_past_the_point_of_no_return_says_its_trouble(
    topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its decision stands, so nothing of it is aborted, and the other stream gets nothing of it alone."""
    play = Play(chunk_bytes=1_000)
    txn_id, token, receipt = play.begun(GONE, OTHER, size=300)
    commit = play.send_commit(token, receipt)
    while not play.controller.state.open[txn_id].staged_merges:
        play.play(1, 0.1)
    play.world.cluster.delete_topic(topic)
    play.play(30, 2 * LOST_S)
    assert play.one_shot(OTHER) == "COMMITTED"
    if play.stream_state(GONE) == ACTIVE:  # nothing there was needed yet
        assert play.one_shot(GONE) == "NotReady"
        play.play(30, 2 * LOST_S)
    assert play.stream_state(GONE) == LOST
    state, reason = play.state(txn_id)
    assert state == "FINALIZE_IN_PROGRESS"
    assert "its merge makes no progress: nyc/gone: a topic of it is gone" in reason
    assert play.world.reply(commit) is None
    play.lead_anew(chunk_bytes=1_000)
    merges = dict(play.controller.state.open[txn_id].staged_merges)
    said = len(caplog.records)
    play.play(20, 6 * LOST_S)
    assert play.state(txn_id) == (state, reason)
    assert play.controller.state.open[txn_id].staged_merges == merges, "nothing is carried in vain"
    assert len(caplog.records) == said, "it is said once"
    assert play.one_shot(OTHER) == "COMMITTED"


def test_plain_writes_of_a_lost_stream_cost_no_rounds() -> None:
    play = Play()
    play.world.cluster.delete_topic(stream_topic(GONE))
    place = TopicPartition(journal_topic(GONE), 0)
    for n in range(4):
        play.world.cluster.produce(place, [Record(0, 1, KEYS[n], b"plain", ())])
    play.play(20, 2 * LOST_S)
    assert play.stream_state(GONE) == LOST
    play.play(3)
    rounds, waits = play.controller.rounds, []
    fetch: Callable[..., Any] = play.controller.log.fetch

    def waited(*args: Any, max_wait: float, **more: Any) -> Any:
        waits.append(max_wait)
        return fetch(*args, max_wait=0, **more)

    play.controller.log.fetch = waited  # type: ignore[method-assign]
    for _ in range(3):
        play.controller.step(0.5)
    assert play.controller.rounds == rounds
    assert min(waits) > 0.1
    described = play.ask(DescribeStreams(None, GONE)).streams[0]
    assert not described.rejected, "they were not passed over"


# -- taking back ---------------------------------------------------------------------------------------


def given_up(topic: str) -> tuple[Play, Callable[[], None], bytes]:
    """A stream that has lost this topic, what brings that back, and the token of a transaction."""
    play = Play()
    _, token, _ = play.begun(GONE)
    bring_back = play.world.take_away(topic)
    assert play.one_shot(GONE) == "NotReady"
    play.play(60, 60.0)
    assert play.one_shot(GONE) == "StreamLost"
    return play, bring_back, token


@pytest.mark.parametrize("mended", ["the old topics", "another topic"])
def test_a_stream_given_up_is_taken_back_with_its_old_topics(mended: str) -> None:
    play, bring_back, token = given_up(stream_topic(GONE))
    assert play.ask(RecoverStream(GONE)).code == "IllegalState"
    if mended == "another topic":
        play.world.cluster.create([TopicSpec(stream_topic(GONE), 2)])
        assert play.ask(RecoverStream(GONE)).code == "IllegalState"
        assert play.one_shot(GONE) == "StreamLost"
    else:
        bring_back()
        assert play.ask(RecoverStream(GONE)).streams[0].state == ACTIVE
        assert play.one_shot(GONE) == "COMMITTED"
        assert play.ask(Abort(token, "")).state == "ABORTED"
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_stream_that_may_not_be_described_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it end leading, which began with the same call."""
    play, bring_back, _ = given_up(topic := stream_topic(GONE))
    bring_back()
    describe = MemoryLog.describe_topics

    def described(self: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        if topic in names:
            refused = "TOPIC_AUTHORIZATION_FAILED"
            raise LogRefused(refused, TOPIC_AUTHORIZATION_FAILED, (topic,))
        return describe(self, names)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "describe_topics", described)
        asked = play.world.send(RecoverStream(GONE))
        play.play(2)
        play.lead_anew()
        assert play.one_shot(OTHER) == "COMMITTED"
        play.play(30, 15.0)
        assert (play.world.reply(asked).code, play.one_shot(GONE)) == ("NotReady", "StreamLost")
    assert play.ask(RecoverStream(GONE)).streams[0].state == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


# -- descriptions of a broker that lags ----------------------------------------------------------------


def described(play: Play) -> dict[str, TopicInfo]:
    return play.world.cluster.log("somebody").describe_topics(topics_of(GONE))


def describe_late(
    patch: pytest.MonkeyPatch, former: Mapping[str, TopicInfo], when: Container[int]
) -> None:
    """Some of the descriptions of all three topics, counted from 1, come from a broker that lags."""
    now, calls = MemoryLog.describe_topics, [0]

    def describe(log: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        found, own = now(log, names), topics_of(GONE)
        calls[0] += set(own) <= set(names)
        if not set(own) <= set(names) or calls[0] not in when:
            return found
        return {name: info for name, info in found.items() if name not in own} | dict(former)

    patch.setattr(MemoryLog, "describe_topics", describe)


@pytest.mark.parametrize(
    ("left", "segments", "when"),
    [(False, 4, [3]), (False, 2, [4]), (True, 2, range(9))],
    ids=["more segments", "the last look", "topics that a former try has made"],
)
def test_a_stream_made_again_has_the_ids_of_its_own_topics(
    monkeypatch: pytest.MonkeyPatch, left: bool, segments: int, when: Container[int]
) -> None:
    play = Play()
    former = described(play)
    play.ask(DeleteStream(GONE), seconds=1)
    if left:
        specs = [TopicSpec(i.name, i.partitions, i.config) for i in former.values()]
        play.world.cluster.log("somebody").create_topics(specs)
    with monkeypatch.context() as patch:
        describe_late(patch, former, when)
        answer = play.ask(CreateStream(GONE, segments, {}), seconds=1)
    assert getattr(answer, "code", "NotReady") == "NotReady"
    assert isinstance(play.ask(CreateStream(GONE, segments, {}), seconds=1), StreamList)
    ids = play.controller.state.streams[GONE].topic_ids
    assert list(ids) == [info.topic_id for info in described(play).values()]


def test_a_deletion_does_not_end_by_one_brokers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    with monkeypatch.context() as patch:
        describe_late(patch, {}, [1])
        assert play.ask(DeleteStream(GONE), seconds=1) == StreamList(())
    assert not described(play)


def test_a_recovery_is_not_refused_for_good_by_one_brokers_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    with monkeypatch.context() as patch:
        describe_late(patch, {}, range(999))
        patch.setattr(MemoryLog, "is_gone", lambda *_: True)
        play.lead_anew()
        play.one_shot(GONE)
        play.play(5, 2 * LOST_S)
        assert play.stream_state(GONE) == LOST
        patch.undo()
        describe_late(patch, {}, range(999))
        answer = play.ask(RecoverStream(GONE), seconds=1)
        assert answer.code == "NotReady"
    assert play.ask(RecoverStream(GONE), seconds=1).streams[0].state == ACTIVE


def test_a_recovery_that_brokers_cannot_judge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried on a helper thread, each try counted as the first one: it never ended."""
    play, asked = Play(), []
    play.world.cluster.delete_topic(history_topic(GONE))
    play.lead_anew()
    play.one_shot(GONE)
    play.play(5, 2 * LOST_S)

    def away(*_: object) -> bool:
        asked.append(1)
        raise LogUnavailable("broker 2 can't be asked")

    monkeypatch.setattr(MemoryLog, "is_gone", away)
    with ThreadPoolExecutor(1) as beside:
        assert play.controller._background is not None
        jobs = play.controller._background._jobs
        jobs._helpers["topics"] = beside
        command = play.world.send(RecoverStream(GONE))
        for _ in range(99):
            play.play(1, 1.0)
            [work.exception() for work, _ in jobs._under_way.values()]
    assert play.world.reply(command).code == "NotReady"
    assert (len(asked), play.stream_state(GONE)) == (TRIES, LOST)


def test_an_alteration_after_a_growth_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    former = described(play)
    play.ask(Scale(GONE, 4, (), ()), seconds=1)
    alter = AlterStream(GONE, {"retention.ms": "86400000"}, ())
    with monkeypatch.context() as patch:
        describe_late(patch, former, range(99))
        assert play.ask(alter, seconds=1).code == "NotReady"
    assert isinstance(play.ask(alter, seconds=1), StreamList)
