"""Parts of one-shots over several control partitions: the participant's side (`docs/inside/across.md`, 5).

The client sends a command to each control partition, all under one id and with one secret.
`coordinating_one_shots.one_shot` receives them all. The command to a participant waits here in memory until the
coordinator asks for a vote (`wait_for_question`). The command proves the question, whose HMAC needs the
command's secret: nothing else is known of the id here (M5). If the question comes first, it waits
(`keep_early`).

Then `participating.on_ask_vote` calls `first_vote`. This logs the part, prepared, with its events (S5), or answers
*no* and logs nothing. From then on the part is a transaction like any other, marked with `prepared.SHOT`. If no
decision follows, `ask_decisions` asks for it (`AskDecision`, S3).

The rows of a part (`row_of`, `log_part`, `put_streams`) are the same at the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from anabranch import errors
from anabranch.core import parts, work
from anabranch.core import rows as k
from anabranch.core.across import participant
from anabranch.core.decisions import one_shot as shots
from anabranch.core.decisions.across import coordinating, holding, locking
from anabranch.core.decisions.across.locking import GivesWay
from anabranch.core.decisions.prepared import SHOT, shot_of
from anabranch.core.decisions.transactions import check_open
from anabranch.core.decisions.turn import FORGOTTEN, Turn, refuse
from anabranch.core.locks import locked_segments, row_changes
from anabranch.core.memory import AskedShot, EarlyAsk, Sent, WaitingCommand, WaitingPart
from anabranch.core.round import ReplyTo
from anabranch.core.transaction_states import born
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, segment_number
from anabranch.protocol.schemas import records as r

PART_MS = 5_000  # how long a command waits for the question for a vote
EARLY_MS = 1_000  # how long a question waits for its command, if it comes first
# How long a participant waits for the decision before it asks for it; then after twice as long each time, up to
# `LONGEST_PAUSE_MS`. A coordinator that has logged the transaction repeats its own messages sooner.
DECISION_MS = 1_000
FIRST_ROUND: tuple[int, r.Asks] = 1, "TIMESTAMP"  # the first round of votes, and its question
_SIZE = attrgetter("size")
_KEEPALIVE_MS = 1_000  # in the row of a part, which no keepalive ends


def wait_for_question(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Keep a command until its coordinator asks for a vote. If that question came first, answer it in this turn."""
    if turn.is_forgotten(command.txn_id):
        raise errors.Expired(FORGOTTEN)
    turn.check_new_id(command.txn_id)
    across, txn_id = turn.across, command.txn_id
    size = min(turn.command_bytes, turn.settings.command_bytes)
    waiting = WaitingPart(command, turn.lane, to, turn.now_ms + PART_MS, size)
    before = across.waiting_parts.get(txn_id, None)
    if before is not None:
        # The first command counts: a stranger can't replace it.
        if (before.lane, before.command.secret) != (turn.lane, command.secret):
            raise errors.InvalidArgument(shots.OTHERS)
    else:
        _check_room_for_part(turn, size)
    across.waiting_parts.put(txn_id, waiting)


def check_room(
    turn: Turn, waiting: Sequence[WaitingPart | WaitingCommand | AskedShot], size: int
) -> None:
    """`NotReady` if too many commands wait for other control partitions, or too many of this lane.

    ``size``: of the next one, bytes.
    """
    turn.charge(work.of_items(len(waiting)))
    total = size + sum(map(_SIZE, waiting))
    most, most_bytes = limits.HELD_PARTS.value, limits.HELD_BYTES.value
    if len(waiting) < most // 2 and total <= most_bytes // 2:
        return
    own = [command.size for command in waiting if command.lane == turn.lane]
    if (
        len(waiting) >= most
        or len(own) >= most // 2
        or total > most_bytes
        or size + sum(own) > most_bytes // 2
    ):
        raise errors.NotReady(
            f"{len(waiting):,} commands wait for other control partitions, {len(own):,} of them from lane "
            f"{turn.lane}: ask again"
        )


def _check_room_for_part(turn: Turn, size: int) -> None:
    check_room(turn, [*turn.across.waiting_parts.as_dict().values()], size)


def keep_refusal(
    turn: Turn, command: r.OneShot, to: ReplyTo | None, error: errors.AnabranchError
) -> None:
    """Keep the refusal of a command, to answer its coordinator's question with it.

    The client waits for the coordinator alone, which would otherwise miss a vote, and not know why.
    """
    txn_id, waiting = command.txn_id, turn.across.waiting_parts
    is_foreign = control_partition_of(txn_id) != turn.settings.control_partition
    if not (turn.settings.across and is_foreign) or isinstance(error, errors.NotReady):
        return
    if waiting.get(txn_id, None) is not None or turn.state.txn_row(txn_id) is not None:
        return
    with suppress(errors.NotReady):
        _check_room_for_part(turn, 0)
        bare = command._replace(events=(), locks=(), changes=())
        waiting.put(
            txn_id, WaitingPart(bare, turn.lane, to, turn.now_ms + PART_MS, 0, refuse(error))
        )


def note_undecided(turn: Turn, txn_id: bytes) -> None:
    """Note that a one-shot's part is logged: if no decision comes, `ask_decisions` asks for it."""
    next_ms = turn.now_ms + DECISION_MS
    turn.across.undecided.put(txn_id, Sent(FIRST_ROUND, turn.now_ms, next_ms, DECISION_MS))


def ask_decisions(turn: Turn) -> None:
    """Ask the coordinators of one-shots for decisions that have not come."""
    undecided = turn.across.undecided
    for txn_id, sent in sorted(undecided.as_dict().items()):
        if turn.now_ms < sent.next_ms:
            continue
        row = turn.state.txn_row(txn_id)
        is_open = row is not None and row.state in ("OPEN", "PREPARED")
        if row is None or not is_open or shot_of(turn.state, txn_id) is None:
            undecided.put(txn_id, None)
            continue
        pause_ms = min(max(2 * sent.pause_ms, DECISION_MS), coordinating.LONGEST_PAUSE_MS)
        undecided.put(txn_id, Sent(FIRST_ROUND, sent.since_ms, turn.now_ms + pause_ms, pause_ms))
        here, head = turn.settings.control_partition, coordinating.head_of(row)
        question = r.AskDecision(txn_id, here, head)
        turn.ask(control_partition_of(txn_id), question, head.secret)


def waiting_here(turn: Turn, txn_id: bytes) -> WaitingPart | AskedShot | None:
    """The command of a one-shot that waits here, and of which nothing is logged.

    Its secret has to prove messages about the transaction, and its lane is charged for them.
    """
    across = turn.across
    return across.waiting_parts.get(txn_id, None) or across.asked_shots.get(txn_id, None)


def keep_early(turn: Turn, ask: r.AskVote, payload: bytes, mac: bytes | None, seen: int) -> None:
    """Keep a question that came before its command for a moment. Alone it proves nothing, so few are kept."""
    early = turn.across.early_asks
    is_small = not ask.receipts and len(payload) <= limits.EARLY_BYTES.value
    if is_small and len(early.as_dict()) < limits.EARLY_ASKS.value:
        early.put(ask.txn_id, EarlyAsk(ask, payload, mac, seen, turn.now_ms + EARLY_MS))


def take_early(turn: Turn) -> list[EarlyAsk]:
    """The questions whose commands have come meanwhile. Those that waited for too long are forgotten."""
    early, found = turn.across.early_asks, []
    for txn_id, early_ask in early.as_dict().items():
        if waiting_here(turn, txn_id) is not None:
            found.append(early_ask)
            early.put(txn_id, None)
        elif turn.now_ms >= early_ask.until_ms:
            early.put(txn_id, None)
    return found


def first_vote(turn: Turn, ask: r.AskVote, refusal: r.Refusal | None) -> r.Vote:
    """The first vote of a part whose command waits here. Only a yes is logged, with the part.

    ``refusal``: why the vote is a no in any case. Raises: NotReady (a stream is in trouble, or a lock is frozen):
    then the question waits, too.
    """
    txn_id, waiting = ask.txn_id, turn.across.waiting_parts.get(ask.txn_id, None)
    if waiting is None:
        raise errors.InvariantViolation("a question was proven by no command")
    turn.lane, command = waiting.lane, waiting.command
    here, promise = turn.settings.control_partition, r.CoordinatorRow(ask.votes_round)
    if ask.head.owner != turn.lane:
        error = errors.NotAuthorized("the commands of one transaction come from one lane")
        return participant.vote(txn_id, here, promise, "NO", error=refuse(error))
    refusal = waiting.refusal or refusal
    if refusal is not None:
        return participant.vote(txn_id, here, promise, "NO", error=refusal)
    ending = shots.ending_of(command, turn.lane)
    ending.prepare, ending.at_once = coordinating.ELSEWHERE, False
    try:
        check_open(turn)
        parts.check(turn, ending)
    except (GivesWay, errors.TooManyTransactions):
        return participant.vote(txn_id, here, promise, "AGAIN")
    except errors.NotReady:
        raise  # the vote waits
    except errors.AnabranchError as refused:
        return participant.vote(txn_id, here, promise, "NO", error=refuse(refused))
    if ending.again is not None:
        return participant.vote(txn_id, here, promise, "NO", revalidate=ending.again)
    turn.across.waiting_parts.put(txn_id, None)
    return _log_prepared(turn, ask, command, ending)


def _log_prepared(turn: Turn, ask: r.AskVote, command: r.OneShot, ending: parts.Ending) -> r.Vote:
    """Log a part that is prepared, with its promise."""
    txn_id, before = ask.txn_id, turn.hybrid_time
    promise = participant.next_promise(
        None, ask, staged=True, fresh=holding.prepare_timestamp(turn)
    )
    if not promise.prepare_timestamp:
        turn.hybrid_time = before
    row = row_of(turn, command, ask.head.scope, ask.head.owner)
    row = row._replace(begun_ms=ask.head.begun_ms)
    row = turn.move(row, "prepare", committed=shots.count(command))
    log_part(turn, row, command, ending)
    pending = r.PendingCommitRow((), False, (), None, None, 0, prepare=coordinating.ELSEWHERE)
    turn.put(k.pending_key(txn_id), pending)
    turn.put(k.coordinator_key(txn_id), promise)
    holding.put_entry(turn, txn_id)
    locking.take_back(turn, txn_id)
    note_undecided(turn, txn_id)
    here = turn.settings.control_partition
    return participant.vote(txn_id, here, promise, "YES", committed=row.committed)


def forget_part(turn: Turn, txn_id: bytes) -> None:
    """Forget a command that waits, as its transaction has ended."""
    if turn.across.waiting_parts.get(txn_id, None) is not None:
        turn.across.waiting_parts.put(txn_id, None)


def refuse_late(turn: Turn) -> None:
    """Refuse the commands whose coordinators did not ask in time."""
    for txn_id, part in turn.across.waiting_parts.as_dict().items():
        if turn.now_ms >= part.until_ms:
            home = control_partition_of(txn_id)
            text = f"control partition {home}, which coordinates the transaction, did not ask for a vote: ask again"
            turn.across.waiting_parts.put(txn_id, None)
            if part.refusal is None:  # else it was answered
                turn.reply(part.to, refuse(errors.NotReady(text)))


# -- the rows of a part, at both sides --------------------------------------------------------------------


def row_of(turn: Turn, command: r.OneShot, scope: str, owner: str) -> r.TxnRow:
    """The row of a one-shot as if it had just begun."""
    return born(
        "begin",
        command.txn_id,
        turn.wall_ms,
        scope=scope,
        keepalive_ms=_KEEPALIVE_MS,
        secret=command.secret,
        owner=owner,
    )


def log_part(turn: Turn, row: r.TxnRow, command: r.OneShot, ending: parts.Ending) -> None:
    """Put the rows of a part: its events, its streams and its locks.

    The values of changes are decided now, so the changed rows are locked, too (L5).
    """
    txn_id = row.txn_id
    turn.put(k.txn_key(txn_id), row)
    events: Any = shots.events_of_part(command, ending)  # `CommandEvents`: they stay encoded
    turn.put(k.prepared_key(txn_id), r.PreparedRow(SHOT, 0, events))
    put_streams(turn, txn_id, ending.placed)
    locks = row_changes.locked_with(command.locks, command.changes)
    if any(each.points or each.ranges for each in locks):
        # No writer has the number 0. They hold until now, by the check.
        turn.put(k.read_lock_key(txn_id, 0, 1), r.ReadLockRow(locks, ()))
        turn.put(k.read_lock_key(txn_id, 0, 0), r.ValidatedRow(1, turn.hybrid_time, 0))


def put_streams(turn: Turn, txn_id: bytes, placed: row_changes.Placed) -> None:
    """Log the streams that a part writes, with their present reference epochs."""
    for stream in sorted(placed):
        epoch = turn.state.streams[stream].reference_epoch
        segments = [segment_number(segment.segment_id) for segment, _ in placed[stream]]
        row = locked_segments.participant(turn, stream, epoch, segments)
        turn.put(k.participant_key(txn_id, stream), row)
