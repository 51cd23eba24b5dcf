"""The bytes of rows and marks in a replica's folder (docs/inside/tables.md, The replica).

A row's key: table number, escaped key, 00 00, inverted timestamp. So a key's versions lie together, the newest
first, and keys lie in their own order. Its value: transaction id, then 1 and the row, or 0: deleted.

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
    """How far a table is laid down. ``position``: offset in the history to read on from.

    ``last``: timestamp of the newest COMMIT here, or of the first EPOCH. ``complete``: with every commit up to
    it. ``floor``: below it versions are swept. All hybrid times. ``ids``: of its topics. ``indexes``: the numbers
    of its indexes, by name. ``base``: the base that is being laid down, and ``laid``: how many rows of each of
    its parts are here, and the offset of the next.
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
        """As it is stored."""
        loading = [self.base, dict(self.laid)] if self.base else []
        return json.dumps([*self[:6], dict(self.indexes), *loading]).encode()

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        """A stored one."""
        return cls(*json.loads(data))


def mark_key(stream: str) -> bytes:
    """The key of a table's mark."""
    return MARKS + b"." + stream.encode()


def table_prefix(number: int) -> bytes:
    """The first bytes of a table's rows."""
    return number.to_bytes(TABLE, "big")


def place(prefix: bytes, key: bytes) -> bytes:
    """The place from which on all keys at or above this one stand, and none below it."""
    return prefix + (key.replace(b"\0", b"\0\xff") if 0 in key else key)


def versions(prefix: bytes, key: bytes) -> bytes:
    """The bytes that all versions of one key begin with, or all entries of an index for one value."""
    return place(prefix, key) + _END


def stamp(timestamp: int) -> bytes:
    """A timestamp as the end of a key; rising times fall."""
    return (_ALL - timestamp).to_bytes(STAMP, "big")


def suffix(timestamp: int) -> bytes:
    """The end of a version's key, behind the escaped one."""
    return _END + stamp(timestamp)


def timestamp_of(raw: bytes) -> int:
    """The timestamp of a row's key."""
    return _ALL - int.from_bytes(raw[-STAMP:], "big")


def entry(prefix: bytes, value: bytes, key: bytes) -> bytes:
    """The entry of an index for a value of a row."""
    return place(versions(prefix, value), key)


def unescaped(key: bytes) -> bytes:
    """A key of an escaped one."""
    return key.replace(b"\0\xff", b"\0") if 0 in key else key


def key_of(versions: bytes) -> bytes:
    """The key that `versions` was given."""
    return unescaped(versions[TABLE:-END])
