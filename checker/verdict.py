"""The whole way from lines to a report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from checker.reading import Entry, pair, read_folder
from checker.report import Report


def judge(folder: Path) -> Report:
    """The history in a folder.

    Raises:
        BrokenHistory: it can't be read, or contradicts the format.
    """
    return judge_entries(read_folder(folder))


def judge_entries(entries: Iterable[Entry]) -> Report:
    """A history in memory: file, line (from 1) and the parsed line. Raises as `judge`."""
    report = Report()
    operations = pair(entries)
    report.counts["operations"] = len(operations)
    return report
