"""Positions of tasks that move with a commit (``docs/inside/processing.md``).

A task's row has its positions, and the hash of its owner's fencing token. A commit is checked against the row when
it is decided; from then on the row names the transaction (``in_progress``). The positions move when it is merged,
even if another worker has taken the task since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from anabranch.core import rows as k
from anabranch.core.authorize import Right, check_right
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import OpenTxn
from anabranch.errors import (
    EventTooLarge,
    InvalidArgument,
    NotReady,
    OwnershipLost,
    UnknownProcessor,
)
from anabranch.protocol.ids import FENCING_TOKEN_SIZE, HASH_SIZE, NO_TXN, hash_of, txn_text
from anabranch.protocol.legal_names import is_state, split_stream, state_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode

STATE_IS_MOVED = (
    "only commits that move positions of a processor write its state, that of these tasks"
)
_NEVER_TAKEN = r.TaskRow(0, b"", "", 0, 0, NO_TXN, 0, 0, None, ())


def digest_of(consumed: r.Consumed) -> bytes:
    """The hash by which a transaction's row names what it consumes."""
    return hashlib.sha256(encode(consumed)).digest()[:HASH_SIZE]


def processor_of(turn: Turn, name: str) -> r.ProcessorRow:
    row = turn.state.processors.get(name)
    if row is None:
        raise UnknownProcessor(f"there is no processor {name!r}: create it first")
    return row


def task_of(turn: Turn, processor: str, task: int) -> r.TaskRow:
    found = turn.state.tasks.get((processor, task))
    if found is None:
        row = turn.state.processors.get(processor)
        found = _NEVER_TAKEN._replace(term=0 if row is None else row.first_term)
    return found


def check_tasks(row: r.ProcessorRow, tasks: tuple[int, ...], fencing_token: bytes) -> bytes:
    """Check the tasks that a command names; returns the hash of its fencing token. `InvalidArgument`."""
    if len(fencing_token) != FENCING_TOKEN_SIZE:
        raise InvalidArgument(f"a fencing token has {FENCING_TOKEN_SIZE} bytes")
    if not tasks:
        raise InvalidArgument(f"name a task of {row.processor}")
    if len(set(tasks)) < len(tasks) or not all(0 <= t < row.tasks for t in tasks):
        raise InvalidArgument(f"tasks of {row.processor} are 0 to {row.tasks - 1}, each once")
    return hash_of(row.processor, fencing_token)


class _Step(NamedTuple):
    """A task, its row, and the positions that the commit moves it to."""

    task: int
    row: r.TaskRow
    sequence: int
    positions: tuple[r.TaskPosition, ...]


def moved_by(turn: Turn, consumed: r.Consumed, txn_id: bytes) -> r.TaskRow | None:
    """The row of a task that this transaction moved last, which proves its commit; None if no row proves it."""
    for step in _steps(turn, consumed):
        if step.row.txn_id == txn_id:
            return step.row
    return None


def judge(turn: Turn, consumed: r.Consumed, txn_id: bytes, scope: str, lane: str) -> None:
    """Check that a transaction of that scope and lane may move these tasks now.

    Raises: OwnershipLost, NotReady (a commit of a task is being merged), InvalidArgument, NotAuthorized,
    UnknownProcessor.
    """
    if split_stream(consumed.processor)[0] != scope:
        raise InvalidArgument(
            f"{consumed.processor} is of another scope than the transaction, {scope!r}"
        )
    check_right(turn.state, lane, Right.PROCESS, consumed.processor)
    row = processor_of(turn, consumed.processor)
    steps = list(_steps(turn, consumed))
    fencing_hash = check_tasks(row, tuple(step.task for step in steps), consumed.fencing_token)
    lost = [step for step in steps if step.row.fencing_hash != fencing_hash]
    if lost:
        holders = sorted({step.row.holder or "no worker" for step in lost})
        raise OwnershipLost(
            f"task {', '.join(str(step.task) for step in lost[:20])} of {row.processor} has another owner, "
            f"{', '.join(holders)[:200]}: take your tasks again; their positions say what is committed"
        )
    for step in steps:
        if step.row.in_progress not in (None, txn_id):
            raise NotReady(
                f"another commit of task {step.task} of {row.processor}, by {txn_text(step.row.in_progress)}, is "
                "prepared or being merged"
            )
        if step.sequence != step.row.sequence + 1:
            missing = ""
            if step.sequence > step.row.sequence:
                missing = (
                    "; or a batch of `consumed()` was not committed: commit it, or `put_back` it"
                )
            raise InvalidArgument(
                f"sequence {step.sequence} of task {step.task} of {row.processor}, which is at "
                f"{step.row.sequence}: take your tasks again; their positions say what is committed{missing}"
            )
        _check_positions(row, step)


def _check_positions(row: r.ProcessorRow, step: _Step) -> None:
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
        known = before.get(position.input, r.TaskPosition(position.input, start, 0))
        same = position.segment == known.segment
        if position.record < known.record or (
            position.record == known.record
            and (position.segment < 0 <= known.segment or (same and position.offset < known.offset))
        ):
            stream = row.inputs[position.input].stream
            raise InvalidArgument(
                f"task {step.task} of {row.processor} goes back in {stream}, from record {known.record} to "
                f"{position.record}: positions only rise"
            )


def check_state(consumed: r.Consumed | None, written: Mapping[str, Collection[int]]) -> None:
    """`InvalidArgument` unless a commit moves the tasks whose state it writes (state stream -> tasks)."""
    for stream, tasks in written.items():
        moved: set[int] = set()
        if consumed is not None and stream == state_stream(consumed.processor):
            moved.update(*(step.tasks for step in consumed.steps))
        if consumed is None or not moved.issuperset(tasks):
            raise InvalidArgument(
                f"{stream}, task {', '.join(map(str, sorted(tasks)))[:200]}: {STATE_IS_MOVED}"
            )


def check_state_size(turn: Turn, size: int) -> None:
    """`EventTooLarge` for a change of state that can't be merged in one round."""
    most = turn.settings.chunk_bytes
    if size > most:
        raise EventTooLarge(
            f"a state change of {size:,} bytes, bigger than a commit may have ({most:,}): commit after "
            "fewer events (a worker does that by itself), change less state for an event, or let an operator raise "
            "the controllers' `--chunk-bytes`"
        )


def state_of(streams: Iterable[str], writers: Iterable[r.Receipt]) -> dict[str, set[int]]:
    """The state that a commit through journals writes: state stream -> tasks. ``streams``: its participants."""
    found: dict[str, set[int]] = {stream: set() for stream in streams if is_state(stream)}
    for receipt in writers:
        for extent in receipt.extents:
            if extent.stream in found and extent.count:
                found[extent.stream].add(extent.partition)
    return found


def begin_moving(turn: Turn, consumed: r.Consumed, txn_id: bytes) -> None:
    """Log in the tasks' rows that this transaction is decided: no other commit moves them until it ends."""
    for step in _steps(turn, consumed):
        turn.put(k.task_key(consumed.processor, step.task), step.row._replace(in_progress=txn_id))


def move(
    turn: Turn,
    consumed: r.Consumed,
    txn_id: bytes,
    commit_timestamp: int,
    committed: int,
    state: Mapping[str, Collection[int]],
) -> r.TaskRow:
    """Move the positions of tasks with a commit in this round. Returns the row of one of these tasks.

    ``state``: the state that the commit writes, as for `check_state`.
    """
    written = state.get(state_stream(consumed.processor), ())
    moved = _NEVER_TAKEN
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
            state_sequence=step.sequence if step.task in written else step.row.state_sequence,
        )
        turn.put(k.task_key(consumed.processor, step.task), moved)
    return moved


def merged(turn: Turn, txn: OpenTxn, row: r.TxnRow) -> None:
    """Move the positions of a transaction that is merged in this round. ``row``: with its commit timestamp."""
    pending = txn.pending
    if pending is not None and pending.consumed is not None:
        state = state_of(txn.participants, pending.writers)
        move(turn, pending.consumed, row.txn_id, row.commit_timestamp, row.committed, state)


def give_back(turn: Turn, txn: OpenTxn) -> None:
    """Let other commits move the tasks again, because the decided transaction is aborted after all."""
    consumed = None if txn.pending is None else txn.pending.consumed
    for step in () if consumed is None else _steps(turn, consumed):
        if consumed is not None and step.row.in_progress == txn.row.txn_id:
            turn.put(k.task_key(consumed.processor, step.task), step.row._replace(in_progress=None))


def _steps(turn: Turn, consumed: r.Consumed) -> Iterator[_Step]:
    for step in consumed.steps:
        for task in step.tasks:
            row = task_of(turn, consumed.processor, task)
            yield _Step(task, row, step.sequence, step.positions)


def outcome(scope: str, row: r.TaskRow, owner: str) -> r.Outcome:
    """The outcome of the one-shot that a task's row names."""
    return r.Outcome(
        txn_id=row.txn_id, state="COMMITTED", scope=scope, name=None,
        commit_timestamp=row.commit_timestamp, committed=row.committed, rejected=0, left_out=0, reason="",
        begun_ms=0, finished_ms=0, keepalive_ms=0, streams=(), writers=(), owner=owner,
    )  # fmt: skip
