"""Faults of brokers, controllers and clients: which, of what, when and for how long is a function of a seed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.cluster import EmbeddedCluster
from tests.faults.coordinators import wait_group, wait_transaction
from tests.workload.crew import Crew
from tests.workload.leaders import Services
from tests.workload.readers import Read

# The exit codes of a process that SIGTERM meets before it is a controller.
STARTING = (143, -signal.SIGTERM)
END_S = 120.0
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


class Faults:
    """Does faults to a crew on an embedded cluster. ``struck``: what coordinators had in hand."""

    def __init__(self, crew: Crew, cluster: EmbeddedCluster, services: Services) -> None:
        self._crew = crew
        self._chance = crew.chance
        self._cluster = cluster
        self._services = services
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()

    def suffer(self, fault: Fault) -> None:
        """Do it, hold it, undo it."""
        self._crew.over.wait(fault.wait)
        self._crew.note(fault)
        {
            "broker": self._broker,
            "brokers": self._brokers,
            "coordinator": self._coordinator,
            "controller": self._controller,
            "client": self._client,
        }[fault.whom](fault)
        with self._lock:
            self.done[f"{fault.how} {fault.whom}"] += 1

    def endure(self, plans: Iterable[Iterator[Fault]], seconds: float) -> None:
        """Suffer these plans at the same time, for that long, while a stream is scaled."""
        problems: list[BaseException] = []
        until = time.monotonic() + seconds

        def work(plan: Iterator[Fault]) -> None:
            for fault in plan:
                if time.monotonic() > until or problems:
                    break
                self.suffer(fault)

        def guarded(body: Callable[[], None]) -> threading.Thread:
            def run() -> None:
                try:
                    body()
                except BaseException as error:  # noqa: BLE001 - raised again below
                    problems.append(error)

            return threading.Thread(target=run)

        scaler = guarded(self._crew.keep_scaling)
        threads = [guarded(partial(work, plan)) for plan in plans]
        for thread in (*threads, scaler):
            thread.start()
        for thread in threads:
            thread.join()
        self._crew.over.set()
        scaler.join()
        if problems:
            raise problems[0]

    def figures(self) -> str:
        return f"faults {dict(self.done)}" + (f" {dict(self.struck)}" if self.struck else "")

    # -- brokers --------------------------------------------------------------------------------------

    def _broker(self, fault: Fault) -> None:
        self._strike([self._chance.choice(list(self._cluster.nodes))], fault)

    def _brokers(self, fault: Fault) -> None:
        self._strike(list(self._cluster.nodes), fault)

    def _coordinator(self, fault: Fault) -> None:
        """Strike that of the controllers' native transactions, or of a group of readers, while it has work."""
        crew = self._crew
        specs = [child.spec for child in crew.of(Read)]
        groups = sorted({spec.group for spec in specs if isinstance(spec, Read) and spec.group})
        if groups and self._chance.random() < 0.5:
            number, work = wait_group(crew.bootstrap, self._chance.choice(groups))
        else:
            number, work = wait_transaction(crew.bootstrap, crew.prefix)
        if number not in self._cluster.nodes:  # its partition has no leader just now
            number = self._chance.choice(list(self._cluster.nodes))
        crew.note(f"it is node {number}, with: {work}")
        self._strike([number], fault)
        self.struck[work] += 1

    def _strike(self, numbers: list[int], fault: Fault) -> None:
        nodes = [self._cluster.node(number) for number in numbers]
        strike(nodes, fault.how, lambda: self._hold(fault))

    def _hold(self, fault: Fault) -> None:
        self._crew.over.wait(fault.hold)

    # -- processes ------------------------------------------------------------------------------------

    def _controller(self, fault: Fault) -> None:
        """Strike mostly the one that leads."""
        controllers = self._services.all
        leading = [one for one in controllers if one.leading()]
        some = leading if leading and self._chance.random() < 0.8 else controllers
        victim = self._chance.choice(some)
        self._services.check()
        if fault.how == "frozen":
            victim.signal(signal.SIGSTOP)
            self._hold(fault)
            victim.signal(signal.SIGCONT)
            return
        if fault.how == "hard":
            victim.kill()
        elif (code := victim.stop()) not in (0, *STARTING):
            raise AssertionError(f"a controller ended with {code}: {victim.log_file}")
        self._hold(fault)
        victim.start()

    def _client(self, fault: Fault) -> None:
        victim = self._chance.choice(self._crew.clients)
        assert victim.running, f"{victim.spec.name} ended by itself: {victim.events[-2:]}"
        if fault.how == "frozen":
            victim.signal(signal.SIGSTOP)
            self._hold(fault)
            victim.go_on()
            return
        if fault.how == "hard":
            victim.kill()
        else:
            victim.signal(signal.SIGTERM)
            victim.wait_ended(END_S)
            # One that has just been forked has no handler of signals yet.
            good = (0,) if victim.said("works") else (0, signal.SIGTERM)
            why = f"{victim.spec.name}: {victim.status} {victim.events[-2:]}"
            assert victim.status in good, why
        self._hold(fault)
        self._crew.again(victim)
