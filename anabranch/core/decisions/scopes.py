"""Decisions on scopes and streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import takewhile

from anabranch.core import limits, work
from anabranch.core import rows as k
from anabranch.core.authorize import CREATORS, EVERYWHERE, Right, of_scope, rights_of
from anabranch.core.decisions import quotas
from anabranch.core.decisions.turn import Turn
from anabranch.core.hybrid_time import from_us, to_text
from anabranch.core.ids import DIRECTORY
from anabranch.core.journal.runs import REFUSED
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE, check_scope, split_stream
from anabranch.core.round import ReplyTo
from anabranch.core.stream_settings import (
    DEFAULT_VERSIONS_MS,
    LEAST_HISTORY_MS,
    is_table,
    versions_ms,
)
from anabranch.core.stream_states import CREATING, GIVEN_UP, STREAMS, WAITING, state_of
from anabranch.errors import (
    InvalidArgument,
    NotReady,
    TooManyStreams,
    TransactionAborted,
    UnknownScope,
)
from anabranch.schemas.records import (
    AdoptScope,
    DescribeStreams,
    FindScope,
    GrantRow,
    ScopeInfo,
    ScopeRow,
    StreamInfo,
    StreamList,
    StreamRow,
)

MAX_LISTED = 400  # streams in an answer; some 8 ms


def _own_scope(turn: Turn, scope: str) -> str:
    """The scope's name; `InvalidArgument` if streams may not have it."""
    if check_scope(scope) == turn.settings.prefix:
        raise InvalidArgument(
            f"{scope!r} is the prefix of anabranch's own topics: choose another scope"
        )
    return scope


def find_scope(turn: Turn, command: FindScope, to: ReplyTo | None) -> None:
    """Tell where a scope is served, as chosen when it was created: it never moves."""
    scope = _own_scope(turn, command.scope)
    if turn.settings.control_partition != DIRECTORY:
        raise InvalidArgument(f"ask control partition {DIRECTORY}, the directory, for scopes")
    scopes, near = turn.state.scopes, command.near if command.create else None
    beside = None if near is None else scopes.get(near)
    if near is not None and beside is None:
        raise UnknownScope(f"there is no scope {near!r} to be near of: create a stream in it first")
    if beside is not None and scopes.get(scope, beside) != beside:
        raise InvalidArgument(
            f"scope {scope!r} is on control partition {scopes[scope]} and {near!r} on {beside}: a scope never moves"
        )
    if scope not in scopes:
        if not command.create:
            raise UnknownScope(f"there is no scope {scope!r}: create a stream in it first")
        limits.SCOPES.check(len(scopes) + 1, "the cluster")
        quotas.check_scopes(turn, turn.lane)
        if beside is None:
            there = Counter(scopes.values())
            beside = min(range(turn.settings.control_partitions), key=lambda one: there[one])
        turn.put(k.scope_key(scope), ScopeRow(scope, beside, turn.lane))
        _grant_creator(turn, scope, turn.lane)
    served = turn.state.scopes[scope]
    if command.create and served != DIRECTORY:
        # Sent again if the scope exists: retention may have deleted the first one unread.
        turn.round.commands.append((served, AdoptScope(scope, _creator(turn, scope))))
    turn.reply(to, ScopeInfo(scope, served))


def _grant_creator(turn: Turn, scope: str, lane: str) -> None:
    """Grant a new scope to the lane that made it; `open` and `admin` have what they have everywhere.

    A row that is there is an operator's word, and stays: it may have come before the directory's message did.
    """
    pattern = of_scope(scope)
    if lane not in (OPEN_LANE, ADMIN_LANE) and pattern not in turn.state.grants.get(lane, {}):
        turn.put(k.grant_key(lane, pattern), GrantRow(lane, pattern, int(CREATORS)))


def _creator(turn: Turn, scope: str) -> str:
    """The lane that made the scope while it has a creator's rights; else `open`, which gets none by it."""
    lane = turn.state.scope_owners[scope]
    rights = turn.state.grants.get(lane, {}).get(of_scope(scope), 0)
    return lane if rights & CREATORS == CREATORS else OPEN_LANE


def adopt_scope(turn: Turn, command: AdoptScope, to: ReplyTo | None) -> None:
    """The directory gave this control partition a scope."""
    scope = _own_scope(turn, command.scope)
    if scope not in turn.state.scopes:
        turn.put(k.scope_key(scope), ScopeRow(scope, turn.settings.control_partition, ""))
        _grant_creator(turn, scope, command.lane)
    turn.reply(to, ScopeInfo(scope, turn.state.scopes[scope]))


def check_served(turn: Turn, scope: str) -> None:
    """`UnknownScope` unless the scope exists and is served here."""
    served = turn.state.scopes.get(scope)
    if served is None:
        _own_scope(turn, scope)
        raise UnknownScope(f"scope {scope!r} is not known here: create a stream in it first")
    if served != turn.settings.control_partition:
        raise UnknownScope(f"scope {scope!r} is served by control partition {served}")


def active_stream(turn: Turn, stream: str) -> StreamRow:
    """The row of a stream that can be written to.

    `NotReady` while it is in trouble, `StreamLost` once it is given up.
    """
    state = state_of(turn.state.streams.get(stream))
    if stream in turn.memory.waiting and state not in GIVEN_UP:
        raise NotReady(f"{stream} waits: {turn.memory.waiting[stream]}; ask again")
    STREAMS.judge(state, "use", stream)
    return turn.state.streams[stream]


def check_room(turn: Turn, owner: str, streams: int, partitions: int) -> None:
    """`TooManyStreams` if a control partition, or the lane, would have more streams or partitions than it may."""
    rows, settings = turn.state.streams.values(), turn.settings
    every = sum(map(quotas.partitions_of, rows)) + partitions
    if len(rows) + streams > settings.max_streams or every > settings.max_partitions:
        raise TooManyStreams(
            f"a control partition has at most {settings.max_streams:,} streams with {settings.max_partitions:,} "
            "partitions: an operator can allow more (`anabranch controller --max-streams`, `--max-partitions`)"
        )
    quotas.check_room(turn, owner, streams, partitions)


def describe_streams(turn: Turn, command: DescribeStreams, to: ReplyTo | None) -> None:
    """One stream, a scope's, or all of this control partition, by name; a bounded part of them in one answer."""
    if command.stream is not None:
        known = turn.state.streams.get(command.stream)
        if known is None or known.state == CREATING:
            known = active_stream(turn, command.stream)
        turn.reply(to, StreamList((stream_info(turn, known),)))
        return
    found: list[StreamInfo] = []
    size = 0
    for name in _described(turn, command.scope, command.after or ""):
        turn.charge(work.LOOK)
        if len(found) == MAX_LISTED or size >= limits.ANSWER.value // 2:  # the next one may be big
            turn.reply(to, StreamList(tuple(found), found[-1].stream))
            return
        found.append(stream_info(turn, turn.state.streams[name]))
        size += limits.weight(found[-1])
    turn.reply(to, StreamList(tuple(found)))


def _described(turn: Turn, scope: str | None, after: str) -> Iterator[str]:
    """The names after one of the streams that the lane may describe, of this or any scope, in order."""
    state, lane = turn.state, turn.lane
    names = state.stream_names
    if rights_of(state, lane, EVERYWHERE) & Right.DESCRIBE:
        granted = ["" if scope is None else f"{scope}/"]
    else:
        patterns = state.grants.get(lane, {})
        turn.charge(work.of_items(len(patterns)))
        granted = [its.removesuffix("*") for its, has in patterns.items() if has & Right.DESCRIBE]
        granted = [its for its in granted if scope in (None, its.partition("/")[0])]
    last = after
    for name in merge(*[_names_of(its, names.since(max(its, after))) for its in granted]):
        if name > last:  # it may be granted twice
            last = name
            yield name


def _names_of(granted: str, names: Iterable[str]) -> Iterator[str]:
    """The first names: all that begin so, if it is a scope with a slash, or empty; else this one."""
    all_of_it = granted[-1:] in ("", "/")
    return takewhile(lambda name: name.startswith(granted) if all_of_it else name == granted, names)


def oldest_snapshot(turn: Turn, row: StreamRow) -> int:
    """The least time as of which a table is promised to be readable, by its setting and for the transactions
    that are open now; 0: it is no table.
    """
    if not is_table(row.settings):
        return 0
    promised = _promised(turn, versions_ms(row.settings))
    return min([promised, *turn.state.locks.snapshots.values()])


def _promised(turn: Turn, history_ms: int) -> int:
    now = max(turn.hybrid_time, from_us(turn.now_us))
    return max(1, now - from_us(history_ms * 1000))


def check_snapshot(turn: Turn, scope: str, snapshot: int) -> None:
    """Raise `TransactionAborted` if replicas may have swept versions of tables that this snapshot needs.

    Replicas that asked for `oldest_snapshot` before the transaction was open did not see it. A table that keeps
    versions for less than a second is left out: no snapshot would be new enough.
    """
    if snapshot and snapshot < _promised(turn, _least_history_ms(turn, scope)):
        raise TransactionAborted(
            f"its snapshot of {to_text(snapshot)} is older than the versions that a table of scope {scope!r} keeps "
            "(`table.history.ms`): other processes could not read at it; begin again"
        )


def _least_history_ms(turn: Turn, scope: str) -> int:
    """The least time for which a table of the scope keeps versions; tables with less than a second don't count."""
    known = turn.state.histories_ms.get(scope)
    if known is None:
        rows = (row for name, row in turn.state.streams.items() if split_stream(name)[0] == scope)
        kept = (versions_ms(row.settings) for row in rows if is_table(row.settings))
        known = min((ms for ms in kept if ms >= LEAST_HISTORY_MS), default=DEFAULT_VERSIONS_MS)
        turn.state.histories_ms[scope] = known
    return known


def stream_info(turn: Turn, row: StreamRow) -> StreamInfo:
    """A stream as its askers see it."""
    turn.charge(work.of_items(2 * row.partitions + len(turn.state.locks.snapshots)))
    return StreamInfo(
        stream=row.stream,
        state=WAITING if row.stream in turn.memory.waiting else row.state,
        stream_epoch=row.stream_epoch,
        reference_epoch=row.reference_epoch,
        segments=row.segments,
        settings=row.settings,
        rejected=_rejected(turn, row.stream),
        journal=_by_partition(row, turn.index.positions),
        partitions=row.partitions,
        low_water=_by_partition(row, turn.state.low_water),
        staged_bytes=turn.index.staged.by_stream[row.stream],
        trouble=turn.memory.waiting.get(row.stream, ""),
        foreign=turn.memory.foreign.get(row.stream, 0),
        base=turn.state.bases.get(row.stream),
        oldest_snapshot=oldest_snapshot(turn, row),
    )


def _rejected(turn: Turn, stream: str) -> dict[str, int]:
    """Journal records rejected since this leader began, and all plain writes that brokers ever refused."""
    rejected = dict(turn.index.rejected.get(stream, {}))
    refused = sum(n for (name, _), n in turn.state.plain_refused.items() if name == stream)
    return rejected | ({REFUSED: refused} if refused else {})


def _by_partition(row: StreamRow, offsets: Mapping[tuple[str, int], int]) -> dict[str, int]:
    places = ((row.stream, partition) for partition in range(row.partitions))
    return {str(place[1]): offsets[place] for place in places if place in offsets}
