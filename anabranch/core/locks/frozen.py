"""Decisions on frozen locks: those of transactions with a staged merge, which can't be aborted any more.

A commit that would break a frozen lock waits until the lock's transaction ends. A staged merge does not begin while
its writes would break a frozen lock, or while the writes of another staged merge would break its own locks. So a
staged merge that has begun never waits for another one, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from anabranch.core.command_events import SomeEvents
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks.table_writes import FEW_POINTS, Write
from anabranch.core.memory import Waiting, Who
from anabranch.errors import NotReady
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import SegmentRange

BARS_MS = 1_000  # when a commit has waited this long, locks that it breaks are not frozen before it
HEARD_MS = 5_000  # … unless it did not try again for this time, like a one-shot that was given up
MOST = 1_000  # waiting commits that are noted; more wait without a note

Writes = Mapping[str, Write]  # by table
On = set[tuple[bytes, str]]  # the transactions that a commit waits for, with the table


def check_free(
    turn: Turn, txn_id: bytes, placed: Mapping[str, Sequence[tuple[SegmentRange, SomeEvents]]]
) -> None:
    """`NotReady` if a one-shot would break a frozen lock."""

    def writes() -> Writes:
        tables = placed.keys() & turn.state.tables.keys()
        keys = {table: (key for _, its in placed[table] for key in its.keys) for table in tables}
        return {table: Write.of(0, its) for table, its in keys.items()}

    if waits(turn, txn_id, writes):
        raise NotReady(
            "a row that this writes was read by a big transaction whose commit is under way; nothing was changed: "
            "call again, it takes seconds a gigabyte (`anabranch txn locks`)"
        )


def waits(turn: Turn, who: Who, writes: Callable[[], Writes]) -> bool:
    """Whether these writes break, or may break, a frozen lock, so that they wait. ``writes``: called if needed."""
    if still_waits(turn, who):
        return True
    if not turn.state.locks.frozen and turn.merging.waiting.get(who, None) is None:
        return False
    found = writes() if turn.state.locks.frozen else {}
    by = who if isinstance(who, bytes) else NO_TXN
    return _note(turn, who, _frozen_by(turn, by, found), found)


def still_waits(turn: Turn, who: Who) -> bool:
    """Whether a transaction for which ``who`` waited before is still frozen. No lock is compared."""
    known = turn.merging.waiting.get(who, None)
    if known is None or not any(txn_id in turn.state.locks.frozen for txn_id, _ in known.on):
        return False
    turn.merging.waiting.put(who, known._replace(heard_ms=turn.now_ms))
    return True


def may_freeze(turn: Turn, txn_id: bytes, written: Callable[[bytes], Writes | None]) -> bool:
    """Whether a transaction's locks, which hold until now, may be frozen.

    ``written``: returns the writes of a transaction; None if the journals are not read up to them yet.
    """
    state = turn.state
    others = [other for other in state.locks.frozen if other != txn_id]
    on: On = set()
    if state.locks.of(txn_id).rows:
        theirs = {other: written(other) for other in others}
        if None in theirs.values():
            return False
        on = {
            (other, table)
            for other, writes in theirs.items()
            for table, write in (writes or {}).items()
            if txn_id in turn.state.locks.possible_conflicts(table, write, other)
        } | _bars(turn, txn_id)
    found: Writes = {}
    if not on and any(state.locks.of(other).rows for other in others):
        found = written(txn_id) or {}
        on = _frozen_by(turn, txn_id, found)
    return not _note(turn, txn_id, on, found, freezes=True)


def _bars(turn: Turn, txn_id: bytes) -> On:
    """The commits that have waited for this transaction's locks for `BARS_MS` and come before it.

    If two commits would both freeze locks, the commit with the older id comes first: otherwise each might wait for
    the other commit.
    """
    return {
        (who if isinstance(who, bytes) else NO_TXN, table)
        for who, its in turn.merging.waiting.as_dict().items()
        if turn.now_ms - its.since_ms >= BARS_MS
        and turn.now_ms - its.heard_ms < HEARD_MS
        and not (its.freezes and isinstance(who, bytes) and who >= txn_id)
        for table, write in its.writes
        if txn_id
        in turn.state.locks.possible_conflicts(
            table, write, who if isinstance(who, bytes) else NO_TXN
        )
    }


def _frozen_by(turn: Turn, by: bytes, writes: Writes) -> On:
    """The frozen transactions whose locks these writes break, or may break, with the table."""
    return {
        (txn_id, table)
        for table, write in writes.items()
        for txn_id in turn.state.locks.possible_conflicts(table, write, by)
        & turn.state.locks.frozen.keys()
    }


def _note(turn: Turn, who: Who, on: On, writes: Writes, *, freezes: bool = False) -> bool:
    """Note the transactions that a commit waits for. Returns whether there are any."""
    waiting = turn.merging.waiting
    known = waiting.get(who, None)
    if not on:
        if known is not None:
            waiting.put(who, None)
        return False
    if known is None and not _room(turn, waiting.as_dict()):
        return True
    kept = tuple((table, _few(write)) for table, write in sorted(writes.items()))
    since_ms = turn.now_ms if known is None else known.since_ms
    kept = kept or (() if known is None else known.writes)
    waiting.put(who, Waiting(since_ms, turn.now_ms, tuple(sorted(on)), kept, freezes))
    return True


def _few(write: Write) -> Write:
    """A write as `Waiting` keeps it: with unknown keys if it is big, so that memory is bounded."""
    points = write.points
    return write if points is not None and len(points) <= FEW_POINTS else Write(0, None, ())


def _room(turn: Turn, waiting: Mapping[Who, Waiting]) -> bool:
    """Whether one more waiting commit may be noted. Drops commits that did not try again for `HEARD_MS`."""
    gone = [who for who, its in waiting.items() if turn.now_ms - its.heard_ms >= HEARD_MS]
    for who in gone:
        turn.merging.waiting.put(who, None)
    return len(waiting) - len(gone) < MOST


def waiting_for(turn: Turn) -> Iterable[tuple[Who, bytes, str]]:
    """(waiting commit, the transaction it waits for, the table) of commits that tried again within `HEARD_MS`."""
    for who, its in turn.merging.waiting.as_dict().items():
        if turn.now_ms - its.heard_ms < HEARD_MS:
            for txn_id, table in its.on:
                yield who, txn_id, table
