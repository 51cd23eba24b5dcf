"""One-shots over several control partitions (`docs/inside/across.md`, 5).

The client sends a command to each control partition, all under one id and with one secret. The *coordinator*, the
control partition in the id, asks the others for votes before it logs anything. When all have voted, it logs its
part together with the decision; if they have not, as a pending commit.

At a participant, the command waits in memory for the question. The command proves that a question under an unknown
id comes from the coordinator: only who knows the command's secret can make the question's HMAC. When the question
comes, the participant logs its part, prepared, and votes. If no decision follows, it asks for it (`AskDecision`).

A part that is logged has a row with its events, marked with `prepared.SHOT`. From then on it is a transaction like
any other, except that it is aborted when its commit is refused: its id is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from hmac import compare_digest
from operator import attrgetter
from typing import Any

from anabranch import errors
from anabranch.core import parts, work
from anabranch.core import rows as k
from anabranch.core.across import participant
from anabranch.core.across.messages import LEVEL
from anabranch.core.decisions import one_shot as shots
from anabranch.core.decisions.across import coordinating, holding, locking
from anabranch.core.decisions.across.locking import GivesWay
from anabranch.core.decisions.commit import join_waiting
from anabranch.core.decisions.prepared import SHOT, shot_of
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.transactions import abort_txn, answer_decided, check_open
from anabranch.core.decisions.turn import FORGOTTEN, Turn, is_finished, refuse
from anabranch.core.locks import locked_segments, row_changes
from anabranch.core.memory import AskedShot, EarlyAsk, Sent, WaitingCommand, WaitingPart
from anabranch.core.round import ReplyTo
from anabranch.core.transaction_states import born
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, is_marked, segment_number
from anabranch.protocol.legal_names import check_name
from anabranch.protocol.schemas import records as r

# How long a command waits at a participant for the question, and a pending commit at the coordinator for votes. The
# commit waits for longer than a takeover takes; the client repeats the command.
PART_MS = 5_000
VOTES_MS = 10_000
EARLY_MS = 1_000  # how long a question waits for its command, if it comes first
# The coordinator logs its part this long before it would ask again, if votes are missing by then.
BEFORE_MS = 50
# How long a participant waits for the decision before it asks for it; then after twice as long each time, up to
# `LONGEST_PAUSE_MS`. A coordinator that has logged the transaction repeats its own messages sooner.
DECISION_MS = 1_000
# How many unknown transactions a coordinator notes because their decisions were asked for.
MOST_UNKNOWN = 1_000
_FIRST: tuple[int, r.Asks] = 1, "TIMESTAMP"  # the first round of votes, and its question
_SIZE = attrgetter("size")
_KEEPALIVE_MS = 1_000  # in the row of a part, which no keepalive ends


def one_shot(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Commit a one-shot. Over several control partitions it becomes a pending commit, or waits to be asked."""
    if command.secret is None and not command.places:
        shots.one_shot(turn, command, to)
        return
    _check(turn, command)
    row = turn.state.txn_row(command.txn_id)
    if control_partition_of(command.txn_id) != turn.settings.control_partition:
        # A repeated command finds the row. The coordinator alone answers that, as it knows the whole.
        if row is None:
            _wait(turn, command, to)
    elif row is None:
        _begin(turn, command, to)
    else:
        _begin_again(turn, row, command, to)


def _check(turn: Turn, command: r.OneShot) -> None:
    """Check `places` and `secret`, and refuse fields that only a one-shot within one control partition may have."""
    here, home = turn.settings.control_partition, control_partition_of(command.txn_id)
    turn.state.check_enabled(LEVEL, "a transaction over several control partitions")
    if not turn.settings.across:
        raise errors.CrossScope(
            "transactions over several control partitions are not possible here"
        )
    check_served(turn, command.scope)
    check_name(command.name)
    places = command.places
    limits.PARTICIPANTS.check(len(places), "a transaction")
    others = all(0 <= place < turn.control_partitions for place in places)
    if command.secret is None or bool(places) != (home == here):
        raise errors.InvalidArgument(
            "a one-shot over several control partitions has a secret; the command to the coordinator names the "
            "others, and no other command does"
        )
    if (
        not others
        or home >= turn.control_partitions
        or home in places
        or len({*places}) < len(places)
    ):
        raise errors.InvalidArgument(
            f"places {sorted(places)}: each is a control partition other than {home}, and is named once"
        )
    if (
        command.consumed is not None
        or command.follows
        or command.turn_to
        or is_marked(command.txn_id)
    ):
        raise errors.InvalidArgument(
            "a one-shot over several control partitions moves no positions, and follows no other one: begin a "
            "transaction, or call it outside of the chain"
        )
    if home != here and command.name is not None:
        raise errors.InvalidArgument("the command to the coordinator alone has the name")


def _check_secret(row: r.TxnRow, command: r.OneShot) -> None:
    if row.secret is None or not compare_digest(row.secret, command.secret or b""):
        raise errors.NotAuthorized("the transaction was begun with another secret")


# -- at the coordinator ----------------------------------------------------------------------------------


def _begin(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Ask the others for votes, and log nothing. With their votes the command is decided again, and is logged.

    If memory has no room for the command, it is logged at once.
    """
    turn.check_new_id(command.txn_id)
    shot = turn.across.shots.get(command.txn_id, None)
    is_again = shot is not None and shot.command is command
    ending = shots.ending_of(command, turn.lane)
    # Once votes are asked for, frozen locks no longer refuse it: the decision judges which one is older (L2).
    ending.at_once, ending.freezes = shot is None, False
    try:
        check_open(turn)
        if shot is not None and is_again and _commit_now(turn, shot):
            return
        parts.check(turn, ending)
    except (errors.NotReady, errors.TooManyTransactions) as error:
        if not is_again:  # also a copy: the command that waits may still commit
            raise
        # Its participants abort their parts: `end_shot`.
        raise errors.TransactionAborted(f"{error}; its id is used up: begin a new one") from error
    turn.across.unknown_ms.put(command.txn_id, None)
    if shot is not None and _said(shot.lane, shot.command) != _said(turn.lane, command):
        raise errors.InvalidArgument(shots.OTHERS)  # the first command counts
    is_first = ending.instead is None and ending.again is None and shot is None
    if is_first and _ask_first(turn, command, to):
        return
    if ending.instead is not None:
        shots.instead(turn, command, ending, to)
        return
    if ending.again is not None:
        # The client takes a new id for the next try.
        reason = "its locks had to be validated again"
        _use_up(turn, command.txn_id, command.scope, turn.lane, reason)
        turn.reply(to, ending.again)
        return
    row = _row_of(turn, command, command.scope, turn.lane)
    _log(turn, row, command, ending)
    _put_places(turn, command)
    pending = _pending_of(turn, None if shot is None else shot.to, to)
    turn.put(k.pending_key(command.txn_id), pending._replace(name=command.name))
    coordinating.ask(turn, command.txn_id, "TIMESTAMP")


def _commit_now(turn: Turn, shot: AskedShot) -> bool:
    """Log the decision of a one-shot for which all participants have voted, and the merge of its part.

    False, and nothing is changed, if it needs rows before that: not all votes are a *yes* with a timestamp, its
    part has to wait, or it takes a name, or changes rows.
    """
    command, txn_id, before = shot.command, shot.command.txn_id, turn.hybrid_time
    votes = {one: turn.across.votes.get((txn_id, one), None) for one in command.places}
    given = {one: vote for one, vote in votes.items() if vote and vote.timestamp}
    if len(given) < len(votes) or command.name is not None or command.changes:
        return False
    # Commits that wait here may break its locks (L5).
    if turn.merge_limit is not None or (command.locks and turn.holds.in_use):
        return False
    ending = shots.ending_of(command, turn.lane)
    ending.at_once = False
    try:
        if not parts.check(turn, ending):
            return False
    except (errors.NotReady, errors.ReservedByPrepared):
        return False
    at = coordinating.timestamp_of(turn, given)
    if turn.holds.in_use and not turn.holds.may_go(at, txn_id, ending.placed):
        turn.hybrid_time = before
        return False
    coordinating.forget_questions(turn, txn_id, command.places)
    row = _row_of(turn, command, command.scope, shot.lane)
    row = turn.move(row, "begin_commit", committed=shots.count(command))
    row = turn.move(row, "begin_finalize", commit_timestamp=at)
    turn.put(k.txn_key(txn_id), row)
    _put_streams(turn, txn_id, ending.placed)
    for one, vote in given.items():
        kept = r.PartitionRow((), committed=vote.committed, left_out=vote.left_out)
        turn.put(k.partition_key(txn_id, one), kept)
    turn.put(k.votes_key(txn_id), r.VotesRow(*_FIRST, own_merged=True))
    pending = _pending_of(turn, shot.to)._replace(decided=True, prepare=coordinating.ELSEWHERE)
    turn.put(k.pending_key(txn_id), pending)
    shots.append(turn, txn_id, ending.placed, at)
    answer_decided(turn, row)
    return True


def _pending_of(turn: Turn, *askers: ReplyTo | None) -> r.PendingCommitRow:
    """The row of a commit that waits for other control partitions."""
    pending = join_waiting(None, None)
    for to in askers:
        pending = join_waiting(pending, to)
    return pending._replace(deadline_ms=turn.wall_ms + VOTES_MS)


def _put_places(turn: Turn, command: r.OneShot) -> None:
    """Log who the participants are, at the coordinator."""
    for place in command.places:
        turn.put(k.partition_key(command.txn_id, place), r.PartitionRow(()))


def _use_up(
    turn: Turn, txn_id: bytes, scope: str, owner: str, reason: str, secret: bytes | None = None
) -> None:
    """Log an id as ABORTED, so that no late copy of its command commits."""
    gone = born("give_way", txn_id, turn.wall_ms, scope=scope, owner=owner, reason=reason)
    turn.put(k.txn_key(txn_id), gone._replace(secret=secret))


def _said(lane: str, command: r.OneShot) -> tuple[object, ...]:
    """The parts of a command to the coordinator that all its copies have in common."""
    return lane, command.secret, {*command.places}, command.scope, command.name


def _ask_first(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> bool:
    """Ask for the first votes, before anything is logged. False: memory has no room for the command.

    If this leader dies, its successor does not know the one-shot: the client sends it again, or a participant asks
    for the decision (`asked_decision`).
    """
    txn_id, size = command.txn_id, min(turn.command_bytes, turn.settings.command_bytes)
    try:
        check_room(turn, [*turn.across.shots.as_dict().values()], size)
    except errors.NotReady:
        return False
    first_ms = coordinating.first_pause_ms(turn.across)
    until_ms = turn.now_ms + first_ms - BEFORE_MS
    shot = AskedShot(command, turn.lane, to, turn.seen, until_ms, size)
    turn.across.shots.put(txn_id, shot)
    head = coordinating.head_of(_row_of(turn, command, command.scope, turn.lane))
    for place in command.places:
        sent = Sent(_FIRST, turn.now_ms, turn.now_ms + first_ms, first_ms)
        turn.across.sent.put((txn_id, place, "ask"), sent)
        turn.ask(place, r.AskVote(txn_id, head, *_FIRST, False, ()), command.secret)
    return True


def shots_to_decide(turn: Turn) -> Iterator[AskedShot]:
    """The one-shots whose first votes have come, or are late. The caller decides each one again.

    If it is refused then, the participants abort their parts.
    """
    across = turn.across
    for txn_id, shot in sorted(across.shots.as_dict().items()):
        votes = [across.votes.get((txn_id, place), None) for place in shot.command.places]
        is_ready = all(votes) or any(vote and not vote.timestamp for vote in votes)
        has_room = turn.merge_limit != 0  # else its merge would not be in the round of its decision
        if not (is_ready and has_room) and turn.now_ms < shot.until_ms:
            continue
        since = turn.work
        yield shot
        end_shot(turn, shot)
        turn.owe(shot.lane, since)


def end_shot(turn: Turn, shot: AskedShot) -> None:
    """Forget the command of a one-shot that was decided again. If it was refused, log an abort of all parts."""
    command, across = shot.command, turn.across
    txn_id = command.txn_id
    across.shots.put(txn_id, None)
    row = turn.state.txn_row(txn_id)
    if row is not None and turn.state.partition_rows(txn_id):
        return
    coordinating.forget_questions(turn, txn_id, command.places)
    if row is not None and row.state != "ABORTED":
        return  # another command has the id: the participants ask for the decision
    reason = "its commit was refused" if row is None else row.reason
    turn.put(k.txn_key(txn_id), _row_of(turn, command, command.scope, shot.lane))
    _put_places(turn, command)
    abort_txn(turn, txn_id, reason)


def refuse_shot(turn: Turn, txn_id: bytes, why: str) -> None:
    """Refuse a one-shot whose events a broker has refused, in the round of its decision."""
    shot = turn.across.shots.get(txn_id, None)
    if shot is None:
        raise errors.InvariantViolation("a merge of an unknown transaction was refused")
    text = f"the broker refused the events: {why}"
    turn.reply(shot.to, refuse(errors.InvalidArgument(text)))
    end_shot(turn, shot)


def asked_decision(turn: Turn, message: r.AskDecision) -> None:
    """Tell a participant to abort if its one-shot is not known here: never begun, or begun with another secret.

    Under another secret, another command has begun the id, and the participant's votes never count for that one.
    If the one-shot has not ended, its messages are repeated, so the question needs no answer. If an operator has
    ended it without this participant, the row has the answer.
    """
    txn_id, place, head = message.txn_id, message.partition, message.head
    row, shot = turn.state.txn_row(txn_id), turn.across.shots.get(txn_id, None)
    secret = row.secret if row is not None else None if shot is None else shot.command.secret
    if secret == head.secret and (row is None or place in turn.state.partition_rows(txn_id)):
        if row is not None and is_finished(row):
            how: r.Verdict = "COMMIT" if row.state == "COMMITTED" else "ABORT"
            ended = r.Decide(txn_id, head, how, row.commit_timestamp, row.reason)
            turn.send(place, ended, head.secret)
        return
    since_ms = turn.across.unknown_ms.get(txn_id, None)
    if row is None and (since_ms is None or turn.now_ms < since_ms + DECISION_MS):
        # The command may be in a lane already, and messages are read before commands: wait for a second question.
        if since_ms is None and _has_room_for_unknown(turn):
            turn.across.unknown_ms.put(txn_id, turn.now_ms)
        return
    turn.across.unknown_ms.put(txn_id, None)
    reason = "it was not begun at its coordinator" if row is None else row.reason
    if row is None and shot is None and not turn.is_forgotten(txn_id):
        _use_up(turn, txn_id, head.scope, head.owner, reason, head.secret)
    turn.send(place, r.Decide(txn_id, head, "ABORT", 0, reason), head.secret)


def _has_room_for_unknown(turn: Turn) -> bool:
    """Whether one more unknown transaction may be noted. If there are many, old ones are forgotten."""
    known = turn.across.unknown_ms.as_dict()
    if len(known) < MOST_UNKNOWN:
        return True
    for txn_id, since_ms in known.items():
        if turn.now_ms > since_ms + 4 * coordinating.LONGEST_PAUSE_MS:
            turn.across.unknown_ms.put(txn_id, None)
    return len(turn.across.unknown_ms.as_dict()) < MOST_UNKNOWN


def _begin_again(turn: Turn, row: r.TxnRow, command: r.OneShot, to: ReplyTo | None) -> None:
    """Answer a repeated command, or add its asker to the pending commit."""
    if row.state in ("ABORT_IN_PROGRESS", "ABORTED"):
        turn.reply(to, shots.gave_way_to(turn, row, command))
        return
    _check_secret(row, command)
    if row.scope != command.scope:
        raise errors.InvalidArgument(shots.OTHERS)
    if row.state == "COMMITTED":
        # The row counts the events of all parts.
        if row.name != command.name or row.committed + row.left_out < shots.count(command):
            raise errors.InvalidArgument(shots.OTHERS)
        turn.answer(to, row)
        return
    pending = turn.open(row.txn_id).pending
    if pending is None:
        raise errors.NotReady("the transaction is being aborted")
    if pending.name != command.name:
        raise errors.InvalidArgument(shots.OTHERS)
    turn.put(k.pending_key(row.txn_id), join_waiting(pending, to))
    if row.state == "FINALIZE_IN_PROGRESS":
        answer_decided(turn, row)


# -- at a participant ------------------------------------------------------------------------------------


def _wait(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Keep a command until its coordinator asks for a vote. If that question came first, answer it in this turn."""
    if turn.is_forgotten(command.txn_id):
        raise errors.Expired(FORGOTTEN)
    turn.check_new_id(command.txn_id)
    across, txn_id = turn.across, command.txn_id
    size = min(turn.command_bytes, turn.settings.command_bytes)
    waiting = WaitingPart(command, turn.lane, to, turn.now_ms + PART_MS, size)
    before = across.parts.get(txn_id, None)
    if before is not None:
        # The first command counts: a stranger can't replace it.
        if (before.lane, before.command.secret) != (turn.lane, command.secret):
            raise errors.InvalidArgument(shots.OTHERS)
    else:
        _check_room(turn, size)
    across.parts.put(txn_id, waiting)


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
    own = [one.size for one in waiting if one.lane == turn.lane]
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


def _check_room(turn: Turn, size: int) -> None:
    check_room(turn, [*turn.across.parts.as_dict().values()], size)


def refused(
    turn: Turn, command: r.OneShot, to: ReplyTo | None, error: errors.AnabranchError
) -> None:
    """Keep the refusal of a command, to answer its coordinator's question with it.

    The client waits for the coordinator alone, which would otherwise miss a vote, and not know why.
    """
    txn_id, waiting = command.txn_id, turn.across.parts
    is_foreign = control_partition_of(txn_id) != turn.settings.control_partition
    if not (turn.settings.across and is_foreign) or isinstance(error, errors.NotReady):
        return
    if waiting.get(txn_id, None) is not None or turn.state.txn_row(txn_id) is not None:
        return
    with suppress(errors.NotReady):
        _check_room(turn, 0)
        bare = command._replace(events=(), locks=(), changes=())
        waiting.put(
            txn_id, WaitingPart(bare, turn.lane, to, turn.now_ms + PART_MS, 0, refuse(error))
        )


def note_undecided(turn: Turn, txn_id: bytes) -> None:
    """Note that a one-shot's part is logged: if no decision comes, `ask_decisions` asks for it."""
    next_ms = turn.now_ms + DECISION_MS
    turn.across.undecided.put(txn_id, Sent(_FIRST, turn.now_ms, next_ms, DECISION_MS))


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
        undecided.put(txn_id, Sent(_FIRST, sent.since_ms, turn.now_ms + pause_ms, pause_ms))
        here, head = turn.settings.control_partition, coordinating.head_of(row)
        question = r.AskDecision(txn_id, here, head)
        turn.ask(control_partition_of(txn_id), question, head.secret)


def waiting_here(turn: Turn, txn_id: bytes) -> WaitingPart | AskedShot | None:
    """The command of a one-shot that waits here, and of which nothing is logged.

    Its secret has to prove messages about the transaction, and its lane is charged for them.
    """
    across = turn.across
    return across.parts.get(txn_id, None) or across.shots.get(txn_id, None)


def keep_early(turn: Turn, ask: r.AskVote, payload: bytes, mac: bytes | None, seen: int) -> None:
    """Keep a question that came before its command for a moment. Alone it proves nothing, so few are kept."""
    early = turn.across.early
    is_small = not ask.receipts and len(payload) <= limits.EARLY_BYTES.value
    if is_small and len(early.as_dict()) < limits.EARLY_ASKS.value:
        early.put(ask.txn_id, EarlyAsk(ask, payload, mac, seen, turn.now_ms + EARLY_MS))


def take_early(turn: Turn) -> list[EarlyAsk]:
    """The questions whose commands have come meanwhile. Those that waited for too long are forgotten."""
    early, found = turn.across.early, []
    for txn_id, one in early.as_dict().items():
        if waiting_here(turn, txn_id) is not None:
            found.append(one)
            early.put(txn_id, None)
        elif turn.now_ms >= one.until_ms:
            early.put(txn_id, None)
    return found


def open_part(turn: Turn, ask: r.AskVote, refusal: r.Refusal | None) -> r.Vote:
    """The first vote of a part whose command waits here. Only a yes is logged, with the part.

    ``refusal``: why the vote is a no in any case. Raises: NotReady (a stream is in trouble, or a lock is frozen):
    then the question waits, too.
    """
    txn_id, waiting = ask.txn_id, turn.across.parts.get(ask.txn_id, None)
    if waiting is None:
        raise errors.InvariantViolation("a question was proven by no command")
    turn.lane, command = waiting.lane, waiting.command
    here, its = turn.settings.control_partition, r.CoordinatorRow(ask.votes_round)
    if ask.head.owner != turn.lane:
        error = errors.NotAuthorized("the commands of one transaction come from one lane")
        return participant.vote(txn_id, here, its, "NO", error=refuse(error))
    refusal = waiting.refusal or refusal
    if refusal is not None:
        return participant.vote(txn_id, here, its, "NO", error=refusal)
    ending = shots.ending_of(command, turn.lane)
    ending.prepare, ending.at_once = coordinating.ELSEWHERE, False
    try:
        check_open(turn)
        parts.check(turn, ending)
    except (GivesWay, errors.TooManyTransactions):
        return participant.vote(txn_id, here, its, "AGAIN")
    except errors.NotReady:
        raise  # the vote waits
    except errors.AnabranchError as refused:
        return participant.vote(txn_id, here, its, "NO", error=refuse(refused))
    if ending.again is not None:
        return participant.vote(txn_id, here, its, "NO", revalidate=ending.again)
    turn.across.parts.put(txn_id, None)
    return _log_prepared(turn, ask, command, ending)


def _log_prepared(turn: Turn, ask: r.AskVote, command: r.OneShot, ending: parts.Ending) -> r.Vote:
    """Log a part that is prepared, with its promise."""
    txn_id, before = ask.txn_id, turn.hybrid_time
    its = participant.promise(None, ask, staged=True, fresh=holding.prepare_timestamp(turn))
    if not its.prepare_timestamp:
        turn.hybrid_time = before
    row = _row_of(turn, command, ask.head.scope, ask.head.owner)
    row = row._replace(begun_ms=ask.head.begun_ms)
    row = turn.move(row, "prepare", committed=shots.count(command))
    _log(turn, row, command, ending)
    pending = r.PendingCommitRow((), False, (), None, None, 0, prepare=coordinating.ELSEWHERE)
    turn.put(k.pending_key(txn_id), pending)
    turn.put(k.coordinator_key(txn_id), its)
    holding.put_entry(turn, txn_id)
    locking.take_back(turn, txn_id)
    note_undecided(turn, txn_id)
    here = turn.settings.control_partition
    return participant.vote(txn_id, here, its, "YES", committed=row.committed)


def forget_part(turn: Turn, txn_id: bytes) -> None:
    """Forget a command that waits, as its transaction has ended."""
    if turn.across.parts.get(txn_id, None) is not None:
        turn.across.parts.put(txn_id, None)


def expire(turn: Turn) -> None:
    """Refuse the commands whose coordinators did not ask in time."""
    for txn_id, one in turn.across.parts.as_dict().items():
        if turn.now_ms >= one.until_ms:
            home = control_partition_of(txn_id)
            text = f"control partition {home}, which coordinates the transaction, did not ask for a vote: ask again"
            turn.across.parts.put(txn_id, None)
            if one.refusal is None:  # else it was answered
                turn.reply(one.to, refuse(errors.NotReady(text)))


# -- at both ---------------------------------------------------------------------------------------------


def _row_of(turn: Turn, command: r.OneShot, scope: str, owner: str) -> r.TxnRow:
    return born(
        "begin",
        command.txn_id,
        turn.wall_ms,
        scope=scope,
        keepalive_ms=_KEEPALIVE_MS,
        secret=command.secret,
        owner=owner,
    )


def _log(turn: Turn, row: r.TxnRow, command: r.OneShot, ending: parts.Ending) -> None:
    """Put the rows of a part: its events, its streams and its locks.

    The values of changes are decided now, so the changed rows are locked, too (L5).
    """
    txn_id = row.txn_id
    turn.put(k.txn_key(txn_id), row)
    events: Any = shots.events_of_part(command, ending)  # `CommandEvents`: they stay encoded
    turn.put(k.prepared_key(txn_id), r.PreparedRow(SHOT, 0, events))
    _put_streams(turn, txn_id, ending.placed)
    locks = row_changes.locked_with(command.locks, command.changes)
    if any(each.points or each.ranges for each in locks):
        # No writer has the number 0. They hold until now, by the check.
        turn.put(k.read_lock_key(txn_id, 0, 1), r.ReadLockRow(locks, ()))
        turn.put(k.read_lock_key(txn_id, 0, 0), r.ValidatedRow(1, turn.hybrid_time, 0))


def _put_streams(turn: Turn, txn_id: bytes, placed: row_changes.Placed) -> None:
    """Log the streams that a part writes, with their present reference epochs."""
    for stream in sorted(placed):
        epoch = turn.state.streams[stream].reference_epoch
        segments = [segment_number(its.segment_id) for its, _ in placed[stream]]
        its = locked_segments.participant(turn, stream, epoch, segments)
        turn.put(k.participant_key(txn_id, stream), its)
