"""The feed of commits: records stay first until they are passed; retention deletes events while they are read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.clock import SystemClock
from anabranch.errors import DeadlineExceeded, MalformedRecord, SnapshotExpired
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import CommitRecord, Position, SegmentCommit
from anabranch.reading import commit_feed, feed
from anabranch.reading.commit_feed import CommitFeed, StreamParts
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import Found
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from anabranch.topics.names import history_topic, stream_topic

STREAM = "nyc/a"
TXN, OTHER = bytes(range(16)), bytes(16)
PLACE = TopicPartition(stream_topic(STREAM), 0)
RECORD = CommitRecord(TXN, 0, 10, (SegmentCommit(0, 0, 4, 7, 3),), (Position(0, 7),), -1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    """A partition; each fetch brings one batch of it."""
    monkeypatch.setattr(feed, "FETCH_BYTES", 1)
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(PLACE.topic, 1)])
    return made


def write(log: MemoryLog, *txns: bytes) -> None:
    """A batch for each event, of these transactions."""
    for txn in txns:
        header = (TXN_HEADER, pack_txn_header(txn, 1, 0))
        log.produce_batch(PLACE, encode_batch([Record(0, 0, b"k", b"v", (header,))]))


def parts(log: MemoryLog, timeout: float = 30.0) -> StreamParts:
    return StreamParts(CommittedLog(log, SystemClock()), STREAM, timeout)


def deletes_at(log: MemoryLog, fetches: int, before: int) -> Callable[..., Any]:
    """The log's fetch; with the fetch of this number retention comes so far."""
    whole, count = log.fetch, 0

    def fetch(*given: Any, **how: Any) -> Any:
        nonlocal count
        count += 1
        if count == fetches:
            log.delete_records({PLACE: before})
        return whole(*given, **how)

    return fetch


def test_a_commit_whose_events_are_deleted_is_skipped(log: MemoryLog) -> None:
    write(log, *[TXN] * 10)
    log.delete_records({PLACE: 5})
    assert parts(log).events(RECORD) is None


@pytest.mark.parametrize(
    ("fetches", "before"),
    [
        (1, 10),  # nothing is left, and nothing new comes
        (1, 9),  # what comes first is behind it
        (1, 6),  # half of it is left
        (2, 6),  # some of it went while it was read
        (3, 7),  # the rest did
    ],
)
def test_a_commit_that_retention_deletes_in_part_is_skipped(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, fetches: int, before: int
) -> None:
    """At once or later: it neither waits for what never comes, nor takes it for tampering."""
    write(log, *[TXN] * 10)
    monkeypatch.setattr(log, "fetch", deletes_at(log, fetches, before))
    assert parts(log).events(RECORD) is None


def test_a_big_commit_that_is_deleted_while_it_is_read_raises(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_feed, "IN_HAND", 2)
    write(log, *[TXN] * 10)
    events = parts(log).events(RECORD)
    assert events is not None
    assert [event.offset for event in events] == [4, 5, 6]
    some = iter(events)
    assert next(some).offset == 4
    assert [event.offset for event in events] == [4, 5, 6]  # as often as one likes
    log.delete_records({PLACE: 6})
    with pytest.raises(SnapshotExpired, match=TXN.hex()):
        list(events)


def test_without_retention_it_is_waited_for(log: MemoryLog) -> None:
    write(log, *[TXN] * 5)
    with pytest.raises(DeadlineExceeded, match="did not show offset 5"):
        parts(log, 0.2).events(RECORD)


def test_events_of_others_in_its_range_are_wrong(log: MemoryLog) -> None:
    write(log, *[TXN] * 5, OTHER, *[TXN] * 4)
    with pytest.raises(MalformedRecord, match="shows 2 events of 3"):
        parts(log).events(RECORD)


def test_a_whole_commit_is_given(log: MemoryLog) -> None:
    write(log, *[TXN] * 10)
    reading = parts(log)
    assert [event.offset for event in reading.events(RECORD) or ()] == [4, 5, 6]
    behind = RECORD.__class__(TXN, 0, 11, (SegmentCommit(0, 0, 8, 10, 2),), (Position(0, 10),), -1)
    assert [event.offset for event in reading.events(behind) or ()] == [8, 9]


# -- the feed ------------------------------------------------------------------------------------------------


HISTORY = TopicPartition(history_topic(STREAM), 0)


def commit(first: int, end: int, timestamp: int) -> CommitRecord:
    part = SegmentCommit(0, 0, first, end, end - first)
    return CommitRecord(TXN, 0, timestamp, (part,), (Position(0, end),), -1)


@pytest.fixture
def filled(log: MemoryLog) -> CommitFeed:
    """The feed of a stream of two commits, of three events and of two; their records are read."""
    log.create_topics([TopicSpec(HISTORY.topic, 1)])
    write(log, *[TXN] * 5)
    for record in (commit(0, 3, 10), commit(3, 5, 11)):
        log.produce_batch(HISTORY, encode_batch([Record(0, 0, b"", encode(record))]))
    made = CommitFeed(CommittedLog(log, SystemClock()), STREAM, 5.0)
    while len(made.records) < 2:
        made.read_on(0.0)
    return made


def offsets(feed: CommitFeed, most: int | None = None) -> list[int]:
    """Of the rest of the first commit's events, from at most this many runs."""
    runs = feed.runs()
    assert runs is not None
    return [offset for run in islice(runs, most) for offset in run.offsets]


def test_the_events_of_the_first_record_come_once(filled: CommitFeed) -> None:
    taken = offsets(filled, 1)
    assert [*taken, *offsets(filled)] == [0, 1, 2]
    assert offsets(filled) == []
    assert filled.advance().record.timestamp == 10
    assert offsets(filled) == [3, 4]
    assert filled.first.record.timestamp == 11


def test_it_reads_again_from_where_it_is_set(filled: CommitFeed) -> None:
    offsets(filled, 1)
    filled.seek(1)
    assert not filled.records
    assert filled.positions()[HISTORY] == 1
    while not filled.records:
        filled.read_on(0.0)
    assert offsets(filled) == [3, 4]


def test_records_that_fail_the_check_are_not_kept(filled: CommitFeed) -> None:
    filled.seek(0)

    def refuse(found: Found) -> None:
        raise SnapshotExpired(f"record {found.offset}")

    with pytest.raises(SnapshotExpired, match="record 0"):
        filled.read_on(SystemClock().monotonic() + 5.0, check=refuse)
    assert not filled.records
