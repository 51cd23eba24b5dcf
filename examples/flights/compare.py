"""Compares events with a table: values, times, counts, and the order of each key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from examples.flights.notes import NO_KEY, Notes, digest_of
from examples.flights.source import Row

_Rows = dict[int, list[tuple[int, int]]]


class Wanted:
    """A table's rows as digests: those with a key in file order, the others in any order."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: _Rows = defaultdict(list)
        self.names = {NO_KEY: "no key"}
        self.count = 0
        self.timed = False
        for row in rows:
            key = digest_of(row.key)
            if row.key is not None and key not in self.names:
                self.names[key] = f"key {row.key.decode('utf-8', 'backslashreplace')}"
            self.rows[key].append((digest_of(row.value()), row.timestamp or 0))
            self.count += 1
            self.timed |= row.timestamp is not None

    @property
    def keys(self) -> int:
        return len(self.rows.keys() - {NO_KEY})

    def name(self, key: int) -> str:
        return self.names.get(key, f"a key that no row has ({key:016x})")


class Compared(NamedTuple):
    """The result. ``matched``: how many rows came as expected. Other events and missing ones are differences."""

    matched: int
    differences: list[str]


def compare(wanted: Wanted, came: Notes) -> Compared:
    """Compare events, in the order of their arrival, with the rows of a table.

    Times are compared only if the table has a time: for other tables writers set none.
    """
    found: _Rows = defaultdict(list)
    stamps = came["stamp"].tolist() if wanted.timed else [0] * len(came)
    for key, value, stamp in zip(came["key"].tolist(), came["value"].tolist(), stamps, strict=True):
        found[key].append((value, stamp))
    matched, differences = 0, []
    for key in wanted.rows.keys() | found.keys():
        rows, events = wanted.rows.get(key, []), found.get(key, [])
        if key == NO_KEY:
            rows, events = sorted(rows), sorted(events)
        equal = min(len(rows), len(events))
        if rows[:equal] != events[:equal]:
            equal = next(i for i in range(equal) if rows[i] != events[i])
        matched += equal
        if equal < max(len(rows), len(events)):
            differences.append(_told(wanted.name(key), came[came["key"] == key], rows, equal))
    return Compared(matched, sorted(differences))


def _told(name: str, events: Notes, rows: list[tuple[int, int]], equal: int) -> str:
    text = f"{name}: {len(events):,} of {len(rows):,} rows came"
    if name == "no key":
        return text + ", not just those of the table"
    if equal == len(events):
        return text + ", the last ones are missing"
    event = events[equal]
    what = (
        "has another value or time, or comes too early or again"
        if equal < len(rows)
        else "is one too many"
    )
    return (
        text
        + f", number {equal + 1} {what}: partition {event['partition']}, offset {event['offset']}"
    )
