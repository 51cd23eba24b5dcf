"""What simulation has found where topics are deleted by hand, each as a short play of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anabranch.core.stream_states import ACTIVE, LOST, WAITING
from anabranch.ports import LogUnavailable, TopicInfo, TopicPartition
from anabranch.protocol.schemas.records import Begin, Commit, Event, OneShot, Refusal, Scale, Touch
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play
from tests.core.labels import SECRET
from tests.memory.log import MemoryLog


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
@pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])
def test_a_stream_that_grows_when_its_topic_goes_holds_up_nobody(topic: str, anew: bool) -> None:
    """With its history made anew, that it had grown could not be logged: nobody led any more."""
    play = Play()
    play.world.send(Scale(GONE, 4, (), ()))
    if anew:
        play.make_anew(topic)
    else:
        play.world.cluster.delete_topic(topic)
    play.play(3)
    play.lead_anew()
    play.play(3)
    assert play.one_shot(OTHER) == "COMMITTED"
    play.play(80, 2 * LOST_S)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.one_shot(GONE) in ("StreamLost", "NotReady", "COMMITTED")


@pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])
def test_who_scales_a_stream_without_a_topic_is_told_to_ask_again(topic: str) -> None:
    """It was told that the call was wrong; and nobody looked which stream lacked a topic."""
    play = Play()
    play.world.cluster.delete_topic(topic)
    refusal = play.ask(Scale(GONE, 4, (), ()))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "NotReady"
    play.play(2)
    assert play.stream_state(GONE) == WAITING


def test_a_history_made_anew_is_not_taken_for_the_old_one_by_the_last_of_several_records() -> None:
    """The last of two records stood behind the only one of the old history: then nobody led any more."""
    play = Play()
    play.world.stream(play.controller, "nyc/young", segments=1)
    play.make_anew(history_topic("nyc/young"))
    events = [Event("nyc/young", 0, b"k", b"v", (), -1) for _ in range(2)]
    for event in events:
        play.world.send(OneShot(play.world.txn_id(), "nyc", None, (event,)))
    play.play(3)
    place = TopicPartition(history_topic("nyc/young"), 0)
    assert not play.world.committed(place)
    play.play(40, 2 * LOST_S)
    play.lead_anew()
    assert play.stream_state("nyc/young") == LOST
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_big_merge_that_waits_for_partitions_does_not_wait_for_ever() -> None:
    """The stream can't grow, for lack of its history: nothing else needed that, so it was never missed."""
    play = Play(chunk_bytes=1_000)
    txn_id, token, receipt = play.begun(GONE, OTHER, size=300)
    play.world.cluster.delete_topic(history_topic(GONE))
    commit = play.world.send(Commit(token, (receipt,), None, None, 60_000))
    play.play(60, 3 * LOST_S)
    assert play.state(txn_id)[0] == "ABORTED"
    assert isinstance(play.world.reply(commit), Refusal)
    assert play.stream_state(GONE) == LOST


def test_what_was_missing_once_is_not_given_up_for_want_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Missing for a moment, then no broker answered for long: that was taken for missing all the time."""
    play = Play()
    broker, topic = play.world.cluster, stream_topic(GONE)
    info, kept = (
        broker.topics[topic],
        {p: log for p, log in broker.partitions.items() if p.topic == topic},
    )
    broker.delete_topic(topic)
    assert play.one_shot(GONE) == "NotReady"
    broker.topics[topic] = info
    broker.partitions.update(kept)

    def away(_: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        raise LogUnavailable(f"no broker answers for {len(names)} topics")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "describe_topics", away)
        play.play(10, 2 * LOST_S)
        assert play.stream_state(GONE) == WAITING
    play.play(3, 3.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize("more", [0, 1, 20], ids=["as many", "one more", "more"])
@pytest.mark.parametrize("looks", [True, False], ids=["a new leader", "the same leader"])
@pytest.mark.parametrize("one_batch", [True, False], ids=["other batches", "the same batches"])
def test_others_records_in_a_journal_made_anew_are_not_taken_for_a_transactions(
    more: int, looks: bool, one_batch: bool
) -> None:
    """The journal was full again before its leader looked: what was weighed in the old one was merged by offset."""
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    other = play.ask(Begin(play.world.txn_id(), "nyc", None, 600_000, SECRET))
    touched = play.ask(Touch(other.token, GONE))
    play.make_anew(journal_topic(GONE))
    # As big, and in the same places: only what they are tells them from those that were there.
    strangers = [(key, b"y" * 8) for key in KEYS]
    for events in (strangers, [(key, b"z") for key in KEYS * more]):
        play.world.write(
            other.txn_id, 9, GONE, touched.segments, events, epoch=0, one_batch=one_batch
        )
    if looks:
        play.lead_anew()
    play.world.send(Commit(token, (receipt,), None, None, 60_000))
    play.play(40, 2 * LOST_S)
    state, _ = play.state(txn_id)
    assert state == "ABORTED"
    values = {
        record.value
        for p in (0, 1)
        for record in play.world.committed(TopicPartition(stream_topic(GONE), p))
    }
    assert values <= {b"v"}, "nobody committed these"
    assert play.events(OTHER) == 1, "its part in the other stream neither"
    assert play.one_shot(OTHER) == "COMMITTED"


def test_who_touches_a_missing_stream_is_not_silent() -> None:
    """A refused touch did not count: the transaction of somebody who asked again and again went stale."""
    play = Play()
    txn_id = play.world.txn_id()
    begun = play.ask(Begin(txn_id, "nyc", None, 4_000, SECRET))
    play.world.cluster.delete_topic(stream_topic(GONE))
    assert play.one_shot(GONE) == "NotReady"
    for _ in range(10):
        assert play.ask(Touch(begun.token, GONE)).code == "NotReady"
        play.play(2, 2.0)
    assert play.state(txn_id)[0] == "OPEN"
    play.play(10, 10.0)
    assert play.state(txn_id)[0] == "ABORTED"
