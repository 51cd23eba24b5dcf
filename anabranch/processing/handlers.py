"""Calls handlers one by one, concurrently, or with Arrow batches. Changes of a failed call are undone.

Handling is bounded in time: between input commits by the time at which a commit is due, inside of
an input commit by `PART_S`. Input that is left is handled next, in this batch or in another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import isawaitable
from itertools import chain, groupby, islice, takewhile
from operator import getitem
from typing import TYPE_CHECKING, Any

from anabranch.controller.monitor import Numbers
from anabranch.errors import AnabranchError, EventTooLarge, IllegalState
from anabranch.processing.batch import LEAST, HandlerContext, TaskRows, WorkBatch, begin_context
from anabranch.processing.failures import (
    FAILURES,
    Case,
    Failures,
    failure_in,
    failure_of,
    is_from_outside,
    new_pauses,
)
from anabranch.processing.metrics import TABLE
from anabranch.processing.program import Awaited, Input, Program, Registered, check_result
from anabranch.processing.timers import Timed, TimeOfTasks
from anabranch.protocol.legal_names import is_plain
from anabranch.reading.slices import Piece, Slices, split_pieces
from anabranch.reading.store_lookup import FIRST_STORE
from anabranch.types import Event

if TYPE_CHECKING:
    import pyarrow as pa

FULL_BYTES = 8 << 20  # below the 16 MiB of state that a controller merges in one commit by default
PART_S = 5.0  # an input commit that is handled for longer comes in parts
_LEAST_S = 0.1  # events are handled for this long, also if the commit is due earlier
_AHEAD = 4  # events for each concurrent handler that may wait for earlier events of their keys
_END_S = 5.0  # how long cancelled asyncio tasks may take
_SAID = 1000  # the most characters of a log line that names them
log = logging.getLogger("anabranch.processor")
Given = tuple[Event, int]  # an event and its task
_Place = tuple[str, int, int]  # of an event: stream, partition and offset


@dataclass(slots=True)
class Chains:
    """Events that are handled concurrently: a chain for each key, in order.

    ``slots``: for running handlers. ``room``: for events that are taken and not done. ``count``: of taken events.
    """

    batch: WorkBatch
    decoders: dict[str, Callable[[Event], Event[Any, Any]] | None]
    slots: asyncio.Semaphore
    room: asyncio.Semaphore
    calls: set[HandlerContext] = field(default_factory=set)  # at work
    by_key: dict[Any, deque[Given]] = field(default_factory=dict)
    count: int = 0
    has_failed: bool = False
    is_ending: bool = False


class Handlers:
    """The handlers of a processor, ready to be called. For one thread."""

    def __init__(
        self, app: Program, stores: Sequence[str], metrics: Numbers | None = None,
        stop: threading.Event | None = None, *, pauses: bool = True, part_s: float = PART_S,
    ) -> None:  # fmt: skip
        """``stores``: names of the processor's stores, in the order of their numbers.

        ``stop``, ``pauses``: see `Failures`. ``part_s``: an input commit that is handled for longer comes in parts.
        """
        self._app = app
        self._part_s = part_s
        self._most_bytes = min(app.cut_bytes, FULL_BYTES)
        self.batch_bytes = min(app.first_bytes, self._most_bytes)
        self._most_events = math.inf  # of a batch; fewer after a batch that was too big
        # Whether the next input commit, which was too big alone, comes in parts.
        self._splits = False
        # The place of an event that is too big alone, and its error.
        self._refused: tuple[_Place, EventTooLarge] | None = None
        self._left: list[Piece] = []  # input that the previous batch had no room for
        self._stop = stop or threading.Event()
        self._failures = Failures(app, metrics or Numbers(TABLE), self._stop, pauses=pauses)
        for number, name in enumerate(stores, FIRST_STORE):
            if name in app.stores:
                app.stores[name].number(number)
        self._time: TimeOfTasks | None = None
        if app.timers:
            timers = [one for one in app.stores.values() if isinstance(one, Timed)]
            self._time = TimeOfTasks(timers, self._failures, app.idle, self._is_over, app.ahead)
        self.monotonic: Callable[[], float] = time.monotonic
        self.due = math.inf  # when the batch's commit is due, in monotonic seconds
        # No input commit is begun after ``soft``, and no event after ``hard``.
        self._soft = self._hard = math.inf
        self._stopped: AnabranchError | None = None
        self._failures.also = self._check_not_stopped
        self._at: HandlerContext | None = None  # of the call at work
        self._chains: Chains | None = None  # of concurrent calls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._strays: list[IllegalState] = []  # errors of asyncio tasks that outlived their event
        # `SystemExit`s of asyncio tasks. They end the process unless a handler awaits the task.
        self._exits: list[BaseException] = []

    def step(
        self, batch: WorkBatch, tasks: Collection[int], wall: Callable[[], float],
        read: Callable[[], list[Piece]],
    ) -> list[Piece]:  # fmt: skip
        """Fire due timers, and handle the next input. Returns that input; empty if there was none.

        Timers that are due fire before any event, then comes the input that was left before.
        Timers that fill the batch don't wait for input. ``wall``: the Unix seconds now. Raises: as `handle` and
        ``read``.
        """
        self._note(batch, self._left)
        self._fire(batch, tasks, wall)
        some, self._left = self._left, []
        read_now = not some and not self._is_full(batch)
        if read_now:
            some = read()
            self._note(batch, some)
            self._left = some
            self._fire(batch, tasks, wall)  # timers that became due while it waited
        self._left = some  # for `again`, if this fails
        self._left = self.handle_part(batch, some)
        read_bytes = sum(piece.size for piece in some) if read_now else 0
        batch.note_input(_without(some, self._left), self._left, read=read_bytes)
        return some

    @property
    def held_until(self) -> float:
        """Until which monotonic second a batch that is due waits for more events; 0: it does not."""
        return 0.0

    def stop(self, error: AnabranchError) -> None:
        """Let `step` and `handle` raise this error after the event at work. For any thread."""
        self._stopped = error
        self._soft = self._hard = -math.inf

    def slow_tasks(self, times: int) -> set[int]:
        """The tasks with an event that has been at work in each of the last calls of this. For another thread."""
        at, chains = self._at, self._chains
        calls = [] if at is None else [at] if chains is None else list(chains.calls)
        if any(call.begins for call in calls):
            return set()
        for call in calls:
            call.seen += 1
        return {call.task for call in calls if call.seen >= times}

    @property
    def tasks_at_work(self) -> set[int]:
        """The tasks of the events at work. For another thread."""
        at, chains = self._at, self._chains
        calls = [] if at is None else [at] if chains is None else list(chains.calls)
        return {call.task for call in calls}

    def _note(self, batch: WorkBatch, pieces: Sequence[Piece]) -> None:
        if batch.tables is not None:
            batch.tables.note(pieces)

    def again(self, batch: WorkBatch, table: TaskRows, tasks: Collection[int]) -> None:
        """Let the next batches handle the input of a batch that has no effect, and is not committed."""
        pieces, stopped = [*batch.pieces, *self._left], self._stopped
        batch.open = False
        self.resume(table, tasks)
        self._left, self._stopped = pieces, stopped  # the tasks may be lost meanwhile

    def close_batch(self, batch: WorkBatch) -> bool:
        """Close a batch; the next one begins with what it has not handled. Returns as `WorkBatch.close`."""
        return batch.close()

    def set_size(self, *, was_full: bool, was_empty: bool = False) -> None:
        """Set the size of the next batch: small while events are few, and doubled after each full batch.

        After a batch that was too big, empty batches leave its limits as they are: a reader has no input at first.
        """
        if was_empty and not was_full and self._most_events < math.inf:
            return
        self.batch_bytes = min(
            2 * self.batch_bytes if was_full else self._app.first_bytes, self._most_bytes
        )
        self._most_events = 2 * self._most_events if was_full else math.inf
        self._splits = False

    def shrink(self, batch: WorkBatch, error: EventTooLarge) -> None:
        """Make the next batches smaller, as ``batch`` changes more state than one commit may.

        An input commit that is too big alone comes in parts. An event that is too big alone fails with the error
        when it comes again. Raises: the error, if nothing smaller can be tried.
        """
        self._splits = batch.of_commits <= 1 and not self._app.whole
        if batch.of_commits > 1 or (self._splits and batch.events > 1):
            # Its state alone has more bytes than a commit may have, so this is more than half of what one may have.
            self._most_bytes = max(1, min(self._most_bytes, batch.size // 2))
            self.batch_bytes = min(self.batch_bytes, self._most_bytes)
            self._most_events = batch.events // 2
        elif batch.limit != LEAST:  # timers may have fired in it
            self._most_events, self.batch_bytes = LEAST
        elif batch.alone is None or (self._refused and self._refused[0] == _place(batch.alone)):
            raise error
        else:
            self._most_events, self.batch_bytes = LEAST
            self._refused = _place(batch.alone), error

    def _fire(self, batch: WorkBatch, tasks: Collection[int], wall: Callable[[], float]) -> None:
        if not batch.pieces:
            self.fire_wall(batch, tasks, int(wall() * 1000))

    def handle_part(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """Do as `handle`, but with no more events than the batch may have. `shrink` sets that limit."""
        batch.limit = self._most_events, self.batch_bytes
        some, later = list(pieces), list[Piece]()
        if _count(pieces) > self._most_events - batch.events:
            some, later = split_pieces(pieces, self._room_of(batch, pieces))
        if some and later and _of_commit(some[-1]) == _of_commit(later[0]):
            some[-1] = some[-1]._replace(whole=False)
        if self._most_events == 1 and _count(some) == 1:  # else they are a whole transaction
            batch.alone = next(iter(some[0].events))
        left = self.handle(batch, some)
        handled = _without(some, left)
        batch.events += _count(handled)
        batch.of_commits += len({_of_commit(piece) for piece in handled})
        batch.is_ended = batch.is_ended or bool(later) or batch.events >= self._most_events
        return [*left, *later]

    def _room_of(self, batch: WorkBatch, pieces: Sequence[Piece]) -> int:
        """How many of these events fit into the batch.

        They are those of whole input commits, if one fits; else a part of the first, if that may be split.
        """
        room, count, size = int(self._most_events) - batch.events, 0, 0
        if is_plain(pieces[0].stream):
            return room  # its records are in no transaction
        for _, commit in groupby(pieces, key=_of_commit):
            if (size := _count(commit)) > room - count:
                break
            count += size
        if count or batch.events:
            return count
        splits = self._splits or (pieces[0].is_inside and not self._app.whole)
        return room if splits else size

    def handle(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """Call the handlers with these events. Returns those for which the batch has no room, or no time.

        Raises: HandlerFailed, NotAHandler, TableError, IllegalState (an asyncio task that is not awaited
        writes), and the error of `stop`. The batch is unusable after an error.
        """
        left = list(pieces)
        if self._time is not None:
            batch.is_ahead = self._time.is_ahead
        with closed_by_failure(batch) as at, self._at_work(at):
            if self._loop is not None and asyncio.all_tasks(self._loop):
                # Asyncio tasks that handlers have left run here; if they write, `_strays` gets an error.
                self._run(asyncio.sleep(0))
            now = self.monotonic()
            self._soft = min(max(self.due, now + _LEAST_S), now + self._part_s)
            self._hard = now + self._part_s  # of timers that are due before the first commit
            while left:
                some = self._together(batch, left)
                if self._time is not None:
                    self._time.before(at, *_of_commit(some[0]))
                # The batch's locks and snapshot were made for the input commits before this one.
                batch.is_ended = batch.is_ended or batch.ends_before(some[0])
                if self._is_full(batch) or (len(left) < len(pieces) and self._is_late()):
                    break
                self._begin_commit(some[0].stream)
                count = self._bury_refused(at, some) or self._handle_together(at, some)
                handled, rest = split_pieces(some, count)
                left = rest + left[len(some) :]
                self._check_not_stopped()
                if self._time is not None:
                    whole = not rest and handled[-1].whole
                    _move_time(at, self._time, handled, app=self._app, whole=whole)
                if rest:
                    break
                batch.commits += handled[-1].whole
            self._check_not_stopped()
        return left

    def _bury_refused(self, at: HandlerContext, pieces: Sequence[Piece]) -> int:
        """Let the first event fail if it is too big for a commit. Returns 1 if so, else 0. Raises: as `handle`."""
        if self._refused is None:
            return 0
        event, at.task = next(_given(pieces[0]))
        place, error = self._refused
        if place != _place(event):
            return 0
        self._failures.bury(at, Case.of(event), error)
        return 1

    def _together(self, batch: WorkBatch, pieces: Sequence[Piece]) -> list[Piece]:
        """The first commit's pieces. Without timers and tables, ``async`` handlers take several commits at once."""
        if self._time is None and batch.tables is None and self._is_async(pieces[0]):
            return list(takewhile(self._is_async, pieces))
        return list(next(groupby(pieces, key=_of_commit))[1])

    def _is_async(self, piece: Piece) -> bool:
        registered = self._app.handlers[piece.stream]
        return not registered[0].batch and any(one.is_async for one in registered)

    def _is_full(self, batch: WorkBatch) -> bool:
        return batch.is_ended or batch.size >= self.batch_bytes

    def _is_over(self, batch: WorkBatch) -> bool:
        return self._is_full(batch) or self.monotonic() >= self._hard

    def _is_late(self) -> bool:
        return self.monotonic() >= self._soft or self._stop.is_set()

    def _begin_commit(self, stream: str) -> None:
        """Set the time at which an input commit is split. Records of plain topics are in no transaction."""
        if is_plain(stream):
            self._hard = self._soft
        else:
            self._hard = math.inf if self._app.whole else self.monotonic() + self._part_s
        self._check_not_stopped()  # `stop` sets its error first, so its times can't be overwritten unnoticed

    def _check_not_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def fire_wall(self, batch: WorkBatch, tasks: Iterable[int], now_ms: int) -> None:
        """Fire timers that the previous batch had no room for, and timers of the wall clock.

        Raises: as `handle`.
        """
        if self._time is not None:
            self._hard = self.monotonic() + self._part_s
            with closed_by_failure(batch) as at, self._at_work(at):
                for task in tasks:
                    self._check_not_stopped()
                    self._time.fire_wall(at, task, now_ms)

    @contextmanager
    def _at_work(self, at: HandlerContext) -> Iterator[None]:
        self._at = at
        try:
            yield
        finally:
            self._at = None

    def resume(self, table: TaskRows, tasks: Collection[int]) -> None:
        """Begin to handle these tasks, whose rows are in the table."""
        self._left, self._stopped = [], None
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

    def _handle_together(self, at: HandlerContext, pieces: Sequence[Piece]) -> int:
        """Handle some pieces. Returns how many of their events there was time for."""
        count = wanted = 0
        for is_async, some in groupby(pieces, key=self._is_async):
            run = list(some)
            if is_async:
                wanted += sum(len(piece.tasks) for piece in run)
                count += self._side_by_side(at.batch, chain.from_iterable(map(_given, run)))
                if count < wanted:
                    return count
                continue
            for piece in run:
                wanted += len(piece.tasks)
                count += self._piece(at, piece)
                if count < wanted:
                    return count
        return count

    def _piece(self, at: HandlerContext, piece: Piece) -> int:
        registered = self._app.handlers[piece.stream]
        if registered[0].batch:
            self._batch(at, piece, registered)
            return len(piece.tasks)
        return self._in_turn(at, piece, registered)

    # -- batches --------------------------------------------------------------------------------------

    def _batch(self, at: HandlerContext, piece: Piece, registered: Sequence[Registered]) -> None:
        # A partition of a plain topic belongs to one task; an Arrow batch of a stream has events of several.
        at.task = piece.tasks[0] if is_plain(piece.stream) and piece.tasks else -1
        at.placed = False
        at.key = at.timestamp = None
        at.seen = 0

        def handle(rows: pa.RecordBatch) -> None:
            at.undo.clear()
            for one in registered:
                check_result(one.call, one.call(rows))

        # Only a failure needs single events, and to make them takes longer than all else.
        self._rows(at, cache(lambda: list(piece.events)), piece.batch(), handle, None)

    def _rows(
        self, at: HandlerContext, events: Callable[[], Sequence[Event]], rows: pa.RecordBatch,
        handle: Callable[[pa.RecordBatch], None], retries: int | None,
    ) -> None:  # fmt: skip
        """Handle an Arrow batch. If that fails, handle its halves, so that only bad events become dead letters.

        ``events``: returns the events of the rows.
        """
        count = rows.num_rows

        def case() -> Case:
            first = Case.of(events()[0])
            if count == 1:
                return first
            return Case(f"a batch of {count} from {first.place} on", None, None, (), None)

        error = self._failures.retry(at, case, partial(failure_of, handle, rows), retries=retries)
        if error is not None and (count == 1 or self._app.dead_letter is None):
            self._failures.bury(at, case(), error)
        elif error is not None:
            middle = count // 2
            for start, end in ((0, middle), (middle, count)):
                # A single event gets all retries, since an outage may have caused the failure.
                retries = None if end - start == 1 else 0
                half = partial(getitem, events(), slice(start, end))
                self._rows(at, half, rows.slice(start, end - start), handle, retries)

    # -- single events --------------------------------------------------------------------------------

    def _in_turn(self, at: HandlerContext, piece: Piece, registered: Sequence[Registered]) -> int:
        """Call the handlers with one event after another. Returns how many there was time for."""
        at.seen, at.placed = 0, piece.placed
        if self._app.threads > 1:  # the time to decode an event counts as the event's
            return self._one_by_one(at, piece, registered, 0, None)
        calls, undo, monotonic = [one.call for one in registered], at.undo, self.monotonic
        handled, is_at_work = 0, False
        error: BaseException | None
        given = zip(_decoded(piece, self._app.inputs[piece.stream]), piece.tasks, strict=True)
        try:
            for (event, at.key, at.value), at.task in given:
                is_at_work = True
                undo.clear()
                at.seen, at.timestamp = 0, event.timestamp
                for call in calls:
                    if (found := call(event)) is not None:
                        check_result(call, found)
                is_at_work = False
                handled += 1
                if monotonic() >= self._hard:
                    break
            return handled
        except FAILURES as raised:
            if not is_at_work and is_from_outside(raised):
                raise
            error = raised if is_at_work else None  # else a codec's, which is raised again
        return self._one_by_one(at, piece, registered, handled, error)

    def _one_by_one(
        self, at: HandlerContext, piece: Piece, registered: Sequence[Registered], first: int,
        error: BaseException | None,
    ) -> int:  # fmt: skip
        """As `_in_turn`, with retries and dead letters, from one of the events on.

        ``first``: how many events were handled before. ``error``: of the first event, if its handlers were called.
        """
        given = list(islice(_given(piece), first, None))
        decode = self._app.inputs[piece.stream].decode

        def handle(event: Event) -> None:
            at.undo.clear()
            at.key, at.value, at.timestamp = event.key, event.value, event.timestamp
            decoded: Event[Any, Any] = event if decode is None else decode(event)
            for one in registered:
                check_result(one.call, one.call(decoded))

        for number, (event, at.task) in enumerate(given):
            attempt = partial(failure_of, handle, event)
            if error is None:
                at.seen = 0
                error = attempt()
            if error is not None:
                try:
                    self._failures.try_or_bury(at, partial(Case.of, event), attempt, error)
                except Awaited:  # only the result shows that it is a decorated async function
                    at.take_back()
                    for one in registered:
                        one.is_async = True
                    return first + number + self._side_by_side(at.batch, given[number:])
                error = None
            if self.monotonic() >= self._hard:
                return first + number + 1
        return first + len(given)

    def _side_by_side(self, batch: WorkBatch, given: Iterable[Given]) -> int:
        """Handle events of different keys concurrently, and events of one key in order.

        Returns how many of them there was time for.
        """
        most = self._app.concurrency
        decoders = {stream: one.decode for stream, one in self._app.inputs.items()}
        chains = Chains(batch, decoders, asyncio.Semaphore(most), asyncio.Semaphore(_AHEAD * most))
        self._chains = chains
        try:
            self._run(self._all_chains(chains, given))
        finally:
            self._chains = None
        return chains.count

    async def _all_chains(self, chains: Chains, given: Iterable[Given]) -> None:
        tasks = list[asyncio.Task[None]]()
        try:
            for event, task in self._in_time(chains.batch, given):
                await chains.room.acquire()
                if chains.has_failed:
                    break
                chains.count += 1
                key = event.key if event.key is not None else (event.partition, event.offset)
                if key in chains.by_key:
                    chains.by_key[key].append((event, task))
                else:
                    chains.by_key[key] = deque([(event, task)])
                    tasks.append(asyncio.create_task(self._in_order(chains, key)))
            await asyncio.gather(*tasks)
        finally:
            chains.is_ending = True
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_order(self, chains: Chains, key: Any) -> None:
        chain = chains.by_key[key]
        try:
            while chain:
                async with chains.slots:
                    if self._stopped is None:  # else another thread or worker has the task
                        await self._with_retries(chains, *chain[0])
                chain.popleft()
                chains.room.release()
        except BaseException:
            chains.has_failed = True
            chains.room.release()  # for `_all_chains`, which may wait for it
            raise
        del chains.by_key[key]

    async def _with_retries(self, chains: Chains, event: Event, task: int) -> None:
        pauses, case = new_pauses(), partial(Case.of, event)
        pause: float | None = 0.0
        failed: BaseException | None = None
        seen = 0
        while pause is not None:
            at = begin_context(chains.batch)  # for this asyncio task and this try only
            at.task, at.seen = task, seen
            chains.calls.add(at)
            at.own_key, at.strays = self._app.concurrency > 1, self._strays
            error = await failure_in(self._awaited(chains, at, event, task))
            if chains.is_ending:
                raise asyncio.CancelledError
            _forget_cancellation(error)
            if error in self._exits:
                self._exits.remove(error)
            pause = None
            if error is not None:
                pause = self._failures.judge(at, case, error, pauses)
                if pause is None:
                    self._failures.bury(at, case(), error)
            elif failed is not None:
                self._failures.passed(failed)
            at.over, failed = True, error
            if pause is not None:
                await asyncio.sleep(pause)
            chains.calls.discard(at)
            seen = at.seen
            if pause is not None:
                self._failures.check_not_stopping()

    async def _awaited(self, chains: Chains, at: HandlerContext, event: Event, task: int) -> None:
        at.task, at.key, at.value, at.timestamp = task, event.key, event.value, event.timestamp
        decode = chains.decoders[event.stream]
        decoded = event if decode is None else decode(event)
        for one in self._app.handlers[event.stream]:
            found = one.call(decoded)
            if isawaitable(found):
                await found
            else:
                check_result(one.call, found)

    def _in_time(self, batch: WorkBatch, given: Iterable[Given]) -> Iterator[Given]:
        """The events that there is time and room for."""
        commit: tuple[str, int] | None = None
        for event, task in given:
            found = event.stream.partition("/")[0], event.commit_timestamp
            if commit is None:
                commit = found
            elif commit != found:
                if self._is_full(batch) or self._is_late():
                    return
                commit = found
                self._begin_commit(event.stream)
            elif self.monotonic() >= self._hard:
                return
            yield event, task

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


def _place(event: Event) -> _Place:
    return event.stream, event.partition, event.offset


def _given(piece: Piece) -> Iterator[Given]:
    return zip(piece.events, piece.tasks, strict=True)


def _decoded(
    piece: Piece, source: Input
) -> Iterator[tuple[Event[Any, Any], bytes | None, bytes | None]]:
    """The events of a piece, decoded, with their undecoded keys and values."""
    events, decode = piece.events, source.decode
    if isinstance(events, Slices) and all(one.places is None for one in events.slices):
        key, value = source.decoders
        runs = (one.run.decoded(piece.stream, key, value) for one in events.slices)
        return chain.from_iterable(runs)
    return (
        (event if decode is None else decode(event), event.key, event.value) for event in events
    )


def _without(pieces: Sequence[Piece], left: Sequence[Piece]) -> list[Piece]:
    """The handled part of pieces. ``left``: what `split_pieces` left of them."""
    return split_pieces(pieces, _count(pieces) - _count(left))[0]


def _count(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.tasks) for piece in pieces)


def _move_time(
    at: HandlerContext, time: TimeOfTasks, commit: Sequence[Piece], *, app: Program, whole: bool
) -> None:
    latest: dict[int, int] = {}
    for piece in commit:
        if not app.moves_time(piece.stream):
            continue
        most = time.latest_of(piece.stream, piece.timestamp)
        for task, timestamp in zip(piece.tasks, piece.timestamps(), strict=True):
            if latest.setdefault(task, 0) < timestamp <= most:
                latest[task] = timestamp
    time.move(at, *_of_commit(commit[-1]), latest, whole=whole)


def _of_commit(piece: Piece) -> tuple[str, int]:
    return piece.stream.partition("/")[0], piece.timestamp
