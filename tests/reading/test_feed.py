"""A feed over the in-memory log: what it fetches, what it leaves, and what it does when offsets are gone."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.clock import SystemClock
from anabranch.errors import NotAuthorized, SnapshotExpired, UnknownStream
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicPartition,
    TopicSpec,
)
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.feed import FETCH_BYTES, Feed, Gone
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog
from tests.reading.test_decoded import offsets

TOPIC = "s.t"
SOON_S = 60.0


@pytest.fixture
def log() -> MemoryLog:
    made = MemoryBrokers(SystemClock()).log("p")
    made.create_topics([TopicSpec(TOPIC, 3)])
    return made


def commit(log: MemoryLog, *partitions: int, count: int = 2, abort: bool = False) -> None:
    """One native transaction with so many events on each."""
    producer = log.producer("c", timeout=60)
    batch = encode_batch([Record(i, 0, None, b"v") for i in range(count)])
    producer.append([(TopicPartition(TOPIC, p), batch) for p in partitions])
    if abort:
        producer.abort()
    else:
        producer.commit()


def feed_of(log: Any, gone: Gone | None = None) -> Feed:
    return Feed(CommittedLog(log, SystemClock()), gone=gone)


def places(*partitions: int) -> set[TopicPartition]:
    return {TopicPartition(TOPIC, partition) for partition in partitions}


def fetch(
    feed: Feed, waiting: Container[TopicPartition] = (), at: float | None = None
) -> dict[int, list[int]]:
    """Partition -> offsets, of what one call brings. ``at``: the deadline."""
    portions = feed.next(time.monotonic() + 0.05 if at is None else at, waiting)
    return {portion.place.partition: offsets(portion) for portion in portions}


def test_each_record_comes_once_without_what_aborted(log: MemoryLog) -> None:
    commit(log, 0, 1)
    commit(log, 0, abort=True)
    commit(log, 0)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 1, TopicPartition(TOPIC, 1): 0})
    found: dict[int, list[int]] = {}
    while some := fetch(feed):
        for partition, new in some.items():
            found.setdefault(partition, []).extend(new)
    assert found == {0: [1, 6, 7], 1: [0, 1]}
    assert feed.positions(TOPIC, [0, 1, 2]) == {0: 9, 1: 3}
    feed.add(TOPIC, {2: 0})
    commit(log, 2, 0)
    assert fetch(feed) == {0: [9, 10], 2: [0, 1]}
    feed.assign({})
    commit(log, 0)
    assert fetch(feed) == {}


@pytest.mark.parametrize("anew", [False, True])
def test_a_deleted_topic_ends_reading_and_a_new_one_of_its_name_is_not_read(
    log: MemoryLog, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.reading.committed_log._MISSING_S", 2.0)
    commit(log, 0)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 0})
    assert fetch(feed) == {0: [0, 1]}
    log.cluster.delete_topic(TOPIC)
    assert fetch(feed) == {}
    if anew:
        log.create_topics([TopicSpec(TOPIC, 3)])
        commit(log, 0, count=9)
    deadline = time.monotonic() + SOON_S
    with pytest.raises(UnknownStream, match="another one" if anew else "not there any more"):
        any(fetch(feed) for _ in iter(lambda: time.monotonic() > deadline, True))
    assert feed.positions(TOPIC, [0]) == {0: 3}


def test_a_topic_that_some_broker_knows_is_waited_for(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.reading.committed_log._MISSING_S", 60.0)
    monkeypatch.setattr("anabranch.reading.committed_log._LOOK_S", 0.05)
    monkeypatch.setattr("anabranch.reading.feed._RETRY_S", 0.05)
    answers: Iterator[Any] = iter([False, LogUnavailable("away"), False, True, False, False])
    asked = []

    class Behind:
        def __getattr__(self, name: str) -> Any:
            return getattr(log, name)

        def fetch(self, positions: Any, *, failed: Any, **_: Any) -> Any:
            failed |= dict.fromkeys(positions, LogRefused("?", UNKNOWN_TOPIC_OR_PARTITION))
            return {}

        def is_known(self, topic: str) -> bool:
            asked.append(time.monotonic())
            if (answer := next(answers, None)) is None:
                monkeypatch.setattr("anabranch.reading.committed_log._MISSING_S", 0.1)
            if isinstance(answer, LogError):
                raise answer
            return bool(answer)

    feed = feed_of(Behind())
    feed.assign(dict.fromkeys(places(0, 1, 2), 0))
    with pytest.raises(UnknownStream, match="not there any more"):
        any(fetch(feed) for _ in iter(int, 1))
    assert len(asked) >= 6, "it was known once: from then on a while counts"
    least = min(after - before for before, after in pairwise(asked))
    assert least > 0.04, "once for all partitions"


def test_nothing_more_is_fetched_of_what_waits(log: MemoryLog) -> None:
    commit(log, 0, 1)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 0, TopicPartition(TOPIC, 1): 0})
    assert fetch(feed, places(0)) == {1: [0, 1]}
    assert feed.positions(TOPIC, [0]) == {0: 0}
    assert fetch(feed, places(0, 1)) == {}
    assert fetch(feed) == {0: [0, 1]}


def test_reading_continues_where_the_log_begins(log: MemoryLog) -> None:
    for _ in range(3):
        commit(log, 0)
    log.delete_records({TopicPartition(TOPIC, 0): 6})
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 0})
    assert fetch(feed) == {}
    assert fetch(feed) == {0: [6, 7]}

    def expired(place: TopicPartition, offset: int) -> None:
        raise SnapshotExpired(f"{place} {offset}")

    strict = feed_of(log, gone=expired)
    strict.assign({TopicPartition(TOPIC, 0): 0})
    with pytest.raises(SnapshotExpired, match=r"0\D* 0"):
        fetch(strict)


def test_a_lagging_broker_is_asked_again(log: MemoryLog) -> None:
    """What it has not (yet, or any more) is waited for: there is no way back, nor over what may still come."""

    def expired(place: TopicPartition, offset: int) -> None:
        raise SnapshotExpired(f"{place} {offset}")

    commit(log, 0, 1)
    found: dict[int, list[int]] = {}
    for gone in (None, expired):
        feed = feed_of(log, gone=gone)
        feed.assign({TopicPartition(TOPIC, 0): 6, TopicPartition(TOPIC, 1): 0})
        found = {}
        while 1 not in found:  # the other partition is read on
            found |= fetch(feed)
        assert (found, feed.positions(TOPIC, [0])) == ({1: [0, 1]}, {0: 6})
        feed.assign({TopicPartition(TOPIC, 0): 6})
        if gone is not None:
            for _ in range(3):
                commit(log, 0)
        deadline = time.monotonic() + SOON_S
        while gone is not None and 0 not in found and time.monotonic() < deadline:
            found |= fetch(feed)
    assert found[0] == [6, 7, 9, 10]


class Failing:
    """A log that answers with errors: of each partition, or of all at once."""

    def __init__(self, error: LogError, whole: bool) -> None:
        self.error = error
        self.whole = whole
        self.asked: list[int] = []

    def fetch(
        self,
        positions: Iterable[TopicPartition],
        *,
        max_bytes: int,
        failed: dict[Any, Any],
        **_: Any,
    ) -> dict[Any, Any]:
        self.asked.append(max_bytes)
        if self.whole:
            raise self.error
        failed |= dict.fromkeys(positions, self.error)
        return {}

    def is_known(self, topic: str) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "whole"),
    [
        (LogUnavailable("no broker"), True),
        (LogUnavailable("no leader"), False),
        (LogRefused("not there", UNKNOWN_TOPIC_OR_PARTITION), False),
    ],
)
def test_transient_errors_are_waited_out(error: LogError, whole: bool) -> None:
    log: Any = Failing(error, whole)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 0})
    assert fetch(feed) == {}
    assert log.asked == [FETCH_BYTES]
    assert feed.positions(TOPIC, [0]) == {0: 0}


def test_a_partition_without_a_leader_holds_up_no_other(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(SystemClock, "monotonic", lambda _: now)
    whole, bad = log.fetch, {TopicPartition(TOPIC, 1)}
    asked: list[list[int]] = []

    def failing(positions: Mapping[TopicPartition, int], **how: Any) -> Any:
        asked.append([place.partition for place in positions])
        how["failed"] |= {place: LogUnavailable("no leader") for place in bad & positions.keys()}
        good = {place: at for place, at in positions.items() if place not in bad}
        return whole(good, **how | {"max_wait": 0.0})

    monkeypatch.setattr(log, "fetch", failing)
    commit(log, 0, 1, 2)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, p): 0 for p in range(3)})
    assert fetch(feed, at=now) == {0: [0, 1], 2: [0, 1]}
    commit(log, 0)
    assert fetch(feed, at=now).keys() == {0}
    now = 1.0  # it is asked for again
    commit(log, 2)
    assert fetch(feed, at=now).keys() == {2}
    bad.clear()
    now = 2.0
    commit(log, 0)
    assert fetch(feed, at=now).keys() == {0, 1}
    assert asked == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("whole", [True, False])
def test_a_missing_right_is_named(whole: bool) -> None:
    log: Any = Failing(LogRefused("not allowed", 29, (TOPIC,)), whole)
    feed = feed_of(log)
    feed.assign({TopicPartition(TOPIC, 0): 0})
    with pytest.raises(NotAuthorized, match=r"Read on the topic s\.t is missing"):
        fetch(feed)
