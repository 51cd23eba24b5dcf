"""Planted bugs in prepared transactions and ledgers: other words than their own end them; see `catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from anabranch.client.client import Client
from anabranch.core.decisions import claims, one_shot, positions, prepared, transactions
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import frozen
from anabranch.core.locks.lock_table import LockTable
from anabranch.core.memory import Keepalives, is_gone
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS, Op
from anabranch.ledger import Ledger, Recovered, ledger
from anabranch.ledger.book import ABORT, COMMIT, Row
from anabranch.protocol import limits
from anabranch.protocol.ids import hash_of
from anabranch.protocol.schemas.records import Consumed, OneShot, TxnRow, TxnState
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
        for module in ("decisions.transactions", "decisions.commit", "decisions.one_shot", "parts"):
            place = f"anabranch.core.{module}.earlier_outcome"
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


# -- with the other parts of a commit ----------------------------------------------------------------------


def given_way_is_committed() -> Planted:
    """A commit with positions that gives way to an earlier one is answered with that one's outcome."""
    return patch.object(claims, "earlier", lambda turn, row, **_: turn.outcome(row))


@wrapping(one_shot, "_answered_before")
def tasks_prove_a_named_one(usual: Any, turn: Turn, command: OneShot, to: Any) -> bool:
    """A one-shot with positions and a name that is repeated is looked up in the rows of its tasks alone."""
    if command.consumed is None or command.name is None:
        return bool(usual(turn, command, to))
    moved = positions.moved_by(turn, command.consumed, command.txn_id)
    if moved is not None:
        turn.answer(to, turn.row(command.txn_id))
    return moved is not None


@wrapping(LockTable, "follow")
def locks_not_frozen(
    usual: Any, locks: LockTable, txn_id: bytes, row: TxnRow, *, merged: bool
) -> None:
    """The locks of a prepared transaction are not frozen, and break like others."""
    usual(locks, txn_id, row, merged=merged)
    if row.state == "PREPARED":
        locks.frozen.pop(txn_id, None)
        locks.holding.pop(txn_id, None)


@wrapping(frozen, "check_prepare")
def its_reads_ignored(usual: Any, turn: Turn, txn_id: bytes, *given: Any) -> None:
    """A transaction is prepared though what another prepared one writes would break its locks."""
    with patch.object(frozen, "_written_by", lambda *_: {}):
        usual(turn, txn_id, *given)


@wrapping(frozen, "check_prepare")
def its_writes_ignored(usual: Any, turn: Turn, txn_id: bytes, writes: Any, locks: Any) -> None:
    """A transaction is prepared though what it writes would break a lock of another prepared one."""
    usual(turn, txn_id, dict, locks)


def waits_for_ever() -> Planted:
    """A commit that would break a lock of a prepared transaction waits for as long as that one stays."""
    return patch.object(limits, "PREPARED_HOLD_MS", 1 << 40)


@wrapping(positions, "begin_moving")
def tasks_not_in_progress(usual: Any, turn: Turn, consumed: Consumed, txn_id: bytes) -> None:
    """The tasks of a prepared transaction can be moved by other commits before it ends."""
    pending = turn.open(txn_id).pending
    if pending is not None and pending.prepare is None:
        usual(turn, consumed, txn_id)


@wrapping(positions, "move")
def fenced_when_it_commits(
    usual: Any, turn: Turn, consumed: Consumed, txn_id: bytes, *more: Any
) -> Any:
    """A prepared transaction whose tasks were taken meanwhile commits without moving their positions."""
    steps = positions._steps
    mine = hash_of(consumed.processor, consumed.fencing_token)
    kept = lambda *of: (step for step in steps(*of) if step.row.fencing_hash == mine)  # noqa: E731
    with patch.object(positions, "_steps", kept):
        return usual(turn, consumed, txn_id, *more)
