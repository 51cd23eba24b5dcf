"""Decisions on a transaction's life, except its commit: begin, touch, heartbeat, abort, resolve.

To *touch* is to add a stream to a transaction; to *resolve*, to ask for the outcome of an unanswered commit. The
last part is about time: transactions without heartbeats are aborted, and old outcomes forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest

from anabranch import errors
from anabranch.core import derivations, work
from anabranch.core import rows as k
from anabranch.core.authorize import EVERYWHERE, Right, check_right, check_writes
from anabranch.core.decisions import claims, positions, prepared, quotas
from anabranch.core.decisions.scopes import active_stream, check_leads, check_served, check_snapshot
from anabranch.core.decisions.turn import DAY_MS, FORGOTTEN, Turn, is_finished, refuse
from anabranch.core.decisions.writers import check_room, put_receipt
from anabranch.core.memory import Keepalives
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.core.transaction_states import TRANSACTIONS, Op, born, locks_broken
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.ids import (
    HASH_SIZE,
    control_partition_of,
    is_marked,
    made_ms_of,
    txn_text,
)
from anabranch.protocol.legal_names import check_name, check_scope, is_state
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import SEE, Rights, peek

MIN_KEEPALIVE_MS = 1000


def begin(turn: Turn, command: r.Begin, to: ReplyTo | None) -> None:
    """Begin a transaction, or answer a repeated begin.

    If a committed or prepared transaction has the name, the answer is its outcome.
    """
    for one in ARGUMENTS:
        one(turn, command)
    known = turn.state.txn_row(command.txn_id)
    if known is not None:
        _begin_again(turn, known, command, to)
        return
    turn.check_new_id(command.txn_id)
    earlier = prepared.prepared_of_name(turn, command.scope, command.name)
    if earlier is None or earlier.owner != turn.lane:
        earlier = earlier_outcome(turn, command.scope, command.name, turn.lane)
    if earlier is not None:
        turn.answer(to, earlier)
        return
    for one in LIMITS:
        one(turn, command)
    supersede(turn, command.scope, command.name, command.txn_id)
    row = born(
        "begin",
        command.txn_id,
        turn.wall_ms,
        scope=command.scope,
        name=command.name,
        keepalive_ms=command.keepalive_ms,
        secret=command.secret,
        owner=turn.lane,
        consumes=command.fencing_hash,
        snapshot=command.snapshot,
    )
    turn.put(k.txn_key(command.txn_id), row)
    turn.hear(command.txn_id)
    turn.reply(to, r.Begun(row.txn_id, row.keepalive_ms, row.begun_ms))


def _begin_again(turn: Turn, row: r.TxnRow, command: r.Begin, to: ReplyTo | None) -> None:
    instead = _gave_way_to(turn, row)
    if instead is not None:
        turn.reply(to, instead)
        return
    TRANSACTIONS.judge(row.state, "begin", row.reason)
    # The transaction may have begun without a name, and its commit claimed one.
    name = row.name if row.state == "OPEN" or command.name is not None else None
    moves = row.consumes if row.state == "OPEN" else command.fencing_hash
    before = row.scope, name, row.keepalive_ms, moves, row.snapshot
    if before != (
        command.scope, command.name, command.keepalive_ms, command.fencing_hash, command.snapshot,
    ):  # fmt: skip
        raise errors.InvalidArgument(
            "the transaction id is in use with other arguments: make a new one"
        )
    if is_finished(row):
        turn.answer(to, row)
        return
    # Lists show the id and all arguments: only the secret proves that the sender began it.
    if row.secret is None or not compare_digest(row.secret, command.secret):
        raise errors.NotAuthorized(
            "the transaction was begun with another secret: hand on its reservation, or its token"
        )
    turn.hear(command.txn_id)
    turn.reply(to, r.Begun(row.txn_id, row.keepalive_ms, row.begun_ms))


def _check_mark(turn: Turn, command: r.Begin) -> None:
    if is_marked(command.txn_id):
        raise errors.InvalidArgument(
            "ids like this one are of one-shots that move positions: make another one"
        )


def _check_snapshot(turn: Turn, command: r.Begin) -> None:
    if not 0 <= command.snapshot <= turn.hybrid_time:
        raise errors.InvalidArgument(
            f"snapshot {command.snapshot}: a hybrid time of a controller's reply"
        )


def _check_positions(turn: Turn, command: r.Begin) -> None:
    if command.fencing_hash is not None and (
        command.name or len(command.fencing_hash) != HASH_SIZE
    ):
        raise errors.InvalidArgument(
            f"a transaction that moves positions has no name; its fencing hash has {HASH_SIZE} bytes"
        )


def _check_keepalive(turn: Turn, command: r.Begin) -> None:
    if not MIN_KEEPALIVE_MS <= command.keepalive_ms <= turn.settings.max_keepalive_ms:
        raise errors.InvalidArgument(
            f"keepalive {command.keepalive_ms:,} ms is not within {MIN_KEEPALIVE_MS:,} and "
            f"{turn.settings.max_keepalive_ms:,}"
        )


# The checks of a begin, in their order; a new check is one more entry. `ARGUMENTS` also apply to a repeated begin,
# `LIMITS` apply to a new transaction alone.
ARGUMENTS: tuple[Callable[[Turn, r.Begin], None], ...] = (
    lambda turn, command: check_served(turn, command.scope),
    lambda turn, command: check_id_partition(turn, command.txn_id),
    lambda turn, command: check_name(command.name),
    _check_mark,
    _check_snapshot,
    _check_positions,
    _check_keepalive,
)
LIMITS: tuple[Callable[[Turn, r.Begin], None], ...] = (
    lambda turn, command: check_snapshot(turn, command.scope, command.snapshot),
    lambda turn, command: check_open(turn, _replaces_open(turn, command)),
    lambda turn, command: quotas.check_keepalive(turn, turn.lane, command.keepalive_ms),
    lambda turn, command: check_uncommitted(turn, turn.lane),
)


def _gave_way_to(turn: Turn, row: r.TxnRow) -> r.Outcome | None:
    """The outcome of the earlier commit to which this transaction's commit gave way; None if it did not."""
    aborted = row.state in ("ABORT_IN_PROGRESS", "ABORTED")
    yielded = turn.state.yielded(row.txn_id) if aborted else None
    return None if yielded is None else claims.answer(turn, yielded, row)


def check_open(turn: Turn, replaced: int = 0) -> None:
    """Raise `TooManyTransactions` if the control partition, or the lane, is at its limit of open transactions.

    ``replaced``: the number of open transactions that the new transaction would end; they are not counted.
    """
    if len(turn.state.open) - replaced >= turn.settings.max_open:
        raise errors.TooManyTransactions(
            f"{turn.settings.max_open:,} transactions are open: wait for some to end"
        )
    quotas.check_open(turn, turn.lane, 1 - replaced)


def _replaces_open(turn: Turn, command: r.Begin) -> bool:
    return (
        command.name is not None
        and turn.state.holder(command.scope, command.name) in turn.state.open
    )


def check_uncommitted(turn: Turn, lane: str, txn_id: bytes | None = None) -> None:
    """Raise `TooManyUncommittedBytes` if this transaction, the lane's transactions, or all are at their limit."""
    quotas.check_uncommitted(turn, lane, txn_id)
    uncommitted, limit = turn.index.uncommitted.total, turn.settings.max_uncommitted_bytes
    if uncommitted >= limit:
        raise errors.TooManyUncommittedBytes(
            f"open transactions have {uncommitted:,} bytes in journals, {limit:,} are allowed: commit or abort "
            "some, or wait for some to end"
        )


def check_id_partition(turn: Turn, txn_id: bytes) -> None:
    """`InvalidArgument` unless the id's first two bytes name this control partition."""
    if control_partition_of(txn_id) != turn.settings.control_partition:
        raise errors.InvalidArgument(
            f"the transaction id names control partition {control_partition_of(txn_id)}; "
            f"this is {turn.settings.control_partition}"
        )


def earlier_outcome(turn: Turn, scope: str, name: str | None, owner: str) -> r.TxnRow | None:
    """The committed transaction of that name; None if the lane ``owner`` may give the name to a new one.

    Raises: NotReady (a transaction of that name is being committed), ReservedByPrepared, NameTaken (another lane's
    transaction has the name, open or committed), NotAuthorized (the name is free, and the lane may not take it).
    """
    if name is None:
        return None
    holder = turn.state.holder(scope, name)
    row = turn.state.txn_row(holder) if holder is not None else None
    if row is None or row.state in ("ABORT_IN_PROGRESS", "ABORTED"):
        claims.check_free(turn, owner, scope, name)
        return None
    if row.owner != owner:
        raise claims.taken(scope, name)
    if row.state == "OPEN":
        return None
    if row.state == "COMMITTED":
        return row
    if row.state == "PREPARED":
        raise prepared.held(row.txn_id, f"the name {name!r}")
    raise errors.NotReady(
        "a transaction of that name is being committed: ask again for its outcome"
    )


def supersede(turn: Turn, scope: str, name: str | None, txn_id: bytes) -> None:
    """Give the name to this transaction, and abort an open transaction that has the name."""
    if name is None:
        return
    holder = turn.state.holder(scope, name)
    if holder is not None and holder != txn_id and holder in turn.state.open:
        abort_txn(turn, holder, f"superseded by a newer transaction named {name!r}")
    turn.put(k.name_key(scope, name), r.NameRow(txn_id))


def touch(turn: Turn, command: r.Touch, to: ReplyTo | None) -> None:
    """Add a stream, and a writer unless ``command.writer`` is 0.

    The first touch of a stream pins its reference epoch for all writers of the transaction.
    """
    row = turn.transaction(command.token, Rights.WRITE, anywhere=turn.settings.across)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    turn.hear(row.txn_id)  # its client is alive, even if the touch is refused
    if row.broken is not None:
        raise locks_broken(row.broken)
    if row.txn_id not in turn.state.promised:
        check_leads(turn, command.stream)
    check_writes(turn.state, row, (command.stream,))
    derivations.check(turn.state, command.stream, command.derivations)
    if is_state(command.stream) and row.consumes is None:
        raise errors.InvalidArgument(f"{command.stream}: {positions.STATE_IS_MOVED}")
    stream = active_stream(turn, command.stream)
    txn = turn.open(row.txn_id)
    begins = command.writer and command.writer not in txn.writers  # a new writer
    receipt = r.Receipt(row.txn_id, command.writer, 0, False, ())
    if begins:
        check_room(turn, txn, (receipt,))
        quotas.check_uncommitted(turn, row.owner, row.txn_id)
    if command.stream not in txn.participants:
        check_uncommitted(turn, row.owner, row.txn_id)
        epoch = stream.reference_epoch
        turn.put(
            k.participant_key(row.txn_id, command.stream), r.ParticipantRow(command.stream, epoch)
        )
        journal_op(turn, command.stream, r.JournalOp("BEGIN_TXN", row.txn_id, epoch, 0))
    if begins:
        put_receipt(turn, receipt, turn.lane)
    turn.reply(to, touched(turn, row.txn_id, command.stream))


def touched(turn: Turn, txn_id: bytes, stream: str) -> r.Touched:
    """The answer to a touch: where the transaction writes, and what it has locked."""
    pinned, state = turn.open(txn_id).participants[stream], turn.state
    row = state.locked.get(stream, {}).get(txn_id)
    return r.Touched(
        stream,
        pinned,
        state.layout(stream, pinned),
        stream in state.tables,
        stream in state.exclusive,
        () if row is None else row.locked,
    )


def journal_op(turn: Turn, stream: str, op: r.JournalOp) -> None:
    """Append a `JournalOp` to a stream's journal, on the lowest partition of the active segments.

    No decision depends on the record, so it is omitted while the stream's topics can't be written.
    """
    if not turn.usable(stream):
        return
    row = turn.state.streams[stream]
    turn.round.ops.append((stream, min(s.partition for s in row.segments), op))


def heartbeat(turn: Turn, command: r.Heartbeat, to: ReplyTo | None) -> None:
    """Note signs of life. Heartbeats of ended transactions, and refused tokens, get an answer; others get none."""
    limits.TOKENS.check(len(command.tokens), "a heartbeat")
    turn.charge(work.LOOK * (len(command.tokens) - 1))
    gone = []
    refused: errors.AnabranchError | None = None
    for data in command.tokens:
        try:
            row = turn.transaction(data, Rights.HEARTBEAT)
        except (errors.InvalidToken, errors.NotAuthorized, errors.Expired) as error:
            refused = error  # the other tokens still count
            continue
        if row.state not in ("ABORT_IN_PROGRESS", "ABORTED", "COMMITTED"):
            turn.hear(row.txn_id)
            helpers = turn.keepalives.helpers.get(row.txn_id, ())
            if turn.lane not in (row.owner, *helpers) and len(helpers) < limits.HELPERS.value:
                turn.keepalives.helpers.put(row.txn_id, (*helpers, turn.lane))
        elif to is not None:
            gone.append(turn.outcome(row, full=False))
    if gone:
        turn.reply(to, r.Ended(tuple(gone)))
    elif refused is not None:
        raise refused


def abort(turn: Turn, command: r.Abort, to: ReplyTo | None) -> None:
    """Abort a transaction for a client, a coordinator or an operator."""
    row = turn.transaction(
        command.token, Rights.ABORT, proven=prepared.proven_by(turn, command.secret)
    )
    if row.state == "COMMITTED":
        raise errors.AlreadyCommitted("the transaction is committed: there is no abort any more")
    if row.state == "PREPARED":
        prepared.check_abort(turn, row, command)
    if TRANSACTIONS.judge(row.state, "begin_abort", row.reason) is not None:
        if turn.lane != row.owner:  # audited even with a token: the owner did not ask for this
            turn.audit(command, f"{txn_text(row.txn_id)} of {row.owner}: {command.reason!r}")
        abort_txn(turn, row.txn_id, command.reason or "aborted by a client")
    turn.answer(to, turn.row(row.txn_id))


def abort_txn(turn: Turn, txn_id: bytes, reason: str, *, op: Op = "begin_abort") -> None:
    """Abort an open transaction by a legal ``op``, and answer the askers of its commit."""
    txn = turn.open(txn_id)
    if txn.row.state == "ABORT_IN_PROGRESS":
        return  # its participants follow
    check(
        txn.pending is not None or not _is_held(txn),
        "a decided commit lost the row that says what to give back",
    )
    reason = limits.cut(reason)
    row = turn.move(txn.row, op, reason=reason, finished_ms=turn.wall_ms)
    rejected = turn.rejected(txn.row)
    row = row._replace(rejected=rejected, committed=0, left_out=0)
    if not txn.partitions:
        row = turn.move(row, "finalize_abort")
    for stream, epoch in sorted(txn.participants.items()):
        journal_op(turn, stream, r.JournalOp("ABORT_TXN", txn_id, epoch, 0))
    for give_back in GIVE_BACK:
        give_back(turn, txn)
    if row.broken is None:
        end_pending(
            turn, txn_id, errors.TransactionAborted(f"the transaction is aborted ({reason})")
        )
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, turn.outcome(row, lane=to.lane))
    if txn.partitions:
        turn.put(
            k.txn_key(txn_id), row
        )  # ABORTED when all participants are (`core.decisions.across`)
    else:
        finish(turn, row)


def _is_held(txn: OpenTxn) -> bool:
    """Whether a transaction may hold tasks, or a number. One that was prepared in one command has a pending commit
    only if it moves positions.
    """
    state = txn.row.state
    in_one_command = state == "PREPARED" and not txn.writers
    return (
        state in ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "PREPARED") and not in_one_command
    )


# A decided or prepared transaction holds these parts (`core.parts`), and gives them back if it is aborted. Its
# locks need no entry: they are rows, which are deleted when it ends.
GIVE_BACK: tuple[Callable[[Turn, OpenTxn], None], ...] = (
    lambda turn, txn: claims.give_back(turn, txn),
    lambda turn, txn: prepared.give_back(turn, txn),
    lambda turn, txn: positions.give_back(turn, txn),
)


def end_pending(turn: Turn, txn_id: bytes, error: errors.AnabranchError | None) -> list[ReplyTo]:
    """Delete the pending commit, answer its askers with the error if there is one, and return them."""
    pending = turn.open(txn_id).pending
    if pending is None:
        return []
    waiting = [ReplyTo.of(each) for each in pending.askers]
    turn.put(k.pending_key(txn_id), None)
    if error is not None:
        for to in waiting:
            turn.reply(to, refuse(error))
    return waiting


def answer_pending(turn: Turn, txn_id: bytes, result: object) -> None:
    """Answer the askers of a decided commit. Its row stays, as it says what an abort has to give back."""
    pending = turn.open(txn_id).pending
    if pending is not None and pending.askers:
        for each in pending.askers:
            turn.reply(ReplyTo.of(each), result)
        turn.put(k.pending_key(txn_id), pending._replace(askers=()))


def answer_decided(turn: Turn, row: r.TxnRow) -> None:
    """Answer those askers of a commit that wait for its decision alone: ``row`` is FINALIZE_IN_PROGRESS."""
    pending = turn.open(row.txn_id).pending
    if pending is not None and any(each.decided for each in pending.askers):
        for each in pending.askers:
            if each.decided:
                turn.answer(ReplyTo.of(each), row)
        others = tuple(each for each in pending.askers if not each.decided)
        turn.put(k.pending_key(row.txn_id), pending._replace(askers=others))


def finish(turn: Turn, row: r.TxnRow) -> None:
    """Put a finished transaction's row, and delete the rows that only an open transaction needs."""
    for key in turn.index.forget(turn.state, row.txn_id):
        turn.state.keep(key, None)
    txn = turn.open(row.txn_id)
    drop_locks(turn, row.txn_id)
    for stream, number in list(txn.staged_merges):
        turn.put(k.staged_merge_key(row.txn_id, stream, number), None)
    for stream, partition, at in list(txn.moved):
        turn.put(k.moved_key(row.txn_id, stream, partition, at), None)
    turn.put(k.txn_key(row.txn_id), row)
    for stream, epoch in txn.participants.items():
        drop_epoch(turn, stream, epoch)
    if turn.holds.in_use:
        turn.holds.give_up(row.txn_id)
    turn.ended.append(row.txn_id)


def drop_locks(turn: Turn, txn_id: bytes) -> None:
    """Delete the rows of a transaction's locks and reads, which it needs no more."""
    for writer, sequence in turn.state.locks.of(txn_id).numbers():
        turn.put(k.read_lock_key(txn_id, writer, sequence), None)
    if txn_id in turn.state.locks.named:
        turn.put(k.reads_key(txn_id), None)


def drop_epoch(turn: Turn, stream: str, epoch: int) -> None:
    """Delete a reference epoch's layout unless it is the active layout, or an open transaction writes by it."""
    pins = turn.state.pins.get(stream)
    if not (pins and pins[epoch]) and epoch != turn.state.streams[stream].reference_epoch:
        turn.put(k.epoch_key(stream, epoch), None)


def named_by(command: r.GetState | r.Resolve) -> bytes:
    """The token of a question, or the bare id. `InvalidArgument` if they contradict each other."""
    if command.token is None:
        return command.txn_id
    if peek(command.token).txn_id != command.txn_id:
        raise errors.InvalidArgument("the token is of another transaction than the question")
    return command.token


def resolve(turn: Turn, command: r.Resolve, to: ReplyTo | None) -> None:
    """Answer with the outcome. For an id without a row log ABORTED, so that the answer never changes."""
    check_id_partition(turn, command.txn_id)
    named = named_by(command)
    row = turn.state.txn_row(command.txn_id)
    where = check_scope(command.scope) if command.scope else EVERYWHERE
    if row is not None:
        try:
            row = turn.transaction(named, SEE)
        except errors.UnknownTransaction:
            # The refusal is the same as for a transaction that does not exist.
            check_right(turn.state, turn.lane, Right.WRITE, where)
            raise
    else:
        check_right(turn.state, turn.lane, Right.WRITE, where)
        if is_marked(command.txn_id):
            raise errors.InvalidArgument(
                "a one-shot that moves positions has no outcome of its own: take its tasks; their positions say "
                "whether it is committed"
            )
        if turn.is_forgotten(command.txn_id):
            raise errors.Expired(FORGOTTEN)
        turn.check_new_id(command.txn_id)
        turn.charge(work.KEPT)
        reason = "it was resolved before any other command of it arrived"
        row = born(
            "resolve",
            command.txn_id,
            turn.wall_ms,
            scope=command.scope,
            reason=reason,
            owner=turn.lane,
        )
        turn.put(k.txn_key(command.txn_id), row)
    turn.answer(to, row)


# -- by time: silent transactions are aborted, old outcomes are forgotten --------------------------


AUDIT_MS = 90 * DAY_MS
# The least value of `limits.UNREAD`: a topic of commands may have no leader for some time.
UNREAD_MS = 600_000
_AUDIT_ROWS = 20  # checked each time
# A round forgets this many old outcomes for each one that it adds, so the table does not grow.
PURGE_SHARE = 2
PURGE_ROWS = 2_000  # … and at most this many rows, plus two for each of those outcomes


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
    may_expire = txn.row.state == "OPEN" and txn.pending is None and txn.promised is None
    return silent_ms > txn.row.keepalive_ms and may_expire


def _heartbeats_of(txn: OpenTxn, keepalives: Keepalives) -> set[str]:
    """The lanes by which a transaction's heartbeats may come: its owner, its writers' lanes, and known helpers."""
    helpers = keepalives.helpers.get(txn.row.txn_id, ())
    return {txn.row.owner, *txn.lanes.values(), *helpers}


def _unread(turn: Turn, txn: OpenTxn) -> list[str]:
    """The lanes of a transaction's heartbeats whose commands are not all decided up to the end of its keepalive.

    Blocked lanes are left out, because no leader reads them.
    """
    over_ms = turn.keepalives.last(txn.row.txn_id) + txn.row.keepalive_ms
    lanes = turn.memory.lanes
    names = sorted(_heartbeats_of(txn, turn.keepalives) & lanes.keys())
    return [name for name in names if lanes[name].read_ms <= over_ms]


def _is_stale(turn: Turn, txn: OpenTxn) -> bool:
    """Whether an open transaction has expired, and no heartbeat of the transaction can be unread.

    Lanes that have been unreadable for very long (`limits.UNREAD`) are ignored.
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
        reason = f"stale: no heartbeat for {silent_ms:,} ms"
        if unread := _unread(turn, turn.open(txn_id)):
            reason += f"; commands of {', '.join(unread)} can't be read"
            turn.round.unread.append(f"{txn_text(txn_id)} is aborted: {reason}")
        abort_txn(turn, txn_id, reason, op="expire")


def abort_old(turn: Turn) -> None:
    """Abort open transactions whose snapshots are older than their lanes' quota: tables stay readable for them."""
    for txn_id in sorted(turn.state.locks.named):
        txn = turn.open(txn_id)
        if txn.row.state != "OPEN" or txn.pending is not None or txn.promised is not None:
            continue
        try:
            quotas.check_snapshot(turn, txn.row.owner, txn.row.snapshot)
        except errors.SnapshotExpired as error:
            abort_txn(turn, txn_id, f"its snapshot is too old: {error}", op="expire")


def forget_outcomes(turn: Turn, most: int) -> int | None:
    """Delete the rows of up to ``most`` transactions that ended longer ago than the retention.

    Returns the new `Turn.expired_ms`, or None if that does not change.
    """
    ended_before = turn.wall_ms - turn.settings.retention_ms
    left = PURGE_ROWS + 2 * most
    for txn_id in turn.state.finished_before(ended_before, most):
        row = turn.state.txn_row(txn_id)
        if row is None:
            continue
        keys = turn.state.row_keys(txn_id, left + 1)
        if len(keys) > left:  # many writers: the transaction's own row, the first key, goes last
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
