"""A partition without a leader is not waited for by those who lead other streams too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.cleanup import Histories
from anabranch.controller.history_tail import load_tail
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import LogUnavailable, TopicPartition
from anabranch.protocol.schemas.records import Commit, Scale, StreamList
from anabranch.topics.names import history_topic, journal_topic, status_topic, stream_topic
from tests.controller.losing import GONE, KEYS, OTHER, TOPICS, Play
from tests.memory.producer import MemoryProducer
from tests.memory.trouble import Kind, Trouble


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


def test_tries_to_lead_without_the_status_topic_leave_nothing() -> None:
    play = Leaderless()
    place = TopicPartition(status_topic("anabranch"), 0)
    play.world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)
    alive = []
    for tries in range(3):
        for _ in range(tries):
            with pytest.raises(LogUnavailable):
                play.controller.lead()
        gc.collect()
        alive.append(sum(type(one) is State for one in gc.get_objects()))
    assert play.controller._trouble.suspects
    assert alive[2] <= alive[1] <= alive[0]


@pytest.mark.parametrize("spare", range(5))
def test_a_marker_that_a_former_leaders_spare_id_lacks(spare: int) -> None:
    """Only a leader's first two ids looked for what they had left open: no round and no reader got by the rest."""
    play = Leaderless()
    play.world.cluster.loses_markers = True
    lease = play.controller.lease
    assert lease is not None
    for _ in range(spare):
        lease.leave_out(lease.producers[0])
    play.lose(TopicPartition(history_topic(GONE), 0), "commit", "append")
    assert play.one_shot(GONE) == "COMMITTED"
    assert play.world.cluster.lost_markers
    play.mend()
    play.lead_anew()
    assert play.one_shot(GONE) == "COMMITTED"
    assert not play.world.cluster.lost_markers


def _loses(patch: pytest.MonkeyPatch, play: Play, topic: str, of: str, nth: int) -> None:
    """The n-th end of such an id's native transaction there gets no marker, on one partition of the topic."""
    cluster, end, seen = play.world.cluster, MemoryProducer._end, []
    cluster.loses_markers = True

    def ended(producer: MemoryProducer, name: str) -> None:
        written = cluster._transactions[producer._id].partitions
        places = [place for place in written if place.topic == topic]
        if places and (".carrier." in producer._id) == (of == "carrier"):
            seen.append(places[0])
            if len(seen) == nth + 1:
                cluster.troubles[places[0]] = Trouble(Kind.LEADERLESS)
        end(producer, name)

    patch.setattr(MemoryProducer, "_end", ended)


@pytest.mark.parametrize("leader", ["same", "new"])
@pytest.mark.parametrize(
    ("topic", "of", "nth"),
    [(topic, "leader", 0) for topic in TOPICS] + [(stream_topic, "carrier", n) for n in range(4)],
)
def test_what_lacks_a_marker_is_ended_though_its_id_comes_no_more(
    monkeypatch: pytest.MonkeyPatch, topic: Callable[[str], str], of: str, nth: int, leader: str
) -> None:
    """To a quiet stream no round comes; a carrier's merge goes on by other ids, or is over."""
    how: dict[str, Any] = {"chunk_bytes": 1000} if of == "carrier" else {}
    play = Leaderless(**how)
    txn_id, token, receipt = play.begun(GONE, size=300)
    with monkeypatch.context() as patch:
        _loses(patch, play, topic(GONE), of, nth)
        play.world.send(Commit(token, (receipt,), None, None, 600_000))
        play.play(20, 1.0)
    lost = bool(play.world.cluster.lost_markers)
    play.mend()
    if leader == "new":
        play.lead_anew(**how)
    play.play(40, 40.0)
    rounds = play.controller.rounds
    assert lost
    assert not play.world.cluster.lost_markers
    assert play.state(txn_id)[0] == "COMMITTED"
    places = [TopicPartition(stream_topic(GONE), p) for p in range(4)]
    there = [place for place in places if place in play.world.cluster.partitions]
    assert sum(len(play.world.committed(place)) for place in there) == len(KEYS) + 1
    play.play(40, 40.0)
    assert play.controller.rounds == rounds + 1, "a look logs nothing"
