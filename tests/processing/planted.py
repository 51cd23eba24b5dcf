"""Planted bugs of a worker: `trial --bug NAME` and `test_failpoints.py` find them (each says how).

Those of sessions, joins and other words (`WORDS`) are found by the folds of `test_words.py`.

``python -m tests.processing.planted`` is ``anabranch`` with the bug that ``ANABRANCH_PLANTED`` names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from anabranch.processing import joins, spans, timers
from anabranch.processing.batch import HandlerContext, WorkBatch
from anabranch.processing.commits import Commits
from anabranch.processing.handlers import Handlers
from anabranch.processing.worker import Worker
from anabranch.reading.task_reader import TaskReader

VARIABLE = "ANABRANCH_PLANTED"
LATE_S = 0.5


def table_early() -> Any:
    """Rows are in RocksDB before the answer."""
    commit = Commits._commit

    def early(self: Commits, ownership: Any, batch: WorkBatch, consumed: Any) -> None:
        self._table.write(((task, rows.items()) for task, rows in batch.rows.items()), {})
        commit(self, ownership, batch, consumed)

    return patch.object(Commits, "_commit", early)


def state_early() -> Any:
    """The state is read up to where it stood before the tasks were taken."""
    take = Worker._take

    def early(self: Worker, wanted: frozenset[int]) -> None:
        before = {row.task: row for row in self._client.processor(self._app.name).tasks}
        time.sleep(LATE_S)
        restore = self._commits.state.restore

        def stale(tasks: Any, *more: Any) -> int:
            known = {task: before.get(task, info) for task, info in tasks.items()}
            return restore(known, *more)

        with patch.object(self._commits.state, "restore", stale):
            take(self, wanted)

    return patch.object(Worker, "_take", early)


def two_in_flight() -> Any:
    """A commit is sent while the one before is under way."""

    def send(self: Commits, ownership: Any, batch: WorkBatch, consumed: Any) -> None:
        batch.set_below(self._table)
        if self._pool is not None and self._pool._max_workers == 1:
            self._pool = ThreadPoolExecutor(2)
        assert self._pool is not None
        self._sent = batch
        self._future = self._pool.submit(self._commit, ownership, batch, consumed)

    wait = Commits.wait

    def hasty(self: Commits, seconds: float | None = None) -> bool:
        return seconds is not None or wait(self)

    return patch.multiple(Commits, send=send, wait=hasty)


def fired_twice() -> Any:
    """A timer's due row is not deleted as it fires."""
    put = HandlerContext.put

    def kept(self: HandlerContext, task: int, row: bytes, value: bytes | None) -> None:
        if value is not None or not row.startswith(timers._DUE):
            put(self, task, row, value)

    return patch.object(HandlerContext, "put", kept)


def positions_ahead() -> Any:
    """Positions are those of all that was read, and the last piece is handled in the next commit."""
    handle = Handlers.handle
    held: list[Any] = []

    def late(self: Handlers, batch: WorkBatch, pieces: Iterable[Any]) -> Any:
        some = [*held, *pieces]
        held[:] = some[-1:] if len(some) > len(held) else []
        return handle(self, batch, some[:-1] if held else some)

    return patch.object(Handlers, "handle", late)


def torn_transactions() -> Any:
    """A transaction comes in parts as soon as it is bigger than what is read at once."""
    cut = TaskReader.cut

    def parts(self: TaskReader, until: float, most_bytes: int, _: int) -> Any:
        return cut(self, until, most_bytes)

    return patch.object(TaskReader, "cut", parts)


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        table_early, state_early, two_in_flight, fired_twice, positions_ahead, torn_transactions,
    )
}  # fmt: skip


def session_timer_stays() -> Any:
    """A key's timer is not set earlier for a session that ends earlier."""

    def save(
        self: spans.Spans, row: spans.Row, *, firing: bool = False, added: int | None = None
    ) -> None:
        if added is not None and isinstance(self, spans.Sessions):
            added = max(added, row.armed)
        spans_save(self, row, firing=firing, added=added)

    spans_save = spans.Spans.save
    return patch.object(spans.Spans, "save", save)


def session_grown_backwards() -> Any:
    """A session that a late event extends to the past keeps its start."""
    joined = spans.Sessions._joined

    def kept(self: spans.Sessions, event: Any) -> Any:
        before = [start for start, _ in self.row_of(event).entries]
        row, entry = joined(self, event)
        gone = set(before) - {start for start, _ in row.entries}
        if entry is not None and gone:
            entry = min(gone), *entry[1:]
        return row, entry

    return patch.object(spans.Sessions, "_joined", kept)


def moved_timers_wait() -> Any:
    """What is due again fires when the event time advances next."""
    return patch.object(spans.Spans, "next_due", lambda *_: None)


def window_forgets_early() -> Any:
    """A sliding window deletes the events that a later window has."""

    def drop(self: spans.Sliding, row: spans.Row, due: int) -> None:
        end = due - self.grace - 1
        row.entries = [entry for entry in row.entries if entry[0] > end]

    return patch.object(spans.Sliding, "drop_due", drop)


def join_forgets_early() -> Any:
    """A join does not wait for the grace."""

    def due_of(self: joins.Join, entry: spans.Entry) -> int:
        return entry[0] + self._within.reach(entry[1][0] & 1) - self._within.grace + 1

    return patch.object(joins.Join, "_due_of", due_of)


def join_swaps_within() -> Any:
    """How much earlier and how much later a right event may be are exchanged."""
    of = joins.Within.of

    def swapped(within: Any, grace: float, kind: str) -> joins.Within:
        return of(within[::-1], grace, kind)

    return patch.object(joins.Within, "of", swapped)


def match_not_noted() -> Any:
    """An event that waited is not marked as matched."""
    return patch.object(joins, "_MATCHED", 0)


def versions_by_commit() -> Any:
    """Versions are in the order of commits."""
    return patch.object(spans.Versions, "note", _append)


def _append(self: spans.Versions, event: Any) -> None:
    row = self.row_of(event)
    if event.timestamp + self._keep >= timers.event_time(row.at.batch, row.task):
        row.entries.append((event.timestamp, b"\x01" + (row.at.value or b"")))
        self.save(row)


def set_resets_no_age() -> Any:
    """A row expires by the time at which it was set first."""
    stored = spans.Expiring._stored

    def aged(self: spans.Expiring, at: HandlerContext, value: bytes) -> bytes:
        task, row = self._place(at, at.key or b"")
        before = at.batch.get(task, row)
        return stored(self, at, value) if before is None else before[:8] + value

    return patch.object(spans.Expiring, "_stored", aged)


WORDS: dict[str, tuple[str, Callable[[], Any]]] = {
    bug.__name__: (word, bug)
    for word, bug in (
        ("sessions", session_timer_stays),
        ("sessions", session_grown_backwards),
        ("sliding", moved_timers_wait),
        ("sliding", window_forgets_early),
        ("inner", join_forgets_early),
        ("inner", join_swaps_within),
        ("left", match_not_noted),
        ("versions", versions_by_commit),
        ("expiring", set_resets_no_age),
    )
}


def main() -> None:
    """The command line, with a bug."""
    from anabranch.cli import app

    with BUGS[os.environ[VARIABLE]]():
        app()


if __name__ == "__main__":
    main()
