"""The key space: a key's hash is its position in [0, 2^32), and ranges tile that space.

The position of a key is the CRC-32 (IEEE, as in zlib) of its bytes, mixed by MurmurHash3's 32-bit
finaliser. Every language can compute both; the CRC is also the first half of a record's checksum, so
a writer hashes each key once. Integers, not floats, so that ranges tile exactly (`docs/protocol.md` has
test vectors).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

from anabranch.errors import InvalidArgument

SPACE = 1 << 32
_MASK = SPACE - 1


def mix(h: int) -> int:
    """MurmurHash3's fmix32: a bijection on 32 bits that spreads the CRC's structure."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def position_of(key: bytes) -> int:
    """The key's position, 0 .. 2^32-1: `mix` of its CRC, written out because every event comes here."""
    h = crc32(key)
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def record_checksum(key: bytes | None, value: bytes | None) -> int:
    """CRC-32 of the key's bytes followed by the value's; null counts as empty."""
    return crc32(value or b"", crc32(key or b""))


def even_ranges(count: int) -> list[tuple[int, int]]:
    """``count`` (low, high) ranges that tile the space as evenly as integers allow."""
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
