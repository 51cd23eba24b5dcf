"""Votes and frozen locks (`docs/inside/across.md`, section 8).

A vote checks the locks of its part, and freezes them, as a prepare does (`core.parts`, `core.locks.frozen`). The
coordinator does the same for its own part in the round of the decision (L4). Two cases differ, and are here:

- A vote *meets* another transaction: the writes of one may break the locks of the other. Then the vote waits, or
  gives way, and is asked for again (`gives_way`; L2, L3). `core.locks.frozen` asks this.
- A commit took a timestamp, and waits for a hold; then a vote freezes a lock that the commit may break. Then the
  commit loses its timestamp (`take_back`; L5). Votes and decisions call this.
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
    """Whether a transaction has parts on several control partitions."""
    if control_partition_of(txn_id) != turn.settings.control_partition:
        return True
    if turn.across.asked_shots.get(txn_id, None) is not None:
        return True
    txn = turn.state.open.get(txn_id)
    return txn is not None and bool(txn.partitions)


def gives_way(turn: Turn, txn_id: bytes, others: Iterable[bytes]) -> bool:
    """Whether a vote gives way because it meets one of these transactions; else it waits for them (L2, L3).

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
    holding.take_back(turn, {commit for commit in waiting if _may_break(turn, commit, txn_id)})


def _may_break(turn: Turn, waiting: bytes, txn_id: bytes) -> bool:
    """Whether a waiting commit may break a lock of a transaction.

    The rows of one-shots are compared. All other commits that write to a table with such locks count: they lose
    nothing but a timestamp.
    """
    shot = turn.holds.shots.get(waiting)
    if shot is None:
        return True
    return any(
        txn_id in turn.state.locks.possible_conflicts(table, write, waiting)
        for table, write in _writes(turn, shot.command).items()
    )


def _writes(turn: Turn, command: r.OneShot) -> dict[str, Write]:
    """The rows that a one-shot writes or changes, by table."""
    keys: dict[str, list[bytes | None]] = {}
    for event in command.events:
        if event.stream in turn.state.tables:
            keys.setdefault(event.stream, []).append(event.key)
    for change in command.changes:
        keys.setdefault(change.table, []).append(change.key)
    turn.charge(work.of_items(len(command.events) + len(command.changes)))
    return {table: Write.of(0, written) for table, written in keys.items()}
