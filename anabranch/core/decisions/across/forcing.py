"""Ends that an operator forces in transactions over several control partitions (`docs/inside/across.md`, 5).

Two things can stop such a transaction for good. Its *coordinator* can't be led any more: then an operator ends a
participant's part alone, and says which way. The end is *presumed*: the row says so (`CoordinatorRow.forced`), and
a coordinator that is led again after all is answered from that row. Or a *merge* is stuck after the decision: other
control partitions have committed, so the part is committed too, without the events that can't be merged (C4).
"""

from __future__ import annotations

from dataclasses import replace

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core.decisions import commit
from anabranch.core.decisions.across import participating
from anabranch.core.decisions.prepared import leave_out
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, is_finished
from anabranch.core.round import ReplyTo
from anabranch.protocol.ids import control_partition_of, txn_text
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights, id_named


def force(turn: Turn, command: r.Force, to: ReplyTo | None) -> None:
    """As `commit.force`, also for the part here of a transaction over several control partitions."""
    txn_id = id_named(command.token)
    txn, its = turn.state.open.get(txn_id), turn.state.coordinator_row(txn_id)
    if its is None and (txn is None or not _is_decided(txn.row) or not txn.partitions):
        commit.force(turn, command, to)
        return
    row = turn.transaction(command.token, Rights(0), anywhere=True)
    if its is not None and command.outcome is None:
        raise errors.IllegalState(
            f"control partition {control_partition_of(txn_id)} coordinates it, and may have decided already: say "
            "which way its part here ends (`--outcome`)"
        )
    if is_finished(row):
        if (row.state == "COMMITTED") != command.outcome:
            raise errors.IllegalState(f"its part here is {row.state} already")
    elif _is_decided(row) and not command.outcome:
        _leave_out(turn, command, row)
    elif its is not None and not its.forced:
        _end_part(turn, command, row, its)
    turn.answer(to, turn.row(txn_id))


def _is_decided(row: r.TxnRow) -> bool:
    return row.state == "FINALIZE_IN_PROGRESS"


def _end_part(turn: Turn, command: r.Force, row: r.TxnRow, its: r.CoordinatorRow) -> None:
    """End a part without its coordinator."""
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
    turn.put(k.coordinator_key(txn_id), replace(its, forced=True))
    if not command.outcome:
        abort_txn(turn, txn_id, command.reason or "aborted by an operator's force")
    elif not row.commit_timestamp:
        at = max(turn.next_timestamp(), its.prepare_timestamp)
        participating.commit_part(turn, txn_id, at)


def _leave_out(turn: Turn, command: r.Force, row: r.TxnRow) -> None:
    """Commit the part here of a decided transaction without all events of its stuck merge."""
    txn_id = row.txn_id
    why = commit.check_stuck(turn, txn_id)
    streams = sorted(turn.open(txn_id).participants)
    turn.audit(
        command,
        f"the part here of {txn_text(txn_id)} of {row.owner} is left out, other control partitions commit theirs: "
        f"{command.reason!r}",
    )
    leave_out(turn, txn_id, streams, f"their merge was forced to end: {why}")
    turn.merging.waits.put(txn_id, None)
