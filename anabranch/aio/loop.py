"""Greenlets of an event loop: the blocking code of the client, run so that its waits park it.

`LoopWaits.call` runs a blocking function in a greenlet, inside of the task that awaits it. When the function waits,
the greenlet is parked: it passes a future to the task, which awaits that and resumes the greenlet. A cancellation
of the task is raised in the greenlet at the place of its wait, as an interrupt by a signal would be in a thread.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
import warnings
from asyncio import get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from anabranch.errors import IllegalState
from anabranch.waits import THREADS, ThreadSignal, Waits, found_by

T = TypeVar("T")
# Threads of a client for calls that block inside a library.
THREADS_OF_CALLS = 2
_FIRST_NAP_S = 0.0005
_LONGEST_NAP_S = 0.01
_NAP_S = 0.05
_LONGEST_TIMER_S = 1e6  # a longer wait has no timer
END: Any = object()
# Greenlets kept for the next calls: a new one's first frame takes a new piece of memory from the system, 15 µs.
_MOST_IDLE = 200


class LoopGreenlet(greenlet):  # type: ignore[misc] # it has no types
    """A greenlet that runs blocking code. Its parent is the greenlet of the event loop.

    The greenlet passes its parent what it waits for, or a list of one result. An error ends it, and is raised in
    its parent.
    """

    def __init__(self, waits: LoopWaits, run: Callable[..., Any]) -> None:
        super().__init__(run, waits.parent)
        self.waits = waits


# A frame of these must not refer to its own greenlet, or that would never be freed.


def _run_calls(function: Any, args: Any, named: Any) -> None:
    """Run blocking calls, one after the other."""
    while True:
        made = [function(*args, **named)]
        function = args = named = None  # they may be freed now
        function, args, named = getcurrent().parent.switch(made)


def _run_items(items: Iterator[Any]) -> Any:
    """Iterate. Each item is a result, and at last `END`."""
    for item in items:
        getcurrent().parent.switch([item])
    return [END]


_pooled = threading.local()


def _find() -> Waits:
    current = getcurrent()
    if isinstance(current, LoopGreenlet):
        return current.waits
    return getattr(_pooled, "waits", THREADS)


found_by(_find)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def park(awaited: Awaitable[T]) -> T:
    """Wait for an awaitable. The caller runs in a greenlet."""
    parent = getcurrent().parent
    if parent is None:
        raise IllegalState("only a greenlet of an event loop can be parked")
    return cast(T, parent.switch(awaited))


class LoopWaits:
    """`anabranch.waits.Waits` of the greenlets of one client, and of the threads that they use.

    Every object that it makes also serves threads: a replica's thread, the thread of replies, those of `run`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._woken: deque[asyncio.Future[None]] = deque()
        self._is_waking = False
        self._idle: list[LoopGreenlet] = []
        self.parent = getcurrent()  # the greenlet of the loop
        self.is_closed = False
        self._pool = ThreadPoolExecutor(
            THREADS_OF_CALLS, "anabranch-aio", initializer=partial(setattr, _pooled, "waits", self)
        )

    def close(self) -> None:
        """End the threads of `run`, and idle greenlets."""
        self.is_closed = True
        self._idle.clear()
        self._pool.shutdown(wait=False)

    def dropped(self, client: object, close: Callable[[], None]) -> None:
        """Close a client that was dropped without being closed, in its loop, if the loop still runs."""
        if not self.is_closed and not self._loop.is_closed():
            warnings.warn(
                f"{client!r} was not closed", ResourceWarning, source=client, stacklevel=2
            )

            def end() -> None:
                close()
                self.close()

            self.start("anabranch-close", end)

    # -- calls ----------------------------------------------------------------------------------------

    def is_thread(self) -> bool:
        """Whether the caller runs on the thread of the loop."""
        return threading.get_ident() == self._thread

    def may_wait(self) -> bool:
        """Whether the caller may wait for a greenlet: on the loop's thread only another greenlet may."""
        return parks() or not self.is_thread()

    async def call(self, function: Callable[..., T], /, *args: Any, **named: Any) -> T:
        """Run a blocking function in a greenlet."""
        self._check()
        idle = self._idle
        worker = idle.pop() if idle else LoopGreenlet(self, _run_calls)
        worker.gr_context = self.parent.gr_context
        made = worker.switch(function, args, named)
        if type(made) is not list:
            made = await self._made(worker, made)
        worker.gr_context = None
        if len(idle) < _MOST_IDLE:
            idle.append(worker)
        result: T = made.pop()
        return result

    def items(self, items: Iterator[Any]) -> LoopGreenlet:
        """A greenlet for `next`."""
        return LoopGreenlet(self, partial(_run_items, items))

    async def next(self, items: LoopGreenlet) -> Any:
        """The next item, or `END`."""
        self._check()
        if items.dead:
            return END
        items.gr_context = self.parent.gr_context
        made = items.switch()
        if type(made) is not list:
            made = await self._made(items, made)
        return made.pop()

    async def _made(self, worker: LoopGreenlet, awaited: Any) -> list[Any]:
        """Await what the greenlet waits for, and resume it, until it has its result. Raises: as the greenlet."""
        while type(awaited) is not list:
            try:
                found = await awaited
            except GeneratorExit:  # the loop has dropped the task: nothing can be awaited any more
                while not worker.dead:
                    worker.throw(GeneratorExit)
                raise
            except BaseException as error:  # noqa: BLE001 - raised in the greenlet
                awaited = worker.throw(error)
            else:
                awaited = worker.switch(found)
        return awaited

    def _check(self) -> None:
        if get_running_loop() is not self._loop:
            raise IllegalState(
                "this client was made in another event loop: each loop needs a client of its own"
            )

    def wake(self, future: asyncio.Future[None]) -> None:
        """Resolve a future, from any thread. All that come before the loop runs take one call of the loop."""
        if self.is_thread():
            _resolve(future)
            return
        self._woken.append(future)
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is closed, so nothing waits
                self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._is_waking = False  # first, so that a future that is added now is not left
        while self._woken:
            _resolve(self._woken.popleft())

    def future(self) -> asyncio.Future[None]:
        """A future of the loop, for `wait_for`."""
        return self._loop.create_future()

    def wait_for(self, future: asyncio.Future[None], seconds: float) -> None:
        """Park the greenlet until the future is resolved, or the time is over."""
        if seconds > _LONGEST_TIMER_S:
            park(future)
            return
        timer = self._loop.call_later(seconds, _resolve, future)
        try:
            park(future)
        finally:
            timer.cancel()

    # -- `Waits` --------------------------------------------------------------------------------------

    def signal(self) -> LoopSignal:
        return LoopSignal(self)

    def lock(self) -> LoopLock:
        return LoopLock(self)

    def condition(self) -> LoopCondition:
        return LoopCondition(self)

    def queue(self) -> LoopQueue:
        return LoopQueue(self)

    def sleep(self, seconds: float) -> None:
        if parks():
            self.wait_for(self.future(), seconds)
        else:
            time.sleep(seconds)

    def ready(self, files: Collection[int], events: int, seconds: float) -> float:
        if seconds <= 0 or not parks():
            return seconds
        future = self.future()
        add, remove = self._loop.add_reader, self._loop.remove_reader
        if events & select.POLLOUT:
            add, remove = self._loop.add_writer, self._loop.remove_writer
        added = []
        try:
            for file in files:
                add(file, _resolve, future)
                added.append(file)
            self.wait_for(future, seconds)
        finally:
            for file in added:
                remove(file)
        return 0.0

    def served(
        self, serve: Callable[[float], object], is_done: Callable[[], bool], seconds: float
    ) -> None:
        if not parks():
            serve(seconds)
            return
        until, nap = time.monotonic() + seconds, _FIRST_NAP_S
        serve(0.0)
        while not is_done() and (left := until - time.monotonic()) > 0:
            self.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
            serve(0.0)

    def nap(self, seconds: float) -> float:
        if seconds <= 0 or not parks():
            return seconds
        self.sleep(min(seconds, _NAP_S))
        return 0.0

    def result(self, future: Future[T], seconds: float) -> T:
        if parks():
            signal = self.signal()
            future.add_done_callback(lambda _: signal.set())
            signal.wait(seconds)
            seconds = 0.0
        return future.result(None if seconds == inf else seconds)

    def run(self, call: Callable[[], T], drop: Callable[[T], object] | None = None) -> T:
        if self.is_closed or not parks():
            return call()
        future = self._pool.submit(call)
        try:
            return self.result(future, inf)
        except BaseException:
            if drop is not None:
                future.add_done_callback(partial(_dropped, drop))
            while drop is None and not (future.done() or future.cancel()):
                with suppress(asyncio.CancelledError):  # the first one is raised
                    self.result(future, inf)
            raise

    def start(self, name: str, work: Callable[[], None]) -> LoopJob:
        return LoopJob(self, self._loop, self.call(work), name)


def _dropped(drop: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        drop(future.result())


def parks() -> bool:
    """Whether the caller runs in a greenlet that can be parked."""
    return isinstance(getcurrent(), LoopGreenlet)


class LoopSignal:
    """`anabranch.waits.Signal`."""

    __slots__ = ("_future", "_is_set", "_thread", "_waits")

    def __init__(self, waits: LoopWaits) -> None:
        self._waits = waits
        self._is_set = False
        self._future: asyncio.Future[None] | None = None
        self._thread: ThreadSignal | None = None

    def set(self) -> None:
        # The waiter checks `_is_set` after it has set one of these.
        self._is_set = True
        if self._future is not None:
            self._waits.wake(self._future)
        elif self._thread is not None:
            self._thread.set()

    def wait(self, seconds: float) -> bool:
        if not self._is_set and parks():
            self._future = future = self._waits.future()
            if not self._is_set:
                self._waits.wait_for(future, seconds)
        elif not self._is_set:
            self._thread = thread = ThreadSignal()
            if not self._is_set:
                thread.wait(seconds)
        return self._is_set


class LoopQueue:
    """`anabranch.waits.Queue`."""

    __slots__ = ("_items", "_signal", "_waits")

    def __init__(self, waits: LoopWaits) -> None:
        self._waits = waits
        self._items: deque[Any] = deque()
        self._signal: LoopSignal | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if (signal := self._signal) is not None:
            signal.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and not self._items:
            self._signal = signal = LoopSignal(self._waits)
            if not self._items:
                signal.wait(inf if timeout is None else timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None


class LoopLock:
    """`anabranch.waits.Lock`. Greenlets and threads get it roughly in the order in which they ask."""

    def __init__(self, waits: LoopWaits) -> None:
        self._waits = waits
        self._taken = threading.Lock()
        self._holder: object = None  # a greenlet; each thread has one from its beginning
        self._count = 0
        self._waiting: deque[LoopSignal] = deque()

    def __enter__(self) -> bool:
        own = getcurrent()
        if self._holder is own:
            self._count += 1
        elif self._taken.acquire(False):
            self._holder, self._count = own, 1
        else:
            return self.acquire()
        return True

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        own = getcurrent()
        if self._holder is own:
            self._count += 1
            return True
        until = inf if timeout < 0 else time.monotonic() + timeout
        while not self._taken.acquire(False):
            if not blocking or (left := until - time.monotonic()) <= 0:
                return False
            if isinstance(self._holder, LoopGreenlet) and not self._waits.may_wait():
                raise IllegalState(
                    "a call of this client is under way in its event loop: await it first"
                )
            self._wait(left)
        self._holder, self._count = own, 1
        return True

    def _wait(self, seconds: float) -> None:
        """Wait until the lock may be free."""
        signal = LoopSignal(self._waits)
        self._waiting.append(signal)
        if not self._taken.locked():  # it was released before it could see this waiter
            self._wake_next()
        try:
            signal.wait(seconds)
        except BaseException:
            if signal not in self._waiting:  # it was this waiter's turn: it is the next one's
                self._wake_next()
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(signal)

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._holder = None
            self._taken.release()
            if self._waiting:
                self._wake_next()

    def _wake_next(self) -> None:
        with suppress(IndexError):
            self._waiting.popleft().set()


class LoopCondition:
    """`anabranch.waits.Condition`."""

    def __init__(self, waits: LoopWaits) -> None:
        self._waits = waits
        self._lock = threading.RLock()
        self._waiting: list[LoopSignal] = []

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        signal = LoopSignal(self._waits)
        self._waiting.append(signal)
        self._lock.release()
        try:
            return signal.wait(inf if timeout is None else timeout)
        finally:
            self._lock.acquire()
            if signal in self._waiting:
                self._waiting.remove(signal)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for signal in waiting:
            signal.set()


class LoopJob:
    """`anabranch.waits.Job`: a task of the loop, begun from any thread."""

    def __init__(
        self,
        waits: LoopWaits,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, None],
        name: str,
    ) -> None:
        self._waits = waits
        self._ended: Future[None] = Future()
        self._task: asyncio.Task[None] | None = None

        def begin() -> None:
            self._task = task = loop.create_task(work, name=name)
            task.add_done_callback(lambda _: self._ended.set_result(None))

        loop.call_soon_threadsafe(begin)

    def is_alive(self) -> bool:
        return not self._ended.done()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, if the caller may wait for a greenlet."""
        if self._waits.may_wait():
            with suppress(TimeoutError):
                self._waits.result(self._ended, inf if timeout is None else timeout)
