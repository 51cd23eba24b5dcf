"""The entrance for messages of other leaders (`docs/inside/across.md`, section 2), and what is due in each turn.

The controller calls `receive` for each message that it reads from `control`, before it decides commands (M4).
`receive` checks who may have sent the message (M3, M5), and then calls the function for its type:

- at the transaction's coordinator: `coordinating` (`Enlist`, `Vote`, `Done`), `coordinating_one_shots`
  (`AskDecision`);
- at a participant: `joining` (`Enlisted`), `participating` (`AskVote`, `Decide`).

A leader judges a message by its own rows, as it does a command. A message that is late, doubled, or of a former
leader states what was logged, so it is an old fact (M2). A message that is not genuine, or of an impossible state,
is not acted on: the round says why, and a metric counts it.

`advance` is called once in each turn: it repeats what was not answered, and ends what has waited for too long;
`next_due_ms` says when the next of these things is due.
"""

from __future__ import annotations

from anabranch.core.across.coordinator import HELD_MS
from anabranch.core.across.messages import (
    MOST_PARTITIONS,
    TO_COORDINATOR,
    ToCoordinator,
    ToParticipant,
    ends_of,
    is_genuine,
    raised,
)
from anabranch.core.across.participant import Action
from anabranch.core.decisions.across import (
    coordinating,
    coordinating_one_shots,
    joining,
    participating,
    parts_of_one_shots,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.memory import NEVER_MS, Across
from anabranch.errors import ClockSkew
from anabranch.protocol import limits
from anabranch.protocol.ids import control_partition_of, made_ms_of
from anabranch.protocol.schemas import records as r

MESSAGES = (r.Enlist, r.Enlisted, r.AskVote, r.Vote, r.Decide, r.Done, r.AskDecision)
Message = ToCoordinator | ToParticipant


def receive(
    turn: Turn, message: Message, payload: bytes, mac: bytes | None, seen: int | None
) -> None:
    """Decide a message of another leader. Its work is charged to the lane that owns the transaction.

    ``payload``: the record as it came. ``mac``: its HMAC. ``seen``: the sender's hybrid time.
    """
    row = turn.state.txn_row(message.txn_id)
    since, lane = turn.work, turn.lane
    owner = None if row is None else row.owner
    if row is None and (waiting := parts_of_one_shots.waiting_here(turn, message.txn_id)):
        owner = waiting.lane
    why_ignored = _why_ignored(turn, message, payload, mac, row)
    if why_ignored == "early" and isinstance(message, r.AskVote):
        parts_of_one_shots.keep_early(turn, message, payload, mac, seen or 0)
    why_ignored = why_ignored or _carry_out(turn, message, seen or 0)
    if why_ignored:
        turn.round.ignored.append(why_ignored)
    turn.lane = lane
    if owner is not None:
        turn.owe(owner, since)


def _why_ignored(
    turn: Turn, message: Message, payload: bytes, mac: bytes | None, row: r.TxnRow | None
) -> str:
    """Why a message is not acted on; empty if it may be (M3, M5). ``row``: of its transaction here.

    - ``misdirected``: it is for another leader, or no leader sent it.
    - ``off``: transactions over several control partitions are switched off here.
    - ``unknown``: nothing here can prove it.
    - ``early``: a question for a vote that came before the command of its one-shot.
    - ``forged``: its HMAC is wrong.
    - ``impossible``: no leader sends it in this state (`_carry_out` returns that).
    """
    here, coordinator = turn.settings.control_partition, control_partition_of(message.txn_id)
    if (coordinator == here) != isinstance(message, TO_COORDINATOR):
        return "misdirected"
    if not turn.settings.across and (row is None or isinstance(message, r.Enlist | r.Enlisted)):
        return "off"  # a transaction that has begun here is brought to its end
    other = message.partition if isinstance(message, TO_COORDINATOR) else here
    most = turn.control_partitions if isinstance(message, r.AskDecision) else MOST_PARTITIONS
    if not 0 <= other < most:
        return "misdirected"  # from no leader
    if isinstance(message, r.AskVote | r.Decide | r.AskDecision):
        latest_ms = turn.wall_ms + turn.settings.max_ahead_ms
        # No coordinator begins an id of the future. When its row is purged, all ids would count as old.
        if not _has_short_names(message.head) or (
            row is None and made_ms_of(message.txn_id) > latest_ms
        ):
            return "unknown"
    if isinstance(message, r.Enlist | r.Enlisted):
        return ""  # the client's token proves it
    sender, receiver = ends_of(message, other)
    secret = _proving_secret(turn, message, row)
    if secret is None:
        return "early" if row is None and isinstance(message, r.AskVote) else "unknown"
    return "" if is_genuine(secret, sender, receiver, payload, mac) else "forged"


def _proving_secret(turn: Turn, message: Message, row: r.TxnRow | None) -> bytes | None:
    """The secret that has to explain a message's HMAC; None: nothing here can prove the message (M3, M5)."""
    if isinstance(message, r.AskDecision):
        # This secret may be of another command with the id: `asked_decision` compares them.
        return message.head.secret
    if row is not None:
        return row.secret
    waiting = parts_of_one_shots.waiting_here(turn, message.txn_id)
    if waiting is not None and isinstance(message, r.Vote | r.AskVote | r.Decide):
        return waiting.command.secret
    # A question alone begins nothing: who could write to `control` would make up its secret.
    return message.head.secret if isinstance(message, r.Decide) else None


def _has_short_names(head: r.TxnHead) -> bool:
    """Whether a transaction's scope and owner are as short as names are: the description may be logged."""
    return len(head.scope) + len(head.owner) <= limits.EARLY_BYTES.value


def _carry_out(turn: Turn, message: Message, seen: int) -> str:
    """Carry out a message that is proven. Returns "impossible" if no leader sends it in this state, else ""."""
    if isinstance(message, r.Enlist):
        coordinating.on_enlist(turn, message)
    elif isinstance(message, r.Enlisted):
        joining.on_enlisted(turn, message)
    elif isinstance(message, r.Vote):
        coordinating.on_vote(turn, message, seen)
    elif isinstance(message, r.Done):
        coordinating.on_done(turn, message)
    elif isinstance(message, r.AskDecision):
        coordinating_one_shots.on_ask_decision(turn, message)
    elif isinstance(message, r.AskVote):
        skewed = None
        try:
            turn.hybrid_time = raised(
                turn.hybrid_time, seen, turn.now_us, turn.settings.max_clock_skew_ms
            )
        except ClockSkew as error:
            skewed = error
        if participating.on_ask_vote(turn, message, skewed) is Action.IMPOSSIBLE:
            return "impossible"
    elif participating.on_decide(turn, message) is Action.IMPOSSIBLE:
        return "impossible"
    return ""


def advance(turn: Turn) -> None:
    """Take all steps that are due, at both sides. `decide_due` calls it after the merges of the round."""
    if not turn.across.on:
        return
    if not turn.across.early_asks.is_empty:
        for early in parts_of_one_shots.take_early(turn):
            receive(turn, early.ask, early.payload, early.mac, early.seen)
    if turn.state.asking:
        coordinating.advance(turn)
    participating.advance(turn)
    if not turn.across.waiting_commands.is_empty:
        joining.refuse_late(turn)


def next_due_ms(across: Across, now_ms: int) -> int | None:
    """Milliseconds until the next message or wait is due; None if none is."""
    if not across.on or (
        across.sent.is_empty
        and across.done_ms == NEVER_MS
        and across.waiting_commands.is_empty
        and across.again_ms.is_empty
        and across.waiting_parts.is_empty
        and across.undecided.is_empty
    ):
        return None
    shots = across.asked_shots.as_dict()  # they wait longer for votes: until their `until_ms`
    held_ms = {txn_id: at for txn_id, at in across.held_ms.as_dict().items() if txn_id not in shots}
    due = [sent.next_ms for sent in across.sent.as_dict().values()]
    due += [] if across.done_ms == NEVER_MS else [across.done_ms]
    due += [at + HELD_MS for at in held_ms.values()]
    due += [at for at in across.again_ms.as_dict().values() if at > now_ms]
    due += [part.until_ms for part in across.waiting_parts.as_dict().values()]
    due += [shot.until_ms for shot in shots.values()]
    due += [question.next_ms for question in across.undecided.as_dict().values()]
    due += [
        command.until_ms
        for waiting in across.waiting_commands.as_dict().values()
        for command in waiting
    ]
    return min((max(0, at - now_ms) for at in due), default=None)
