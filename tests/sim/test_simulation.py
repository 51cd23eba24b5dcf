"""Some seeds. A failing one is printed with the command that replays it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from checker import judge
from tests.sim.simulation import simulate

SEEDS = (*range(446, 470), 498)
# What has to occur in these seeds, or a test of it is none.
FAULTS = frozenset(
    (
        "clock jump",
        "crash",
        "delay",
        "denying",
        "double command",
        "freeze",
        "full disk",
        "half an append",
        "hidden partition",
        "late end",
        "late send",
        "leaderless",
        "lost checkpoint",
        "lost reply",
        "nonsense",
        "refusing",
        "retention",
        "slow disk",
        "slow lead",
        "stale",
        "topic deleted",
        "topic not known",
        "unavailable",
        "uncertain",
        "uncertain send",
    )
)
JUDGED = (
    "transactions committed",
    "answers on transactions",
    "real-time order of commits",
    "polls, ordered",
    "polls, raw",
    "polls, transactions",
    "snapshots",
    "tasks taken",
    "commits that consumed",
    "events consumed",
    "reads of snapshots of tables",
    "reads that hold at their commit",
)


@pytest.mark.slow(30)
@pytest.mark.timeout(300)
def test_what_must_hold_holds_under_every_seed() -> None:
    commits = 0
    faults: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    for seed in SEEDS:
        report = simulate(seed)
        assert not report.violation, str(report)
        commits += report.commits
        faults.update(report.faults)
        judged.update(report.judged)
    assert commits > 5 * len(SEEDS), "too little happens in these runs"
    assert not FAULTS - faults.keys(), "faults that never strike"
    assert all(judged[what] > 20 for what in JUDGED), dict(judged)


def test_a_seed_replays_exactly() -> None:
    for seed in (1, 2, 3):
        lines: list[str] = []
        first = simulate(seed, trace=lines.append)
        again = simulate(seed)
        assert len(lines) > 500
        assert (first.digest, first.steps) == (again.digest, again.steps)


def test_a_history_in_files_is_judged_as_in_memory(tmp_path: Path) -> None:
    report = simulate(2, history=tmp_path)
    assert report.judged == dict(judge(tmp_path).counts)


def test_a_full_disk_ends_the_process_and_nothing_else() -> None:
    """The next one, once there is room, goes on where the log stands."""
    struck = 0
    for seed in (1, 8):
        report = simulate(seed, full_disk=0.04, full_disk_s=2.0)
        assert not report.violation, str(report)
        struck += report.faults.get("full disk", 0)
        assert report.commits > 0
    assert struck > 1
