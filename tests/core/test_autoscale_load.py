"""Automatic scaling of a stream under load: it follows the load, and comes to rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import segments as seg
from anabranch.core.decisions.scale import Autoscaler, Proposal
from anabranch.core.stream_settings import Policy
from anabranch.protocol.ids import segment_number
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import KeyRange, SegmentRange
from tests.conftest import some

# Events a second by cells of the key space: (low, high, rate), each spread evenly.
Density = Sequence[tuple[int, int, float]]


@dataclass
class Stream:
    """A stream that follows every proposal, and judges each."""

    auto: Autoscaler
    segments: tuple[SegmentRange, ...]
    sampled: random.Random | None = None
    now_ms: int = 12_345
    epoch: int = 0
    next_number: int = 0
    opened: dict[int, int] = field(default_factory=dict)
    scalings: list[tuple[int, Proposal]] = field(default_factory=list)
    numbers: dict[KeyRange, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_number = len(self.segments)
        self.opened = dict.fromkeys(range(self.next_number), self.now_ms)
        self.auto.track(self.segments, self.now_ms)

    def rate(self, low: int, high: int, density: Density) -> float:
        return sum(rate * max(0, min(high, b) - max(low, a)) / (b - a) for a, b, rate in density)

    def run(self, seconds: int, density: Callable[[float], Density]) -> None:
        """By steps of a bucket; ``density`` of the seconds from now on."""
        step_s = self.auto.policy.bucket_ms // 1000
        for second in range(0, seconds, step_s):
            now = density(second)
            self.now_ms += step_s * 1000
            for s in self.segments:
                events = round(self.rate(s.low, s.high, now) * step_s)
                number = segment_number(s.segment_id)
                self.auto.add(number, events, events * 10, self.now_ms)
                if self.sampled is not None and events:
                    self.auto.sample(number, self._positions(s, now))
            proposal = self.auto.propose(self.segments, self.now_ms)
            if proposal is not None:
                self._follow(proposal)

    def _positions(self, s: SegmentRange, density: Density) -> list[int]:
        assert self.sampled is not None
        inside = [(max(a, s.low), min(b, s.high)) for a, b, _ in density]
        weights = [
            self.rate(a, b, [cell]) if a < b else 0
            for (a, b), cell in zip(inside, density, strict=True)
        ]
        return [self.sampled.randrange(a, b) for a, b in self.sampled.choices(inside, weights, k=8)]

    def _follow(self, proposal: Proposal) -> None:
        policy = self.auto.policy
        numbers = {segment_number(s.segment_id) for s in self.segments}
        assert set(proposal.seal) <= numbers
        assert proposal.ranges
        before = len(self.segments)
        self.epoch += 1
        # Checks that the ranges tile exactly what is sealed.
        made = seg.scale(
            self.segments,
            proposal.seal,
            proposal.ranges,
            epoch=self.epoch,
            next_number=self.next_number,
            idle=sorted(set(range(200)) - {s.partition for s in self.segments}),
        )
        assert made is not None
        self.segments = made
        self.numbers |= {r: self.next_number + i for i, r in enumerate(proposal.ranges)}
        self.next_number += len(proposal.ranges)
        assert policy.min_segments <= len(made) <= max(policy.max_segments, before)
        for number in proposal.seal:
            age_ms = self.now_ms - self.opened[number]
            assert age_ms >= policy.cooldown_ms or before < policy.min_segments
        for s in made:
            self.opened.setdefault(segment_number(s.segment_id), self.now_ms)
        self.scalings.append((self.now_ms, proposal))

    def hottest(self, density: Density) -> float:
        return max(self.rate(s.low, s.high, density) for s in self.segments)


QUICK = Policy(events_per_s=1000, cooldown_ms=8000)
cells = st.lists(st.tuples(st.integers(0, 63), st.integers(1, 6), st.floats(0, 6000)), max_size=6)


def density_of(found: list[tuple[int, int, float]]) -> Density:
    cell = SPACE // 64
    return [
        (at * cell, min(SPACE, (at + width) * cell), float(round(rate)))
        for at, width, rate in found
    ]


@settings(max_examples=some(25), deadline=None)
@given(cells, st.integers(1, 9), st.booleans(), st.integers(1, 4), st.sampled_from([None, 10**6]))
def test_a_constant_load_comes_to_rest(
    found: list[tuple[int, int, float]], count: int, sampled: bool, least: int, full: int | None
) -> None:
    density = density_of(found)
    policy = QUICK._replace(max_segments=16, min_segments=least, segment_bytes=full)
    stream = Stream(Autoscaler(policy), seg.create(count), random.Random(1) if sampled else None)
    stream.run(400, lambda _: density)
    if full is None:
        made = len(stream.scalings)
        stream.run(200, lambda _: density)
        assert len(stream.scalings) == made
        if len(stream.segments) < 9:
            assert stream.hottest(density) <= 1510
    # What a merge made is never split again.
    merged: set[int] = set()
    for _, proposal in stream.scalings:
        assert not merged & set(proposal.seal) or len(proposal.ranges) == 1
        if len(proposal.ranges) == 1:
            merged.add(stream.numbers[proposal.ranges[0]])


def test_a_hot_key_does_not_split_for_ever() -> None:
    density: Density = [(1000, 1001, 50_000.0), (0, SPACE, 300.0)]
    blind = Stream(Autoscaler(QUICK), seg.create(1))
    blind.run(3000, lambda _: density)
    told = Stream(Autoscaler(QUICK), seg.create(1), random.Random(1))
    told.run(3000, lambda _: density)
    for stream in (blind, told):
        assert stream.now_ms - max([at for at, _ in stream.scalings], default=0) > 1_000_000
    assert len(blind.segments) < 40
    assert told.scalings == []


def test_a_moving_hot_spot_is_followed() -> None:
    """It rests on each eighth of the keys in turn: split there, merged behind."""

    def density(second: float) -> Density:
        eighth = SPACE // 8
        at = int(second // 300) % 8
        return [(at * eighth, (at + 1) * eighth, 6000.0), (0, SPACE, 400.0)]

    for sampled in (None, random.Random(3)):
        stream = Stream(Autoscaler(QUICK._replace(max_segments=16)), seg.create(2), sampled)
        for at in range(8):
            start = at * 300
            stream.run(300, lambda second, start=start: density(start + second))  # type: ignore[misc]
            now = density(start)
            low, high, _ = now[0]
            assert stream.hottest(now) <= 1510
            # Many segments where it is hot, few elsewhere.
            hot = [s for s in stream.segments if s.low < high and s.high > low]
            assert 4 <= len(hot) <= 9
            assert len(stream.segments) - len(hot) <= 4
        assert len(stream.scalings) < 8 * 10


def test_bursts_don_t_make_it_swing() -> None:
    """Short peaks come again and again, sooner than what is idle is forgotten."""
    stream = Stream(Autoscaler(QUICK), seg.create(1))
    stream.run(2000, lambda second: [(0, SPACE, 9000.0 if second % 25 < 3 else 10.0)])
    assert 1 <= len(stream.scalings) <= 4
    assert all(len(p.seal) == 1 for _, p in stream.scalings)


def test_noise_makes_no_scaling() -> None:
    noise = random.Random(5)

    def density(_: float) -> Density:
        return [(0, SPACE, noise.uniform(0.7, 1.3) * 4000)]

    stream = Stream(Autoscaler(QUICK), seg.create(4))
    stream.run(4000, density)
    assert stream.scalings == []
