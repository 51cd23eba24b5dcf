"""One run: a seed draws the weather, the processes and their work; at the end everything is checked."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, KeysView, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

from anabranch.batches import packer
from anabranch.controller import background, controller, durability, intake, suspects
from anabranch.controller.controller import Controller
from anabranch.controller.lanes import Command, Key, Lanes
from anabranch.controller.leadership import STATUS_POSITION
from anabranch.controller.suspects import DIED, SuspectCommands
from anabranch.core import history_records
from anabranch.core import rows as k
from anabranch.core.journal_runs import place_of, txn_of
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import AnabranchError, InvariantViolation
from anabranch.ports import TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import split_stream, state_stream
from anabranch.reading import feed as feeds
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import history_topic, status_topic, stream_topic, topics_of
from tests.sim import poison
from tests.sim.chains import NAME as OF_CHAINS
from tests.sim.chains import Chained, ChainMachine, check_chains
from tests.sim.check_clients import check_clients
from tests.sim.check_epochs import Epochs, check_epochs, check_order, epochs_of
from tests.sim.check_log import check_log, check_lost, hold
from tests.sim.check_tasks import check_tasks
from tests.sim.clients import TIGHT_BYTES, Worker
from tests.sim.controllers import Fleet, carriers_beside
from tests.sim.counters import Counted, CounterMachine, check_counters
from tests.sim.derivers import Derived, DeriverMachine, note_derivations
from tests.sim.faults import Faults
from tests.sim.growth import Grower
from tests.sim.held import check_held, few_of_each
from tests.sim.hops import Hopper
from tests.sim.hour import Hour
from tests.sim.instants import check_instants, check_snapshots
from tests.sim.later import LaterMachine
from tests.sim.ledger import Ledger
from tests.sim.lives import Lives
from tests.sim.operators import Operator
from tests.sim.picture import (
    Picture,
    Seen,
    fold,
    folded_rows,
    histories_of,
    placed,
    stuck_of,
    visible,
)
from tests.sim.ports import SimCluster
from tests.sim.readers import ReaderMachine
from tests.sim.recording import FINAL, History, Part
from tests.sim.retention import Retention
from tests.sim.safe_times import check_safe_times
from tests.sim.sim_waits import waiting_in
from tests.sim.tables import COMPANIONS, Noted, TableMachine, without_tables
from tests.sim.tables import NAME as OF_TABLES
from tests.sim.task_rows import check_tally
from tests.sim.tasks import TaskMachine
from tests.sim.together import check_together
from tests.sim.trouble import Outages
from tests.sim.weather import Weather
from tests.sim.world import Violation, World
from tests.sim.writers import CHAINED, COUNTERS, FLATS, GOODS, LATER, STREAMS, TABLES

PREFIX = "anabranch"
# Streams that the checker does not judge.
_NOT_JUDGED = (*COMPANIONS, COUNTERS, CHAINED, state_stream(LATER))
CALM_S = 90.0  # after the faults stop, everything ends in so much virtual time
_SETTLE_S = 4.0
_SET_UP_S = 30.0  # faults begin then at the latest, if they wait for the streams
_TABLE_CHECKS = 0.1
_COLLECT_S = 5.0
_LONG_S = 86_400.0
SPREAD = "commits over several control partitions"
_DEATHS = ("crash", "full disk")
Machine = TypeVar("Machine", TableMachine, TaskMachine)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a run. ``violation``: empty if all held."""

    seed: int
    violation: str
    digest: str
    weather: str
    steps: int
    virtual_s: float
    real_s: float
    commits: int
    epochs: Epochs
    faults: dict[str, int]
    origin: str  # the function that found the violation
    struck: dict[str, str]  # the faults by their names
    drawn: Weather
    judged: dict[str, int]  # what the checker looked at
    overlapped: int  # rounds that were decided while the one before was being written
    parts: Mapping[str, int]  # as `together.Shared` has them

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return (
            f"seed {self.seed}: {self.violation or 'all held'}\n"
            f"  weather: {self.weather}\n"
            f"  {self.steps} steps, {self.virtual_s:.1f} virtual s in {self.real_s:.2f} s, {self.commits} "
            f"commits; {self.epochs}; {self.overlapped} overlapped; {faults or 'no faults'}\n"
            f"  trace {self.digest}; replay: scripts/simulate --seeds 1 --start {self.seed} --trace; "
            f"cut down: scripts/simulate --shrink {self.seed}"
        )


def simulate(
    seed: int,
    *,
    trace: Callable[[str], None] | None = None,
    bug: AbstractContextManager[object] | None = None,
    only: frozenset[str] | None = None,
    history: Path | None = None,
    **weather: float,
) -> Report:
    """Run one seed.

    Args:
        seed: all chance comes from it.
        trace: is called with each line of the trace.
        bug: a planted one, see `mutants`.
        only: of the faults that the weather brings those of these names (`Report.struck`); None: all.
        history: a folder to which the run's history is written, whatever comes of it.
        weather: not as the seed draws it.
    """
    return _simulate(seed, trace, bug, only, history, weather)


@contextmanager
def _strict(faults: Faults) -> Iterator[None]:
    """All commands but those of `poison` are innocent: none may raise, or be quarantined. Streams may be tight.

    A command at which processes died may be quarantined: chance may strike three of them.
    """
    real, aside = SuspectCommands.raised, SuspectCommands._quarantine

    def raised(own: SuspectCommands, key: Key | None, error: Exception) -> None:
        if error.args != poison.RAISED:
            raise error
        real(own, key, error)

    def put_aside(own: SuspectCommands, command: Command, reason: str, *more: Any) -> None:
        deaths = sum(faults.counts.get(name, 0) for name in _DEATHS)
        by_chance = reason == DIED and deaths >= limits.TRIES.value
        if poison.RAISED[0] not in reason and not by_chance:
            raise InvariantViolation(f"an innocent command is quarantined: {command} {reason}")
        aside(own, command, reason, *more)

    with (
        patch.object(
            limits, "LEAST_MESSAGE", limits.LEAST_MESSAGE._replace(value=int(TIGHT_BYTES))
        ),
        patch.object(SuspectCommands, "raised", raised),
        patch.object(SuspectCommands, "_quarantine", put_aside),
        patch.object(feeds, "_RETRY_S", 1.0),  # else a reader seems to have come to the end
    ):
        yield


@contextmanager
def _overlapping(counts: Counter[str]) -> Iterator[None]:
    """Count rounds that are decided while the one before is being written."""
    real = SuspectCommands.take_more

    def take_more(own: SuspectCommands, lanes: Lanes) -> list[Command]:
        found = real(own, lanes)
        counts["overlapped"] += bool(found)
        return found

    with patch.object(SuspectCommands, "take_more", take_more):
        yield


def _simulate(
    seed: int,
    trace: Callable[[str], None] | None,
    bug: AbstractContextManager[object] | None,
    only: frozenset[str] | None,
    history: Path | None,
    weather: dict[str, float],
) -> Report:
    began = time.perf_counter()
    world = World(seed, trace=trace)
    drawn = Weather.draw(world.random).changed(weather)
    faults = Faults(world, drawn, only)
    was_collecting = gc.isenabled()
    # What is freed when must not depend on what ran before: it is freed here, or stays. (To unfreeze it afterwards
    # would let each later collection of the process walk through all that is loaded.)
    gc.collect()
    gc.disable()
    gc.freeze()
    _collect(world)
    commits, epochs = 0, Epochs()
    judged: dict[str, int] = {}
    parts = Counter[str]()
    counts = Counter[str]()
    closing: list[TableMachine | TaskMachine] = []
    try:
        beside: AbstractContextManager[object] = nullcontext()
        if drawn.carriers_beside:
            beside = patch.object(background, "Carriers", carriers_beside(world))
        with (
            _strict(faults),
            _overlapping(counts),
            _limits(small=drawn.small),
            patch.object(controller, "OVERLAP_S", drawn.overlap_s),
            few_of_each() if drawn.greedy_s else nullcontext(),
            beside,
            poison.failing_decisions(),
            waiting_in(world, OF_CHAINS, OF_TABLES),
            bug or nullcontext(),
        ):
            run = _Run(world, faults)
            closing.extend((*run.replicas, *run.tasks))
            commits, epochs = run.play()
            judged, parts = run.judged, run.noted.together.parts
            if history is not None:
                run.history.write(history)
    finally:
        world.close()
        for machine in closing:
            machine.close()
        if was_collecting:
            gc.enable()
    return Report(
        seed,
        str(world.violation or ""),
        world.digest,
        str(drawn),
        world.steps,
        world.now,
        time.perf_counter() - began,
        commits,
        epochs,
        faults.counts,
        world.origin,
        faults.struck,
        drawn,
        judged,
        counts["overlapped"],
        parts,
    )


def _collect(world: World) -> None:
    gc.collect()
    world.later(_COLLECT_S, lambda: _collect(world))


class _Run:
    def __init__(self, world: World, faults: Faults) -> None:
        self.world = world
        self.faults = faults
        weather = faults.weather
        world.across = weather.across
        world.switch_rate = weather.switch
        world.faults = faults
        self.history = History(world)
        self.judged: dict[str, int] = {}
        self.ledger = Ledger(PREFIX, list(STREAMS)[: weather.streams], self.history)
        self.ledger.names_are_kept = weather.retention_s > _LONG_S
        self.cluster = SimCluster(world, faults, self.ledger)
        self.retention = Retention(world, self.cluster, faults, self.ledger)
        self.outages = Outages(world, self.cluster, faults, self.ledger)
        self.fleet = Fleet(world, self.cluster, faults, PREFIX)
        self.fleet.after_lead = self._check_tables
        self.fleet.after_step = self._after_step
        self.hour = Hour(world, self.cluster, faults, self.ledger, self.fleet)
        self.operator = Operator(world, self.cluster, faults, self.ledger)
        self.hopper = Hopper(world, self.cluster, faults, self.ledger)
        self.lives = Lives(world, self.cluster, faults, self.ledger)
        self.readers = [
            ReaderMachine(world, self.cluster, faults, self.ledger, number)
            for number in range(weather.readers)
        ]
        self._make_workers()
        self._make_tables()

    def _make_workers(self) -> None:
        """The clients, and the operator whose new stream they write to."""
        world, cluster, faults, ledger = self.world, self.cluster, self.faults, self.ledger
        jobs, lane_of = faults.weather.jobs, self.operator.lane_of
        self.workers = [
            Worker(world, cluster, faults, ledger, f"k{i}", jobs, lane_of(i))
            for i in range(faults.weather.clients)
        ]
        for worker in self.workers:
            worker.peers = [peer for peer in self.workers if peer is not worker]
        self.grower = Grower(world, cluster, faults, ledger, self.workers)

    def _make_tables(self) -> None:
        """The processes with replicas of tables, and those that work on tasks."""
        weather = self.faults.weather
        self.counted = Counted()
        self.chained = Chained()
        self.derived = Derived(self.world.seed)
        self.noted = Noted(counted=self.counted if weather.counters else None)
        self.tasks = self._machines(TaskMachine, self.noted, weather.workers)
        for machine in self.tasks:
            machine.peers = self.tasks
        self.replicas: list[TableMachine] = [
            *self._machines(TableMachine, self.noted, weather.tables),
            *self._machines(CounterMachine, self.counted, weather.counters),
            *self._machines(ChainMachine, self.chained, weather.chains),
            *self._machines(DeriverMachine, self.derived, weather.derivers),
            *self._machines(LaterMachine, Noted(), weather.later),
        ]

    def _machines(self, make: Callable[..., Machine], all_did: object, count: int) -> list[Machine]:
        """Make ``count`` processes of a kind. ``all_did``: the record that they share."""
        return [
            make(self.world, self.cluster, self.faults, self.ledger, all_did, number)
            for number in range(count)
        ]

    @property
    def partitions(self) -> int:
        """How many control partitions there are by now."""
        return len(self.fleet.partitions)

    def play(self) -> tuple[int, Epochs]:
        """Faults first, then calm, then the checks; returns the number of COMMIT records, and epochs."""
        self.fleet.start()
        self.retention.start()
        if self.faults.awake:
            self._start_trouble()
        self.operator.start()
        self.grower.start()
        for worker in self.workers:
            worker.start()
        self.hopper.start()
        self.lives.start()
        for reader in self.readers:
            reader.start()
        for machine in self.tasks:
            machine.start()
        for replica in self.replicas:
            replica.start()
        world = self.world
        if not self.faults.awake:
            world.run(lambda: any(worker.client for worker in self.workers), _SET_UP_S)
            self.faults.awake = True
            self._start_trouble()
        world.run(self._worked, world.now + self.faults.weather.work_s)
        world.note("world", "calm")
        self.faults.calm = True
        world.thaw_all()
        self.fleet.calm_down()
        self.outages.outlast()
        self.hour.play()
        limit = self._await_end()
        settled = world.now + _SETTLE_S
        world.run(lambda: world.now >= settled and self._ended(), limit + CALM_S)
        self._consume_all()
        self._read_on()
        if world.violation is not None:
            return 0, Epochs()
        try:
            return self._check()
        except Violation as violation:
            world.fail(str(violation))
        except AnabranchError as error:
            world.fail(f"the log can't be read: {error!r}")
        return 0, Epochs()

    def _await_end(self) -> float:
        """Let all come to its end; an operator sets the clocks if they are in the way. Returns the last moment."""
        world, weather = self.world, self.faults.weather
        apart_s = max(weather.skew_s, weather.jump_by_s if weather.jump_s else 0.0)
        # A commit of a transaction that is stuck is asked for during all of its deadline.
        limit = world.now + CALM_S * (2 if self.ledger.deleted else 1)
        # No client can begin anything while clocks are minutes apart.
        if apart_s <= CALM_S and world.run(self._ended, limit):
            return limit
        if apart_s:
            # A client whose clock is wrong may be refused each time. One whose clock is right is refused until that
            # has passed the time of a clock that was ahead.
            world.set_clocks()
            limit = max(limit, world.now + CALM_S) + apart_s
        if not world.run(self._ended, limit) and world.violation is None:
            world.fail(f"no end {CALM_S:.0f} s after the faults: {self._what_is_open()}")
        return limit

    def _start_trouble(self) -> None:
        """What comes now and then, and lasts."""
        self.cluster.hands.start()
        self.outages.start()
        self._expire_offsets()

    def _expire_offsets(self) -> None:
        """Now and then, if the weather has it."""
        mean_s = self.faults.weather.offsets_expire_s
        if mean_s and not self.faults.calm:
            if self.cluster.groups.expire():
                self.faults.strikes(1.0, "expired offsets")
            self.world.later(self.faults.span(mean_s), self._expire_offsets)

    def _consume_all(self) -> None:
        """Until workers have consumed everything, and no transaction of theirs is left."""
        if not self.tasks or self.world.violation:
            return
        for machine in self.tasks:
            machine.finishing = True
        self.world.set_clocks()  # an id that is too old, or too new, is refused each time
        done = lambda: all(machine.done for machine in self.tasks) and self._ended()  # noqa: E731
        # A clock that was ahead has made controllers forget outcomes: until then ids of a right clock are refused.
        limit = self.world.now + CALM_S + self.faults.weather.jump_by_s
        before, last = 0, limit + 10 * CALM_S
        while not self.world.run(done, limit) and not self.world.violation:
            consumed = sum(machine.consumed for machine in self.tasks)
            # While events are consumed there is much input, of which a commit takes one event.
            if consumed == before or limit >= last:
                slow = [machine.name for machine in self.tasks if not machine.done]
                self.world.fail(f"workers don't come to an end: {slow}; {self._what_is_open()}")
            before, limit = consumed, self.world.now + CALM_S

    def _read_on(self) -> None:
        """Until readers have seen everything."""
        world = self.world
        for reader in self.readers:
            reader.finishing = True
        limit = world.now + CALM_S
        if not world.run(lambda: all(r.done for r in self.readers), limit) and not world.violation:
            slow = [f"{reader.name} ({reader.kind})" for reader in self.readers if not reader.done]
            world.fail(f"readers don't come to an end: {', '.join(slow)}")
        for reader in self.readers:
            reader.catch_up()

    def _worked(self) -> bool:
        # The operator goes on as long as there is time.
        lawful = self.operator.done or not self.faults.calm
        lawful = lawful and self.grower.done and self.hopper.done and self.lives.done
        if self.faults.calm:
            lawful = lawful and all(m.done for m in self.replicas)
        return lawful and all(worker.done for worker in self.workers)

    def _ended(self) -> bool:
        if not self._worked() or self._lost_markers():
            return False
        for partition in range(self.partitions):
            leader = self.fleet.leading(partition)
            if leader is None or leader._memory.waiting.keys() - self.ledger.deleted:
                return False  # a stream's pause may outlast its trouble
            rows = leader.state.streams.items()
            if any(row.state == ACTIVE and self.cluster.hands.lacks_topic(s) for s, row in rows):
                return False  # the stream has to be given up, although nothing is written to it
            growing = {s for s, row in rows if row.wanted_partitions > row.partitions}
            if growing - self.ledger.deleted.keys():
                return False  # so may that of its growth
            stuck = len(stuck_of(leader.state, self.ledger.deleted))
            if len(leader.state.open) > stuck or sum(1 for _ in leader.table.scan(k.OPEN)) > stuck:
                return False
        return True

    def _lost_markers(self) -> list[TopicPartition]:
        """Where readers stand, and no controller may need to write again."""
        known = {
            topic
            for s in self.ledger.streams
            if s not in self.ledger.deleted
            for topic in topics_of(s)
        }
        return [place for place, _ in self.cluster.lost_markers if place.topic in known]

    def _what_is_open(self) -> str:
        picture = Picture.take(self.cluster, PREFIX, self.partitions)
        rows = [f"{row.txn_id.hex()} {row.state}" for row in picture.unfinished]
        jobs = [f"{worker.name} has {worker.jobs} jobs" for worker in self.workers]
        doubts = [deal.label for worker in self.workers for deal in worker.in_doubt]
        leaders = [p for p in range(self.partitions) if self.fleet.leading(p)]
        lost = self._lost_markers()
        jobs += [f"{machine.name} goes on" for machine in self.replicas if not machine.done]
        return f"led: {leaders}; {', '.join(rows + jobs)}; in doubt: {doubts}; no markers: {lost}"

    def _check(self) -> tuple[int, Epochs]:
        self._check_disks()
        for partition in range(self.partitions):
            leader = self.fleet.leading(partition)
            if leader is None:
                raise Violation(f"nobody leads {partition} at the end")
            kept = leader.state.open.keys()
            left = [
                *(key for key, _ in leader.table.scan(k.REJECTED) if key[1:17] not in kept),
                *(
                    key
                    for kind in (k.INDEX, k.DIGEST)
                    for key, _ in leader.table.scan(kind)
                    if not self._may_stay(key, kept)
                ),
            ]
            hold(not left, f"all is ended, and the journal index still has {left[:3]}")
        deleted = self.ledger.deleted
        given_up = {topic for stream in deleted for topic in topics_of(stream)}
        for place, producer_id in list(self.cluster.lost_markers):
            if place.topic in given_up:  # no leader looks there; it is judged as it was decided
                self.cluster.land_lost(place, producer_id)
        left_out = self.ledger.left_out
        picture = Picture.take(
            self.cluster, PREFIX, self.partitions, self.ledger.carriers, deleted, left_out
        )
        picture.spread.update(self.ledger.spread)  # also those whose rows are forgotten
        check_lost(picture, self.ledger)
        check_safe_times(picture, self.ledger.safe_answers, self.partitions)
        check_log(picture)
        check_epochs(picture)
        with without_tables(picture):
            check_order(picture)
            check_snapshots(picture, self.ledger)
            check_instants(picture, self.ledger.instants, self.ledger.deleted)
            check_clients(picture, self.ledger)
            check_tasks(picture, self.ledger)
        check_counters(picture, self.counted)
        check_chains(picture, self.chained)
        check_together(picture, self.ledger.deleted)
        check_tally(picture, self.ledger)
        self._judge(picture)
        return len(picture.commits()), epochs_of(picture)

    def _may_stay(self, key: bytes, kept: KeysView[bytes]) -> bool:
        """A run of one that is stuck, or a plain write to a stream that somebody spoiled."""
        return txn_of(key) in kept or place_of(key)[0] in self.ledger.deleted

    def _judge(self, picture: Picture) -> None:
        """What was recorded, by the checker that knows nothing of the product."""
        derived = note_derivations(picture, self.history)
        tables = (*TABLES, GOODS, FLATS, *derived)
        parts: list[Part] = []
        histories: dict[str, tuple[int, list[tuple[Seen, Any]]]] = {}
        for stream, number in picture.events:
            if stream in _NOT_JUDGED:
                continue
            log = self.cluster.partitions.get(TopicPartition(stream_topic(stream), number))
            if log is not None:
                left = picture.events[stream, number]
                if picture.deleted:
                    left = placed(self.cluster, stream, number, graves=False)
                # What a base covers is deleted, and judged all the same.
                start = 0 if stream in tables else log.start_offset
                parts.append((stream, number, start, log.stable_offset, left))
        for stream, found in picture.history.items():
            if stream in _NOT_JUDGED:
                continue
            place = TopicPartition(history_topic(stream), 0)
            if place in self.cluster.partitions:
                start = self.cluster.partition(place).start_offset
                first = 0 if stream in tables else start
                if picture.deleted.get(stream) == "history":
                    found = histories_of(visible(self.cluster, place, graves=False))
                histories[stream] = first, found
        for partition in range(self.partitions):
            near = sorted(scope for scope, its in picture.scopes.items() if its == partition)
            if near:
                self.history.named(FINAL).note("near", scopes=near)
        for txn_id in sorted(picture.stuck):
            asking = self.history.named(FINAL).asking("state", txn_id=txn_id.hex())
            with asking as told:
                told |= {"state": "committing", "timestamp": None}
        for work in self.ledger.workplaces.values():
            if work.made and not work.is_over and work.start == "begin":
                there = sorted(set(work.inputs) - self.ledger.deleted.keys())
                self.history.named(FINAL).note("drained", processor=work.name, streams=there)
        self.history.read_log(parts, histories, (*TABLES, GOODS, FLATS), derived)
        report = self.history.judged()
        self.judged = dict(report.counts) | {SPREAD: _spread(picture)}
        if not report.ok:
            examples = "; ".join(str(found) for found in report.anomalies[:3])
            raise Violation(f"the checker: {examples}", f"checker: {min(report.kinds)}")

    # -- invariants while it runs ---------------------------------------------------------------------

    def _after_step(self, leader: Controller) -> None:
        check_held(leader, self.world.wall_s * 1000)
        self.hour.after_step(leader)
        if self.world.random.random() < _TABLE_CHECKS:
            self._check_tables(leader)

    def _check_tables(self, _: Controller) -> None:
        self._check_disks()

    def _check_disks(self) -> None:
        """Every table is the fold of the status log up to its own position, byte for byte."""
        for machine in self.fleet.machines:
            for partition, store in machine.disks.items():
                self._check_disk(f"{machine.name}, control partition {partition}", partition, store)

    def _check_disk(self, where: str, partition: int, store: MemoryStore) -> None:
        stored = store.row(STATUS_POSITION)
        if stored is None:
            return
        position = int.from_bytes(stored, "big")
        place = TopicPartition(status_topic(PREFIX), partition)
        if (
            place not in self.cluster.partitions
            or position > self.cluster.partition(place).stable_offset
        ):
            return  # the markers of the round it has seen are still to land
        beyond = [seen for seen in visible(self.cluster, place) if seen.record.offset >= position]
        if beyond and self.faults.weather.compact_s:
            return  # compaction may have taken what the table has seen
        found = folded_rows(store)
        if any(
            k.split_key(key[1:])[1] is k.Entry.STAGED_MERGE for key in found if key[:1] == k.STATUS
        ):
            self._check_ahead(where, place, position, store)
            return
        expected = folded_rows(fold(self.cluster, place, position))
        self._compare(f"{where}: the table at {position} is not the fold", expected, found)

    def _check_ahead(
        self, where: str, place: TopicPartition, position: int, store: MemoryStore
    ) -> None:
        """While a merge is staged the table may know more than its position says.

        Going on from there must come to the same as beginning from nothing.
        """
        log = self.cluster.partition(place)
        if log.stable_offset < log.end_offset:
            return
        ahead = MemoryStore()
        ahead.restore(store.snapshot())
        again = folded_rows(fold(self.cluster, place, start=position, store=ahead))
        expected = folded_rows(fold(self.cluster, place))
        self._compare(f"{where}: folding on from {position} is not the fold", expected, again)

    def _compare(self, what: str, expected: dict[bytes, bytes], found: dict[bytes, bytes]) -> None:
        different = sorted(
            key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
        )
        hold(
            not different,
            f"{what} of the log: "
            + ", ".join(f"{key.hex()}: {found.get(key)!r}" for key in different[:3]),
        )


def _spread(picture: Picture) -> int:
    """How many transactions were merged into streams of several control partitions."""
    found: dict[bytes, set[int]] = defaultdict(set)
    for stream, _, record in picture.commits():
        found[record.txn_id].add(picture.scopes[split_stream(stream)[0]])
    return sum(len(its) > 1 for txn_id, its in found.items() if txn_id != NO_TXN)


_SMALL: tuple[tuple[ModuleType, str, int], ...] = (
    (suspects, "MAX_COMMANDS", 3),
    (suspects, "PIECE", 2),
    (intake, "FETCH_BYTES", 700),
    (intake, "INDEX_ROWS", 3),
    (durability, "SMALL_BYTES", 300),
    (durability, "BATCH_BYTES", 400),
    (history_records, "FEW", 1),
    (history_records, "EVERY", 3),
    (packer, "BATCH_BYTES", 300),
    (packer, "MIN_SPLICED_RECORDS", 2),
)


@contextmanager
def _limits(*, small: bool) -> Iterator[None]:
    """Small limits, so that commands, fetches, merges and batches are cut in pieces."""
    if not small:
        yield
        return
    with ExitStack() as stack:
        for module, name, value in _SMALL:
            stack.enter_context(patch.object(module, name, value))
        yield
