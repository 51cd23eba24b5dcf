"""The schedule of faults, targets and times: a function of its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from anabranch.infra.broker import EmbeddedBroker

How = Literal["hard", "clean", "frozen"]
Whom = Literal["broker", "coordinator", "brokers", "controller", "client"]

HOWS: tuple[How, ...] = ("hard", "clean", "frozen")
WHOMS: tuple[Whom, ...] = ("broker", "coordinator", "brokers", "controller", "client")


class Fault(NamedTuple):
    """``hard``: SIGKILL, and started again after ``hold`` seconds; ``clean``: ended as it should be, and started
    again; ``frozen``: SIGSTOP for ``hold`` seconds. ``wait``: seconds after the end of the one before.

    ``coordinator``: the broker that coordinates the controllers' native transactions or a group of readers, while
    it has such work in hand; ``brokers``: all of them at once.
    """

    wait: float
    how: How
    whom: Whom
    hold: float

    def __str__(self) -> str:
        return f"{self.wait:.1f} s, {self.how} {self.whom} for {self.hold:.1f} s"


def fault(chance: random.Random, how: How, whom: Whom) -> Fault:
    """One of a kind: some are shorter than the sessions (3 s of a broker, 6 s of a member), some longer."""
    is_short = whom == "brokers" or (how != "frozen" and whom in ("controller", "client"))
    longest = 3.0 if is_short else 8.0
    return Fault(chance.uniform(0.3, 2.5), how, whom, chance.uniform(0.1, longest))


def schedule(chance: random.Random, whoms: tuple[Whom, ...]) -> Iterator[Fault]:
    """Faults without end: of each kind in turn, in an order of its own each time."""
    kinds = [(how, whom) for how in HOWS for whom in whoms]
    while True:
        chance.shuffle(kinds)
        for how, whom in kinds:
            yield fault(chance, how, whom)


def strike(nodes: list[EmbeddedBroker], how: How, hold: Callable[[], object]) -> None:
    """All these brokers at the same time; undone after ``hold`` has returned."""
    begin: dict[How, Callable[[EmbeddedBroker], None]] = {
        "hard": EmbeddedBroker.kill,
        # Without a majority the last ones would wait for it.
        "clean": lambda node: node.stop(timeout_s=5.0 if len(nodes) > 1 else 10.0),
        "frozen": EmbeddedBroker.pause,
    }
    end = EmbeddedBroker.resume if how == "frozen" else EmbeddedBroker.start
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(begin[how], nodes))
        hold()
        list(pool.map(end, nodes))
