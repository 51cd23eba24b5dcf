"""The rows that a transaction wrote, which its reads see instead of the snapshot's: those of this process."""

from __future__ import annotations

import shutil
import struct
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

from anabranch.schemas.records import WriterAt
from anabranch.tables.layout import DELETED, THERE
from anabranch.tables.rows import Rows
from anabranch.tables.store import Seen, Store

Writers = Literal["own", "all"]
OWN_BYTES = 64 << 20  # rows in memory, about; more rows go to a temporary folder
_ROW_BYTES = 150
_AT_ONCE = 4096  # rows
_BATCH_BYTES = 8 << 20
_NEWEST = (1 << 63) - 1
_BY = struct.Struct(
    ">qq"
)  # a writer and its receipt's sequence: in place of a row's transaction; 0: this process
T = TypeVar("T")


class Written(NamedTuple):
    """A row that the transaction wrote. ``value`` None: deleted. ``by``: the other writer that wrote it."""

    value: bytes | None
    by: WriterAt | None = None


class OwnRows(Protocol):
    """A transaction's own writes, of this process and of others."""

    def get(self, table: str, key: bytes) -> Written | None:
        """The last write to a key, or None."""

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        """The written keys of [low, high), in their order. Later writes are not seen."""

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Note a write of this process."""

    def refresh(self) -> None:
        """Let the next read see the writes of writers that have finished since."""

    def close(self) -> None:
        """Free everything. Repeating the call is harmless."""


class Scratch:
    """Rows in a temporary folder, as a replica keeps them: the highest version of a key counts."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="anabranch-own-")
        self._store = Store(Path(self._folder), "own")
        self._rows = Rows()

    def add(
        self,
        table: str,
        by: WriterAt | None,
        version: int,
        keys: Iterable[bytes | None],
        values: Iterable[bytes | None],
    ) -> None:
        """Add rows; rows without a value are deletions. They can be read after `write`."""
        stored = (DELETED if value is None else THERE + value for value in values)
        whose = _BY.pack(by.writer, by.sequence) if by is not None else bytes(_BY.size)
        self._rows.add(self._number(table), whose, version, keys, stored)
        if self._rows.size >= _BATCH_BYTES:
            self.write()

    def write(self) -> None:
        """Store all added rows, so that they can be read."""
        self._store.write(self._rows)
        self._rows = Rows()

    def get(self, table: str, key: bytes) -> Written | None:
        found = self._store.get(self._number(table), key, _NEWEST)
        return None if found.value is None else _written(found)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        found = self._store.scan(self._number(table), low, high, _NEWEST, reverse=reverse)
        return ((seen.key, _written(seen)) for seen in found)

    def close(self) -> None:
        """Delete the folder, unless this is a forked child."""
        if self._store.forked:
            return
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _number(self, table: str) -> int:
        return (self._store.marks.get(table) or self._store.begin(table, "")).number


def _written(seen: Seen) -> Written:
    by, data = WriterAt(*_BY.unpack(seen.txn_id)), seen.value or DELETED
    return Written(data[1:] if data[:1] == THERE else None, by if by.writer else None)


class Local:
    """The writes of this process: in memory, and beyond `OWN_BYTES` in a temporary folder."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, bytes | None]] = {}
        self._keys: dict[str, list[bytes]] = {}  # rising
        self._bytes = 0
        self._spilled: Scratch | None = None
        self._spills = 0

    def get(self, table: str, key: bytes) -> Written | None:
        rows = self._rows.get(table, {})
        if key in rows:
            return Written(rows[key])
        return None if self._spilled is None else self._spilled.get(table, key)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        keys = self._keys.get(table, [])
        end = len(keys) if high is None else bisect_left(keys, high)
        found = keys[bisect_left(keys, low) : end]
        rows = self._rows.get(table, {})
        mine = iter([(key, Written(rows[key])) for key in (found[::-1] if reverse else found)])
        if self._spilled is None:
            return mine
        return merged(self._spilled.scan(table, low, high, reverse=reverse), mine, reverse)

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        rows = self._rows.setdefault(table, {})
        self._bytes += len(value or b"") - len(rows.get(key) or b"")
        if key not in rows:
            insort(self._keys.setdefault(table, []), key)
            self._bytes += len(key) + _ROW_BYTES
        rows[key] = value
        if self._bytes > OWN_BYTES:
            self._spill()

    def refresh(self) -> None:
        """Do nothing: only writes of this process are here."""

    def _spill(self) -> None:
        self._spilled = self._spilled or Scratch()
        self._spills += 1
        for table, rows in self._rows.items():
            keys = list(rows)
            for at in range(0, len(keys), _AT_ONCE):
                some = keys[at : at + _AT_ONCE]
                self._spilled.add(table, None, self._spills, some, (rows[key] for key in some))
        self._spilled.write()
        self._rows.clear()
        self._keys.clear()
        self._bytes = 0

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()
            self._spilled = None


def merged(
    under: Iterator[tuple[bytes, T]], over: Iterator[tuple[bytes, T]], reverse: bool
) -> Iterator[tuple[bytes, T]]:
    """Rows of both in order; of equal keys those of ``over``."""
    theirs, ours = next(under, None), next(over, None)
    while theirs is not None or ours is not None:
        if theirs is not None and (ours is None or _first(theirs[0], ours[0], reverse)):
            yield theirs
            theirs = next(under, None)
        elif ours is not None:
            if theirs is not None and theirs[0] == ours[0]:
                theirs = next(under, None)
            yield ours
            ours = next(over, None)


def _first(one: bytes, other: bytes, reverse: bool) -> bool:
    return one > other if reverse else one < other
