"""Judges each event of readers and snapshots: was it written and committed, and is it where the log has it?"""

from __future__ import annotations

from checker.matching import check_written
from checker.model import PLAIN, Event, History, Txn
from checker.reading import FAILED, Operation
from checker.report import Report
from checker.writes import choices


def judge_seen(history: History, report: Report) -> None:
    """``dirty-read``, ``aborted-read`` of events missing from the log, and ``unexplained``."""
    accepted: dict[Txn, set[Event]] = {}
    for reader in history.readers.values():
        for poll in reader.polls:
            if poll.ok:
                report.counts[f"polls, {reader.mode}"] += 1
                _judge(history, report, poll, accepted, may_be_bare=reader.mode == "raw")
    for snapshot in history.snapshots.values():
        for read in snapshot.reads:
            report.counts["readings of snapshots"] += 1
            _judge(history, report, read, accepted, may_be_bare=False)


def _judge(
    history: History,
    report: Report,
    op: Operation,
    accepted: dict[Txn, set[Event]],
    *,
    may_be_bare: bool,
) -> None:
    told_at = op.told_at or 0
    report.counts["events seen"] += len(op.result["events"])
    for stream, partition, offset, key, name, txn_id, timestamp in op.result["events"]:
        event = history.events.get(name)
        if event is None:
            report.add("unexplained", f"{name} was seen, and nobody wrote it", [op.told_where])
            continue
        evidence = [op.told_where, event.op.where]
        if event.stream != stream or event.key != key:
            check_written(report, event, stream, key, "seen", evidence)
        txn = event.txn
        first = event.op if txn is None else txn.first_asked
        if first is None or told_at <= first.at or told_at <= event.op.at:
            _judge_dirty(report, op, event)
        if event.part is None:
            _judge_absent(history, report, op, event, (partition, offset), accepted)
        elif (event.part.partition, event.offset) != (partition, offset):
            where = f"at {partition}, {offset}; the log has it at {event.part}, {event.offset}"
            evidence.append(event.part.op.told_where)
            report.add("unexplained", f"{event} was seen {where}", evidence)
        if timestamp is not None and event.timestamp not in (None, timestamp):
            text = f"{event} was seen with timestamp {timestamp}, and has {event.timestamp}"
            report.add("changed-answer", text, evidence)
        own = txn.txn_id if txn is not None else None
        if txn_id == PLAIN:
            txn_id = None
        if own != txn_id and not (txn_id is None and may_be_bare) and not (txn and own is None):
            text = f"{event} was seen as of {txn_id}; it is of {own}"
            report.add("unexplained", text, evidence)


def _judge_dirty(report: Report, op: Operation, event: Event) -> None:
    if op.ended_before(event.op):
        text = f"{event} was seen before it was written"
        report.add("dirty-read", text, [op.told_where, event.op.where])
    elif event.txn is not None and event.txn.candidates and event.asked_after(op):
        text = f"{event} was seen before the commit of {event.txn} was asked"
        asked = [commit.where for commit in event.txn.candidates]
        report.add("dirty-read", text, [op.told_where, *asked])


def _judge_absent(
    history: History,
    report: Report,
    op: Operation,
    event: Event,
    place: tuple[int, int],
    accepted: dict[Txn, set[Event]],
) -> None:
    """Judge an event that a reader got, and that the log lacks."""
    txn = event.txn
    is_gone = history.is_whole(event.stream) and not history.was_deleted(event.stream, *place)
    if txn is None:
        if event.op.outcome == FAILED:
            text = f"{event}, of a plain write that failed, was seen"
            report.add("aborted-read", text, [op.told_where, event.op.told_where])
        elif is_gone:
            text = f"{event} was seen, and is not in the log"
            report.add("lost-write", text, [op.told_where, event.op.where])
        return
    if txn not in accepted:
        accepted[txn] = {event for one in choices(txn) for event in one.must | one.may}
    commits = [commit.where for commit in txn.commits]
    if txn.is_committed is False or event not in accepted[txn]:
        text = f"{event} was seen, and {txn} never committed it"
        report.add("aborted-read", text, [op.told_where, *commits])
    elif is_gone:
        kind = "lost-write" if txn.is_committed else "aborted-read"
        report.add(kind, f"{event} was seen, and is not in the log", [op.told_where, *commits])
