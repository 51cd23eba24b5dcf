"""Decisions on prepared transactions, whose coordinator (a database, a program) decides later (`docs/prepared.md`).

All checks that can fail are made before PREPARED is logged; from then on writers, name, number and journals are
fixed, and only the coordinator's decision, or an operator's force, ends the transaction. After a decision to commit
there is no abort: a refused merge is tried again, and a LOST stream is left out. A PREPARED transaction has no
timestamp, so no reader and no other commit waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from hashlib import sha256
from hmac import compare_digest

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core.decisions import quotas
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import Weighed
from anabranch.core.memory import is_gone
from anabranch.core.state import OpenTxn, State
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.errors import count_of
from anabranch.protocol import limits
from anabranch.protocol.ids import SECRET_SIZE, TXN_ID_SIZE, txn_text
from anabranch.protocol.schemas import records as r

MAX_ATTEMPT = 64  # bytes
# In the row with the events of a one-shot over several control partitions. No command can have this: there, `by` is
# a hash or empty.
SHOT = r.Prepare(b"one-shot", b"")


def check_arguments(command: r.Commit) -> None:
    """`InvalidArgument` for impossible arguments of a commit that concern a coordinator."""
    if command.secret is not None and len(command.secret) != SECRET_SIZE:
        raise errors.InvalidArgument(f"a coordinator's secret has {SECRET_SIZE} bytes")
    if command.prepare is not None:
        check_coordinator(command.prepare)


def check_coordinator(prepare: r.Prepare) -> None:
    """`InvalidArgument` unless the hash and the attempt have legal sizes."""
    if len(prepare.by) not in (0, 32) or len(prepare.attempt) > MAX_ATTEMPT:
        raise errors.InvalidArgument(
            f"`by` is a SHA-256, 32 bytes, or empty; an attempt has up to {MAX_ATTEMPT} bytes"
        )


def proves(row: r.PreparedRow | None, secret: bytes | None) -> bool:
    """Whether a secret has the hash with which the transaction was prepared."""
    if row is None or secret is None or not row.prepare.by:
        return False
    return compare_digest(sha256(secret).digest(), row.prepare.by)


def proven_by(turn: Turn, secret: bytes | None) -> Callable[[r.TxnRow], bool]:
    """The argument ``proven`` of `Turn.transaction`: the coordinator's secret replaces a token."""
    return lambda row: proves(turn.state.prepared_row(row.txn_id), secret)


def check_word(turn: Turn, txn_id: bytes, secret: bytes | None) -> None:
    """`NotAuthorized` if the transaction was prepared with a secret's hash, and this is not the secret."""
    row = turn.state.prepared_row(txn_id)
    if row is not None and row.prepare.by and not proves(row, secret):
        raise errors.NotAuthorized(
            f"transaction {txn_text(txn_id)} is prepared for a ledger, whose word alone ends it: `anabranch ledger "
            "recover`, or for an operator `anabranch txn force --outcome`"
        )


def check_abort(turn: Turn, row: r.TxnRow, command: r.Abort) -> None:
    """Refuse an abort of a PREPARED transaction that does not come from its coordinator.

    Such an abort lacks the secret with which the transaction was prepared, or has a bare id and comes from another
    lane. Raises: NotAuthorized, IllegalState.
    """
    check_word(turn, row.txn_id, command.secret)
    proven = proves(turn.state.prepared_row(row.txn_id), command.secret)
    if len(command.token) == TXN_ID_SIZE and turn.lane != row.owner and not proven:
        raise errors.IllegalState(
            f"transaction {txn_text(row.txn_id)} is PREPARED, and its coordinator may have decided: if it is gone "
            "for good, `anabranch txn force --outcome`; nothing was changed"
        )


def check_same(turn: Turn, row: r.TxnRow, prepare: r.Prepare) -> None:
    """Refuse a prepare of a transaction that is not open, unless it repeats the one that prepared it.

    Raises: IllegalState (another attempt prepared the transaction), AlreadyCommitted, OutcomeUnknown (it commits
    without a prepare).
    """
    before = turn.state.prepared_row(row.txn_id)
    if before is None and row.state == "COMMITTED":
        raise errors.AlreadyCommitted("the transaction is committed, and was not prepared for that")
    if before is None and row.state not in ("ABORT_IN_PROGRESS", "ABORTED"):
        raise errors.OutcomeUnknown(
            "another commit of this transaction is under way: ask for the outcome"
        )
    if before is not None and before.prepare != prepare:
        raise errors.IllegalState(
            f"transaction {txn_text(row.txn_id)} was prepared by another attempt: ask for its outcome; "
            "nothing was changed"
        )


def check_ending(txn: OpenTxn, command: r.Commit, behind: list[int]) -> None:
    """Refuse a commit that differs from what was prepared. ``behind``: writers of which the commit has more events.

    Raises: InvalidArgument, IllegalState.
    """
    claim, pending = (command.name, command.number), txn.pending
    prepared = (txn.row.name, None) if pending is None else (pending.name, pending.number)
    if claim not in ((None, None), prepared):
        raise errors.InvalidArgument("the transaction was prepared with another name or number")
    moves = None if pending is None else pending.consumed
    if command.consumed != moves and (command.consumed is not None or command.prepare is not None):
        raise errors.InvalidArgument("the transaction was prepared with other positions")
    if behind:
        raise errors.IllegalState(
            "the transaction was prepared without some of these receipts: they can't be added; nothing was changed"
        )


def held(txn_id: bytes, what: str) -> errors.ReservedByPrepared:
    """The error for a name or series that a PREPARED transaction reserves."""
    return errors.ReservedByPrepared(
        f"{what} is held by prepared transaction {txn_text(txn_id)}: it has to be ended first; nothing was changed"
    )


def check_count(turn: Turn, lane: str) -> None:
    """Raise `TooManyTransactions` if all lanes, or this lane, are at the limit of PREPARED transactions."""
    limit = limits.PREPARED.value
    if len(turn.state.prepared) >= limit:
        raise errors.TooManyTransactions(f"{limit:,} transactions are prepared: end some of them")
    quotas.check_prepared(turn, lane)


def check_room(turn: Turn, txn_id: bytes, weighed: Weighed) -> None:
    """Refuse to prepare a transaction whose merge could fail, or whose journals have no room for it.

    Raises: TooManyUncommittedBytes, EventTooLarge.
    """
    most = turn.settings.max_uncommitted_bytes // 2
    if turn.index.uncommitted.total > most:
        uncommitted = turn.index.uncommitted.size_of((*turn.state.prepared, txn_id))
        if uncommitted > most:
            raise errors.TooManyUncommittedBytes(
                f"prepared transactions would have {uncommitted:,} bytes in journals, {most:,} are allowed: "
                "end some"
            )
    for stream, size in weighed.biggest.items():
        takes = int(turn.state.streams[stream].settings.get(MAX_MESSAGE, limits.MESSAGE.value))
        if size > takes:
            raise errors.EventTooLarge(
                f"a batch of {size:,} bytes is in the journal of {stream}, which takes up to {takes:,} now"
            )


def log_prepared(
    turn: Turn, txn_id: bytes, pending: r.PendingCommitRow | None, row: r.PreparedRow
) -> None:
    """Log how it was prepared. A coordinator decides now, so the pending commit has no deadline and no askers."""
    if pending is not None:
        kept = pending._replace(askers=(), deadline_ms=0, decided=True)
        turn.put(k.pending_key(txn_id), kept)
    turn.put(k.prepared_key(txn_id), row)


def leave_out_lost(turn: Turn, txn_id: bytes, txn: OpenTxn) -> bool:
    """Leave LOST streams out of a prepared transaction that commits; its outcome names them. False: try later."""
    pending = txn.pending
    if pending is None or pending.prepare is None:
        return True
    gone = {s for s in txn.participants if is_gone(turn.state, s)}
    if not any(stream in gone for _, stream, _ in txn.due):
        return True
    if txn_id in turn.memory.staging:
        return False  # a chunk is being copied
    leave_out(turn, txn_id, gone, "their stream is LOST")
    return True


def leave_out(turn: Turn, txn_id: bytes, gone: Collection[str], why: str) -> None:
    """Commit a prepared transaction without the events of these streams; its outcome says so, and ``why``."""
    txn = turn.open(txn_id)
    pending = txn.pending
    if pending is None:
        raise errors.InvariantViolation(
            "a prepared transaction lost the row that names its writers"
        )
    lost = {e for receipt in pending.writers for e in receipt.extents if e.stream in gone}
    writers = tuple(
        replace(one, extents=tuple(e for e in one.extents if e.stream not in gone))
        for one in pending.writers
    )
    turn.put(k.pending_key(txn_id), pending._replace(writers=writers))
    left_out = sum(e.count for e in lost)
    if (kept := shot_of(turn.state, txn_id)) is not None:
        rest = tuple(event for event in kept.events if event.stream not in gone)
        left_out += len(kept.events) - len(rest)
        turn.put(k.prepared_key(txn_id), replace(kept, events=rest))
    turn.put(k.txn_key(txn_id), without(txn.row, left_out, gone, why))
    for (stream, number), staged in list(txn.staged_merges.items()):
        if stream in gone:
            turn.put(k.staged_merge_key(txn_id, stream, number), None)
            # No history may ever name the chunks there, even if the stream is recovered.
            turn.put(
                k.retired_key(stream, staged.partition), r.RetiredRow(stream, staged.partition)
            )


def without(
    row: r.TxnRow, events: int, gone: Collection[str], why: str = "their stream is LOST"
) -> r.TxnRow:
    """The row of a transaction that commits without the streams ``gone``, which have this number of events."""
    said = f"{count_of(events, 'event')} left out, as {why}: {', '.join(sorted(gone))}"
    return row._replace(
        committed=row.committed - events, left_out=row.left_out + events, reason=limits.cut(said)
    )


def shot_of(state: State, txn_id: bytes) -> r.PreparedRow | None:
    """The row with the events of a one-shot over several control partitions; None: no such one, or merged here."""
    row = state.prepared_row(txn_id)
    return row if row is not None and row.prepare == SHOT else None


def give_back(turn: Turn, txn: OpenTxn) -> None:
    """Drop the events that a row keeps, because the transaction is aborted."""
    txn_id = txn.row.txn_id
    if (txn.partitions or txn.promised is not None) and shot_of(turn.state, txn_id) is not None:
        turn.put(k.prepared_key(txn_id), None)
    elif txn.row.state == "PREPARED":
        drop_events(turn, txn_id)


def drop_events(turn: Turn, txn_id: bytes) -> r.PreparedRow | None:
    """Put the row of a PREPARED transaction that ends, without its events. Returns what is left of it."""
    row = turn.state.prepared_row(txn_id)
    if row is not None and row.events:
        row = r.PreparedRow(row.prepare, row.prepared_ms)
        turn.put(k.prepared_key(txn_id), row)
    return row


def needed(state: State, pending: r.PendingCommitRow) -> tuple[r.Receipt, ...]:
    """The receipts of a decided commit; if it was prepared, without its LOST streams, which are not read."""
    if pending.prepare is None:
        return pending.writers
    return tuple(
        replace(one, extents=tuple(e for e in one.extents if not is_gone(state, e.stream)))
        for one in pending.writers
    )


def prepared_of_name(turn: Turn, scope: str, name: str | None) -> r.TxnRow | None:
    """The PREPARED transaction that has a name, or None."""
    holder = turn.state.holder(scope, name) if name is not None else None
    if holder is None or holder not in turn.state.prepared:
        return None
    return turn.state.open[holder].row
