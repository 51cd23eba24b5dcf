"""Tables in a processor: what a batch reads with locks at one snapshot, and the rows that its commit writes.

The reads are those of a transaction on a replica, which the batch's commit ends with its positions. Rows that
handlers write stay in the batch until then, so that those of a failed handler can be undone. If a lock is broken,
the batch has no effect: it is handled again at a later snapshot (`Conflicts` decides how much of it, and when).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from anabranch.backoff import Backoff
from anabranch.client.client import Client
from anabranch.controller.monitor import Numbers
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    NotReady,
    NumberOverflow,
    UniqueViolation,
)
from anabranch.ports import Clock, TableError
from anabranch.presentation.rows import bytes_text
from anabranch.processing.batch import (
    BatchConflict,
    BatchTables,
    HandlerContext,
    Refusal,
    RowRefused,
    WorkBatch,
    current_context,
)
from anabranch.processing.stores import after
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import is_plain
from anabranch.protocol.limits import LOCKS, check_row_key
from anabranch.tables.rocks import TableDamaged, release_frames, table_error
from anabranch.types import TaskOwnership
from anabranch.values import Stream

if TYPE_CHECKING:
    from anabranch.client.replica import Replica
    from anabranch.client.table_transaction import TableTransaction
    from anabranch.client.transaction import Transaction
    from anabranch.tables.indexes import Index
    from anabranch.tables.snapshot import TableSnapshot

log = logging.getLogger("anabranch.processor")
_ALONE = (
    3  # broken locks of a row, after which the input commit that locks it gets a batch of its own
)
_BAD_ROW = (UniqueViolation, NumberOverflow, InvalidArgument)  # as a derivation finds
_FOLDER = "tables"  # in a worker's folder


class SharedTable:
    """A table that others write, too. Handlers read it with locks, and write it in their commit.

    Keys are bytes, or text as UTF-8, if there is no codec for them.
    """

    def __init__(self, stream: Stream[Any, Any], *, text_keys: bool) -> None:
        self.name = stream.name
        self.stream = stream
        self._text_keys = text_keys

    def get(
        self, key: Any, default: Any = None, *, lock: bool = True, at: int | datetime | None = None
    ) -> Any:
        """The value of a key, or ``default``. The commit fails if others write the key before, unless not ``lock``.

        ``at``: as of this commit timestamp, such as that of the event, without a lock, and without what this batch
        wrote.

        Raises: IllegalState (not called by a handler), InvalidArgument, UndecodableValue, TooManyLocks;
        SnapshotExpired (the table keeps no versions of ``at``).
        """
        context, tables, raw = self._place(key)
        if at is not None:
            data = tables.get_at(self.name, raw, at)
        else:
            if lock:
                self._check_alone(context, raw)
            data = tables.get(context, self.name, raw, lock=lock)
        return default if data is None else self.stream.decode_value(raw, data)

    def __getitem__(self, key: Any) -> Any:
        """As `get`. Raises KeyError if there is no row."""
        raw, data = self._locked(key)
        if data is None:
            raise KeyError(key)
        return self.stream.decode_value(raw, data)

    def __contains__(self, key: Any) -> bool:
        return self._locked(key)[1] is not None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a row, whether the key has one or not. Raises: IllegalState, InvalidArgument, EventTooLarge."""
        context, tables, raw = self._place(key)
        self._check_alone(context, raw)
        if value is None:
            raise InvalidArgument(f"a row of {self.name} is not None: `del` takes it away")
        tables.put(context, self.name, raw, self.stream.encode(None, value)[1])

    def __delitem__(self, key: Any) -> None:
        """Delete a row, if it is there. Raises: as setting it."""
        context, tables, raw = self._place(key)
        self._check_alone(context, raw)
        tables.put(context, self.name, raw, None)

    def items(
        self, low: bytes | str = b"", high: bytes | str | None = None, *, prefix: bytes | str = b"",
        reverse: bool = False, lock: bool = True,
    ) -> Iterator[tuple[Any, Any]]:  # fmt: skip
        """Rows from ``low`` up to ``high`` (not included), in byte order of their keys.

        The range that was iterated over is locked, including keys without a row. Raises: as `get`.
        """
        context, tables = _tables()
        if lock and context.own_key:
            self._refuse("a range of keys")
        first = max(_bytes(low), _bytes(prefix))
        end = None if high is None else _bytes(high)
        if _bytes(prefix).rstrip(b"\xff"):
            last = after(_bytes(prefix))
            end = last if end is None else min(end, last)
        if end is not None and first >= end:
            return
        batch = context.batch
        for raw, data in tables.scan(context, self.name, first, end, reverse=reverse, lock=lock):
            yield self.stream.decode_row(raw, data)
            if current_context().batch is not batch:
                raise IllegalState(
                    f"rows of {self.name} are read while their event is handled: read them again"
                )

    def add(self, key: Any, number: int) -> NoReturn:
        """Refuse a change that commutes, as of `TableTransaction.add`. Raises: InvalidArgument."""
        raise InvalidArgument(
            f"a batch's commit can't add to rows of {self.name}, as a commit changes at most 64 rows in this way, "
            "and a batch may have more: read the row with a lock and write it; or write a stream of numbers, which "
            "another program adds up: client.transact(lambda txn: txn.add(…), consume=reader)"
        )

    min = max = add

    def __iter__(self) -> NoReturn:
        raise TypeError(f"iterate over the rows of {self.name} by items()")

    def _locked(self, key: Any) -> tuple[bytes, bytes | None]:
        context, tables, raw = self._place(key)
        self._check_alone(context, raw)
        return raw, tables.get(context, self.name, raw, lock=True)

    def _place(self, key: Any) -> tuple[HandlerContext, BatchTables, bytes]:
        context, tables = _tables()
        return context, tables, check_row_key(self._raw(key))

    def _raw(self, key: Any) -> Any:
        if self._text_keys and isinstance(key, str):
            return key.encode()
        return self.stream.encode_key(key)

    def _check_alone(self, at: HandlerContext, raw: bytes) -> None:
        if at.own_key and raw != at.key:
            self._refuse(f"key {raw!r:.100}")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidArgument(
            f"{what} of {self.name} is not this event's key, and others are handled concurrently: use "
            "concurrency=1, or read without a lock"
        )


def _tables() -> tuple[HandlerContext, BatchTables]:
    at = current_context()
    if at.batch.tables is None:
        raise IllegalState("this worker's program has no tables")
    return at, at.batch.tables


def _bytes(key: bytes | str) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if not isinstance(key, bytes):
        raise InvalidArgument(f"an end of a range is bytes or text, not {type(key).__name__}")
    return key


class SharedReplica:
    """Tables that a program reads without locks. Its worker opens one replica for all of its tasks."""

    def __init__(self, tables: Sequence[str], index: Mapping[str, Index] | None) -> None:
        self.tables, self.index = tuple(tables), index
        self.opened: Any = None  # the replica, while a worker runs

    def snapshot(
        self, at: int | datetime | None = None, *, fresh: bool = True, timeout: float | None = None
    ) -> TableSnapshot:
        """A snapshot of all its tables, as `ReadReplica.snapshot`. Close it, or use it as a context manager.

        Raises: IllegalState (no worker runs); as there.
        """
        if self.opened is None:
            raise IllegalState(
                f"the replica of {', '.join(self.tables)} is open while a worker runs the program"
            )
        found: TableSnapshot = self.opened.snapshot(at, fresh=fresh, timeout=timeout)
        return found


class WorkerTables:
    """The replicas of a worker: one for all tables that have locks, and those of `SharedReplica`."""

    def __init__(
        self, client: Client, folder: Path, tables: Collection[str],
        replicas: Sequence[SharedReplica], inputs: Iterable[str], *, threads: bool,
    ) -> None:  # fmt: skip
        """Raises: as `Client.replica`."""
        self.near: Collection[str] = ()
        self.committed_at = 0  # the last commit of any thread
        self.emptied = 0  # how often a folder was emptied
        self._stack = ExitStack()
        self._client, self._threads = client, threads
        self._is_open = False
        self._opening, self._noting = threading.Lock(), threading.Lock()
        self.replica: Replica | None = None
        self._replicas = replicas
        self._tables, self._place = tuple(tables), folder / _FOLDER
        self._places = [folder / f"{_FOLDER}-{number}" for number in range(len(replicas))]
        self._open()
        if not tables:
            return
        try:
            streams = [name for name in inputs if not is_plain(name)]
            numbers = client.control_partitions([*streams, self._tables[0]])
        except BaseException:
            self.close()
            raise
        self.near = frozenset(one for one in streams if numbers[one] == numbers[self._tables[0]])

    def _open(self) -> None:
        try:
            self._is_open = True
            if self._tables:
                self.replica = self._opened(self._place, self._tables, None)
            for place, one in zip(self._places, self._replicas, strict=True):
                one.opened = self._opened(place, one.tables, one.index)
        except BaseException:
            self.close()
            raise

    def _opened(
        self, place: Path, tables: Sequence[str], index: Mapping[str, Index] | None
    ) -> Replica:
        """A replica; a damaged folder is emptied."""
        client, threads = self._client, self._threads
        try:
            replica = client.replica(*tables, folder=place, threads=threads, index=index)
        except IllegalState as error:
            cause = error.__cause__
            if not (
                isinstance(cause, Exception)
                and isinstance(table_error(cause, place, "opened"), TableDamaged)
            ):
                raise
            self._delete(place, error)
            replica = client.replica(*tables, folder=place, threads=threads, index=index)
        return self._stack.enter_context(replica)

    def _delete(self, place: Path, error: Exception) -> None:
        log.error("%s; the folder is emptied, and the tables are read from the log again", error)
        self.emptied += 1
        release_frames(error)
        if place.exists():
            shutil.rmtree(place)

    def has(self, error: TableDamaged) -> bool:
        """Whether a damaged folder is a replica's, and not that of the worker's state."""
        return any(str(place) in str(error) for place in (self._place, *self._places))

    def empty(self, error: TableDamaged) -> None:
        """Delete the rows of a damaged folder: the log has them. `is_loaded` opens it again. Raises: OSError."""
        release_frames(error)
        self.close()
        for place in (self._place, *self._places):
            if str(place) in str(error):
                self._delete(place, error)

    def is_loaded(self, seconds: float) -> bool:
        """Wait for up to this long until all replicas have their tables, and return whether they do.

        Raises: as `ReadReplica.wait`; after `empty` as `Client.replica`.
        """
        with self._opening:  # several threads may come here after `empty`
            if not self._is_open:
                self._open()
        opened = [one.opened for one in self._replicas]
        for replica in [*opened, *([] if self.replica is None else [self.replica])]:
            try:
                replica.wait(1, {}, replica.deadline(seconds))
            except NotReady:
                return False
        return True

    def note_commit(self, timestamp: int) -> None:
        """Note a commit of any thread."""
        with self._noting:  # else a thread could lose another one's later commit
            self.committed_at = max(self.committed_at, timestamp)

    def close(self) -> None:
        """Close the replicas."""
        self.replica, self._is_open = None, False
        for one in self._replicas:
            one.opened = None
        self._stack.close()


class TaskTables:
    """The `Source` of the batches of one thread."""

    def __init__(self, tables: WorkerTables) -> None:
        self._tables = tables
        self._ownership: TaskOwnership | None = None
        self._past: TableSnapshot | None = None

    @property
    def near(self) -> Collection[str]:
        return self._tables.near

    @property
    def committed_at(self) -> int:
        return self._tables.committed_at

    @committed_at.setter
    def committed_at(self, timestamp: int) -> None:
        self._tables.note_commit(timestamp)

    def of_batch(self, ownership: TaskOwnership, batch_bytes: int) -> BatchTables | None:
        """The tables for a new batch of these tasks; None if the program has none."""
        if self._tables.replica is None:
            return None
        self._ownership = ownership
        return BatchTables(self, 2 * batch_bytes // LOCKS.value)

    def begin(self, least: int) -> TableTransaction:
        """As of `Source`. Raises: as `Replica.begin`."""
        replica, ownership = self._tables.replica, self._ownership
        if replica is None or ownership is None:
            raise IllegalState("the program has no tables")
        return replica.begin_tasks(ownership, least)

    def get_at(self, table: str, key: bytes, at: int | datetime) -> bytes | None:
        """As of `Source`. Raises: as `ReadReplica.snapshot`."""
        if self._tables.replica is None:
            raise IllegalState("the program has no tables")
        if self._past is None or self._past.timestamp != at:
            self._end_past()
            self._past = self._tables.replica.snapshot(at)
        return self._past.get(table, key)

    def _end_past(self) -> None:
        past, self._past = self._past, None
        if past is not None:
            past.close()

    def end_batch(self, tables: BatchTables | None) -> None:
        """Let the replica sweep versions that a batch has read."""
        self._end_past()
        if tables is not None:
            tables.close()


def write_rows(txn: Transaction | TableTransaction, tables: BatchTables) -> None:
    """Write the rows of a batch in its transaction. Raises: RowRefused; as its ``write`` or ``put``."""
    for table, rows in tables.rows.items():
        if txn is not tables.reads:  # nothing was read
            for key, value in rows.items():
                txn.write(table, value, key=key)
            continue
        for key, value in rows.items():
            try:
                if value is None:
                    tables.reads.delete(table, key)
                else:
                    tables.reads.put(table, key, value)
            except Exception as error:
                own = not isinstance(
                    error, AnabranchError | TableError
                )  # of a derivation's function
                if own or isinstance(error, _BAD_ROW):
                    raise RowRefused(error, table=table, key=key, value=value) from error
                raise


class Conflicts:
    """Decides how a batch's input is handled again after conflicts: in which batches, and after which pause.

    If a row's locks are broken `_ALONE` times, the first input commit that locks the row gets a batch of its own.
    The input commits before it are handled first, in another batch. For one thread.

    If a derivation refuses a row, smaller batches find the input commit with the event that wrote it: the order of
    rows in a larger batch is not that of its events. Then the event's call gets the error, as if it had failed.
    """

    def __init__(self, name: str, metrics: Numbers, clock: Clock) -> None:
        self._name, self._metrics, self._clock = name, metrics, clock
        self._log_at: dict[str, float] = {}  # by table: from when on a conflict is logged as INFO
        self._counts = Counter[tuple[str, bytes]]()
        self.refused: dict[tuple[str, bytes], Refusal] = {}  # as of `BatchTables`
        self.task: int | None = None  # whose event locks a row that was broken `_ALONE` times
        self._tries = 0
        self._cuts: deque[int] = deque()  # numbers of input commits of the next batches
        self._pauses = Backoff(
            defaults.FIRST_CONFLICT_PAUSE_S,
            defaults.LONGEST_CONFLICT_PAUSE_S,
            clock,
            # So that workers in conflict do not try again together.
            jitter=lambda: os.urandom(1)[0] / 255,
        )

    @property
    def most_commits(self) -> float:
        """How many input commits the next batch may have."""
        return self._cuts[0] if self._cuts else inf

    def note(self, conflict: BatchConflict, batch: WorkBatch) -> float:
        """Note that a batch has to be handled again. Returns the seconds to wait before."""
        if isinstance(conflict, RowRefused):
            self.task = None
            self._cuts.clear()
            self._cuts.append(max(1, batch.commits // 2))
            if batch.commits <= 1:
                row = conflict.table, conflict.key
                known = self.refused[row].values if row in self.refused else ()
                self.refused[row] = Refusal(conflict.error, (*known, conflict.value))
            return 0.0
        row = conflict.table, conflict.key
        self._counts[row] += 1
        self._tries += 1
        if conflict.table:
            self._metrics.add("processor_conflicts", conflict.table)
        self._log(conflict)
        self._cuts.clear()
        self.task = None
        if self._counts[row] >= _ALONE:
            places = {} if batch.tables is None else batch.tables.places
            before, self.task = places.get(row, (0, None))
            self._cuts += [before, 1] if before else [1]
        elif self._tries % _ALONE == 0 or not conflict.table:
            self._cuts.append(max(1, batch.commits // 2))
        return self._pauses.begin()

    def _log(self, conflict: BatchConflict) -> None:
        """Log a conflict: one of each table in `CONFLICT_LOG_S` seconds as INFO, others as DEBUG."""
        now, level = self._clock.monotonic(), logging.DEBUG
        if now >= self._log_at.get(conflict.table, -inf):
            self._log_at[conflict.table] = now + defaults.CONFLICT_LOG_S
            level = logging.INFO
        what = (
            f"Conflict in {conflict.table}, key {bytes_text(conflict.key[:100])}: another transaction wrote it."
            if conflict.table
            else f"Conflict: {conflict}."
        )
        text = "%s: %s The batch is handled again (try %d)."
        log.log(level, text, self._name, what, self._tries + 1)

    def passed(self) -> None:
        """Note that a batch is committed."""
        self._pauses.reset()
        self._tries = 0
        self.refused.clear()
        if self._cuts:
            self._cuts.popleft()
        if not self._cuts:
            self._counts.clear()

    def forget(self) -> None:
        """Forget all conflicts: the worker begins with other tasks, or again from their positions."""
        self._cuts.clear()
        self._counts.clear()
        self.refused.clear()
        self._tries = 0
