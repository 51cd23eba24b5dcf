"""`TableSnapshot`: tables as of a commit timestamp, read from a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, starmap
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar, overload

from anabranch.core.derived_rows import READY, STATE_KEY, of_value
from anabranch.core.stream_settings import Derived, derived_table
from anabranch.errors import DerivationMissing, IllegalState, InvalidArgument, SnapshotExpired
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import check_type
from anabranch.protocol.limits import ROW_KEY, check_row_key
from anabranch.tables.indexes import Indexed
from anabranch.tables.store import Cursor, Seen, Store
from anabranch.types import K, V
from anabranch.values import Stream

T = TypeVar("T")


class TableSnapshot:
    """Tables as of one moment: each read returns the same rows. Thread-safe.

    While a snapshot is open, the replica keeps its versions: close it, or use it as a context manager.
    """

    def __init__(
        self,
        store: Store,
        timestamp: int,
        numbers: Mapping[str, int],
        closed: Callable[[TableSnapshot], None],
        derived: Mapping[str, Derived] = MappingProxyType({}),
    ) -> None:
        """``numbers``: the numbers of the tables in the store. ``closed``: called when the snapshot is closed.

        ``derived``: the derivations of derived tables among them.
        """
        self.timestamp = timestamp
        self.is_open = True
        self.check_fork, self.cursor = store.check_fork, store.cursor
        self._store = store
        self._numbers = numbers
        self._closed = closed
        self.derived = derived

    def in_place_of(self, other: TableSnapshot) -> Self:
        """Let this snapshot replace a closed snapshot. Tables that were loaded again since then can't be read."""
        self._numbers = other._numbers
        return self

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that took it."""
        return self._store.forked

    def __repr__(self) -> str:
        return f"<TableSnapshot of {', '.join(self._numbers)} at {to_text(self.timestamp)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the snapshot's versions for sweeping. Closing twice is harmless. Does nothing in a forked child."""
        if not self.is_forked:
            self._closed(self)

    @overload
    def get(self, table: str, key: bytes) -> bytes | None: ...

    @overload
    def get(self, table: Stream[K, V], key: K) -> V | None: ...

    def get(self, table: Any, key: Any) -> Any:
        """The row of a key, or None. ``table``: a name, or what `Client.stream` made, with its types.

        Raises: InvalidArgument, IllegalState (closed), SnapshotExpired (the table is loaded again),
        UndecodableValue.
        """
        if type(table) is not str and isinstance(table, Stream):
            key = table.encode_key(key)
            return table.decode_value(key, self.get(table.name, key))
        number = self._number(table)
        row = self._store.row(number, check_row_key(key), self.timestamp)
        self._number(table)  # raises if the table was dropped while it was read
        return row

    @overload
    def get_many(self, table: str, keys: Iterable[bytes]) -> dict[bytes, bytes]: ...

    @overload
    def get_many(self, table: Stream[K, V], keys: Iterable[K]) -> dict[K, V]: ...

    def get_many(self, table: Any, keys: Iterable[Any]) -> dict[Any, Any]:
        """The rows of these keys, without missing ones. This is faster than `get`. Raises: as `get`."""
        if type(table) is not str and isinstance(table, Stream):
            found = self.get_many(table.name, map(table.encode_key, keys))
            return dict(starmap(table.decode_row, found.items()))
        wanted = sorted({check_row_key(key) for key in keys})
        rows = self._store.get_many(self._number(table), wanted, self.timestamp)
        self._number(table)  # as in `get`
        return rows

    @overload
    def scan(
        self,
        table: str,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]: ...

    @overload
    def scan(
        self,
        table: Stream[K, V],
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[K, V]]: ...

    def scan(
        self,
        table: Any,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Keys and rows of [low, high), or with a prefix, in byte order of the keys; at most ``limit``.

        Bounds and prefixes are bytes, also with the handle of a table. Raises: as `get`; except for
        UndecodableValue, before the first row is returned.
        """
        if type(table) is not str and isinstance(table, Stream):
            rows = self.scan(table.name, low, high, prefix=prefix, reverse=reverse, limit=limit)
            return starmap(table.decode_row, rows)
        check_limit(limit)
        begin, end = bounds(low, high, prefix)
        if reverse:
            seen = self.walk(table, begin, end, reverse=True)
            return islice(((s.key, s.value) for s in seen if s.value is not None), limit)
        rows = self._store.rows(self._number(table), begin, end, self.timestamp)
        self._number(table)
        return islice(self._while_open(rows), limit)

    def lookup(
        self, index: str, value: bytes, *, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and rows that an index or derivation has under a value, in byte order of keys; at most ``limit``.

        For a derivation, the replica needs the source and the derived table. Raises: as `get`; InvalidArgument (the
        replica has no such index, or the derivation has totals), DerivationMissing (no version of it is ready at
        this time).
        """
        check_limit(limit)
        if not isinstance(value, bytes):
            raise InvalidArgument(f"what an index is asked for is bytes, not {value!r:.100}")
        for table in self._numbers:
            number = self._number(table)
            for prefix, its in self._store.indexes(table):
                if its.name == index:
                    found = self._found(table, number, prefix, its, value)
                    return islice(self._while_open(found), limit)
        derived = in_use(self, index)
        if derived is not None:
            if derived.kind == "totals":
                raise InvalidArgument(
                    f"derivation {index!r} has totals: get the rows of {derived_table(derived.of)}"
                )
            return islice(self._while_open(_rows_under(self, derived, value)), limit)
        raise InvalidArgument(
            f"this replica has no index {index!r}: give it to `replica` as index={{name: function}}, or open "
            "it with the derived table, too"
        )

    def _found(
        self, table: str, number: int, prefix: bytes, index: Indexed, value: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        for key in self._store.lookup(prefix, value):
            row = self._store.row(number, key, self.timestamp)
            if row is not None and value in index.of(key, row):
                yield key, row
        self._number(table)  # as in `get`

    def get_version(self, table: str, key: bytes, cursor: Cursor | None = None) -> Seen:
        """A key with its newest version. ``cursor``: as of `Store.get`. Raises: as `get`."""
        number = self._number(table)
        seen = self._store.get(number, check_row_key(key), self.timestamp, cursor)
        self._check_still(table, number)
        return seen

    def row_at(self, table: str, key: bytes, at: int) -> bytes | None:
        """The row of a key as of a later time, through which the table is complete. Raises: as `get`."""
        number = self._number(table)
        row = self._store.row(number, check_row_key(key), max(at, self.timestamp))
        self._number(table)  # as in `get`
        return row

    def versions(self, table: str, key: bytes) -> Iterator[Seen]:
        """The kept versions of a key up to the snapshot, the newest first. ``value`` None: deleted.

        Each was valid from its ``timestamp`` to the timestamp of the version listed before it. Raises: as `get`.
        """
        number = self._number(table)
        return self._while_open(self._store.versions(number, check_row_key(key), self.timestamp))

    def stamped(self, table: str) -> Iterator[tuple[bytes, bytes, int, bytes]]:
        """All rows in the order of their keys: key, row, commit timestamp and transaction id. Raises: as `get`."""
        for row in self._store.stamped(self._number(table), self.timestamp):
            self._number(table)
            yield row

    def walk(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[Seen]:
        """Keys of [low, high) that have a row, or a version later than the snapshot. Raises: as `get`."""
        number = self._number(table)
        seen = self._store.scan(number, low, high, self.timestamp, reverse=reverse)
        self._number(table)
        return self._while_open(seen)

    def walk_some(
        self, table: str, low: bytes, high: bytes | None, most: int, cursor: Cursor
    ) -> list[Seen]:
        """The first keys of `walk`, as `Store.scan_some`. Raises: as `get`."""
        number = self._number(table)
        seen = self._store.scan_some(number, low, high, self.timestamp, most, cursor)
        self._check_still(table, number)
        return seen

    def _while_open(self, rows: Iterator[T]) -> Iterator[T]:
        for row in rows:
            if not self.is_open:
                self.check_open()
            yield row

    def check_open(self) -> None:
        """Raise `IllegalState` once the snapshot or its replica is closed, and `NotForkSafe` in a forked child."""
        self._store.check_open()
        if not self.is_open:
            raise IllegalState("the snapshot is closed: take another one")

    def _check_still(self, table: str, number: int) -> None:
        """Raise if the table was dropped, or the snapshot closed, while it was read. Raises: as `get`."""
        if not self.is_open or self._store.marks[table].number != number:
            self._number(table)

    def _number(self, table: str) -> int:
        if not self.is_open or self._store.is_closed:
            self.check_open()
        number = self._numbers.get(table)
        if number is None:
            raise InvalidArgument(
                f"{table!r} is not in this replica of {', '.join(self._numbers)}: open it with that table, too"
            )
        if self._store.marks[table].number != number:
            raise SnapshotExpired(
                f"{table} is loaded again from its beginning: take a later snapshot"
            )
        return number


def take_snapshot(
    store: Store,
    tables: Iterable[str],
    time: int,
    closed: Callable[[TableSnapshot], None],
    derived: Mapping[str, Derived] = MappingProxyType({}),
) -> TableSnapshot:
    """A snapshot of tables at a time. Raises `SnapshotExpired` if its versions are swept."""
    marks = {table: store.marks[table] for table in tables}
    for table, mark in marks.items():
        if time < mark.floor:
            raise SnapshotExpired(
                f"{table} keeps its versions from {to_text(mark.floor)} on, not {to_text(time)}: take a later "
                "snapshot, or set `table.history.ms` higher"
            )
    numbers = {table: mark.number for table, mark in marks.items()}
    return TableSnapshot(store, time, numbers, closed, derived)


def _version(derived: Derived) -> int:
    return derived.of.version


def in_use(view: TableSnapshot, name: str) -> Derived | None:
    """The version of a derivation that look-ups use as of the snapshot; None if the replica has no such table.

    Raises: as `TableSnapshot.get`; DerivationMissing, InvalidArgument (several sources have such a derivation).
    """
    derived = [each for each in view.derived.values() if each.of.name == name]
    if not derived:
        return None
    if len({each.of.source for each in derived}) > 1:
        raise InvalidArgument(f"several tables have a derivation {name!r}: open a replica of one")
    states = {each: view.get(derived_table(each.of), STATE_KEY) for each in derived}
    ready = [each for each in derived if states[each] == READY]
    # Before the first switch no asynchronous version has a state: the lowest is the one in use.
    first = [each for each in derived if each.asynchronous and states[each] is None]
    if not ready and not first:
        raise DerivationMissing(
            f"no version of derivation {name!r} is ready in this replica at {to_text(view.timestamp)}: open it "
            "with the newest one"
        )
    return max(ready, key=_version) if ready else min(first, key=_version)


def _rows_under(
    view: TableSnapshot, derived: Derived, value: bytes
) -> Iterator[tuple[bytes, bytes]]:
    """Keys and rows that a derivation has under a value."""
    source, table, prefix = derived.of.source, derived_table(derived.of), of_value(value)
    if derived.kind == "unique":
        key = view.get(table, prefix)
        keys: Iterable[bytes] = () if key is None else (key,)
    else:
        keys = (entry[len(prefix) :] for entry, _ in view.scan(table, prefix=prefix))
    for key in keys:
        row = view.get(source, key)
        if row is not None:
            yield key, row


def check_limit(limit: int | None) -> None:
    """Raise `InvalidArgument` unless the limit is a possible number of rows, or None."""
    if limit is not None:
        check_type("a limit", limit, int)
    if limit is not None and limit < 0:
        raise InvalidArgument(f"limit {limit!r}: a number of rows, or None")


def bounds(
    low: bytes | None, high: bytes | None, prefix: bytes | None
) -> tuple[bytes, bytes | None]:
    """A range of keys [low, high) from a caller's arguments; high None: to the end. Raises `InvalidArgument`."""
    for end in (low, high, prefix):
        if end is not None and not isinstance(end, bytes):
            raise InvalidArgument(f"ranges and prefixes of keys are bytes, not {end!r:.100}")
        if len(end or b"") > ROW_KEY.value + 1:  # just after the longest key
            raise InvalidArgument(
                f"an end of a range has {len(end or b''):,} bytes: a key has at most {ROW_KEY.value:,}"
            )
    if prefix is not None:
        if low is not None or high is not None:
            raise InvalidArgument("give a prefix, or low and high")
        cut = prefix.rstrip(b"\xff")
        return prefix, cut[:-1] + bytes([cut[-1] + 1]) if cut else None
    if high is not None and (low or b"") >= high:
        raise InvalidArgument(f"low {low!r} is not below high {high!r}")
    return low or b"", high
