"""The recent writes to tables, a memory of the leader by which it decides whether locks hold.

They never refuse a commit by themselves. If they can't show that a lock holds, the client is asked to revalidate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from anabranch.core.locks.table_writes import WINDOW_BYTES, Write, fingerprint
from anabranch.protocol.schemas import records as r

# At most this many bounded writes are compared with ranges: for more, a client's validation is cheaper.
MOST_BOUNDED = 100
# About how much memory numbers in rows take at most, and how much each number takes, without its key.
NUMBERS_BYTES = 16 << 20
_NUMBER_BYTES = 250

Row = tuple[str, bytes]  # table, key


class Number(NamedTuple):
    """The number that a change left in a row (`anabranch.core.locks.row_changes`), and its commit timestamp."""

    value: int
    timestamp: int


@dataclass(slots=True)
class _Table:
    """Writes to one table later than the reach, oldest first. ``before``: timestamp of the last commit before them.

    ``packed``, ``bounded``: the packed and the bounded ones among ``writes``. ``newest``: fingerprint -> timestamp
    of its newest write, without packed and ``fresh`` writes. ``unknown``: timestamp of the newest write with
    unknown keys.
    """

    before: int
    writes: deque[Write] = field(default_factory=deque)
    packed: deque[Write] = field(default_factory=deque)
    bounded: deque[Write] = field(default_factory=deque)
    newest: dict[int, int] = field(default_factory=dict)
    fresh: deque[Write] = field(default_factory=deque)
    unknown: int = 0

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
        # Older writes are not hashed, because no lock may ever need them.
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
        """The timestamp of the newest commit at or before a timestamp."""
        for write in reversed(self.writes):
            if write.timestamp <= timestamp:
                return write.timestamp
        return self.before


@dataclass(slots=True)
class RecentWrites:
    """Recent writes by table: all that are later than ``reach``.

    A new leader's reach is the hybrid time that it read from the log, because it has not seen earlier writes.
    ``numbers``: the numbers that changes left in rows; the latest change is last.
    """

    reach: int = 0
    limit: int = WINDOW_BYTES
    size: int = 0
    numbers: dict[Row, Number] = field(default_factory=dict)
    numbers_size: int = 0
    _tables: dict[str, _Table] = field(default_factory=dict)
    _order: deque[str] = field(default_factory=deque)  # the tables of all writes, the oldest first

    def draft(self) -> RecentWritesDraft:
        return RecentWritesDraft(self)

    def follow(self, draft: RecentWritesDraft) -> None:
        """Add the writes of a round that is committed."""
        for table, its in draft.tables.items():
            known = self._tables.setdefault(table, _Table(its.before))
            for write in its.writes:
                known.add(write)
                self.size += write.size
        self._remember(draft.numbers)
        self._order.extend(draft.order)
        while self.size > self.limit:
            oldest = self._order.popleft()
            # Otherwise the table was forgotten.
            if oldest in self._tables and self._tables[oldest].writes:
                write = self._tables[oldest].drop_oldest()
                self.size -= write.size
                self.reach = max(self.reach, write.timestamp)

    def _remember(self, numbers: dict[Row, Number]) -> None:
        known = self.numbers
        for row, number in numbers.items():
            if known.pop(row, None) is None:
                self.numbers_size += _NUMBER_BYTES + len(row[1])
            known[row] = number
        while self.numbers_size > NUMBERS_BYTES:
            self._drop(next(iter(known)))

    def _drop(self, row: Row) -> None:
        del self.numbers[row]
        self.numbers_size -= _NUMBER_BYTES + len(row[1])

    def forget(self, table: str) -> None:
        """Drop a deleted table. Locks on it stay older than a table that is created with its name later."""
        for row in [row for row in self.numbers if row[0] == table]:
            self._drop(row)
        gone = self._tables.pop(table, None)
        if gone is not None:
            self.size -= sum(write.size for write in gone.writes)
            self._order = deque(name for name in self._order if name != table)

    def table(self, name: str) -> _Table | None:
        """A table's writes; None if it has no writes later than the reach."""
        return self._tables.get(name)


@dataclass(slots=True)
class RecentWritesDraft:
    """A round's writes to tables, searched together with the recent writes to which they will be added.

    ``former``: the writes of the round before, while that is being written.
    """

    base: RecentWrites
    former: RecentWritesDraft | None = None
    tables: dict[str, _Table] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    numbers: dict[Row, Number] = field(default_factory=dict)

    def draft(self) -> RecentWritesDraft:
        return RecentWritesDraft(self.base, self)

    def rebase(self) -> None:
        """Note that the former writes were added to the recent ones."""
        self.former = None

    def add(self, table: str, write: Write, before: int) -> None:
        """Add a commit. ``before``: timestamp of the table's commit before it."""
        self.tables.setdefault(table, _Table(before)).add(write)
        self.order.append(table)

    def keep_number(self, row: Row, number: Number) -> None:
        """Note the number that a change left in a row."""
        self.numbers.pop(row, None)
        self.numbers[row] = number

    def number(self, row: Row) -> int | None:
        """The number that a change left in a row; None if none did, or if a later commit may have written it."""
        found = self.numbers.get(row)
        if found is None and self.former is not None:
            found = self.former.numbers.get(row)
        if found is None:
            found = self.base.numbers.get(row)
        if found is None or self._may_be_later(row, found.timestamp):
            return None
        return found.value

    def _may_be_later(self, row: Row, timestamp: int) -> bool:
        """Whether a commit later than a timestamp may have written a row."""
        if timestamp < self.base.reach:
            return True
        point = (fingerprint(row[1]),)
        return any(
            its.unknown > timestamp or its.has(point, timestamp) for its in self._known(row[0])
        )

    def _known(self, table: str) -> list[_Table]:
        """A table's writes in this round, then those before."""
        former = None if self.former is None else self.former.tables.get(table)
        return [t for t in (self.tables.get(table), former, self.base.table(table)) if t]

    def spares(self, locks: r.TableLocks, through: int) -> bool:
        """Whether it is certain that no commit later than ``through`` broke one of these locks unnoticed.

        Breaks that are certain are noticed (`hold_against`). So the answer is yes if the recent writes have all
        these commits with their keys, or with bounds that enclose no locked range.
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

    def holds(self, locks: r.TableLocks, last: int) -> bool:
        """Whether it is certain that no locked row was written later than ``locks.since``.

        ``last``: timestamp of the table's newest commit.
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
    """The newest commit at or before a timestamp. ``known``: as of `RecentWritesDraft._known`."""
    found = 0
    for its in known:
        found = its.newest_at(timestamp)
        if its.writes and its.writes[0].timestamp <= timestamp:
            break
    return found
