"""Commit: whom it takes, how it ends, repeated, in rounds. Read as transcripts.

A commit that the journal covers is decided in the turn that receives it and merged in the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.decisions.decide import decide_due
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc, states

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


def test_a_writer_has_a_label_that_errors_and_lists_tell(opened: World) -> None:
    opened.write("A", "w1", count=3)
    number = opened.writer("w1")

    def label(text: str, writer: int = number, lane: str | None = None) -> str:
        command = r.LabelWriter(opened.token("A"), writer, text)
        return opened.ask("label", command, lane=lane)

    assert label("loader 7") == "InvalidArgument", "it is not known yet"
    opened.register("A", opened.receipt("A", "w1", finished=False))
    assert label("x" * 64) == "registered 1"
    assert label("loader 7") == "registered 1"
    for text in ("x" * 65, "two\nlines"):
        assert label(text) == "InvalidArgument"
    assert label("other", lane="other") == "NotAuthorized", "only the writer's lane"
    opened.lead()
    assert opened.commit("A") == "WritersUnfinished"
    assert f"{number & (1 << 64) - 1:016x} (loader 7);" in opened.message
    opened.ask("list", r.ListOpen(None, opened.id("A"), 1))
    (found,) = opened.result.transactions
    assert found.writers == (r.WriterInfo(number, "open", "loader 7", 3, False),)


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
    assert opened.state.receipt(opened.id("A"), opened.writer("w1")) == last


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
        assert opened.state.receipt(opened.id("A"), opened.writer("w1")) == new


@pytest.mark.parametrize("where", ["own", "receipts", "own and receipts", "registered"])
def test_two_that_differ_in_one_sequence_are_refused(opened: World, where: str) -> None:
    """A receipt that lacks a partition is one of them: a part of its writer would be committed."""
    opened.write("A", "w1")
    opened.write("A", "w1", partition=1)
    whole = opened.receipt("A", "w1", sequence=1)
    part = replace(whole, extents=whole.extents[:1])
    if where == "registered":
        opened.register("A", whole)
        assert opened.register("A", part) == "ReceiptMismatch"
        assert opened.commit("A", receipts=[part]) == "ReceiptMismatch"
    elif where == "own and receipts":
        assert opened.commit("A", own=[whole], receipts=[part]) == "ReceiptMismatch"
    else:
        given: dict[str, Any] = {where: [part, whole]}
        assert opened.commit("A", **given) == "ReceiptMismatch"
    assert states(opened) == ("OPEN", None)


def test_who_has_touched_is_never_left_out_in_silence(opened: World) -> None:
    """It writes to journals from now on; its first receipt may be far."""
    opened.ask("touch", r.Touch(opened.token("A"), "nyc/a", opened.writer("w2")))
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    assert opened.commit("A", own=own) == "WritersUnfinished"
    assert f"{opened.writer('w2') & (1 << 64) - 1:016x}" in opened.message
    opened.lead(keep_table=False)
    assert opened.commit("A", own=own) == "WritersUnfinished"
    opened.write("A", "w2")
    opened.finish("A", "w2")
    opened.ask("touch", r.Touch(opened.token("A"), "nyc/a", opened.writer("w2")))
    assert opened.commit("A", own=own) == ""
    assert opened.turn() == "[commit A] A COMMITTED 2"


def test_a_refused_commit_registers_nothing(opened: World) -> None:
    opened.write("A", "w1")
    assert opened.commit("A", own=[opened.receipt("A", "w1", crc=1)]) == "ReceiptMismatch"
    assert opened.state.writers_after(opened.id("A")) == []


def test_an_outcome_names_exactly_who_was_taken(opened: World) -> None:
    """Also before it is merged, and after a takeover."""
    for writer in ("w1", "w2", "w3"):
        opened.write("A", writer)
    opened.finish("A", "w2")
    opened.finish("A", "w3")
    taken = [opened.receipt("A", "w1"), opened.receipt("A", "w3")]
    opened.commit("A", own=taken[:1], receipts=taken[1:])
    found = opened.state.writers_after(opened.id("A"))
    assert {x.writer: x for x in found} == {x.writer: x for x in taken}
    opened.lead()
    opened.turn()
    assert opened.get("A") == "A COMMITTED 2, 1 left out"
    assert opened.result.writers == tuple(taken)


@pytest.mark.parametrize("state", ["waits", "decided", "committed"])
def test_no_committer_is_told_of_another_ones_success(opened: World, state: str) -> None:
    opened.write("A", "mine")
    opened.write("A", "other")
    mine, other = opened.receipt("A", "mine"), opened.receipt("A", "other")
    first: dict[str, Any] = {"own": [mine]}
    second: dict[str, Any] = {"own": [], "receipts": [other]}
    if state == "waits":
        opened.held = True
        opened.commit("A", asker="owner", **first)
        assert opened.commit("A", asker="helper", **second) == "[owner] OutcomeUnknown"
        assert opened.register("A", mine) == "registered 1"  # late: it changes nothing
        opened.held = False
        opened.turn()
        assert opened.turn() == "[helper] A COMMITTED 1, 1 left out"
    else:
        opened.commit("A", asker="helper", **second)
        if state == "committed":
            opened.turn()
    told = opened.commit("A", asker="owner", **first)
    if state == "decided":
        assert told == "[owner] OutcomeUnknown; [helper] A COMMITTED 1, 1 left out" or (
            told == "OutcomeUnknown; [helper] A COMMITTED 1, 1 left out"
        )
    else:
        assert told == "AlreadyCommitted"
    assert opened.commit("A", asker="helper", **second) == "A COMMITTED 1, 1 left out"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("end", [2, 5], ids=["the same end", "others wrote meanwhile"])
@pytest.mark.parametrize("state", ["waits", "decided", "committed"])
def test_two_receipts_of_the_same_events_get_the_same_answer(
    opened: World, state: str, end: int, order: tuple[int, int]
) -> None:
    """A flush without new writes gives a higher sequence, and a higher end if others wrote to the journal."""
    opened.write("A", "w1", count=2)
    opened.write("A", "other", count=3)
    first = opened.receipt("A", "w1")
    ends = {1: 2, 2: end}
    receipts = [
        replace(first, sequence=n, extents=(replace(first.extents[0], end=ends[n]),)) for n in order
    ]
    opened.held = state == "waits"
    assert opened.commit("A", asker="1", own=receipts[:1], receipts=[]) == ""
    told = ""
    if state == "committed":
        told = opened.turn()
    told += "; " + opened.commit("A", asker="2", own=receipts[1:], receipts=[])
    opened.held = False
    told += "; " + opened.turn() + "; " + opened.turn()
    found = [said for said in told.replace("[1] ", "").replace("[2] ", "").split("; ") if said]
    assert found == ["A COMMITTED 2, 3 left out"] * 2


def test_a_commit_that_claims_something_else_takes_the_place_of_one(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    opened.commit("A", asker="1", own=own, name="s", number=7)
    assert opened.commit("A", asker="2", own=own) == "[1] OutcomeUnknown"


# -- again -------------------------------------------------------------------------------------


def test_repeated_while_it_waits(opened: World) -> None:
    """The last one says whom to take and how long to wait; everyone is answered."""
    opened.held = True
    opened.write("A", "w1")
    opened.write("A", "w2")
    w1 = [opened.receipt("A", "w1")]
    assert opened.commit("A", asker="1", own=w1) == ""
    opened.wait(6_000)
    w2 = [opened.receipt("A", "w2")]
    assert opened.commit("A", asker="2", own=w2, receipts=w1) == ""
    assert opened.wait(6_000) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[1] A COMMITTED 2; [2] A COMMITTED 2"
    assert opened.plan() == "A nyc/a 0: w1[0-1) w2[1-2)"


def test_the_same_command_again_is_answered_once(opened: World) -> None:
    """And keeps its deadline, or a client would have given up before it ends."""
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    for _ in range(3):
        assert opened.commit("A", own=own) == ""
        assert opened.wait(3_000) == ""
    assert opened.wait(1_000) == "[commit A] ReceiptsNotCovered"
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
@pytest.mark.parametrize("busy", [False, True])
def test_a_big_merge_keeps_the_next_out_of_its_round(
    round_bytes: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While commands come, `BUSY_ROUND` holds, too."""
    most = limits.BUSY_ROUND._replace(value=round_bytes if busy else 1)
    monkeypatch.setattr(limits, "BUSY_ROUND", most)
    world = nyc(round_bytes=10_000 if busy else round_bytes)
    world.busy = busy
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
    decide_due(turn, judge_silence=True)
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
