"""The rows of derived tables: entries of values, and the row that says whether the table is ready.

docs/inside/decisions/0057-derived-tables.md has their layout. Clients make them; leaders don't know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from anabranch.core.stream_settings import derived_table
from anabranch.errors import InvalidArgument
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r

# The key of the state. Entries begin with an escaped value and `_END`, so none is equal to it.
STATE_KEY = b"\0"
READY = b"ready"
RETIRED = b"retired"
BUILDING = b"building "  # with random bytes
_END = b"\0\0"


def of_value(value: bytes) -> bytes:
    """The beginning of the keys of a value's entries. No value's is the beginning of another value's."""
    return value.replace(b"\0", b"\0\xff") + _END


class Function(NamedTuple):
    """A version of a derivation with its function."""

    of: r.Derivation
    unique: bool
    values: Callable[[bytes, bytes], frozenset[bytes]]  # of key and row

    @property
    def table(self) -> str:
        """The derived table."""
        return derived_table(self.of)

    def entries(self, key: bytes, row: bytes | None) -> dict[bytes, bytes]:
        """The entries of a row. Raises: InvalidArgument (a value is too long, or no bytes), as the function."""
        if row is None:
            return {}
        found = {}
        for value in self.values(key, row):
            entry = of_value(value) if self.unique else of_value(value) + key
            if len(entry) > limits.ROW_KEY.value:
                raise InvalidArgument(
                    f"derivation {self.of.name!r}: value {value!r:.100} of row {key!r:.100} of {self.of.source} is "
                    f"too long: with the row's key, at most {limits.ROW_KEY.value:,} bytes"
                )
            found[entry] = key if self.unique else b""
        return found


def entry_end(entry: bytes) -> int:
    """The place after the value, and its end mark, in the key of an entry."""
    at = entry.index(b"\0")
    while entry[at + 1 : at + 2] == b"\xff":
        at = entry.index(b"\0", at + 2)
    return at + len(_END)
