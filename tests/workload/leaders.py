"""The controllers of a run: two processes of the command line, or forked ones that take over from each other."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from anabranch.batches import columns_write, framing
from tests.cluster import ControllerProcess
from tests.workload.leader import Lead
from tests.workload.zygote import Child, Zygote

LEAD_S = 30.0
CONTROLLER = (
    *("--chunk-bytes", str(16 << 10)),
    # A frozen broker answers nothing: half a minute of patience would be most of a run.
    *("--kafka", "socket.timeout.ms=8000"),
)


class Leaders(Protocol):
    """The controllers of a run."""

    def start(self) -> None:
        """Start them; the first topics come soon."""

    def check(self) -> None:
        """Fail if one ended by itself: controllers wait for brokers that are away, also when they start."""

    def hand_over(self) -> None:
        """Let another one answer from now on."""

    def close(self) -> None:
        """End them."""


class Services:
    """Two processes of `anabranch controller`."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        self.all = [
            ControllerProcess(bootstrap, folder / f"controller-{n}", prefix, CONTROLLER)
            for n in range(2)
        ]

    def start(self) -> None:
        # On a fresh tree they are compiled first, for up to a minute: not in the middle of a fault.
        columns_write.warm()
        framing.warm()
        for controller in self.all:
            controller.start()

    def check(self) -> None:
        for controller in self.all:
            assert controller.running, f"a controller ended by itself: {controller.log_file}"

    def hand_over(self) -> None:
        for controller in self.all:
            if controller.leading():
                controller.stop()
                return

    def close(self) -> None:
        for controller in self.all:
            controller.kill()


@dataclass
class Forked:
    """Forked controllers, one after another, each on the next of some machines: its table is old, or lost.

    ``lost``: how likely a machine has lost its disk. ``how``: fields of each `Lead`.
    """

    zygote: Zygote
    bootstrap: str
    folder: Path
    prefix: str
    chance: random.Random
    machines: int = 3
    lost: float = 0.1
    how: dict[str, Any] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def last(self) -> Child:
        return self.children[-1]

    def fork(self, *points: str) -> Child:
        """The next controller. ``points``: as a `Lead` has them."""
        number = len(self.children)
        machine = self.folder / f"machine-{number % self.machines}"
        if self.chance.random() < self.lost:
            shutil.rmtree(machine, ignore_errors=True)
        spec = Lead(
            self.bootstrap,
            self.prefix,
            f"controller-{number}",
            folder=str(machine / "table"),
            points=points,
            **self.how,
        )
        self.children.append(self.zygote.fork(spec))
        return self.last

    def kill(self) -> None:
        """Kill the leader at a random moment of its work, or of its taking the lead; the next one follows."""
        if self.chance.random() < 0.8:
            self.last.wait_leading(LEAD_S)
        time.sleep(self.chance.uniform(0, 0.3))
        self.check()
        self.last.kill()
        self.killed["controller"] += 1
        self.fork()

    def start(self) -> None:
        self.fork().wait_leading(LEAD_S)

    def check(self) -> None:
        last = self.last
        assert last.running, f"the leader ended by itself: {last.status} {last.events[-3:]}"

    def hand_over(self) -> None:
        self.last.kill()
        self.fork().wait_leading(LEAD_S)

    def end(self) -> None:
        """End the last one in peace."""
        self.last.wait_leading(LEAD_S)
        self.last.signal(signal.SIGTERM)
        self.last.wait_ended()
        assert self.last.status == 0, self.last.status

    def close(self) -> None:
        for child in self.children:
            child.kill()
