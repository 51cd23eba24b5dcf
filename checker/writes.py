"""Judges the log: does it have each committed transaction whole, and no other event?"""

from __future__ import annotations

from dataclasses import dataclass

from checker.model import Event, History, Txn
from checker.reading import FAILED, Operation
from checker.report import Report


@dataclass(slots=True)
class Choice:
    """The events that one commit takes. ``must``: surely; ``may``: perhaps."""

    commit: Operation
    must: set[Event]
    may: set[Event]

    def misfit(self, present: set[Event], judged: set[Event]) -> int:
        """How many events of the log contradict it. ``judged``: events that the log would have."""
        return len((self.must & judged) - present) + len(present - self.must - self.may)


def judge_writes(history: History, report: Report) -> None:
    """``lost-write``, ``aborted-read`` and ``torn-transaction`` in the log, and wrong counts."""
    for txn in history.txns.values():
        _judge_txn(history, report, txn)
    for event in history.events.values():
        if event.txn is None:
            _judge_plain(history, report, event)
    written = {event.stream for event in history.events.values()}
    unread = [stream for stream in written if not history.is_whole(stream)]
    report.counts["streams whose log was not read whole"] = len(unread)
    if not unread:
        for txn in history.by_id.values():
            told = [answer for answer in txn.answered("committed") if answer.events]
            if not txn.handle and told and not any(history.is_trimmed(s) for s, _ in history.parts):
                text = f"{txn} was told committed with {told[0].events} events; none is in the log"
                report.add("lost-write", text, [told[0].op.told_where])


def judge_truncations(history: History, report: Report) -> None:
    """``lost-write`` of a commit later than a truncation's time, ``undeleted`` of one up to it."""
    for stream, ops in history.truncations.items():
        report.counts["truncations"] += len(ops)
        asked = max(op.asked["until"] for op in ops)
        told = max((op.asked["until"] for op in ops if op.ok), default=-1)
        line = history.chronicles.get(stream)
        for record in line.items if line is not None else ():
            for partition, first, end in record.ranges:
                part = history.parts.get((stream, partition))
                if part is None:
                    continue
                if record.timestamp > asked and first < min(end, part.start):
                    kind, text = "lost-write", f"{record} is above {asked}, and begins below {part}"
                elif record.timestamp <= told and end > max(first, part.start):
                    kind, text = (
                        "undeleted",
                        f"{record} was truncated up to {told}, and is at {part}",
                    )
                else:
                    continue
                evidence = [*(op.where for op in ops), part.op.told_where]
                report.add(kind, f"{text}, which starts at {part.start}", evidence)


def choices(txn: Txn) -> list[Choice]:
    """The events of each possible commit; commits that take the same writers are one."""
    found: dict[tuple[str, ...], Choice] = {}
    done = [answer.op for answer in txn.answered("committed")]
    for commit in txn.candidates:
        if any(op is not commit and op.ended_before(commit) for op in done):
            continue  # an earlier request had committed the transaction
        writers, own = commit.asked["writers"], commit.asked.get("own") or []
        name = ("", *sorted(own)) if writers is None else tuple(sorted(writers))
        if name not in found:
            found[name] = _choice(txn, commit)
    return list(found.values())


def _choice(txn: Txn, commit: Operation) -> Choice:
    choice = Choice(commit, set(), set())
    # For each writer: whether the commit takes it, and which operation ends its events.
    takes = {writer: _takes(txn, commit, writer) for writer in {_writer(e) for e in txn.events}}
    for event in txn.events:
        taken, end = takes[_writer(event)]
        if taken is False or event.op.outcome == FAILED:
            continue
        if commit.ok and commit.ended_before(event.op):
            continue
        if taken and event.op.ok and event.op.ended_before(end):
            choice.must.add(event)
        else:
            choice.may.add(event)
    return choice


def _takes(txn: Txn, commit: Operation, writer: str) -> tuple[bool | None, Operation]:
    """Whether a commit takes a writer (None: unknown), and the operation that ends the writer's events."""
    finish = txn.finishes.get(writer)
    end = finish if finish is not None and not commit.ended_before(finish) else commit
    names = commit.asked["writers"]
    if names is not None:
        perhaps = commit.asked.get("perhaps") or ()
        return None if writer in perhaps and writer not in names else writer in names, end
    if writer in (commit.asked.get("own") or ()):
        return True, end
    if finish is None or (commit.ok and commit.ended_before(finish)):
        return False, end
    return (True if finish.ok and finish.ended_before(commit) else None), end


def _writer(event: Event) -> str:
    """Who asked to write it: known also where ``event.writer`` is not, as the log may show another's deletion."""
    return str(event.op.asked["writer"])


def _judge_txn(history: History, report: Report, txn: Txn) -> None:
    present = {event for event in txn.events if event.part is not None}
    shown = [event.part.op.told_where for event in present if event.part is not None][:1]
    told = [answer.op.told_where for answer in txn.answered("committed", "aborted")]
    asked = [op.where for op in txn.commits]
    report.counts[f"transactions {_called(txn)}"] += 1
    if txn.is_committed is False or not txn.candidates:
        if present:
            why = "never committed" if not txn.candidates else "aborted"
            text = f"{txn} was {why}, and in the log is {_some(present)}"
            report.add("aborted-read", text, [*told, *asked, *shown])
        elif txn.records and txn.handle:
            text = f"{txn} was not committed, and it is in the history of {txn.records[0].line}"
            report.add("aborted-read", text, [*told, *asked, txn.records[0].line.op.told_where])
        return
    if not txn.is_committed:
        return
    judged = {event for event in txn.events if _is_judged(history, txn, event)}
    for commit in txn.commits:
        _judge_own(report, txn, commit, judged - present)
    best = min(choices(txn), key=lambda choice: choice.misfit(present, judged), default=None)
    if best is None:
        return
    missing = (best.must & judged) - present
    written = [event.op.where for event in sorted(missing, key=_written)][:1]
    evidence = [best.commit.where, *told, *written, *shown]
    if missing and (txn.answered("committed") or txn.records):
        text = f"{txn} is committed, and not in the log is {_some(missing)}"
        report.add("lost-write", text, evidence)
    if missing and present:
        text = f"of {txn} {_some(present)} is in the log, {_some(missing)} is not"
        report.add("torn-transaction", text, evidence)
    extra = present - best.must - best.may
    if extra:
        text = f"the commit of {txn} did not take {_some(extra)}, and it is in the log"
        report.add("aborted-read", text, [*evidence, next(iter(extra)).op.where])
    if not missing and not extra:
        _check_counts(history, report, txn, present, judged)


def _judge_own(report: Report, txn: Txn, commit: Operation, absent: set[Event]) -> None:
    """Judge that a client whose commit was answered lost none of its own writes, whichever commit took effect."""
    if not commit.ok or commit.result.get("replayed"):
        return
    own = commit.asked.get("own") or ()
    missing = {e for e in absent if _writer(e) in own and e.op.ok and e.op.ended_before(commit)}
    if missing:
        text = (
            f"who wrote {_some(missing)} was told that {txn} is committed, and it is not in the log"
        )
        report.add("lost-write", text, [commit.where, commit.told_where])


def _check_counts(
    history: History, report: Report, txn: Txn, present: set[Event], judged: set[Event]
) -> None:
    """Judge the numbers of events in answers about a commit. Rows of derived tables count, too."""
    if not judged.issuperset(txn.events) or not all(
        d.is_read for d in history.derivations.values()
    ):
        return
    count = len(present) + history.entries[txn.txn_id or ""]
    for answer in txn.answered("committed"):
        if answer.events is not None and answer.events != count:
            text = f"{txn}: told {answer.events} events, in the log are {count}"
            report.add("unexplained", text, [answer.op.told_where])


def _is_judged(history: History, txn: Txn, event: Event) -> bool:
    """Whether the log would have the event: it was read, and retention has deleted nothing of the transaction."""
    if not history.is_whole(event.stream):
        return False
    if not history.is_due(event):
        return False
    if event.part is not None or not history.is_trimmed(event.stream, event):
        return True
    for record in txn.records:
        if record.line.stream == event.stream:
            places = [(event.stream, p, at) for p, at, _ in record.ranges]
            return not any(history.was_deleted(*place, event) for place in places)
    chronicle = history.chronicles.get(event.stream)
    return chronicle is not None and not chronicle.is_cut


def _judge_plain(history: History, report: Report, event: Event) -> None:
    report.counts[f"plain writes {event.op.outcome}"] += 1
    if event.part is not None:
        if event.op.outcome == FAILED:
            text = f"{event}, of a plain write that failed, is in the log"
            report.add("aborted-read", text, [event.op.told_where, event.part.op.told_where])
    elif event.op.ok and history.is_whole(event.stream) and not _may_be_gone(history, event):
        text = f"{event}, a plain write that was acknowledged, is not in the log"
        report.add("lost-write", text, [event.op.told_where])


def _may_be_gone(history: History, event: Event) -> bool:
    """Whether a plain event may be missing: by retention, or uncommitted when a topic was deleted."""
    return history.is_trimmed(event.stream) or history.is_spoiled(event.stream)


def _called(txn: Txn) -> str:
    if txn.is_committed:
        return "committed" if txn.answered("committed") else "committed, nobody was told"
    return "not known to be committed" if txn.is_committed is None else "not committed"


def _written(event: Event) -> tuple[str, int, int]:
    return event.op.file, event.op.line, event.index


def _some(events: set[Event]) -> str:
    names = [str(event) for event in sorted(events, key=_written)[:3]]
    more = len(events) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
