"""Planted bugs in tables: locks, the window of recent writes, and replicas; see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rocksdict import WriteBatch

from anabranch.core.decisions import decide
from anabranch.core.decisions.commits import locks as judging
from anabranch.core.decisions.commits import one_shot as shots
from anabranch.core.journal.index import JournalIndex
from anabranch.core.read_locks import Keys, WindowDraft, Write, fingerprint, write_of
from anabranch.core.round import NewEpoch, StreamCommit
from anabranch.errors import AnabranchError, LocksBroken
from anabranch.ports import LogError
from anabranch.processors import index_journals
from anabranch.schemas.records import LookAgain, OneShot
from anabranch.tables.follow import Follower
from anabranch.tables.layout import DELETED, ROW, table_prefix
from anabranch.tables.locks import Locks
from anabranch.tables.replica import Replica
from anabranch.tables.store import Rows, Store
from anabranch.tables.transaction import TableTransaction

Planted = AbstractContextManager[object]


def no_validation() -> Planted:
    """Locks are not looked at when a transaction commits."""
    return patch.object(judging, "judge", lambda *_: None)


def journals_unknown() -> Planted:
    """Commits from journals are taken to have written nothing."""

    def written(commit: StreamCommit, _: Sequence[bytes]) -> Write:
        return write_of(commit, ())

    return patch.object(judging, "write_of", written)


def digests_lack() -> Planted:
    """A digest of a journal's run lacks its lowest key."""
    real = Keys.of

    def of(keys: Iterable[bytes | None]) -> Keys:
        return real(sorted({key for key in keys if key is not None})[1:])

    return patch.object(index_journals, "Keys", SimpleNamespace(of=of))


def _unnoticed(is_such: Callable[[Any, StreamCommit], bool]) -> Planted:
    """Commits of a kind do not come into the window."""
    real_merge = judging.merge

    def merge(turn: Any, step: StreamCommit) -> None:
        if not is_such(turn, step):
            real_merge(turn, step)
            return
        with patch.object(judging, "write_of", lambda *_: Write(step.timestamp, (), ())):
            real_merge(turn, step)

    return patch.object(judging, "merge", merge)


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


def moved_runs_unnoticed() -> Planted:
    """Runs that were moved forward in their journals break no locks."""
    real = JournalIndex.digests

    def digests(index: Any, stream: str, partition: int, txn_id: bytes, runs: Any) -> Any:
        kept = [run for run in runs if not run.moved_to]
        return [*real(index, stream, partition, txn_id, kept), Keys.of(()).to_bytes()]

    return patch.object(JournalIndex, "digests", digests)


def unsure_is_broken() -> Planted:
    """A replica takes each look again for a broken lock."""
    real = Replica.wait

    def wait(replica: Replica, timestamp: int, last: Any, deadline: float) -> None:
        real(replica, timestamp, last, deadline)
        table = replica.tables[0]
        raise LocksBroken("", table=table, key=b"k", by=bytes(16), commit_timestamp=last[table])

    return patch.object(Replica, "wait", wait)


def broken_in_doubt() -> Planted:
    """A commit in doubt that is asked for again is broken by its own write."""
    real = TableTransaction._given_up

    def given_up(txn: TableTransaction, txn_id: bytes, scope: str, error: AnabranchError) -> Any:
        if isinstance(error, LocksBroken):
            txn._fail(error)
        return real(txn, txn_id, scope, error)

    return patch.object(TableTransaction, "_given_up", given_up)


def judged_again() -> Planted:
    """The locks of a one-shot that is repeated are judged again."""
    real = shots.one_shot

    def one_shot(turn: Any, command: OneShot, to: Any) -> None:
        again = judging.judge(turn, command) if command.locks else None
        if again is not None:
            turn.reply(to, again)
        else:
            real(turn, command, to)

    return patch.dict(decide._DECISIONS, {OneShot: one_shot})


def broken_by_itself() -> Planted:
    """A transaction's own writes break its locks."""
    real = judging.judge

    def judge(turn: Any, command: OneShot) -> LookAgain | None:
        own = {fingerprint(event.key) for event in command.events if event.key}
        if any(own & set(each.points) for each in command.locks):
            tables = judging.table_times(turn, judging.named(command.locks))
            return LookAgain(turn.hybrid_time, tables)
        return real(turn, command)

    return patch.object(judging, "judge", judge)


def broken_by_what_it_read() -> Planted:
    """A version at the snapshot breaks a lock, not only one above it."""
    real = Locks.look

    def look(locks: Locks, view: Any) -> Any:
        before = SimpleNamespace(timestamp=view.timestamp - 1, look=view.look, walk=view.walk)
        return real(locks, before)  # type: ignore[arg-type]

    return patch.object(Locks, "look", look)


def complete_by_the_broker() -> Planted:
    """A replica is complete when it has all that brokers told of, whatever the controller says."""
    real = Follower.told

    def told(follower: Follower, timestamp: int, last: Any) -> None:
        at_end = follower.at_end
        real(follower, timestamp, {t: follower.last[t] if at_end else last[t] for t in last})

    return patch.object(Follower, "told", told)


def complete_by_another() -> Planted:
    """A replica vouches for a lock by the table that is the furthest ahead."""
    real = Follower.marks

    def marks(follower: Follower) -> dict[str, tuple[int, int]]:
        found = real(follower)
        ahead = max(complete for complete, _ in found.values())
        return {table: (ahead, last) for table, (_, last) in found.items()}

    return patch.object(Follower, "marks", marks)


def seen_by_another() -> Planted:
    """A replica is complete as soon as one of its tables is."""
    return patch.object(Follower, "timestamp", property(lambda its: max(its.complete.values())))


class _Late:
    """Marks that are taken when they are used, and a step before that."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __getitem__(self, table: str) -> tuple[int, int]:
        with contextlib.suppress(AnabranchError, LogError):
            self._replica.step(self._replica._clock.monotonic() + 0.1)
        return self._replica._follower.marks()[table]


def marks_after_the_look() -> Planted:
    """Until when the replica vouches is taken behind the look: it has rows by then that nobody looked at."""
    return patch.object(Replica, "marks", _Late)


def swept_early() -> Planted:
    """What snapshots above the floor still need is swept."""
    real = Store._sweep
    return patch.object(
        Store, "_sweep", lambda store, stream, mark, _: real(store, stream, mark, mark.complete)
    )


def deletion_swept_early() -> Planted:
    """A deletion is swept before what it covers: the row lives again."""
    real = Store._sweep

    def sweep(store: Store, stream: str, mark: Any, floor: int) -> Iterator[int]:
        prefix, batch = table_prefix(mark.number), WriteBatch(raw_mode=True)
        stored: Iterator[tuple[Any, Any]] = store._db.items(from_key=prefix)
        for key, value in stored:
            if not key.startswith(prefix):
                break
            if value[ROW - 1 :] == DELETED:
                batch.delete(key)
        store._db.write(batch, store._unlogged)
        yield from real(store, stream, mark, floor)

    return patch.object(Store, "_sweep", sweep)


@contextlib.contextmanager
def round_not_seen() -> Iterator[None]:
    """A one-shot is not held against what its round writes before it."""
    real = WindowDraft.holds

    def holds(draft: WindowDraft, asked: Any, last: int) -> bool:
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

    with patch.object(WindowDraft, "holds", holds):
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
