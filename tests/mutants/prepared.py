"""Planted bugs in prepared transactions: other words than their coordinator's end them; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

from anabranch.core.decisions import expiry, transactions
from anabranch.core.decisions.commits import prepared
from anabranch.core.decisions.turn import Turn
from anabranch.core.memory import Keepalives
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS, Op
from anabranch.schemas.records import TxnRow, TxnState

Planted = AbstractContextManager[object]


def _leads(op: Op, state: TxnState) -> Planted:
    return patch.dict(TRANSACTIONS.transitions, {("PREPARED", op): state})


@contextmanager
def goes_stale() -> Iterator[None]:
    """A prepared transaction is aborted when nothing is heard of it for its keepalive."""

    def stale(txn: OpenTxn, keepalives: Keepalives, now_ms: int) -> bool:
        silent_ms = now_ms - keepalives.last(txn.row.txn_id)
        waits = txn.row.state == "PREPARED" or (txn.row.state == "OPEN" and txn.pending is None)
        return silent_ms > txn.row.keepalive_ms and waits

    with patch.object(expiry, "_seems_stale", stale), _leads("expire", "ABORT_IN_PROGRESS"):
        yield


@contextmanager
def superseded() -> Iterator[None]:
    """A newer transaction takes the name of a prepared one, which is aborted."""
    usual = transactions.earlier_outcome

    def earlier(turn: Turn, scope: str, name: str | None, owner: str) -> TxnRow | None:
        holder = turn.state.holder(scope, name) if name is not None else None
        return None if holder in turn.state.prepared else usual(turn, scope, name, owner)

    with ExitStack() as stack:
        for module in ("transactions", "commits.commit", "commits.one_shot"):
            place = f"anabranch.core.decisions.{module}.earlier_outcome"
            stack.enter_context(patch(place, earlier))
        stack.enter_context(patch.object(prepared, "prepared_of_name", lambda *_: None))
        yield


def lost_with_a_stream() -> Planted:
    """A prepared transaction is aborted when a stream of it is given up."""
    return _leads("lose_stream", "ABORT_IN_PROGRESS")


def refused_and_aborted() -> Planted:
    """A merge that a broker refuses aborts what its coordinator has committed."""
    return _leads("begin_commit", "COMMIT_IN_PROGRESS")
