"""A group's reader over the in-memory log, with a member whose partitions the test gives and takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from anabranch.clock import SystemClock
from anabranch.ports import TopicPartition
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.reading import ordered_reader as reader_module
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.ordered_reader import Reader
from tests.client.written import Keys, WrittenStream
from tests.reading.test_stream_order import written as written

PARTITIONS = 3


class Member:
    """A `GroupMember`."""

    def __init__(self) -> None:
        self.offsets: dict[TopicPartition, int] = {}
        self.news: deque[Callable[[], None]] = deque()
        self.gained: Any = None
        self.lost: Any = None

    def join(self, topics: Sequence[str], gained: object, lost: object) -> None:
        self.gained, self.lost = gained, lost

    def serve(self, wait: float) -> None:
        while self.news:
            self.news.popleft()()

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.offsets[place] for place in places if place in self.offsets}

    def commit(self, offsets: Mapping[TopicPartition, int], *, wait: bool) -> bool:
        self.offsets |= offsets
        return True

    def look(self) -> None:
        pass

    def leak(self) -> None:
        pass

    def close(self) -> None:
        self.lost([], True)


def test_what_is_taken_away_within_a_step_is_given_no_more(
    written: WrittenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member()
    log = written.log
    ports = ReaderPorts(lambda _: log, lambda _: member, SystemClock())
    monkeypatch.setattr(reader_module, "_TICK_S", 0.0)
    keys = Keys(12)
    written.scale((0, 0, 1, 0), (1, 1, 6, 1), (2, 6, 8, 2))
    written.commit(keys.events(5))
    places = [TopicPartition(written.topic, p) for p in range(PARTITIONS)]
    with Reader(ports, [written.stream], "g", 0.2, "begin", 5.0) as reader:
        member.news.append(lambda: member.gained(places))
        given = [next(reader) for _ in range(3)]
        (mine,) = {event.partition for event in given}
        others = [place for place in places if place.partition != mine]
        member.news.append(lambda: member.lost(places, True))
        member.news.append(lambda: member.gained(others))
        rest = list(iter(lambda: next(reader, None), None))
        assert {event.partition for event in rest} == {place.partition for place in others}
        # What was asked beyond is processed, and was committed when the partition went.
        assert member.offsets[TopicPartition(written.topic, mine)] == given[-1].offset + 1
    left = sum(map(len, keys.expected.values())) - len(given) - len(rest)
    assert left > 0
    ends = log.end_offsets(others, committed=True)
    for place, end in ends.items():
        assert member.offsets[place] == end - 1  # but for the marker


def test_commits_that_the_group_has_consumed_are_not_ahead(
    written: WrittenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One partition is consumed to its end; the other one has two events, with many commits between."""
    monkeypatch.setattr("anabranch.reading.commit_index.MOST_SPANS", 4)
    member = Member()
    ports = ReaderPorts(lambda _: written.log, lambda _: member, SystemClock())
    written.scale((0, 0, 4, 1), (1, 4, 8, 2))
    keys = [b"%d" % number for number in range(99)]
    low, high = (
        next(k for k in keys if (position_of(k) < SPACE // 2) == lower) for lower in (True, False)
    )
    for number, key in enumerate([low, *[high] * 10, low]):
        written.commit([(key, b"%d" % number)])
    behind, done = (TopicPartition(written.topic, p) for p in (1, 2))
    member.offsets = {behind: 0, done: written.log.end_offsets([done], committed=True)[done] - 1}
    with Reader(ports, [written.stream], "g", 0.2, "begin", 5.0) as reader:
        member.news.append(lambda: member.gained([behind, done]))
        assert [event.value for event in reader] == [b"0", b"11"]
