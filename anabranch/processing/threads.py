"""A worker with several threads (``threads=`` of `anabranch.Processor`): a slow event delays its own task alone.

Each thread is a `Worker` with some of the tasks. One of them has all tasks that no other one keeps. When a handler
takes long, its thread keeps the tasks of the events at work, and gives up its batch, which has events of other
tasks, too. A free thread takes the other tasks, from their committed positions. After `CALM_S` without a slow event
the tasks come back.

A task moves as between two workers: the next thread takes it, and the controller then refuses commits of the former
one. But threads share a folder. So a task is *claimed* by one thread at a time: from before it takes the task until
it has dropped what it computed, and its last commit has ended, with the rows in the folder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from anabranch.client.client import Client
from anabranch.processing.program import Program
from anabranch.processing.worker import (
    IDLE_S,
    AllTasks,
    Membership,
    Shared,
    Worker,
    join_group,
)
from anabranch.protocol.schemas.records import ProcessorInfo
from anabranch.tables.rocks import TableDamaged

log = logging.getLogger("anabranch.processor")

WATCH_S = 0.025
SLOW_TIMES = 4  # an event is slow if this many calls of `watch` in turn have found it at work
CALM_S = 60.0
LEAST_CALM_S = 5.0  # after which tasks come back if another event is slow, and no thread is free


class Part:
    """The tasks of one thread, in place of a `Membership`. ``team``: the worker, whose lock guards all fields."""

    def __init__(self, team: ThreadedWorker) -> None:
        self._team = team
        self._changed = threading.Condition(team.lock)
        self.wanted: frozenset[int] = frozenset()
        self.generation = self._served = 0
        self.claimed: frozenset[int] = frozenset()
        self.alone: frozenset[int] = (
            frozenset()
        )  # tasks that it keeps; empty: it has none, or all others
        self.is_leaving = (
            False  # whether its claim ends with the commit under way, except for ``alone``
        )
        self.slow_at = 0.0  # when an event was slow, in monotonic seconds
        self.ended = threading.Event()  # its thread has released its tasks, and works no more
        self._error: Exception | None = None
        self.worker: Worker  # set by the team

    @property
    def is_free(self) -> bool:
        return not (self.claimed or self.wanted or self.alone)

    def give(self, tasks: frozenset[int], *, again: bool = False) -> None:
        """Set the tasks that the thread should have. ``again``: the group has assigned them again."""
        if again or tasks != self.wanted:
            self.wanted = tasks
            self.generation += 1
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Let `serve` raise an error of the group."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def serve(self, wait: float) -> frozenset[int]:
        """As `Membership.serve`."""
        with self._changed:
            if wait > 0 and self._team.threads:
                self._changed.wait_for(
                    lambda: self.generation != self._served or self._error is not None, wait
                )
            error, self._error = self._error, None
            if error is not None:
                raise error
            self._served = self.generation
            return self.wanted

    def claim(self, tasks: frozenset[int]) -> frozenset[int]:
        """As of `Tasks`."""
        with self._changed:
            self.claimed = tasks & self.wanted
            return self.claimed

    def unclaim(self) -> None:
        """As of `Tasks`."""
        with self._changed:
            self.claimed, self.is_leaving = frozenset(), False
            self._team.deal()

    def keep_alone(self, task: int) -> bool:
        """As of `Tasks`."""
        return self._team.split(self, frozenset({task}))

    def of_others(self) -> frozenset[int]:
        """As of `Tasks`. One thread copies the state of other workers' tasks."""
        return self._team.of_others(self)

    def close(self) -> None:
        """Do nothing: the worker leaves its group."""


class ThreadedWorker:
    """A worker with up to ``app.threads`` threads. Its public members are those of a `Worker`."""

    def __init__(
        self, app: Program, client: Client, folder: Path, *, tasks: AllTasks | None = None,
        standby: bool = False, threads: bool = True,
    ) -> None:  # fmt: skip
        """As `Worker`. ``threads`` False: the caller calls `watch`, and `Worker.step` of all parts."""
        self._app, self._client, self._folder = app, client, folder
        self._standby, self.threads = standby, threads
        self.lock = threading.RLock()
        self.parts: list[Part] = []
        self._running: list[threading.Thread] = []
        self._is_running = False
        self._error: BaseException | None = None
        self._stops = 0  # threads that wait until no task is claimed
        self._generation = 0
        self._stack = ExitStack()
        try:
            self._shared = Shared(app, client, folder, threads=threads)
            self._stack.callback(self._shared.close)
            self.stop, self.metrics = self._shared.stop, self._shared.metrics
            self._monotonic = client.reader_ports().clock.monotonic
            self._member: AllTasks | Membership = AllTasks(())
            self._rest = self._add()
            self._member = tasks or join_group(app, client, self._shared.table, self._watch_all)
            self._stack.callback(self._member.close)
            self._keep_spare()
        except BaseException:
            self.close()
            raise

    @property
    def tasks(self) -> Collection[int]:
        """The tasks that this worker has. For any thread."""
        return {task for part in self.parts for task in part.worker.tasks}

    @property
    def trouble(self) -> str | None:
        """As `Worker.trouble`. For any thread."""
        if not self._member.generation:
            return "its group has not assigned its tasks yet"
        found = (part.worker.trouble for part in list(self.parts) if part.wanted)
        return next((each for each in found if each is not None), None)

    def described(self, age_s: float) -> ProcessorInfo:
        """As `Worker.described`. For any thread. Raises: NotReady."""
        return self.parts[0].worker.described(age_s)

    def run(self) -> None:
        """Work until `stop` is set. Raises: FixCallError, HandlerFailed."""
        with self.lock:
            self._is_running = True
            for part in self.parts[1:]:
                self._start(part)
        watching = threading.Thread(target=self._watching, name="watch")
        watching.start()
        try:
            self._work(self.parts[0])
        finally:
            self.stop.set()
            watching.join()
            for thread in self._running:
                thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Release the tasks and leave the group, after the commits under way have ended."""
        for part in self.parts:
            part.worker.close()
        self._stack.close()

    def watch(self) -> None:
        """Move tasks between threads. `run` calls it every `WATCH_S`."""
        try:
            self._member.serve(0.0)
        except Exception as error:  # noqa: BLE001 - a thread of the worker raises it
            self._rest.fail(error)
        now = self._monotonic()
        with self.lock:
            for part in self.parts:
                slow = frozenset(part.worker.slow_tasks(SLOW_TIMES)) & part.claimed
                if slow:
                    part.slow_at = now
                    gives_up = bool(part.claimed - slow)  # else only new tasks go to another thread
                    if not part.is_leaving and self.split(part, slow) and gives_up:
                        part.is_leaving = True
                        part.worker.give_up(slow)
                elif part.alone and now - part.slow_at > CALM_S:
                    part.alone = frozenset()
            self.deal()
        self._keep_spare()

    def split(self, part: Part, kept: frozenset[int]) -> bool:
        """Let a thread keep only these tasks, once it has dropped its batch. Returns False if no thread is free."""
        with self.lock:
            if kept <= part.alone:
                part.slow_at = self._monotonic()
            if not kept < part.claimed | part.wanted:
                return False
            if part is self._rest:
                free = next((each for each in self.parts if each.is_free), None)
                if free is None:
                    self._free_one()
                    return False
                self._rest = free
            part.alone, part.slow_at = kept, self._monotonic()
            part.give(kept)
            return True

    def _free_one(self) -> None:
        """Let the tasks come back that had their last slow event first, so that a thread will be free soon."""
        calm = [
            part
            for part in self.parts
            if part.alone and self._monotonic() - part.slow_at > LEAST_CALM_S
        ]
        if calm:
            min(calm, key=lambda part: part.slow_at).alone = frozenset()
            self.deal()

    def deal(self) -> None:
        """Give each thread its tasks, except tasks that another thread still claims. Call it with the lock."""
        again, self._generation = (
            self._generation != self._member.generation,
            self._member.generation,
        )
        wanted = frozenset[int]() if self._stops else self._member.wanted
        for part in self.parts:
            if part.is_leaving and not part.worker.is_committing:
                # A concurrent call of another task ends first: a task's handlers run in one thread.
                part.claimed &= part.wanted | part.worker.tasks_at_work
                part.is_leaving = not part.claimed <= part.wanted
            if not self._stops and not part.alone & wanted:
                part.alone = frozenset()
        alone = frozenset[int]().union(*(part.alone for part in self.parts))
        for part in self.parts:
            own = wanted - alone if part is self._rest else part.alone & wanted
            claimed = (each.claimed for each in self.parts if each is not part)
            part.give(own.difference(*claimed), again=again)

    def of_others(self, part: Part) -> frozenset[int]:
        """As of `Tasks`, for one thread."""
        with self.lock:
            if part is not self._rest or self._stops:
                return frozenset(range(self._app.tasks))
            claimed = (each.claimed for each in self.parts if each is not part)
            return self._member.wanted.union(*claimed)

    def _add(self) -> Part:
        part = Part(self)
        part.worker = Worker(
            self._app, self._client, self._folder, tasks=part, standby=self._standby,
            threads=self.threads, shared=self._shared,
        )  # fmt: skip
        part.worker.on_damage = partial(self._damaged, part)
        with self.lock:
            self.parts.append(part)
            if self._is_running:
                self._start(part)
        return part

    def _keep_spare(self) -> None:
        """Keep one thread free, as a new one takes a moment to begin."""
        free = (part for part in self.parts if part.is_free and part is not self._rest)
        if len(self.parts) < self._app.threads and not any(free):
            self._add()

    def _start(self, part: Part) -> None:
        thread = threading.Thread(target=self._work, args=(part,), name=f"tasks-{len(self.parts)}")
        self._running.append(thread)
        thread.start()

    def _work(self, part: Part) -> None:
        try:
            part.worker.run()
            part.worker.release()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._error = self._error or error
            self.stop.set()
        finally:
            part.ended.set()

    def _watching(self) -> None:
        try:
            while not self.stop.wait(WATCH_S):
                self.watch()
            self._leave()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._error = self._error or error
            self.stop.set()

    def _leave(self) -> None:
        """Leave the group once only slow events are at work, so that other workers have all tasks at once.

        The commit of a slow event is refused if another worker has taken its task by then.
        """
        for part in self.parts:
            while not part.ended.wait(WATCH_S) and not part.worker.slow_tasks(SLOW_TIMES):
                pass
        self._member.close()

    def _watch_all(self) -> None:
        for part in list(self.parts):
            part.worker.watch()

    def _damaged(self, part: Part, error: TableDamaged) -> None:
        """Empty the folder once no thread uses it."""
        with self.lock:
            self._stops += 1
            self.deal()
        while any(each.claimed for each in self.parts) and not self.stop.wait(WATCH_S):
            pass
        if self._standby:
            self.stop.wait(2 * IDLE_S)  # a thread may still copy the state of other workers' tasks
        with self.lock:
            if not self.stop.is_set():
                part.worker.empty(error)
            self._stops -= 1
            self.deal()
