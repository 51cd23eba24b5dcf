"""One-shots over several control partitions: the coordinator's side (`docs/inside/across.md`, 5).

The client sends a command to each control partition, all under one id and with one secret. `one_shot` decides them
all; it gives those of participants to `parts_of_one_shots`. The coordinator, the control partition in the id, takes
two steps, and logs nothing before the second (S1):

1. `_begin` checks the command, keeps it in memory, and asks the others for votes (`_ask_before_logging`).
2. When the votes have come, or are late, `decide_due` decides the command again (`shots_to_decide`), so `_begin`
   runs a second time. If all have voted *yes*, it logs the decision together with the merge of the part here
   (`_commit_now`). If not, it logs the part as a pending commit, which `deciding` then advances. If the command is
   refused now, it logs an abort of all parts (`end_shot`).

Frozen locks no longer refuse the command in the second step (S2). A participant that waits for a decision asks for
it (`on_ask_decision`, S4). A refused one-shot is ABORTED: its id is used up (S6).
"""

from __future__ import annotations

from collections.abc import Iterator
from hmac import compare_digest

from anabranch import errors
from anabranch.core import parts
from anabranch.core import rows as k
from anabranch.core.across.messages import LEVEL
from anabranch.core.decisions import one_shot as shots
from anabranch.core.decisions.across import coordinating, parts_of_one_shots
from anabranch.core.decisions.commit import join_waiting
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.transactions import abort_txn, answer_decided, check_open
from anabranch.core.decisions.turn import Turn, is_finished, refuse
from anabranch.core.memory import AskedShot, Sent
from anabranch.core.round import ReplyTo
from anabranch.core.transaction_states import born
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, is_marked
from anabranch.protocol.legal_names import check_name
from anabranch.protocol.schemas import records as r

# How long a pending commit waits for votes: longer than a takeover takes. The client repeats the command.
VOTES_MS = 10_000
# The coordinator logs its part this long before it would ask again, if votes are missing by then.
BEFORE_MS = 50
# How many unknown transactions a coordinator notes because their decisions were asked for.
MOST_UNKNOWN = 1_000


def one_shot(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Decide a `OneShot`. One over several control partitions waits: for votes, or here to be asked for one."""
    if command.secret is None and not command.places:
        shots.one_shot(turn, command, to)
        return
    _check(turn, command)
    row = turn.state.txn_row(command.txn_id)
    if control_partition_of(command.txn_id) != turn.settings.control_partition:
        # A repeated command finds the row. The coordinator alone answers that, as it knows the whole.
        if row is None:
            parts_of_one_shots.wait_for_question(turn, command, to)
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
    """`NotAuthorized` if another command has begun the transaction."""
    if row.secret is None or not compare_digest(row.secret, command.secret or b""):
        raise errors.NotAuthorized("the transaction was begun with another secret")


def _begin(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Ask the others for votes, and log nothing. With their votes the command is decided again, and is logged.

    If memory has no room for the command, it is logged at once.
    """
    turn.check_new_id(command.txn_id)
    shot = turn.across.asked_shots.get(command.txn_id, None)
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
    if shot is not None and _in_common(shot.lane, shot.command) != _in_common(turn.lane, command):
        raise errors.InvalidArgument(shots.OTHERS)  # the first command counts
    is_first = ending.instead is None and ending.again is None and shot is None
    if is_first and _ask_before_logging(turn, command, to):
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
    row = parts_of_one_shots.row_of(turn, command, command.scope, turn.lane)
    parts_of_one_shots.log_part(turn, row, command, ending)
    _put_places(turn, command)
    pending = _pending_of(turn, None if shot is None else shot.to, to)
    turn.put(k.pending_key(command.txn_id), pending._replace(name=command.name))
    coordinating.begin_round(turn, command.txn_id, "TIMESTAMP")


def _commit_now(turn: Turn, shot: AskedShot) -> bool:
    """Log the decision of a one-shot for which all participants have voted, and the merge of its part.

    False, and nothing is changed, if it needs rows before that: not all votes are a *yes* with a timestamp, its
    part has to wait, or it takes a name, or changes rows.
    """
    command, txn_id, before = shot.command, shot.command.txn_id, turn.hybrid_time
    votes = {place: turn.across.votes.get((txn_id, place), None) for place in command.places}
    given = {place: vote for place, vote in votes.items() if vote and vote.timestamp}
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
    row = parts_of_one_shots.row_of(turn, command, command.scope, shot.lane)
    row = turn.move(row, "begin_commit", committed=shots.count(command))
    row = turn.move(row, "begin_finalize", commit_timestamp=at)
    turn.put(k.txn_key(txn_id), row)
    parts_of_one_shots.put_streams(turn, txn_id, ending.placed)
    for place, vote in given.items():
        kept = r.PartitionRow((), committed=vote.committed, left_out=vote.left_out)
        turn.put(k.partition_key(txn_id, place), kept)
    turn.put(k.votes_key(txn_id), r.VotesRow(*parts_of_one_shots.FIRST_ROUND, own_merged=True))
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


def _in_common(lane: str, command: r.OneShot) -> tuple[object, ...]:
    """The parts of a command to the coordinator that all its copies have in common."""
    return lane, command.secret, {*command.places}, command.scope, command.name


def _ask_before_logging(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> bool:
    """Ask for the first votes, before anything is logged. False: memory has no room for the command.

    If this leader dies, its successor does not know the one-shot: the client sends it again, or a participant asks
    for the decision (`on_ask_decision`).
    """
    txn_id, size = command.txn_id, min(turn.command_bytes, turn.settings.command_bytes)
    try:
        parts_of_one_shots.check_room(turn, [*turn.across.asked_shots.as_dict().values()], size)
    except errors.NotReady:
        return False
    first_ms = coordinating.first_pause_ms(turn.across)
    until_ms = turn.now_ms + first_ms - BEFORE_MS
    shot = AskedShot(command, turn.lane, to, turn.seen, until_ms, size)
    turn.across.asked_shots.put(txn_id, shot)
    head = coordinating.head_of(parts_of_one_shots.row_of(turn, command, command.scope, turn.lane))
    for place in command.places:
        sent = Sent(parts_of_one_shots.FIRST_ROUND, turn.now_ms, turn.now_ms + first_ms, first_ms)
        turn.across.sent.put((txn_id, place, "ask"), sent)
        turn.ask(
            place,
            r.AskVote(txn_id, head, *parts_of_one_shots.FIRST_ROUND, False, ()),
            command.secret,
        )
    return True


def shots_to_decide(turn: Turn) -> Iterator[AskedShot]:
    """The one-shots whose first votes have come, or are late. The caller decides each one again.

    If it is refused then, the participants abort their parts.
    """
    across = turn.across
    for txn_id, shot in sorted(across.asked_shots.as_dict().items()):
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
    across.asked_shots.put(txn_id, None)
    row = turn.state.txn_row(txn_id)
    if row is not None and turn.state.partition_rows(txn_id):
        return
    coordinating.forget_questions(turn, txn_id, command.places)
    if row is not None and row.state != "ABORTED":
        return  # another command has the id: the participants ask for the decision
    reason = "its commit was refused" if row is None else row.reason
    turn.put(k.txn_key(txn_id), parts_of_one_shots.row_of(turn, command, command.scope, shot.lane))
    _put_places(turn, command)
    abort_txn(turn, txn_id, reason)


def refuse_shot(turn: Turn, txn_id: bytes, why: str) -> None:
    """Refuse a one-shot whose events a broker has refused, in the round of its decision."""
    shot = turn.across.asked_shots.get(txn_id, None)
    if shot is None:
        raise errors.InvariantViolation("a merge of an unknown transaction was refused")
    text = f"the broker refused the events: {why}"
    turn.reply(shot.to, refuse(errors.InvalidArgument(text)))
    end_shot(turn, shot)


def on_ask_decision(turn: Turn, message: r.AskDecision) -> None:
    """Tell a participant to abort if its one-shot is not known here: never begun, or begun with another secret.

    Under another secret, another command has begun the id, and the participant's votes never count for that one.
    If the one-shot has not ended, its messages are repeated, so the question needs no answer. If an operator has
    ended it without this participant, the row has the answer.
    """
    txn_id, place, head = message.txn_id, message.partition, message.head
    row, shot = turn.state.txn_row(txn_id), turn.across.asked_shots.get(txn_id, None)
    secret = row.secret if row is not None else None if shot is None else shot.command.secret
    if secret == head.secret and (row is None or place in turn.state.partition_rows(txn_id)):
        if row is not None and is_finished(row):
            how: r.Verdict = "COMMIT" if row.state == "COMMITTED" else "ABORT"
            ended = r.Decide(txn_id, head, how, row.commit_timestamp, row.reason)
            turn.send(place, ended, head.secret)
        return
    since_ms = turn.across.unknown_ms.get(txn_id, None)
    if row is None and (
        since_ms is None or turn.now_ms < since_ms + parts_of_one_shots.DECISION_MS
    ):
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
