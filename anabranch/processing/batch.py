"""The batch of a worker: what handlers wrote and changed, in memory until one commit takes it.

Handlers change a batch through a `HandlerContext`, one for each call, which can undo what the call did. A batch is
an overlay: its rows hide the stored ones, or those of the batch that is being committed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from heapq import merge
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from anabranch.client.arrow import columns_of
from anabranch.errors import AnabranchError, EventTooLarge, IllegalState, InvalidArgument
from anabranch.protocol.limits import (
    LATEST,
    Room,
    check_event,
    check_headers,
    headers_size,
)
from anabranch.protocol.partitioner import task_of
from anabranch.reading.slices import Piece
from anabranch.types import Headers

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
_MISSING: Any = object()
_TIME = 8  # bytes of a time
_NUMBER = 2  # bytes of a store's number
_NEVER = 1 << 63
_LAST = b"\xff" * (_TIME + 1)


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

    def get(self, task: int, row: bytes) -> bytes | None: ...

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
        self.outputs: dict[str, list[Written | pa.RecordBatch]] = {}  # events and batches in order
        self.batched = set[str]()  # streams whose outputs may include Arrow batches
        self.rows: dict[int, dict[bytes, bytes | None]] = {}
        self.counts = Counter[tuple[str, ...]]()  # metrics to add when it is committed
        self.pieces: list[Piece] = []  # the input that was handled
        self.left: list[Piece] = []  # input that is read and not handled
        self.is_ended = (
            False  # whether timers are left, which the next batch has to fire before any event
        )
        self._slices = 0
        self._below = below
        self._task_count = task_count
        self.known: dict[bytes, int] = below.known
        self.due: dict[tuple[int, bytes], int] = below.due

    def note_input(self, handled: Sequence[Piece], left: list[Piece], *, read: bool) -> None:
        """Note pieces of input. ``left``: what is not handled. ``read``: whether they were just read."""
        self._slices += read
        self.left = left
        self.pieces += handled

    def is_full(self, most: int) -> bool:
        """Whether the batch has to be committed now. ``most``: bytes that a commit should have."""
        read = self._slices * SLICE_BYTES
        return self.is_ended or self.size >= most or read >= _READ_AHEAD * most

    def close(self) -> bool:
        """Take no more changes, because all events are handled. Returns whether the batch has input or effects."""
        self.open = False
        has_any = bool(self.pieces or self.rows or self.outputs)
        for piece in self.pieces:
            self.counts["processor_events_in", piece.stream] += len(piece.events)
        self.pieces.clear()  # else the events would stay in memory until the commit has ended
        return has_any

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

    def get(self, task: int, row: bytes) -> bytes | None:
        """The value of a row of a task, with the changes of this batch."""
        changed = self.rows.get(task)
        if changed is not None:
            value: bytes | None = changed.get(row, _MISSING)
            if value is not _MISSING:
                return value
        return self._below.get(task, row)

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


class HandlerContext:
    """A call of a handler: its batch, and the task, key, time and value (undecoded) of its event.

    ``name``: the decoded key, if the program decodes keys. ``over``: whether the event is done. ``own_key``:
    whether the call may use only this key's rows, because other handlers run concurrently. ``strays``: collects the
    errors of asyncio tasks that write after the event is done.
    """

    __slots__ = (
        "batch", "key", "name", "over", "own_key", "strays", "task", "timestamp", "undo", "value",
    )  # fmt: skip

    def __init__(self, batch: WorkBatch) -> None:
        self.batch = batch
        self.task = -1
        self.key: bytes | None = None
        self.name: Any = None
        self.timestamp: int | None = None
        self.value: bytes | None = None
        self.over = self.own_key = False
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
        size, here = len(value or b""), len(row)
        if here + size > batch.most_of_row:
            batch.limits.check(batch.limits.state, row, _INCARNATION + here + size, None)
        changed = batch.rows.get(task)
        if changed is None:
            changed = batch.rows[task] = {}
        before = changed.get(row, _MISSING)
        if before is _MISSING:
            batch.size += here + _ROW_BYTES
        self.undo.append((changed, row, before))
        changed[row] = value
        batch.size += size

    def put_due(self, task: int, kind: bytes, due: int, place: bytes, value: bytes) -> None:
        """Set a row of this kind, due at a time."""
        batch = self.batch
        self.put(task, kind + due.to_bytes(_TIME, "big") + place, value)
        if (task, kind) in batch.due:
            batch.due[task, kind] = min(batch.due[task, kind], due)

    def count(self, *what: str) -> None:
        """Add 1 to a metric once the batch is committed."""
        self.batch.counts[what] += 1
        self.undo.append((self.batch.counts, what, 1))

    def take_back(self) -> None:
        """Undo all changes of a handler that failed."""
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
