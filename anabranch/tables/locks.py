"""The locks of one transaction on tables: what it read, and whether the replica has newer versions of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabranch.core import limits
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import txn_text
from anabranch.core.journal.table_writes import fingerprint
from anabranch.errors import LocksBroken, TooManyLocks
from anabranch.schemas import records as r
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tables.store import Seen

_PARTS = 16  # registered ranges of a scan under way; with more it is registered as a whole


class Span:
    """A range of keys that is being read: it begins as what was read, and grows. ``high`` None: to the end."""

    __slots__ = ("_whole", "high", "low", "registered")

    def __init__(self, low: bytes, high: bytes | None) -> None:
        self.low, self.high = low, high
        self._whole = r.LockedRange(low, high)
        self.registered: list[r.LockedRange] = []

    @property
    def record(self) -> r.LockedRange:
        """The range to be registered now."""
        part = r.LockedRange(self.low, self.high)
        return part if len(self.registered) < _PARTS or part in self.registered else self._whole


class Locks:
    """Points and ranges, by table. One thread at a time."""

    def __init__(self) -> None:
        self._points: dict[str, set[bytes]] = {}
        self._spans: dict[str, list[Span]] = {}
        self._count = 0
        self._registered: set[tuple[str, int]] = set()  # points

    def point(self, table: str, key: bytes) -> None:
        """Lock a key, whether it has a row or not. `TooManyLocks`."""
        points = self._points.setdefault(table, set())
        if key not in points:
            self._one_more()
            points.add(key)

    def span(self, table: str, low: bytes, high: bytes | None) -> Span:
        """Lock a range, which may grow. `TooManyLocks`."""
        self._one_more()
        self._spans.setdefault(table, []).append(span := Span(low, high))
        return span

    def _one_more(self) -> None:
        if self._count >= limits.LOCKS.value:
            raise TooManyLocks(
                f"the transaction has {self._count:,} locks, and may have no more: scan a range instead, or read "
                "with lock=False"
            )
        self._count += 1

    def look(
        self, view: TableSnapshot, marks: Mapping[str, tuple[int, int]] | None = None
    ) -> LocksBroken | None:
        """Validate the locks: the error if the replica has a version later than the snapshot of something locked.

        ``marks``: those of the command, as for `records`. Tables without a commit later than the snapshot are
        skipped: the controller checks what is later than the marks. A table without a mark is being loaded again.
        """
        if marks is not None and all(0 < last <= view.timestamp for _, last in marks.values()):
            return None
        for table, keys in self._points.items():
            for key in keys:
                seen = view.get_version(table, key)
                if seen.timestamp > view.timestamp:
                    return broken(table, seen, view.timestamp)
        for table, spans in self._spans.items():
            for span in spans:
                for seen in view.walk(table, span.low, span.high):
                    if seen.timestamp > view.timestamp:
                        return broken(table, seen, view.timestamp)
        return None

    def fresh(self) -> tuple[r.TableLocks, ...]:
        """Locks that are not registered yet, as many as fit into a command; empty if all are registered."""
        left = limits.LOCK_BYTES.value
        found: list[r.TableLocks] = []
        for table in sorted({*self._points, *self._spans}):
            known = self._registered
            prints = {fingerprint(key) for key in self._points.get(table, ())}
            points = sorted(each for each in prints if (table, each) not in known)[: left // 8]
            left -= 8 * len(points)
            spans = [s.record for s in self._spans.get(table, ()) if s.record not in s.registered]
            ranges: list[r.LockedRange] = []
            for span in joined(spans):
                left -= len(span.low) + len(span.high or b"")
                if left < 0 and (
                    found or points or ranges
                ):  # a single one too big is refused, not skipped
                    break
                ranges.append(span)
            if points or ranges:
                found.append(r.TableLocks(table, 0, 0, tuple(points), tuple(ranges)))
            if left <= 0:
                break
        return tuple(found)

    def registered(self, locks: Iterable[r.TableLocks]) -> None:
        """Note that these locks, and all within them, are registered."""
        for each in locks:
            self._registered.update((each.table, point) for point in each.points)
            for span in self._spans.get(each.table, ()):
                record = span.record
                known = record in span.registered
                if not known and any(_covers(whole, record) for whole in each.ranges):
                    span.registered.append(record)

    def records(
        self, tables: Sequence[str], marks: Mapping[str, tuple[int, int]]
    ) -> tuple[r.TableLocks, ...]:
        """The locks of a command. ``marks``: the time through which the replica validates a table, and its newest
        commit.

        All tables are named, so that the answer has the newest commits also of tables without a lock.
        """
        return tuple(
            r.TableLocks(
                table,
                *marks[table],
                tuple(sorted(set(map(fingerprint, self._points.get(table, ()))))),
                joined(self._spans.get(table, ())),
            )
            for table in sorted(tables)
        )


def _covers(whole: r.LockedRange, part: r.LockedRange) -> bool:
    if whole.low > part.low:
        return False
    return whole.high is None or (part.high is not None and part.high <= whole.high)


def broken(table: str, seen: Seen, snapshot: int) -> LocksBroken:
    """The error for a row that was read at a snapshot, and written later."""
    return LocksBroken(
        f"{table} {seen.key!r:.100} was read as of {to_text(snapshot)}, and written by {txn_text(seen.txn_id)} at "
        f"{to_text(seen.timestamp)}: begin again",
        table=table,
        key=seen.key,
        by=seen.txn_id,
        commit_timestamp=seen.timestamp,
    )


def joined(spans: Iterable[Span | r.LockedRange]) -> tuple[r.LockedRange, ...]:
    """Ranges as a command needs them: rising and disjoint."""
    found: list[r.LockedRange] = []
    for span in sorted(spans, key=lambda span: span.low):
        before = found[-1] if found else None
        if before is None or (before.high is not None and span.low > before.high):
            found.append(r.LockedRange(span.low, span.high))
        elif before.high is not None and (span.high is None or span.high > before.high):
            found[-1] = r.LockedRange(before.low, span.high)
    return tuple(found)
