"""Automatic scaling: proposals fit the load and the policy, and come to rest under any load."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import segments as seg
from anabranch.core.decisions.scale import Autoscaler, Load, Proposal, cut, propose
from anabranch.core.stream_settings import HISTORY, Policy, parse_policy
from anabranch.protocol.ids import segment_id, segment_number
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import KeyRange, SegmentRange
from tests.conftest import some

EVENTS = Policy(events_per_s=1000)
QUICK = Policy(events_per_s=1000, cooldown_ms=8000)


# -- settings --------------------------------------------------------------------------------------------


def test_without_a_target_there_is_no_policy() -> None:
    assert parse_policy({}) is None
    assert parse_policy({"scale.max.segments": "9", "retention.ms": "soon"}) is None


def test_a_policy_is_read_from_the_settings() -> None:
    assert parse_policy({"scale.events.per.second": "1000", "retention.ms": "-1"}) == EVENTS
    assert parse_policy(
        {
            "scale.bytes.per.second": "2000",
            "scale.segment.bytes": "3000",
            "scale.min.segments": "4",
            "scale.max.segments": "5",
            "scale.cooldown.ms": "6000",
        }
    ) == Policy(None, 2000, 3000, 4, 5, 6000)


# -- single proposals ------------------------------------------------------------------------------------


def load(
    events_per_s: float = 0.0,
    *,
    policy: Policy = EVENTS,
    age_ms: int = 10**9,
    taken: int = 0,
    size: int = 10,
    positions: Sequence[int] = (),
) -> Load:
    """A steady load for as long as is kept."""
    each = round(events_per_s * policy.bucket_ms / 1000)
    return Load(age_ms, taken, [each] * HISTORY, [each * size] * HISTORY, positions)


def even(*loads: Load) -> tuple[tuple[SegmentRange, ...], dict[int, Load]]:
    return seg.create(len(loads)), dict(enumerate(loads))


def half(number: int, of: int) -> KeyRange:
    return KeyRange(SPACE * number // of, SPACE * (number + 1) // of)


def test_nothing_without_a_policy_or_loads() -> None:
    segments, loads = even(load(10**6), load(0), load(0))
    assert propose(None, segments, loads) is None
    assert propose(EVENTS, segments, {}) is None


@pytest.mark.parametrize(
    ("rate", "parts"),
    [(0, 1), (1000, 1), (1500, 1), (1510, 2), (2000, 2), (2100, 3), (7900, 8), (90_000, 8)],
)
def test_a_segment_is_split_by_its_rate(rate: float, parts: int) -> None:
    proposal = propose(EVENTS, *even(load(rate)))
    if parts == 1:
        assert proposal is None
    else:
        assert proposal is not None
        assert proposal.seal == (0,)
        assert proposal.ranges == tuple(half(i, parts) for i in range(parts))
        assert proposal.why.startswith("segment 0 takes ")


def test_bytes_count_as_events_do() -> None:
    policy = Policy(bytes_per_s=10_000)
    assert propose(policy, *even(load(1400))) is None
    proposal = propose(policy, *even(load(1000), load(1600)))
    assert proposal is not None
    assert proposal.seal == (1,)
    both = Policy(events_per_s=10**6, bytes_per_s=10_000)
    assert propose(both, *even(load(1000), load(1600))) == proposal


def test_the_hottest_is_split_first() -> None:
    proposal = propose(EVENTS, *even(load(1600), load(4000), load(3000)))
    assert proposal is not None
    assert proposal.seal == (1,)


def test_a_short_peak_has_to_be_high() -> None:
    def peak(buckets: int, rate: float) -> Load:
        each = round(rate * EVENTS.bucket_ms / 1000)
        return Load(10**9, 0, [0] * (HISTORY - buckets) + [each] * buckets, [0] * HISTORY)

    for buckets, above, below in ((2, 5100, 4900), (4, 2600, 2400), (8, 1600, 1400)):
        assert propose(EVENTS, *even(peak(buckets, above))) is not None
        assert propose(EVENTS, *even(peak(buckets, below))) is None


def test_what_is_young_is_left_alone() -> None:
    assert propose(EVENTS, *even(load(9000, age_ms=EVENTS.cooldown_ms - 1))) is None
    assert propose(EVENTS, *even(load(9000, age_ms=EVENTS.cooldown_ms))) is not None
    quiet = HISTORY * EVENTS.bucket_ms
    assert quiet == 4 * EVENTS.cooldown_ms
    assert propose(EVENTS, *even(load(1), load(1, age_ms=quiet - 1))) is None
    assert propose(EVENTS, *even(load(1), load(1, age_ms=quiet))) is not None


def test_a_full_segment_is_split() -> None:
    policy = Policy(segment_bytes=10**6)
    assert propose(policy, *even(load(taken=10**6))) is None
    proposal = propose(policy, *even(load(taken=10**6), load(taken=10**6 + 1)))
    assert proposal is not None
    assert (proposal.seal, proposal.ranges) == ((1,), (half(2, 4), half(3, 4)))
    assert "1,000,001 bytes" in proposal.why


def test_idle_neighbours_are_merged() -> None:
    proposal = propose(EVENTS, *even(load(600), load(200), load(250), load(600)))
    assert proposal is not None
    assert (proposal.seal, proposal.ranges) == (
        (1, 2),
        (KeyRange(half(1, 4).low, half(2, 4).high),),
    )
    assert propose(EVENTS, *even(load(600), load(250), load(260), load(600))) is None
    # Not neighbours.
    assert propose(EVENTS, *even(load(10), load(600), load(10))) is None


def test_a_whole_run_is_merged_at_once() -> None:
    proposal = propose(EVENTS, *even(load(600), *[load(60)] * 12, load(600)))
    assert proposal is not None
    assert proposal.seal == tuple(range(1, 9))


def test_a_peak_that_is_not_long_past_forbids_a_merge() -> None:
    events = [0] * HISTORY
    # Alone over a quarter of a cool-down it would be 1,700 a second.
    events[3] = 2 * 1700 * EVENTS.bucket_ms // 1000
    assert propose(EVENTS, *even(load(0), Load(10**9, 0, events, [0] * HISTORY))) is None
    events[3] = 2 * 300 * EVENTS.bucket_ms // 1000
    assert propose(EVENTS, *even(load(0), Load(10**9, 0, events, [0] * HISTORY))) is not None


def test_where_size_splits_only_nothing_is_idle() -> None:
    policy = Policy(events_per_s=1000, segment_bytes=10**6)
    assert propose(policy, *even(load(1), load(1))) is None
    assert propose(policy, *even(load(0), load(0))) is not None
    # Without a target of a rate nothing tells what is idle.
    assert propose(Policy(segment_bytes=10**6), *even(load(0), load(0))) is None


def test_the_number_of_segments_stays_within_its_limits() -> None:
    most = EVENTS._replace(max_segments=5)
    assert propose(most, *even(*[load(9000)] * 5)) is None
    proposal = propose(most, *even(*[load(9000)] * 3))
    assert proposal is not None
    assert len(proposal.ranges) == 3
    least = EVENTS._replace(min_segments=5)
    proposal = propose(least, *even(*[load(0)] * 7))
    assert proposal is not None
    assert len(proposal.seal) == 3
    assert propose(least, *even(*[load(0)] * 5)) is None


def test_there_are_as_many_as_the_policy_wants_at_least() -> None:
    proposal = propose(EVENTS._replace(min_segments=4), *even(load(0)))
    assert proposal is not None
    assert proposal.ranges == tuple(half(i, 4) for i in range(4))
    proposal = propose(EVENTS._replace(min_segments=3), *even(load(0), load(0)))
    assert proposal is not None
    assert (proposal.seal, proposal.ranges) == ((0,), (half(0, 4), half(1, 4)))


# -- where to cut ----------------------------------------------------------------------------------------


def test_samples_say_where_to_cut() -> None:
    low_end = list(range(1000, 1100))
    assert cut(0, SPACE, 2, low_end) == (KeyRange(0, 1050), KeyRange(1050, SPACE))
    shares = [sum(r.low <= p < r.high for p in low_end) for r in cut(0, SPACE, 4, low_end)]
    assert shares == [25, 25, 25, 25]
    # Too few to tell, or none in this range.
    assert cut(0, SPACE, 2, low_end[:63]) == (half(0, 2), half(1, 2))
    assert cut(0, SPACE, 2, [SPACE] * 99) == (half(0, 2), half(1, 2))


def test_a_single_key_is_not_split() -> None:
    assert cut(0, SPACE, 4, [77] * 100) == (KeyRange(0, SPACE),)
    assert cut(0, SPACE, 4, [77] * 95 + list(range(200, 205))) == (KeyRange(0, SPACE),)
    assert cut(77, 78, 4, [77] * 100) == (KeyRange(77, 78),)
    assert cut(77, 78, 4, []) == (KeyRange(77, 78),)


def test_a_hot_key_is_set_apart() -> None:
    positions = [10] * 20 + [77] * 60 + [99] * 20
    assert cut(0, SPACE, 3, positions) == (
        KeyRange(0, 77),
        KeyRange(77, 78),
        KeyRange(78, SPACE),
    )


ranges = st.tuples(st.integers(0, SPACE - 1), st.integers(1, SPACE)).filter(lambda r: r[0] < r[1])


@given(
    ranges,
    st.integers(2, 8),
    st.lists(st.integers(0, SPACE - 1) | st.integers(0, 50), max_size=200),
)
def test_cuts_tile_their_range(bounds: tuple[int, int], parts: int, positions: list[int]) -> None:
    found = cut(*bounds, parts, positions)
    assert 1 <= len(found) <= parts
    assert (found[0].low, found[-1].high) == bounds
    assert all(r.low < r.high for r in found)
    assert all(a.high == b.low for a, b in pairwise(found))


# -- counting --------------------------------------------------------------------------------------------


def test_a_load_is_counted_by_buckets() -> None:
    auto = Autoscaler(QUICK)
    (segment,) = seg.create(1)
    assert auto.policy.bucket_ms == 1000
    auto.track([segment], 0)
    for second in range(20):
        auto.add(0, 2000, 1, second * 1000 + 500)
        auto.add(9, 10**9, 1, second * 1000 + 500)  # not a segment
    assert auto.propose([segment], 20_000) == Proposal(
        (0,), (half(0, 2), half(1, 2)), "segment 0 takes 2,000/s, scale.events.per.second=1000"
    )
    # It looks once a bucket.
    assert auto.propose([segment], 20_999) is None
    assert auto.propose([segment], 21_000) is not None
    # Long after, nothing of that is left.
    assert auto.propose([segment], 10**7) is None


def test_a_copied_layout_keeps_the_load_of_its_segments() -> None:
    auto = Autoscaler(QUICK)
    (segment,) = seg.create(1)
    auto.track([segment], 0)
    for second in range(20):
        auto.add(0, 2000, 1, second * 1000)
    (copy,) = seg.duplicate([segment], 5, {0: 3})
    assert copy.segment_id == segment_id(5, 0)
    assert auto.propose([copy], 20_000) is not None
    # A new segment starts to age.
    other = SegmentRange(segment_id(6, 1), 0, SPACE, 0)
    auto.track([other], 21_000)
    for second in range(7):
        auto.add(1, 20_000, 1, 21_000 + second * 1000)
        assert auto.propose([other], 21_000 + second * 1000) is None
    assert auto.propose([other], 29_000) is not None


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
