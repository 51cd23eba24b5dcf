"""A worker: takes tasks, brings their state here, and handles cut after cut, each in one commit.

Durable order of a commit: handlers change nothing but the cut in memory; one transaction has outputs, state and
positions; its answer is COMMITTED; only then RocksDB is written. Whatever fails before leaves nothing. In any doubt
the worker drops what is computed, takes its tasks again, and believes their rows.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.client.client import Client
from anabranch.client.connect import connect
from anabranch.client.transaction import Transaction
from anabranch.core.ids import state_stream
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    InvalidArgument,
    RetryError,
    TenureLost,
    TransactionAborted,
    WriteFailed,
)
from anabranch.processing.app import Processor
from anabranch.processing.cut import Cut
from anabranch.processing.handlers import HandlerFailed, Handlers, Passed, Place
from anabranch.processing.membership import AllTasks, Membership
from anabranch.processing.state import StateReader
from anabranch.processing.table import Table
from anabranch.reading.tasks.reader import Piece, TaskReader
from anabranch.schemas.records import Consumed
from anabranch.topics.names import stream_topic
from anabranch.types import Tenure

log = logging.getLogger("anabranch.processor")

NO_STORE = "-"  # the one of a processor without stores: its topic has the partitions that the group hands out
SLICE_BYTES = 256 << 10  # so much is read before it is handled
SESSION_S = 6.0  # a worker that is not heard for so long loses its tasks
_IDLE_S = 0.25
_ASK_S = 30.0
_PAUSES_S = (0.05, 2.0)  # after an error that passes: the first and the longest
_RESTORE_S = 600.0
_DOUBT_S = 60.0  # a commit is repeated so long, before the tasks are taken again
_ENDS_S = 10.0  # so often the ends are looked up that the folder may read on from
_REDONE = 5  # times that one commit may be aborted by others
_HANDOVER_S = 3.0


class Worker:
    """One worker of a processor. One thread; `stop` may be set by another."""

    def __init__(
        self,
        app: Processor,
        client: Client,
        folder: Path,
        *,
        tasks: AllTasks | None = None,
        standby: bool = False,
        handlers: Callable[[Processor, Sequence[str]], Handlers] = Handlers,
    ) -> None:
        """``tasks``: None: as the workers' group says. Raises as `Client.create_processor`."""
        self._app = app
        self._client = client
        self._standby = standby
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(2).hex()}"
        self._stack = ExitStack()
        self.stop = threading.Event()
        self.commits = self.events = self.dead_letters = self.rows_read = 0
        self._tenure: Tenure | None = None
        self._reader: TaskReader | None = None
        self._generation = -1
        self._lost: frozenset[int] = frozenset()
        self._look_again = 0.0
        self._committed_at = 0.0
        try:
            info = client.create_processor(
                app.name, app.check(), app.tasks, app.start, stores=tuple(app.stores) or (NO_STORE,)
            )
            self._incarnation = info.incarnation
            self._handlers = handlers(app, info.stores)
            self._stack.callback(self._handlers.close)
            self._table = Table(folder)
            self._stack.callback(self._table.close)
            ports = client.reader_ports()
            self._clock = ports.clock
            self._source = self._stack.enter_context(closing(ports.committed_log(_ASK_S)))
            self._state = self._state_reader()
            topic = stream_topic(state_stream(app.name))
            group = f"{app.scope}.{app.name.partition('/')[2]}.workers"
            self._member: Membership | AllTasks = tasks or Membership(ports.member(group), topic)
            self._stack.callback(self._member.close)
        except BaseException:
            self._stack.close()
            raise
        self._ends_due = 0.0

    def _state_reader(self) -> StateReader:
        return StateReader(self._source, self._table, self._app.name, self._incarnation)

    @property
    def tasks(self) -> Collection[int]:
        """The tasks that it has."""
        tenure = self._tenure
        return () if tenure is None else tenure.tasks.keys()

    # -- its life -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop` is set. Raises: FixCallError, HandlerFailed."""
        pause, longest = _PAUSES_S
        while not self.stop.is_set():
            try:
                self.step()
                pause, longest = _PAUSES_S
            except (RetryError, BeginAgainError, AskOutcomeError) as error:
                log.warning("%s: %s; its tasks are taken again", self._app.name, error)
                self._drop()
                if isinstance(error, TenureLost):
                    self._lost, self._look_again = frozenset(range(self._app.tasks)), 0.0
                self.stop.wait(pause)
                pause = min(2 * pause, longest)

    def close(self) -> None:
        """Give the tasks up, and leave. What was committed stays."""
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            with suppress(AnabranchError):
                self._client.release(tenure, timeout=_HANDOVER_S)
        self._drop()
        self._stack.close()

    def step(self) -> None:
        """One round: hear the group, and handle and commit what has come."""
        wanted = self._wanted()
        if self._tenure is None or wanted != self._tenure.tasks.keys():
            self._take(wanted)
        if self._tenure is None or self._reader is None:
            self._member.serve(0.0 if self._standby else _IDLE_S)
            self._follow(set())
        elif not self._commit_cut(self._tenure, self._reader):
            self._follow(self._tenure.tasks)

    def _follow(self, own: Collection[int]) -> None:
        """Keep the copies of other workers' tasks warm."""
        if self._standby:
            others = set(range(self._app.tasks)) - set(own)
            self._state.follow(others, self._clock.monotonic() + _IDLE_S)

    def _drop(self) -> None:
        """Forget what is computed."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._tenure = None

    def _take(self, wanted: frozenset[int]) -> None:
        """Take the tasks of the group's hint, bring their state here, and begin to read."""
        before = self._tenure
        self._drop()
        if before is not None and before.tasks.keys() - wanted:
            left = {task: info for task, info in before.tasks.items() if task not in wanted}
            self._client.release(replace(before, tasks=left))
        if not wanted:
            return
        tenure = self._client.take(self._app.name, wanted, holder=self._holder)
        if tenure.incarnation != self._incarnation:
            self._incarnation = tenure.incarnation
            self._state = self._state_reader()
        self._state.forget(wanted)
        begun = self._clock.monotonic()
        rows = self._state.restore(tenure.tasks, begun + _RESTORE_S)
        self._reader = self._client.read(list(self._app.inputs), tenure=tenure)
        self._tenure = tenure
        self.rows_read += rows
        took = self._clock.monotonic() - begun
        log.info("%s: tasks %s; %d rows read in %.1f s", self._app.name, sorted(wanted), rows, took)

    def _wanted(self) -> frozenset[int]:
        """The group's tasks, without those that another one took since the group gave them here.

        Two that both think that a task is theirs would take it in turn without end. So the one that lost it waits
        until the group assigns again, or the task is released.
        """
        wanted = self._member.serve(0.0)
        if self._generation != self._member.generation:
            self._generation, self._lost = self._member.generation, frozenset()
        now = self._clock.monotonic()
        if self._lost and now >= self._look_again:
            self._look_again = now + SESSION_S
            rows = self._client.processor(self._app.name).tasks
            self._lost = frozenset(row.task for row in rows if row.holder not in ("", self._holder))
        return wanted - self._lost

    # -- a commit -------------------------------------------------------------------------------------

    def _commit_cut(self, tenure: Tenure, reader: TaskReader) -> bool:
        """Handle what comes until the commit is due, and commit it. False: there was nothing."""
        app, clock = self._app, self._clock
        cut, passed = self._new_cut(), dict[Place, Passed]()
        tried: dict[Place, int] = {}
        pieces: list[Piece] = []
        until = clock.monotonic() + _IDLE_S
        while True:
            some = reader.cut(until, min(SLICE_BYTES, app.cut_bytes))
            try:
                if not pieces:
                    self._fire(cut, tenure)
                pieces += some
                self._handlers.handle(cut, some, passed)
            except HandlerFailed as failed:
                self._judge(failed, tried, passed)
                cut = self._redo(tenure, pieces, tried, passed)
            until = self._committed_at + app.commit_interval
            if not pieces or cut.size >= app.cut_bytes or clock.monotonic() >= until:
                break
        cut.open = False
        if not (pieces or cut.rows or cut.outputs or reader.has_moved):
            return False
        self._commit(tenure, cut, reader.consumed(cut.rows.keys()))
        self._committed_at = clock.monotonic()
        self.commits += 1
        self.events += sum(len(piece.events) for piece in pieces)
        self.dead_letters += len(passed)
        return True

    def _fire(self, cut: Cut, tenure: Tenure) -> None:
        self._handlers.fire_wall(cut, tenure.tasks, int(self._clock.wall() * 1000))

    def _new_cut(self) -> Cut:
        return Cut(self._table, self._app.tasks)

    def _redo(
        self, tenure: Tenure, pieces: list[Piece], tried: dict[Place, int],
        passed: dict[Place, Passed],
    ) -> Cut:  # fmt: skip
        """Handle all of the cut from the beginning: a handler failed, and left no trace."""
        while True:
            cut = self._new_cut()
            try:
                self._fire(cut, tenure)
                self._handlers.handle(cut, pieces, passed)
            except HandlerFailed as failed:
                self._judge(failed, tried, passed)
            else:
                return cut

    def _judge(
        self, failed: HandlerFailed, tried: dict[Place, int], passed: dict[Place, Passed]
    ) -> None:
        """Whether the cut is tried again, without the event perhaps. Raises the failure if not."""
        event = failed.event
        place = ("", 0, 0) if event is None else (event.stream, event.partition, event.offset)
        tried[place] = tried.get(place, 0) + 1
        what = "a timer or batch" if event is None else f"{place[0]}[{place[1]}] offset {place[2]}"
        text = "%s: the handler of %s failed: %s"
        log.warning(text, self._app.name, what, failed, exc_info=failed.error)
        if tried[place] <= self._app.retries:
            self.stop.wait(min(2.0, 0.05 * 2 ** tried[place]))
        elif self._app.dead_letter is None or event is None:
            raise failed
        else:
            passed[place] = Passed(event, str(failed))

    def _commit(self, tenure: Tenure, cut: Cut, consumed: Consumed) -> None:
        """One transaction; then the folder. Raises: BeginAgainError, AskOutcomeError, RetryError, FixCallError."""
        sequences = {task: step.sequence for step in consumed.steps for task in step.tasks}
        state = {
            task: self._state.records(rows, sequences[task]) for task, rows in cut.rows.items()
        }
        ends = self._ends(tenure)
        for redone in range(_REDONE + 1):
            try:
                with self._client.begin(tenure.scope, tenure=tenure) as txn:
                    for stream, events in cut.outputs.items():
                        txn.write_many(stream, events)
                    for stream, batches in cut.batches.items():
                        for batch in batches:
                            txn.write_batch(stream, batch)
                    for task, rows in state.items():
                        txn.write_state(task, rows)
                    self._until_known(txn, consumed)
                break
            except (TransactionAborted, WriteFailed) as error:
                # The same bytes under a new id: no handler runs again.
                if redone == _REDONE:
                    raise
                log.warning("%s: the commit is made again: %s", self._app.name, error)
            except InvalidArgument as error:
                found = self._client.processor(self._app.name).tasks
                if all(
                    sequences.get(row.task, 1) == row.sequence + 1
                    for row in found
                    if row.task in sequences
                ):
                    raise
                raise TenureLost(f"tasks stand elsewhere than was known: {error}") from error
        if self._app.stores:
            marks = {
                task: self._state.mark_after(
                    task, sequence if task in state else None, ends.get(task)
                )
                for task, sequence in sequences.items()
            }
            self._table.write(((task, rows.items()) for task, rows in cut.rows.items()), marks)

    def _until_known(self, txn: Transaction, consumed: Consumed) -> None:
        give_up = self._clock.monotonic() + _DOUBT_S
        pause, longest = _PAUSES_S
        while True:
            try:
                txn.commit(consumed=consumed)
                return
            except WriteFailed:
                raise
            except (AskOutcomeError, RetryError) as error:
                if self._clock.monotonic() >= give_up:
                    raise
                log.info("%s: the commit is asked for again: %s", self._app.name, error)
            self.stop.wait(pause)
            pause = min(2 * pause, longest)

    def _ends(self, tenure: Tenure) -> dict[int, int]:
        """Ends of the state's partitions before a commit, now and then.

        If that commit succeeds, all below is of this tenure's own commits, and in the table: so the folder may be
        read on from there.
        """
        now = self._clock.monotonic()
        if now < self._ends_due or not self._app.stores:
            return {}
        self._ends_due = now + _ENDS_S
        return self._state.ends(tenure.tasks, now + 1.0)


def run_worker(
    app: Processor,
    bootstrap: str | None,
    *,
    folder: str | Path | None,
    standby: bool,
    **options: Any,
) -> None:
    """See `Processor.run`."""
    with ExitStack() as stack:
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="anabranch-processor-")
            folder = stack.enter_context(made)
        client = stack.enter_context(connect(bootstrap, **options))
        worker = Worker(app, client, Path(folder), standby=standby)
        stack.callback(worker.close)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.signal(number, lambda *_: worker.stop.set())
                stack.callback(signal.signal, number, before)
        worker.run()
