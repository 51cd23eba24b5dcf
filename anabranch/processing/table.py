"""The rows of a worker's tasks in RocksDB: a copy of the state stream, never ahead of it.

The state stream has the committed changes of a processor's stores. A task's mark says how far its rows follow that
stream: the topic's id, the state's incarnation (a number that a reset of the state raises), the sequence of the
last commit of which all rows are here, and the offset from which to resume reading. While records are read, rows
may be those of half a commit, and the sequence is `NOT_WHOLE`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rocksdict import Rdict, WriteBatch, WriteOptions

from anabranch.controller.rocksdb_table import open_rows
from anabranch.errors import IllegalState
from anabranch.ports import TableError
from anabranch.tables.rocks import (
    TableDamaged,
    Walk,
    is_full,
    named,
    of_disk,
    release_frames,
    table_error,
)

log = logging.getLogger("anabranch.processor")

_TASK = 2  # bytes of a task's number
_MARKS = b"\xff\xff"  # no task has this number
_IDENTITY = b"\xff\xfe"  # and none this
_VERSION = "1"
NOT_WHOLE = -1
# Rows that a thread keeps in memory: their bytes, and what Python takes for each of them.
_KEPT_BYTES = 8 << 20
_KEPT_OVERHEAD = 150
_MISSING: Any = object()


class Mark(NamedTuple):
    """How far a task's rows follow its state. ``written_ms``: Kafka's timestamp of the last record read."""

    topic_id: str
    incarnation: int
    sequence: int
    offset: int
    written_ms: int


Rows = Iterable[tuple[bytes, bytes | None]]


class Table:
    """Rows by task. One process at a time can open the folder. Errors are `TableError`.

    Threads may use it concurrently, each for tasks of its own: with `TaskTable`.
    """

    def __init__(self, folder: Path) -> None:
        """Open it, or make it; a damaged folder is emptied. Raises: IllegalState, TableError (the disk is full)."""
        self.folder = folder
        self.emptied = 0  # how often the folder was emptied
        self.tasks = [task.to_bytes(_TASK, "big") for task in range(1 << 10)]
        self._to_flush = False
        self._writing = threading.RLock()
        self._logged, self._unlogged = WriteOptions(), WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[assignment, method-assign]
        # Shared with all batches: answers of `WorkBatch.soonest`, and the tasks of some keys.
        self.due: dict[tuple[int, bytes], int] = {}
        self.known: dict[bytes, int] = {}
        try:
            self._open()
        except TableDamaged as error:
            self.empty(error)

    def _open(self) -> None:
        try:
            self._rows = open_rows(self.folder)
        except Exception as error:
            if not of_disk(error):
                raise
            found = table_error(error, self.folder, "opened")
            if is_full(error) or isinstance(found, TableDamaged):
                raise found from error
            raise IllegalState(
                f"the folder {self.folder} can't be opened: {error}. Give each worker a folder of its own; what is "
                "in it is in the log, too, and may be deleted"
            ) from error
        self._get = self._rows.get

    def identity(self) -> str:
        """A random name of the folder, which it keeps until it is emptied."""
        with named(self.folder, "read"):
            found: bytes | None = self._rows.get(_IDENTITY)
        if found is None:
            found = os.urandom(4)
            with named(self.folder, "written"):
                self._rows.put(_IDENTITY, found)
        return found.hex()

    def empty(self, error: TableDamaged) -> None:
        """Delete all rows and marks, as files are damaged: the log has them. Raises: TableError, IllegalState."""
        log.error("%s; the folder is emptied, and the state is read from the log again", error)
        self.emptied += 1
        release_frames(error)
        with suppress(TableError, AttributeError):  # it was not open
            self.close()
        with named(self.folder, "emptied"):
            Rdict.destroy(str(self.folder))
        self._to_flush = False
        self.due.clear()
        self._open()

    def get(self, task: int, row: bytes, *, keep: bool = True) -> bytes | None:
        try:
            value: bytes | None = self._get(self.tasks[task] + row)
        except Exception as error:
            if not of_disk(error):
                raise
            raise table_error(error, self.folder, "read") from error
        return value

    def scan(self, task: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows from ``low`` up to ``high`` (not included), in order, as of now."""
        prefix = self.tasks[task]
        return _below(prefix + high, Walk(self._rows, self.folder, prefix + low))

    def write(
        self, changes: Iterable[tuple[int, Rows]], marks: dict[int, Mark], *, logged: bool = True
    ) -> None:
        """Change rows of tasks, and their marks, in one step.

        Without ``logged`` it is faster, but a crash before `flush` undoes the changes.
        """
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for task, rows in changes:
            prefix = self.tasks[task]
            for row, value in rows:
                if value is None:
                    delete(prefix + row)
                else:
                    put(prefix + row, value)
        for task, mark in marks.items():
            put(_MARKS + self.tasks[task], "/".join(map(str, (_VERSION, *mark))).encode())
        with self._writing, named(self.folder, "written"):
            if logged:
                self.flush()  # otherwise a crash could lose only the earlier changes
            self._rows.write(batch, self._logged if logged else self._unlogged)
            self._to_flush = not logged

    def flush(self) -> None:
        with self._writing:
            if self._to_flush:
                with named(self.folder, "written"):
                    self._rows.flush()
                self._to_flush = False

    def mark(self, task: int) -> Mark | None:
        """The mark of a task; None if the task has no rows here."""
        with named(self.folder, "read"):
            data = self._rows.get(_MARKS + self.tasks[task])
        if data is None:
            return None
        version, topic_id, *numbers = data.decode().split("/")
        if version != _VERSION:
            return None
        return Mark(topic_id, *map(int, numbers))

    def clear(self, task: int) -> None:
        prefix = self.tasks[task]
        with named(self.folder, "written"):
            self._rows.delete(_MARKS + prefix)
            self._rows.delete_range(prefix, (task + 1).to_bytes(_TASK, "big"))

    def close(self) -> None:
        with named(self.folder, "closed"):
            self._rows.close()


class TaskTable:
    """The rows of a `Table`, for one thread of several.

    Rows that were looked up lately are kept in memory, unless the caller says that another look-up is unlikely: to
    keep a row takes as long as RocksDB takes to find it.
    One thread looks up, and another one may write: rows that the first does not look up until they are written,
    because it finds them in the batch that is being committed (`WorkBatch`).
    """

    def __init__(self, table: Table) -> None:
        self.due: dict[tuple[int, bytes], int] = {}  # depends on what the thread's batches changed
        self.known = table.known
        self._table, self.scan = table, table.scan
        # By task and row. Each has at most about `_KEPT_BYTES`: when the first is full, the other is dropped.
        self._recent: dict[bytes, bytes | None] = {}
        self._older: dict[bytes, bytes | None] = {}
        self._room = _KEPT_BYTES
        self._tasks = table.tasks

    def get(self, task: int, row: bytes, *, keep: bool = True) -> bytes | None:
        if not keep:
            return self._table.get(task, row)
        place = self._tasks[task] + row
        value: bytes | None = self._recent.get(place, _MISSING)
        if value is not _MISSING:
            return value
        value = self._older.get(place, _MISSING)
        if value is _MISSING:
            value = self._table.get(task, row)
        self._room -= len(place) + (0 if value is None else len(value)) + _KEPT_OVERHEAD
        if self._room < 0:
            self._older, self._recent, self._room = self._recent, {}, _KEPT_BYTES
        self._recent[place] = value
        return value

    def write(self, changes: Sequence[tuple[int, Rows]], marks: dict[int, Mark]) -> None:
        """As `Table.write`. Raises: TableError; then call `forget`."""
        self._table.write(changes, marks)
        for task, rows in changes:
            prefix = self._tasks[task]
            for row, value in rows:
                place = prefix + row
                if place in self._recent or place in self._older:
                    self._recent[place] = value
                    self._room -= 0 if value is None else len(value)

    def forget(self) -> None:
        """Forget all rows that are in memory, as others may have written them."""
        self._recent, self._older, self._room = {}, {}, _KEPT_BYTES


def _below(end: bytes, walk: Walk) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a walk up to ``end``, without their task."""
    raw = None
    for raw, value in walk.rows:
        if raw >= end:
            return
        yield raw[_TASK:], value
    walk.check(raw)
