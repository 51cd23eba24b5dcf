"""Commit: whom it takes, when it waits, how it ends. Read as transcripts.

A commit that the journal covers is decided in the turn that receives it and merged in the next.
"""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core import hybrid_time
from anabranch.core import rows as k
from anabranch.core.decide import decide_due
from anabranch.core.decide_commit import MAX_WAIT_MS
from anabranch.schemas import records as r
from tests.core.harness import World, nyc
from tests.core.labels import MINUTE


@pytest.fixture
def opened(world: World) -> World:
    """A is open and touched nyc/a."""
    world.begin("A")
    world.touch("A")
    return world


def states(world: World, label: str = "A") -> tuple[str, bool | None]:
    """The transaction's state, and whether its commit is decided (None: there is none)."""
    pending = (
        world.state.open[world.id(label)].pending if world.id(label) in world.state.open else None
    )
    return world.row(label).state, None if pending is None else pending.decided


# -- the usual way -----------------------------------------------------------------------------


def test_decided_in_one_turn_and_merged_in_the_next(opened: World) -> None:
    opened.write("A", "w1", count=3)
    opened.write("A", "w1", count=2, partition=1)
    opened.finish("A", "w1")
    assert opened.commit("A") == ""
    assert states(opened) == ("COMMIT_IN_PROGRESS", True)
    assert opened.ops() == "BEGIN_COMMIT A nyc/a:0"
    assert opened.plan() == ""
    before = opened.state.round.hybrid_time
    assert opened.turn() == "[commit A] A COMMITTED 5"
    assert opened.plan() == "A nyc/a 0: w1[0-3), 1: w1[0-2)"
    assert opened.ops() == "FINALIZE_COMMIT A nyc/a:0"
    outcome = opened.result
    assert outcome.commit_timestamp == opened.round.commits[0].timestamp > before
    assert outcome.commit_timestamp == opened.state.round.hybrid_time
    assert hybrid_time.to_ms(outcome.commit_timestamp) == opened.wall_ms
    assert outcome.streams == ("nyc/a",)
    assert [(w.writer, w.finished) for w in outcome.writers] == [(opened.writer("w1"), True)]
    assert (outcome.finished_ms, outcome.name, outcome.scope) == (opened.wall_ms, None, "nyc")
    assert [o.commit_timestamp for _, _, o in opened.round.ops] == [outcome.commit_timestamp]
    assert opened.turn() == "", "once"
    assert not opened.state.open
    assert not opened.state.committing


def test_with_nothing_written(opened: World) -> None:
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert opened.plan() == "", "no history record of nothing"
    assert opened.ops() == "FINALIZE_COMMIT A nyc/a:0"


def test_several_streams_are_merged_in_one_round_at_one_timestamp() -> None:
    world = nyc("nyc/b", "nyc/a")
    world.begin("A")
    world.touch("A", "nyc/b")
    world.touch("A", "nyc/a")
    world.write("A", "w1", "nyc/b")
    world.write("A", "w1", "nyc/a", count=2, partition=1)
    world.commit("A", own=[world.receipt("A", "w1")])
    assert world.ops() == "BEGIN_COMMIT A nyc/a:0; BEGIN_COMMIT A nyc/b:0"
    assert world.turn() == "[commit A] A COMMITTED 3"
    assert world.plan() == "A nyc/a 1: w1[0-2); A nyc/b 0: w1[0-1)"
    assert len({c.timestamp for c in world.round.commits}) == 1


def test_the_events_of_several_writers_keep_the_journals_order(opened: World) -> None:
    for writer in ("w2", "w1", "w3", "w1", "w2"):
        opened.write("A", writer)
    own = [opened.receipt("A", w) for w in ("w1", "w2", "w3")]
    opened.commit("A", own=own)
    assert opened.turn() == "[commit A] A COMMITTED 5"
    assert opened.plan() == "A nyc/a 0: w2[0-1) w1[1-2) w3[2-3) w1[3-4) w2[4-5)"


def test_two_transactions_side_by_side(opened: World) -> None:
    opened.begin("B")
    opened.touch("B")
    for label, writer in ("AB"[0], "w1"), ("B", "w2"), ("A", "w1"):
        opened.write(label, writer)
    opened.commit("B", own=[opened.receipt("B", "w2")])
    assert opened.turn() == "[commit B] B COMMITTED 1"
    assert opened.plan() == "B nyc/a 0: w2[1-2)"
    opened.commit("A", own=[opened.receipt("A", "w1")])
    assert opened.turn() == "[commit A] A COMMITTED 2"
    assert opened.plan() == "A nyc/a 0: w1[0-1) w1[2-3)"


# -- whom it takes -----------------------------------------------------------------------------


def test_only_its_own(opened: World) -> None:
    opened.write("A", "w1", count=2)
    opened.write("A", "w2", count=3)
    opened.finish("A", "w2")
    assert opened.commit("A", own=[opened.receipt("A", "w1")], receipts=[]) == ""
    assert opened.turn() == "[commit A] A COMMITTED 2, 3 left out"
    assert opened.plan() == "A nyc/a 0: w1[0-2)"


def test_exactly_the_receipts_given(opened: World) -> None:
    for n, writer in enumerate(("w1", "w2", "w3"), start=1):
        opened.write("A", writer, count=n)
    opened.finish("A", "w3")
    unregistered = opened.receipt("A", "w2", finished=False)
    opened.commit("A", own=[opened.receipt("A", "w1")], receipts=[unregistered])
    assert opened.turn() == "[commit A] A COMMITTED 3, 3 left out"
    assert opened.plan() == "A nyc/a 0: w1[0-1) w2[1-3)"


def test_every_finished_one_by_default(opened: World) -> None:
    for writer in ("w1", "w2", "w3"):
        opened.write("A", writer)
    opened.finish("A", "w2")
    opened.finish("A", "w3")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    assert opened.turn() == "[commit A] A COMMITTED 3"


def test_one_that_did_not_finish(opened: World) -> None:
    opened.write("A", "w1")
    opened.write("A", "w2")
    opened.finish("A", "w1")
    opened.register("A", opened.receipt("A", "w2", finished=False))
    assert opened.commit("A") == "WritersUnfinished"
    assert f"{opened.writer('w2') & (1 << 64) - 1:016x}" in opened.message
    assert f"{opened.writer('w1') & (1 << 64) - 1:016x}" not in opened.message
    assert opened.commit("A", own=[opened.receipt("A", "w2", finished=False)]) == "", "own is taken"
    assert opened.turn() == "[commit A] A COMMITTED 2"


def test_all_that_did_not_finish_are_named(opened: World) -> None:
    for writer in ("w1", "w2", "w3"):
        opened.register("A", opened.receipt("A", writer, finished=False))
    assert opened.commit("A") == "WritersUnfinished"
    named = [f"{opened.writer(w) & (1 << 64) - 1:016x}" for w in ("w2", "w1", "w3")]
    assert f"writer {', '.join(named)};" in opened.message, "in the order of their numbers"


def test_it_may_finish_and_then_the_commit_succeeds(opened: World) -> None:
    opened.write("A", "w1")
    opened.register("A", opened.receipt("A", "w1", finished=False))
    assert opened.commit("A") == "WritersUnfinished"
    assert opened.finish("A", "w1") == "registered 2"
    assert opened.commit("A") == ""
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_a_writer_that_never_registered_is_left_out_and_counted(opened: World) -> None:
    opened.write("A", "w1", count=2)
    opened.write("A", "lost", count=5)
    opened.finish("A", "w1")
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 2, 5 left out"


def test_what_a_writer_wrote_after_its_receipt_is_left_out(opened: World) -> None:
    opened.write("A", "w1", count=2)
    opened.finish("A", "w1")
    opened.write("A", "w1", count=4)
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 2, 4 left out"


def test_own_receipts_are_registered(opened: World) -> None:
    opened.write("A", "w1")
    opened.register("A", opened.receipt("A", "w1", finished=False))
    last = opened.receipt("A", "w1", finished=False)
    opened.held = True
    opened.commit("A", own=[last])
    assert opened.state.writers(opened.id("A"))[opened.writer("w1")] == last


@pytest.mark.parametrize("where", ["own", "receipts", "own and receipts", "own and registered"])
@pytest.mark.parametrize("first", ["old", "new"])
def test_of_two_receipts_of_one_writer_the_highest_wins(
    opened: World, where: str, first: str
) -> None:
    opened.write("A", "w1")
    old = opened.receipt("A", "w1")
    opened.write("A", "w1", count=2)
    new = opened.receipt("A", "w1")
    one, two = (old, new) if first == "old" else (new, old)
    if where == "own":
        opened.commit("A", own=[one, two])
    elif where == "receipts":
        opened.commit("A", receipts=[one, two])
    elif where == "own and receipts":
        opened.commit("A", own=[one], receipts=[two])
    else:
        opened.register("A", one)
        opened.commit("A", own=[two])
    assert opened.turn() == "[commit A] A COMMITTED 3"
    if where in ("own", "own and registered"):
        assert opened.state.writers(opened.id("A"))[opened.writer("w1")] == new


def test_of_two_with_one_sequence_its_own_is_taken(opened: World) -> None:
    opened.write("A", "w1")
    own = opened.receipt("A", "w1", sequence=1)
    other = opened.receipt("A", "w1", sequence=1, count=5)
    opened.commit("A", own=[own], receipts=[other])
    assert opened.turn() == "[commit A] A COMMITTED 1"


# -- what the journal shows --------------------------------------------------------------------


def test_it_waits_until_the_journal_covers_the_receipts(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1", count=3)
    opened.write("A", "w1", partition=1)
    own = [opened.receipt("A", "w1")]
    assert opened.commit("A", own=own) == ""
    assert states(opened) == ("OPEN", False)
    assert opened.next_due_ms() == 10_000
    assert opened.wait(9_000) == ""
    assert opened.rounds[-1].empty, "waiting writes nothing"
    opened.held = False
    assert opened.turn() == ""
    assert states(opened) == ("COMMIT_IN_PROGRESS", True)
    assert opened.next_due_ms() == 0
    assert opened.turn() == "[commit A] A COMMITTED 4"
    assert opened.next_due_ms() is None


def test_every_partition_must_be_covered(opened: World) -> None:
    opened.write("A", "w1", partition=1)
    opened.turn()
    opened.held = True
    opened.write("A", "w1", partition=0)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.turn()
    assert states(opened) == ("OPEN", False)


def test_deadline_and_then_a_second_commit(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    assert opened.wait(9_999) == ""
    assert opened.wait(1) == "[commit A] ReceiptsNotCovered"
    assert opened.get("A") == "A OPEN"
    assert states(opened) == ("OPEN", None)
    assert opened.state.committing == {}
    opened.held = False
    assert opened.commit("A") == "", "it knows the receipt by now"
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_at_the_deadline_what_is_covered_commits(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.held = False
    assert opened.wait(10_000) == ""
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_without_patience(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    assert opened.commit("A", own=own, wait_ms=0) == "ReceiptsNotCovered"
    opened.held = False
    assert opened.commit("A", own=own, wait_ms=0) == ""
    assert opened.turn() == "[commit A] A COMMITTED 1"


@pytest.mark.parametrize(
    ("wait_ms", "answer"),
    [(-1, "InvalidArgument"), (0, ""), (MAX_WAIT_MS, ""), (MAX_WAIT_MS + 1, "InvalidArgument")],
)
def test_the_range_of_the_wait(opened: World, wait_ms: int, answer: str) -> None:
    assert opened.commit("A", wait_ms=wait_ms) == answer


@pytest.mark.parametrize(
    ("bend", "said"),
    [
        ({"count": 1}, "the receipt says 4 records, the journal shows 3 (count differs)"),
        ({"count": -1}, "the receipt says 2 records, the journal shows 3 (count differs)"),
        ({"crc": 1}, "the receipt says 3 records, the journal shows 3 (checksum differs)"),
    ],
    ids=["one more", "one less", "checksum"],
)
def test_receipt_and_journal_disagree(opened: World, bend: dict[str, Any], said: str) -> None:
    opened.write("A", "w1", count=3, partition=1)
    assert opened.commit("A", own=[opened.receipt("A", "w1", **bend)]) == "ReceiptMismatch"
    assert said in opened.message
    assert f"writer {opened.writer('w1'):016x}, nyc/a journal partition 1" in opened.message
    assert opened.get("A") == "A OPEN"
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
    assert opened.turn() == "[commit A] A COMMITTED 3"


def test_a_mismatch_is_found_as_soon_as_the_journal_is_covered(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    assert opened.commit("A", own=[opened.receipt("A", "w1", crc=1)]) == ""
    opened.held = False
    assert opened.turn() == "[commit A] ReceiptMismatch"


def test_loose_bounds_are_fine(opened: World) -> None:
    opened.write("A", "other", count=5)
    opened.write("A", "w1", count=2)
    opened.write("A", "other", count=5)
    opened.commit("A", own=[opened.receipt("A", "w1", loose=5)])
    assert opened.turn() == "[commit A] A COMMITTED 2, 10 left out"
    assert opened.plan() == "A nyc/a 0: w1[5-7)"


def test_records_rejected_are_counted_in_the_outcome(opened: World) -> None:
    opened.write("A", "w1")
    opened.write("A", "w2", count=4, epoch=7)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.write("A", "w1", count=2)  # too late
    assert opened.turn() == "[commit A] A COMMITTED 1, 6 rejected"


def test_after_the_decision_nothing_is_added(opened: World) -> None:
    """Whatever arrives between decision and merge, the plan holds what was decided."""
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.write("A", "w1", count=3)
    opened.write("A", "w2", count=3)
    assert opened.turn() == "[commit A] A COMMITTED 1, 6 rejected"
    assert opened.plan() == "A nyc/a 0: w1[0-1)"


# -- names claimed by the commit ---------------------------------------------------------------


def test_a_free_name(opened: World) -> None:
    opened.commit("A", name="daily")
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert (opened.holder("daily"), opened.row("A").name) == ("A", "daily")
    assert opened.begin("B", name="daily") == "A COMMITTED 0"


def test_a_name_is_claimed_by_the_decision_not_before(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")], name="daily")
    assert opened.holder("daily") == "nobody"
    assert opened.wait(10_000) == "[commit A] ReceiptsNotCovered"
    assert (opened.holder("daily"), opened.row("A").name) == ("nobody", None)


def test_a_name_held_by_an_open_one(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.touch("B")
    opened.commit("A", name="daily")
    assert opened.ops() == "ABORT_TXN B nyc/a:0; BEGIN_COMMIT A nyc/a:0"
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert opened.get("B") == "B ABORTED (superseded by a newer transaction named 'daily')"


def test_a_name_held_by_an_open_one_whose_commit_waits(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.touch("B")
    opened.held = True
    opened.write("B", "w2")
    opened.commit("B", own=[opened.receipt("B", "w2")])
    assert opened.commit("A", name="daily") == "[commit B] TransactionAborted"
    assert opened.turn() == "[commit A] A COMMITTED 0"


def test_a_name_held_by_a_committed_one(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.commit("B")
    opened.turn()
    opened.write("A", "w1")
    answer = opened.commit("A", own=[opened.receipt("A", "w1")], name="daily")
    assert answer == "B COMMITTED 0"
    assert opened.ops() == "ABORT_TXN A nyc/a:0"
    assert opened.get("A") == (
        f"A ABORTED (the name 'daily' was committed before by {opened.id('B').hex()})"
    )
    assert opened.commit("A", name="daily") == "B COMMITTED 0", "the same answer again"
    assert opened.commit("A") == "TransactionAborted"
    assert opened.holder("daily") == "B"


def test_two_claim_one_name(opened: World) -> None:
    opened.begin("B")
    assert (
        opened.turn(
            ("commit A", opened.committing("A", name="daily")),
            ("commit B", opened.committing("B", name="daily")),
        )
        == ""
    )
    assert states(opened, "A") == ("COMMIT_IN_PROGRESS", True)
    assert states(opened, "B") == ("OPEN", False)
    assert opened.turn() == "[commit A] A COMMITTED 0; [commit B] A COMMITTED 0"
    assert opened.get("B").startswith("B ABORTED")


@pytest.mark.parametrize("patient", [False, True])
def test_a_claim_on_a_name_whose_holder_is_decided_and_not_merged_yet(patient: bool) -> None:
    """The holder's merge must wait for a bigger one before it."""
    world = nyc(round_bytes=10)
    for label in "ABC":
        world.begin(label, name="daily" if label == "B" else None)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "ABC"}
    world.turn(*((f"commit {x}", world.committing(x, own=own[x])) for x in "AB"))
    wait_ms = 10_000 if patient else 0
    claim = world.commit("C", name="daily", wait_ms=wait_ms, own=own["C"])
    after = world.turn()
    if patient:
        assert claim == "[commit A] A COMMITTED 1"
        assert after == "[commit B] B COMMITTED 1; [commit C] B COMMITTED 1"
    else:
        assert claim == "[commit A] A COMMITTED 1; NotReady"
        assert after == "[commit B] B COMMITTED 1"
        assert world.get("C") == "C OPEN"


def test_its_own_name_again(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.commit("B", name="daily")
    assert opened.turn() == "[commit B] B COMMITTED 0"
    assert opened.holder("daily") == "B"


def test_another_name_than_it_began_with(opened: World) -> None:
    opened.begin("B", name="daily")
    assert opened.commit("B", name="weekly") == "InvalidArgument"
    assert "'daily'" in opened.message
    assert (opened.holder("daily"), opened.holder("weekly")) == ("B", "nobody")


@pytest.mark.parametrize("name", ["", "n" * 257])
def test_names_that_are_none(opened: World, name: str) -> None:
    assert opened.commit("A", name=name) == "InvalidArgument"


# -- again -------------------------------------------------------------------------------------


def test_repeated_while_it_waits(opened: World) -> None:
    """The last one says whom to take and how long to wait; everyone is answered."""
    opened.held = True
    opened.write("A", "w1")
    opened.write("A", "w2")
    assert opened.commit("A", asker="1", own=[opened.receipt("A", "w1")]) == ""
    opened.wait(6_000)
    w2 = [opened.receipt("A", "w2")]
    assert opened.commit("A", asker="2", own=w2, receipts=[]) == ""
    assert opened.wait(6_000) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[1] A COMMITTED 1, 1 left out; [2] A COMMITTED 1, 1 left out"
    assert opened.plan() == "A nyc/a 0: w2[1-2)"


def test_the_same_command_again_is_answered_once(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    assert opened.commit("A", own=own) == ""
    assert opened.commit("A", own=own) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_repeated_when_it_is_decided(opened: World) -> None:
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    late = r.Commit(opened.token("A"), (), (), "late", -1)
    assert opened.turn(("again", late)) == "[commit A] A COMMITTED 1; A COMMITTED 1"
    assert opened.plan() == "A nyc/a 0: w1[0-1)"
    assert opened.row("A").name is None, "whom and what to take is final"


def test_repeated_when_it_is_committed(opened: World) -> None:
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.turn()
    first = opened.result
    assert opened.commit("A") == "A COMMITTED 1"
    assert opened.result == first
    assert opened.plan() == ""


def test_of_an_aborted_one(opened: World) -> None:
    opened.abort("A", "no need")
    assert opened.commit("A") == "TransactionAborted"
    assert "no need" in opened.message
    assert opened.commit("A", name="daily") == "TransactionAborted"


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_bytes", [401, 1_000, 1_100])
def test_a_big_merge_keeps_the_next_out_of_its_round(round_bytes: int) -> None:
    world = nyc(round_bytes=round_bytes)
    for label in "ABCD":
        world.begin(label)
        world.touch(label)
    for label, size in ("A", 400), ("B", 700), ("C", 10), ("D", 10):
        world.write(label, f"w{label}", size=size)
    asked = [
        (label, world.committing(label, own=[world.receipt(label, f"w{label}")]))
        for label in "ABCD"
    ]
    world.turn(*asked)
    assert world.turn() == "[A] A COMMITTED 1; [B] B COMMITTED 1"
    assert world.turn() == "[C] C COMMITTED 1; [D] D COMMITTED 1"


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_a_round_may_be_limited_to_a_few_merges(limit: int | None) -> None:
    """So the controller finds the one whose data the broker refuses."""
    world = nyc()
    for label in "ABC":
        world.begin(label)
    world.turn(*((label, world.committing(label)) for label in "ABC"))
    turn = world.new_turn()
    turn.merge_limit = limit
    decide_due(turn, read_to_end=True)
    assert world.close(turn).count("COMMITTED") == (limit or 3)


def test_timestamps_of_one_round_rise_in_the_order_of_the_merges(opened: World) -> None:
    for label in "BC":
        opened.begin(label)
        opened.touch(label)
    for label in "CAB":
        opened.write(label, f"w{label}")
    opened.turn(
        *(
            (label, opened.committing(label, own=[opened.receipt(label, f"w{label}")]))
            for label in "BAC"
        )
    )
    opened.turn()
    timestamps = [c.timestamp for c in opened.round.commits]
    assert timestamps == sorted(set(timestamps))
    assert len(timestamps) == 3


def test_timestamps_rise_when_the_clock_goes_back(opened: World) -> None:
    opened.begin("B")
    opened.commit("A")
    opened.turn()
    first = opened.result.commit_timestamp
    opened.wall_us -= 5_000_000
    opened.commit("B")
    opened.turn()
    assert opened.result.commit_timestamp == first + 1
    assert opened.state.round.hybrid_time == first + 1


# -- after a takeover --------------------------------------------------------------------------


def test_a_successor_merges_what_was_decided(opened: World) -> None:
    opened.write("A", "w1", count=2)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.lead()
    assert opened.turn() == "[commit A] A COMMITTED 2"
    assert opened.plan() == "A nyc/a 0: w1[0-2)"


def test_a_successor_merges_only_when_it_has_read_the_journals(opened: World) -> None:
    """Its own table may be empty: the index is built anew while the decision stands already."""
    opened.write("A", "w1", count=2)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.held = True
    opened.lead(keep_table=False)
    assert opened.turn() == "", "not yet"
    assert states(opened) == ("COMMIT_IN_PROGRESS", True)
    opened.held = False
    assert opened.turn() == "[commit A] A COMMITTED 2"
    assert opened.plan() == "A nyc/a 0: w1[0-2)"


@pytest.mark.parametrize("found", ["fewer", "more"])
def test_another_count_than_was_decided_is_never_merged(opened: World, found: str) -> None:
    """Should a journal lose records that the decision rests on, the transaction ends without effect."""
    opened.write("A", "w1", count=2)
    opened.write("A", "w1", count=1, partition=1)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    key = next(key for key in opened.table.rows if key[:1] == k.INDEX)
    if found == "fewer":
        del opened.table.rows[key]
    else:
        opened.table.rows[key[:-1] + b"\x01"] = opened.table.rows[key]
    shown = 1 if found == "fewer" else 5
    assert opened.turn() == "[commit A] TransactionAborted"
    assert f"its journals show {shown} of the 3 records" in opened.message
    assert (opened.plan(), opened.ops()) == ("", "ABORT_TXN A nyc/a:0")
    assert opened.row("A").state == "ABORTED"


def test_a_successor_goes_on_waiting(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.lead(keep_table=False)
    assert opened.wait(9_999) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[commit A] A COMMITTED 1"


@pytest.mark.parametrize("takeover", [False, True])
def test_the_order_of_merges_does_not_depend_on_a_takeover(takeover: bool) -> None:
    world = nyc()
    for label in "AB":
        world.begin(label)
        world.touch(label)
        world.write(label, f"w{label}")
    world.turn(*((x, world.committing(x, own=[world.receipt(x, f"w{x}")])) for x in ("B", "A")))
    if takeover:
        world.lead(keep_table=False)
    assert world.turn() == "[A] A COMMITTED 1; [B] B COMMITTED 1"
    assert world.plan() == "A nyc/a 0: wA[0-1); B nyc/a 0: wB[1-2)"


# -- a refused commit leaves it open, with its whole keepalive ------------------------------------


@pytest.mark.parametrize("how", ["not covered", "mismatch"])
def test_a_refusal_after_a_long_wait_leaves_time_to_commit_again(how: str) -> None:
    world = nyc()
    world.begin("A", keepalive_ms=5_000)
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    crc = 1 if how == "mismatch" else 0
    world.commit("A", own=[world.receipt("A", "w1", crc=crc)], wait_ms=MINUTE)
    assert world.wait(30_000) == "", "a received commit stops the keepalive"
    if how == "mismatch":
        world.held = False
        assert world.wait(20_000) == "[commit A] ReceiptMismatch"
    else:
        assert world.wait(30_000) == "[commit A] ReceiptsNotCovered"
    world.held = False
    assert world.wait(5_000) == ""
    assert world.commit("A", own=[world.receipt("A", "w1")]) == ""
    assert world.turn() == "[commit A] A COMMITTED 1"
