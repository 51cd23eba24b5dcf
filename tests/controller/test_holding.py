"""A controller that waits for another one's decision: when it wakes up, and what it answers."""

from __future__ import annotations

import pytest

from anabranch.batches.records import Record
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import journal_topic
from tests.controller.test_across import STREAMS, Pair


@pytest.fixture
def pair() -> Pair:
    """Control partition 1 has voted, and nobody leads control partition 0."""
    pair = Pair()
    pair.asked = pair.world.send(pair.commit)
    held = pair.leaders[1]
    for _ in range(20):
        pair.leaders[0].step(0)
        held.step(0)
        if held._memory.holds.in_use:
            break
    pair.leaders[0].resign()
    assert [one.fixed for one in held._memory.holds.on([STREAMS[1]])] == [False]
    return pair


def test_a_one_shot_is_answered_in_time(pair: Pair) -> None:
    held, clock = pair.leaders[1], pair.world.clock
    event = r.Event(STREAMS[1], -1, b"k", b"shot", (), -1)
    shot = r.OneShot(pair.world.txn_id(1), "ber", None, (event,))
    asked = pair.world.send(shot, 1)
    held.step(0)
    assert pair.world.reply(asked) is None
    assert 0 < held._wait_for(10.0) <= 0.1
    clock.sleep(0.099)
    held.step(0)
    assert pair.world.reply(asked) is None
    clock.sleep(0.001)
    held.step(0)
    assert pair.world.reply(asked).code == "NotReady"
    again = pair.world.send(shot, 1)
    held.step(0)
    pair.leaders[0] = pair.new(0)
    assert pair.outcome().state == "COMMITTED"
    pair.step(4)
    assert pair.world.reply(again).state == "COMMITTED"
    assert pair.values() == [[b"v"], [b"v", b"shot"]]


def test_plain_writes_wait_without_haste(pair: Pair) -> None:
    held = pair.leaders[1]
    place = TopicPartition(journal_topic(STREAMS[1]), 0)
    pair.world.cluster.produce(place, [Record(0, 0, b"k", b"plain", ())])
    held.step(0)
    assert held._wait_for(10.0) > 0, "it does not try again and again"
    pair.leaders[0] = pair.new(0)
    assert pair.outcome().state == "COMMITTED"
    pair.step(4)
    assert pair.values() == [[b"v"], [b"v", b"plain"]]
