"""An independent judge of recorded histories: requests of clients and their answers, events of readers, the log.

Start with `verdict.judge`. A history is files of lines (``recorder`` writes them, ``reading`` makes operations of
them), from which ``build`` and ``matching`` make the objects of ``model``; then each judge checks one kind of
promise. `docs/inside/checker.md` is the design. It imports nothing of `anabranch`.
"""

from checker.reading import BrokenHistory
from checker.report import KINDS, Anomaly, Report
from checker.verdict import judge, judge_entries

__all__ = ["KINDS", "Anomaly", "BrokenHistory", "Report", "judge", "judge_entries"]
