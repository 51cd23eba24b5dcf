"""Decisions on processors (created, described, copied, altered, reset, deleted) and on the ownership of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.decisions import quotas
from anabranch.core.decisions.positions import check_tasks, processor_of, task_of
from anabranch.core.decisions.prepared import held
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.streams import end_stream, with_aborted
from anabranch.core.decisions.times import admit_change, check_informed, is_repeated, note_change
from anabranch.core.decisions.turn import Turn
from anabranch.core.derivations import is_asynchronous
from anabranch.core.round import ReplyTo
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotReady,
    OwnershipLost,
    UnknownProcessor,
    count_of,
)
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import (
    COPYING,
    SAVEPOINT,
    check_input,
    is_plain,
    is_state,
    split_stream,
    state_stream,
)
from anabranch.protocol.schemas import records as r

TASKS_IN_ANSWER = 128
# A new processor's incarnation is below this. Keys of states have room for 65,535, so it can be reset often.
_INCARNATIONS = 1 << 15


def create_processor(turn: Turn, command: r.CreateProcessor, to: ReplyTo | None) -> None:
    """Create a processor, or add the stores that an existing one with the same tasks and inputs lacks."""
    name, inputs = command.processor, command.inputs
    check_served(turn, split_stream(name)[0])
    limits.TASKS.check(command.tasks, f"processor {name}")
    if command.tasks < 1 or command.tasks & (command.tasks - 1):
        raise InvalidArgument(
            f"{command.tasks:,} tasks: a power of two, 1 to {limits.TASKS.value:,}"
        )
    if is_state(name):
        raise InvalidArgument(
            f"{name} would be named as the state of a processor: choose another name"
        )
    _check_inputs(name, inputs)
    limits.TOPOLOGY.check(len(command.topology), f"processor {name}")
    row = turn.state.processors.get(name)
    stores = _with_stores(name, () if row is None else row.stores, command.stores)
    kinds = _kinds_of(row, stores, command)
    if row is None:
        row = _new_row(turn, name, command.tasks)
        row = replace(row, inputs=inputs, stores=stores, kinds=kinds, topology=command.topology)
        admit_change(turn, k.processor_key(name), to)
        turn.put(k.processor_key(name), row)
    elif row.phase:
        raise _not_to_run(row)
    elif row.tasks != command.tasks or (known := _same(row.inputs, inputs)) is None:
        way = "choose another name"
        if row.tasks == command.tasks:
            way += ", or change its inputs by `anabranch processor alter`"
        raise IllegalState(
            f"processor {name} exists with {_difference(row, command.tasks, inputs)}: {way}"
        )
    elif (changed := replace(
        row, stores=stores, kinds=kinds, inputs=known, topology=command.topology or row.topology
    )) != row:  # fmt: skip
        check_informed(turn, k.processor_key(name), to)  # stores are only added
        row = changed
        turn.put(k.processor_key(name), row)
    turn.reply(to, r.ProcessorList((_info(turn, row, 0, 0),)))


def _new_row(turn: Turn, name: str, tasks: int) -> r.ProcessorRow:
    """The row of a new processor, without inputs and stores. Raises as a limit that is reached."""
    limits.PROCESSORS.check(len(turn.state.processors) + 1, "a control partition")
    counted = sum(each.tasks for each in turn.state.processors.values())
    limits.ALL_TASKS.check(counted + tasks, "a control partition")
    quotas.check_processors(turn, turn.lane, tasks)
    floor = turn.state.get(_scope_of(name)).floor
    return r.ProcessorRow(
        name, tasks, (), floor % _INCARNATIONS, turn.lane, resets=floor, first_term=floor
    )


def _check_inputs(name: str, inputs: Sequence[r.ProcessorInput]) -> None:
    limits.INPUTS.check(len(inputs), f"processor {name}")
    if not inputs or len({one.stream for one in inputs}) < len(inputs):
        raise InvalidArgument(f"processor {name} needs inputs, each once")
    if len({is_plain(one.stream) for one in inputs}) > 1:
        raise InvalidArgument(
            f"processor {name} reads streams, or plain topics: bridge a topic into a stream first"
        )
    for one in inputs:
        check_input(one.stream)
        if one.record < 0 or one.timestamp < 0 or len(one.topic_id) not in (0, 32):
            raise InvalidArgument(
                f"the start of {one.stream}: an offset and a time from 0, and a topic's id"
            )


def _with_stores(name: str, known: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    """The names of all stores; the index of a store is its number, which never changes."""
    for store in more:
        if not store:
            raise InvalidArgument("a store has a name")
        limits.NAME.check(len(store), "a store's name")
    stores = tuple(dict.fromkeys((*known, *more)))
    limits.STORES.check(len(stores), f"processor {name}")
    return stores


def _kinds_of(
    row: r.ProcessorRow | None, stores: Sequence[str], command: r.CreateProcessor
) -> tuple[str, ...]:
    """The kind of each store; empty if no kind is known. `IllegalState`: a store has another kind already."""
    if command.kinds and len(command.kinds) != len(command.stores):
        raise InvalidArgument("kinds of stores: none, or one a store")
    known = {} if row is None else dict(zip(row.stores, row.kinds, strict=False))
    for store, kind in zip(command.stores, command.kinds, strict=False):
        limits.NAME.check(len(kind), "a store's kind")
        if known.setdefault(store, kind) not in ("", kind):
            raise IllegalState(
                f"{store!r} of {command.processor} is {known[store]}, not {kind}: choose another name, or "
                "reset the processor"
            )
        known[store] = kind
    return tuple(known.get(store, "") for store in stores)


def _same(
    known: Sequence[r.ProcessorInput], asked: Sequence[r.ProcessorInput]
) -> tuple[r.ProcessorInput, ...] | None:
    """The known inputs, with topic ids that were unknown so far; None if the inputs differ, except in order."""
    by_name = {one.stream: one for one in asked}
    if by_name.keys() != {one.stream for one in known}:
        return None
    with_ids = [replace(x, topic_id=x.topic_id or by_name[x.stream].topic_id) for x in known]
    same = all(by_name[x.stream].topic_id in ("", x.topic_id) for x in with_ids)
    return tuple(with_ids) if same else None


def _difference(row: r.ProcessorRow, tasks: int, inputs: Sequence[r.ProcessorInput]) -> str:
    """A text for the first difference between a processor and the command that asks for it."""
    if row.tasks != tasks:
        return f"{count_of(row.tasks, 'task')}, not {tasks:,}"
    there, asked = {one.stream for one in row.inputs}, {one.stream for one in inputs}
    if gone := sorted(there - asked):
        return f"the input {', '.join(gone)}, too"
    if more := sorted(asked - there):
        return f"its inputs, without {', '.join(more)}"
    return "streams of these names that were created again since"


def describe_processors(turn: Turn, command: r.DescribeProcessors, to: ReplyTo | None) -> None:
    """Describe one processor and its tasks, or a scope's processors by name; a bounded number in one answer."""
    check_served(turn, command.scope)
    if command.processor is not None:
        row = processor_of(turn, command.processor)
        info = _info(turn, row, command.task, TASKS_IN_ANSWER)
        if command.topology:  # only then: programs of an older release can't read it
            info = replace(info, topology=row.topology)
        turn.charge(work.LOOK * len(info.tasks))
        turn.reply(to, r.ProcessorList((info,)))
        return
    turn.charge(work.LOOK * len(turn.state.processors))
    found: list[r.ProcessorInfo] = []
    for name, row in sorted(turn.state.processors.items()):
        if name <= (command.after or "") or split_stream(name)[0] != command.scope:
            continue
        if len(found) == TASKS_IN_ANSWER:
            turn.reply(to, r.ProcessorList(tuple(found), found[-1].processor))
            return
        found.append(_info(turn, row, 0, 0))
    turn.reply(to, r.ProcessorList(tuple(found)))


def _info(turn: Turn, row: r.ProcessorRow, first: int, most: int) -> r.ProcessorInfo:
    numbers = range(max(0, first), min(row.tasks, max(0, first) + most))
    more = numbers.stop if numbers and numbers.stop < row.tasks else None
    tasks = tuple(_task_info(turn, row.processor, task) for task in numbers)
    return r.ProcessorInfo(
        row.processor, row.tasks, row.inputs, row.incarnation, tasks, more, row.stores, row.resets,
        row.origin, row.phase,
    )  # fmt: skip


def _task_info(turn: Turn, processor: str, task: int) -> r.TaskInfo:
    row = task_of(turn, processor, task)
    return r.TaskInfo(
        task, row.term, row.holder, row.taken_ms, row.sequence, row.txn_id, row.commit_timestamp,
        row.in_progress, row.positions, row.state_sequence,
    )  # fmt: skip


def take(turn: Turn, command: r.TakeTasks, to: ReplyTo | None) -> None:
    """Give tasks to the worker with this fencing token; their former owners are fenced at once.

    The answer names commits that are still being merged.
    """
    row = processor_of(turn, command.processor)
    if row.phase != (COPYING if command.copying else ""):
        raise _not_to_run(row)
    limits.HOLDER.check(len(command.holder), "a holder")
    fencing_hash = check_tasks(row, command.tasks, command.fencing_token)
    if len(command.terms) != len(command.tasks):
        raise InvalidArgument("each task needs its term")
    taken = []
    for task, term in zip(command.tasks, command.terms, strict=True):
        known = task_of(turn, command.processor, task)
        if known.fencing_hash == fencing_hash:
            continue  # a repeated command
        if known.term != term:
            raise OwnershipLost(
                f"task {task} of {command.processor} was taken by {known.holder or 'another worker'} meanwhile: "
                "describe the processor, and take it if it is yours"
            )
        taken.append((task, known))
    for task, known in taken:
        moved = known._replace(
            term=known.term + 1,
            fencing_hash=fencing_hash,
            holder=command.holder,
            taken_ms=turn.wall_ms,
        )
        turn.put(k.task_key(command.processor, task), moved)
    _answer(turn, row, command.tasks, to)


def release(turn: Turn, command: r.ReleaseTasks, to: ReplyTo | None) -> None:
    """Release tasks, except those that have another owner by now."""
    row = processor_of(turn, command.processor)
    fencing_hash = check_tasks(row, command.tasks, command.fencing_token)
    for task in command.tasks:
        known = task_of(turn, command.processor, task)
        if known.fencing_hash == fencing_hash:
            turn.put(k.task_key(command.processor, task), _released(turn, known))
    _answer(turn, row, command.tasks, to)


def _released(turn: Turn, known: r.TaskRow) -> r.TaskRow:
    """The row of a task that no worker owns any more; its state and positions stay."""
    return known._replace(term=known.term + 1, fencing_hash=b"", holder="", taken_ms=turn.wall_ms)


def _emptied(turn: Turn, known: r.TaskRow) -> r.TaskRow:
    """The row of a task that no worker owns any more, and that begins again without state and positions."""
    return r.TaskRow(known.term + 1, b"", "", turn.wall_ms, 0, NO_TXN, 0, 0, None, ())


def _answer(turn: Turn, row: r.ProcessorRow, tasks: tuple[int, ...], to: ReplyTo | None) -> None:
    infos = tuple(_task_info(turn, row.processor, task) for task in tasks)
    turn.reply(to, r.ProcessorList((replace(_info(turn, row, 0, 0), tasks=infos, more=None),)))


# -- copied, altered, reset, and deleted ----------------------------------------------------------------


def _not_to_run(row: r.ProcessorRow) -> IllegalState:
    """Why a processor can't be taken, altered or reset in its phase, or filled."""
    if row.phase == COPYING:
        return IllegalState(
            f"{row.processor} is being copied from {row.origin}: repeat `anabranch processor copy {row.origin} "
            f"{row.processor}` if that has ended, or delete {row.processor}"
        )
    if row.phase == SAVEPOINT:
        return IllegalState(
            f"{row.processor} is a savepoint of {row.origin}, which is never run: run a copy of it, by `anabranch "
            f"processor copy {row.processor} NEW`"
        )
    return IllegalState(f"{row.processor} is no copy that was begun")


def copy_processor(turn: Turn, command: r.CopyProcessor, to: ReplyTo | None) -> None:
    """Begin a copy of a processor, or begin it again without what it has so far, or end it.

    Until it ends only the program that fills it can take its tasks. To begin, tasks, inputs, stores and kinds are
    those of the origin. To end, all task ownership ends.
    """
    thing = k.processor_key(command.processor)
    if not is_repeated(turn, thing, to):
        check_informed(turn, thing, to)
        known = turn.state.processors.get(command.processor)
        if known is not None and (known.phase, known.origin) != (COPYING, command.origin):
            raise IllegalState(
                f"{command.processor} exists, and is no copy of {command.origin} that was begun: choose another "
                "name"
            )
        row = (
            _begun_copy(turn, command, known)
            if command.phase == COPYING
            else _ended_copy(command, known)
        )
        tasks = {} if known is None else _may_move(turn, known, command.resets)
        note_change(turn, thing, to)
        without = _emptied if command.phase == COPYING else _released
        for task, known_task in tasks.items():
            turn.put(k.task_key(row.processor, task), without(turn, known_task))
        turn.put(thing, row)
        turn.audit(command, f"{row.processor} from {row.origin}: {row.phase or 'may be run'}")
    row = processor_of(turn, command.processor)
    turn.reply(to, r.ProcessorList((_info(turn, row, 0, 0),)))


def _begun_copy(
    turn: Turn, command: r.CopyProcessor, known: r.ProcessorRow | None
) -> r.ProcessorRow:
    """The row of a copy that begins; ``known``: its row, if it was begun before."""
    name, scope = command.processor, split_stream(command.processor)[0]
    check_served(turn, scope)
    origin = processor_of(turn, command.origin)
    if scope != split_stream(origin.processor)[0]:
        raise InvalidArgument(
            f"{name} is of another scope than {origin.processor}: a copy is of the same"
        )
    if is_state(name):
        raise InvalidArgument(
            f"{name} would be named as the state of a processor: choose another name"
        )
    _check_derives_nothing(turn, name)
    if origin.phase == COPYING:
        raise _not_to_run(origin)
    if command.origin_resets != origin.resets:
        raise IllegalState(f"{origin.processor} was reset meanwhile: begin the copy again")
    if known is None:
        row = _new_row(turn, name, origin.tasks)
    elif known.tasks != origin.tasks:
        raise IllegalState(
            f"{name} was begun with {count_of(known.tasks, 'task')}, {origin.processor} has {origin.tasks:,}: "
            f"delete {name} first"
        )
    else:
        row = _ended(known, keep_state=False)
    return replace(
        row,
        inputs=origin.inputs,
        stores=origin.stores,
        kinds=origin.kinds,
        topology=origin.topology,
        origin=origin.processor,
        phase=COPYING,
    )


def _ended_copy(command: r.CopyProcessor, known: r.ProcessorRow | None) -> r.ProcessorRow:
    """The row of a copy that ends: workers may run it, or it is a savepoint."""
    if command.phase not in ("", SAVEPOINT):
        raise InvalidArgument(f"a copy has no phase {command.phase!r}")
    if known is None:
        raise UnknownProcessor(f"no copy {command.processor!r} was begun")
    return replace(known, phase=command.phase, resets=known.resets + 1)


def alter_processor(turn: Turn, command: r.AlterProcessor, to: ReplyTo | None) -> None:
    """Change the inputs of a processor. All task ownership ends, since positions name inputs by their numbers.

    State, sequences, and the positions of inputs that stay, are kept. A new input has no position: each task begins
    where the input begins.
    """
    row = processor_of(turn, command.processor)
    thing = k.processor_key(row.processor)
    if not is_repeated(turn, thing, to):
        check_informed(turn, thing, to)
        if row.phase:
            raise _not_to_run(row)
        _check_derives_nothing(turn, row.processor)
        tasks = _may_move(turn, row, command.resets)
        kept = _kept(row, command)
        inputs = (*(row.inputs[number] for number in kept), *command.add)
        _check_inputs(row.processor, inputs)
        new_numbers = {number: new for new, number in enumerate(kept)}
        ended = _ended(row, keep_state=True)
        note_change(turn, thing, to)
        for task, known in tasks.items():
            positions = tuple(
                position._replace(input=new_numbers[position.input])
                for position in known.positions
                if position.input in new_numbers
            )
            left = _released(turn, known)._replace(positions=positions)
            turn.put(k.task_key(row.processor, task), left)
        row = replace(ended, inputs=inputs)
        turn.put(k.processor_key(row.processor), row)
        turn.audit(command, row.processor)
    turn.reply(to, r.ProcessorList((_info(turn, row, 0, 0),)))


def _kept(row: r.ProcessorRow, command: r.AlterProcessor) -> list[int]:
    """The numbers of the inputs that stay. Raises: InvalidArgument."""
    names = [one.stream for one in row.inputs]
    if not command.drop and not command.add:
        raise InvalidArgument(f"nothing to change of {row.processor}: add an input, or drop one")
    if unknown := sorted(set(command.drop) - set(names)):
        raise InvalidArgument(f"{row.processor} has no input {', '.join(unknown)[:200]}")
    kept = [number for number, name in enumerate(names) if name not in command.drop]
    if both := sorted({one.stream for one in command.add} & {names[number] for number in kept}):
        raise InvalidArgument(f"{', '.join(both)[:200]} is an input of {row.processor} already")
    return kept


def reset_processor(turn: Turn, command: r.ResetProcessor, to: ReplyTo | None) -> None:
    """Reset a processor, and keep its state or drop it. All task ownership ends.

    With its state it also keeps its sequences, because the head of the state names one.
    """
    row = processor_of(turn, command.processor)
    thing = k.processor_key(row.processor)
    if not is_repeated(turn, thing, to):
        check_informed(turn, thing, to)
        if row.phase:
            raise _not_to_run(row)
        _check_derives_nothing(turn, row.processor)
        tasks = _may_move(turn, row, command.resets)
        if not command.inputs and not command.keep_state:
            raise InvalidArgument(
                "without its state a processor has no position to go by: say where it starts, or keep its state"
            )
        if command.inputs:
            _check_inputs(row.processor, command.inputs)
            if [x.stream for x in command.inputs] != [x.stream for x in row.inputs]:
                raise InvalidArgument(
                    f"a reset of {row.processor} names all of its inputs, in order"
                )
        ended = _ended(row, keep_state=command.keep_state)
        note_change(turn, thing, to)
        for task, known in tasks.items():
            left = _emptied(turn, known)
            if command.keep_state:
                left = left._replace(
                    sequence=known.sequence,
                    state_sequence=known.state_sequence,
                    positions=() if command.inputs else known.positions,
                )
            turn.put(k.task_key(row.processor, task), left)
        row = replace(ended, inputs=command.inputs or row.inputs)
        turn.put(k.processor_key(row.processor), row)
        turn.audit(command, row.processor)
    turn.reply(to, r.ProcessorList((_info(turn, row, 0, 0),)))


def delete_processor(turn: Turn, command: r.DeleteProcessor, to: ReplyTo | None) -> None:
    """Delete a processor's rows, and begin to delete the topics of its state.

    The scope's row gets a floor for the incarnation, resets and terms of later processors, so that a delayed copy
    of a command does not fit one of the same name.
    """
    thing = k.processor_key(command.processor)
    if not is_repeated(turn, thing, to):
        row = processor_of(turn, command.processor)
        check_informed(turn, thing, to)
        tasks = _may_move(turn, row, command.resets)
        gone = _ended(row, keep_state=False)
        aborted = end_stream(turn, state_stream(row.processor), "its processor is deleted")
        for task in tasks:
            turn.put(k.task_key(row.processor, task), None)
        note_change(turn, thing, to)
        scope = turn.state.get(_scope_of(row.processor))
        term = max(known.term for known in tasks.values()) + 1
        floor = max(scope.floor, gone.incarnation, gone.resets, term)
        turn.put(_scope_of(row.processor), replace(scope, floor=floor))
        turn.put(k.processor_key(row.processor), None)
        turn.audit(command, with_aborted(row.processor, aborted))
    turn.reply(to, r.ProcessorList(()))


def _scope_of(processor: str) -> bytes:
    return k.scope_key(split_stream(processor)[0])


def _check_derives_nothing(turn: Turn, processor: str) -> None:
    """Raise `IllegalState` if a processor derives a table: its positions only rise with the table's rows."""
    if is_asynchronous(turn.state, processor):
        raise IllegalState(
            f"{processor} derives a table, which has rows already: derive a higher version instead"
        )


def _ended(row: r.ProcessorRow, *, keep_state: bool) -> r.ProcessorRow:
    incarnation = row.incarnation + (not keep_state)
    if incarnation >= 1 << 16:
        raise IllegalState(f"{row.processor} was reset 65,535 times: choose another name")
    kinds = row.kinds if keep_state else ()
    return replace(row, incarnation=incarnation, resets=row.resets + 1, kinds=kinds)


def _may_move(turn: Turn, row: r.ProcessorRow, resets: int) -> dict[int, r.TaskRow]:
    """The rows of a processor's tasks, if their positions may be changed, or dropped, now.

    Raises: IllegalState (it was reset meanwhile), NotReady and ReservedByPrepared (a commit moves a task).
    """
    if resets != row.resets:
        raise IllegalState(f"{row.processor} was reset meanwhile: look at it again")
    tasks = {task: task_of(turn, row.processor, task) for task in range(row.tasks)}
    moving = {known.in_progress for known in tasks.values() if known.in_progress is not None}
    for txn_id in sorted(moving & set(turn.state.prepared)):
        raise held(txn_id, f"a task of {row.processor}")
    if moving:
        raise NotReady(f"a commit of {row.processor} is being merged: ask again")
    return tasks
