"""Rights of lanes: what a lane may do, and where (``docs/security.md``, Grants)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag

from anabranch.core.ids import ADMIN_LANE, OPEN_LANE
from anabranch.core.state import State
from anabranch.errors import NotAuthorized


class Right(IntFlag):
    """One thing that a lane may do; their sums are the ``rights`` of a `GrantRow`."""

    DESCRIBE = 1
    SAFE_TIME = 2
    WRITE = 4
    CREATE = 8
    SCALE = 16
    SERIES = 32
    OPERATE = 64
    ADMIN = 128


EVERYWHERE = "*"
ALL = Right(255)
CREATORS = ALL & ~Right.ADMIN  # of the lane that creates a scope, on that scope

_KEPT = 10_000  # answers remembered
# Rights that lanes have from the start, on everything; a row of that lane and pattern replaces them.
_FROM_THE_START: Mapping[str, Right] = {
    ADMIN_LANE: ALL,
    OPEN_LANE: ALL & ~(Right.OPERATE | Right.ADMIN),
}


def of_scope(scope: str) -> str:
    """The pattern of all streams of a scope, and of the scope itself."""
    return f"{scope}/*"


def rights_of(state: State, lane: str, what: str) -> int:
    """A lane's rights on a stream (``scope/stream``), a whole scope (``scope/*``) or everything (``*``)."""
    known = state.rights.get((lane, what))
    if known is None:
        granted = state.grants.get(lane, {})
        found = granted.get(EVERYWHERE, _FROM_THE_START.get(lane, 0))
        if what != EVERYWHERE:
            found |= granted.get(of_scope(what.partition("/")[0]), 0) | granted.get(what, 0)
        known = _keep(state, lane, what, found)
    return known


def rights_within(state: State, lane: str, scope: str) -> int:
    """All rights that a lane has on any stream of a scope."""
    known = state.rights.get((lane, scope))
    if known is None:
        found = rights_of(state, lane, of_scope(scope))
        for pattern, rights in state.grants.get(lane, {}).items():
            if pattern.partition("/")[0] == scope:
                found |= rights
        known = _keep(state, lane, scope, found)
    return known


def _keep(state: State, lane: str, what: str, rights: int) -> int:
    if len(state.rights) >= _KEPT:  # senders choose the names
        state.rights.clear()
    state.rights[lane, what] = int(rights)
    return int(rights)


def check_right(state: State, lane: str, right: Right, what: str) -> None:
    """`NotAuthorized` unless the lane has the right on ``what``, as in `rights_of`; or on any of a scope's.

    A bare scope's name as ``what`` means any of its streams. The text is the same whether the thing exists or not.
    """
    within = rights_of if "/" in what or what == EVERYWHERE else rights_within
    if not within(state, lane, what) & right:
        raise refusal(lane, right, what)


def refusal(lane: str, right: Right, what: str) -> NotAuthorized:
    """The error for a right that is missing; the same whether the thing exists or not."""
    name = (right.name or "").lower().replace("_", "-")
    where = what if "/" in what or what == EVERYWHERE else of_scope(what)
    return NotAuthorized(
        f"lane {lane!r} has no right {name!r} on {where}, or there is no such thing; nothing was changed. An "
        f"operator grants it: anabranch grants add {lane} '{where}' {name}"
    )
