"""The lives of a stream: made, written to, altered, truncated and deleted, over and over, under one name.

After an answer this holds: topics have their settings, the deleted events are gone and no others,
and a stream shows nothing of an earlier stream of its name. Positions of former lives are kept, and refused. The
checker of histories knows each life as a stream of its own.
"""

from __future__ import annotations

from random import Random

from anabranch.client.client import Client
from anabranch.errors import AnabranchError, UnknownStream
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.topics.names import history_topic, stream_topic, topics_of
from tests.sim.check_log import hold
from tests.sim.faults import Faults
from tests.sim.ledger import LIFE, Ledger
from tests.sim.picture import histories_of, placed, visible
from tests.sim.ports import SimCluster, client_ports
from tests.sim.readers import reading_client
from tests.sim.world import Process, World

_RESTART_S = 1.0
_TIMEOUT_S = 10.0
_LIVES = 4
_TRIES = 3
_SEGMENTS = 2


class Lives:
    """One process, by the lanes `open` and `admin`; it is started again when it dies, and goes on where it was."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._random = Random(f"{world.seed}/lives")
        self._starts = self._life = self._step = 0
        self._left = _LIVES if faults.weather.lives_s else 0
        self._told: dict[bytes, int] = {}  # event -> its commit timestamp, as answered
        self._until = 0
        self._written = 0
        self._kept: dict[int, str] = {}  # life -> a position in it
        self._is_judged = False  # this life: its log is in the history

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
            except AnabranchError as error:
                self._world.note("life", f"{type(error).__name__}: {error}"[:200])
                failed += self._faults.calm
                if failed == _TRIES:  # in calm: a wrong clock stays so, or time is short
                    self._left = 0
            else:
                self._step = (self._step + 1) % len(steps)
                self._left -= not self._step and self._faults.calm

    def _create(self, client: Client, operator: Client) -> None:
        client.create_stream(LIFE, _SEGMENTS)

    def _write(self, client: Client, operator: Client) -> None:
        recorder = self._ledger.history.here
        for number in range(3):
            self._written += 1
            event, label = f"life-{self._life}-{self._written}", f"life.{self._written}"
            events = [[str(number), event]]
            with recorder.asking("begin", txn=label, scope="s") as told:
                txn = operator.begin("s")
                told["txn_id"] = None
            with txn:
                named = {"txn": label, "writer": "own", "stream": self._name}
                with recorder.asking("write", **named, events=events):
                    txn.write(LIFE, event.encode(), key=b"%d" % number)
                recorder.note("finish", txn=label, writer="own")
                with recorder.asking("commit", txn=label, writers=["own"], own=["own"]) as told:
                    result = txn.commit()
                    told |= {"txn_id": result.txn_id.hex(), "timestamp": result.commit_timestamp}
                    told["committed"] = result.counts.committed
            self._told[event.encode()] = result.commit_timestamp

    @property
    def _name(self) -> str:
        """This life's, in the history."""
        return f"{LIFE}-{self._life}"

    def _alter(self, client: Client, operator: Client) -> None:
        wanted = str(self._random.randrange(1 << 40, 1 << 41))
        operator.alter_stream(LIFE, {"retention.ms": wanted})
        config = self._cluster.topics[stream_topic(LIFE)].config
        hold(config["retention.ms"] == wanted, "an altered setting is told, and not there")

    def _truncate(self, client: Client, operator: Client) -> None:
        until = self._random.choice(sorted(self._told.values()))
        self._until = max(
            self._until, until
        )  # one before, that was not answered, may be carried out
        recorder = self._ledger.history.here
        with recorder.asking("truncate", stream=self._name, until=until):
            operator.truncate_stream(LIFE, until)

    def _look(self, client: Client, operator: Client) -> None:
        snapshot = client.snapshot(LIFE, timeout=_TIMEOUT_S)
        found = {event.value for event in snapshot.read(LIFE)}
        former = [v for v in found if v is None or not v.startswith(b"life-%d-" % self._life)]
        hold(not former, f"life {self._life} shows {former}")
        lost = {v for v, at in self._told.items() if at > self._until} - found
        hold(not lost, f"{lost} were committed after what was deleted")
        for life, position in self._kept.items():
            if life != self._life:
                self._refused(client, life, position)
        if found:
            self._kept[self._life] = snapshot.plan().to_text()
        self._record_log()

    def _refused(self, client: Client, life: int, position: str) -> None:
        """A position in a former life has to be refused in this one."""
        try:
            with client.open_snapshot(position).read(LIFE) as reader:
                given = [event.value for event in reader]
        except UnknownStream:
            return
        hold(False, f"a position of life {life} gives {given} of life {self._life}")

    def _record_log(self) -> None:
        """Nothing of this life is written after it."""
        if self._is_judged:
            return
        self._is_judged = True
        parts = []
        for number in range(_SEGMENTS):
            kept = self._cluster.partition(TopicPartition(stream_topic(LIFE), number))
            there = placed(self._cluster, LIFE, number, graves=False)
            parts.append((self._name, number, kept.start_offset, kept.stable_offset, there))
        place = TopicPartition(history_topic(LIFE), 0)
        found = histories_of(visible(self._cluster, place, graves=False))
        first = self._cluster.partition(place).start_offset
        self._ledger.history.read_log(parts, {self._name: (first, found)})

    def _delete(self, client: Client, operator: Client) -> None:
        operator.delete_stream(LIFE)
        left = self._cluster.topics.keys() & set(topics_of(LIFE))
        hold(not left, f"{left} of a deleted stream are there")
        self._told.clear()
        self._is_judged = False
        self._life += 1
        self._left -= 1
