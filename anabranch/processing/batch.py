"""The batch of a worker: what handlers wrote and changed, in memory until one commit takes it.

Handlers change a batch through a `HandlerContext`, one for each call, which can undo what the call did. A batch is
an overlay: its rows hide the stored ones, or those of the batch that is being committed. Rows of tables that others
write, too, hide those of one snapshot (`BatchTables`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from heapq import merge
from itertools import chain, groupby, islice
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias

from anabranch.client.arrow import columns_of
from anabranch.errors import (
    AnabranchError,
    BeginAgainError,
    EventTooLarge,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    SnapshotExpired,
    TooManyLocks,
)
from anabranch.ports import TableError
from anabranch.protocol.limits import (
    LATEST,
    Room,
    check_event,
    check_headers,
    headers_size,
)
from anabranch.protocol.partitioner import task_of
from anabranch.reading.slices import Piece
from anabranch.tracing import traces_of
from anabranch.types import Event, Headers

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.batches.columns_write import EventColumns

Written: TypeAlias = "tuple[bytes | None, bytes | None, Headers | None, int | None]"
# (dict of rows, row, its former value), (list of outputs, output, its size) or (the counts, metric, 1).
Undo: TypeAlias = "tuple[Any, Any, Any]"
SLICE_BYTES = 256 << 10  # how much input is read before it is handled
_READ_AHEAD = 4  # a commit's input has at most this many times the bytes that it may write
_ROW_BYTES = 48  # overhead of an event or a row
_INCARNATION = 2  # bytes of the incarnation, before a row in the state stream
_KNOWN_KEYS = 20_000
_MOST_REFUSED = 3  # values of a row
_MOST_TRACED = 256  # events of a batch whose trace contexts are looked for
_MISSING: Any = object()
_TIME = 8  # bytes of a time
_NUMBER = 2  # bytes of a store's number
_NEVER = 1 << 63
_LAST = b"\xff" * (_TIME + 1)
LEAST: tuple[float, int] = (1, 1)  # the limits of a batch that has one event or timer


class Limits:
    """Size limits of the outputs' events and of the state's rows. Operators may change them at any time."""

    def __init__(
        self, state: str = "", ask: Callable[[Iterable[str]], Mapping[str, Room]] | None = None
    ) -> None:
        """``state``: the state stream. ``ask``: as `Client.check_outputs`."""
        self.state, self._ask = state, ask
        self.known: dict[str, Room] = {}

    def learn(self, streams: Iterable[str]) -> None:
        """Ask for the limits of these streams. Raises: as `Client.check_outputs`."""
        if self._ask is not None:
            self.known |= self._ask(streams)

    def have_changed(self, streams: Iterable[str]) -> bool:
        """Ask again. Returns whether limits of these streams or of the state changed. Raises: as `learn`."""
        before = dict(self.known)
        self.learn({*streams, self.state})
        return any(
            old is None or old.most != room.most or room.latest < old.latest
            for stream, room in self.known.items()
            if (old := before.get(stream)) is not room
        )

    def check(self, stream: str, key: bytes | None, size: int, timestamp: int | None) -> None:
        """Check an event by the stream's limits. Before it refuses an event, it asks for the limits again.

        Raises: InvalidArgument, EventTooLarge.
        """
        try:
            self.known.get(stream, Room()).check(key, size, timestamp)
        except (EventTooLarge, InvalidArgument):
            self.known.pop(stream, None)
            with suppress(AnabranchError):  # then the commit checks it
                self.learn((stream,))
            self.known.get(stream, Room()).check(key, size, timestamp)


class TaskRows(Protocol):
    """Rows by task, as committed or as a batch will leave them.

    ``due`` and ``known`` are shared with all batches on top: answers of `WorkBatch.soonest`, and the tasks of some
    keys.
    """

    due: dict[tuple[int, bytes], int]
    known: dict[bytes, int]

    def get(self, task: int, row: bytes, *, keep: bool = True) -> bytes | None:
        """The value of a row. ``keep``: whether another batch is likely to look it up again."""
        ...

    def scan(self, task: int, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows from ``low`` up to ``high`` (not included), in order, as of the first step of the iterator."""
        ...


class WorkBatch:
    """A batch: outputs and changed rows of the next commit. For one thread."""

    def __init__(self, below: TaskRows, task_count: int, limits: Limits | None = None) -> None:
        """``below``: what this batch is computed on: the stored rows, or the batch that is being committed."""
        self.limits = limits or Limits()
        of_row = self.limits.known.get(self.limits.state, Room()).most
        self.most_of_row = inf if of_row is None else of_row - _INCARNATION
        self.open = True
        self.size = 0  # bytes of outputs and changes, about
        self.events = 0  # events that were handled, of how many input commits
        self.of_commits = 0
        self.limit: tuple[float, int] = (inf, 0)  # how many events and bytes it may have
        self.alone: Event | None = None  # the event of a batch that may have only one
        self.outputs: dict[str, list[Written | pa.RecordBatch]] = {}  # events and batches in order
        self.batched = set[str]()  # streams whose outputs may include Arrow batches
        self.rows: dict[int, dict[bytes, bytes | None]] = {}
        self.counts = Counter[tuple[str, ...]]()  # metrics to add when it is committed
        self.pieces: list[Piece] = []  # the input that was handled
        self.left: list[Piece] = []  # input that is read and not handled
        # Whether no event is for this batch any more: timers are left, which the next batch has to fire before any
        # event, or the next input commit is for a later batch.
        self.is_ended = False
        self.commits = 0  # input commits that were handled to their ends
        self.most_commits = inf  # input commits that this batch may have
        self.times: dict[int, int] = {}  # event times of tasks that were asked for
        # Whether an event's time is too far ahead, by the clock of the thread that handles it.
        self.is_ahead: Callable[[Event], bool] = lambda _: False
        self.tables: BatchTables | None = None  # None: the program has no tables
        # Trace contexts of the input, once all is handled; None if the worker does not trace.
        self.traces: set[bytes] | None = None
        self._read = 0  # bytes of input
        self._below = below
        self._task_count = task_count
        self.known: dict[bytes, int] = below.known
        self.due: dict[tuple[int, bytes], int] = below.due

    def note_input(self, handled: Sequence[Piece], left: list[Piece], *, read: int) -> None:
        """Note pieces of input. ``left``: what is not handled. ``read``: bytes that were just read."""
        self._read += read
        self.left = left
        self.pieces += handled

    def add_output(self, stream: str, event: Written) -> None:
        """Add an event that no handler wrote, after all others."""
        self.outputs.setdefault(stream, []).append(event)

    def is_full(self, most: int) -> bool:
        """Whether the batch has to be committed now. ``most``: bytes that a commit should have."""
        return self.is_ended or self.size >= most or self._read >= _READ_AHEAD * most

    def close(self) -> bool:
        """Take no more changes, because all events are handled. Returns whether the batch has input or effects."""
        self.open = False
        has_any = bool(self.pieces or self.rows or self.outputs)
        for piece in self.pieces:
            self.counts["processor_events_in", piece.stream] += len(piece.events)
        if self.traces is not None:
            events = chain.from_iterable(piece.events for piece in self.pieces)
            self.traces |= traces_of(islice(events, _MOST_TRACED))
        if self.tables is None:  # else they may have to be handled again
            self.pieces.clear()  # else the events would stay in memory until the commit has ended
        return has_any

    def ends_before(self, commit: Piece) -> bool:
        """Whether an input commit, which begins with this piece, is for a later batch because of the tables."""
        if self.tables is None or commit.is_inside:
            return False
        return self.commits >= self.most_commits or self.tables.is_before(commit)

    def set_below(self, table: TaskRows) -> None:
        """Note that the batch below is stored, so that rows are read from the table."""
        self._below = table

    def task_of(self, key: bytes) -> int:
        task = self.known.get(key, -1)
        if task < 0:
            task = task_of(key, self._task_count)
            if len(self.known) < _KNOWN_KEYS:
                self.known[key] = task
        return task

    def get(self, task: int, row: bytes, *, keep: bool = True) -> bytes | None:
        """The value of a row of a task, with the changes of this batch. ``keep``: as of `TaskRows`."""
        changed = self.rows.get(task)
        if changed is not None:
            value: bytes | None = changed.get(row, _MISSING)
            if value is not _MISSING:
                return value
        return self._below.get(task, row, keep=keep)

    def soonest(self, task: int, kind: bytes, stores: Collection[bytes]) -> int:
        """A time before which no row of this kind and of these stores is due."""
        found = self.due.get((task, kind))
        return self.look_soonest(task, kind, stores) if found is None else found

    def look_soonest(self, task: int, kind: bytes, stores: Collection[bytes]) -> int:
        """`soonest`, by a scan from the former answer on: earlier rows belong to other stores."""
        low = len(kind)
        high = low + _TIME
        start = kind + self.due.get((task, kind), 0).to_bytes(_TIME, "big")
        rows = (row for row, _ in self.scan(task, start, kind + _LAST))
        row = next((row for row in rows if row[high : high + _NUMBER] in stores), None)
        due = _NEVER if row is None else int.from_bytes(row[low:high], "big")
        self.due[task, kind] = due
        return due

    def scan(
        self, task: int, low: bytes, high: bytes
    ) -> Generator[tuple[bytes, bytes], None, None]:
        """Rows from ``low`` up to ``high`` (not included), in order, as of the first step of the iterator."""
        changed: Mapping[bytes, bytes | None] = self.rows.get(task, {})
        ours = sorted((row, changed[row]) for row in changed if low <= row < high)
        stored = self._below.scan(task, low, high)
        # This batch's version of a row comes first, and hides the stored one.
        for row, same in groupby(merge(ours, stored, key=itemgetter(0)), itemgetter(0)):
            value = next(same)[1]
            if value is not None:
                yield row, value


class BatchConflict(BeginAgainError):
    """Others wrote rows that a batch has read: it has no effect, and is handled again.

    ``table`` and ``key`` name the changed row; empty if that is not known.
    """

    def __init__(self, message: str, *, table: str = "", key: bytes = b"") -> None:
        super().__init__(message)
        self.table, self.key = table, key

    @classmethod
    def of(cls, error: AnabranchError) -> BatchConflict:
        """The conflict that ended a batch's transaction."""
        if isinstance(error, LocksBroken):
            return cls(str(error), table=error.table, key=error.key)
        return cls(str(error))


class BatchTooBig(BeginAgainError):
    """A batch changes more state than a commit may. Nothing of it has an effect; smaller batches take its events.

    ``error``: the refusal of its commit.
    """

    batch: WorkBatch
    error: EventTooLarge

    @classmethod
    def of(cls, batch: WorkBatch, error: EventTooLarge) -> BatchTooBig:
        """The error of a batch whose commit was refused with ``error``."""
        made = cls(str(error))
        made.batch, made.error = batch, error
        return made


class RowRefused(BatchConflict):
    """A derivation of a table refuses a row of the batch, which has no effect, and is handled again.

    ``value``: the row. ``error``: of the derivation, such as `UniqueViolation`, or of its function.
    """

    def __init__(
        self, error: Exception, *, table: str = "", key: bytes = b"", value: bytes | None = None
    ) -> None:
        super().__init__(str(error), table=table, key=key)
        self.value, self.error = value, error


class Refusal(NamedTuple):
    """The error of a derivation for a row, and the last values of the row that it refused."""

    error: Exception
    values: tuple[bytes | None, ...]

    def holds_for(self, value: bytes | None) -> bool:
        """Whether a value is refused: one of these; after `_MOST_REFUSED`, as handlers make new ones, any."""
        return value in self.values or len(self.values) >= _MOST_REFUSED


class Reads(Protocol):
    """Reads of tables at one snapshot: a `TableTransaction`, or in tests a dict of rows."""

    @property
    def timestamp(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None: ...

    def scan(
        self,
        table: str,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        reverse: bool = False,
        lock: bool = True,
    ) -> Iterator[tuple[bytes, bytes]]: ...

    def abort(self) -> None: ...


class Source(Protocol):
    """Begins the reads of batches.

    ``near``: inputs that are ordered with the tables by commit timestamps. ``committed_at``: the last commit.
    """

    committed_at: int

    @property
    def near(self) -> Collection[str]: ...

    def begin(self, least: int) -> Reads:
        """Read all tables as of one moment, this hybrid time or later."""
        ...

    def get_at(self, table: str, key: bytes, at: int | datetime) -> bytes | None: ...


class BatchTables:
    """The tables as one batch sees them. ``rows``: what its handlers wrote. For one thread."""

    def __init__(self, source: Source, lock_bytes: int) -> None:
        """``lock_bytes``: what each lock adds to a batch's size, so that the batch ends before it has too many."""
        self.rows: dict[str, dict[bytes, bytes | None]] = {}
        self.reads: Reads | None = None  # None before the first read
        # Locked row -> number of its first input commit, and the task of that event.
        self.places: dict[tuple[str, bytes], tuple[int, int]] = {}
        self.refused: Mapping[tuple[str, bytes], Refusal] = {}  # by table and key
        self._source, self._lock_bytes = source, lock_bytes
        self._least = 0
        self._trouble: Exception | None = None

    def note(self, pieces: Iterable[Piece]) -> None:
        """Let the snapshot include the commits of this input, if it is taken later."""
        times = (piece.timestamp for piece in pieces if piece.stream in self._source.near)
        self._least = max(self._least, *times, 0)

    def is_before(self, commit: Piece) -> bool:
        """Whether the snapshot was taken, and does not include this commit of an input."""
        return (
            self.reads is not None
            and commit.stream in self._source.near
            and commit.timestamp > self.reads.timestamp
        )

    def check(self) -> None:
        """Raise the error that ended the batch, even if a handler has caught it."""
        if self._trouble is not None:
            raise self._trouble

    def get(self, at: HandlerContext, table: str, key: bytes, *, lock: bool) -> bytes | None:
        """A row, as of the snapshot, with what this batch wrote. Raises: TooManyLocks; as `check`."""
        written = self._written(at, table, key)
        if key in written:
            return written[key]
        try:
            found = self.begin(at).get(table, key, lock=lock)
        except (AnabranchError, TableError) as error:
            self._failed(at, error)
        if lock and (table, key) not in self.places:
            self.places[table, key] = at.batch.commits, at.task
            at.batch.size += self._lock_bytes
        return found

    def scan(
        self, at: HandlerContext, table: str, low: bytes, high: bytes | None,
        *, reverse: bool, lock: bool,
    ) -> Iterator[tuple[bytes, bytes]]:  # fmt: skip
        """Rows from ``low`` up to ``high`` (not included; None: to the end), in order. Raises: as `get`."""
        written = {} if at.own_key else self.rows.get(table, {})
        inside = (key for key in written if low <= key and (high is None or key < high))
        ours = [(key, written[key]) for key in sorted(inside, reverse=reverse)]
        theirs = self._walk(at, table, low, high, reverse=reverse, lock=lock)
        # This batch's version of a row comes first, and hides the other one.
        rows = merge(ours, theirs, key=itemgetter(0), reverse=reverse)
        for key, same in groupby(rows, itemgetter(0)):
            value = next(same)[1]
            if value is not None:
                yield key, value

    def _walk(
        self, at: HandlerContext, table: str, low: bytes, high: bytes | None,
        *, reverse: bool, lock: bool,
    ) -> Iterator[tuple[bytes, bytes | None]]:  # fmt: skip
        try:
            rows = self.begin(at).scan(table, low, high, reverse=reverse, lock=lock)
            if lock:
                at.batch.size += self._lock_bytes
            while (row := next(rows, None)) is not None:
                yield row
                self.check()
        except (AnabranchError, TableError) as error:
            self._failed(at, error)

    def get_at(self, table: str, key: bytes, at: int | datetime) -> bytes | None:
        """A row as of a time, without a lock. Raises: SnapshotExpired, InvalidArgument; as `check`."""
        self.check()
        try:
            return self._source.get_at(table, key, at)
        except (SnapshotExpired, InvalidArgument):
            raise  # of the event's time
        except (AnabranchError, TableError) as error:
            self._trouble = error
            raise

    def put(self, at: HandlerContext, table: str, key: bytes, value: bytes | None) -> None:
        """Write a row, or delete it. Raises: InvalidArgument, EventTooLarge; as `check`; as in ``refused``."""
        self.check()
        refusal = self.refused.get((table, key))
        if refusal is not None and refusal.holds_for(value):
            raise refusal.error.with_traceback(None)
        size, limits = len(key) + len(value or b""), at.batch.limits
        room = limits.known.get(table)
        if room is not None and room.most is not None and size > room.most:
            limits.check(table, key, size, None)
        at.change(self.rows.setdefault(table, {}), key, value)

    def committed(self, timestamp: int) -> None:
        """Let the next batch see what this one committed."""
        self._source.committed_at = timestamp

    def close(self) -> None:
        """End the reads, unless a commit has ended them."""
        if self.reads is not None and not self.reads.is_over:
            self.reads.abort()

    def _written(self, at: HandlerContext, table: str, key: bytes) -> Mapping[bytes, bytes | None]:
        """Rows that the batch wrote to a table. Concurrent handlers see only the row of their own key."""
        self.check()
        return self.rows.get(table, {}) if not at.own_key or key == at.key else {}

    def begin(self, at: HandlerContext | None = None) -> Reads:
        """The reads, which begin with the first call. ``at``: the call that waits for them. Raises: as `get`."""
        self.check()
        if self.reads is None:
            if at is not None:
                at.begins = True
            try:
                self.reads = self._source.begin(max(self._least, self._source.committed_at))
            finally:
                if at is not None:
                    at.begins = False
        return self.reads

    def _failed(self, at: HandlerContext, error: Exception) -> NoReturn:
        """Raise an error of a read, which ends the batch, unless the event that is handled is the cause."""
        if isinstance(error, TooManyLocks):
            if at.batch.commits == 0:
                raise error
            error = BatchConflict(str(error))
        elif isinstance(error, LocksBroken | SnapshotExpired):
            error = BatchConflict.of(error)
        self._trouble = self._trouble or error
        raise self._trouble


class HandlerContext:
    """A call of a handler: its batch, and the task, key, time and value (undecoded) of its event.

    ``name``: the decoded key, if the program decodes keys. ``over``: whether the event is done. ``own_key``:
    whether the call may use only this key's rows, because other handlers run concurrently. ``strays``: collects the
    errors of asyncio tasks that write after the event is done. ``seen``: how often `Handlers.slow_tasks` has found
    the call at work on its event. ``begins``: whether the call waits for its batch's snapshot, which would take as
    long for any other event. ``removals``: raised whenever rows that the call has found may be deleted.
    ``placed``: whether the task is certainly that of the key, because the reader has computed it from the key.
    """

    __slots__ = (
        "batch", "begins", "key", "name", "over", "own_key", "placed", "removals", "seen", "strays", "task",
        "timestamp", "undo", "value", "waited",
    )  # fmt: skip

    def __init__(self, batch: WorkBatch) -> None:
        self.batch = batch
        self.task = -1
        self.seen = self.removals = 0
        self.key: bytes | None = None
        self.name: Any = None
        self.timestamp: int | None = None
        self.value: bytes | None = None
        # An event of a join that waited, and its undecoded value.
        self.waited: tuple[Event, bytes | None] | None = None
        self.over = self.own_key = self.begins = self.placed = False
        self.strays: list[IllegalState] | None = None
        self.undo: list[Undo] = []

    def write(self, stream: str, event: Written) -> None:
        """Add an event to the outputs.

        Raises: IllegalState (the batch is not open), InvalidArgument, EventTooLarge (no commit can take it).
        """
        batch = self.batch
        if not batch.open:
            _refuse()
        value, key, headers, timestamp = event
        if (
            type(key) is bytes
            and type(value) is bytes
            and (timestamp is None or (type(timestamp) is int and 0 < timestamp <= LATEST))
        ):
            size = len(value) + len(key)
        else:  # the full check; the condition above is its fast path
            check_event(key, value, timestamp)
            size = len(value or b"") + len(key or b"")
        whole = size
        if headers is not None:
            # A copy: the handler's own object may change later, or be an iterator.
            pairs = check_headers(headers)
            event = value, key, pairs, timestamp
            whole += headers_size(pairs)
        room = batch.limits.known.get(stream)
        if room is not None:
            _, most, is_table, latest = room
            late = timestamp is not None and timestamp > latest
            if late or is_table or (most is not None and whole > most):
                batch.limits.check(stream, key, whole, timestamp)
        found = batch.outputs.get(stream)
        if found is None:
            found = batch.outputs[stream] = []
        found.append(event)
        self.undo.append((found, event, size + _ROW_BYTES))
        batch.size += size + _ROW_BYTES

    def write_batch(self, stream: str, rows: pa.RecordBatch) -> None:
        """Add the rows of an Arrow batch to the outputs. Raises: as `write`."""
        batch = self.batch
        if not batch.open:
            _refuse()
        size, room = rows.nbytes, batch.limits.known.get(stream)
        for columns in columns_of(rows):
            if room is not None and not _has_room(columns, size, room):
                for (_, key, _, timestamp), whole in zip(
                    columns.events(), columns.sizes().tolist(), strict=True
                ):
                    batch.limits.check(stream, key, whole, timestamp)
        found = batch.outputs.setdefault(stream, [])
        found.append(rows)
        batch.batched.add(stream)
        self.undo.append((found, rows, size))
        batch.size += size

    def put(self, task: int, row: bytes, value: bytes | None) -> None:
        """Set a row's value, or delete the row if the value is None.

        Raises: IllegalState (the batch is not open), EventTooLarge (no commit can take it).
        """
        batch = self.batch
        if not batch.open:
            _refuse()
        size, here = 0 if value is None else len(value), len(row)
        if here + size > batch.most_of_row:
            batch.limits.check(batch.limits.state, row, _INCARNATION + here + size, None)
        changed = batch.rows.get(task)
        if changed is None:
            changed = batch.rows[task] = {}
        before = changed.get(row, _MISSING)  # `change`, inlined for speed
        batch.size += size + here + _ROW_BYTES if before is _MISSING else size
        self.undo.append((changed, row, before))
        changed[row] = value

    def change(self, rows: dict[bytes, bytes | None], row: bytes, value: bytes | None) -> None:
        """Set a row in some of the batch's rows."""
        batch, before = self.batch, rows.get(row, _MISSING)
        if before is _MISSING:
            batch.size += len(row) + _ROW_BYTES
        self.undo.append((rows, row, before))
        rows[row] = value
        batch.size += len(value or b"")

    def put_due(self, task: int, kind: bytes, due: int, place: bytes, value: bytes) -> None:
        """Set a row of this kind, due at a time."""
        batch = self.batch
        self.put(task, kind + due.to_bytes(_TIME, "big") + place, value)
        if (soonest := batch.due.get((task, kind))) is not None:
            batch.due[task, kind] = min(soonest, due)

    def count(self, *what: str) -> None:
        """Add 1 to a metric once the batch is committed."""
        self.batch.counts[what] += 1
        self.undo.append((self.batch.counts, what, 1))

    def take_back(self) -> None:
        """Undo all changes of a handler that failed."""
        self.removals += 1
        if not self.undo:
            return
        batch = self.batch
        for where, what, before in reversed(self.undo):
            if where is batch.counts:
                where[what] -= before
            elif isinstance(where, list):
                # Other handlers may have appended to it meanwhile.
                at = next(n for n in reversed(range(len(where))) if where[n] is what)
                del where[at]
                batch.size -= before
            else:
                batch.size -= len(where[what] or b"")
                if before is _MISSING:
                    batch.size -= len(what) + _ROW_BYTES
                    del where[what]
                else:
                    where[what] = before
        self.undo.clear()
        batch.rows = {task: rows for task, rows in batch.rows.items() if rows}
        batch.outputs = {stream: some for stream, some in batch.outputs.items() if some}


def _has_room(columns: EventColumns, size: int, room: Room) -> bool:
    """Whether a stream accepts all of these events, which have this many bytes in all."""
    if len(columns.timestamps) and int(columns.timestamps.max()) > room.latest:
        return False
    if room.is_table and not columns.has_row_keys:
        return False
    return room.most is None or size <= room.most or int(columns.sizes().max()) <= room.most


def _refuse() -> NoReturn:
    raise IllegalState("this batch is no longer open: it is being committed, or was dropped")


_CONTEXT: ContextVar[HandlerContext | None] = ContextVar("context", default=None)


def _forget() -> None:
    """Refuse writes in a forked child, whose copy of the batch is never committed."""
    at = _CONTEXT.get()
    if at is not None:
        at.over, at.strays, at.batch.open = True, None, False


os.register_at_fork(after_in_child=_forget)


def begin_context(batch: WorkBatch) -> HandlerContext:
    """Let handlers that are called from now on write to this batch."""
    at = HandlerContext(batch)
    _CONTEXT.set(at)
    return at


def current_context() -> HandlerContext:
    """The current call of a handler. Raises `IllegalState` if there is no such call, or its batch has ended."""
    at = _CONTEXT.get()
    if at is None or at.over or not at.batch.open:
        what = "" if at is None else "this task went on after its event was handled; "
        error = IllegalState(
            f"{what}stores and outputs are for handlers, while their event is handled: elsewhere write in a "
            "transaction of its own"
        )
        if at is not None and at.strays is not None:
            at.strays.append(error)
        raise error
    return at


def outside() -> bool:
    """Whether the caller was not called by a handler."""
    return _CONTEXT.get() is None
