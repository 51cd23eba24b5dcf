"""Judges derived tables: at each commit timestamp, their rows follow from the rows of their source.

Source and derived table are replayed together, commit by commit, and only the entries that a commit concerns are
compared.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from typing import Any, NamedTuple

from checker.model import Derivation, EntryCommit, EntryEvent, History
from checker.reading import ASYNCHRONOUS, Operation
from checker.report import Report
from checker.tables import Rows, is_serializable, snapshot_of

STATE = "\0"  # the key of the row that says whether a derived table is ready
PROGRESS = "\0\1"  # … how far it is built
_ENTRY = re.compile("((?:[^\0]|\0\xff)*)\0\0(.*)", re.DOTALL)


class Entry(NamedTuple):
    """An entry of a derived table: a value, and the key of the row that has it; empty if values are unique."""

    value: str
    key: str


def read_entries(history: History, report: Report) -> None:
    """Find what each commit wrote to derived tables, and when these were ready."""
    for derivation in history.derivations.values():
        records = derivation.records
        whole = records is not None and records.ok and not records.result.get("start")
        derivation.is_read = bool(derivation.is_read and whole and derivation.parts)
        if records is None or not derivation.is_read:
            report.counts["derived tables that are not judged"] += 1
            continue
        for _, timestamp, ids, ranges in records.result["records"]:
            rows = {}
            for number, start, end in ranges:
                for event in _within(derivation, number, start, end):
                    rows[event[1]] = event[2]
                    if derivation.type == ASYNCHRONOUS:
                        derivation.events.append(
                            EntryEvent(timestamp, event[1], event[2], event[4])
                        )
                    history.entries[event[3] or ""] += 1
            derivation.changes.append(EntryCommit(timestamp, tuple(ids), rows))
            if STATE in rows:
                derivation.states.append((timestamp, rows[STATE] or ""))


def _within(derivation: Derivation, partition: int, start: int, end: int) -> list[list[Any]]:
    part = derivation.parts.get(partition)
    events: list[list[Any]] = [] if part is None else part.result["events"]
    first, last = (bisect_left(events, at, key=lambda event: event[0]) for at in (start, end))
    return events[first:last]


def judge_derivations(history: History, report: Report) -> None:
    """``wrong-entry``, ``two-of-a-value`` and ``mixed-versions``; and look-ups of totals, as other reads."""
    for source in sorted({each.source for each in history.derivations.values()}):
        rows = Rows.read(history, source)
        for derivation in history.derivations.values():
            if derivation.source == source and rows is not None and derivation.is_read:
                replay = _REPLAYS.get(derivation.type, _Replay)
                replay(history, report, derivation).play(rows)
        for op in history.totals_read:
            if op.asked["table"] == source and rows is not None and op.ok:
                _judge_total_read(history, report, rows, op)
    for derivation in history.derivations.values():
        _judge_states(history, report, derivation)
        _judge_end(history, report, derivation)


class _Replay:
    """A derived table beside its source."""

    def __init__(self, history: History, report: Report, derivation: Derivation) -> None:
        self._history, self._report, self._of = history, report, derivation
        self._others = [
            each
            for each in history.derivations.values()
            if (each.source, each.name) == (derivation.source, derivation.name)
            and each is not derivation
        ]
        self._rows: dict[str, str | None] = {}  # of the source
        self._due: dict[Entry, set[str]] = defaultdict(set)  # the keys of rows that have an entry
        self._found: dict[Entry, str] = {}  # the key that an entry names
        self._state = ""
        self._at = 0

    def play(self, source: Rows) -> None:
        changes = source.changes()
        written = {commit.timestamp: commit.rows for commit in self._of.changes}
        for at in sorted(changes.keys() | written.keys()):
            self._at, was_ready = at, self._state == "ready"
            touched = set[Entry]()
            for key, row in changes.get(at, ()):
                touched |= self._change(key, row)
            entries = self._write(written.get(at, {}))
            if self._state == "ready":
                everything = self._due.keys() | self._found.keys()
                self._compare(touched | entries.keys() if was_ready else everything)
            else:
                self._judge_come(entries)
            self._report.counts["derived tables at a commit"] += 1

    def _change(self, key: str, row: str | None) -> set[Entry]:
        """A row of the source. Returns the entries that come or go."""
        former = self._entries(key, self._rows.get(key))
        self._rows[key] = row
        now = self._entries(key, row)
        for entry in former - now:
            self._due[entry].discard(key)
        for entry in now - former:
            self._due[entry].add(key)
        return former ^ now

    def _entries(self, key: str, row: str | None) -> set[Entry]:
        name = "" if self._of.unique else key
        return {Entry(value, name) for value in self._of.values(row)}

    def _write(self, rows: dict[str, str | None]) -> dict[Entry, str | None]:
        """Rows of the derived table. Returns the entries, and the key that each names now."""
        written: dict[Entry, str | None] = {}
        for key, row in rows.items():
            if key in (STATE, PROGRESS):
                self._state = (row or "") if key == STATE else self._state
                continue
            match = _ENTRY.fullmatch(key)
            in_key = self._of.type == "index"
            if match is None or (row if in_key else match[2]):
                self._add("wrong-entry", f"{key!r}: {row!r} is no entry")
                continue
            entry = Entry(match[1].replace("\0\xff", "\0"), match[2])
            named = entry.key if in_key and row is not None else row
            written[entry] = named
            if named is None:
                self._found.pop(entry, None)
            else:
                self._found[entry] = named
        return written

    def _compare(self, entries: set[Entry]) -> None:
        """Judge entries of a table that is ready."""
        for entry in sorted(entries):
            due, found = self._due.get(entry, set()), self._found.get(entry)
            self._report.counts["derived rows compared"] += 1
            if len(due) > 1 and self._of.unique:
                self._add("two-of-a-value", f"{entry.value!r} is of rows {sorted(due)}")
            elif due != ({found} if found is not None else set()):
                self._wrong(entry, f"due is {sorted(due)}, and it is {found!r}")

    def _judge_come(self, entries: dict[Entry, str | None]) -> None:
        """Judge that entries which come while a table is built, or before it ends, are of rows that are there."""
        for entry, named in sorted(entries.items()):
            if named is not None and named not in self._due.get(entry, set()):
                self._wrong(entry, f"it came for row {named!r}, which does not have it")

    def _wrong(self, entry: Entry, text: str) -> None:
        row = self._rows.get(self._found.get(entry, ""))
        is_anothers = any(entry.value in other.values(row) for other in self._others)
        kind = "mixed-versions" if is_anothers else "wrong-entry"
        self._add(kind, f"entry {entry.value!r} {entry.key!r}: {text}")

    def _add(self, kind: str, text: str) -> None:
        records = self._of.records
        evidence = [self._of.op.where, *([records.told_where] if records is not None else [])]
        self._report.add(kind, f"{self._of} at {self._at}: {text}", evidence)


class _Totals(_Replay):
    """A derived table of totals: an entry names the sum and the count of its rows."""

    def __init__(self, history: History, report: Report, derivation: Derivation) -> None:
        super().__init__(history, report, derivation)
        self._sums: dict[Entry, list[int]] = defaultdict(lambda: [0, 0])

    def _change(self, key: str, row: str | None) -> set[Entry]:
        touched = set[Entry]()
        for name, sign in ((self._rows.get(key), -1), (row, 1)):
            for value in self._of.values(name):
                total = self._sums[entry := Entry(value, "")]
                total[0] += sign * self._of.number_of(name or "")
                total[1] += sign
                touched.add(entry)
        self._rows[key] = row
        for entry in touched:
            total = self._sums[entry]
            self._due[entry] = {f"{total[0]} {total[1]}"} if total[1] else set()
        return touched

    def _judge_come(self, entries: dict[Entry, str | None]) -> None:
        """While they are built, totals are of some rows only."""


class _Later(_Replay):
    """A table that a worker derives: each event of an entry names the commit of the source from which it comes."""

    def __init__(self, history: History, report: Report, derivation: Derivation) -> None:
        super().__init__(history, report, derivation)
        # By entry and commit of the source: whether the entry should be there from then on, and whether it is.
        self._expected: dict[Entry, dict[int, bool]] = defaultdict(dict)
        self._came: dict[Entry, dict[int, bool]] = defaultdict(dict)
        self._written: dict[tuple[Entry, int], int] = {}  # when the worker committed it
        # Commits of progress, and the commit of the source up to which it says that all entries are there.
        self._through: list[tuple[int, int]] = []

    def play(self, source: Rows) -> None:
        for at, changes in sorted(source.changes().items()):
            for key, row in changes:
                for entry in self._change(key, row):
                    self._expected[entry][at] = bool(self._due[entry])
        known: dict[int, int] = {}
        for event in self._of.events:
            self._at = event.timestamp
            if event.key.startswith(PROGRESS):
                self._note_progress(known, event)
            elif event.key != STATE:
                self._note_entry(event, source.often)
        for entry in sorted(self._expected.keys() | self._came.keys()):
            self._compare_times(entry)

    def _note_progress(self, known: dict[int, int], event: EntryEvent) -> None:
        """Note up to which commit of the source all tasks have derived."""
        count = int.from_bytes(event.key[2:4].encode("latin-1"), "big")
        tasks = int.from_bytes(event.key[4:].encode("latin-1"), "big")
        at = int.from_bytes((event.row or "").encode("latin-1"), "big")
        for task in range(count):
            if tasks >> task & 1:
                known[task] = max(known.get(task, 0), at)
        through = min(known.get(task, 0) for task in range(count))
        if not self._through or through > self._through[-1][1]:
            self._through.append((event.timestamp, through))

    def _note_entry(self, event: EntryEvent, often: set[tuple[str, int]]) -> None:
        """Note what is written, once as of each commit, and in order.

        A worker takes a big commit in parts. If that changes a row more than once, each part may write the entry.
        """
        match = _ENTRY.fullmatch(event.key)
        if match is None or event.row or event.of is None:
            self._add("wrong-entry", f"{event.key!r}: {event.row!r} of {event.of} is no entry")
            return
        entry = Entry(match[1].replace("\0\xff", "\0"), match[2])
        came = self._came[entry]
        last = max(came, default=0)
        is_again = event.of in came and self._written[entry, event.of] != event.timestamp
        if event.of < last or (is_again and (entry.key, event.of) not in often):
            self._wrong(entry, f"it was written as of {event.of} after it was written as of {last}")
        came[event.of] = event.row is not None
        self._written[entry, event.of] = event.timestamp

    def _compare_times(self, entry: Entry) -> None:
        """Compare an entry with the source as of each of its commits. What no progress covers may be missing."""
        expected, came = self._expected.get(entry, {}), self._came.get(entry, {})
        end = self._through[-1][1] if self._through else 0
        was_due = was_there = False
        for at in sorted(expected.keys() | came.keys()):
            is_due, is_there = expected.get(at, was_due), came.get(at, was_there)
            if at not in came and at > end:
                return
            self._report.counts["derived rows compared at the source's times"] += 1
            promised = [commit for commit, through in self._through if through >= at][:1]
            if is_due != is_there:
                self._wrong(entry, f"as of {at}: due is {is_due}, found is {is_there}")
                return
            if promised and self._written.get((entry, at), 0) > promised[0]:
                self._wrong(
                    entry, f"as of {at}: it came after {promised[0]}, which had promised it"
                )
            was_due, was_there = is_due, is_there


_REPLAYS: dict[str, type[_Replay]] = {"totals": _Totals, ASYNCHRONOUS: _Later}


def _judge_states(history: History, report: Report, derivation: Derivation) -> None:
    """Judge that no other version is ready when one becomes ready."""
    for timestamp, state in derivation.states:
        if state != "ready":
            continue
        report.counts["versions that became ready"] += 1
        ready = history.ready(derivation.source, derivation.name, timestamp)
        if len(ready) > 1:
            text = f"at {timestamp} {' and '.join(map(str, ready))} are ready"
            report.add("mixed-versions", text, [each.op.where for each in ready])


def _judge_end(history: History, report: Report, derivation: Derivation) -> None:
    """Judge that no transaction began, and wrote a version, after it had ended."""
    ended = derivation.ended
    if ended is None:
        return
    for commit in derivation.changes:
        for txn_id in commit.ids:
            txn = history.by_id.get(txn_id)
            if txn is None or txn.begin is None:
                continue
            report.counts["commits with entries"] += 1
            if ended.ended_before(txn.begin):
                text = f"{txn} wrote {derivation} at {commit.timestamp}, which had ended"
                report.add("mixed-versions", text, [ended.told_where, txn.begin.where])


def _judge_total_read(history: History, report: Report, rows: Rows, op: Operation) -> None:
    """Judge that a total was so at the snapshot of its transaction, and just below the commit.

    One of a transaction that had written to the source before is not judged.
    """
    txn = history.txns[op.asked["txn"]]
    at, given = snapshot_of(txn), [op.result["sum"], op.result["count"]]
    if at is None or op.result.get("own"):
        return
    report.counts["totals that were looked up"] += 1
    due = _total(history, rows, op, at)
    if due is not None and given not in due:
        text = f"total of {op.asked['value']!r} at {at}: given {given}, due {due}"
        report.add("snapshot-not-prefix", text, [op.where, op.told_where])
        return
    if not is_serializable(txn) or not txn.is_committed or txn.timestamp is None:
        return
    report.counts["look-ups that hold at their commit"] += 1
    due = _total(history, rows, op, txn.timestamp - 1)
    if due is not None and given not in due:
        text = f"{txn}, of {txn.timestamp}, saw total {given} of {op.asked['value']!r}, due {due}"
        report.add("write-skew", text, [op.told_where, *(commit.where for commit in txn.commits)])


def _total(history: History, rows: Rows, op: Operation, at: int) -> list[list[int]] | None:
    """What a look-up of a total may have found at a time, by the version that is ready; None: it is not known."""
    source, name, value = (op.asked[field] for field in ("table", "derivation", "value"))
    if not history.knows(source, name):
        return None
    found = []
    for ready in history.ready(source, name, at):
        ids = [row for key in rows.keys if (row := rows.at(key, at)) and value in ready.values(row)]
        found.append([sum(map(ready.number_of, ids)), len(ids)])
    return found
