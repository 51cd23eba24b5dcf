"""Decisions on locks: what a one-shot read must hold just below its commit timestamp (`docs/tables.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.authorize import Right, check_right
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal.runs import StoredRun
from anabranch.core.read_locks import write_of
from anabranch.core.round import StreamCommit
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import (
    LockedRange,
    LookAgain,
    OneShot,
    TableLocks,
    TableRow,
    TableTime,
)


def merge(
    turn: Turn, step: StreamCommit, taken: Iterable[tuple[int, Sequence[StoredRun]]] = ()
) -> None:
    """Put a merge into the round; a table's is noted, too, for the locks on it.

    ``taken``: the runs of a transaction, by journal partition; carried ones, too.
    """
    turn.round.history.append(step)
    before = turn.state.tables.get(step.stream)
    if before is not None:
        digests = (
            digest
            for source, runs in (*step.plain, *taken)
            for digest in turn.index.digests(step.stream, source, step.txn_id, runs)
        )
        turn.windows.add(step.stream, write_of(step, digests), before.last)
        turn.put(k.table_key(step.stream), TableRow(step.timestamp))


def judge(turn: Turn, command: OneShot) -> LookAgain | None:
    """None: all locks hold until now. Else the client has to look; nothing is put.

    Raises: InvalidArgument, NotAuthorized, UnknownStream, CrossScope.
    """
    _check(turn, command)
    state, windows = turn.state, turn.windows
    for locks in command.locks:
        asks = locks.points or locks.ranges
        if asks and not windows.holds(locks, state.tables[locks.table].last):
            return LookAgain(turn.hybrid_time, table_times(turn, named(command.locks)))
    return None


def named(locks: Iterable[TableLocks]) -> list[str]:
    """The tables of these locks."""
    return [each.table for each in locks]


def table_times(turn: Turn, tables: Iterable[str]) -> tuple[TableTime, ...]:
    """The newest commits of these tables, with what this round commits so far."""
    return tuple(TableTime(table, turn.state.tables[table].last) for table in tables)


def check_table(turn: Turn, table: str) -> None:
    """`InvalidArgument` unless this control partition has such a table; `NotAuthorized`."""
    check_right(turn.state, turn.lane, Right.SAFE_TIME, table)
    if table not in turn.state.tables:
        raise InvalidArgument(
            f"{limits.cut(table)} is no table of this control partition: make one with `create_table`, `near`"
        )


def _check(turn: Turn, command: OneShot) -> None:
    locks = command.locks
    limits.LOCKS.check(sum(len(each.points) + len(each.ranges) for each in locks), "a transaction")
    if not _rise(named(locks)):
        raise InvalidArgument("locks name each table once, in rising order")
    for each in locks:
        check_table(turn, each.table)
        if not 0 <= each.last <= each.since <= turn.hybrid_time:
            raise InvalidArgument(
                f"locks on {each.table} since {each.since}, its newest commit {each.last}: `since` is a time that "
                f"a controller told ({turn.hybrid_time} at most), and `last` is not above it"
            )
        if not _rise(each.points) or not _apart(each.ranges):
            raise InvalidArgument(
                f"locks on {each.table}: points rise; ranges rise, don't meet, and each ends above its beginning"
            )


def _rise(values: Iterable[str | int]) -> bool:
    return all(a < b for a, b in pairwise(values))  # type: ignore[operator]


def _apart(ranges: Iterable[LockedRange]) -> bool:
    found = tuple(ranges)
    if any(each.high is not None and each.low >= each.high for each in found):
        return False
    return all(a.high is not None and a.high < b.low for a, b in pairwise(found))
