"""Prepared transactions, played turn by turn: who may end them, and what can't (`docs/prepared.md`)."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from anabranch.core.decisions import streams
from anabranch.core.decisions.cleanup import runs_to_move
from anabranch.core.rows import stream_key
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from tests.core.cleaning import PLACE, crowd, rebuild, relocate
from tests.core.cleaning import opened as crowded
from tests.core.harness import DAY, START_MS, World, event, nyc, states
from tests.core.labels import SECRET

LEDGER, OTHER = b"l" * 32, b"o" * 32
BY = sha256(LEDGER).digest()


@pytest.fixture
def world() -> World:
    world = nyc("nyc/a", "nyc/b")
    for label in "AB":
        world.begin(label)
        world.touch(label)
    world.write("A", "w1", count=3)
    return world


def prepare(
    world: World, label: str = "A", by: bytes = b"", attempt: bytes = b"1", **given: Any
) -> str:
    own = [world.receipt(label, "w1", sequence=1)] if label == "A" else []
    command = world.committing(label, own=own, **given)
    return world.ask("prepare", replace(command, prepare=r.Prepare(by, attempt)))


def commit(world: World, label: str = "A", secret: bytes | None = None, by_id: bool = False) -> str:
    token = world.id(label) if by_id else world.token(label)
    said = world.ask("commit", r.Commit(token, (), None, None, 10_000, secret=secret))
    return said or world.turn().removeprefix("[commit] ")


def abort(world: World, label: str = "A", secret: bytes | None = None) -> str:
    return world.ask("abort", r.Abort(world.token(label), "", secret))


def force(world: World, outcome: bool | None, label: str = "A") -> str:
    said = world.ask("force", r.Force(world.id(label), "", outcome))
    return said or world.turn().removeprefix("[force] ")


def give_up(world: World, stream: str) -> None:
    turn = world.new_turn()
    assert streams.give_up_stream(turn, stream, "gone") == []
    world.close(turn)


# -- its life -------------------------------------------------------------------------------------


def test_it_waits_through_silence_and_leaders_and_commits(world: World) -> None:
    assert prepare(world) == "A PREPARED 3"
    assert (states(world), list(world.state.committing)) == (("PREPARED", True), [])
    assert world.next_due_ms() is None, "no round looks at it"
    for keep_table in (True, False):
        world.lead(keep_table=keep_table)
        world.wait(30 * DAY)
        assert world.get("A") == "A PREPARED 3"
    assert commit(world) == "A COMMITTED 3"
    assert world.plan() == "A nyc/a 0: w1[0-3)"
    assert commit(world) == "A COMMITTED 3", "the same answer again"


def test_it_is_merged_in_a_round_after_the_one_that_says_so(world: World) -> None:
    prepare(world)
    assert world.ask("commit", world.committing("A")) == ""
    assert (world.plan(), states(world)) == ("", ("FINALIZE_IN_PROGRESS", True))
    world.lead()
    assert world.turn() == "[commit] A COMMITTED 3"


def test_its_commit_is_decided_when_it_is_logged(world: World) -> None:
    world.ask("level", r.SetFeatureLevel(4), lane=ADMIN_LANE)
    prepare(world)
    world.at_decision = True
    said = world.ask("commit", world.committing("A"))
    assert said.startswith("A FINALIZE_IN_PROGRESS")
    assert world.turn() == "", "it is answered once"
    assert world.get("A") == "A COMMITTED 3"


@pytest.mark.parametrize("lead", [False, True])
def test_a_client_aborts_what_is_prepared(world: World, lead: bool) -> None:
    prepare(world)
    if lead:
        world.lead(keep_table=False)
    assert abort(world) == "A ABORTED (aborted by a client)"
    assert commit(world) == "TransactionAborted"


def test_after_it_nothing_is_added(world: World) -> None:
    receipt = world.receipt("A", "w1")
    prepare(world)
    assert world.touch("A", "nyc/b") == "IllegalState"
    assert world.register("A", replace(receipt, sequence=9)) == "IllegalState"
    world.write("A", "w1", count=2)
    world.turn()
    late = replace(world.committing("A"), own=(world.receipt("A", "w1"),))
    assert world.ask("commit", late) == "IllegalState"
    assert commit(world) == "A COMMITTED 3, 2 rejected"


def test_repeated_it_is_the_same_and_another_attempt_is_not(world: World) -> None:
    assert [prepare(world), prepare(world)] == ["A PREPARED 3"] * 2
    assert prepare(world, attempt=b"2") == "IllegalState"
    assert prepare(world, by=BY) == "IllegalState"
    assert prepare(world, name="other") == "InvalidArgument"
    assert commit(world) == "A COMMITTED 3"
    assert prepare(world) == "A COMMITTED 3"
    assert prepare(world, attempt=b"2") == "IllegalState"


def test_repeated_with_a_later_receipt_of_the_same_events_it_is_the_same(world: World) -> None:
    receipt = world.receipt("A", "w1")
    prepare(world)
    later = replace(receipt, sequence=receipt.sequence + 1)
    again = replace(world.committing("A", own=[later]), prepare=r.Prepare(b"", b"1"))
    assert world.ask("prepare", again) == "A PREPARED 3", world.message
    assert world.ask("commit", world.committing("A", own=[later])) == ""
    assert world.turn() == "[commit] A COMMITTED 3"


# -- what a commit checks, it checks --------------------------------------------------------------


def test_it_waits_for_its_journals_until_its_deadline(world: World) -> None:
    world.held = True
    assert prepare(world) == ""
    assert world.wait(10_000) == "[prepare] ReceiptsNotCovered"
    world.held = False
    assert prepare(world) == "A PREPARED 3"


def test_a_prepared_one_that_ends_makes_room_for_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PREPARED", limits.Limit(1, "transactions", ""))
    prepare(world)
    assert prepare(world, "B") == "TooManyTransactions"
    abort(world)
    assert prepare(world, "B") == "B PREPARED 0"


# -- its claims -----------------------------------------------------------------------------------


def test_its_name_is_given_to_nothing_else(world: World) -> None:
    assert prepare(world, name="daily") == "A PREPARED 3"
    assert world.begin("C", name="daily") == "A PREPARED 3", "that one is given back"
    assert world.one_shot("D", name="daily") == "ReservedByPrepared"
    assert world.id("A").hex() in world.message
    assert world.commit("B", name="daily", wait_ms=60_000) == "ReservedByPrepared", "at once"
    with world.by("lane"):
        world.grant("lane", "nyc/*", 511)
        assert world.begin("E", name="daily") == "NameTaken"
    assert (world.holder("daily"), world.get("A")) == ("A", "A PREPARED 3")
    assert commit(world) == "A COMMITTED 3"
    assert world.one_shot("F", name="daily") == "A COMMITTED 3"


def test_its_number_is_taken_and_given_back(world: World) -> None:
    assert prepare(world, name="s", number=7) == "A PREPARED 3"
    assert world.commit("B", name="s", number=8, wait_ms=60_000) == "ReservedByPrepared"
    assert world.ask("set", r.SetSeries("nyc", "s", 7, 9), lane="admin") == "ReservedByPrepared"
    abort(world)
    assert world.series("s") == "nowhere"
    world.commit("B", name="s", number=7)
    assert world.turn() == "[commit B] B COMMITTED 0"


@pytest.mark.parametrize("number", [None, 3])
def test_what_was_committed_before_is_its_answer(world: World, number: int | None) -> None:
    world.commit("B", name="daily", number=number)
    world.turn()
    assert prepare(world, name="daily", number=number) == "B COMMITTED 0"
    assert world.row("A").state == "ABORTED"


# -- who ends it ----------------------------------------------------------------------------------


def test_no_secret_but_its_ledgers_ends_it(world: World) -> None:
    assert prepare(world, by=BY) == "A PREPARED 3"
    for secret in (None, OTHER):
        assert commit(world, secret=secret) == "NotAuthorized"
        assert abort(world, secret=secret) == "NotAuthorized"
    assert world.ask("abort", r.Abort(world.id("A"), ""), lane="admin") == "NotAuthorized"
    assert commit(world, secret=b"short") == "InvalidArgument"
    assert world.get("A") == "A PREPARED 3"
    with world.by("stranger"):
        world.grant("stranger", "lax/*", 1)
        assert commit(world, secret=OTHER, by_id=True) == "UnknownTransaction"
        assert commit(world, secret=LEDGER, by_id=True) == "A COMMITTED 3"
        assert commit(world, secret=LEDGER, by_id=True) == "A COMMITTED 3"


def test_an_operator_aborts_it_by_force_alone(world: World) -> None:
    """A token does, and in the lane of its owner, to which `prepare` may give another's, the id."""
    prepare(world)
    with world.by("admin"):
        for secret in (None, LEDGER):
            assert world.ask("abort", r.Abort(world.id("A"), "", secret)) == "IllegalState"
        assert abort(world) == "A ABORTED (aborted by a client)"
        world.begin("C")
        prepare(world, "C")
        asked = r.Abort(world.id("C"), "")
        assert world.ask("abort", asked) == "C ABORTED (aborted by a client)"


def test_it_is_listed_to_who_shows_the_secret(world: World) -> None:
    prepare(world, by=BY)
    prepare(world, "B")
    asked = r.ListTransactions("nyc", False, 10, None, prepared=True)
    assert world.ask("list", asked) == "A PREPARED 3, B PREPARED 0"
    with world.by("stranger"):
        world.grant("stranger", "lax/*", 1)
        assert world.ask("list", asked) == "NotAuthorized"
        assert world.ask("list", replace(asked, secret=LEDGER)) == "A PREPARED 3"
        assert world.ask("list", replace(asked, secret=OTHER)) == "none"
    found = world.state.open[world.id("A")]
    assert world.state.prepared_row(found.row.txn_id) == r.PreparedRow(
        r.Prepare(BY, b"1"), world.wall_ms
    )


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [(True, "A COMMITTED 3"), (False, "A ABORTED (aborted by an operator's force)")],
)
def test_an_operator_forces_its_end(world: World, outcome: bool, ends: str) -> None:
    prepare(world, by=BY)
    assert force(world, None) == "IllegalState"
    assert force(world, outcome, "B") == "IllegalState", "that one is open"
    assert force(world, outcome) == ends
    assert [row.command for row in world.rounds[-1].audit + world.rounds[-2].audit] == ["Force"]
    assert force(world, outcome) == ends


@pytest.mark.parametrize("gone", [False, True], ids=["whole", "a stream is LOST"])
def test_a_copy_of_that_word_waits_with_it_and_no_other_word_follows(
    world: World, gone: bool
) -> None:
    world.touch("A", "nyc/b")
    prepare(world, by=BY)
    if gone:
        give_up(world, "nyc/b")
    word = r.Force(world.id("A"), "", True)
    said = world.turn(("force", word), ("force", word), ("other", replace(word, outcome=False)))
    assert said == "[other] IllegalState"
    assert world.turn() == "[force] A COMMITTED 3"


def test_one_whose_events_are_gone_is_only_aborted(world: World) -> None:
    prepare(world)
    world.ask("commit", world.committing("A"))
    world.memory.merging.wait(world.id("A"), "torn", world.now_ms, 1)
    why = "its merge made no progress: a journal lost records of it"
    assert [force(world, True), force(world, False)] == [
        "IllegalState",
        f"[commit] TransactionAborted; A ABORTED (forced by an operator: {why})",
    ]


def test_one_that_waits_for_a_stream_is_aborted_if_an_operator_says_so(world: World) -> None:
    """Its coordinator may have told others that it commits: so nothing less than that word does it."""
    prepare(world)
    world.ask("commit", world.committing("A"))
    world.memory.waiting = {"nyc/a": "a partition has no leader"}
    why = "its merge made no progress: nyc/a: a partition has no leader"
    assert [force(world, None), force(world, True), force(world, False, "A")] == [
        "IllegalState",
        "",
        f"[commit] TransactionAborted; TransactionAborted; A ABORTED (forced by an operator: {why})",
    ]


def test_a_deletion_that_it_refuses_names_the_commands_that_end_it(world: World) -> None:
    prepare(world)
    assert world.ask("delete", r.DeleteStream("nyc/a"), lane="admin") == "IllegalState"
    for command in (
        f"`anabranch txn force {world.id('A').hex()} --outcome commit|abort`",
        f"`anabranch txn abort {world.id('B').hex()}`",
    ):
        assert command in world.message


# -- once its coordinator said commit ---------------------------------------------------------------


def test_there_is_no_abort_after_its_coordinators_word(world: World) -> None:
    prepare(world, by=BY)
    world.ask("commit", r.Commit(world.token("A"), (), None, None, 0, secret=LEDGER))
    force_now, give_up = r.Force(world.id("A"), "", None), r.Abort(world.token("A"), "", LEDGER)
    assert world.turn(("abort", give_up), ("force", force_now)) == (
        "[abort] OutcomeUnknown; [force] IllegalState; [commit] A COMMITTED 3"
    )


@pytest.mark.parametrize("told", [False, True], ids=["prepared", "told to commit"])
def test_a_lost_stream_is_left_out_and_named(world: World, told: bool) -> None:
    world.touch("A", "nyc/b")
    world.write("A", "w1", count=2, stream="nyc/b")
    assert prepare(world) == "A PREPARED 5"
    if told:
        world.ask("commit", world.committing("A"))
    give_up(world, "nyc/b")
    assert states(world)[0] == ("FINALIZE_IN_PROGRESS" if told else "PREPARED")
    said = world.turn() if told else commit(world)
    assert said.removeprefix("[commit] ").startswith("A COMMITTED 3")
    assert world.row("A").reason == "2 events left out, as their stream is LOST: nyc/b"
    assert world.row("A").left_out == 2
    assert world.plan() == "A nyc/a 0: w1[0-3)"


def test_what_keeps_a_journal_long_is_moved_and_committed_after_it() -> None:
    world = crowded("A", move_bytes=25_000)
    world.write("A", "w1", count=2)
    assert prepare(world) == "A PREPARED 2"
    for _ in range(3):
        crowd(world)
    assert runs_to_move(world.new_turn(), PLACE) != []
    assert relocate(world) == 1
    rebuild(world)
    assert commit(world) == "A COMMITTED 2"


# -- in one command ---------------------------------------------------------------------------------


def shot(
    world: World, label: str = "S", *events: r.Event, name: str | None = None, attempt: bytes = b"1",
    by: bytes = BY,
) -> str:  # fmt: skip
    given = events or (event(), event("nyc/b", b"x", b"2"))
    prepare = r.Prepare(by, attempt)
    command = r.PrepareEvents(world.id(label), "nyc", name, given, SECRET, prepare)
    return world.ask("shot", command)


def test_its_events_wait_in_a_row_and_go_where_their_keys_are_then(world: World) -> None:
    assert shot(world) == "S PREPARED 2"
    assert (world.plan(), list(world.state.prepared)) == ("", [world.id("S")])
    world.lead(keep_table=False)
    assert list(world.state.prepared) == [world.id("S")]
    world.wait(30 * DAY)
    assert [shot(world), shot(world, attempt=b"2")] == ["S PREPARED 2", "IllegalState"]
    said = world.ask("commit", r.Commit(world.id("S"), (), None, None, 0, secret=LEDGER))
    assert said == "S COMMITTED 2", "in the round that says so"
    assert sorted(world.plan().split("; ")) == ["S nyc/a 0: v", "S nyc/b 0: 2"]
    assert world.state.prepared_row(world.id("S")) == r.PreparedRow(r.Prepare(BY, b"1"), START_MS)
    assert commit(world, "S", LEDGER, by_id=True) == "S COMMITTED 2"
    assert shot(world) == "S COMMITTED 2"


@pytest.mark.parametrize("lead", [False, True])
def test_it_is_aborted_by_its_coordinator_alone(world: World, lead: bool) -> None:
    shot(world)
    if lead:
        world.lead(keep_table=False)
    assert abort(world, "S") == "NotAuthorized"
    assert abort(world, "S", LEDGER) == "S ABORTED (aborted by a client)"
    row = world.state.prepared_row(world.id("S"))
    assert row is not None
    assert row.events == ()
    assert commit(world, "S", LEDGER) == "TransactionAborted"
    assert shot(world) == "TransactionAborted"


def test_in_one_command_its_name_is_held_too(world: World) -> None:
    assert shot(world, name="daily") == "S PREPARED 2"
    assert shot(world, "T", name="daily") == "ReservedByPrepared"
    assert world.commit("A", name="daily", wait_ms=60_000) == "ReservedByPrepared"
    assert commit(world, "S", LEDGER) == "S COMMITTED 2"
    assert [shot(world, "U", name="daily"), shot(world, "U", name="daily")] == ["S COMMITTED 2"] * 2
    assert world.row("U").state == "ABORTED"


def test_null_keys_go_to_the_segments_that_their_client_chose(world: World) -> None:
    numbers = [segment.segment_id for segment in world.state.streams["nyc/a"].segments]
    shot(world, "S", *(event(key=None, segment_id=n, value=b"%d" % n) for n in (*numbers, -1)))
    assert commit(world, "S", LEDGER) == "S COMMITTED 3"
    assert world.plan() == "S nyc/a 0: 0 -1, 1: 1"


def test_a_stream_that_waits_leaves_it_prepared_and_a_lost_one_is_left_out(world: World) -> None:
    shot(world)
    world.memory.waiting = {"nyc/b": "no leader"}
    assert commit(world, "S", LEDGER) == "NotReady"
    assert force(world, True, "S") == "NotReady"
    assert world.get("S") == "S PREPARED 2"
    world.memory.waiting = {}
    give_up(world, "nyc/b")
    row = world.state.streams["nyc/b"]
    world.log_rows([(stream_key("nyc/b"), replace(row, state="RECOVERING"))])
    assert commit(world, "S", LEDGER) == "NotReady"
    world.log_rows([(stream_key("nyc/b"), row)])
    assert commit(world, "S", LEDGER).startswith("S COMMITTED 1, 1 left out (1 event left out")
    assert world.plan() == "S nyc/a 0: v"
