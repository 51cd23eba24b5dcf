"""Questions: lists of transactions and locks, the places of records, safe timestamps. They change no row.

While a question is answered all commands wait. So a list reads a bounded number of rows, and its answer has the key
from which the next list continues. A list shows only what the lane may see.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import merge, nsmallest
from itertools import takewhile
from typing import TypeVar

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import EVERYWHERE, Right, check_writes, operates, rights_of, sees
from anabranch.core.decisions.across import coordinating, holding
from anabranch.core.decisions.prepared import proves
from anabranch.core.decisions.scopes import active_stream, check_served
from anabranch.core.decisions.transactions import check_id_partition, named_by
from anabranch.core.decisions.turn import Turn
from anabranch.core.decisions.writers import label_of
from anabranch.core.journal_index import segment_on
from anabranch.core.journal_runs import wanted_runs
from anabranch.core.locks import conflicts, frozen, locked_segments
from anabranch.core.memory import Who, wait_text, way_to_end
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, Ordered
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import InvalidArgument, NotReady, UnknownStream
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE, control_partition_of
from anabranch.protocol.messages import weight
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import SEE, Rights

T = TypeVar("T")
Hold = tuple[bytes, str]  # a transaction, and a table on which it has locks
MAX_LISTED = 10_000
MAX_WAITING = 100  # waiting commits that are listed for a transaction and table


def get_state(turn: Turn, command: r.GetState, to: ReplyTo | None) -> None:
    check_id_partition(turn, command.txn_id)
    row = turn.transaction(named_by(command), SEE)
    turn.reply(to, turn.outcome(row, after=command.after))


def list_transactions(turn: Turn, command: r.ListTransactions, to: ReplyTo | None) -> None:
    """List open or prepared transactions, oldest first, or all transactions, newest first.

    A list of all transactions leaves out parts of transactions that other control partitions coordinate. A list of
    open transactions has such parts: while the coordinator is away, no other list shows them.
    """
    if command.prepared:
        rows = _open_after(turn, (turn.state.prepared,), command.before)
    elif command.include_finished:
        rows = _own_below(turn, command.before)
    else:
        rows = _open_after(turn, _visible(turn, command.scope), command.before)
    shown = command.secret if command.prepared else None
    # Its coordinator lists a prepared transaction, and no participant elsewhere does.
    parts = turn.state.promised if command.prepared else ()
    found, more = _listed(
        turn,
        rows,
        command.limit,
        lambda row: (
            command.scope in (None, row.scope)
            and row.txn_id not in parts
            and _may_list(turn, row, shown)
        ),
        lambda row: turn.outcome(row, full=False),
    )
    turn.reply(to, r.TransactionList(tuple(found), more))


def _own_below(turn: Turn, before: bytes | None) -> Iterator[tuple[bytes, r.TxnRow | None]]:
    """The transactions that this control partition coordinates, as `State.txn_rows_below`: ids begin with it."""
    first = turn.settings.control_partition.to_bytes(2, "big")
    last = first + b"\xff" * TXN_ID_SIZE
    rows = turn.state.txn_rows_below(last if before is None else min(before, last))
    return takewhile(lambda found: found[0] >= first, rows)


def list_open(turn: Turn, command: r.ListOpen, to: ReplyTo | None) -> None:
    """List open transactions, oldest first, as `OpenInfo`; or one transaction, with some of its writers."""
    if command.txn_id is not None:
        check_id_partition(turn, command.txn_id)
        row = turn.transaction(command.txn_id, SEE)
        info = open_info(turn, row, full=True, after=command.after)
        full = len(info.writers) == limits.WRITERS_LISTED.value
        more = k.writer_key(row.txn_id, info.writers[-1].writer)[-8:] if full else None
        turn.reply(to, r.OpenList((info,), more))
        return
    found, more = _listed(
        turn,
        _open_after(turn, _visible(turn, command.scope), command.after),
        command.limit,
        lambda row: command.scope in (None, row.scope) and sees(turn.state, turn.lane, row),
        lambda row: open_info(turn, row, full=False),
    )
    turn.reply(to, r.OpenList(tuple(found), more))


def list_table_locks(turn: Turn, command: r.ListTableLocks, to: ReplyTo | None) -> None:
    """List the tables that open transactions read and lock, and the commits that wait for frozen locks."""
    waiting, waits_for = defaultdict[Hold, list[bytes]](list), defaultdict[Hold, list[bytes]](list)
    for who, on, table in frozen.waiting_for(turn):
        turn.charge(work.LOOK)
        its = _seen(turn, who)
        waiting[on, table].append(its)
        waits_for[its, table].append(_seen(turn, on))

    def show(row: r.TxnRow) -> list[r.TableLockInfo]:
        sets = turn.state.locks.of(row.txn_id)
        points, ranges = Counter[str](), Counter[str]()
        for each in [each for kept in sets.rows.values() for each in kept.locks]:
            turn.charge(work.LOOK)
            points[each.table] += len(each.points)
            ranges[each.table] += len(each.ranges)
        return [
            r.TableLockInfo(
                row.txn_id,
                table,
                points=points[table],
                ranges=ranges[table],
                frozen=row.txn_id in turn.state.locks.holding,
                broken=row.broken is not None,
                waiting=_some(waiting[row.txn_id, table]),
                waits_for=_some(waits_for[row.txn_id, table]),
            )
            for table in sorted({*points, *turn.state.locks.named.get(row.txn_id, ())})
        ]

    found, more = _listed(
        turn,
        _open_after(turn, _visible(turn, command.scope), command.after),
        command.limit,
        lambda row: (
            (row.txn_id in turn.state.locks.sets or row.txn_id in turn.state.locks.named)
            and command.scope in (None, row.scope)
            and sees(turn.state, turn.lane, row)
        ),
        show,
    )
    turn.reply(to, r.TableLockList(tuple(info for its in found for info in its), more))


def _seen(turn: Turn, who: Who) -> bytes:
    """The id of a waiting commit; zeros if the lane may not see it."""
    row = turn.state.txn_row(who) if isinstance(who, bytes) else None
    return row.txn_id if row is not None and sees(turn.state, turn.lane, row) else NO_TXN


def _some(ids: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(nsmallest(MAX_WAITING, ids))


def open_info(turn: Turn, row: r.TxnRow, *, full: bool, after: bytes | None = None) -> r.OpenInfo:
    """A transaction, and what it uses. ``full``: also writers after ``after``, staged merges and kept bytes."""
    txn = turn.state.open.get(row.txn_id)
    outcome = turn.outcome(row, full=False)
    streams = tuple(sorted(turn.state.participants(row.txn_id)))
    outcome = outcome._replace(streams=streams)
    if txn is None:
        parts = coordinating.part_infos(turn, row)
        return r.OpenInfo(outcome, 0, 0, 0, -1, 0, (), (), {}, partitions=parts)
    silent_ms = max(0, turn.now_ms - turn.keepalives.last(row.txn_id))
    runs = outcome.state == "OPEN"
    stays = turn.index.uncommitted.stays.get(row.txn_id, {})
    turn.charge(work.of_items(len(streams) + len(stays) + len(txn.partitions)))
    return r.OpenInfo(
        outcome=outcome,
        uncommitted_bytes=sum(stay.size for stay in stays.values()),
        age_ms=max(0, turn.wall_ms - row.begun_ms),
        silent_ms=silent_ms,
        left_ms=max(0, row.keepalive_ms - silent_ms) if runs else -1,
        writer_count=len(txn.writers),
        writers=_writers_of(turn, txn, after) if full else (),
        staged_merges=_staged_merges_of(turn, txn) if full else (),
        locks=turn.state.locks.of(row.txn_id).count,
        frozen=row.txn_id in turn.state.locks.holding,
        journals=_kept_for(turn, row.txn_id) if full else {},
        waits=_waits_for(turn, row.txn_id),
        ends=way_to_end(turn.state, row.txn_id),
        locked_segments=locked_segments.locked_by(turn, row.txn_id, full=full),
        asks=locked_segments.asked_by(turn, row.txn_id, full=full),
        partitions=coordinating.part_infos(turn, row) if txn.partitions else (),
    )


def _kept_for(turn: Turn, txn_id: bytes) -> dict[str, int]:
    """Stream -> bytes of its journal whose deletion a transaction prevents: all from its first batch on."""
    kept: Counter[str] = Counter()
    for place, stay in turn.index.uncommitted.stays.get(txn_id, {}).items():
        read = turn.index.read.get(place)
        end = turn.index.positions.get(place, 0)
        kept[place[0]] += stay.size if read is None else max(stay.size, read.between(stay.low, end))
    return dict(kept)


def _waits_for(turn: Turn, txn_id: bytes) -> r.WaitInfo | None:
    wait, txn = turn.wait_of(txn_id), turn.state.open.get(txn_id)
    if wait is None and txn is not None:
        if txn.row.state == "PREPARED" and txn_id in turn.state.promised:
            coordinator = control_partition_of(txn_id)
            text = f"waits for the decision of control partition {coordinator}, its coordinator"
            return r.WaitInfo("coordinator", "", text, -1)
        return coordinating.waits_for(turn, txn) if txn.partitions else None
    if wait is None:
        return None
    age_ms = -1 if wait.since_ms < 0 else max(0, turn.now_ms - wait.since_ms)
    on = wait.on if wait.on in turn.state.streams else ""
    return r.WaitInfo(wait.why, on, limits.cut(wait_text(turn.memory, wait)), age_ms)


def _writers_of(turn: Turn, txn: OpenTxn, after: bytes | None) -> tuple[r.WriterInfo, ...]:
    txn_id = txn.row.txn_id
    since = None if after is None else int.from_bytes(after[:8], "big", signed=True)
    receipts = turn.state.writers_after(txn_id, since, limits.WRITERS_LISTED.value)
    turn.charge(work.of_receipts(receipts) + work.LOOK * len(receipts))  # the labels
    return tuple(
        [
            r.WriterInfo(
                one.writer,
                txn.lanes[one.writer],
                label_of(turn.state, txn_id, one.writer),
                sum(extent.count for extent in one.extents),
                one.finished,
            )
            for one in receipts
        ]
    )


def _staged_merges_of(turn: Turn, txn: OpenTxn) -> tuple[r.StagedMergeInfo, ...]:
    events = Counter[tuple[str, int]]()
    for (_, stream, partition), extent in txn.due.items() if txn.staged_merges else ():
        events[stream, partition] += extent.count
    stays = turn.index.uncommitted.stays.get(txn.row.txn_id, {})
    turn.charge(work.of_items(len(txn.due)) + work.LOOK * len(txn.staged_merges))
    found = []
    for _, staged in sorted(txn.staged_merges.items()):
        place = staged.stream, staged.source
        stay = stays.get(place)
        chunks = max(1, -(-(stay.size if stay else 0) // turn.settings.chunk_bytes))
        found.append(
            r.StagedMergeInfo(
                staged.stream, staged.source, staged.count, events[place], chunks, staged.done,
            )
        )  # fmt: skip
    return tuple(found)


def _listed(
    turn: Turn,
    rows: Iterable[tuple[bytes, r.TxnRow | None]],
    limit: int,
    wanted: Callable[[r.TxnRow], bool],
    show: Callable[[r.TxnRow], T],
) -> tuple[list[T], bytes | None]:
    """Up to ``limit`` wanted rows as they are shown, and the key from which to continue; None at the end."""
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidArgument(f"a list has 1 to {MAX_LISTED:,} transactions")
    found: list[T] = []
    last, size = None, 0
    for looked_at, (key, row) in enumerate(rows):
        turn.charge(work.LISTED)
        full = len(found) == limit or size >= turn.settings.listed_bytes
        if full or looked_at == limits.LIST_ROWS.value:
            return found, _between(turn, last, key)
        if row is not None and wanted(row):
            found.append(show(row))
            size += weight(found[-1])
        last = key
    return found, None


def _may_list(turn: Turn, row: r.TxnRow, secret: bytes | None) -> bool:
    if secret is not None:
        return proves(turn.state.prepared_row(row.txn_id), secret)
    return sees(turn.state, turn.lane, row)


def _between(turn: Turn, last: bytes | None, key: bytes) -> bytes | None:
    """A key between the last key read and the next, which reveals no id that the lane may not see."""
    txn_id = (last or b"")[:TXN_ID_SIZE]
    row = turn.state.txn_row(txn_id)
    if last is None or (row is not None and sees(turn.state, turn.lane, row)):
        return last
    if key.startswith(txn_id):  # skip the rest of that transaction
        key = next((key for key, _ in turn.state.txn_rows_below(k.txn_key(txn_id))), b"")
    same = next(i for i in range(TXN_ID_SIZE) if last[i : i + 1] != key[i : i + 1])
    return max(last, key)[: same + 1]


def _visible(turn: Turn, scope: str | None) -> list[Ordered[bytes]]:
    """Groups of open transactions that together contain all that the lane may see, in one scope or all."""
    state, lane = turn.state, turn.lane
    if scope is not None:
        found = [
            state.open_in.get(scope) if operates(state, lane, scope) else state.open_of.get(lane)
        ]
    elif rights_of(state, lane, EVERYWHERE) & Right.OPERATE:
        found = [*state.open_in.values()]
    else:
        granted = {pattern.partition("/")[0] for pattern in state.grants.get(lane, ())}
        scopes = sorted(scope for scope in granted if operates(state, lane, scope))
        turn.charge(work.of_items(len(granted)))
        found = [state.open_of.get(lane), *[state.open_in.get(scope) for scope in scopes]]
    turn.charge(work.of_items(len(found)))
    return [ids for ids in found if ids]


def _open_after(
    turn: Turn, groups: Iterable[Ordered[bytes]], key: bytes | None
) -> Iterator[tuple[bytes, r.TxnRow | None]]:
    last = key or b""
    for txn_id in merge(*[ids.since(last[:TXN_ID_SIZE]) for ids in groups]):
        its = k.txn_key(txn_id)
        if its > last:  # a transaction may be in two groups
            last = its
            yield its, turn.state.open[txn_id].row


def list_runs(turn: Turn, command: r.ListRuns, to: ReplyTo | None) -> None:
    """List the places of accepted records of an open transaction's writers, as many as one answer takes.

    `NotReady` until the journals are indexed up to all wanted offsets: before, it is not known which are rejected.
    """
    row = turn.transaction(command.token, Rights.WRITE | SEE, anywhere=turn.settings.across)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    check_writes(turn.state, row, (command.stream,))
    epoch = turn.open(row.txn_id).participants.get(command.stream)
    if epoch is None:
        raise UnknownStream(f"the transaction never touched {command.stream}")
    active_stream(turn, command.stream)
    for wanted in command.wanted:
        segment = segment_on(turn.state, command.stream, epoch, wanted.partition)
        if segment is None or not wanted.writer or not 0 <= wanted.first <= wanted.end:
            raise InvalidArgument(
                f"{wanted}: name a writer, a journal partition of {command.stream} in stream epoch {epoch}, and "
                "offsets that rise"
            )
    turn.hear(row.txn_id)
    positions = turn.index.positions
    unread = [w for w in command.wanted if positions.get((command.stream, w.partition), 0) < w.end]
    if unread:
        raise NotReady(
            f"journal partition {unread[0].partition} of {command.stream} is not read up to {unread[0].end} yet"
        )
    turn.reply(to, _runs(turn, row.txn_id, command.stream, command.wanted))


def _runs(turn: Turn, txn_id: bytes, stream: str, wanted: tuple[r.RunsWanted, ...]) -> r.RunList:
    found: list[r.RunPlace] = []
    for number, each in enumerate(wanted):
        left = limits.LIST_ROWS.value - number
        if len(found) >= left:
            return r.RunList(tuple(found), wanted[number:])
        turn.charge(work.LOOK)
        for run in wanted_runs(turn.index.rows, stream, txn_id, each):
            if len(found) >= left:
                more = replace(each, first=run.first), *wanted[number + 1 :]
                return r.RunList(tuple(found), more)
            turn.charge(work.LOOK)
            found.append(
                r.RunPlace(
                    run.writer, each.partition, run.first, run.end, run.records, run.at,
                    run.batch_base,
                )
            )  # fmt: skip
    return r.RunList(tuple(found), ())


def safe_time(turn: Turn, command: r.SafeTime, to: ReplyTo | None) -> None:
    """Make a timestamp safe, so that a snapshot at it never changes. A future one is refused: `NotReady`.

    A timestamp is safe when no commit at or before it can be added any more. Commit timestamps rise from the hybrid
    time of the state, which each round logs in its `RoundRow`. So it is enough, for this leader and all later ones,
    that hybrid time has reached the timestamp in the round of the answer. The question itself never moves hybrid
    time beyond the clock, because all later commits would be dated ahead; the times that its sender has seen may
    move it (`times`).

    While a commit at or before the timestamp is left to be merged into one of ``command.streams``, the answer fixes
    the time, and says that it is not safe yet: the sender asks again for this time (H5).
    """
    check_served(turn, command.scope)
    for table in command.tables:
        conflicts.check_table(turn, table)
    at = make_safe(turn, command.at)
    safe = holding.is_safe(turn, at, command.streams)
    if not safe and not command.streams:
        raise NotReady(
            f"the time {hybrid_time.to_text(at)} is not safe yet, because a transaction across control partitions "
            "is not decided: ask again"
        )
    tables = conflicts.table_times(turn, command.tables, at)
    turn.reply(to, r.SafeTimeReply(command.scope, at, tables, safe))


def make_safe(turn: Turn, at: int | None) -> int:
    """Let hybrid time reach a timestamp (None: now) with this round. `NotReady`, `InvalidArgument`."""
    present = max(turn.hybrid_time, hybrid_time.from_us(turn.now_us))
    at = present if at is None else at
    if not 0 <= at <= hybrid_time.MAX:
        raise InvalidArgument(f"timestamp {at}: a hybrid time, or null for now")
    if at > present:
        ahead_ms = (hybrid_time.to_us(at) - hybrid_time.to_us(present)) / 1000
        raise NotReady(
            f"the time {hybrid_time.to_text(at)} is not reached yet: {ahead_ms:,.0f} ms are missing "
            "by the controller's clock"
        )
    turn.hybrid_time = max(turn.hybrid_time, at)
    return at
