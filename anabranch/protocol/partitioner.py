"""The key space: a key's hash is its position in [0, 2^32); the ranges of a stream's segments tile this space.

The position of a key is the CRC-32 (IEEE, as in zlib) of its bytes, mixed by MurmurHash3's 32-bit finaliser. Every
language can compute both; the CRC is also the first half of a record's checksum, so a writer hashes each key once.
Positions are integers, so that ranges tile exactly (`docs/protocol.md` has test vectors).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

from anabranch.errors import InvalidArgument
from anabranch.protocol.ids import segment_number
from anabranch.protocol.schemas.records import SegmentRange

SPACE = 1 << 32
_MASK = SPACE - 1
_NONE = -1


def mix(h: int) -> int:
    """MurmurHash3's fmix32: a bijection on 32 bits that spreads the CRC's structure."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def position_of(key: bytes) -> int:
    """The key's position, 0 to 2^32 - 1: `mix` of its CRC, inlined because this runs for every event."""
    h = crc32(key)
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def place_of(key: bytes | None, segment_id: int) -> int:
    """An event's place in any layout: the position of its key. Without a key it is below 0, and names the segment
    that the sender chose: ``~segment_number(segment_id)``.
    """
    return ~segment_number(segment_id) if key is None else position_of(key)


def task_of(key: bytes, tasks: int) -> int:
    """The task of a key: the number of the range, of ``tasks`` equal ones, that has its position."""
    return position_of(key) * tasks // SPACE


def record_checksum(key: bytes | None, value: bytes | None) -> int:
    """CRC-32 of the key's bytes followed by the value's; null counts as empty."""
    return crc32(value or b"", crc32(key or b""))


def even_ranges(count: int) -> list[tuple[int, int]]:
    """``count`` ranges (low, high) that tile the space as evenly as integers allow. `InvalidArgument`."""
    if not 1 <= count <= 10_000:
        raise InvalidArgument(f"a stream has 1 to 10,000 segments, not {count}")
    bounds = [SPACE * i // count for i in range(count + 1)]
    return list(pairwise(bounds))


def tiles(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether the ranges cover the space exactly: no gap, no overlap."""
    ordered = sorted(ranges)
    if not ordered or ordered[0][0] != 0 or ordered[-1][1] != SPACE:
        return False
    return all(low < high for low, high in ordered) and all(
        a[1] == b[0] for a, b in pairwise(ordered)
    )


class Layout:
    """The active segments of a stream, indexed for finding the segment of a key."""

    __slots__ = ("_bounds", "_by_number", "_owners", "segments")

    def __init__(self, segments: Sequence[SegmentRange]) -> None:
        self.segments = segments
        self._by_number = {segment_number(s.segment_id): i for i, s in enumerate(segments)}
        # The owner of positions from one bound to the next is the index of a segment. Places below 0 are before the
        # first bound.
        self._bounds: list[int] = []
        self._owners = [_NONE]
        end = 0
        for index in sorted(range(len(segments)), key=lambda i: segments[i].low):
            segment = segments[index]
            if segment.low > end:
                self._bounds.append(end)
                self._owners.append(_NONE)
            self._bounds.append(segment.low)
            self._owners.append(index)
            end = segment.high
        self._bounds.append(end)
        self._owners.append(_NONE)

    def find(self, key: bytes) -> int:
        """The index of the segment of a key."""
        return self._index_of(position_of(key))

    def _index_of(self, place: int) -> int:
        if place < 0:
            return self._by_number.get(~place, 0)
        found = self._owners[bisect_right(self._bounds, place)]
        if found == _NONE:
            raise InvalidArgument("the stream's segments do not hold this key")
        return found

    def spread(
        self, places: Sequence[int], numbers: Sequence[int]
    ) -> list[tuple[SegmentRange, Sequence[int]]]:
        """Group numbers of events by segment, in the order of the segments and of the numbers.

        ``places``: the place (`place_of`) of each event, by its number.
        """
        bounds, owners = self._bounds, self._owners
        lists: dict[int, list[int]] = {}
        for number in numbers:
            index = owners[bisect_right(bounds, places[number])]
            if index == _NONE:
                index = self._index_of(places[number])
            if index in lists:
                lists[index].append(number)
            else:
                lists[index] = [number]
        return [(self.segments[index], lists[index]) for index in sorted(lists)]
