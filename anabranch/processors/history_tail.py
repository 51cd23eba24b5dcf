"""The end of a stream's history: found once when leading begins, then kept by who writes it."""

from __future__ import annotations

from anabranch.core.plan import NO_PREVIOUS, Round, Tail
from anabranch.errors import InvariantViolation
from anabranch.ports import Clock, Log, LogUnavailable, TopicGone, TopicPartition
from anabranch.schemas.records import CommitRecord, EpochRecord
from anabranch.topics.history_record import HistoryRecord, decode_history
from anabranch.topics.names import history_topic
from anabranch.topics.records import Record, decode_records

DEADLINE_S = 30.0
_WINDOW = 64


def tail_for(log: Log, clock: Clock, stream: str, round_: Round) -> Tail:
    """The end of a stream's history. `TopicGone` if there is none, and this round does not begin it."""
    tail = load_tail(log, clock, stream)
    begins = any(new.stream == stream and not new.stream_epoch for new in round_.epochs)
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
    end = log.end_offsets([partition], committed=False)[partition]
    start = log.start_offsets([partition])[partition]
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
            return Tail({p.partition: p.offset for p in record.vector}, starts, last.offset)
        if low == start:
            return Tail()
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
    position = low
    while position < end:
        if clock.monotonic() > deadline:
            raise LogUnavailable(f"{partition.topic} could not be read in {DEADLINE_S:.0f} s")
        fetched = log.fetch({partition: position}, max_wait=1.0, max_bytes=1 << 16, committed=True)
        if partition not in fetched:
            continue
        for batch in fetched[partition].batches:
            for record in decode_records(batch.data):
                if low <= record.offset < end:
                    return record
        position = fetched[partition].next_offset
    return None


def _last_record(
    log: Log, clock: Clock, deadline: float, partition: TopicPartition, low: int, end: int
) -> Record | None:
    last: Record | None = None
    position = low
    while position < end:
        if clock.monotonic() > deadline:
            raise LogUnavailable(
                f"{partition.topic} could not be read from {position} to {end} in {DEADLINE_S:.0f} s: "
                "a native transaction may be open on it"
            )
        fetched = log.fetch({partition: position}, max_wait=1.0, max_bytes=1 << 20, committed=True)
        if partition not in fetched:
            continue
        for batch in fetched[partition].batches:
            records = [r for r in decode_records(batch.data) if low <= r.offset < end]
            last = records[-1] if records else last
        position = fetched[partition].next_offset
    return last
