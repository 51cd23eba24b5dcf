"""Decisions on grants, and the list of what operators did."""

from __future__ import annotations

from itertools import islice

from anabranch.core import limits
from anabranch.core import rows as k
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
from anabranch.core.decisions.times import admit_change
from anabranch.core.decisions.turn import Turn
from anabranch.core.legal_names import ADMIN_LANE, check_lane, check_scope, split_stream
from anabranch.core.round import ReplyTo
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import (
    AuditList,
    GrantList,
    GrantRow,
    ListAudit,
    ListGrants,
    SetGrant,
)


def set_grant(turn: Turn, command: SetGrant, to: ReplyTo | None) -> None:
    """Set, add to or take from a lane's rights on a pattern. Repeating it changes nothing and adds no audit row."""
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
        turn.put(k.grant_key(lane, pattern), GrantRow(lane, pattern, rights))
        turn.audit(command, f"{lane} on {pattern}: {names_of(rights) or 'nothing'}")
    turn.reply(to, GrantList((GrantRow(lane, pattern, rights),)))


def _count(turn: Turn) -> int:
    """The number of grants without those of scopes' creators, so that a lane with many scopes does not use them
    up.
    """
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


def list_grants(turn: Turn, command: ListGrants, to: ReplyTo | None) -> None:
    """All grants in force, by lane and pattern, including those that exist from the start."""
    found = {(lane, EVERYWHERE): from_the_start(turn.state, lane) for lane in FROM_THE_START}
    for lane, granted in turn.state.grants.items():
        found |= {(lane, pattern): rights for pattern, rights in granted.items()}
    turn.reply(to, GrantList(tuple([GrantRow(*place, found[place]) for place in sorted(found)])))


def list_audit(turn: Turn, command: ListAudit, to: ReplyTo | None) -> None:
    """Operators' commands that were carried out, the newest first; a bounded part of them in one answer."""
    below = b"\xff" * 13 if command.before is None else command.before
    most = limits.LIST_ROWS.value
    found = list(islice(turn.state.rows_below(k.AUDIT_KEY, below), most + 1))
    more = found[most - 1][0] if len(found) > most else None
    turn.reply(to, AuditList(tuple([row for _, row in found[:most]]), more))
