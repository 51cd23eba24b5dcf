"""The rows of derived tables: entries of values, totals, and the rows that say how far the table is.

docs/inside/decisions/0057-derived-tables.md and 0063-asynchronous-derivations.md have their layout. Clients make
them; leaders don't know them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from anabranch.core.stream_settings import Kind, derived_table
from anabranch.errors import InvalidArgument, MalformedRecord, NumberOverflow
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r

# The keys of the state, and of the progress of a build: the last key of the source that is done. All other keys
# begin with an escaped value and `_END`, so none is equal to these.
STATE_KEY = b"\0"
PROGRESS_KEY = b"\0\1"
READY = b"ready"
RETIRED = b"retired"
BUILDING = b"building "  # with random bytes
# A function of key and row, which returns values, or pairs of group and number: one, several, or None.
DerivingFunction = Callable[
    [bytes, bytes],
    "bytes | Iterable[bytes] | tuple[bytes, int] | Iterable[tuple[bytes, int]] | None",
]
# The progress rows of workers begin with `PROGRESS_KEY`. Then come the number of tasks, and a bit for each task
# that the row is of. The row is a commit timestamp of the source.
_COUNT = 2  # bytes of a number of tasks
_TIME = 8  # bytes of a timestamp
_END = b"\0\0"


def of_value(value: bytes) -> bytes:
    """The beginning of the keys of a value's entries. No value's is the beginning of another value's."""
    return value.replace(b"\0", b"\0\xff") + _END


class Function(NamedTuple):
    """A version of a derivation with its function."""

    of: r.Derivation
    kind: Kind  # but not "totals"
    values: Callable[[bytes, bytes], frozenset[bytes]]  # of key and row

    @property
    def table(self) -> str:
        """The derived table."""
        return derived_table(self.of)

    @property
    def unique(self) -> bool:
        """Whether a value has one row at most."""
        return self.kind == "unique"

    def entries(self, key: bytes, row: bytes | None) -> dict[bytes, bytes]:
        """The entries of a row. Raises: InvalidArgument (a value is too long, or no bytes), as the function."""
        if row is None:
            return {}
        found = {}
        for value in self.values(key, row):
            entry = of_value(value) if self.unique else of_value(value) + key
            _check_size(self.of, entry, value, key)
            found[entry] = key if self.unique else b""
        return found


class Total(NamedTuple):
    """The total of a group: the sum of its numbers, and how many rows have a number."""

    sum: int = 0
    rows: int = 0


class Totals(NamedTuple):
    """A version of a derivation that adds up numbers by group, with its function."""

    of: r.Derivation
    function: DerivingFunction

    @property
    def table(self) -> str:
        """The derived table."""
        return derived_table(self.of)

    @property
    def kind(self) -> Kind:
        """The kind of the derived table."""
        return "totals"

    def numbers(self, key: bytes, row: bytes | None) -> dict[bytes, int]:
        """The numbers of a row, by the keys of their totals. Raises: InvalidArgument, as the function."""
        found: dict[bytes, int] = {}
        if row is None:
            return found
        where = (
            f"the function of derivation {self.of.name!r}, for row {key!r:.100} of {self.of.source}"
        )
        try:
            made: Any = self.function(key, row)
            pairs = _pairs(made)
        except Exception as error:
            error.add_note(f"in {where}: it has to accept each row of the table")
            raise
        for pair in pairs:
            if not (
                isinstance(pair, tuple)
                and len(pair) == 2
                and isinstance(pair[0], bytes)
                and type(pair[1]) is int
            ):
                raise InvalidArgument(
                    f"{where} gave {made!r:.100}: give a pair of bytes and an int, several, or None"
                )
            entry = of_value(pair[0])
            _check_size(self.of, entry, pair[0], key)
            found[entry] = found.get(entry, 0) + pair[1]
        return found

    def changes(self, key: bytes, before: bytes | None, after: bytes | None) -> dict[bytes, Total]:
        """The changes of totals, by their keys, that a change of a row makes. Raises: as `numbers`."""
        former, now = self.numbers(key, before), self.numbers(key, after)
        found = {}
        for entry in sorted(former.keys() | now.keys()):
            change = Total(
                now.get(entry, 0) - former.get(entry, 0), (entry in now) - (entry in former)
            )
            if change != Total():
                found[entry] = change
        return found

    def added(self, entry: bytes, row: bytes | None, change: Total) -> bytes | None:
        """The row of a total after a change; None if the group has no rows. Raises: NumberOverflow."""
        total = Total(*map(sum, zip(total_of(row), change, strict=True)))
        if not limits.LEAST_NUMBER <= total.sum <= limits.MOST_NUMBER:
            raise NumberOverflow(
                f"the total {value_of(entry)!r:.100} of derivation {self.of.name!r} of {self.of.source} would be "
                f"{total.sum:,}, which has more than 64 bits: nothing of the row was written"
            )
        return b"%d %d" % total if total.rows > 0 else None


AnyFunction = Function | Totals


def _pairs(made: Any) -> list[Any]:
    if made is None:
        return []
    is_one = isinstance(made, tuple) and made != () and not isinstance(made[0], tuple)
    return [made] if is_one or not isinstance(made, Iterable) else list(made)


def _check_size(of: r.Derivation, entry: bytes, value: bytes, key: bytes) -> None:
    if len(entry) > limits.ROW_KEY.value:
        raise InvalidArgument(
            f"derivation {of.name!r}: value {value!r:.100} of row {key!r:.100} of {of.source} is "
            f"too long: with the row's key, at most {limits.ROW_KEY.value:,} bytes"
        )


def total_of(row: bytes | None) -> Total:
    """The total in a row of a derived table; zeros without one. Raises: MalformedRecord."""
    if row is None:
        return Total()
    try:
        total, rows = map(int, row.split(b" "))
    except ValueError:
        raise MalformedRecord(f"{row!r:.100} is no total: a sum and a number of rows") from None
    return Total(total, rows)


def entry_end(entry: bytes) -> int:
    """The place after the value, and its end mark, in the key of an entry."""
    at = entry.index(b"\0")
    while entry[at + 1 : at + 2] == b"\xff":
        at = entry.index(b"\0", at + 2)
    return at + len(_END)


def value_of(entry: bytes) -> bytes:
    """The value in the key of an entry, or the group in the key of a total."""
    return entry[: entry_end(entry) - len(_END)].replace(b"\0\xff", b"\0")


def is_entry(key: bytes) -> bool:
    """Whether a row of a derived table is an entry."""
    return key != STATE_KEY and not key.startswith(PROGRESS_KEY)


def progress_row(tasks: Collection[int], count: int, timestamp: int) -> tuple[bytes, bytes]:
    """Key and row that say: of these tasks, of ``count``, all up to a commit of the source is derived."""
    bits = sum(1 << task for task in tasks).to_bytes((count + 7) // 8, "big")
    return PROGRESS_KEY + count.to_bytes(_COUNT, "big") + bits, timestamp.to_bytes(_TIME, "big")


def progress_of(key: bytes, row: bytes | None) -> int:
    """The timestamp of a progress row, or 0 for any other row."""
    if row is None or len(row) != _TIME or not key.startswith(PROGRESS_KEY):
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
    start = len(PROGRESS_KEY) + _COUNT
    return int.from_bytes(key[len(PROGRESS_KEY) : start], "big"), int.from_bytes(key[start:], "big")
