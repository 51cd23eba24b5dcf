"""Places in a history: their lag, and where a reader resumes that has the committed offsets of a group."""

from __future__ import annotations

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.clock import SystemClock
from anabranch.errors import SnapshotExpired
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.hybrid_time import from_us, to_ms
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
)
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.group_lag import Lag, lags_behind
from anabranch.reading.history import HistorySearch
from anabranch.reading.positions import passed
from anabranch.reading.snapshot import newest
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from anabranch.topics.names import history_topic, stream_topic

PLACE = TopicPartition(history_topic("s/t"), 0)
SECOND_US = 1_000_000
# Each commit: partition -> (first, end), a marker behind each. They stand at 0 (EPOCH), 2, 4, 6, 8 of the history.
COMMITS: list[dict[int, tuple[int, int]]] = [
    {0: (0, 3)},
    {0: (4, 6), 1: (0, 1)},
    {1: (2, 12)},
    {0: (7, 8)},
]


def second(number: int) -> int:
    return from_us((1_700_000_000 + number) * SECOND_US)


@pytest.fixture(params=["vectors", "wide"])
def log(request: pytest.FixtureRequest) -> MemoryLog:
    """A history; of a wide stream its COMMIT records have no vector, but the EPOCH record at 0."""
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(PLACE.topic, 1)])
    segments = tuple(EpochSegment(p, p << 31, (p + 1) << 31, p, 0) for p in (0, 1))
    vector = {0: 0, 1: 0}
    whole = EpochRecord(0, 0, second(0), segments, (), (Position(0, 0), Position(1, 0)), -1)
    records: list[EpochRecord | CommitRecord] = [whole]
    for number, ranges in enumerate(COMMITS, 1):
        parts = [SegmentCommit(p, p, low, end, end - low) for p, (low, end) in ranges.items()]
        vector |= {part.partition: part.end for part in parts}
        ends = tuple(Position(*at) for at in sorted(vector.items()))
        whole_at, ends = (0, ()) if request.param == "wide" else (-1, ends)
        where = tuple(parts), ends, 2 * number - 2, whole_at
        records.append(CommitRecord(bytes(16), 0, second(number), *where))
    producer = made.producer("c", timeout=60)
    for record in records:
        row = Record(0, to_ms(record.timestamp), b"", encode(record))
        producer.append([(PLACE, encode_batch([row]))])
        producer.commit()
    return made


def search(log: MemoryLog) -> HistorySearch:
    return HistorySearch(CommittedLog(log, SystemClock()), "s/t", 30.0)


# position: events behind, which commit is the oldest of them (0: none), offsets behind
LAGS = {
    0: (17, 1, 20),
    1: (17, 1, 20),
    2: (17, 1, 20),
    3: (14, 2, 17),
    4: (14, 2, 17),
    6: (11, 3, 13),
    8: (1, 4, 2),
    9: (0, 0, 0),
    10: (0, 0, 0),
}


def test_the_lag_of_a_position(log: MemoryLog) -> None:
    exact = lags_behind(search(log), LAGS)
    by_vectors = lags_behind(search(log), LAGS, counted=2)
    for place, (events, oldest, offsets) in LAGS.items():
        at_ms = to_ms(second(oldest)) if oldest else 0
        assert exact[place] == Lag(events, at_ms), place
        assert by_vectors[place] == Lag(offsets, at_ms, exact=not oldest), place


def test_t4_the_newest_record_is_not_safe_while_an_earlier_commit_is_held(log: MemoryLog) -> None:
    """Another stream of its control partition may get a commit before it."""
    log.create_topics([TopicSpec(stream_topic("s/t"), 2)])
    clock = SystemClock()
    source, deadline = CommittedLog(log, clock), clock.monotonic() + 30
    assert newest(source, ["s/t"], deadline) == (second(4), True)
    record = CommitRecord(bytes(16), 0, second(9), (), (), 8, 0, safe=second(8))
    producer = log.producer("c", timeout=60)
    producer.append([(PLACE, encode_batch([Record(0, 0, b"", encode(record))]))])
    producer.commit()
    assert newest(source, ["s/t"], deadline) == (second(9), False)


@pytest.mark.parametrize(
    ("group", "start"),
    [
        ({}, 0),
        ({0: 0, 1: 0}, 0),
        ({0: 2}, 2),  # in the middle of the first commit
        ({0: 3}, 4),
        ({0: 4}, 4),  # behind its marker
        ({1: 13}, 2),  # far ahead on the other partition
        ({0: 6}, 4),  # half of the second
        ({0: 6, 1: 1}, 6),
        ({0: 6, 1: 11}, 6),
        ({0: 7, 1: 12}, 8),
        ({0: 8, 1: 12}, 9),
        ({0: 9, 1: 13}, 9),  # all of it, and the markers
    ],
)
def test_where_a_group_resumes(log: MemoryLog, group: dict[int, int], start: int) -> None:
    found, timestamp, beyond = passed(search(log), group)
    assert (start == 0 and found <= 2) or found == start
    assert timestamp == (second((found - 1) // 2) if found > 1 else 0)
    oldest = LAGS[found][1]
    assert beyond == (second(oldest) if oldest else None)


def test_a_truncated_history_of_a_group_raises(log: MemoryLog) -> None:
    log.delete_records({PLACE: 5})
    with pytest.raises(SnapshotExpired, match="has truncated the history"):
        passed(search(log), {0: 6})


@pytest.mark.parametrize("log", ["vectors"], indirect=True)
def test_a_history_that_is_cut_below_a_group(log: MemoryLog) -> None:
    log.delete_records({PLACE: 5})
    assert passed(search(log), {0: 6, 1: 12})[0] == 8
