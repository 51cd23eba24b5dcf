"""Decisions on what an operator ends by hand: merges that a loss or a torn journal stopped, and prepared ones.

Nothing else ends these: a merge that is carried aside can't be aborted, and a prepared transaction waits for its
coordinator, however long.
"""

from __future__ import annotations

from anabranch.core import rows as k
from anabranch.core.decisions.commits.askers import join_waiting
from anabranch.core.decisions.commits.commit import commit_prepared
from anabranch.core.decisions.commits.merge import TORN
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, is_finished
from anabranch.core.ids import txn_text
from anabranch.core.round import ReplyTo
from anabranch.core.stream_states import FORGOTTEN, GIVEN_UP, state_of
from anabranch.core.tokens import Rights, id_named
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import IllegalState, NotReady
from anabranch.schemas.records import RetiredRow, Settle


def settle(turn: Turn, command: Settle, to: ReplyTo | None) -> None:
    """Abort a transaction whose merge can't go on, in all its streams, or end a PREPARED one. Repeatable.

    Chunks of it are in streams, committed natively. No history may ever name them, so their partitions are
    used no more.
    """
    row = turn.transaction(id_named(command.token), Rights(0))
    txn_id = row.txn_id
    was_prepared = turn.state.prepared_row(txn_id) is not None
    if not is_finished(row) and was_prepared != (command.presume is not None):
        raise IllegalState(
            "it is prepared, and its coordinator may have decided already: say which way (`--presume`)"
            if was_prepared
            else "the transaction is not prepared: there is nothing to presume"
        )
    if row.state == "PREPARED":
        how = "commit" if command.presume else "abort"
        if command.presume:
            commit_prepared(turn, txn_id, to)  # may be refused, so before anything is put
        else:
            abort_txn(turn, txn_id, command.reason or "presumed aborted by an operator")
        turn.audit(
            command, f"{txn_text(txn_id)} of {row.owner}, presumed {how}: {command.reason!r}"
        )
        if command.presume:
            return
    elif row.state == "COMMITTED" and command.presume:
        pass  # repeated
    elif row.state == "FINALIZE_IN_PROGRESS" and command.presume and not _is_torn(turn, txn_id):
        turn.put(k.pending_key(txn_id), join_waiting(turn.open(txn_id).pending, to))  # repeated
        return
    elif TRANSACTIONS.judge(row.state, "settle", row.reason) is not None:
        txn = turn.open(txn_id)
        if command.presume:
            raise IllegalState("a part of it is gone: nothing but `--presume abort` ends it")
        # A prepared one leaves its LOST streams out.
        stops = not was_prepared and any(_is_lost(turn, stream) for stream in txn.participants)
        if not stops and not _is_torn(turn, txn_id):
            raise IllegalState("no loss stops the transaction: its merge goes on by itself")
        if txn_id in turn.memory.carrying:
            raise NotReady("a chunk of the transaction is being carried: ask again")
        for (stream, _), carry in sorted(txn.carries.items()):
            if carry.count and stream in turn.state.streams:  # a LOST one may be taken back
                retired = RetiredRow(stream, carry.partition)
                turn.put(k.retired_key(stream, carry.partition), retired)
        turn.audit(command, f"{txn_text(row.txn_id)} of {row.owner}: {command.reason!r}")
        abort_txn(turn, txn_id, command.reason or "settled by an operator", op="settle")
    turn.answer(to, turn.row(txn_id))


def _is_torn(turn: Turn, txn_id: bytes) -> bool:
    return turn.memory.trouble(txn_id) == TORN


def _is_lost(turn: Turn, stream: str) -> bool:
    return state_of(turn.state.streams.get(stream)) in (*GIVEN_UP, FORGOTTEN)
