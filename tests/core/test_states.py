"""The transition tables: every op on every state, spelt out again; and what must never be."""

from __future__ import annotations

import runpy
from collections.abc import Container
from pathlib import Path
from typing import Any, get_args

import pytest

from anabranch.core.stream_states import STREAMS, StreamOp
from anabranch.core.transaction_states import (
    BIRTHS,
    FINISHED,
    HANDLES,
    IN_DOUBT,
    TRANSACTIONS,
    USABLE,
    Birth,
    HandleOp,
    HandleState,
    Machine,
    Op,
    OpT,
    StateT,
    Verdict,
)
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    NotReady,
    OutcomeUnknown,
    StreamLost,
    TransactionAborted,
    UnknownStream,
)
from anabranch.protocol.schemas.records import StreamState, TxnState

ROOT = Path(__file__).parents[2]

# One letter for each cell: the state it leads to · "=" already applied · "-" illegal.
LETTERS: dict[str, TxnState] = {
    "O": "OPEN",
    "C": "COMMIT_IN_PROGRESS",
    "F": "FINALIZE_IN_PROGRESS",
    "D": "COMMITTED",
    "A": "ABORT_IN_PROGRESS",
    "X": "ABORTED",
    "P": "PREPARED",
}
#                   O C F D A X P
EXPECTED: dict[Op, str] = {
    "begin": "          = = = = - - =",
    "touch": "          O - - - - - -",
    "register": "       O - - - - - -",
    "heartbeat": "      O = = = - - =",
    "prepare": "        P - - - - - =",
    "reopen": "         = - - - - - O",
    "begin_commit": "   C = = = - - F",
    "begin_finalize": " - F = = - - -",
    "finalize_commit": "- - D = - - -",
    "begin_abort": "    A A - - = = A",
    "finalize_abort": " - - - - X = -",
    "expire": "         A - - - = = -",
    "lose_stream": "    A A = = = = =",
    "force": "         - - A - = = -",
}
REFUSALS: dict[TxnState, type[AnabranchError]] = {
    "OPEN": IllegalState,
    "COMMIT_IN_PROGRESS": OutcomeUnknown,
    "FINALIZE_IN_PROGRESS": OutcomeUnknown,
    "COMMITTED": AlreadyCommitted,
    "ABORT_IN_PROGRESS": TransactionAborted,
    "ABORTED": TransactionAborted,
    "PREPARED": IllegalState,
}
STREAM_LETTERS: dict[str, StreamState] = {
    "C": "CREATING",
    "A": "ACTIVE",
    "L": "LOST",
    "R": "RECOVERING",
    "F": "FORGETTING",
    "X": "FORGOTTEN",
}
#                    C A L R F X
STREAM_EXPECTED: dict[StreamOp, str] = {
    "use": "             n A l l l u",
    "begin_create": "    C = l l n C",
    "finalize_create": " A = - - - -",
    "refuse_create": "   X - - - - =",
    "give_up": "         - L = = = =",
    "begin_recover": "   n = R n n u",
    "finalize_recover": "- = - A - -",
    "refuse_recover": "  - - = L - -",
    "begin_forget": "    n - F n = =",
    "finalize_forget": " - - - - X =",
    "refuse_forget": "   - - = - L -",
}
STREAM_REFUSALS: dict[str, type[AnabranchError]] = {
    "-": IllegalState,
    "l": StreamLost,
    "n": NotReady,
    "u": UnknownStream,
}


HANDLE_LETTERS: dict[str, HandleState] = {
    "B": "buffered",
    "O": "open",
    "S": "sent",
    "D": "doubted",
    "C": "decided",
    "P": "prepared",
    "A": "aborting",
    "X": "over",
}
#                   B O S D C P A X
HANDLE_EXPECTED: dict[HandleOp, str] = {
    "write": "      = = - - - - - -",
    "begin": "      O = = = - - - -",
    "send": "       S S D = = = - -",
    "refuse": "     - - O = = = - =",
    "refuse_shot": "- - B = = = - =",
    "doubt": "      - - D = = = - =",
    "under_way": "  - D D = = = D =",
    "late": "       - C C C = C C =",
    "prepare": "    - P P P P = - =",
    "commit": "     - X X X X X X =",
    "fail": "       X X X X X X X =",
    "abort": "      A A = = = = = A",
}
HANDLE_REFUSALS: dict[HandleState, type[AnabranchError]] = {
    "buffered": IllegalState,
    "open": IllegalState,
    "sent": IllegalState,
    "doubted": IllegalState,
    "decided": AlreadyCommitted,
    "prepared": IllegalState,
    "aborting": OutcomeUnknown,
    "over": IllegalState,
}


def cells(machine: Machine[StateT, OpT], expected: dict[OpT, str]) -> dict[str, str]:
    """The cells of a table, as its texts say: "op on state" -> letter."""
    assert set(machine.ops) == set(expected)
    return {
        f"{op} on {state}": letter
        for op, row in expected.items()
        for state, letter in zip(machine.states, row.split(), strict=True)
    }


def judged(machine: Machine[StateT, OpT], what: str = "") -> dict[str, object]:
    """The same cells, as the machine judges them: the next state, None, or the class of an error that says so."""
    found: dict[str, object] = {}
    for state, op in machine.transitions:
        try:
            found[f"{op} on {state}"] = machine.judge(state, op, what)
        except AnabranchError as error:
            found[f"{op} on {state}"] = type(error) if what in str(error) else error
    return found


def reachable(
    machine: Machine[StateT, OpT], start: StateT, but: Container[str] = ()
) -> set[StateT]:
    """All states that some sequence of ops leads to, without some ops."""
    found: set[StateT] = set()
    todo = [start]
    while todo:
        state = todo.pop()
        for op in machine.ops:
            verdict = machine.transitions[state, op]
            if op not in but and not isinstance(verdict, Verdict) and verdict not in found:
                found.add(verdict)
                todo.append(verdict)
    return found


def test_each_cell_of_a_transaction_is_judged_so() -> None:
    wanted = cells(TRANSACTIONS, EXPECTED)
    moves = {f"{op} on {s}": TRANSACTIONS.moves(s, op) for s, op in TRANSACTIONS.transitions}
    assert moves == {cell: letter not in "=-" for cell, letter in wanted.items()}
    known: dict[str, object] = {"=": None, **LETTERS}
    found = {
        cell: REFUSALS[_state(cell)] if letter == "-" else known[letter]
        for cell, letter in wanted.items()
    }
    found["force on COMMIT_IN_PROGRESS"] = IllegalState  # it comes too early, not too late
    assert judged(TRANSACTIONS, "the reason") == found


def _state(cell: str) -> Any:
    return cell.rpartition(" ")[2]


def test_each_cell_of_a_stream_is_judged_so() -> None:
    known: dict[str, object] = {"=": None, **STREAM_LETTERS, **STREAM_REFUSALS}
    wanted = cells(STREAMS, STREAM_EXPECTED)
    assert judged(STREAMS, "nyc/a") == {cell: known[letter] for cell, letter in wanted.items()}


def test_each_cell_of_a_handle_is_judged_so() -> None:
    known: dict[str, object] = {"=": None, **HANDLE_LETTERS}
    assert judged(HANDLES) == {
        cell: HANDLE_REFUSALS[_state(cell)] if letter == "-" else known[letter]
        for cell, letter in cells(HANDLES, HANDLE_EXPECTED).items()
    }


def test_the_tables_are_complete() -> None:
    assert set(HANDLES.states) == set(get_args(HandleState)) == set(HANDLE_LETTERS.values())
    assert set(HANDLES.ops) == set(get_args(HandleOp))
    assert set(TRANSACTIONS.states) == set(get_args(TxnState)) == set(LETTERS.values())
    assert set(STREAMS.states) == set(get_args(StreamState)) == set(STREAM_LETTERS.values())
    assert set(TRANSACTIONS.ops) == set(get_args(Op))
    assert set(STREAMS.ops) == set(get_args(StreamOp))
    assert set(BIRTHS) == set(get_args(Birth))


def test_an_impossible_op_says_where_and_that_nothing_changed() -> None:
    with pytest.raises(
        IllegalState, match="begin_finalize is impossible in state OPEN; nothing was changed"
    ):
        TRANSACTIONS.judge("OPEN", "begin_finalize")


def test_an_op_that_comes_too_late_says_to_ask_for_the_outcome() -> None:
    with pytest.raises(OutcomeUnknown, match="being committed: nothing was changed; ask"):
        TRANSACTIONS.judge("COMMIT_IN_PROGRESS", "touch")


# A machine, a state, ops that are left out, and all states that the others lead to.
NO_ABORT = ("begin_abort", "expire", "force", "lose_stream")
REACHED: dict[str, tuple[Any, str, tuple[str, ...], set[str]]] = {
    "nothing leads out of a commit": (TRANSACTIONS, "COMMITTED", (), set()),
    "nothing leads out of an abort": (TRANSACTIONS, "ABORTED", (), set()),
    "after the final timestamp only an operator aborts": (
        TRANSACTIONS, "FINALIZE_IN_PROGRESS", ("force",), {"COMMITTED"},
    ),
    "an operator does": (
        TRANSACTIONS, "FINALIZE_IN_PROGRESS", (), {"COMMITTED", "ABORT_IN_PROGRESS", "ABORTED"},
    ),
    "after an abort nothing commits": (TRANSACTIONS, "ABORT_IN_PROGRESS", (), {"ABORTED"}),
    "a transaction can end both ways": (TRANSACTIONS, "OPEN", (), set(TRANSACTIONS.states)),
    "or commit alone": (
        TRANSACTIONS, "OPEN", NO_ABORT,
        {"OPEN", "PREPARED", "COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "COMMITTED"},
    ),
    **{f"a stream is never stuck {state}": (STREAMS, state, (), set(STREAMS.states)) for state in STREAMS.states},
    "a stream is forgotten only if it is lost": (STREAMS, "ACTIVE", ("give_up",), {"ACTIVE"}),
    "a lost one is active again if its topics are the old ones": (
        STREAMS, "LOST", ("begin_create",),
        {"LOST", "RECOVERING", "FORGETTING", "FORGOTTEN", "ACTIVE"},
    ),
    "or if it is created anew": (STREAMS, "LOST", ("finalize_recover",), set(STREAMS.states)),
    "and in no other case": (
        STREAMS, "LOST", ("finalize_recover", "begin_create"),
        {"LOST", "RECOVERING", "FORGETTING", "FORGOTTEN"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", REACHED)
def test_which_states_can_be_reached(rule: str) -> None:
    machine, start, without, states = REACHED[rule]
    assert reachable(machine, start, without) == states


def test_ops_that_only_some_states_allow() -> None:
    assert {"COMMITTED", "ABORTED"} == FINISHED
    moves = {op for op in TRANSACTIONS.ops if TRANSACTIONS.moves("PREPARED", op)}
    assert moves == {"reopen", "begin_commit", "begin_abort"}, "a prepared one is its coordinator's"
    assert [s for s in TRANSACTIONS.states if TRANSACTIONS.moves(s, "expire")] == ["OPEN"]
    assert [s for s in STREAMS.states if STREAMS.moves(s, "begin_forget")] == ["LOST"]


def test_a_handle_in_doubt_is_never_open_again_but_by_its_only_copy() -> None:
    for state in IN_DOUBT:
        but = ("refuse", "refuse_shot") if state == "sent" else ()
        assert not reachable(HANDLES, state, but) & USABLE
    assert not reachable(HANDLES, "aborting") & USABLE


def test_an_op_that_moved_can_be_repeated() -> None:
    """Kudu's rule: a transition asked for twice is already applied, never an error."""
    for (state, op), verdict in TRANSACTIONS.transitions.items():
        if not isinstance(verdict, Verdict) and verdict != state:
            assert TRANSACTIONS.transitions[verdict, op] is Verdict.ALREADY, (state, op)


def test_an_op_that_moved_a_stream_can_be_repeated() -> None:
    """All but two: a stream's row keeps one asker."""
    others = {
        (state, op): STREAMS.transitions[verdict, op]
        for (state, op), verdict in STREAMS.transitions.items()
        if not isinstance(verdict, Verdict) and verdict != state
        if STREAMS.transitions[verdict, op] is not Verdict.ALREADY
    }
    assert others == {
        ("FORGOTTEN", "begin_create"): "CREATING",  # the last one is answered
        ("LOST", "begin_recover"): Verdict.ILLEGAL,  # another one is told to ask again
    }


def test_the_page_of_states_can_be_built() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "draw-states"))["page"]()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for machine in (TRANSACTIONS, STREAMS, HANDLES):
        assert ["| op", *machine.states[:-1], f"{machine.states[-1]} |"] in rows
        assert [row[0] for row in rows if row[0] == f"| {machine.ops[-1]}"]
