"""Decisions that register locks: from then on each commit is checked against them in its round.

A set of locks is *registered* first: from that round on the controller misses no commit that breaks it. Then a
replica validates the set against all commits up to that round, and the client reports this. A later commit that may
have broken a lock, but not for certain, makes another validation necessary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import check_writes, shown
from anabranch.core.decisions import quotas
from anabranch.core.decisions.scopes import check_readable
from anabranch.core.decisions.turn import Turn
from anabranch.core.decisions.writers import writers_text
from anabranch.core.locks.conflicts import (
    check_locks,
    check_table,
    named,
    put_validated,
    table_times,
    validated_rows,
)
from anabranch.core.locks.lock_table import bytes_of, held_by
from anabranch.core.round import ReplyTo
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights


def lock_reads(turn: Turn, command: r.LockReads, to: ReplyTo | None) -> None:
    """Register a set of locks. A transaction with a broken lock can only read, so it registers no lock.

    All named tables have to be readable at the transaction's snapshot, and are kept readable until it ends.
    """
    row = turn.transaction(command.token, Rights.WRITE, anywhere=turn.settings.across)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    check_writes(turn.state, row)
    sets = turn.state.locks.of(row.txn_id)
    validated = validated_rows(turn, sets, command.validated)
    asked = sorted({*named(command.locks), *command.tables})
    for table in asked:
        check_table(turn, table)
    reads = turn.state.locks.named.get(row.txn_id, {})
    fresh = [table for table in asked if table not in reads] if row.snapshot else []
    limits.TABLES.check(len(reads) + len(fresh), "a transaction that reads")
    check_readable(turn, fresh, row.snapshot)
    if fresh:
        quotas.check_snapshot(turn, row.owner, row.snapshot)
    kept = r.ReadLockRow(command.locks, command.read_from)
    known = sets.rows.get((command.writer, command.sequence))
    if known not in (None, kept):
        raise errors.InvalidArgument(
            "this set of locks is registered with others: give it a higher number"
        )
    turn.charge(work.of_items(len(asked)))
    adds = bool(command.sequence) and known is None and row.broken is None
    if adds:
        _check(turn, row, command, kept)
    turn.hear(row.txn_id)
    put_validated(turn, row.txn_id, validated)
    if fresh:
        named_now = r.ReadsRow({**reads, **dict.fromkeys(fresh, turn.lane)})
        turn.put(k.reads_key(row.txn_id), named_now)
    if adds:
        turn.put(k.read_lock_key(row.txn_id, command.writer, command.sequence), kept)
        before = validated.get(command.writer) or sets.validated.get(
            command.writer, r.ValidatedRow(0, 0, 0)
        )
        due = r.ValidatedRow(
            before.sequence, before.validated_through, max(before.due, turn.hybrid_time)
        )
        turn.put(k.read_lock_key(row.txn_id, command.writer, 0), due)
    turn.reply(to, _locked(turn, row, asked))


def _locked(
    turn: Turn,
    row: r.TxnRow,
    tables: Iterable[str],
    sequence: int = 0,
    locks: tuple[r.TableLocks, ...] = (),
) -> r.ReadsLocked:
    times = table_times(turn, tables)
    return r.ReadsLocked(
        row.snapshot,
        turn.hybrid_time,
        times,
        shown(turn.state, turn.lane, row.broken),
        sequence,
        locks,
    )


def _check(turn: Turn, row: r.TxnRow, command: r.LockReads, kept: r.ReadLockRow) -> None:
    sets, known = turn.state.locks.of(row.txn_id), turn.open(row.txn_id).writers
    if not row.snapshot:
        raise errors.InvalidArgument(
            "the transaction began without a snapshot: it can't lock what it reads"
        )
    if command.writer == 0 or command.sequence <= sets.last(command.writer):
        raise errors.InvalidArgument(
            f"set {command.sequence} of writer {command.writer}: no writer is 0, and its sets have rising numbers"
        )
    check_locks(turn, command.locks)
    strangers = [source.writer for source in kept.read_from if source.writer not in known]
    if strangers:
        raise errors.InvalidArgument(
            f"a set of locks was read from writer {writers_text(strangers)}, which the transaction has not"
        )
    more = held_by(kept)
    limits.LOCK_BYTES.check(bytes_of(command.locks), "a command that registers locks")
    most = limits.LOCKS.value
    if sets.count + more > most or len(sets.rows) >= most:
        raise errors.TooManyLocks(
            f"the transaction would have {sets.count + more:,} locks and sources of locks, {most:,} are allowed: "
            "lock a range, or read with lock=False"
        )
    check_room(turn, row.owner, command.locks, more)


def check_room(turn: Turn, lane: str, locks: Iterable[r.TableLocks], more: int) -> None:
    """`TooMuchLocked` unless a lane may register these locks. ``more``: their number, as `held_by`."""
    most = limits.REGISTERED.value
    if turn.state.locks.count + more > most:
        raise errors.TooMuchLocked(
            f"{most:,} locks are registered: wait for some transactions to end"
        )
    quotas.check_locks(turn, lane, more)
    for each in locks:
        if each.ranges:
            _check_ranges(turn, lane, each)


def _check_ranges(turn: Turn, lane: str, locks: r.TableLocks) -> None:
    """`TooMuchLocked` if the lane would have more ranges of the table than its share.

    All lanes with locked ranges have equal shares. A lane that comes later gets its share even if other lanes have
    more than their shares; those lanes get no more ranges then.
    """
    has = Counter[str]()
    for txn_id, count in turn.state.locks.ranges(locks.table).items():
        has[turn.open(txn_id).row.owner] += count
    turn.charge(work.of_items(has.total()))
    share = limits.RANGES.value // len({*has, lane})
    if (wanted := has[lane] + len(locks.ranges)) > share:
        raise errors.TooMuchLocked(
            f"lane {lane!r} would have {wanted:,} of the locked ranges of {locks.table}; its share is {share:,}: "
            "wait for some transactions to end, or lock keys"
        )


def list_locks(turn: Turn, command: r.ListLocks, to: ReplyTo | None) -> None:
    """List a writer's next set of locks, for a client that validates the set after the writer's process ended."""
    rights = Rights.WRITE | Rights.COMMIT
    row = turn.transaction(command.token, rights, anywhere=turn.settings.across)
    rows = turn.state.locks.of(row.txn_id).rows
    later = [s for writer, s in rows if writer == command.writer and s > command.after]
    sequence = min(later, default=0)
    locks = rows[command.writer, sequence].locks if sequence else ()
    turn.reply(to, _locked(turn, row, named(locks), sequence, locks))
