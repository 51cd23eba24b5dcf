"""A participant's side of a transaction over several control partitions (`docs/inside/across.md`, section 5).

The part of such a transaction here is a prepared transaction: PREPARED is logged with the vote, under the id of the
coordinator's transaction, and only the coordinator's decision ends it (O2). The *promise*, `CoordinatorRow`, has
the round of votes and the prepare timestamp; `holding` then holds the streams above that. `core.across.participant`
has the table of what each message means in each state.

`joining` opens a part (`open_part`). `receiving` brings the coordinator's messages: `on_ask_vote`, `on_decide`.
Once in each turn it calls `advance`: votes that had to wait are tried again, and `Done` is sent for merges that
ended.
"""

from __future__ import annotations

from anabranch import errors
from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across import participant
from anabranch.core.across.participant import Action
from anabranch.core.decisions.across import holding, locking, parts_of_one_shots
from anabranch.core.decisions.across.coordinating import ELSEWHERE
from anabranch.core.decisions.across.locking import GivesWay
from anabranch.core.decisions.commit import ending_of
from anabranch.core.decisions.prepared import shot_of
from anabranch.core.decisions.transactions import abort_txn, end_pending, journal_op
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.decisions.writers import check_receipts, take_exactly, writers_text
from anabranch.core.memory import is_gone
from anabranch.core.state import OpenTxn
from anabranch.core.transaction_states import born
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.schemas import records as r

# -- opening ------------------------------------------------------------------------------------------------


def open_part(turn: Turn, txn_id: bytes, head: r.TxnHead) -> None:
    """Log a transaction whose coordinator is elsewhere, as OPEN and with no promise."""
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


def on_ask_vote(turn: Turn, ask: r.AskVote, skewed: errors.ClockSkew | None) -> Action:
    """Carry out a question of the coordinator, and answer. ``skewed``: its clock is too far ahead of this one's."""
    row, promise = turn.state.txn_row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    action = participant.asked(row, promise, ask)
    if row is None and turn.is_forgotten(ask.txn_id):
        return Action.PASS  # it was over, as nothing unfinished is purged
    if row is None and action is Action.REOPEN:
        return Action.PASS  # nothing was promised
    if row is None and action is Action.VOTE:
        try:
            vote = parts_of_one_shots.first_vote(
                turn, ask, None if skewed is None else refuse(skewed)
            )
        except errors.NotReady:
            turn.across.waiting_asks.put(ask.txn_id, ask)
            return action
        turn.across.waiting_asks.put(ask.txn_id, None)
        turn.send(control_partition_of(ask.txn_id), vote, ask.head.secret)
        return action
    if action is not Action.PASS:
        turn.across.waiting_asks.put(ask.txn_id, None)
    if action is Action.VOTE:
        _try_to_vote(turn, ask, None if skewed is None else refuse(skewed))
    elif action is Action.PROMISE:
        _vote_yes(turn, ask, None if skewed is None else refuse(skewed))
    elif action is Action.REOPEN:
        _reopen(turn, ask)
    elif action is Action.ANSWER:
        # Only an answer in the present round of votes counts, also from a part that is aborted.
        if promise is not None and promise.votes_round < ask.votes_round:
            turn.put(k.coordinator_key(ask.txn_id), promise._replace(votes_round=ask.votes_round))
        _send_vote(turn, ask.txn_id, "NO")
    return action


def _try_to_vote(turn: Turn, ask: r.AskVote, refusal: r.Refusal | None = None) -> None:
    """Check whether the transaction can commit here, log the vote, and answer.

    A vote that has to wait is kept in memory, and tried again in each turn. A next leader does not know it, and is
    asked again.
    """
    txn_id, promise = ask.txn_id, turn.state.coordinator_row(ask.txn_id)
    # Also a no is of this round of votes: a question that was overtaken must find that.
    noted = participant.next_promise(promise, ask._replace(asks="VOTE"), staged=True, fresh=0)
    if noted != promise:
        turn.put(k.coordinator_key(txn_id), noted)
    try:
        if refusal is None:
            again = _prepare(turn, ask)
            if again is None:
                _vote_yes(turn, ask)
            else:
                _send_vote(turn, txn_id, "NO", revalidate=again)
            return
    except GivesWay:
        _send_vote(turn, txn_id, "AGAIN")
        return
    except (errors.ReceiptsNotCovered, errors.NotReady):
        if turn.across.waiting_asks.get(txn_id, None) is None:
            turn.across.waiting_asks.put(txn_id, ask)
            _send_vote(turn, txn_id, "WAITING")
        return
    except errors.TooManyTransactions:
        _send_vote(turn, txn_id, "AGAIN")
        return
    except (errors.FixCallError, errors.RetryError, errors.LocksBroken) as error:
        refusal = refuse(error)
    _send_vote(turn, txn_id, "NO", refusal)


def _prepare(turn: Turn, ask: r.AskVote) -> r.Revalidate | None:
    """Log PREPARED with exactly these writers, if no check refuses it; else nothing is changed.

    Returns what the client has to validate before, or None.
    """
    txn_id = ask.txn_id
    txn = turn.open(txn_id)
    if gone := _lost_streams(turn, txn):
        raise errors.StreamLost(f"{gone[0]} is lost: abort the transaction")
    kept = shot_of(turn.state, txn_id)
    taken = () if kept is not None else _receipts_taken(turn, txn, ask)
    pending = r.PendingCommitRow((), False, taken, None, None, 0, prepare=ELSEWHERE)
    ending = ending_of(txn, pending, kept)
    if not parts.check(turn, ending):
        check(ending.again is not None, "a participant has a claim")
        return ending.again
    weighed = ending.weighed
    if weighed is None:
        check(kept is not None, "a participant votes whose journals were not weighed")
        committed, left_out, staged = 0 if kept is None else len(kept.events), 0, True
    else:
        committed, left_out = weighed.committed, weighed.left_out
        staged = weighed.size <= turn.settings.chunk_bytes
    row = turn.move(txn.row, "prepare", committed=committed, left_out=left_out)
    turn.put(k.txn_key(txn_id), row)
    turn.put(k.pending_key(txn_id), pending)
    promise = turn.state.coordinator_row(txn_id) or r.CoordinatorRow(0)
    if promise.staged != staged:
        turn.put(k.coordinator_key(txn_id), promise._replace(staged=staged))
    locking.take_back(turn, txn_id)
    return None


def _lost_streams(turn: Turn, txn: OpenTxn) -> list[str]:
    """The streams of a part that are lost, and the tables that it has locked."""
    both = txn.participants.keys() | set(turn.state.locks.of(txn.row.txn_id).tables)
    return [stream for stream in sorted(both) if is_gone(turn.state, stream)]


def _receipts_taken(turn: Turn, txn: OpenTxn, ask: r.AskVote) -> tuple[r.Receipt, ...]:
    """The receipts that the commit takes here. Raises: as `check_receipts`; WritersUnfinished."""
    check_receipts(turn, ask.txn_id, ask.receipts)
    named = {receipt.writer for receipt in ask.receipts}
    unnamed = [] if ask.exactly else [writer for writer in txn.writers if writer not in named]
    if unnamed:
        raise errors.WritersUnfinished(
            f"not finished: writer {writers_text(unnamed)}; give the receipts to take, or let it finish"
        )
    # Those of writers that wrote here, or touched a stream here.
    return tuple(each for each in ask.receipts if each.extents or each.writer in txn.writers)


def _vote_yes(turn: Turn, ask: r.AskVote, refusal: r.Refusal | None = None) -> None:
    """Vote yes: log the round of votes, with a prepare timestamp if one is asked for, and answer.

    If a stream was lost since it was prepared, the vote says so: there is a way back until the decision (C4).
    ``refusal``: the coordinator's clock is too far ahead. Then no timestamp is given, also after the decision.
    """
    txn_id, promise = ask.txn_id, turn.state.coordinator_row(ask.txn_id)
    row = turn.row(txn_id)
    if promise is not None and row.state == "COMMITTED":  # by force: its timestamp is what it has
        # The coordinator takes back a timestamp that it has not asked for, and asks again: that would never end.
        at = row.commit_timestamp if ask.asks == "TIMESTAMP" else 0
        noted = promise._replace(votes_round=ask.votes_round, prepare_timestamp=at, staged=True)
        turn.put(k.coordinator_key(txn_id), noted)
        _send_vote(turn, txn_id, "YES")
        return
    txn = turn.open(txn_id)
    gone = _lost_streams(turn, txn)
    if gone and txn.row.state == "PREPARED":
        refusal = refuse(errors.StreamLost(f"{gone[0]} is lost: abort it"))
    check(promise is not None, "a prepared participant has no row of its promise")
    if promise is None:
        return
    if refusal is not None:
        ask = ask._replace(asks="VOTE")
    before = turn.hybrid_time
    fresh = holding.prepare_timestamp(turn)
    after = participant.next_promise(promise, ask, staged=promise.staged, fresh=fresh)
    if after.prepare_timestamp in (0, promise.prepare_timestamp):
        turn.hybrid_time = before
    if after != promise:
        turn.put(k.coordinator_key(txn_id), after)
        holding.put_entry(turn, txn_id)
    _send_vote(turn, txn_id, "YES" if refusal is None else "NO", refusal)


def _reopen(turn: Turn, ask: r.AskVote) -> None:
    """Take the promise back: the transaction is open again, and nothing of it is held."""
    row, promise = turn.row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    end_pending(turn, ask.txn_id, None)
    turn.put(k.txn_key(ask.txn_id), turn.move(row, "reopen", committed=0, left_out=0))
    turn.memory.written.pop(ask.txn_id, None)  # it may write more
    turn.put(k.coordinator_key(ask.txn_id), participant.reopened(promise, ask))
    holding.put_entry(turn, ask.txn_id)
    _send_vote(turn, ask.txn_id, "NO")


def refuse_for_good(turn: Turn, txn_id: bytes, why: str) -> None:
    """Send a *no* for good without a question, so that the coordinator aborts an open transaction (section 8)."""
    _send_vote(turn, txn_id, "NO", refuse(errors.TransactionAborted(why)))


def _send_vote(
    turn: Turn,
    txn_id: bytes,
    answer: r.VoteAnswer,
    error: r.Refusal | None = None,
    revalidate: r.Revalidate | None = None,
) -> None:
    """Send a vote, with what the rows say of it: round, timestamp, counts."""
    row = turn.row(txn_id)
    if error is None and answer == "NO" and revalidate is None and row.state == "ABORTED":
        error = refuse(errors.TransactionAborted(f"the transaction is aborted ({row.reason})"))
    promise = turn.state.coordinator_row(txn_id) or r.CoordinatorRow(0)
    here = turn.settings.control_partition
    vote = participant.vote(
        txn_id,
        here,
        promise,
        answer,
        committed=row.committed,
        left_out=row.left_out,
        error=error,
        revalidate=revalidate,
    )
    turn.send(control_partition_of(txn_id), vote, row.secret)


# -- decisions -----------------------------------------------------------------------------------------------


def on_decide(turn: Turn, message: r.Decide) -> Action:
    """Carry out a decision. A merge waits until holds let it go; `advance` then says that it is done."""
    txn_id = message.txn_id
    row, promise = turn.state.txn_row(txn_id), turn.state.coordinator_row(txn_id)
    action = participant.decided(
        row,
        message,
        forgotten=turn.is_forgotten(txn_id),
        forced=promise is not None and promise.forced,
        promised=None if promise is None else promise.prepare_timestamp,
    )
    if action is not Action.PASS:
        turn.across.waiting_asks.put(txn_id, None)
        voted = turn.across.undecided.get(txn_id, None)
        if voted is not None and action is Action.MERGE:
            holding.note_decision(turn, turn.now_ms - voted.since_ms)
        turn.across.undecided.put(txn_id, None)
        parts_of_one_shots.forget_part(turn, txn_id)
    if action is Action.ABORT and row is not None:
        abort_txn(turn, txn_id, message.reason)
    elif action is Action.ABORT:
        aborted = _row_of(turn, txn_id, message.head)._replace(
            state="ABORTED", finished_ms=turn.wall_ms, reason=limits.cut(message.reason)
        )
        turn.put(k.txn_key(txn_id), aborted)
        _send_done(turn, txn_id, aborted, message.head.secret)
    elif action in (Action.STAGE, Action.MERGE):
        commit_part(turn, txn_id, message.timestamp)
    elif action is Action.ANSWER:
        _send_vote(turn, txn_id, "YES")
    elif action is Action.DONE:
        _send_done(turn, txn_id, row, message.head.secret)
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
        turn.put(k.pending_key(txn_id), pending._replace(decided=True))
        if shot_of(turn.state, txn_id) is None:
            for stream, epoch in sorted(txn.participants.items()):
                journal_op(turn, stream, r.JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))
    holding.put_entry(turn, txn_id)
    turn.merging.look_now(txn_id)


def _send_done(turn: Turn, txn_id: bytes, row: r.TxnRow | None, secret: bytes | None) -> None:
    """Say that a decision is carried out. ``row``: None if it is purged, so the coordinator knows the counts."""
    here = turn.settings.control_partition
    done = r.Done(txn_id, here, 0, 0, 0 if row is None else row.rejected, "")
    promise = turn.state.coordinator_row(txn_id)
    if row is not None and row.state == "COMMITTED":
        done = done._replace(committed=row.committed, left_out=row.left_out, reason=row.reason)
    elif row is not None and promise is not None and promise.forced:
        done = done._replace(reason=f"aborted at control partition {here} alone ({row.reason})")
    turn.send(control_partition_of(txn_id), done, secret)


# -- in each turn --------------------------------------------------------------------------------------------


def advance(turn: Turn) -> None:
    """Say what ended in this round, and try votes again that wait."""
    here = turn.settings.control_partition
    # If such transactions are switched off, coordinators are answered when they repeat their decisions.
    for txn_id in turn.ended if turn.settings.across else ():
        if control_partition_of(txn_id) != here:
            turn.across.waiting_asks.put(txn_id, None)
            row = turn.row(txn_id)
            _send_done(turn, txn_id, row, row.secret)
    for txn_id in turn.ready:
        promise = turn.state.coordinator_row(txn_id)
        if promise is not None and not promise.staged:
            turn.put(k.coordinator_key(txn_id), promise._replace(staged=True))
            _send_vote(turn, txn_id, "YES")
    if not turn.across.waiting_asks.is_empty:
        for _, ask in sorted(turn.across.waiting_asks.as_dict().items()):
            since = turn.work
            _try_again(turn, ask)
            turn.owe(ask.head.owner, since)
    if not turn.across.waiting_parts.is_empty:
        parts_of_one_shots.refuse_late(turn)
    if not turn.across.undecided.is_empty:
        parts_of_one_shots.ask_decisions(turn)


def _try_again(turn: Turn, ask: r.AskVote) -> None:
    """Try a vote again that had to wait, if it is still asked for."""
    row, promise = turn.state.txn_row(ask.txn_id), turn.state.coordinator_row(ask.txn_id)
    if row is None and parts_of_one_shots.waiting_here(turn, ask.txn_id) is not None:
        lane = turn.lane
        on_ask_vote(turn, ask, None)
        turn.lane = lane
        return
    if row is not None and participant.asked(row, promise, ask) is Action.VOTE:
        _try_to_vote(turn, ask)
    after = turn.state.txn_row(ask.txn_id)
    if after is None or after.state != "OPEN":
        turn.across.waiting_asks.put(ask.txn_id, None)
