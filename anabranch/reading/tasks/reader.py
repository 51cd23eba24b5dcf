"""The events of some tasks of a processor: `Client.read` with a tenure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.core.history_records import DIRECTLY_BEFORE
from anabranch.errors import IllegalState, InvalidArgument, RetryError, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import (
    CommittedLog,
    ReaderPorts,
    check_timeout,
    partitions_of,
)
from anabranch.reading.history import Found, HistoryCursor
from anabranch.reading.history_search import HistorySearch, Start, check_start
from anabranch.reading.iteration import Iteration
from anabranch.reading.tasks.dealing import Dealing
from anabranch.reading.transaction_reader import StreamParts
from anabranch.schemas.records import (
    CommitRecord,
    Consumed,
    EpochRecord,
    ProcessorInput,
    TaskPosition,
    TaskStep,
)
from anabranch.topics.names import history_topic
from anabranch.types import Event, Tenure

_PACE_S = 0.25  # so long one input is waited for, while nothing comes
_ALL_S = 10.0  # so often all tasks move, those without events too


class _Place(NamedTuple):
    """A place in an input: a record of its history, and how far in it; they compare in the order of reading."""

    record: int
    part: int = -1  # which segment of the record, in its order; -1: none of it is given
    offset: int = -1  # all below, in that segment, is given
    segment: int = -1
    timestamp: int = 0  # of the last record that is given whole


@dataclass(slots=True)
class _Input:
    """An input while it is read. ``at``: what was given so far; ``stands``: where each task stood at first."""

    number: int
    stream: str
    history: HistoryCursor
    parts: StreamParts
    dealing: Dealing
    at: _Place
    stands: dict[int, TaskPosition]
    order: dict[int, int] = field(default_factory=dict)  # segments of the record that is given
    batch: deque[Found] = field(default_factory=deque)


class TaskReader(Iteration[Event]):
    """Events of a tenure's tasks, those of each key in commit order. Close it, or use it as a context manager.

    Iterate over it. Each event counts as consumed once it is given. One thread at a time.
    """

    def __init__(
        self,
        ports: ReaderPorts,
        streams: Sequence[str],
        tenure: Tenure,
        timeout: float | None,
        ask_timeout: float,
    ) -> None:
        super().__init__()
        self._clock = ports.clock
        self._timeout = check_timeout(timeout)
        self._tenure = tenure
        self._sequences = {task: tenure.tasks[task].sequence for task in tenure.tasks}
        self._touched: set[int] = set()
        self._all_due = self._clock.monotonic() + _ALL_S
        numbers = {one.stream: number for number, one in enumerate(tenure.inputs)}
        for stream in streams:
            if stream not in numbers:
                raise InvalidArgument(f"{stream} is no input of processor {tenure.processor}")
        self._source = ports.committed_log(ask_timeout)
        try:
            deadline = self._clock.monotonic() + ask_timeout
            ids = self._source.topic_ids([history_topic(stream) for stream in streams], deadline)
            for stream in streams:
                _check_same_topic(history_topic(stream), tenure.inputs[numbers[stream]], ids)
            self._inputs = [self._open(numbers[s], s, ask_timeout) for s in streams]
        except BaseException:
            self._source.close()
            raise
        self._closed = False

    def _open(self, number: int, stream: str, timeout: float) -> _Input:
        begin = self._tenure.inputs[number]
        history = HistoryCursor(self._source, stream)
        stands = {}
        for task, info in self._tenure.tasks.items():
            known = (p for p in info.positions if p.input == number)
            stands[task] = next(known, TaskPosition(number, begin.record, begin.timestamp))
        first = min(position.record for position in stands.values())
        history.seek(first)
        search = HistorySearch(self._source, stream, timeout)
        dealing = Dealing(search, self._tenure.task_count)
        parts = StreamParts(self._source, stream, timeout)
        return _Input(number, stream, history, parts, dealing, _Place(first), stands)

    def _free(self) -> None:
        self._source.close()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        give_up = math.inf
        if self._timeout is not None:
            give_up = self._clock.monotonic() + self._timeout
        while not self._closed:
            before = [each.at for each in self._inputs]
            try:
                for each in self._inputs:
                    yield from self._new_of(each, give_up)
            except (RuntimeError, RetryError):  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                return
            now = self._clock.monotonic()
            # Events of other tasks count, too: a long history of theirs is no silence.
            if self._timeout is not None and before != [each.at for each in self._inputs]:
                give_up = now + self._timeout
            if now >= give_up:
                return

    def _new_of(self, one: _Input, give_up: float) -> Iterator[Event]:
        """The events of the next records of an input's history."""
        if not one.batch:
            pause = 0.0 if any(each.batch for each in self._inputs) else _PACE_S / len(self._inputs)
            found = one.history.next(min(give_up, self._clock.monotonic() + pause))
            if found:
                _check_whole(one, found[0])
            one.batch.extend(found)
        while one.batch and not self._closed:
            offset, record = one.batch[0]
            if isinstance(record, EpochRecord):
                one.dealing.note(record)
            else:
                yield from self._events(one, offset, record)
            one.at = _Place(offset + 1, timestamp=record.timestamp)
            one.batch.popleft()

    def _events(self, one: _Input, offset: int, record: CommitRecord) -> Iterator[Event]:
        """The events of a commit that belong to this tenure's tasks, and are not consumed yet."""
        events = one.parts.events(record)
        if events is None:
            raise SnapshotExpired(
                f"retention has deleted events of {one.stream} that processor {self._tenure.processor} has not "
                f"consumed (record {offset} of its history): keep the stream for longer"
            )
        ranges = one.dealing.ranges(record.stream_epoch)
        one.order = order = {part.segment_id: i for i, part in enumerate(record.segments)}
        stands = {
            task: _place(position, order)
            for task, position in one.stands.items()
            if position.record >= offset  # the others stand before this record
        }
        before = one.at
        for event in events:
            place = _Place(
                offset,
                order[event.segment_id],
                event.offset + 1,
                event.segment_id,
                before.timestamp,
            )
            if place[:3] <= one.at[:3]:
                continue  # given already: this iteration was left in the middle
            task = one.dealing.task_of(event, ranges)
            one.at = place
            if task in self._sequences and place[:3] > stands.get(task, _Place(-1))[:3]:
                self._touched.add(task)
                yield event

    # -- positions ------------------------------------------------------------------------------------

    def consumed(self) -> Consumed:
        """All that was given since the last call: plain data, to be committed once, after those before it.

        The caller may pickle it, or send it as bytes. Any process may give it to `commit`.
        Once a commit with it fails for good, this reader is of no more use: take the tasks again.
        """
        now = self._clock.monotonic()
        tasks = self._touched
        if now >= self._all_due or not tasks:
            tasks, self._all_due = set(self._sequences), now + _ALL_S
        alike: dict[tuple[int, tuple[TaskPosition, ...]], list[int]] = {}
        for task in sorted(tasks):
            self._sequences[task] += 1
            moved = tuple(p for each in self._inputs for p in _moved(each, task))
            alike.setdefault((self._sequences[task], moved), []).append(task)
        self._touched = set()
        steps = tuple(TaskStep(tuple(some), *step) for step, some in alike.items())
        return Consumed(self._tenure.processor, self._tenure.secret, steps)


def _place(position: TaskPosition, order: dict[int, int]) -> _Place:
    """The place of a task in, or behind, a record. ``order``: the record's segments."""
    if position.segment < 0:
        return _Place(position.record)
    return _Place(position.record, order.get(position.segment, -1), position.offset)


def _moved(one: _Input, task: int) -> Iterator[TaskPosition]:
    """The position of a task in an input, if that is beyond where it stood at first."""
    at = one.at
    if at[:3] > _place(one.stands[task], one.order)[:3]:
        yield TaskPosition(one.number, at.record, at.timestamp, at.segment, at.offset)


def _check_whole(one: _Input, first: Found) -> None:
    """`SnapshotExpired` if the history was cut between what was read and this record."""
    before = first.record.previous
    before = first.offset - 1 if before == DIRECTLY_BEFORE else before
    if before >= one.at.record:
        raise SnapshotExpired(
            f"the history of {one.stream} is cut behind record {one.at.record}, which is not consumed yet: commits "
            "are gone for this processor"
        )


def _check_same_topic(topic: str, wanted: ProcessorInput, ids: Mapping[str, str]) -> None:
    """`IllegalState` if a topic has another id than the processor was made with, if both are known."""
    found = ids.get(topic, "")
    if wanted.topic_id and found and found != wanted.topic_id:
        raise IllegalState(
            f"{topic} is another topic than the one that the processor was made for: its stream was forgotten and "
            "created again. Make another processor"
        )


def first_inputs(
    source: CommittedLog, streams: Sequence[str], start: Start, timeout: float, deadline: float
) -> tuple[ProcessorInput, ...]:
    """The inputs of a new processor, each with the place where it starts.

    ``start``: as of `Client.read`. ``timeout``: seconds of a search. Raises: UnknownStream, NotReady.
    """
    partitions_of(source, streams, deadline)
    places = {stream: TopicPartition(history_topic(stream), 0) for stream in streams}
    ids = source.topic_ids([place.topic for place in places.values()], deadline)
    inputs = []
    for stream, place in places.items():
        begin, timestamp = source.start_offsets([place], deadline)[place], 0
        found = HistorySearch(source, stream, timeout).as_of(check_start(start))
        if found is not None:
            begin, timestamp = found.offset + 1, found.record.timestamp
        inputs.append(ProcessorInput(stream, ids.get(place.topic, ""), begin, timestamp))
    return tuple(inputs)
