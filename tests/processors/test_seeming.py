"""A broker that leads no more, and does not know it, gives less to read than there was: nothing is lost by that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from anabranch.core.stream_states import ACTIVE
from anabranch.ports import Fetched, OffsetOutOfRange, TopicPartition
from anabranch.processors.intake import Intake
from anabranch.schemas.records import Commit, Outcome
from anabranch.topics.names import history_topic, journal_topic
from tests.memory.log import MemoryLog
from tests.processors.losing import GONE, KEYS, LOST_S, OTHER, Play


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
