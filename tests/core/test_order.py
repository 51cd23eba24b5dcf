"""Stream order against a naive model: readers of random streams that scale, roll, merge and reuse partitions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.protocol.ids import segment_id
from anabranch.protocol.schemas.records import EpochRecord, EpochSegment, SegmentEnd
from anabranch.reading.commit_index import StreamOrder
from tests.conftest import some

KEYS = 8  # the key space of these tests


@dataclass
class Placed:
    """An event on the log of a partition."""

    offset: int
    key: int
    sequence: int  # of its key, over the whole stream
    segment: int
    epoch: int


@dataclass
class Log:
    """What a controller would write: the partitions, and the history as EPOCH records."""

    partitions: list[list[Placed]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # high watermarks: markers take offsets too
    vector: list[int] = field(default_factory=list)
    layout: list[EpochSegment] = field(default_factory=list)
    history: list[EpochRecord] = field(default_factory=list)
    sequences: list[int] = field(default_factory=lambda: [0] * KEYS)
    numbers: int = 0
    references: dict[int, list[EpochSegment]] = field(default_factory=dict)

    def write(self, key: int) -> None:
        (segment,) = [s for s in self.layout if s.low <= key < s.high]
        p = segment.partition
        self.partitions[p].append(
            Placed(
                self.ends[p], key, self.sequences[key], segment.segment_id, len(self.history) - 1
            )
        )
        self.sequences[key] += 1
        self.ends[p] += 1
        self.vector[p] = self.ends[p]

    def mark(self, partition: int) -> None:
        """A marker, or something aborted."""
        if partition < len(self.ends):
            self.ends[partition] += 1

    def scale(self, cuts: set[int], keep: bool) -> None:
        """Other ranges; with ``keep`` segments whose range stays go on under their ids."""
        bounds = [0, *sorted(cuts), KEYS]
        ranges = list(pairwise(bounds))
        kept = [s for s in self.layout if keep and (s.low, s.high) in ranges]
        new = [r for r in ranges if r not in [(s.low, s.high) for s in kept]]
        epoch = len(self.history)
        free = self._free({s.partition for s in kept}, len(new))
        opened = []
        for (low, high), partition in zip(new, free, strict=True):
            opened.append(self._segment(segment_id(epoch, self.numbers), low, high, partition))
            self.numbers += 1
        if new or not self.layout:
            self._append(epoch, kept + opened)
            self.references[epoch] = self.layout

    def duplicate(self, reference: int, shift: int) -> None:
        """A rolling commit's epoch: the segments of another one under new ids, on any partitions."""
        copied = self.references[sorted(self.references)[reference % len(self.references)]]
        epoch = len(self.history)
        free = self._free(set(), len(copied) + shift)[shift:]
        self._append(
            epoch,
            [
                self._segment(
                    segment_id(epoch, s.segment_id & 0xFFFFFFFF), s.low, s.high, partition
                )
                for s, partition in zip(copied, free, strict=True)
            ],
        )

    def _free(self, taken: set[int], count: int) -> list[int]:
        while len(self.partitions) < count + len(taken):
            self.partitions.append([])
            self.ends.append(0)
            self.vector.append(0)
        return [p for p in range(len(self.partitions)) if p not in taken][:count]

    def _segment(self, number: int, low: int, high: int, partition: int) -> EpochSegment:
        return EpochSegment(number, low, high, partition, self.vector[partition])

    def _append(self, epoch: int, layout: list[EpochSegment]) -> None:
        ids = {s.segment_id for s in layout}
        sealed = tuple(
            SegmentEnd(s.segment_id, self.vector[s.partition])
            for s in self.layout
            if s.segment_id not in ids
        )
        self.layout = layout
        self.history.append(EpochRecord(epoch, epoch, epoch, tuple(layout), sealed, (), -1))


cuts = st.sets(st.integers(1, KEYS - 1), max_size=4)
steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, KEYS - 1)),
    st.tuples(st.just("write"), st.integers(0, KEYS - 1)),
    st.tuples(st.just("mark"), st.integers(0, 5)),
    st.tuples(st.just("scale"), cuts, st.booleans()),
    st.tuples(st.just("duplicate"), st.integers(0, 3), st.integers(0, 2)),
)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    log.scale(draw(cuts), False)
    for step in draw(st.lists(steps, max_size=40)):
        getattr(log, step[0])(*step[1:])
    return log


@dataclass
class Member:
    """A reader of some partitions, who sees the history and others' positions late."""

    own: set[int]
    order: StreamOrder
    known: int  # EPOCH records read

    def next_event(self, log: Log, partition: int, positions: list[int]) -> Placed | None:
        """The next event of a partition, once the history shows its epoch."""
        for event in log.partitions[partition]:
            if event.offset >= positions[partition]:
                return event if event.epoch < self.known else None
        return None


def naive_readable(log: Log, event: Placed, positions: list[int]) -> bool:
    """By the events themselves: none of the segment's keys may have an unread event of an earlier segment."""
    (segment,) = {s for e in log.history for s in e.segments if s.segment_id == event.segment}
    opened = event.segment >> 32
    return not any(
        e.segment >> 32 < opened
        and segment.low <= e.key < segment.high
        # An untouched segment's later events do not stand before one that was opened meanwhile.
        and e.segment != event.segment
        and e.offset >= positions[p]
        for p, events in enumerate(log.partitions)
        for e in events
        if e.segment != event.segment
    )


def all_before_is_read(log: Log, event: Placed, positions: list[int]) -> bool:
    """Every earlier segment that overlaps the event's is read to its end, other keys' events too."""
    ranges = {s.segment_id: (s.low, s.high) for e in log.history for s in e.segments}
    low, high = ranges[event.segment]
    return not any(
        e.segment >> 32 < event.segment >> 32
        and ranges[e.segment][0] < high
        and low < ranges[e.segment][1]
        and e.offset >= positions[p]
        for p, events in enumerate(log.partitions)
        for e in events
    )


@settings(max_examples=some(150), deadline=None)
@given(logs(), st.integers(1, 4), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_members_read_every_key_in_order_and_everything(
    log: Log, members: int, chance: random.Random, changes: bool, retention: bool
) -> None:
    n = len(log.partitions)
    positions = [0] * n
    deleted: set[tuple[int, int]] = set()
    start = 0
    seen: list[list[int]] = [[] for _ in range(KEYS)]

    def assigned() -> list[Member]:
        owners = [chance.randrange(members) for _ in range(n)]
        group = []
        for who in range(members):
            own = {p for p in range(n) if owners[p] == who}
            order = StreamOrder(own)
            order.moved(dict(enumerate(positions)))
            order.add(log.history[start])
            group.append(Member(own, order, start + 1))
        return group

    group = assigned()
    idle = 0
    while idle < 3:
        if changes and chance.random() < 0.05:
            # The group's state is nothing but its positions: what is read says which epoch to begin with.
            unread = [
                e.epoch for p in range(n) for e in log.partitions[p] if e.offset >= positions[p]
            ]
            start = min(unread, default=len(log.history) - 1)
            group = assigned()
        if retention and chance.random() < 0.05:
            p = chance.randrange(n)
            first = chance.randint(positions[p], max(positions[p], log.ends[p]))
            deleted |= {
                (e.key, e.sequence) for e in log.partitions[p] if positions[p] <= e.offset < first
            }
            positions[p] = first
            for member in group:
                if p in member.own:
                    member.order.moved({p: first})
        progress = False
        for member in chance.sample(group, len(group)):
            if member.known < len(log.history) and chance.random() < 0.5:
                member.order.add(log.history[member.known])
                member.known += 1
                progress = True
            if chance.random() < 0.5:
                member.order.moved(dict(enumerate(positions)))
            for p in sorted(member.own):
                event = member.next_event(log, p, positions)
                if event is None:
                    continue
                if member.order.readable(event.segment):
                    assert naive_readable(log, event, positions)
                    seen[event.key].append(event.sequence)
                    positions[p] = event.offset + 1
                    member.order.moved({p: positions[p]})
                    progress = True
                elif all_before_is_read(log, event, positions):
                    # It waits only for news of what others have read.
                    assert not member.order.awaited(event.segment) <= member.own
                    member.order.moved(dict(enumerate(positions)))
                    assert member.order.readable(event.segment)
        if not progress:
            for member in group:
                member.order.moved(dict(enumerate(positions)))
                while member.known < len(log.history):
                    member.order.add(log.history[member.known])
                    member.known += 1
            idle += 1
        else:
            idle = 0
    assert seen == [
        [s for s in range(count) if (key, s) not in deleted]
        for key, count in enumerate(log.sequences)
    ]
    for member in group:
        assert member.order.watched == set()


@pytest.mark.parametrize("is_known_before", [True, False])
def test_what_is_older_than_what_retention_deleted_is_waited_for(is_known_before: bool) -> None:
    """A key moved from partition 1 to 0, and to 2: its events on 0 are gone, those on 1 are not."""
    old, between, new = (
        EpochSegment(segment_id(number, number), 0, KEYS, partition, 0)
        for number, partition in ((0, 1), (1, 0), (2, 2))
    )
    order = StreamOrder({0, 1, 2})
    if is_known_before:
        order.moved({0: 3})
    order.add(EpochRecord(0, 0, 10, (old,), (), (), -1))
    order.add(EpochRecord(1, 1, 11, (between,), (SegmentEnd(old.segment_id, 5),), (), -1))
    order.add(EpochRecord(2, 2, 12, (new,), (SegmentEnd(between.segment_id, 3),), (), -1))
    order.moved({0: 3})
    assert not order.readable(new.segment_id)
    assert order.awaited(new.segment_id) == {1}
    order.moved({1: 5})
    assert order.readable(new.segment_id)
