"""What is decided later: staged merges, prepared transactions, and ends that an operator forces.

By the leaders' real decisions; messages are passed by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.across.coordinator import Due, due
from anabranch.core.round import NewEpoch
from anabranch.core.transaction_states import born
from anabranch.protocol.ids import FENCING_TOKEN_SIZE, NO_TXN, hash_of, txn_text
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import Leaders, losing
from tests.core.across.tables import Tables
from tests.core.across.test_leaders import assert_committed_once, settled
from tests.core.harness import event
from tests.core.labels import SECRET

BIG = 5_000


def begun(*big: str) -> Leaders:
    """A transaction over nyc/a and ber/a, with much to merge into these streams."""
    leaders = Leaders(chunk_bytes=1_000)
    leaders.begin()
    for stream in big:
        leaders.write("A", "w1", stream, size=BIG)
    leaders.seen.clear()
    return leaders


def staged(leaders: Leaders) -> str:
    """Let time pass until all is staged and merged; what was answered."""
    said = []
    for ms in (0, 60, 60, 300, 600, 1_200, 1_200):
        leaders.carry()
        said.append(leaders.wait(ms))
    return "; ".join(filter(None, said))


# Which parts are staged, and the messages until that is done.
@pytest.mark.parametrize(
    ("big", "first"),
    [
        (["ber/a"], ["0>1 AskVote TIMESTAMP 1", "1>0 Vote YES 1", "0>1 Decide COMMIT"]),
        (["nyc/a"], ["0>1 AskVote VOTE 1", "1>0 Vote YES 1", "0>1 Decide COMMIT"]),
        (["nyc/a", "ber/a"], ["0>1 AskVote VOTE 1", "1>0 Vote YES 1", "0>1 Decide COMMIT"]),
    ],
)
def test_what_is_big_is_decided_then_staged_then_dated(big: list[str], first: list[str]) -> None:
    """C3: no chunk is copied before the decision (`Leaders.carry`). While chunks are copied, nothing is held."""
    leaders = begun(*big)
    leaders.commit()
    assert leaders.settle() == ""
    assert leaders.seen[:3] == first
    assert leaders.states() == ["FINALIZE_IN_PROGRESS"] * 2
    assert "OutcomeUnknown" in leaders[0].abort("A"), "there is no way back"
    assert leaders[0].one_shot("B", event("nyc/a")) == "B COMMITTED 1"
    assert leaders[1].one_shot("C", event("ber/a"), scope="ber") == "C COMMITTED 1"
    assert f"[commit A] A COMMITTED {2 + len(big)}" in staged(leaders)
    assert leaders.seen[-4:] == [
        "0>1 AskVote TIMESTAMP 2", "1>0 Vote YES 2 at p", "0>1 Decide COMMIT", "1>0 Done",
    ]  # fmt: skip
    merges = leaders.merges()
    assert [label for label, _ in merges["nyc/a"]] == ["B", "A"]
    assert [label for label, _ in merges["ber/a"]] == ["C", "A"]
    assert merges["nyc/a"][1] == merges["ber/a"][1]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", range(9))
def test_a_successor_goes_on_with_a_staged_one_from_each_step(number: int, after: int) -> None:
    leaders = begun("nyc/a", "ber/a")
    leaders.commit()
    for step in range(after):
        leaders.deliver()
        if step > 3:
            leaders.carry()
            leaders.all[step % 2].wait(10)
    leaders.bag = [one for one in leaders.bag if one.sender != number]
    leaders.lead(number)
    staged(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert_committed_once(leaders, "nyc/a", "ber/a")


@pytest.mark.parametrize("stream", ["nyc/a", "ber/a"])
def test_c4_a_stream_that_is_lost_while_merges_are_staged_is_left_out(stream: str) -> None:
    leaders = begun("nyc/a", "ber/a")
    leaders.commit()
    leaders.settle()
    leaders.lose(stream)
    other = {"nyc/a": "ber/a", "ber/a": "nyc/a"}[stream]
    assert f"A COMMITTED 2, 2 left out (2 events left out, as their stream is LOST: {stream})" in (
        staged(leaders)
    )
    assert_committed_once(leaders, other)


def test_c4_a_participant_that_could_say_no_is_told_that_it_is_decided() -> None:
    """Its stream was lost before it knew: its no is not the end, and the decision is sent again."""
    leaders = begun()
    leaders.prepare()
    assert leaders.settle() == "[prepare A] A PREPARED 2"
    leaders.lose("ber/a")
    with losing(leaders, r.Decide):
        leaders.commit_prepared()
        leaders.settle()
    assert leaders.seen[-1] == "1>0 Vote NO 2"
    assert "A COMMITTED 1, 1 left out" in settled(leaders)
    row = born("begin", b"", 0, scope="nyc", owner="open")._replace(state="FINALIZE_IN_PROGRESS")
    no = r.Vote(b"", 1, 2, "NO", 0, False, 0, 0, None, None)
    found = list(due(row, r.VotesRow(2, "VOTE"), {1: r.PartitionRow(())}, {1: no}))
    assert found == [Due(1, "commit_later"), Due(1, "ask")]


def test_a_stream_rolls_once_in_a_round_however_many_merges_come_due_in_it() -> None:
    """Both were begun before a scaling; one of them gets its timestamp in the round that merges the other."""
    leaders = Leaders()
    leaders.begin()
    leaders[0].begin("B")
    leaders[0].touch("B")
    leaders[0].write("B", "w2")
    leaders[0].ask("scale", r.Scale("nyc/a", 1, (), ()))
    leaders.carry()
    leaders.commit()
    leaders.deliver()
    leaders[0].commit("B", own=[leaders[0].receipt("B", "w2")])
    leaders[0].rounds.clear()
    settled(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    for round_ in leaders[0].rounds:
        epochs = [one for one in round_.history if isinstance(one, NewEpoch)]
        assert len(epochs) in (0, 2), "one for the merges, and one for what follows"


def test_two_that_are_staged_at_one_side_each_do_not_wait_for_each_other() -> None:
    """Each has the free partitions of one stream until the other one is staged there, too."""
    leaders = Tables(chunk_bytes=1_000)
    for label in "AB":
        leaders.begin(label, writer=f"w{label}")
        for stream in ("nyc/a", "ber/a"):
            leaders.write(label, f"w{label}", stream, size=BIG)
    for label in "AB":
        receipt = replace(leaders.receipt(label, f"w{label}"), sequence=1)
        leaders[0].commit(label, receipts=[receipt], asker=f"commit {label}")
    leaders.deliver()
    leaders.deliver()
    leaders.deliver_of("B", 1)
    for _ in range(3):
        for one in leaders.all:
            one.wait(60)
            one.carry()
    waits = [one.memory.merging.waits for one in leaders.all]
    ready = [its.get(leaders[0].id(x), None) for its, x in zip(waits, "AB", strict=True)]
    assert [wait and wait.why for wait in ready] == ["timestamp", "timestamp"]
    said = staged(leaders)
    assert "[commit A] A COMMITTED 4" in said
    assert "[commit B] B COMMITTED 4" in said


# -- prepared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_a_prepared_transaction_waits_for_its_program(commits: bool) -> None:
    leaders = begun()
    leaders.prepare()
    assert leaders.settle() == "[prepare A] A PREPARED 2"
    assert leaders.states() == ["PREPARED", "PREPARED"]
    assert leaders[0].one_shot("B", event("nyc/a")) == "B COMMITTED 1", "it holds nothing"
    assert leaders[1].one_shot("C", event("ber/a"), scope="ber") == "C COMMITTED 1"
    leaders.lead(0)
    leaders.lead(1)
    leaders.seen.clear()
    assert leaders.wait(10 * 60_000) == "", "it never expires"
    assert leaders.seen == []
    assert leaders.prepare() == "A PREPARED 2"
    for one, found in zip(leaders.all, (1, 0), strict=True):
        one.ask("list", r.ListTransactions(None, False, 10, prepared=True))
        assert len(one.result.transactions) == found
    if commits:
        leaders.commit_prepared()
        assert leaders.settle() == "[end A] A COMMITTED 2"
        assert leaders.seen == [
            "0>1 Decide COMMIT", "0>1 AskVote TIMESTAMP 2", "1>0 Vote YES 2 at p", "0>1 Decide COMMIT",
            "1>0 Done",
        ]  # fmt: skip
        merges = leaders.merges()
        assert merges["nyc/a"][1] == merges["ber/a"][1]
    else:
        assert leaders[0].abort("A") == "A ABORTED (aborted by a client)"
        leaders.settle()
        assert leaders.states() == ["ABORTED", "ABORTED"]


def test_a_prepared_and_big_one_is_staged_after_its_programs_word() -> None:
    leaders = begun("nyc/a", "ber/a")
    leaders.prepare()
    leaders.settle()
    leaders.carry()
    leaders.commit_prepared()
    leaders.settle()
    leaders.lead(0)
    leaders.lead(1)
    staged(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert_committed_once(leaders, "nyc/a", "ber/a")


def test_a_refused_prepare_leaves_all_open_and_can_be_repeated() -> None:
    leaders = begun()
    leaders.touch("A", "ber/a", leaders[0].writer("w2"))
    receipt = leaders.receipt("A")
    command = leaders[0].committing("A", own=(receipt,))
    leaders[0].ask("prepare A", replace(command, prepare=r.Prepare(b"", b"a")))
    assert leaders.settle() == "[prepare A] WritersUnfinished"
    assert leaders.states() == ["OPEN", "OPEN"]
    leaders.prepare()
    assert "A PREPARED 2" in settled(leaders)
    assert leaders[0].ask("other", replace(
        leaders[0].committing("A", receipts=(receipt,)), prepare=r.Prepare(b"", b"b")
    )) == "IllegalState"  # fmt: skip


def test_events_of_other_control_partitions_do_not_fit_into_one_command_that_prepares() -> None:
    leaders = Leaders()
    command = r.PrepareEvents(
        leaders[0].id("A"), "nyc", None, (event("nyc/a"), event("ber/a")), SECRET,
        r.Prepare(b"", b""),
    )  # fmt: skip
    assert leaders[0].ask("prepare A", command) == "CrossScope"


# -- positions ---------------------------------------------------------------------------------------------


def test_positions_move_with_a_commit_whose_outputs_are_elsewhere() -> None:
    leaders = Leaders()
    fencing_token = bytes(FENCING_TOKEN_SIZE)
    owner = hash_of("nyc/p", fencing_token)
    row = r.ProcessorRow("nyc/p", 1, (r.ProcessorInput("nyc/a", "", 0, 0),), 1, "open")
    task = r.TaskRow(1, owner, "me", 0, 0, NO_TXN, 0, 0, None, ())
    leaders[0].log_rows([(k.processor_key("nyc/p"), row), (k.task_key("nyc/p", 0), task)])
    begin = replace(leaders[0].beginning("A"), fencing_hash=owner)
    leaders[0].ask("begin A", begin)
    leaders.touch("A", "ber/a")
    leaders.write("A", "w1", "ber/a")
    step = r.TaskStep((0,), 1, (r.TaskPosition(0, 3, 0),))
    consumed = r.Consumed("nyc/p", fencing_token, (step,))
    command = leaders[0].committing("A", receipts=(leaders.receipt("A"),))
    leaders[0].ask("commit A", replace(command, consumed=consumed))
    with losing(leaders, r.Vote):
        leaders.settle()
    assert leaders[0].state.tasks["nyc/p", 0].sequence == 0, "nothing moves before the decision"
    assert "A COMMITTED 1" in settled(leaders)
    moved = leaders[0].state.tasks["nyc/p", 0]
    assert (moved.sequence, moved.in_progress) == (1, None)
    assert moved.positions == (r.TaskPosition(0, 3, 0),)
    assert_committed_once(leaders, "ber/a")


# -- claims ------------------------------------------------------------------------------------------------


def test_a_commit_that_gives_way_is_answered_alike_before_and_after_its_participants_end() -> None:
    leaders = begun()
    assert leaders[0].one_shot("B", event("nyc/a"), name="day") == "B COMMITTED 1"
    leaders.commit(name="day")
    with losing(leaders, r.Decide):
        assert leaders.settle() == "[commit A] B COMMITTED 1"
        assert leaders.states() == ["ABORT_IN_PROGRESS", "PREPARED"]
        assert leaders.commit(name="day", asker="again") == "B COMMITTED 1"
    settled(leaders)
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert leaders.commit(name="day", asker="again") == "B COMMITTED 1"
    assert leaders.merges() == {"nyc/a": [("B", leaders[0].row("B").commit_timestamp)]}


@pytest.mark.parametrize("what", ["name", "series"])
def test_a_name_and_a_number_are_the_coordinators(what: str) -> None:
    leaders = begun()
    leaders.commit(name="day", number=None if what == "name" else 7)
    assert leaders.settle() == "[commit A] A COMMITTED 2"
    if what == "name":
        assert [one.holder("day") for one in leaders.all] == ["A", "nobody"]
    else:
        assert [one.series("day") for one in leaders.all] == ["7 by A", "nowhere"]


# -- forced ------------------------------------------------------------------------------------------------


def force(leaders: Leaders, number: int, outcome: bool | None) -> str:
    return leaders[number].ask("force", r.Force(leaders[0].id("A"), "P is gone", outcome))


# How an operator ends the part of control partition 1, and what its coordinator does when it is led again.
@pytest.mark.parametrize(
    ("outcome", "then", "said", "states"),
    [
        (True, "commit", "A COMMITTED 2", ["COMMITTED", "COMMITTED"]),
        (False, "commit", "[commit A] TransactionAborted", ["ABORTED", "ABORTED"]),
        (True, "abort", "", ["ABORTED", "COMMITTED"]),
        (False, "abort", "", ["ABORTED", "ABORTED"]),
    ],
)
def test_a_part_is_forced_to_an_end_while_its_coordinator_can_not_be_led(
    outcome: bool, then: str, said: str, states: list[str]
) -> None:
    leaders = begun()
    leaders.commit()
    leaders.deliver()
    leaders.bag.clear()
    assert force(leaders, 1, None) == "IllegalState"
    with losing(leaders, r.Done, r.Vote):
        force(leaders, 1, outcome)
        leaders[1].turn()
        leaders.collect()
    how = "commit" if outcome else "abort"
    assert [row.what for one in leaders[1].rounds for row in one.audit] == [
        (
            f"the part here of {txn_text(leaders[0].id('A'))} of open, presumed to {how} without its coordinator, "
            "control partition 0: 'P is gone'"
        )
    ]
    if then == "abort":
        leaders[0].abort("A")
    assert said in settled(leaders)
    assert leaders.states() == states
    assert force(leaders, 1, not outcome) == "IllegalState"
    if states == ["ABORTED", "COMMITTED"]:
        assert "committed at control partition 1 alone, by force" in leaders[0].row("A").reason


@pytest.mark.parametrize("number", [0, 1])
def test_c4_a_stuck_merge_is_left_out_and_the_others_commit(number: int) -> None:
    leaders = begun("nyc/a", "ber/a")
    leaders.commit()
    leaders.settle()
    leaders.carry()
    leaders.wait(60)
    assert force(leaders, number, False) == "IllegalState", "nothing stops it"
    leaders[number].memory.merging.wait(leaders[0].id("A"), "torn", leaders[number].now_ms, 0)
    assert force(leaders, number, False).startswith("A FINALIZE_IN_PROGRESS")
    assert "A COMMITTED 2, 2 left out (2 events left out, as their merge was forced" in (
        staged(leaders)
    )
    assert_committed_once(leaders, ["ber/a", "nyc/a"][number])


def test_a_part_that_was_forced_to_abort_says_so_in_each_round_of_votes() -> None:
    leaders = begun()
    leaders.commit(wait_ms=1_000)
    leaders.deliver()
    leaders.bag.clear()
    with losing(leaders, r.Done, r.Vote):
        force(leaders, 1, False)
        assert leaders.wait(1_001) == "[commit A] NotReady"
    leaders.commit(asker="again")
    assert "[again] TransactionAborted" in settled(leaders)
    assert leaders.states() == ["ABORTED", "ABORTED"]


def test_a_part_that_was_forced_to_commit_lets_another_one_be_staged() -> None:
    leaders = begun("nyc/a")
    leaders.commit(wait_ms=1_000)
    leaders.deliver()
    leaders.bag.clear()
    with losing(leaders, r.Done, r.Vote):
        force(leaders, 1, True)
        leaders.wait(1_001)
    leaders.commit(asker="again")
    assert "[again] A COMMITTED 3" in staged(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]


def test_a_big_part_that_is_forced_to_commit_takes_partitions_of_its_own() -> None:
    """S is staged, has the free partition, and is later than the part, so S waits for it."""
    leaders = begun("ber/a")
    leaders.commit()
    leaders.deliver()
    leaders.bag.clear()
    one = leaders[1]
    one.begin("S", scope="ber")
    one.touch("S", "ber/a")
    one.write("S", "w2", "ber/a", size=BIG)
    one.commit("S", receipts=[one.receipt("S", "w2", sequence=1)])
    while one.row("S").state != "FINALIZE_IN_PROGRESS":
        leaders.carry()
        one.wait(60)
    with losing(leaders, r.Vote, r.Done):
        force(leaders, 1, True)
        for _ in range(5):
            leaders.carry()
            one.wait(60)
        assert [one.row(label).state for label in "AS"] == ["COMMITTED", "COMMITTED"]


def test_a_part_that_was_forced_to_abort_does_not_stop_what_its_program_commits() -> None:
    leaders = begun()
    leaders.prepare()
    leaders.settle()
    force(leaders, 1, False)
    leaders.commit_prepared()
    said = "[end A] A COMMITTED 1, 1 left out (aborted at control partition 1 alone (P is gone))"
    assert said in settled(leaders)
    assert leaders.states() == ["COMMITTED", "ABORTED"]


def test_a_part_of_a_one_shot_whose_stream_is_in_trouble_can_be_left_out() -> None:
    leaders = Leaders()
    leaders.one_shot("A", "nyc/a", "ber/a")
    leaders.deliver()
    leaders[1].memory.waiting = {"ber/a": "its topic is away"}
    assert settled(leaders) == ""
    assert force(leaders, 1, False).startswith("A FINALIZE_IN_PROGRESS")
    why = "1 event left out, as their merge was forced to end: ber/a: its topic is away: ber/a"
    assert settled(leaders) == f"[A@0] A COMMITTED 1, 1 left out ({why})"
    assert_committed_once(leaders, "nyc/a")


@pytest.mark.parametrize("commits", [True, False])
def test_a_coordinator_ends_without_a_participant_that_is_gone(commits: bool) -> None:
    leaders = begun()
    state = "COMMITTED" if commits else "ABORTED"
    with losing(leaders, r.Decide):
        if commits:
            leaders.commit()
        else:
            leaders[0].abort("A")
        leaders.settle()
        assert force(leaders, 0, commits) == "IllegalState", "it may be led again"
        leaders.wait(10_001)
        force(leaders, 0, not commits)
        assert leaders[0].row("A").state != state, "there is no way back"
        force(leaders, 0, commits)
        leaders[0].turn()
        row = leaders[0].row("A")
        assert (row.state, row.committed, row.left_out) == (state, int(commits), int(commits))
    settled(leaders)
    assert leaders.states() == [state, "PREPARED" if commits else "OPEN"], "nobody tells it"
    force(leaders, 1, commits)
    settled(leaders)
    assert leaders.states() == [state, state]


# ``promised``: the prepare timestamp of a later vote that did not arrive. Others may have passed all below it.
@pytest.mark.parametrize(
    ("commits", "promised", "then"),
    [
        (True, None, "COMMITTED"),
        (True, 0, "PREPARED"),
        (True, (1 << 63) - 1, "PREPARED"),
        (False, None, "ABORTED"),
        (False, 0, "ABORTED"),
    ],
)
def test_a_participant_of_a_one_shot_that_was_ended_without_it_learns_how(
    commits: bool, promised: int | None, then: str
) -> None:
    leaders = Leaders()
    leaders.one_shot("A", "nyc/a", "ber/a")
    with losing(leaders, r.Decide, *([] if commits else [r.Vote])):
        leaders.settle()
        for ms in (250, 10_001, 10_001):
            leaders.wait(ms)
        force(leaders, 0, commits)
        leaders[0].turn()
    state = "COMMITTED" if commits else "ABORTED"
    assert leaders.states() == [state, "PREPARED"]
    if promised is not None:
        its = leaders[1].state.coordinator_row(leaders[0].id("A"))
        assert its is not None
        its = its._replace(prepare_timestamp=promised)
        leaders[1].log_rows([(k.coordinator_key(leaders[0].id("A")), its)])
    leaders.lead(1)
    settled(leaders)
    assert leaders.states() == [state, then]
    if then == "COMMITTED":
        assert_committed_once(leaders, "nyc/a", "ber/a")


def test_a_participant_that_waits_for_one_that_is_gone_is_committed_without_it() -> None:
    """Both have been asked for their votes when one goes; the other is staged, and owes no answer."""
    leaders = Leaders(3, chunk_bytes=1_000)
    leaders.begin("A", streams=("nyc/a", "ber/a", "tok/a"))
    leaders.write("A", "w1", "ber/a", size=BIG)
    leaders.commit()
    for _ in range(3):
        leaders.deliver()
    leaders.lost = lambda one: 2 in (one.sender, one.receiver)
    staged(leaders)
    leaders.wait(10_001)
    assert leaders.states() == ["FINALIZE_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "PREPARED"]
    assert "1 left out" in force(leaders, 0, True)
    leaders.settle()
    assert leaders.states() == ["COMMITTED", "COMMITTED", "PREPARED"]


def test_a_coordinator_aborts_what_holds_segments_of_another_control_partition_for_too_long() -> (
    None
):
    leaders = begun()
    leaders[1].create("ber/x", 2, exclusive="true", exclusive_hold_ms="2000")
    leaders[1].created("ber/x", 0, 0)
    locking = r.Touch(leaders[0].token("A"), "ber/x", leaders[0].writer("w1"), (), (0,), 1_000)
    leaders[1].turn(("lock", locking))
    leaders.wait(1_900)
    assert leaders.states() == ["OPEN", "OPEN"]
    with losing(leaders, r.Vote):
        leaders.wait(300)
    leaders.wait(300)
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert "it held segment 0 of ber/x for more than 2,000 ms" in leaders[0].row("A").reason
    assert leaders[1].state.locked.get("ber/x", {}) == {}
