"""A participant's side of a transaction over several control partitions (`docs/inside/across.md`).

The part of such a transaction here is a prepared transaction: PREPARED is logged with the vote, under the id of the
coordinator's transaction, and only the coordinator's decision ends it. `CoordinatorRow` has what was promised.
`core.across.participant` has the table of what each message means in each state.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

from anabranch import errors
from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across import participant
from anabranch.core.across.participant import Action
from anabranch.core.decisions import transactions
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.across.coordinating import ELSEWHERE
from anabranch.core.decisions.commit import ending_of
from anabranch.core.decisions.scopes import active_stream
from anabranch.core.decisions.transactions import abort_txn, check_open, end_pending, journal_op
from anabranch.core.decisions.turn import FORGOTTEN, Turn, attempt, refuse
from anabranch.core.decisions.writers import check_receipts, take_exactly, writers_text
from anabranch.core.memory import WaitingTouch, is_gone
from anabranch.core.round import ReplyTo
from anabranch.core.transaction_states import born
from anabranch.errors import InvariantViolation, check
from anabranch.protocol import limits
from anabranch.protocol.ids import TXN_ID_SIZE, control_partition_of
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import is_genuine, peek

LEVEL = 4  # the feature level of the messages and rows
TOUCH_MS = 5_000  # how long a touch waits for the coordinator


# -- opening -------------------------------------------------------------------------------------------------


def touch(turn: Turn, command: r.Touch, to: ReplyTo | None) -> None:
    """Touch a stream here. If the transaction is another control partition's, its coordinator is asked first."""
    data = command.token
    txn_id = data if len(data) == TXN_ID_SIZE else peek(data).txn_id
    is_own = control_partition_of(txn_id) == turn.settings.control_partition
    if is_own or not turn.settings.across or txn_id in turn.state.promised:
        transactions.touch(turn, command, to)
        return
    turn.state.check_enabled(LEVEL, "a transaction over several control partitions")
    if turn.state.txn_row(txn_id) is not None:
        transactions.touch(turn, command, to)  # it has ended: this is refused
        return
    _check_touch(turn, command, txn_id)
    if to is not None:
        _wait(turn, command, txn_id, to)


def _check_touch(turn: Turn, command: r.Touch, txn_id: bytes) -> None:
    """Check what needs no word of the coordinator."""
    if len(command.token) == TXN_ID_SIZE or control_partition_of(txn_id) >= turn.control_partitions:
        raise errors.InvalidToken(
            "a stream of another control partition is touched with a token of the transaction"
        )
    if turn.is_forgotten(txn_id):
        raise errors.Expired(FORGOTTEN)
    _check_served(turn, command.stream)
    active_stream(turn, command.stream)


def _check_served(turn: Turn, stream: str) -> None:
    """`CrossScope` if another control partition serves the stream."""
    scope, here = split_stream(stream)[0], turn.settings.control_partition
    served = turn.state.scopes.get(scope)
    if (served is None and here != 0) or served not in (None, here):
        raise errors.CrossScope(
            f"{stream} is not led by control partition {here}: touch it where its scope is served"
        )


def _wait(turn: Turn, command: r.Touch, txn_id: bytes, to: ReplyTo) -> None:
    key = txn_id, split_stream(command.stream)[0]
    waiting = turn.across.touches.get(key, ())
    if sum(map(len, turn.across.touches.as_dict().values())) >= limits.TOUCHES.value:
        raise errors.NotReady(f"{limits.TOUCHES.value:,} touches wait already: ask again")
    waits = WaitingTouch(command, turn.lane, to, turn.now_ms + TOUCH_MS)
    same = [one for one in waiting if one.to == to]
    turn.across.touches.put(key, (*[one for one in waiting if one not in same], waits))
    home = control_partition_of(txn_id)
    here = turn.settings.control_partition
    turn.send(home, r.Enlist(txn_id, here, key[1], command.token, turn.lane), None)


def enlisted(turn: Turn, message: r.Enlisted) -> None:
    """Carry out the touches that waited for this answer, or refuse them with the coordinator's refusal.

    Only the touches' tokens prove the answer: the secret in it has to explain them. So without a touch that waits,
    nothing is done.
    """
    key = message.txn_id, message.scope
    waiting = turn.across.touches.get(key, ())
    if not waiting:
        return
    if message.refusal is not None or message.head is None:
        turn.across.touches.put(key, None)
        for one in waiting:
            turn.reply(one.to, message.refusal)
        return
    head = message.head
    proven = [one for one in waiting if is_genuine(peek(one.command.token), head.secret)]
    if not proven:
        turn.round.ignored.append("forged")
        return
    turn.across.touches.put(key, tuple(one for one in waiting if one not in proven) or None)
    for one in proven:
        if turn.state.txn_row(message.txn_id) is None:
            turn.lane = head.owner
            try:
                check_open(turn)
            except errors.AnabranchError as error:
                turn.reply(one.to, refuse(error))
                continue
            _open(turn, message.txn_id, head)
        turn.lane = one.lane
        attempt(turn, one.to, partial(transactions.touch, turn, one.command, one.to))


def _open(turn: Turn, txn_id: bytes, head: r.TxnHead) -> None:
    """Put the rows of a transaction whose coordinator is elsewhere."""
    turn.put(k.txn_key(txn_id), _row_of(turn, txn_id, head))
    turn.put(k.coordinator_key(txn_id), r.CoordinatorRow(0))


def _row_of(turn: Turn, txn_id: bytes, head: r.TxnHead) -> r.TxnRow:
    row = born(
        "begin",
        txn_id,
        turn.wall_ms,
        scope=head.scope,
        keepalive_ms=head.keepalive_ms,
        secret=head.secret,
        owner=head.owner,
        snapshot=head.snapshot,
    )
    return row._replace(begun_ms=head.begun_ms)


# -- votes ---------------------------------------------------------------------------------------------------


def asked(turn: Turn, ask: r.AskVote, skewed: errors.ClockSkew | None) -> Action:
    """Carry out a question of the coordinator, and answer. ``skewed``: its clock is too far ahead of this one's."""
    row, its = turn.state.txn_row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    action = participant.asked(row, its, ask)
    if row is None and turn.is_forgotten(ask.txn_id):
        return Action.PASS  # it was over, as nothing unfinished is purged
    if action in (Action.VOTE, Action.REOPEN) and row is None:
        _open(turn, ask.txn_id, ask.head)
    if action is not Action.PASS:
        turn.across.asked.put(ask.txn_id, None)
    if action is Action.VOTE:
        _vote(turn, ask, None if skewed is None else refuse(skewed))
    elif action is Action.PROMISE:
        _promise(turn, ask)
    elif action is Action.REOPEN:
        _reopen(turn, ask)
    elif action is Action.ANSWER:
        _answer(turn, ask.txn_id, "NO")
    return action


def _vote(turn: Turn, ask: r.AskVote, refusal: r.Refusal | None = None) -> None:
    """Check whether the transaction can commit here, log the vote, and answer.

    A vote that has to wait is kept in memory, and tried again in each turn; who forgets it is asked again.
    """
    txn_id, its = ask.txn_id, turn.state.coordinator_row(ask.txn_id)
    # Also a no is of this round of votes: a question that was overtaken must find that.
    noted = participant.promise(its, replace(ask, asks="VOTE"), staged=True, fresh=0)
    if noted != its:
        turn.put(k.coordinator_key(txn_id), noted)
    try:
        if refusal is None:
            staged = _prepare(turn, ask)
            turn.put(k.coordinator_key(txn_id), replace(noted, staged=staged))
            _promise(turn, ask)
            return
    except (errors.ReceiptsNotCovered, errors.NotReady):
        if turn.across.asked.get(txn_id, None) is None:
            turn.across.asked.put(txn_id, ask)
            _answer(turn, txn_id, "WAITING")
        return
    except errors.TooManyTransactions:
        _answer(turn, txn_id, "AGAIN")
        return
    except (errors.FixCallError, errors.RetryError, errors.LocksBroken) as error:
        refusal = refuse(error)
    _answer(turn, txn_id, "NO", refusal)


def _prepare(turn: Turn, ask: r.AskVote) -> bool:
    """Log PREPARED with exactly these writers, if no check refuses it; else nothing is changed.

    Returns whether its merge needs no staging.
    """
    txn_id = ask.txn_id
    txn = turn.open(txn_id)
    gone = [stream for stream in sorted(txn.participants) if is_gone(turn.state, stream)]
    if gone:
        raise errors.StreamLost(f"{gone[0]} is lost: abort the transaction")
    if ask.events or ask.changes or ask.locks or ask.follows:
        raise errors.CrossScope(
            "one-shots and locks over several control partitions are not built yet"
        )
    check_receipts(turn, txn_id, ask.receipts)
    named = {one.writer for one in ask.receipts}
    unnamed = [] if ask.exactly else [writer for writer in txn.writers if writer not in named]
    if unnamed:
        raise errors.WritersUnfinished(
            f"not finished: writer {writers_text(unnamed)}; give the receipts to take, or let it finish"
        )
    taken = _that_count(ask.receipts, txn.writers)
    pending = r.PendingCommitRow((), False, taken, None, None, 0, prepare=ELSEWHERE)
    ending = ending_of(txn, pending)
    check(parts.check(turn, ending), "a participant has locks or a claim")
    weighed = ending.weighed
    if weighed is None:
        raise InvariantViolation("a participant votes whose journals were not weighed")
    row = turn.move(txn.row, "prepare", committed=weighed.committed, left_out=weighed.left_out)
    turn.put(k.txn_key(txn_id), row)
    turn.put(k.pending_key(txn_id), pending)
    return weighed.size <= turn.settings.chunk_bytes


def _that_count(receipts: tuple[r.Receipt, ...], known: Container[int]) -> tuple[r.Receipt, ...]:
    """Receipts of writers that wrote here, or touched a stream here."""
    return tuple(one for one in receipts if one.extents or one.writer in known)


def _promise(turn: Turn, ask: r.AskVote) -> None:
    """Log the round of votes, with a timestamp if one is asked for, and vote yes.

    If a stream was lost since it was prepared, the vote says so: there is a way back until the decision (C4).
    """
    txn_id, its = ask.txn_id, turn.state.coordinator_row(ask.txn_id)
    row = turn.row(txn_id)
    if its is not None and row.state == "COMMITTED":  # by force: its timestamp is what it has
        at = row.commit_timestamp
        noted = replace(its, votes_round=ask.votes_round, prepare_timestamp=at, staged=True)
        turn.put(k.coordinator_key(txn_id), noted)
        _answer(turn, txn_id, "YES")
        return
    txn = turn.open(txn_id)
    gone = [stream for stream in sorted(txn.participants) if is_gone(turn.state, stream)]
    if gone and txn.row.state == "PREPARED":
        noted = participant.promise(its, replace(ask, asks="VOTE"), staged=True, fresh=0)
        turn.put(k.coordinator_key(txn_id), noted)
        _answer(turn, txn_id, "NO", refuse(errors.StreamLost(f"{gone[0]} is lost: abort it")))
        return
    check(its is not None, "a prepared participant has no row of its promise")
    if its is None:
        return
    before = turn.hybrid_time
    after = participant.promise(its, ask, staged=its.staged, fresh=turn.next_timestamp())
    if after.prepare_timestamp in (0, its.prepare_timestamp):
        turn.hybrid_time = before
    if after != its:
        turn.put(k.coordinator_key(txn_id), after)
        holding.put_entry(turn, txn_id)
    _answer(turn, txn_id, "YES")


def _reopen(turn: Turn, ask: r.AskVote) -> None:
    """Take the promise back: the transaction is open again, and nothing of it is held."""
    row, its = turn.row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    end_pending(turn, ask.txn_id, None)
    turn.put(k.txn_key(ask.txn_id), turn.move(row, "reopen", committed=0, left_out=0))
    turn.put(k.coordinator_key(ask.txn_id), participant.reopened(its, ask))
    holding.put_entry(turn, ask.txn_id)
    _answer(turn, ask.txn_id, "NO")


def _answer(
    turn: Turn, txn_id: bytes, answer: r.VoteAnswer, error: r.Refusal | None = None
) -> None:
    """Send the vote that the rows say."""
    row = turn.row(txn_id)
    if error is None and answer == "NO" and row.state == "ABORTED":
        error = refuse(errors.TransactionAborted(f"the transaction is aborted ({row.reason})"))
    its = turn.state.coordinator_row(txn_id) or r.CoordinatorRow(0)
    here = turn.settings.control_partition
    vote = participant.vote(
        txn_id, here, its, answer, committed=row.committed, left_out=row.left_out, error=error
    )
    turn.send(control_partition_of(txn_id), vote, row.secret)


# -- decisions -----------------------------------------------------------------------------------------------


def decided(turn: Turn, message: r.Decide) -> Action:
    """Carry out a decision. A merge waits until holds let it go; `advance` then says that it is done."""
    txn_id = message.txn_id
    row, its = turn.state.txn_row(txn_id), turn.state.coordinator_row(txn_id)
    action = participant.decided(
        row,
        message,
        forgotten=turn.is_forgotten(txn_id),
        forced=its is not None and its.forced,
    )
    if action is not Action.PASS:
        turn.across.asked.put(txn_id, None)
    if action is Action.ABORT and row is not None:
        abort_txn(turn, txn_id, message.reason)
    elif action is Action.ABORT:
        aborted = _row_of(turn, txn_id, message.head)._replace(
            state="ABORTED", finished_ms=turn.wall_ms, reason=limits.cut(message.reason)
        )
        turn.put(k.txn_key(txn_id), aborted)
        _done(turn, txn_id, aborted, message.head.secret)
    elif action in (Action.STAGE, Action.MERGE):
        commit_part(turn, txn_id, message.timestamp)
    elif action is Action.ANSWER:
        _answer(turn, txn_id, "YES")
    elif action is Action.DONE:
        _done(turn, txn_id, row, message.head.secret)
    return action


def commit_part(turn: Turn, txn_id: bytes, timestamp: int) -> None:
    """Log that the transaction commits, and its timestamp if that is known (0: it follows; C3).

    Without a timestamp, only a merge that has to be staged begins. With it the merge follows.
    """
    txn, pending = turn.open(txn_id), turn.open(txn_id).pending
    check(pending is not None, "a participant is prepared without the row that names its writers")
    if pending is None:
        return
    was_prepared = txn.row.state == "PREPARED"
    turn.hybrid_time = max(turn.hybrid_time, timestamp)
    row = turn.move(txn.row, "begin_commit", commit_timestamp=timestamp)
    turn.put(k.txn_key(txn_id), row)
    if was_prepared:
        take_exactly(turn, txn, pending.writers)
        turn.put(k.pending_key(txn_id), replace(pending, decided=True))
        for stream, epoch in sorted(txn.participants.items()):
            journal_op(turn, stream, r.JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))
    holding.put_entry(turn, txn_id)
    turn.merging.look_now(txn_id)


def _done(turn: Turn, txn_id: bytes, row: r.TxnRow | None, secret: bytes | None) -> None:
    """Say that a decision is carried out. ``row``: None if it is purged, so the coordinator knows the counts."""
    here = turn.settings.control_partition
    done = r.Done(txn_id, here, 0, 0, 0 if row is None else row.rejected, "")
    its = turn.state.coordinator_row(txn_id)
    if row is not None and row.state == "COMMITTED":
        done = replace(done, committed=row.committed, left_out=row.left_out, reason=row.reason)
    elif row is not None and its is not None and its.forced:
        done = replace(done, reason=f"aborted at control partition {here} alone ({row.reason})")
    turn.send(control_partition_of(txn_id), done, secret)


# -- in each turn --------------------------------------------------------------------------------------------


def advance(turn: Turn) -> None:
    """Say what ended in this round, try votes again that wait, and refuse touches that waited for too long."""
    here = turn.settings.control_partition
    # If such transactions are switched off, coordinators are answered when they repeat their decisions.
    for txn_id in turn.ended if turn.settings.across else ():
        if control_partition_of(txn_id) != here:
            turn.across.asked.put(txn_id, None)
            row = turn.row(txn_id)
            _done(turn, txn_id, row, row.secret)
    for txn_id in turn.ready:
        its = turn.state.coordinator_row(txn_id)
        if its is not None and not its.staged:
            turn.put(k.coordinator_key(txn_id), replace(its, staged=True))
            _answer(turn, txn_id, "YES")
    if not turn.across.asked.is_empty:
        for txn_id, ask in sorted(turn.across.asked.as_dict().items()):
            since, owner = turn.work, turn.row(txn_id).owner
            asked_again(turn, ask)
            turn.owe(owner, since)
    if not turn.across.touches.is_empty:
        for key, waiting in turn.across.touches.as_dict().items():
            late = [one for one in waiting if turn.now_ms >= one.until_ms]
            for one in late:
                home = control_partition_of(key[0])
                text = f"control partition {home}, which coordinates the transaction, did not answer: ask again"
                turn.reply(one.to, refuse(errors.NotReady(text)))
            if late:
                rest = tuple(one for one in waiting if one not in late)
                turn.across.touches.put(key, rest or None)


def asked_again(turn: Turn, ask: r.AskVote) -> None:
    """Try a vote again that had to wait, if it is still asked for."""
    row, its = turn.state.txn_row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    if participant.asked(row, its, ask) is Action.VOTE:
        _vote(turn, ask)
    after = turn.state.txn_row(ask.txn_id)
    if after is None or after.state != "OPEN":
        turn.across.asked.put(ask.txn_id, None)
