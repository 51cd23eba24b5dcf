"""An independent judge of recorded histories: what clients asked and were told, what readers saw, what the log has.

`docs/checker.md` is its design. It imports nothing of `anabranch`, but for `anabranch.schemas`.
"""

from checker.reading import BrokenHistory
from checker.report import KINDS, Anomaly, Report
from checker.verdict import judge, judge_entries

__all__ = ["KINDS", "Anomaly", "BrokenHistory", "Report", "judge", "judge_entries"]
