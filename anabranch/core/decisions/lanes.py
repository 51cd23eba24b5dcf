"""Decisions on lanes: made, blocked, unblocked, listed. No lane is ever removed.

An unblocked lane resumes at the end of its commands. Only the shell can find that offset, so the position is
`AT_END` until the shell has logged it (`resume`). Before that no leader reads commands of the lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.core import limits, work
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
    """Whether the lane's commands must not be carried out: it is blocked, or not known."""
    row = state.lanes.get(lane)
    return row.blocked if row is not None else lane not in (OPEN_LANE, ADMIN_LANE)


def is_read(state: State, lane: str) -> bool:
    """Whether the lane's commands may be carried out: it is not blocked, and its position is known."""
    return not is_blocked(state, lane) and state.lane_positions.get(lane) != AT_END


def position_of(state: State, lane: str) -> int:
    """The offset of the lane's next command to decide, or `AT_END`."""
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
    own = quotas.own_quotas(state, lane, command.quotas)
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
    """Refuse the undecided commits of a lane that is blocked. Decided commits continue."""
    error = NotAuthorized(f"lane {lane!r} is blocked: the transaction is still open")
    for txn_id in sorted(turn.state.committing):
        txn = turn.state.open[txn_id]
        if txn.pending is not None and not txn.pending.decided and _waits_for(txn, lane):
            end_pending(turn, txn_id, error)
            turn.hear(txn_id)  # the keepalive was stopped by the commit: it starts again


def _waits_for(txn: OpenTxn, lane: str) -> bool:
    """Whether a pending commit belongs to the lane, as the transaction's owner or the only asker."""
    asked = set(txn.pending.lanes) if txn.pending is not None else set()
    return txn.row.owner == lane or asked == {lane}


def list_lanes(turn: Turn, command: ListLanes, to: ReplyTo | None) -> None:
    """List all lanes, by name."""
    names = sorted({OPEN_LANE, ADMIN_LANE, *turn.state.lanes})
    turn.reply(to, LaneList(_infos(turn, names)))


def _infos(turn: Turn, lanes: Sequence[str]) -> tuple[LaneInfo, ...]:
    state = turn.state
    counted = len(state.scopes) + len(state.streams) + len(state.processors) + len(state.open)
    turn.charge(work.LOOK * 4 * len(lanes) + work.of_items(counted))
    used = quotas.usages(turn.state, turn.index.uncommitted, lanes)
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
    """Log the offsets at which lanes resume: `AT_END`, or the ends that the shell found."""
    for lane, offset in positions.items():
        own = lane == OPEN_LANE and offset != AT_END  # the row of the round has that position
        turn.put(k.lane_position_key(lane), None if own else LanePositionRow(offset))
