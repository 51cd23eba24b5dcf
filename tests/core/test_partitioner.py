"""The key space: every position is in exactly one range, keys spread evenly, a layout finds a key's segment."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InvalidArgument
from anabranch.protocol import partitioner as ks
from anabranch.protocol.ids import segment_id
from anabranch.protocol.partitioner import SPACE, Layout, even_ranges, place_of, position_of
from anabranch.protocol.schemas.records import Event, SegmentRange

u32 = st.integers(0, (1 << 32) - 1)


@given(st.integers(1, 10_000))
def test_even_ranges_tile_and_are_even(count: int) -> None:
    ranges = ks.even_ranges(count)
    assert len(ranges) == count
    assert ks.tiles(ranges)
    sizes = {high - low for low, high in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 64), u32)
def test_a_position_is_in_exactly_one_range(count: int, position: int) -> None:
    assert sum(low <= position < high for low, high in ks.even_ranges(count)) == 1


@pytest.mark.parametrize("count", [0, -1, 10_001])
def test_other_numbers_of_segments_are_refused(count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 to 10,000"):
        ks.even_ranges(count)


@given(st.sets(st.integers(1, (1 << 32) - 1), max_size=20), st.randoms())
def test_any_cuts_tile_in_any_order(cuts: set[int], random: object) -> None:
    bounds = [0, *sorted(cuts), ks.SPACE]
    ranges = list(pairwise(bounds))
    random.shuffle(ranges)  # type: ignore[attr-defined]
    assert ks.tiles(ranges)


@given(
    st.sets(st.integers(1, (1 << 32) - 1), min_size=1, max_size=20),
    st.integers(0, 20),
    st.sampled_from(["drop", "double", "low", "high"]),
    st.sampled_from([-1, 1]),
)
def test_any_gap_or_overlap_is_seen(cuts: set[int], at: int, how: str, step: int) -> None:
    ranges = list(pairwise([0, *sorted(cuts), ks.SPACE]))
    at %= len(ranges)
    low, high = ranges[at]
    if how == "drop":
        del ranges[at]
    elif how == "double":
        ranges.append((low, high))
    elif how == "low":
        ranges[at] = (low + step, high)
    else:
        ranges[at] = (low, high + step)
    assert not ks.tiles(ranges)


def test_nothing_does_not_tile() -> None:
    assert not ks.tiles([])
    assert not ks.tiles([(0, ks.SPACE), (5, 5)])
    assert not ks.tiles([(0, 0), (0, ks.SPACE)])
    assert ks.tiles([(0, ks.SPACE)])


def unmix(h: int) -> int:
    """The inverse of fmix32: there is one, so it is a bijection."""
    h ^= h >> 16
    h = h * pow(0xC2B2AE35, -1, 1 << 32) % (1 << 32)
    h ^= h >> 13 ^ h >> 26
    h = h * pow(0x85EBCA6B, -1, 1 << 32) % (1 << 32)
    return h ^ h >> 16


@given(u32)
def test_mixing_is_a_bijection_of_32_bits(h: int) -> None:
    assert 0 <= ks.mix(h) < 1 << 32
    assert unmix(ks.mix(h)) == h


def test_mixing_is_murmurs_finaliser() -> None:
    # From MurmurHash3_x86_32 of the empty string under seeds 1 and 2^32-1: only the finaliser runs.
    assert ks.mix(1) == 0x514E28B7
    assert ks.mix(0xFFFFFFFF) == 0x81F16F39
    assert ks.mix(0) == 0


@given(st.binary(max_size=50))
def test_a_position_is_the_mixed_crc(key: bytes) -> None:
    assert ks.position_of(key) == ks.mix(crc32(key))


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_a_checksum_is_that_of_key_and_value_in_a_row(key: bytes, value: bytes) -> None:
    assert ks.record_checksum(key, value) == crc32(key + value)
    assert ks.record_checksum(None, value) == crc32(value)
    assert ks.record_checksum(key, None) == crc32(key)
    assert ks.record_checksum(None, None) == 0


@pytest.mark.parametrize(
    "form", ["{}", "user-{:08d}", "{:032x}", "N{}AA|JFK"], ids=["number", "padded", "hex", "mixed"]
)
def test_similar_keys_spread_evenly(form: str) -> None:
    keys, segments = 40_000, 16
    found = Counter(ks.position_of(form.format(i).encode()) * segments >> 32 for i in range(keys))
    mean = keys / segments
    chi2 = sum((found[i] - mean) ** 2 / mean for i in range(segments))
    # 15 degrees of freedom: 50 is beyond one in 80,000. Too even (a pattern) is no fault here.
    assert chi2 < 50


def segments_of(bounds: list[tuple[int, int]]) -> tuple[SegmentRange, ...]:
    return tuple(
        SegmentRange(segment_id(3, i), low, high, i) for i, (low, high) in enumerate(bounds)
    )


def event(key: bytes | None, segment: int = -1) -> Event:
    return Event("s/a", segment, key, b"", (), -1)


@given(st.integers(1, 40), st.randoms(use_true_random=False), st.lists(st.binary(max_size=9)))
def test_keys_and_their_segments(count: int, random: object, keys: list[bytes]) -> None:
    bounds = even_ranges(count)
    random.shuffle(bounds)  # type: ignore[attr-defined]
    segments = segments_of(bounds)
    layout = Layout(segments)
    for key in keys:
        found = segments[layout.find(key)]
        assert found.low <= position_of(key) < found.high


@given(st.lists(st.none() | st.binary(max_size=3), max_size=20), st.data())
def test_events_keep_their_order_in_each_segment(
    keys: list[bytes | None], data: st.DataObject
) -> None:
    segments = segments_of(even_ranges(4))
    ids = [segment.segment_id for segment in segments]
    events = [event(key, data.draw(st.sampled_from([*ids, -1, 77]))) for key in keys]
    places = [place_of(one.key, one.segment_id) for one in events]
    found_numbers = Layout(segments).spread(places, range(len(events)))
    spread = [(segment, [events[n] for n in numbers]) for segment, numbers in found_numbers]
    assert [segment.segment_id for segment, _ in spread] == sorted(
        {segment.segment_id for segment, _ in spread}
    )
    for segment, found in spread:
        wanted = [
            one
            for one in events
            if (
                segment.low <= position_of(one.key) < segment.high
                if one.key is not None
                else segment.segment_id == (one.segment_id if one.segment_id in ids else ids[0])
            )
        ]
        assert found == wanted
    assert sum(len(found) for _, found in spread) == len(events)


@pytest.mark.parametrize("bounds", [[(0, 1)], [(SPACE - 1, SPACE)], [(0, 9), (SPACE - 9, SPACE)]])
def test_a_key_that_no_segment_holds_is_refused(bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidArgument, match="do not hold"):
        Layout(segments_of(bounds)).find(b"key")
    with pytest.raises(InvalidArgument, match="do not hold"):
        Layout(segments_of(bounds)).spread([position_of(b"key")], [0])
