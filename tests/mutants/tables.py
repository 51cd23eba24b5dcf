"""Planted bugs in tables: locks, the window of recent writes, and replicas; see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rocksdict import WriteBatch

from anabranch.client.own_writes import ReadBack
from anabranch.client.row_chain import Chain
from anabranch.client.table_locks import Locks
from anabranch.client.table_one_shot import TableOneShot
from anabranch.client.table_transaction import TableTransaction
from anabranch.controller import history_tail
from anabranch.controller import stream_topics as topics
from anabranch.core.decisions import bases, decide, quotas, scopes
from anabranch.core.decisions import one_shot as shots
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import JournalIndex
from anabranch.core.locks import conflicts, frozen, registering, row_changes, row_turns
from anabranch.core.locks.conflicts import _is_latest
from anabranch.core.locks.lock_table import LockTable
from anabranch.core.locks.recent_writes import RecentWritesDraft
from anabranch.core.locks.table_writes import Keys, Write, fingerprint, write_of
from anabranch.core.memory import TurnAsker
from anabranch.core.round import NewEpoch, StreamCommit
from anabranch.core.stream_settings import is_table
from anabranch.errors import AnabranchError, DeadlineExceeded, LocksBroken, RetryError
from anabranch.ports import LogError
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import MAX, from_us
from anabranch.protocol.schemas.records import (
    BaseRow,
    BrokenLock,
    FollowedRows,
    OneShot,
    Outcome,
    ReadLockRow,
    Revalidate,
    StreamRow,
    TableLocks,
    TxnRow,
)
from anabranch.tables import store as store_module
from anabranch.tables.follow import Follower
from anabranch.tables.replica import ReadReplica
from anabranch.tables.store import DELETED, ROW, Mark, Rows, Store, table_prefix
from tests.mutants.planting import Planted, instead_of, wrapping


def no_validation() -> Planted:
    """Locks are not looked at when a transaction commits."""
    return patch.object(conflicts, "judge", lambda *_: None)


@instead_of(row_turns, "_is_over")
def turns_outlast_commits(turn: Turn, holder: TurnAsker, merged: set[bytes]) -> bool:
    """A turn at a row does not end with the commit of its transaction, but after a second."""
    return turn.now_ms >= holder.until_ms


@instead_of(row_turns, "_is_over")
def turns_outlast_clients(turn: Turn, holder: TurnAsker, merged: set[bytes]) -> bool:
    """A turn at a row does not end after a second, only with its transaction."""
    return holder.txn_id in merged


@instead_of(conflicts, "_is_latest")
def followed_unseen(turn: Turn, rows: FollowedRows) -> bool:
    """A one-shot is committed that follows a commit which has not come, or has failed."""
    row = turn.state.txn_row(rows.txn_id)
    return row is None or row.state == "ABORTED" or _is_latest(turn, rows)


@instead_of(conflicts, "_is_latest")
def followed_unlocked(turn: Turn, rows: FollowedRows) -> bool:
    """A row is not locked since the commit that it follows."""
    row = turn.state.txn_row(rows.txn_id)
    return row is not None and row.state == "COMMITTED"


@instead_of(TableTransaction, "_check_committed")
def uncommitted_reported(_: TableTransaction, __: str) -> None:
    """A call reports what it computed on commits under way, before these are known to be committed."""


@instead_of(Chain, "_unused_turn")
def idle_turns_kept(_: Chain) -> None:
    """A chain keeps its turn at a row when all of its calls are answered, and none comes."""


@wrapping(TableOneShot, "_send")
def copies_forgotten(real: Any, shot: TableOneShot, command: OneShot, *more: Any) -> Any:
    """A one-shot that follows a commit under way is taken for ended once it is to be revalidated."""
    answer = real(shot, command, *more)
    if isinstance(answer, Revalidate) and command.follows:
        raise LocksBroken("it follows a commit that has not come")
    return answer


@wrapping(RecentWritesDraft, "holds")
def at_since_counts(real: Any, draft: RecentWritesDraft, asked: TableLocks, last: int) -> Any:
    """A commit at a lock's `since` is held against it, not only those above."""
    return real(draft, asked._replace(since=asked.since - 1), last)


@instead_of(RecentWritesDraft, "_may_be_later")
def numbers_outlive_writes(_: RecentWritesDraft, __: Any, ___: int) -> bool:
    """The number that a change left in a row counts, though the row was written since."""
    return False


@wrapping(RecentWritesDraft, "keep_number")
def numbers_outlive_rounds(real: Any, draft: RecentWritesDraft, row: Any, number: Any) -> None:
    """The number that a change makes of a row is kept before its round is committed."""
    real(draft, row, number)
    draft.base.numbers.pop(row, None)
    draft.base.numbers[row] = number


@wrapping(TableOneShot, "_given_up")
def given_up_unresolved(
    real: Any, shot: TableOneShot, txn_id: bytes, scope: str, error: AnabranchError
) -> Any:
    """A commit with changes of rows that is given up after `Revalidate` is not resolved: a late copy counts."""
    if shot._command is None or not shot._command.changes:
        return real(shot, txn_id, scope, error)
    shot.is_over = True
    raise DeadlineExceeded(str(error)) if isinstance(error, RetryError) else error


@wrapping(TableOneShot, "_repeated")
def advised_and_given_up(
    real: Any, shot: TableOneShot, error: AnabranchError, deadline: float
) -> Any:
    """A commit that was advised to take a turn is given up without being sent again: a late copy counts."""
    if isinstance(error, LocksBroken):
        raise error
    return real(shot, error, deadline)


@wrapping(row_changes, "values_of")
def bases_below_the_reach(real: Any, *given: Any) -> Any:
    """A client's row counts from before the leader's memory of writes begins."""

    def holds(draft: RecentWritesDraft, asked: TableLocks, last: int) -> bool:
        if last <= asked.since:
            return True
        known = draft._known(asked.table)
        return not any(t.unknown > asked.since or t.has(asked.points, asked.since) for t in known)

    with patch.object(RecentWritesDraft, "holds", holds):
        return real(*given)


@instead_of(conflicts, "write_of")
def journals_unknown(commit: StreamCommit, _: Sequence[bytes]) -> Write:
    """Commits from journals are taken to have written nothing."""
    return write_of(commit, ())


@wrapping(Keys, "to_bytes")
def digests_lack(real: Any, its: Keys) -> Any:
    """A digest of a journal's run lacks its lowest key."""
    lowest = {fingerprint(key) for key in its.keys[:1]}
    points = [point for point in its.points if point not in lowest]
    return real(Keys(points, its.keys[len(lowest) :]))


@wrapping(conflicts, "written")
def carried_digest_lacks(real: Any, turn: Any, step: StreamCommit, taken: Any) -> Any:
    """The least key that a commit wrote, which was staged, is not known."""
    write = real(turn, step, taken)
    if write.points is None or not any(part.staged for part in step.parts):
        return write
    lowest = {fingerprint(key) for key in write.keys[:1]}
    points = tuple(point for point in write.points if point not in lowest)
    return Write(write.timestamp, points, write.keys[1:])


@contextlib.contextmanager
def no_freezing() -> Iterator[None]:
    """Nobody waits for a frozen lock."""
    with (
        patch.object(frozen, "waits", lambda *_: None),
        patch.object(frozen, "_to_freeze", lambda *_, **__: None),
    ):
        yield


def frozen_one_sided() -> Planted:
    """A transaction is carried or prepared though what another one, which is, too, writes breaks its locks."""
    return patch.object(frozen, "_written_by", lambda *_: {})


def _unnoticed(is_such: Callable[[Any, StreamCommit], bool]) -> Planted:
    """Commits of a kind do not come into the window."""
    real_merge = conflicts.merge

    def merge(turn: Any, step: StreamCommit, *taken: Any) -> None:
        if not is_such(turn, step):
            real_merge(turn, step, *taken)
            return
        with patch.object(conflicts, "write_of", lambda *_: Write(step.timestamp, (), ())):
            real_merge(turn, step, *taken)

    return patch.object(conflicts, "merge", merge)


def plain_writes_unnoticed() -> Planted:
    """Commits of plain writes break no locks."""
    return _unnoticed(lambda _, step: bool(step.plain))


def rolling_unnoticed() -> Planted:
    """Rolling commits, into an epoch before the last one, break no locks."""

    def rolls(turn: Any, step: StreamCommit) -> bool:
        return any(isinstance(s, NewEpoch) and s.stream == step.stream for s in turn.round.history)

    return _unnoticed(rolls)


def one_shots_unnoticed() -> Planted:
    """One-shots break no locks."""
    return _unnoticed(lambda _, step: any(part.events for part in step.parts))


@wrapping(JournalIndex, "digests")
def moved_runs_unnoticed(
    real: Any, index: Any, stream: str, partition: int, txn_id: bytes, runs: Any
) -> Any:
    """Runs that were moved forward in their journals break no locks."""
    kept = [run for run in runs if not run.moved_to]
    return [*real(index, stream, partition, txn_id, kept), Keys.of(()).to_bytes()]


@wrapping(ReadReplica, "wait")
def unsure_is_broken(
    real: Any, replica: ReadReplica, timestamp: int, last: Any, deadline: float
) -> None:
    """A replica takes each `Revalidate` for a broken lock."""
    real(replica, timestamp, last, deadline)
    for table, newest in last.items():  # of a look
        raise LocksBroken("", table=table, key=b"k", by=bytes(16), commit_timestamp=newest)


@wrapping(TableOneShot, "_given_up")
def broken_in_doubt(
    real: Any, shot: TableOneShot, txn_id: bytes, scope: str, error: AnabranchError
) -> Any:
    """A commit in doubt that is asked for again is broken by its own write."""
    if isinstance(error, LocksBroken):
        raise error
    return real(shot, txn_id, scope, error)


def judged_again() -> Planted:
    """The locks of a one-shot that is repeated are judged again."""
    real = shots.one_shot

    def one_shot(turn: Any, command: OneShot, to: Any) -> None:
        again = conflicts.judge(turn, command.locks) if command.locks else None
        if again is not None:
            turn.reply(to, again)
        else:
            real(turn, command, to)

    return patch.dict(decide._DECISIONS, {OneShot: one_shot})


def broken_by_itself() -> Planted:
    """A transaction's own writes break its locks."""
    real = shots.one_shot

    def one_shot(turn: Any, command: OneShot, to: Any) -> None:
        own = {fingerprint(event.key) for event in command.events if event.key}
        if any(own & set(each.points) for each in command.locks):
            tables = conflicts.table_times(turn, conflicts.named(command.locks))
            turn.reply(to, Revalidate(turn.hybrid_time, tables))
        else:
            real(turn, command, to)

    return patch.dict(decide._DECISIONS, {OneShot: one_shot})


@wrapping(Locks, "validate")
def broken_by_what_it_read(real: Any, locks: Locks, view: Any, _: object = None) -> Any:
    """A version at the snapshot breaks a lock, not only one above it."""
    before = SimpleNamespace(
        timestamp=view.timestamp - 1, get_version=view.get_version, walk=view.walk
    )
    return real(locks, before)


@wrapping(Follower, "observe")
def complete_by_the_broker(real: Any, follower: Follower, timestamp: int, last: Any) -> Any:
    """A replica is complete when it has all that brokers told of, whatever the controller says."""
    at_end = follower.at_end
    return real(follower, timestamp, {t: follower.last[t] if at_end else last[t] for t in last})


@wrapping(Follower, "marks")
def complete_by_another(real: Any, follower: Follower) -> dict[str, tuple[int, int]]:
    """A replica validates a lock by the table that is the furthest ahead, and by what it was told of its own."""
    found = real(follower)
    ahead = max(complete for complete, _ in found.values())
    reports = {table: {*follower._reported[table], follower._newest[table]} for table in found}
    told = {table: [n for n in reports[table] if n <= ahead] for table in found}
    return {table: (ahead, max(last, *told[table], 0)) for table, (_, last) in found.items()}


def seen_by_another() -> Planted:
    """A replica is complete as soon as one of its tables is."""
    return patch.object(Follower, "timestamp", property(lambda its: max(its.complete.values())))


def registered_never_broken() -> Planted:
    """Commits are not held against registered locks."""
    return patch.object(conflicts, "hold_against", lambda *_: None)


@wrapping(TxnRow, "_replace")
def broken_not_logged(real: Any, row: TxnRow, **changes: Any) -> Any:
    """A registered lock that is broken is not marked as that, unless the transaction ends with it."""
    return real(row, **{name: value for name, value in changes.items() if name != "broken"})


def registered_breaks_itself() -> Planted:
    """A transaction's own writes break its registered locks."""
    real = LockTable.conflicts
    return patch.object(
        LockTable, "conflicts", lambda its, table, write, _: real(its, table, write, b"")
    )


def doubts_dropped() -> Planted:
    """A commit that may have broken a registered lock, which is not sure, makes no look due."""
    return patch.object(conflicts, "_may_be_broken", lambda *_: False)


@wrapping(LockTable, "conflicts")
def what_is_not_sure_breaks(real: Any, its: LockTable, table: str, write: Write, by: bytes) -> Any:
    """A commit that may have broken a registered lock is taken to have broken it."""
    doubted = its.possible_conflicts(table, write, by)
    lock = BrokenLock(table, b"", None, write.timestamp, by)
    return dict.fromkeys(doubted, lock) | real(its, table, write, by)


def sets_not_validated() -> Planted:
    """A commit takes locks that nobody validated."""
    return patch.object(conflicts, "to_revalidate", lambda *_: None)


def told_before_the_look() -> Planted:
    """A process reports locks as validated without validating them."""
    return patch.object(Locks, "validate", lambda *_: None)


@wrapping(LockTable, "derive")
def left_out_forgotten(
    real: Any, its: LockTable, txn_id: bytes, identifier: bytes, row: Any
) -> None:
    """Only the locks of one writer of a transaction are kept."""
    first = next(iter(its.of(txn_id).validated), None)
    is_first = first is None or identifier.startswith(first.to_bytes(8, "big", signed=True))
    if isinstance(row, ReadLockRow) and not is_first:
        row = ReadLockRow((), row.read_from)
    real(its, txn_id, identifier, row)


def read_from_left_out() -> Planted:
    """A commit may leave out a writer that was read from."""
    return patch.object(conflicts, "covers", lambda *_: True)


class _Finished:
    """A controller's word on a transaction, but for which of its writers have finished."""

    def __init__(self, places: Any, finished: bool) -> None:
        self.list_runs, self._state, self._finished = places.list_runs, places.state, finished

    def state(self, *given: Any) -> Outcome:
        told: Outcome = self._state(*given)
        writers = (replace(receipt, finished=self._finished) for receipt in told.writers)
        return told._replace(writers=tuple(writers))


def _as_if(finished: bool) -> Planted:
    real = ReadBack.__init__

    def init(own: ReadBack, handle: Any, places: Any, *more: Any) -> None:
        session: Any = _Finished(places, finished)
        real(own, handle, session, *more)

    return patch.object(ReadBack, "__init__", init)


def unfinished_read() -> Planted:
    """A process that reads all writers' rows sees those of one that has not finished."""
    return _as_if(finished=True)


def finished_missed() -> Planted:
    """A process that reads all writers' rows misses those of the ones that have finished."""
    return _as_if(finished=False)


class _Late(Mapping[str, tuple[int, int]]):
    """Marks that are taken when they are used, and a step before that."""

    def __init__(self, replica: ReadReplica) -> None:
        self._replica = replica

    def __getitem__(self, table: str) -> tuple[int, int]:
        with contextlib.suppress(AnabranchError, LogError):
            self._replica.step(self._replica._clock.monotonic() + 0.1)
        return self._replica._follower.marks()[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replica._follower.marks())

    def __len__(self) -> int:
        return len(self._replica._follower.marks())


def marks_after_the_look() -> Planted:
    """Through when the replica validates is read after the check: by then it has rows that were not checked."""
    return patch.object(ReadReplica, "marks", lambda replica: _Late(replica))


def swept_early() -> Planted:
    """What snapshots above the floor still need is swept."""
    real = Store._sweep
    return patch.object(
        Store, "_sweep", lambda store, stream, mark, _: real(store, stream, mark, mark.complete)
    )


@wrapping(Store, "_sweep")
def deletion_swept_early(
    real: Any, store: Store, stream: str, mark: Any, floor: int
) -> Iterator[int]:
    """A deletion is swept before what it covers: the row lives again."""
    prefix, batch = table_prefix(mark.number), WriteBatch(raw_mode=True)
    stored: Iterator[tuple[Any, Any]] = store._db.items(from_key=prefix)
    for key, value in stored:
        if not key.startswith(prefix):
            break
        if value[ROW - 1 :] == DELETED:
            batch.delete(key)
    store._db.write(batch, store._unlogged)
    yield from real(store, stream, mark, floor)


@contextlib.contextmanager
def round_not_seen() -> Iterator[None]:
    """A one-shot is not held against what its round writes before it."""
    real = RecentWritesDraft.holds

    def holds(draft: RecentWritesDraft, asked: Any, last: int) -> bool:
        its = draft.tables.pop(asked.table, None)
        try:
            known = draft.base.table(asked.table)
            before = last if its is None else its.before
            if known is None and its is not None and asked.since >= before:
                return bool(before == asked.last)
            return real(draft, asked, before)
        finally:
            if its is not None:
                draft.tables[asked.table] = its

    with patch.object(RecentWritesDraft, "holds", holds):
        yield


@contextlib.contextmanager
def position_first() -> Iterator[None]:
    """A replica's position passes rows that it does not write."""
    real = Store.write

    def write(store: Store, rows: Rows) -> None:
        marks = Rows()
        marks.marks = dict(rows.marks)
        real(store, marks)
        if rows.rows % 3:
            real(store, rows)

    with patch.object(Store, "write", write):
        yield


@contextlib.contextmanager
def base_of_now() -> Iterator[None]:
    """A base is as of now, though snapshots below it are promised."""

    def oldest_snapshot(turn: Any, row: Any) -> int:
        return int(max(turn.hybrid_time, from_us(turn.now_us))) if is_table(row.settings) else 0

    with (
        patch.object(scopes, "oldest_snapshot", oldest_snapshot),
        patch.object(bases, "oldest_snapshot", oldest_snapshot),
    ):
        yield


def deleted_beyond_the_base() -> Planted:
    """All that is committed is deleted once a base is published, not only what it covers."""
    real = history_tail.events_until
    return patch.object(
        topics, "events_until", lambda log, clock, stream, _: real(log, clock, stream, MAX)
    )


@wrapping(topics.StreamTopics, "_change")
def deleted_before_published(
    real: Any, own: topics.StreamTopics, row: StreamRow, base: BaseRow | None
) -> Any:
    """What a base covers is deleted before a round tells of the base."""
    if row.change is not None and row.change.base is not None:
        due = history_tail.events_until(own._log, own._clock, row.stream, row.change.until)
        own._log.delete_records(due)
    return real(own, row, base)


@wrapping(Store, "begin")
def base_laid_over_rows(real: Any, store: Store, stream: str, ids: str) -> Any:
    """A folder that is behind the base keeps its rows when the base is laid down."""
    before = store.marks.get(stream)
    if before is None:
        return real(store, stream, ids)
    store.marks[stream] = Mark(before.number, ids, indexes=before.indexes)
    return store.marks[stream]


@instead_of(store_module, "unpack_version")
def rows_of_the_compactor(_: bytes | None) -> tuple[int, bytes]:
    """A base's rows are told to be of the base's own transaction and time."""
    return from_us(1), b"c" * 16


def any_base() -> Planted:
    """Any committed transaction is taken for a base."""
    return patch.object(bases, "_check", lambda *_: None)


def old_snapshots() -> Planted:
    """A transaction may keep tables readable as of any time, and for as long as its client likes."""
    return patch.object(quotas, "check_snapshot", lambda *_: None)


@wrapping(registering, "_check")
def locks_uncounted(real: Any, turn: Turn, *given: Any) -> None:
    """A transaction may register as many locks as its client likes."""
    with patch.object(limits, "LOCKS", limits.LOCKS._replace(value=1 << 60)):
        real(turn, *given)
