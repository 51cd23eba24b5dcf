"""Quotas of lanes: how much one lane may have at once, in addition to the limits of a control partition.

Lanes have the defaults of `limits.QUOTAS` unless their `LaneRow` has others. The lane `admin` has no quotas, nor
has `open` if its senders are trusted. A quota refuses commands that create more, but never a
commit, an abort, a question or a heartbeat. The quota of work refuses no command, but delays all
(`controller.lanes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from anabranch import errors
from anabranch.core import work
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import Uncommitted
from anabranch.core.state import State
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_us
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.records import StreamRow

_ERRORS: dict[str, type[errors.AnabranchError]] = {
    "open": errors.TooManyTransactions,
    "staged": errors.TooManyUncommittedBytes,
    "scopes": errors.TooManyStreams,
    "streams": errors.TooManyStreams,
    "partitions": errors.TooManyStreams,
    "locks": errors.TooMuchLocked,
    "prepared": errors.TooManyTransactions,
    "processors": errors.InvalidArgument,
    "tasks": errors.InvalidArgument,
    "series": errors.InvalidArgument,
    "keepalive": errors.InvalidArgument,
    "snapshot": errors.SnapshotExpired,
}


def quota(state: State, lane: str, name: str) -> int | None:
    """A lane's quota of this name (`limits.QUOTAS`); None if it has no such quota."""
    row = state.lanes.get(lane)
    if row is not None and name in row.quotas:
        return row.quotas[name]
    return _default(state, lane, name)


def _default(state: State, lane: str, name: str) -> int | None:
    free = lane == ADMIN_LANE or state.trusts(lane)
    return None if free else limits.QUOTAS[name].value


def own_quotas(state: State, lane: str, quotas: Mapping[str, int]) -> dict[str, int]:
    """The quotas that differ from the defaults: to send back a listed set does not fix the defaults."""
    return {name: most for name, most in quotas.items() if most != _default(state, lane, name)}


# Each check raises the error of `_ERRORS` for its quota if the lane would have more than the quota allows.


def check_open(turn: Turn, lane: str, more: int = 1) -> None:
    _check(turn, lane, "open", len(turn.state.open_of.get(lane, ())) + more)


def check_uncommitted(turn: Turn, lane: str, txn_id: bytes | None = None) -> None:
    """`TooManyUncommittedBytes` if this transaction, or the lane's open ones, are at their limit in journals."""
    uncommitted = turn.index.uncommitted
    found = 0 if txn_id is None else uncommitted.size_of((txn_id,))
    if found >= limits.UNCOMMITTED.value:
        raise errors.TooManyUncommittedBytes(
            f"the transaction has {found:,} bytes in journals, {limits.UNCOMMITTED.value:,} are allowed: commit "
            "or abort it"
        )
    most = quota(turn.state, lane, "staged")
    # The sum of the lane, which takes time, can't exceed the sum of all.
    if most is not None and uncommitted.total >= most:
        _check(turn, lane, "staged", uncommitted.size_of(turn.state.open_of.get(lane, ())) + 1)


def check_prepared(turn: Turn, lane: str) -> None:
    if quota(turn.state, lane, "prepared") is not None:
        turn.charge(work.of_items(len(turn.state.open_of.get(lane, ()))))
        _check(turn, lane, "prepared", _prepared_of(turn.state, lane) + 1)


def _prepared_of(state: State, lane: str) -> int:
    return sum(state.open[each].row.state == "PREPARED" for each in state.open_of.get(lane, ()))


def check_processors(turn: Turn, lane: str, tasks: int) -> None:
    rows = [row for row in turn.state.processors.values() if row.owner == lane]
    turn.charge(work.of_items(len(turn.state.processors)))
    _check(turn, lane, "processors", len(rows) + 1)
    _check(turn, lane, "tasks", sum(row.tasks for row in rows) + tasks)


def check_series(turn: Turn, lane: str) -> None:
    _check(turn, lane, "series", turn.state.series_of(lane) + 1)


def check_scopes(turn: Turn, lane: str) -> None:
    if quota(turn.state, lane, "scopes") is not None:
        made = sum(owner == lane for owner in turn.state.scope_owners.values())
        turn.charge(work.of_items(len(turn.state.scope_owners)))
        _check(turn, lane, "scopes", made + 1)


def check_room(turn: Turn, lane: str, streams: int, partitions: int) -> None:
    if quota(turn.state, lane, "streams") is None and quota(turn.state, lane, "partitions") is None:
        return
    rows = [row for row in turn.state.streams.values() if row.owner == lane]
    turn.charge(work.of_items(len(turn.state.streams)))
    _check(turn, lane, "streams", len(rows) + streams)
    _check(turn, lane, "partitions", sum(map(partitions_of, rows)) + partitions)


def check_locks(turn: Turn, lane: str, more: int) -> None:
    if quota(turn.state, lane, "locks") is not None:
        turn.charge(work.of_items(len(turn.state.open_of.get(lane, ()))))
        _check(turn, lane, "locks", _locks_of(turn.state, lane) + more)


def _locks_of(state: State, lane: str) -> int:
    return sum(state.locks.of(txn_id).count for txn_id in state.open_of.get(lane, ()))


def check_keepalive(turn: Turn, lane: str, keepalive_ms: int) -> None:
    _check(turn, lane, "keepalive", keepalive_ms)


def check_snapshot(turn: Turn, lane: str, snapshot: int) -> None:
    """Raise `SnapshotExpired` if a snapshot is older than the lane's quota: tables are not kept readable for it."""
    now_us = max(to_us(turn.hybrid_time), turn.now_us)
    _check(turn, lane, "snapshot", (now_us - to_us(snapshot)) // 1000)


def partitions_of(row: StreamRow) -> int:
    """The number of partitions that a stream has or will have."""
    return max(row.wanted_partitions, row.segment_count)


def _check(turn: Turn, lane: str, name: str, found: int) -> None:
    most = quota(turn.state, lane, name)
    if most is not None and found > most:
        limit = limits.QUOTAS[name]
        raise _ERRORS[name](
            f"lane {lane!r} would have {found:,} {limit.unit} ({limit.bounds}); {most:,} are allowed. An operator "
            f"raises it: anabranch lane add {lane} --quota {name}={found}"
        )


def usages(state: State, uncommitted: Uncommitted, lanes: Iterable[str]) -> dict[str, Counter[str]]:
    """Lane -> how much it has of each quota that counts things. Reads every open transaction of these lanes."""
    found: dict[str, Counter[str]] = {}
    for lane in lanes:
        mine = state.open_of.get(lane, ())
        found[lane] = Counter(open=len(mine), staged=uncommitted.size_of(mine))
        found[lane]["locks"] = _locks_of(state, lane)
        found[lane]["prepared"] = _prepared_of(state, lane)
        found[lane]["series"] = state.series_of(lane)
    for owner in state.scope_owners.values():
        if owner in found:
            found[owner]["scopes"] += 1
    for each in state.processors.values():
        if each.owner in found:
            found[each.owner]["processors"] += 1
            found[each.owner]["tasks"] += each.tasks
    for row in state.streams.values():
        if row.owner in found:
            found[row.owner]["streams"] += 1
            found[row.owner]["partitions"] += partitions_of(row)
    return found


def quotas_of(state: State, lane: str) -> dict[str, int]:
    """All quotas of a lane, including defaults."""
    found = {name: quota(state, lane, name) for name in limits.QUOTAS}
    return {name: most for name, most in found.items() if most is not None}


def check_quotas(turn: Turn, lane: str, quotas: Mapping[str, int], *, blocked: bool) -> None:
    """`InvalidArgument` for a quota that is not known, below 1, or below what the lane has now.

    A lane that is to be ``blocked`` is never refused for what it has, which differs between control partitions.
    """
    has = Counter[str]() if blocked else usages(turn.state, turn.index.uncommitted, (lane,))[lane]
    for name, most in quotas.items():
        if name not in limits.QUOTAS:
            raise errors.InvalidArgument(f"{name!r} is no quota: {', '.join(limits.QUOTAS)}")
        if not 1 <= most < 1 << 63:
            raise errors.InvalidArgument(
                f"quota {name}={most}: 1 or more; block the lane to stop it"
            )
        if most < has[name] and most != quota(turn.state, lane, name):
            raise errors.InvalidArgument(
                f"quota {name}={most}: lane {lane!r} has {has[name]:,} now"
            )
