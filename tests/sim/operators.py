"""The operator of lanes: makes them, blocks and unblocks them, takes grants away and gives them back."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.errors import IllegalState
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.topics.names import commands_topic
from tests.sim.faults import Faults
from tests.sim.ledger import NOISE, Ledger
from tests.sim.ports import client_ports
from tests.sim.world import Process, World
from tests.sim.writers import FINE, SCOPE

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

RIGHTS = ("describe", "safe-time", "write", "create", "scale", "series")
_RESTART_S = 1.0
_PAUSE_S = 0.3


class Operator:
    """One process, by the lane `admin`. ``names``: the lanes that it makes."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._random = Random(f"{world.seed}/operator")
        self._starts = 0
        self.names = [f"l{number}" for number in range(faults.weather.lanes)]
        self.done = not self.names

    def lane_of(self, worker: int) -> str:
        """The lane of a client: the last one of them all is `open`."""
        return [*self.names, OPEN_LANE][worker % (len(self.names) + 1)]

    def start(self) -> None:
        """Start a process, if there are lanes."""
        if not self.names:
            return
        self._starts += 1
        process = Process(f"op.{self._starts}", "client")
        process.on_death.append(lambda: self._world.later(_RESTART_S, self.start))
        self._world.spawn(process, "main", lambda: self._run(process))

    def _run(self, process: Process) -> None:
        ports = client_ports(self._cluster, process, self._ledger.prefix, ADMIN_LANE)
        client = Client(ports, timeout=10.0, threads=False)
        while not self.done:
            try:
                self._go_on(client)
            except FINE as error:
                self._world.note("operator", f"{type(error).__name__}: {error}"[:200])
            self._world.sleep(_PAUSE_S)

    def _go_on(self, client: Client) -> None:
        for name in self.names:
            if name not in self._ledger.lanes:
                self._make(client, name)
        mean_s = self._faults.weather.rights_s
        if not mean_s or self._faults.calm:
            for name in self.names if self._ledger.blocked or mean_s else ():
                self._restore(client, name)
            self.done = True
            return
        self._world.sleep(self._random.expovariate(1 / mean_s))
        name = self._random.choice(self.names)
        if self._random.random() < 0.5:
            self._block(client, name)
        else:
            client.revoke(name, "*", ("write",))
            self._world.sleep(self._random.expovariate(0.5))
        self._restore(client, name)

    def _make(self, client: Client, name: str) -> None:
        try:
            client.add_lane(name)
        except IllegalState:  # topics of an attempt that was cut short
            client.add_lane(name, adopt_topics=True)
        deadline = client._session.now() + 10.0
        client._session.find_scope(
            SCOPE, deadline, create=True
        )  # a lane that made it may operate it
        client.grant(name, "*", RIGHTS)
        self._ledger.lanes.add(name)

    def _restore(self, client: Client, name: str) -> None:
        client.unblock_lane(name)
        client.grant(name, "*", RIGHTS)

    def _block(self, client: Client, name: str) -> None:
        """What is sent from the answer on until it is unblocked is never carried out."""
        self._ledger.blocked.add(name)
        client.block_lane(name)
        for _ in range(self._random.randint(1, 3)):
            self._world.sleep(self._random.expovariate(2.0))
            self._send_in_vain(name)
        self._world.sleep(self._random.expovariate(0.5))

    def _send_in_vain(self, lane: str) -> None:
        now_ms = self._world.wall_ms
        number = self._random.randrange(self._faults.weather.control_partitions)
        txn_id = make_txn_id(number, now_ms, self._random.getrandbits(64))
        event = r.Event(f"{SCOPE}/a", -1, b"k0", NOISE, (), -1)
        value = encode(r.OneShot(txn_id, SCOPE, None, (event,)))
        place = TopicPartition(commands_topic(self._ledger.prefix, lane), number)
        self._ledger.never.add(txn_id)
        self._cluster.send(place, encode_batch([Record(0, now_ms, None, value)]))
