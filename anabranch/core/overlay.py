"""Pending changes of a table, which reads see before they are written to it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

_FEW = 32  # fresh keys up to this many are inserted one by one; more are sorted in


class Rows(Protocol):
    """The calls of a table that the core makes; `anabranch.ports.Table` has them."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]: ...

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]: ...


class Overlay:
    """Rows as they will be once the pending changes are written."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._changes: dict[bytes, bytes | None] = {}
        self.bytes = 0  # of values that were set since the last `take`
        self._order: list[bytes] = []  # the changed keys, sorted, without the fresh ones
        self._fresh: list[bytes] = []
        # The last key that was not found: a new row is looked up before `set`, and again in it.
        self._missed: bytes | None = None

    def get(self, key: bytes) -> bytes | None:
        if key in self._changes:
            return self._changes[key]
        if key == self._missed:
            return None
        value = self._rows.get(key)
        if value is None:
            self._missed = key
        return value

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        over = self._changed_keys(prefix, first)
        at = 0
        for key, value in self._rows.scan(prefix, first):
            while at < len(over) and over[at] < key:
                yield from self._changed(over[at])
                at += 1
            if at < len(over) and over[at] == key:
                yield from self._changed(key)
                at += 1
            else:
                yield key, value
        for key in over[at:]:
            yield from self._changed(key)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._put_in_order()
        over = self._order[: bisect_left(self._order, before)]
        for key, value in self._rows.scan_back(before):
            while over and over[-1] > key:
                yield from self._changed(over.pop())
            if over and over[-1] == key:
                yield from self._changed(over.pop())
            else:
                yield key, value
        while over:
            yield from self._changed(over.pop())

    def _put_in_order(self) -> None:
        """Sort the fresh keys into the order: a big round often scans many changes."""
        if len(self._fresh) > _FEW:
            self._order = sorted((*self._order, *self._fresh))
        else:
            for key in self._fresh:
                insort(self._order, key)
        self._fresh.clear()

    def _changed_keys(self, prefix: bytes, first: bytes) -> list[bytes]:
        self._put_in_order()
        begin = end = bisect_left(self._order, max(prefix, first))
        while end < len(self._order) and self._order[end].startswith(prefix):
            end += 1
        return self._order[begin:end]

    def _changed(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        value = self._changes.get(key)
        if value is not None:
            yield key, value

    def set(self, key: bytes, value: bytes | None) -> None:
        """Put, or delete where ``value`` is None."""
        if key not in self._changes:
            self._fresh.append(key)
        self._changes[key] = value
        if value is not None:
            self.bytes += len(value)

    @property
    def size(self) -> int:
        """The number of changes."""
        return len(self._changes)

    def take(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call; the caller must write them to the table before it continues."""
        taken, self._changes, self.bytes = self._changes, {}, 0
        self._order.clear()
        self._fresh.clear()
        self._missed = None
        return taken
