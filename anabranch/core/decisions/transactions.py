"""Decisions on a transaction's life before its commit: begin, touch, register, abort, questions."""

from __future__ import annotations

from hmac import compare_digest

from anabranch.core import limits, work
from anabranch.core import rows as k
from anabranch.core.authorize import EVERYWHERE, Right, check_right, check_writes
from anabranch.core.decisions import quotas
from anabranch.core.decisions.commits import names_and_series as claims
from anabranch.core.decisions.commits import positions, prepared
from anabranch.core.decisions.commits.writers import check_room, put_receipt
from anabranch.core.decisions.scopes import active_stream, check_served, check_snapshot
from anabranch.core.decisions.turn import FORGOTTEN, Turn, is_finished, refuse
from anabranch.core.ids import (
    DIRECTORY,
    HASH_SIZE,
    control_partition_of,
    is_marked,
    txn_text,
)
from anabranch.core.legal_names import check_name, check_scope, is_state, split_stream
from anabranch.core.round import ReplyTo
from anabranch.core.tokens import SEE, Rights, peek
from anabranch.core.transaction_states import TRANSACTIONS, Op, born, locks_broken
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    CrossScope,
    Expired,
    InvalidArgument,
    InvalidToken,
    NotAuthorized,
    NotReady,
    TooManyTransactions,
    TooManyUncommittedBytes,
    TransactionAborted,
    UnknownTransaction,
)
from anabranch.schemas.records import (
    Abort,
    Begin,
    Begun,
    Ended,
    GetState,
    Heartbeat,
    JournalOp,
    NameRow,
    Outcome,
    ParticipantRow,
    Receipt,
    Resolve,
    Touch,
    Touched,
    TxnRow,
)

MIN_KEEPALIVE_MS = 1000


def begin(turn: Turn, command: Begin, to: ReplyTo | None) -> None:
    """Begin, or answer a repeated begin. A committed or prepared name is answered with its transaction."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    if is_marked(command.txn_id):
        raise InvalidArgument(
            "ids like this one are of one-shots that move positions: make another one"
        )
    if not 0 <= command.snapshot <= turn.hybrid_time:
        raise InvalidArgument(f"snapshot {command.snapshot}: a hybrid time of a controller's reply")
    if command.fencing_hash is not None and (
        command.name or len(command.fencing_hash) != HASH_SIZE
    ):
        raise InvalidArgument(
            f"a transaction that moves positions has no name; its fencing hash has {HASH_SIZE} bytes"
        )
    if not MIN_KEEPALIVE_MS <= command.keepalive_ms <= turn.settings.max_keepalive_ms:
        raise InvalidArgument(
            f"keepalive {command.keepalive_ms} ms is not within {MIN_KEEPALIVE_MS} and "
            f"{turn.settings.max_keepalive_ms}"
        )
    row = turn.state.txn_row(command.txn_id)
    if row is not None:
        instead = _gave_way_to(turn, row)
        if instead is not None:
            turn.reply(to, instead)
            return
        TRANSACTIONS.judge(row.state, "begin", row.reason)
        # The transaction may have begun without a name, and its commit claimed one.
        name = row.name if row.state == "OPEN" or command.name is not None else None
        moves = row.consumes if row.state == "OPEN" else command.fencing_hash
        if (row.scope, name, row.keepalive_ms, moves, row.snapshot) != (
            command.scope,
            command.name,
            command.keepalive_ms,
            command.fencing_hash,
            command.snapshot,
        ):
            raise InvalidArgument(
                "the transaction id is in use with other arguments: make a new one"
            )
        if is_finished(row):
            turn.answer(to, row)
        else:
            # Lists show the id and all arguments: only the secret proves that the sender began it.
            if row.secret is None or not compare_digest(row.secret, command.secret):
                raise NotAuthorized(
                    "the transaction was begun with another secret: hand on its reservation, or its token"
                )
            turn.hear(command.txn_id)
            turn.reply(to, Begun(row.txn_id, row.keepalive_ms, row.begun_ms))
        return
    turn.check_new_id(command.txn_id)
    held = prepared.prepared_of_name(turn, command.scope, command.name)
    earlier = (
        held
        if held is not None and held.owner == turn.lane
        else earlier_outcome(turn, command.scope, command.name, turn.lane)
    )
    if earlier is not None:
        turn.answer(to, earlier)
        return
    check_snapshot(turn, command.scope, command.snapshot)
    check_open(turn, _replaces_open(turn, command))
    quotas.check_keepalive(turn, turn.lane, command.keepalive_ms)
    check_uncommitted(turn, turn.lane)
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
    turn.reply(to, Begun(row.txn_id, row.keepalive_ms, row.begun_ms))


def _gave_way_to(turn: Turn, row: TxnRow) -> Outcome | None:
    """The outcome with which this transaction's commit was answered, if it gave way to an earlier commit."""
    yielded = turn.state.yielded(row.txn_id) if row.state == "ABORTED" else None
    return None if yielded is None else claims.answer(turn, yielded, row.owner)


def check_open(turn: Turn, replaced: int = 0) -> None:
    """`TooManyTransactions` at the limit of open transactions. ``replaced``: how many of them a new one ends."""
    if len(turn.state.open) - replaced >= turn.settings.max_open:
        raise TooManyTransactions(
            f"{turn.settings.max_open} transactions are open: wait for some to end"
        )
    quotas.check_open(turn, turn.lane, 1 - replaced)


def _replaces_open(turn: Turn, command: Begin) -> bool:
    return (
        command.name is not None
        and turn.state.holder(command.scope, command.name) in turn.state.open
    )


def check_uncommitted(turn: Turn, lane: str, txn_id: bytes | None = None) -> None:
    """`TooManyUncommittedBytes` while this transaction, the lane's, or all open ones are at their limit of bytes in
    journals.
    """
    quotas.check_uncommitted(turn, lane, txn_id)
    uncommitted, limit = turn.index.uncommitted.total, turn.settings.max_uncommitted_bytes
    if uncommitted >= limit:
        raise TooManyUncommittedBytes(
            f"open transactions have {uncommitted:,} bytes in journals, {limit:,} are allowed: commit or abort "
            "some, or wait for some to end"
        )


def check_id_partition(turn: Turn, txn_id: bytes) -> None:
    """`InvalidArgument` unless the id's first two bytes name this control partition."""
    if control_partition_of(txn_id) != turn.settings.control_partition:
        raise InvalidArgument(
            f"the transaction id names control partition {control_partition_of(txn_id)}; "
            f"this is {turn.settings.control_partition}"
        )


def earlier_outcome(turn: Turn, scope: str, name: str | None, owner: str) -> TxnRow | None:
    """The committed transaction of that name. `NotReady` while one of that name is being committed.

    `NameTaken` while a transaction of another lane has it, open or committed; `NotAuthorized` if it is free and the
    lane may not take it; `ReservedByPrepared` while a prepared one has it.
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
    raise NotReady("a transaction of that name is being committed: ask again for its outcome")


def supersede(turn: Turn, scope: str, name: str | None, txn_id: bytes) -> None:
    """Give the name to this transaction, and abort an open one that has it."""
    if name is None:
        return
    holder = turn.state.holder(scope, name)
    if holder is not None and holder != txn_id and holder in turn.state.open:
        abort_txn(turn, holder, f"superseded by a newer transaction named {name!r}")
    turn.put(k.name_key(scope, name), NameRow(txn_id))


def touch(turn: Turn, command: Touch, to: ReplyTo | None) -> None:
    """Add a stream and a writer to the transaction; the first touch pins the reference epoch for all writers."""
    row = turn.transaction(command.token, Rights.WRITE)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    turn.hear(row.txn_id)  # its client is alive, even if the touch is refused
    if row.broken is not None:
        raise locks_broken(row.broken)
    check_same_partition(turn, command.stream, row.scope)
    check_writes(turn.state, row, (command.stream,))
    if is_state(command.stream) and row.consumes is None:
        raise InvalidArgument(f"{command.stream}: {positions.STATE_IS_MOVED}")
    stream = active_stream(turn, command.stream)
    txn = turn.open(row.txn_id)
    begins = command.writer and command.writer not in txn.writers  # a new writer
    receipt = Receipt(row.txn_id, command.writer, 0, False, ())
    if begins:
        check_room(turn, txn, (receipt,))
        quotas.check_uncommitted(turn, row.owner, row.txn_id)
    if command.stream not in txn.participants:
        check_uncommitted(turn, row.owner, row.txn_id)
        epoch = stream.reference_epoch
        turn.put(
            k.participant_key(row.txn_id, command.stream), ParticipantRow(command.stream, epoch)
        )
        journal_op(turn, command.stream, JournalOp("BEGIN_TXN", row.txn_id, epoch, 0))
    if begins:
        put_receipt(turn, receipt, turn.lane)
    pinned = txn.participants[command.stream]
    layout, is_table = (
        turn.state.layout(command.stream, pinned),
        command.stream in turn.state.tables,
    )
    turn.reply(to, Touched(command.stream, pinned, layout, is_table))


def check_same_partition(turn: Turn, stream: str, scope: str) -> None:
    """`CrossScope` unless this control partition also serves the stream's scope."""
    here, other = turn.settings.control_partition, split_stream(stream)[0]
    served = turn.state.scopes.get(other)
    if (here != DIRECTORY) if served is None else (served != here):
        raise CrossScope(
            f"{stream} is not led by control partition {here}, as scope {scope!r} is: one transaction writes to "
            "scopes of one control partition; make new ones with `near`"
        )


def journal_op(turn: Turn, stream: str, op: JournalOp) -> None:
    """Append a participant op to the journal, on the lowest partition of the active segments.

    The op decides nothing, so it is omitted while the stream's topics can't be written.
    """
    if not turn.usable(stream):
        return
    row = turn.state.streams[stream]
    turn.round.ops.append((stream, min(s.partition for s in row.segments), op))


def heartbeat(turn: Turn, command: Heartbeat, to: ReplyTo | None) -> None:
    """Note signs of life. Only transactions that are not open any more, and refused tokens, are answered."""
    limits.TOKENS.check(len(command.tokens), "a heartbeat")
    turn.charge(work.LOOK * (len(command.tokens) - 1))
    gone = []
    refused: AnabranchError | None = None
    for data in command.tokens:
        try:
            row = turn.transaction(data, Rights.HEARTBEAT)
        except (InvalidToken, NotAuthorized, Expired) as error:  # the other tokens still count
            refused = error
            continue
        if row.state not in ("ABORT_IN_PROGRESS", "ABORTED", "COMMITTED"):
            turn.hear(row.txn_id)
            helpers = turn.keepalives.helpers.get(row.txn_id, ())
            if turn.lane not in (row.owner, *helpers) and len(helpers) < limits.HELPERS.value:
                turn.keepalives.helpers.put(row.txn_id, (*helpers, turn.lane))
        elif to is not None:
            gone.append(turn.outcome(row, full=False))
    if gone:
        turn.reply(to, Ended(tuple(gone)))
    elif refused is not None:
        raise refused


def abort(turn: Turn, command: Abort, to: ReplyTo | None) -> None:
    """Abort a transaction for a client or an operator."""
    row = turn.transaction(
        command.token, Rights.ABORT, proven=prepared.proven_by(turn, command.secret)
    )
    if row.state == "COMMITTED":
        raise AlreadyCommitted("the transaction is committed: there is no abort any more")
    if row.state == "PREPARED":
        prepared.check_abort(turn, row, command)
    if TRANSACTIONS.judge(row.state, "begin_abort", row.reason) is not None:
        if turn.lane != row.owner:  # audited even with a token: the owner did not ask for this
            turn.audit(command, f"{txn_text(row.txn_id)} of {row.owner}: {command.reason!r}")
        abort_txn(turn, row.txn_id, command.reason or "aborted by a client")
    turn.answer(to, turn.row(row.txn_id))


def abort_txn(turn: Turn, txn_id: bytes, reason: str, *, op: Op = "begin_abort") -> None:
    """Abort an open transaction, and answer the askers of its commit."""
    txn = turn.open(txn_id)
    reason = limits.cut(reason)
    row = turn.move(txn.row, op, reason=reason, finished_ms=turn.wall_ms)
    rejected = turn.rejected(txn.row)
    row = turn.move(row, "finalize_abort", rejected=rejected, committed=0, left_out=0)
    for stream, epoch in sorted(txn.participants.items()):
        journal_op(turn, stream, JournalOp("ABORT_TXN", txn_id, epoch, 0))
    claims.give_back(turn, row.scope, txn.pending)
    if txn.row.state == "PREPARED":
        prepared.drop_events(turn, txn_id)
    if txn.pending is not None:
        positions.give_back(turn, txn.pending.consumed, txn_id)
    if row.broken is None:
        end_pending(turn, txn_id, TransactionAborted(f"the transaction is aborted ({reason})"))
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, turn.outcome(row, lane=to.lane))
    finish(turn, row)


def end_pending(turn: Turn, txn_id: bytes, error: AnabranchError | None) -> list[ReplyTo]:
    """Delete the pending commit, and return its askers; with an error, answer them."""
    pending = turn.open(txn_id).pending
    if pending is None:
        return []
    waiting = [
        ReplyTo(*who, held=who[0] in pending.held)
        for who in zip(
            pending.correlation_ids,
            pending.reply_partitions,
            pending.commands,
            pending.lanes,
            strict=True,
        )
    ]
    turn.put(k.pending_key(txn_id), None)
    if error is not None:
        for to in waiting:
            turn.reply(to, refuse(error))
    return waiting


def finish(turn: Turn, row: TxnRow) -> None:
    """Put a finished transaction's row, and delete the rows that only an open one needs."""
    for key in turn.index.forget(turn.state, row.txn_id):
        turn.state.keep(key, None)
    txn = turn.open(row.txn_id)
    for writer, sequence in turn.state.locks.of(row.txn_id).numbers():
        turn.put(k.read_lock_key(row.txn_id, writer, sequence), None)
    if row.txn_id in turn.state.locks.named:
        turn.put(k.reads_key(row.txn_id), None)
    for stream, number in list(txn.staged_merges):
        turn.put(k.staged_merge_key(row.txn_id, stream, number), None)
    for stream, partition, at in list(txn.moved):
        turn.put(k.moved_key(row.txn_id, stream, partition, at), None)
    turn.put(k.txn_key(row.txn_id), row)
    for stream, epoch in txn.participants.items():
        drop_epoch(turn, stream, epoch)
    turn.ended.append(row.txn_id)


def drop_epoch(turn: Turn, stream: str, epoch: int) -> None:
    """Forget a reference epoch's layout when nothing can be written by it any more."""
    pins = turn.state.pins.get(stream)
    if not (pins and pins[epoch]) and epoch != turn.state.streams[stream].reference_epoch:
        turn.put(k.epoch_key(stream, epoch), None)


def named_by(command: GetState | Resolve) -> bytes:
    """The token of a question, or the bare id."""
    if command.token is None:
        return command.txn_id
    if peek(command.token).txn_id != command.txn_id:
        raise InvalidArgument("the token is of another transaction than the question")
    return command.token


def resolve(turn: Turn, command: Resolve, to: ReplyTo | None) -> None:
    """Answer with the outcome. Without a row ABORTED is logged first, so that the answer never changes."""
    check_id_partition(turn, command.txn_id)
    named = named_by(command)
    row = turn.state.txn_row(command.txn_id)
    where = check_scope(command.scope) if command.scope else EVERYWHERE
    if row is not None:
        try:
            row = turn.transaction(named, SEE)
        except UnknownTransaction:
            check_right(
                turn.state, turn.lane, Right.WRITE, where
            )  # the same refusal as without a transaction
            raise
    else:
        check_right(turn.state, turn.lane, Right.WRITE, where)
        if is_marked(command.txn_id):
            raise InvalidArgument(
                "a one-shot that moves positions has no outcome of its own: take its tasks; where they stand says "
                "whether it is committed"
            )
        if turn.is_forgotten(command.txn_id):
            raise Expired(FORGOTTEN)
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
