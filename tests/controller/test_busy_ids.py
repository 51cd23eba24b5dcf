"""Native transactions whose markers can't be written: their ids are passed over, and the markers come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.errors import NotLeader
from anabranch.ports import (
    LogBusy,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    Steps,
    TopicPartition,
)
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import history_topic, stream_topic
from tests.controller.losing import GONE, KEYS, OTHER, TOPICS, Play


def test_a_busy_id_is_passed_over_by_its_own_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who led last knows that the transaction is its own; another process could not tell a zombie's."""
    play = Play()
    cluster = play.world.cluster
    initialise = cluster.initialise

    def busy(transactional_id: str, timeout: float) -> tuple[int, int] | None:
        if transactional_id.endswith("control.0.a"):
            return None
        return initialise(transactional_id, timeout)

    monkeypatch.setattr(cluster, "initialise", busy)
    play.controller.lead()
    assert play.one_shot(OTHER) == "COMMITTED"
    play.controller.lead()
    assert play.one_shot(OTHER) == "COMMITTED"

    def unsure(process: str, name: str) -> None:
        if name == "commit.after":
            raise LogUncertain("of its term")

    monkeypatch.setattr(cluster, "on_call", unsure)
    with pytest.raises(LogUncertain):
        play.controller.lead()
    monkeypatch.setattr(cluster, "on_call", None)
    play.controller.lead()
    other = play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    play.controller.resign()  # the same process loses the partition, and gets it again
    again = play.world.controller("again")
    again.terms = play.controller.terms
    again.lead()
    again.hand_over()
    other.lead()  # nothing more can come of who has let go
    with pytest.raises(LogBusy):
        play.controller.lead()  # the last term is not its own any more


def test_a_leader_that_is_stopped_before_it_leads_again_hands_over() -> None:
    play = Play()
    play.world.cluster.troubles[TopicPartition(history_topic(GONE), 0)] = Trouble(Kind.FAILED_DISK)
    with pytest.raises(LogUncertain):
        play.one_shot(GONE)
    first, other = play.controller, play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    first.hand_over()
    other.lead()
    play.controller = other
    assert play.one_shot(OTHER) == "COMMITTED"
    with pytest.raises(NotLeader):
        first.hand_over()  # it does not disturb who leads since
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_leader_whose_first_reads_fail_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its term is logged, and it passed over an id, so no successor can lead before it has resigned."""
    play = Play()
    cluster = play.world.cluster
    initialise = cluster.initialise
    monkeypatch.setattr(
        cluster,
        "initialise",
        lambda id_, s: None if id_.endswith("control.0.b") else initialise(id_, s),
    )
    first, other = play.controller, play.world.controller("other")
    first.lead()
    first.hand_over()
    called = [""]
    after = ["commit.after", ""]  # `end_offsets` fails once after the first, then at the next call

    def trouble(process: str, name: str) -> None:
        fails = name == "end_offsets" and after and called[-1] == after[0]
        called.append(name)
        if fails:
            del after[0]
            called.append("")
            raise LogUnavailable("no broker answers")

    monkeypatch.setattr(cluster, "on_call", trouble)
    with pytest.raises(LogUnavailable):
        other.lead()
    other.hand_over()  # its first call fails, too
    assert not after
    monkeypatch.setattr(cluster, "on_call", None)
    first.lead()


@pytest.mark.parametrize("fenced_in", ["the hand-over", "a round"])
def test_a_leader_that_is_fenced_while_an_id_is_busy_hands_over(
    monkeypatch: pytest.MonkeyPatch, fenced_in: str
) -> None:
    """Each controller that tried to lead fenced the other ids, so the record that it needed was never logged."""
    play = Play()
    initialise = play.world.cluster.initialise
    monkeypatch.setattr(
        play.world.cluster,
        "initialise",
        lambda id_, s: None if id_.endswith("control.0.b") else initialise(id_, s),
    )
    play.controller.lead()  # it was the last leader, so it passes the busy id over
    assert not play.controller._trouble.suspects
    other = play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    if fenced_in == "a round":
        with pytest.raises(LogFenced):
            play.one_shot(OTHER)
    play.controller.hand_over()
    other.lead()
    play.controller = other
    assert play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("busy", ["carrier.0.a", "carrier.0.b"])
def test_a_merge_uses_the_id_that_is_not_busy(monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    play = Play(chunk_bytes=1_000)
    wait = MemoryProducer._wait_for_markers

    def waits(producer: MemoryProducer) -> None:
        if producer._id.endswith(busy):
            raise LogBusy(f"{producer._id}: markers can't be written")
        wait(producer)

    monkeypatch.setattr(MemoryProducer, "_wait_for_markers", waits)
    _, token, receipt = play.begun(OTHER, size=1_500)
    play.commit(token, receipt)


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_leader_with_a_busy_id_hands_over_by_another(rounds: int) -> None:
    play = Play()
    for _ in range(rounds):
        assert play.one_shot(OTHER) == "COMMITTED"
    play.world.cluster.troubles[TopicPartition(history_topic(GONE), 0)] = Trouble(Kind.FEW_REPLICAS)
    assert play.one_shot(GONE) == "NotReady"
    play.controller.hand_over()
    play.world.controller("other").lead()


def test_streams_of_a_dead_broker_cost_no_id_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that too few replicas refuse keeps its id busy: the others are found before they are written to."""
    play = Play()
    bad = [f"nyc/bad{i}" for i in range(4)]
    for stream in bad:
        play.world.stream(play.controller, stream)
        assert play.one_shot(stream) == "COMMITTED"
    refused = []
    appending = MemoryProducer.appending

    def counted(producer: MemoryProducer, batches: Any) -> Steps[list[int]]:
        try:
            return (yield from appending(producer, batches))
        except LogRefused as error:
            refused.append(error)
            raise

    monkeypatch.setattr(MemoryProducer, "appending", counted)
    for stream in bad:
        place = TopicPartition(stream_topic(stream), 0)
        play.world.cluster.troubles[place] = Trouble(Kind.FEW_REPLICAS)
    assert [play.one_shot(stream) for stream in bad] == ["NotReady"] * len(bad)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert len(refused) == 1


def test_a_round_uses_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    cluster = play.world.cluster
    is_ending = cluster.is_ending
    for letter in "abcd":
        busy = f"control.0.{letter}"
        monkeypatch.setattr(
            cluster, "is_ending", lambda id_, busy=busy: id_.endswith(busy) or is_ending(id_)
        )
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("spare", range(5))
def test_a_marker_that_a_former_leaders_spare_id_lacks(spare: int) -> None:
    """Only a leader's first two ids looked for what they had left open: no round and no reader got by the rest."""
    play = Play()
    cluster, place = play.world.cluster, TopicPartition(history_topic(GONE), 0)
    cluster.loses_markers = True
    lease = play.controller.lease
    assert lease is not None
    for _ in range(spare):
        lease.leave_out(lease.producers[0])
    appended = False

    def called(_: str, name: str) -> None:
        nonlocal appended
        appended |= name == "append"
        if name == "commit" and appended:
            cluster.troubles[place] = Trouble(Kind.LEADERLESS)

    cluster.on_call = called
    assert play.one_shot(GONE) == "COMMITTED"
    assert cluster.lost_markers
    cluster.on_call = None
    cluster.troubles.clear()
    play.lead_anew()
    assert play.one_shot(GONE) == "COMMITTED"
    assert not cluster.lost_markers


def _loses(patch: pytest.MonkeyPatch, play: Play, topic: str, of: str, nth: int) -> None:
    """The n-th end of such an id's native transaction there gets no marker, on one partition of the topic."""
    cluster, end, seen = play.world.cluster, MemoryProducer._end, []
    cluster.loses_markers = True

    def ended(producer: MemoryProducer, name: str) -> Steps[None]:
        written = cluster._transactions[producer._id].partitions
        places = [place for place in written if place.topic == topic]
        if places and (".carrier." in producer._id) == (of == "carrier"):
            seen.append(places[0])
            if len(seen) == nth + 1:
                cluster.troubles[places[0]] = Trouble(Kind.LEADERLESS)
        yield from end(producer, name)

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
    play = Play(**how)
    txn_id, token, receipt = play.begun(GONE, size=300)
    with monkeypatch.context() as patch:
        _loses(patch, play, topic(GONE), of, nth)
        play.send_commit(token, receipt)
        play.play(20, 1.0)
    lost = bool(play.world.cluster.lost_markers)
    play.world.cluster.troubles.clear()
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
