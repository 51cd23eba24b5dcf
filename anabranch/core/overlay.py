"""Changes that lie over a table until they are written to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Rows(Protocol):
    """What the core reads; `anabranch.ports.Table` fits."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]: ...


class Overlay:
    """Rows as they will be once the pending changes are written."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._changes: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        if key in self._changes:
            return self._changes[key]
        return self._rows.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        over = sorted(key for key in self._changes if key.startswith(prefix))
        at = 0
        for key, value in self._rows.scan(prefix):
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

    def _changed(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        value = self._changes.get(key)
        if value is not None:
            yield key, value

    def set(self, key: bytes, value: bytes | None) -> None:
        """Put, or delete where ``value`` is None."""
        self._changes[key] = value

    def take(self) -> dict[bytes, bytes | None]:
        """The changes since the last call, for the caller to write to the table before it goes on."""
        taken, self._changes = self._changes, {}
        return taken
