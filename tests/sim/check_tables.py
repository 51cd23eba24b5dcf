"""One serial order of tables: commits are replayed by their timestamps, and all reads held against that."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

from anabranch.core.ids import NO_TXN
from anabranch.errors import LocksBroken
from tests.sim.check_log import hold
from tests.sim.tables import LEAST, PAIR, TABLES, Done, Noted, Read, number_of

if TYPE_CHECKING:
    from tests.sim.picture import Picture

Row = tuple[int, bytes, bytes | None]  # since, by, value


class Versions:
    """All versions of all rows, by the COMMIT records alone."""

    def __init__(self, picture: Picture) -> None:
        self._rows: dict[str, dict[bytes, list[Row]]] = {table: {} for table in TABLES}
        self.times: dict[bytes, int] = {}
        self.pairs: set[int] = set()
        for table, _, commit in picture.commits():
            if table not in self._rows:
                continue
            if commit.txn_id != NO_TXN:
                self.times[commit.txn_id] = commit.timestamp
            written: dict[bytes, bytes | None] = {}
            for part in commit.segments:
                for event in picture.events[table, part.partition]:
                    if part.first <= event.offset < part.end and event.record.key:
                        written[event.record.key] = event.record.value
            for key, value in written.items():
                row = commit.timestamp, commit.txn_id, value
                self._rows[table].setdefault(key, []).append(row)
                if key == PAIR:
                    self.pairs.add(commit.timestamp)

    def value(self, table: str, key: bytes, at: int) -> bytes | None:
        """A row as of a time."""
        rows = self._rows[table].get(key, [])
        found = bisect_right(rows, at, key=lambda row: row[0])
        return rows[found - 1][2] if found else None

    def due(self, read: Read, at: int) -> tuple[tuple[bytes, bytes], ...]:
        """What a read has to give as of a time."""
        keys: Iterable[bytes] = [read.low]
        if read.limit:
            below = read.high or b"\xff"
            keys = sorted(self._rows[read.table], reverse=read.reverse)
            keys = [key for key in keys if read.low <= key < below]
        found = [(key, self.value(read.table, key, at)) for key in keys]
        return tuple((key, v) for key, v in found if v is not None)[: read.limit or 1]

    def is_broken(self, error: LocksBroken, since: int) -> bool:
        """Whether the row that the error names was written then, by this transaction, above the snapshot."""
        rows = self._rows[error.table].get(error.key, [])
        found = bisect_left(rows, error.commit_timestamp, key=lambda row: row[0])
        at = error.commit_timestamp
        who = {b"", rows[found][1]} if found < len(rows) else set()  # perhaps it may not be known
        return error.by in who and rows[found][0] == at > since


def check_tables(picture: Picture, noted: Noted) -> int:
    """All reads are what stood at their snapshot, and just below the commit; returns how many were judged."""
    versions = Versions(picture)
    judged = 0
    for done in noted.done:
        _check_reads(versions, done, done.at, "its snapshot")
        own = versions.times.get(done.txn_id) if done.txn_id else None
        if own is not None:
            _check_reads(versions, done, own - 1, "its commit")
            judged += len(done.reads)
        if done.read_only:
            _check_reads(versions, done, done.read_only - 1, "its end")
        if done.txn_id and done.told:
            hold(done.told == own, f"{done.txn_id.hex()}: told {done.told}, and the log says {own}")
        if done.error is not None:
            hold(own is None, f"{done.error!r}, and it is committed")
            real = not isinstance(done.error, LocksBroken) or versions.is_broken(
                done.error, done.at
            )
            hold(real, f"no such write, or its own: {done.error!r}")
    for at in sorted(versions.pairs):
        both = sum(number_of(versions.value(table, PAIR, at)) for table in TABLES)
        hold(both >= LEAST, f"write skew: the pair is {both} at {at}")
    return judged


def _check_reads(versions: Versions, done: Done, at: int, what: str) -> None:
    who = done.txn_id.hex() if done.txn_id else "a reader"
    for read in done.reads:
        due = versions.due(read, at)
        hold(read.rows == due, f"{who} at {done.at}: {read}, and as of {what} {at}: {due}")


def take_out(picture: Picture) -> None:
    """The rest of the checks knows nothing of tables."""
    for table in TABLES:
        picture.history.pop(table, None)
    for place in [place for place in picture.events if place[0] in TABLES]:
        del picture.events[place]
