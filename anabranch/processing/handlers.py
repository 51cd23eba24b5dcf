"""Calls handlers one by one, concurrently, or with Arrow batches. Changes of a failed call are undone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isawaitable
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from anabranch.controller.monitor import Numbers
from anabranch.errors import IllegalState
from anabranch.processing.batch import HandlerContext, TaskRows, WorkBatch, begin_context
from anabranch.processing.failures import (
    FAILURES,
    PATIENCE_S,
    Case,
    Failures,
    failure_in,
    failure_of,
    is_from_outside,
    new_pauses,
)
from anabranch.processing.metrics import TABLE
from anabranch.processing.program import Awaited, Program, Registered, check_result
from anabranch.processing.timers import TimeOfTasks, Timer, Windows
from anabranch.protocol.legal_names import is_plain
from anabranch.reading.slices import Piece
from anabranch.reading.store_lookup import FIRST_STORE
from anabranch.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

FULL_BYTES = 8 << 20  # below the 16 MiB of state that a controller merges in one commit by default
_END_S = 5.0  # how long cancelled asyncio tasks may take
_SAID = 1000  # the most characters of a log line that names them
log = logging.getLogger("anabranch.processor")
Decode = Callable[[Event], Event[Any, Any]] | None
Given = tuple[Event, int]  # an event and its task


class Handlers:
    """The handlers of a processor, ready to be called. For one thread."""

    def __init__(
        self, app: Program, stores: Sequence[str], metrics: Numbers | None = None,
        stop: threading.Event | None = None, *, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """``stores``: names of the processor's stores, in the order of their numbers.

        ``stop``, ``patience_s``: see `Failures`.
        """
        self._app = app
        self._patience_s = patience_s
        self.batch_bytes = min(app.cut_bytes, FULL_BYTES)
        self._left: list[Piece] = []  # input that the previous batch had no room for
        self._failures = Failures(app, metrics or Numbers(TABLE), stop or threading.Event())
        for number, name in enumerate(stores, FIRST_STORE):
            if name in app.stores:
                app.stores[name].number(number)
        self._time: TimeOfTasks | None = None
        if app.timers:
            timers = [one for one in app.stores.values() if isinstance(one, Timer | Windows)]
            self._time = TimeOfTasks(timers, self._failures, app.idle, self.batch_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._strays: list[IllegalState] = []  # errors of asyncio tasks that outlived their event
        # `SystemExit`s of asyncio tasks. They end the process unless a handler awaits the task.
        self._exits: list[BaseException] = []

    def step(
        self, batch: WorkBatch, tasks: Collection[int], wall: Callable[[], float],
        read: Callable[[], list[Piece]],
    ) -> list[Piece]:  # fmt: skip
        """Fire due timers, and handle the next input. Returns that input; empty if there was none.

        Timers that are due fire before any event, then comes the input that the previous batch had no room for.
        Timers that fill the batch don't wait for input. ``wall``: the Unix seconds now. Raises: as `handle` and
        ``read``.
        """
        self._note(batch, self._left)
        self._fire(batch, tasks, wall)
        some, self._left = self._left, []
        if not some and batch.size < self.batch_bytes:
            some = read()
            self._note(batch, some)
            self._left = some  # for `again`, if this fails
            self._fire(batch, tasks, wall)  # timers that became due while it waited
        self._left = some
        left = self.handle(batch, some)
        self._left = []
        batch.note_input(some, left)
        return some

    def _note(self, batch: WorkBatch, pieces: Sequence[Piece]) -> None:
        if batch.tables is not None:
            batch.tables.note(pieces)

    def again(self, batch: WorkBatch, table: TaskRows, tasks: Collection[int]) -> None:
        """Let the next batches handle the input of a batch that has no effect, and is not committed."""
        pieces = [*batch.pieces, *self._left]
        batch.open = False
        self.resume(table, tasks)
        self._left = pieces

    def close_batch(self, batch: WorkBatch) -> bool:
        """Close a batch; the next one begins with what it had no room for. Returns as `WorkBatch.close`."""
        self._left = batch.left
        return batch.close()

    def _fire(self, batch: WorkBatch, tasks: Collection[int], wall: Callable[[], float]) -> None:
        if not batch.pieces:
            self.fire_wall(batch, tasks, int(wall() * 1000))

    def handle(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """Call the handlers with these events. Returns input commits for which the batch has no room.

        Raises: HandlerFailed, NotAHandler, TableError, IllegalState (an asyncio task that is not awaited
        writes). The batch is unusable after an error.
        """
        left = list[Piece]()
        self._failures.patience = self._patience_s
        with closed_by_failure(batch) as at:
            if self._loop is not None and asyncio.all_tasks(self._loop):
                # Asyncio tasks that handlers have left run here; if they write, `_strays` gets an error.
                self._run(asyncio.sleep(0))
            for (scope, number), some in groupby(pieces, key=_of_commit):
                commit = list(some)
                if not left and self._time is not None:
                    self._time.before(at, scope, number)
                full = batch.size >= self.batch_bytes or batch.ends_before(commit[0])
                if left or (full and (commit[0] is pieces[0] or not commit[0].is_inside)):
                    left += commit
                    continue
                for piece in commit:
                    self._piece(at, piece)
                batch.commits += 1
                if self._time is not None:
                    _move_time(at, self._time, commit)
        return left

    def fire_wall(self, batch: WorkBatch, tasks: Iterable[int], now_ms: int) -> None:
        """Fire timers that the previous batch had no room for, and timers of the wall clock.

        Raises: as `handle`.
        """
        self._failures.patience = self._patience_s
        if self._time is not None:
            with closed_by_failure(batch) as at:
                for task in tasks:
                    self._time.fire_wall(at, task, now_ms)

    def resume(self, table: TaskRows, tasks: Collection[int]) -> None:
        """Begin to handle these tasks, whose rows are in the table."""
        self._left = []
        if self._time is not None:
            self._time.resume(table, tasks)

    def close(self) -> None:
        """Cancel the asyncio tasks that handlers left."""
        if self._loop is None:
            return
        left = asyncio.all_tasks(self._loop)
        if left:
            text = "%s: %d tasks that handlers started and did not await are cancelled: %s"
            log.warning(text, self._app.name, len(left), ", ".join(map(str, left))[:_SAID])
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
        self._loop.close()

    def _piece(self, at: HandlerContext, piece: Piece) -> None:
        registered = self._app.handlers[piece.stream]
        if registered[0].batch:
            self._batch(at, piece, registered)
            return
        decode = self._app.inputs[piece.stream].decode
        given = zip(piece.events, piece.tasks, strict=True)
        if any(one.is_async for one in registered):
            self._side_by_side(at.batch, given, registered, decode)
        else:
            self._in_turn(at, given, registered, decode)

    # -- batches --------------------------------------------------------------------------------------

    def _batch(self, at: HandlerContext, piece: Piece, registered: Sequence[Registered]) -> None:
        # A partition of a plain topic belongs to one task; an Arrow batch of a stream has events of several.
        at.task = piece.tasks[0] if is_plain(piece.stream) and piece.tasks else -1
        at.key = at.timestamp = None

        def handle(rows: pa.RecordBatch) -> None:
            at.undo.clear()
            for one in registered:
                check_result(one.call, one.call(rows))

        self._rows(at, list(piece.events), piece.batch(), handle, None)

    def _rows(
        self, at: HandlerContext, events: Sequence[Event], rows: pa.RecordBatch,
        handle: Callable[[pa.RecordBatch], None], retries: int | None,
    ) -> None:  # fmt: skip
        """Handle an Arrow batch. If that fails, handle its halves, so that only bad events become dead letters."""

        def case() -> Case:
            first = Case.of(events[0])
            if len(events) == 1:
                return first
            return Case(f"a batch of {len(events)} from {first.place} on", None, None, (), None)

        error = self._failures.retry(at, case, partial(failure_of, handle, rows), retries=retries)
        if error is not None and (len(events) == 1 or self._app.dead_letter is None):
            self._failures.bury(at, case(), error)
        elif error is not None:
            middle = len(events) // 2
            for start, end in ((0, middle), (middle, len(events))):
                # A single event gets all retries, since an outage may have caused the failure.
                retries = None if end - start == 1 else 0
                self._rows(at, events[start:end], rows.slice(start, end - start), handle, retries)

    # -- single events --------------------------------------------------------------------------------

    def _in_turn(
        self, at: HandlerContext, given: Iterator[Given], registered: Sequence[Registered],
        decode: Decode,
    ) -> None:  # fmt: skip
        """Call the handlers with one event after another."""
        calls = [one.call for one in registered]
        undo = at.undo
        event: Event | None = None
        error: BaseException

        def handle(event: Event) -> None:
            undo.clear()
            at.key, at.value, at.timestamp = event.key, event.value, event.timestamp
            decoded: Event[Any, Any] = event if decode is None else decode(event)
            for call in calls:
                check_result(call, call(decoded))

        while True:
            try:
                for event, at.task in given:  # `handle`, inlined for speed
                    undo.clear()
                    at.key, at.value, at.timestamp = event.key, event.value, event.timestamp
                    decoded: Event[Any, Any] = event
                    if decode is not None:
                        decoded = decode(event)
                    for call in calls:
                        if (found := call(decoded)) is not None:
                            check_result(call, found)
                    event = None
                return
            except FAILURES as raised:
                if event is None:  # the reader raised it
                    raise
                error = raised
            failed, event = event, None
            case, attempt = partial(Case.of, failed), partial(failure_of, handle, failed)
            try:
                self._failures.try_or_bury(at, case, attempt, error)
            except Awaited:  # only the result shows that it is a decorated async function
                at.take_back()
                for one in registered:
                    one.is_async = True
                self._side_by_side(at.batch, chain([(failed, at.task)], given), registered, decode)
                return

    def _side_by_side(
        self, batch: WorkBatch, given: Iterable[Given], registered: Sequence[Registered],
        decode: Decode,
    ) -> None:  # fmt: skip
        """Handle events of different keys concurrently, and events of one key in order."""
        chains: dict[Any, list[Given]] = {}
        for event, task in given:
            key = event.key if event.key is not None else (event.partition, event.offset)
            chains.setdefault(key, []).append((event, task))
        ending = False
        self._failures.patience = self._patience_s * self._app.concurrency  # their pauses overlap

        async def handle(at: HandlerContext, event: Event, task: int) -> None:
            at.task, at.key, at.value, at.timestamp = task, event.key, event.value, event.timestamp
            decoded = event if decode is None else decode(event)
            for one in registered:
                found = one.call(decoded)
                if isawaitable(found):
                    await found
                else:
                    check_result(one.call, found)

        async def handle_with_retries(event: Event, task: int) -> None:
            pauses, case = new_pauses(), partial(Case.of, event)
            pause: float | None = 0.0
            while pause is not None:
                at = begin_context(batch)  # for this asyncio task and this try only
                at.own_key, at.strays = self._app.concurrency > 1, self._strays
                error = await failure_in(handle(at, event, task))
                if ending:
                    raise asyncio.CancelledError
                _forget_cancellation(error)
                if error in self._exits:
                    self._exits.remove(error)
                pause = None
                if error is not None:
                    pause = self._failures.judge(at, case, error, pauses)
                    if pause is None:
                        self._failures.bury(at, case(), error)
                at.over = True
                if pause is not None:
                    await asyncio.sleep(pause)
                    self._failures.check_not_stopping()

        async def in_order(some: list[Given], slots: asyncio.Semaphore) -> None:
            async with slots:
                for event, task in some:
                    await handle_with_retries(event, task)

        async def all_chains() -> None:
            nonlocal ending
            slots = asyncio.Semaphore(self._app.concurrency)
            tasks = [asyncio.create_task(in_order(some, slots)) for some in chains.values()]
            try:
                await asyncio.gather(*tasks)
            finally:
                ending = True
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self._run(all_chains())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(work)
        self._exits = []
        while True:
            try:
                self._loop.run_until_complete(task)
                break
            except SystemExit as error:
                # asyncio raises a task's exit out of its loop, and also in the handler that awaits the task.
                if is_from_outside(error) or (task.done() and task.exception() is error):
                    raise
                self._exits.append(error)
        if self._exits:
            raise self._exits[0]
        if self._strays:
            raise self._strays[0]


@contextmanager
def closed_by_failure(batch: WorkBatch) -> Iterator[HandlerContext]:
    """Close the batch on an error, so that handlers that still run can't write to it."""
    try:
        yield begin_context(batch)
    except BaseException:
        batch.open = False
        batch.due.clear()
        raise


def _forget_cancellation(error: BaseException | None) -> None:
    """Undo the cancellation if a handler cancelled its own asyncio task, which handles later events, too."""
    task = asyncio.current_task()
    while isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        task.uncancel()


def _move_time(at: HandlerContext, time: TimeOfTasks, commit: Sequence[Piece]) -> None:
    latest: dict[int, int] = {}
    for piece in commit:
        for task, event in zip(piece.tasks, piece.events, strict=True):
            if event.timestamp > latest.get(task, 0):
                latest[task] = event.timestamp
    time.move(at, *_of_commit(commit[-1]), latest, whole=commit[-1].whole)


def _of_commit(piece: Piece) -> tuple[str, int]:
    return piece.stream.partition("/")[0], piece.timestamp
