"""Calling handlers: for each event, side by side, or with Arrow batches; and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.core.legal_names import is_plain
from anabranch.errors import EventTooLarge, FixCallError, InvalidArgument
from anabranch.processing.cut import Cut, Doing, begin_doing, time_of
from anabranch.processing.program import NotAHandler, Program, Registered, is_awaited
from anabranch.processing.timers import TimeOfTasks
from anabranch.reading.tasks.shares import Piece
from anabranch.reading.tasks.stored import FIRST_STORE
from anabranch.types import Event

if TYPE_CHECKING:
    from anabranch.processing.table import Table

log = logging.getLogger("anabranch.processor")

FULL_BYTES = 8 << 20  # as a controller merges 16 MiB of state in one commit, unless told otherwise
_ERROR_BYTES = 1024
_make_event: Callable[[Sequence[Any]], Event] = partial(tuple.__new__, Event)
Place = tuple[str, int, int]  # stream, partition, offset of an event


class HandlerFailed(FixCallError):
    """A handler raised: ``event`` (None: a timer's, or a batch's) is the one that it was called with."""

    def __init__(self, event: Event | None, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.event = event
        self.error = error


class Passed(NamedTuple):
    """An event that is passed over, and the error of its handler."""

    event: Event
    error: str


class Handlers:
    """The handlers of a processor, ready to be called. One thread."""

    def __init__(self, app: Program, stores: Sequence[str]) -> None:
        """``stores``: the names of the processor's stores, in the order of their numbers."""
        self._app = app
        self.most = min(app.cut_bytes, FULL_BYTES)
        for number, name in enumerate(stores, FIRST_STORE):
            if name in app.stores:
                app.stores[name].number(number)
        names = {app.stores[name].prefix: name for name in app.timers}
        self._time: TimeOfTasks | None = None
        if app.timers:
            self._time = TimeOfTasks(names, app.timers, app.idle, self.most)
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle(self, cut: Cut, pieces: Sequence[Piece], passed: dict[Place, Passed]) -> list[Piece]:
        """Call the handlers with these events; returns those that have no room in the cut, whole commits.

        Raises: HandlerFailed, and the cut is of no more use.
        """
        left = list[Piece]()
        with closed_by_failure(cut) as at:
            for (scope, number), some in groupby(pieces, key=_of_commit):
                commit = list(some)
                if not left and self._time is not None:
                    _called(self._time.before, at, scope, number)
                full = cut.late or cut.size >= self.most
                if left or (full and (commit[0] is pieces[0] or not commit[0].is_inside)):
                    left += commit
                    continue
                for piece in commit:
                    self._piece(at, piece, passed)
                if self._time is not None:
                    self._move_time(at, self._time, commit)
        return left

    def fire_wall(self, cut: Cut, tasks: Iterable[int], now_ms: int) -> None:
        """Fire what was due before, and timers of the wall clock. Raises: HandlerFailed."""
        if self._time is not None:
            with closed_by_failure(cut) as at:
                for task in tasks:
                    _called(self._time.fire_wall, at, task, now_ms)

    def resume(self, table: Table, tasks: Collection[int]) -> None:
        """These are the worker's tasks now, and their rows are in the table."""
        if self._time is not None:
            self._time.resume(table, tasks)

    def close(self) -> None:
        """End what asynchronous handlers left."""
        if self._loop is not None:
            self._loop.close()

    def _piece(self, at: Doing, piece: Piece, passed: dict[Place, Passed]) -> None:
        registered = self._app.handlers[piece.stream]
        if passed:
            piece = self._without(at, piece, passed)
        if registered[0].batch:
            batch = piece.batch()
            # A partition of a plain topic is one task's; a stream's batch has events of several.
            at.task = piece.tasks[0] if is_plain(piece.stream) and piece.tasks else -1
            at.key = at.timestamp = None
            for one in registered:
                _called(lambda call: is_awaited(call, call(batch)), one.call)
            return
        decode = self._app.inputs[piece.stream].codec.decode
        if any(one.is_async for one in registered):
            self._side_by_side(at, piece, registered, decode)
            return
        calls = [one.call for one in registered]
        event: Event | None = None
        found: Any
        try:
            for event, at.task in zip(piece.events, piece.tasks, strict=True):
                stream, at.key, at.value, headers, at.timestamp, *more = event
                decoded = event
                if (value := at.value) is not None:
                    fields = (stream, at.key, decode(value), headers, at.timestamp, *more)
                    decoded = _make_event(fields)
                for call in calls:
                    if (found := call(decoded)) is not None and is_awaited(
                        call, found, may_wait=True
                    ):
                        self._await(registered, call, found)
        except NotAHandler:
            raise
        except Exception as error:
            raise HandlerFailed(event, error) from error

    def _await(
        self, registered: Sequence[Registered], call: Callable[..., Any], found: Any
    ) -> None:
        """Await what a handler that looked plain returned first; its next events go side by side."""
        for one in registered:
            one.is_async = one.is_async or one.call is call

        async def awaiting() -> None:
            await found

        self._events_loop().run_until_complete(awaiting())

    def _events_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _side_by_side(
        self, at: Doing, piece: Piece, registered: Sequence[Registered],
        decode: Callable[[bytes], Any],
    ) -> None:  # fmt: skip
        """Events of different keys side by side, those of one key in order."""
        chains: dict[Any, list[tuple[int, Event]]] = {}
        for task, event in zip(piece.tasks, piece.events, strict=True):
            key = event.key if event.key is not None else (event.partition, event.offset)
            chains.setdefault(key, []).append((task, event))

        async def chain(some: list[tuple[int, Event]], slots: asyncio.Semaphore) -> None:
            async with slots:
                own = begin_doing(at.cut)  # of this asyncio task alone
                for own.task, event in some:
                    try:
                        own.key, own.value, own.timestamp = event.key, event.value, event.timestamp
                        if event.value is not None:
                            decoded = event._replace(value=decode(event.value))
                        else:
                            decoded = event
                        for one in registered:
                            found = one.call(decoded)
                            if found is not None and is_awaited(one.call, found, may_wait=True):
                                await found
                    except NotAHandler:
                        raise
                    except Exception as error:
                        raise HandlerFailed(event, error) from error

        async def all_chains() -> None:
            slots = asyncio.Semaphore(self._app.concurrency)
            tasks = [asyncio.create_task(chain(some, slots)) for some in chains.values()]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self._events_loop().run_until_complete(all_chains())

    def _without(self, at: Doing, piece: Piece, passed: dict[Place, Passed]) -> Piece:
        """The piece without the events that are passed over; they go to the stream of dead letters."""
        events, tasks = list[Event](), list[int]()
        for event, task in zip(piece.events, piece.tasks, strict=True):
            found = passed.get((event.stream, event.partition, event.offset))
            if found is None:
                events.append(event)
                tasks.append(task)
            elif self._app.dead_letter is not None:
                place = f"{event.stream}[{event.partition}]@{event.offset}"
                headers = [
                    *(
                        # No stream takes a name that is no UTF-8; plain topics may have some.
                        (name.encode("utf-8", "replace").decode(), value)
                        for name, value in event.headers
                        if not name.startswith("ab.")
                    ),
                    ("error", found.error.encode("utf-8", "replace")[:_ERROR_BYTES]),
                    ("from", place.encode()),
                ]
                time = time_of(event.timestamp)
                try:
                    at.cut.write(self._app.dead_letter, (event.value, event.key, headers, time))
                except (EventTooLarge, InvalidArgument) as error:
                    raise type(error)(f"{place} can't be a dead letter: {error}") from error
        return piece._replace(events=events, tasks=tasks)

    def _move_time(self, at: Doing, time: TimeOfTasks, commit: Sequence[Piece]) -> None:
        latest: dict[int, int] = {}
        for piece in commit:
            for task, event in zip(piece.tasks, piece.events, strict=True):
                if event.timestamp > latest.get(task, 0):
                    latest[task] = event.timestamp
        move = partial(time.move, whole=commit[-1].whole)
        _called(move, at, *_of_commit(commit[-1]), latest)


@contextmanager
def closed_by_failure(cut: Cut) -> Iterator[Doing]:
    """A handler that outlives a failed cut must not write to it."""
    try:
        yield begin_doing(cut)
    except HandlerFailed:
        cut.open, cut.failed = False, True
        cut.due.clear()
        raise


def _of_commit(piece: Piece) -> tuple[str, int]:
    return piece.stream.partition("/")[0], piece.timestamp


def _called(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except NotAHandler:
        raise
    except Exception as error:
        raise HandlerFailed(None, error) from error
