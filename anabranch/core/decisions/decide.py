"""The entrance to all decisions: commands and due deadlines become what a round says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.core import rows as k
from anabranch.core.decisions import (
    cleanup,
    commit,
    plain,
    questions,
    scale,
    scopes,
    set_aside,
    streams,
    transactions,
    writers,
)
from anabranch.core.decisions import names_and_series as claims
from anabranch.core.decisions.turn import Turn, attempt
from anabranch.core.ids import made_ms_of
from anabranch.core.memory import Keepalives
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.errors import MalformedRecord
from anabranch.schemas import records as r

_DECISIONS: dict[type, Callable[[Turn, Any, ReplyTo | None], None]] = {
    r.FindScope: scopes.find_scope,
    r.AdoptScope: scopes.adopt_scope,
    r.CreateStream: streams.create_stream,
    r.DescribeStreams: scopes.describe_streams,
    r.ForgetStream: streams.forget_stream,
    r.RecoverStream: streams.recover_stream,
    r.Scale: scale.scale,
    r.Begin: transactions.begin,
    r.Touch: transactions.touch,
    r.Register: writers.register,
    r.Heartbeat: transactions.heartbeat,
    r.Abort: transactions.abort,
    r.Settle: streams.settle,
    r.GetState: transactions.get_state,
    r.Resolve: transactions.resolve,
    r.ListTransactions: questions.list_transactions,
    r.ListCommands: set_aside.list_commands,
    r.Commit: commit.commit,
    r.OneShot: commit.one_shot,
    r.SafeTime: questions.safe_time,
    r.ListSeries: claims.list_series,
    r.SetSeries: claims.set_series,
}


CHECK_MS = 250  # how often to look for silent transactions and, without new ones, old outcomes
# A round forgets this many old outcomes for each that it adds: the table never outgrows them.
PURGE_SHARE = 2


def decide(turn: Turn, command: Any, to: ReplyTo | None) -> None:
    """Decide one command. A refusal is answered and changes nothing."""
    decision = _DECISIONS.get(type(command))

    def run() -> None:
        if decision is None:
            raise MalformedRecord(f"{type(command).__name__} is not a command")
        decision(turn, command, to)

    attempt(turn, to, run)


def decide_due(turn: Turn, *, read_to_end: bool) -> int | None:
    """Decide what is due: plain writes, commits, merges, stale transactions, old outcomes, journals to cut.

    ``read_to_end``: the commands are read to their end; only then is staleness judged (a heartbeat may wait
    unread). Returns the new horizon of forgotten ids, or None if it stays.
    """
    # Plain writes go to the active layouts, so they come before any stream leaves its own.
    plain.commit_plain(turn)
    commit.advance_commits(turn)
    looks = turn.now_ms >= turn.keepalives.next_check_ms
    if looks:
        turn.keepalives.next_check_ms = turn.now_ms + CHECK_MS
        if read_to_end:
            _abort_stale(turn)
    most = PURGE_SHARE * turn.finished + looks * turn.settings.purge_per_look
    horizon = _forget_old(turn, most) if most else None
    if looks:
        cleanup.clean_up(turn)
    return horizon


def anything_stale(state: State, keepalives: Keepalives, now_ms: int) -> bool:
    """Whether some transaction would be aborted for its silence if all commands were read."""
    return now_ms >= keepalives.next_check_ms and any(
        _is_stale(txn, keepalives, now_ms) for txn in state.open.values()
    )


def _is_stale(txn: OpenTxn, keepalives: Keepalives, now_ms: int) -> bool:
    """Whether an open transaction, without a received commit, was silent for longer than its keepalive."""
    silent_ms = now_ms - keepalives.last(txn.row.txn_id)
    return silent_ms > txn.row.keepalive_ms and txn.row.state == "OPEN" and txn.pending is None


def _abort_stale(turn: Turn) -> None:
    stale = [
        txn_id
        for txn_id, txn in turn.state.open.items()
        if _is_stale(txn, turn.keepalives, turn.now_ms)
    ]
    for txn_id in sorted(stale):
        silent_ms = turn.now_ms - turn.keepalives.last(txn_id)
        reason = f"stale: nothing heard of it for {silent_ms} ms"
        transactions.abort_txn(turn, txn_id, reason, op="expire")


def _forget_old(turn: Turn, most: int) -> int | None:
    """Delete the rows of up to ``most`` transactions that ended longer ago than the retention."""
    ended_before = turn.wall_ms - turn.settings.retention_ms
    for txn_id in turn.state.finished_before(ended_before, most):
        row = turn.state.txn_row(txn_id)
        if row is None:
            continue
        if row.name is not None and turn.state.holder(row.scope, row.name) == txn_id:
            turn.put(k.name_key(row.scope, row.name), None)
        for key in turn.state.row_keys(txn_id):
            turn.put(key, None)
        turn.expired_ms = max(turn.expired_ms, made_ms_of(txn_id))
    return turn.expired_ms if turn.expired_ms != turn.state.round.expired_ms else None
