"""Decisions on processors: their making, and who has the right to commit for their tasks."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.decisions.commits.positions import check_tasks, processor_of, task_of
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.turn import Turn
from anabranch.core.ids import split_stream
from anabranch.core.round import ReplyTo
from anabranch.errors import IllegalState, InvalidArgument, TenureLost
from anabranch.schemas.records import (
    CreateProcessor,
    DescribeProcessors,
    ProcessorInfo,
    ProcessorInput,
    ProcessorList,
    ProcessorRow,
    Release,
    Take,
    TaskInfo,
)

TASKS_IN_ANSWER = 128


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
            f"processor {name} exists with {row.tasks} tasks and other inputs, or with streams that were created "
            "again since: choose another name"
        )
    turn.reply(to, ProcessorList((_info(turn, row, 0, 0),)))


def _streams(inputs: Iterable[ProcessorInput]) -> list[tuple[str, str]]:
    return [(one.stream, one.topic_id) for one in inputs]


def describe_processors(turn: Turn, command: DescribeProcessors, to: ReplyTo | None) -> None:
    """One processor and its tasks, or a scope's processors by name; a bounded part of them."""
    check_served(turn, command.scope)
    if command.processor is not None:
        row = processor_of(turn, command.processor)
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


def _info(turn: Turn, row: ProcessorRow, first: int, most: int) -> ProcessorInfo:
    numbers = range(max(0, first), min(row.tasks, max(0, first) + most))
    more = numbers.stop if numbers and numbers.stop < row.tasks else None
    tasks = tuple(_task_info(turn, row.processor, task) for task in numbers)
    return ProcessorInfo(row.processor, row.tasks, row.inputs, row.incarnation, tasks, more)


def _task_info(turn: Turn, processor: str, task: int) -> TaskInfo:
    row = task_of(turn, processor, task)
    return TaskInfo(
        task, row.term, row.holder, row.taken_ms, row.sequence, row.txn_id, row.commit_timestamp,
        row.in_progress, row.positions,
    )  # fmt: skip


def take(turn: Turn, command: Take, to: ReplyTo | None) -> None:
    """Fence the former tenures of these tasks at once; the answer names commits that are being merged meanwhile."""
    row = processor_of(turn, command.processor)
    limits.HOLDER.check(len(command.holder), "a holder")
    tenure = check_tasks(row, command.tasks, command.tenure)
    if len(command.terms) != len(command.tasks):
        raise InvalidArgument("each task needs its term")
    taken = []
    for task, term in zip(command.tasks, command.terms, strict=True):
        known = task_of(turn, command.processor, task)
        if known.tenure == tenure:
            continue  # repeated
        if known.term != term:
            raise TenureLost(
                f"task {task} of {command.processor} was taken by {known.holder or 'somebody'} meanwhile: look "
                "again, and take it if it is yours"
            )
        taken.append((task, known))
    for task, known in taken:
        moved = known._replace(
            term=known.term + 1, tenure=tenure, holder=command.holder, taken_ms=turn.wall_ms
        )
        turn.put(k.task_key(command.processor, task), moved)
    _answer(turn, row, command.tasks, to)


def release(turn: Turn, command: Release, to: ReplyTo | None) -> None:
    """Give tasks up; those of another tenure by now stay so."""
    row = processor_of(turn, command.processor)
    tenure = check_tasks(row, command.tasks, command.tenure)
    for task in command.tasks:
        known = task_of(turn, command.processor, task)
        if known.tenure == tenure:
            gone = known._replace(term=known.term + 1, tenure=b"", holder="", taken_ms=turn.wall_ms)
            turn.put(k.task_key(command.processor, task), gone)
    _answer(turn, row, command.tasks, to)


def _answer(turn: Turn, row: ProcessorRow, tasks: tuple[int, ...], to: ReplyTo | None) -> None:
    infos = tuple(_task_info(turn, row.processor, task) for task in tasks)
    info = ProcessorInfo(row.processor, row.tasks, row.inputs, row.incarnation, infos)
    turn.reply(to, ProcessorList((info,)))
