"""Judges tables: are transactions serializable in the order of their commit timestamps?

Every read, broken lock and change is compared with the rows as of its time, taken only from logs and histories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checker.model import History, Record, Txn
from checker.reading import Operation
from checker.report import Report


class Version(NamedTuple):
    """A version of a row. ``id``: of the event that wrote it; None: the row was deleted. ``record``: the commit."""

    timestamp: int
    id: str | None
    record: Record

    def is_of(self, txn: Txn) -> bool:
        return txn.txn_id in self.record.ids


@dataclass
class Rows:
    """All versions of a table's rows, by key and in the order of commits."""

    keys: list[str] = field(default_factory=list)  # in order
    of: dict[str, list[Version]] = field(default_factory=dict)
    # Keys, each with the timestamp of a commit, that it writes more than once.
    often: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def read(cls, history: History, table: str) -> Rows | None:
        """The versions, from the table's history and log; None if some of these are deleted or were not read."""
        line = history.chronicles.get(table)
        if line is None or line.is_cut or not history.is_whole(table) or history.is_spoiled(table):
            return None
        if history.is_trimmed(table):
            return None
        lying: dict[int, list[list[Any]]] = {
            number: part.op.result["events"]
            for (stream, number), part in history.parts.items()
            if stream == table
        }
        rows = cls()
        for record in line.items:
            last: dict[str, str | None] = {}
            for partition, start, end in record.ranges:
                there = lying.get(partition, [])
                first = bisect_left(there, start, key=_offset)
                for offset, key, name, _ in there[first:]:
                    if offset >= end:
                        break
                    if key and key in last:
                        rows.often.add((key, record.timestamp))
                    if key:
                        last[key] = name
            for key, name in last.items():
                rows.of.setdefault(key, []).append(Version(record.timestamp, name, record))
        for versions in rows.of.values():
            versions.sort(key=lambda version: version.timestamp)
        rows.keys = sorted(rows.of)
        return rows

    def changes(self) -> dict[int, list[tuple[str, str | None]]]:
        """The rows that each commit wrote: its timestamp -> keys, and ids of versions (None: deleted)."""
        found: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
        for key, versions in self.of.items():
            for version in versions:
                found[version.timestamp].append((key, version.id))
        return found

    def newest(self, key: str, at: int) -> Version | None:
        """A row's version as of a time."""
        versions = self.of.get(key, [])
        found = bisect_left(versions, at + 1, key=lambda version: version.timestamp)
        return versions[found - 1] if found else None

    def within(self, low: str, high: str | None) -> list[str]:
        """Keys of [low, high) that have ever had a row."""
        first = bisect_left(self.keys, low)
        return self.keys[first : None if high is None else bisect_left(self.keys, high)]

    def at(self, key: str, at: int) -> str | None:
        """The id of a row as of a time; None: there is no row."""
        found = self.newest(key, at)
        return None if found is None else found.id

    def between(self, key: str, after: int, before: int) -> Iterator[Version]:
        """Versions later than a time and earlier than another one."""
        versions = self.of.get(key, [])
        for version in versions[
            bisect_left(versions, after + 1, key=lambda version: version.timestamp) :
        ]:
            if version.timestamp >= before:
                return
            yield version


def judge_tables(history: History, report: Report) -> None:
    """``lost-update``, ``write-skew``, ``false-conflict``, ``wrong-change``; ``snapshot-not-prefix`` of reads."""
    tables = {table: Rows.read(history, table) for table in sorted(history.tables)}
    report.counts["tables"] += len(tables)
    wrote = _written(history)
    for op in history.reads:
        rows = tables.get(op.asked["table"])
        known = history.knows(op.asked["table"], op.asked.get("derivation", ""))
        if rows is None or not op.ok or not known:
            report.counts["reads of tables that are not judged"] += 1
        elif "txn" in op.asked:
            _judge_txn_read(history, report, rows, op, wrote)
        else:
            taken = history.snapshots[op.asked["snapshot"]].op
            if taken.ok:
                report.counts["reads of snapshots of tables"] += 1
                _judge_at(history, report, rows, op, taken)
    for txn in history.txns.values():
        _judge_session(report, txn)
        _judge_first_committer(report, tables, txn, wrote)
    for op in history.operations:
        if op.told is not None and "broken" in op.told:
            _judge_broken(history, report, tables, op)
    for op in history.changes:
        rows = tables.get(op.asked["table"])
        if rows is not None and op.ok:
            _judge_changes(report, rows, op)


def snapshot_of(txn: Txn) -> int | None:
    """The time that a transaction reads at, if an answer says so."""
    told: int | None = txn.begin.result.get("snapshot") if txn.begin is not None else None
    return told


def _written(history: History) -> dict[Txn, set[tuple[str, str]]]:
    """Transaction -> table and key of each of its events in the log."""
    found: dict[Txn, set[tuple[str, str]]] = defaultdict(set)
    for event in history.events.values():
        if event.txn is None or event.part is None or event.key is None:
            continue
        if event.stream in history.tables:
            found[event.txn].add((event.stream, event.key))
    return found


# -- reads --------------------------------------------------------------------------------------------


def _seen(op: Operation) -> tuple[dict[str, str], set[str]]:
    """The rows that a read returned, and the keys that its transaction had written, so that they prove nothing."""
    return dict(op.result["rows"] or ()), set(op.result.get("own", ()))


def _wrong(history: History, rows: Rows, op: Operation, at: int) -> list[str]:
    """The keys of a read whose rows were others at a time."""
    seen, own = _seen(op)
    low, high = op.result["low"], op.result["high"]
    is_shown = _shown_by(history, op, at)
    wrong = []
    for key in rows.within(low, high):
        due = rows.at(key, at)
        if due is not None and not is_shown(due):
            due = None
        if key not in own and due != seen.get(key):
            wrong.append(key)
    known = set(rows.within(low, high))
    return wrong + [key for key in seen if key not in known and key not in own]


def _shown_by(history: History, op: Operation, at: int) -> Callable[[str], bool]:
    """Whether a read shows a row with an id: any, or those of an index, or of a derivation, under a value."""
    if "derivation" not in op.asked:
        begins = op.asked.get("begins", "")
        return lambda row: row.startswith(begins)
    ready = history.ready(op.asked["table"], op.asked["derivation"], at)
    value = op.asked["value"]
    return lambda row: any(value in each.values(row) for each in ready)


def _judge_at(history: History, report: Report, rows: Rows, op: Operation, told: Operation) -> bool:
    """Judge that a read returned the rows of its snapshot, in order. ``told``: whose answer has its time."""
    if op.result["rows"] is None:
        return True
    at: int = told.result["snapshot" if told.what == "begin" else "timestamp"]
    keys = [key for key, _ in op.result["rows"]]
    if keys != sorted(set(keys), reverse=bool(op.asked.get("reverse"))):
        report.add("snapshot-not-prefix", f"a read gave its keys out of order: {keys}", _at(op))
        return False
    wrong = _wrong(history, rows, op, at)
    if wrong:
        text = f"read at {at}: {_says(rows, op, wrong[0], at)}"
        report.add("snapshot-not-prefix", text, [told.told_where, *_at(op)])
    return not wrong


def _judge_txn_read(
    history: History,
    report: Report,
    rows: Rows,
    op: Operation,
    wrote: dict[Txn, set[tuple[str, str]]],
) -> None:
    txn = history.txns[op.asked["txn"]]
    at, begin = snapshot_of(txn), txn.begin
    if at is None or begin is None:
        return
    report.counts["reads of transactions on tables"] += 1
    if not _judge_at(history, report, rows, op, begin) or not is_serializable(txn):
        return
    if op.asked.get("unlocked") or not txn.is_committed or txn.timestamp is None:
        return
    if "writer" in op.asked and not _has_finished(txn, op.asked["writer"]):
        return
    report.counts["reads that hold at their commit"] += 1
    report.counts["reads of parts that hold at the commit"] += "writer" in op.asked
    report.counts["look-ups that hold at their commit"] += "derivation" in op.asked
    below = txn.timestamp - 1
    if op.result["rows"] is None:  # locked, not read
        low, high = op.result["low"], op.result["high"]
        wrong = [k for k in rows.within(low, high) if any(rows.between(k, at, txn.timestamp))]
    else:
        wrong = _wrong(history, rows, op, below)
    table, evidence = op.asked["table"], [*_at(op), *(commit.where for commit in txn.commits)]
    what = f"{txn}, of {txn.timestamp}, read at {at}:"
    if wrong:
        own = [key for key in wrong if (table, key) in wrote[txn]]
        kind = "lost-update" if own else "write-skew"
        key = own[0] if own else wrong[0]
        report.add(kind, f"{what} {_says(rows, op, key, below)} just below its commit", evidence)
    elif "derivation" in op.asked:
        first, then = (history.ready(table, op.asked["derivation"], time) for time in (at, below))
        if first != then:
            names = [", ".join(map(str, versions)) or "none" for versions in (first, then)]
            text = f"{what} by {names[0]}, and just below its commit {names[1]} is ready"
            report.add("write-skew", text, evidence)


def _has_finished(txn: Txn, writer: str) -> bool:
    """Whether an answer says that a writer has finished: then its locks count, even if its writes are left out."""
    finish = txn.finishes.get(writer)
    return finish is not None and finish.ok


def _says(rows: Rows, op: Operation, key: str, at: int) -> str:
    seen, _ = _seen(op)
    due = rows.newest(key, at)
    stood = "was not there" if due is None or due.id is None else f"was {due.id}"
    by = f", of {due.timestamp}" if due is not None else ""
    return f"{key!r} of {op.asked['table']} was given as {seen.get(key)}, and {stood}{by}"


def is_serializable(txn: Txn) -> bool:
    """Whether its reads must be true when it commits, too."""
    return txn.begin is not None and txn.begin.asked.get("isolation", "serializable") != "snapshot"


def _at(op: Operation) -> Iterable[str]:
    return op.where, op.told_where


# -- transactions -------------------------------------------------------------------------------------


def _judge_session(report: Report, txn: Txn) -> None:
    """Judge that a snapshot has all that its client had seen before."""
    at, begin = snapshot_of(txn), txn.begin
    if at is not None and begin is not None and at < (begin.asked.get("seen") or 0):
        text = f"{txn} reads at {at}; its client was told of {begin.asked['seen']} before"
        report.add("snapshot-not-prefix", text, _at(begin))


def _judge_first_committer(
    report: Report,
    tables: dict[str, Rows | None],
    txn: Txn,
    wrote: dict[Txn, set[tuple[str, str]]],
) -> None:
    """Judge that no other transaction wrote the rows of one with snapshot isolation since its snapshot."""
    at = snapshot_of(txn)
    if at is None or is_serializable(txn) or not txn.is_committed or txn.timestamp is None:
        return
    for table, key in sorted(wrote[txn]):
        rows = tables.get(table)
        for version in rows.between(key, at, txn.timestamp) if rows is not None else ():
            other = f"so did another at {version.timestamp}"
            text = f"{txn} at {at} wrote {key!r} of {table} at {txn.timestamp}; {other}"
            report.add("lost-update", text, [commit.where for commit in txn.commits])
            return
        report.counts["writes whose first committer won"] += 1


def _judge_broken(
    history: History, report: Report, tables: dict[str, Rows | None], op: Operation
) -> None:
    """Judge that a broken lock names a write of another transaction after the snapshot, and that no broken lock is
    reported of a transaction after its commit was answered.
    """
    table, key, by, timestamp = (op.told or {})["broken"]
    txn, rows = history.txns[op.asked["txn"]], tables.get(table)
    before = [a.op for a in txn.answered("committed") if a.op.ended_before(op)]
    if before:
        text = f"{txn} was told that its locks are broken, though its commit had been answered"
        report.add("false-conflict", text, [before[0].told_where, *_at(op)])
        return
    at = snapshot_of(txn)
    if rows is None or at is None:
        return
    report.counts["broken locks"] += 1
    found = rows.newest(key, timestamp)
    is_real = found is not None and found.timestamp == timestamp and timestamp > at
    if found is not None and found.record.ids:
        is_real = is_real and by in ("", *found.record.ids) and not found.is_of(txn)
    if not is_real:
        text = f"{txn} at {at} was told that {by} wrote {key!r} of {table} at {timestamp}: no other did"
        report.add("false-conflict", text, _at(op))


# -- changes ------------------------------------------------------------------------------------------


def _judge_changes(report: Report, rows: Rows, op: Operation) -> None:
    """Judge that changes are all versions of their span of time, in order, each with the row before it."""
    given = [tuple(row) for row in op.result["rows"]]
    start, until = op.asked["start"], op.result["until"]
    if start is None:
        start = given[0][3] - 1 if given else until
    due: list[tuple[Any, ...]] = []
    for key in rows.keys:
        before = rows.at(key, start)
        for version in rows.between(key, start, until + 1):
            told = version.record.ids[0] if version.record.ids else None
            shown = before if op.asked.get("before") else None
            due.append((key, shown, version.id, version.timestamp, told))
            before = version.id
    due.sort(key=lambda change: (change[3], change[0]))
    report.counts["changes of tables"] += len(given)
    if given != due:
        first = next(
            (n for n, (a, b) in enumerate(zip(given, due, strict=False)) if a != b),
            min(len(given), len(due)),
        )
        gave, right = ([*given, "nothing more"][first], [*due, "nothing more"][first])
        text = (
            f"changes of {op.asked['table']} above {start} up to {until}: given {gave}, due {right}"
        )
        report.add("wrong-change", text, _at(op))


def _offset(row: list[Any]) -> int:
    offset: int = row[0]
    return offset
