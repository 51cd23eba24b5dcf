"""The in-memory `Table`: sorted bytes, as a crash of its process or its disk leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile

from anabranch.ports import TableError
from anabranch.testing.rows import SortedRows

OnCall = Callable[[str, str], None]


class MemoryStore:
    """A disk: rows outlive the process that wrote them.

    `snapshot` and `restore` set it back to an earlier state, as a disk that lost its last writes, or
    that was copied; each write is whole or not there.
    """

    def __init__(self) -> None:
        self._rows = SortedRows()
        self._owner: str | None = None

    def open(self, process: str, *, on_call: OnCall | None = None) -> MemoryTable:
        """Open it for one process.

        Raises:
            TableError: another process has it open.
        """
        if self._owner is not None:
            raise TableError(f"the table is open in {self._owner}: only one process may have it")
        self._owner = process
        return MemoryTable(self, process, on_call)

    def release(self) -> None:
        """The process that had it open is dead: its lock is gone, and its table can't write any more."""
        self._owner = None

    def snapshot(self) -> dict[bytes, bytes]:
        """All rows as they are now."""
        return self._rows.copy()

    def restore(self, rows: Mapping[bytes, bytes]) -> None:
        """Set all rows."""
        self._rows = SortedRows(rows)

    # -- for the table --------------------------------------------------------------------------------

    def is_owned_by(self, process: str) -> bool:
        """Whether this process holds the lock."""
        return self._owner == process

    def row(self, key: bytes) -> bytes | None:
        """The value, or None."""
        return self._rows.get(key)

    def rows_from(self, prefix: bytes, first: bytes) -> list[tuple[bytes, bytes]]:
        """A copy of all rows with that prefix from the key ``first`` on, in key order."""
        rows = self._rows.scan(max(prefix, first))
        return list(takewhile(lambda row: row[0].startswith(prefix), rows))

    def rows_below(self, before: bytes) -> list[tuple[bytes, bytes]]:
        """A copy of all rows with a lower key, the highest first."""
        return list(self._rows.scan_back(before))

    def change(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put and delete."""
        self._rows.change(changes)


class MemoryTable:
    """`anabranch.ports.Table` in memory. Made by `MemoryStore.open`.

    ``on_call(process, name)`` comes before and (``.after``) after the effect of each write, and before
    each read: a simulator's place to switch, crash the process or raise `TableError`.
    """

    def __init__(self, store: MemoryStore, process: str, on_call: OnCall | None) -> None:
        self._store = store
        self._process = process
        self._on_call = on_call
        self._open = True

    def get(self, key: bytes) -> bytes | None:
        self._enter("table.get")
        return self._store.row(key)

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        self._enter("table.scan")
        return iter(self._store.rows_from(prefix, first))

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._enter("table.scan")
        return iter(self._store.rows_below(before))

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        self._enter("table.write")
        # Taken now, as a write batch takes them: the hook after it may change the caller's mapping.
        self._store.change(changes)
        self._called("table.write.after")

    def close(self) -> None:
        if self._open and self._store.is_owned_by(self._process):
            self._store.release()
        self._open = False

    def _enter(self, name: str) -> None:
        self._called(name)
        if not self._open or not self._store.is_owned_by(self._process):
            raise TableError("the table is closed")

    def _called(self, name: str) -> None:
        if self._on_call is not None:
            self._on_call(self._process, name)
