"""Decisions on lanes: made, blocked, unblocked, listed. No lane is ever removed.

Unblocking goes on at the end of the lane's commands. Only the shell can find it, so the position is `AT_END` until
the shell has logged the offset (`resume`); before that nothing of the lane is read, by a successor neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.decisions import quotas
from anabranch.core.decisions.times import admit_change
from anabranch.core.decisions.transactions import end_pending
from anabranch.core.decisions.turn import AT_END, Turn
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE, check_lane
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.errors import IllegalState, InvalidArgument, NotAuthorized
from anabranch.schemas.records import (
    LaneInfo,
    LaneList,
    LanePositionRow,
    LaneRow,
    ListLanes,
    SetLane,
)


def is_blocked(state: State, lane: str) -> bool:
    """Whether the lane's commands are not to be carried out; so also those of a lane that is not known."""
    row = state.lanes.get(lane)
    return row.blocked if row is not None else lane not in (OPEN_LANE, ADMIN_LANE)


def is_read(state: State, lane: str) -> bool:
    """Whether the lane's commands may be carried out: it is not blocked, and its position is known."""
    return not is_blocked(state, lane) and state.lane_positions.get(lane) != AT_END


def position_of(state: State, lane: str) -> int:
    """The next of a lane's commands to decide; or `AT_END`."""
    start = state.round.commands_offset if lane == OPEN_LANE else 0
    return state.lane_positions.get(lane, start)


def set_lane(turn: Turn, command: SetLane, to: ReplyTo | None) -> None:
    """Make a lane, or block, unblock, or change it."""
    lane, state = check_lane(command.lane), turn.state
    if lane == ADMIN_LANE and command.blocked:
        raise InvalidArgument("the lane admin can't be blocked: no command could unblock it")
    former = state.lanes.get(lane)
    if former is None:
        limits.LANES.check(len(state.lanes) + 1, "a control partition")
    elif former.topic_ids != command.topic_ids:
        raise IllegalState(
            f"lane {lane!r} has other topics: block it, and make one of another name"
        )
    quotas.check_quotas(turn, lane, command.quotas, blocked=command.blocked)
    own = quotas.own_quotas(lane, command.quotas)
    row = LaneRow(lane, command.blocked, command.topic_ids, own)
    if row != former:
        admit_change(turn, k.lane_key(lane), to)
    if command.blocked:
        _refuse_pending(turn, lane)
    elif former is not None and former.blocked:
        turn.put(k.lane_position_key(lane), LanePositionRow(AT_END))
    if row != former:
        turn.put(k.lane_key(lane), row)
        how = "blocked" if command.blocked else "on"
        turn.audit(command, f"{lane}: {how}, quotas {own}")
    turn.reply(to, LaneList(_infos(turn, (lane,))))


def _refuse_pending(turn: Turn, lane: str) -> None:
    """Answer the undecided commits of a lane that is blocked. Decided ones go on."""
    error = NotAuthorized(f"lane {lane!r} is blocked: the transaction is still open")
    for txn_id in sorted(turn.state.committing):
        txn = turn.state.open[txn_id]
        if txn.pending is not None and not txn.pending.decided and _waits_for(txn, lane):
            end_pending(turn, txn_id, error)
            turn.hear(txn_id)  # the keepalive stopped at the commit: it begins afresh


def _waits_for(txn: OpenTxn, lane: str) -> bool:
    """Whether a pending commit is the lane's: its transaction's owner, or its only asker."""
    asked = set(txn.pending.lanes) if txn.pending is not None else set()
    return txn.row.owner == lane or asked == {lane}


def list_lanes(turn: Turn, command: ListLanes, to: ReplyTo | None) -> None:
    """List all lanes, by name."""
    names = sorted({OPEN_LANE, ADMIN_LANE, *turn.state.lanes})
    turn.reply(to, LaneList(_infos(turn, names)))


def _infos(turn: Turn, lanes: Sequence[str]) -> tuple[LaneInfo, ...]:
    used = quotas.usages(turn.state, turn.index.staged, lanes)
    return tuple([_info(turn, lane, used[lane]) for lane in lanes])


def _info(turn: Turn, lane: str, used: Mapping[str, int]) -> LaneInfo:
    row = turn.state.lanes.get(lane) or LaneRow(lane, False, (), {})
    seen, position = turn.memory.lanes.get(lane), position_of(turn.state, lane)
    trouble, end = (seen.trouble, seen.end) if seen is not None else ("", position)
    if lane == OPEN_LANE and turn.settings.lanes_only:
        trouble = "this controller serves lanes with a name of their own only (--lanes-only)"
    return LaneInfo(
        lane,
        row.blocked,
        trouble,
        row.topic_ids,
        quotas.quotas_of(turn.state, lane),
        {**used, **(seen.usage() if seen is not None else {})},
        position,
        max(position, end),
    )


def resume(turn: Turn, positions: Mapping[str, int]) -> None:
    """Log where lanes go on: `AT_END`, or the ends that the shell found."""
    for lane, offset in positions.items():
        own = lane == OPEN_LANE and offset != AT_END  # the round's own row has it
        turn.put(k.lane_position_key(lane), None if own else LanePositionRow(offset))
