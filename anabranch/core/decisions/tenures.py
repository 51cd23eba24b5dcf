"""Processors, their tasks, and positions that move with a commit (``docs/processing.md``).

A task's row says who may commit for it, and where it stands. A commit is judged by it when it is decided; its positions
move when it is merged, by the transaction's id: no `Take` comes in between, since it replaces the tenure and leaves
``in_progress`` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.authorize import Right, check_right
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.turn import Turn
from anabranch.core.ids import NO_TXN, TENURE_SIZE, split_stream
from anabranch.core.round import ReplyTo
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotReady,
    TenureLost,
    UnknownProcessor,
)
from anabranch.schemas.codec import encode
from anabranch.schemas.records import (
    Consumed,
    CreateProcessor,
    DescribeProcessors,
    Outcome,
    ProcessorInfo,
    ProcessorList,
    ProcessorRow,
    Release,
    Take,
    TaskInfo,
    TaskPosition,
    TaskRow,
)

HASH_SIZE = 16
TASKS_IN_ANSWER = 128
_NEVER_TAKEN = TaskRow(0, b"", "", 0, 0, NO_TXN, 0, 0, None, ())


def hash_of(processor: str, tenure: bytes) -> bytes:
    """The hash by which rows and `Begin` name a tenure."""
    return hashlib.sha256(processor.encode() + b"\0" + tenure).digest()[:HASH_SIZE]


def digest_of(consumed: Consumed) -> bytes:
    """The hash by which a transaction's row names what it consumes."""
    return hashlib.sha256(encode(consumed)).digest()[:HASH_SIZE]


# -- processors ---------------------------------------------------------------------------------------


def create_processor(turn: Turn, command: CreateProcessor, to: ReplyTo | None) -> None:
    """Make a processor. One that exists with equal tasks and inputs is answered as it is."""
    name, inputs = command.processor, command.inputs
    check_served(turn, split_stream(name)[0])
    limits.TASKS.check(command.tasks, f"processor {name}")
    if command.tasks < 1 or command.tasks & (command.tasks - 1):
        raise InvalidArgument(f"{command.tasks} tasks: a power of two, 1 to {limits.TASKS.value:,}")
    limits.INPUTS.check(len(inputs), f"processor {name}")
    if not inputs or len({one.stream for one in inputs}) < len(inputs):
        raise InvalidArgument(f"processor {name} needs inputs, each once")
    for one in inputs:
        split_stream(one.stream)
        if one.record < 0 or one.timestamp < 0 or len(one.topic_id) not in (0, 32):
            raise InvalidArgument(
                f"the start of {one.stream}: an offset and a time from 0, and a topic's id"
            )
    row = turn.state.processors.get(name)
    if row is None:
        limits.PROCESSORS.check(len(turn.state.processors) + 1, "a control partition")
        tasks = sum(each.tasks for each in turn.state.processors.values())
        limits.ALL_TASKS.check(tasks + command.tasks, "a control partition")
        row = ProcessorRow(name, command.tasks, inputs, 0, turn.lane)
        turn.put(k.processor_key(name), row)
    elif (row.tasks, _streams(row.inputs)) != (command.tasks, _streams(inputs)):
        raise IllegalState(
            f"processor {name} exists with {row.tasks} tasks and other inputs, or inputs that were made anew since: "
            "choose another name"
        )
    turn.reply(to, ProcessorList((_info(turn, row, 0, 0),)))


def _streams(inputs: Iterable[object]) -> list[tuple[str, str]]:
    return [(one.stream, one.topic_id) for one in inputs]  # type: ignore[attr-defined]


def describe_processors(turn: Turn, command: DescribeProcessors, to: ReplyTo | None) -> None:
    """One processor and its tasks, or a scope's processors by name; a bounded part of them."""
    check_served(turn, command.scope)
    if command.processor is not None:
        row = _processor(turn, command.processor)
        info = _info(turn, row, command.task, TASKS_IN_ANSWER)
        turn.look(len(info.tasks))
        turn.reply(to, ProcessorList((info,)))
        return
    turn.look(len(turn.state.processors))
    found: list[ProcessorInfo] = []
    for name, row in sorted(turn.state.processors.items()):
        if name <= (command.after or "") or split_stream(name)[0] != command.scope:
            continue
        if len(found) == TASKS_IN_ANSWER:
            turn.reply(to, ProcessorList(tuple(found), found[-1].processor))
            return
        found.append(_info(turn, row, 0, 0))
    turn.reply(to, ProcessorList(tuple(found)))


def _processor(turn: Turn, name: str) -> ProcessorRow:
    row = turn.state.processors.get(name)
    if row is None:
        raise UnknownProcessor(f"there is no processor {name!r}: create it first")
    return row


def _info(turn: Turn, row: ProcessorRow, first: int, most: int) -> ProcessorInfo:
    numbers = range(max(0, first), min(row.tasks, max(0, first) + most))
    more = numbers.stop if numbers and numbers.stop < row.tasks else None
    tasks = tuple(_task_info(turn, row.processor, task) for task in numbers)
    return ProcessorInfo(row.processor, row.tasks, row.inputs, row.incarnation, tasks, more)


def _task_info(turn: Turn, processor: str, task: int) -> TaskInfo:
    row = _task(turn, processor, task)
    return TaskInfo(
        task, row.term, row.holder, row.taken_ms, row.sequence, row.txn_id, row.commit_timestamp,
        row.in_progress, row.positions,
    )  # fmt: skip


def _task(turn: Turn, processor: str, task: int) -> TaskRow:
    return turn.state.tasks.get((processor, task), _NEVER_TAKEN)


# -- tenures ------------------------------------------------------------------------------------------


def take(turn: Turn, command: Take, to: ReplyTo | None) -> None:
    """Fence whoever had these tasks, at once; the answer names commits that are being merged meanwhile."""
    row = _processor(turn, command.processor)
    limits.HOLDER.check(len(command.holder), "a holder")
    tenure = _check_tasks(row, command.tasks, command.tenure)
    if len(command.terms) != len(command.tasks):
        raise InvalidArgument("each task needs its term")
    taken = []
    for task, term in zip(command.tasks, command.terms, strict=True):
        known = _task(turn, command.processor, task)
        if known.tenure == tenure:
            continue  # repeated
        if known.term != term:
            raise TenureLost(
                f"task {task} of {command.processor} was taken by {known.holder or 'somebody'} meanwhile, nothing was "
                "changed: look again, and take it if it is yours"
            )
        taken.append((task, known))
    for task, known in taken:
        moved = known._replace(
            term=known.term + 1, tenure=tenure, holder=command.holder, taken_ms=turn.wall_ms
        )
        turn.put(k.task_key(command.processor, task), moved)
    _answer(turn, row, command.tasks, to)


def release(turn: Turn, command: Release, to: ReplyTo | None) -> None:
    """Give tasks up; those that somebody else has by now stay theirs."""
    row = _processor(turn, command.processor)
    tenure = _check_tasks(row, command.tasks, command.tenure)
    for task in command.tasks:
        known = _task(turn, command.processor, task)
        if known.tenure == tenure:
            gone = known._replace(term=known.term + 1, tenure=b"", holder="", taken_ms=turn.wall_ms)
            turn.put(k.task_key(command.processor, task), gone)
    _answer(turn, row, command.tasks, to)


def _check_tasks(row: ProcessorRow, tasks: tuple[int, ...], tenure: bytes) -> bytes:
    """The tenure's hash. `InvalidArgument` for tasks that are none, or named twice."""
    if len(tenure) != TENURE_SIZE:
        raise InvalidArgument(f"a tenure has {TENURE_SIZE} bytes")
    if not tasks or len(set(tasks)) < len(tasks) or not all(0 <= t < row.tasks for t in tasks):
        raise InvalidArgument(f"tasks of {row.processor} are 0 to {row.tasks - 1}, each once")
    limits.TASKS_TAKEN.check(len(tasks), "one command")
    return hash_of(row.processor, tenure)


def _answer(turn: Turn, row: ProcessorRow, tasks: tuple[int, ...], to: ReplyTo | None) -> None:
    infos = tuple(_task_info(turn, row.processor, task) for task in tasks)
    info = ProcessorInfo(row.processor, row.tasks, row.inputs, row.incarnation, infos)
    turn.reply(to, ProcessorList((info,)))


# -- positions in a commit ----------------------------------------------------------------------------


class _Step(NamedTuple):
    """A task, its row, and where the commit moves it."""

    task: int
    row: TaskRow
    sequence: int
    positions: tuple[TaskPosition, ...]


def moved_by(turn: Turn, consumed: Consumed, txn_id: bytes) -> TaskRow | None:
    """The row of a task that this transaction moved last: so it is committed. None: it did not, so far as is known."""
    for step in _steps(turn, consumed):
        if step.row.txn_id == txn_id:
            return step.row
    return None


def judge(turn: Turn, consumed: Consumed, txn_id: bytes, scope: str, lane: str) -> None:
    """Whether a transaction of that scope and lane may move these tasks now.

    Raises: TenureLost, NotReady (another one is being merged), InvalidArgument, NotAuthorized, UnknownProcessor.
    """
    if split_stream(consumed.processor)[0] != scope:
        raise InvalidArgument(
            f"{consumed.processor} is of another scope than the transaction, {scope!r}"
        )
    check_right(turn.state, lane, Right.PROCESS, consumed.processor)
    row = _processor(turn, consumed.processor)
    steps = list(_steps(turn, consumed))
    tenure = _check_tasks(row, tuple(step.task for step in steps), consumed.tenure)
    lost = [step for step in steps if step.row.tenure != tenure]
    if lost:
        holders = sorted({step.row.holder or "nobody" for step in lost})
        raise TenureLost(
            f"task {', '.join(str(step.task) for step in lost[:20])} of {row.processor} is not held by this tenure: "
            f"{', '.join(holders)[:200]} has it. Take your tasks again; their rows say what is committed"
        )
    for step in steps:
        if step.row.in_progress not in (None, txn_id):
            raise NotReady(f"another commit of task {step.task} of {row.processor} is being merged")
        if step.sequence != step.row.sequence + 1:
            raise InvalidArgument(
                f"sequence {step.sequence} of task {step.task} of {row.processor}, which stands at "
                f"{step.row.sequence}: take your tasks again; their rows say what is committed"
            )
        _check_positions(row, step)


def _check_positions(row: ProcessorRow, step: _Step) -> None:
    before = {position.input: position for position in step.row.positions}
    if len({position.input for position in step.positions}) < len(step.positions):
        raise InvalidArgument(f"task {step.task} has an input twice")
    for position in step.positions:
        if not 0 <= position.input < len(row.inputs):
            raise InvalidArgument(f"{row.processor} has no input {position.input}")
        inside = (position.segment, position.offset)
        if position.record < 0 or (inside != (-1, -1) and min(inside) < 0):
            raise InvalidArgument(f"task {step.task}: {position} is no place in a history")
        start = row.inputs[position.input].record
        known = before.get(position.input, TaskPosition(position.input, start, 0))
        same = position.segment == known.segment
        if position.record < known.record or (
            position.record == known.record
            and (position.segment < 0 <= known.segment or (same and position.offset < known.offset))
        ):
            raise InvalidArgument(
                f"task {step.task} of {row.processor} goes back in {row.inputs[position.input].stream}, from record "
                f"{known.record} to {position.record}: positions only rise"
            )


def begin_moving(turn: Turn, consumed: Consumed, txn_id: bytes) -> None:
    """Log on its tasks that this transaction is decided: no other commit moves them until it ends."""
    for step in _steps(turn, consumed):
        turn.put(k.task_key(consumed.processor, step.task), step.row._replace(in_progress=txn_id))


def move(
    turn: Turn, consumed: Consumed, txn_id: bytes, commit_timestamp: int, committed: int
) -> None:
    """Move the tasks: the transaction is committed in this round."""
    for step in _steps(turn, consumed):
        positions = {position.input: position for position in step.row.positions}
        positions |= {position.input: position for position in step.positions}
        moved = step.row._replace(
            sequence=step.sequence,
            txn_id=txn_id,
            commit_timestamp=commit_timestamp,
            committed=committed,
            in_progress=None,
            positions=tuple(positions[number] for number in sorted(positions)),
        )
        turn.put(k.task_key(consumed.processor, step.task), moved)


def give_back(turn: Turn, consumed: Consumed | None, txn_id: bytes) -> None:
    """Let others commit for the tasks again: the decided transaction is aborted after all."""
    for step in _steps(turn, consumed) if consumed is not None else ():
        if step.row.in_progress == txn_id:
            turn.put(k.task_key(consumed.processor, step.task), step.row._replace(in_progress=None))


def _steps(turn: Turn, consumed: Consumed) -> Iterator[_Step]:
    for step in consumed.steps:
        for task in step.tasks:
            row = _task(turn, consumed.processor, task)
            yield _Step(task, row, step.sequence, step.positions)


def outcome(scope: str, row: TaskRow, owner: str) -> Outcome:
    """The outcome of a one-shot that a task's row names."""
    return Outcome(
        txn_id=row.txn_id, state="COMMITTED", scope=scope, name=None,
        commit_timestamp=row.commit_timestamp, committed=row.committed, rejected=0, left_out=0, reason="",
        begun_ms=0, finished_ms=0, keepalive_ms=0, streams=(), writers=(), owner=owner,
    )  # fmt: skip
