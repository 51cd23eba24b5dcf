"""Hunting planted bugs (`tests.mutants.catalogue`) in the simulator, by its own checks or by the checker alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

from tests.mutants.catalogue import CATALOGUE, UNFIT, Mutant
from tests.sim import simulation
from tests.sim.check_epochs import Epochs
from tests.sim.picture import Picture
from tests.sim.simulation import Report, simulate
from tests.sim.weather import CLEAR
from tests.sim.world import World

Judge = Literal["any", "own", "checker"]

MUTANTS = tuple(mutant for mutant in CATALOGUE if mutant.simulated)
BY_CHECKER = "the checker:"
BY_ITSELF = " failed with\n"


def hunt(mutant: Mutant, start: int, seeds: int, judge: Judge = "any") -> Report | None:
    """The first seed that finds the bug: it fails with the bug, and passes without it in the same weather.

    ``judge``: ``own``: the simulator's own checks, and the product's; ``checker``: nothing but the checker, on
    what was recorded; ``any``: whichever comes first.
    """
    # Trouble only where it is what brings the bug out.
    settings: dict[str, Any] = {**CLEAR, **mutant.weather}
    for seed in range(start, start + seeds):
        with checker_alone() if judge == "checker" else nullcontext():
            report = simulate(seed, bug=mutant.plant(), **settings)
            if not report.violation:
                continue
            if judge == "own" and report.violation.startswith(BY_CHECKER):
                continue
            if report.violation.strip().splitlines()[-1].startswith(UNFIT):
                print(
                    f"not counted, {mutant.name!r} does not fit the product: {report}", flush=True
                )
                continue
            unplanted = _violation(seed, judge, tuple(settings.items()))
        if not unplanted:
            return report
        print(f"not counted, it fails without {mutant.name!r} too: {unplanted}", flush=True)
    return None


@cache
def _violation(seed: int, _: Judge, settings: tuple[tuple[str, Any], ...]) -> str:
    """What a seed fails with if no bug is planted: many bugs are looked for in the same weather."""
    return simulate(seed, **dict(settings)).violation


@contextmanager
def checker_alone() -> Iterator[None]:
    """Only what the checker finds is a violation. A process that fails by itself has crashed, and starts again."""
    real = World.fail

    def fail(self: World, message: str, *origin: Any) -> None:
        if message.startswith(BY_CHECKER):
            real(self, message, *origin)
        elif BY_ITSELF in message:
            self.kill(self.current)

    def check(self: simulation._Run) -> tuple[int, Epochs]:
        deleted = self.ledger.deleted
        picture = Picture.take(self.cluster, simulation.PREFIX, self.partitions, deleted=deleted)
        self._judge(picture)
        return len(picture.commits()), Epochs()

    with ExitStack() as stack:
        stack.enter_context(patch.object(World, "fail", fail))
        stack.enter_context(patch.object(simulation._Run, "_check", check))
        stack.enter_context(patch.object(simulation._Run, "_check_disks", lambda _: None))
        yield
