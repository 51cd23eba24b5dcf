"""The rows of derived tables: entries of values, the row that says whether the table is ready, and progress rows.

docs/inside/decisions/0057-derived-tables.md and 0060-asynchronous-derivations.md have their layout. Clients make
them; leaders don't know them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
# Progress rows begin so, and entries and the state don't. Then come the number of tasks, and a bit for each task
# that the row is of. The row is a commit timestamp of the source.
PROGRESS = b"\0\1"
_COUNT = 2  # bytes of a number of tasks
_TIME = 8  # bytes of a timestamp
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


def is_entry(key: bytes) -> bool:
    """Whether a row of a derived table is an entry."""
    return key != STATE_KEY and not key.startswith(PROGRESS)


def progress_row(tasks: Collection[int], count: int, timestamp: int) -> tuple[bytes, bytes]:
    """Key and row that say: of these tasks, of ``count``, all up to a commit of the source is derived."""
    bits = sum(1 << task for task in tasks).to_bytes((count + 7) // 8, "big")
    return PROGRESS + count.to_bytes(_COUNT, "big") + bits, timestamp.to_bytes(_TIME, "big")


def progress_of(key: bytes, row: bytes | None) -> int:
    """The timestamp of a progress row, or 0 for any other row."""
    if row is None or len(row) != _TIME or not key.startswith(PROGRESS):
        return 0
    return int.from_bytes(row, "big")


def with_progress(known: Mapping[bytes, int], key: bytes, timestamp: int) -> dict[bytes, int]:
    """Progress rows with one more, without those of tasks that the new one is of, too."""
    count, bits = _tasks_of(key)
    kept = {
        other: at
        for other, at in known.items()
        if at > timestamp or _tasks_of(other)[0] != count or _tasks_of(other)[1] & ~bits
    }
    return kept | {key: max(timestamp, known.get(key, 0))}


def derived_through(progress: Mapping[bytes, int]) -> int:
    """The time up to which all tasks have derived the source; 0 if a task has no progress row."""
    through = 0
    missing = -1
    for key, timestamp in sorted(progress.items(), key=lambda each: -each[1]):
        count, bits = _tasks_of(key)
        missing = ((1 << count) - 1 if missing < 0 else missing) & ~bits
        through = timestamp
        if not missing:
            return through
    return 0


def _tasks_of(key: bytes) -> tuple[int, int]:
    """The number of all tasks, and a bit for each task that a progress row is of."""
    start = len(PROGRESS) + _COUNT
    return int.from_bytes(key[len(PROGRESS) : start], "big"), int.from_bytes(key[start:], "big")
