"""Decisions by time: silent transactions are aborted, and outcomes are forgotten when their retention is over."""

from __future__ import annotations

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.decisions import quotas, transactions
from anabranch.core.decisions.turn import DAY_MS, Turn
from anabranch.core.ids import made_ms_of, txn_text
from anabranch.core.memory import Keepalives
from anabranch.core.state import OpenTxn, State
from anabranch.errors import SnapshotExpired

AUDIT_MS = 90 * DAY_MS
UNREAD_MS = 600_000  # at least this long: a topic of commands may have no leader for some time
_AUDIT_ROWS = 20  # checked each time
# A round forgets this many old outcomes for each that it adds, so the table does not grow.
PURGE_SHARE = 2
PURGE_ROWS = 2_000  # … and this many rows, plus two for each of those outcomes


def silent_lanes(state: State, keepalives: Keepalives, now_ms: int) -> set[str]:
    """The lanes whose unread commands may contain a heartbeat of a transaction that seems silent."""
    found: set[str] = set()
    if now_ms >= keepalives.next_check_ms:
        for txn in state.open.values():
            if _seems_stale(txn, keepalives, now_ms):
                found |= _heartbeats_of(txn, keepalives)
    return found


def _seems_stale(txn: OpenTxn, keepalives: Keepalives, now_ms: int) -> bool:
    """Whether an open transaction without a received commit has been silent for longer than its keepalive."""
    silent_ms = now_ms - keepalives.last(txn.row.txn_id)
    return silent_ms > txn.row.keepalive_ms and txn.row.state == "OPEN" and txn.pending is None


def _heartbeats_of(txn: OpenTxn, keepalives: Keepalives) -> set[str]:
    """The lanes by which a transaction's heartbeats may come: its owner's, its writers', its known helpers'."""
    helpers = keepalives.helpers.get(txn.row.txn_id, ())
    return {txn.row.owner, *txn.lanes.values(), *helpers}


def _unread(turn: Turn, txn: OpenTxn) -> list[str]:
    """The lanes of a transaction's heartbeats whose commands are not all decided up to the end of its keepalive.

    A blocked lane is not read and does not count.
    """
    over_ms = turn.keepalives.last(txn.row.txn_id) + txn.row.keepalive_ms
    lanes = turn.memory.lanes
    names = sorted(_heartbeats_of(txn, turn.keepalives) & lanes.keys())
    return [name for name in names if lanes[name].read_ms <= over_ms]


def _is_stale(turn: Turn, txn: OpenTxn) -> bool:
    """Whether an open transaction has expired: all its lanes are read, except lanes that were unreadable for
    long.
    """
    if not _seems_stale(txn, turn.keepalives, turn.now_ms):
        return False
    last, keepalive_ms = turn.keepalives.last(txn.row.txn_id), txn.row.keepalive_ms
    long = turn.now_ms - last > max(limits.UNREAD.value * keepalive_ms, UNREAD_MS)
    seen = [turn.memory.lanes[name] for name in _unread(turn, txn)]
    return all(long and lane.well_ms <= last + keepalive_ms for lane in seen)


def abort_stale(turn: Turn) -> None:
    stale = [txn_id for txn_id, txn in turn.state.open.items() if _is_stale(turn, txn)]
    for txn_id in sorted(stale):
        silent_ms = turn.now_ms - turn.keepalives.last(txn_id)
        reason = f"stale: no heartbeat for {silent_ms} ms"
        if unread := _unread(turn, turn.open(txn_id)):
            reason += f"; commands of {', '.join(unread)} can't be read"
            turn.round.unread.append(f"{txn_text(txn_id)} is aborted: {reason}")
        transactions.abort_txn(turn, txn_id, reason, op="expire")


def abort_old(turn: Turn) -> None:
    """Abort open transactions that keep tables readable for longer than their lanes may."""
    for txn_id in sorted(turn.state.locks.named):
        txn = turn.open(txn_id)
        if txn.row.state != "OPEN" or txn.pending is not None:
            continue
        try:
            quotas.check_snapshot(turn, txn.row.owner, txn.row.snapshot)
        except SnapshotExpired as error:
            transactions.abort_txn(turn, txn_id, f"its snapshot is too old: {error}", op="expire")


def forget_outcomes(turn: Turn, most: int) -> int | None:
    """Delete the rows of up to ``most`` transactions that ended longer ago than the retention."""
    ended_before = turn.wall_ms - turn.settings.retention_ms
    left = PURGE_ROWS + 2 * most
    for txn_id in turn.state.finished_before(ended_before, most):
        row = turn.state.txn_row(txn_id)
        if row is None:
            continue
        keys = turn.state.row_keys(txn_id, left + 1)
        if len(keys) > left:  # it had many writers: its own row, the first key, is deleted last
            for key in keys[1:]:
                turn.put(key, None)
            break
        left -= len(keys)
        if row.name is not None and turn.state.holder(row.scope, row.name) == txn_id:
            turn.put(k.name_key(row.scope, row.name), None)
        for key in keys:
            turn.put(key, None)
        turn.expired_ms = max(turn.expired_ms, made_ms_of(txn_id))
    return turn.expired_ms if turn.expired_ms != turn.state.round.expired_ms else None


def forget_audit(turn: Turn) -> None:
    """Delete some of the audit's rows that are older than `AUDIT_MS`."""
    due = k.audit_key(max(0, turn.wall_ms - AUDIT_MS), 0)
    for key in turn.state.row_keys(k.AUDIT_KEY, _AUDIT_ROWS):
        if key < due:
            turn.put(key, None)
