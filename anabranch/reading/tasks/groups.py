"""Positions and consumer groups of Kafka: the mirror of a processor, and starts where a group stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import groupby
from operator import itemgetter

from anabranch.core.history_records import has_vector
from anabranch.core.hybrid_time import from_us
from anabranch.errors import AnabranchError, InvalidArgument, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import CommittedLog, ReaderPorts, ids_of, partitions_of
from anabranch.reading.history_search import HistorySearch, Start, check_start, heads
from anabranch.reading.tasks.lag import positions_of
from anabranch.schemas.records import CommitRecord, ProcessorInfo, ProcessorInput
from anabranch.topics.names import history_topic, mirror_group, stream_topic

log = logging.getLogger("anabranch.client")


class Mirror:
    """Shows Kafka's tools where a processor stands: offsets of a group without members, which are never read back.

    Call `step` every few seconds, by a thread that may wait: not by the one that commits. Close it in the end.
    """

    def __init__(
        self, ports: ReaderPorts, processor: str, ask: Callable[[], ProcessorInfo], timeout: float
    ) -> None:
        """``ask``: describes the processor with its tasks. ``timeout``: seconds of each question."""
        self._ask, self._timeout = ask, timeout
        self._told: dict[str, int] = {}
        self._source = ports.committed_log(timeout)
        self._member = ports.member(mirror_group(processor))

    def step(self) -> bool:
        """Tell the positions if they have moved; True if so. Trouble is logged, and the next step tries again."""
        try:
            info = self._ask()
            offsets: dict[TopicPartition, int] = {}
            stands: dict[str, int] = {}
            for number, one in enumerate(info.inputs):
                lowest = min(at.record for at in positions_of(info, number).values())
                if self._told.get(one.stream) != lowest:
                    stands[one.stream] = lowest
                    offsets |= mirrored(self._source, one.stream, lowest, self._timeout)
            if not offsets or not self._member.commit(offsets, wait=True):
                return False
        except AnabranchError as error:
            log.info("the positions of a processor are not mirrored: %s", error)
            return False
        self._told |= stands
        return True

    def close(self) -> None:
        """Free its connections; the group's offsets stay."""
        self._member.close()
        self._source.close()


def mirrored(
    source: CommittedLog, stream: str, record: int, timeout: float
) -> dict[TopicPartition, int]:
    """The offsets of a position: of the history, and of each partition of the stream.

    The partitions' are those of the last whole commit below. Once all is consumed they are the ends, behind all
    markers, so that tools show no lag.
    """
    topic, history = stream_topic(stream), TopicPartition(history_topic(stream), 0)
    deadline = source.clock.monotonic() + timeout
    count = partitions_of(source, [stream], deadline)[topic]
    places = [TopicPartition(topic, partition) for partition in range(count)]
    # Asked for first: the history tells all commits below these ends.
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
    """The inputs of a processor that goes on where a consumer group stands in the streams' own topics.

    Raises: UnknownStream, InvalidArgument (the group has no offset there), SnapshotExpired (retention took what it
    has not consumed), NotReady, NotAuthorized.
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
    """The highest timestamp up to which a group has consumed all that streams have, at most a safe one.

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
    """A log, and where the group stands: stream -> partition -> offset. `InvalidArgument`: nowhere."""
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
    """The place in a history for one that has read up to these offsets, and the timestamp of what lies before it.

    The first commit with an event at or above one of them stands there: nothing is left out, some come again. The
    last value is its timestamp; None: there is none, so far.
    """
    near = search.not_beyond(offsets)
    start, timestamp = near.offset if near is not None else 0, 0
    oldest = next(search.since(0), None)
    if oldest is not None and search.is_cut():
        ends = oldest.vector().items()
        if not has_vector(oldest.record) or any(end > offsets.get(p, 0) for p, end in ends):
            raise SnapshotExpired(
                "retention has cut the history above where the group stands, or it can't be told any more: events "
                "that it has not read are gone. Start at 'begin' instead"
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
    together: Mapping[str, int],
) -> tuple[ProcessorInput, ...]:
    """The inputs of a new processor, each with the place where it starts: all or nothing of each transaction.

    ``start``: as of `Client.read`. ``timeout``: seconds of a search. ``together``: stream -> a number; streams with
    different ones never share a transaction. Raises: UnknownStream, NotReady, InvalidArgument (a time to come).
    """
    checked, newest = check_start(start), 0
    ids = ids_of(source, streams, deadline)
    searches = {stream: HistorySearch(source, stream, timeout) for stream in streams}
    begins, lost = {}, False
    for stream, found in heads(searches, together, checked).items():
        if found is not None:
            begins[stream] = found.offset + 1, found.record.timestamp
        else:
            begins[stream] = _oldest(source, stream, searches[stream], deadline)
            lost |= begins[stream][1] > 0
    passed = {stream: timestamp for stream, (_, timestamp) in begins.items()}
    halves = _halves(searches, together, passed) if lost else {}
    inputs = []
    for stream in streams:
        begin, timestamp = begins[stream]
        half = halves.get(together[stream], 0)
        if timestamp < half and (behind := searches[stream].as_of(half)) is not None:
            begin, timestamp = behind.offset + 1, behind.record.timestamp
        newest = max(newest, timestamp)
        inputs.append(ProcessorInput(stream, ids[stream].history, begin, timestamp))
    # A commit's own timestamp is no time to come, whatever this machine's clock says.
    if isinstance(checked, int) and checked > max(newest, from_us(int(source.clock.wall() * 1e6))):
        raise InvalidArgument(
            f"start {start} is still to come: 'end' begins with what is committed from now on"
        )
    return tuple(inputs)


def _halves(
    searches: Mapping[str, HistorySearch], together: Mapping[str, int], passed: Mapping[str, int]
) -> dict[int, int]:
    """Number of ``together`` -> the newest commit of which one stream is passed over, and another one is not.

    As far as histories tell: one that was cut may have had others. ``passed``: stream -> the timestamp up to which
    it is passed over.
    """

    def commits(stream: str, above: int, until: int) -> Iterator[tuple[int, str]]:
        for _, record in searches[stream].between(above, until):
            if isinstance(record, CommitRecord):
                yield record.timestamp, stream

    found = {}
    for number in set(together.values()):
        group = [stream for stream in passed if together[stream] == number]
        first, last = min(passed[s] for s in group), max(passed[s] for s in group)
        if first == last:
            continue
        # A cut history tells no more: no other one is read from before it.
        oldest = [searches[s].not_beyond({}) for s in group if passed[s] > first]
        first = max(first, min(at.record.timestamp if at else last for at in oldest) - 1)
        shared = merge(*(commits(stream, first, last) for stream in group))
        for timestamp, parts in groupby(shared, itemgetter(0)):
            if len({timestamp <= passed[stream] for _, stream in parts}) > 1:
                found[number] = timestamp
    return found


def _oldest(
    source: CommittedLog, stream: str, search: HistorySearch, deadline: float
) -> tuple[int, int]:
    """The place in a history behind all commits of which retention has taken events, and the time before it."""
    history, topic = TopicPartition(history_topic(stream), 0), stream_topic(stream)
    count = partitions_of(source, [stream], deadline)[topic]
    places = [TopicPartition(topic, partition) for partition in range(count)]
    firsts = {p.partition: at for p, at in source.start_offsets(places, deadline).items()}
    begin, timestamp = source.start_offsets([history], deadline)[history], 0
    near = search.not_beyond(firsts) if any(firsts.values()) else None
    if near is None:
        return begin, timestamp
    begin, timestamp = near.offset, near.record.timestamp  # all before is gone
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
