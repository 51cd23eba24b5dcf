"""Every legal transition of a transaction, as one table (Kudu's transaction status manager, YDB).

An op on a state is *applied* (the transaction moves), *already applied* (nothing changes, the caller is
answered as if it had moved it; Kudu's TXN_OP_ALREADY_APPLIED) or *illegal* (a named error, nothing
changes; TXN_ILLEGAL_STATE). The table is complete: each op has a verdict on each state.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, get_args

from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    OutcomeUnknown,
    TransactionAborted,
)
from anabranch.schemas.records import TxnState

STATES: tuple[TxnState, ...] = get_args(TxnState)

Op = Literal[
    "begin",  # a client begins it (again)
    "touch",  # a stream is registered
    "register",  # a writer's receipt
    "heartbeat",
    "begin_commit",  # its writers are final
    "begin_finalize",  # its commit timestamp is final
    "finalize_commit",  # merged
    "begin_abort",
    "finalize_abort",
    "expire",  # nothing was heard of it
    "settle",  # an operator ends a merge that can't go on
]
OPS: tuple[Op, ...] = get_args(Op)


class Verdict(Enum):
    """What an op does to a state, besides moving it."""

    ALREADY = "already applied"
    ILLEGAL = "illegal"


_ = Verdict.ILLEGAL
_same = Verdict.ALREADY

# fmt: off
_TABLE: dict[Op, tuple[TxnState | Verdict, ...]] = {
    # OPEN, COMMIT_IN_PROGRESS, FINALIZE_IN_PROGRESS, COMMITTED, ABORT_IN_PROGRESS, ABORTED
    "begin":            (_same, _same, _same, _same, _, _),
    "touch":            ("OPEN", _, _, _, _, _),
    "register":         ("OPEN", _, _, _, _, _),
    "heartbeat":        ("OPEN", _same, _same, _same, _, _),
    "begin_commit":     ("COMMIT_IN_PROGRESS", _same, _same, _same, _, _),
    "begin_finalize":   (_, "FINALIZE_IN_PROGRESS", _same, _same, _, _),
    "finalize_commit":  (_, _, "COMMITTED", _same, _, _),
    "begin_abort":      ("ABORT_IN_PROGRESS", "ABORT_IN_PROGRESS", _, _, _same, _same),
    "finalize_abort":   (_, _, _, _, "ABORTED", _same),
    "expire":           ("ABORT_IN_PROGRESS", _, _, _, _same, _same),
    "settle":           (_, _, "ABORT_IN_PROGRESS", _, _same, _same),
}
# fmt: on

TRANSITIONS: dict[tuple[TxnState, Op], TxnState | Verdict] = {
    (state, op): verdict
    for op, row in _TABLE.items()
    for state, verdict in zip(STATES, row, strict=True)
}

FINISHED: frozenset[TxnState] = frozenset(("COMMITTED", "ABORTED"))


def judge(state: TxnState, op: Op, what: str = "") -> TxnState | None:
    """The state after the op; None: already applied.

    Raises the error of `illegal` for an illegal op.
    """
    verdict = TRANSITIONS[state, op]
    if verdict is Verdict.ALREADY:
        return None
    if isinstance(verdict, Verdict):
        raise illegal(state, op, what)
    return verdict


def illegal(state: TxnState, op: Op, what: str) -> AnabranchError:
    """The error for an op that is illegal in this state: what the caller does next depends on it."""
    said = f" ({what})" if what else ""
    if state in ("ABORT_IN_PROGRESS", "ABORTED"):
        return TransactionAborted(f"the transaction is aborted{said}: begin a new one")
    if state == "COMMITTED":
        return AlreadyCommitted(f"the transaction is committed{said}: its outcome stands")
    if state in ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS") and op != "settle":
        return OutcomeUnknown(
            f"{op} comes too late, the transaction is being committed{said}: nothing was changed; ask for its "
            "outcome"
        )
    return IllegalState(f"{op} is impossible in state {state}{said}; nothing was changed")
