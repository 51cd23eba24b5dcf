"""Compares a stream with its table, row by row: values, times, counts, and the order of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from examples.flights.source import Row

SHOWN = 10
_CUT = 80


@dataclass
class Differences:
    """The first few differences in words, and how many there are."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str) -> None:
        """One more."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(text)


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What comparing a stream brought. ``expected`` and ``matched`` count rows."""

    stream: str
    expected: int
    matched: int
    keys: int
    differences: tuple[str, ...]
    difference_count: int
    smalls: dict[int, tuple[int, int]]
    kinds: dict[str, int]
    writers: dict[str, int]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "stream": self.stream,
            "expected": self.expected,
            "matched": self.matched,
            "keys": self.keys,
            "differences": list(self.differences),
            "difference_count": self.difference_count,
            "smalls": [[number, *sizes] for number, sizes in sorted(self.smalls.items())],
            "kinds": self.kinds,
            "writers": self.writers,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> StreamReport:
        """What `document` made."""
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        fields["differences"] = tuple(document["differences"])
        fields["smalls"] = {n: (count, of) for n, count, of in document["smalls"]}
        return cls(**fields)


class RowCheck:
    """Takes the events of one stream in their order, and says how they differ from the table's rows.

    The rows of a key have to come in the order of the file, each once; those without a key in any
    order, each once.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._by_key: dict[bytes, list[tuple[bytes, int | None]]] = {}
        self._next: dict[bytes, int] = {}
        self._keyless: Counter[tuple[bytes, int | None]] = Counter()
        self.expected = 0
        self.matched = 0
        self.differences = Differences()
        for row in rows:
            self.expected += 1
            entry = (row.value(), row.timestamp)
            if row.key is None:
                self._keyless[entry] += 1
            else:
                self._by_key.setdefault(row.key, []).append(entry)

    @property
    def keys(self) -> int:
        """How many keys the table has."""
        return len(self._by_key)

    def take(self, key: bytes | None, value: bytes, timestamp: int | None, where: object) -> None:
        """One event that should be a row. ``timestamp`` None: not to be compared.

        ``where`` is only made a text of if there is a difference.
        """
        if key is None:
            self._take_keyless(value, timestamp, where)
            return
        rows = self._by_key.get(key)
        if rows is None:
            self.differences.add(f"{where}: no row has the key {_text(key)}")
            return
        at = self._next.get(key, 0)
        if at < len(rows) and _same(rows[at], value, timestamp):
            self.matched += 1
            self._next[key] = at + 1
            return
        found = next((i for i, row in enumerate(rows) if row[0] == value), None)
        if found is None:
            self.differences.add(
                f"{where}: no row of key {_text(key)} has the value {_text(value)}"
            )
        elif found < at:
            self.differences.add(
                f"{where}: row {found + 1} of key {_text(key)} comes again, or too late, after row {at}"
            )
        elif found > at:
            self.differences.add(
                f"{where}: row {found + 1} of key {_text(key)} comes where row {at + 1} should"
            )
            self._next[key] = found + 1
        else:
            self.differences.add(
                f"{where}: row {at + 1} of key {_text(key)} has the time {timestamp}, "
                f"not {rows[at][1]}"
            )
            self._next[key] = at + 1

    def _take_keyless(self, value: bytes, timestamp: int | None, where: object) -> None:
        for entry in ((value, timestamp), (value, None)):
            if self._keyless[entry] > 0:
                self._keyless[entry] -= 1
                self.matched += 1
                return
        self.differences.add(f"{where}: no row without a key (any more) is {_text(value)}")

    def finish(self) -> None:
        """Call after the last event: what is missing is a difference too."""
        for key, rows in self._by_key.items():
            missing = len(rows) - self._next.get(key, 0)
            if missing > 0:
                self.differences.add(f"the last {missing:,} rows of key {_text(key)} are missing")
        if (missing := sum(count for count in self._keyless.values() if count > 0)) > 0:
            self.differences.add(f"{missing:,} rows without a key are missing")
        if self.matched != self.expected and not self.differences.count:
            self.differences.add(f"{self.matched:,} of {self.expected:,} rows matched")


def _same(row: tuple[bytes, int | None], value: bytes, timestamp: int | None) -> bool:
    return row[0] == value and (row[1] is None or row[1] == timestamp)


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "backslashreplace")
    return text if len(text) <= _CUT else text[: _CUT - 1] + "…"
