"""Judges the log: are the events of a key in the order in which they were written?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from checker.model import Event, History
from checker.reading import Operation
from checker.report import Report


def judge_sending(history: History, report: Report) -> None:
    """``int-send-order`` and ``ext-send-order``."""
    keys: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for part in history.parts.values():
        for event in part.items:
            if event.key is not None:
                keys[event.stream, event.key].append(event)
    for (stream, _), events in keys.items():
        known = all(event.record for event in events)
        # In a state stream, each task's partition may have the same key: these rows have no order between them.
        if len({event.part for event in events}) == 1 or (known and not stream.endswith(".state")):
            # On one partition the offset gives the order; across partitions the history does.
            if len({event.part for event in events}) > 1:
                events.sort(key=lambda e: (e.timestamp or 0, e.part.partition if e.part else 0))
            orders = [events]
        else:
            split: dict[object, list[Event]] = defaultdict(list)
            for event in events:
                split[event.part].append(event)
            orders = list(split.values())
        for order in orders:
            _within(report, order)
            _between(report, order)
    report.counts["keys with an order"] += len(keys)


def _within(report: Report, events: Iterable[Event]) -> None:
    """Judge the order of each writer's events."""
    writers: dict[tuple[object, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.writer is not None:
            writers[event.txn, event.writer].append(event)
    for order in writers.values():
        latest: dict[str, Event] = {}  # file -> the event of the latest request
        highest: dict[Operation, Event] = {}  # operation -> its last event so far
        for event in order:
            others = {*latest.values(), highest.get(event.op, event)} - {event}
            for other in others:
                if _sent_before(event, other):
                    text = f"{event} was written before {other}, and comes after it"
                    places = [event.op.where, other.op.where]
                    report.add("int-send-order", text, [*places, *_shown(event)])
            known = latest.get(event.op.file)
            if known is None or known.op.line < event.op.line:
                latest[event.op.file] = event
            known = highest.get(event.op)
            if known is None or known.index < event.index:
                highest[event.op] = event


def _sent_before(one: Event, other: Event) -> bool:
    if one.op is other.op:
        return one.index < other.index
    return one.op.ok and one.op.ended_before(other.op)


def _between(report: Report, events: Iterable[Event]) -> None:
    """Judge a transaction's events against those of transactions that began after its answer."""
    latest: dict[str, tuple[Operation, Event]] = {}  # file -> the latest request to commit
    for event in events:
        txn = event.txn
        if txn is None:
            continue
        asked = txn.first_asked
        if asked is None:
            continue
        for answer in txn.answered("committed"):
            later = [
                (first, other)
                for first, other in latest.values()
                if other.txn is not txn and other.asked_after(answer.op)
            ]
            for first, other in later[:1]:
                text = f"{txn} was committed before {other.txn}: {event} comes after {other}"
                evidence = [answer.op.told_where, first.where, *_shown(event)]
                report.add("ext-send-order", text, evidence)
            if later:
                break
        known = latest.get(asked.file)
        if known is None or known[0].line < asked.line:
            latest[asked.file] = (asked, event)


def _shown(event: Event) -> list[str]:
    return [event.part.op.told_where] if event.part is not None else []
