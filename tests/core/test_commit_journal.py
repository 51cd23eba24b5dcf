"""Commits and the journal: when one waits, what is not as its receipts say, what a successor finds."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core import rows as k
from tests.core.harness import World, nyc, states
from tests.core.labels import MINUTE

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
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
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
    ("bend", "said"),
    [
        (
            {"count": 1, "loose": 1},
            "the receipt says 4 records, the journal shows 3 (count differs)",
        ),
        ({"count": -1}, "the receipt says 2 records, the journal shows 3 (count differs)"),
        ({"crc": 1}, "the receipt says 3 records, the journal shows 3 (checksum differs)"),
    ],
    ids=["one more", "one less", "checksum"],
)
def test_receipt_and_journal_disagree(opened: World, bend: dict[str, Any], said: str) -> None:
    opened.write("A", "w1", count=3, partition=1)
    opened.write("A", "other", partition=1)
    assert opened.commit("A", own=[opened.receipt("A", "w1", **bend)]) == "ReceiptMismatch"
    assert said in opened.message
    assert f"writer {opened.writer('w1'):016x}, nyc/a journal partition 1" in opened.message
    assert opened.get("A") == "A OPEN"
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
    assert opened.turn() == "[commit A] A COMMITTED 3, 1 left out"


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
