"""Decisions on commits: which writers to take, when the journal covers them, what to merge.

A commit goes: *pending* (logged; waits, with a deadline, for the journal to show all receipts) → *decided*
(COMMIT_IN_PROGRESS and exactly the writers to take are logged; from here a successor finishes it) → *merged*
(timestamp, merges, COMMIT, COMMITTED and the answers, in one round). A refusal before *decided* leaves the
transaction open and unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from anabranch.core import limits, vectors
from anabranch.core import rows as k
from anabranch.core.authorize import Right, check_right, check_writes
from anabranch.core.decisions import names_and_series as claims
from anabranch.core.decisions import tenures
from anabranch.core.decisions.merge import merge_decided
from anabranch.core.decisions.scopes import active_stream, check_served
from anabranch.core.decisions.transactions import (
    abort_txn,
    check_id_partition,
    check_in_scope,
    earlier_outcome,
    end_pending,
    journal_op,
    supersede,
)
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.decisions.writers import (
    check_receipts,
    choose_writers,
    left_behind,
    take_exactly,
    writers_text,
)
from anabranch.core.ids import check_name, check_number, is_marked
from anabranch.core.journal.index import JournalIndex, Weighed
from anabranch.core.memory import Merging
from anabranch.core.round import Part, ReplyTo, StreamCommit
from anabranch.core.state import OpenTxn, State
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.core.tokens import Rights
from anabranch.core.transaction_states import TRANSACTIONS, born
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    EventTooLarge,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    OutcomeUnknown,
    ReceiptMismatch,
    ReceiptsNotCovered,
    TenureLost,
    TransactionAborted,
)
from anabranch.schemas.records import (
    Commit,
    Event,
    JournalOp,
    OneShot,
    Outcome,
    PendingCommitRow,
    Receipt,
    SegmentRange,
    TxnRow,
    YieldedRow,
)

_FRAMING = 68  # least bytes of a record batch with one record, besides its content


def commit(turn: Turn, command: Commit, to: ReplyTo | None) -> None:
    """Receive a commit: it is logged as pending, and decided as soon as the journal covers it."""
    row = turn.transaction(command.token, Rights.COMMIT, partial(_heard_late, turn, to))
    named = (*command.own, *(command.receipts or ()))
    if row.state != "OPEN":
        _check_decided(row, command)
    if row.state == "COMMITTED":
        behind = left_behind(named, turn.state.writers(row.txn_id))
        if behind:
            raise AlreadyCommitted(
                f"the transaction was committed without writer {writers_text(behind)}, by another commit: its "
                "outcome stands; write that again"
            )
        turn.reply(to, turn.outcome(row))
        return
    if row.state == "ABORTED":
        # Perhaps because it gave way to an earlier commit: then the answer is the same again.
        earlier = _earlier_answer(turn, row, command)
        if earlier is not None:
            turn.reply(to, earlier)
            return
    moves = TRANSACTIONS.judge(row.state, "begin_commit", row.reason) is not None
    txn = turn.open(row.txn_id)
    if not moves:  # decided already: this asker waits too
        _check_replaced(named, txn.writers)
        turn.hear(row.txn_id)
        turn.put(k.pending_key(row.txn_id), _join_waiting(txn.pending, to))
        return
    turn.hear(row.txn_id)
    if _waits(txn.pending, to):
        return  # repeated: the first request and its deadline count
    check_writes(turn.state, row, txn.participants)
    try:
        _check_consumed(turn, row, command)
    except TenureLost as error:  # no later tenure may commit what was made under this one
        end_pending(turn, row.txn_id, error)
        abort_txn(turn, row.txn_id, str(error))
        turn.reply(to, refuse(error))
        return
    check_name(command.name)
    check_number(command.name, command.number)
    claims.check_jump(turn, row, command.name, command.number)
    claims_name = command.name is not None and command.number is None
    if claims_name and row.name not in (None, command.name):
        raise InvalidArgument(f"the transaction began as {row.name!r}: it can't claim another name")
    if not 0 <= command.wait_ms <= limits.MAX_WAIT_MS:
        raise InvalidArgument(f"wait_ms {command.wait_ms} is not within 0 and {limits.MAX_WAIT_MS}")
    check_receipts(turn, row.txn_id, named)
    writers = choose_writers(txn, command)
    former = txn.pending
    if former is not None:
        same = (former.name, former.number, former.consumed) == (
            command.name,
            command.number,
            command.consumed,
        )
        try:
            _check_replaced(former.writers, {receipt.writer: receipt for receipt in writers}, same)
        except OutcomeUnknown as error:  # this commit may end otherwise than the former
            end_pending(turn, row.txn_id, error)
    waiting = _join_waiting(txn.pending, to)
    turn.put(
        k.pending_key(row.txn_id),
        replace(
            waiting,
            writers=writers,
            name=command.name,
            number=command.number,
            deadline_ms=turn.wall_ms + command.wait_ms,
            consumed=command.consumed,
        ),
    )


def _check_consumed(turn: Turn, row: TxnRow, command: Commit) -> None:
    """Whether the commit moves the positions of the tenure that its begin named, now. Raises as `tenures.judge`."""
    consumed = command.consumed
    named = None if consumed is None else tenures.hash_of(consumed.processor, consumed.tenure)
    if named != row.consumes:
        raise InvalidArgument(
            "a commit moves the positions of the tenure that its transaction began with, and no others: begin it "
            "with the tenure, and give `consumed`"
        )
    if consumed is not None:
        if command.name is not None:
            raise InvalidArgument("a commit that moves positions claims no name and no number")
        tenures.judge(turn, consumed, row.txn_id, row.scope, row.owner)


def _check_decided(row: TxnRow, command: Commit) -> None:
    """`AlreadyCommitted` for a commit that was decided with other positions than this one's."""
    consumed = command.consumed
    if row.state == "ABORTED" or row.state == "ABORT_IN_PROGRESS":
        return
    if row.consumes != (None if consumed is None else tenures.digest_of(consumed)):
        raise AlreadyCommitted(
            "the transaction is committed, or being committed, with other positions: its outcome stands"
        )


def _heard_late(turn: Turn, to: ReplyTo | None, row: TxnRow) -> bool:
    """Whether a commit is answered although its token's time is over: perhaps it came before, in time."""
    return row.state != "OPEN" or _waits(turn.open(row.txn_id).pending, to)


def _earlier_answer(turn: Turn, row: TxnRow, command: Commit) -> Outcome | None:
    """The answer to an aborted transaction's repeated commit; None: only that it is aborted."""
    yielded = turn.state.yielded(row.txn_id)
    if yielded is not None and (yielded.name, yielded.number) == (command.name, command.number):
        earlier = claims.answer(turn, yielded, row.owner)
        if earlier is not None:
            return earlier
    if command.number is not None:
        return None
    named = None
    with suppress(NotAuthorized):  # another lane's is no answer: this one is aborted
        named = earlier_outcome(turn, row.scope, command.name, row.owner)
    return None if named is None else turn.outcome(named)


def _check_replaced(
    wanted: Iterable[Receipt], taken: Mapping[int, Receipt], same_claim: bool = True
) -> None:
    """`OutcomeUnknown` if a commit is waiting or decided without what another one wants."""
    behind = left_behind(wanted, taken)
    if behind or not same_claim:
        without = f"writer {writers_text(behind)}" if behind else "this one's name and number"
        raise OutcomeUnknown(
            f"another commit of this transaction is under way, without {without}: ask for the outcome; "
            "while it is open, commit again with all receipts"
        )


def _waits(pending: PendingCommitRow | None, to: ReplyTo | None) -> bool:
    if pending is None or to is None:
        return False
    waiting = zip(pending.lanes, pending.reply_partitions, pending.correlation_ids, strict=True)
    return (to.lane, to.partition, to.correlation_id) in waiting


def _join_waiting(pending: PendingCommitRow | None, to: ReplyTo | None) -> PendingCommitRow:
    """Add an asker who waits for the answer; a repeated command does not wait twice."""
    if pending is None:
        pending = PendingCommitRow((), (), (), (), False, (), None, None, 0)
    if to is None or _waits(pending, to):
        return pending
    if len(pending.correlation_ids) >= limits.WAITERS.value:
        raise NotReady(f"{limits.WAITERS.value:,} wait for the outcome already: ask again")
    return replace(
        pending,
        correlation_ids=(*pending.correlation_ids, to.correlation_id),
        reply_partitions=(*pending.reply_partitions, to.partition),
        lanes=(*pending.lanes, to.lane),
        commands=(*pending.commands, to.command),
    )


# -- due work -----------------------------------------------------------------------------------------


def advance_commits(turn: Turn) -> None:
    """Merge the commits decided in former rounds, then decide the pending ones that can be decided."""
    if not turn.state.committing:
        return
    waiting = sorted(turn.state.committing)  # an order that a successor repeats
    merge_decided(turn, [txn_id for txn_id in waiting if _can_merge(turn, txn_id)])
    for txn_id in waiting:
        txn = turn.state.open.get(txn_id)
        # Merged or superseded meanwhile, a transaction is no longer open.
        if txn is not None and txn.pending is not None and not txn.pending.decided:
            _try_decide(turn, txn_id, txn, txn.pending)


def _can_merge(turn: Turn, txn_id: bytes) -> bool:
    """Whether the commit is decided, and this leader has read the journals that far."""
    pending = turn.state.open[txn_id].pending
    return pending is not None and pending.decided and turn.index.covers(pending.writers)


def next_due_ms(
    state: State, index: JournalIndex, merging: Merging, wall_ms: int, now_ms: int
) -> int | None:
    """Milliseconds until the next commit is to be looked at: 0 if one can be merged at once.

    A commit that the journals do not cover yet is not due: reading them wakes the loop.
    """
    due = []
    for txn_id in state.committing:
        pending = state.open[txn_id].pending
        if pending is not None and pending.decided:
            if index.covers(pending.writers):
                due.append(max(0, merging.not_before_ms.get(txn_id, 0) - now_ms))
        elif pending is not None:
            due.append(max(0, pending.deadline_ms - wall_ms))
    return min(due, default=None)


def _try_decide(turn: Turn, txn_id: bytes, txn: OpenTxn, pending: PendingCommitRow) -> None:
    late = turn.wall_ms >= pending.deadline_ms
    if not late and not turn.index.covers(pending.writers):
        return  # the usual wait: don't weigh in vain
    weighed = turn.index.weigh(turn.state, txn_id, pending.writers)
    error = _why_not(turn, txn, weighed, pending)
    if error is None:
        _decide(turn, txn_id, txn, pending, weighed)
    elif isinstance(error, TenureLost):
        end_pending(turn, txn_id, error)
        abort_txn(turn, txn_id, str(error))
    elif late or not isinstance(error, ReceiptsNotCovered | NotReady):
        end_pending(turn, txn_id, error)
        turn.hear(txn_id)  # the keepalive stopped at the commit: it begins afresh


def _why_not(
    turn: Turn, txn: OpenTxn, weighed: Weighed, pending: PendingCommitRow
) -> AnabranchError | None:
    gone = [s for s in sorted(txn.participants) if not turn.usable(s)]
    if gone:
        why = turn.memory.waiting.get(gone[0], "it is lost")
        return NotReady(f"{gone[0]} waits: {why}; the transaction is still open")
    if not weighed.covered:
        return ReceiptsNotCovered(
            "the journal did not show all that the receipts claim before the deadline; the transaction "
            "is still open: commit again"
        )
    if weighed.wrong:
        return ReceiptMismatch(weighed.wrong)
    try:
        check_writes(turn.state, txn.row, txn.participants)
        _earlier(turn, txn.row, pending)
        if pending.consumed is not None:
            parts = txn.row.txn_id, txn.row.scope, txn.row.owner
            tenures.judge(turn, pending.consumed, *parts)
    except (NotAuthorized, NotReady, TenureLost, InvalidArgument) as error:
        return error
    return None


def _decide(
    turn: Turn, txn_id: bytes, txn: OpenTxn, pending: PendingCommitRow, weighed: Weighed
) -> None:
    """Log that the transaction commits, with exactly these writers."""
    row = txn.row
    earlier = _earlier(turn, row, pending)
    if earlier is not None:
        _yield_to(turn, txn_id, earlier)
        return
    if pending.name is not None and pending.number is not None:
        claims.take_number(turn, row, pending.name, pending.number)
    elif pending.name is not None and pending.name != row.name:
        supersede(turn, row.scope, pending.name, txn_id)
        row = row._replace(name=pending.name)
    if pending.consumed is not None:
        tenures.begin_moving(turn, pending.consumed, txn_id)
        row = row._replace(consumes=tenures.digest_of(pending.consumed))
    moved = turn.move(row, "begin_commit", committed=weighed.committed, left_out=weighed.left_out)
    turn.put(k.txn_key(txn_id), moved)
    turn.put(k.pending_key(txn_id), replace(pending, decided=True))
    take_exactly(turn, txn, pending.writers)
    for stream, epoch in sorted(txn.participants.items()):
        journal_op(turn, stream, JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))


def _earlier(turn: Turn, row: TxnRow, pending: PendingCommitRow) -> YieldedRow | None:
    """The claim that this commit gives way to. `NotReady` while it commits, `NotAuthorized`: another lane's."""
    if pending.name is None:
        return None
    if pending.number is not None:
        return claims.overtaken(turn, row, pending.name, pending.number)
    if pending.name == row.name:
        return None
    earlier = earlier_outcome(turn, row.scope, pending.name, row.owner)
    return None if earlier is None else YieldedRow(pending.name, None, -1, earlier.txn_id)


def _yield_to(turn: Turn, txn_id: bytes, earlier: YieldedRow) -> None:
    """Answer with the commit that has the claim already, and abort this transaction."""
    try:
        answer: object = claims.answer(turn, earlier, turn.open(txn_id).row.owner)
    except AlreadyCommitted as error:
        answer = refuse(error)
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, answer)
    turn.put(k.yielded_key(txn_id), earlier)
    abort_txn(turn, txn_id, claims.reason(earlier))


# -- one-shots ----------------------------------------------------------------------------------------


def one_shot(turn: Turn, command: OneShot, to: ReplyTo | None) -> None:
    """A whole transaction in one command; events are placed by key in the active segments."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    if command.consumed is not None or is_marked(command.txn_id):
        _one_shot_of_tasks(turn, command, to)
        return
    row = turn.state.txn_row(command.txn_id)
    if row is not None:
        if row.state == "ABORTED":
            earlier = None
            with suppress(NotAuthorized):
                earlier = earlier_outcome(turn, command.scope, command.name, row.owner)
            if earlier is None:
                raise TransactionAborted(
                    f"the transaction is aborted ({row.reason}): begin a new one"
                )
            row = earlier
        elif (row.state, row.scope, row.name, row.committed) != (
            "COMMITTED",
            command.scope,
            command.name,
            len(command.events),
        ):
            raise InvalidArgument(
                "the transaction id is in use with other arguments: make a new one"
            )
        turn.reply(to, turn.outcome(row))
        return
    turn.check_new_id(command.txn_id)
    placed = _place(turn, command)
    earlier = earlier_outcome(turn, command.scope, command.name, turn.lane)
    if earlier is not None:
        # Its own id must not commit when the name is forgotten and the command is repeated.
        reason = f"the name {command.name!r} was committed before by {earlier.txn_id.hex()}"
        scope, owner = command.scope, turn.lane
        never = born(
            "give_way", command.txn_id, turn.wall_ms, scope=scope, owner=owner, reason=reason
        )
        turn.put(k.txn_key(command.txn_id), never)
        turn.reply(to, turn.outcome(earlier))
        return
    supersede(turn, command.scope, command.name, command.txn_id)
    timestamp = _append(turn, command, placed)
    row = born(
        "one_shot",
        command.txn_id,
        turn.wall_ms,
        scope=command.scope,
        name=command.name,
        commit_timestamp=timestamp,
        committed=len(command.events),
        owner=turn.lane,
    )
    turn.put(k.txn_key(command.txn_id), row)
    turn.reply(to, turn.outcome(row, full=False))


def _one_shot_of_tasks(turn: Turn, command: OneShot, to: ReplyTo | None) -> None:
    """A one-shot that moves positions: the tasks' rows are its outcome, so it leaves none of its own."""
    consumed = command.consumed
    if consumed is None or command.name is not None or not is_marked(command.txn_id):
        raise InvalidArgument(
            "a one-shot moves positions if its id is marked so, and then has no name"
        )
    before = tenures.moved_by(turn, consumed, command.txn_id)
    if before is not None:
        turn.reply(to, tenures.outcome(command.scope, before, turn.lane))
        return
    tenures.judge(turn, consumed, command.txn_id, command.scope, turn.lane)
    placed = _place(turn, command)
    timestamp = _append(turn, command, placed)
    tenures.move(turn, consumed, command.txn_id, timestamp, len(command.events))
    task = (consumed.processor, consumed.steps[0].tasks[0])
    turn.reply(to, tenures.outcome(command.scope, turn.state.tasks[task], turn.lane))


_Placed = Mapping[str, list[tuple[SegmentRange, list[Event]]]]


def _append(turn: Turn, command: OneShot, placed: _Placed) -> int:
    """Put the events of a one-shot into the round. Returns their commit timestamp."""
    timestamp = turn.next_timestamp()
    for stream, by_segment in placed.items():
        parts = tuple(
            [
                Part(segment.segment_id, segment.partition, events=tuple(events))
                for segment, events in by_segment
            ]
        )
        target = turn.state.streams[stream]
        epoch = target.stream_epoch
        wide = vectors.FEW + target.partitions // vectors.EVERY  # not each record has the vector
        turn.size += 16 * min(target.partitions, wide)  # in the history's record, about
        turn.round.history.append(StreamCommit(command.txn_id, stream, epoch, timestamp, parts))
    return timestamp


def _place(turn: Turn, command: OneShot) -> dict[str, list[tuple[SegmentRange, list[Event]]]]:
    """Events by stream and active segment, in order."""
    by_stream: dict[str, list[Event]] = {}
    events: list[Event] = []
    former, most, may_be_big = None, 0, True
    for event in command.events:
        stream, _, key, value, headers, timestamp = event
        if stream != former:
            if stream not in by_stream:
                # A name that is known is a legal one: mostly that is all there is to check.
                if stream not in turn.state.streams or not stream.startswith(f"{command.scope}/"):
                    check_in_scope(stream, command.scope)
                check_right(turn.state, turn.lane, Right.WRITE, stream)
                active_stream(turn, stream)
                by_stream[stream] = []
            former, events = stream, by_stream[stream]
            most = int(turn.state.streams[stream].settings.get(MAX_MESSAGE, limits.MESSAGE.value))
            may_be_big = _FRAMING + turn.command_bytes > most
        if timestamp != -1 and not 0 <= timestamp <= limits.EVENT_TIME.value:
            raise InvalidArgument(
                f"an event's timestamp is {timestamp} ms: -1 (now) to {limits.EVENT_TIME.value}"
            )
        if headers or may_be_big:
            limits.HEADERS.check(len(headers), "an event")
            size = _FRAMING + len(key or b"") + len(value or b"")
            size += sum(len(name) + len(content or b"") for name, content in headers)
            if size > most:
                raise EventTooLarge(
                    f"an event of {size:,} bytes; {stream} takes up to {most:,} (its setting {MAX_MESSAGE})"
                )
            for name, _ in headers:
                if name.startswith("ab."):
                    raise InvalidArgument(f"header {name!r}: names that begin so are reserved")
        events.append(event)
    return {
        stream: turn.state.layouts[stream].spread(events) for stream, events in by_stream.items()
    }
