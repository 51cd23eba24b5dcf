"""A topic of a stream is deleted, or made again, by hand: that stream is given up, all others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.core.stream_states import ACTIVE, LOST, WAITING
from anabranch.ports import Failed, LogUnavailable, TopicInfo, TopicPartition
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import (
    Abort,
    Commit,
    CreateStream,
    DescribeStreams,
    Outcome,
    Refusal,
    Scale,
)
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play
from tests.memory.log import MemoryLog

each_topic = pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])


@each_topic
def test_a_missing_topic_stops_nobody_else_and_is_given_up_in_time(topic: str) -> None:
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    play.world.cluster.delete_topic(topic)
    commit = play.world.send(Commit(token, (receipt,), None, None, 60_000))
    play.play(10, 1.0)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.stream_state(GONE) == WAITING
    assert play.one_shot(GONE) == "NotReady"
    assert play.world.reply(commit) is None
    play.play(20, 1.2 * LOST_S)
    refusal = play.world.reply(commit)
    assert isinstance(refusal, Refusal)
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
    assert isinstance(aborted, Outcome)
    assert aborted.state == "ABORTED"


@each_topic
@pytest.mark.parametrize("leader", ["same", "new"])
def test_a_topic_made_anew_is_another_one(topic: str, leader: str) -> None:
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    play.make_anew(topic)
    if leader == "new":
        play.lead_anew()
    play.world.send(Commit(token, (receipt,), None, None, 600_000))
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


@pytest.mark.parametrize(
    ("known", "hidden_s"),
    [
        pytest.param("all but the topic", 0.5 * LOST_S, id="not known for a while"),
        pytest.param("nothing", 3 * LOST_S, id="a broker that knows nothing yet"),
        pytest.param("a partition less", 0.5 * LOST_S, id="a broker that lags behind"),
    ],
)
@each_topic
def test_a_topic_that_is_found_again_was_only_not_known(
    topic: str, known: str, hidden_s: float
) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    broker = play.world.cluster
    topics = dict(broker.topics)
    kept = {p: log for p, log in broker.partitions.items() if p.topic == topic}
    broker.delete_topic(topic)
    if known == "nothing":
        broker.topics.clear()
    elif known == "a partition less":
        broker.topics[topic] = replace(topics[topic], partitions=topics[topic].partitions - 1)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    play.play(20, hidden_s)
    assert play.world.reply(commit) is None
    broker.topics.update(topics)
    broker.partitions.update(kept)
    play.play(10, 5.0)
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2 * len(KEYS))
    assert play.stream_state(GONE) == ACTIVE
    assert play.events(GONE) == play.events(OTHER) == len(KEYS) + 1


@each_topic
def test_a_carried_merge_past_the_point_of_no_return_says_its_trouble(
    topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its decision stands, so nothing of it is aborted, and the other stream gets nothing of it alone."""
    play = Play(chunk_bytes=1_000)
    txn_id, token, receipt = play.begun(GONE, OTHER, size=300)
    commit = play.world.send(Commit(token, (receipt,), None, None, 60_000))
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


def test_plain_writes_of_a_lost_stream_keep_nobody_busy() -> None:
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


def test_keys_reach_both_segments() -> None:
    assert {position_of(key) >> 31 for key in KEYS} == {0, 1}
