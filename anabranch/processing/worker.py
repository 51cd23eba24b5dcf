"""A worker: takes tasks, reads their state, and handles one batch after another, each in one commit.

After any error of unknown effect it drops what it has computed, takes its tasks again, and continues from the
positions and state sequences in their rows.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from anabranch.backoff import Backoff
from anabranch.batches import columns_read, columns_write
from anabranch.client.client import Client
from anabranch.controller.monitor import Numbers
from anabranch.core.derived_rows import progress_row
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    IllegalState,
    InvalidArgument,
    NotReady,
    OwnershipLost,
    RetryError,
    SnapshotExpired,
)
from anabranch.ports import Clock, GroupMember, TopicPartition
from anabranch.processing.batch import SLICE_BYTES, BatchConflict, BatchTooBig, Limits, WorkBatch
from anabranch.processing.commits import FIRST_PAUSE_S, LONGEST_PAUSE_S, Commits, FirstEvents
from anabranch.processing.handlers import Handlers
from anabranch.processing.metrics import TABLE
from anabranch.processing.operations.topology import topology_of
from anabranch.processing.plain import PlainReader, plain_inputs, plain_ports
from anabranch.processing.program import Program
from anabranch.processing.state import StateReader
from anabranch.processing.table import Table
from anabranch.processing.tables import Conflicts, TaskTables, WorkerTables
from anabranch.protocol.defaults import SESSION_S
from anabranch.protocol.hybrid_time import to_ms
from anabranch.protocol.legal_names import PLAIN, state_stream
from anabranch.protocol.schemas.records import ProcessorInfo, ProcessorInput, TaskInfo
from anabranch.reading.history import check_start
from anabranch.reading.slices import Piece
from anabranch.reading.task_reader import TaskReader
from anabranch.tables.rocks import TableDamaged
from anabranch.topics.names import stream_topic
from anabranch.types import TaskOwnership

log = logging.getLogger("anabranch.processor")

# The store of a processor without stores: it needs a state stream, whose partitions the workers' group assigns.
NO_STORE = "-"
IDLE_S = 0.25
# How often, and for how long, a busy worker reads the state of other workers' tasks.
_FOLLOW_S = 1.0
_SLICE_S = 0.05
_ASK_S = 30.0
_RESTORE_S = 600.0  # a restore fails after this time without a record of state
_HANDOVER_S = 3.0
_SERVE_S = 0.25
# A folder that is damaged more often than this, in this many seconds, is on a bad disk.
_DAMAGES = 3
_DAMAGES_S = 3600.0
# While a commit is under way, input is read as often as commits are due, with pauses of at least and at most this.
_LEAST_SLICE_S = 0.02
_MOST_SLICE_S = 0.05
_FEW = 5  # up to this many commits of input in an interval, input is slow
MIRROR_S = 5.0
_SILENT_S = 60.0
_LOST_S = 0.25  # before the first check of a lost task; later pauses are longer, up to a session
_GONE_S = 30.0  # a holder of a lost task that makes no progress for this long counts as gone


class Membership:
    """A member of the workers' Kafka group: its partitions of the state stream are the tasks that it should have.

    The assignment is a hint. While the group rebalances, a worker continues with the tasks that it has: the
    controller refuses commits for a task once another worker has taken it (task ownership).

    A thread serves the group, so that a worker stays a member however long its handlers take.
    """

    def __init__(self, member: GroupMember, topic: str, also: Callable[[], None]) -> None:
        """``also``: called a few times a second, on the thread."""
        self._member, self._also = member, also
        self.wanted: frozenset[int] = frozenset()
        self.generation = 0  # raised with each assignment
        self._error: Exception | None = None
        self._changed, self._ended = threading.Condition(), threading.Event()
        member.join([topic], self._gained, self._lost)
        self._thread = threading.Thread(target=self._run, name="group", daemon=True)
        self._thread.start()

    def serve(self, wait: float) -> frozenset[int]:
        """Wait for an assignment for at most this many seconds. Returns the tasks that this worker should have.

        Raises: as `GroupMember.serve`.
        """
        with self._changed:
            generation = self.generation
            if wait > 0:
                self._changed.wait_for(
                    lambda: self.generation != generation or self._error is not None, wait
                )
            error, self._error = self._error, None
        if error is not None:
            raise error
        return self.wanted

    def claim(self, tasks: frozenset[int]) -> frozenset[int]:
        """As of `Tasks`: all. The controller decides between workers."""
        return tasks

    def unclaim(self) -> None:
        """Do nothing: no other thread waits for these tasks."""

    def keep_alone(self, _: int) -> bool:
        """As of `Tasks`: no. There is no other thread."""
        return False

    def of_others(self) -> frozenset[int]:
        """As of `Tasks`: none."""
        return frozenset()

    def close(self) -> None:
        """Leave the group. Repeating it is harmless."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._member.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._member.serve(_SERVE_S)
                self._also()
            except Exception as error:  # noqa: BLE001 - the worker's thread raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                self._ended.wait(IDLE_S)

    def _gained(self, places: list[TopicPartition]) -> None:
        with self._changed:
            self.wanted = frozenset(place.partition for place in places)
            self.generation += 1
            self._changed.notify_all()

    def _lost(self, places: Sequence[TopicPartition], may_commit: bool) -> None:
        """Do nothing: the next assignment counts."""


class Lost:
    """Tasks that another worker took since the group assigned them to this one.

    Two workers that both want a task would take it from each other without end. So the worker that lost it waits
    until the group assigns again, the task is released, or its holder has made no progress for `_GONE_S`.
    """

    def __init__(self, clock: Clock, tasks: Iterable[int] = ()) -> None:
        self.tasks = frozenset(tasks)
        self.pauses = Backoff(_LOST_S, SESSION_S, clock)  # between checks
        self._clock = clock
        # Task -> term and sequence of its row, and since when they are known (monotonic seconds).
        self._holders: dict[int, tuple[tuple[int, int], float]] = {}

    def update(self, rows: Iterable[TaskInfo], holder: str) -> None:
        """Update the lost tasks from the current rows of all tasks. ``holder``: this worker's name."""
        before, self._holders = self._holders, {}
        now = self._clock.monotonic()
        for row in rows:
            if row.holder not in ("", holder):
                state, since = (row.term, row.sequence), now
                if row.task in before and before[row.task][0] == state:
                    since = before[row.task][1]
                self._holders[row.task] = state, since
        self.tasks = frozenset(
            task for task, (_, since) in self._holders.items() if now < since + _GONE_S
        )


class AllTasks:
    """Fixed tasks, in place of a `Membership`: for a worker without a group."""

    generation = 1

    def __init__(self, tasks: Iterable[int]) -> None:
        self.wanted = frozenset(tasks)

    def serve(self, _: float) -> frozenset[int]:
        return self.wanted

    def claim(self, tasks: frozenset[int]) -> frozenset[int]:
        return tasks

    def unclaim(self) -> None:
        """Do nothing: as of `Membership`."""

    def keep_alone(self, _: int) -> bool:
        return False

    def of_others(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        """Do nothing: there is no group to leave."""


class Shared:
    """The parts that the threads of one worker share: its folder, with state and tables, limits and metrics."""

    def __init__(self, app: Program, client: Client, folder: Path, *, threads: bool) -> None:
        """Raises: as `Client.create_processor`, `Table` and `Client.replica`."""
        self.stop = threading.Event()
        self.metrics = Numbers(TABLE)
        self._showing = threading.Lock()
        self._shown: dict[object, frozenset[int]] = {}  # tasks by thread
        self._stack = ExitStack()
        try:
            self.info = make_processor(client, app)
            log.info("%s: loading compiled code; the first time it takes half a minute", app.name)
            columns_read.warm()
            columns_write.warm()
            self.table = Table(folder)
            self._stack.callback(self.table.close)
            self.limits = Limits(state_stream(app.name), partial(client.check_outputs, app.name))
            self.tables = WorkerTables(
                client, folder, app.tables, app.replicas, app.inputs, threads=threads
            )
            self._stack.callback(self.tables.close)
        except BaseException:
            self.close()
            raise
        emptied = self.table.emptied + self.tables.emptied
        self.metrics.add("processor_folders_emptied", by=emptied)

    def show(self, thread: object, tasks: Iterable[int]) -> None:
        """Let the metrics show that one of the threads has these tasks. For any thread."""
        with self._showing:
            self._shown[thread] = frozenset(tasks)
            self.metrics.set("processor_tasks", len(frozenset().union(*self._shown.values())))

    def close(self) -> None:
        self._stack.close()


class Tasks(Protocol):
    """The tasks that a worker should have: a `Membership`, `AllTasks`, or one thread's part of them."""

    @property
    def wanted(self) -> frozenset[int]: ...

    @property
    def generation(self) -> int:
        """Raised with each assignment; 0 before the first."""
        ...

    def serve(self, wait: float) -> frozenset[int]: ...

    def claim(self, tasks: frozenset[int]) -> frozenset[int]:
        """Those of these tasks that may be taken now."""
        ...

    def unclaim(self) -> None:
        """Note that no commit of claimed tasks is under way any more, and that none will be sent."""
        ...

    def keep_alone(self, task: int) -> bool:
        """Give all other claimed tasks to another thread, once they are dropped. Returns whether one is free."""
        ...

    def of_others(self) -> frozenset[int]:
        """Tasks of the worker's other threads."""
        ...

    def close(self) -> None: ...


class TaskMoved(BeginAgainError):
    """Another thread of this worker takes tasks of a batch, which has no effect."""


class Worker:
    """One worker of a processor, or one of its threads. For one thread; others may set `stop`."""

    def __init__(
        self,
        app: Program,
        client: Client,
        folder: Path,
        *,
        tasks: Tasks | None = None,
        standby: bool = False,
        threads: bool = True,
        handlers: Callable[[Program, Sequence[str], Numbers, threading.Event], Handlers] = Handlers,
        shared: Shared | None = None,
    ) -> None:
        """Raises: as `Shared`.

        ``tasks`` None: the tasks that the workers' group assigns. ``threads`` False: commit in the caller's thread.
        ``shared``: what it shares with other threads, which the caller closes.
        """
        self._app = app
        self._client = client
        self._standby = standby
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(2).hex()}"
        self._stack = ExitStack()
        self.on_damage: Callable[[TableDamaged], None] = self.empty
        self._ownership: TaskOwnership | None = None
        self._reader: TaskReader | PlainReader | None = None
        self._generation = -1
        self._check_at = self._follow_at = self._watch_at = 0.0
        self._sent_at = self._seen_at = self._taken_at = 0.0
        self._is_slow = False  # whether the last batch had few commits of input
        self._handled_s = 0.0  # how long the handlers took for the last input
        self._derived_through = 0  # of the last progress row
        self._described: tuple[float, ProcessorInfo] | None = None
        try:
            ports = client.reader_ports()
            self._clock = ports.clock
            self._lost = Lost(ports.clock)
            if shared is None:
                shared = Shared(app, client, folder, threads=threads)
                self._stack.callback(shared.close)
            self._shared = shared
            self.stop, self.metrics = shared.stop, shared.metrics
            self._table, self._limits = shared.table, shared.limits
            info = shared.info
            self._incarnation = info.incarnation
            self._handlers = handlers(app, info.stores, self.metrics, self.stop)
            self._handlers.monotonic = self._clock.monotonic
            self._stack.callback(self._handlers.close)
            self._source = self._stack.enter_context(closing(ports.committed_log(_ASK_S)))
            state = StateReader(self._source, self._table, app.name, info.incarnation)
            self._commits = Commits(
                client, self._table, state, self.metrics, self._limits, threads=threads
            )
            self._stack.callback(self._commits.close)
            if app.derivation is not None:
                self._commits.ran = (app.derivation.of,)
            self._tables = TaskTables(shared.tables)
            self._conflicts = Conflicts(app.name, self.metrics, self._clock)
            self._member: Tasks = tasks or join_group(app, client, self._table, self.watch)
            self._stack.callback(self._member.close)
        except BaseException:
            self._stack.close()
            raise

    @property
    def tasks(self) -> Collection[int]:
        """The tasks that this worker has. For any thread."""
        ownership = self._ownership
        return () if ownership is None else ownership.tasks.keys()

    @property
    def trouble(self) -> str | None:
        """Why the worker is not ready, that is, not at work on all assigned tasks; else None. For any thread."""
        silent_s = self._clock.monotonic() - self._seen_at
        if not self._member.generation:
            return "its group has not assigned its tasks yet"
        if self._member.wanted - self._lost.tasks and self._reader is None:
            return "its tasks are being taken, and their state read"
        if lost := self._member.wanted & self._lost.tasks:
            return f"others hold tasks that its group gives it: {', '.join(map(str, sorted(lost)))}"
        if silent_s > _SILENT_S:
            return f"its handlers, or a commit, have been at work for {silent_s:.0f} s"
        return None

    def slow_tasks(self, times: int) -> set[int]:
        """As `Handlers.slow_tasks`. For another thread."""
        return self._handlers.slow_tasks(times)

    @property
    def tasks_at_work(self) -> set[int]:
        """As `Handlers.tasks_at_work`. For another thread."""
        return self._handlers.tasks_at_work

    def give_up(self, kept: Collection[int]) -> None:
        """Let the batch at work have no effect, and send nothing until tasks are taken. For another thread.

        ``kept``: the tasks that this thread takes again.
        """
        self._shared.show(self, kept)
        error = TaskMoved("other tasks of this thread continue on another one")
        self._commits.hold(error)
        self._handlers.stop(error)

    @property
    def is_committing(self) -> bool:
        """Whether a commit is under way. For any thread."""
        return self._commits.is_under_way

    def run(self) -> None:
        """Work until `stop` is set. Raises: FixCallError, HandlerFailed."""
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._clock)
        damages = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._clock, quiet_s=_DAMAGES_S)
        while not self.stop.is_set():
            try:
                self.step()
                pauses.reset()
            except TaskMoved as error:
                log.info("%s: tasks %s: %s", self._app.name, sorted(self._member.wanted), error)
                before = self._ownership
                self._drop()
                if before is not None and self.stop.is_set():  # no thread takes them any more
                    with suppress(AnabranchError):
                        self._client.release_tasks(before, timeout=_HANDOVER_S)
            except (RetryError, BeginAgainError, AskOutcomeError) as error:
                if self.stop.is_set():
                    break
                self.begin_again(error)
                self.stop.wait(pauses.begin())
            except TableDamaged as error:
                self._drop()
                pause = damages.begin()
                if damages.count > _DAMAGES:
                    raise
                self.stop.wait(pause)
                self.on_damage(error)

    def begin_again(self, error: AnabranchError) -> None:
        """After an error that does not end `run`: drop the tasks, which the next step takes again.

        Raises: EventTooLarge (no smaller batch can be tried).
        """
        log.warning("%s: %s; its tasks are taken again", self._app.name, error)
        self.metrics.add("processor_taken_again", type(error).__name__)
        if isinstance(error, BatchTooBig):
            self._handlers.shrink(error.batch, error.error)
        self._drop()
        if isinstance(error, OwnershipLost):
            self._lost, self._check_at = Lost(self._clock, range(self._app.tasks)), 0.0

    def close(self) -> None:
        """Release the tasks and leave the group, after the commit under way has ended."""
        self.release()
        self._stack.close()

    def release(self) -> None:
        """Release the tasks, after the commit under way has ended. The worker works no more."""
        self._commits.ending.set()
        with suppress(AnabranchError):
            self._commits.wait()
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            with suppress(AnabranchError):
                self._client.release_tasks(ownership, timeout=_HANDOVER_S)
        self._drop()

    def step(self) -> None:
        """Serve the group once, then handle and commit one batch of events."""
        self._seen_at = self._clock.monotonic()
        wanted = self._wanted()
        if self._ownership is None or wanted != self._ownership.tasks.keys():
            if wanted and not self._shared.tables.is_loaded(IDLE_S):
                wanted = frozenset()  # others may have the tasks meanwhile
            self._take(wanted)
        if self._ownership is None or self._reader is None:
            self._member.serve(0.0 if self._others(()) else IDLE_S)
            self._follow(())
        elif not self._process_batch(self._ownership, self._reader):
            self._follow(self._ownership.tasks)
            self._check_unsent(self._ownership.tasks)
        elif self._clock.monotonic() >= self._follow_at:
            self._follow(self._ownership.tasks, _SLICE_S)

    def _others(self, own: Collection[int]) -> set[int]:
        """The tasks of other workers whose state this one copies."""
        if not self._standby:
            return set()
        return set(range(self._app.tasks)).difference(own, self._member.of_others())

    def _follow(self, own: Collection[int], seconds: float = IDLE_S) -> None:
        if others := self._others(own):
            now = self._clock.monotonic()
            self._follow_at = now + _FOLLOW_S
            self._commits.state.follow(others, now + seconds)

    def _drop(self) -> None:
        """Drop what is computed, after the commit under way has ended. The tasks' rows will show its outcome."""
        with suppress(AnabranchError, TableDamaged):
            self._commits.wait()
        if self._reader is not None:
            self._reader.close()
        self._reader = self._ownership = None
        self._shared.show(self, ())
        self._member.unclaim()

    def empty(self, error: TableDamaged) -> None:
        """Empty the folder, whose files are damaged. The state, or the tables, are then read from the log."""
        self.metrics.add("processor_folders_emptied")
        if self._shared.tables.has(error):
            self._shared.tables.empty(error)
            return
        self._table.empty(error)
        self._commits.state.forget(range(self._app.tasks))

    def _take(self, wanted: frozenset[int]) -> None:
        """Take the tasks that the group assigned, read their state, and begin to read their inputs."""
        before = self._ownership
        self._drop()
        if before is not None and before.tasks.keys() - wanted:
            left = {task: info for task, info in before.tasks.items() if task not in wanted}
            self._client.release_tasks(replace(before, tasks=left))
        self._commits.admit()  # before the claim: who stops them later has taken tasks away
        wanted = self._member.claim(wanted)
        if not wanted:
            return
        self._check_inputs(self.described(0.0).inputs)  # before other workers lose tasks
        ownership = self._client.take_tasks(self._app.name, wanted, holder=self._holder)
        try:
            self._check_inputs(ownership.inputs)
            if ownership.incarnation != self._incarnation:
                # The processor may have been deleted, and made again.
                self._app.check_created(self._client)
        except (IllegalState, InvalidArgument):
            self._client.release_tasks(ownership)
            raise
        if ownership.incarnation != self._incarnation:
            self._incarnation = ownership.incarnation
            self._commits.state = StateReader(
                self._source, self._table, self._app.name, ownership.incarnation
            )
        self._ownership = ownership
        begun = self._taken_at = self._clock.monotonic()
        generation = self._member.generation

        def still_wanted() -> None:
            self._seen_at = self._clock.monotonic()
            self._member.serve(0.0)
            if self.stop.is_set() or self._member.generation != generation:
                raise NotReady("the worker ends, or its group assigns again")

        state = self._commits.state
        state.forget(range(self._app.tasks))
        self._limits.learn({*self._app.outputs, *self._app.tables, self._limits.state})
        self._conflicts.forget()
        try:
            rows = state.restore(ownership.tasks, _RESTORE_S, still_wanted)
        except IllegalState:
            self._check_holder(wanted)  # commits of another owner explain the error, too
            raise
        state.forget(wanted)  # from now on this worker's commits set their marks
        self._commits.rows.forget()
        self._handlers.resume(self._commits.rows, wanted)
        first = FirstEvents(
            app=self._app, client=self._client, commits=self._commits, handlers=self._handlers
        )
        ownership = self._ownership = first.handle(ownership, still_wanted)
        self._reader, self._derived_through = self._read(ownership), 0
        if self._app.on_lost == "skip":
            self._reader.on_lost = self._note_lost
        self._shared.show(self, wanted)
        self.metrics.add("processor_restored_rows", by=rows)
        took = self._clock.monotonic() - begun
        log.info("%s: tasks %s; %d rows read in %.1f s", self._app.name, sorted(wanted), rows, took)

    def _check_inputs(self, inputs: Sequence[ProcessorInput]) -> None:
        """Raise `IllegalState` if the processor has other inputs by now than this program."""
        there, here = {one.stream for one in inputs}, set(self._app.inputs)
        if there != here:
            found = [
                f"has the input {name}, which this program lacks" for name in sorted(there - here)
            ]
            found += [f"has no input {name} any more" for name in sorted(here - there)]
            raise IllegalState(
                f"{self._app.name} {', '.join(found)}: it was altered since this worker started; run a program "
                "with these inputs"
            )

    def _read(self, ownership: TaskOwnership) -> TaskReader | PlainReader:
        if self._app.cluster is None:
            return self._client.read(list(self._app.inputs), ownership=ownership)
        source = plain_ports(self._client, self._app.cluster).committed_log(_ASK_S)
        return PlainReader(source, ownership, _ASK_S, single=bool(self._app.timers))

    def _note_lost(self, stream: str, count: int, why: SnapshotExpired) -> None:
        lost = self.metrics.values["processor_lost"]
        before = int(lost.get((stream,), 0))
        self.metrics.add("processor_lost", stream, by=count)
        if before.bit_length() != (before + count).bit_length():  # at each doubling
            text = "%s: %d commits of %s are passed over by now: %s"
            log.warning(text, self._app.name, before + count, stream, why)

    def described(self, age_s: float) -> ProcessorInfo:
        """The processor, as of at most ``age_s`` seconds ago. For any thread. Raises: NotReady."""
        now, known = self._clock.monotonic(), self._described
        if known is None or now - known[0] >= age_s:
            known = self._described = now, self._client.processor(self._app.name)
        return known[1]

    def _check_holder(self, tasks: Collection[int], age_s: float = 0.0) -> None:
        """Raise `OwnershipLost` if another worker had one of these tasks at most ``age_s`` seconds ago."""
        for row in self.described(age_s).tasks:
            if row.task in tasks and row.holder != self._holder:
                who = f"{row.holder} has" if row.holder else "no worker has"
                raise OwnershipLost(f"{who} task {row.task} of {self._app.name} now")

    def _check_unsent(self, tasks: Collection[int]) -> None:
        """As `_check_holder`, from time to time: without commits, no reply says that the tasks were taken."""
        if (now := self._clock.monotonic()) >= self._check_at:
            self._check_at = now + SESSION_S
            self._check_holder(tasks, min(MIRROR_S, now - self._taken_at))

    def watch(self) -> None:
        """While handlers are at work for long, check that the tasks are still this worker's. For another thread."""
        now, ownership = self._clock.monotonic(), self._ownership
        if ownership is None or now < max(self._seen_at + SESSION_S, self._watch_at):
            return
        if self._commits.is_held:  # other tasks are another thread's by now
            return
        self._watch_at = now + SESSION_S
        try:
            self._check_holder(ownership.tasks)
        except OwnershipLost as error:
            if self._ownership is ownership and self._reader is not None:
                self._handlers.stop(error)
        except AnabranchError as error:
            log.info("%s: %s", self._app.name, error)

    def _wanted(self) -> frozenset[int]:
        """The assigned tasks, without tasks that another worker took since the assignment."""
        wanted = self._member.serve(0.0)
        if self._generation != self._member.generation:
            self._generation, self._lost = self._member.generation, Lost(self._clock)
        now = self._clock.monotonic()
        if self._lost.tasks and now >= self._check_at:
            self._check_at = now + self._lost.pauses.begin()
            self._lost.update(self._client.processor(self._app.name).tasks, self._holder)
        return wanted - self._lost.tasks

    def _process_batch(self, ownership: TaskOwnership, reader: TaskReader | PlainReader) -> bool:
        """Handle events until the commit is due, and send it. Returns False if nothing was to be committed."""
        app = self._app
        batch = self._commits.new_batch(app.tasks)
        batch.tables = self._tables.of_batch(ownership, self._handlers.batch_bytes)
        if batch.tables is not None:
            batch.tables.refused = self._conflicts.refused
        batch.most_commits = self._conflicts.most_commits
        try:
            return self._fill_and_commit(ownership, reader, batch)
        except BatchConflict as conflict:
            pause_s = self._conflicts.note(conflict, batch)
            if (task := self._conflicts.task) is not None and self._member.keep_alone(task):
                raise TaskMoved(f"{conflict}; its task gets a thread of its own") from conflict
            self._handlers.again(batch, self._commits.rows, ownership.tasks)
            self._sent_at = 0.0  # its commit is due as soon as it is handled
        finally:
            self._tables.end_batch(batch.tables)
        self.stop.wait(pause_s)
        return True

    def _fill_and_commit(
        self, ownership: TaskOwnership, reader: TaskReader | PlainReader, batch: WorkBatch
    ) -> bool:
        app, clock = self._app, self._clock
        due, generation, rested = clock.monotonic() + IDLE_S, self._member.generation, False

        def read() -> list[Piece]:
            nonlocal rested
            rested = self._rest(reader) or rested
            until = min(due, clock.monotonic() + IDLE_S)
            some = reader.cut(until, min(SLICE_BYTES, app.cut_bytes), app.cut_bytes)
            self._seen_at = clock.monotonic()
            return some

        while True:
            self._seen_at = clock.monotonic()
            # Asked before the input is read: the batch has all that came until the previous commit ended.
            is_free = self._commits.wait(0.0)
            self._handlers.due = self._sent_at + app.commit_interval
            some = self._handlers.step(batch, ownership.tasks, clock.wall, read)
            if some:
                self._handled_s = clock.monotonic() - self._seen_at
            if not batch.pieces or batch.is_full(self._handlers.batch_bytes) or self.stop.is_set():
                break
            self._member.serve(0.0)
            # Input that came during a rest is for this commit, unless handling it takes another interval.
            extra = app.commit_interval if rested and reader.has_fetched else 0.0
            due = max(self._sent_at + app.commit_interval + extra, self._handlers.held_until)
            late = clock.monotonic() >= due or self._member.generation != generation
            if late and is_free:
                break
            # While the previous commit is under way, this one can't be sent, so more events are handled.
            if late and not some:
                self._commits.wait(min(max(app.commit_interval, _LEAST_SLICE_S), _MOST_SLICE_S))
            if clock.monotonic() >= max(self._sent_at, self._taken_at) + SESSION_S:
                self._check_unsent(ownership.tasks)
        for stream, count in reader.misplaced.items():
            self.metrics.add("processor_misplaced", stream, by=count)
        reader.misplaced.clear()
        self._is_slow = len(batch.pieces) <= _FEW
        was_full, was_empty = batch.is_full(self._handlers.batch_bytes), not batch.pieces
        self._handlers.set_size(was_full=was_full, was_empty=was_empty)
        has_any = self._handlers.close_batch(batch)
        has_progress = self._note_progress(ownership, reader, batch, wait=not has_any)
        if not (has_any or has_progress or reader.has_moved):
            self._commits.wait()
            return False
        self._sent_at = clock.monotonic()
        consumed = reader.consumed(batch.rows.keys(), batch.left)
        try:
            self._commits.send(ownership, batch, consumed)
            if batch.tables is not None:
                self._commits.wait()
        except BatchConflict:
            reader.put_back(consumed)
            raise
        if batch.tables is not None:
            self._conflicts.passed()
        return True

    def _note_progress(
        self, ownership: TaskOwnership, reader: TaskReader | PlainReader, batch: WorkBatch,
        *, wait: bool,
    ) -> bool:  # fmt: skip
        """If a table is derived, add the row that says up to which commit of its source all is derived.

        ``wait``: until a commit is due. Returns False if there is nothing new to say.
        """
        derivation = self._app.derivation
        if derivation is None or isinstance(reader, PlainReader):
            return False
        if wait:  # commits without events of these tasks are reported together
            left = self._sent_at + self._app.commit_interval - self._clock.monotonic()
            if left > IDLE_S:
                return False
            self.stop.wait(max(0.0, left))
        through = reader.through(derivation.of.source, batch.left)
        if through <= self._derived_through:
            return False
        self._derived_through = through
        key, row = progress_row(ownership.tasks, ownership.task_count, through)
        batch.add_output(derivation.table, (row, key, None, None))
        return True

    def _rest(self, reader: TaskReader | PlainReader) -> bool:
        """Sleep until the next commit is almost due, if input comes slowly. Returns whether it did.

        Slow input is thus read once for a commit: each read costs more than handling a few events.
        """
        due = self._sent_at + self._app.commit_interval - self._handled_s
        left = due - self._clock.monotonic()
        if left <= 0 or not self._is_slow or reader.is_behind:
            return False
        self._clock.sleep(min(left, IDLE_S))
        return True


def join_group(app: Program, client: Client, table: Table, also: Callable[[], None]) -> Membership:
    """Join the workers' group. ``also``: as of `Membership`."""
    topic = stream_topic(state_stream(app.name))
    group = f"{app.scope}.{app.name.partition('/')[2]}.workers"
    member = client.reader_ports().member(group, SESSION_S, table.identity())
    return Membership(member, topic, also)


def make_processor(client: Client, app: Program) -> ProcessorInfo:
    """Create the processor of a program, as `Client.create_processor`. If it exists, add its new stores."""
    inputs: Sequence[str | ProcessorInput] = app.check()
    app.prepare(client)
    client.check_outputs(app.name, [*app.outputs, *app.tables])
    if app.cluster is not None:
        ports, start = plain_ports(client, app.cluster), check_start(app.start)
        if isinstance(start, int):
            start_ms = to_ms(start)
        else:
            start_ms = 0 if start == "begin" else int(ports.clock.wall() * 1000)
        topics = [name.removeprefix(PLAIN) for name in app.inputs]
        with closing(ports.committed_log(_ASK_S)) as source:
            deadline = ports.clock.monotonic() + _ASK_S
            inputs = plain_inputs(source, topics, app.tasks, start_ms, deadline)
    stores = {name: store.kind for name, store in app.stores.items()} or (NO_STORE,)
    info = client.create_processor(
        app.name, inputs, app.tasks, app.start, stores=stores, topology=topology_of(app)
    )
    app.check_created(client)
    return info
