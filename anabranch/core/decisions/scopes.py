"""Decisions on scopes, descriptions of streams, and what prevents the deletion of a stream's events.

The control partition `DIRECTORY` knows which control partition serves each scope. Each control partition has the
rows of the scopes and streams that it serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from itertools import islice, takewhile

from anabranch import errors
from anabranch.core import rejections, work
from anabranch.core import rows as k
from anabranch.core.authorize import CREATORS, EVERYWHERE, Right, of_scope, rights_of, sees
from anabranch.core.decisions import quotas
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_runs import REFUSED
from anabranch.core.locks import locked_segments
from anabranch.core.round import ReplyTo
from anabranch.core.stream_settings import (
    DEFAULT_VERSIONS_MS,
    LEAST_HISTORY_MS,
    is_table,
    versions_ms,
)
from anabranch.core.stream_states import CREATING, GIVEN_UP, STREAMS, WAITING, state_of
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import from_us, to_ms, to_text
from anabranch.protocol.ids import DIRECTORY, txn_text
from anabranch.protocol.legal_names import (
    ADMIN_LANE,
    OPEN_LANE,
    as_kafka_compares,
    check_scope,
    names_beside,
    split_stream,
)
from anabranch.protocol.messages import weight
from anabranch.protocol.schemas import records as r

MAX_BLOCKERS = 100  # that are listed for one stream


def _own_scope(turn: Turn, scope: str) -> str:
    """Return the scope's name. The name of a new scope is checked first.

    Raises: InvalidArgument (the name is illegal, or begins like the names of anabranch's own topics).
    """
    if scope not in turn.state.scopes:
        _check_own(turn, check_scope(scope), "scope", "_")
    return scope


def check_names(turn: Turn, stream: str) -> None:
    """`InvalidArgument` if the name of a topic of the stream is taken; Kafka treats . and _ in names as equal."""
    _check_own(turn, stream, "stream")
    for name in names_beside(stream):
        if (other := turn.state.names.get(name)) is not None:
            raise errors.InvalidArgument(
                f"{stream} can't be beside {other}: names of their topics differ in . and _ alone, and Kafka "
                "treats these as equal; choose another name"
            )


def _check_own(turn: Turn, name: str, kind: str, end: str = "") -> None:
    prefix = turn.settings.prefix
    if (as_kafka_compares(name) + end).startswith(f"{prefix}_"):
        raise errors.InvalidArgument(
            f"{name!r} begins as the names of anabranch's own topics do ({prefix}., and Kafka treats . and _ as "
            f"equal): choose another {kind}"
        )


def find_scope(turn: Turn, command: r.FindScope, to: ReplyTo | None) -> None:
    """Answer with the control partition of a scope, and create the scope if the command says so.

    The control partition of a scope never changes.
    """
    scope = _own_scope(turn, command.scope)
    if turn.settings.control_partition != DIRECTORY:
        raise errors.InvalidArgument(
            f"ask control partition {DIRECTORY}, the directory, for scopes"
        )
    scopes, near = turn.state.scopes, command.near if command.create else None
    partition = None if near is None else scopes.get(near)
    if near is not None and partition is None:
        raise errors.UnknownScope(
            f"near={near!r}: there is no such scope; create a stream in it first"
        )
    if partition is not None and scopes.get(scope, partition) != partition:
        raise errors.InvalidArgument(
            f"scope {scope!r} is on control partition {scopes[scope]} and {near!r} on {partition}: a scope never "
            "moves"
        )
    if scope not in scopes:
        if not command.create:
            raise errors.UnknownScope(f"there is no scope {scope!r}: create a stream in it first")
        limits.SCOPES.check(len(scopes) + 1, "the cluster")
        quotas.check_scopes(turn, turn.lane)
        if partition is None:
            there = Counter(scopes.values())
            partition = min(range(turn.control_partitions), key=lambda one: there[one])
        turn.put(k.scope_key(scope), r.ScopeRow(scope, partition, turn.lane))
        _grant_creator(turn, scope, turn.lane)
    served = turn.state.scopes[scope]
    if command.create and served != DIRECTORY:
        # The message is sent for an existing scope, too: retention may have deleted the first message unread.
        turn.send(served, r.AdoptScope(scope, _creator(turn, scope)), None)
    turn.reply(to, r.ScopeInfo(scope, served))


def _grant_creator(turn: Turn, scope: str, lane: str) -> None:
    """Grant a new scope to the lane that created it, except to `open` and `admin`.

    An existing grant is kept: an operator made it, perhaps before the directory's message arrived.
    """
    pattern = of_scope(scope)
    if lane not in (OPEN_LANE, ADMIN_LANE) and pattern not in turn.state.grants.get(lane, {}):
        turn.put(k.grant_key(lane, pattern), r.GrantRow(lane, pattern, int(CREATORS)))


def _creator(turn: Turn, scope: str) -> str:
    """The lane that created the scope, if it still has its grant; otherwise `open`, which gets no grant."""
    lane = turn.state.scope_owners[scope]
    rights = turn.state.grants.get(lane, {}).get(of_scope(scope), 0)
    return lane if rights & CREATORS == CREATORS else OPEN_LANE


def adopt_scope(turn: Turn, command: r.AdoptScope, to: ReplyTo | None) -> None:
    """Take over a scope that the directory assigned to this control partition."""
    scope = _own_scope(turn, command.scope)
    if scope not in turn.state.scopes:
        turn.put(k.scope_key(scope), r.ScopeRow(scope, turn.settings.control_partition, ""))
        _grant_creator(turn, scope, command.lane)
    turn.reply(to, r.ScopeInfo(scope, turn.state.scopes[scope]))


def check_served(turn: Turn, scope: str) -> None:
    """`UnknownScope` unless the scope exists and is served here."""
    served = turn.state.scopes.get(scope)
    if served is None:
        _own_scope(turn, scope)
        raise errors.UnknownScope(f"scope {scope!r} is not known here: create a stream in it first")
    if served != turn.settings.control_partition:
        raise errors.UnknownScope(f"scope {scope!r} is served by control partition {served}")


def check_leads(turn: Turn, stream: str) -> None:
    """`CrossScope` unless the stream's scope is served here, or unknown at the directory, which knows all."""
    here, served = turn.settings.control_partition, turn.state.scopes.get(split_stream(stream)[0])
    if (here != DIRECTORY) if served is None else (served != here):
        raise errors.CrossScope(
            f"{stream} is not led by control partition {here}: ask where its scope is served; below feature level "
            "4, one transaction writes to scopes of one control partition: make new ones with `near`"
        )


def active_stream(turn: Turn, stream: str) -> r.StreamRow:
    """The row of a stream that can be written to. Raises: NotReady (in trouble), StreamLost, UnknownStream."""
    state = state_of(turn.state.streams.get(stream))
    if stream in turn.memory.waiting and state not in GIVEN_UP:
        raise errors.NotReady(f"{stream} waits: {turn.memory.waiting[stream]}; ask again")
    STREAMS.judge(state, "use", stream)
    return turn.state.streams[stream]


def check_room(turn: Turn, owner: str, streams: int, partitions: int) -> None:
    """Raise `TooManyStreams` if the control partition, or the lane, would have too many streams or partitions."""
    rows, settings = turn.state.streams.values(), turn.settings
    # Each journal has as many partitions as its stream.
    every = 2 * (sum(map(quotas.partitions_of, rows)) + partitions)
    turn.charge(work.of_items(len(rows)))
    if len(rows) + streams > settings.max_streams or every > settings.max_partitions:
        raise errors.TooManyStreams(
            f"a control partition has at most {settings.max_streams:,} streams, and {settings.max_partitions:,} "
            "partitions of them and of their journals: an operator can allow more (`anabranch controller "
            "--max-streams`, `--max-partitions`)"
        )
    quotas.check_room(turn, owner, streams, partitions)


def describe_streams(turn: Turn, command: r.DescribeStreams, to: ReplyTo | None) -> None:
    """Describe one stream, or the streams of a scope or of this control partition, by name, some in each answer."""
    if command.stream is not None:
        known = turn.state.streams.get(command.stream)
        if known is None or known.state == CREATING:
            known = active_stream(turn, command.stream)
        info = stream_info(turn, known, full=True)
        if command.rejected:
            turn.state.check_enabled(rejections.LEVEL, "a list of rejected records")
            row = rejections.of_stream(turn, command.stream)
            counts = Counter(row.counts) + Counter(_refused(turn, command.stream))
            info = replace(info, rejected=dict(counts), rejected_records=row.records)
        turn.reply(to, r.StreamList((info,)))
        return
    found: list[r.StreamInfo] = []
    size = 0
    for name in _described(turn, command.scope, command.after or ""):
        turn.charge(work.LOOK)
        full = len(found) == limits.LIST_ROWS.value
        if full or size >= turn.settings.listed_bytes:
            turn.reply(to, r.StreamList(tuple(found), found[-1].stream))
            return
        found.append(stream_info(turn, turn.state.streams[name]))
        size += weight(found[-1])
    turn.reply(to, r.StreamList(tuple(found)))


def _described(turn: Turn, scope: str | None, after: str) -> Iterator[str]:
    """Names of streams that the lane may describe, in order, after ``after``; of one scope, or of all (None)."""
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
        if name > last:  # two grants may have the same name
            last = name
            yield name


def _names_of(granted: str, names: Iterable[str]) -> Iterator[str]:
    """The names that a granted prefix (empty, or ending with a slash) or name contains."""
    all_of_it = granted[-1:] in ("", "/")
    return takewhile(lambda name: name.startswith(granted) if all_of_it else name == granted, names)


def oldest_snapshot(turn: Turn, row: r.StreamRow) -> int:
    """The earliest time as of which a table has to be readable, by its setting and for open transactions.

    0 if the stream is not a table.
    """
    promised = _promised_of(turn, row)
    return min([promised, *reading(turn, row.stream).values()]) if promised else 0


def _promised_of(turn: Turn, row: r.StreamRow) -> int:
    """The earliest time as of which a table has to be readable by its setting; 0 if the stream is not a table."""
    return _promised(turn, versions_ms(row.settings)) if is_table(row.settings) else 0


def _promised(turn: Turn, history_ms: int) -> int:
    now = max(turn.hybrid_time, from_us(turn.now_us))
    return max(1, now - from_us(history_ms * 1000))


def check_snapshot(turn: Turn, scope: str, snapshot: int) -> None:
    """Raise `TransactionAborted` if replicas may have dropped versions of tables that this snapshot needs.

    Replicas drop versions before the `oldest_snapshot` that they asked for, which did not include this transaction.
    Tables that keep versions for less than a second are skipped, because no snapshot would be new enough.
    """
    if snapshot and snapshot < _promised(turn, _least_history_ms(turn, scope)):
        raise errors.TransactionAborted(
            f"its snapshot of {to_text(snapshot)} is older than the versions that a table of scope {scope!r} keeps "
            "(`table.history.ms`): other processes could not read at it; begin again"
        )


def check_readable(turn: Turn, tables: Iterable[str], snapshot: int) -> None:
    """Raise `SnapshotExpired` if versions that this snapshot needs may be gone from one of these tables."""
    for table in tables:
        row, base = turn.state.streams[table], turn.state.bases.get(table)
        kept = versions_ms(row.settings) >= LEAST_HISTORY_MS
        if snapshot < max(_promised_of(turn, row) if kept else 0, base.timestamp if base else 0):
            raise errors.SnapshotExpired(
                f"the transaction's snapshot of {to_text(snapshot)} is older than the versions that {table} keeps "
                "(`table.history.ms`): begin again, and read all tables soon"
            )


def _least_history_ms(turn: Turn, scope: str) -> int:
    """The shortest time for which a table of the scope keeps versions, ms, if it is a second or more."""
    known = turn.state.histories_ms.get(scope)
    if known is None:
        turn.charge(work.of_items(len(turn.state.streams)))
        rows = (row for name, row in turn.state.streams.items() if split_stream(name)[0] == scope)
        kept = (versions_ms(row.settings) for row in rows if is_table(row.settings))
        known = min((ms for ms in kept if ms >= LEAST_HISTORY_MS), default=DEFAULT_VERSIONS_MS)
        turn.state.histories_ms[scope] = known
    return known


# -- what prevents deletion: transactions and processors that use a stream, while their lane may see it ------


def reading(turn: Turn, table: str) -> dict[bytes, int]:
    """The open transactions for which a table is kept readable, with their snapshots."""
    locks, state = turn.state.locks, turn.state
    readers = locks.readers.get(table, {})
    turn.charge(work.of_items(len(readers)))
    return {
        txn_id: locks.snapshots[txn_id]
        for txn_id, lane in readers.items()
        if txn_id in locks.snapshots and rights_of(state, lane, table) & Right.SAFE_TIME
    }


def consuming(turn: Turn, stream: str) -> dict[str, r.ProcessorRow]:
    """The processors for which a stream is kept."""
    turn.charge(work.of_items(len(turn.state.processors)))
    return {
        name: row
        for name, row in sorted(turn.state.processors.items())
        if stream in [one.stream for one in row.inputs]
        and rights_of(turn.state, row.owner, stream) & Right.DESCRIBE
    }


def blockers_of(turn: Turn, stream: str, promised: int) -> tuple[r.Blocker, ...]:
    """The *blockers* of a stream, which prevent the deletion of events: processors, and transactions that read a
    table as of a time before ``promised`` (`_promised_of`). Empty for a lane that may not operate the stream.
    """
    if not rights_of(turn.state, turn.lane, stream) & Right.OPERATE:
        return ()

    def found() -> Iterator[r.Blocker]:
        for txn_id, snapshot in sorted(reading(turn, stream).items(), key=lambda one: one[1]):
            if snapshot < promised:
                yield _transaction(turn, txn_id)
        for row in consuming(turn, stream).values():
            yield processor_blocker(turn, row)

    blockers = tuple(islice(found(), MAX_BLOCKERS))
    turn.charge(work.LOOK * len(blockers))
    return blockers


def _transaction(turn: Turn, txn_id: bytes) -> r.Blocker:
    row, text = turn.row(txn_id), txn_text(txn_id)
    ends = "abort" if row.state == "OPEN" else "describe"  # `describe` shows what it waits for
    lane = row.owner if sees(turn.state, turn.lane, row) else ""
    age_ms = max(0, turn.wall_ms - row.begun_ms)
    return r.Blocker("transaction", text, lane, age_ms, f"anabranch txn {ends} {text}")


def processor_blocker(turn: Turn, row: r.ProcessorRow) -> r.Blocker:
    """A processor as the blocker of its inputs."""
    name, change = row.processor, turn.state.last_change(k.processor_key(row.processor))
    age_ms = 0 if change is None else max(0, turn.wall_ms - to_ms(change.timestamp))
    return r.Blocker("processor", name, row.owner, age_ms, f"anabranch processor delete {name}")


def text_of(blocker: r.Blocker) -> str:
    whose = f" of lane {blocker.lane}" if blocker.lane else ""
    age = f"{blocker.age_ms // 1000:,} s old"
    return f"{blocker.what} {blocker.name}{whose}, {age} (`{blocker.ends}`)"


def stream_info(turn: Turn, row: r.StreamRow, *, full: bool = False) -> r.StreamInfo:
    """A stream as clients see it. ``full``: with its blockers."""
    turn.charge(work.of_items(2 * row.partitions))
    return r.StreamInfo(
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
        uncommitted_bytes=turn.index.uncommitted.by_stream[row.stream],
        trouble=turn.memory.waiting.get(row.stream, ""),
        foreign=turn.memory.foreign.get(row.stream, 0),
        base=turn.state.bases.get(row.stream),
        oldest_snapshot=oldest_snapshot(turn, row),
        blockers=blockers_of(turn, row.stream, _promised_of(turn, row)) if full else (),
        description=row.description,
        locked_segments=locked_segments.locked_in(turn, row.stream) if full else (),
    )


def _rejected(turn: Turn, stream: str) -> dict[str, int]:
    """Reason -> journal records rejected since this leader began, or plain writes that brokers ever refused."""
    return dict(turn.index.rejected.get(stream, {})) | _refused(turn, stream)


def _refused(turn: Turn, stream: str) -> dict[str, int]:
    refused = sum(n for (name, _), n in turn.state.plain_refused.items() if name == stream)
    return {REFUSED: refused} if refused else {}


def _by_partition(row: r.StreamRow, offsets: Mapping[tuple[str, int], int]) -> dict[str, int]:
    places = ((row.stream, partition) for partition in range(row.partitions))
    return {str(place[1]): offsets[place] for place in places if place in offsets}
