"""Consumer groups in streams: their positions, their lag, and moving them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from anabranch.core.legal_names import split_stream
from anabranch.errors import AnabranchError, InvalidArgument, UnknownStream
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import CommittedLog, Groups, ReaderPorts, partitions_of
from anabranch.reading.history_search import HistorySearch, Start, check_start
from anabranch.reading.ordered_reader import Starting
from anabranch.reading.tasks.lag import Lag, lag_of_offsets, lags_behind
from anabranch.topics.names import history_topic, stream_topic


@dataclass(frozen=True, slots=True)
class StreamStanding:
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
    streams: tuple[StreamStanding, ...]

    @property
    def most(self) -> Lag:
        """The lag in all its streams together: events, and the oldest of them."""
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
        return lag_of_offsets(search, _firsts(source, stream, timeout))


def group_of(ports: ReaderPorts, groups: Groups, name: str, timeout: float) -> ConsumerGroup:
    """A group and its positions in all streams. `InvalidArgument`: there is no such group."""
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
    standings = [_standing(source, stream, at, timeout) for stream, at in places.items()]
    return ConsumerGroup(name, state, members, tuple(standings))


def _standing(
    source: CommittedLog, stream: str, offsets: Mapping[int, int], timeout: float
) -> StreamStanding:
    try:
        search = HistorySearch(source, stream, timeout)
        if HISTORY in offsets:
            lag = lags_behind(search, {offsets[HISTORY]})[offsets[HISTORY]]
            return StreamStanding(stream, offsets, lag)
        # Events below are deleted.
        firsts = _firsts(source, stream, timeout)
        at = {p: max(first, offsets.get(p, 0)) for p, first in firsts.items()}
        return StreamStanding(stream, offsets, lag_of_offsets(search, at))
    except AnabranchError as error:
        return StreamStanding(stream, offsets, Lag(0, 0), f"{type(error).__name__}: {error}")


def _firsts(source: CommittedLog, stream: str, timeout: float) -> dict[int, int]:
    deadline, topic = source.clock.monotonic() + timeout, stream_topic(stream)
    count = partitions_of(source, [stream], deadline)[topic]
    places = [TopicPartition(topic, partition) for partition in range(count)]
    return {p.partition: at for p, at in source.start_offsets(places, deadline).items()}


def move_group(
    ports: ReaderPorts, groups: Groups, name: str, stream: str, start: Start, timeout: float
) -> ConsumerGroup:
    """Move a group without members to ``start``, as for `Client.read`, in a stream.

    Raises: IllegalState (members are in it), InvalidArgument, UnknownStream, SnapshotExpired, NotAuthorized.
    """
    checked = check_start(start)
    split_stream(stream)
    with closing(ports.committed_log(timeout)) as source:
        group = _group(source, groups, name, timeout, stream)
        deadline = source.clock.monotonic() + timeout
        if history_topic(stream) not in source.partition_counts([history_topic(stream)], deadline):
            raise UnknownStream(f"there is no stream {stream!r}")
        search = HistorySearch(source, stream, timeout)
        if any(one.by_transactions for one in group.streams):
            found = search.as_of(checked)
            place = TopicPartition(history_topic(stream), 0)
            first = source.start_offsets([place], deadline)[place]
            offsets = {place: first if found is None else found.offset + 1}
        else:
            topic = stream_topic(stream)
            begin = Starting(source, search, stream, checked, timeout).alone()
            offsets = {TopicPartition(topic, p): offset for p, offset in begin.items()}
        groups.move(name, offsets, source.clock.monotonic() + timeout)
        return _group(source, groups, name, timeout, stream)
