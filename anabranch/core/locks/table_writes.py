"""The writes of a commit to a table: fingerprints of the written keys, and the keys or their bounds."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from crc32c import crc32c

from anabranch.core.round import StreamCommit
from anabranch.errors import MalformedRecord
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import LockedRange

# Up to this many keys of a commit are compared with ranges; of more keys, the bounds are compared.
FEW_KEYS = 64
# Up to this many fingerprints of a commit are kept one by one; more are a packed array.
FEW_POINTS = 4_096
WINDOW_BYTES = 128 << 20  # of the recent writes of a control partition, about
_WRITE_BYTES = 200
_POINT_BYTES = 120
_PACKED_BYTES = 8


def fingerprint(key: bytes) -> int:
    """The 64 bits that represent a key in a lock, as a signed number: its position, then its CRC-32C."""
    position = position_of(key)
    return (position << 32 | crc32c(key)) - (position >> 31 << 64)


class Write:
    """A commit's writes to one table.

    ``is_packed``: there are more than `FEW_POINTS` fingerprints. ``is_bounded``: only the bounds of its keys are
    known. Keys are hashed, and fingerprints sorted, on first use: most commits are never compared with a lock.
    """

    __slots__ = (
        "_is_sorted", "_keys", "_points", "_unread", "is_bounded", "is_packed", "size", "timestamp",
    )  # fmt: skip

    def __init__(
        self, timestamp: int, points: Sequence[int] | None, keys: tuple[bytes, ...]
    ) -> None:
        """``points``: fingerprints, rising; None: not known. ``keys``: rising; above `FEW_KEYS`, their bounds."""
        self.timestamp = timestamp
        self._points = points
        self._keys = keys
        self._unread: list[bytes] | None = None
        self._is_sorted = True
        self.is_packed = points is not None and len(points) > FEW_POINTS
        self.is_bounded = points is not None and len(keys) < len(points)
        self.size = self._size_of(keys, len(points or ()))

    @classmethod
    def of(cls, timestamp: int, keys: Iterable[bytes | None]) -> Write:
        """The writes of these keys; None is skipped."""
        found = [key for key in keys if key is not None]
        if len(found) > FEW_KEYS:
            return cls(timestamp, *Keys.of(found))
        write = cls(timestamp, (), ())
        write._unread = found
        write.size = write._size_of(found, len(found))
        return write

    @classmethod
    def packed(cls, timestamp: int, points: Iterable[Any], keys: tuple[bytes, ...]) -> Write:
        """The writes of arrays with more than `FEW_POINTS` fingerprints, in any order. ``keys``: as for `Write`."""
        # Joined as bytes: digests are not aligned, and NumPy copies such numbers one by one.
        write = cls(timestamp, memoryview(bytearray().join(points)).cast("q"), keys)
        write._is_sorted = False
        return write

    def _size_of(self, keys: Iterable[bytes], points: int) -> int:
        each = _PACKED_BYTES if self.is_packed else _POINT_BYTES
        return _WRITE_BYTES + sum(map(len, keys)) + each * points

    def at(self, timestamp: int) -> Write:
        """The same keys, written at another time."""
        if self._unread is not None:
            return Write.of(timestamp, self._unread)
        return Write(timestamp, self.points, self._keys)

    def _read(self) -> None:
        if self._unread is not None:
            self._points, self._keys = Keys.of(self._unread)
            self._unread = None
        if not self._is_sorted:
            self._points = _rising(self._points)
            self._is_sorted = True

    @property
    def points(self) -> Sequence[int] | None:
        self._read()
        return self._points

    @property
    def keys(self) -> tuple[bytes, ...]:
        self._read()
        return self._keys

    @property
    def is_unknown(self) -> bool:
        return self._points is None

    def has(self, point: int) -> bool:
        """Whether the key of this fingerprint may be among the written ones."""
        points = self.points
        if points is None:
            return True
        at = bisect_left(points, point)
        return at < len(points) and points[at] == point

    def touches(self, span: LockedRange) -> bool:
        """Whether a key of the range may be among the written ones."""
        keys = self.keys
        if self.points is None:
            return True
        if len(keys) < len(self.points):  # only the bounds are known
            return keys[-1] >= span.low and (span.high is None or keys[0] < span.high)
        at = bisect_left(keys, span.low)
        return at < len(keys) and (span.high is None or keys[at] < span.high)

    def touches_any(self, spans: Sequence[LockedRange], lows: Sequence[bytes]) -> bool:
        """Whether `touches` is true for any of these rising, disjoint ranges. ``lows``: their beginnings."""

        def meets(first: bytes, last: bytes) -> bool:
            at = bisect_right(lows, last)
            return at > 0 and ((high := spans[at - 1].high) is None or first < high)

        if self.points is None:
            return bool(spans)
        if len(self.keys) < len(self.points):
            return meets(self.keys[0], self.keys[-1])
        return any(meets(key, key) for key in self.keys)

    def key_in(self, span: LockedRange) -> bytes | None:
        """A written key of the range, if it is known for certain."""
        at = bisect_left(self.keys, span.low)
        found = self.keys[at : at + 1]
        return found[0] if found and (span.high is None or found[0] < span.high) else None

    def key_of(self, point: int) -> bytes:
        """The key of a fingerprint; empty if it is not known."""
        return next((key for key in self.keys if fingerprint(key) == point), b"")


class Keys(NamedTuple):
    """Keys that were written. ``points``: fingerprints, rising; ``keys``: as in a `Write`.

    Its bytes are a *digest*: the number of points (4), each point in 8 bytes in this machine's order, then for each
    key its length (4) and its bytes.
    """

    points: Sequence[int]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Iterable[bytes | None]) -> Keys:
        """These keys, each once; None is skipped."""
        found = sorted({key for key in keys if key is not None})
        points = tuple(sorted(set(map(fingerprint, found))))
        return cls(points, _few(found))

    @classmethod
    def packed(cls, points: Sequence[Any], few: list[bytes]) -> Keys:
        """Join arrays of fingerprints. ``few``: their keys, or the bounds of these, rising."""
        count = sum(map(len, points))
        if count <= FEW_KEYS:
            return cls(
                tuple(sorted({point for its in points for point in its.tolist()})), _few(few)
            )
        import numpy as np  # clients that only write need not have it

        found = np.concatenate([np.asarray(its, dtype=np.int64) for its in points])
        return cls(_rising(found), _few(few))

    def to_bytes(self) -> bytes:
        """The digest of the keys."""
        points, keys = self.points, self.keys
        if not isinstance(points, memoryview):
            points = memoryview(array("q", points))
        rest = [part for key in keys for part in (len(key).to_bytes(4, "big"), key)]
        return b"".join([len(points).to_bytes(4, "big"), points, *rest])

    @classmethod
    def parse(cls, digest: bytes) -> Keys:
        """The keys of a digest. `MalformedRecord`."""
        at = 4 + 8 * int.from_bytes(digest[:4], "big")
        if at > len(digest):
            raise MalformedRecord("a digest of keys ends within its points")
        points = memoryview(digest)[4:at].cast("q")
        keys = []
        while at < len(digest):
            end = at + 4 + int.from_bytes(digest[at : at + 4], "big")
            if end > len(digest):
                raise MalformedRecord("a digest of keys ends in the middle of one")
            keys.append(digest[at + 4 : end])
            at = end
        return cls(points, tuple(keys))


def _rising(points: Any) -> memoryview:
    """An array of fingerprints, sorted in place, each of them once."""
    import numpy as np

    found = np.frombuffer(points, dtype=np.int64)
    found.sort()
    others = found[1:] != found[:-1]
    if not others.all():
        found = np.concatenate([found[:1], found[1:][others]])
    return memoryview(found.data.cast("B").cast("q"))


def _few(rising: list[bytes]) -> tuple[bytes, ...]:
    return tuple(rising if len(rising) <= FEW_KEYS else (rising[0], rising[-1]))


def write_of(commit: StreamCommit, digests: Iterable[bytes]) -> Write:
    """The writes of a merge to a table: the keys of its events, and the keys in the digests of its journal runs.

    If a digest is empty, or the digests together exceed `WINDOW_BYTES`, the keys count as unknown: the write may
    have changed any key.
    """
    own = [key for part in commit.parts for key in part.events.keys]
    found: list[Keys] = []
    room = WINDOW_BYTES
    for digest in digests:
        room -= len(digest)
        if not digest or room < 0:
            return Write(commit.timestamp, None, ())
        found.append(Keys.parse(digest))
    if not found:
        return Write.of(commit.timestamp, own)
    found.insert(0, Keys.of(own))
    keys = sorted({key for its in found for key in its.keys})
    if any(len(its.keys) < len(its.points) for its in found):
        keys = [keys[0], keys[-1]]  # some of these keys are bounds
    if sum(len(its.points) for its in found) > FEW_POINTS:
        points: list[Any] = [array("q", found[0].points), *[its.points for its in found[1:]]]
        return Write.packed(commit.timestamp, points, _few(keys))
    few = {point for its in found for point in its.points}
    return Write(commit.timestamp, tuple(sorted(few)), _few(keys))
