"""Plain topics of Kafka, of any cluster, as a processor's inputs: task n reads partition n.

A position is an offset. The topic's producers choose the partition of a key, so stores are local to tasks.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from re import escape
from typing import TYPE_CHECKING, Any

from anabranch.client.client import Client
from anabranch.client.connect import reader_ports
from anabranch.errors import IllegalState, InvalidArgument, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import PLAIN
from anabranch.protocol.limits import LATEST, RESERVED
from anabranch.protocol.schemas.records import (
    Consumed,
    ProcessorInput,
    TaskInfo,
    TaskPosition,
    TaskStep,
)
from anabranch.reading.committed_log import CommittedLog, ReaderPorts
from anabranch.reading.decoded import Portion, Run, Stretch
from anabranch.reading.feed import Feed
from anabranch.reading.group_lag import check_partitions, check_same_topic
from anabranch.reading.slices import Piece, Slice, Slices
from anabranch.types import TaskOwnership

if TYPE_CHECKING:
    import pyarrow as pa

_FIND_S = 10.0  # between checks for new partitions
_EMPTY_S = (
    5.0  # how long records wait for an empty partition of their task that is not read to its end
)
_HELD_S = 0.25  # between fetches, and between look-ups of a partition's end, meanwhile
_BEHIND_S = (
    5.0  # how long an end offset below the position counts as the report of a leader that lags
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster of plain topics. ``bootstrap``: None for the processor's own cluster."""

    bootstrap: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def plain_inputs(
    source: CommittedLog, topics: Sequence[str], tasks: int, start_ms: int, deadline: float
) -> tuple[ProcessorInput, ...]:
    """The inputs of a new processor. ``start_ms``: Unix milliseconds to start at, or 0 for the beginning.

    Raises: UnknownStream, IllegalState (more partitions than tasks), NotReady.
    """
    ids = source.topic_ids(topics, deadline)
    counts = source.partition_counts(list(ids), deadline)
    for topic in topics:
        check_partitions(topic, counts, tasks)
    return tuple(ProcessorInput(PLAIN + t, ids[t], 0, start_ms) for t in topics)


class PlainReader:
    """Reads the partitions of a worker's tasks, as `TaskReader` reads streams. For one thread.

    ``on_lost``: as in `TaskReader`, but it counts skipped offsets.
    """

    on_lost: Callable[[str, int, SnapshotExpired], None] | None = None

    def __init__(
        self, source: CommittedLog, ownership: TaskOwnership, timeout: float, *, single: bool
    ) -> None:
        """``timeout``: seconds for a request. ``single``: make each record a piece of its own, for timers."""
        self._source, self._ownership, self._timeout, self._single = (
            source,
            ownership,
            timeout,
            single,
        )
        self._clock = source.clock
        self._sequences = {task: info.sequence for task, info in ownership.tasks.items()}
        self._numbers = {
            one.stream.removeprefix(PLAIN): number for number, one in enumerate(ownership.inputs)
        }
        self._feed = Feed(source, gone=self._gone)
        self._at: dict[TopicPartition, int] = {}  # the next offset to return
        self._touched: dict[
            TopicPartition, int
        ] = {}  # the part of `_at` that moved since `consumed`
        # Fetched records. By event time: of each partition; else in the order in which they came.
        self._portions: dict[TopicPartition, deque[Portion]] = {}
        self._ends: dict[
            TopicPartition, tuple[int, float]
        ] = {}  # a partition's end, and when it was asked for
        self._held: dict[
            int, float
        ] = {}  # task -> since when its records wait for an empty partition
        self._before: tuple[dict[int, int], dict[TopicPartition, int]]
        self.misplaced = Counter[str]()
        # Event time is by task, so that the order of several topics decides which events are late.
        self._by_time = single and len(self._numbers) > 1
        self._find_at = -math.inf
        self._find_partitions()

    def _find_partitions(self) -> None:
        now = self._clock.monotonic()
        if now < self._find_at:
            return
        self._find_at = now + _FIND_S
        deadline, topics = now + self._timeout, list(self._numbers)
        # A topic is gone only if every broker says so.
        counts = self._source.partition_counts(topics, deadline, math.inf)
        ids = self._source.topic_ids(topics, deadline)
        for topic, number in self._numbers.items():
            check_partitions(topic, counts, self._ownership.task_count)
            begin = self._ownership.inputs[number]
            check_same_topic(topic, begin, ids)
            tasks = (task for task in self._ownership.tasks if task < counts[topic])
            for place in (TopicPartition(topic, task) for task in tasks):
                if place not in self._at:
                    self._at[place] = at = self._first(place, begin, deadline)
                    self._feed.add(topic, {place.partition: at})

    def _first(self, place: TopicPartition, begin: ProcessorInput, deadline: float) -> int:
        known = self._ownership.tasks[place.partition].positions
        at = next((p.record for p in known if p.input == self._numbers[place.topic]), None)
        end = self._source.end_offsets([place], deadline)[place]
        if at is None:
            if begin.timestamp:
                found = self._source.offset_for_time(place, begin.timestamp, deadline)
                return end if found is None else found
            return self._source.start_offsets([place], deadline)[place]
        until = self._clock.monotonic() + _BEHIND_S
        while at > end and self._clock.monotonic() < until:  # the partition's leader may lag
            self._clock.sleep(0.5)
            end = self._source.end_offsets([place], deadline)[place]
        if at > end:
            raise IllegalState(
                f"{place.topic}[{place.partition}] ends at {end}, and offset {at} is consumed: it was made again, "
                "or has lost records; make another processor"
            )
        return at

    def _gone(self, place: TopicPartition, offset: int) -> None:
        error = SnapshotExpired(
            f"{place.topic}[{place.partition}] has lost offset {offset}, which is not consumed yet: keep it for "
            "longer; to continue now, use on_lost='skip' (`anabranch bridge --lossy`)"
        )
        if self.on_lost is None:
            raise error
        start = self._source.start_offsets([place], self._clock.monotonic() + self._timeout)[place]
        self.on_lost(PLAIN + place.topic, start - offset, error)
        self._at[place] = self._touched[place] = start

    # The ends of its partitions are not asked for, so more may be there at any time.
    is_behind = True

    @property
    def has_fetched(self) -> bool:
        """Whether `cut` has more records without a fetch."""
        return bool(self._portions)

    @property
    def has_moved(self) -> bool:
        """Whether positions have moved since `consumed`."""
        return bool(self._touched)

    def cut(self, until: float, most_bytes: int, _: int | None = None) -> list[Piece]:
        """About this many bytes of records; empty if no record came until the monotonic second ``until``."""
        self._find_partitions()
        taken: list[Piece] = []
        size = 0
        while size < most_bytes:
            portion = self._next_portion()
            if portion is None:
                if taken or not self._fetch(until):
                    return taken
                continue
            place = portion.place
            block, low = portion.next_of_block()
            high = min(len(block.offsets), low + 1) if self._single else len(block.offsets)
            stretch = Stretch(high - low, None, block.offsets[low], 0)
            tasks = [place.partition] * (high - low)
            found = Slice(Run(block, place.partition, low, stretch), tasks)
            stream = PLAIN + place.topic
            slices = Slices(stream, [found], size=int(found.ends()[-1]))
            taken.append(Piece(stream, block.offsets[low], slices, tasks))
            size += slices.size
            self._at[place] = self._touched[place] = block.offsets[high - 1] + 1
            portion.advance(high)
        return taken

    def _fetch(self, until: float) -> bool:
        """Fetch records of partitions without fetched ones. Returns whether `cut` may continue."""
        held = bool(self._portions)
        if held:
            until = min(until, self._clock.monotonic() + _HELD_S)
        for portion in self._feed.next(until, self._portions):
            self._portions.setdefault(portion.place, deque()).append(portion)
        return bool(self._portions) and (not held or self._clock.monotonic() < until)

    def _next_portion(self) -> Portion | None:
        """The portion whose first record is next; None if records have to be fetched first."""
        for place in list(self._portions):
            some = self._portions[place]
            while some and some[0].first() is None:
                some.popleft()
            if not some:
                del self._portions[place]
        if not self._by_time:
            return next(iter(self._portions.values()))[0] if self._portions else None
        ready = [place for place in self._portions if self._is_ready(place.partition)]
        if not ready:
            return None
        return self._portions[min(ready, key=self._time_of)][0]

    def _time_of(self, place: TopicPartition) -> tuple[int, int]:
        """The timestamp of a partition's next record; then the order of the inputs."""
        block, low = self._portions[place][0].next_of_block()
        return block.rows(low, low + 1).timestamps[0], self._numbers[place.topic]

    def _is_ready(self, task: int) -> bool:
        """Whether the lowest of a task's fetched records is next: other topics have none before it."""
        now = self._clock.monotonic()
        for place in (TopicPartition(topic, task) for topic in self._numbers):
            if (
                place in self._at
                and place not in self._portions
                and not self._is_at_end(place, now)
            ):
                return now >= self._held.setdefault(task, now) + _EMPTY_S
        self._held.pop(task, None)
        return True

    def _is_at_end(self, place: TopicPartition, now: float) -> bool:
        """Whether all of a partition was read, as of `_HELD_S` ago at most."""
        end, asked = self._ends.get(place, (-1, -math.inf))
        if now >= asked + _HELD_S:
            deadline = now + self._timeout
            end = self._source.end_offsets([place], deadline, committed=True)[place]
            self._ends[place] = end, now
        return self._feed.positions(place.topic, [place.partition])[place.partition] >= end

    def consumed(self, also: Iterable[int] = (), left: Sequence[Piece] = ()) -> Consumed:
        """Positions after all records since the last call, except ``left``. ``also``: tasks without records."""
        self._before = self._sequences.copy(), self._touched
        stays = {
            TopicPartition(piece.stream.removeprefix(PLAIN), piece.tasks[0]): piece.timestamp
            for piece in reversed(left)
        }
        positions: dict[int, list[TaskPosition]] = {task: [] for task in also}
        for place, at in sorted(self._touched.items()):
            number = self._numbers[place.topic]
            positions.setdefault(place.partition, []).append(
                TaskPosition(number, stays.get(place, at), 0)
            )
        self._touched = {place: self._at[place] for place in stays}
        steps = []
        for task, moved in sorted(positions.items()):
            self._sequences[task] += 1
            steps.append(TaskStep((task,), self._sequences[task], tuple(moved)))
        return Consumed(self._ownership.processor, self._ownership.fencing_token, tuple(steps))

    def put_back(self, consumed: Consumed) -> None:
        """As `TaskReader.put_back`. ``consumed``: the last ones."""
        self._sequences, touched = self._before
        self._touched = touched | self._touched

    def close(self) -> None:
        self._source.close()


def outputs_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Records of plain topics as outputs. A record whose time no stream accepts (-1, 0) gets the current time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    times = batch.column("timestamp")
    ms = pc.divide(times.cast(pa.int64()), 1000)
    legal = pc.and_(pc.greater(ms, 0), pc.less_equal(ms, LATEST))
    times = pc.if_else(legal, times, pa.scalar(None, times.type))
    names = ["key", "value", "headers", "timestamp"]
    columns = [batch.column("key"), batch.column("value"), _copied(batch.column("headers")), times]
    return pa.record_batch(columns, names=names)


def _copied(headers: pa.ListArray) -> pa.ListArray:
    """Headers with names that may be written, as `copied_name` makes them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pairs = headers.values
    names = pc.replace_substring_regex(pairs.field("key"), f"^{escape(RESERVED)}", f"_{RESERVED}")
    made = pa.StructArray.from_arrays([names, pairs.field("value")], fields=list(pairs.type))
    return pa.ListArray.from_arrays(headers.offsets, made, type=headers.type)


def plain_ports(client: Client, cluster: Cluster) -> ReaderPorts:
    if cluster.bootstrap is None:
        return client.reader_ports()
    return reader_ports(cluster.bootstrap, cluster.config)


def import_group(
    client: Client, ports: ReaderPorts, processor: str, group: str, timeout: float
) -> int:
    """Start a processor of plain topics, before its first commit, at the committed offsets of a consumer group.

    Stop the group's members first. ``ports``: of the topics' cluster. Returns how many partitions have an offset.

    Raises: InvalidArgument (the group has no offsets there), IllegalState (the processor has begun), NotReady.
    """
    info = client.processor(processor)
    _check_not_begun(processor, info.tasks)
    places = {
        TopicPartition(one.stream.removeprefix(PLAIN), task): number
        for number, one in enumerate(info.inputs)
        for task in range(info.task_count)
    }
    with closing(ports.committed_log(timeout)) as source:
        topics = list({place.topic for place in places})
        deadline = source.clock.monotonic() + timeout
        counts = source.partition_counts(topics, deadline)
    member = ports.member(group)
    try:
        found = member.committed([p for p in places if p.partition < counts.get(p.topic, 0)])
    finally:
        member.close()
    if not found:
        raise InvalidArgument(f"the group {group} has no offsets of {', '.join(topics)}")
    moved: dict[int, list[TaskPosition]] = {}
    for place, offset in sorted(found.items()):
        moved.setdefault(place.partition, []).append(TaskPosition(places[place], offset, 0))
    steps = tuple(TaskStep((task,), 1, tuple(some)) for task, some in moved.items())
    ownership = client.take_tasks(processor)
    try:
        _check_not_begun(processor, ownership.tasks.values())  # a worker may have begun meanwhile
        with client.begin(ownership.scope, ownership=ownership) as txn:
            txn.commit(consumed=Consumed(processor, ownership.fencing_token, steps))
    finally:
        client.release_tasks(ownership)
    return len(found)


def _check_not_begun(processor: str, tasks: Iterable[TaskInfo]) -> None:
    if any(task.sequence for task in tasks):
        raise IllegalState(
            f"{processor} has begun already: a group is imported before its first commit"
        )
