"""Locks on what transactions read of tables: a leader's window of recent writes, and the registered ones.

By the window alone no lock is broken: a controller that is not sure asks the client to look again. Registered
locks are rows of open transactions: each commit is held against them. `docs/inside/tables.md` has the rules.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from anabranch.core import rows as k
from anabranch.core.journal.table_writes import WINDOW_BYTES, Write
from anabranch.schemas.records import (
    BrokenLock,
    LockedRange,
    LookedRow,
    ReadLockRow,
    TableLocks,
    TxnRow,
)


@dataclass(slots=True)
class _Table:
    """The writes to one table above the reach. ``before``: its newest commit that is not among them."""

    before: int
    writes: deque[Write] = field(default_factory=deque)
    packed: deque[Write] = field(default_factory=deque)
    bounded: deque[Write] = field(default_factory=deque)
    newest: dict[int, int] = field(default_factory=dict)  # by fingerprint, of those that are not
    fresh: deque[Write] = field(default_factory=deque)  # those that are not in `newest` yet
    unknown: int = 0  # the newest write whose keys are not known

    def add(self, write: Write) -> None:
        self.writes.append(write)
        if write.is_bounded:
            self.bounded.append(write)
        if write.is_unknown:
            self.unknown = write.timestamp
        elif write.is_packed:
            self.packed.append(write)
        else:
            self.fresh.append(write)

    def drop_oldest(self) -> Write:
        write = self.writes.popleft()
        self.before = write.timestamp
        if write.is_bounded:
            self.bounded.popleft()
        if write.is_packed:
            self.packed.popleft()
        elif self.fresh and self.fresh[0] is write:
            self.fresh.popleft()
        else:
            for point in write.points or ():
                if self.newest[point] == write.timestamp:
                    del self.newest[point]
        return write

    def has(self, points: Sequence[int], since: int) -> bool:
        """Whether one of these fingerprints was written above a timestamp."""
        if not points:
            return False
        newest = self.newest
        # Older ones may never be asked about.
        while self.fresh and self.fresh[-1].timestamp > since:
            write = self.fresh.pop()
            for point in write.points or ():
                newest[point] = max(write.timestamp, newest.get(point, 0))
        for point in points:
            if newest.get(point, 0) > since:
                return True
        big = [write for write in self.packed if write.timestamp > since]
        return bool(big) and any(write.has(point) for write in big for point in points)

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

    def _known(self, table: str) -> list[_Table]:
        """The newest part first."""
        return [t for t in (self.tables.get(table), self.base.table(table)) if t]

    def spares(self, locks: TableLocks, through: int) -> bool:
        """Whether no commit above a time may have broken one of these locks unnoticed.

        So it is if all of them are in the window, their keys are known, or their bounds, which lie round no range.
        """
        known = self._known(locks.table)
        if through < self.base.reach or any(its.unknown > through for its in known):
            return False
        lows = [span.low for span in locks.ranges]
        near = (write for its in known if lows for write in _above(its.bounded, through))
        return not any(
            looked_at == MOST_BOUNDED or write.touches_any(locks.ranges, lows)
            for looked_at, write in enumerate(near)
        )

    def holds(self, locks: TableLocks, last: int) -> bool:
        """Whether it is sure that nothing of it was written above ``since``. ``last``: the table's newest
        commit.
        """
        since = locks.since
        if last <= since:
            return last == locks.last
        known = self._known(locks.table)
        if since < self.base.reach or _newest_at(known, since) != locks.last:
            return False
        lows = [span.low for span in locks.ranges]
        for its in known:
            if its.unknown > since or its.has(locks.points, since):
                return False
            if lows and any(
                write.touches_any(locks.ranges, lows) for write in _above(its.writes, since)
            ):
                return False
        return True


def _above(writes: deque[Write], timestamp: int) -> Iterator[Write]:
    """Those above a timestamp, the newest first."""
    return takewhile(lambda write: write.timestamp > timestamp, reversed(writes))


def _newest_at(known: Iterable[_Table], timestamp: int) -> int:
    """The newest commit at or below a timestamp; the newest part of what is known comes first."""
    found = 0
    for its in known:
        found = its.newest_at(timestamp)
        if its.writes and its.writes[0].timestamp <= timestamp:
            break
    return found


MOST_BOUNDED = 100  # commits of known bounds that are looked through; a look costs less


@dataclass(slots=True)
class Sets:
    """Registered locks of an open transaction, by writer and sequence, and how far each writer's are looked at.

    ``count``: of the locks, as `held_by` counts.
    """

    rows: dict[tuple[int, int], ReadLockRow] = field(default_factory=dict)
    looked: dict[int, LookedRow] = field(default_factory=dict)
    count: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by writer

    def put(self, writer: int, sequence: int, row: ReadLockRow) -> None:
        """Add a set."""
        self.rows[writer, sequence] = row
        self.count += held_by(row)
        self._last[writer] = max(sequence, self.last(writer))

    def take(self, writer: int, sequence: int) -> ReadLockRow | None:
        """Take a set out; None: there is none."""
        row = self.rows.pop((writer, sequence), None)
        if row is not None:
            self.count -= held_by(row)
            if self.last(writer) == sequence:
                others = (number for its, number in self.rows if its == writer)
                self._last[writer] = max(others, default=0)
        return row

    @property
    def tables(self) -> list[str]:
        """The locked tables, sorted."""
        return sorted({each.table for row in self.rows.values() for each in row.locks})

    def numbers(self) -> list[tuple[int, int]]:
        """(writer, sequence) of all rows."""
        return [*self.rows, *((writer, 0) for writer in self.looked)]

    def last(self, writer: int) -> int:
        """The sequence of a writer's last set; 0: it has none."""
        return self._last.get(writer, 0)


def count_of(locks: Iterable[TableLocks]) -> int:
    """The number of points and ranges."""
    return sum([len(each.points) + len(each.ranges) for each in locks])


def held_by(row: ReadLockRow) -> int:
    """The number of things in a set: locks, tables that it names without one, and writers that it was read from."""
    named = sum([not (each.points or each.ranges) for each in row.locks])
    return count_of(row.locks) + named + len(row.read_from)


def _with_locks(row: ReadLockRow) -> Iterator[TableLocks]:
    """The tables of a set of which something is locked: a client may name others."""
    return (each for each in row.locks if each.points or each.ranges)


@dataclass(slots=True)
class _Locked:
    """The registered locks on one table. ``owners``: how many each transaction has."""

    points: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    ranges: list[tuple[LockedRange, bytes]] = field(default_factory=list)
    owners: Counter[bytes] = field(default_factory=Counter)

    def put(self, owner: bytes, locks: TableLocks) -> None:
        alone = (owner,)  # one for all points
        for point in locks.points:
            others = self.points.get(point)
            self.points[point] = alone if others is None else (*others, owner)
        self.ranges += [(span, owner) for span in locks.ranges]
        self.owners[owner] += count_of((locks,))

    def take(self, owner: bytes, locks: TableLocks) -> None:
        for point in locks.points:
            rest = list(self.points.pop(point))
            rest.remove(owner)
            if rest:
                self.points[point] = tuple(rest)
        if gone := Counter(locks.ranges):  # another writer of it may have the same one
            ranges, self.ranges = self.ranges, []
            for span, its in ranges:
                if its == owner and gone[span]:
                    gone[span] -= 1
                else:
                    self.ranges.append((span, its))
        self.owners[owner] -= count_of((locks,))
        if not self.owners[owner]:
            del self.owners[owner]

    def hit(self, write: Write) -> Iterator[tuple[int, bytes]]:
        """The locked points that a write has, and whose they are."""
        few: Iterable[int] = write.points or ()
        if len(write.points or ()) > len(self.points):  # 10 million writes are not walked over
            few = filter(write.has, self.points)
        for point in few:
            for owner in self.points.get(point, ()):
                yield point, owner


@dataclass(slots=True)
class Registered:
    """The registered locks of all open transactions: a view of the status log's rows."""

    sets: dict[bytes, Sets] = field(default_factory=dict)
    snapshots: dict[bytes, int] = field(default_factory=dict)  # of open transactions that read
    readers: dict[str, dict[bytes, str]] = field(
        default_factory=dict
    )  # … by a table that they named, and the lane that named it
    named: dict[bytes, Mapping[str, str]] = field(default_factory=dict)  # table -> lane
    carried: dict[bytes, bool] = field(default_factory=dict)  # transactions whose locks are frozen
    count: int = 0
    _tables: dict[str, _Locked] = field(default_factory=dict)

    def clear(self) -> None:
        for kept in (
            self.sets, self.snapshots, self.readers, self.named, self.carried, self._tables,
        ):  # fmt: skip
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
        if row.state == "FINALIZE_IN_PROGRESS":
            self.carried[txn_id] = True

    def name(self, txn_id: bytes, tables: Mapping[str, str]) -> None:
        """Follow the tables that a transaction reads, each with the lane that named it."""
        for table in self.named.pop(txn_id, {}):
            del self.readers[table][txn_id]
            if not self.readers[table]:
                del self.readers[table]
        if tables:
            self.named[txn_id] = tables
        for table, lane in tables.items():
            self.readers.setdefault(table, {})[txn_id] = lane

    def derive(self, txn_id: bytes, identifier: bytes, row: ReadLockRow | LookedRow | None) -> None:
        """Follow a row of locks of an open transaction."""
        writer, sequence = k.read_lock_of(identifier)
        sets = self.sets.setdefault(txn_id, Sets())
        former = sets.take(writer, sequence)
        if former is not None:
            self._take(txn_id, former)
        if isinstance(row, ReadLockRow):
            sets.put(writer, sequence, row)
            self.count += held_by(row)
            for each in _with_locks(row):
                self._tables.setdefault(each.table, _Locked()).put(txn_id, each)
        elif isinstance(row, LookedRow):
            sets.looked[writer] = row
        elif not sequence:
            sets.looked.pop(writer, None)

    def _take(self, owner: bytes, row: ReadLockRow) -> None:
        self.count -= held_by(row)
        for each in _with_locks(row):
            self._tables[each.table].take(owner, each)
            if not self._tables[each.table].owners:
                del self._tables[each.table]

    def end(self, txn_id: bytes) -> None:
        """The transaction is over."""
        self.carried.pop(txn_id, None)
        self.snapshots.pop(txn_id, None)
        self.name(txn_id, {})
        sets = self.sets.pop(txn_id, None)
        for row in sets.rows.values() if sets is not None else ():
            self._take(txn_id, row)

    def ranges(self, table: str) -> Counter[bytes]:
        """How many ranges of a table transactions have locked."""
        locked = self._tables.get(table)
        return Counter([txn_id for _, txn_id in locked.ranges] if locked else ())

    def broken(self, table: str, write: Write, by: bytes) -> dict[bytes, BrokenLock]:
        """The transactions whose locks a commit breaks for certain, but for its own.

        A fingerprint is taken for the key: two keys share one in 2^64 cases. Ranges are held against keys that are
        known; where a commit has more, the table's row has its time (`TableRow`).
        """
        found: dict[bytes, BrokenLock] = {}
        locked = self._tables.get(table)
        if locked is None:
            return found
        for point, owner in locked.hit(write):
            if owner not in found:
                key = write.key_of(point)
                found[owner] = BrokenLock(table, key, None, write.timestamp, by)
        for span, owner in locked.ranges if write.points and not write.is_bounded else ():
            key_in = write.key_in(span)
            if key_in is not None:
                found.setdefault(owner, BrokenLock(table, key_in, span, write.timestamp, by))
        found.pop(by, None)
        return found

    def touched(self, table: str, write: Write, by: bytes) -> set[bytes]:
        """The transactions whose locks a commit would break, or may, but for its own."""
        locked = self._tables.get(table)
        if locked is None:
            return set()
        if write.is_unknown:
            return locked.owners.keys() - {by}
        found = {owner for _, owner in locked.hit(write)}
        found.update(owner for span, owner in locked.ranges if write.touches(span))
        return found - {by}
