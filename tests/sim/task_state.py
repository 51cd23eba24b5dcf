"""State of simulated processors: counts of consumed events by key. The ledger knows what a row's value says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from anabranch.batches.records import decode_records
from anabranch.errors import NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import Consumed
from anabranch.topics.names import stream_topic
from anabranch.types import Event, TaskOwnership
from tests.sim.ledger import Given, Ledger

if TYPE_CHECKING:
    from tests.sim.ports import SimLog

STORES = ("counts",)
HEAD, COUNTS = bytes(4), b"\0\0\0\2"  # of the first incarnation


class Row(NamedTuple):
    """A change of a task's state. ``number``: a count; of the head, the sequence."""

    task: int
    key: bytes
    number: int


Numbers = dict[int, dict[bytes, int]]  # task -> key -> count


def counted_by(task: int, tasks: int, event: Event | Given) -> bool:
    """Whether an event's key is of that task; a commit counts those of the tasks that it moves."""
    return event.key is not None and position_of(event.key) * tasks >> 32 == task


def restore(log: SimLog, ledger: Ledger, ownership: TaskOwnership) -> Numbers:
    """The state of an ownership's tasks, as far as their heads say. `NotReady`: the broker does not show all of
    it.
    """
    found: Numbers = {}
    for task, info in ownership.tasks.items():
        place = TopicPartition(stream_topic(ownership.state), task)
        end = log.end_offsets([place], committed=True)[place]
        rows: dict[bytes, int] = {}
        at = 0
        while at < end:
            fetched = log.fetch({place: at}, max_wait=1.0, max_bytes=1 << 20, committed=True)
            if place not in fetched:
                raise NotReady(f"{place.topic}[{task}] is not shown")
            for batch in fetched[place].batches:
                for record in decode_records(batch.data):
                    rows[record.key or b""] = ledger.numbers[record.value or b""]
            at = fetched[place].next_offset
        head = rows.pop(HEAD, 0)
        if head != info.state_sequence:
            raise NotReady(f"{place.topic}[{task}] shows {head}, not {info.state_sequence}")
        found[task] = rows
    return found


def change(
    state: Numbers, ownership: TaskOwnership, consumed: Consumed, events: Sequence[Event]
) -> list[Row]:
    """Count events, and tell which rows that changes."""
    rows: list[Row] = []
    for step in consumed.steps:
        for task in step.tasks:
            keys = [e.key or b"" for e in events if counted_by(task, ownership.task_count, e)]
            for key in dict.fromkeys(COUNTS + key for key in keys):
                state[task][key] = state[task].get(key, 0) + keys.count(key[len(COUNTS) :])
                rows.append(Row(task, key, state[task][key]))
            if keys:
                rows.append(Row(task, HEAD, step.sequence))
    return rows
