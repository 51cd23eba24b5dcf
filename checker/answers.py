"""Judges answers to clients about transactions: can all of them be true?"""

from __future__ import annotations

from collections import defaultdict

from checker.model import History, Txn
from checker.reading import Operation
from checker.report import Report
from checker.sweep import Told
from checker.times import number_of

# No answer may be followed by one of a lower rank.
_RANKS = {
    "unknown": 0, "open": 1, "prepared": 2, "committing": 3, "aborting": 4, "aborted": 5, "committed": 5,
}  # fmt: skip


def judge_answers(history: History, report: Report) -> None:
    """``changed-answer``; and ``unexplained``, for effects without a request."""
    for txn in history.all_txns:
        report.counts["answers on transactions"] += len(txn.answers)
        _judge_ends(report, txn)
        _judge_times(report, txn)
        _judge_order(report, txn)
        _judge_causes(report, txn)
    _judge_holders(history, report)


def _judge_ends(report: Report, txn: Txn) -> None:
    """Judge that a transaction is committed or aborted, not both."""
    committed = [answer.op for answer in txn.answered("committed")]
    aborted = [answer.op for answer in txn.answered("aborted", "aborting")] + txn.gave_way
    if committed and aborted:
        text = f"{txn} was told committed, and aborted"
        report.add("changed-answer", text, [committed[0].told_where, aborted[0].told_where])


def _judge_times(report: Report, txn: Txn) -> None:
    """Judge that a transaction has one timestamp and one number of events."""
    times: dict[int, str] = {}
    for answer in txn.answered("committed"):
        if answer.timestamp is not None:
            times.setdefault(answer.timestamp, answer.op.told_where)
    for record in txn.records:
        times.setdefault(record.timestamp, record.line.op.told_where)
    if len(times) > 1:
        text = f"{txn} has the timestamps {', '.join(map(str, times))}"
        report.add("changed-answer", text, times.values())
    counts = {a.events: a.op.told_where for a in txn.answered("committed") if a.events is not None}
    if len(counts) > 1:
        text = f"{txn} has {', '.join(map(str, counts))} events"
        report.add("changed-answer", text, counts.values())


def _judge_order(report: Report, txn: Txn) -> None:
    """Judge that a transaction's states follow each other as in `_RANKS`."""
    known = [(a.op, _RANKS[a.state], a) for a in txn.answers if a.state in _RANKS]
    if len({rank for _, rank, _ in known}) < 2:
        return
    later = [(answer.op, answer) for _, _, answer in known]
    for _, answer, rank, earlier in Told(known).before(later):
        if _RANKS[answer.state] < rank:
            text = f"{txn} was {earlier.state}, and then {answer.state}"
            evidence = [earlier.op.told_where, answer.op.told_where]
            report.add("changed-answer", text, evidence)


def _judge_causes(report: Report, txn: Txn) -> None:
    """Judge that each committed transaction had a request to commit, and each prepared one that aborted a request
    to abort.
    """
    if not txn.handle:
        return
    prepared = txn.answered("prepared")
    aborted = txn.answered("aborted", "aborting") if prepared else []
    if aborted and all(aborted[0].op.ended_before(op) for op in txn.aborts):
        text = f"{txn} was told prepared, and then aborted, though its coordinator had not asked for it"
        evidence = [prepared[0].op.told_where, aborted[0].op.told_where]
        report.add("unexplained", text, [*evidence, *(op.where for op in txn.aborts)])
    for answer in txn.answered("committed"):
        if all(answer.op.ended_before(commit) for commit in txn.candidates):
            text = f"{txn} was told committed, and nobody had asked for it"
            asked = [op.where for op in txn.commits]
            report.add("unexplained", text, [answer.op.told_where, *asked])
            return


def _judge_holders(history: History, report: Report) -> None:
    """Judge that a number or name is committed once, and that a repetition is answered with that commit."""
    holders: dict[tuple[object, ...], dict[Txn, str]] = defaultdict(dict)
    for txn in history.txns.values():
        for op in txn.commits:
            if not op.ok:
                continue
            told = history.by_id.get(op.result["txn_id"], txn)
            for key in _claims(txn, op):
                holders[key].setdefault(told, op.told_where)
                claims = [_claims(told, one) for one in told.candidates] if told.handle else []
                if told is not txn and claims and not any(key in claim for claim in claims):
                    text = f"{txn} gave way to {told}, which never claimed {key}"
                    report.add("unexplained", text, [op.told_where, *_asked(told)])
        if not txn.is_committed or not txn.candidates:
            continue
        if (number := number_of(txn)) is not None:
            holders[number].setdefault(txn, txn.candidates[0].where)
        if len({op.asked.get("name") for op in txn.candidates}) == 1:
            for key in _claims(txn, txn.candidates[0])[-1:]:
                if len(key) == 2:
                    holders[key].setdefault(txn, txn.candidates[0].where)
    for key, found in holders.items():
        report.counts["numbers and names"] += 1
        if len(found) > 1:
            text = f"{key} is committed by {' and by '.join(map(str, found))}"
            report.add("changed-answer", text, found.values())


def _claims(txn: Txn, op: Operation) -> list[tuple[object, ...]]:
    """The number and name that a commit claims: (scope, series, number), (scope, name)."""
    found: list[tuple[object, ...]] = []
    if op.asked.get("series") is not None:
        found.append((txn.scope, op.asked["series"], op.asked["number"]))
    name = op.asked.get("name") or (txn.begin.asked.get("name") if txn.begin else None)
    if name is not None:
        found.append((txn.scope, name))
    return found


def _asked(txn: Txn) -> list[str]:
    return [op.where for op in txn.commits]
