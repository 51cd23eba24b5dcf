"""How a call waits: it blocks its thread, or it parks a greenlet of an event loop.

The code of the client is blocking calls, and this is the only part of it that differs between `anabranch.connect`
and `anabranch.aio.connect`. Code that has to wait asks `here` in which way. In a thread, `here` returns `THREADS`,
which uses the standard library. In a greenlet of `anabranch.aio`, it returns that client's `aio.loop.LoopWaits`.

A lock that may be held across a wait, and everything else that one caller waits for until another acts, is made by
`here`: what a greenlet makes serves greenlets and threads alike. Locks that are held for a few lines without a wait
are those of `threading`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Signal(Protocol):
    """One waiter waits until another thread or greenlet calls `set`, once."""

    def set(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Whether it was set in time."""


class Lock(AbstractContextManager[bool], Protocol):
    """A lock that its holder may take again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Condition(AbstractContextManager[bool], Protocol):
    """As `threading.Condition`. Its lock is never held across another wait."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Queue(Protocol):
    """As `queue.SimpleQueue`, for one waiter."""

    def put(self, item: Any) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def get_nowait(self) -> Any: ...


class Job(Protocol):
    """Work in the background."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Waits(Protocol):
    """The ways to wait. Times are seconds."""

    def signal(self) -> Signal: ...

    def lock(self) -> Lock: ...

    def condition(self) -> Condition: ...

    def queue(self) -> Queue: ...

    def sleep(self, seconds: float) -> None: ...

    def ready(self, files: Collection[int], events: int, seconds: float) -> float:
        """How long the caller may block in the system until one of these files has one of ``events``.

        A greenlet waits here, and gets 0. ``events``: `select.POLLIN` or `select.POLLOUT`.
        """

    def served(
        self, serve: Callable[[float], object], is_done: Callable[[], bool], seconds: float
    ) -> None:
        """Call ``serve``, which blocks for a time inside a library, until it is done or the time is over."""

    def nap(self, seconds: float) -> float:
        """How long the caller may block inside a library. A greenlet sleeps here, perhaps shorter, and gets 0."""

    def result(self, future: Future[T], seconds: float) -> T:
        """The result of a future. Raises `TimeoutError`."""

    def run(self, call: Callable[[], T], drop: Callable[[T], object] | None = None) -> T:
        """Make a call that blocks inside a library; greenlets give it to one of a few threads.

        If the greenlet is cancelled meanwhile, the call still ends first; with ``drop``, it ends alone, and its
        result is dropped by this.
        """

    def start(self, name: str, work: Callable[[], None]) -> Job:
        """Do work in the background, which must not keep the process alive."""


class ThreadSignal:
    """`Signal` between threads. A lock alone is quicker than `threading.Event`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.set = self._lock.release

    def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class ThreadWaits:
    """`Waits` of threads."""

    signal = staticmethod(ThreadSignal)
    lock = staticmethod(threading.RLock)
    condition = staticmethod(threading.Condition)
    queue: Callable[[], Queue] = staticmethod(SimpleQueue)
    sleep = staticmethod(time.sleep)

    def ready(self, files: Collection[int], events: int, seconds: float) -> float:
        return seconds

    def served(
        self, serve: Callable[[float], object], is_done: Callable[[], bool], seconds: float
    ) -> None:
        serve(seconds)

    def nap(self, seconds: float) -> float:
        return seconds

    def result(self, future: Future[T], seconds: float) -> T:
        return future.result(seconds)

    def run(self, call: Callable[[], T], drop: Callable[[T], object] | None = None) -> T:
        return call()

    def start(self, name: str, work: Callable[[], None]) -> Job:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


THREADS: Waits = ThreadWaits()
_find: list[Callable[[], Waits]] = []


def here() -> Waits:
    """The way to wait of the thread or greenlet that asks."""
    return _find[0]() if _find else THREADS


def found_by(find: Callable[[], Waits]) -> None:
    """Let `here` ask this function from now on."""
    _find[:] = [find]
