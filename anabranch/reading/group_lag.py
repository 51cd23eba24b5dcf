"""Positions of consumer groups and processors in streams, their lag, and moving groups.

The lag is counted in a stream's history, which has the number of events of each commit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from anabranch.batches.records import decode_records
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    UnknownStream,
    count_of,
)
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import MAX, to_ms
from anabranch.protocol.legal_names import PLAIN, is_plain, split_stream
from anabranch.protocol.schemas.records import (
    CommitRecord,
    ProcessorInfo,
    ProcessorInput,
    TaskPosition,
)
from anabranch.reading.committed_log import CommittedLog, Groups, ReaderPorts, first_offsets
from anabranch.reading.history import HistorySearch, Start, check_start
from anabranch.reading.ordered_reader import Starting
from anabranch.topics.names import history_topic, stream_topic

_COUNTED = 10_000  # most records that are read of one history: some tenths of a second
_FETCH_BYTES = 64 << 10
_COUNT_S = 2.0  # of one stream among many


class Lag(NamedTuple):
    """The number of committed events after a position, and the Unix ms of the oldest of their commits (0: none).

    All events of the commit at the position are counted. If the number is not ``exact``, offsets are counted: they
    include the markers between events.
    """

    events: int
    oldest_ms: int
    exact: bool = True

    def age_s(self, now: float) -> float:
        """Seconds from the oldest commit to the Unix time ``now``; 0 without a commit."""
        return max(0.0, now - self.oldest_ms / 1000) if self.oldest_ms else 0.0


@dataclass(frozen=True, slots=True)
class InputLag:
    """An input of a processor. ``tasks``: task -> its position and lag. ``trouble``: why these are not known."""

    stream: str
    tasks: Mapping[int, tuple[TaskPosition, Lag]]
    trouble: str = ""

    @property
    def most(self) -> Lag:
        """The lag of the task with the lowest position."""
        found = (lag for _, lag in self.tasks.values())
        return max(found, key=lambda lag: lag.events, default=Lag(0, 0))


def positions_of(info: ProcessorInfo, number: int) -> dict[int, TaskPosition]:
    """Task -> its position in the input with this number; the input's start if the task never moved."""
    begin = info.inputs[number]
    start = TaskPosition(number, begin.record, begin.timestamp)
    found = dict.fromkeys(range(info.task_count), start)
    for task in info.tasks:
        for position in task.positions:
            if position.input == number:
                found[task.task] = position
    return found


def input_lags(source: CommittedLog, info: ProcessorInfo, timeout: float) -> list[InputLag]:
    """The lags of a processor that was described with its tasks. ``timeout``: seconds for each question."""
    found = []
    for number, one in enumerate(info.inputs):
        plain = is_plain(one.stream)
        topic = one.stream.removeprefix(PLAIN) if plain else history_topic(one.stream)
        deadline = source.clock.monotonic() + timeout
        try:
            ids = source.topic_ids([topic], deadline)
            check_same_topic(topic, one, ids)
            stands = positions_of(info, number)
            if plain:
                found.append(InputLag(one.stream, _plain_lags(source, topic, stands, deadline)))
                continue
            search = HistorySearch(source, one.stream, timeout)
            lags = lags_behind(search, {position.record for position in stands.values()})
            tasks = {task: (at, lags[at.record]) for task, at in stands.items()}
            found.append(InputLag(one.stream, tasks))
        except AnabranchError as error:
            found.append(InputLag(one.stream, {}, f"{type(error).__name__}: {error}"))
    return found


def _plain_lags(
    source: CommittedLog, topic: str, stands: Mapping[int, TaskPosition], deadline: float
) -> dict[int, tuple[TaskPosition, Lag]]:
    counts = source.partition_counts([topic], deadline)
    check_partitions(topic, counts, len(stands))
    places = [TopicPartition(topic, partition) for partition in range(counts[topic])]
    starts = source.start_offsets(places, deadline)
    ends = source.end_offsets(places, deadline, committed=True)
    found = {}
    for place, end in ends.items():
        at = stands[place.partition]
        first = at.record or starts[place]
        if at.timestamp:  # the task never moved: the start, in Unix ms
            by_time = source.offset_for_time(place, at.timestamp, deadline)
            first = end if by_time is None else by_time
        oldest_ms = 0  # stays if only markers and aborted records follow
        while not oldest_ms and first < end:
            fetched = source.fetch(place, first, deadline, _FETCH_BYTES)
            if fetched is None:
                break
            records = (x for b in fetched.batches for x in decode_records(b.data))
            first, oldest_ms = next(
                ((x.offset, x.timestamp_ms) for x in records if x.offset >= first),
                (fetched.next_offset, 0),
            )
        found[place.partition] = at, Lag(max(0, end - first), oldest_ms, exact=False)
    return found


def lags_behind(
    search: HistorySearch, records: Iterable[int], counted: int = _COUNTED
) -> dict[int, Lag]:
    """Place in a history -> lag. If more than ``counted`` records follow a place, vectors are compared."""
    wanted = sorted(set(records))
    read = list(islice(search.since(wanted[0]), counted + 1))
    if len(read) > counted:
        return {place: _by_vectors(search, place) for place in wanted}
    commits = [(at, record) for at, record in read if isinstance(record, CommitRecord)]
    counts = [_events(record, {}) for _, record in commits]
    lags = {}
    for place in wanted:
        at = bisect_left(commits, place, key=itemgetter(0))
        oldest = to_ms(commits[at][1].timestamp) if at < len(commits) else 0
        lags[place] = Lag(sum(counts[at:]), oldest)
    return lags


def lag_of_offsets(search: HistorySearch, offsets: Mapping[int, int]) -> Lag:
    """The lag of a reader at these offsets of a stream's partitions, in events without markers.

    If more than `_COUNTED` records follow, vectors are compared instead.
    """
    near = search.not_beyond(offsets)
    if near is None:
        return Lag(0, 0)
    events = oldest = 0
    for number, (_, record) in enumerate(search.since(near.offset)):
        behind = _events(record, offsets) if isinstance(record, CommitRecord) else 0
        if behind and not oldest:
            oldest = to_ms(record.timestamp)
        events += behind
        if number == _COUNTED and (last := search.as_of("end")) is not None:
            ends = last.vector().items()
            events = sum(max(0, end - offsets.get(partition, 0)) for partition, end in ends)
            return Lag(events, oldest, exact=False)
    return Lag(events, oldest)


def _events(record: CommitRecord, offsets: Mapping[int, int]) -> int:
    """The number of a commit's events at or above these offsets. Within a segment's range it counts offsets."""
    return sum(
        min(part.count, max(0, part.end - offsets.get(part.partition, 0)))
        for part in record.segments
    )


def _by_vectors(search: HistorySearch, place: int) -> Lag:
    last, before = search.as_of("end"), search.before(place)
    first = next((at for at in search.since(place) if isinstance(at.record, CommitRecord)), None)
    if last is None or first is None:
        return Lag(0, 0)
    if before is None and search.is_cut():
        before = search.oldest_whole()  # an EPOCH record: events before it are deleted
    begin = before.vector() if before is not None else {}
    ends = sum(end - begin.get(partition, 0) for partition, end in last.vector().items())
    return Lag(ends, to_ms(first.record.timestamp), exact=False)


def check_same_topic(topic: str, wanted: ProcessorInput, ids: Mapping[str, str]) -> None:
    """Raise `IllegalState` if a topic has another id than the processor was made with; ids may be unknown."""
    found = ids.get(topic, "")
    if wanted.topic_id and found and found != wanted.topic_id:
        raise IllegalState(
            f"{topic} is another topic than the one that the processor was made for: its stream was forgotten and "
            "created again. Make another processor"
        )


def check_partitions(topic: str, counts: Mapping[str, int], tasks: int) -> None:
    """Raise `UnknownStream` without the plain topic, `IllegalState` if it has more partitions than tasks."""
    if topic not in counts:
        raise UnknownStream(f"there is no topic {topic} here: name the cluster that has it")
    if counts[topic] > tasks:
        raise IllegalState(
            f"{topic} has {count_of(counts[topic], 'partition')}, more than the processor has tasks ({tasks:,}): "
            "make another processor, with more"
        )


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """A group's position in a stream, and its lag. ``trouble``: why the lag is not known.

    ``offsets``: partition -> offset in the stream's topic; for a group of `read_transactions` {-1: offset in the
    stream's history}.
    """

    stream: str
    offsets: Mapping[int, int]
    lag: Lag
    trouble: str = ""

    @property
    def by_transactions(self) -> bool:
        """Whether the group reads whole transactions."""
        return HISTORY in self.offsets


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group with positions in streams: of `read`, of `read_transactions`, or of plain consumers."""

    name: str
    state: str
    members: tuple[str, ...]
    streams: tuple[GroupPosition, ...]

    @property
    def most(self) -> Lag:
        """The lag in all streams of the group together: the number of events, and the oldest commit."""
        lags = [one.lag for one in self.streams]
        oldest = min((lag.oldest_ms for lag in lags if lag.oldest_ms), default=0)
        return Lag(sum(lag.events for lag in lags), oldest, all(lag.exact for lag in lags))


HISTORY = -1  # in place of a partition: the stream's history


def groups_of(
    ports: ReaderPorts, groups: Groups, stream: str | None, timeout: float
) -> list[ConsumerGroup]:
    """The groups with a position in a stream; None: in any stream. By name.

    Groups that this client may not see are omitted. ``timeout``: seconds of each question.
    """
    found = []
    if stream is not None:
        split_stream(stream)
    with closing(ports.committed_log(timeout)) as source:
        for name in groups.names(source.clock.monotonic() + timeout):
            group = _group(source, groups, name, timeout, stream)
            if group.streams:
                found.append(group)
    return found


def count_events(ports: ReaderPorts, stream: str, timeout: float) -> Lag:
    """The committed events that a stream has now, as a lag from its beginning."""
    split_stream(stream)
    with closing(ports.committed_log(timeout)) as source:
        search = HistorySearch(source, stream, timeout)
        firsts = first_offsets(source, stream, source.clock.monotonic() + timeout)
        return lag_of_offsets(search, firsts)


class StreamCount(NamedTuple):
    """The committed events that a stream has now. ``newest``: hybrid time of its newest commit; 0 without one."""

    events: int
    exact: bool
    newest: int


def count_streams(
    ports: ReaderPorts, streams: Iterable[str], timeout: float
) -> dict[str, StreamCount]:
    """Stream -> its count. Streams in trouble, or that this client may not read, are missing.

    ``timeout``: seconds for all streams. Those that would take longer are missing, too.
    """
    found = {}
    with closing(ports.committed_log(timeout)) as source:
        deadline = source.clock.monotonic() + timeout
        for stream in streams:
            left = min(_COUNT_S, deadline - source.clock.monotonic())
            if left <= 0:
                break
            with suppress(AnabranchError):
                search = HistorySearch(source, stream, left)
                firsts = first_offsets(source, stream, source.clock.monotonic() + left)
                lag = lag_of_offsets(search, firsts)
                last = search.commits(-1, MAX, 1)
                newest = last[0].timestamp if last else 0
                found[stream] = StreamCount(lag.events, lag.exact, newest)
    return found


def group_of(ports: ReaderPorts, groups: Groups, name: str, timeout: float) -> ConsumerGroup:
    """A group and its positions in all streams. Raises `InvalidArgument` if there is no such group."""
    with closing(ports.committed_log(timeout)) as source:
        found = _group(source, groups, name, timeout)
    if not found.streams and found.state == "dead":
        raise InvalidArgument(f"there is no group {name!r}: `anabranch group list` shows all")
    return found


def _group(
    source: CommittedLog, groups: Groups, name: str, timeout: float, wanted: str | None = None
) -> ConsumerGroup:
    deadline = source.clock.monotonic() + timeout
    placed: dict[str, dict[int, int]] = {}
    histories: dict[str, int] = {}
    for (topic, partition), offset in groups.offsets(name, deadline).items():
        scope, dot, rest = topic.partition(".")
        if not dot or not scope or rest.partition(".")[2] not in ("", "history"):
            continue
        stream = f"{scope}/{rest.partition('.')[0]}"
        if wanted in (None, stream):
            if topic == history_topic(stream):
                histories[stream] = offset
            else:
                placed.setdefault(stream, {})[partition] = offset
    for stream, offset in histories.items():
        placed.setdefault(stream, {HISTORY: offset})
    # Most topics of other groups do not belong to streams: one broker's answer is enough.
    more = {"patience": 0.0} if wanted is None else {}
    known = source.partition_counts([*map(history_topic, placed)], deadline, **more)
    places = {stream: at for stream, at in sorted(placed.items()) if history_topic(stream) in known}
    state, members = groups.state(name, deadline) if places or wanted is None else ("", ())
    positions = [_position_of(source, stream, at, timeout) for stream, at in places.items()]
    return ConsumerGroup(name, state, members, tuple(positions))


def _position_of(
    source: CommittedLog, stream: str, offsets: Mapping[int, int], timeout: float
) -> GroupPosition:
    try:
        search = HistorySearch(source, stream, timeout)
        if HISTORY in offsets:
            lag = lags_behind(search, {offsets[HISTORY]})[offsets[HISTORY]]
            return GroupPosition(stream, offsets, lag)
        # Events at lower offsets are deleted.
        firsts = first_offsets(source, stream, source.clock.monotonic() + timeout)
        at = {p: max(first, offsets.get(p, 0)) for p, first in firsts.items()}
        return GroupPosition(stream, offsets, lag_of_offsets(search, at))
    except AnabranchError as error:
        return GroupPosition(stream, offsets, Lag(0, 0), f"{type(error).__name__}: {error}")


def move_group(
    ports: ReaderPorts, groups: Groups, name: str, stream: str, start: Start, timeout: float
) -> ConsumerGroup:
    """Move a group without members to ``start``, as for `Client.read`, in a stream.

    Raises: IllegalState (the group has members), InvalidArgument, UnknownStream, SnapshotExpired, NotAuthorized.
    """
    checked = check_start(start)
    split_stream(stream)
    with closing(ports.committed_log(timeout)) as source:
        group = _group(source, groups, name, timeout, stream)
        deadline = source.clock.monotonic() + timeout
        if history_topic(stream) not in source.partition_counts([history_topic(stream)], deadline):
            raise UnknownStream(f"there is no stream {stream!r}")
        if any(one.by_transactions for one in group.streams):
            found = HistorySearch(source, stream, timeout).as_of(checked)
            place = TopicPartition(history_topic(stream), 0)
            first = source.start_offsets([place], deadline)[place]
            offsets = {place: first if found is None else found.offset + 1}
        else:
            topic = stream_topic(stream)
            begin = Starting(source, stream, checked, timeout).alone()
            offsets = {TopicPartition(topic, p): offset for p, offset in begin.items()}
        groups.move(name, offsets, source.clock.monotonic() + timeout)
        return _group(source, groups, name, timeout, stream)
