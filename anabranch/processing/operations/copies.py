"""Copies of processors: a processor under a new name, or a savepoint, from one instant of another one.

1. The copy is begun: its row names the origin, and no worker can take its tasks (phase 'copying').
2. The origin's state is read into a folder while the origin runs.
3. The origin's tasks are taken for a moment: no commit moves them. The rest of the state is read, up to the commit
   that each task's row names, and the tasks are released. Positions and state of all tasks are now those of one
   instant. State can't be read exactly while commits change it: compaction may delete a row's former value.
4. State and positions are committed to the copy, and the copy is ended: workers may take its tasks, or, for a
   savepoint, only copies are made of it.

A call that ends in the middle leaves a copy that nothing runs. The next call begins it again.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.client.client import Client
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    NotReady,
    OwnershipLost,
    UnknownProcessor,
)
from anabranch.processing.commits import commit_until_known
from anabranch.processing.state import StateReader
from anabranch.processing.table import Table
from anabranch.protocol.legal_names import COPYING, SAVEPOINT, is_plain
from anabranch.protocol.schemas.records import (
    Consumed,
    ProcessorInfo,
    TaskInfo,
    TaskPosition,
    TaskStep,
)
from anabranch.reading.committed_log import CommittedLog
from anabranch.types import TaskOwnership

log = logging.getLogger("anabranch.processor")

_ASK_S = 30.0
_SILENT_S = 60.0  # reading state fails after this time without a record of it
_LOOK_S = 0.25
_TRIES = 5  # how often the origin's tasks are taken, if workers take them back meanwhile
_PART_BYTES = 512 << 10  # of rows in one commit, about
_PART_TASKS = 64
_ROWS_END = b"\xff\xff"  # greater than the prefix of every store


def copy_processor(
    client: Client,
    origin: str,
    name: str,
    *,
    savepoint: bool = False,
    folder: str | Path | None = None,
) -> ProcessorInfo:
    """Copy a processor: ``name``, in the same scope, starts with the positions and state that ``origin`` has now.

    ``origin`` continues; it pauses for a second or so. ``savepoint``: the copy is kept, and never run. An origin
    that is a savepoint itself does not change. ``folder``: holds the state meanwhile; None: a temporary one. If the
    call fails or is killed, call it again.

    Raises: UnknownProcessor, IllegalState (``name`` exists, and is no copy of ``origin`` that was begun;
    ``origin`` is such a copy, or was reset meanwhile; an input was created again), SnapshotExpired (retention has
    deleted events that ``origin`` has not consumed; nothing was changed), InvalidArgument (another scope),
    NotReady, FeatureNotEnabled, NotAuthorized, DeadlineExceeded.
    """
    info = client.processor(origin)
    if info.phase == COPYING:
        raise IllegalState(f"{origin} is a copy that is not complete: copy it when it is")
    resets = _resets_of_copy(client, origin, name)
    _check_inputs(client, info)
    copy = client.mark_copy(name, origin, COPYING, origin_resets=info.resets, resets=resets)
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-copy-"))
        table = Table(Path(folder))
        stack.callback(table.close)
        source = stack.enter_context(closing(client.reader_ports().committed_log(_ASK_S)))
        state = StateReader(source, table, origin, info.incarnation)
        if info.phase == SAVEPOINT:
            tasks: Mapping[int, TaskInfo] = {task.task: task for task in info.tasks}
            if info.stores:
                state.restore(tasks, _SILENT_S, lambda: None)
        else:
            tasks = _at_one_instant(client, info, state, name)
        _Filling(client, copy, source, table).fill(tasks)
    return client.mark_copy(
        name,
        origin,
        SAVEPOINT if savepoint else "",
        origin_resets=info.resets,
        resets=copy.resets,
    )


def _resets_of_copy(client: Client, origin: str, name: str) -> int:
    """How often the copy was reset; 0 if it does not exist. Raises: IllegalState (it exists, and was not begun)."""
    try:
        known = client.processor(name)
    except UnknownProcessor:
        return 0
    if known.origin == origin and known.phase != COPYING:
        raise IllegalState(f"{name} is a complete copy of {origin} already: choose another name")
    if (known.origin, known.phase) != (origin, COPYING):
        raise IllegalState(f"{name} exists, and is no copy of {origin}: choose another name")
    return known.resets


def _check_inputs(client: Client, info: ProcessorInfo) -> None:
    """Raise `SnapshotExpired` if the next events of a processor are deleted. Plain topics are not checked."""
    streams = [one.stream for one in info.inputs if not is_plain(one.stream)]
    if not streams:
        return
    all_tasks = TaskOwnership(
        info.processor, info.task_count, info.inputs, {one.task: one for one in info.tasks}, b"",
        info.stores, info.incarnation,
    )  # fmt: skip
    with closing(client.read(streams, ownership=all_tasks)) as reader:
        give_up = reader.clock.monotonic() + _ASK_S
        while reader.clock.monotonic() < give_up:
            if reader.cut(reader.clock.monotonic() + _LOOK_S, 1) or not reader.is_behind:
                return


def _at_one_instant(
    client: Client, info: ProcessorInfo, state: StateReader, name: str
) -> Mapping[int, TaskInfo]:
    """The tasks of the origin as of one instant, whose state is in the table then."""
    origin, numbers = info.processor, range(info.task_count)
    for _ in range(_TRIES):
        if info.stores:
            state.catch_up(numbers, _SILENT_S)
        try:
            ownership = client.take_tasks(origin, holder=f"copy to {name}")
        except OwnershipLost:
            continue
        try:
            if info.stores:
                state.restore(ownership.tasks, _SILENT_S, lambda: None)
        except IllegalState:
            if _is_held(client, info, ownership):
                raise
        else:
            if _is_held(client, info, ownership):
                return ownership.tasks
        finally:
            with suppress(AnabranchError):  # workers take them in half a minute, too
                client.release_tasks(ownership)
    raise NotReady(
        f"workers of {origin} took its tasks back: copy it again when no worker starts or stops"
    )


def _is_held(client: Client, info: ProcessorInfo, ownership: TaskOwnership) -> bool:
    """Whether no commit has moved a task since it was taken.

    Raises: IllegalState (the origin was reset or altered, or has more stores, whose numbers the copy lacks).
    """
    now = client.processor(info.processor)
    if (now.resets, now.stores) != (info.resets, info.stores):
        raise IllegalState(f"{info.processor} was reset or altered meanwhile: copy it again")
    return all(
        (task.term, task.sequence) == (held.term, held.sequence)
        for task in now.tasks
        if (held := ownership.tasks.get(task.task)) is not None
    )


@dataclass(slots=True)
class _Part:
    """Rows that one commit gives a task, and with the last rows its positions."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    positions: tuple[TaskPosition, ...] = ()


class _Filling:
    """Commits the state and positions of another processor to a copy."""

    def __init__(
        self, client: Client, copy: ProcessorInfo, source: CommittedLog, table: Table
    ) -> None:
        self._client, self._copy, self._table = client, copy, table
        self._clock = source.clock
        self._state = StateReader(source, table, copy.processor, copy.incarnation)
        self._ownership = client.take_tasks(
            copy.processor, holder=f"copy of {copy.origin}", copying=True
        )
        self._sequences = {task: one.sequence for task, one in self._ownership.tasks.items()}

    def fill(self, tasks: Mapping[int, TaskInfo]) -> None:
        """Commit all rows of the table, and these tasks' positions."""
        parts: dict[int, _Part] = {}
        size = 0
        for task, info in sorted(tasks.items()):
            part = _Part()
            for row, value in self._table.scan(task, b"", _ROWS_END):
                part.rows[row] = value
                size += len(row) + len(value)
                if size >= _PART_BYTES:
                    self._commit(parts | {task: part})
                    parts, part, size = {}, _Part(), 0
            part.positions = info.positions
            if part.rows or part.positions:
                parts[task] = part
            if len(parts) >= _PART_TASKS:
                self._commit(parts)
                parts, size = {}, 0
        if parts:
            self._commit(parts)

    def _commit(self, parts: Mapping[int, _Part]) -> None:
        """Commit rows and positions of some tasks."""
        steps = []
        with self._client.begin(self._ownership.scope, ownership=self._ownership) as txn:
            for task, part in parts.items():
                self._sequences[task] += 1
                sequence = self._sequences[task]
                if part.rows:
                    txn.write_state(task, self._state.records(task, part.rows, sequence))
                steps.append(TaskStep((task,), sequence, part.positions))
            consumed = Consumed(self._copy.processor, self._ownership.fencing_token, tuple(steps))
            commit_until_known(txn, consumed, self._clock)
        log.info("%s: %d tasks copied in part", self._copy.processor, len(parts))
