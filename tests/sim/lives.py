"""The lives of a stream: made, written to, altered, truncated and deleted, over and over, under one name.

An answer holds from then on: topics have their settings, deleted events are gone and no others,
and a stream of the same name shows nothing of the one before.
"""

from __future__ import annotations

from random import Random

from anabranch.client.client import Client
from anabranch.core.ids import ADMIN_LANE
from anabranch.errors import AnabranchError
from anabranch.ports import LogError
from anabranch.topics.names import stream_topic, topics_of
from tests.sim.check_log import hold
from tests.sim.faults import Faults
from tests.sim.ledger import LIFE, Ledger
from tests.sim.ports import SimCluster, client_ports
from tests.sim.readers import reading_client
from tests.sim.world import Process, World

_RESTART_S = 1.0
_TIMEOUT_S = 10.0
_LIVES = 4
_TRIES = 3


class Lives:
    """One process, by the lanes `open` and `admin`; it is started again when it dies, and goes on where it was."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._random = Random(f"{world.seed}/lives")
        self._starts = self._life = self._step = 0
        self._left = _LIVES if faults.weather.lives_s else 0
        self._told: dict[bytes, int] = {}  # event -> its commit timestamp, as answered
        self._until = 0

    @property
    def done(self) -> bool:
        """All lives are over."""
        return self._left <= 0

    def start(self) -> None:
        """Start a process, if there is something to do."""
        if self.done:
            return
        self._starts += 1
        process = Process(f"life.{self._starts}", "client")
        process.on_death.append(lambda: self._world.later(_RESTART_S, self.start))
        self._world.spawn(process, "main", lambda: self._run(process))

    def _run(self, process: Process) -> None:
        prefix = self._ledger.prefix
        operator = Client(
            client_ports(self._cluster, process, prefix, ADMIN_LANE),
            timeout=_TIMEOUT_S,
            threads=False,
        )
        client = reading_client(self._cluster, process, prefix, timeout=_TIMEOUT_S)
        steps = (self._create, self._write, self._alter, self._truncate, self._look, self._delete)
        failed = 0
        while not self.done:
            self._world.sleep(self._random.expovariate(1 / self._faults.weather.lives_s))
            try:
                steps[self._step](client, operator)
            except (AnabranchError, LogError) as error:
                self._world.note("life", f"{type(error).__name__}: {error}"[:200])
                failed += self._faults.calm
                if failed == _TRIES:  # in calm: a wrong clock stays so, or time is short
                    self._left = 0
            else:
                self._step = (self._step + 1) % len(steps)
                self._left -= not self._step and self._faults.calm

    def _create(self, client: Client, operator: Client) -> None:
        client.create_stream(LIFE, 2)

    def _write(self, client: Client, operator: Client) -> None:
        for number in range(3):
            value = b"life %d %d" % (self._life, number)
            with operator.begin("s") as txn:
                txn.write(LIFE, value, key=b"%d" % number)
                told = txn.commit().commit_timestamp
            self._told.setdefault(value, told)

    def _alter(self, client: Client, operator: Client) -> None:
        wanted = str(self._random.randrange(1 << 40, 1 << 41))
        operator.alter_stream(LIFE, {"retention.ms": wanted})
        config = self._cluster.topics[stream_topic(LIFE)].config
        hold(config["retention.ms"] == wanted, "an altered setting is told, and not there")

    def _truncate(self, client: Client, operator: Client) -> None:
        self._until = self._random.choice(sorted(self._told.values()))
        operator.truncate_stream(LIFE, self._until)

    def _look(self, client: Client, operator: Client) -> None:
        snapshot = client.snapshot(LIFE, timeout=_TIMEOUT_S)
        found = {event.value for event in snapshot.read(LIFE)}
        former = [v for v in found if v is None or not v.startswith(b"life %d " % self._life)]
        hold(not former, f"life {self._life} shows {former}")
        lost = {v for v, at in self._told.items() if at > self._until} - found
        hold(not lost, f"{lost} were committed after what was deleted")

    def _delete(self, client: Client, operator: Client) -> None:
        operator.delete_stream(LIFE)
        left = self._cluster.topics.keys() & set(topics_of(LIFE))
        hold(not left, f"{left} of a deleted stream are there")
        self._told.clear()
        self._life += 1
        self._left -= 1
