"""Positions of processors in their inputs, and how they relate to consumer groups.

Here are the start of a new processor, inputs that start at a group's position, a group's progress, and the mirror
of a processor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import groupby
from operator import itemgetter

from anabranch.core.history_records import has_vector
from anabranch.errors import AnabranchError, InvalidArgument, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.schemas.records import CommitRecord, ProcessorInfo, ProcessorInput
from anabranch.reading.committed_log import (
    CommittedLog,
    ReaderPorts,
    first_offsets,
    ids_of,
    partitions_of,
    places_of,
)
from anabranch.reading.group_lag import positions_of
from anabranch.reading.history import HistorySearch, Start, check_start, heads
from anabranch.topics.names import history_topic, mirror_group, stream_topic

log = logging.getLogger("anabranch.client")


class Mirror:
    """Copies a processor's positions to a consumer group without members, for tools that show lag.

    The copies are never read back. Call `step` every few seconds from a thread that may wait, not from the thread
    that commits. Close the mirror at the end.
    """

    def __init__(
        self, ports: ReaderPorts, processor: str, ask: Callable[[], ProcessorInfo], timeout: float
    ) -> None:
        """``ask``: describes the processor with its tasks. ``timeout``: seconds of each question."""
        self._ask, self._timeout = ask, timeout
        self._mirrored: dict[str, int] = {}
        self._source = ports.committed_log(timeout)
        self._member = ports.member(mirror_group(processor))

    def step(self) -> bool:
        """Copy the positions if they have moved; returns whether it copied any.

        Errors are logged; the next step tries again.
        """
        try:
            info = self._ask()
            offsets: dict[TopicPartition, int] = {}
            records: dict[str, int] = {}
            for number, one in enumerate(info.inputs):
                lowest = min(at.record for at in positions_of(info, number).values())
                if self._mirrored.get(one.stream) != lowest:
                    records[one.stream] = lowest
                    offsets |= mirrored(self._source, one.stream, lowest, self._timeout)
            if not offsets or not self._member.commit(offsets, wait=True):
                return False
        except AnabranchError as error:
            log.info("the positions of a processor are not mirrored: %s", error)
            return False
        self._mirrored |= records
        return True

    def close(self) -> None:
        """Free the connections; the group's offsets stay."""
        self._member.close()
        self._source.close()


def mirrored(
    source: CommittedLog, stream: str, record: int, timeout: float
) -> dict[TopicPartition, int]:
    """The offsets of a position (``record``): in the history, and on each partition of the stream.

    The offsets on the partitions are the ends as of the record before the position. Once all is consumed they are
    the present ends, after all markers, so that tools show no lag.
    """
    topic, history = stream_topic(stream), TopicPartition(history_topic(stream), 0)
    deadline = source.clock.monotonic() + timeout
    places = places_of(source, stream, deadline)
    # Asked for before the search, so that the history has all commits below these ends.
    ends = source.end_offsets([history, *places], deadline, committed=True)
    search = HistorySearch(source, stream, timeout)
    last = search.last()
    if last is None or last.offset < record:
        return ends
    before = search.before(record)
    vector = before.vector() if before is not None else {}
    return {history: record} | {TopicPartition(topic, p): end for p, end in vector.items()}


def group_inputs(
    ports: ReaderPorts, group: str, streams: Sequence[str], timeout: float
) -> tuple[ProcessorInput, ...]:
    """The inputs of a processor that continues at a consumer group's offsets in the streams' topics.

    Raises: UnknownStream, InvalidArgument (the group has no offset), SnapshotExpired (retention deleted events
    that it has not consumed), NotReady, NotAuthorized.
    """
    with _group(ports, group, streams, timeout) as (source, positions):
        deadline = source.clock.monotonic() + timeout
        ids = ids_of(source, streams, deadline)
        inputs = []
        for stream, offsets in positions.items():
            start, timestamp, _ = passed(HistorySearch(source, stream, timeout), offsets)
            inputs.append(ProcessorInput(stream, ids[stream].history, start, timestamp))
        return tuple(inputs)


def group_progress(
    ports: ReaderPorts, group: str, streams: Sequence[str], safe: int, timeout: float
) -> int:
    """The highest timestamp, at most ``safe``, up to which a group has consumed all events of streams.

    Raises: as `group_inputs`.
    """
    with _group(ports, group, streams, timeout) as (source, positions):
        for stream, offsets in positions.items():
            *_, beyond = passed(HistorySearch(source, stream, timeout), offsets)
            safe = min(safe, safe if beyond is None else beyond - 1)
        return safe


@contextmanager
def _group(
    ports: ReaderPorts, group: str, streams: Sequence[str], timeout: float
) -> Iterator[tuple[CommittedLog, dict[str, dict[int, int]]]]:
    """A log, and the group's offsets: stream -> partition -> offset. Raises `InvalidArgument` without offsets."""
    source, member = ports.committed_log(timeout), ports.member(group)
    try:
        counts = partitions_of(source, streams, source.clock.monotonic() + timeout)
        positions = {}
        for stream in streams:
            topic = stream_topic(stream)
            found = member.committed(TopicPartition(topic, p) for p in range(counts[topic]))
            if not found:
                raise InvalidArgument(f"the group {group} has no offset in the topic {topic}")
            positions[stream] = {place.partition: offset for place, offset in found.items()}
        yield source, positions
    finally:
        member.close()
        source.close()


def passed(search: HistorySearch, offsets: Mapping[int, int]) -> tuple[int, int, int | None]:
    """The place in a history for a reader at these offsets; the timestamps of the record before it, and at it.

    The place is the first commit with an event at or above one of the offsets: no event is skipped, some may come
    again. The last timestamp is None if there is no such commit yet.
    """
    near = search.not_beyond(offsets)
    start, timestamp = near.offset if near is not None else 0, 0
    oldest = next(search.since(0), None)
    if oldest is not None and search.is_cut():
        ends = oldest.vector().items()
        if not has_vector(oldest.record) or any(end > offsets.get(p, 0) for p, end in ends):
            raise SnapshotExpired(
                "retention has truncated the history after the group's offsets, or their place in it is not known "
                "any more: events that it has not read are gone. Start at 'begin' instead"
            )
    for at, record in search.since(start):
        if isinstance(record, CommitRecord) and any(
            part.end > offsets.get(part.partition, 0) for part in record.segments
        ):
            return at, timestamp, record.timestamp
        start, timestamp = at + 1, record.timestamp
    return start, timestamp, None


def first_inputs(
    source: CommittedLog,
    streams: Sequence[str],
    start: Start,
    timeout: float,
    deadline: float,
    *,
    is_safe: bool = False,
) -> tuple[ProcessorInput, ...]:
    """The inputs of a new processor, each with its start; together they have all or nothing of each transaction.

    ``start``: as for `Client.read`, and as `heads` needs it. ``is_safe``: whether it is a safe time, which may be
    ahead of this machine's clock. ``timeout``: seconds of a search. Raises: UnknownStream, NotReady,
    InvalidArgument (a future time).
    """
    checked, newest = check_start(start), 0
    ids = ids_of(source, streams, deadline)
    searches = {stream: HistorySearch(source, stream, timeout) for stream in streams}
    begins, lost = {}, False
    for stream, found in heads(searches, checked).items():
        if found is not None:
            begins[stream] = found.offset + 1, found.record.timestamp
        else:
            begins[stream] = _oldest(source, stream, searches[stream], deadline)
            lost |= begins[stream][1] > 0
    passed = {stream: timestamp for stream, (_, timestamp) in begins.items()}
    half = _half(searches, passed) if lost else 0
    inputs = []
    for stream in streams:
        begin, timestamp = begins[stream]
        if timestamp < half and (behind := searches[stream].as_of(half)) is not None:
            begin, timestamp = behind.offset + 1, behind.record.timestamp
        newest = max(newest, timestamp)
        inputs.append(ProcessorInput(stream, ids[stream].history, begin, timestamp))
    # A timestamp in the history is not in the future, whatever this machine's clock shows.
    latest = max(newest, from_us(int(source.clock.wall() * 1e6)))
    if isinstance(checked, int) and not is_safe and checked > latest:
        raise InvalidArgument(
            f"start {start} is still to come: 'end' begins with what is committed from now on"
        )
    return tuple(inputs)


def _half(searches: Mapping[str, HistorySearch], passed: Mapping[str, int]) -> int:
    """The timestamp of the newest commit that is skipped in one stream, but not in another; 0 without one.

    Only commits that histories still have are found. ``passed``: stream -> the timestamp up to which it is skipped.
    """

    def commits(stream: str, above: int, until: int) -> Iterator[tuple[int, str]]:
        for _, record in searches[stream].between(above, until):
            if isinstance(record, CommitRecord):
                yield record.timestamp, stream

    first, last, found = min(passed.values()), max(passed.values()), 0
    if first == last:
        return found
    # A truncated history has no older commits, so there is no need to read other histories further back.
    oldest = [searches[s].not_beyond({}) for s in passed if passed[s] > first]
    first = max(first, min(at.record.timestamp if at else last for at in oldest) - 1)
    shared = merge(*(commits(stream, first, last) for stream in passed))
    for timestamp, parts in groupby(shared, itemgetter(0)):
        if len({timestamp <= passed[stream] for _, stream in parts}) > 1:
            found = timestamp
    return found


def _oldest(
    source: CommittedLog, stream: str, search: HistorySearch, deadline: float
) -> tuple[int, int]:
    """The place in a history after all commits with deleted events, and the timestamp of the record before it."""
    history = TopicPartition(history_topic(stream), 0)
    firsts = first_offsets(source, stream, deadline)
    begin, timestamp = source.start_offsets([history], deadline)[history], 0
    near = search.not_beyond(firsts) if any(firsts.values()) else None
    if near is None:
        return begin, timestamp
    begin, timestamp = near.offset, near.record.timestamp  # everything before it is deleted
    for at, record in search.since(near.offset):
        if not isinstance(record, CommitRecord):
            continue
        if any(part.first < firsts.get(part.partition, 0) for part in record.segments):
            begin, timestamp = at + 1, record.timestamp
        elif has_vector(record) and all(
            p.offset >= firsts.get(p.partition, 0) for p in record.vector
        ):
            break
    return begin, timestamp
