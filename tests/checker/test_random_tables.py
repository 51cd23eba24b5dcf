"""Random histories of a table, made by one thing after the other, are sound; one lie in them is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from checker import judge_entries
from checker.reading import Entry
from tests.checker.tape import Tape

TABLE, KEYS = "s/a", "abcdefghijklmnop"


@dataclass
class Toy:
    """A table and transactions that are open; a commit holds if nothing that it read was written since."""

    random: Random
    tape: Tape = field(default_factory=Tape)
    clock: int = 100
    rows: list[tuple[int, str, str | None, str]] = field(default_factory=list)  # versions, rising
    open: dict[str, tuple[int, bool, set[str]]] = field(default_factory=dict)
    count: int = 0

    def at(self, key: str, time: int) -> str | None:
        found = [name for at, k, name, _ in self.rows if k == key and at <= time]
        return found[-1] if found else None

    def range(self, low: str, high: str, time: int) -> list[list[str]]:
        there = [(key, self.at(key, time)) for key in KEYS if low <= key < high]
        return [[key, name] for key, name in there if name is not None]

    def begin(self) -> None:
        self.count += 1
        is_strict = self.random.random() < 0.7
        self.open[f"t{self.count}"] = self.clock, is_strict, set()
        how = {"isolation": "serializable" if is_strict else "snapshot", "seen": self.clock}
        told = {"txn_id": None, "snapshot": self.clock}
        self.tape.do("p", "begin", told, txn=f"t{self.count}", scope="s", **how)

    def read(self) -> None:
        txn = self.random.choice(sorted(self.open))
        snapshot, _, read = self.open[txn]
        low, high = sorted(self.random.sample([*KEYS, "~"], 2))
        high = min(high, chr(ord(low) + 3))
        read.update(key for key in KEYS if low <= key < high)
        told = {"low": low, "high": high, "rows": self.range(low, high, snapshot)}
        self.tape.do("p", "read", told, table=TABLE, txn=txn)

    def commit(self) -> None:
        txn = self.random.choice(sorted(self.open))
        snapshot, is_strict, read = self.open.pop(txn)
        events: list[tuple[str, str | None]] = []
        for key in self.random.sample(KEYS, self.random.randint(1, 2)):
            self.count += 1
            events.append((key, None if self.random.random() < 0.2 else f"e{self.count}"))
        self.tape.do(
            "p",
            "write",
            txn=txn,
            writer="w",
            stream=TABLE,
            events=[list(event) for event in events],
        )
        op = self.tape.ask("p", "commit", txn=txn, writers=["w"])
        mine = read if is_strict else {key for key, _ in events}
        breaks = [row for row in self.rows if row[0] > snapshot and row[1] in mine]
        if breaks:
            at, key, _, by = breaks[-1]
            self.tape.told("p", op, "failed", broken=[TABLE, key, by, at])
            return
        self.clock += self.random.randint(1, 9)
        txn_id = f"{len(self.rows) + 1:032x}"
        self.rows += [(self.clock, key, name, txn_id) for key, name in events]
        told: dict[str, Any] = {"txn_id": txn_id, "timestamp": self.clock}
        told["committed"] = len(events)
        if self.random.random() < 0.9:
            self.tape.told("p", op, **told)

    def snapshot(self) -> None:
        self.count += 1
        at = self.random.choice([None, self.random.randint(1, self.clock)])
        where = {"snapshot": f"n{self.count}", "streams": [TABLE], "asked_for": at}
        self.tape.do("p", "snapshot", {"timestamp": at or self.clock}, **where)
        told = {"low": "", "high": None, "rows": self.range("", "~", at or self.clock)}
        self.tape.do("p", "read", told, table=TABLE, snapshot=f"n{self.count}")

    def changes(self) -> None:
        start = self.random.randint(1, self.clock)
        rows = sorted(row for row in self.rows if row[0] > start)
        given = [[key, self.at(key, at - 1), name, at, txn_id] for at, key, name, txn_id in rows]
        told = {"until": self.clock, "rows": given}
        self.tape.do("p", "changes", told, table=TABLE, start=start, before=True)

    def run(self) -> list[Entry]:
        kinds = [self.begin, self.read, self.commit, self.snapshot, self.changes]
        for _ in range(160):
            if len(self.open) < 2:
                self.begin()
            self.random.choices(kinds, [4, 6, 5, 2, 1])[0]()
        lying = [[n, key, name, by] for n, (_, key, name, by) in enumerate(self.rows)]
        told = {"start": 0, "end": len(lying), "events": lying}
        self.tape.do("end", "log", told, stream=TABLE, partition=0, table=True)
        times = {at: by for at, _, _, by in self.rows}
        spans = {at: [n for n, row in enumerate(self.rows) if row[0] == at] for at in times}
        records = [
            [n, at, [times[at]], [[0, spans[at][0], spans[at][-1] + 1]]]
            for n, at in enumerate(times)
        ]
        self.tape.commits(*records)
        return self.tape.entries


def told_of(entries: list[Entry], what: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Questions and answers."""
    asked = {(file, e["op"]): e for file, _, e in entries if e["kind"] == "ask"}
    pairs = [(asked[file, e["op"]], e) for file, _, e in entries if e["kind"] == "told"]
    return [(ask, told) for ask, told in pairs if ask["what"] == what]


def drop_a_row(entries: list[Entry], draw: Random) -> bool:
    found = [told for _, told in told_of(entries, "read") if told["rows"]]
    return bool(found and draw.choice(found)["rows"].pop())


def read_below(entries: list[Entry], draw: Random) -> bool:
    """A transaction reads what it read at an older snapshot than it was told."""
    found = [told for _, told in told_of(entries, "begin") if told["snapshot"] > 110]
    for told in found:
        told["snapshot"] -= 10
    return bool(found)


def blame_another(entries: list[Entry], draw: Random) -> bool:
    found = [told for _, told in told_of(entries, "commit") if "broken" in told]
    if found:
        draw.choice(found)["broken"][3] -= 1
    return bool(found)


def commit_what_is_broken(entries: list[Entry], draw: Random) -> bool:
    """A commit whose locks are broken is carried out in spite of that, above all others."""
    ((_, log),), ((_, history),) = told_of(entries, "log"), told_of(entries, "commits")
    rows, records = log["events"], history["records"]
    newest = {key: name for _, key, name, _ in rows}
    found = [(a, t) for a, t in told_of(entries, "commit") if newest.get(t.get("broken", "__")[1])]
    if not found:
        return False
    ask, told = draw.choice(found)
    (events,) = [a["events"] for a, _ in told_of(entries, "write") if a["txn"] == ask["txn"]]
    at, by, end = records[-1][1] + 1, "f" * 32, len(rows)
    rows += [[end + n, key, name, by] for n, (key, name) in enumerate(events)]
    records.append([len(records), at, [by], [[0, end, len(rows)]]])
    log["end"] = len(rows)
    del told["broken"]
    told |= {"outcome": "ok", "txn_id": by, "timestamp": at, "committed": len(events)}
    return True


def lose_a_change(entries: list[Entry], draw: Random) -> bool:
    found = [told for _, told in told_of(entries, "changes") if told["rows"]]
    return bool(found and draw.choice(found)["rows"].pop(0))


def another_row_before(entries: list[Entry], draw: Random) -> bool:
    found = [told for _, told in told_of(entries, "changes") if told["rows"]]
    if found:
        draw.choice(draw.choice(found)["rows"])[1] = "ghost"
    return bool(found)


def lose_a_deletion(entries: list[Entry], draw: Random) -> bool:
    ((_, log),) = told_of(entries, "log")
    found = [row for row in log["events"] if row[2] is None]
    if found:
        log["events"].remove(draw.choice(found))
    return bool(found)


Lie = Callable[[list[Entry], Random], bool]
LIES: list[tuple[Lie, set[str]]] = [
    (drop_a_row, {"snapshot-not-prefix"}),
    (read_below, {"snapshot-not-prefix"}),
    (blame_another, {"false-conflict"}),
    (commit_what_is_broken, {"lost-update", "write-skew"}),
    (lose_a_change, {"wrong-change"}),
    (another_row_before, {"wrong-change"}),
    (lose_a_deletion, {"lost-write"}),
]


@pytest.mark.parametrize("seed", range(25))
def test_sound_histories(seed: int) -> None:
    report = judge_entries(Toy(Random(seed)).run())
    assert report.ok, report.anomalies
    assert report.counts["reads that hold at their commit"] > 1
    assert report.counts["broken locks"]


@pytest.mark.parametrize(("lie", "kinds"), LIES, ids=[lie.__name__ for lie, _ in LIES])
def test_a_lie_is_found(lie: Lie, kinds: set[str]) -> None:
    told = 0
    for seed in range(20):
        entries = copy.deepcopy(Toy(Random(seed)).run())
        if lie(entries, Random(seed)):
            told += 1
            report = judge_entries(entries)
            assert report.kinds & kinds, f"seed {seed}: {report.kinds}"
    assert told > 5
