"""``scripts/mutants``: the planted bugs, hunted in the simulator or on a real broker; a table of what was found.

``seeds``: each quick one's first seed, from the one on that the catalogue has. ``simulator``: seeds, until the
simulator's own checks and the product's find it, and seeds until the checker does by itself. ``broker``: recorded
workloads that the checker judges. ``tests``: the plays, and the files of tests that find what neither can bring
about. ``table``: what all wrote with ``--json``, which is put into docs/inside/mutants.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mutants.catalogue import CATALOGUE, UNFIT, Mutant

Found = dict[str, Any]
FOUND = Path(__file__).with_name("found.json")
PAGE = Path(__file__).parents[2] / "docs" / "inside" / "mutants.md"
_TABLE = re.compile(r"(<!-- planted bugs -->\n).*?(?=<!-- end -->\n)", re.DOTALL)


def main() -> int:
    """Run what the arguments say; 1 if a bug survived, or something was found where none is planted."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("where", choices=("seeds", "simulator", "broker", "tests", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only; 'none': no bug")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=100, help="of the simulator, at most")
    parser.add_argument("--judge", choices=("own", "checker"), help="one of them only")
    parser.add_argument("--runs", type=int, default=3, help="on a broker, at most")
    parser.add_argument("--keep", type=Path, help="keep the histories of a broker's runs here")
    parser.add_argument("--json", type=Path, help="add what was found to this file, or read it")
    given = parser.parse_intermixed_args()
    if given.where == "table":
        PAGE.write_text(with_tables(PAGE.read_text(), json.loads(FOUND.read_text())))
        return 0
    book = _Book(given.json)
    if given.where in ("seeds", "simulator"):
        logging.disable(logging.ERROR)  # of the product: what goes wrong is meant to
    hunts = {"seeds": _seeds, "simulator": _simulator, "broker": _broker, "tests": _tests}
    return 0 if hunts[given.where](given, book) else 1


class _Book:
    """What was found so far, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._of: dict[str, dict[str, Found]] = {}
        if path is not None and path.exists():
            self._of = json.loads(path.read_text())

    def note(self, name: str, judge: str, found: Found) -> None:
        """Add one."""
        self._of.setdefault(name, {})[judge] = found
        if self._path is not None:
            self._path.write_text(json.dumps(self._of, indent=1))


def _wanted(given: argparse.Namespace, occurs: Callable[[Mutant], bool]) -> list[Mutant]:
    return [m for m in CATALOGUE if occurs(m) and (not given.names or m.name in given.names)]


# -- the simulator ------------------------------------------------------------------------------------


def _seeds(given: argparse.Namespace, _: _Book) -> bool:
    from tests.sim.mutants import hunt

    good = True
    for mutant in _wanted(given, lambda m: m.quick):
        report = hunt(mutant, mutant.seed, given.seeds)
        good = good and report is not None and report.seed == mutant.seed
        now = "none" if report is None else report.seed
        print(f"{'as before' if now == mutant.seed else f'now {now}'}: {mutant.name}", flush=True)
    return good


def _simulator(given: argparse.Namespace, book: _Book) -> bool:
    from tests.sim.mutants import hunt

    good = True
    for mutant in _wanted(given, lambda m: m.simulated):
        for judge in (given.judge,) if given.judge else ("own", "checker"):
            began = time.monotonic()
            report = hunt(mutant, given.seed, given.seeds, judge)
            seconds = round(time.monotonic() - began, 1)
            seeds = report.seed - given.seed + 1 if report else given.seeds
            why = report.violation.strip().splitlines()[-1] if report else ""
            found = {"found": report is not None, "tries": seeds, "seconds": seconds, "why": why}
            book.note(mutant.name, judge, found)
            good = good and (report is not None or judge == "checker")
            said = "caught  " if report else "survived"
            print(f"{said} {judge:7} {seeds:3} seeds, {seconds} s: {mutant.name}: {why:.120}")
            sys.stdout.flush()
    return good


# -- a real broker ------------------------------------------------------------------------------------


def _broker(given: argparse.Namespace, book: _Book) -> bool:
    from anabranch.infra.broker import EmbeddedBroker
    from tests.mutants.workload import TRIALS
    from tests.workload.zygote import Zygote

    good = True
    with Zygote() as zygote, EmbeddedBroker(quick_start=True) as broker:
        if not given.names or "none" in given.names:
            for trial in TRIALS:
                for seed in range(given.seed, given.seed + given.runs):
                    good = not _run(zygote, broker, given, None, trial, seed)["found"] and good
        for mutant in _wanted(given, lambda m: bool(m.broker)):
            found: Found = {}
            for run in range(given.runs):
                found = _run(zygote, broker, given, mutant, mutant.broker, given.seed + run)
                found["tries"] = run + 1
                if found["found"]:
                    break
            book.note(mutant.name, "broker", found)
            good = found["found"] and good
        broker.kill()
    return good


def _run(
    zygote: Any,
    broker: Any,
    given: argparse.Namespace,
    mutant: Mutant | None,
    trial: str,
    seed: int,
) -> Found:
    from tests.mutants.workload import TRIALS, Workload

    what = mutant.name if mutant else "none"
    name = f"{what}-{trial}-{seed}".replace(" ", "-")
    folder = given.keep / name if given.keep else Path(tempfile.mkdtemp(prefix="mutant-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        workload = Workload(zygote, broker.bootstrap, folder, mutant, TRIALS[trial], seed)
        verdict = workload.run()
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    found = verdict.found or bool(verdict.oracle) or verdict.halted
    right = found is (mutant is not None)
    print(f"{'right' if right else 'WRONG'} {what} ({trial}, seed {seed}): {verdict}", flush=True)
    return {
        "found": found,
        "oracle": verdict.oracle,
        "seconds": round(verdict.seconds, 1),
        "kinds": dict(verdict.report.totals),
        "stopped": verdict.stopped[:3],
    }


# -- tests --------------------------------------------------------------------------------------------


def _tests(given: argparse.Namespace, book: _Book) -> bool:
    """Each play, and each file of tests, with its bug: it has to fail."""
    good = True
    for mutant in _wanted(given, lambda m: bool(m.play or m.suite)):
        began = time.monotonic()
        why = _played(mutant) if mutant.play else _run_tests(mutant)
        seconds = round(time.monotonic() - began, 1)
        what = "play" if mutant.play else mutant.suite
        book.note(
            mutant.name, "tests", {"found": bool(why), "tries": 1, "seconds": seconds, "why": why}
        )
        good = good and bool(why)
        said = "caught  " if why else "survived"
        print(f"{said} {what}, {seconds} s: {mutant.name}: {why:.120}", flush=True)
    return good


def _played(mutant: Mutant) -> str:
    assert mutant.play is not None
    with mutant.plant():
        try:
            mutant.play()
        except AssertionError as error:
            return str(error) or "it does not hold"
    return ""


def _run_tests(mutant: Mutant) -> str:
    """The first test that fails; empty if none does, or they can't be run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.mutants.plugin",
        "--mutant",
        mutant.name,
    ]
    ran = subprocess.run(
        [*command, "-n0", "-q", "-x", "-p", "no:cacheprovider", mutant.suite],
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED ")]
    if not failed or ran.returncode != 1:
        return ""
    test, _, why = failed[0].removeprefix("FAILED ").partition(" - ")
    if why.startswith(UNFIT):
        print(f"not counted, {mutant.name!r} does not fit the product: {why}", flush=True)
        return ""
    return test


# -- the table ----------------------------------------------------------------------------------------


def with_tables(page: str, found: dict[str, dict[str, Found]]) -> str:
    """The page of planted bugs with its tables as they should be."""
    from tests.mutants.rules import with_rules

    page = _TABLE.sub(lambda match: f"{match[1]}{table(found)}\n", page)
    return with_rules(page, found)


def table(found: dict[str, dict[str, Found]]) -> str:
    """In Markdown: each mutant, by which judge it was found and in how many tries."""
    heads = ("mutant", "what it breaks", "simulator's own checks", "checker in the simulator")
    lines = [
        f"| {' | '.join((*heads, 'checker on a broker', 'tests'))} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mutant in CATALOGUE:
        mine = found.get(mutant.name, {})
        cells = [
            _cell(mine.get(judge), mutant.simulated if judge != "broker" else bool(mutant.broker))
            for judge in ("own", "checker", "broker")
        ]
        cells.append(_tests_cell(mutant, mine.get("tests")))
        lines.append(f"| {mutant.name} | {mutant.breaks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _tests_cell(mutant: Mutant, found: Found | None) -> str:
    if not (mutant.play or mutant.suite):
        return ""
    if found is None:
        return "not run"
    if not found["found"]:
        return "no"
    return "play" if mutant.play else f"`{mutant.suite.removeprefix('tests/')}`"


def _cell(found: Found | None, occurs: bool) -> str:
    if not occurs:
        return ""
    if found is None:
        return "not run"
    kinds = ", ".join(found.get("kinds", ()))
    if not kinds and found.get("oracle"):
        kinds = "by the log alone"
    if not kinds and found.get("stopped"):
        kinds = "the product's own checks stop it"
    if not found["found"]:
        return f"no, in {found['tries']}"
    return f"{found['tries']}{f': {kinds}' if kinds else ''}"


if __name__ == "__main__":
    sys.exit(main())
