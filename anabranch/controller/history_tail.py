"""Reads of a leader from a stream's history: its end, before the first round to it, and places for truncation.

A *history* is a stream's topic with one record for each commit and stream epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anabranch.core.history_records import NO_PREVIOUS, Tail, completed
from anabranch.core.round import Round
from anabranch.errors import (
    AnabranchError,
    IllegalState,
    InvalidArgument,
    InvariantViolation,
    MalformedRecord,
    NotReady,
    SnapshotExpired,
)
from anabranch.ports import (
    Clock,
    Failed,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicGone,
    TopicPartition,
    answered,
)
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import HistorySearch
from anabranch.topics.names import history_topic, stream_topic

# All streams wait with the leader, so a history that takes longer is tried again later.
DEADLINE_S = 5.0
_FETCH_BYTES = 1 << 20
T = TypeVar("T")


class _LeadersLog(CommittedLog):
    """A reader that raises the log's own errors at once, because all other streams wait for the leader."""

    def _unread(self, topic: str, error: LogError, left: float) -> None:
        raise error

    def _ask(self, deadline: float, question: Callable[[Failed], T]) -> T:
        return answered(question)


def tail_for(log: Log, clock: Clock, stream: str, round_: Round) -> Tail:
    """The end of a stream's history.

    Raises: TopicGone: the history is empty, and this round does not begin it. LogRefused: it can't be understood.
    """
    try:
        tail = load_tail(log, clock, stream)
    except AnabranchError as error:
        raise LogRefused(
            f"a history can't be used: {error}", 0, (history_topic(stream),)
        ) from error
    begins = any(
        new.stream == stream and not new.stream_epoch and not new.again for new in round_.epochs
    )
    if tail.last == NO_PREVIOUS and not begins:
        topic = history_topic(stream)
        raise TopicGone(f"{topic} is empty: it was made again", topic, lost=True)
    return tail


def load_tail(log: Log, clock: Clock, stream: str) -> Tail:
    """The vector and the offset of the newest committed history record; empty for a new stream.

    This reads up to the high watermark, beyond the last stable offset: the markers of this leader's own last round
    may still be on their way, and without that round the chain of records would break.
    """
    topic = history_topic(stream)
    search = HistorySearch(_LeadersLog(log, clock), stream, DEADLINE_S)
    try:
        last = search.last()
        end = search.end
        if last is None:
            return Tail(read_to=end)
        since = search.since_vector(last)
        epoch = last.record if isinstance(last.record, EpochRecord) else search.epoch(last)
    except NotReady as error:
        why = f"{error} in {DEADLINE_S:.0f} s: a native transaction may be open on it"
        raise LogUnavailable(why, (topic,)) from error
    except SnapshotExpired as error:
        raise MalformedRecord(
            f"{topic} was cut where the last vector stood: records were deleted by hand. "
            "Replace the stream by a new one"
        ) from error
    if epoch is None:
        raise InvariantViolation(f"{topic} has no EPOCH record {last.record.stream_epoch}")
    vector = completed(last.record, [at.record for at in since]).vector
    return Tail(
        {p.partition: p.offset for p in vector},
        {s.segment_id: s.start_offset for s in epoch.segments},
        last.offset,
        since[0].offset,
        len(since) - 1,
        read_to=end,
    )


def events_until(log: Log, clock: Clock, stream: str, until: int) -> dict[TopicPartition, int]:
    """Partition -> end of its events committed at or before a timestamp, if the partition has such events."""
    source = _LeadersLog(log, clock)
    search = HistorySearch(source, stream, DEADLINE_S)
    try:
        found = search.as_of(until)
    except NotReady as error:
        raise LogUnavailable(str(error), (history_topic(stream),)) from error
    ends = {} if found is None else found.vector()
    starts = source.start_offsets([TopicPartition(stream_topic(stream), p) for p in ends], 0.0)
    return {
        place: ends[place.partition] for place, at in starts.items() if at < ends[place.partition]
    }


def base_place(log: Log, clock: Clock, stream: str, until: int) -> tuple[int, int]:
    """Offset of the first history record after a timestamp, and the timestamp of the last COMMIT record before it.

    If there is no such COMMIT record, the second value is the time when the history began, or 0 if the history was
    truncated. `IllegalState`: the topic has records from before the history, which no base has.
    """
    source = _LeadersLog(log, clock)
    search = HistorySearch(source, stream, DEADLINE_S)
    try:
        found = at = search.as_of(until)
        if found is None or at is None:
            raise InvalidArgument(
                f"{stream} was made after {to_text(until)}: it has no rows as of then"
            )
        first = search.epoch_record(0)
        adopted = {
            TopicPartition(stream_topic(stream), p.partition): p.offset
            for p in (first.vector if first is not None else ())
            if p.offset
        }
        starts = source.start_offsets(adopted, 0.0) if adopted else {}
        if any(starts[place] < end for place, end in adopted.items()):
            raise IllegalState(
                f"{stream} was made of a topic with records, which its replicas and bases lack: write them and its "
                "rows to another table"
            )
        while not isinstance(at.record, CommitRecord):
            earlier = search.before(at.offset)
            if earlier is None:
                return (
                    found.offset + 1,
                    at.record.timestamp if at.record.previous == NO_PREVIOUS else 0,
                )
            at = earlier
    except NotReady as error:
        raise LogUnavailable(str(error), (history_topic(stream),)) from error
    return found.offset + 1, at.record.timestamp


def check_unread(log: Log, clock: Clock, partition: TopicPartition, low: int, end: int) -> None:
    """`LogUnavailable` if a history has a record in [low, end): the broker that gave ``low`` as its end lags."""
    source = _LeadersLog(log, clock)
    deadline = clock.monotonic() + DEADLINE_S
    position = low
    while position < end:
        found = source.fetch(partition, position, deadline, _FETCH_BYTES)
        why = ""
        if found is not None:
            position = found.next_offset
            if any(batch.base_offset < end for batch in found.batches):
                why = "was read from a broker that lags"
        elif clock.monotonic() >= deadline:
            why = f"could not be read from {position} on in {DEADLINE_S:.0f} s"
        if why:
            raise LogUnavailable(f"{partition.topic} {why}", (partition.topic,))
