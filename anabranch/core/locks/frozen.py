"""Decisions on frozen locks: the locks of transactions that can't be aborted any more.

There are two kinds. A *staged* merge has chunks in the stream, and ends by itself. A *prepared* transaction ends
when its coordinator decides, which may have committed elsewhere already. A commit that would break a frozen lock
waits until the lock's transaction ends; for a prepared one, until `PREPARED_HOLD_MS` after its prepare at most.

No wait is part of a cycle: a staged merge waits for no lock, and a prepared transaction that commits waits for
staged merges alone. So a merge is not staged while its writes would break a frozen lock, or while the writes of
another merge that can't be aborted would break its own locks. And a transaction is not prepared while its writes
would break a lock of another prepared one, or while the writes of a staged merge or of another prepared transaction
would break its own locks. A part of a transaction over several control partitions is frozen by its vote; what it
does when it meets another one is in `core.decisions.across.locking`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.command_events import CommandEvents, SomeEvents
from anabranch.core.decisions.across.locking import GivesWay, gives_way, is_across
from anabranch.core.decisions.prepared import held, needed
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import extents_by_place, taken_runs
from anabranch.core.locks.conflicts import written
from anabranch.core.locks.lock_table import LockTable
from anabranch.core.locks.table_writes import FEW_POINTS, Write
from anabranch.core.memory import STUCK, Waiting, Who
from anabranch.core.round import StreamCommit
from anabranch.errors import NotReady, ReservedByPrepared
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r

BARS_MS = 1_000  # when a commit has waited this long, locks that it breaks are not frozen before it
HEARD_MS = 5_000  # … unless it did not try again for this time, like a one-shot that was given up
MOST = 1_000  # waiting commits that are noted; more wait without a note
MOST_ON = 16  # transactions that a waiting commit notes: the oldest ones first, others when these have ended

Writes = Mapping[str, Write]  # by table
On = set[tuple[bytes, str]]  # the transactions that a commit waits for, with the table
Refused = NotReady | ReservedByPrepared  # a commit has to wait; or it has waited for too long


def check_free(turn: Turn, txn_id: bytes, writes: Callable[[], Writes]) -> None:
    """Refuse a one-shot, or the commit of one that was prepared, that would break a frozen lock.

    Raises: NotReady, ReservedByPrepared.
    """
    refused = waits(turn, txn_id, writes)
    if refused is not None:
        raise refused


def check_prepare(
    turn: Turn, txn_id: bytes, writes: Callable[[], Writes], locks: Sequence[r.TableLocks]
) -> None:
    """Refuse to prepare a transaction if its locks can't be frozen now. ``locks``: its unregistered ones.

    Raises: NotReady, ReservedByPrepared.
    """
    refused = still_waits(turn, txn_id)
    refused = refused or _to_freeze(turn, txn_id, writes, locks=locks, prepares=True)
    if refused is not None:
        raise refused


def waits(turn: Turn, who: Who, writes: Callable[[], Writes]) -> Refused | None:
    """Why a commit has to wait for a frozen lock that its writes break, or may break; None if it need not wait.

    ``writes``: returns its writes; called only if they are needed.
    """
    refused = still_waits(turn, who)
    if refused is not None:
        return refused
    holding: Collection[bytes] = turn.state.locks.holding
    if who in turn.state.locks.frozen:  # it was prepared
        holding = [one for one in holding if one != who and _is_staged(turn, one)]
    if not holding and turn.merging.waiting.get(who, None) is None:
        return None
    found = writes() if holding else {}
    by = who if isinstance(who, bytes) else NO_TXN
    on = _broken_by(turn.state.locks, by, found, holding)
    turn.charge(work.of_items(len(on)))
    return _note(turn, who, on, found)


def still_waits(turn: Turn, who: Who) -> Refused | None:
    """Why a commit still has to wait: a transaction that it waited for before still has frozen locks.

    This compares no locks.
    """
    known = turn.merging.waiting.get(who, None)
    on = () if known is None else [one for one in known.on if one[0] in turn.state.locks.frozen]
    if known is None or not on:
        return None
    turn.merging.waiting.put(who, known._replace(heard_ms=turn.now_ms))
    return _refused(turn, who, on, known.held_since_ms)


def may_stage(turn: Turn, txn_id: bytes, writes: Callable[[], Writes]) -> Refused | None:
    """Why a merge can't be staged now; None if it can. The caller has checked that its locks hold until now.

    A prepared transaction has frozen locks already: it waits only while it would break a lock of a staged merge.
    """
    if txn_id in turn.state.locks.frozen:
        return waits(turn, txn_id, writes)
    return _to_freeze(turn, txn_id, writes, locks=(), prepares=False)


def _to_freeze(
    turn: Turn,
    txn_id: bytes,
    writes: Callable[[], Writes],
    *,
    locks: Sequence[r.TableLocks],
    prepares: bool,
) -> Refused | None:
    """Why a transaction's locks, which hold until now, can't be frozen yet; None if they can.

    ``locks``: its locks that are not registered. ``prepares``: it is to be prepared; otherwise its merge is to be
    staged.
    """
    known = _alone(txn_id, locks) if locks else turn.state.locks
    tables = known.of(txn_id).tables
    on: On = set()
    behind: On = set()
    if tables:
        others = [one for one in turn.state.locks.frozen if one != txn_id]
        if not prepares:
            its = turn.state
            others = [one for one in others if one not in its.prepared or one in its.promised]
        turn.charge(work.of_items(len(others)))
        kept = 0
        for other in others:
            since = turn.work
            theirs = _written_by(turn, other, tables) if kept < limits.ROUND_WORK.value else None
            if theirs is None:
                return NotReady(
                    "the writes of a prepared transaction or a staged merge are read first"
                )
            if not any(write.is_packed for write in theirs.values()):
                kept += turn.work - since  # memory has these for the next try
            on |= {(other, table) for _, table in _broken_by(known, other, theirs, (txn_id,))}
        bars, behind = _bars(turn, txn_id, known)
        on |= bars
    found: Writes = {}
    # A transaction that a program has prepared may wait for a staged merge when it commits.
    may_wait = prepares and not is_across(turn, txn_id)
    holding = [one for one in turn.state.locks.holding if not (may_wait and _is_staged(turn, one))]
    if not on and holding:
        found = writes()
        on = _broken_by(turn.state.locks, txn_id, found, holding)
    return _note(turn, txn_id, on, found, freezes=True, behind=behind)


def _alone(txn_id: bytes, locks: Sequence[r.TableLocks]) -> LockTable:
    """A table of these locks of a transaction, as if they were registered."""
    found = LockTable()
    identifier = k.read_lock_key(txn_id, 0, 1)[len(txn_id) + 1 :]
    found.derive(txn_id, identifier, r.ReadLockRow(tuple(locks), ()))
    return found


def _is_staged(turn: Turn, txn_id: bytes) -> bool:
    return bool(turn.state.open[txn_id].staged_merges)


def _written_by(turn: Turn, txn_id: bytes, tables: Iterable[str]) -> Writes | None:
    """The writes of a frozen transaction to some tables; None if the journals are not read up to them yet.

    Reading them is charged; most are kept in memory.
    """
    txn, known = turn.open(txn_id), turn.memory.written.setdefault(txn_id, {})
    wanted = txn.participants.keys() & set(tables)
    missing = wanted - known.keys()
    found = {table: known[table] for table in wanted - missing}
    if not missing:
        return found
    kept = turn.state.prepared_row(txn_id)
    if kept is not None and kept.events:
        events = CommandEvents.of(kept.events)
        turn.charge(work.of_items(events.items) + (len(events.payload) >> work.KIB_BITS))
        fresh = writes_of(events, missing, events.by_stream())
    else:
        receipts = () if txn.pending is None else needed(turn.state, txn.pending)
        its = [
            replace(receipt, extents=tuple(e for e in receipt.extents if e.stream in missing))
            for receipt in receipts
        ]
        if not turn.index.covers(its):
            return None
        fresh = writes_in_journals(turn, txn_id, its, missing)
    # A prepared transaction may stay for weeks, so its big writes are not kept.
    is_staged = _is_staged(turn, txn_id)
    known.update({t: write for t, write in fresh.items() if is_staged or not write.is_packed})
    return found | fresh


def writes_kept(turn: Turn, kept: r.PreparedRow) -> Writes:
    """The writes of events that a row keeps, by table."""
    events = CommandEvents.of(kept.events)
    return writes_of(events, turn.state.tables, events.by_stream())


def writes_of(
    events: CommandEvents, tables: Collection[str], by_stream: Mapping[str, Sequence[int]]
) -> dict[str, Write]:
    """The writes of events to these tables. ``by_stream``: the numbers of the events."""
    return {
        table: Write.of(0, SomeEvents(events, by_stream[table]).keys)
        for table in sorted(by_stream.keys() & set(tables))
    }


def writes_in_journals(
    turn: Turn, txn_id: bytes, writers: Sequence[r.Receipt], tables: Collection[str]
) -> dict[str, Write]:
    """The writes to these tables that the receipts of a transaction take, by the journals' index."""
    extents = extents_by_place(writers)
    found = {}
    for table, epoch in sorted(turn.open(txn_id).participants.items()):
        if table not in tables:
            continue
        places = [segment.partition for segment in turn.state.layout(table, epoch)]
        taken = [
            (at, taken_runs(turn.index.runs(txn_id, table, at), extents[table, at]))
            for at in places
            if (table, at) in extents
        ]
        runs = [run for _, its in taken for run in its]
        turn.charge(work.of_batch(len(runs), sum([run.records for run in runs]), 0))
        found[table] = written(turn, StreamCommit(txn_id, table, 0, 0, ()), taken)
    return found


def _broken_by(locks: LockTable, by: bytes, writes: Writes, holding: Collection[bytes]) -> On:
    """The transactions in ``holding`` that have locks which the writes break, or may break; each with the table."""
    return {
        (txn_id, table)
        for table, write in writes.items()
        for txn_id in locks.possible_conflicts(table, write, by)
        if txn_id in holding
    }


def _bars(turn: Turn, txn_id: bytes, locks: LockTable) -> tuple[On, On]:
    """The commits that have waited for this transaction's locks for `BARS_MS` and come before it.

    If two commits would both freeze locks, the commit with the older id comes first: otherwise each might wait for
    the other commit. Also returns the transactions for which the plain writes among these commits wait. Plain
    writes can't be refused, so this transaction would otherwise wait for as long as they do.
    """
    found: On = set()
    behind: On = set()
    for who, its in turn.merging.waiting.as_dict().items():
        by = who if isinstance(who, bytes) else NO_TXN
        if (
            turn.now_ms - its.since_ms < BARS_MS
            or turn.now_ms - its.heard_ms >= HEARD_MS
            or (its.freezes and by >= txn_id)
        ):
            continue
        tables = [
            table
            for table, write in its.writes
            if txn_id in locks.possible_conflicts(table, write, by)
        ]
        found |= {(by, table) for table in tables}
        if tables and by == NO_TXN:
            behind |= set(its.on)
    return found, behind


def _note(
    turn: Turn,
    who: Who,
    on: On,
    writes: Writes,
    *,
    freezes: bool = False,
    behind: Collection[tuple[bytes, str]] = (),
) -> Refused | None:
    """Note the transactions that a commit waits for. Returns why it waits, if there are any.

    ``behind``: transactions that it waits for indirectly, through plain writes.
    """
    waiting = turn.merging.waiting
    known = waiting.get(who, None)
    if not on:
        if known is not None:
            waiting.put(who, None)
        return None
    is_frozen = turn.state.locks.frozen
    first = sorted(on, key=lambda one: (one[0] not in is_frozen, one))[:MOST_ON]
    heard = known is not None and turn.now_ms - known.heard_ms < HEARD_MS
    held_since_ms = known.held_since_ms if known is not None and heard else turn.now_ms
    if not any(_may_stay(turn, one) for one, _ in (*first, *behind)):
        held_since_ms = turn.now_ms
    refused = _refused(turn, who, [*first, *behind], held_since_ms)
    if known is None and not _room(turn, waiting.as_dict()):
        return refused
    kept = tuple((table, _few(write)) for table, write in sorted(writes.items()))
    since_ms = turn.now_ms if known is None else known.since_ms
    kept = kept or (() if known is None else known.writes)
    waiting.put(who, Waiting(since_ms, turn.now_ms, held_since_ms, tuple(first), kept, freezes))
    return refused


def _refused(turn: Turn, who: Who, on: Collection[tuple[bytes, str]], since_ms: int) -> Refused:
    """The error for a commit that would break these locks: it has to wait or give way, or has waited for too long.

    ``since_ms``: when this leader first made it wait for a prepared transaction. The time in the transaction's row
    is not enough: it is by the clock of the leader that logged it, which may have been ahead of this leader's.
    """
    waited = turn.now_ms - since_ms >= limits.PREPARED_HOLD_MS
    for txn_id, table in sorted(on):
        if not _may_stay(turn, txn_id):
            continue
        since_ms = turn.open(txn_id).prepared_ms  # 0: only its coordinator knows
        if waited or (since_ms and turn.wall_ms - since_ms >= limits.PREPARED_HOLD_MS):
            return held(txn_id, f"a row of {table}, by a lock,")
    text = (
        "a row that this writes was read by a prepared transaction, or by a big one whose commit is under way; "
        "nothing was changed: call again (`anabranch txn locks` shows who waits)"
    )
    if isinstance(who, bytes) and is_across(turn, who) and gives_way(turn, who, {o for o, _ in on}):
        return GivesWay(text)
    return NotReady(text)


def _may_stay(turn: Turn, txn_id: bytes) -> bool:
    """Whether a transaction may hold locks for hours: a program prepared it and has not decided, or its commit is
    stuck. A part of another control partition's transaction has no timestamp while its program has not decided.
    """
    txn = turn.state.open.get(txn_id)
    if txn is not None and txn.promised is not None:
        return txn_id in turn.state.prepared and not txn.promised.prepare_timestamp
    if txn is None or not txn.prepared_ms:
        return False
    wait = None if txn_id in turn.state.prepared else turn.wait_of(txn_id)
    return txn_id in turn.state.prepared or (wait is not None and wait.why in STUCK)


def _few(write: Write) -> Write:
    """A write as `Waiting` keeps it: with unknown keys if it is big, so that memory is bounded."""
    points = write.points
    return write if points is not None and len(points) <= FEW_POINTS else Write(0, None, ())


def _room(turn: Turn, waiting: Mapping[Who, Waiting]) -> bool:
    """Whether one more waiting commit may be noted. Drops commits that did not try again for `HEARD_MS`."""
    gone = [who for who, its in waiting.items() if turn.now_ms - its.heard_ms >= HEARD_MS]
    for who in gone:
        turn.merging.waiting.put(who, None)
    return len(waiting) - len(gone) < MOST


def waiting_for(turn: Turn) -> Iterable[tuple[Who, bytes, str]]:
    """(waiting commit, the transaction it waits for, the table) of commits that tried again within `HEARD_MS`."""
    for who, its in turn.merging.waiting.as_dict().items():
        if turn.now_ms - its.heard_ms < HEARD_MS:
            for txn_id, table in its.on:
                yield who, txn_id, table
