"""Commit: whose records it takes, when it is decided, what its askers are answered, in which round it is merged.

A commit that the journals cover is decided in the turn that receives it and merged in the next one. What it is
refused for by itself is in `test_refusals`; names and series that it claims are in `test_claims`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.decide import decide_due
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc, states
from tests.core.labels import MINUTE


def written(world: World, *labels: str, size: int | None = None) -> dict[str, list[r.Receipt]]:
    """Transactions that each wrote once to nyc/a, and their receipts."""
    for label in labels:
        if label not in world.ids:
            world.begin(label)
            world.touch(label)
        world.write(label, f"w{label}", size=size)
    return {label: [world.receipt(label, f"w{label}")] for label in labels}


# -- the usual way -----------------------------------------------------------------------------


def test_a_commit_is_decided_in_one_turn_and_merged_in_the_next(opened: World) -> None:
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
    assert (len(opened.state.open), len(opened.state.committing)) == (0, 0)
    assert opened.commit("A") == "A COMMITTED 5", "repeated"
    assert (opened.result, opened.plan()) == (outcome, "")


def test_a_commit_of_nothing_has_no_history(opened: World) -> None:
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert (opened.plan(), opened.ops()) == ("", "FINALIZE_COMMIT A nyc/a:0")


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


def test_events_keep_the_journals_order_and_their_transaction(opened: World) -> None:
    opened.begin("B")
    opened.touch("B")
    for label, writer in (("A", "w2"), ("A", "w1"), ("B", "w4"), ("A", "w3"), ("A", "w1")):
        opened.write(label, writer)
    opened.commit("B", own=[opened.receipt("B", "w4")])
    assert opened.turn() == "[commit B] B COMMITTED 1"
    assert opened.plan() == "B nyc/a 0: w4[2-3)"
    opened.commit("A", own=[opened.receipt("A", w) for w in ("w1", "w2", "w3")])
    assert opened.turn() == "[commit A] A COMMITTED 4"
    assert opened.plan() == "A nyc/a 0: w2[0-1) w1[1-2) w3[3-4) w1[4-5)"


# -- whose records it takes --------------------------------------------------------------------


def receipts_are_given(world: World) -> dict[str, Any]:
    unfinished = world.receipt("A", "w2", finished=False)
    return {"own": [world.receipt("A", "w1")], "receipts": [unfinished]}


def registered(world: World, *writers: str) -> dict[str, Any]:
    for writer in writers:
        world.finish("A", writer)
    return {"own": [] if "w1" in writers else [world.receipt("A", "w1")]}


# w1 wrote 1 record, w2 wrote 2, w3 wrote 3.
TAKEN: dict[str, tuple[Any, str, str]] = {
    "own alone": (
        lambda w: {"own": [w.receipt("A", "w1")], "receipts": []}, "1, 5 left out", "w1[0-1)",
    ),
    "exactly the receipts given": (receipts_are_given, "3, 3 left out", "w1[0-1) w2[1-3)"),
    "own and all that are registered": (
        lambda w: registered(w, "w2", "w3"), "6", "w1[0-1) w2[1-3) w3[3-6)",
    ),
    "not who never registered": (lambda w: registered(w, "w1"), "1, 5 left out", "w1[0-1)"),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_a_commit_takes_the_writers_that_it_says(opened: World, case: str) -> None:
    given, said, plan = TAKEN[case]
    for n, writer in enumerate(("w1", "w2", "w3"), start=1):
        opened.write("A", writer, count=n)
    assert opened.commit("A", **given(opened)) == ""
    assert opened.turn() == f"[commit A] A COMMITTED {said}"
    assert opened.plan() == f"A nyc/a 0: {plan}"


def test_what_a_writer_wrote_after_its_receipt_is_left_out(opened: World) -> None:
    opened.write("A", "w1", count=2)
    opened.finish("A", "w1")
    opened.write("A", "w1", count=4)
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 2, 4 left out"


def test_writers_that_have_not_finished_are_named(opened: World) -> None:
    for writer in ("w1", "w2", "w3", "w4"):
        opened.write("A", writer)
        finished = writer == "w4"
        opened.register("A", opened.receipt("A", writer, finished=finished))
    assert opened.commit("A") == "WritersUnfinished"
    named = [f"{opened.writer(w) & (1 << 64) - 1:016x}" for w in ("w2", "w1", "w3")]
    assert f"writer {', '.join(named)};" in opened.message, "in the order of their numbers"
    assert opened.finish("A", "w2") == "registered 2"
    assert opened.finish("A", "w3") == "registered 2"
    assert opened.commit("A") == "WritersUnfinished"
    assert opened.commit("A", own=[opened.receipt("A", "w1", finished=False)]) == "", "own is taken"
    assert opened.turn() == "[commit A] A COMMITTED 4"


def test_a_writer_has_a_label_in_errors_and_lists(opened: World) -> None:
    opened.write("A", "w1", count=3)
    number = opened.writer("w1")

    def label(text: str, lane: str | None = None) -> str:
        command = r.LabelWriter(opened.token("A"), number, text)
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


def test_a_writer_that_touched_is_never_left_out_in_silence(opened: World) -> None:
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


def test_own_receipts_are_registered_unless_the_commit_is_refused(opened: World) -> None:
    opened.write("A", "w1")
    assert opened.commit("A", own=[opened.receipt("A", "w1", crc=1)]) == "ReceiptMismatch"
    assert opened.state.writers_after(opened.id("A")) == []
    opened.register("A", opened.receipt("A", "w1", finished=False))
    last = opened.receipt("A", "w1", finished=False)
    opened.held = True
    opened.commit("A", own=[last])
    assert opened.state.receipt(opened.id("A"), opened.writer("w1")) == last


def test_an_outcome_names_exactly_the_writers_that_were_taken(opened: World) -> None:
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


# -- what its askers are answered --------------------------------------------------------------


@pytest.mark.parametrize("state", ["waits", "decided", "committed"])
def test_no_asker_is_answered_with_another_ones_success(opened: World, state: str) -> None:
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
    said = opened.commit("A", asker="owner", **first).removeprefix("[owner] ")
    if state == "decided":
        assert said == "OutcomeUnknown; [helper] A COMMITTED 1, 1 left out"
    else:
        assert said == "AlreadyCommitted"
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
    said = [opened.turn() if state == "committed" else ""]
    said.append(opened.commit("A", asker="2", own=receipts[1:], receipts=[]))
    opened.held = False
    said += [opened.turn(), opened.turn()]
    answers = "; ".join(filter(None, said)).replace("[1] ", "").replace("[2] ", "")
    assert answers == "; ".join(["A COMMITTED 2, 3 left out"] * 2)


def test_a_commit_that_claims_something_else_replaces_the_one_that_waits(opened: World) -> None:
    opened.held = True
    own = written(opened, "A")["A"]
    opened.commit("A", asker="1", own=own, name="s", number=7)
    assert opened.commit("A", asker="2", own=own) == "[1] OutcomeUnknown"


def test_the_last_commit_says_whom_to_take_and_how_long_to_wait(opened: World) -> None:
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


def test_a_repeated_command_is_answered_once_and_keeps_its_deadline(opened: World) -> None:
    """Or a client would have given up before it ends."""
    opened.held = True
    own = written(opened, "A")["A"]
    for _ in range(3):
        assert opened.commit("A", own=own) == ""
        assert opened.wait(3_000) == ""
    assert opened.wait(1_000) == "[commit A] ReceiptsNotCovered"
    assert opened.commit("A", own=own) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_a_decision_is_final(opened: World) -> None:
    opened.commit("A", own=written(opened, "A")["A"])
    late = r.Commit(opened.token("A"), (), (), "late", -1)
    assert opened.turn(("again", late)) == "[commit A] A COMMITTED 1; A COMMITTED 1"
    assert opened.plan() == "A nyc/a 0: wA[0-1)"
    assert opened.row("A").name is None


# -- what the journals show --------------------------------------------------------------------


def test_a_commit_waits_until_every_journal_covers_its_receipts(opened: World) -> None:
    opened.write("A", "w1", partition=1)
    opened.turn()
    opened.held = True
    opened.write("A", "w1", count=3)
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


@pytest.mark.parametrize("wait_ms", [10_000, 0])
def test_after_its_deadline_a_commit_is_refused_and_may_come_again(
    opened: World, wait_ms: int
) -> None:
    opened.held = True
    own = written(opened, "A")["A"]
    said = opened.commit("A", own=own, wait_ms=wait_ms)
    if wait_ms:
        assert said == opened.wait(wait_ms - 1) == ""
        said = opened.wait(1).removeprefix("[commit A] ")
    assert said == "ReceiptsNotCovered"
    assert opened.get("A") == "A OPEN"
    assert states(opened) == ("OPEN", None)
    assert opened.state.committing == {}
    opened.held = False
    assert opened.commit("A", own=own, wait_ms=wait_ms) == ""
    assert opened.turn() == "[commit A] A COMMITTED 1"


def test_at_the_deadline_what_is_covered_commits(opened: World) -> None:
    opened.held = True
    opened.commit("A", own=written(opened, "A")["A"])
    opened.held = False
    assert opened.wait(10_000) == ""
    assert opened.turn() == "[commit A] A COMMITTED 1"


@pytest.mark.parametrize(
    ("bend", "said"),
    [
        ({"count": 1, "loose": 1}, "says 4 records, the journal shows 3 (count differs)"),
        ({"count": -1}, "says 2 records, the journal shows 3 (count differs)"),
        ({"crc": 1}, "says 3 records, the journal shows 3 (checksum differs)"),
        ({"count": 1, "crc": 1, "loose": 1}, "(count differs)"),
    ],
    ids=["one more", "one less", "checksum", "both"],
)
@pytest.mark.parametrize("held", [False, True])
def test_a_receipt_that_differs_from_the_journal_is_refused_once_it_is_covered(
    opened: World, bend: dict[str, Any], said: str, held: bool
) -> None:
    opened.held = held
    opened.write("A", "w1", count=3, partition=1)
    opened.write("A", "other", partition=1)
    answer = opened.commit("A", own=[opened.receipt("A", "w1", **bend)])
    if held:
        assert answer == ""
        opened.held = False
        answer = opened.turn().removeprefix("[commit A] ")
    assert answer == "ReceiptMismatch"
    assert said in opened.message
    assert f"writer {opened.writer('w1'):016x}, nyc/a journal partition 1" in opened.message
    assert opened.get("A") == "A OPEN"
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
    assert opened.turn() == "[commit A] A COMMITTED 3, 1 left out"


def test_bounds_of_a_receipt_may_be_loose(opened: World) -> None:
    opened.write("A", "other", count=5)
    opened.write("A", "w1", count=2)
    opened.write("A", "other", count=5)
    opened.commit("A", own=[opened.receipt("A", "w1", loose=5)])
    assert opened.turn() == "[commit A] A COMMITTED 2, 10 left out"
    assert opened.plan() == "A nyc/a 0: w1[5-7)"


def test_after_the_decision_nothing_is_added_and_rejected_records_are_counted(
    opened: World,
) -> None:
    opened.write("A", "w1")
    opened.write("A", "w2", count=4, epoch=7)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.write("A", "w1", count=2)
    opened.write("A", "w2", count=3)
    assert opened.turn() == "[commit A] A COMMITTED 1, 9 rejected"
    assert opened.plan() == "A nyc/a 0: w1[0-1)"


@pytest.mark.parametrize("how", ["not covered", "mismatch"])
def test_a_refusal_after_a_long_wait_leaves_the_whole_keepalive(how: str) -> None:
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


# -- after a takeover --------------------------------------------------------------------------


@pytest.mark.parametrize("keep_table", [True, False])
def test_a_successor_merges_what_was_decided_once_it_has_read_the_journals(
    opened: World, keep_table: bool
) -> None:
    """Its own table may be empty: the index is built anew after the decision."""
    opened.write("A", "w1", count=2)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    opened.held = not keep_table
    opened.lead(keep_table=keep_table)
    if not keep_table:
        assert opened.turn() == "", "not yet"
        assert states(opened) == ("COMMIT_IN_PROGRESS", True)
        opened.held = False
    assert opened.turn() == "[commit A] A COMMITTED 2"
    assert opened.plan() == "A nyc/a 0: w1[0-2)"


def test_a_successor_waits_for_an_undecided_commit(opened: World) -> None:
    opened.held = True
    opened.commit("A", own=written(opened, "A")["A"])
    opened.lead(keep_table=False)
    assert opened.wait(9_999) == ""
    opened.held = False
    opened.turn()
    assert opened.turn() == "[commit A] A COMMITTED 1"


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


@pytest.mark.parametrize("takeover", [False, True])
def test_the_order_of_merges_does_not_depend_on_a_takeover(takeover: bool) -> None:
    world = nyc()
    own = written(world, "A", "B")
    world.turn(*((x, world.committing(x, own=own[x])) for x in ("B", "A")))
    if takeover:
        world.lead(keep_table=False)
    assert world.turn() == "[A] A COMMITTED 1; [B] B COMMITTED 1"
    assert world.plan() == "A nyc/a 0: wA[0-1); B nyc/a 0: wB[1-2)"


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_bytes", [401, 1_000, 1_100])
@pytest.mark.parametrize("busy", [False, True])
def test_a_big_merge_keeps_the_next_out_of_its_round(
    round_bytes: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While commands come, `BUSY_ROUND` is the limit, too."""
    most = limits.BUSY_ROUND._replace(value=round_bytes if busy else 1)
    monkeypatch.setattr(limits, "BUSY_ROUND", most)
    world = nyc(round_bytes=10_000 if busy else round_bytes)
    world.busy = busy
    sizes = {"A": 400, "B": 700, "C": 10, "D": 10}
    own = {label: written(world, label, size=size)[label] for label, size in sizes.items()}
    world.turn(*((label, world.committing(label, own=own[label])) for label in "ABCD"))
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


def test_timestamps_rise_in_the_order_of_the_merges_whatever_the_clock_does(world: World) -> None:
    own = written(world, *"ABCD")
    world.turn(*((label, world.committing(label, own=own[label])) for label in "BAC"))
    world.turn()
    timestamps = [c.timestamp for c in world.round.commits]
    assert timestamps == sorted(set(timestamps))
    assert len(timestamps) == 3
    world.wall_us -= 5_000_000
    world.commit("D", own=own["D"])
    world.turn()
    assert world.result.commit_timestamp == timestamps[-1] + 1 == world.state.round.hybrid_time
