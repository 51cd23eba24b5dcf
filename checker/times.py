"""Judges commit timestamps: do they increase in real time, and with the numbers of a series?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from checker.model import Event, History, Txn
from checker.reading import Operation
from checker.report import Report
from checker.sweep import Told

# The operation with the answer, the timestamp in it, and (the transaction or event with that timestamp, the
# operation).
Fact = tuple[Operation, int, tuple[object, Operation]]
# The request, and its subject: a transaction, or a plain event.
Question = tuple[Operation, Txn | Event]


def judge_times(history: History, report: Report) -> None:
    """``non-monotone-timestamps`` between transactions."""
    asked = questions(history)
    for clock, known in facts(history).items():
        for _, later, timestamp, (earlier, told) in Told(known).before(asked.get(clock, [])):
            report.counts["real-time order of commits"] += 1
            own = later.timestamp
            if earlier is later or own is None or own > timestamp or not is_after(later, told):
                continue
            text = f"{later} was asked for after {earlier} was told: {own} is not above {timestamp}"
            evidence = [told.told_where, *asked_at(later)]
            report.add("non-monotone-timestamps", text, evidence)
    _judge_series(history, report)
    _judge_seen(history, report)
    _judge_own(history, report)


def _judge_own(history: History, report: Report) -> None:
    """Judge that no two transactions have the same timestamp, as timestamps order all commits.

    Two control partitions may give the same one to transactions that are within one of them each.
    """
    known: dict[int, list[Txn]] = defaultdict(list)
    for txn in history.all_txns:
        if not txn.is_committed or txn.timestamp is None or txn.txn_id is None:
            continue
        report.counts["commits at a timestamp of their own"] += 1
        clocks = set(history.clocks_of(txn))
        for other in known[txn.timestamp]:
            theirs = set(history.clocks_of(other))
            is_one = other.txn_id == txn.txn_id or any(other.txn_id in x.ids for x in txn.records)
            if not is_one and (clocks & theirs or len(clocks) > 1 or len(theirs) > 1):
                text = f"{other} and {txn} have the same timestamp, {txn.timestamp}"
                report.add("non-monotone-timestamps", text, [*asked_at(other), *asked_at(txn)])
        known[txn.timestamp].append(txn)


def _judge_seen(history: History, report: Report) -> None:
    """Judge that a commit is later than all that its client and its writers had seen before, in any scope."""
    for txn in history.txns.values():
        seen = min((op.asked.get("seen") or 0 for op in txn.candidates), default=0)
        if seen and txn.is_committed and txn.timestamp is not None:
            report.counts["commits above what was seen"] += 1
            if txn.timestamp <= seen:
                text = f"{txn} was asked for with {seen} seen: {txn.timestamp} is not above it"
                report.add("non-monotone-timestamps", text, asked_at(txn))


def facts(history: History) -> dict[str, list[Fact]]:
    """Clock -> commit timestamps in answers, and those that readers by the history got."""
    found: dict[str, list[Fact]] = defaultdict(list)
    for txn in history.all_txns:
        for clock in history.clocks_of(txn):
            for answer in txn.answered("committed"):
                if answer.timestamp is not None:
                    found[clock].append((answer.op, answer.timestamp, (txn, answer.op)))
    for reader in history.readers.values():
        for poll in reader.polls if reader.mode != "raw" else ():
            if not poll.ok:
                continue
            best: dict[str, tuple[int, Event]] = {}
            for row in poll.result["events"]:
                event = history.events.get(row[4])
                if event is None or event.timestamp is None:
                    continue
                clock = history.clock_of(event.stream)
                if clock not in best or best[clock][0] < event.timestamp:
                    best[clock] = (event.timestamp, event)
            for clock, (timestamp, event) in best.items():
                found[clock].append((poll, timestamp, (event.txn or event, poll)))
    return found


def questions(history: History) -> dict[str, list[Question]]:
    """Clock -> committed transactions and plain writes with a known timestamp."""
    found: dict[str, list[Question]] = defaultdict(list)
    for txn in history.txns.values():
        if txn.is_committed and txn.timestamp is not None and txn.first_asked is not None:
            for clock in history.clocks_of(txn):
                found[clock].append((txn.first_asked, txn))
    for event in history.events.values():
        if event.txn is None and event.timestamp is not None:
            found[history.clock_of(event.stream)].append((event.op, event))
    return found


def is_after(later: Txn | Event, told: Operation) -> bool:
    """Whether all its possible commits were requested after that answer."""
    if isinstance(later, Event):
        return later.asked_after(told)
    return all(told.ended_before(commit) for commit in later.candidates)


def asked_at(later: Txn | Event) -> Iterator[str]:
    """The evidence: where it was requested."""
    for op in later.candidates if isinstance(later, Txn) else [later.op]:
        yield op.where


def _judge_series(history: History, report: Report) -> None:
    """Judge that the commits of a series are in the order of their numbers."""
    series: dict[tuple[str, str], dict[tuple[int, int], Txn]] = defaultdict(dict)
    for txn in history.txns.values():
        number = number_of(txn)
        if txn.is_committed and number is not None and txn.timestamp is not None:
            series[number[:2]][txn.timestamp, number[2]] = txn
    for (scope, name), found in series.items():
        for one, other in pairwise(sorted(found)):
            report.counts["numbers of series in order"] += 1
            if one[1] >= other[1] and found[one] is not found[other]:
                text = f"{scope}, series {name}: number {one[1]} at {one[0]}, then {other[1]} at {other[0]}"
                evidence = [*asked_at(found[one]), *asked_at(found[other])]
                report.add("non-monotone-timestamps", text, evidence)


def number_of(txn: Txn) -> tuple[str, str, int] | None:
    """The scope, series and number of a transaction's commit; None if they are uncertain, or it has no number."""
    found = {(op.asked.get("series"), op.asked.get("number")) for op in txn.candidates}
    if len(found) != 1:
        return None
    series, number = found.pop()
    return None if series is None or number is None else (txn.scope, series, number)
