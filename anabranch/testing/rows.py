"""Rows in memory, in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping


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
