"""Rights of lanes: what a lane may do, and where (``docs/security.md``, Grants).

A *lane* is a request channel: all clients whose ACLs permit writing to its topic of commands have its rights.
Grants give a lane rights on a stream, on all of a scope, or on everything. Before each decision, `RULES`
check the lane's command; some decisions check more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from anabranch.core.stream_settings import BASE
from anabranch.errors import NotAuthorized
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE, STATE, is_plain, is_state
from anabranch.protocol.legal_names import BASE as BASES
from anabranch.protocol.schemas import records as r

if TYPE_CHECKING:
    from anabranch.core.state import State


class Right(IntFlag):
    """One thing that a lane may do; the ``rights`` of a `GrantRow` are a sum of them."""

    DESCRIBE = 1
    SAFE_TIME = 2
    WRITE = 4
    CREATE = 8
    SCALE = 16
    SERIES = 32
    OPERATE = 64
    ADMIN = 128
    PROCESS = 256


EVERYWHERE = "*"
ALL = Right(511)
# Flags of a `SetGrant`: add to the rights, or take from them.
ADD = 1 << 29
TAKE = 1 << 30
CREATORS = ALL & ~Right.ADMIN  # given to the lane that creates a scope, on that scope
_FIND = Right.DESCRIBE | Right.CREATE  # either right is enough to find an existing scope
# Either right is enough to begin a transaction that moves positions; its commit needs `process`.
_MOVE = Right.WRITE | Right.PROCESS

_KEPT = 10_000  # cached answers at most
_LONGEST = 250  # characters of a cached pattern
# Rights on everything that lanes have from the start; a row of the same lane and pattern replaces these rights.
_TRUSTED = ALL & ~(Right.OPERATE | Right.ADMIN)  # the rights of `open` if its senders are trusted
FROM_THE_START: Mapping[str, Right] = {
    ADMIN_LANE: ALL,
    OPEN_LANE: _TRUSTED & ~(Right.SCALE | Right.SERIES),
}


def from_the_start(state: State, lane: str) -> int:
    """The rights on everything that a lane has without a grant."""
    return int(_TRUSTED if state.trusts(lane) else FROM_THE_START.get(lane, 0))


def changed(has: int, rights: int) -> int:
    """A lane's rights on a pattern after a `SetGrant` with these ``rights``. ``has``: its rights before."""
    if rights & ADD:
        return has | rights & ~ADD
    return has & ~rights if rights & TAKE else rights


def of_scope(scope: str) -> str:
    """The pattern of all streams of a scope, and of the scope itself."""
    return f"{scope}/*"


def rights_of(state: State, lane: str, what: str) -> int:
    """A lane's rights on a stream (``scope/stream``), a whole scope (``scope/*``) or everything (``*``)."""
    known = state.rights.get((lane, what))
    if known is None:
        granted = state.grants.get(lane, {})
        found = granted.get(EVERYWHERE, from_the_start(state, lane))
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
    if len(what) <= _LONGEST:
        state.rights[lane, what] = int(rights)
    return int(rights)


def check_right(state: State, lane: str, right: Right, what: str) -> None:
    """Raise `NotAuthorized` unless the lane has the right on ``what``, which is as for `rights_of`.

    If ``what`` is a scope's name, the right on any stream of that scope is enough.
    """
    rights = state.rights.get((lane, what))  # each event's stream comes here
    if rights is None:
        within = rights_of if "/" in what or what == EVERYWHERE else rights_within
        rights = within(state, lane, what)
    if not rights & int(right):  # a plain number: flags are slow
        raise refusal(lane, right, what)


def refusal(lane: str, right: Right, what: str) -> NotAuthorized:
    """The error for a right that is missing; the same whether the thing exists or not."""
    name = names_of(right)
    where = what if "/" in what or what == EVERYWHERE else of_scope(what)
    unknown = "" if what == EVERYWHERE else ", or there is no such thing"
    return NotAuthorized(
        f"lane {lane!r} has no right {name!r} on {where}{unknown}; nothing was changed. An "
        f"operator grants it: anabranch grants add {lane} '{where}' {name}"
    )


def names_of(rights: int) -> str:
    """Rights as people write them: "write, safe-time"."""
    names = [each.name or "" for each in Right if each & rights]
    return ", ".join(names).lower().replace("_", "-")


# -- which right each command needs -------------------------------------------------------------------

Rule = Callable[["State", str, Any], None]  # of a lane and its command; raises NotAuthorized


def _on(right: Right, what: Callable[[Any], str]) -> Rule:
    return lambda state, lane, command: check_right(state, lane, right, what(command))


def _stream(right: Right) -> Rule:
    return _on(right, lambda command: command.stream)


def _within(right: Right) -> Rule:
    """The rule that the lane needs this right on any stream of the scope that the command names."""
    return _on(right, lambda command: command.scope)


def _everywhere(right: Right) -> Rule:
    return _on(right, lambda command: EVERYWHERE)


def _by_transaction(state: State, lane: str, command: Any) -> None:
    """Refuse nothing: the decision itself checks the token, or the transaction's owner."""


def _from_controllers(state: State, lane: str, command: Any) -> None:
    """Refuse nothing: only controllers can write to the topic of this message."""


def _find_scope(state: State, lane: str, command: r.FindScope) -> None:
    if command.create and command.near is not None:
        check_right(state, lane, Right.DESCRIBE, command.near)
    if not command.create:
        check_right(state, lane, Right.DESCRIBE, command.scope)
    elif not (command.scope in state.scopes and rights_within(state, lane, command.scope) & _FIND):
        check_right(state, lane, Right.CREATE, of_scope(command.scope))


def _describe(state: State, lane: str, command: r.DescribeStreams) -> None:
    """A list of all streams needs no right: it contains what the lane may describe."""
    what = command.stream if command.stream is not None else command.scope
    if what is not None:
        check_right(state, lane, Right.DESCRIBE, what)


def _describe_processors(state: State, lane: str, command: r.DescribeProcessors) -> None:
    check_right(state, lane, Right.DESCRIBE, command.processor or of_scope(command.scope))


def _list_transactions(
    state: State, lane: str, command: r.ListTransactions | r.ListTableLocks
) -> None:
    """A list of all scopes, or by a coordinator's secret, needs no right: it has what its sender may see."""
    if command.scope is not None and getattr(command, "secret", None) is None:
        check_right(state, lane, Right.DESCRIBE, command.scope)


def _list_open(state: State, lane: str, command: r.ListOpen) -> None:
    """For one transaction the decision checks the right; a list of all scopes contains what the lane may see."""
    if command.scope is not None and command.txn_id is None:
        check_right(state, lane, Right.DESCRIBE, command.scope)


def _begin(state: State, lane: str, command: r.Begin | r.OneShot | r.PrepareEvents) -> None:
    """A repeated command needs no right: it is answered from the transaction's row, but only to the owner."""
    row = state.txn_row(command.txn_id)
    if row is None:
        moved = getattr(command, "fencing_hash", None) or getattr(command, "consumed", None)
        check_right(state, lane, Right.WRITE if moved is None else _MOVE, command.scope)
    elif row.owner != lane:
        raise refusal(lane, Right.WRITE, command.scope)


def _create_stream(state: State, lane: str, command: r.CreateStream) -> None:
    """A processor's state needs the right to run the processor; a companion needs the right to operate its table.

    Adopting a topic needs a right that the creator of a scope does not have, as it may be another team's topic.
    """
    if is_state(command.stream):
        check_right(state, lane, Right.PROCESS, command.stream.removesuffix(STATE))
    elif BASE in command.settings:
        check_right(state, lane, Right.OPERATE, command.settings[BASE])
    else:
        check_right(state, lane, Right.CREATE, command.stream)
    if command.adopt and not rights_of(state, lane, EVERYWHERE) & Right.OPERATE:
        raise NotAuthorized(
            f"lane {lane!r} has no right 'operate' on *, which it takes to adopt a topic, as its records may be "
            "another team's; nothing was changed. Let an operator create the stream: --lane admin"
        )


_processor = _on(Right.PROCESS, lambda command: command.processor)


def _reads(state: State, lane: str, inputs: Iterable[r.ProcessorInput]) -> None:
    for one in inputs:
        if not is_plain(one.stream):
            check_right(state, lane, Right.DESCRIBE, one.stream)


def _create_processor(state: State, lane: str, command: r.CreateProcessor) -> None:
    """The lane has to see the inputs, because a processor prevents their deletion."""
    _processor(state, lane, command)
    _reads(state, lane, command.inputs)


def _alter_processor(state: State, lane: str, command: r.AlterProcessor) -> None:
    """The lane has to see the new inputs, as for a new processor."""
    _processor(state, lane, command)
    _reads(state, lane, command.add)


def _copy_processor(state: State, lane: str, command: r.CopyProcessor) -> None:
    """The lane takes the tasks of both processors, and has to see their inputs."""
    _processor(state, lane, command)
    check_right(state, lane, Right.PROCESS, command.origin)
    origin = state.processors.get(command.origin)
    _reads(state, lane, () if origin is None else origin.inputs)


def _take(state: State, lane: str, command: r.TakeTasks) -> None:
    _processor(state, lane, command)
    row = state.processors.get(command.processor)
    _reads(state, lane, () if row is None else row.inputs)


RULES: Mapping[type, Rule] = {
    r.FindScope: _find_scope,
    r.AdoptScope: _from_controllers,
    r.CreateStream: _create_stream,
    r.DescribeStreams: _describe,
    r.ForgetStream: _stream(Right.OPERATE),
    r.DeleteStream: _stream(Right.OPERATE),
    r.RecoverStream: _stream(Right.OPERATE),
    r.AlterStream: _stream(Right.OPERATE),
    r.TruncateStream: _stream(Right.OPERATE),
    r.PublishBase: _on(Right.OPERATE, lambda command: command.table),
    r.Scale: _stream(Right.SCALE),
    r.Begin: _begin,
    r.OneShot: _begin,  # its decision checks `write` on each stream
    r.PrepareEvents: _begin,  # its decision checks `write`, too
    r.Touch: _by_transaction,
    r.Register: _by_transaction,
    r.Heartbeat: _by_transaction,
    r.Commit: _by_transaction,
    r.Abort: _by_transaction,
    r.Force: _by_transaction,
    r.GetState: _by_transaction,
    r.Resolve: _by_transaction,
    r.ListTransactions: _list_transactions,
    r.ListOpen: _list_open,
    r.LabelWriter: _by_transaction,
    r.LockReads: _by_transaction,  # its decision checks `safe-time` on each table
    r.ListLocks: _by_transaction,
    r.ListRuns: _by_transaction,
    r.ListTableLocks: _list_transactions,
    r.TakeTurn: _on(Right.WRITE, lambda command: command.table),
    r.CreateProcessor: _create_processor,
    r.TakeTasks: _take,
    r.ReleaseTasks: _processor,
    r.AlterProcessor: _alter_processor,
    r.CopyProcessor: _copy_processor,
    r.ResetProcessor: _processor,
    r.DeleteProcessor: _processor,
    r.DescribeProcessors: _describe_processors,
    r.ListCommands: _everywhere(Right.OPERATE),
    r.SafeTime: _within(Right.SAFE_TIME),
    r.ListSeries: _within(Right.DESCRIBE),
    r.SetSeries: _on(Right.SERIES, lambda command: of_scope(command.scope)),
    r.SetLane: _everywhere(Right.ADMIN),
    r.ListLanes: _everywhere(Right.ADMIN),
    r.SetGrant: _everywhere(Right.ADMIN),
    r.ListGrants: _everywhere(Right.ADMIN),
    r.ListAudit: _everywhere(Right.ADMIN),
    r.SetFeatureLevel: _everywhere(Right.OPERATE),
    r.DescribeLeader: _everywhere(Right.OPERATE),
}


# -- owners: of transactions, names and series --------------------------------------------------------


def table_of(state: State, stream: str) -> str:
    """The table whose bases are in a stream; empty for other streams."""
    row = state.streams.get(stream)
    return row.settings.get(BASE, "") if row is not None else ""


def writing(state: State, stream: str) -> tuple[Right, str]:
    """The right that a write to a stream needs, and on what: for bases it is `operate` on their table."""
    table = table_of(state, stream) if stream.endswith(BASES) else ""
    return (Right.OPERATE, table) if table else (Right.WRITE, stream)


def operates(state: State, lane: str, scope: str) -> bool:
    """Whether a lane may operate the scope's transactions, whichever lane owns them."""
    return bool(rights_of(state, lane, of_scope(scope)) & Right.OPERATE)


def sees(state: State, lane: str, row: r.TxnRow) -> bool:
    """Whether a lane may see a transaction without a token."""
    return row.owner == lane or operates(state, lane, row.scope)


def shown(state: State, lane: str, broken: r.BrokenLock | None) -> r.BrokenLock | None:
    """A broken lock as a lane may see it: without the transaction that broke it, unless the lane may see that."""
    if broken is None or broken.by == NO_TXN:
        return broken
    row = state.txn_row(broken.by)
    known = row is not None and sees(state, lane, row)
    return broken if known else replace(broken, by=b"")


def check_writes(state: State, row: r.TxnRow, streams: Iterable[str] = ()) -> None:
    """`NotAuthorized` unless a transaction's owner may write to these streams; without any, to any of its scope.

    A processor's state needs the right to run the processor, bases the right to operate the table. If the owner is
    blocked, its tokens are refused in every lane.
    """
    owner = state.lanes.get(row.owner)
    if owner is not None and owner.blocked:
        raise NotAuthorized(f"lane {row.owner!r}, which the transaction belongs to, is blocked")
    for what in sorted(streams) or (row.scope,):
        if is_state(what):
            check_right(state, row.owner, Right.PROCESS, what.removesuffix(STATE))
        elif what == row.scope and row.consumes is not None:
            check_right(state, row.owner, _MOVE, what)
        else:
            check_right(state, row.owner, *writing(state, what))
