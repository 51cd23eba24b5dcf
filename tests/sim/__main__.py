"""``scripts/simulate``: many seeds; one again, with its trace; a failing one cut down; or the planted bugs."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tests.sim.check_epochs import Epochs
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.shrink import Case, Plant, shrink, story
from tests.sim.simulation import SPREAD, simulate
from tests.sim.weather import parse


def main() -> int:
    """Run what the arguments say; 1 if anything was found that must not be."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument(
        "--start", type=_start, default=0, metavar="SEED", help="the first one; HEAD: by the commit"
    )
    parser.add_argument("--step", type=int, default=1, help="from one seed to the next (default 1)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="number of processes (default 1)"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long, 0: never")
    parser.add_argument("--trace", action="store_true", help="print each port call")
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    parser.add_argument("--history", type=Path, metavar="FOLDER", help="write what was recorded")
    parser.add_argument(
        "--weather", type=_weather, default={}, metavar="NAME=VALUE,…", help="not as drawn"
    )
    parser.add_argument(
        "--faults", type=_faults, metavar="NAME,…", help="only these strike; 'none': none does"
    )
    parser.add_argument("--mutant", metavar="NAME", help="with this planted bug")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="cut a failing seed down")
    parser.add_argument(
        "--mutants", nargs="*", metavar="NAME", help="find the planted bugs (all, or these)"
    )
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # of the product: what goes wrong is meant to
    if given.mutants is not None:
        return _mutants(given.mutants, given.start, given.seeds)
    if given.mutant is not None and given.mutant not in [mutant.name for mutant in MUTANTS]:
        parser.error(f"no such mutant; there are {', '.join(mutant.name for mutant in MUTANTS)}")
    if given.shrink is not None:
        return _shrink(given)
    return _seeds(given) if given.at_once == 1 else _at_once(given, sys.argv[1:])


def _start(given: str) -> int:
    """A seed, or for HEAD the one that the commit's hash gives: each commit has its own."""
    if given.isdecimal():
        return int(given)
    asked = ["git", "rev-parse", "--verify", f"{given}^{{commit}}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode:
        raise argparse.ArgumentTypeError(found.stderr.strip())
    start = int(found.stdout[:8], 16)
    print(f"commit {found.stdout[:8]}: seeds from {start}", flush=True)
    return start


def _at_once(given: argparse.Namespace, arguments: list[str]) -> int:
    """Each process plays every n-th seed; options that come later override the given ones."""
    many = given.at_once
    begun = []
    if "--start" in arguments:
        arguments[arguments.index("--start") + 1] = "0"  # a child need not look up the commit
    for number in range(many):
        own = ["--at-once", "1", "--start", str(given.start + number * given.step)]
        own += ["--step", str(given.step * many)]
        own += ["--seeds", str(len(range(number, given.seeds, many)))]
        begun.append(subprocess.Popen([sys.executable, "-m", "tests.sim", *arguments, *own]))
    return max(process.wait() for process in begun)


def _weather(given: str) -> dict[str, float]:
    try:
        return parse(given.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _faults(given: str) -> frozenset[str]:
    return frozenset(given.split(",")) - {"none"}


def _planted(given: argparse.Namespace) -> tuple[Plant, dict[str, float]]:
    """The bug to plant, and what its weather has to be."""
    for mutant in MUTANTS:
        if mutant.name == given.mutant:
            return mutant.plant, dict(mutant.weather)
    return _nothing, {}


def _nothing() -> AbstractContextManager[object]:
    return nullcontext()


def _shrink(given: argparse.Namespace) -> int:
    plant, weather = _planted(given)
    case = Case(given.shrink, {**weather, **given.weather}, given.faults)
    seconds = given.minutes * 60 if given.minutes else float("inf")
    try:
        found = shrink(case, plant, seconds=seconds, tell=lambda text: print(text, flush=True))
    except ValueError as error:
        print(error)
        return 0
    print(story(found, f'--mutant "{given.mutant}"' if given.mutant else ""))
    return 1


def _seeds(given: argparse.Namespace) -> int:
    began = time.monotonic()
    done = commits = spread = steps = overlapped = 0
    epochs = Epochs()
    virtual_s = 0.0
    failed: list[int] = []
    plant, weather = _planted(given)
    for number in range(given.seeds):
        seed = given.start + number * given.step
        if given.minutes and time.monotonic() - began > given.minutes * 60:
            break
        report = simulate(
            seed,
            trace=print if given.trace else None,
            bug=plant(),
            only=given.faults,
            history=given.history / str(seed) if given.history else None,
            **{**weather, **given.weather},
        )
        done, commits, steps = done + 1, commits + report.commits, steps + report.steps
        virtual_s += report.virtual_s
        epochs += report.epochs
        overlapped += report.overlapped
        spread += report.judged.get(SPREAD, 0)
        if report.violation or given.trace:
            print(report, flush=True)
        if report.violation:
            failed.append(seed)
            if not given.keep_going:
                break
    every = f", every {given.step}" if given.step > 1 else ""
    print(
        f"{done} seeds from {given.start}{every}: {len(failed)} failed {failed or ''}; {commits} commits, "
        f"{spread} {SPREAD}, {epochs}, {overlapped} overlapped, "
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
