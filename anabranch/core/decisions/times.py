"""Hybrid times that clients have seen: they order commits, and keep late copies of commands without effect.

A commit timestamp is later than all times that the commit's sender and writers had seen. For this, commands that
lead to a commit, or set something, may raise the hybrid time beyond the clock, if their lane may write there. The
round of an accepted command logs its hybrid time in the `RoundRow`, and no later leader begins before that. A
refused command leaves the hybrid time as it is.

A *thing* that commands set is a stream, its segments, a lane, a grant, a processor or a series; the key of its row
names it. Each copy of a command carries the highest time that its sender had received when it sent the first copy.
Each change of a thing gets a time later than all times that were answered before. So a command whose sender did not
know of the last change is refused, unless the command made that change itself. The refusal carries the time of the
change, so that the sender can send a new command (docs/inside/decisions/0032).
"""

from __future__ import annotations

from typing import Any

from anabranch.core import rows as k
from anabranch.core.authorize import Right, rights_within
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
from anabranch.errors import ClockSkew, InvalidArgument, NotReady
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.protocol.messages import SETS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import peek

# Commands that lead to a commit timestamp. Commands that are neither here nor in `SETS` are carried out whatever
# their sender has seen, and don't raise the hybrid time.
_OF_SCOPES = (r.Begin, r.OneShot, r.PrepareEvents, r.SafeTime)
_BY_TOKENS = (r.Touch, r.Register, r.LockReads, r.Commit)
_LEAD_TO_TIMES = _OF_SCOPES + _BY_TOKENS


def observed(turn: Turn, command: Any) -> int:
    """The hybrid time when this command is accepted.

    A command raises it up to the allowed skew ahead of the wall clock; with commit wait up to the clock's error,
    because each answer waits until the clock is past its commit. So no client can move the time ahead step by step.

    Raises: ClockSkew; NotReady where the hybrid time is not raised (commit wait, a lane that may not write),
    because the clock will reach the sender's time soon. A command that sets something is carried out all the same.
    """
    former = turn.hybrid_time
    sets = type(command) in SETS
    if not (sets or isinstance(command, _LEAD_TO_TIMES)):
        return former
    seen = max(turn.seen or 0, _carried(command))
    if isinstance(command, r.SafeTime) and command.at is not None:
        seen = min(seen, command.at)  # the answer says nothing about later times
    if seen <= former:  # perhaps because a former leader's clock was fast
        return former
    skew_ms, error_ms = turn.settings.max_clock_skew_ms, turn.settings.clock_error_ms
    limit_ms = skew_ms if error_ms is None else min(skew_ms, error_ms)
    ahead_ms = (hybrid_time.to_us(seen) - turn.now_us) / 1000
    if ahead_ms <= limit_ms and (sets or ahead_ms <= 0 or _may_write(turn, command)):
        return seen
    if sets:
        return former
    what = f"the sender has seen a time {ahead_ms:,.0f} ms ahead of the controller's clock"
    if ahead_ms > skew_ms:
        raise ClockSkew(f"{what}, {skew_ms:,} are allowed: set the clocks")
    if ahead_ms > limit_ms:
        raise NotReady(f"{what}, whose error is {limit_ms:,} ms at most: ask again")
    if isinstance(command, r.SafeTime) and not command.streams:
        raise NotReady(f"{what}, which continues by itself: ask again")
    # A repeated command was decided already. A `SafeTime` with streams is one of several: each clock counts.
    return former


def _may_write(turn: Turn, command: Any) -> bool:
    """Whether the lane that owns the commit to which a command leads may write in the scope."""
    lane, scope = turn.lane, ""
    if isinstance(command, _OF_SCOPES):
        scope = command.scope
    else:
        named = command.token
        row = turn.state.txn_row(named if len(named) == TXN_ID_SIZE else peek(named).txn_id)
        if row is None:
            return False
        lane, scope = row.owner, row.scope
    return bool(rights_within(turn.state, lane, scope) & (Right.WRITE | Right.PROCESS))


def check_waits(turn: Turn) -> None:
    """`InvalidArgument` if commit wait is impossible, because the clocks' error is not set."""
    if turn.settings.clock_error_ms is None:
        raise InvalidArgument(
            "commit wait needs to know the clocks' error: start the controllers with --clock-error-ms, or connect "
            "without commit_wait"
        )


def _carried(command: Any) -> int:
    """The highest time that the makers of a command's token and receipts had seen; 0 if it has neither."""
    if not isinstance(command, _BY_TOKENS):
        return 0
    receipts: tuple[r.Receipt, ...] = ()
    if isinstance(command, r.Register):
        receipts = (command.receipt,)
    elif isinstance(command, r.Commit):
        receipts = (*command.own, *(command.receipts or ()))
    token = 0 if len(command.token) == TXN_ID_SIZE else peek(command.token).seen
    return max(token, *[receipt.seen for receipt in receipts], 0)


def is_repeated(turn: Turn, thing: bytes, to: ReplyTo | None) -> bool:
    """Whether this command made the last change of a thing, so that it must not be carried out again."""
    last = turn.state.last_change(thing)
    return to is not None and last is not None and last.asker == to.asker


def check_informed(turn: Turn, thing: bytes, to: ReplyTo | None) -> None:
    """Raise `NotReady` if another command made a thing's last change, and the sender did not know of it.

    A command that carries no time of its sender is not checked.
    """
    last = turn.state.last_change(thing)
    if turn.seen is None or last is None or turn.seen >= last.timestamp:
        return
    if not is_repeated(turn, thing, to):
        raise NotReady(
            "another command changed this, and the sender does not know of it: ask again; nothing was changed"
        )


def note_change(turn: Turn, thing: bytes, to: ReplyTo | None = None) -> int:
    """Log that a command, or the controller by itself (None), changes a thing. Returns the time of the change."""
    timestamp = turn.next_timestamp()
    turn.put(k.changed_key(thing), r.ChangedRow(timestamp, b"" if to is None else to.asker))
    return timestamp


def admit_change(turn: Turn, thing: bytes, to: ReplyTo | None) -> None:
    """`check_informed`, then `note_change`. Call it before any other row is put."""
    check_informed(turn, thing, to)
    note_change(turn, thing, to)
