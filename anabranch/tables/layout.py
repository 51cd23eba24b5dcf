"""The bytes of rows and marks in a replica's folder (docs/inside/tables.md, The replica).

A row's key: table number, escaped key, 00 00, inverted timestamp. So a key's versions are adjacent, the newest
first, and keys are in byte order. Its value: transaction id, then 1 and the row, or 0: deleted.

An entry of an index: its number, an escaped value, 00 00, the escaped key of a row; no value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from anabranch.core.ids import TXN_ID_SIZE

TABLE = 2  # bytes of a table's number
STAMP = 8  # … of a timestamp
MARKS = b"\xff\xff"  # no table has this number
HIGHEST = (1 << 8 * TABLE) - 2  # … except the numbers from 1 to this one
IDENTITY = MARKS + b"/"
ROW = TXN_ID_SIZE + 1  # where the row begins in a value
DELETED = b"\0"
THERE = b"\1"
_END = b"\0\0"
END = len(_END)
_ALL = (1 << 64) - 1


class Mark(NamedTuple):
    """How far a table is stored. ``position``: offset in the history from which to continue.

    ``last``: timestamp of the newest stored COMMIT, or of the first EPOCH. ``complete``: all commits up to this
    time are stored. ``floor``: versions below this time are swept. All are hybrid times. ``ids``: topic ids.
    ``indexes``: the numbers of its indexes, by name. ``base``: the base that is being loaded, and ``laid``: the
    number of stored rows of each of its parts, and the offset of the next one.
    """

    number: int
    ids: str
    position: int = 0
    last: int = 0
    complete: int = 0
    floor: int = 0
    indexes: Mapping[str, int] = MappingProxyType({})
    base: str = ""
    laid: Mapping[str, tuple[int, int]] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """The bytes as stored."""
        loading = [self.base, dict(self.laid)] if self.base else []
        return json.dumps([*self[:6], dict(self.indexes), *loading]).encode()

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        """The mark of stored bytes."""
        return cls(*json.loads(data))


def mark_key(stream: str) -> bytes:
    """The key of a table's mark."""
    return MARKS + b"." + stream.encode()


def table_prefix(number: int) -> bytes:
    """The first bytes of a table's rows."""
    return number.to_bytes(TABLE, "big")


def place(prefix: bytes, key: bytes) -> bytes:
    """The start of all keys at or above this one."""
    return prefix + (key.replace(b"\0", b"\0\xff") if 0 in key else key)


def versions(prefix: bytes, key: bytes) -> bytes:
    """The common prefix of all versions of a key, or of all entries of an index for one value."""
    return place(prefix, key) + _END


def stamp(timestamp: int) -> bytes:
    """A timestamp as the end of a key; it is inverted, so that later times sort first."""
    return (_ALL - timestamp).to_bytes(STAMP, "big")


def suffix(timestamp: int) -> bytes:
    """The end of a version's key, after the escaped key."""
    return _END + stamp(timestamp)


def timestamp_of(raw: bytes) -> int:
    """The timestamp of a row's key."""
    return _ALL - int.from_bytes(raw[-STAMP:], "big")


def entry(prefix: bytes, value: bytes, key: bytes) -> bytes:
    """The entry of an index for a value of a row."""
    return place(versions(prefix, value), key)


def unescaped(key: bytes) -> bytes:
    """The key of an escaped one."""
    return key.replace(b"\0\xff", b"\0") if 0 in key else key


def key_of(versions: bytes) -> bytes:
    """The key from which `versions` made a prefix."""
    return unescaped(versions[TABLE:-END])
