"""Locks on what transactions read of tables: a leader's window of recent writes, and the registered ones.

By the window alone no lock is broken: a controller that is not sure asks the client to look again. Registered
locks are rows of open transactions: each commit is held against them. `docs/tables.md` has the rules.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from crc32c import crc32c

from anabranch.core import rows as k
from anabranch.core.partitioner import position_of
from anabranch.core.round import StreamCommit
from anabranch.errors import MalformedRecord
from anabranch.schemas.records import (
    BrokenLock,
    LockedRange,
    LookedRow,
    ReadLockRow,
    TableLocks,
    TxnRow,
)

FEW_KEYS = 64  # of so many keys of a commit each one is held against ranges; of more, their bounds
FEW_POINTS = 4_096  # of so many writes of a commit each is noted by itself; more are a packed array
WINDOW_BYTES = 128 << 20  # of a control partition, about
_WRITE_BYTES, _POINT_BYTES, _PACKED_BYTES = 200, 120, 8


def fingerprint(key: bytes) -> int:
    """The 64 bits that stand for a key in a lock, as a signed number: its position, then its CRC-32C."""
    position = position_of(key)
    return (position << 32 | crc32c(key)) - (position >> 31 << 64)


class Write(NamedTuple):
    """A commit's writes to one table. ``points``: fingerprints, rising; None: not known, perhaps any.

    ``keys``: rising; of more than `FEW_KEYS` the first and the last alone.
    """

    timestamp: int
    points: Sequence[int] | None
    keys: tuple[bytes, ...]

    @property
    def is_packed(self) -> bool:
        return self.points is not None and len(self.points) > FEW_POINTS

    def has(self, point: int) -> bool:
        """Whether the key of this fingerprint may be among them."""
        points = self.points
        if points is None:
            return True
        at = bisect_left(points, point)
        return at < len(points) and points[at] == point

    def touches(self, span: LockedRange) -> bool:
        """Whether a key of the range may be among them."""
        keys = self.keys
        if self.points is None:
            return True
        if len(keys) < len(self.points):  # only the bounds are known
            return keys[-1] >= span.low and (span.high is None or keys[0] < span.high)
        at = bisect_left(keys, span.low)
        return at < len(keys) and (span.high is None or keys[at] < span.high)

    def key_in(self, span: LockedRange) -> bytes | None:
        """A key of the range that is among them for certain."""
        at = bisect_left(self.keys, span.low)
        found = self.keys[at : at + 1]
        return found[0] if found and (span.high is None or found[0] < span.high) else None

    def key_of(self, point: int) -> bytes:
        """The key of a fingerprint; empty if it is not known."""
        return next((key for key in self.keys if fingerprint(key) == point), b"")

    @property
    def size(self) -> int:
        each = _PACKED_BYTES if self.is_packed else _POINT_BYTES
        return _WRITE_BYTES + sum(map(len, self.keys)) + each * len(self.points or ())


class Numbers(Protocol):
    """An array of numbers."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class Keys(NamedTuple):
    """Keys that were written. ``points``: fingerprints, rising; ``keys``: as in a `Write`.

    Its bytes, a *digest*, have the number of points (4), each in 8 bytes as this machine has them, then each key
    behind its length (4).
    """

    points: Sequence[int]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Iterable[bytes | None]) -> Keys:
        """Take these keys, each once; null is none."""
        found = sorted({key for key in keys if key is not None})
        points = tuple(sorted(set(map(fingerprint, found))))
        return cls(points, _few(found))

    @classmethod
    def packed(cls, points: Sequence[Numbers], few: list[bytes]) -> Keys:
        """Put arrays of fingerprints together. ``few``: these keys, or their bounds, rising."""
        count = sum(map(len, points))
        if count <= FEW_KEYS:
            return cls(tuple(sorted({int(point) for its in points for point in its})), _few(few))
        import numpy as np  # clients that write only do without

        found = np.concatenate([np.asarray(its, dtype=np.int64) for its in points])
        found.sort()
        again = found[1:] == found[:-1]
        if again.any():
            found = np.concatenate([found[:1], found[1:][~again]])
        return cls(found.data.cast("B").cast("q"), _few(few))

    def to_bytes(self) -> bytes:
        """A digest."""
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


def _few(rising: list[bytes]) -> tuple[bytes, ...]:
    return tuple(rising if len(rising) <= FEW_KEYS else (rising[0], rising[-1]))


def write_of(commit: StreamCommit, digests: Iterable[bytes]) -> Write:
    """The writes of a merge: its events, and what digests of journals' runs say. An empty one is not known."""
    found = [Keys.of(event.key for part in commit.parts for event in part.events)]
    room = WINDOW_BYTES
    for digest in digests:
        room -= len(digest)
        if not digest or room < 0:
            return Write(commit.timestamp, None, ())
        found.append(Keys.parse(digest))
    if len(found) == 1:
        return Write(commit.timestamp, *found[0])
    keys = sorted({key for its in found for key in its.keys})
    if any(len(its.keys) < len(its.points) for its in found):
        keys = [keys[0], keys[-1]]  # bounds are among them
    if sum(len(its.points) for its in found) > FEW_POINTS:
        return Write(commit.timestamp, *Keys.packed([its.points for its in found], keys))
    points = {point for its in found for point in its.points}
    return Write(commit.timestamp, tuple(sorted(points)), _few(keys))


@dataclass(slots=True)
class _Table:
    """The writes to one table above the reach. ``before``: its newest commit that is not among them."""

    before: int
    writes: deque[Write] = field(default_factory=deque)
    newest: dict[int, int] = field(default_factory=dict)  # by fingerprint, of those that are not
    packed: deque[Write] = field(default_factory=deque)
    unknown: int = 0  # the newest write whose keys are not known

    def add(self, write: Write) -> None:
        self.writes.append(write)
        if write.points is None:
            self.unknown = write.timestamp
        elif write.is_packed:
            self.packed.append(write)
        else:
            self.newest.update(dict.fromkeys(write.points, write.timestamp))

    def drop_oldest(self) -> Write:
        write = self.writes.popleft()
        self.before = write.timestamp
        if write.is_packed:
            self.packed.popleft()
            return write
        for point in write.points or ():
            if self.newest[point] == write.timestamp:
                del self.newest[point]
        return write

    def has(self, points: Iterable[int], since: int) -> bool:
        """Whether one of these fingerprints was written above a timestamp."""
        big = [write for write in self.packed if write.timestamp > since]
        return any(
            self.newest.get(point, 0) > since or any(write.has(point) for write in big)
            for point in points
        )

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
        if any(its.has(locks.points, since) for its in known):
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


Owner = tuple[bytes, int]  # transaction, writer


@dataclass(slots=True)
class Sets:
    """Registered locks of an open transaction, by writer and sequence, and how far each writer's are looked at."""

    rows: dict[tuple[int, int], ReadLockRow] = field(default_factory=dict)
    looked: dict[int, LookedRow] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(count_of, (row.locks for row in self.rows.values())))

    @property
    def tables(self) -> list[str]:
        """The locked tables, sorted."""
        return sorted({each.table for row in self.rows.values() for each in row.locks})

    def numbers(self) -> list[tuple[int, int]]:
        """(writer, sequence) of all rows."""
        return [*self.rows, *((writer, 0) for writer in self.looked)]

    def last(self, writer: int) -> int:
        """The sequence of a writer's last set; 0: it has none."""
        return max((sequence for its, sequence in self.rows if its == writer), default=0)


def count_of(locks: Iterable[TableLocks]) -> int:
    """The number of points and ranges."""
    return sum(len(each.points) + len(each.ranges) for each in locks)


@dataclass(slots=True)
class _Locked:
    """The registered locks on one table. ``owners``: how many each has."""

    points: dict[int, tuple[Owner, ...]] = field(default_factory=dict)
    ranges: list[tuple[LockedRange, Owner]] = field(default_factory=list)
    owners: Counter[Owner] = field(default_factory=Counter)

    def put(self, owner: Owner, locks: TableLocks) -> None:
        alone = (owner,)  # one for all points
        for point in locks.points:
            others = self.points.get(point)
            self.points[point] = alone if others is None else (*others, owner)
        self.ranges += [(span, owner) for span in locks.ranges]
        self.owners[owner] += count_of((locks,))

    def take(self, owner: Owner, locks: TableLocks) -> None:
        for point in locks.points:
            rest = list(self.points.pop(point))
            rest.remove(owner)
            if rest:
                self.points[point] = tuple(rest)
        gone = set(locks.ranges)
        self.ranges = [(s, its) for s, its in self.ranges if its != owner or s not in gone]
        self.owners[owner] -= count_of((locks,))
        if not self.owners[owner]:
            del self.owners[owner]


class Hits(NamedTuple):
    """Transactions whose locks a commit breaks, and writers of others whose locks it may break."""

    broken: dict[bytes, BrokenLock]
    doubted: set[Owner]


@dataclass(slots=True)
class Registered:
    """The registered locks of all open transactions: a view of the status log's rows."""

    sets: dict[bytes, Sets] = field(default_factory=dict)
    snapshots: dict[bytes, int] = field(default_factory=dict)  # of open transactions that read
    count: int = 0
    _tables: dict[str, _Locked] = field(default_factory=dict)

    def clear(self) -> None:
        for kept in (self.sets, self.snapshots, self._tables):
            kept.clear()
        self.count = 0

    def of(self, txn_id: bytes) -> Sets:
        """A transaction's; empty if it has none."""
        return self.sets.get(txn_id) or Sets()

    def follow(self, txn_id: bytes, row: TxnRow) -> None:
        """Follow the row of an open transaction. A PREPARED one reads no more."""
        if row.snapshot and row.state != "PREPARED":
            self.snapshots[txn_id] = row.snapshot
        else:
            self.snapshots.pop(txn_id, None)

    def derive(self, txn_id: bytes, identifier: bytes, row: ReadLockRow | LookedRow | None) -> None:
        """Follow a row of locks of an open transaction."""
        writer, sequence = k.read_lock_of(identifier)
        sets = self.sets.setdefault(txn_id, Sets())
        former = sets.rows.pop((writer, sequence), None)
        if former is not None:
            self._take((txn_id, writer), former)
        if isinstance(row, ReadLockRow):
            sets.rows[writer, sequence] = row
            self.count += count_of(row.locks)
            for each in row.locks:
                self._tables.setdefault(each.table, _Locked()).put((txn_id, writer), each)
        elif isinstance(row, LookedRow):
            sets.looked[writer] = row
        elif not sequence:
            sets.looked.pop(writer, None)

    def _take(self, owner: Owner, row: ReadLockRow) -> None:
        self.count -= count_of(row.locks)
        for each in row.locks:
            self._tables[each.table].take(owner, each)
            if not self._tables[each.table].owners:
                del self._tables[each.table]

    def end(self, txn_id: bytes) -> None:
        """The transaction is over."""
        self.snapshots.pop(txn_id, None)
        sets = self.sets.pop(txn_id, None)
        for (writer, _), row in sets.rows.items() if sets is not None else ():
            self._take((txn_id, writer), row)

    def ranges(self, table: str) -> int:
        """How many ranges of a table are locked."""
        return len(self._tables[table].ranges) if table in self._tables else 0

    def hits(self, table: str, write: Write, by: bytes) -> Hits:
        """Hold a commit against all locks on a table, but for the transaction's own.

        A fingerprint is taken for the key: two keys share one in 2^64 cases.
        """
        hits = Hits({}, set())
        locked = self._tables.get(table)
        if locked is None:
            return hits
        if write.points is None:
            hits.doubted.update(locked.owners)
        few: Iterable[int] = write.points or ()
        if len(write.points or ()) > len(locked.points):  # 10 million writes are not walked over
            few = filter(write.has, locked.points)
        for point in few:
            for txn_id, _ in locked.points.get(point, ()):
                if txn_id not in hits.broken:
                    key = write.key_of(point)
                    hits.broken[txn_id] = BrokenLock(table, key, None, write.timestamp, by)
        for span, owner in locked.ranges if write.points else ():
            key_in = write.key_in(span)
            if key_in is not None:
                its = BrokenLock(table, key_in, span, write.timestamp, by)
                hits.broken.setdefault(owner[0], its)
            elif write.touches(span):  # between the bounds of a big commit
                hits.doubted.add(owner)
        hits.broken.pop(by, None)
        doubted = {o for o in hits.doubted if o[0] != by and o[0] not in hits.broken}
        return Hits(hits.broken, doubted)
