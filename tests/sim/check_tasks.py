"""What must hold of processors: each event of an input is consumed once, in order, with its position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from anabranch.errors import OwnershipLost
from anabranch.protocol.ids import NO_TXN, is_marked
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.partitioner import mix
from anabranch.protocol.schemas import records as r
from tests.sim.check_log import hold
from tests.sim.ledger import Deal, Given, Ledger, Workplace
from tests.sim.picture import Picture, Placed
from tests.sim.task_state import COUNTS, HEAD, counted_by

Place = tuple[int, int, int]  # record of the history, part of it, offset: the order of reading
Named = tuple[int, int, bytes | None, bytes | None]  # an event: partition, offset, key, value
END = r.TaskPosition(0, 1 << 62, 0)


class Move(NamedTuple):
    """A task's step in a commit."""

    sequence: int
    deal: Deal
    step: r.TaskStep


class Input:
    """An input as it was committed. ``tasks``: of each event, by partition and offset."""

    def __init__(self, picture: Picture, stream: str, tasks: int) -> None:
        self.stream = stream
        self.tasks: dict[tuple[int, int], int] = {}
        self._orders: dict[int, dict[int, int]] = {}  # record -> its segments, in order
        self._due: dict[int, list[tuple[Place, Placed]]] = {task: [] for task in range(tasks)}
        self._next: dict[int, int] = {}
        ranges: dict[int, dict[int, tuple[int, int]]] = {}  # stream epoch -> segment -> keys
        for seen, record in picture.history[stream]:
            if isinstance(record, r.EpochRecord):
                layout = {
                    segment.segment_id: (segment.low, segment.high) for segment in record.segments
                }
                ranges[record.stream_epoch] = layout
                continue
            at = seen.record.offset
            self._orders[at] = {part.segment_id: i for i, part in enumerate(record.segments)}
            for i, part in enumerate(record.segments):
                keys = ranges[record.stream_epoch][part.segment_id]
                for event in picture.events[stream, part.partition]:
                    if part.first <= event.offset < part.end:
                        task = task_of(event, keys, tasks)
                        self.tasks[part.partition, event.offset] = task
                        self._due[task].append(((at, i, event.offset), event))

    def begin(self, task: int, position: r.TaskPosition) -> None:
        """Start with the first event that is not before a position."""
        self._next[task] = 0
        self.go_to(task, position)

    def go_to(self, task: int, position: r.TaskPosition) -> list[Named]:
        """The task's events up to a position, from where it went last."""
        end = (position.record, -1, -1)
        if position.segment >= 0:
            part = self._orders[position.record][position.segment]
            end = position.record, part, position.offset
        passed = []
        due = self._due[task]
        while self._next[task] < len(due) and due[self._next[task]][0] < end:
            event = due[self._next[task]][1]
            passed.append((event.partition, event.offset, event.record.key, event.record.value))
            self._next[task] += 1
        return passed

    def has(self, task: int, given: Given) -> bool:
        """Whether it is of that task."""
        return self.tasks.get((given.partition, given.offset)) == task


def task_of(event: Placed, keys: tuple[int, int], tasks: int) -> int:
    """As `docs/inside/processing.md` has it: by key, or by offset among the tasks of the segment's range."""
    key = event.record.key
    at = None if key is None else mix(crc32(key))
    if at is not None and keys[0] <= at < keys[1]:
        return at * tasks >> 32
    first, last = keys[0] * tasks >> 32, (keys[1] - 1) * tasks >> 32
    return first + event.offset % (last - first + 1)


def check_tasks(picture: Picture, ledger: Ledger) -> None:
    """All of it."""
    seen = {event.record.value for events in picture.events.values() for event in events}
    moved: dict[tuple[str, int], list[Move]] = defaultdict(list)
    for deal in ledger.deals.values():
        if deal.consumed is None:
            continue
        outputs = {told.value for writer in deal.writers.values() for told in writer.told}
        committed = bool(outputs & seen)  # all or none of them: see `check_deal`
        is_final = not is_marked(deal.txn_id or NO_TXN)  # it may answer a repeated one-shot, too
        for attempt in deal.attempts:
            lost = is_final and isinstance(attempt.error, OwnershipLost)
            hold(not (lost and committed), f"{deal.label}: committed, but {attempt.error}")
        for step in deal.consumed.steps if committed else ():
            for task in step.tasks:
                moved[deal.consumed.processor, task].append(Move(step.sequence, deal, step))
    times = {record.txn_id: record.timestamp for _, _, record in picture.commits()}
    for place in ledger.workplaces.values():
        row = picture.processors.get(place.name)
        if row is not None:
            _check_processor(picture, ledger, place, row, moved, times)
    kept = {(name, task) for name, row in picture.processors.items() for task in range(row.tasks)}
    hold(picture.tasks.keys() <= kept, f"rows of no task: {sorted(picture.tasks.keys() - kept)}")
    hold(moved.keys() <= picture.tasks.keys(), "commits moved tasks that have no row")


def _check_processor(
    picture: Picture,
    ledger: Ledger,
    place: Workplace,
    row: r.ProcessorRow,
    moved: Mapping[tuple[str, int], list[Move]],
    times: Mapping[bytes, int],
) -> None:
    inputs = {
        number: Input(picture, one.stream, row.tasks)
        for number, one in enumerate(row.inputs)
        if one.stream not in ledger.deleted  # else it is not known what there was
    }
    starts = {i: r.TaskPosition(i, one.record, 0) for i, one in enumerate(row.inputs)}
    for task in range(row.tasks):
        where = f"task {task} of {place.name}"
        known = picture.tasks.get((place.name, task))
        moves = sorted(moved.get((place.name, task), ()), key=lambda move: move.sequence)
        numbers = [move.sequence for move in moves]
        hold(numbers == list(range(1, len(moves) + 1)), f"{where}: {numbers} are committed")
        at = dict(starts)
        for number, one in inputs.items():
            one.begin(task, at[number])
        last = 0
        for move in moves:
            what = f"{where}: sequence {move.sequence} by {move.deal.label}"
            now = times[move.deal.txn_id or NO_TXN]
            hold(now > last, f"{what} is committed at {now}, after {last}")
            last = now
            at |= {position.input: position for position in move.step.positions}
            for number, one in inputs.items():
                expected = one.go_to(task, at[number])
                given = [g for g in move.deal.given if g.stream == one.stream and one.has(task, g)]
                found = [(g.partition, g.offset, g.key, g.value) for g in given]
                hold(found == expected, f"{what} consumed {found}; {expected} is before {at}")
        for number, one in inputs.items():
            rest = one.go_to(task, END._replace(input=number))
            hold(not rest or place.is_over, f"{where}: {rest} of {one.stream} were never consumed")
        if known is not None:
            hold(known.in_progress is None, f"{where}: a commit of it is in progress for ever")
            hold(known.commit_timestamp == last, f"{where}: {known}, and it moved at {last}")
            hold(known.sequence == len(moves), f"{where}: {known} after {len(moves)} commits")
            hold(
                all(at[position.input] == position for position in known.positions),
                f"{where}: it stands at {known.positions}, and was moved to {at}",
            )
            _check_state(picture, ledger, place, task, known, moves)
            by = moves[-1].deal.txn_id if moves else NO_TXN
            hold(known.txn_id == by, f"{where}: moved by {known.txn_id.hex()} last")
    _check_strangers(ledger, place, inputs, moved)


def _check_state(
    picture: Picture,
    ledger: Ledger,
    place: Workplace,
    task: int,
    known: r.TaskRow,
    moves: list[Move],
) -> None:
    """The rows of a task's state are what its commits come to, up to the head."""
    expected: dict[bytes, int] = defaultdict(int)
    for move in moves:
        mine = [given for given in move.deal.given if counted_by(task, place.tasks, given)]
        for given in mine:
            expected[COUNTS + (given.key or b"")] += 1
        if mine:
            expected[HEAD] = move.sequence
    if not place.stores:
        expected.clear()
    rows = picture.events.get((state_stream(place.name), task), [])
    found = {event.record.key: ledger.numbers[event.record.value or b""] for event in rows}
    where = f"state of task {task} of {place.name}"
    hold(found == expected, f"{where}: {found}, and its commits come to {dict(expected)}")
    head = expected.get(HEAD, 0)
    hold(known.state_sequence == head, f"{where}: sequence {known.state_sequence}, head {head}")


def _check_strangers(
    ledger: Ledger,
    place: Workplace,
    inputs: Mapping[int, Input],
    moved: Mapping[tuple[str, int], list[Move]],
) -> None:
    """No commit consumed events of tasks that it did not move."""
    mine = {of: {m.deal.label for m in moves} for of, moves in moved.items() if of[0] == place.name}
    labels = {label for some in mine.values() for label in some}
    for label in sorted(labels):
        for given in ledger.deals[label].given:
            for one in inputs.values():
                if one.stream == given.stream:
                    task = one.tasks.get((given.partition, given.offset), -1)
                    moves = label in mine.get((place.name, task), ())
                    hold(moves, f"{label} consumed {given}, of task {task}, which it did not move")
