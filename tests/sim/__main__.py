"""``scripts/simulate``: many seeds, one with its trace, or the planted bugs."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.check_epochs import Epochs
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.simulation import simulate


def main() -> int:
    """Run what the arguments say; 1 if anything was found that must not be."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long, 0: never")
    parser.add_argument("--trace", action="store_true", help="print each port call")
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    parser.add_argument(
        "--mutants", nargs="*", metavar="NAME", help="find the planted bugs (all, or these)"
    )
    given = parser.parse_args()
    if given.mutants is not None:
        return _mutants(given.mutants, given.start, given.seeds)
    return _seeds(given)


def _seeds(given: argparse.Namespace) -> int:
    began = time.monotonic()
    done = commits = steps = 0
    epochs = Epochs()
    virtual_s = 0.0
    failed: list[int] = []
    for seed in range(given.start, given.start + given.seeds):
        if given.minutes and time.monotonic() - began > given.minutes * 60:
            break
        report = simulate(seed, trace=print if given.trace else None)
        done, commits, steps = done + 1, commits + report.commits, steps + report.steps
        virtual_s += report.virtual_s
        epochs += report.epochs
        if report.violation or given.trace:
            print(report, flush=True)
        if report.violation:
            failed.append(seed)
            if not given.keep_going:
                break
    print(
        f"{done} seeds from {given.start}: {len(failed)} failed {failed or ''}; {commits} commits, "
        f"{epochs}, "
        f"{steps} steps, {virtual_s / 3600:.1f} virtual hours in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def _mutants(names: list[str], start: int, seeds: int) -> int:
    survived = []
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        began = time.monotonic()
        found = hunt(mutant, start, seeds)
        took = f"{time.monotonic() - began:.1f} s"
        if found is None:
            survived.append(mutant.name)
            print(f"SURVIVED {mutant.name}: {seeds} seeds, {took}", flush=True)
        else:
            why = found.violation.strip().splitlines()[-1]
            print(f"caught {mutant.name} by seed {found.seed}, {took}: {why}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
