"""The final checks of a run under faults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import checker
from tests.faults.team import Team

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))


def judged(team: Team, measured: Callable[[str], None], name: str, seconds: float) -> None:
    """No anomaly, and enough was done that there could have been some."""
    report = checker.judge(team.history)
    struck = f" {dict(team.struck)}" if team.struck else ""
    measured(
        f"{name}: {team.told} commits told, {team.scalings} scalings, faults {dict(team.done)}{struck} "
        f"in {seconds:.0f} s; troubles {dict(team.troubles)}; {len(report.anomalies)} anomalies; "
        f"{dict(report.counts)}; seed {SEED}"
    )
    assert not team.defects, team.defects[:3]
    assert not report.anomalies, "\n".join(map(str, report.anomalies[:5]))
    assert team.told > 3, "too little was done under the faults"
