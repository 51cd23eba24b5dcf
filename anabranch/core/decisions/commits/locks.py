"""Decisions on locks: what was read must be unchanged just below the commit timestamp (`docs/inside/tables.md`).

This module validates the locks of one-shots, and checks which registered locks (`registered`) each commit breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import lt

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.authorize import Right, check_right
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal.runs import StoredRun
from anabranch.core.journal.table_writes import Write, write_of
from anabranch.core.read_locks import count_of
from anabranch.core.round import StreamCommit
from anabranch.core.stream_states import STREAMS, state_of
from anabranch.core.transaction_states import TRANSACTIONS, broken_text
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import (
    LockedRange,
    OneShot,
    Revalidate,
    TableLocks,
    TableRow,
    TableTime,
)

Taken = tuple[int, Sequence[StoredRun]]  # runs of a journal partition


def merge(turn: Turn, step: StreamCommit, taken: Iterable[Taken] = ()) -> None:
    """Put a merge into the round. A merge into a table is also noted in the recent writes.

    ``taken``: the runs of the transaction by journal partition, with those of a staged merge.
    """
    turn.round.history.append(step)
    before = turn.state.tables.get(step.stream)
    if before is not None:
        known = turn.memory.written.get(step.txn_id, {}).get(step.stream)
        write = (
            written(turn, step, (*step.plain, *taken))
            if known is None
            else known.at(step.timestamp)
        )
        turn.windows.add(step.stream, write, before.last)
        at = step.timestamp
        unknown = at if write.is_unknown else before.unknown
        bounded = at if write.is_bounded else before.bounded
        turn.put(k.table_key(step.stream), TableRow(at, unknown, bounded))
        if turn.state.locks.count:
            hold_against(turn, step.stream, write, step.txn_id)


def written(turn: Turn, step: StreamCommit, taken: Iterable[Taken]) -> Write:
    """The writes of a merge to a table: its events, and the runs that it takes."""
    digests = (
        digest
        for source, runs in taken
        for digest in turn.index.digests(step.stream, source, step.txn_id, runs)
    )
    return write_of(step, digests)


def hold_against(turn: Turn, table: str, write: Write, by: bytes) -> None:
    """Check a commit against the registered locks of a table, and log with it the locks that it breaks.

    A transaction with a broken lock is aborted if it touched a stream, or is committing; one that only reads
    continues.
    """
    for txn_id, broken in sorted(turn.state.locks.broken(table, write, by).items()):
        txn = turn.open(txn_id)
        if txn.row.broken is not None:
            continue
        turn.put(k.txn_key(txn_id), txn.row._replace(broken=broken))
        # A staged merge can't be aborted, and need not be: commits that would break its frozen locks wait.
        acts = txn.participants or txn.pending is not None
        if acts and TRANSACTIONS.moves(txn.row.state, "begin_abort"):
            abort_txn(turn, txn_id, broken_text(broken))


def judge(turn: Turn, command: OneShot) -> Revalidate | None:
    """None if all locks hold until now; else the answer that asks the client to revalidate. Puts nothing.

    Raises: InvalidArgument, NotAuthorized, UnknownStream, CrossScope.
    """
    limits.LOCKS.check(count_of(command.locks), "a transaction")
    check_locks(turn, command.locks)
    state, windows = turn.state, turn.windows
    for locks in command.locks:
        asks = locks.points or locks.ranges
        if asks and not windows.holds(locks, state.tables[locks.table].last):
            return Revalidate(turn.hybrid_time, table_times(turn, named(command.locks)))
    return None


def named(locks: Iterable[TableLocks]) -> list[str]:
    """The tables of these locks."""
    return [each.table for each in locks]


def table_times(turn: Turn, tables: Iterable[str]) -> tuple[TableTime, ...]:
    """The newest commits of these tables, including those of this round so far."""
    known = turn.state.tables
    return tuple(TableTime(table, known[table].last) for table in tables if table in known)


def check_table(turn: Turn, table: str) -> None:
    """`InvalidArgument`: the stream is no table; `UnknownStream`, `StreamLost`, `NotAuthorized`."""
    check_right(turn.state, turn.lane, Right.SAFE_TIME, table)
    STREAMS.judge(state_of(turn.state.streams.get(table)), "use", limits.cut(table))
    if table not in turn.state.tables:
        raise InvalidArgument(f"{table} is no table: make one with `create_table`")


def check_locks(turn: Turn, locks: Sequence[TableLocks]) -> None:
    """Raise `InvalidArgument` for malformed locks, `NotAuthorized` for tables that the lane may not read."""
    if not _rise(named(locks)):
        raise InvalidArgument("locks name each table once, in rising order")
    for each in locks:
        check_table(turn, each.table)
        if not 0 <= each.last <= each.since <= turn.hybrid_time:
            raise InvalidArgument(
                f"locks on {each.table} since {each.since}, its newest commit {each.last}: `since` is a time that "
                f"a controller's reply ({turn.hybrid_time} at most), and `last` is not above it"
            )
        if not _rise(each.points) or not _apart(each.ranges):
            raise InvalidArgument(
                f"locks on {each.table}: points rise; ranges rise, don't meet, and each ends above its beginning"
            )


def _rise(values: Sequence[str | int]) -> bool:
    return all(map(lt, values, values[1:]))


def _apart(ranges: Sequence[LockedRange]) -> bool:
    if any(each.high is not None and each.low >= each.high for each in ranges):
        return False
    return all(a.high is not None and a.high < b.low for a, b in pairwise(ranges))
