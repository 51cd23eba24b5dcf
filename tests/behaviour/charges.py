"""A search for the command that costs most for its charge, by CPU time, where a control partition has much of all.

``scripts/hostile charges --minutes 10`` begins with the worst form of each command that is known
(`tests.core.test_costs`) and goes on with mixtures of them, by chance. No command may cost more than `MOST` times
what small commands cost for a unit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

from anabranch.controller.lanes import Command, decide_command
from anabranch.core.round import ReplyTo
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import Refusal
from tests.core.test_costs import MOST, WORST, crowded
from tests.fuzz.samples import sample

SMALL = ("begin another", "touch", "find a scope", "safe time", "label")
TIMES = 5  # the least of so many is taken
LEAST_S = 0.0005  # less is not judged: the clock, and the machine, have pauses
SHOWN = 12


@dataclass(frozen=True, slots=True)
class Cost:
    """A command's seconds and units, and what it is."""

    seconds: float
    units: int
    what: str

    @property
    def each(self) -> float:
        """Seconds a unit."""
        return self.seconds / self.units


def cost(what: str, payload: bytes, *, times: int = TIMES) -> Cost:
    """Decide it some times, each in a fresh state."""
    found: list[tuple[float, int]] = []
    for _ in range(times):
        world = crowded().copy()
        turn = world.new_turn()
        command = Command(7, ReplyTo(b"c", 0, b"d", "etl"), payload, False, "etl")
        gc.collect()
        gc.disable()
        began = time.process_time()
        decide_command(turn, command)
        found.append((time.process_time() - began, turn.work))
        gc.enable()
        answer = turn.round.replies[0][1] if turn.round.replies else None
        what = f"{what}: {answer.code}" if isinstance(answer, Refusal) and ":" not in what else what
    return Cost(min(found)[0], found[0][1], what)


def mixed(random: Random, made: dict[str, Any]) -> tuple[str, bytes]:
    """A known command with some fields of another one of its type, or of chance."""
    name = random.choice(list(made))
    its = made[name]
    alike = [other for other in made.values() if type(other) is type(its)]
    alike.append(sample(type(its), random.getrandbits(32)))
    names = [f.name for f in fields(its)] if is_dataclass(its) else list(its._fields)
    values = {n: getattr(random.choice(alike) if random.random() < 0.3 else its, n) for n in names}
    return f"{name}, mixed", encode(type(its)(**values))


def search(minutes: float, seed: int) -> int:
    """Print the dearest; returns the exit code."""
    random = Random(seed)
    world = crowded().copy()
    made = {name: make(world) for name, make in WORST.items() if name != "adopt"}
    known = {name: cost(name, encode(command)) for name, command in made.items()}
    unit_s = statistics.median(known[name].each for name in SMALL)
    found, tried = list(known.values()), 0
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        what, payload = mixed(random, made)
        its = cost(what, payload, times=1)
        if its.seconds > LEAST_S and its.each > MOST * unit_s:
            its = cost(what, payload)  # the machine may have paused
        found.append(its)
        tried += 1
    found.sort(key=lambda its: -its.each if its.seconds > LEAST_S else 0.0)
    print(
        f"seed {seed}: {len(known)} known commands, {tried} mixed; a unit is {1e6 * unit_s:.1f} µs of small ones"
    )
    for its in found[:SHOWN]:
        print(
            f"  {its.each / unit_s:5.2f} x  {1e3 * its.seconds:8.2f} ms {its.units:8,} units  {its.what}"
        )
    wrong = [its for its in found if its.seconds > LEAST_S and its.each > MOST * unit_s]
    return 1 if wrong else 0


def main() -> int:
    """``scripts/hostile charges``."""
    parser = argparse.ArgumentParser(prog="scripts/hostile charges", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.5, help="how long to search")
    parser.add_argument("--seed", type=int, default=None, help="of all chance")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    return search(options.minutes, seed)


if __name__ == "__main__":
    raise SystemExit(main())
