"""Whether a group of readers got each key's events in order, and all of them, however the stream was scaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from examples.flights.child import Orders, Say
from examples.flights.events import Kind
from examples.flights.order_reader import Note, digest_of
from examples.flights.rows import Differences
from examples.flights.source import TABLES, Row, find_source
from examples.flights.ticker import END

_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What the members saw together.

    ``rows``: of the big transaction, of ``expected``. ``moved``: keys whose events came from several segments;
    ``shared``: keys of which several members got events. ``repeated``: events that came again (at least once).
    ``smalls``: (number, events) of small transactions.
    """

    rows: int
    expected: int
    keys: int
    moved: int
    shared: int
    repeated: int
    smalls: tuple[tuple[int, int], ...]
    differences: tuple[str, ...]
    difference_count: int

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> OrderReport:
        """What `asdict` made, and JSON."""
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        fields["smalls"] = tuple((number, count) for number, count in document["smalls"])
        fields["differences"] = tuple(document["differences"])
        return cls(**fields)


@dataclass(slots=True)
class _Key:
    """What is known of a key: its rows to come, and how far it has come."""

    name: bytes
    rows: list[int] = field(default_factory=list)
    next_row: int = 0
    small: tuple[int, int] = (-1, -1)
    commit_timestamp: int = 0
    segments: set[int] = field(default_factory=set)
    members: set[int] = field(default_factory=set)


class OrderCheck:
    """Takes the rows of the source first, then what the members noted."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._keys: dict[bytes, _Key] = {}
        self._keyless: Counter[int] = Counter()
        self._expected = 0
        self._rows = 0
        self._differences = Differences()
        for row in rows:
            self._expected += 1
            value = crc32(row.value())
            if row.key is None:
                self._keyless[value] += 1
            else:
                digest = digest_of(row.key)
                self._keys.setdefault(digest, _Key(row.key)).rows.append(value)

    def check(self, members: Iterable[Iterable[Note]]) -> OrderReport:
        """All that the members noted, in the order in which it came to any of them."""
        noted = sorted(
            ((note, member) for member, notes in enumerate(members) for note in notes),
            key=lambda each: each[0].at,
        )
        seen: set[tuple[int, int]] = set()
        smalls: Counter[int] = Counter()
        for note, member in noted:
            place = (note.partition, note.offset)
            if place in seen:
                continue  # once more: that is allowed, in any order
            seen.add(place)
            if note.kind is Kind.SMALL:
                smalls[note.number] += 1
            self._take(note, member)
        self._finish()
        keys = [key for key in self._keys.values() if key.rows]
        return OrderReport(
            rows=self._rows,
            expected=self._expected,
            keys=len(keys),
            moved=sum(len(key.segments) > 1 for key in keys),
            shared=sum(len(key.members) > 1 for key in keys),
            repeated=len(noted) - len(seen),
            smalls=tuple(sorted((n, count) for n, count in smalls.items() if n != END)),
            differences=tuple(self._differences.shown),
            difference_count=self._differences.count,
        )

    def _take(self, note: Note, member: int) -> None:
        add = self._differences.add
        where = f"partition {note.partition}, offset {note.offset}"
        if note.kind not in (Kind.BIG, Kind.SMALL):
            add(f"{where}: an event that nobody committed")
            return
        if note.key == digest_of(None):
            if self._keyless[note.value] > 0:
                self._keyless[note.value] -= 1
                self._rows += 1
            else:
                add(f"{where}: a row without a key that is not in the source, or not so often")
            return
        key = self._keys.setdefault(note.key, _Key(note.key.hex().encode()))
        key.segments.add(note.segment_id)
        key.members.add(member)
        name = key.name.decode("utf-8", "backslashreplace")
        if note.commit_timestamp < key.commit_timestamp:
            add(f"{where}: {name} goes back in commit time")
        key.commit_timestamp = note.commit_timestamp
        if note.kind is Kind.SMALL:
            if (note.number, note.within) <= key.small and note.number != END:
                add(f"{where}: {name} has small event {note.number} after {key.small[0]}")
            key.small = (note.number, note.within)
        elif key.next_row < len(key.rows) and key.rows[key.next_row] == note.value:
            key.next_row += 1
            self._rows += 1
        else:
            add(f"{where}: {name} has another row than its number {key.next_row + 1}")

    def _finish(self) -> None:
        for key in self._keys.values():
            if missing := len(key.rows) - key.next_row:
                name = key.name.decode("utf-8", "backslashreplace")
                self._differences.add(f"the last {missing:,} rows of {name} did not come")
        if missing := sum(self._keyless.values()):
            self._differences.add(f"{missing:,} rows without a key did not come")


def check(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """Reads the source, and when told to, the members' files."""
    table = next(table for table in TABLES if table.name == parameters["table"])
    order_check = OrderCheck(find_source(parameters["limit"]).rows(table))
    if not orders.finish.wait(_DEADLINE_S):
        raise TimeoutError("nobody wanted the comparison")
    report = order_check.check(Note.read(Path(path)) for path in parameters["files"])
    say("ordered", **asdict(report))
