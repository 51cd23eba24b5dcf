"""The end of a stream's history: found once when leading begins, then kept by who writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from anabranch.batches.history import HistoryRecord, decode_history
from anabranch.batches.records import Record, decode_records
from anabranch.core.round import NO_PREVIOUS, Round, Tail
from anabranch.core.vectors import completed, has_vector, vector_place
from anabranch.errors import AnabranchError, InvariantViolation, MalformedRecord
from anabranch.ports import (
    Clock,
    Fetched,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicGone,
    TopicPartition,
)
from anabranch.schemas.records import CommitRecord, EpochRecord
from anabranch.topics.names import history_topic

DEADLINE_S = 5.0  # everybody waits for it; a history that takes longer is tried again later
_WINDOW = 64
_LITTLE = 1 << 16  # bytes, for one record


def tail_for(log: Log, clock: Clock, stream: str, round_: Round) -> Tail:
    """The end of a stream's history.

    Raises: TopicGone: there is none, and this round does not begin it. LogRefused: it can't be understood.
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
        raise TopicGone(f"{topic} is empty: it was made anew", topic, lost=True)
    return tail


def load_tail(log: Log, clock: Clock, stream: str) -> Tail:
    """The vector and the offset of the newest committed history record; empty for a new stream.

    It reads to the high watermark, not to the last stable offset: the markers of this leader's own last
    round may still be on their way, and missing that round would break the chain of records.
    """
    partition = TopicPartition(history_topic(stream), 0)
    deadline = clock.monotonic() + DEADLINE_S
    failed: dict[TopicPartition, LogError] = {}
    end = log.end_offsets([partition], committed=False, failed=failed).get(partition, 0)
    start = log.start_offsets([partition], failed=failed).get(partition, 0)
    for error in failed.values():
        raise error
    window = _WINDOW
    while True:
        low = max(start, end - window)
        last = _last_record(log, clock, deadline, partition, low, end)
        if last is not None:
            record = _history_record(partition, last)
            epoch = (
                record
                if isinstance(record, EpochRecord)
                else _epoch_of(log, clock, deadline, partition, (start, last.offset), record)
            )
            starts = {s.segment_id: s.start_offset for s in epoch.segments}
            begin = vector_place(last.offset, record)
            since = [record]
            if not has_vector(record):
                found = _records(log, clock, deadline, partition, begin, last.offset + 1)
                since = [_history_record(partition, one) for one in found]
            if begin < start or not has_vector(since[0]):
                raise MalformedRecord(
                    f"{partition.topic} was cut behind offset {begin}, where the last vector stood: records were "
                    "deleted by hand. Replace the stream by a new one"
                )
            whole = completed(record, since)
            vector = {p.partition: p.offset for p in whole.vector}
            return Tail(vector, starts, last.offset, begin, len(since) - 1, read_to=end)
        if low == start:
            return Tail(read_to=end)
        window *= 8  # markers and aborted rounds fill the window


def _history_record(partition: TopicPartition, found: Record) -> HistoryRecord:
    return decode_history(
        partition.topic,
        found.offset,
        found.value,
        "Let only controllers write to that topic, and replace the stream by a new one",
    )


def _epoch_of(
    log: Log,
    clock: Clock,
    deadline: float,
    partition: TopicPartition,
    span: tuple[int, int],
    commit: CommitRecord,
) -> EpochRecord:
    """The EPOCH record of a commit's stream epoch: the first record with that epoch, found by halving."""
    low, high = span
    while low < high:
        middle = (low + high) // 2
        found = _first_record(log, clock, deadline, partition, middle, high + 1)
        if (
            found is not None
            and _history_record(partition, found).stream_epoch < commit.stream_epoch
        ):
            low = found.offset + 1
        else:
            high = middle
    first = _first_record(log, clock, deadline, partition, low, span[1] + 1)
    record = _history_record(partition, first) if first is not None else None
    if not isinstance(record, EpochRecord):
        raise InvariantViolation(f"{partition.topic} has no EPOCH record {commit.stream_epoch}")
    return record


def _first_record(
    log: Log, clock: Clock, deadline: float, partition: TopicPartition, low: int, end: int
) -> Record | None:
    return next(_records(log, clock, deadline, partition, low, end, _LITTLE), None)


def _last_record(
    log: Log, clock: Clock, deadline: float, partition: TopicPartition, low: int, end: int
) -> Record | None:
    last = deque(_records(log, clock, deadline, partition, low, end), maxlen=1)
    return last[0] if last else None


def _records(
    log: Log,
    clock: Clock,
    deadline: float,
    partition: TopicPartition,
    low: int,
    end: int,
    max_bytes: int = 1 << 20,
) -> Iterator[Record]:
    position = low
    while position < end:
        fetched = _fetch(log, clock, deadline, partition, position, max_bytes)
        if fetched is None:
            continue
        for batch in fetched.batches:
            yield from (r for r in decode_records(batch.data) if low <= r.offset < end)
        position = fetched.next_offset


def _fetch(
    log: Log, clock: Clock, deadline: float, partition: TopicPartition, position: int, size: int
) -> Fetched | None:
    if clock.monotonic() > deadline:
        raise LogUnavailable(
            f"{partition.topic} could not be read from {position} on in {DEADLINE_S:.0f} s: a native "
            "transaction may be open on it",
            (partition.topic,),
        )
    failed: dict[TopicPartition, LogError] = {}
    fetched = log.fetch(
        {partition: position}, max_wait=1.0, max_bytes=size, committed=True, failed=failed
    )
    for error in failed.values():
        raise error
    return fetched.get(partition)


def check_unread(log: Log, clock: Clock, partition: TopicPartition, low: int, end: int) -> None:
    """`LogUnavailable` if a record stands in [low, end) of a history: a broker that is behind told its end."""
    if _last_record(log, clock, clock.monotonic() + DEADLINE_S, partition, low, end) is not None:
        why = f"{partition.topic} was read from a broker that is behind"
        raise LogUnavailable(why, (partition.topic,))
