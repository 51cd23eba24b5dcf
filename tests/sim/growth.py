"""An operator lets the cluster grow by a control partition; then there is a stream in a scope of its own there.

Each lane has to be able to write there, and from then on transactions write to that stream, too. The operator may
die, and repeats its calls until one succeeds.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from anabranch.client.client import Client
from anabranch.errors import InvalidArgument, NotAuthorized
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests.sim.clients import settings_of
from tests.sim.faults import Faults
from tests.sim.ledger import Ledger
from tests.sim.ports import client_ports
from tests.sim.world import Process, World
from tests.sim.writers import FINE, NEW, STREAMS, commit_one

if TYPE_CHECKING:
    from tests.sim.clients import Worker
    from tests.sim.ports import SimCluster

_RESTART_S = 1.0
_PAUSE_S = 0.3
_TIMEOUT_S = 10.0
_JOBS = 3  # that each client does afterwards


class Grower:
    """One process, by the lane `admin`, if the weather has it."""

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, workers: list[Worker]
    ) -> None:  # fmt: skip
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._workers = workers
        self._random = Random(f"{world.seed}/growth")
        self._starts = 0
        self._until = 1 + faults.weather.control_partitions
        self._has_grown = False
        self._writing: set[str] = set()  # lanes that have written to the new stream
        self.done = not faults.weather.grow_s

    def start(self) -> None:
        """Start a process, if the cluster is to grow."""
        if self.done:
            return
        self._starts += 1
        process = self._faults.process(f"gr.{self._starts}", "client")
        process.on_death.append(lambda: self._world.later(_RESTART_S, self.start))
        self._world.spawn(process, "main", lambda: self._run(process))

    def _run(self, process: Process) -> None:
        ports = client_ports(self._cluster, process, self._ledger.prefix, ADMIN_LANE)
        client = Client(ports, timeout=_TIMEOUT_S, threads=False)
        if self._starts == 1:
            self._world.sleep(self._random.expovariate(1 / self._faults.weather.grow_s))
        while not self.done:
            try:
                self._go_on(client)
            except (
                NotAuthorized,
                *FINE,
            ) as error:  # an operator may have taken a lane's right away
                self._world.note("grower", f"{type(error).__name__}: {error}"[:200])
            self._world.sleep(_PAUSE_S)

    def _go_on(self, client: Client) -> None:
        if not self._has_grown:
            client.feature_level(raise_to=LEVEL)
            try:
                client.grow_cluster(self._until)
            except InvalidArgument as error:  # the answer to a former call was lost
                if f"the cluster has {self._until} control partitions" not in str(error):
                    raise
            self._has_grown = True
        client.create_stream(NEW, STREAMS[NEW], settings_of(self._faults))
        for lane in sorted({OPEN_LANE, *self._ledger.lanes} - self._writing):
            try:
                self._write(lane)
            except InvalidArgument as error:
                if "there is no control partition" not in str(error):
                    raise
                client.add_lane(lane)  # when the cluster grew, it was blocked and without its topic
                return
            self._writing.add(lane)
        self._ledger.streams.append(NEW)
        for worker in self._workers:
            worker.jobs += _JOBS
        self.done = True

    def _write(self, lane: str) -> None:
        ports = client_ports(self._cluster, self._world.current, self._ledger.prefix, lane)
        client = Client(ports, timeout=_TIMEOUT_S, threads=False)
        deal = self._ledger.open(NEW.split("/")[0], "one-shot")
        deal.lane = lane
        commit_one(self._world, self._ledger, client, deal, NEW, _TIMEOUT_S)
