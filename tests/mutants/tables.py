"""Planted bugs in tables: locks, the window of recent writes, and replicas; see `catalogue`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from anabranch.core.decisions import bases, decide, scopes
from anabranch.core.decisions.commits import locks as judging
from anabranch.core.decisions.commits import one_shot as shots
from anabranch.core.hybrid_time import MAX, from_us
from anabranch.core.read_locks import Keys, WindowDraft, Write, fingerprint, write_of
from anabranch.core.round import StreamCommit
from anabranch.core.state import State
from anabranch.core.stream_settings import is_table
from anabranch.errors import AnabranchError
from anabranch.ports import LogError
from anabranch.processors import history_tail, index_journals
from anabranch.processors.streams import topics
from anabranch.schemas.records import LookAgain, OneShot, StreamRow
from anabranch.tables import rows as rows_module
from anabranch.tables.follow import Follower
from anabranch.tables.layout import Mark
from anabranch.tables.locks import Locks
from anabranch.tables.replica import Replica
from anabranch.tables.rows import Rows
from anabranch.tables.store import Store

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


def deleted_before_published() -> Planted:
    """What a base covers is deleted before a round tells of the base."""
    real = topics.StreamTopics._change

    def change(own: topics.StreamTopics, row: StreamRow, state: State) -> Any:
        if row.change is not None and row.change.base is not None:
            due = history_tail.events_until(own._log, own._clock, row.stream, row.change.until)
            own._log.delete_records(due)
        return real(own, row, state)

    return patch.object(topics.StreamTopics, "_change", change)


def base_laid_over_rows() -> Planted:
    """A folder that is behind the base keeps its rows when the base is laid down."""
    real = Store.begin

    def begin(store: Store, stream: str, ids: str) -> Mark:
        before = store.marks.get(stream)
        if before is None:
            return real(store, stream, ids)
        store.marks[stream] = Mark(before.number, ids, indexes=before.indexes)
        return store.marks[stream]

    return patch.object(Store, "begin", begin)


def rows_of_the_compactor() -> Planted:
    """A base's rows are told to be of the base's own transaction and time."""

    def unpack(_: bytes | None) -> tuple[int, bytes]:
        return from_us(1), b"c" * 16

    return patch.object(rows_module, "unpack_version", unpack)


def any_base() -> Planted:
    """Any committed transaction is taken for a base."""
    return patch.object(bases, "_check", lambda *_: None)
