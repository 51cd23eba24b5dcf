"""The events of some tasks of a processor: `Client.read` with a task ownership (``docs/inside/processing.md``).

A `TaskReader` reads the histories of its inputs (topics with one record for each commit), picks the events of its
tasks (`Assignment`), and keeps each task's position, which the processor commits. `TaskReader.cut` makes batches of
whole commits, iterating single events.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from zlib import crc32

import numpy as np

from anabranch.batches.columns_read import Longs
from anabranch.errors import IllegalState, InvalidArgument, RetryError, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas.records import (
    CommitRecord,
    Consumed,
    EpochRecord,
    TaskPosition,
    TaskStep,
)
from anabranch.reading.commit_feed import CommitFeed
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.feed import FETCH_BYTES
from anabranch.reading.group_lag import check_same_topic
from anabranch.reading.history import Found, HistorySearch, SafeTimeOf, safe_time_in
from anabranch.reading.iteration import Iteration, check_timeout
from anabranch.reading.slices import Piece, Place, Slice, Slices, count_within
from anabranch.topics.names import history_topic
from anabranch.types import Event, TaskOwnership

log = logging.getLogger("anabranch.client")

_PACE_S = 0.25  # the wait for one input while no events come
_ALL_S = 10.0  # the positions of all tasks move this often, also without events
_ALL_READ_S = (
    1.0  # once all input is read, they move this often, so that no lag is shown without events
)
_FEW_TASKS = 64  # with more tasks, they always move every `_ALL_S`
_ENDS_S = 5.0  # the longest wait for other inputs
_NONE = (-1, -1, -1)
_INSTEAD = (
    "keep the stream for longer; to continue now, use on_lost='skip', or begin elsewhere with "
    "`anabranch processor reset`"
)
_WITH_IT = SnapshotExpired("retention has deleted events that were committed with it")
_ALL = (1 << 63) - 1
_FEW_KEYS = 8  # numpy's calls take longer than this many keys
_KEPT = 64  # layouts of stream epochs; the positions of tasks are rarely more epochs apart


class Assignment:
    """Assigns the events of one stream to a number of tasks, each an equal range of the key positions.

    Every reader finds the same task for an event. A keyed event belongs to the task of its key. An event without a
    key is assigned by its offset to one of the tasks whose ranges overlap its segment. So is an event whose key is
    outside of its segment's range, because another client hashed the key differently: the task of that key may not
    read this partition, and would never see the event.
    """

    def __init__(self, search: HistorySearch, tasks: int) -> None:
        self._search = search
        self._tasks = tasks
        self.misplaced = 0  # events whose key is outside of their segment's range
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}  # stream epoch -> segment -> keys

    def note(self, epoch: EpochRecord) -> None:
        """Add the layout of an epoch."""
        ranges = {segment.segment_id: (segment.low, segment.high) for segment in epoch.segments}
        self._ranges[epoch.stream_epoch] = ranges
        if len(self._ranges) > _KEPT:
            del self._ranges[next(iter(self._ranges))]

    def ranges(self, epoch: int) -> dict[int, tuple[int, int]]:
        """Segment -> its keys, of a stream epoch. Raises `SnapshotExpired` if its record is deleted."""
        if epoch not in self._ranges:
            found = self._search.epoch_record(epoch)
            if found is None:
                raise SnapshotExpired(
                    f"the layout of stream epoch {epoch} is not in the history any more"
                )
            self.note(found)
        return self._ranges[epoch]

    def tasks_of(
        self, keys: Sequence[bytes | None], offsets: Sequence[int], within: tuple[int, int]
    ) -> Longs:
        """The tasks of events of one segment. ``within``: its key positions in the epoch of their commit."""
        low, high = within
        positions = _positions(keys)
        first, last = low * self._tasks // SPACE, (high - 1) * self._tasks // SPACE
        tasks: Longs = positions * self._tasks // SPACE
        elsewhere = np.flatnonzero((positions < low) | (positions >= high))
        if len(elsewhere):
            self.misplaced += int(np.count_nonzero(positions[elsewhere] >= 0))
            tasks[elsewhere] = first + np.array(offsets)[elsewhere] % (last - first + 1)
        return tasks


def _positions(keys: Sequence[bytes | None]) -> Longs:
    """The key positions of keys; -1 for null."""
    if len(keys) <= _FEW_KEYS:
        few = [-1 if key is None else position_of(key) for key in keys]
        return np.array(few, dtype=np.int64)
    nulls: list[int] = []
    try:
        crcs = np.fromiter(map(crc32, keys), np.uint32, len(keys))  # type: ignore[arg-type]
    except TypeError:
        nulls = [at for at, key in enumerate(keys) if key is None]
        crcs = np.fromiter((crc32(key or b"") for key in keys), np.uint32, len(keys))
    crcs ^= crcs >> 16
    crcs *= np.uint32(0x85EBCA6B)
    crcs ^= crcs >> 13
    crcs *= np.uint32(0xC2B2AE35)
    crcs ^= crcs >> 16
    found = crcs.astype(np.int64)
    found[nulls] = -1
    return found


@dataclass(slots=True)
class Input:
    """An input while it is read.

    ``at``: the place up to which events were returned; `place` brings it up to date. ``starts``: each task's
    position when it was taken.
    """

    number: int
    stream: str
    feed: CommitFeed
    assignment: Assignment
    at: Place
    starts: dict[int, TaskPosition]
    order: dict[int, int] = field(default_factory=dict)  # segments of the present record
    rest: Iterator[Slice] | None = None  # of the feed's first record
    # The rest of a slice, for iteration over single events.
    given: Iterator[tuple[int, Event]] | None = None
    # Segment and offset returned of the present record, not yet in ``at``.
    last: tuple[int, int] | None = None
    # Task -> its place in the last `consumed`.
    reported: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    # Task -> its first place, once the record of its position was read.
    firsts: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def place(self) -> Place:
        """The place up to which all events were returned."""
        if self.last is not None:
            segment, offset = self.last
            record = self.feed.first.offset
            self.at = Place(record, self.order[segment], offset + 1, segment, self.at.timestamp)
            self.last = None
        return self.at

    def begin_again(self) -> None:
        """Read the feed's first record again, from the last returned event on."""
        self.place()
        self.rest = self.given = None

    def passed(self) -> None:
        """Note that the feed's first record is returned completely."""
        offset, record = self.feed.advance()
        self.at = Place(offset + 1, timestamp=record.timestamp)
        self.rest = self.given = self.last = None

    def moved(self, task: int, left: Place | None = None) -> Iterator[TaskPosition]:
        """A task's position, if it moved since `consumed`. ``left``: the first place that is not processed."""
        at = left or self.place()
        if at[:3] > self.reported_of(task):
            yield TaskPosition(self.number, at.record, at.timestamp, at.segment, at.offset)

    def reported_of(self, task: int) -> tuple[int, int, int]:
        """The place of a task in the last `consumed`, or its first place if that is higher.

        Before the record of its position was read, only that record's number matters.
        """
        first = self.firsts.get(task) or place_of(self.starts[task], self.order)[:3]
        return max(first, self.reported.get(task, first))


def end_of(place: tuple[int, int, int], here: tuple[int, int]) -> int:
    """The offset up to which a record's segment (``here``: record, part) is before a place."""
    if place[:2] == here:
        return place[2]
    return _ALL if place[:2] > here else 0


def place_of(position: TaskPosition, order: dict[int, int]) -> Place:
    """The place of a task within or after a record. ``order``: the record's segments."""
    if position.segment < 0:
        return Place(position.record)
    return Place(position.record, order.get(position.segment, -1), position.offset)


@dataclass(frozen=True, slots=True)
class _Given:
    """The last positions of `consumed`, and the reader's state before, for `TaskReader.put_back`."""

    consumed: Consumed
    touched: set[int]
    all_at: float
    reported: list[dict[int, tuple[int, int, int] | None]]  # by input


class TaskReader(Iteration[Event]):
    """Events of an ownership's tasks, each key in commit order.

    An iterator; close it, or use it as a context manager. Each event counts as consumed when it is returned. One
    thread at a time.

    ``on_lost``: called when retention has deleted commits, or their part in another input. Its arguments are the
    input, the number of the input's commits that are skipped, and the error. None: reading raises that error.
    """

    on_lost: Callable[[str, int, SnapshotExpired], None] | None = None

    def __init__(
        self,
        ports: ReaderPorts,
        streams: Sequence[str],
        ownership: TaskOwnership,
        timeout: float | None,
        ask_timeout: float,
        safe: SafeTimeOf,
    ) -> None:
        """``safe``: the safe time of these streams."""
        super().__init__()
        self.clock = self._clock = ports.clock
        self._timeout = check_timeout(timeout)
        self._ownership = ownership
        self._sequences = {task: ownership.tasks[task].sequence for task in ownership.tasks}
        self._ours = np.zeros(ownership.task_count, dtype=np.bool_)
        self._ours[list(ownership.tasks)] = True
        self.misplaced = Counter[str]()  # events read whose key lies outside of their segment
        self._touched: set[int] = set()
        self._safe = safe
        self._complete = -1  # the timestamp up to which all commits of all inputs were read
        self._safe_time = -1  # the last that the controllers answered
        self._lost: list[tuple[int, int]] = []  # timestamps of commits that may be incomplete
        self._all_at = self._clock.monotonic()  # when the positions of all tasks moved last
        self._last: _Given | None = None
        self._ended = ""  # why no positions can be committed any more
        numbers = {one.stream: number for number, one in enumerate(ownership.inputs)}
        for stream in streams:
            if stream not in numbers:
                raise InvalidArgument(f"{stream} is no input of processor {ownership.processor}")
        self._source = ports.committed_log(ask_timeout)
        try:
            deadline = self._clock.monotonic() + ask_timeout
            ids = self._source.topic_ids([history_topic(stream) for stream in streams], deadline)
            for stream in streams:
                check_same_topic(history_topic(stream), ownership.inputs[numbers[stream]], ids)
            self._inputs = [self._open(numbers[s], s, ask_timeout) for s in streams]
        except BaseException:
            self._source.close()
            raise
        self._closed = False

    def _open(self, number: int, stream: str, timeout: float) -> Input:
        begin = self._ownership.inputs[number]
        starts = {}
        for task, info in self._ownership.tasks.items():
            known = (p for p in info.positions if p.input == number)
            starts[task] = next(known, TaskPosition(number, begin.record, begin.timestamp))
        record, timestamp = min((at.record, at.timestamp) for at in starts.values())
        feed = CommitFeed(self._source, stream, timeout)
        feed.seek(record)
        search = HistorySearch(self._source, stream, timeout)
        assignment = Assignment(search, self._ownership.task_count)
        return Input(number, stream, feed, assignment, Place(record, timestamp=timestamp), starts)

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
            # Events of other tasks count, too: reading a long history of them is not a time-out.
            if self._timeout is not None and before != [each.at for each in self._inputs]:
                give_up = now + self._timeout
            if now >= give_up:
                return

    def _new_of(self, one: Input, give_up: float) -> Iterator[Event]:
        """The events of the next records of an input's history."""
        if not one.feed.records:
            pause = (
                0.0
                if any(each.feed.records for each in self._inputs)
                else _PACE_S / len(self._inputs)
            )
            self._read_on(one, min(give_up, self._clock.monotonic() + pause))
        while one.feed.records and not self._closed:
            for task, event in one.given or ():
                one.last = event.segment_id, event.offset
                self._touched.add(task)
                yield event
            found = self._next(one)
            if found is None:
                one.passed()
            else:
                one.given = zip(found.tasks, found.events(one.stream), strict=True)

    def _read_on(self, one: Input, deadline: float) -> None:
        one.feed.read_on(deadline, check=partial(self._check_whole, one))

    def _next(self, one: Input) -> Slice | None:
        """The next events of the first record for these tasks; None at its end."""
        if one.rest is None:
            offset, record = one.feed.first
            if isinstance(record, EpochRecord):
                one.assignment.note(record)
                return None
            one.rest = self._slices(one, offset, record)
        try:
            return next(one.rest, None)
        except SnapshotExpired as error:
            one.begin_again()
            at = one.feed.first.record.timestamp
            self._lose(one.stream, at, at, error)
            return None
        except BaseException:
            one.begin_again()
            raise

    def _slices(self, one: Input, offset: int, record: CommitRecord) -> Iterator[Slice]:
        """The events of a commit that belong to this ownership's tasks and are not consumed yet."""
        runs = one.feed.parts.runs(record)
        if runs is None:
            raise SnapshotExpired(
                f"retention has deleted events of {one.stream} that processor {self._ownership.processor} has not "
                f"consumed (record {offset} of its history): {_INSTEAD}"
            )
        ranges = one.assignment.ranges(record.stream_epoch)
        one.order = order = {part.segment_id: i for i, part in enumerate(record.segments)}
        # Other tasks have consumed nothing of this record.
        not_consumed = {
            task: place_of(position, order)[:3]
            for task, position in one.starts.items()
            if position.record >= offset and task in self._sequences
        }
        one.firsts |= {task: place for task, place in not_consumed.items() if place[0] == offset}
        given = one.at[:3] if one.at.record == offset else _NONE  # a part was returned before
        for run in runs:
            segment = run.stretch.segment_id
            offsets = run.offsets
            keys = run.block.keys(run.low, run.low + len(offsets))
            tasks = one.assignment.tasks_of(keys, offsets, ranges[segment])
            placed = not one.assignment.misplaced
            if not placed:
                self.misplaced[one.stream] += one.assignment.misplaced
                one.assignment.misplaced = 0
            mine = self._ours[tasks]
            if given != _NONE or not_consumed:
                here = offset, order[segment]
                begun = np.full(self._ownership.task_count, end_of(given, here))
                for task, place in not_consumed.items():
                    begun[task] = max(begun[task], end_of(place, here))
                mine &= np.array(offsets) >= begun[tasks]
            places = np.flatnonzero(mine)
            if len(places) == len(offsets):
                yield Slice(run, tasks.tolist(), placed=placed)
            elif len(places):
                yield Slice(run, tasks[places].tolist(), places, placed)

    # -- cuts -----------------------------------------------------------------------------------------

    def cut(self, until: float, most_bytes: int, part_bytes: int | None = None) -> list[Piece]:
        """A batch of whole commits of the inputs, in the order of their timestamps, up to about ``most_bytes``.

        A batch has all or nothing of a transaction, in all inputs. Only a commit of more than ``part_bytes``
        (None: ``most_bytes``) comes in parts. Empty: nothing came until ``until`` (monotonic seconds).

        Raises as iterating does. After an error this reader can't be used any more: the batch's beginning is
        lost.
        """
        taken: list[Piece] = []
        size, full = 0, 0
        last: int | None = None  # the timestamp of the commit that was taken last
        if not any(one.feed.records for one in self._inputs):
            self._wait(until)
        while True:
            for each in self._inputs:  # a history gives the records of one Kafka batch at a time
                if not each.feed.records and each.feed.history.is_fetched:
                    self._read_on(each, 0.0)
            # Events that were taken don't wait for another answer, as commits may come without a pause.
            one = self._ready(until, asks=not taken)
            if one is None:
                return taken
            number, record = one.feed.first.offset, one.feed.first.record
            timestamp = record.timestamp
            if size >= most_bytes and timestamp != last:
                return taken
            if timestamp != last:
                last, full = timestamp, size + (part_bytes or most_bytes)
            if isinstance(record, CommitRecord) and self._is_half(timestamp):
                self._lose(one.stream, timestamp, timestamp)
                one.passed()
                continue
            if one.given is not None:
                one.begin_again()
            before, slices, tasks = one.place(), Slices(one.stream), list[int]()
            size_before = size
            while size <= full:
                found = self._next(one)
                if found is None:
                    one.passed()
                    break
                ends = found.ends()
                count = count_within(ends, full - size)
                if count < len(ends) and one.rest is not None:
                    found, left = found.split(count)
                    one.rest = chain([left], one.rest)
                size += int(ends[len(found.tasks) - 1])
                one.last = found.last()
                slices.slices.append(found)
                tasks += found.tasks
            slices.record, slices.order = number, one.order
            slices.size = size - size_before
            # If a part turned out to be deleted, drop the commit's events from other inputs, too.
            if self._is_half(timestamp):
                while taken and taken[-1].timestamp == timestamp:
                    self._lose(taken.pop().stream, timestamp, timestamp)
            elif tasks:
                self._touched.update(tasks)
                whole = one.rest is None
                taken.append(Piece(one.stream, timestamp, slices, tasks, whole, before))
            if one.rest is not None:
                return taken

    def _ready(self, until: float, *, asks: bool = True) -> Input | None:
        """The input with the oldest first record, if it may be taken, because `_is_complete` holds for it.

        To find out, it reads on until ``until`` (monotonic seconds), and again if new first records came. ``asks``:
        whether it may ask controllers.
        """
        while True:
            filled = [one for one in self._inputs if one.feed.records]
            # If it is not complete, later records are not, so controllers are asked once, and not for each input.
            oldest = min(filled, key=lambda one: one.feed.first.record.timestamp, default=None)
            complete = oldest is not None and self._is_complete(oldest, until, asks)
            if filled == [one for one in self._inputs if one.feed.records]:
                return oldest if complete else None

    def _wait(self, until: float) -> None:
        """Wait for a commit in any input. A small commit's events usually come with the same request."""
        waited = False
        while not self._closed:
            for one in self._inputs:
                # At a history's known end only waiting can bring more.
                if waited or one.feed.history.ended_at != one.feed.history.position:
                    self._read_on(one, 0.0)
            late = waited and self._clock.monotonic() >= until
            if late or any(one.feed.records for one in self._inputs):
                return
            places: dict[TopicPartition, int] = {}
            for one in self._inputs:
                places |= one.feed.positions()
            self._source.wait_for(places, until, FETCH_BYTES)
            waited = True

    def _is_complete(self, one: Input, until: float, asks: bool) -> bool:
        """Whether all commits up to its first record have been read, in all inputs.

        The ends of the histories, asked for after a time was safe, prove it: all that transactions up to this time
        wrote to the inputs is below these ends.
        """
        others = self._inputs
        first = one.feed.first.record.timestamp
        if len(others) == 1 or first <= self._complete:
            return True
        for each in others:
            if not each.feed.records:
                self._read_on(each, 0.0)
        sure = min(each.feed.records[-1].record.timestamp for each in others if each.feed.records)
        deadline = max(until, self._clock.monotonic() + _ENDS_S)
        if self._safe.apart or first > max(self._safe_in(each) for each in others):
            try:
                if first > self._safe_time:  # not for each commit: what is safe remains so
                    if not asks:
                        return False
                    self._safe_time = self._safe.ask(first, deadline)
                sure = min(sure, self._safe_time)
            except RetryError as error:
                log.warning(
                    "events wait, as no controller says which commits are complete: %s", error
                )
                return False
        ends = self._source.end_offsets([each.feed.history.place for each in others], deadline)
        for each in others:
            while each.feed.history.position < ends[each.feed.history.place] and (
                not each.feed.records or each.feed.records[-1].record.timestamp < sure
            ):
                if self._closed or self._clock.monotonic() >= deadline:
                    return False
                self._read_on(each, deadline)
        self._complete = sure
        return first <= sure

    def _safe_in(self, one: Input) -> int:
        """The highest time that a record here shows to be safe, as one control partition serves all inputs."""
        return safe_time_in(one.feed.records[-1].record) if one.feed.records else -1

    # -- what retention deleted -----------------------------------------------------------------------

    def _lose(
        self, stream: str, first: int, last: int, why: SnapshotExpired = _WITH_IT, count: int = 1
    ) -> None:
        """Skip commits of these timestamps in all inputs that may share them. No ``on_lost``: raise ``why``."""
        if self.on_lost is None:
            raise why
        self._lost.append((first, last))
        self.on_lost(stream, count, why)

    def _is_half(self, timestamp: int) -> bool:
        """Whether retention may have deleted a part of a commit. Timestamps must not fall from call to call."""
        self._lost = [lost for lost in self._lost if lost[1] >= timestamp]
        return any(first <= timestamp for first, _ in self._lost)

    def _check_whole(self, one: Input, first: Found) -> None:
        """Check that the history was not truncated between what was read and this record."""
        last = one.feed.records[-1] if one.feed.records else None
        expected = one.at.record if last is None else last.offset + 1
        if first.before >= expected:
            since = one.at.timestamp if last is None else last.record.timestamp
            error = SnapshotExpired(
                f"the history of {one.stream} is truncated past record {expected}, which is not consumed yet: "
                f"commits are gone for this processor: {_INSTEAD}"
            )
            last_lost = first.record.timestamp - 1
            self._lose(one.stream, since + 1, last_lost, error, first.before + 1 - expected)

    # -- positions ------------------------------------------------------------------------------------

    @property
    def ownership(self) -> TaskOwnership:
        """The ownership of the tasks whose events it reads."""
        return self._ownership

    @property
    def has_fetched(self) -> bool:
        """Whether `cut` has more input without a fetch."""
        return any(one.feed.records or one.feed.history.is_fetched for one in self._inputs)

    @property
    def is_behind(self) -> bool:
        """Whether more input is known to be there."""
        return any(one.feed.records or one.feed.history.behind for one in self._inputs)

    @property
    def has_moved(self) -> bool:
        """Whether `consumed` has something new: events were returned, or tasks without events are due to move."""
        if self._touched or not self._all_are_due():
            return bool(self._touched)
        return any(next(each.moved(task), None) for each in self._inputs for task in each.starts)

    def through(self, stream: str, left: Sequence[Piece] = ()) -> int:
        """The hybrid time up to which all commits of an input are returned whole. ``left``: as of `consumed`."""
        one = next(each for each in self._inputs if each.stream == stream)
        places = (piece.before for piece in left if piece.stream == stream)
        return (next(places, None) or one.place()).timestamp

    def _all_are_due(self) -> bool:
        is_quick = len(self._sequences) <= _FEW_TASKS and not self.is_behind
        return self._clock.monotonic() >= self._all_at + (
            min(_ALL_READ_S, _ALL_S) if is_quick else _ALL_S
        )

    def consumed(self, also: Iterable[int] = (), left: Sequence[Piece] = ()) -> Consumed:
        """The positions after all events returned since the last call: plain data, to be committed once and in
        order.

        Any process may commit these positions: pass them on pickled, or as bytes. ``also``: tasks to include though
        they had no event. ``left``: the last pieces, which belong to the next call. If the commit has failed
        without an effect, `put_back`; else take the tasks again. Raises: IllegalState (that was so before).
        """
        if self._ended:
            raise IllegalState(
                f"{self._ended}: take the tasks again, and read from their positions"
            )
        now, before = self._clock.monotonic(), (self._touched, self._all_at)
        tasks = self._touched | set(also)
        if self._all_are_due() or not tasks:
            tasks, self._all_at = set(self._sequences), now
        reported = [{task: each.reported.get(task) for task in tasks} for each in self._inputs]
        limits = {piece.stream: piece.before for piece in reversed(left)}
        alike: dict[tuple[int, tuple[TaskPosition, ...]], list[int]] = {}
        for task in sorted(tasks):
            self._sequences[task] += 1
            moved = tuple(
                p for each in self._inputs for p in each.moved(task, limits.get(each.stream))
            )
            alike.setdefault((self._sequences[task], moved), []).append(task)
            for each in self._inputs:
                each.reported[task] = (limits.get(each.stream) or each.place())[:3]
        self._touched = {task for piece in left for task in piece.tasks}
        steps = tuple(TaskStep(tuple(some), *step) for step, some in alike.items())
        made = Consumed(self._ownership.processor, self._ownership.fencing_token, steps)
        self._last = _Given(made, *before, reported)
        return made

    def put_back(self, consumed: Consumed) -> None:
        """Take back the last `consumed`, whose commit had no effect: the next one includes its positions.

        Raises: IllegalState (it is not the last one).
        """
        last, self._last = self._last, None
        if last is None or last.consumed is not consumed:
            raise IllegalState("only the last positions can be put back")
        for each, reported in zip(self._inputs, last.reported, strict=True):
            for task, place in reported.items():
                if place is None:
                    del each.reported[task]
                else:
                    each.reported[task] = place
        for step in consumed.steps:
            for task in step.tasks:
                self._sequences[task] -= 1
        self._touched |= last.touched
        self._all_at = last.all_at

    def end(self, why: str) -> None:
        """Make every later `consumed` raise `IllegalState`, with this reason."""
        self._ended = why
