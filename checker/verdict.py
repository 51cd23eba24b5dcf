"""Judges a whole history: from the lines of its files to a report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from checker.answers import judge_answers
from checker.build import build
from checker.derivations import judge_derivations, read_entries
from checker.matching import match
from checker.programs import judge_programs
from checker.readers import judge_readers
from checker.reading import Entry, pair, read_folder
from checker.report import Report
from checker.seen import judge_seen
from checker.sending import judge_sending
from checker.snapshots import judge_snapshots
from checker.tables import judge_tables
from checker.tasks import judge_tasks
from checker.times import judge_times
from checker.writes import judge_truncations, judge_writes

_JUDGES = (
    judge_writes,
    judge_truncations,
    judge_sending,
    judge_times,
    judge_answers,
    judge_seen,
    judge_readers,
    judge_snapshots,
    judge_tables,
    judge_derivations,
    judge_tasks,
    judge_programs,
)


def judge(folder: Path) -> Report:
    """The report on the history in a folder. Raises: BrokenHistory (unreadable, or against the format)."""
    return judge_entries(read_folder(folder))


def judge_entries(entries: Iterable[Entry]) -> Report:
    """The report on a history in memory. Raises: as `judge`."""
    report = Report()
    operations = pair(entries)
    report.counts["operations"] = len(operations)
    report.counts["operations without an answer"] = sum(op.told is None for op in operations)
    history = build(operations)
    match(history, report)
    read_entries(history, report)
    for judge_one in _JUDGES:
        judge_one(history, report)
    return report
