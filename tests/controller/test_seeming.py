"""A broker that leads no more, or lags, and does not know it, tells of former times: nothing is lost by that."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from anabranch.controller.intake import Intake
from anabranch.controller.stream_topics import TRIES
from anabranch.core.stream_states import ACTIVE, LOST
from anabranch.ports import (
    Fetched,
    LogUnavailable,
    OffsetOutOfRange,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.protocol.schemas.records import (
    AlterStream,
    Commit,
    CreateStream,
    DeleteStream,
    Outcome,
    RecoverStream,
    Refusal,
    Scale,
    StreamList,
)
from anabranch.topics.names import history_topic, journal_topic, topics_of
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, Play
from tests.memory.log import MemoryLog


class StaleBroker:
    """Some partitions are read from it while ``leads``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic: str, end: int) -> None:
        self.leads = False
        fetch, end_offsets = MemoryLog.fetch, MemoryLog.end_offsets

        def fetched(
            log: MemoryLog, positions: Mapping[TopicPartition, int], **how: Any
        ) -> dict[TopicPartition, Fetched]:
            stale = {
                place: at
                for place, at in positions.items()
                if self.leads and place.topic == topic and at > end
            }
            for place, at in stale.items():
                how["failed"][place] = OffsetOutOfRange(place, at)
            return fetch(log, {p: at for p, at in positions.items() if p not in stale}, **how)

        def ends(
            log: MemoryLog, places: Sequence[TopicPartition], **how: Any
        ) -> dict[TopicPartition, int]:
            found = end_offsets(log, places, **how)
            stale = [place for place in found if self.leads and place.topic == topic]
            return found | dict.fromkeys(stale, end)

        monkeypatch.setattr(MemoryLog, "fetch", fetched)
        monkeypatch.setattr(MemoryLog, "end_offsets", ends)


def test_a_decided_merge_whose_journal_is_read_of_it_is_not_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    broker = StaleBroker(monkeypatch, journal_topic(GONE), 0)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    with monkeypatch.context() as patched:  # the intake has read it from another broker
        patched.setattr(Intake, "_journal_positions", lambda *_: [])
        broker.leads = True
        play.play(20, 10.0)
    assert play.world.reply(commit) is None
    broker.leads = False
    play.play(20, 20.0)
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2 * len(KEYS))


@pytest.mark.parametrize(
    ("topic", "end"),
    [(journal_topic(GONE), 1), (history_topic(GONE), 0)],
    ids=["journal", "history"],
)
@pytest.mark.parametrize("times", [1, 5], ids=["once", "again and again, with days between"])
def test_nothing_is_given_up_for_what_is_read_of_it_for_a_while(
    monkeypatch: pytest.MonkeyPatch, topic: str, end: int, times: int
) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    broker = StaleBroker(monkeypatch, topic, end)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    for _ in range(times):
        broker.leads = True
        if topic == history_topic(GONE):  # read when leading begins only
            play.lead_anew()
        play.play(20, 0.5 * LOST_S)
        assert play.one_shot(GONE) == "NotReady"
        assert play.one_shot(OTHER) == "COMMITTED"
        broker.leads = False
        play.play(10, 20.0)
        assert play.stream_state(GONE) == ACTIVE
        assert play.one_shot(GONE) == "COMMITTED"
        outcome = play.world.reply(commit)
        assert isinstance(outcome, Outcome)
        assert (outcome.state, outcome.committed) == ("COMMITTED", 2 * len(KEYS))
        play.world.clock.sleep(100_000)


def described(play: Play) -> dict[str, TopicInfo]:
    return play.world.cluster.log("somebody").describe_topics(topics_of(GONE))


def tell_late(
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
        tell_late(patch, former, when)
        answer = play.ask(CreateStream(GONE, segments, {}), seconds=1)
    assert getattr(answer, "code", "NotReady") == "NotReady"
    assert isinstance(play.ask(CreateStream(GONE, segments, {}), seconds=1), StreamList)
    ids = play.controller.state.streams[GONE].topic_ids
    assert list(ids) == [info.topic_id for info in described(play).values()]


def test_a_deletion_does_not_end_by_one_brokers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    with monkeypatch.context() as patch:
        tell_late(patch, {}, [1])
        assert play.ask(DeleteStream(GONE), seconds=1) == StreamList(())
    assert not described(play)


def test_a_recovery_is_not_refused_for_good_by_one_brokers_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    with monkeypatch.context() as patch:
        tell_late(patch, {}, range(999))
        patch.setattr(MemoryLog, "is_gone", lambda *_: True)
        play.lead_anew()
        play.one_shot(GONE)
        play.play(5, 2 * LOST_S)
        assert play.stream_state(GONE) == LOST
        patch.undo()
        tell_late(patch, {}, range(999))
        answer = play.ask(RecoverStream(GONE), seconds=1)
        assert isinstance(answer, Refusal)
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


def test_an_alteration_behind_a_growth_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    former = described(play)
    play.ask(Scale(GONE, 4, (), ()), seconds=1)
    alter = AlterStream(GONE, {"retention.ms": "86400000"}, ())
    with monkeypatch.context() as patch:
        tell_late(patch, former, range(99))
        assert play.ask(alter, seconds=1).code == "NotReady"
    assert isinstance(play.ask(alter, seconds=1), StreamList)
