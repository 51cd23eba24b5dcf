"""A one-shot whose participants are asked before its coordinator logs anything, when that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.core.across.coordinator import HELD_MS
from anabranch.core.decisions.across.coordinating import FIRST_PAUSE_MS, LONGEST_PAUSE_MS
from anabranch.core.decisions.across.coordinating_one_shots import BEFORE_MS
from anabranch.core.decisions.across.parts_of_one_shots import PART_MS
from anabranch.core.decisions.across.receiving import next_due_ms
from anabranch.core.round import Message
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import Leaders, Sent
from tests.core.across.test_leaders import settled
from tests.core.across.test_one_shots import BOTH
from tests.core.harness import event


def assert_idle(leaders: Leaders) -> None:
    """Nothing is due, held or open any more."""
    for one in leaders.all:
        assert next_due_ms(one.memory.across, one.now_ms) is None
        assert not one.memory.holds.in_use
        assert not one.state.open


def test_a_part_that_can_not_be_prepared_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is left of it, although the coordinator dies and the client does not repeat the command."""
    most = limits.PREPARED
    monkeypatch.setattr(limits, "PREPARED", most._replace(value=0))
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    assert leaders.states() == ["-", "-"]
    leaders.bag.clear()
    leaders.lead(0)
    settled(leaders)
    leaders.wait(PART_MS)
    assert leaders.states() == ["-", "-"]
    assert_idle(leaders)
    # While both live, it is asked again until others have ended.
    leaders.one_shot("B", *BOTH)
    assert leaders.settle() == ""
    monkeypatch.setattr(limits, "PREPARED", most)
    assert settled(leaders) == "[B@0] B COMMITTED 2"


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("how", ["dies", "freezes"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_leader_goes_at_each_step_and_the_outcome_is_one(
    number: int, how: str, again: bool
) -> None:
    """It dies before its next round is written, or goes on until it can't write one.

    ``again``: whether the client repeats its commands.
    """
    for after in range(6):
        leaders = Leaders()
        leaders.one_shot("A", *BOTH)
        said = [leaders.deliver() for _ in range(after)]
        if how == "dies":
            leaders[number].dies = True
        else:
            leaders[number].freeze()
        said.append(leaders.wait(0))
        said += [leaders.one_shot("A", *BOTH)] if again else []
        said += [settled(leaders), leaders.wait(2 * LONGEST_PAUSE_MS)]
        told = [one for one in said if " COMMITTED" in one]
        states = set(leaders.states()) - {"-"}
        assert len(states) < 2, (after, leaders.states())
        assert states == {"COMMITTED"} or not told, (after, told)
        assert len(leaders.merges()) == (2 if states == {"COMMITTED"} else 0), after
        if again:
            assert states == {"COMMITTED"}, after
        leaders.wait(0)
        assert_idle(leaders)


def test_a_command_that_can_not_go_when_the_votes_have_come_says_that_its_id_is_used_up() -> None:
    """Its stream at the coordinator came into trouble meanwhile: to repeat the command would be of no use."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    leaders[0].memory.waiting = {"nyc/a": "its topic is away"}
    assert settled(leaders) == "[A@0] TransactionAborted"
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert_idle(leaders)


def test_a_copy_that_comes_in_trouble_does_not_end_the_command_that_waits_for_its_votes() -> None:
    """If it said that the id is used up, the client would begin anew, and both would commit."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders[0].memory.waiting = {"nyc/a": "its topic is away"}
    assert leaders.one_shot("A", *BOTH, to=(0,)) == "NotReady"
    leaders[0].memory.waiting = {}
    assert settled(leaders) == "[A@0] A COMMITTED 2"
    assert_idle(leaders)


def test_a_command_whose_transaction_has_no_room_any_more_says_that_its_id_is_used_up() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    leaders[0].settings = replace(leaders[0].settings, max_open=0)
    assert settled(leaders) == "[A@0] TransactionAborted"
    assert leaders.states() == ["ABORTED", "ABORTED"]


def test_a_coordinator_that_lacks_one_of_two_votes_sleeps_until_it_would_log_its_part() -> None:
    """The other vote has held its streams for `HELD_MS`: of a one-shot that is not logged it is not taken back."""
    leaders = Leaders(3)
    leaders.one_shot("A", *BOTH, "tok/a")
    leaders.collect()
    leaders.bag = [one for one in leaders.bag if one.receiver == 1]
    leaders.deliver()
    leaders.deliver()
    one = leaders[0]
    one.now_ms += HELD_MS
    assert one.memory.across.asked_shots.get(one.id("A"), None) is not None
    assert next_due_ms(one.memory.across, one.now_ms) == FIRST_PAUSE_MS - BEFORE_MS - HELD_MS


# Another command with the id that comes while the votes are out; its answer; the states at the end.
OTHERS: list[tuple[Callable[[Leaders], str], str, list[str]]] = [
    (lambda its: its[0].one_shot("A", event("nyc/a")), "A COMMITTED 1", ["COMMITTED", "ABORTED"]),
    (lambda its: its[0].begin("A"), "begun A", ["ABORTED", "ABORTED"]),
    (
        lambda its: its.one_shot("A", *BOTH, to=(0,), secret=b"t" * 32),
        "InvalidArgument",
        ["COMMITTED", "COMMITTED"],
    ),
    (
        lambda its: its.one_shot("A", "nyc/a", "tok/a", to=(0,)),
        "InvalidArgument",
        ["COMMITTED", "COMMITTED"],
    ),
]


@pytest.mark.parametrize(("other", "said", "then"), OTHERS)
def test_another_command_with_the_id_leaves_nothing_behind(
    other: Callable[[Leaders], str], said: str, then: list[str]
) -> None:
    leaders = Leaders(3)
    leaders.one_shot("A", *BOTH)
    assert other(leaders) == said
    settled(leaders)
    if "begun" in said:
        leaders[0].abort("A")
    leaders.wait(2 * LONGEST_PAUSE_MS)
    assert leaders.states()[:2] == then
    leaders.wait(0)
    assert_idle(leaders)


@pytest.mark.parametrize("partition", [-1, 1 << 16])
def test_a_forged_question_from_nowhere_is_not_acted_on(partition: int) -> None:
    """Who can write to `control` makes up the id, too."""
    leaders = Leaders()
    head = r.TxnHead("nyc", "open", 1_000, 0, b"s" * 32, 0)
    forged = r.AskDecision(leaders[0].id("A"), partition, head)
    leaders.bag.append(Sent(1, Message(0, forged, b"s" * 32), 0))
    leaders.settle()
    assert leaders[0].round.ignored == ["misdirected"]
    assert leaders.states() == ["-", "-"]


def test_a_forged_question_is_not_logged_with_a_huge_name() -> None:
    leaders = Leaders()
    head = r.TxnHead("n" * limits.EARLY_BYTES.value, "open", 1_000, 0, b"s" * 32, 0)
    for message in (
        r.AskDecision(leaders[0].id("A"), 1, head),
        r.Decide(leaders[0].id("A"), head, "ABORT", 0, ""),
    ):
        receiver = int(isinstance(message, r.Decide))
        leaders.bag.append(Sent(1 - receiver, Message(receiver, message, b"s" * 32), 0))
        leaders.settle()
        assert leaders[receiver].round.ignored == ["unknown"]
    assert leaders.states() == ["-", "-"]
