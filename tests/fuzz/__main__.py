"""``scripts/fuzz``: random and mutated inputs for every decoder that reads the outside."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.fuzz.child import judge
from tests.fuzz.runner import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run what the arguments say; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all (default 1)")
    parser.add_argument("--seed", type=int, default=None, help="default: one made of the time")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these targets, or that start so")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="try one input, in this process"
    )
    parser.add_argument("--list", action="store_true", help="show the targets")
    given = parser.parse_args()
    starts = tuple(given.only or [""])
    names = [name for name in TARGETS if name.startswith(starts)]
    if given.list or not names:
        print("\n".join(TARGETS))
        return 0 if given.list else 2
    if given.replay is not None:
        return _replay(names[0] if len(names) == 1 else starts[0], given.replay)
    seed = given.seed if given.seed is not None else int(time.time()) ^ os.getpid()
    seconds = given.minutes * 60 / len(names)
    began = time.monotonic()
    report = fuzz(names, seed, inputs=0, seconds=seconds, limit=given.minutes * 90 + 120)
    for finding in report.findings:
        print(finding.text(seed), flush=True)
    total = sum(report.done.values())
    counts = ", ".join(f"{name} {report.done[name]:,}" for name in names)
    print(
        f"seed {seed}: {total:,} inputs in {time.monotonic() - began:.0f} s ({counts}); "
        f"{len(report.findings)} findings"
    )
    return 1 if report.findings else 0


def _replay(name: str, file: Path) -> int:
    target = TARGETS[name]
    run = target.make()
    for data in target.seeds()[:3]:
        judge(target, run, data)
    why = judge(target, run, file.read_bytes())
    print(why or "nothing is wrong")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
