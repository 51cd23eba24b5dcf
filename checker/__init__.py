"""An independent judge of recorded histories: requests of clients and their answers, events of readers, the log.

`docs/inside/checker.md` is its design. It imports nothing of `anabranch`.
"""

from checker.reading import BrokenHistory
from checker.report import KINDS, Anomaly, Report
from checker.verdict import judge, judge_entries

__all__ = ["KINDS", "Anomaly", "BrokenHistory", "Report", "judge", "judge_entries"]
