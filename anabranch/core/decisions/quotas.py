"""Quotas of lanes: how much one lane may have at once, beside the limits of a control partition in sum.

A lane that an operator made has the defaults of `limits.QUOTAS`, `open` and `admin` have none; a `LaneRow` replaces
them. A quota refuses what makes more, and never a commit, an abort, a question or a heartbeat. Only the rate of
a lane's commands delays these, in `processors.intake`.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core import limits
from anabranch.core.decisions.turn import Turn
from anabranch.core.ids import ADMIN_LANE, OPEN_LANE
from anabranch.core.state import State
from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    TooManyStreams,
    TooManyTransactions,
    TooMuchStaged,
)

_ERRORS: dict[str, type[AnabranchError]] = {
    "open": TooManyTransactions,
    "staged": TooMuchStaged,
    "streams": TooManyStreams,
    "partitions": TooManyStreams,
    "keepalive": InvalidArgument,
}


def quota(state: State, lane: str, name: str) -> int | None:
    """The most that a lane may have of one of `limits.QUOTAS`; None: as much as the control partition."""
    row = state.lanes.get(lane)
    if row is not None and name in row.quotas:
        return row.quotas[name]
    return None if lane in (OPEN_LANE, ADMIN_LANE) else limits.QUOTAS[name].value


def check_open(turn: Turn, lane: str, more: int = 1) -> None:
    """`TooManyTransactions` if the lane would have more open transactions than it may."""
    _check(turn, lane, "open", len(turn.state.open_of.get(lane, ())) + more)


def check_staged(turn: Turn, lane: str) -> None:
    """`TooMuchStaged` once the lane's open transactions have as many bytes in journals as they may."""
    most = quota(turn.state, lane, "staged")
    staged = turn.index.staged
    if most is not None and staged.total >= most:  # only then is the sum worth its time
        _check(turn, lane, "staged", staged.size_of(turn.state.open_of.get(lane, ())) + 1)


def check_room(turn: Turn, lane: str, streams: int, partitions: int) -> None:
    """`TooManyStreams` if the lane would have more streams, or partitions in them, than it may."""
    if quota(turn.state, lane, "streams") is None and quota(turn.state, lane, "partitions") is None:
        return
    rows = [row for row in turn.state.streams.values() if row.owner == lane]
    _check(turn, lane, "streams", len(rows) + streams)
    had = sum(max(row.wanted_partitions, row.segment_count) for row in rows)
    _check(turn, lane, "partitions", had + partitions)


def check_keepalive(turn: Turn, lane: str, keepalive_ms: int) -> None:
    """`InvalidArgument` for a keepalive that is longer than the lane may have."""
    _check(turn, lane, "keepalive", keepalive_ms)


def _check(turn: Turn, lane: str, name: str, found: int) -> None:
    most = quota(turn.state, lane, name)
    if most is not None and found > most:
        limit = limits.QUOTAS[name]
        raise _ERRORS[name](
            f"lane {lane!r} would have {found:,} {limit.unit} ({limit.bounds}); {most:,} are allowed. An operator "
            f"raises it: anabranch lane add {lane} --quota {name}={found}"
        )


def usage(turn: Turn, lane: str) -> dict[str, int]:
    """What a lane has now of each quota that counts things."""
    rows = [row for row in turn.state.streams.values() if row.owner == lane]
    mine = turn.state.open_of.get(lane, ())
    return {
        "open": len(mine),
        "staged": turn.index.staged.size_of(mine),
        "streams": len(rows),
        "partitions": sum(max(row.wanted_partitions, row.segment_count) for row in rows),
    }


def check_quotas(quotas: Iterable[tuple[str, int]]) -> None:
    """`InvalidArgument` for a quota that is not known, or below 1."""
    for name, most in quotas:
        if name not in limits.QUOTAS:
            raise InvalidArgument(f"{name!r} is no quota: {', '.join(limits.QUOTAS)}")
        if not 1 <= most < 1 << 63:
            raise InvalidArgument(f"quota {name}={most}: 1 or more; block the lane to stop it")
