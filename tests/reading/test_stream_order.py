"""Stream order over the in-memory log: one reader, or members that share the partitions, in random steps.

The same code as on a broker, from the feed to the events. What is random is drawn from the seed in the test's name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from anabranch.clock import SystemClock
from anabranch.errors import NotReady
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, EpochSegment, SegmentEnd
from anabranch.reading import commit_index as history
from anabranch.reading import decoded as portions
from anabranch.reading import ordered_reader as ordered
from anabranch.reading.commit_index import StreamOrder
from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.feed import Feed
from anabranch.reading.history import Found, HistoryCursor
from anabranch.reading.ordered_reader import OrderedStream, Step
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.topics.names import history_topic
from anabranch.types import Event
from tests.client.members import by_key
from tests.client.written import ONE, Keys, WrittenStream, scaled

SOON_S = 20.0


class History(HistoryCursor):
    """A history that may be held back, or fail."""

    made: list[History] = []  # noqa: RUF012

    def __init__(self, source: CommittedLog, stream: str) -> None:
        super().__init__(source, stream)
        self.late: random.Random | None = None
        self.fails = False
        self.made.append(self)

    def next(self, deadline: float, limit: int = 2000) -> list[Found]:
        if self.fails and deadline <= time.monotonic():
            raise NotReady("not now")
        if self.late is not None and deadline <= time.monotonic() and self.late.random() < 0.5:
            return []
        return super().next(deadline, limit if self.late is None else 1)


class Group:
    """The committed offsets of a group."""

    def __init__(self) -> None:
        self.offsets: dict[TopicPartition, int] = {}

    def committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.offsets[place] for place in places if place in self.offsets}

    def look(self) -> None:
        pass


class Member:
    """An `OrderedStream` with a feed, read by hand. Alone, or with its own partitions in a group."""

    def __init__(self, written: WrittenStream, group: Group | None, own: Collection[int]) -> None:
        log = written.log
        source = CommittedLog(log, SystemClock())
        self.feed = Feed(source)
        member: Any = group
        self.stream = OrderedStream(source, self.feed, member, written.stream, SOON_S)
        self.group = group
        count = log.describe_topics([written.topic])[written.topic].partitions
        at = dict.fromkeys(range(count), 0)
        if group is not None:
            at |= {p: o for (_, p), o in group.offsets.items()}
        self.stream.begin(at, None if group is None else own)
        wanted = at if group is None else own
        self.feed.assign({TopicPartition(written.topic, p): at[p] for p in wanted})

    def step(self, limit: int) -> Step | None:
        """What may be given out now, if anything."""
        told = self.stream.update_positions(True)
        if self.group is not None:
            for partition, offset in told.items():
                place = TopicPartition(self.stream.topic, partition)
                self.group.offsets[place] = max(offset, self.group.offsets.get(place, 0))
        self.stream.release()
        for portion in self.feed.next(0.0, self.stream.waiting()):
            self.stream.put(portion)
        return self.stream.step(limit)

    def take(self, step: Step) -> list[Event]:
        """All of a step, processed."""
        events = list(step.rest)
        if self.group is not None:
            self.group.offsets[step.place] = step.offsets[-1] + 1
        return events


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> WrittenStream:
    log = MemoryBrokers(SystemClock()).log("p")
    monkeypatch.setattr(History, "made", [])
    monkeypatch.setattr(history, "HistoryCursor", History)
    for name in ("_AT_ONCE_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(ordered, name, 0.0)
    monkeypatch.setattr(portions, "_FEW", 4)
    return WrittenStream(log, "s/t", 3)


def read(members: Sequence[Member], dice: random.Random, count: int) -> list[Event]:
    """So many events, as they are given out, in steps of random sizes by random members."""
    found: list[Event] = []
    deadline = time.monotonic() + SOON_S
    while len(found) < count:
        assert time.monotonic() < deadline, by_key(found)
        member = dice.choice(members)
        step = member.step(dice.choice((1, 3, 1000)))
        if step is not None:
            found += member.take(step)
    return found


def shuffled(written: WrittenStream, keys: Keys, dice: random.Random) -> None:
    """Random commits, scalings and rolling commits, on partitions that are used again and again."""
    references = [written.scale(ONE)]
    for number in range(1, 30):
        match dice.randrange(4):
            case 0:
                written.roll(dice.choice(references), keys.events(), keys.events())
            case 1:
                cuts = sorted({0, 8, *dice.sample(range(1, 8), dice.randrange(3))})
                partitions = dice.sample(range(3), len(cuts) - 1)
                pieces = zip(cuts, cuts[1:], partitions, strict=False)
                layout = [(10 * number + i, *piece) for i, piece in enumerate(pieces)]
                references.append(written.scale(*layout))
            case _:
                written.commit(keys.events(dice.randrange(1, 4)), plain=dice.random() < 0.2)


@pytest.mark.parametrize("seed", range(8))
def test_every_key_comes_in_order(written: WrittenStream, seed: int) -> None:
    dice = random.Random(seed)
    keys = Keys(9)
    shuffled(written, keys, dice)
    alone = Member(written, None, ())
    if seed % 2:
        History.made[-1].late = dice
    events = read([alone], dice, sum(map(len, keys.expected.values())))
    assert by_key(events) == keys.expected
    assert {event.value: event.segment_id for event in events} == written.where
    commits = {r.txn_id: r for _, r in written.records if isinstance(r, CommitRecord)}
    for event in events:
        if event.txn_id is not None:
            assert event.commit_timestamp == commits[event.txn_id].timestamp
    for _ in range(3):
        assert alone.step(1000) is None


@pytest.mark.parametrize("seed", range(8))
def test_members_keep_the_order_too(written: WrittenStream, seed: int) -> None:
    dice = random.Random(seed)
    keys = Keys(9)
    shuffled(written, keys, dice)
    group = Group()
    total = sum(map(len, keys.expected.values()))
    events: list[Event] = []
    while len(events) < total:
        # They come and go: what is fetched and not given out is dropped with them.
        own = {p: dice.randrange(2) for p in range(3)}
        members = [Member(written, group, [p for p in own if own[p] == who]) for who in (0, 1)]
        events += read(members, dice, min(dice.choice((30, 300)), total - len(events)))
    first = {event.value: event for event in reversed(events)}
    assert len(first) == len(events) == total
    assert by_key(events) == keys.expected


def test_new_partitions_and_staged_chunks_keep_the_order(written: WrittenStream) -> None:
    dice = random.Random(1)
    keys = Keys()
    alone = Member(written, None, ())
    scaled(written, keys)
    reference = written.scale((9, 0, 8, 1))
    carried = written.carry(2, [(b"c", b"c:0")], [(b"c", b"c:1")])
    assert by_key(read([alone], dice, sum(map(len, keys.expected.values())))) == keys.expected
    assert alone.step(1000) is None
    assert alone.stream.holds
    written.roll(reference, carried)
    written.commit([(b"c", b"c:2")])
    assert by_key(read([alone], dice, 3)) == {b"c": [0, 1, 2]}


@pytest.mark.parametrize("grouped", [False, True])
def test_stray_chunks_of_a_merge_that_was_forced_are_never_given_out(
    written: WrittenStream, grouped: bool
) -> None:
    """Their partition is retired: no segment, no commit and no vector ever comes to where they stand."""
    dice = random.Random(2)
    keys = Keys()
    written.scale((0, 0, 4, 0), (1, 4, 8, 2))
    written.commit(keys.events(2))
    written.scale((2, 0, 8, 1))
    written.commit(keys.events(2))
    written.carry(2, [(b"c", b"stray")], [(b"c", b"stray too")])
    for layout in ([(3, 0, 4, 0), (4, 4, 8, 1)], [(5, 0, 8, 0)]):
        written.commit(keys.events(2))
        written.scale(*layout)
    written.commit(keys.events(2))
    group = Group() if grouped else None
    members = [Member(written, group, [0, 1]), Member(written, group, [2])][: 1 + grouped]
    found = read(members, dice, sum(map(len, keys.expected.values())))
    assert by_key(found) == keys.expected
    for member in members * 3:
        assert member.step(1000) is None
    assert members[-1].stream.holds


def test_nothing_is_lost_when_the_history_fails_in_the_middle_of_a_step(
    written: WrittenStream,
) -> None:
    written.scale(ONE)
    keys = Keys(2)
    for _ in range(3):
        written.commit(keys.events())
    alone = Member(written, None, ())
    index = History.made[-1]
    step = alone.step(3)
    assert step is not None
    found = alone.take(step)
    index.late = random.Random(0)  # so that it comes record by record
    for _ in range(4):
        written.commit(keys.events())
    raised = 0
    while len(found) < 14:
        index.fails = not index.fails
        try:
            step = alone.stream.step(1000) if index.fails else alone.step(1000)
        except NotReady:
            raised += 1
        else:
            found += alone.take(step) if step is not None else []
    assert by_key(found) == keys.expected
    assert {e.value: e.segment_id for e in found} == written.where


def test_events_of_a_lost_partition_are_dropped(written: WrittenStream) -> None:
    written.scale(ONE)
    written.commit(Keys(2).events(3))
    alone = Member(written, None, ())
    assert alone.step(2) is not None
    assert alone.stream.waiting()
    alone.stream.stop()
    alone.feed.assign({})
    assert alone.stream.waiting() == set()
    assert alone.step(2) is None


def test_what_retention_deletes_while_it_is_held_is_passed_over(
    written: WrittenStream, caplog: pytest.LogCaptureFixture
) -> None:
    """The history is cut up to a later epoch, whose time is not the time of a commit."""
    written.scale(ONE)
    keys = Keys(4)
    for _ in range(2):
        written.commit(keys.events())
    alone = Member(written, None, ())
    for portion in alone.feed.next(0.0, ()):
        alone.stream.put(portion)
    written.scale((1, 0, 4, 0), (2, 4, 8, 1))
    cut = written.records[-1][0]
    history_place = TopicPartition(history_topic(written.stream), 0)
    written.log.delete_records(
        {TopicPartition(written.topic, 0): written.vector[0], history_place: cut}
    )
    left = keys.events()
    commit = written.commit(left)
    found = read([alone], random.Random(3), len(left))
    assert sorted((e.key, e.value) for e in found) == sorted(left)
    assert {e.commit_timestamp for e in found} == {commit.timestamp}
    assert "retention has deleted events of s.t[0]" in caplog.text
    assert "records of others" not in caplog.text


def test_adopted_events_have_the_time_of_the_first_epoch(written: WrittenStream) -> None:
    """A commit is in the same round."""
    adopted = [(b"k0", b"k0:0"), (b"k1", b"k1:0")]
    written.vector[0] = written._append(0, adopted, NO_TXN).stop
    whole = written._segment(0, 0, 0, SPACE, 0)
    first = written._epoch(0, [whole])
    commit = written._commit([(b"k0", b"k0:1")])
    written._write(first, commit)
    found = read([Member(written, None, ())], random.Random(4), 3)
    assert [(e.segment_id, e.commit_timestamp) for e in found] == [
        *[(history.NO_SEGMENT, first.timestamp)] * 2,
        (whole.segment_id, commit.timestamp),
    ]


def test_a_position_is_never_reported_below_where_reading_began(
    written: WrittenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention is asked about for sealed segments that no member reads, and reported for these only."""
    monkeypatch.setattr(ordered, "_STARTS_EVERY_S", 0.0)
    written.scale((0, 0, 4, 0), (1, 4, 8, 1))
    written.commit(Keys(8).events(4))
    written.scale((2, 0, 8, 2))
    group = Group()
    group.offsets = {
        TopicPartition(written.topic, 0): 3,
        TopicPartition(written.topic, 1): 0,
    }
    member = Member(written, group, [0, 1, 2])
    member.stream.index.cover({0: 3, 1: 0, 2: 0}, range(3))
    member.stream._begun = None
    while member.stream.index.read_on():
        pass
    assert member.stream.index.order.watched == {0, 1}
    assert member.stream.update_positions(False) == {}
    written.log.delete_records({TopicPartition(written.topic, 0): 5})
    assert member.stream.update_positions(False) == {0: 5}


def test_a_member_keeps_no_ends_of_what_others_have_read() -> None:
    """Each rolling commit seals all segments. A member asks for others' positions only while it waits for them."""
    order, ends = StreamOrder({0}), [0] * 16

    def segments(epoch: int) -> tuple[EpochSegment, ...]:
        step = SPACE // 16
        return tuple(
            EpochSegment(epoch << 32 | n, n * step, (n + 1) * step, n, ends[n]) for n in range(16)
        )

    order.add(EpochRecord(0, 0, 0, segments(0), (), (), -1))
    for epoch in range(1, 200):
        ends = [end + 10 for end in ends]
        sealed = tuple(SegmentEnd((epoch - 1) << 32 | n, ends[n]) for n in range(16))
        order.add(EpochRecord(epoch, 0, epoch, segments(epoch), sealed, (), 0))
        order.moved({0: ends[0]})
        assert order.readable(epoch << 32)
    left, kept = [one for segment in order._layout for one in segment.awaits], 0
    while left:
        kept += 1
        left += left.pop().before
    assert kept < 32


def test_ends_that_share_what_was_before_them_share_it() -> None:
    """A member stands still on partition 0 while two halves of the keys move, and come together again."""
    order, ends = StreamOrder(range(9)), [0] * 9
    layout: list[EpochSegment] = []

    def scale(gone: list[EpochSegment], *new: tuple[int, int, int]) -> list[EpochSegment]:
        epoch = order.epoch + 1
        sealed = tuple(SegmentEnd(one.segment_id, ends[one.partition]) for one in gone)
        made = [
            EpochSegment(epoch << 32 | n, low, high, p, ends[p])
            for n, (low, high, p) in enumerate(new)
        ]
        layout[:] = [one for one in layout if one not in gone] + made
        segments = tuple(sorted(layout, key=lambda one: one.low))
        order.add(EpochRecord(epoch, 0, epoch, segments, sealed, (), 0))
        return made

    (whole,) = scale([], (0, 8, 0))
    ends[0] += 5
    (whole,) = scale([whole], (0, 8, 1))
    for _ in range(20):
        ends[1] += 1
        low, high = scale([whole], (0, 4, 1), (4, 8, 2))
        ends[1] += 1
        (low,) = scale([low], (0, 4, 3))
        (high,) = scale([high], (4, 8, 1))
        ends[1] += 1
        (whole,) = scale([low, high], (0, 8, 1))
    assert max(len(end.before) for one in order._layout for end in one.awaits) < 10
