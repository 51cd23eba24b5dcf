"""Parts of the suites, each of about as many minutes as the others; and ``scripts/long``, which runs one of them.

``scripts/long`` runs tests marked ``long``. A part is as many of their files as are expected to take half of
``--minutes``: other work on the machine may double that. The commit's hash chooses the part, so that a run is
repeated by its commit, and a few commits run all parts. When the minutes are over, no further test begins, and the
run fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST, LONG, SOAK = TIERS = ("test", "long", "soak")
# By tier: seconds that each file took, with what it had to start.
DURATIONS = Path(__file__).with_name("durations.json")
# A file of long tests that nobody has measured yet.
UNMEASURED_S = 300.0
MINUTES = 20.0


def stored_durations() -> dict[str, dict[str, float]]:
    """Tier -> file -> seconds."""
    found = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return {tier: found.get(tier, {}) for tier in TIERS}


def shared(
    seconds: Mapping[str, float], count: int, first: Collection[str] = (), among: int = 0
) -> list[list[str]]:
    """As many parts as ``count``. Each unit, the longest first, comes to the part that has least by then.

    ``first``: units that come before all others, into the first ``among`` parts.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for unit in sorted(seconds, key=lambda unit: (unit not in first, -seconds[unit], unit)):
        open_ = loads[: max(1, among)] if unit in first else loads
        least = open_.index(min(open_))
        parts[least].append(unit)
        loads[least] += seconds[unit]
    return parts


def turns(seconds: Mapping[str, float], most: float) -> list[list[str]]:
    """The fewest parts of which none takes longer than ``most`` seconds, unless it is one file."""
    for count in range(1, len(seconds) + 1):
        parts = shared(seconds, count)
        if all(len(part) == 1 or sum(seconds[file] for file in part) <= most for part in parts):
            return parts
    return []


def number_of(commit: str, count: int) -> int:
    """The number of a commit's part, from 0. ``count``: of the parts."""
    return int(commit[:8], 16) % count


def long_files() -> dict[str, float]:
    """Files with tests marked ``long``, and about how many seconds each takes."""
    found = subprocess.run(
        ["git", "grep", "--untracked", "-l", "-F", "pytest.mark.long", "--", "tests/**/test_*.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    known = stored_durations()[LONG]
    return {file: known.get(file, UNMEASURED_S) for file in found.stdout.split()}


def _commit(given: str) -> str:
    """The hash of a commit; what is a hash already need not be in this repository."""
    if re.fullmatch(r"[0-9a-f]{8,40}", given):
        return given
    asked = ["git", "rev-parse", "--verify", f"{given}^{{commit}}"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise argparse.ArgumentTypeError(found.stderr.strip())
    return found.stdout.strip()


def main() -> int:
    """Run the commit's part; pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/long",
        description="Run a part of the tests marked `long`. Other arguments go to pytest.",
    )
    parser.add_argument(
        "--turn", type=_commit, default="HEAD", metavar="HASH",
        help="the commit whose part runs (default: HEAD)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"at most (default {MINUTES:g})"
    )
    parser.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    given, pytest_arguments = parser.parse_known_args()
    seconds = long_files()
    parts = turns(seconds, given.minutes * 30)
    if not parts:
        print("no test is marked `long`")
        return 0
    chosen = number_of(given.turn, len(parts))
    for number, part in enumerate(parts) if given.list else [(chosen, parts[chosen])]:
        print(f"part {number + 1} of {len(parts)}{', the chosen one' if number == chosen else ''}:")
        for file in part:
            print(f"  {file}  {seconds[file]:.0f} s")
    print(
        f"scripts/long --turn {given.turn[:8]} --minutes {given.minutes:g} repeats it", flush=True
    )
    if given.list:
        return 0
    limit = f"--session-timeout={given.minutes * 60:.0f}"
    tests = ["-m", f"{LONG} and not {SOAK}", *parts[chosen]]
    words = ["-m", "pytest", limit, *pytest_arguments, *tests]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
