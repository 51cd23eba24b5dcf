"""Cuts a failing run down while it fails the same way: fairer weather, less work, then fault by fault.

"The same way": found by the same function of the checks (or of the product, where a process failed), or by the
checker as the same kind of anomaly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from tests.sim.simulation import Report, simulate
from tests.sim.weather import FAIR, Weather

Value = float
Plant = Callable[[], AbstractContextManager[object]]

# How much is done, each with what is tried instead, the least first.
_SIZES: Mapping[str, Sequence[Value]] = {
    "readers": (0, 1, 2),
    "workers": (0, 1, 2),
    "clients": (1, 2),
    "machines": (1, 2),
    "streams": (1, 2),
    "control_partitions": (1,),
    "jobs": (1, 2, 3, 4, 5, 6),
    "work_s": (5.0, 10.0, 20.0),
}
_MOST_FAULTS = 400


@dataclass(frozen=True, slots=True)
class Case:
    """A run. ``changes``: of the seed's weather. ``only``: the faults that strike; None: all that come up."""

    seed: int
    changes: Mapping[str, Value] = field(default_factory=dict)
    only: frozenset[str] | None = None

    def run(self, plant: Plant = nullcontext, trace: Callable[[str], None] | None = None) -> Report:
        """Run it."""
        changes: dict[str, Any] = dict(self.changes)
        return simulate(self.seed, trace=trace, bug=plant(), only=self.only, **changes)

    def command(self, more: str = "") -> str:
        """What replays it exactly."""
        words = [f"scripts/simulate --seeds 1 --start {self.seed}"]
        drawn = Weather.draw(Random(self.seed))
        weather = drawn.changed(self.changes)
        if weather != drawn:
            by_seed = ",".join(weather.differences(drawn))
            by_name = ",".join([FAIR, *weather.differences(Weather())])
            words.append(f"--weather {min(by_seed, by_name, key=len)}")
        if self.only is not None:
            words.append(f"--faults {','.join(sorted(self.only)) or 'none'}")
        return " ".join([*words, *([more] if more else []), "--trace"])


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What came of it."""

    case: Case
    before: Report
    after: Report
    runs: int


def shrink(
    case: Case,
    plant: Plant = nullcontext,
    *,
    seconds: float = math.inf,
    tell: Callable[[str], None] = lambda _: None,
) -> Shrunk:
    """The smallest case that is found within so many seconds.

    Raises:
        ValueError: the case does not fail.
    """
    return _Shrinking(case, plant, seconds, tell).go()


class _Shrinking:
    def __init__(
        self, case: Case, plant: Plant, seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._plant = plant
        self._until = time.monotonic() + seconds
        self._tell = tell
        self._runs = 0
        self._best = case
        self._report = self._before = case.run(plant)
        if not self._before.violation:
            raise ValueError(f"seed {case.seed} does not fail")

    def go(self) -> Shrunk:
        """All passes, until none helps."""
        while self._pass():
            pass
        return Shrunk(self._best, self._before, self._report, self._runs)

    def _pass(self) -> bool:
        before = self._best
        self._sizes()
        self._weather()
        self._faults()
        return self._best != before and time.monotonic() < self._until

    def _try(self, case: Case) -> bool:
        """Whether this one fails in the same way; then it is the best one from here on."""
        if time.monotonic() >= self._until or case == self._best:
            return False
        self._runs += 1
        report = case.run(self._plant)
        if not report.violation or report.origin != self._before.origin:
            return False
        self._best, self._report = case, report
        self._tell(f"{self._runs:4} runs: {size_of(report)}")
        return True

    def _changed(self, **changes: Value) -> Case:
        return replace(self._best, changes={**self._best.changes, **changes})

    def _sizes(self) -> None:
        now = self._report.drawn
        for name, values in _SIZES.items():
            for value in values:
                if value < getattr(now, name) and self._try(self._changed(**{name: value})):
                    break

    def _weather(self) -> None:
        """Kinds of weather: all at once, in halves, and each for itself."""
        fair = Weather()
        names = [
            f.name
            for f in fields(Weather)
            if f.name not in _SIZES and getattr(self._report.drawn, f.name) != getattr(fair, f.name)
        ]
        for some in _parts(names):
            left = [n for n in some if getattr(self._report.drawn, n) != getattr(fair, n)]
            if left:
                self._try(self._changed(**{name: getattr(fair, name) for name in left}))

    def _faults(self) -> None:
        """Single faults: those that struck, without some of them."""
        if len(self._report.struck) > _MOST_FAULTS:
            return
        if self._best.only is None or len(self._best.only) > len(self._report.struck):
            self._try(replace(self._best, only=frozenset(self._report.struck)))
        for some in _parts(list(self._report.struck)):
            known = self._best.only
            if known is not None and known & set(some):
                self._try(replace(self._best, only=known - set(some)))


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """All of them, halves, quarters, …, each for itself."""
    size = len(names)
    while size:
        for at in range(0, len(names), size):
            yield names[at : at + size]
        size //= 2


def size_of(report: Report) -> str:
    """How big a run is, in a line."""
    drawn = report.drawn
    return (
        f"{report.steps} steps, {report.virtual_s:.0f} virtual s, {len(report.struck)} faults, "
        f"{drawn.clients} clients x {drawn.jobs} jobs, {drawn.machines} controllers, {drawn.readers} readers, "
        f"{drawn.streams} streams, {len(drawn.differences(Weather()))} settings that are not as usual"
    )


def story(shrunk: Shrunk, more: str = "") -> str:
    """For people."""
    lines = [
        f"before: {size_of(shrunk.before)}",
        f"after:  {size_of(shrunk.after)}  ({shrunk.runs} runs)",
        *(f"  fault {name} {what}" for name, what in shrunk.after.struck.items()),
        shrunk.after.violation.strip(),
        f"replay: {shrunk.case.command(more)}",
    ]
    return "\n".join(lines)
