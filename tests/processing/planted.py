"""Planted bugs of a worker: `trial --bug NAME` and `test_failpoints.py` find them (each says how).

``python -m tests.processing.planted`` is ``anabranch`` with the bug that ``ANABRANCH_PLANTED`` names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from anabranch.processing import timers
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


def main() -> None:
    """The command line, with a bug."""
    from anabranch.cli import app

    with BUGS[os.environ[VARIABLE]]():
        app()


if __name__ == "__main__":
    main()
