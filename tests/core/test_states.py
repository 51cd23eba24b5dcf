"""The transition table: every op on every state, spelt out again; and what must never be."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import get_args

import pytest

from anabranch.core.states import FINISHED, OPS, STATES, TRANSITIONS, Op, Verdict, judge
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    OutcomeUnknown,
    TransactionAborted,
)
from anabranch.schemas.records import TxnState

ROOT = Path(__file__).parents[2]

# One letter for each cell: the state it leads to · "=" already applied · "-" illegal.
LETTERS: dict[str, TxnState] = {
    "O": "OPEN",
    "C": "COMMIT_IN_PROGRESS",
    "F": "FINALIZE_IN_PROGRESS",
    "D": "COMMITTED",
    "A": "ABORT_IN_PROGRESS",
    "X": "ABORTED",
}
#                   O C F D A X
EXPECTED: dict[Op, str] = {
    "begin": "          = = = = - -",
    "touch": "          O - - - - -",
    "register": "       O - - - - -",
    "heartbeat": "      O = = = - -",
    "begin_commit": "   C = = = - -",
    "begin_finalize": " - F = = - -",
    "finalize_commit": "- - D = - -",
    "begin_abort": "    A A - - = =",
    "finalize_abort": " - - - - X =",
    "expire": "         A - - - = =",
    "settle": "         - - A - = =",
}
CELLS = [
    pytest.param(state, op, letter, id=f"{op} on {state}")
    for op, row in EXPECTED.items()
    for state, letter in zip(STATES, row.split(), strict=True)
]
REFUSALS: dict[TxnState, type[AnabranchError]] = {
    "OPEN": IllegalState,
    "COMMIT_IN_PROGRESS": OutcomeUnknown,
    "FINALIZE_IN_PROGRESS": OutcomeUnknown,
    "COMMITTED": AlreadyCommitted,
    "ABORT_IN_PROGRESS": TransactionAborted,
    "ABORTED": TransactionAborted,
}


def reachable(start: TxnState, ops: tuple[Op, ...] = OPS) -> set[TxnState]:
    """All states that some sequence of these ops leads to."""
    found: set[TxnState] = set()
    todo: list[TxnState] = [start]
    while todo:
        state = todo.pop()
        for op in ops:
            verdict = TRANSITIONS[state, op]
            if not isinstance(verdict, Verdict) and verdict not in found:
                found.add(verdict)
                todo.append(verdict)
    return found


@pytest.mark.parametrize(("state", "op", "letter"), CELLS)
def test_cell(state: TxnState, op: Op, letter: str) -> None:
    if letter == "=":
        assert judge(state, op) is None
    elif letter != "-":
        assert judge(state, op) == LETTERS[letter]
    else:
        with pytest.raises(AnabranchError) as refused:
            judge(state, op, "the reason")
        expected = REFUSALS[state]
        if (state, op) == ("COMMIT_IN_PROGRESS", "settle"):
            expected = IllegalState  # it comes too early, not too late
        assert type(refused.value) is expected
        assert "the reason" in str(refused.value)


def test_the_table_is_complete() -> None:
    assert set(STATES) == set(get_args(TxnState)) == set(LETTERS.values())
    assert set(OPS) == set(get_args(Op)) == set(EXPECTED)
    assert set(TRANSITIONS) == {(state, op) for state in STATES for op in OPS}


def test_an_impossible_op_says_where_and_that_nothing_changed() -> None:
    with pytest.raises(
        IllegalState, match="begin_finalize is impossible in state OPEN; nothing was changed"
    ):
        judge("OPEN", "begin_finalize")


def test_an_op_that_comes_too_late_says_to_ask_for_the_outcome() -> None:
    with pytest.raises(OutcomeUnknown, match="being committed: nothing was changed; ask"):
        judge("COMMIT_IN_PROGRESS", "touch")


def test_nothing_leads_out_of_an_outcome() -> None:
    assert {"COMMITTED", "ABORTED"} == FINISHED
    assert [reachable(state) for state in sorted(FINISHED)] == [set(), set()]


def test_there_is_no_abort_past_the_final_timestamp_but_by_an_operator() -> None:
    ops = tuple(op for op in OPS if op != "settle")
    assert reachable("FINALIZE_IN_PROGRESS", ops) == {"COMMITTED"}
    assert reachable("FINALIZE_IN_PROGRESS") == {"COMMITTED", "ABORT_IN_PROGRESS", "ABORTED"}


def test_there_is_no_commit_past_an_abort() -> None:
    assert reachable("ABORT_IN_PROGRESS") == {"ABORTED"}


def test_every_transaction_can_end_both_ways() -> None:
    assert reachable("OPEN") == set(STATES)
    assert reachable("OPEN", ("begin_commit", "begin_finalize", "finalize_commit")) == {
        "COMMIT_IN_PROGRESS",
        "FINALIZE_IN_PROGRESS",
        "COMMITTED",
    }


def test_silence_ends_only_an_open_transaction() -> None:
    assert [s for s in STATES if not isinstance(TRANSITIONS[s, "expire"], Verdict)] == ["OPEN"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("state", STATES)
def test_an_op_that_moved_can_be_repeated(state: TxnState, op: Op) -> None:
    """Kudu's rule: a transition asked for twice is already applied, never an error."""
    verdict = TRANSITIONS[state, op]
    if not isinstance(verdict, Verdict):
        assert verdict == state or TRANSITIONS[verdict, op] is Verdict.ALREADY


def test_the_page_of_states_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw-states"))
    written = (ROOT / "docs" / "states.md").read_text("utf-8")
    assert written == script["page"](), "docs/states.md is stale: run scripts/draw-states"
    for state in STATES:
        assert state in written
