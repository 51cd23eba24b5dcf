"""Rows and marks of a replica, collected for one write."""

from __future__ import annotations

from collections.abc import Iterable

from rocksdict import WriteBatch

from anabranch.core.ids import VERSION_HEADER, unpack_version
from anabranch.tables.indexes import Indexes, entries_of
from anabranch.tables.layout import DELETED, THERE, Mark, entry, place, suffix, table_prefix

BaseEvent = tuple[bytes | None, bytes | None, Iterable[tuple[str, bytes | None]]]  # with headers


class Rows:
    """Rows and marks for one `Store.write`."""

    def __init__(self) -> None:
        self.batch = WriteBatch(raw_mode=True)
        self.marks: dict[str, Mark] = {}
        self.rows = 0

    def add(
        self,
        number: int,
        txn_id: bytes,
        timestamp: int,
        keys: Iterable[bytes | None],
        values: Iterable[bytes | None],
        indexes: Indexes = (),
    ) -> None:
        """Add versions of a commit. Events without a key are skipped. ``indexes``: with their prefixes."""
        put, before, after = self.batch.put, table_prefix(number), suffix(timestamp)
        there, deleted = txn_id + THERE, txn_id + DELETED
        for key, value in zip(keys, values, strict=True):
            if key is not None:
                if indexes and value is not None:
                    self._index(key, value, indexes)
                if 0 in key:  # a tenth of the time of `b"\0" in key`
                    key = key.replace(b"\0", b"\0\xff")
                put(before + key + after, deleted if value is None else there + value)
        self.rows = self.batch.len()

    def add_base(self, number: int, events: Iterable[BaseEvent], indexes: Indexes = ()) -> None:
        """Add rows of a base, each with its own commit. `MalformedRecord`: an event without a commit."""
        put, before = self.batch.put, table_prefix(number)
        for key, value, headers in events:
            if key is not None and value is not None:
                timestamp, txn_id = unpack_version(dict(headers).get(VERSION_HEADER))
                if indexes:
                    self._index(key, value, indexes)
                put(place(before, key) + suffix(timestamp), txn_id + THERE + value)
        self.rows = self.batch.len()

    def _index(self, key: bytes, row: bytes, indexes: Indexes) -> None:
        for prefix, value in entries_of(indexes, key, row):
            self.batch.put(entry(prefix, value, key), b"")

    @property
    def size(self) -> int:
        """The bytes of all rows and marks."""
        return self.batch.size_in_bytes()
