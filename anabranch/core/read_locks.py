"""Locks on what transactions read of tables: the leader's recent writes (its *window*), and registered locks.

The window alone never refuses a commit. If it cannot decide, the controller asks the client to revalidate its
reads. Registered locks are rows of open transactions: each commit is checked against them.
`docs/inside/tables.md` has the rules.
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
    ReadLockRow,
    TableLocks,
    TxnRow,
    ValidatedRow,
)


@dataclass(slots=True)
class _Table:
    """Writes to one table that are newer than the reach. ``before``: timestamp of the last commit before those."""

    before: int
    writes: deque[Write] = field(default_factory=deque)
    packed: deque[Write] = field(default_factory=deque)
    bounded: deque[Write] = field(default_factory=deque)
    newest: dict[int, int] = field(
        default_factory=dict
    )  # fingerprint -> newest write that is not packed
    fresh: deque[Write] = field(default_factory=deque)  # writes that are not in `newest` yet
    unknown: int = 0  # timestamp of the newest write with unknown keys

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
        """Whether one of these fingerprints was written later than a timestamp."""
        if not points:
            return False
        newest = self.newest
        # Only writes that matter here are hashed: older ones may never be asked for.
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
    """Recent writes by table: all that are later than ``reach``.

    A new leader's reach is the hybrid time that it folded, because it has not seen the writes before.
    """

    reach: int = 0
    limit: int = WINDOW_BYTES
    size: int = 0
    _tables: dict[str, _Table] = field(default_factory=dict)
    _order: deque[str] = field(default_factory=deque)  # the tables of all writes, the oldest first

    def draft(self) -> WindowDraft:
        """A draft for the writes of a round."""
        return WindowDraft(self)

    def follow(self, draft: WindowDraft) -> None:
        """Add the writes of a round that is committed."""
        for table, its in draft.tables.items():
            known = self._tables.setdefault(table, _Table(its.before))
            for write in its.writes:
                known.add(write)
                self.size += write.size
        self._order.extend(draft.order)
        while self.size > self.limit:
            oldest = self._order.popleft()
            if (
                oldest in self._tables and self._tables[oldest].writes
            ):  # otherwise the table was forgotten
                write = self._tables[oldest].drop_oldest()
                self.size -= write.size
                self.reach = max(self.reach, write.timestamp)

    def forget(self, table: str) -> None:
        """Drop a deleted table. Locks on it are older than any table that is created with its name later."""
        gone = self._tables.pop(table, None)
        if gone is not None:
            self.size -= sum(write.size for write in gone.writes)
            self._order = deque(name for name in self._order if name != table)

    def table(self, name: str) -> _Table | None:
        """A table's writes; None if it has no writes later than the reach."""
        return self._tables.get(name)


@dataclass(slots=True)
class WindowDraft:
    """A round's writes to tables, searched together with the window that they will be added to."""

    base: Windows
    tables: dict[str, _Table] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def add(self, table: str, write: Write, before: int) -> None:
        """Add a commit. ``before``: timestamp of the table's commit before it."""
        self.tables.setdefault(table, _Table(before)).add(write)
        self.order.append(table)

    def _known(self, table: str) -> list[_Table]:
        """The parts with writes to a table, the newest part first."""
        return [t for t in (self.tables.get(table), self.base.table(table)) if t]

    def spares(self, locks: TableLocks, through: int) -> bool:
        """Whether it is certain that no commit later than ``through`` broke one of these locks without being
        logged.

        The answer is yes if the window has all these commits with their keys, or with bounds that enclose no locked
        range.
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
        """Whether it is certain that nothing locked was written later than ``since``. ``last``: timestamp of the
        table's newest commit.
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
    """The writes later than a timestamp, the newest first."""
    return takewhile(lambda write: write.timestamp > timestamp, reversed(writes))


def _newest_at(known: Iterable[_Table], timestamp: int) -> int:
    """The newest commit at or below a timestamp; the newest part of what is known comes first."""
    found = 0
    for its in known:
        found = its.newest_at(timestamp)
        if its.writes and its.writes[0].timestamp <= timestamp:
            break
    return found


# Bounded commits that are compared; a validation by the client is cheaper than more.
MOST_BOUNDED = 100


@dataclass(slots=True)
class Sets:
    """Registered locks of an open transaction, by writer and sequence, and how far each writer's are validated.

    ``count``: the number of locks, as `held_by` counts them.
    """

    rows: dict[tuple[int, int], ReadLockRow] = field(default_factory=dict)
    validated: dict[int, ValidatedRow] = field(default_factory=dict)
    count: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by writer

    def put(self, writer: int, sequence: int, row: ReadLockRow) -> None:
        """Add a set."""
        self.rows[writer, sequence] = row
        self.count += held_by(row)
        self._last[writer] = max(sequence, self.last(writer))

    def take(self, writer: int, sequence: int) -> ReadLockRow | None:
        """Remove a set and return it; None if it is not there."""
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
        return [*self.rows, *((writer, 0) for writer in self.validated)]

    def last(self, writer: int) -> int:
        """The sequence of a writer's last set; 0 if it has no set."""
        return self._last.get(writer, 0)


def count_of(locks: Iterable[TableLocks]) -> int:
    """The number of points and ranges."""
    return sum([len(each.points) + len(each.ranges) for each in locks])


def held_by(row: ReadLockRow) -> int:
    """The size of a set: its locks, tables named without a lock, and writers that it was read from."""
    named = sum([not (each.points or each.ranges) for each in row.locks])
    return count_of(row.locks) + named + len(row.read_from)


def _with_locks(row: ReadLockRow) -> Iterator[TableLocks]:
    """The tables of a set with locks. A client may also name tables without a lock."""
    return (each for each in row.locks if each.points or each.ranges)


@dataclass(slots=True)
class _Locked:
    """The registered locks on one table. ``owners``: the number of locks of each transaction."""

    points: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    ranges: list[tuple[LockedRange, bytes]] = field(default_factory=list)
    owners: Counter[bytes] = field(default_factory=Counter)

    def put(self, owner: bytes, locks: TableLocks) -> None:
        alone = (owner,)  # one shared tuple for all points
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
        if gone := Counter(
            locks.ranges
        ):  # another writer of the transaction may have locked the same range
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
        """The locked points that a write contains, with the transactions that locked them."""
        few: Iterable[int] = write.points or ()
        if len(write.points or ()) > len(self.points):  # so 10 million writes need no loop
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
    frozen: dict[bytes, bool] = field(default_factory=dict)  # transactions whose locks are frozen
    count: int = 0
    _tables: dict[str, _Locked] = field(default_factory=dict)

    def clear(self) -> None:
        for kept in (
            self.sets, self.snapshots, self.readers, self.named, self.frozen, self._tables,
        ):  # fmt: skip
            kept.clear()
        self.count = 0

    def of(self, txn_id: bytes) -> Sets:
        """A transaction's locks, perhaps none."""
        return self.sets.get(txn_id) or Sets()

    def follow(self, txn_id: bytes, row: TxnRow) -> None:
        """Follow the row of an open transaction. A PREPARED one does not read any more."""
        if row.snapshot and row.state != "PREPARED":
            self.snapshots[txn_id] = row.snapshot
        else:
            self.snapshots.pop(txn_id, None)
        if row.state == "FINALIZE_IN_PROGRESS":
            self.frozen[txn_id] = True

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

    def derive(
        self, txn_id: bytes, identifier: bytes, row: ReadLockRow | ValidatedRow | None
    ) -> None:
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
        elif isinstance(row, ValidatedRow):
            sets.validated[writer] = row
        elif not sequence:
            sets.validated.pop(writer, None)

    def _take(self, owner: bytes, row: ReadLockRow) -> None:
        self.count -= held_by(row)
        for each in _with_locks(row):
            self._tables[each.table].take(owner, each)
            if not self._tables[each.table].owners:
                del self._tables[each.table]

    def end(self, txn_id: bytes) -> None:
        """Drop a transaction that ended."""
        self.frozen.pop(txn_id, None)
        self.snapshots.pop(txn_id, None)
        self.name(txn_id, {})
        sets = self.sets.pop(txn_id, None)
        for row in sets.rows.values() if sets is not None else ():
            self._take(txn_id, row)

    def ranges(self, table: str) -> Counter[bytes]:
        """The number of locked ranges of a table, by transaction."""
        locked = self._tables.get(table)
        return Counter([txn_id for _, txn_id in locked.ranges] if locked else ())

    def broken(self, table: str, write: Write, by: bytes) -> dict[bytes, BrokenLock]:
        """The other transactions whose locks a commit breaks for certain.

        Equal fingerprints count as equal keys: two keys share one in 2^64 cases. Ranges are compared with known
        keys; if a commit has more keys, the table's row has its time (`TableRow`).
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
        """The other transactions whose locks a commit breaks, or may break."""
        locked = self._tables.get(table)
        if locked is None:
            return set()
        if write.is_unknown:
            return locked.owners.keys() - {by}
        found = {owner for _, owner in locked.hit(write)}
        found.update(owner for span, owner in locked.ranges if write.touches(span))
        return found - {by}
