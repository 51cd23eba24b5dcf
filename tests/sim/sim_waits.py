"""Waits of a world's tasks: what the threads of a process wait for, its other tasks do in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from anabranch import waits
from tests.sim.world import Crash, World

_FOREVER_S = 1e6


class SimSignal:
    """`anabranch.waits.Signal`."""

    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False

    def set(self) -> None:
        """Wake the task that waits."""
        self._is_set = True
        self._world.changed()

    def wait(self, seconds: float) -> bool:
        """Whether it was set in time."""
        until = self._world.now + seconds
        while not self._is_set and self._world.now < until:
            if self._world.current.dead:
                raise Crash
            self._world.park(until - self._world.now)
        return self._is_set


class SimLock(AbstractContextManager[bool]):
    """`anabranch.waits.Lock`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holder: greenlet | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Whether the task has it now."""
        own, world = getcurrent(), self._world
        until = world.now + (_FOREVER_S if timeout < 0 else timeout)
        while self._holder not in (None, own):
            if world.current.dead:
                raise Crash
            if not blocking or world.now >= until:
                return False
            world.park(until - world.now)
        self._holder, self._count = own, self._count + 1
        return True

    def release(self) -> None:
        """Let another task have it."""
        self._count -= 1
        if not self._count:
            self._holder = None
            self._world.changed()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition(SimLock):
    """`anabranch.waits.Condition`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._calls = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was notified in time."""
        seen, until = self._calls, self._world.now + (_FOREVER_S if timeout is None else timeout)
        self.release()
        while self._calls == seen and self._world.now < until:
            if self._world.current.dead:
                raise Crash
            self._world.park(until - self._world.now)
        self.acquire()
        return self._calls > seen

    def notify_all(self) -> None:
        """Wake all tasks that wait."""
        self._calls += 1
        self._world.changed()


class SimWaits(waits.ThreadWaits):
    """`anabranch.waits.Waits` of a process with several tasks that call its client."""

    def __init__(self, world: World) -> None:
        self._world = world

    def signal(self) -> SimSignal:  # type: ignore[override]
        """One waiter's."""
        return SimSignal(self._world)

    def lock(self) -> SimLock:  # type: ignore[override]
        """Its holder may take it again."""
        return SimLock(self._world)

    def condition(self) -> SimCondition:  # type: ignore[override]
        """With a lock."""
        return SimCondition(self._world)


@contextmanager
def waiting_in(world: World, *names: str) -> Iterator[None]:
    """Let processes whose names begin with one of these wait in the world."""
    known = list(waits._find)
    own = SimWaits(world)

    def find() -> waits.Waits:
        if any(world.runs(name) for name in names):
            return own
        return known[0]() if known else waits.THREADS

    waits.found_by(find)
    try:
        yield
    finally:
        waits._find[:] = known
