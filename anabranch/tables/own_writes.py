"""The rows that a transaction wrote, which lie over its snapshot: here those in memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from anabranch.errors import EventTooLarge
from anabranch.schemas.records import WriterAt

OWN_BYTES = 64 << 20  # of rows in memory, about
_ROW_BYTES = 150


class Written(NamedTuple):
    """A row that the transaction wrote. ``value`` None: deleted. ``by``: another of its writers, which wrote it."""

    value: bytes | None
    by: WriterAt | None = None


class OwnRows(Protocol):
    """A transaction's own writes, of this process and of others."""

    def get(self, table: str, key: bytes) -> Written | None:
        """The last write to a key; None: there is none."""

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        """Keys of [low, high) that were written, in their order. Later writes are not seen."""

    def check_room(self, table: str, key: bytes, value: bytes | None) -> None:
        """`EventTooLarge`: there is no room for this write."""

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Note a write of this process."""


class InMemory:
    """The writes of this process, in memory."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, bytes | None]] = {}
        self._keys: dict[str, list[bytes]] = {}  # rising
        self._bytes = 0

    def get(self, table: str, key: bytes) -> Written | None:
        rows = self._rows.get(table, {})
        return Written(rows[key]) if key in rows else None

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        keys = self._keys.get(table, [])
        end = len(keys) if high is None else bisect_left(keys, high)
        found = keys[bisect_left(keys, low) : end]
        rows = self._rows.get(table, {})
        return iter([(key, Written(rows[key])) for key in (found[::-1] if reverse else found)])

    def _more(self, table: str, key: bytes, value: bytes | None) -> int:
        rows = self._rows.get(table, {})
        more = len(value or b"") - len(rows.get(key) or b"")
        return more if key in rows else more + len(key) + _ROW_BYTES

    def check_room(self, table: str, key: bytes, value: bytes | None) -> None:
        if self._bytes + self._more(table, key, value) > OWN_BYTES:
            raise EventTooLarge(
                f"the rows that this process wrote in the transaction take {OWN_BYTES >> 20} MiB of memory: commit "
                "it, or write the rest by another process that joins it"
            )

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        self._bytes += self._more(table, key, value)
        rows = self._rows.setdefault(table, {})
        if key not in rows:
            insort(self._keys.setdefault(table, []), key)
        rows[key] = value
