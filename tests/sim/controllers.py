"""The controllers' processes: real controllers in their loop, their disks, and who thinks it should lead.

Carriers run in the loop, or concurrently with it, as threads do on Kafka: then each is a task of the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anabranch.controller import carrier
from anabranch.controller.carrier import Carrier, Carriers
from anabranch.controller.controller import Controller
from anabranch.controller.leadership import STATUS_POSITION
from anabranch.core import rows as k
from anabranch.core.decisions.turn import Settings
from anabranch.core.journal_index import JournalIndex
from anabranch.core.state import State
from anabranch.errors import NotLeader, NotReady
from anabranch.ports import LogError, LogFenced, LogUnavailable, TableError, TopicPartition
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import StagedMergeRow, TermRow
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.creation import create_control_topics
from anabranch.topics.names import commands_topic, status_topic
from tests.sim.faults import Faults
from tests.sim.picture import visible
from tests.sim.ports import SimCluster, open_table
from tests.sim.world import Process, SimClock, World

CLEANING: dict[str, Any] = {
    "clean_ms": 100,
    "clean_records": 2,
    "clean_bytes": 200,
    "clean_history_ms": 400,
    "epoch_again": 4,
    "move_bytes": 300,
}
SELDOM = {"clean_ms": 5_000, "clean_history_ms": 60_000}  # in a run of an hour
IDLE_WAIT_S = 0.5
FENCED_PAUSE_S = 1.0
TROUBLE_PAUSE_S = 0.2
REPLY_PARTITIONS = 2
_RESTART_S = 1.5  # mean
_JOIN_S = 30.0
_REBALANCE_S = 1.0  # how often the controllers' group looks for new control partitions
_LOOK_S = 0.02


@dataclass(eq=False)
class Machine:
    """A controller's machine: disks outlive processes. ``assigned``: what it thinks it should lead."""

    name: str
    disks: dict[int, MemoryStore]
    copies: dict[int, list[dict[bytes, bytes]]]
    assigned: set[int] = field(default_factory=set)
    process: Process | None = None
    starts: int = 0
    full_until: float = 0.0  # its disk has no room before
    led: dict[int, Controller] = field(default_factory=dict)  # where it believes that it leads


class Fleet:
    """All controllers, and the director who says which should lead (a hint only, and often a bad one)."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, prefix: str) -> None:
        self.world = world
        self.cluster = cluster
        self.faults = faults
        self.prefix = prefix
        self.partitions = range(faults.weather.control_partitions)
        self.calm = False
        self.after_lead: Callable[[Controller], None] = lambda controller: None
        self.after_step: Callable[[Controller], None] = lambda controller: None
        self.machines = [
            Machine(
                f"c{number}",
                {p: MemoryStore() for p in self.partitions},
                {p: [] for p in self.partitions},
            )
            for number in range(faults.weather.machines)
        ]

    def start(self) -> None:
        """Start all; the first one leads everything until the director thinks otherwise."""
        self.machines[0].assigned = set(self.partitions)
        for machine in self.machines:
            self._start(machine)
        self._direct()
        if self.faults.weather.grow_s:
            self._look_for_more()
        if self.faults.weather.compact_s:
            self._compact()
        if self.faults.weather.expire_s:
            self._expire()

    def _look_for_more(self) -> None:
        """Let one machine lead each control partition that was added, as the controllers' group does."""
        self.world.later(_REBALANCE_S, self._look_for_more)
        commands = self.cluster.topics.get(commands_topic(self.prefix))
        count = 0 if commands is None else commands.partitions
        for partition in range(len(self.partitions), count):
            leader = self.world.random.choice(self.machines)
            if self.calm:
                leader = next(machine for machine in self.machines if machine.assigned)
            for machine in self.machines:
                machine.disks[partition], machine.copies[partition] = MemoryStore(), []
                process = machine.process
                if process is not None and not process.dead:
                    body = partial(self._serve, machine, process, partition)
                    self.world.spawn(process, f"p{partition}", body)
            leader.assigned.add(partition)
            self.world.note("director", f"{partition} is new, and for {leader.name}")
            self.partitions = range(partition + 1)

    def calm_down(self) -> None:
        """No more changes: one machine leads for good."""
        self.calm = True
        chosen = self.world.random.choice(self.machines)
        for machine in self.machines:
            machine.assigned = set(self.partitions) if machine is chosen else set()
            machine.full_until = 0.0

    def leading(self, partition: int) -> Controller | None:
        """The controller of the machine that should lead, if it thinks that it does."""
        for machine in self.machines:
            if partition in machine.assigned and partition in machine.led:
                return machine.led[partition]
        return None

    def replace(self) -> None:
        """Another machine leads from now on, with an empty disk; one that is alone starts again with it."""
        idle = [machine for machine in self.machines if not machine.assigned]
        chosen = self.world.random.choice(idle or self.machines)

        def begin() -> None:
            for store in chosen.disks.values():
                store.restore({})

        def lead() -> None:
            for machine in self.machines:
                machine.assigned = set(self.partitions) if machine is chosen else set()

        if chosen.process is not None:
            self.world.kill(chosen.process)
        self.world.later(0.0, begin)  # once it is buried
        self.world.later(4 * _RESTART_S, lead)

    # -- what happens to them -------------------------------------------------------------------------

    def _direct(self) -> None:
        if self.calm:
            return
        if not self.faults.awake:
            self.world.later(_LOOK_S, self._direct)
            return
        random = self.world.random
        for partition in self.partitions:
            count = random.choice((0, 1, 1, 1, 2, 2))
            for machine in self.machines:
                machine.assigned.discard(partition)
            for machine in random.sample(self.machines, min(count, len(self.machines))):
                machine.assigned.add(partition)
            names = "+".join(m.name for m in self.machines if partition in m.assigned)
            self.world.note("director", f"{partition} is for {names or 'nobody'}")
        self.world.later(self.faults.span(self.faults.weather.director_s), self._direct)

    def _compact(self) -> None:
        if self.calm:
            return
        for partition in self.partitions:
            place = TopicPartition(status_topic(self.prefix), partition)
            if place in self.cluster.partitions:
                # A tombstone goes only once every table has seen it, as topics and checkpoints promise.
                seen = all(self._is_abreast(m, partition) for m in self.machines)
                drop = seen and self.world.random.random() < 0.5
                if drop:
                    for machine in self.machines:
                        machine.copies[partition].clear()
                self.world.note(
                    "brokers", f"compact {partition}{' tombstones too' if drop else ''}"
                )
                self.cluster.compact(place, drop_tombstones=drop)
        self.world.later(self.faults.span(self.faults.weather.compact_s), self._compact)

    def _expire(self) -> None:
        """Delete commands that are consumed, as their topic's retention does."""
        if self.calm:
            return
        for partition in self.partitions:
            place = TopicPartition(commands_topic(self.prefix), partition)
            rows = visible(self.cluster, TopicPartition(status_topic(self.prefix), partition))
            rounds = [s.record.value for s in rows if s.record.key == k.ROUND_KEY]
            if rounds and rounds[-1] is not None:
                consumed = decode(rounds[-1]).commands_offset
                self.world.note("brokers", f"commands {partition} begin at {consumed}")
                self.cluster.partition(place).delete_below(consumed)
        self.world.later(self.faults.span(self.faults.weather.expire_s), self._expire)

    def _is_abreast(self, machine: Machine, partition: int) -> bool:
        """Whether the machine's table has seen all of the status log."""
        stored = machine.disks[partition].row(STATUS_POSITION)
        if stored is None:
            return False
        place = TopicPartition(status_topic(self.prefix), partition)
        fetched = self.cluster.partition(place).read(
            int.from_bytes(stored, "big"), committed=False, max_bytes=1 << 30
        )
        return fetched is None or not fetched.batches

    def _start(self, machine: Machine) -> None:
        world = self.world
        machine.starts += 1
        process = self.faults.process(f"{machine.name}.{machine.starts}", "controller")
        process.on_death.append(lambda: self._died(machine))
        machine.process = process
        for partition in self.partitions:
            self._lose_disk(machine, partition)
        for partition in self.partitions:
            body = partial(self._serve, machine, process, partition)
            world.spawn(process, f"p{partition}", body)

    def _died(self, machine: Machine) -> None:
        machine.led.clear()
        for store in machine.disks.values():
            store.release()
        pause_s = min(self.faults.span(_RESTART_S), 4 * _RESTART_S)
        self.world.later(pause_s, lambda: self._start(machine))

    def _lose_disk(self, machine: Machine, partition: int) -> None:
        store, copies = machine.disks[partition], machine.copies[partition]
        if self.faults.strikes(self.faults.weather.checkpoint_loss, "lost checkpoint"):
            back = self.world.random.choice(copies) if copies else None
            store.restore(back if back and self.world.random.random() < 0.5 else {})
        elif self.world.random.random() < 0.5:
            copies.append(store.snapshot())

    def _check_room(self, machine: Machine) -> None:
        """`TableError` if the disk is full, or is found to be so now."""
        weather, now = self.faults.weather, self.world.now
        if self.faults.strikes(weather.full_disk, "full disk"):
            machine.full_until = now + self.faults.span(weather.full_disk_s)
        if now < machine.full_until:
            raise TableError("the disk is full: No space left on device")

    # -- a process ------------------------------------------------------------------------------------

    def _serve(self, machine: Machine, process: Process, partition: int) -> None:
        """As the service does: a table that can't be written ends the process; it is started again later."""
        try:
            self._run(machine, process, partition)
        except TableError as error:
            self.world.note(process.name, f"ends: {error}")
            self.world.kill(process)

    def _run(self, machine: Machine, process: Process, partition: int) -> None:
        clock = SimClock(self.world, process)
        source = self.cluster.log_of(process)
        room = partial(self._check_room, machine)
        table = open_table(machine.disks[partition], process, self.world, room)
        count, replies = self._prepare(source, clock)
        weather = self.faults.weather
        settings = Settings(
            control_partition=partition,
            control_partitions=count,
            prefix=self.prefix,
            reply_partitions=replies,
            trusts_open=True,
            retention_ms=int(weather.retention_s * 1000),
            round_bytes=2000 if weather.small else 64 << 20,
            chunk_bytes=weather.chunk_bytes,
            collate_ms=weather.collate_ms,
            **(CLEANING if weather.cleaning else {}) | (SELDOM if weather.hour_s else {}),
            purge_per_look=3 if weather.small else 500,
            lost_after_ms=int(weather.lost_after_s * 1000),
            max_clock_skew_ms=int(weather.apart_s * 1000),
            clock_error_ms=int(weather.error_s * 1000) or None,
        )
        terms: list[TermRow] = []
        while True:
            if partition not in machine.assigned:
                clock.sleep(0.3)
                continue
            controller = Controller(
                source,
                table,
                clock,
                settings,
                leader=process.name,
                native_timeout=weather.native_timeout_s,
                overlap_from=1,
                terms=terms,
            )
            self._lead(machine, partition, controller, clock)

    def _prepare(self, source: object, clock: SimClock) -> tuple[int, int]:
        """The numbers of control partitions and of replies' partitions."""
        while True:
            try:
                return create_control_topics(
                    source,  # type: ignore[arg-type]
                    self.prefix,
                    control_partitions=self.faults.weather.control_partitions,
                    reply_partitions=REPLY_PARTITIONS,
                )[:2]
            except (LogUnavailable, NotReady):
                clock.sleep(TROUBLE_PAUSE_S)

    def _lead(
        self, machine: Machine, partition: int, controller: Controller, clock: SimClock
    ) -> None:
        """As `anabranch.controller.leader` does it."""
        try:
            while partition in machine.assigned:
                try:
                    controller.lead()
                    machine.led[partition] = controller
                    self.after_lead(controller)
                    while partition in machine.assigned:
                        if controller.step(IDLE_WAIT_S):
                            self.after_step(controller)
                except (LogFenced, NotLeader):
                    machine.led.pop(partition, None)
                    clock.sleep(FENCED_PAUSE_S)
                except LogError:
                    machine.led.pop(partition, None)
                    clock.sleep(TROUBLE_PAUSE_S)
            with suppress(LogError, NotLeader):
                controller.hand_over()
        finally:
            machine.led.pop(partition, None)
            controller.resign()


def carriers_beside(world: World) -> Callable[..., Carriers]:
    """What takes the place of `Carriers` in a run."""

    def make(each: Sequence[Carrier], *, threads: bool) -> Carriers:
        return CarriersBeside(world, each)

    return make


class CarriersBeside(Carriers):
    """See `Carriers`: what a carrier does and says is the same, only who runs it is another."""

    def __init__(self, world: World, each: Sequence[Carrier]) -> None:
        super().__init__(each, threads=False)
        self._world = world
        self._busy = 0
        self._started = False

    def sync(
        self, state: State, index: JournalIndex, wall_ms: int, usable: Callable[[str], bool]
    ) -> None:
        """See `Carriers`; the tasks begin with the first work."""
        super().sync(state, index, wall_ms, usable)
        if self._waiting and not self._started:
            self._started = True
            for number, one in enumerate(self._each):
                body = partial(self._run, one)
                self._world.spawn(self._world.current, f"carrier-{number}", body)

    def take(self, wall_ms: int) -> list[StagedMergeRow]:
        """See `Carriers`; what waits is for the tasks."""
        waiting, self._waiting = self._waiting, deque()
        try:
            return super().take(wall_ms)
        finally:
            self._waiting = waiting

    def _run(self, one: Carrier) -> None:
        while not self._stop.is_set():
            if not self._waiting:
                self._world.sleep(_LOOK_S)
                continue
            job = self._waiting.popleft()
            self._busy += 1
            try:
                while not self._stop.is_set():
                    wall_ms = self._world.wall_ms
                    self._results.put(result := carrier._chunk(one, job, wall_ms))
                    if not isinstance(result, StagedMergeRow) or result.done:
                        break
            except Exception as error:  # noqa: BLE001 the leader raises it
                self._results.put(error)
                return
            finally:
                self._busy -= 1

    def close(self) -> bool:
        """See `Carriers`."""
        self._stop.set()
        until = self._world.now + _JOIN_S
        while self._busy and self._world.now < until:
            self._world.sleep(_LOOK_S)
        return super().close() and not self._busy
