"""Decisions on transactions that an operator forces to end: prepared ones, and those whose merge is stuck.

Nothing else ends these: a staged merge can't be aborted, and waits for all its streams; a prepared transaction
waits for its coordinator without limit.
"""

from __future__ import annotations

from anabranch.core import rows as k
from anabranch.core.decisions.commits.askers import join_waiting
from anabranch.core.decisions.commits.commit import commit_prepared
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, is_finished
from anabranch.core.ids import txn_text
from anabranch.core.memory import STUCK, wait_text
from anabranch.core.round import ReplyTo
from anabranch.core.tokens import Rights, id_named
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import IllegalState, NotReady
from anabranch.schemas.records import Force, RetiredRow


def force(turn: Turn, command: Force, to: ReplyTo | None) -> None:
    """Abort a transaction whose merge is stuck, in all its streams, or end a PREPARED one. Repeatable.

    Chunks of a staged merge are in the streams, committed natively. No history may ever name them, so their
    partitions are never used again.
    """
    row = turn.transaction(id_named(command.token), Rights(0))
    txn_id = row.txn_id
    was_prepared = turn.state.prepared_row(txn_id) is not None
    if not is_finished(row) and was_prepared != (command.outcome is not None):
        raise IllegalState(
            "it is prepared, and its coordinator may have decided already: say which way (`--outcome`)"
            if was_prepared
            else "the transaction is not prepared: give no outcome"
        )
    if row.state == "PREPARED":
        how = "commit" if command.outcome else "abort"
        if command.outcome:
            commit_prepared(turn, txn_id, to)  # may be refused, so before anything is put
        else:
            abort_txn(turn, txn_id, command.reason or "aborted by an operator's force")
        turn.audit(
            command, f"{txn_text(txn_id)} of {row.owner}, forced to {how}: {command.reason!r}"
        )
        if command.outcome:
            return
    elif row.state == "COMMITTED" and command.outcome:
        pass  # repeated
    elif row.state == "FINALIZE_IN_PROGRESS" and command.outcome:
        wait = turn.wait_of(txn_id)
        if wait is not None and wait.why == "torn":
            raise IllegalState("a part of it is gone: nothing but `--outcome abort` ends it")
        turn.put(k.pending_key(txn_id), join_waiting(turn.open(txn_id).pending, to))  # repeated
        return
    elif TRANSACTIONS.judge(row.state, "force", row.reason) is not None:
        wait = turn.wait_of(txn_id)
        if wait is None or wait.why not in STUCK | {"partitions"}:
            raise IllegalState("nothing stops the transaction: its merge continues by itself")
        if txn_id in turn.memory.staging:
            raise NotReady("a chunk of the transaction is being staged: ask again")
        for (stream, _), staged in sorted(turn.open(txn_id).staged_merges.items()):
            # Also in a LOST one: it may be recovered.
            if staged.count and stream in turn.state.streams:
                retired = RetiredRow(stream, staged.partition)
                turn.put(k.retired_key(stream, staged.partition), retired)
        why = wait_text(turn.memory, wait)
        turn.audit(command, f"{txn_text(txn_id)} of {row.owner}: {command.reason!r}")
        said = command.reason or "forced by an operator"
        abort_txn(turn, txn_id, f"{said}: its merge made no progress: {why}", op="force")
    turn.answer(to, turn.row(txn_id))
