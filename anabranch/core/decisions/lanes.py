"""Decisions on lanes: adding, blocking and listing them; their grants, the audit, and quarantined commands; and on
the feature level.

A *lane* is a request channel: the topics for the commands of some clients, and for the replies. No lane is ever
removed. An unblocked lane resumes at the end of its commands. Only the shell can find that offset, so the position
is `AT_END` until the shell has it logged (`resume`), and no leader reads the lane before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import (
    ADD,
    ALL,
    CREATORS,
    EVERYWHERE,
    FROM_THE_START,
    TAKE,
    changed,
    from_the_start,
    names_of,
)
from anabranch.core.decisions import quotas
from anabranch.core.decisions.times import admit_change
from anabranch.core.decisions.transactions import end_pending
from anabranch.core.decisions.turn import AT_END, Turn
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.errors import IllegalState, InvalidArgument, NotAuthorized
from anabranch.protocol import limits
from anabranch.protocol.ids import AS_NOW, DIRECTORY, MAX_CONTROL_PARTITION
from anabranch.protocol.legal_names import (
    ADMIN_LANE,
    OPEN_LANE,
    check_lane,
    check_scope,
    split_stream,
)
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, unsupported_level


def is_blocked(state: State, lane: str) -> bool:
    """Whether the lane is blocked or not known, so that its commands must not be carried out."""
    row = state.lanes.get(lane)
    return row.blocked if row is not None else lane not in (OPEN_LANE, ADMIN_LANE)


def is_read(state: State, lane: str) -> bool:
    """Whether the lane's commands may be carried out: it is not blocked, and its position is known."""
    return not is_blocked(state, lane) and state.lane_positions.get(lane) != AT_END


def position_of(state: State, lane: str) -> int:
    """The offset of the lane's next command to decide, or `AT_END`."""
    start = state.round.commands_offset if lane == OPEN_LANE else 0
    return state.lane_positions.get(lane, start)


def set_lane(turn: Turn, command: r.SetLane, to: ReplyTo | None) -> None:
    """Add a lane, or block, unblock, or change it."""
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
    row = r.LaneRow(lane, command.blocked, command.topic_ids, own)
    if row != former:
        admit_change(turn, k.lane_key(lane), to)
    if command.blocked:
        _refuse_pending(turn, lane)
    elif former is not None and former.blocked:
        turn.put(k.lane_position_key(lane), r.LanePositionRow(AT_END))
    if row != former:
        turn.put(k.lane_key(lane), row)
        how = "blocked" if command.blocked else "on"
        turn.audit(command, f"{lane}: {how}, quotas {own}")
    turn.reply(to, r.LaneList(_infos(turn, (lane,))))


def _refuse_pending(turn: Turn, lane: str) -> None:
    """Refuse the undecided commits of a lane that is blocked. Decided commits continue."""
    error = NotAuthorized(f"lane {lane!r} is blocked: the transaction is still open")
    for txn_id in sorted(turn.state.committing):
        txn = turn.state.open[txn_id]
        if txn.pending is not None and not txn.pending.decided and _waits_for(txn, lane):
            end_pending(turn, txn_id, error)
            turn.hear(txn_id)  # the keepalive, which stops while a commit is pending, starts again


def _waits_for(txn: OpenTxn, lane: str) -> bool:
    """Whether a pending commit belongs to the lane, as the transaction's owner or the only asker."""
    asked = {each.lane for each in txn.pending.askers} if txn.pending is not None else set()
    return txn.row.owner == lane or asked == {lane}


def list_lanes(turn: Turn, command: r.ListLanes, to: ReplyTo | None) -> None:
    names = sorted({OPEN_LANE, ADMIN_LANE, *turn.state.lanes})
    turn.reply(to, r.LaneList(_infos(turn, names)))


def _infos(turn: Turn, lanes: Sequence[str]) -> tuple[r.LaneInfo, ...]:
    state = turn.state
    counted = len(state.scopes) + len(state.streams) + len(state.processors) + len(state.open)
    turn.charge(work.LOOK * 4 * len(lanes) + work.of_items(counted))
    used = quotas.usages(turn.state, turn.index.uncommitted, lanes)
    return tuple([_info(turn, lane, used[lane]) for lane in lanes])


def _info(turn: Turn, lane: str, used: Mapping[str, int]) -> r.LaneInfo:
    row = turn.state.lanes.get(lane) or r.LaneRow(lane, False, (), {})
    seen, position = turn.memory.lanes.get(lane), position_of(turn.state, lane)
    trouble, end = (seen.trouble, seen.end) if seen is not None else ("", position)
    if lane == OPEN_LANE and turn.settings.lanes_only:
        trouble = "this controller serves lanes with a name of their own only (--lanes-only)"
    return r.LaneInfo(
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
        own = lane == OPEN_LANE and offset != AT_END  # the `RoundRow` has this position
        turn.put(k.lane_position_key(lane), None if own else r.LanePositionRow(offset))


# -- grants, and the audit -------------------------------------------------------------------------


def set_grant(turn: Turn, command: r.SetGrant, to: ReplyTo | None) -> None:
    """Set a lane's rights on a pattern, or add rights, or take rights away. Repeating the command is harmless."""
    lane, pattern = command.lane, command.pattern
    if check_lane(lane) not in turn.state.lanes and lane not in FROM_THE_START:
        raise InvalidArgument(f"there is no lane {lane!r}: add it first (`anabranch lane add`)")
    _check_pattern(pattern)
    how = command.rights & (ADD | TAKE)
    if not 0 <= command.rights - how <= ALL or how == ADD | TAKE:
        raise InvalidArgument(f"rights {command.rights}: their bits are 0 to {ALL:d}")
    granted = turn.state.grants.get(lane, {})
    start = from_the_start(turn.state, lane) if pattern == EVERYWHERE else 0
    rights = changed(int(granted.get(pattern, start)), command.rights)
    if (lane, pattern) == (ADMIN_LANE, EVERYWHERE) and rights != ALL:
        raise InvalidArgument(
            f"lane {ADMIN_LANE!r} keeps all rights: else no lane could grant them again"
        )
    if granted.get(pattern) != rights:
        if pattern not in granted:
            limits.GRANTS.check(_count(turn) + 1, "the cluster")
        admit_change(turn, k.grant_key(lane, pattern), to)
        turn.put(k.grant_key(lane, pattern), r.GrantRow(lane, pattern, rights))
        turn.audit(command, f"{lane} on {pattern}: {names_of(rights) or 'nothing'}")
    turn.reply(to, r.GrantList((r.GrantRow(lane, pattern, rights),)))


def _count(turn: Turn) -> int:
    """The number of grants without the creators' grants on their scopes: many scopes do not use up the limit."""
    every = [grant for granted in turn.state.grants.values() for grant in granted.items()]
    return sum(pattern == EVERYWHERE or rights != CREATORS for pattern, rights in every)


def _check_pattern(pattern: str) -> None:
    scope, slash, name = pattern.partition("/")
    if pattern == EVERYWHERE:
        return
    if slash and name == EVERYWHERE:
        check_scope(scope)
    else:
        split_stream(pattern)


def list_grants(turn: Turn, command: r.ListGrants, to: ReplyTo | None) -> None:
    """List all grants, by lane and pattern, including those that exist from the start."""
    found = {(lane, EVERYWHERE): from_the_start(turn.state, lane) for lane in FROM_THE_START}
    for lane, granted in turn.state.grants.items():
        found |= {(lane, pattern): rights for pattern, rights in granted.items()}
    turn.reply(
        to, r.GrantList(tuple([r.GrantRow(*place, found[place]) for place in sorted(found)]))
    )


def list_audit(turn: Turn, command: r.ListAudit, to: ReplyTo | None) -> None:
    """List operators' commands that were carried out, the newest first, a bounded number in one answer."""
    below = b"\xff" * 13 if command.before is None else command.before
    most = limits.LIST_ROWS.value
    found = list(islice(turn.state.rows_below(k.AUDIT_KEY, below), most + 1))
    more = found[most - 1][0] if len(found) > most else None
    turn.reply(to, r.AuditList(tuple([row for _, row in found[:most]]), more))


def set_feature_level(turn: Turn, command: r.SetFeatureLevel, to: ReplyTo | None) -> None:
    """Raise the level up to which controllers may write records, or only answer with the present one.

    A leader of an older release can't read records of a level that it does not know. So an operator raises the
    level once no controller is of such a release. A level is never lowered, because records of it may be anywhere
    in the logs (docs/inside/decisions/0046-feature-levels.md).
    """
    present, asked = turn.state.feature_level, command.level
    if asked is not None and command.control_partitions:
        raise InvalidArgument("raise the level by one command, and grow by another one")
    if asked is not None and asked != present:
        if asked < 1:
            raise InvalidArgument(f"feature level {asked}: 1 or more")
        if asked < present:
            raise IllegalState(f"the feature level is {present}, and can't be lowered")
        if asked > LEVEL:
            raise unsupported_level(asked, "the command")
        row = turn.state.feature or r.FeatureRow(1, 0)
        turn.put(k.FEATURE_KEY, replace(row, level=asked, raised_ms=turn.now_ms))
        turn.audit(command, f"{present} to {asked}")
    in_use = 0
    if command.control_partitions:
        in_use = _use_control_partitions(turn, command)
    turn.reply(to, r.FeatureLevel(turn.state.feature_level, LEVEL, in_use))


def _use_control_partitions(turn: Turn, command: r.SetFeatureLevel) -> int:
    """Log how many control partitions new scopes may get, if that is more than before; returns the number.

    Until it is logged for the first time, it is the number that the topics had when this controller started. A
    client that adds partitions has the present number logged first (`AS_NOW`). Otherwise the next leader would
    count the new partitions, and a scope could get one that has no leader yet.

    The others log it, too, and before the directory: they accept transactions of these control partitions.
    """
    row, asked = turn.state.feature or r.FeatureRow(1, 0), command.control_partitions
    if asked == AS_NOW:
        asked = turn.control_partitions
    if not 1 <= asked <= MAX_CONTROL_PARTITION + 1:
        raise InvalidArgument(f"{asked} control partitions: 1 to {MAX_CONTROL_PARTITION + 1:,}")
    if asked < row.control_partitions and turn.settings.control_partition != DIRECTORY:
        return row.control_partitions  # a call that was interrupted had asked for more
    if asked < row.control_partitions:
        raise IllegalState(f"{row.control_partitions} control partitions are in use, for ever")
    if asked > row.control_partitions:
        turn.put(k.FEATURE_KEY, replace(row, control_partitions=asked))
        turn.audit(command, f"control partitions: {asked}")
    return asked


# -- quarantined commands: logged and skipped, so that other commands are served -------------------


_REASON = 256  # characters of a reason: one answer has many of them


def suspect(turn: Turn, lane: str, offset: int, end: int, tries: int) -> None:
    """Log that the commands from ``offset`` to ``end`` are tried alone next, for the ``tries``-th time.

    If they crash the leader, the next leader finds them in the log.
    """
    turn.put(k.SUSPECT_KEY, r.SuspectRow(offset, end, tries, lane))


def quarantine(turn: Turn, lane: str, offset: int, what: str, reason: str) -> None:
    """Log that a command, or a batch of them, is quarantined. At the limit the oldest row is deleted."""
    known = turn.state.quarantined
    for key in list(islice(known, max(0, len(known) + 1 - limits.QUARANTINED.value))):
        turn.put(k.quarantine_key(*k.quarantine_at(key)), None)
    reason = limits.cut(reason, _REASON)
    row = r.QuarantineRow(offset, turn.wall_ms, what, reason, lane)
    turn.put(k.quarantine_key(lane, offset), row)


def list_commands(turn: Turn, command: r.ListCommands, to: ReplyTo | None) -> None:
    """Answer with the position in the commands, the quarantined commands, and the number of transactions kept."""
    found = tuple(turn.state.quarantined.values())
    here = turn.at is not None and turn.lane == OPEN_LANE
    position = turn.at + 1 if here and turn.at is not None else turn.state.round.commands_offset
    seen = turn.memory.lanes.get(OPEN_LANE)
    end = max(seen.end if seen is not None else 0, position)
    state = turn.state
    turn.reply(to, r.CommandList(position, end, found, len(state.open), state.outcomes))


LOAD_LEVEL = 4  # the feature level from which answers have the processor time
_NO_TERM = r.TermRow(0, "", 0, resigned=False)


def describe_leader(turn: Turn, command: r.DescribeLeader, to: ReplyTo | None) -> None:
    """Answer with the term of this leader, and how much it does."""
    term = turn.state.term or _NO_TERM
    held = turn.index.uncommitted.total
    busy_us = waiting = 0
    if turn.state.feature_level >= LOAD_LEVEL:
        busy_us = turn.memory.busy_us
        seen = turn.memory.lanes.items()
        waiting = sum([max(0, lane.end - position_of(turn.state, name)) for name, lane in seen])
        waiting = max(0, waiting - 1)  # all but this command
    info = r.LeaderInfo(
        term.term, term.leader, term.since_ms, turn.state.committed, held, busy_us, waiting
    )
    turn.reply(to, info)
