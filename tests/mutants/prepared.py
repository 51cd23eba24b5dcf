"""Planted bugs in prepared transactions and ledgers: other words than their own end them; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from anabranch.client.client import Client
from anabranch.core.decisions import prepared, transactions
from anabranch.core.decisions.turn import Turn
from anabranch.core.memory import Keepalives, is_gone
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS, Op
from anabranch.ledger import Ledger, Recovered, ledger
from anabranch.ledger.book import ABORT, COMMIT, Row
from anabranch.protocol.schemas.records import TxnRow, TxnState
from tests.mutants.planting import Planted, instead_of, wrapping


def _leads(op: Op, state: TxnState) -> Planted:
    return patch.dict(TRANSACTIONS.transitions, {("PREPARED", op): state})


@contextmanager
def goes_stale() -> Iterator[None]:
    """A prepared transaction is aborted when nothing is heard of it for its keepalive."""

    def stale(txn: OpenTxn, keepalives: Keepalives, now_ms: int) -> bool:
        silent_ms = now_ms - keepalives.last(txn.row.txn_id)
        waits = txn.row.state == "PREPARED" or (txn.row.state == "OPEN" and txn.pending is None)
        return silent_ms > txn.row.keepalive_ms and waits

    with patch.object(transactions, "_seems_stale", stale), _leads("expire", "ABORT_IN_PROGRESS"):
        yield


@contextmanager
def superseded() -> Iterator[None]:
    """A newer transaction takes the name of a prepared one, which is aborted."""
    usual = transactions.earlier_outcome

    def earlier(turn: Turn, scope: str, name: str | None, owner: str) -> TxnRow | None:
        holder = turn.state.holder(scope, name) if name is not None else None
        held = holder is not None and holder in turn.state.prepared
        return None if held else usual(turn, scope, name, owner)

    with ExitStack() as stack:
        for module in ("transactions", "commit", "one_shot", "parts"):
            place = f"anabranch.core.decisions.{module}.earlier_outcome"
            stack.enter_context(patch(place, earlier))
        stack.enter_context(patch.object(prepared, "prepared_of_name", lambda *_: None))
        yield


def lost_with_a_stream() -> Planted:
    """A prepared transaction is aborted when a stream of it is given up."""
    return _leads("lose_stream", "ABORT_IN_PROGRESS")


def all_is_left_out() -> Planted:
    """A prepared transaction is committed without all of its streams once any stream is given up."""
    usual = is_gone
    return patch.object(
        prepared, "is_gone", lambda state, _: any(usual(state, stream) for stream in state.streams)
    )


def uncounted() -> Planted:
    """A commit without a LOST stream does not count the events that it leaves out."""
    usual = prepared.without
    return patch.object(
        prepared,
        "without",
        lambda row, events, gone: usual(row, events, gone)._replace(left_out=row.left_out),
    )


def refused_and_aborted() -> Planted:
    """A merge that a broker refuses aborts what its coordinator has committed."""
    return _leads("begin_commit", "COMMIT_IN_PROGRESS")


@instead_of(Ledger, "_last_word")
def no_answer_is_no_commit(self: Ledger, open_book: object, txn_id: bytes, *_: object) -> Row:
    """A ledger takes a commit of the database without an answer for none."""
    return Row(txn_id, ABORT, b"", 0, former=False)


@wrapping(ledger, "_ended")
def rows_go_too_early(
    usual: Any, client: Client, secret: bytes, row: Row, found: Recovered
) -> str | None:
    """A ledger's row `commit` goes before the log says COMMITTED."""
    return row.outcome if row.outcome == COMMIT else usual(client, secret, row, found)
