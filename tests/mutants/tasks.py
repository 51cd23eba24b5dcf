"""Planted bugs in task ownership, in positions that move with commits, in reading by tasks, and in batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from anabranch.core.decisions import decide, one_shot, ownership, positions
from anabranch.core.decisions.turn import Turn
from anabranch.processing.batch import WorkBatch
from anabranch.processing.handlers import Handlers
from anabranch.processing.operations import copies
from anabranch.processing.threads import Part
from anabranch.processing.worker import Worker
from anabranch.protocol.ids import hash_of
from anabranch.protocol.schemas.records import (
    AlterProcessor,
    CommitRecord,
    Consumed,
    CopyProcessor,
    CreateProcessor,
    TakeTasks,
    TaskInfo,
    TaskPosition,
    TaskRow,
)
from anabranch.reading import task_reader as reader
from anabranch.reading.slices import Piece, Place
from anabranch.reading.task_reader import Assignment, TaskReader
from anabranch.testing.driver import Driver
from tests.mutants.planting import Planted, wrapping


def _judged(change: Callable[[Any, bytes, bytes], Any]) -> Planted:
    """`positions.judge` sees its steps changed. ``change``: (step, hash of the commit's fencing token,
    transaction).
    """
    judge, steps = positions.judge, positions._steps

    def seen(turn: Turn, consumed: Consumed, txn_id: bytes, *rest: Any) -> None:
        fencing_hash = hash_of(consumed.processor, consumed.fencing_token)
        changed = lambda *of: (change(step, fencing_hash, txn_id) for step in steps(*of))  # noqa: E731
        with patch.object(positions, "_steps", changed):
            judge(turn, consumed, txn_id, *rest)

    return patch.object(positions, "judge", seen)


def any_owner() -> Planted:
    """Whoever has a task's sequence and positions may commit for it."""
    return _judged(
        lambda step, fencing_hash, _: step._replace(
            row=step.row._replace(fencing_hash=fencing_hash)
        )
    )


def any_sequence() -> Planted:
    """A stretch is committed though the one before it is not, or another one was in its place."""
    return _judged(lambda step, *_: step._replace(sequence=step.row.sequence + 1))


def two_in_flight() -> Planted:
    """A commit is judged as if no other one of its tasks were being merged."""
    return _judged(lambda step, *_: step._replace(row=step.row._replace(in_progress=None)))


def decided_unmarked() -> Planted:
    """A decided commit does not show in its tasks' rows until it is merged."""
    return patch.object(positions, "begin_moving", lambda *_: None)


def judged_early_only() -> Planted:
    """A commit is judged when it comes, and not when it is decided: its tasks may be another's by then."""
    judge = positions.judge

    def seen(turn: Turn, consumed: Consumed, txn_id: bytes, *rest: Any) -> None:
        if txn_id not in turn.state.committing:
            judge(turn, consumed, txn_id, *rest)

    return patch.object(positions, "judge", seen)


def taken_too_early() -> Planted:
    """A `TakeTasks` is answered as if no former commit were being merged, with the positions before it."""
    info: Callable[..., TaskInfo] = ownership._task_info

    def blind(*asked: Any) -> TaskInfo:
        return replace(info(*asked), in_progress=None)

    return patch.object(ownership, "_task_info", blind)


@contextmanager
def moved_when_decided() -> Iterator[None]:
    """Positions move with the decision, not with the merge."""
    move = positions.move

    def begin(turn: Turn, consumed: Consumed, txn_id: bytes) -> None:
        move(turn, consumed, txn_id, turn.hybrid_time, 0, {})

    def stay(turn: Turn, consumed: Consumed, txn_id: bytes, *more: Any) -> TaskRow:
        row = next(positions._steps(turn, consumed)).row
        return row if row.txn_id == txn_id else move(turn, consumed, txn_id, *more)

    with patch.object(positions, "begin_moving", begin), patch.object(positions, "move", stay):
        yield


def not_given_back() -> Planted:
    """A commit that is aborted after its decision keeps its tasks."""
    return patch.object(positions, "give_back", lambda *_: None)


@contextmanager
def one_task_moves() -> Iterator[None]:
    """Of the tasks of a commit the first one alone moves."""
    move = positions.move

    def first(turn: Turn, consumed: Consumed, *more: Any) -> TaskRow:
        step = replace(consumed.steps[0], tasks=consumed.steps[0].tasks[:1])
        return move(turn, replace(consumed, steps=(step,)), *more)

    with patch.object(positions, "move", first):
        yield


def state_by_key() -> Planted:
    """Rows of a state go to the task of their key, not to the one that they were written for."""
    return patch.object(one_shot, "is_state", lambda _: False)


@contextmanager
def state_untold() -> Iterator[None]:
    """A task's row does not say with which sequence its state was changed last."""
    move = positions.move

    def silent(turn: Turn, consumed: Consumed, txn_id: bytes, at: int, *more: Any) -> TaskRow:
        return move(turn, consumed, txn_id, at, more[0], {})

    with patch.object(positions, "move", silent):
        yield


@wrapping(TaskReader, "_new_of")
def given_again(new_of: Any, self: TaskReader, one: Any, give_up: float) -> Any:
    """A reader that was left in the middle of a commit gives its events again."""
    if one.rest is not None:
        one.rest = one.given = one.last = None
        one.at = one.at._replace(part=-1, offset=-1)
    return new_of(self, one, give_up)


@contextmanager
def whole_commits() -> Iterator[None]:
    """A position inside a commit is taken for the commit's beginning."""

    def begun(position: TaskPosition, _: Any) -> Place:
        return Place(position.record)

    with patch.object(reader, "place_of", begun):
        yield


@wrapping(TaskReader, "_slices")
def segment_skipped(
    slices: Any, self: TaskReader, one: Any, offset: int, record: CommitRecord
) -> Any:
    """A commit that was rolled is read without its last segment."""
    if record.stream_epoch and len(record.segments) > 1:
        record = record._replace(segments=record.segments[:-1])
    return slices(self, one, offset, record)


def _consumed(before: Callable[[TaskReader], None]) -> Planted:
    real = TaskReader.consumed

    def consumed(self: TaskReader, also: Iterable[int] = ()) -> Consumed:
        before(self)
        return real(self, also)

    return patch.object(TaskReader, "consumed", consumed)


def ahead_of_what_was_given() -> Planted:
    """A stretch ends with the commit that its last event is of, though not all of that was given."""

    def jump(self: TaskReader) -> None:
        for one in self._inputs:
            if one.feed.records:
                one.at = Place(one.feed.records[0].offset + 1)

    return _consumed(jump)


def a_task_is_forgotten() -> Planted:
    """A stretch does not name the last one of the tasks that had events in it."""
    return _consumed(lambda self: self._touched.discard(max(self._touched, default=0)))


def null_keys_by_count() -> Planted:
    """Events without a key are dealt as each reader counts them, not by their offsets."""
    real, counts = Assignment.tasks_of, defaultdict[Assignment, int](int)

    def dealt(
        self: Assignment, keys: Sequence[bytes | None], offsets: Sequence[int], within: Any
    ) -> Any:
        counted = list(offsets)
        for at, key in enumerate(keys):
            if key is None:
                counted[at] = counts[self]
                counts[self] += 1
        return real(self, keys, counted, within)

    return patch.object(Assignment, "tasks_of", dealt)


@wrapping(Handlers, "close_batch")
def left_input_is_dropped(close: Any, self: Handlers, batch: WorkBatch) -> bool:
    """The next batch does not begin with the input that a commit had no room for."""
    self._left = []
    found: bool = close(self, batch)
    return found


def commits_of_any_length() -> Planted:
    """An input commit is handled whole, however long it takes."""
    return patch.object(Handlers, "_begin_commit", lambda *_: None)


@wrapping(Piece, "split")
def rest_from_the_beginning(split: Any, self: Piece, at: int) -> tuple[Piece, Piece]:
    """The position of a part that is not handled is the beginning of its commit."""
    first, rest = split(self, at)
    return first, rest._replace(before=self.before)


@wrapping(Driver, "_commit")
def a_driver_forgets_left_input(commit: Any, self: Driver, batch: WorkBatch) -> None:
    """A driver keeps no input that a commit had no room for, so that a failure of the next commit drops it."""
    commit(self, batch)
    self._uncommitted = []


def claims_of_no_thread() -> Planted:
    """A thread takes its tasks without a claim, so that another one gets them at once."""
    return patch.object(Part, "claim", lambda part, tasks: tasks & part.wanted)


@contextmanager
def numbers_of_former_inputs() -> Iterator[None]:
    """Positions keep the numbers that their inputs had before one was dropped."""
    put = Turn.put

    def kept(turn: Turn, key: bytes, row: Any) -> None:
        former = turn.state.get(key) if isinstance(row, TaskRow) else None
        if former is not None and row.term > former.term and row.sequence == former.sequence:
            row = row._replace(positions=former.positions)
        put(turn, key, row)

    with patch.object(Turn, "put", kept):
        yield


@contextmanager
def owners_of_former_inputs() -> Iterator[None]:
    """Workers keep their tasks while the inputs of their processor change."""
    alter, put = ownership.alter_processor, Turn.put

    def owned(turn: Turn, key: bytes, row: Any) -> None:
        former = turn.state.get(key) if isinstance(row, TaskRow) else None
        if former is not None:
            row = row._replace(
                term=former.term, fencing_hash=former.fencing_hash, holder=former.holder
            )
        put(turn, key, row)

    def altered(turn: Turn, command: Any, to: Any) -> None:
        with patch.object(Turn, "put", owned):
            alter(turn, command, to)

    with patch.dict(decide._DECISIONS, {AlterProcessor: altered}):
        yield


def any_inputs() -> Planted:
    """A worker takes tasks of a processor that has other inputs than its program."""
    return patch.object(Worker, "_check_inputs", lambda *_: None)


@contextmanager
def copies_for_all() -> Iterator[None]:
    """Workers may take a copy that is not complete, or a savepoint."""
    take, create = ownership.take, ownership.create_processor

    def without_phase(decision: Any) -> Any:
        def decided(turn: Turn, command: Any, to: Any) -> None:
            rows = turn.state.processors
            row = rows.get(command.processor)
            if row is not None and row.phase:
                rows[command.processor] = replace(row, phase="")
                command = (
                    replace(command, copying=False) if hasattr(command, "copying") else command
                )
            try:
                decision(turn, command, to)
            finally:
                if row is not None:
                    rows[command.processor] = row

        return decided

    changed = {TakeTasks: without_phase(take), CreateProcessor: without_phase(create)}
    with patch.dict(decide._DECISIONS, changed):
        yield


@contextmanager
def any_copier_ends() -> Iterator[None]:
    """A copy is ended by a copier whose copy was begun again by another one."""
    copy = ownership.copy_processor

    def ended(turn: Turn, command: Any, to: Any) -> None:
        row = turn.state.processors.get(command.processor)
        resets = command.resets if row is None else row.resets
        copy(turn, replace(command, resets=resets), to)

    with patch.dict(decide._DECISIONS, {CopyProcessor: ended}):
        yield


def copies_of_two_instants() -> Planted:
    """A copier takes state and positions of an original that commits meanwhile."""
    return patch.object(copies, "_is_held", lambda *_: True)


@contextmanager
def copies_without_positions() -> Iterator[None]:
    """A copy has the state of its original, and reads its inputs from where that one began."""
    fill = copies._Filling.fill

    def filled(self: Any, tasks: Any) -> None:
        fill(self, {task: replace(info, positions=()) for task, info in tasks.items()})

    with patch.object(copies._Filling, "fill", filled):
        yield
