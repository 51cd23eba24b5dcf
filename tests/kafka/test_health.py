"""What follows from the observed failures and answers of brokers, by a clock of the test's own."""

from __future__ import annotations

import pytest

from anabranch.kafka import health
from anabranch.kafka.health import BrokerHealth, Use
from anabranch.ports import TopicPartition
from tests.client.doubles import ManualClock

ONE, TWO, THREE = (("broker", port) for port in (1, 2, 3))
PLACE, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def state(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> BrokerHealth:
    monkeypatch.setattr(health, "_late", {})
    return BrokerHealth(clock, "rack")


def test_brokers_that_failed_are_asked_last_the_longest_ago_first(
    state: BrokerHealth, clock: ManualClock
) -> None:
    state.failed(TWO)
    clock.now += 1
    state.failed(ONE)
    assert state.in_order([ONE, TWO, THREE]) == [THREE, TWO, ONE]
    state.answered(ONE)
    assert state.in_order([ONE, TWO, THREE]) == [ONE, THREE, TWO]


def test_a_broker_is_skipped_longer_each_time_for_one_use(
    state: BrokerHealth, clock: ManualClock
) -> None:
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 16.0):
        state.skip(Use.READ, 1)
        assert state.is_skipped(Use.READ, 1)
        assert not state.is_skipped(Use.SEND, 1)
        assert not state.is_skipped(Use.READ, 2)
        clock.now += seconds - 0.001
        assert state.is_skipped(Use.READ, 1)
        clock.now += 0.001
        assert not state.is_skipped(Use.READ, 1)
    state.serves(Use.READ, 1)
    state.skip(Use.READ, 1)
    clock.now += 1.0
    assert not state.is_skipped(Use.READ, 1)


def test_leaders_are_confirmed_every_ten_seconds_and_several_topics_at_once(
    state: BrokerHealth, clock: ManualClock
) -> None:
    state.noted(["old"])
    clock.now += 4
    state.noted(["old", "older than half", "new"])
    clock.now += 6.001
    state.confirming(["new"])
    topics = ["old", "older than half", "new", "never seen"]
    assert state.to_confirm(topics) == ["old", "older than half"]
    assert state.to_confirm(["older than half"]) == []
    state.confirming(["old", "older than half"])
    assert state.to_confirm(topics) == []


def test_a_replica_that_was_late_is_not_waited_for_until_it_answers_or_for_a_while(
    state: BrokerHealth, clock: ManualClock
) -> None:
    quick, refused, silent = (state.ask() for _ in range(3))
    state.ended(quick, answered=True)
    clock.now += health.WAIT_S - 0.001
    state.ended(refused, answered=False)  # it cost less than the wait
    clock.now += 0.001
    for address, question in ((ONE, quick), (TWO, refused), (THREE, silent)):
        state.give_up(address, question)
    assert [state.unanswered(one) for one in (ONE, TWO, THREE)] == [None, None, silent]
    assert BrokerHealth(clock).unanswered(THREE) is silent, "a new client would wait again"
    clock.now += health.LATE_S
    assert state.unanswered(THREE) is silent, "it still may answer"
    state.ended(silent, answered=True)
    assert state.unanswered(THREE) is None
    again = state.ask()
    clock.now += health.WAIT_S
    state.ended(again, answered=False)
    state.give_up(THREE, again)
    assert state.unanswered(THREE) is again
    clock.now += health.LATE_S
    assert state.unanswered(THREE) is None


def test_a_follower_that_fails_is_replaced_by_its_leader_for_a_while(
    state: BrokerHealth, clock: ManualClock
) -> None:
    followers, led = state.followers, {1: [PLACE, OTHER]}
    assert followers.groups(led) == led
    followers.named(PLACE, 2)
    assert followers.groups(led) == {2: [PLACE], 1: [OTHER]}
    assert followers.rack_for([PLACE, OTHER]) == "rack"
    assert not followers.fails([OTHER], 2)
    assert followers.fails([PLACE], 2)
    assert followers.groups(led) == led
    assert followers.rack_for([PLACE, OTHER]) == "", "the leader would name the follower again"
    clock.now += health.LED_S
    assert followers.groups(led) == led
    assert followers.rack_for([PLACE, OTHER]) == "rack"
