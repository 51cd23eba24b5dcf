"""Decisions on commits through journals, from the command to the decision.

A commit has three stages. A refusal before *decided* leaves the transaction open and unchanged.

1. *pending*: the commit is logged, and waits, with a deadline, until the journals are indexed up to its receipts.
2. *decided*: COMMIT_IN_PROGRESS and the exact list of writers are logged; from now on any leader can finish it.
3. *merged* (`merge`): its timestamp, events, history records, COMMITTED and the answers are written in one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from anabranch import errors
from anabranch.core import parts, work
from anabranch.core import rows as k
from anabranch.core.across.coordinator import Step
from anabranch.core.authorize import check_writes
from anabranch.core.decisions import claims, one_shot, positions, prepared
from anabranch.core.decisions.across import coordinating
from anabranch.core.decisions.across.locking import GivesWay
from anabranch.core.decisions.merge import merge_decided
from anabranch.core.decisions.transactions import (
    abort_txn,
    answer_decided,
    earlier_outcome,
    end_pending,
    journal_op,
)
from anabranch.core.decisions.turn import Turn, is_finished, refuse
from anabranch.core.decisions.writers import (
    check_receipts,
    choose_writers,
    receipts_here,
    take_exactly,
    writers_text,
)
from anabranch.core.journal_index import JournalIndex
from anabranch.core.journal_runs import not_covered
from anabranch.core.locks import conflicts, frozen
from anabranch.core.memory import Merging
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.core.transaction_states import TRANSACTIONS, Op
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.ids import hash_of
from anabranch.protocol.legal_names import check_name, check_number
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights


@dataclass(slots=True)
class _Request:
    """A commit of an open transaction while it is checked. ``named``: the receipts in the command. ``writers``: the
    receipts that the commit takes.
    """

    txn: OpenTxn
    command: r.Commit
    named: tuple[r.Receipt, ...]
    writers: tuple[r.Receipt, ...] = ()


def commit(turn: Turn, command: r.Commit, to: ReplyTo | None) -> None:
    """Log a commit as pending, answer a repeated one, or add its asker to a commit under way."""
    prepared.check_arguments(command)
    row = turn.transaction(
        command.token,
        Rights.COMMIT,
        partial(_accepts_expired, turn, to),
        prepared.proven_by(turn, command.secret),
    )
    named = (*command.own, *(command.receipts or ()))
    if row.state != "OPEN":
        _check_decided(turn, row, command)
        if command.prepare is not None:
            prepared.check_same(turn, row, command.prepare)
    is_over = is_finished(row) or row.state == "ABORT_IN_PROGRESS"  # its participants follow
    if is_over and _answer_ended(turn, row, command, named, to):
        return
    TRANSACTIONS.judge(row.state, "begin_commit", row.reason)
    txn = turn.open(row.txn_id)
    # A coordinator whose own part is merged keeps no locks, so reports of them are passed over.
    is_merged = txn.votes_row is not None and txn.votes_row.own_merged
    reports = () if is_merged else command.validated
    validated = conflicts.validated_rows(turn, turn.state.locks.of(row.txn_id), reports)
    if row.state == "PREPARED":
        _commit_prepared(turn, txn, command, to)
    elif row.state == "OPEN":
        turn.hear(row.txn_id)
        if not is_waiting(txn.pending, to):  # a repeated command does not change the deadline
            _log_pending(turn, _Request(txn, command, named), validated, to)
    else:
        _join_decided(turn, txn, named, validated, to)


def _answer_ended(
    turn: Turn, row: r.TxnRow, command: r.Commit, named: tuple[r.Receipt, ...], to: ReplyTo | None
) -> bool:
    """Answer a commit of a finished transaction. False: it is aborted, and the caller refuses the commit."""
    if row.state != "COMMITTED":
        # If it gave way to an earlier commit, the answer is that commit again.
        earlier = _earlier_answer(turn, row, command)
        if earlier is not None:
            turn.reply(to, earlier)
        elif row.broken is not None:
            turn.answer(to, row)
        return earlier is not None or row.broken is not None
    turn.charge(work.of_receipts(named) + work.LOOK * len(named))
    taken = {one.writer: turn.state.receipt(row.txn_id, one.writer) for one in named}
    missing = not_covered(named, {writer: one for writer, one in taken.items() if one})
    if missing:
        raise errors.AlreadyCommitted(
            f"the transaction was committed without writer {writers_text(missing)}, by another commit: its "
            "outcome stands; write that again"
        )
    turn.answer(to, row)
    return True


def _log_pending(
    turn: Turn, request: _Request, validated: Mapping[int, r.ValidatedRow], to: ReplyTo | None
) -> None:
    """Log the commit as pending, if no check refuses it and its locks are validated."""
    for one in CHECKS:
        one(turn, request)
    txn, command, txn_id = request.txn, request.command, request.txn.row.txn_id
    if (again := conflicts.to_revalidate(turn, txn_id, validated)) is not None:
        conflicts.put_validated(turn, txn_id, validated)
        turn.reply(to, again)
        return
    former, claim = txn.pending, (command.name, command.number, command.consumed, command.prepare)
    if former is not None:
        same = (former.name, former.number, former.consumed, former.prepare) == claim
        try:
            _check_replaced(former.writers, {one.writer: one for one in request.writers}, same)
        except errors.OutcomeUnknown as error:
            end_pending(turn, txn_id, error)  # this commit may end differently from that one
    pending = join_waiting(txn.pending, to)._replace(
        writers=request.writers,
        name=command.name,
        number=command.number,
        deadline_ms=turn.wall_ms + command.wait_ms,
        consumed=command.consumed,
        prepare=command.prepare,
    )
    conflicts.put_validated(turn, txn_id, validated)
    turn.put(k.pending_key(txn_id), pending)
    if txn.partitions:
        _note_exactly(turn, txn, former, pending, exactly=command.receipts is not None)


def _note_exactly(
    turn: Turn, txn: OpenTxn, former: r.PendingCommitRow | None, pending: r.PendingCommitRow,
    *, exactly: bool,
) -> None:  # fmt: skip
    """Note whether a commit over control partitions names all its writers.

    If the participants are asked for votes on another commit of the transaction, they have to reopen first.
    """
    txn_id = txn.row.txn_id
    same = former is not None and (former.writers, former.prepare) == (
        pending.writers,
        pending.prepare,
    )
    same = same and exactly == turn.across.exactly.get(txn_id, False)
    turn.across.exactly.put(txn_id, exactly)
    if coordinating.has_asked(txn) and not same:
        coordinating.begin_round(turn, txn_id, "REOPEN")


def _check_level(turn: Turn, request: _Request) -> None:
    parts.check_level(turn, request.command, request.txn.row.txn_id)


def _check_across(turn: Turn, request: _Request) -> None:
    """Refuse what transactions over several control partitions can't do yet."""
    txn = request.txn
    if not txn.partitions:
        return
    if prepared.shot_of(turn.state, txn.row.txn_id) is not None:
        raise errors.InvalidArgument("this transaction is a one-shot, whose commit is under way")


def _check_rights(turn: Turn, request: _Request) -> None:
    check_writes(turn.state, request.txn.row, request.txn.participants)


def _check_positions(turn: Turn, request: _Request) -> None:
    """Check that the commit moves positions of the ownership that its begin named, and no others."""
    row, consumed = request.txn.row, request.command.consumed
    named = None if consumed is None else hash_of(consumed.processor, consumed.fencing_token)
    if named != row.consumes:
        raise errors.InvalidArgument(
            "a commit moves the positions of the ownership that its transaction began with, no others: begin it "
            "with that ownership, and give `consumed`"
        )
    # Lost ownership is no refusal: `_try_decide` aborts the transaction then.
    with suppress(errors.OwnershipLost):
        if consumed is not None:
            positions.judge(turn, consumed, row.txn_id, row.scope, row.owner)


def _check_claim(turn: Turn, request: _Request) -> None:
    command, row = request.command, request.txn.row
    check_name(command.name)
    check_number(command.name, command.number)
    claims.check_jump(turn, row, command.name, command.number)
    claims_name = command.name is not None and command.number is None
    if claims_name and row.name not in (None, command.name):
        raise errors.InvalidArgument(
            f"the transaction began as {row.name!r}: it can't claim another name"
        )


def _check_wait(turn: Turn, request: _Request) -> None:
    wait_ms = request.command.wait_ms
    if not 0 <= wait_ms <= limits.MAX_WAIT_MS:
        raise errors.InvalidArgument(
            f"wait_ms {wait_ms:,} is not within 0 and {limits.MAX_WAIT_MS:,}"
        )


def _check_writers(turn: Turn, request: _Request) -> None:
    check_receipts(turn, request.txn.row.txn_id, request.named)
    request.writers = choose_writers(turn, request.txn, request.command)


def _check_state(turn: Turn, request: _Request) -> None:
    state = positions.state_of(request.txn.participants, request.writers)
    positions.check_state(request.command.consumed, state)


def _check_locks(turn: Turn, request: _Request) -> None:
    conflicts.check_conflicts(turn, request.txn, request.writers)


# The checks of a commit, in their order; a new check is one more entry. The checks put no row.
CHECKS: tuple[Callable[[Turn, _Request], None], ...] = (
    _check_level,
    _check_across,
    _check_rights,
    _check_positions,
    _check_claim,
    _check_wait,
    _check_writers,
    _check_state,
    _check_locks,
)


def _join_decided(
    turn: Turn,
    txn: OpenTxn,
    named: tuple[r.Receipt, ...],
    validated: Mapping[int, r.ValidatedRow],
    to: ReplyTo | None,
) -> None:
    """Add an asker to a decided commit. The command's reports of validated locks count, whatever its receipts."""
    txn_id = txn.row.txn_id
    waiting = join_waiting(txn.pending, to)
    due = conflicts.to_revalidate(turn, txn_id)
    if due is None:
        _check_replaced(named, txn.writers)
    turn.hear(txn_id)
    conflicts.put_validated(turn, txn_id, validated)
    again = conflicts.to_revalidate(turn, txn_id)
    if again is None:
        turn.merging.look_now(txn_id)
        if not not_covered(named, txn.writers):
            turn.put(k.pending_key(txn_id), waiting)
            if txn.row.state == "FINALIZE_IN_PROGRESS":
                answer_decided(turn, txn.row)
            return
        # Not refused now, because a refusal would discard the reports: the next copy is refused.
        again = due
    turn.reply(to, again)


def _commit_prepared(turn: Turn, txn: OpenTxn, command: r.Commit, to: ReplyTo | None) -> None:
    """Answer a repeated prepare, or commit a PREPARED transaction for its coordinator."""
    row = txn.row
    named = (*command.own, *(command.receipts or ()))
    prepared.check_ending(txn, command, not_covered(named, txn.writers))
    if command.prepare is not None:
        turn.answer(to, row)
        return
    prepared.check_word(turn, row.txn_id, command.secret)
    commit_prepared(turn, row.txn_id, to)


def commit_prepared(turn: Turn, txn_id: bytes, to: ReplyTo | None) -> None:
    """Log that a PREPARED transaction commits. If a row has its events, this round merges it, else a later one.

    Participants at other control partitions learn it by messages, and are asked for their timestamps.
    """
    txn, kept = turn.open(txn_id), turn.state.prepared_row(txn_id)
    if txn.pending is None or (kept is not None and kept.events):
        one_shot.commit_events(turn, txn, to)
        return
    waiting = join_waiting(txn.pending, to)
    row = turn.move(txn.row, "begin_commit")
    turn.put(k.txn_key(txn_id), row)
    turn.put(k.pending_key(txn_id), waiting)
    answer_decided(turn, row)
    turn.newly_committing.add(txn_id)
    if txn.partitions:
        coordinating.begin_round(turn, txn_id, "TIMESTAMP")
    for stream, epoch in sorted(txn.participants.items()):
        journal_op(turn, stream, r.JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))


def _check_decided(turn: Turn, row: r.TxnRow, command: r.Commit) -> None:
    """Refuse a commit whose transaction was decided with other positions: `AlreadyCommitted`, `OutcomeUnknown`.

    A coordinator need not repeat the arguments of the prepare (`prepared.check_ending`).
    """
    consumed = command.consumed
    if row.state in ("ABORT_IN_PROGRESS", "ABORTED", "PREPARED"):
        return
    if row.consumes == (None if consumed is None else positions.digest_of(consumed)):
        return
    if consumed is None and command.prepare is None and turn.state.prepared_row(row.txn_id):
        return
    if row.state == "COMMITTED":
        raise errors.AlreadyCommitted(
            "the transaction was committed with other positions than these"
        )
    raise errors.OutcomeUnknown(
        "another commit of this transaction is under way, with other positions: ask for the outcome"
    )


def _accepts_expired(turn: Turn, to: ReplyTo | None, row: r.TxnRow) -> bool:
    """Whether to accept a commit whose token has expired, because an earlier copy may have come in time."""
    return row.state not in ("OPEN", "PREPARED") or is_waiting(turn.open(row.txn_id).pending, to)


def _earlier_answer(turn: Turn, row: r.TxnRow, command: r.Commit) -> r.Outcome | None:
    """The outcome with which this commit of an aborted transaction is answered; None if it gave way to no other."""
    yielded = turn.state.yielded(row.txn_id)
    if yielded is not None and (yielded.name, yielded.number) == (command.name, command.number):
        earlier = claims.answer(turn, yielded, row)
        if earlier is not None:
            return earlier
    if command.number is not None:
        return None
    named = None
    # Another lane's outcome is not shown: the answer is then that this transaction is aborted.
    with suppress(errors.NotAuthorized):
        named = earlier_outcome(turn, row.scope, command.name, row.owner)
    return None if named is None else claims.earlier(turn, named, moves=row.consumes is not None)


def _check_replaced(
    wanted: Iterable[r.Receipt], taken: Mapping[int, r.Receipt], same_claim: bool = True
) -> None:
    """`OutcomeUnknown` if the commit under way (``taken``) lacks a wanted receipt, or has another claim."""
    missing = not_covered(wanted, taken)
    if missing or not same_claim:
        without = f"writer {writers_text(missing)}" if missing else "this one's name and number"
        raise errors.OutcomeUnknown(
            f"another commit of this transaction is under way, without {without}: ask for the outcome; "
            "while it is open, commit again with all receipts"
        )


def is_waiting(pending: r.PendingCommitRow | None, to: ReplyTo | None) -> bool:
    """Whether the asker is among those that wait for the commit."""
    if pending is None or to is None:
        return False
    key = to.lane, to.partition, to.correlation_id
    return any((a.lane, a.reply_partition, a.correlation_id) == key for a in pending.askers)


def join_waiting(pending: r.PendingCommitRow | None, to: ReplyTo | None) -> r.PendingCommitRow:
    """The row with this asker added, unless the row has it already. `NotReady` at the limit of askers."""
    if pending is None:
        pending = r.PendingCommitRow((), False, (), None, None, 0)
    if to is None or is_waiting(pending, to):
        return pending
    if len(pending.askers) >= limits.WAITERS.value:
        raise errors.NotReady(f"{limits.WAITERS.value:,} wait for the outcome already: ask again")
    return pending._replace(askers=(*pending.askers, to.row))


# -- in each turn -------------------------------------------------------------------------------------


def advance_commits(turn: Turn) -> None:
    """Merge the commits that were decided in former rounds, then decide the pending ones that can be decided.

    `across.deciding` decides those with participants at other control partitions.
    """
    if not turn.state.committing:
        return
    waiting = sorted(turn.state.committing)  # the same order in each leader
    merge_decided(turn, [txn_id for txn_id in waiting if _can_merge(turn, txn_id)])
    for txn_id in waiting:
        txn = turn.state.open.get(txn_id)
        # A transaction that was merged or superseded in this loop is not open any more.
        if txn is None or txn.pending is None or txn.pending.decided or txn.partitions:
            continue
        with trying(turn, txn_id):
            ending = judge(turn, txn_id, txn, txn.pending)
            if ending is not None:
                _decide(turn, txn, txn.pending, ending)


@contextmanager
def trying(turn: Turn, txn_id: bytes) -> Iterator[None]:
    """Take a step of a pending commit. An error that concerns this commit alone ends it; the leader continues."""
    before, since, owner = turn.puts, turn.work, turn.open(txn_id).row.owner
    try:
        yield
    except (errors.FixCallError, errors.RetryError) as error:
        check(turn.puts == before, f"a commit that failed changed something: {error}")
        end_pending(turn, txn_id, error)
    turn.owe(owner, since)


def _can_merge(turn: Turn, txn_id: bytes) -> bool:
    """Whether a commit was decided in a former round, and the journals are indexed up to its receipts."""
    txn = turn.state.open[txn_id]
    pending = txn.pending
    if pending is None or not pending.decided or txn_id in turn.newly_committing:
        return False
    if txn.votes_row is not None and txn.votes_row.own_merged:
        return False
    needed = prepared.needed(turn.state, pending)
    place = turn.index.lacking(needed, txn if pending.prepare is None else None)
    if place is not None:
        turn.merging.wait(txn_id, "journal", turn.now_ms, 0, place[0])
    return place is None


def next_due_ms(
    state: State, index: JournalIndex, merging: Merging, wall_ms: int, now_ms: int
) -> int | None:
    """Milliseconds until the next commit has to be checked: 0 if a commit can be merged at once; None if no commit
    has to be checked.

    A decided commit that the journals do not cover yet is not counted: reading the journals begins the next turn.
    """
    due = []
    for txn_id in state.committing:
        txn = state.open[txn_id]
        pending = txn.pending
        if txn.votes_row is not None and txn.votes_row.own_merged:
            continue  # it waits for its participants
        if pending is not None and pending.decided:
            needed = prepared.needed(state, pending)
            if index.covers(needed, txn if pending.prepare is None else None):
                wait = merging.waits.get(txn_id, None)
                due.append(0 if wait is None else max(0, wait.until_ms - now_ms))
        elif pending is not None:
            due.append(max(0, pending.deadline_ms - wall_ms))
    return min(due, default=None)


def ending_of(
    txn: OpenTxn,
    pending: r.PendingCommitRow,
    kept: r.PreparedRow | None = None,
    *,
    late: bool = False,
) -> parts.Ending:
    """A commit while it is decided. ``kept``: the row with the events of a one-shot; None: they are in journals.

    ``late``: whether its deadline has passed.
    """
    check_events, writes = (
        (partial(_check_events, txn, pending, late), partial(_writes_in_journals, pending))
        if kept is None
        else (partial(one_shot.check_kept, txn), lambda turn, _: frozen.writes_kept(turn, kept))
    )
    return parts.Ending(
        txn_id=txn.row.txn_id,
        scope=txn.row.scope,
        owner=txn.row.owner,
        named=txn.row.name,
        name=pending.name,
        number=pending.number,
        consumed=pending.consumed,
        prepare=pending.prepare,
        check_events=check_events,
        writes=writes,
        pending=pending,
    )


def judge(
    turn: Turn, txn_id: bytes, txn: OpenTxn, pending: r.PendingCommitRow
) -> parts.Ending | None:
    """The commit, if it can be decided now. None: it waits, or it has ended without a decision."""
    late = turn.wall_ms >= pending.deadline_ms
    kept = prepared.shot_of(turn.state, txn_id) if txn.partitions else None
    ending = ending_of(txn, pending, kept, late=late)
    try:
        may = parts.check(turn, ending)
    except (errors.OwnershipLost, errors.UnknownProcessor) as lost:
        # Another worker has the tasks, so the transaction can never commit.
        end_pending(turn, txn_id, lost)
        abort_txn(turn, txn_id, str(lost))
    except GivesWay as error:
        if late:
            end_pending(turn, txn_id, error)
            turn.hear(txn_id)
        else:
            coordinating.carry_out(turn, txn_id, Step.AGAIN)
    except (errors.FixCallError, errors.RetryError, errors.LocksBroken) as error:
        if late or not isinstance(error, errors.ReceiptsNotCovered | errors.NotReady):
            end_pending(turn, txn_id, error)
            turn.hear(txn_id)  # the keepalive, which stops while a commit is pending, starts again
    else:
        if may:
            return ending
        if ending.instead is not None:
            _yield_to(turn, txn_id, ending.instead)
        else:
            for to in end_pending(turn, txn_id, None):
                turn.reply(to, ending.again)
            turn.hear(txn_id)
    return None


def _writes_in_journals(
    pending: r.PendingCommitRow, turn: Turn, ending: parts.Ending
) -> frozen.Writes:
    tables = turn.state.tables
    return frozen.writes_in_journals(turn, ending.txn_id, pending.writers, tables)


def _check_events(
    txn: OpenTxn, pending: r.PendingCommitRow, late: bool, turn: Turn, ending: parts.Ending
) -> None:
    """Check what the journals show of a commit. ``late``: whether its deadline has passed."""
    writers = receipts_here(txn, pending.writers)
    if not late and not turn.index.covers(writers, txn):
        raise errors.ReceiptsNotCovered("the usual wait")
    gone = [s for s in sorted(txn.participants) if not turn.usable(s)]
    if gone:
        why = turn.memory.waiting.get(gone[0], "it is lost")
        raise errors.NotReady(f"{gone[0]} waits: {why}; the transaction is still open")
    weighed = ending.weighed = turn.index.weigh(turn.state, txn.row.txn_id, writers)
    if not weighed.covered:
        raise errors.ReceiptsNotCovered(
            "the journal did not show all that the receipts claim before the deadline; the transaction "
            "is still open: commit again"
        )
    if weighed.wrong:
        raise errors.ReceiptMismatch(weighed.wrong)
    for stream, latest in weighed.latest.items():
        limits.check_ahead(latest, turn.latest_time(stream), stream)
    check_writes(turn.state, txn.row, txn.participants)
    positions.check_state_size(turn, weighed.state)


def _decide(turn: Turn, txn: OpenTxn, pending: r.PendingCommitRow, ending: parts.Ending) -> None:
    """Log that the transaction commits, or is prepared, with exactly these writers."""
    txn_id, weighed = txn.row.txn_id, ending.weighed
    check(weighed is not None, "a commit is decided whose journals were not weighed")
    prepares = pending.prepare is not None
    waiting = end_pending(turn, txn_id, None) if prepares else []
    parts.hold(turn, ending)
    op: Op = "prepare" if prepares else "begin_commit"
    changes = dict(ending.gains)
    if weighed is not None:
        changes |= {"committed": weighed.committed, "left_out": weighed.left_out}
    row = turn.move(txn.row, op, **changes)
    turn.put(k.txn_key(txn_id), row)
    take_exactly(turn, txn, pending.writers)
    for to in waiting:
        turn.answer(to, row)
    if not prepares:
        turn.put(k.pending_key(txn_id), pending._replace(decided=True))
        for stream, epoch in sorted(txn.participants.items()):
            journal_op(turn, stream, r.JournalOp("BEGIN_COMMIT", txn_id, epoch, 0))


def _yield_to(turn: Turn, txn_id: bytes, earlier: r.YieldedRow) -> None:
    """Answer with the outcome of the commit that has the claim, and abort this transaction."""
    try:
        answer: object = claims.answer(turn, earlier, turn.open(txn_id).row)
    except errors.AlreadyCommitted as error:
        answer = refuse(error)
    for to in end_pending(turn, txn_id, None):
        turn.reply(to, answer)
    turn.put(k.yielded_key(txn_id), earlier)
    abort_txn(turn, txn_id, claims.reason(earlier))
