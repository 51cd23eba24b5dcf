"""Judges what programs have to keep: one outcome of each command, and a total that never changes."""

from __future__ import annotations

import re
from collections import defaultdict

from checker.model import Event, History
from checker.reading import Operation
from checker.report import Report
from checker.tables import Rows

_NUMBER = re.compile(r"(-?\d+)/")


def judge_programs(history: History, report: Report) -> None:
    """``no-outcome``, ``two-outcomes`` and ``wrong-total``."""
    for op in history.outcomes:
        _judge_outcomes(history, report, op)
    for op in history.totals:
        _judge_total(history, report, op)


def number_in(name: str | None) -> int:
    """The number that an id begins with, before a ``/``; 0 without one, and for no row."""
    found = _NUMBER.match(name or "")
    return int(found[1]) if found is not None else 0


def _judge_outcomes(history: History, report: Report, op: Operation) -> None:
    """Judge that each command in the log has one outcome there."""
    commands, streams = (set(op.asked[name]) for name in ("commands", "outcomes"))
    found: dict[str, list[Event]] = defaultdict(list)
    for event in history.events.values():
        if event.stream in streams and _is_there(event):
            found[event.id.partition("/")[0]].append(event)
    for event in history.events.values():
        if event.stream not in commands or not _is_there(event):
            continue
        report.counts["commands with an outcome"] += 1
        outcomes = found.pop(event.id, [])
        evidence = [event.op.where, *(one.op.where for one in outcomes)]
        if not outcomes:
            report.add("no-outcome", f"{event} has no outcome", evidence)
        elif len(outcomes) > 1:
            text = f"{event} has {len(outcomes)}: {', '.join(map(str, outcomes))}"
            report.add("two-outcomes", text, evidence)
    for name, outcomes in found.items():
        text = f"{outcomes[0]} is the outcome of {name}, which is not in the log"
        report.add("unexplained", text, [op.where, outcomes[0].op.where])


def _is_there(event: Event) -> bool:
    return event.part is not None and not event.is_adrift


def _judge_total(history: History, report: Report, op: Operation) -> None:
    """Judge that the sum of all numbers is the same after each commit."""
    changes: dict[int, int] = defaultdict(int)
    for table in op.asked["tables"]:
        rows = Rows.read(history, table)
        if rows is None:
            return
        for versions in rows.of.values():
            before = 0
            for version in versions:
                now = number_in(version.id)
                changes[version.timestamp] += now - before
                before = now
    for event in history.events.values():
        if event.stream in op.asked["changes"] and _is_there(event):
            if event.timestamp is None:
                return
            changes[event.timestamp] += number_in(event.id)
    total = 0
    for timestamp, change in sorted(changes.items()):
        report.counts["totals after a commit"] += 1
        before, total = total, total + change
        if change and (before or total != op.asked["total"]):
            text = f"it is {total} after the commit at {timestamp}, and was {before} before"
            report.add("wrong-total", text, [op.where])
