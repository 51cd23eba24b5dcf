"""The coordinator's steps in a commit, or prepare, through journals (`docs/inside/across.md`, section 5).

`decide_due` calls `advance` in each turn. For each commit with participants, `advance` asks for votes, looks at the
votes that have come, and takes the step that follows (`core.across.coordinator.next_step`). `coordinating` keeps
the votes, and sends the questions. A one-shot comes here when `coordinating_one_shots` has logged it as a pending
commit.

The coordinator's own part votes last, in the round of the decision, by the same checks as a commit within one
control partition (`core.parts`). There are three decisions:

- `DECIDE`: all have voted with a timestamp. The commit timestamp is logged (C2), and the coordinator's part is
  merged in the same round, if no hold stops it.
- `DECIDE_LATER`: a part has to be staged. The row then says that the transaction commits, without a timestamp (C3);
  when all parts are staged, the participants are asked for timestamps.
- `PREPARE`: all have voted, and a program or a database decides. Its commit then goes as after `DECIDE_LATER`.

After `DECIDE` and `DECIDE_LATER` there is no way back (C4).
"""

from __future__ import annotations

from anabranch import errors
from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across.coordinator import Step
from anabranch.core.decisions.across import coordinating, holding, locking
from anabranch.core.decisions.commit import judge, trying
from anabranch.core.decisions.merge import merge_decided
from anabranch.core.decisions.prepared import shot_of
from anabranch.core.decisions.transactions import answer_decided, end_pending, journal_op
from anabranch.core.decisions.turn import Turn
from anabranch.core.decisions.writers import receipts_here, take_exactly
from anabranch.core.state import OpenTxn
from anabranch.protocol.schemas import records as r

_DECISIONS = (Step.DECIDE, Step.DECIDE_LATER, Step.PREPARE)


def advance(turn: Turn) -> None:
    """Take the next step of each commit with participants. `decide_due` calls it after the merges of the round."""
    for txn_id in sorted(turn.state.committing) if turn.state.coordinated else ():
        txn = turn.state.open.get(txn_id)
        if txn is None or txn.pending is None or not txn.partitions:
            continue
        if txn.lacks_time:
            since = turn.work
            _advance_decided(turn, txn_id, txn)
            turn.owe(txn.row.owner, since)
        elif not txn.pending.decided:
            if turn.wall_ms < txn.pending.deadline_ms and coordinating.only_waits(turn, txn):
                continue
            with trying(turn, txn_id):
                _advance_undecided(turn, txn_id, txn, txn.pending)


def _advance_undecided(
    turn: Turn, txn_id: bytes, txn: OpenTxn, pending: r.PendingCommitRow
) -> None:
    """Refuse a commit after its deadline, or take the step that its votes allow, or ask for votes.

    Participants are asked once the journals here are read up to the receipts, so that they hold nothing meanwhile.
    """
    missing = coordinating.missing_text(turn, txn) if turn.wall_ms >= pending.deadline_ms else ""
    if missing:
        then = "aborted" if shot_of(turn.state, txn_id) else "still open"
        end_pending(turn, txn_id, errors.NotReady(f"{missing}; the transaction is {then}"))
        turn.hear(txn_id)
    elif coordinating.has_asked(txn):
        step = coordinating.next_step(turn, txn, own_stages=_is_big(turn, txn_id))
        if step not in _DECISIONS:
            coordinating.carry_out(turn, txn_id, step)
        elif step is Step.DECIDE and turn.merge_limit == 0:
            _wait_for_room(turn, txn_id, pending)
        elif (ending := judge(turn, txn_id, txn, pending)) is not None:
            _log_decision(turn, txn, pending, ending, step)
        elif txn.row.state == "OPEN" and txn.pending is not None:
            coordinating.end_long_hold(turn, txn_id)  # its part here has to wait
    elif coordinating.may_ask(turn, txn) and turn.index.covers(receipts_here(txn, pending.writers)):
        later = pending.prepare is not None or _is_big(turn, txn_id)
        coordinating.begin_round(turn, txn_id, "VOTE" if later else "TIMESTAMP")


def _wait_for_room(turn: Turn, txn_id: bytes, pending: r.PendingCommitRow) -> None:
    """Leave a decision to a later round, because a broker refused one, and this round has its one merge.

    If the merge were not in the round of the decision, it could be refused when there is no way back.
    """
    if turn.wall_ms < pending.deadline_ms:
        coordinating.end_long_hold(turn, txn_id)
        return
    error = "a broker refuses events of some commit, and each commit is tried alone: call again"
    end_pending(turn, txn_id, errors.NotReady(error))
    turn.hear(txn_id)


def _is_big(turn: Turn, txn_id: bytes) -> bool:
    """Whether the part here may have to be staged. If it then needs no staging, it has cost two more messages."""
    return turn.index.uncommitted.size_of((txn_id,)) > turn.settings.chunk_bytes


def _log_decision(
    turn: Turn, txn: OpenTxn, pending: r.PendingCommitRow, ending: parts.Ending, step: Step
) -> None:
    """Log a decision, and merge the part here if that can be done now.

    ``ending``: the part here, which `judge` has checked (L4).
    """
    txn_id, prepares = txn.row.txn_id, step is Step.PREPARE
    shot = shot_of(turn.state, txn_id)
    here = receipts_here(txn, pending.writers)
    # There is no way back, so it ends as prepared ones do, also if a stream is lost.
    kept = pending._replace(
        decided=True, writers=here, prepare=pending.prepare or coordinating.ELSEWHERE
    )
    waiting = end_pending(turn, txn_id, None) if prepares else []
    if prepares:
        ending.pending = kept
    parts.hold(turn, ending)
    row = _moved(turn, txn, ending, step)
    turn.across.exactly.put(txn_id, None)
    turn.put(k.txn_key(txn_id), row)
    take_exactly(turn, txn, pending.writers)
    locking.take_back(turn, txn_id)
    for to in waiting:
        turn.answer(to, row)
    if prepares:
        return
    turn.put(k.pending_key(txn_id), kept)
    holding.put_entry(turn, txn_id)
    for stream, epoch in sorted(txn.participants.items()) if shot is None else ():
        journal_op(turn, stream, r.JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))
    answer_decided(turn, row)
    merge_decided(turn, [txn_id])


def _moved(turn: Turn, txn: OpenTxn, ending: parts.Ending, step: Step) -> r.TxnRow:
    """The transaction's row after a decision, with the counts of the part here. The votes are used up.

    This logs the counts of the other parts, by their votes; after `DECIDE_LATER` also the next round of votes.
    """
    txn_id, weighed, shot = txn.row.txn_id, ending.weighed, shot_of(turn.state, txn.row.txn_id)
    changes = dict(ending.gains)
    if weighed is not None:
        changes |= {"committed": weighed.committed, "left_out": weighed.left_out}
    elif shot is not None:
        changes |= {"committed": len(shot.events)}
    else:
        raise errors.InvariantViolation("a commit is decided whose journals were not weighed")
    coordinating.log_counts(turn, txn_id)
    row = turn.move(txn.row, "prepare" if step is Step.PREPARE else "begin_commit", **changes)
    if step is Step.DECIDE:
        return turn.move(
            row, "begin_finalize", commit_timestamp=coordinating.choose_timestamp(turn, txn_id)
        )
    if step is Step.DECIDE_LATER:
        coordinating.begin_round(turn, txn_id, "VOTE")
        return turn.move(row, "begin_finalize")
    coordinating.forget_messages(turn, txn_id)
    return row


def _advance_decided(turn: Turn, txn_id: bytes, txn: OpenTxn) -> None:
    """Take the next step of a commit that is decided without a timestamp: wait for staged parts, or give it one."""
    wait = turn.merging.waits.get(txn_id, None)
    is_ready = wait is not None and wait.why == "timestamp"
    step = coordinating.next_step(turn, txn, own_stages=not is_ready)
    if step is not Step.DECIDE:
        coordinating.carry_out(turn, txn_id, step)
        return
    coordinating.log_counts(turn, txn_id)
    row = txn.row._replace(commit_timestamp=coordinating.choose_timestamp(turn, txn_id))
    turn.put(k.txn_key(txn_id), row)
    holding.put_entry(turn, txn_id)
    turn.merging.look_now(txn_id)
    merge_decided(turn, [txn_id])
