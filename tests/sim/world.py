"""A whole cluster in one OS thread, under one seed: processes, time, chance and a trace.

Every process is some greenlets (`Task`s, as threads are). A task runs until it calls a port; there `World.point`
gives the hub the choice to let it go on, run another task, let time pass, raise an error, freeze the process
or crash it. Time is virtual: it moves a little with each port call, and jumps when all tasks wait. All chance
comes from the seed, so a seed replays exactly; `World.digest` is the hash of everything that happened. The
scheduler, the world and each process draw from sequences of their own, so that one of them can change and the
others go on as they were.

**A crash** is the exception `Crash` (nothing in the product catches it) raised out of a port call; whatever the
process still does while it unwinds raises `Crash` again, so it has no effect. **A frozen process** is not resumed
until it thaws: then it goes on as if nothing had happened, a zombie.

**To add a fault:** give it a rate in `weather.Weather` and let `faults.Faults.at` return its `Action` for the
names of the port calls where it may strike (``--trace`` shows all names). A fault that is an event of its own,
rather than of a port call (compaction, a copy of a disk), is a function that calls `World.later`. Draw from
`World.random` only, and in no order that depends on a set's or on time outside.

The rest: `ports` (log, table and client ports in the world), `groups` (what the library's readers
stand on), `controllers`, `clients` and `readers` (the workload), `ledger` (what clients know), `check_*` (what must
hold), `recording` and `recorded` (the history, which `checker` judges), `simulation` (one run), `shrink` (cuts a
failing one down), `mutants` (bugs that a run must find).
"""

from __future__ import annotations

import hashlib
import heapq
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import CodeType
from typing import Protocol

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

START_S = 1_700_000_000.0
_STEP_S = 0.0004  # most that a port call takes
_MAX_STEPS = 800_000  # with clocks ten minutes apart, nothing may commit for seven minutes


class Crash(BaseException):
    """The process is dead. Not an `Exception`: nothing in the product catches it."""


class Interrupt(BaseException):
    """An exception from outside, as Ctrl-C raises it, in a call of the library; its handle is used afterwards."""


class Violation(Exception):
    """Something that must hold does not. ``origin``: whose finding it is, if not that of who raises it."""

    def __init__(self, message: str, origin: str = "") -> None:
        super().__init__(message)
        self.origin = origin


@dataclass(frozen=True, slots=True)
class Action:
    """What happens at a port call. Nothing: it goes on, or another task runs first.

    ``delay``: seconds until it goes on. ``error``: raised to the caller. ``freeze``: seconds that the process
    stands still. ``crash``: the process dies.
    """

    name: str
    delay: float = 0.0
    error: BaseException | None = None
    freeze: float = 0.0
    crash: bool = False


class Faulty(Protocol):
    """Decides what goes wrong; see `faults.Faults`."""

    def at(self, process: Process, call: str) -> Action | None: ...


@dataclass(eq=False)
class Process:
    """What a crash takes away at once. ``skew``: how far its wall clock is ahead, seconds."""

    name: str
    kind: str  # "controller", "client", "reader" or "worker"
    skew: float = 0.0
    offset: float = 0.0  # of its monotonic clock
    dead: bool = False
    frozen: int = 0
    random: Random | None = None
    on_death: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A greenlet of a process: runnable once ``wake`` has come. ``parked``: any change wakes it earlier."""

    name: str
    process: Process
    greenlet: greenlet
    wake: float
    parked: bool = False


class World:
    """The scheduler. Its hub is the greenlet that calls `run`."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self._own_random = Random(seed)
        self._schedule = Random(f"{seed}/schedule")
        self.now = 0.0
        self.steps = 0
        self._most_steps = _MAX_STEPS
        self.switch_rate = 0.5
        self.across = False  # scopes are at control partitions of their own
        self.faults: Faulty | None = None
        self.violation: Violation | None = None
        self.origin = ""  # the function that found it: the same one finds the same kind
        self._tasks: list[Task] = []
        self._open: list[Task] = []  # whose port calls may be interrupted
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._current: Task | None = None
        self._hub = getcurrent()
        self._trace = trace
        self._hash = hashlib.blake2b(digest_size=12)

    # -- for those who build a run --------------------------------------------------------------------

    def lives(self, name: str) -> bool:
        """Whether a process of this name has a task."""
        return any(task.process.name == name for task in self._tasks)

    def spawn(self, process: Process, name: str, body: Callable[[], None]) -> Task:
        """Start a task; an exception that it lets through is a violation."""
        label = f"{process.name}/{name}"

        def run() -> None:
            try:
                body()
            except Crash:
                pass
            except Violation as violation:
                self.fail(str(violation))
            except Exception:  # noqa: BLE001
                self.fail(f"{label} failed with\n{traceback.format_exc()}")

        task = Task(label, process, greenlet(run, parent=self._hub), self.now)
        self._tasks.append(task)
        return task

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Call this from the hub in so many seconds; it must not wait."""
        self._event_count += 1
        heapq.heappush(self._events, (self.now + seconds, self._event_count, event))

    def allow(self, steps: float) -> None:
        """So many steps more than usual may come."""
        self._most_steps += int(steps)

    def fail(self, message: str) -> None:
        """Note a violation; the run ends. The first one stays."""
        if self.violation is None:
            self.violation = Violation(message)
            error = sys.exception()
            self.origin = origin_of(error) if error else _name(sys._getframe(1).f_code)
            self.note("world", f"violation: {message}")

    def note(self, who: str, what: str) -> None:
        """Add to the trace."""
        line = f"{self.now:11.6f} {who:<16} {what}"
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    @property
    def digest(self) -> str:
        """The hash of the trace so far."""
        return self._hash.hexdigest()

    @property
    def wall_s(self) -> float:
        """The true time, as Unix seconds."""
        return START_S + self.now

    @property
    def wall_ms(self) -> int:
        """The true time, as Unix milliseconds."""
        return int(self.wall_s * 1000)

    @property
    def current(self) -> Process:
        """The process that runs."""
        return self._running().process

    @property
    def random(self) -> Random:
        """The chance of the process that runs, or of the world."""
        if self._current is None:
            return self._own_random
        process = self._current.process
        if process.random is None:
            process.random = Random(f"{self.seed}/{process.name}")
        return process.random

    def runs(self, name: str) -> bool:
        """Whether a process runs whose name begins so."""
        return self._current is not None and self._current.process.name.startswith(name)

    @property
    def running_name(self) -> str:
        """Of the process that runs, or the world's."""
        return "world" if self._current is None else self._current.process.name

    @property
    def may_interrupt(self) -> bool:
        """Whether the running task is in a call that may be interrupted."""
        return self._current in self._open

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In here `Interrupt` may come out of any port call of the running task."""
        task = self._running()
        self._open.append(task)
        try:
            yield
        finally:
            self._open.remove(task)

    # -- what tasks call ------------------------------------------------------------------------------

    def point(self, call: str) -> None:
        """A port call of the running task; its name ends in ``.after`` behind the effect."""
        task = self._running()
        process = task.process
        if process.dead:
            raise Crash
        self.now += self._schedule.random() * _STEP_S
        action = self.faults.at(process, call) if self.faults is not None else None
        if action is None:
            self.note(task.name, call)
            if self._schedule.random() < self.switch_rate:
                self._yield(task, self.now)
            return
        self.note(task.name, f"{call} !{action.name}")
        if action.crash:
            self.kill(process)
            raise Crash
        if action.freeze:
            self.freeze(process, action.freeze)
        self._yield(task, self.now + action.delay)
        if action.error is not None:
            raise action.error

    def sleep(self, seconds: float) -> None:
        """The running task waits."""
        task = self._running()
        self._yield(task, self.now + max(seconds, 0.0))

    def park(self, seconds: float) -> None:
        """The running task waits until something changes, at most so long."""
        task = self._running()
        task.parked = True
        self._yield(task, self.now + max(seconds, 0.0))

    def changed(self) -> None:
        """Something did: wake who is parked."""
        for task in self._tasks:
            if task.parked:
                task.parked = False
                task.wake = min(task.wake, self.now)

    # -- life and death -------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """The process dies at once, all its tasks with it."""
        if process.dead:
            return
        process.dead = True
        self.note(process.name, "dies")
        self.later(0.0, lambda: self._bury(process))

    def _bury(self, process: Process) -> None:
        for task in [t for t in self._tasks if t.process is process]:
            self._end(task)
        for event in process.on_death:
            event()

    def _end(self, task: Task) -> None:
        """Unwind a dead process's task: its ``finally`` clauses run, without effect."""
        if task.greenlet:
            self._current = task
            task.greenlet.throw(Crash())
            self._current = None
        if task in self._tasks:
            self._tasks.remove(task)

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process for so long."""
        process.frozen += 1

        def thaw() -> None:
            if process.frozen and not process.dead:
                process.frozen -= 1
                self.note(process.name, "thaws")

        self.later(seconds, thaw)

    def thaw_all(self) -> None:
        """All frozen processes go on."""
        for task in self._tasks:
            task.process.frozen = 0

    def set_clocks(self) -> None:
        """All wall clocks are right from now on."""
        for task in self._tasks:
            task.process.skew = 0.0

    # -- the hub --------------------------------------------------------------------------------------

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Run until ``done``; False if the virtual time ``until`` or a violation came first."""
        while not done():
            if self.violation is not None:
                return False
            if self.steps > self._most_steps:
                self.fail(f"no end after {self.steps} steps")
                return False
            if not self._step(until):
                return False
        return self.violation is None

    def _step(self, until: float) -> bool:
        """Run one task or event; False at ``until``, or if nothing can ever happen again."""
        self.steps += 1
        ready: list[Task] = []
        soonest = self._events[0][0] if self._events else float("inf")
        if soonest <= self.now:
            heapq.heappop(self._events)[2]()
            return True
        for task in self._tasks:
            if not task.process.frozen and not task.process.dead:
                if task.wake <= self.now:
                    ready.append(task)
                elif task.wake < soonest:
                    soonest = task.wake
        if not ready:
            if soonest > until:
                return False
            self.now = soonest
            return True
        task = ready[self._schedule.randrange(len(ready))] if len(ready) > 1 else ready[0]
        task.parked = False
        self._current = task
        task.greenlet.switch()
        self._current = None
        if not task.greenlet and task in self._tasks:
            self._tasks.remove(task)
        return True

    def close(self) -> None:
        """End all tasks, whatever they are at."""
        for task in list(self._tasks):
            task.process.dead = True
        while self._tasks:
            self._end(self._tasks[0])

    def _yield(self, task: Task, wake: float) -> None:
        task.wake = wake
        self._hub.switch()
        if task.process.dead:
            raise Crash

    def _running(self) -> Task:
        if self._current is None:
            raise Violation("a port was called outside of any task")
        return self._current


def origin_of(error: BaseException) -> str:
    """Who raised it: a function, or what the checker calls it."""
    if isinstance(error, Violation) and error.origin:
        return error.origin
    names = [_name(frame.f_code) for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name for name in names if name != "check_log.hold"]
    return names[-1] if names else ""


def _name(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/')[2].removesuffix('.py')}.{code.co_qualname}"


@dataclass(frozen=True, slots=True)
class SimClock:
    """A process's clock: `anabranch.ports.Clock`."""

    world: World
    process: Process | None  # None: the brokers'

    def wall(self) -> float:
        """Unix seconds; with the process's skew."""
        return self.world.wall_s + (self.process.skew if self.process else 0.0)

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return self.world.now + (self.process.offset if self.process else 0.0)

    def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        self.world.sleep(seconds)
