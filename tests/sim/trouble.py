"""Trouble that lasts: a topic of one stream has no leader, too few replicas, refuses, or answers from the past.

It begins while much else goes wrong, and outlasts that. Once it is all that is wrong, others must not wait: a
*probe* commits to another stream again and again, each time within a bound. When the trouble is over, everything
comes to an end, and the stream is whole: nobody gives it up (`check_lost`). A partition of a control topic, on
which all depend, is in trouble for a moment only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from anabranch.client.client import Client
from anabranch.errors import AnabranchError, ClockSkew, Expired
from anabranch.ports import TopicPartition
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import commands_topic, replies_topic, status_topic
from tests.sim.faults import Faults
from tests.sim.ledger import Ledger
from tests.sim.ports import SimCluster, client_ports
from tests.sim.topics import NAMES
from tests.sim.world import Process, World
from tests.sim.writers import SCOPE, commit_one

BOUND_S = 10.0  # a commit takes at most so long while another stream is all that is in trouble
_OWN = f"{SCOPE}/probe"  # of all streams there may be only the troubled one yet
_MOMENT_S = (0.5, 4.0)
_AMBUSH_S = 10.0  # so long a native transaction is waited for whose marker can be lost
_LIMITS = ("70", "100", "300")  # a marker has 78 bytes
_POLICY = 44
_RIGHTS = 29
_LIMIT = "max.message.bytes"
_CONTROLLERS = "c"  # processes that are called so
_READERS = "r"
_KINDS = {
    "leaderless_s": Kind.LEADERLESS,
    "few_replicas_s": Kind.FEW_REPLICAS,
    "failed_disk_s": Kind.FAILED_DISK,
    "refusing_s": Kind.REFUSING,
    "denying_s": Kind.DENYING,
    "stale_s": Kind.STALE,
    "stale_reads_s": Kind.STALE,
    "small_limit_s": None,
}
_PASSING = (Kind.LEADERLESS, Kind.FEW_REPLICAS, Kind.FAILED_DISK, Kind.STALE)


class Outages:
    """All of a run. ``stream``: the one that comes into trouble."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._random = Random(f"{world.seed}/trouble")
        self._lasting: dict[TopicPartition, Trouble] = {}
        self._lane = ""  # the one that is in trouble
        self._probing = self._held = False
        self._whose = ""
        self.stream = self._random.choice(ledger.streams)
        if faults.weather.small_limit_s:
            ledger.limited.add(self.stream)

    def start(self) -> None:
        """From now on, if the weather has it."""
        for name, kind in _KINDS.items():
            whose = _READERS if name == "stale_reads_s" else ""
            self._later(getattr(self._faults.weather, name), self._spoiling(kind, whose))
        self._later(self._faults.weather.control_s, self._control)
        self._later(self._faults.weather.lane_s, self._spoil_lane)

    def _later(self, mean_s: float, event: Callable[[], None]) -> None:
        if mean_s:
            self._world.later(1.0 + self._random.expovariate(1 / mean_s), event)

    # -- it comes -------------------------------------------------------------------------------------

    def _spoiling(self, kind: Kind | None, whose: str = "") -> Callable[[], None]:
        loses = kind is Kind.LEADERLESS and bool(self._faults.weather.lose_markers)
        armed = False

        def spoil() -> None:
            nonlocal armed
            if self._faults.calm:
                return
            if not self._stands():
                self._world.later(1.0, spoil)
            elif loses and not armed:
                armed = True
                self._cluster.on_end = self._lose_a_marker
                self._world.later(_AMBUSH_S, spoil)
            elif not armed or self._cluster.on_end is not None:
                self._cluster.on_end = None
                name = self._random.choice(sorted(NAMES))
                self._put(NAMES[name](self.stream), kind, whose=whose)

        return spoil

    def _stands(self) -> bool:
        deleted = self.stream in self._ledger.deleted
        return not deleted and self._cluster.hands.stands(self.stream)

    def _lose_a_marker(self, written: Sequence[TopicPartition]) -> None:
        """A native transaction ends that wrote to these: the leader of one goes before its marker comes there."""
        topics = {name(self.stream) for name in NAMES.values()}
        places = [place for place in written if place.topic in topics]
        if places and not self._faults.calm and self._stands():
            self._cluster.on_end = None
            place = self._random.choice(places)
            self._put(place.topic, Kind.LEADERLESS, [place])

    def _put(
        self,
        topic: str,
        kind: Kind | None,
        places: list[TopicPartition] | None = None,
        whose: str = "",
    ) -> None:
        """On one partition, or on all of them: as a broker goes, or the topic's settings are."""
        if places is None:
            count = self._cluster.topics[topic].partitions
            places = [TopicPartition(topic, number) for number in range(count)]
            if kind in _PASSING and self._random.random() < 0.5:
                places = [self._random.choice(places)]
        what = kind.name.lower().replace("_", " ") if kind is not None else "small limit"
        if not self._faults.strikes(1.0, what, topic):
            return
        self._world.note("brokers", f"{topic} from now on: {what}")
        self._ledger.troubled.add(self.stream)
        if kind is None:
            self._cluster.hands.alter(topic, _LIMIT, self._random.choice(_LIMITS))
        else:
            made = {place: self._trouble(kind, place, whose) for place in places}
            self._lasting |= made
            self._cluster.troubles.update(made)
        self._world.changed()

    def _trouble(self, kind: Kind, place: TopicPartition, whose: str = "") -> Trouble:
        if kind is Kind.STALE:
            log = self._cluster.partition(place)
            ends = [log.start_offset, *(entry.next_offset for entry in log.entries)]
            known = [end for end in ends if end <= log.stable_offset][-4:]
            process = whose or self._random.choice(["c0.", "c0.", "k0.", "r0."])
            return Trouble(kind, process=process, end=self._random.choice(known))
        if kind in (Kind.REFUSING, Kind.DENYING):
            code = _RIGHTS if kind is Kind.DENYING else self._random.choice((_RIGHTS, _POLICY))
            return Trouble(kind, code, _CONTROLLERS)
        return Trouble(kind)

    def _spoil_lane(self) -> None:
        """A topic of a lane can't be used: others must not wait for it."""
        if self._faults.calm:
            return
        if not self._ledger.lanes:
            self._world.later(1.0, self._spoil_lane)
            return
        self._lane = self._random.choice(sorted(self._ledger.lanes))
        topic = self._random.choice((commands_topic, replies_topic))
        name = topic(self._ledger.prefix, self._lane)
        kind = self._random.choice((Kind.LEADERLESS, Kind.DENYING, None))
        if not self._faults.strikes(1.0, "lane in trouble", name):
            self._lane = ""
            return
        self._world.note("brokers", f"{name} from now on: {kind.name if kind else 'gone'}")
        if kind is None:
            self._cluster.hands.gone.add(name)
        else:
            denied = Trouble(kind, _RIGHTS, _CONTROLLERS)
            trouble = denied if kind is Kind.DENYING else Trouble(kind)
            places = [place for place in self._cluster.partitions if place.topic == name]
            self._lasting |= dict.fromkeys(places, trouble)
            self._cluster.troubles.update(self._lasting)
        self._world.changed()

    def _control(self) -> None:
        """A control topic's partition, for a moment."""
        if self._faults.calm:
            return
        self._later(self._faults.weather.control_s, self._control)
        names = (commands_topic, status_topic, replies_topic)
        topic = self._random.choice(names)(self._ledger.prefix)
        kind, seconds = self._random.choice(_PASSING), self._random.uniform(*_MOMENT_S)
        places = [place for place in self._cluster.partitions if place.topic == topic]
        if not places or not self._faults.strikes(1.0, "control topic", topic):
            return
        place = self._random.choice(places)
        self._world.note("brokers", f"{topic}[{place.partition}] {kind.name} for {seconds:.3f} s")
        self._cluster.troubles[place] = self._trouble(kind, place)
        self._world.later(seconds, lambda: self._free(place))

    def _free(self, place: TopicPartition) -> None:
        self._cluster.troubles.pop(place, None)
        self._world.changed()

    # -- it is all that is wrong, and then it is over ---------------------------------------------------

    @property
    def lasts(self) -> bool:
        """Something of a stream is in trouble."""
        return bool(self._lasting or self._cluster.hands.altered or self._lane)

    def outlast(self) -> None:
        """Others commit meanwhile; then it is over. Called once all other faults have ended."""
        if not self.lasts and not self._ledger.poisoned:
            return
        world, ends = self._world, self._world.now + self._faults.weather.trouble_for_s
        self._whose = self.stream if self.lasts else "a poisonous command"
        self._whose = f"lane {self._lane}" if self._lane else self._whose
        others = [s for s in self._ledger.streams if s not in self._ledger.deleted]
        others = [s for s in others if s != self.stream and self._cluster.hands.stands(s)]
        self._probing = True
        self._spawn("probe", [*others, _OWN], must=True)
        if self.lasts:
            self._spawn("stir", [self.stream], must=False)
        world.run(lambda: world.now >= ends, ends)
        self._probing = False
        world.note("brokers", "the trouble is over")
        for place in self._lasting:
            self._free(place)
        self._lasting.clear()
        self._cluster.hands.restore()
        self._cluster.hands.gone.clear()
        self._lane = ""
        world.changed()

    def _spawn(self, name: str, streams: Sequence[str], *, must: bool) -> None:
        process = Process(f"{name}.1", "client")

        def body() -> None:
            ports = client_ports(self._cluster, process, self._ledger.prefix)
            size = self._world.random.choice((0, 1 << 18))  # by journals, or in one command
            client = Client(ports, timeout=BOUND_S, one_shot_bytes=size, threads=False)
            if must:
                self._create(client)
            while self._probing:
                self._commit(client, streams, must=must)
                self._world.sleep(1.0)

        self._world.spawn(process, "main", body)

    def _create(self, client: Client) -> None:
        try:
            client.create_stream(_OWN, 1, timeout=BOUND_S)
        except AnabranchError as error:
            self._waits(_OWN, error)

    def _waits(self, stream: str, error: AnabranchError) -> None:
        self._held = self._held or self._cluster.held_by_the_dead()
        if self._held:
            return  # the successor waits until the trouble is over: docs/inside/decisions/0013
        what = f"{type(error).__name__}: {error}"
        self._world.fail(f"{stream} waits for {self._whose}: {what}")

    def _commit(self, client: Client, streams: Sequence[str], *, must: bool) -> None:
        """One event; ``must``: it is committed in time."""
        timeout = BOUND_S if must else 3.0
        deal = self._ledger.open(SCOPE, "probe")
        stream = self._random.choice(streams)
        try:
            commit_one(self._world, self._ledger, client, deal, stream, timeout)
        except AnabranchError as error:
            # Clocks stay where they jumped to. If an answer was lost, the wrong clock is the cause of the error.
            clocks = any(isinstance(e, ClockSkew | Expired) for e in (error, error.__cause__))
            if must and not clocks:
                self._waits(stream, error)
