"""Indexes of a replica: the values by which a row can be looked up.

An entry is a value and a row's key. Entries are hints: a look-up checks each with the row, which may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.errors import InvalidArgument

IndexFunction = Callable[[bytes, bytes], "bytes | Iterable[bytes] | None"]
Index = IndexFunction | tuple[str, IndexFunction]


class Indexed(NamedTuple):
    """An index of a table. ``values``: a function of key and row that returns the same for the same row."""

    table: str
    name: str
    values: IndexFunction

    def of(self, key: bytes, row: bytes) -> frozenset[bytes]:
        """The index's values for a row; empty if the function returned None.

        Raises: InvalidArgument (the function returned no bytes, iterable of bytes, or None); the function's errors.
        """
        try:
            found: Any = self.values(key, row)
            if found is None:
                return frozenset()
            one = isinstance(found, bytes) or not isinstance(found, Iterable)
            values = frozenset((found,) if one else found)
        except Exception as error:
            error.add_note(
                f"in the function of index {self.name!r}, for row {key!r:.100} of {self.table}: it has to accept "
                "each row of the table; return no value to leave a row out"
            )
            raise
        if not all(isinstance(value, bytes) for value in values):
            raise InvalidArgument(
                f"the function of index {self.name!r} gave {found!r:.100} for row {key!r:.100} of {self.table}: "
                "give bytes, several, or None"
            )
        return values


# The indexes of a table, each with its prefix in the store.
Indexes = Sequence[tuple[bytes, Indexed]]
Entry = tuple[bytes, bytes]  # an entry of a known row: prefix of the index, value


def entries_of(indexes: Indexes, key: bytes, row: bytes | None) -> set[Entry]:
    """The entries of a version; ``row`` is None for a deletion."""
    if row is None:
        return set()
    return {(prefix, value) for prefix, index in indexes for value in index.of(key, row)}


def indexed(index: Mapping[str, Index] | None, tables: Sequence[str]) -> dict[str, list[Indexed]]:
    """Table -> its indexes, by name, from the argument of `Client.replica`. Raises `InvalidArgument`."""
    found: dict[str, list[Indexed]] = {}
    names: Any = index or {}
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"index {names!r:.100}: give names, each with a function")
    for name, given in sorted(names.items()):
        table, values = given if isinstance(given, tuple) else (tables[0], given)
        if not isinstance(given, tuple) and len(tables) > 1:
            raise InvalidArgument(
                f"index {name!r}: the replica has several tables, so give (table, function)"
            )
        if table not in tables:
            raise InvalidArgument(f"index {name!r} is of {table}, which is not in this replica")
        if not callable(values):
            raise InvalidArgument(f"index {name!r}: {values!r:.100} is no function of key and row")
        found.setdefault(table, []).append(Indexed(table, name, values))
    return found
