"""Locks of transactions over several control partitions (`docs/inside/across.md`, section 8).

A vote checks the locks of its part, and freezes them, as a prepare does (`core.parts`, `core.locks.frozen`). The
coordinator does the same for its own part in the round of the decision (L4). Here is what differs: what becomes of
a vote that meets another transaction, and of commits that took a timestamp before the locks were frozen.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core import work
from anabranch.core.across.messages import Meeting, meet
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks.table_writes import Write
from anabranch.errors import NotReady
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.schemas import records as r


class GivesWay(NotReady):
    """A vote gives way to another transaction: the coordinator takes all votes back, and asks for them again."""


def is_across(turn: Turn, txn_id: bytes) -> bool:
    """Whether a transaction has parts at several control partitions."""
    if control_partition_of(txn_id) != turn.settings.control_partition:
        return True
    if turn.across.shots.get(txn_id, None) is not None:
        return True
    txn = turn.state.open.get(txn_id)
    return txn is not None and bool(txn.partitions)


def gives_way(turn: Turn, txn_id: bytes, others: Iterable[bytes]) -> bool:
    """Whether a vote gives way because it meets these transactions; else it waits for them (L2, L3).

    A vote waits for a transaction that a program has prepared, and is refused after `limits.PREPARED_HOLD_MS`. A
    vote gives way to commits that have waited for its locks for `frozen.BARS_MS`: they may wait for an older one.
    """
    state = turn.state
    return any(
        meet(txn_id, other, decided=other not in state.prepared) is Meeting.AGAIN
        for other in others
        if other in state.promised or other not in state.prepared
    )


def take_back(turn: Turn, txn_id: bytes) -> None:
    """Take back timestamps of waiting commits that may break the locks that a transaction has frozen now (L5).

    Such a timestamp may be below the transaction's own one. Without it, the commit waits until the locks are free.
    """
    if not turn.holds.in_use:
        return
    tables = turn.state.locks.of(txn_id).tables
    waiting = {entry.txn_id for entry in turn.holds.on(tables) if entry.since_ms >= 0}
    turn.charge(work.of_items(len(waiting)))
    holding.take_back(turn, {one for one in waiting if _may_break(turn, one, txn_id)})


def _may_break(turn: Turn, waiting: bytes, txn_id: bytes) -> bool:
    """Whether a waiting commit may break a lock. Rows are compared for one-shots, tables for other commits."""
    shot = turn.holds.shots.get(waiting)
    if shot is None:
        return True
    return any(
        txn_id in turn.state.locks.possible_conflicts(table, write, waiting)
        for table, write in _writes(turn, shot.command).items()
    )


def _writes(turn: Turn, command: r.OneShot) -> dict[str, Write]:
    keys: dict[str, list[bytes | None]] = {}
    for event in command.events:
        if event.stream in turn.state.tables:
            keys.setdefault(event.stream, []).append(event.key)
    for change in command.changes:
        keys.setdefault(change.table, []).append(change.key)
    turn.charge(work.of_items(len(command.events) + len(command.changes)))
    return {table: Write.of(0, its) for table, its in keys.items()}
