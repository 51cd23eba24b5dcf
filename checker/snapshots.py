"""Judges snapshots: do they have exactly the commits up to their timestamp, in order?"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from checker.model import Event, History, Part, Snapshot, Txn
from checker.reading import Operation
from checker.report import Report
from checker.sweep import Told
from checker.tables import snapshot_of
from checker.times import asked_at, facts, is_after, questions
from checker.writes import choices


def judge_snapshots(history: History, report: Report) -> None:
    """``snapshot-not-prefix``, and ``torn-transaction``, ``duplicate`` and ``int-poll-order`` within snapshots."""
    taken = [one for one in history.snapshots.values() if one.op.ok]
    report.counts["snapshots"] += len(taken)
    _judge_times(history, report, taken)
    if not any(snapshot.reads for snapshot in taken):
        return
    expected = _expected(history)
    for snapshot in taken:
        timestamp = snapshot.op.result["timestamp"]
        for read in snapshot.reads:
            stream = read.asked["stream"]
            _judge_read(history, report, snapshot, read, expected[stream], timestamp)


def _judge_times(history: History, report: Report, taken: list[Snapshot]) -> None:
    """Judge that a snapshot of now has every commit answered before, and no commit that was requested later."""
    asked: dict[str, list[tuple[Operation, Snapshot]]] = defaultdict(list)
    told: dict[str, list[tuple[Operation, int, Operation]]] = defaultdict(list)
    for snapshot in taken:
        timestamp, wanted = snapshot.op.result["timestamp"], snapshot.op.asked["asked_for"]
        if wanted is not None and wanted != timestamp:
            text = f"snapshot {snapshot.label} was asked for at {wanted}, and is at {timestamp}"
            report.add("snapshot-not-prefix", text, [snapshot.op.told_where])
        for clock in {history.clock_of(stream) for stream in snapshot.streams}:
            told[clock].append((snapshot.op, timestamp, snapshot.op))
            if wanted is None and not snapshot.op.asked.get("stale"):
                asked[clock].append((snapshot.op, snapshot))
    for txn in history.txns.values():
        at, begin = snapshot_of(txn), txn.begin
        if at is not None and begin is not None:
            told[history.clock_of(begin.asked["scope"])].append((begin, at, begin))
    for clock, known in facts(history).items():
        for op, snapshot, timestamp, (whose, fact) in Told(known).before(asked.get(clock, [])):
            report.counts["real-time order of snapshots"] += 1
            if timestamp > op.result["timestamp"] and _concerns(snapshot, whose):
                late = f"{whose}, told before, is of {timestamp}"
                text = f"snapshot {snapshot.label} is of {op.result['timestamp']}; {late}"
                report.add("snapshot-not-prefix", text, [fact.told_where, op.where])
    later = questions(history)
    for clock, snapshots in told.items():
        for _, commit, timestamp, op in Told(snapshots).before(later.get(clock, [])):
            report.counts["real-time order of snapshots"] += 1
            own = commit.timestamp
            if own is not None and own <= timestamp and is_after(commit, op):
                text = f"{commit} was asked for after a snapshot at {timestamp} was told, and is of {own}"
                report.add("snapshot-not-prefix", text, [op.told_where, *asked_at(commit)])


def _concerns(snapshot: Snapshot, whose: object) -> bool:
    """Whether a snapshot has to have a commit that was answered before: with ``latest`` only one in its streams."""
    if not snapshot.op.asked.get("latest"):
        return True
    events = whose.events if isinstance(whose, Txn) else [whose]
    return any(
        isinstance(event, Event) and event.part is not None and event.stream in snapshot.streams
        for event in events
    )


def _expected(history: History) -> dict[str, list[Event]]:
    """Stream -> all events with a known commit timestamp, in the order of these."""
    found: dict[str, list[Event]] = defaultdict(list)
    must: dict[Txn, set[Event]] = {}
    for event in history.events.values():
        if event.timestamp is None or not history.is_due(event):
            continue
        if event.part is None:
            txn = event.txn
            if txn is None or history.is_trimmed(event.stream):
                continue
            if txn not in must:
                must[txn] = set.intersection(*(one.must for one in choices(txn)), set(txn.events))
            if event not in must[txn]:
                continue
        found[event.stream].append(event)
    for events in found.values():
        events.sort(key=_time)
    return found


def _time(event: Event) -> int:
    return event.timestamp or 0


def _judge_read(
    history: History,
    report: Report,
    snapshot: Snapshot,
    read: Operation,
    expected: list[Event],
    timestamp: int,
) -> None:
    seen: set[Event] = set()
    last: dict[Part, Event] = {}
    keys: dict[str, Event] = {}
    for _, _, _, _, name, _, _ in read.result["events"]:
        event = history.events.get(name)
        if event is None:
            continue
        evidence = [read.told_where, event.op.where]
        if event in seen:
            text = f"snapshot {snapshot.label} shows {event} twice"
            report.add("duplicate", text, evidence)
            continue
        seen.add(event)
        if event.timestamp is not None and event.timestamp > timestamp:
            text = f"snapshot {snapshot.label} at {timestamp} shows {event} of {event.timestamp}"
            report.add("snapshot-not-prefix", text, evidence)
        _judge_order(report, read, event, last, keys)
    due = expected[: bisect_right(expected, timestamp, key=_time)]
    missing = [event for event in due if event not in seen]
    if not history.was_there(read):
        missing = []
    if missing:
        text = f"snapshot {snapshot.label} at {timestamp} does not show {missing[0]}"
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        evidence = [read.told_where, missing[0].op.where]
        report.add("snapshot-not-prefix", text + more, evidence)
    halves = {event.txn for event in missing} & {event.txn for event in seen} - {None}
    for txn in halves:
        text = f"snapshot {snapshot.label} shows some of {txn}, and not all"
        report.add("torn-transaction", text, [read.told_where])


def _judge_order(
    report: Report,
    read: Operation,
    event: Event,
    last: dict[Part, Event],
    keys: dict[str, Event],
) -> None:
    """Judge the order by offset within a partition, and by commit within a key."""
    part = event.part
    before = last.get(part) if part is not None else None
    if part is not None:
        last[part] = event
    if before is not None and before.rank > event.rank:
        text = f"a snapshot showed {event} after {before}"
        report.add("int-poll-order", text, [read.told_where])
    if event.key is None or event.timestamp is None:
        return
    other = keys.get(event.key)
    keys[event.key] = event
    if other is not None and (other.timestamp or 0) > event.timestamp:
        text = f"a snapshot showed {event}, of {event.timestamp}, after {other} of its key"
        report.add("int-poll-order", text, [read.told_where])
