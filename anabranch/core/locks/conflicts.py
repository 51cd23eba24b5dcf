"""Conflicts of commits with locks: no commit may have changed what a transaction read before its own commit.

A commit is checked in two ways: its own locks have to hold (`judge` for a one-shot, `to_revalidate` and
`check_conflicts` for a transaction with registered locks), and its writes break the locks of others (`merge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import lt

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import Right, check_right
from anabranch.core.decisions.transactions import abort_txn, answer_pending
from anabranch.core.decisions.turn import Turn
from anabranch.core.decisions.writers import writers_text
from anabranch.core.journal_runs import StoredRun, covers
from anabranch.core.locks.lock_table import TxnLocks, count_of
from anabranch.core.locks.recent_writes import MOST_BOUNDED
from anabranch.core.locks.table_writes import Write, write_of
from anabranch.core.round import StreamCommit
from anabranch.core.state import OpenTxn
from anabranch.core.stream_states import STREAMS, state_of
from anabranch.core.transaction_states import TRANSACTIONS, broken_text, locks_broken
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.schemas import records as r

Taken = tuple[int, Sequence[StoredRun]]  # runs of a journal partition


def merge(turn: Turn, step: StreamCommit, taken: Iterable[Taken] = ()) -> None:
    """Put a merge into the round. A merge into a table is also added to the recent writes.

    ``taken``: the transaction's runs by journal partition, including those that a staged merge has copied.
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
        turn.recent_writes.add(step.stream, write, before.last)
        at = step.timestamp
        unknown = at if write.is_unknown else before.unknown
        bounded = at if write.is_bounded else before.bounded
        turn.put(k.table_key(step.stream), r.TableRow(at, unknown, bounded))
        if turn.state.locks.count:
            hold_against(turn, step.stream, write, step.txn_id)


def written(turn: Turn, step: StreamCommit, taken: Iterable[Taken]) -> Write:
    """The writes of a merge to a table: its own events, and those of the runs ``taken``."""
    digests = (
        digest
        for source, runs in taken
        for digest in turn.index.digests(step.stream, source, step.txn_id, runs)
    )
    return write_of(step, digests)


def hold_against(turn: Turn, table: str, write: Write, by: bytes) -> None:
    """Find the registered locks of a table that a commit breaks, and log this in the rows of their transactions.

    Such a transaction is aborted if it touched a stream, or is committing. Otherwise it may continue to read. A
    part of another control partition's transaction is never aborted here: its vote is no.
    """
    for txn_id, broken in sorted(turn.state.locks.conflicts(table, write, by).items()):
        txn = turn.open(txn_id)
        if txn.row.broken is not None:
            continue
        turn.put(k.txn_key(txn_id), txn.row._replace(broken=broken))
        # A transaction with frozen locks can't be aborted. Its locks are not broken: commits that would do so wait.
        acts = txn.participants or txn.pending is not None
        if (
            acts
            and txn.promised is None
            and txn_id not in turn.state.locks.frozen
            and TRANSACTIONS.moves(txn.row.state, "begin_abort")
        ):
            abort_txn(turn, txn_id, broken_text(broken))


def judge(
    turn: Turn, locked: Sequence[r.TableLocks], follows: Sequence[r.FollowedRows] = ()
) -> r.Revalidate | None:
    """The answer that asks a sender to revalidate the locks in its command; None: all of them hold. Puts nothing.

    Raises: InvalidArgument, NotAuthorized, UnknownStream, CrossScope.
    """
    more = sum([len(rows.points) for rows in follows])
    limits.LOCKS.check(count_of(locked) + more, "a transaction")
    check_locks(turn, locked)
    if follows:
        _check_followed(turn, locked, follows)
    state, windows = turn.state, turn.recent_writes
    for locks in locked:
        asks = locks.points or locks.ranges
        if asks and not windows.holds(locks, state.tables[locks.table].last):
            return again(turn, locked)
    for rows in follows:
        if not _is_latest(turn, rows):
            return again(turn, locked)
    return None


def _is_latest(turn: Turn, rows: r.FollowedRows) -> bool:
    """Whether the transaction that these rows follow is committed, and certainly no later commit wrote them."""
    row = turn.state.txn_row(rows.txn_id)
    if row is None or (row.state, row.owner) != ("COMMITTED", turn.lane):
        return False
    if not rows.table:
        return True
    at = row.commit_timestamp
    locks = r.TableLocks(rows.table, at, at, rows.points, ())
    return turn.recent_writes.holds(locks, turn.state.tables[rows.table].last)


def _check_followed(
    turn: Turn, locked: Sequence[r.TableLocks], follows: Sequence[r.FollowedRows]
) -> None:
    """Raise `InvalidArgument` for malformed rows. Their tables are those of ``locked``, which are checked.

    Without a table there are no rows, and only the order counts.
    """
    limits.FOLLOWED.check(len(follows), "a transaction")
    turn.charge(work.of_items(len(follows)))
    tables = set(named(locked))
    for rows in follows:
        if not rows.table and not rows.points:
            continue
        if rows.table not in tables:
            raise errors.InvalidArgument(
                f"locks name each table of which rows are followed: {limits.cut(rows.table)} is missing"
            )
        if not _rise(rows.points):
            raise errors.InvalidArgument(f"followed rows of {rows.table}: points rise")


def again(turn: Turn, locked: Sequence[r.TableLocks]) -> r.Revalidate:
    """The answer that asks the sender of a one-shot with these locks to revalidate."""
    return r.Revalidate(turn.hybrid_time, table_times(turn, named(locked)))


def named(locks: Iterable[r.TableLocks]) -> list[str]:
    """The tables of these locks."""
    return [each.table for each in locks]


def table_times(turn: Turn, tables: Iterable[str], at: int = MAX) -> tuple[r.TableTime, ...]:
    """The times of the newest commits to these tables, including commits of this round so far.

    ``at``: the time of the answer. Tables with an entry up to it are left out: they are not complete through that
    time (T3).
    """
    known = turn.state.tables
    if turn.holds.in_use:
        tables = [table for table in tables if turn.holds.safe_time(at, (table,)) == at]
    return tuple(r.TableTime(table, known[table].last) for table in tables if table in known)


def check_table(turn: Turn, table: str) -> None:
    """`InvalidArgument` unless the stream is a table; also `UnknownStream`, `StreamLost`, `NotAuthorized`."""
    check_right(turn.state, turn.lane, Right.SAFE_TIME, table)
    STREAMS.judge(state_of(turn.state.streams.get(table)), "use", limits.cut(table))
    if table not in turn.state.tables:
        raise errors.InvalidArgument(f"{table} is no table: make one with `create_table`")


def check_locks(turn: Turn, locks: Sequence[r.TableLocks]) -> None:
    """Raise `InvalidArgument` for malformed locks, `NotAuthorized` for tables that the lane may not read."""
    if not _rise(named(locks)):
        raise errors.InvalidArgument("locks name each table once, in rising order")
    for each in locks:
        check_table(turn, each.table)
        if not 0 <= each.last <= each.since <= turn.hybrid_time:
            raise errors.InvalidArgument(
                f"locks on {each.table} since {each.since}, its newest commit {each.last}: `since` is a time that "
                f"a controller's reply ({turn.hybrid_time} at most), and `last` is not above it"
            )
        if not _rise(each.points) or not _apart(each.ranges):
            raise errors.InvalidArgument(
                f"locks on {each.table}: points rise; ranges rise, don't meet, and each ends above its beginning"
            )


def _rise(values: Sequence[str | int]) -> bool:
    return all(map(lt, values, values[1:]))


def _apart(ranges: Sequence[r.LockedRange]) -> bool:
    if any(each.high is not None and each.low >= each.high for each in ranges):
        return False
    return all(a.high is not None and a.high < b.low for a, b in pairwise(ranges))


# -- registered locks of a transaction that commits -----------------------------------------------------


def validated_rows(
    turn: Turn, sets: TxnLocks, validated: Iterable[r.Validated]
) -> dict[int, r.ValidatedRow]:
    """The rows that change with a client's reports of validation, by writer. Puts nothing. `InvalidArgument`."""
    found: dict[int, r.ValidatedRow] = {}
    for report in validated:
        row = found.get(report.writer) or sets.validated.get(report.writer)
        if not 0 <= report.validated_through <= turn.hybrid_time:
            raise errors.InvalidArgument(
                f"{report.validated_through} is no time of a reply: {turn.hybrid_time} is the latest"
            )
        if report.sequence > sets.last(report.writer):
            raise errors.InvalidArgument(
                f"set {report.sequence} of writer {report.writer} is not registered"
            )
        if row is None or report.sequence < row.sequence:
            continue
        through = (
            report.validated_through
            if report.sequence > row.sequence
            else max(row.validated_through, report.validated_through)
        )
        found[report.writer] = r.ValidatedRow(report.sequence, through, row.due)
    return found


def put_validated(turn: Turn, txn_id: bytes, validated: Mapping[int, r.ValidatedRow]) -> None:
    """Put what `validated_rows` found."""
    sets = turn.state.locks.of(txn_id)
    for writer, row in validated.items():
        if sets.validated.get(writer) != row:
            turn.put(k.read_lock_key(txn_id, writer, 0), row)


def to_revalidate(
    turn: Turn, txn_id: bytes, validated: Mapping[int, r.ValidatedRow] = {}
) -> r.Revalidate | None:
    """The answer to a commit while locks of some writers have to be validated; None: all locks hold until now.

    ``validated``: rows of `validated_rows` that are not put yet.
    """
    if txn_id in turn.state.locks.frozen:
        return None  # its locks are frozen: commits that may break a lock wait
    sets = turn.state.locks.of(txn_id)
    rows = {**sets.validated, **validated}
    due = {
        w
        for w, row in rows.items()
        if row.sequence < sets.last(w) or row.validated_through < row.due
    }
    turn.charge(work.of_items(len(sets.rows)))
    for (writer, _), kept in sets.rows.items():
        through = rows[writer].validated_through
        if writer not in due and any(_may_be_broken(turn, its, through) for its in kept.locks):
            due.add(writer)
    if not due:
        return None
    pending = turn.open(txn_id).pending
    decided = pending is not None and pending.decided
    return r.Revalidate(
        turn.hybrid_time, table_times(turn, sets.tables), tuple(sorted(due)), decided
    )


def _may_be_broken(turn: Turn, locks: r.TableLocks, through: int) -> bool:
    """Whether a commit later than ``through`` may have broken one of these locks, but not for certain.

    If a commit broke a lock for certain, the row of the lock's transaction names it (`hold_against`). The table's
    row has the times of the latest commits whose keys, or all but the bounds of their keys, are unknown. The recent
    writes have these bounds.
    """
    row = turn.state.tables.get(locks.table)
    if row is None or not (locks.points or locks.ranges):
        return False
    if max(row.unknown, row.bounded if locks.ranges else 0) <= through:
        return False
    turn.charge(work.of_items(MOST_BOUNDED) if locks.ranges else work.LOOK)
    return not turn.recent_writes.spares(locks, through)


def ready_to_merge(turn: Turn, txn_id: bytes) -> bool:
    """Whether a decided transaction may be merged, after the merges of this round so far.

    If its locks have to be revalidated, the answer asks for that; after a keepalive without a command the
    transaction is aborted.
    """
    txn = turn.state.open.get(txn_id)
    if txn is None:
        return False  # an earlier merge of this round broke its locks
    again = to_revalidate(turn, txn_id)
    if again is None:
        return True
    if turn.now_ms - turn.keepalives.last(txn_id) > txn.row.keepalive_ms:
        abort_txn(
            turn, txn_id, "its locks were not revalidated, and other commits may have broken them"
        )
        return False
    answer_pending(turn, txn_id, again)
    return False


@dataclass(slots=True)
class _Reads:
    """The reads of a transaction, and the commit that is checked for it. ``taken``: its receipts by writer."""

    txn: OpenTxn
    locks: TxnLocks
    taken: Mapping[int, r.Receipt]


def check_conflicts(turn: Turn, txn: OpenTxn, writers: Iterable[r.Receipt]) -> None:
    """Refuse a commit because of what its transaction read.

    Raises: LocksBroken, WritersUnfinished (it lacks events that were read).
    """
    locks = turn.state.locks.of(txn.row.txn_id)
    taken = {receipt.writer: receipt for receipt in writers}
    reads = _Reads(txn, locks, taken)
    turn.charge(work.of_items(len(taken) + locks.count))
    for one in CHECKS:
        one(reads)


def _check_broken(reads: _Reads) -> None:
    if reads.txn.row.broken is not None:
        raise locks_broken(reads.txn.row.broken)


def _check_read_from(reads: _Reads) -> None:
    taken, known = reads.taken, reads.txn.writers
    missing = {
        source.writer
        for kept in reads.locks.rows.values()
        for source in kept.read_from
        if not _is_taken(taken.get(source.writer), known.get(source.writer), source.sequence)
    }
    if missing:
        raise errors.WritersUnfinished(
            f"the transaction read what writer {writers_text(missing)} wrote, so its commit has to take that: give "
            "its latest receipt"
        )


# The conflicts that refuse a commit, in order; a new conflict is one more entry.
CHECKS: tuple[Callable[[_Reads], None], ...] = (_check_broken, _check_read_from)


def _is_taken(receipt: r.Receipt | None, known: r.Receipt | None, sequence: int) -> bool:
    """Whether a commit with a receipt takes a writer's events up to a sequence. ``known``: as registered."""
    if receipt is None or receipt.sequence >= sequence:
        return receipt is not None
    return known is not None and known.sequence >= sequence and covers(receipt, known)
