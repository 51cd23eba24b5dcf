"""The ends that an operator forces, with `anabranch txn force` (the command `Force`).

Within one control partition (`_force_whole`), a stuck merge is aborted, and a prepared transaction ends as the
operator says. Three things can stop a transaction over several control partitions for good
(`docs/inside/across.md`, section 5, *if a process stops*):

- Its *coordinator* can't be led any more. Then an operator ends each participant's part alone, and says which way
  (`_end_part`). The end is *presumed*: the row says so (`CoordinatorRow.forced`), and a coordinator that is led
  again after all is answered from that row.
- A *participant* can't be led any more, after the decision. Then the coordinator ends the transaction without it
  (`_end_without_silent`). If that participant is led again, O4 says what it may do.
- A *merge* is stuck after the decision. Other control partitions have committed, so the part is committed too,
  without the events that can't be merged (`_leave_out`; C4).
"""

from __future__ import annotations

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core.decisions.across import coordinating, participating
from anabranch.core.decisions.commit import commit_prepared, join_waiting
from anabranch.core.decisions.prepared import leave_out
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, is_finished
from anabranch.core.memory import STUCK, wait_text
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.protocol.ids import control_partition_of, txn_text
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights, id_named

# How long a participant has to owe its answer before an operator can end the transaction without it.
GONE_MS = 10_000


def force(turn: Turn, command: r.Force, to: ReplyTo | None) -> None:
    """End a transaction, or the part here of one over several control partitions. Repeating it is harmless."""
    txn_id = id_named(command.token)
    txn = turn.state.open.get(txn_id)
    promise = turn.state.coordinator_row(txn_id)  # None: this is not a participant
    if promise is None and (
        txn is None or txn.row.state not in coordinating.ENDING or not txn.partitions
    ):
        _force_whole(turn, command, to)
        return
    row = turn.transaction(txn_id, Rights(0), anywhere=True)
    if promise is not None and command.outcome is None:
        raise errors.IllegalState(
            f"control partition {control_partition_of(txn_id)} coordinates it, and may have decided already: say "
            "which way its part here ends (`--outcome`)"
        )
    if is_finished(row):
        if (row.state == "COMMITTED") != command.outcome:
            raise errors.IllegalState(f"its part here is {row.state} already")
    elif promise is None and command.outcome == _is_decided(row):
        _end_without_silent(turn, command, turn.open(txn_id))
    elif _is_decided(row) and not command.outcome:
        _leave_out(turn, command, row)
    elif promise is not None and not promise.forced:
        _end_part(turn, command, row, promise)
    turn.answer(to, turn.row(txn_id))


def _force_whole(turn: Turn, command: r.Force, to: ReplyTo | None) -> None:
    """Abort a transaction whose merge is stuck, or end a PREPARED one. Repeating it is harmless.

    If it has participants, it is not decided yet, and they follow the outcome. The chunks of a staged merge are in
    the streams already. No history may ever name them, so their partitions are never used again (`RetiredRow`).
    """
    row = turn.transaction(id_named(command.token), Rights(0))
    txn_id = row.txn_id
    was_prepared = turn.state.prepared_row(txn_id) is not None
    if not is_finished(row) and was_prepared != (command.outcome is not None):
        raise errors.IllegalState(
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
            raise errors.IllegalState("a part of it is gone: nothing but `--outcome abort` ends it")
        turn.put(k.pending_key(txn_id), join_waiting(turn.open(txn_id).pending, to))  # repeated
        return
    elif TRANSACTIONS.judge(row.state, "force", row.reason) is not None:
        why = _check_stuck(turn, txn_id)
        for (stream, _), staged in sorted(turn.open(txn_id).staged_merges.items()):
            # Also in a LOST stream, as it may be recovered.
            if staged.count and stream in turn.state.streams:
                retired = r.RetiredRow(stream, staged.partition)
                turn.put(k.retired_key(stream, staged.partition), retired)
        turn.audit(command, f"{txn_text(txn_id)} of {row.owner}: {command.reason!r}")
        said = command.reason or "forced by an operator"
        abort_txn(turn, txn_id, f"{said}: its merge made no progress: {why}", op="force")
    turn.answer(to, turn.row(txn_id))


def _check_stuck(turn: Turn, txn_id: bytes) -> str:
    """Why a merge makes no progress. `IllegalState`: it does; `NotReady`: a chunk of it is being copied."""
    wait = turn.wait_of(txn_id)
    if wait is None or wait.why not in STUCK | {"partitions"}:
        raise errors.IllegalState("nothing stops the transaction: its merge continues by itself")
    if txn_id in turn.memory.staging:
        raise errors.NotReady("a chunk of the transaction is being staged: ask again")
    return wait_text(turn.memory, wait)


def _is_decided(row: r.TxnRow) -> bool:
    """Whether it is decided that the transaction commits."""
    return row.state == "FINALIZE_IN_PROGRESS"


def _end_part(turn: Turn, command: r.Force, row: r.TxnRow, promise: r.CoordinatorRow) -> None:
    """At a participant, end the part without its coordinator."""
    txn_id, how = row.txn_id, "commit" if command.outcome else "abort"
    if command.outcome and row.state == "OPEN":
        raise errors.IllegalState(
            "its part here has not voted: nothing but `--outcome abort` ends it"
        )
    turn.audit(
        command,
        f"the part here of {txn_text(txn_id)} of {row.owner}, presumed to {how} without its coordinator, control "
        f"partition {control_partition_of(txn_id)}: {command.reason!r}",
    )
    turn.put(k.coordinator_key(txn_id), promise._replace(forced=True))
    if not command.outcome:
        abort_txn(turn, txn_id, command.reason or "aborted by an operator's force")
    elif not row.commit_timestamp:
        turn.hybrid_time = max(turn.hybrid_time, promise.prepare_timestamp)
        participating.commit_part(turn, txn_id, turn.next_timestamp())


def _end_without_silent(turn: Turn, command: r.Force, txn: OpenTxn) -> None:
    """At the coordinator, end a decided transaction without participants that have not answered for `GONE_MS`.

    Other participants may wait for these, and owe no answer: they are committed without them.
    """
    row = txn.row
    owing = {number: owed for number, owed in sorted(txn.partitions.items()) if not owed.done}
    waited = {number: coordinating.waited_ms(turn, row.txn_id, number) for number in owing}
    silent = {number: owing[number] for number in owing if waited[number] >= GONE_MS}
    if not owing:
        return
    if not silent:
        number = max(waited, key=waited.__getitem__)
        raise errors.IllegalState(
            f"control partition {number} has not answered for {max(0, waited[number]) // 1000} s: the transaction "
            f"ends when it does; if it can't be led any more, call again after {GONE_MS // 1000} s of silence"
        )
    named = ", ".join(map(str, silent))
    turn.audit(
        command,
        f"{txn_text(row.txn_id)} of {row.owner}, ended without its part at control partition {named}, from which "
        f"no answer came: {command.reason!r}",
    )
    for number, before in silent.items():
        said = f"ended by force without control partition {number}"
        after = before._replace(done=True, reason=said)
        if _is_decided(row):
            after = after._replace(committed=0, left_out=before.committed + before.left_out)
        turn.put(k.partition_key(row.txn_id, number), after)


def _leave_out(turn: Turn, command: r.Force, row: r.TxnRow) -> None:
    """Commit the part here of a decided transaction without any event of its stuck merge (C4)."""
    txn_id = row.txn_id
    why = _check_stuck(turn, txn_id)
    streams = sorted(turn.open(txn_id).participants)
    turn.audit(
        command,
        f"the part here of {txn_text(txn_id)} of {row.owner} is left out, other control partitions commit theirs: "
        f"{command.reason!r}",
    )
    leave_out(turn, txn_id, streams, f"their merge was forced to end: {why}")
    turn.merging.waits.put(txn_id, None)
