"""A partition without a leader is not waited for by those who lead other streams too."""

from __future__ import annotations

import pytest

from anabranch.batches.records import Record
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import LogUnavailable, TopicPartition
from anabranch.processors.history_tail import load_tail
from anabranch.processors.streams.histories import Histories
from anabranch.schemas.records import Scale, StreamList
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.memory.trouble import Kind, Trouble
from tests.processors.losing import GONE, OTHER, Play


class Leaderless(Play):
    """A partition loses its leader at a call."""

    def lose(self, place: TopicPartition, call: str, after: str = "") -> None:
        """``after``: only once there was such a call."""
        self.place = place
        seen: set[str] = set()
        self.began = self.world.clock.now

        def called(_: str, name: str) -> None:
            seen.add(name)
            if name == call and (not after or after in seen):
                self.world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)

        self.world.cluster.on_call = called

    def check_nobody_waited(self) -> None:
        assert self.place in self.world.cluster.troubles
        assert self.world.clock.now == self.began

    def mend(self) -> None:
        self.world.cluster.on_call = None
        self.world.cluster.troubles.clear()

    def check_that_stream_alone_waits(self) -> None:
        self.play(5)
        assert self.one_shot(OTHER) == "COMMITTED"
        self.check_nobody_waited()
        assert self.one_shot(GONE) == "NotReady"
        self.mend()
        self.play(30, 30.0)


def test_a_new_segment_on_it() -> None:
    play = Leaderless()
    play.lose(TopicPartition(stream_topic(GONE), 2), "describe_topics", "add_partitions")
    scaled = play.world.send(Scale(GONE, 3, (), ()))
    play.check_that_stream_alone_waits()
    assert isinstance(play.world.reply(scaled), StreamList)
    assert play.one_shot(GONE) == "COMMITTED"


def test_the_history_when_its_end_is_looked_for() -> None:
    play = Leaderless()
    play.lose(TopicPartition(history_topic(GONE), 0), "start_offsets")
    with pytest.raises(LogUnavailable, match="no leader"):
        load_tail(play.world.cluster.log("c"), play.world.clock, GONE)
    play.check_nobody_waited()


def test_a_journal_whose_beginning_was_deleted() -> None:
    play = Leaderless()
    place = TopicPartition(journal_topic(GONE), 0)
    for _ in range(3):
        play.world.cluster.produce(place, [Record(0, 1, b"k", b"v", ())])
    log = play.world.cluster.log("somebody")
    log.delete_records(log.end_offsets([place], committed=False))
    play.lose(place, "start_offsets")
    play.check_that_stream_alone_waits()
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


def test_what_is_looked_at_to_cut_histories() -> None:
    play = Leaderless()
    play.lose(TopicPartition(stream_topic(GONE), 1), "start_offsets")
    assert Histories(play.world.cluster.log("c")).spare({GONE: 2, OTHER: 2}) == {}
    play.check_nobody_waited()


@pytest.mark.parametrize("spare", range(5))
def test_a_marker_that_a_former_leaders_spare_id_lacks(spare: int) -> None:
    """Only a leader's first two ids looked for what they had left open: no round and no reader got by the rest."""
    play = Leaderless()
    play.world.cluster.loses_markers = True
    lease = play.controller.lease
    assert lease is not None
    for _ in range(spare):
        lease.set_aside(lease.producers[0])
    play.lose(TopicPartition(history_topic(GONE), 0), "commit", "append")
    assert play.one_shot(GONE) == "COMMITTED"
    assert play.world.cluster.lost_markers
    play.mend()
    play.lead_anew()
    assert play.one_shot(GONE) == "COMMITTED"
    assert not play.world.cluster.lost_markers
