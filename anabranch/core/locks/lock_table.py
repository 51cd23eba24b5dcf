"""Registered locks: a view of the rows of open transactions against which each commit is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from anabranch.core import rows as k
from anabranch.core.locks.table_writes import Write
from anabranch.protocol.schemas import records as r


@dataclass(slots=True)
class TxnLocks:
    """The registered sets of locks of an open transaction, by writer and sequence.

    ``validated``: writer -> how far its sets are validated. ``count``: the sum of `held_by`.
    """

    rows: dict[tuple[int, int], r.ReadLockRow] = field(default_factory=dict)
    validated: dict[int, r.ValidatedRow] = field(default_factory=dict)
    count: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by writer

    def put(self, writer: int, sequence: int, row: r.ReadLockRow) -> None:
        self.rows[writer, sequence] = row
        self.count += held_by(row)
        self._last[writer] = max(sequence, self.last(writer))

    def take(self, writer: int, sequence: int) -> r.ReadLockRow | None:
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
        """(writer, sequence) of all rows, including each `ValidatedRow`, whose sequence is 0."""
        return [*self.rows, *((writer, 0) for writer in self.validated)]

    def last(self, writer: int) -> int:
        """The sequence of a writer's last set; 0 if it has no set."""
        return self._last.get(writer, 0)


def count_of(locks: Iterable[r.TableLocks]) -> int:
    """The number of points and ranges."""
    return sum([len(each.points) + len(each.ranges) for each in locks])


def bytes_of(locks: Iterable[r.TableLocks]) -> int:
    """The bytes of the locks: of their fingerprints, and of the bounds of their ranges."""
    size = 0
    for each in locks:
        size += 8 * len(each.points)
        size += sum([len(span.low) + len(span.high or b"") for span in each.ranges])
    return size


def held_by(row: r.ReadLockRow) -> int:
    """The size of a set: its locks, its tables without a lock, and the writers whose events were read."""
    named = sum([not (each.points or each.ranges) for each in row.locks])
    return count_of(row.locks) + named + len(row.read_from)


def _with_locks(row: r.ReadLockRow) -> Iterator[r.TableLocks]:
    """The tables of a set that have locks. A client may also name tables without a lock."""
    return (each for each in row.locks if each.points or each.ranges)


@dataclass(slots=True)
class _Locked:
    """The registered locks on one table. ``owners``: the number of locks of each transaction."""

    points: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    ranges: list[tuple[r.LockedRange, bytes]] = field(default_factory=list)
    owners: Counter[bytes] = field(default_factory=Counter)

    def put(self, owner: bytes, locks: r.TableLocks) -> None:
        alone = (owner,)  # one shared tuple for all points
        for point in locks.points:
            others = self.points.get(point)
            self.points[point] = alone if others is None else (*others, owner)
        self.ranges += [(span, owner) for span in locks.ranges]
        self.owners[owner] += count_of((locks,))

    def take(self, owner: bytes, locks: r.TableLocks) -> None:
        for point in locks.points:
            rest = list(self.points.pop(point))
            rest.remove(owner)
            if rest:
                self.points[point] = tuple(rest)
        # Counted, because another writer of the transaction may have locked the same range.
        if gone := Counter(locks.ranges):
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
        if len(write.points or ()) > len(self.points):  # so 10 million written keys need no loop
            few = filter(write.has, self.points)
        for point in few:
            for owner in self.points.get(point, ()):
                yield point, owner


_NO_LOCKS = TxnLocks()


@dataclass(slots=True)
class LockTable:
    """The registered locks of all open transactions."""

    sets: dict[bytes, TxnLocks] = field(default_factory=dict)
    # Transaction -> snapshot, of transactions that read.
    snapshots: dict[bytes, int] = field(default_factory=dict)
    # Table -> transaction that reads the table -> the lane that named it; and transaction -> table -> lane.
    readers: dict[str, dict[bytes, str]] = field(default_factory=dict)
    named: dict[bytes, Mapping[str, str]] = field(default_factory=dict)
    # Transactions with frozen locks: they can't be aborted, as their merge is staged or their coordinator decides.
    # ``holding``: the frozen ones that have locks at all.
    frozen: dict[bytes, bool] = field(default_factory=dict)
    holding: dict[bytes, bool] = field(default_factory=dict)
    count: int = 0
    _tables: dict[str, _Locked] = field(default_factory=dict)

    def clear(self) -> None:
        for kept in (
            self.sets, self.snapshots, self.readers, self.named, self.frozen, self.holding, self._tables,
        ):  # fmt: skip
            kept.clear()
        self.count = 0

    def of(self, txn_id: bytes) -> TxnLocks:
        """A transaction's locks, empty if it has none. The caller does not change them."""
        return self.sets.get(txn_id, _NO_LOCKS)

    def follow(self, txn_id: bytes, row: r.TxnRow, *, merged: bool) -> None:
        """Follow the row of an open transaction. A PREPARED transaction does not read any more.

        ``merged``: all that it does here is done, and it waits for other control partitions.
        """
        if row.snapshot and row.state != "PREPARED":
            self.snapshots[txn_id] = row.snapshot
        else:
            self.snapshots.pop(txn_id, None)
        if row.state in ("FINALIZE_IN_PROGRESS", "PREPARED") and not merged:
            self.frozen[txn_id] = True
            self._note_holding(txn_id)
        else:
            self.frozen.pop(txn_id, None)
            self.holding.pop(txn_id, None)

    def _note_holding(self, txn_id: bytes) -> None:
        if txn_id in self.frozen and self.of(txn_id).rows:
            self.holding[txn_id] = True

    def name(self, txn_id: bytes, tables: Mapping[str, str]) -> None:
        """Follow the `ReadsRow` of a transaction: the tables that it reads, each with the lane that named it."""
        for table in self.named.pop(txn_id, {}):
            del self.readers[table][txn_id]
            if not self.readers[table]:
                del self.readers[table]
        if tables:
            self.named[txn_id] = tables
        for table, lane in tables.items():
            self.readers.setdefault(table, {})[txn_id] = lane

    def derive(
        self, txn_id: bytes, identifier: bytes, row: r.ReadLockRow | r.ValidatedRow | None
    ) -> None:
        """Follow a row of locks of an open transaction."""
        writer, sequence = k.read_lock_of(identifier)
        sets = self.sets.setdefault(txn_id, TxnLocks())
        former = sets.take(writer, sequence)
        if former is not None:
            self._take(txn_id, former)
        if isinstance(row, r.ReadLockRow):
            sets.put(writer, sequence, row)
            self.count += held_by(row)
            for each in _with_locks(row):
                self._tables.setdefault(each.table, _Locked()).put(txn_id, each)
            self._note_holding(txn_id)
        elif isinstance(row, r.ValidatedRow):
            sets.validated[writer] = row
        elif not sequence:
            sets.validated.pop(writer, None)

    def _take(self, owner: bytes, row: r.ReadLockRow) -> None:
        self.count -= held_by(row)
        for each in _with_locks(row):
            self._tables[each.table].take(owner, each)
            if not self._tables[each.table].owners:
                del self._tables[each.table]

    def end(self, txn_id: bytes) -> None:
        self.frozen.pop(txn_id, None)
        self.holding.pop(txn_id, None)
        self.snapshots.pop(txn_id, None)
        self.name(txn_id, {})
        sets = self.sets.pop(txn_id, None)
        for row in sets.rows.values() if sets is not None else ():
            self._take(txn_id, row)

    def ranges(self, table: str) -> Counter[bytes]:
        """The number of locked ranges of a table, by transaction."""
        locked = self._tables.get(table)
        return Counter([txn_id for _, txn_id in locked.ranges] if locked else ())

    def conflicts(self, table: str, write: Write, by: bytes) -> dict[bytes, r.BrokenLock]:
        """The transactions other than ``by`` whose locks a commit breaks for certain.

        Equal fingerprints count as equal keys: two keys have the same fingerprint in one of 2^64 cases. Ranges are
        compared with keys; if of a commit's keys the bounds alone are known, the table's row has its time
        (`TableRow`).
        """
        found: dict[bytes, r.BrokenLock] = {}
        locked = self._tables.get(table)
        if locked is None:
            return found
        for point, owner in locked.hit(write):
            if owner not in found:
                key = write.key_of(point)
                found[owner] = r.BrokenLock(table, key, None, write.timestamp, by)
        for span, owner in locked.ranges if write.points and not write.is_bounded else ():
            key_in = write.key_in(span)
            if key_in is not None:
                found.setdefault(owner, r.BrokenLock(table, key_in, span, write.timestamp, by))
        found.pop(by, None)
        return found

    def possible_conflicts(self, table: str, write: Write, by: bytes) -> set[bytes]:
        """The transactions other than ``by`` whose locks a commit breaks, or may break."""
        locked = self._tables.get(table)
        if locked is None:
            return set()
        if write.is_unknown:
            return locked.owners.keys() - {by}
        found = {owner for _, owner in locked.hit(write)}
        found.update(owner for span, owner in locked.ranges if write.touches(span))
        return found - {by}
