"""A layout finds the segment that holds a key, as looking through all of them does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InvalidArgument
from anabranch.protocol.ids import segment_id
from anabranch.protocol.partitioner import SPACE, Layout, even_ranges, position_of
from anabranch.protocol.schemas.records import Event, SegmentRange


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
    spread = Layout(segments).spread(events)
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
