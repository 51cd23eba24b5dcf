"""Decisions on registered locks: rows that each commit is checked against, in the round that gives its timestamp.

A set of locks is *registered* first: from that round on the controller misses no commit that breaks it. Then a
replica validates it against all commits up to that round, and the client reports this. A later commit that may have
broken a lock, but not for certain, makes another validation necessary. `docs/inside/tables.md` has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from anabranch.core import limits, work
from anabranch.core import rows as k
from anabranch.core.authorize import check_writes, shown
from anabranch.core.decisions import quotas
from anabranch.core.decisions.commits.askers import without_askers
from anabranch.core.decisions.commits.locks import (
    check_locks,
    check_table,
    named,
    table_times,
)
from anabranch.core.decisions.commits.writers import writers_text
from anabranch.core.decisions.scopes import check_readable
from anabranch.core.decisions.transactions import abort_txn, end_pending
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal.receipts import covers
from anabranch.core.read_locks import MOST_BOUNDED, Sets, count_of, held_by
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn
from anabranch.core.tokens import Rights
from anabranch.core.transaction_states import TRANSACTIONS, locks_broken
from anabranch.errors import (
    InvalidArgument,
    TooManyLocks,
    TooMuchLocked,
    WritersUnfinished,
)
from anabranch.schemas.records import (
    Commit,
    ListLocks,
    LockReads,
    PendingCommitRow,
    ReadLockRow,
    ReadsLocked,
    ReadsRow,
    Receipt,
    Revalidate,
    TableLocks,
    TxnRow,
    Validated,
    ValidatedRow,
)

# -- registering ----------------------------------------------------------------------------------------


def lock_reads(turn: Turn, command: LockReads, to: ReplyTo | None) -> None:
    """Register a set of locks. A broken transaction registers none, because it can only continue to read.

    All named tables have to be readable at its snapshot, and stay readable until it ends.
    """
    row = turn.transaction(command.token, Rights.WRITE)
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
    kept = ReadLockRow(command.locks, command.read_from)
    known = sets.rows.get((command.writer, command.sequence))
    if known not in (None, kept):
        raise InvalidArgument(
            "this set of locks is registered with others: give it a higher number"
        )
    turn.charge(work.of_items(len(asked)))
    adds = bool(command.sequence) and known is None and row.broken is None
    if adds:
        _check(turn, row, command, kept)
    turn.hear(row.txn_id)
    put_validated(turn, row.txn_id, validated)
    if fresh:
        named_now = ReadsRow({**reads, **dict.fromkeys(fresh, turn.lane)})
        turn.put(k.reads_key(row.txn_id), named_now)
    if adds:
        turn.put(k.read_lock_key(row.txn_id, command.writer, command.sequence), kept)
        before = validated.get(command.writer) or sets.validated.get(
            command.writer, ValidatedRow(0, 0, 0)
        )
        due = ValidatedRow(
            before.sequence, before.validated_through, max(before.due, turn.hybrid_time)
        )
        turn.put(k.read_lock_key(row.txn_id, command.writer, 0), due)
    turn.reply(to, _locked(turn, row, asked))


def _locked(
    turn: Turn,
    row: TxnRow,
    tables: Iterable[str],
    sequence: int = 0,
    locks: tuple[TableLocks, ...] = (),
) -> ReadsLocked:
    times = table_times(turn, tables)
    return ReadsLocked(
        row.snapshot,
        turn.hybrid_time,
        times,
        shown(turn.state, turn.lane, row.broken),
        sequence,
        locks,
    )


def _check(turn: Turn, row: TxnRow, command: LockReads, kept: ReadLockRow) -> None:
    sets, known = turn.state.locks.of(row.txn_id), turn.open(row.txn_id).writers
    if not row.snapshot:
        raise InvalidArgument(
            "the transaction began without a snapshot: it can't lock what it reads"
        )
    if command.writer == 0 or command.sequence <= sets.last(command.writer):
        raise InvalidArgument(
            f"set {command.sequence} of writer {command.writer}: no writer is 0, and its sets have rising numbers"
        )
    check_locks(turn, command.locks)
    strangers = [source.writer for source in kept.read_from if source.writer not in known]
    if strangers:
        raise InvalidArgument(
            f"a set of locks was read from writer {writers_text(strangers)}, which the transaction has not"
        )
    more = held_by(kept)
    spans = [span for each in command.locks for span in each.ranges]
    size = 8 * (count_of(command.locks) - len(spans)) + sum(
        len(s.low) + len(s.high or b"") for s in spans
    )
    limits.LOCK_BYTES.check(size, "a command that registers locks")
    most = limits.LOCKS.value
    if sets.count + more > most or len(sets.rows) >= most:
        raise TooManyLocks(
            f"the transaction would have {sets.count + more:,} locks and sources of locks, {most:,} are allowed: "
            "lock a range, or read with lock=False"
        )
    most = limits.REGISTERED.value
    if turn.state.locks.count + more > most:
        raise TooMuchLocked(f"{most:,} locks are registered: wait for some transactions to end")
    quotas.check_locks(turn, row.owner, more)
    for each in command.locks:
        if each.ranges:
            _check_ranges(turn, row.owner, each)


def _check_ranges(turn: Turn, lane: str, locks: TableLocks) -> None:
    """`TooMuchLocked` if the lane would have more ranges of the table than its share.

    All lanes with locked ranges have equal shares. A lane that comes later gets its share although the others have
    more than theirs by then; the others get no more.
    """
    has = Counter[str]()
    for txn_id, count in turn.state.locks.ranges(locks.table).items():
        has[turn.open(txn_id).row.owner] += count
    turn.charge(work.of_items(has.total()))
    share = limits.RANGES.value // len({*has, lane})
    if (wanted := has[lane] + len(locks.ranges)) > share:
        raise TooMuchLocked(
            f"lane {lane!r} would have {wanted:,} ranges of {locks.table} locked, {share:,} are its share: wait "
            "for some transactions to end, or lock keys"
        )


def list_locks(turn: Turn, command: ListLocks, to: ReplyTo | None) -> None:
    """List a set of locks, for a client that validates it instead of a process that ended."""
    row = turn.transaction(command.token, Rights.WRITE | Rights.COMMIT)
    rows = turn.state.locks.of(row.txn_id).rows
    later = [s for writer, s in rows if writer == command.writer and s > command.after]
    sequence = min(later, default=0)
    locks = rows[command.writer, sequence].locks if sequence else ()
    turn.reply(to, _locked(turn, row, named(locks), sequence, locks))


# -- validation -----------------------------------------------------------------------------------------


def validated_rows(
    turn: Turn, sets: Sets, validated: Iterable[Validated]
) -> dict[int, ValidatedRow]:
    """How far the locks of writers are validated with these reports. Puts nothing. `InvalidArgument`."""
    found: dict[int, ValidatedRow] = {}
    for report in validated:
        row = found.get(report.writer) or sets.validated.get(report.writer)
        if not 0 <= report.validated_through <= turn.hybrid_time:
            raise InvalidArgument(
                f"{report.validated_through} is no time of a reply: {turn.hybrid_time} is the latest"
            )
        if report.sequence > sets.last(report.writer):
            raise InvalidArgument(
                f"set {report.sequence} of writer {report.writer} is not registered"
            )
        if row is None or report.sequence < row.sequence:
            continue
        through = (
            report.validated_through
            if report.sequence > row.sequence
            else max(row.validated_through, report.validated_through)
        )
        found[report.writer] = ValidatedRow(report.sequence, through, row.due)
    return found


def put_validated(turn: Turn, txn_id: bytes, validated: Mapping[int, ValidatedRow]) -> None:
    """Put what `validated_rows` found."""
    sets = turn.state.locks.of(txn_id)
    for writer, row in validated.items():
        if sets.validated.get(writer) != row:
            turn.put(k.read_lock_key(txn_id, writer, 0), row)


def to_revalidate(
    turn: Turn, txn_id: bytes, validated: Mapping[int, ValidatedRow] = {}
) -> Revalidate | None:
    """The answer to a commit while locks of any writer have to be validated; None: all hold until now."""
    if txn_id in turn.state.locks.frozen:
        return None  # its locks are frozen: commits that may break one wait
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
    return Revalidate(turn.hybrid_time, table_times(turn, sets.tables), tuple(sorted(due)), decided)


def _may_be_broken(turn: Turn, locks: TableLocks, through: int) -> bool:
    """Whether a commit later than ``through`` may have broken one of these locks.

    Commits that break one for certain are logged with the lock's transaction. The table's row has the times of
    possible ones, and the recent writes have their keys, above their reach.
    """
    row = turn.state.tables.get(locks.table)
    if row is None or not (locks.points or locks.ranges):
        return False
    if max(row.unknown, row.bounded if locks.ranges else 0) <= through:
        return False
    turn.charge(work.of_items(MOST_BOUNDED) if locks.ranges else work.LOOK)
    return not turn.windows.spares(locks, through)


def ready_to_merge(turn: Turn, txn_id: bytes) -> bool:
    """Whether a decided transaction may be merged, now that others of the round are.

    If its locks have to be validated, its askers are answered so; it is aborted after a keepalive without a
    command.
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
    pending = txn.pending
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, again)
    if pending is not None:
        turn.put(k.pending_key(txn_id), without_askers(pending))
    return False


def check_commit(
    turn: Turn, txn: OpenTxn, writers: Iterable[Receipt], wanted: Commit | PendingCommitRow
) -> None:
    """Refuse a commit because of what its transaction read.

    Raises: LocksBroken, InvalidArgument (a prepare), WritersUnfinished (a writer that was read from is not taken).
    """
    row, sets = txn.row, turn.state.locks.of(txn.row.txn_id)
    if row.broken is not None:
        raise locks_broken(row.broken)
    if sets.rows and wanted.prepare is not None:
        raise InvalidArgument("a transaction with locks on tables can't be prepared: commit it")
    taken = {receipt.writer: receipt for receipt in writers}
    turn.charge(work.of_items(len(taken) + sets.count))
    missing = {
        source.writer
        for kept in sets.rows.values()
        for source in kept.read_from
        if not _is_taken(taken.get(source.writer), txn.writers.get(source.writer), source.sequence)
    }
    if missing:
        raise WritersUnfinished(
            f"the transaction read what writer {writers_text(missing)} wrote, so its commit has to take that: give "
            "its latest receipt"
        )


def _is_taken(receipt: Receipt | None, known: Receipt | None, sequence: int) -> bool:
    """Whether a commit takes a writer's events up to a receipt of this sequence. ``known``: the registered one."""
    if receipt is None or receipt.sequence >= sequence:
        return receipt is not None
    return known is not None and known.sequence >= sequence and covers(receipt, known)
