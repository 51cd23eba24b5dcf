"""Locks on what transactions read of tables, and a leader's window of the writes that may have broken them.

Nothing here says that a lock is broken: a controller that is not sure asks the client to look again.
`docs/tables.md` has the rules.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crc32c import crc32c

from anabranch.core.partitioner import position_of
from anabranch.core.round import StreamCommit
from anabranch.schemas.records import LockedRange, TableLocks

FEW_KEYS = 64  # of so many keys of a commit each one is held against ranges; of more, their bounds
MOST_POINTS = 100_000  # of a commit with more keys none is known
WINDOW_BYTES = 64 << 20  # of a control partition, about
_WRITE_BYTES, _POINT_BYTES = 200, 120


def fingerprint(key: bytes) -> int:
    """The 64 bits that stand for a key in a lock, as a signed number: its position, then its CRC-32C."""
    position = position_of(key)
    return (position << 32 | crc32c(key)) - (position >> 31 << 64)


class Write(NamedTuple):
    """A commit's writes to one table. ``points``: None: not known, perhaps any.

    ``keys``: rising; of more than `FEW_KEYS` the first and the last alone.
    """

    timestamp: int
    points: tuple[int, ...] | None
    keys: tuple[bytes, ...]

    def touches(self, span: LockedRange) -> bool:
        """Whether a key of the range may be among them."""
        keys = self.keys
        if self.points is None:
            return True
        if len(keys) < len(self.points):  # only the bounds are known
            return keys[-1] >= span.low and (span.high is None or keys[0] < span.high)
        at = bisect_left(keys, span.low)
        return at < len(keys) and (span.high is None or keys[at] < span.high)

    @property
    def size(self) -> int:
        return _WRITE_BYTES + sum(map(len, self.keys)) + _POINT_BYTES * len(self.points or ())


class Keys(NamedTuple):
    """Keys that were written. ``points``: fingerprints, rising; ``keys``: as in a `Write`."""

    points: tuple[int, ...]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Iterable[bytes | None]) -> Keys:
        """Take these keys, each once; null is none."""
        found = sorted({key for key in keys if key is not None})
        points = tuple(sorted(set(map(fingerprint, found))))
        return cls(points, _few(found))

    def to_bytes(self) -> bytes:
        """A digest: the number of points, each of 8 bytes, then each key behind its length of 4 bytes."""
        keys = b"".join(len(key).to_bytes(4, "big") + key for key in self.keys)
        return struct.pack(f">I{len(self.points)}q", len(self.points), *self.points) + keys

    @classmethod
    def parse(cls, digest: bytes) -> Keys:
        """The keys of a digest."""
        (count,) = struct.unpack_from(">I", digest)
        points = struct.unpack_from(f">{count}q", digest, 4)
        keys, at = [], 4 + 8 * count
        while at < len(digest):
            end = at + 4 + int.from_bytes(digest[at : at + 4], "big")
            keys.append(digest[at + 4 : end])
            at = end
        return cls(points, tuple(keys))


def _few(rising: list[bytes]) -> tuple[bytes, ...]:
    return tuple(rising if len(rising) <= FEW_KEYS else (rising[0], rising[-1]))


def write_of(commit: StreamCommit, digests: Sequence[bytes]) -> Write:
    """The writes of a merge: its events, and what digests of journals' runs say. An empty one is not known."""
    if not all(digests):
        return Write(commit.timestamp, None, ())
    own = Keys.of(event.key for part in commit.parts for event in part.events)
    if not digests:
        return Write(commit.timestamp, *own)
    found = [own, *map(Keys.parse, digests)]
    points: set[int] = set()
    for its in found:
        points.update(its.points)
        if len(points) > MOST_POINTS:
            return Write(commit.timestamp, None, ())
    keys = sorted({key for its in found for key in its.keys})
    if any(len(its.keys) < len(its.points) for its in found):
        keys = [keys[0], keys[-1]]  # bounds are among them
    return Write(commit.timestamp, tuple(sorted(points)), _few(keys))


@dataclass(slots=True)
class _Table:
    """The writes to one table above the reach. ``before``: its newest commit that is not among them."""

    before: int
    writes: deque[Write] = field(default_factory=deque)
    newest: dict[int, int] = field(default_factory=dict)  # by fingerprint
    unknown: int = 0  # the newest write whose keys are not known

    def add(self, write: Write) -> None:
        self.writes.append(write)
        if write.points is None:
            self.unknown = write.timestamp
        for point in write.points or ():
            self.newest[point] = write.timestamp

    def drop_oldest(self) -> Write:
        write = self.writes.popleft()
        self.before = write.timestamp
        for point in write.points or ():
            if self.newest[point] == write.timestamp:
                del self.newest[point]
        return write

    def above(self, timestamp: int) -> Iterator[Write]:
        """Writes above a timestamp, the newest first."""
        for write in reversed(self.writes):
            if write.timestamp <= timestamp:
                return
            yield write

    def newest_at(self, timestamp: int) -> int:
        """The timestamp of the newest commit at or below one."""
        for write in reversed(self.writes):
            if write.timestamp <= timestamp:
                return write.timestamp
        return self.before


@dataclass(slots=True)
class Windows:
    """The writes of the last moments, by table: all above ``reach``.

    A leader begins with the hybrid time that it folded as its reach: it has not seen the writes before.
    """

    reach: int = 0
    limit: int = WINDOW_BYTES
    size: int = 0
    _tables: dict[str, _Table] = field(default_factory=dict)
    _order: deque[str] = field(default_factory=deque)  # the tables of all writes, the oldest first

    def draft(self) -> WindowDraft:
        """A round's own writes, beside these."""
        return WindowDraft(self)

    def follow(self, draft: WindowDraft) -> None:
        """Take over the writes of a round that is committed."""
        for table, its in draft.tables.items():
            known = self._tables.setdefault(table, _Table(its.before))
            for write in its.writes:
                known.add(write)
                self.size += write.size
        self._order.extend(draft.order)
        while self.size > self.limit:
            oldest = self._order.popleft()
            if oldest in self._tables and self._tables[oldest].writes:  # else it was forgotten
                write = self._tables[oldest].drop_oldest()
                self.size -= write.size
                self.reach = max(self.reach, write.timestamp)

    def forget(self, table: str) -> None:
        """The table is deleted. A new one of its name was made above all locks on this one."""
        gone = self._tables.pop(table, None)
        if gone is not None:
            self.size -= sum(write.size for write in gone.writes)
            self._order = deque(name for name in self._order if name != table)

    def table(self, name: str) -> _Table | None:
        """A table's writes; None: there are none above the reach."""
        return self._tables.get(name)


@dataclass(slots=True)
class WindowDraft:
    """A round's writes to tables, looked through together with the window that they will join."""

    base: Windows
    tables: dict[str, _Table] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def add(self, table: str, write: Write, before: int) -> None:
        """Note a commit. ``before``: the table's newest one before it."""
        self.tables.setdefault(table, _Table(before)).add(write)
        self.order.append(table)

    def holds(self, locks: TableLocks, last: int) -> bool:
        """Whether it is sure that nothing of it was written above ``since``. ``last``: the table's newest
        commit.
        """
        since = locks.since
        if last <= since:
            return last == locks.last
        known = [t for t in (self.tables.get(locks.table), self.base.table(locks.table)) if t]
        if since < self.base.reach or _newest_at(known, since) != locks.last:
            return False
        if any(its.unknown > since for its in known):
            return False
        if any(its.newest.get(point, 0) > since for its in known for point in locks.points):
            return False
        return not any(
            write.touches(span)
            for its in known if locks.ranges
            for write in its.above(since)
            for span in locks.ranges
        )  # fmt: skip


def _newest_at(known: Iterable[_Table], timestamp: int) -> int:
    """The newest commit at or below a timestamp; the newest part of what is known comes first."""
    found = 0
    for its in known:
        found = its.newest_at(timestamp)
        if its.writes and its.writes[0].timestamp <= timestamp:
            break
    return found
