"""A long history over the raw log: searched, and read for one partition, with native transactions that aborted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.clock import SystemClock
from anabranch.errors import InvalidArgument, MalformedRecord, NotReady, SnapshotExpired
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.hybrid_time import from_us, to_ms
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, Position, SegmentCommit
from anabranch.reading.commit_columns import CommitColumns
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import HistoryCursor, HistorySearch
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from anabranch.topics.names import history_topic

STREAM = "s/t"
PLACE = TopicPartition(history_topic(STREAM), 0)
COMMITS = 3000
STEP_US = 700  # of the commit timestamps: two or so in a millisecond


def record(number: int, previous: int = -2) -> CommitRecord:
    """Commit ``number``: an event or two on partition 0, every third has some on partition 1, too."""
    first = number * 3
    parts = [SegmentCommit(7, 0, first, first + 1 + number % 2, 1 + number % 2)]
    ends = [Position(0, first + 1 + number % 2)]
    if number >= 3:
        other = number - number % 3
        ends.append(Position(1, other + 2))
        if number % 3 == 0:
            parts.append(SegmentCommit(8, 1, other, other + 2, 2))
    return CommitRecord(bytes(16), 0, timestamp(number), tuple(parts), tuple(ends), previous)


def timestamp(number: int) -> int:
    return from_us(1_700_000_000_000_000 + number * STEP_US)


@pytest.fixture(scope="module")
def log() -> MemoryLog:
    """Rounds of one to five commits, every seventh tried in vain before."""
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(PLACE.topic, 1)])
    producer = made.producer("c", timeout=60)
    number, last = 0, -1
    while number < COMMITS:
        size = min(1 + number % 5, COMMITS - number)
        rows = [
            Record(i, to_ms(timestamp(n)), b"", encode(record(n, -2 if i else last)))
            for i, n in enumerate(range(number, number + size))
        ]
        if number % 7 == 0:
            producer.append([(PLACE, encode_batch(rows))])
            producer.abort()
        (base,) = producer.append([(PLACE, encode_batch(rows))])
        producer.commit()
        number, last = number + size, base + size - 1
    return made


def history(log: MemoryLog, partition: int, timeout: float = 30.0) -> CommitColumns:
    return CommitColumns(CommittedLog(log, SystemClock()), STREAM, partition, timeout)


def search(log: MemoryLog) -> HistorySearch:
    return HistorySearch(CommittedLog(log, SystemClock()), STREAM, 30.0)


@pytest.mark.parametrize("number", [0, 1, 2, 17, 1499, 1500, COMMITS - 2, COMMITS - 1])
@pytest.mark.parametrize("partition", [0, 1])
def test_an_offsets_commit_is_found(log: MemoryLog, number: int, partition: int) -> None:
    if partition == 1:
        number = max(3, number - number % 3)
    first = number * 3 if partition == 0 else number
    found = history(log, partition)
    found.begin(first, None)
    found.cover(first + 1)
    joined = found.spans.join(np.array([first], dtype=np.int64))
    assert joined.known is None
    assert joined.timestamps.tolist() == [timestamp(number)]
    assert joined.segments.tolist() == [7 + partition]
    # The search came near: what was read before is little.
    assert found.spans.firsts[0] >= first - 200


def test_all_commits_in_order(log: MemoryLog) -> None:
    found = history(log, 0)
    found.begin(0, None)
    last = record(COMMITS - 1).vector[0].offset
    found.cover(last)
    assert found.spans.firsts.tolist() == [3 * n for n in range(COMMITS)]
    assert found.spans.timestamps.tolist() == [timestamp(n) for n in range(COMMITS)]
    assert found.known_to == last
    assert found.last_timestamp == timestamp(COMMITS - 1)
    found.drop(last - 1)
    assert len(found.spans) == 1


def test_what_the_history_does_not_show(log: MemoryLog) -> None:
    found = history(log, 0, timeout=0.2)
    found.begin(0, None)
    started = time.monotonic()
    with pytest.raises(NotReady, match="does not show the commits"):
        found.cover(COMMITS * 3 + 1)
    assert time.monotonic() - started < 20
    found.begin(0, (0, 10))
    with pytest.raises(InvalidArgument, match="does not reach"):
        found.cover(COMMITS)


@pytest.mark.parametrize("limit", [1, 3, 2000])
def test_records_come_once_and_in_order(log: MemoryLog, limit: int) -> None:
    source = CommittedLog(log, SystemClock())
    cursor = HistoryCursor(source, STREAM)
    found: list[int] = []
    while cursor.ended_at < 0:
        batch = cursor.next(time.monotonic() + 30, limit)
        assert len(batch) <= limit
        found += [at.record.timestamp for at in batch]
    assert found == [timestamp(number) for number in range(COMMITS)]
    assert cursor.ended_at == source.end_offsets([PLACE], 0)[PLACE]


@pytest.mark.parametrize("number", [0, 5, 1000, COMMITS - 1])
def test_a_commit_timestamp_is_found(log: MemoryLog, number: int) -> None:
    """Searched by time: the records of aborted native transactions are no landing places."""
    searching = search(log)
    for at in (timestamp(number), timestamp(number + 1) - 1):
        found = searching.as_of(at)
        assert found is not None
        assert found.record.timestamp == timestamp(number)
    assert searching.as_of(timestamp(0) - 1) is None
    newest = searching.as_of("end")
    assert newest is not None
    assert newest.record.timestamp == timestamp(COMMITS - 1)


def test_a_history_that_is_cut_there_is_a_named_error() -> None:
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(PLACE.topic, 1)])
    made.produce(PLACE, [Record(i, 0, b"", encode(record(i))) for i in range(10)])
    made.delete_records({PLACE: 5})
    found = history(made, 0)
    found.begin(0, (2, None))
    with pytest.raises(SnapshotExpired):
        found.cover(30)
    found.begin(0, None)
    found.cover(28)
    joined = found.spans.join(np.arange(12, 16))
    assert joined.known is not None
    assert joined.known.tolist() == [False, False, False, True]


def test_a_record_that_is_there_twice_is_malformed() -> None:
    log = MemoryBrokers(SystemClock()).log("p")
    log.create_topics([TopicSpec(PLACE.topic, 1)])
    producer = log.producer("c", timeout=60)
    rows = [record(0, -1), record(1), record(0), record(2)]
    producer.append(
        [(PLACE, encode_batch([Record(i, 1, b"", encode(r)) for i, r in enumerate(rows)]))]
    )
    producer.commit()
    found = history(log, 0)
    found.begin(0, None)
    with pytest.raises(MalformedRecord, match=r"names offset 0 of partition 0 twice.* audit"):
        found.cover(7)


@pytest.mark.parametrize("count", [1, 2, 150, 299, 300, 1000])
def test_the_newest_epochs(count: int) -> None:
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(PLACE.topic, 1)])
    producer = made.producer("c", timeout=60)
    records: list[EpochRecord | CommitRecord] = []
    for epoch in range(300):
        records.append(EpochRecord(epoch, epoch, timestamp(len(records)), (), (), (), -1))
        for _ in range(epoch % 4):
            now = timestamp(len(records))
            records.append(CommitRecord(bytes(16), epoch, now, (), (), -1))
    rows = [Record(i, to_ms(r.timestamp), b"", encode(r)) for i, r in enumerate(records)]
    for at in range(0, len(rows), 7):
        some = [row._replace(offset=i) for i, row in enumerate(rows[at : at + 7])]
        producer.append([(PLACE, encode_batch(some))])
        producer.commit()
    found = list(search(made).newest_epochs(count))
    assert found == [r for r in records if r.stream_epoch >= 300 - count]
