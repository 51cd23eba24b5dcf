"""One-shots over control partitions, by the leaders' real decisions; messages are passed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core.authorize import Right
from anabranch.core.decisions.across.coordinating import DONE_MS, FIRST_PAUSE_MS, MOST_FIRST_MS
from anabranch.core.decisions.across.coordinating_one_shots import BEFORE_MS
from anabranch.core.decisions.across.parts_of_one_shots import DECISION_MS, PART_MS
from anabranch.core.locks.table_writes import fingerprint
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import SCOPES, Leaders, losing
from tests.core.across.test_leaders import assert_committed_once, settled
from tests.core.harness import event

BOTH = ("nyc/a", "ber/a")


def test_one_shot_over_two_control_partitions() -> None:
    leaders = Leaders()
    assert leaders.one_shot("A", *BOTH) == ""
    assert leaders.settle() == "[A@0] A COMMITTED 2"
    assert leaders.seen == [
        "0>1 AskVote TIMESTAMP 1", "1>0 Vote YES 1 at p", "0>1 Decide COMMIT", "1>0 Done",
    ]  # fmt: skip
    assert_committed_once(leaders, *BOTH)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert leaders.parts() == (r.PartInfo(1, (), "COMMITTED", 0, None, -1),)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", range(5))
def test_a_successor_goes_on_from_each_step(number: int, after: int) -> None:
    """What waits in memory is gone; the client sends all commands again, and gets the one outcome."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    for _ in range(after):
        leaders.deliver()
    leaders.bag = [one for one in leaders.bag if one.sender != number]
    leaders.lead(number)
    leaders.wait(0)
    leaders.one_shot("A", *BOTH)
    settled(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert_committed_once(leaders, *BOTH)
    assert leaders.one_shot("A", *BOTH) == "A COMMITTED 2"
    assert_committed_once(leaders, *BOTH)


@pytest.mark.parametrize("late", ["no command", "its command", "its outcome was asked for"])
def test_a_part_is_aborted_whose_coordinator_died_before_it_logged_anything(late: str) -> None:
    """Nobody sends the commands again, or too late."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    leaders.bag.clear()
    leaders.lead(0)
    assert leaders.states() == ["-", "PREPARED"]
    if late.startswith("its outcome"):
        assert leaders[0].resolve("A").startswith("A ABORTED")
    for ms in (DECISION_MS, 2 * DECISION_MS):
        assert leaders.wait(ms) == ""
    assert leaders.seen[-3:] == ["1>0 AskDecision", "0>1 Decide ABORT", "1>0 Done"]
    assert leaders.states() == ["ABORTED", "ABORTED"]
    if late == "its command":
        assert leaders.one_shot("A", *BOTH, to=(0,)) == "TransactionAborted"
    assert not leaders.merges()
    assert not leaders[1].memory.holds.in_use


def test_a_participant_asks_again_for_a_decision_and_its_successor_does() -> None:
    leaders = Leaders()
    with losing(leaders, r.Vote, r.AskDecision):
        leaders.one_shot("A", *BOTH)
        leaders.settle()
        leaders.lead(0)
        leaders.wait(DECISION_MS)
    assert leaders.states() == ["-", "PREPARED"]
    leaders.lead(1)
    for ms in (0, DECISION_MS):
        leaders.wait(ms)
    assert leaders.states() == ["ABORTED", "ABORTED"]


def test_a_one_shot_that_is_refused_after_the_votes_is_aborted_everywhere() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    leaders.lose("nyc/a")
    assert leaders.settle() == "[A@0] StreamLost"
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert leaders.one_shot("A", *BOTH) == "TransactionAborted"


@pytest.mark.parametrize("kind", [r.AskVote, r.Vote, r.Decide, r.Done])
def test_what_is_lost_is_sent_again_and_what_comes_twice_changes_nothing(kind: type) -> None:
    leaders = Leaders()
    with losing(leaders, kind):
        leaders.one_shot("A", *BOTH)
        leaders.settle(times=2)
    leaders.one_shot("A", *BOTH)
    leaders.wait(300)
    said = leaders.settle(times=3)
    assert leaders.states() == ["COMMITTED", "COMMITTED"], said
    assert_committed_once(leaders, *BOTH)


def test_a_question_that_comes_before_its_command_is_kept_for_a_moment() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, to=(0,))
    leaders.settle()
    assert leaders[1].round.ignored == ["early"]
    assert leaders.states() == ["-", "-"]
    leaders.one_shot("A", *BOTH, to=(1,))
    assert leaders.settle() == "[A@0] A COMMITTED 2"
    assert_committed_once(leaders, *BOTH)


def test_without_its_command_a_participant_does_nothing_and_the_id_is_used_up() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, to=(0,))
    assert leaders.wait(FIRST_PAUSE_MS - BEFORE_MS) == ""
    assert leaders.wait(5_000) == ""
    assert leaders.states() == ["OPEN", "-"]
    said = leaders[0].ask("state", r.GetState(leaders[0].id("A")))
    assert "waits for the votes of control partition 1" in said
    assert leaders.wait(5_001) == "[A@0] NotReady"
    assert leaders.states() == ["ABORTED", "ABORTED"]
    row = leaders[0].state.txn_row(leaders[0].id("A"))
    assert row is not None
    assert "the vote of control partition 1" in row.reason
    assert leaders.one_shot("A", *BOTH, to=(0,)) == "TransactionAborted"
    leaders.one_shot("A", *BOTH, to=(1,))
    settled(leaders)
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert not leaders.merges()


def test_a_command_waits_five_seconds_for_its_coordinator() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, to=(1,))
    assert leaders.wait(PART_MS - 100) == ""
    assert leaders.states() == ["-", "-"]
    assert leaders.wait(200) == "[A@1] NotReady"
    leaders.one_shot("A", *BOTH)
    assert leaders.settle() == "[A@0] A COMMITTED 2"


def test_a_question_that_the_commands_secret_does_not_explain_begins_nothing() -> None:
    """Who can write to `control` alone makes up a secret; the command of the client has another one."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, to=(0,))
    leaders.one_shot("A", *BOTH, to=(1,), secret=b"t" * 32)
    leaders.settle()
    assert leaders[1].round.ignored == ["forged"]
    assert leaders.states() == ["-", "-"]


REFUSED = [
    # what a participant's command has, and how the client is answered
    ({"events": (event("ber/none"),)}, "UnknownStream"),
    ({"events": (event("ber/a", headers={"ab.x": b""}),)}, "InvalidArgument"),
    ({"events": (event("nyc/a"),)}, "CrossScope"),
    ({"scope": "none"}, "UnknownScope"),  # refused when it comes, before the question
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_a_refusal_of_a_participant_aborts_everywhere(fields: dict[str, Any], said: str) -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, own={1: fields})
    assert leaders.settle() == f"[A@0] {said}"
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert not leaders.merges()
    assert leaders.one_shot("A", *BOTH, to=(0,)) == "TransactionAborted"


@pytest.mark.parametrize(("fields", "said"), REFUSED[:2])
def test_a_refusal_of_the_coordinator_logs_nothing(fields: dict[str, Any], said: str) -> None:
    leaders = Leaders()
    events = tuple(
        one._replace(stream=one.stream.replace("ber", "nyc")) for one in fields["events"]
    )
    assert leaders.one_shot("A", *BOTH, own={0: {"events": events}}) == said
    leaders.wait(PART_MS + 1)
    assert leaders.states() == ["-", "-"]


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"secret": None}),
        (1, {"secret": None}),
        (0, {"places": (1, 1)}),
        (0, {"places": (0,)}),
        (0, {"places": (7,)}),
        (1, {"places": (0,)}),
        (0, {"consumed": r.Consumed("p", b"f" * 32, ())}),
        (1, {"turn_to": bytes(16)}),
    ],
)
def test_what_such_a_one_shot_can_t_have(number: int, fields: dict[str, object]) -> None:
    leaders = Leaders()
    said = leaders.one_shot("A", *BOTH, to=(number,), own={number: fields})
    assert said == "InvalidArgument"
    leaders.settle()
    assert leaders.states() == ["-", "-"]


def test_three_control_partitions_one_with_nothing_but_the_decision() -> None:
    leaders = Leaders(3)
    leaders.one_shot("A", "ber/a", "tok/a")
    assert leaders.settle() == "[A@0] A COMMITTED 2"
    assert_committed_once(leaders, "ber/a", "tok/a")


def test_it_is_answered_at_its_decision_if_that_is_asked_for() -> None:
    leaders = Leaders()
    leaders[0].at_decision = True
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    assert leaders.deliver().startswith("[A@0] A FINALIZE_IN_PROGRESS (but 2 committed at ")


def test_a_name_is_claimed_once() -> None:
    leaders = Leaders()
    leaders.one_shot("A", *BOTH, name="daily")
    leaders.one_shot("B", *BOTH, name="daily")
    leaders.settle()
    assert leaders.wait(300) == "[A@0] A COMMITTED 2; [B@0] A COMMITTED 2"
    assert (leaders.states("A"), leaders.states("B")) == (["COMMITTED"] * 2, ["ABORTED"] * 2)
    assert leaders.one_shot("C", *BOTH, name="daily", to=(0,)) == "A COMMITTED 2"


def test_an_id_in_use_is_refused_with_other_arguments() -> None:
    leaders = Leaders()
    for state in ("OPEN", "COMMITTED"):
        leaders.one_shot("A", *BOTH, name="daily")
        leaders[0].wait(FIRST_PAUSE_MS - BEFORE_MS)
        assert leaders.states()[0] == state
        assert leaders.one_shot("A", *BOTH, to=(0,), name="other") == "InvalidArgument"
        leaders.settle()
    many = {0: {"events": (event("nyc/a"),) * 3}}
    assert leaders.one_shot("A", *BOTH, to=(0,), own=many, name="daily") == "InvalidArgument"
    assert_committed_once(leaders, *BOTH)


def test_two_that_meet_are_both_committed_in_one_order() -> None:
    leaders = Leaders()
    for label in "ABCD":
        leaders.one_shot(label, *BOTH)
    settled(leaders)
    merges = leaders.merges()
    assert [label for label, _ in merges["nyc/a"]] == [label for label, _ in merges["ber/a"]]
    assert merges["nyc/a"] == merges["ber/a"]
    assert len(merges["nyc/a"]) == 4


def test_events_are_placed_in_the_segments_that_are_active_when_they_are_merged() -> None:
    """Also after a merge that rolls, in one round with it, and in the order of timestamps."""
    leaders = Leaders()
    leaders.begin("J")
    leaders.one_shot("A", *BOTH)
    leaders.deliver()
    vote = leaders.bag.pop()
    leaders[1].ask("scale", r.Scale("ber/a", 1, (), ()))
    leaders.commit("J")
    leaders.settle()
    assert leaders.states("J") == ["FINALIZE_IN_PROGRESS", "FINALIZE_IN_PROGRESS"]
    leaders.bag.append(vote)
    said = leaders.settle()
    assert "[A@0] A COMMITTED 2" in said
    assert "[commit J] J COMMITTED 2" in said
    rounds = [one for one in leaders[1].rounds if one.commits]
    assert [one.txn_id for one in rounds[-1].commits] == [leaders[0].id("J"), leaders[0].id("A")]
    assert len(rounds[-1].epochs) == 2  # for J's segments, and back
    active = leaders[1].state.streams["ber/a"].segments
    assert [part.segment_id for part in rounds[-1].commits[1].parts] == [active[0].segment_id]


# -- tables --------------------------------------------------------------------------------------------------

NYC, BER = "nyc/t", "ber/t"


def with_tables() -> Leaders:
    leaders = Leaders()
    for number, table in enumerate((NYC, BER)):
        leaders[number].create(table, 1, table="true")
        leaders[number].created(table, 0)
        leaders[number].rounds.clear()
    return leaders


def mark(leaders: Leaders, table: str, *keys: bytes) -> r.TableLocks:
    """A lock on these rows since now."""
    one = leaders[SCOPES.index(table.partition("/")[0])]
    one.ask("now", r.SafeTime(table.partition("/")[0], None, (table,)))
    found: r.SafeTimeReply = one.result
    last = {at.table: at.last for at in found.tables}[table]
    points = tuple(sorted(map(fingerprint, keys)))
    return r.TableLocks(table, found.timestamp, last, points, ())


def put(leaders: Leaders, table: str, label: str) -> str:
    """Write the row k by a one-shot of its own control partition."""
    scope = table.partition("/")[0]
    return leaders[SCOPES.index(scope)].one_shot(label, event(table), scope=scope)


def rows(leaders: Leaders) -> dict[str, bytes | None]:
    """The newest row of each table."""
    found: dict[str, bytes | None] = {}
    for one in leaders.all:
        for round_ in one.rounds:
            for step in round_.commits:
                for part in step.parts:
                    found |= {each.stream: each.value for each in part.events}
    return found


# When another commit writes the row that the one-shot has read, and what becomes of the one-shot.
WHEN = [
    ("before", NYC, "revalidate"),
    ("before", BER, "revalidate"),
    ("under way", NYC, "revalidate"),
    ("under way", BER, "revalidate"),
    ("voted", BER, "COMMITTED"),
    ("after", NYC, "COMMITTED"),
]


@pytest.mark.parametrize(("when", "table", "said"), WHEN)
def test_what_it_read_is_so_when_it_commits(when: str, table: str, said: str) -> None:
    leaders = with_tables()
    own = {n: {"locks": (mark(leaders, t, b"k"),)} for n, t in enumerate((NYC, BER))}
    before = put(leaders, table, "X") if when == "before" else ""
    answers = [leaders.one_shot("A", *BOTH, own=own)]
    answers.append(put(leaders, table, "X") if when == "under way" else "")
    answers.append(leaders.deliver())
    voted = put(leaders, table, "X") if when == "voted" else ""
    answers.append(settled(leaders))
    assert said in "; ".join(answers), answers
    ended = "COMMITTED" if said == "COMMITTED" else "ABORTED"
    assert leaders.states()[0] == ended
    assert leaders.states()[1] in ("-", ended)
    assert voted in ("", "NotReady")
    assert before in ("", "X COMMITTED 1")
    assert put(leaders, table, "Y") == "Y COMMITTED 1", "nothing is left that is locked"


def test_numbers_are_added_at_both_control_partitions() -> None:
    leaders = with_tables()

    def added(number: int) -> dict[int, dict[str, Any]]:
        return {
            n: {
                "locks": (mark(leaders, table),),
                "changes": (
                    r.RowChange(table, b"k", "ADD", number * (1 - 2 * n), rows(leaders).get(table)),
                ),
                "events": (),
            }
            for n, table in enumerate((NYC, BER))
        }

    leaders.one_shot("A", *BOTH, own=added(5))
    assert leaders.settle() == "[A@0] A COMMITTED 2"
    leaders.one_shot("B", *BOTH, own=added(2))
    leaders.one_shot("C", *BOTH, own=added(1))
    said = settled(leaders)
    whole = 5 + 2 * ("B COMMITTED" in said) + ("C COMMITTED" in said)
    assert whole > 5
    assert rows(leaders) == {NYC: b"%d" % whole, BER: b"%d" % -whole}


@pytest.mark.parametrize("kind", ["part", "touch"])
def test_a_lane_takes_half_of_the_room_for_what_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_PARTS", limits.HELD_PARTS._replace(value=4))
    leaders = Leaders()

    def send(label: str, lane: str) -> str:
        with leaders[1].by(lane):
            if kind == "part":
                return leaders.one_shot(label, *BOTH, to=(1,))
            touch = r.Touch(leaders[0].token(label), "ber/a")
            return leaders[1].ask(label, touch)

    leaders[1].grant("etl", "ber/*", Right.WRITE)
    for label in "ABC":
        assert leaders[0].begin(label) == f"begun {label}"
    assert [send(label, "open") for label in "ABC"] == ["", "", "NotReady"]
    assert send("C", "etl") == "", "another lane has its own half"


def test_the_client_is_answered_before_the_end_is_logged() -> None:
    """Three rounds, one after the other, precede the answer: PREPARED, decided, and merged at the participant."""
    leaders = Leaders()
    leaders.one_shot("A", *BOTH)
    for _ in range(3):
        assert leaders.deliver() == ""
    assert sum(bool(each.rows) for one in leaders.all for each in one.rounds) == 3
    assert leaders.deliver() == "[A@0] A COMMITTED 2"
    assert leaders.states() == ["FINALIZE_IN_PROGRESS", "COMMITTED"]
    assert leaders[0].wait(DONE_MS) == ""
    assert leaders.states() == ["COMMITTED", "COMMITTED"]


def test_messages_are_not_sent_again_while_answers_take_long() -> None:
    """Leaders under load answer each message after 150 ms, a lost one never."""
    leaders = Leaders()
    for number in range(6):
        leaders.one_shot(f"A{number}", *BOTH)
        for _ in range(5):
            leaders.collect()
            for one in leaders.all:
                one.wait(150)
            leaders.deliver()
    assert len(leaders.seen) == 6 * 4 + 2  # of the first one, the question and the vote
    with losing(leaders, r.Vote):
        leaders.one_shot("B", *BOTH)
        leaders.settle()
    leaders.wait(FIRST_PAUSE_MS)
    assert leaders.states("B") == ["-", "PREPARED"]
    leaders.wait(MOST_FIRST_MS)
    assert leaders.states("B") == ["COMMITTED", "COMMITTED"]
