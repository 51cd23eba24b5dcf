"""Rows in memory, in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, Self

from anabranch.errors import InvalidArgument
from anabranch.reading.history import check_at

Versions = list[tuple[int, bytes | None]]  # commit timestamps, rising, and values


class SortedRows:
    """Values by key: a dict, and its keys in order."""

    def __init__(self, rows: Mapping[bytes, bytes] | None = None) -> None:
        self._values = dict(rows or {})
        self._keys = sorted(self._values)
        self.get = self._values.get

    def change(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Set values; None deletes the key."""
        values, keys = self._values, self._keys
        for key, value in changes.items():
            if value is not None:
                if key not in values:
                    insort(keys, key)
                values[key] = value
            elif values.pop(key, None) is not None:
                del keys[bisect_left(keys, key)]

    def scan(self, low: bytes, high: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Rows from ``low`` up to ``high`` (not included). They must not change meanwhile."""
        keys, values = self._keys, self._values
        end = len(keys) if high is None else bisect_left(keys, high)
        for at in range(bisect_left(keys, low), end):
            key = keys[at]
            yield key, values[key]

    def scan_back(self, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows below ``high``, the highest first. They must not change meanwhile."""
        for at in range(bisect_left(self._keys, high) - 1, -1, -1):
            key = self._keys[at]
            yield key, self._values[key]

    def copy(self) -> dict[bytes, bytes]:
        return dict(self._values)


class MemorySnapshot:
    """Tables as of one moment, read as `anabranch.tables.snapshot.TableSnapshot` is. Locks are always valid."""

    is_over = False

    def __init__(self, tables: Mapping[str, Mapping[bytes, Versions]], timestamp: int) -> None:
        self.timestamp = timestamp
        self._tables = tables

    def get(self, table: str, key: bytes, *, lock: bool = True) -> bytes | None:
        versions = self._table(table).get(key, ())
        return next((value for at, value in reversed(versions) if at <= self.timestamp), None)

    def get_many(self, table: str, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        rows = ((key, self.get(table, key)) for key in keys)
        return {key: value for key, value in rows if value is not None}

    def scan(
        self, table: str, low: bytes | None = None, high: bytes | None = None,
        *, prefix: bytes = b"", reverse: bool = False, limit: int | None = None, lock: bool = True,
    ) -> Iterator[tuple[bytes, bytes]]:  # fmt: skip
        """Rows from ``low`` up to ``high`` (not included), and with a prefix, in the order of keys."""
        keys = sorted(key for key in self._table(table) if key.startswith(prefix))
        inside = keys[
            bisect_left(keys, low or b"") : None if high is None else bisect_left(keys, high)
        ]
        rows = ((key, self.get(table, key)) for key in (inside[::-1] if reverse else inside))
        yield from islice(((key, value) for key, value in rows if value is not None), limit)

    def _table(self, table: str) -> Mapping[bytes, Versions]:
        if table not in self._tables:
            raise InvalidArgument(f"{table} is no table of the program: {', '.join(self._tables)}")
        return self._tables[table]

    def abort(self) -> None:
        """Do nothing: a snapshot holds nothing."""

    close = abort

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: a snapshot holds nothing."""


class MemoryTables:
    """Tables with all their versions: `anabranch.processing.batch.Source`, and a program's replicas."""

    def __init__(self, names: Iterable[str], near: Collection[str]) -> None:
        self.near = near
        self.committed_at = 0
        self._tables: dict[str, dict[bytes, Versions]] = {name: {} for name in names}

    def __contains__(self, table: object) -> bool:
        return table in self._tables

    def write(self, table: str, rows: Mapping[bytes, bytes | None], timestamp: int) -> None:
        """Add versions of rows; None: the row is deleted. Timestamps rise. Raises: InvalidArgument."""
        if table not in self._tables:
            raise InvalidArgument(f"{table} is no table of the program: {', '.join(self._tables)}")
        for key, value in rows.items():
            self._tables[table].setdefault(key, []).append((timestamp, value))
        self.committed_at = timestamp

    def begin(self, least: int) -> MemorySnapshot:
        return MemorySnapshot(self._tables, least)

    def get_at(self, table: str, key: bytes, at: int | datetime) -> bytes | None:
        return self.snapshot(at).get(table, key)

    def snapshot(self, at: int | datetime | None = None, **_: Any) -> MemorySnapshot:
        wanted = check_at(at)
        return MemorySnapshot(self._tables, self.committed_at if wanted is None else wanted)
