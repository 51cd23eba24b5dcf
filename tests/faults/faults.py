"""What is done to whom and when: a schedule that is a function of its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

How = Literal["hard", "clean", "frozen"]
Whom = Literal["broker", "controller", "client"]

HOWS: tuple[How, ...] = ("hard", "clean", "frozen")
WHOMS: tuple[Whom, ...] = ("broker", "controller", "client")


class Fault(NamedTuple):
    """``hard``: SIGKILL, and started again after ``hold`` seconds; ``clean``: ended as it should be, and started
    again; ``frozen``: SIGSTOP for ``hold`` seconds. ``wait``: seconds after the end of the one before.
    """

    wait: float
    how: How
    whom: Whom
    hold: float

    def __str__(self) -> str:
        return f"{self.wait:.1f} s, {self.how} {self.whom} for {self.hold:.1f} s"


def fault(chance: random.Random, how: How, whom: Whom) -> Fault:
    """One of a kind: some are shorter than the sessions (3 s of a broker, 6 s of a member), some longer."""
    longest = 8.0 if how == "frozen" or whom == "broker" else 3.0
    return Fault(chance.uniform(0.3, 2.5), how, whom, chance.uniform(0.1, longest))


def schedule(chance: random.Random, whoms: tuple[Whom, ...]) -> Iterator[Fault]:
    """Faults without end: of each kind in turn, in an order of its own each time."""
    kinds = [(how, whom) for how in HOWS for whom in whoms]
    while True:
        chance.shuffle(kinds)
        for how, whom in kinds:
            yield fault(chance, how, whom)
