"""The ports of the simulated processes: the in-memory log and table, and a client's bus and journals over it.

Names of the port calls: ``fetch:commands+control+journal``, ``append:journal+status``, ``end:commit``,
``end:abort``, ``send:replies``, ``producer:a``, ``table:rows``, …, each also with ``.after`` behind its effect.
Appends and ends have a point ``.sent`` too, when their caller begins to wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from anabranch.batches.format import Buffer
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.client.ports import ClientPorts
from anabranch.core.rows import TERM_KEY
from anabranch.errors import WriteFailed
from anabranch.ports import (
    Failed,
    Fetched,
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    Steps,
    TopicGone,
    TopicInfo,
    TopicPartition,
)
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas.codec import decode_as
from anabranch.protocol.schemas.records import TermRow
from anabranch.testing.memory.broker import Transactions
from anabranch.testing.memory.client import MemoryBus, MemoryJournal, MemoryJournals
from anabranch.testing.memory.log import MemoryBrokers, MemoryLog, MemoryProducer
from anabranch.testing.memory.partition import Partition
from anabranch.testing.memory.table import MemoryStore, MemoryTable
from anabranch.testing.memory.trouble import Kind, Trouble, error_of
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    of_transactions,
    replies_topic,
    status_topic,
)
from tests.sim.faults import Faults, LateEnd
from tests.sim.groups import Groups
from tests.sim.ledger import Ledger, Native
from tests.sim.picture import visible
from tests.sim.retention import KeptPartition
from tests.sim.topics import Hands
from tests.sim.world import Process, SimClock, World

_CHANGES = (
    "append",
    "send",
    "end:",
    "produce",
    "producer:",
    "create_topics",
    "add_partitions",
    "delete_records",
)
PATIENCE_S = 1.5  # of a call to brokers, for what may pass
FOREIGN_ID = "raw.x"  # a transactional id of another client's
_LATE_S = 2.0  # mean time that something late is under way
_SLOW = 0.3  # how often brokers do a step of an append or end only when the leader waits for it
_NOT_SURE = 0.3  # how often no broker reports the end of a partition whose old leader answers


class SimCluster(MemoryBrokers):
    """The brokers, in a world."""

    def __init__(self, world: World, faults: Faults, ledger: Ledger) -> None:
        super().__init__(
            SimClock(world, None),
            marker_delay=self._marker_delay,
            loses_markers=bool(faults.weather.lose_markers),
            transaction_version=faults.weather.transaction_version,
            patience=PATIENCE_S,
        )
        self.world = world
        self.faults = faults
        self.ledger = ledger
        self.groups = Groups(self)
        self.hands = Hands(world, self, faults, ledger)
        # Called with what a native transaction of a controller wrote to, when it is about to end.
        self.on_end: Callable[[list[TopicPartition]], None] | None = None
        self.graves: dict[TopicPartition, list[Partition]] = {}  # what was deleted, for the checks
        self.owners: dict[str, Process] = {}  # by transactional id: who initialised it last

    def _add(self, topic: str, numbers: Iterable[int], config: dict[str, str]) -> None:
        for number in numbers:
            name = TopicPartition(topic, number)
            self.partitions[name] = KeptPartition(name, config)

    def delete_topic(self, topic: str) -> None:
        """See `MemoryBrokers`; the run's checks still see what stood there."""
        for place in sorted(place for place in self.partitions if place.topic == topic):
            self.graves.setdefault(place, []).append(self.partitions[place])
        super().delete_topic(topic)

    def land(
        self, partition: TopicPartition, producer_id: int, epoch: int, *, commit: bool
    ) -> None:
        """See `MemoryBrokers`; the run's checks see what became of what was deleted with it."""
        super().land(partition, producer_id, epoch, commit=commit)
        for grave in self.graves.get(partition, ()):
            if producer_id in grave.open:
                grave.mark(producer_id, epoch, commit=commit, now_ms=self.now_ms())

    def may_mark(self, topic: str) -> bool:
        """Whether markers for that topic may still come."""
        return any(
            place.topic == topic
            for state in self._transactions.values()
            for place in (*state.partitions, *(marker[1] for marker in state.landing))
        )

    def held_by_the_dead(self) -> bool:
        """Whether an id stays busy, as its markers can't land, and its owner or the last leader was killed.

        Nobody may pass over the id then: `anabranch.controller.leadership`.
        """
        busy = [
            name
            for name, state in self._transactions.items()
            if not all(self._takes_markers(marker[1]) for marker in state.landing)
        ]
        return any(self.owners[name].dead or self._leader_was_killed(name) for name in busy)

    def _leader_was_killed(self, transactional_id: str) -> bool:
        """Whether the last leader of this id's control partition is gone without having resigned."""
        prefix = self.ledger.prefix
        number, _, _ = transactional_id.removeprefix(of_transactions(prefix)).partition(".")
        status = visible(self, TopicPartition(status_topic(prefix), int(number)))
        rows = [seen.record.value for seen in status if seen.record.key == TERM_KEY]
        last = decode_as(TermRow, rows[-1] or b"") if rows else None
        return last is not None and not last.resigned and not self.world.lives(last.leader)

    def pause(self, seconds: float) -> None:
        """A waiting fetch looks again when something has changed."""
        self.world.park(seconds)

    def log_of(self, process: Process) -> SimLog:
        """A process's handle."""
        return SimLog(self, process)

    def send(self, place: TopicPartition, data: bytes) -> None:
        """An append by the running process, which ignores the result: any topic may be in trouble."""
        with suppress(LogError):
            self.log_of(self.world.current).produce_batch(place, data)

    def produce_late(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """An append that its sender has given up arrives."""

        def land() -> None:
            self.world.note("brokers", f"late batch on {partition.topic}[{partition.partition}]")
            with suppress(LogRefused):  # the topic may be gone
                self.produce_batch(partition, encode_batch(records))
            self.world.changed()

        self.world.later(self.faults.span(_LATE_S), land)

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """See `MemoryBrokers`; commands and plain writes are noted in the ledger."""
        offset = super().produce_batch(partition, data)
        commands = commands_topic(self.ledger.prefix)
        if partition.topic.startswith(commands):
            lane = partition.topic[len(commands) + 1 :] or OPEN_LANE
            self.ledger.hear(self.world.now, decode_records(data), lane, partition.partition)
        elif partition.topic.endswith(".journal"):
            self.ledger.hear_plain(offset, decode_records(data))
        return offset

    def end(self, state: Transactions, *, commit: bool) -> tuple[int, int]:
        """See `MemoryBrokers`; what is decided now is noted in the ledger."""
        if self.on_end is not None and state is not self._transactions.get(FOREIGN_ID):
            self.on_end(list(state.partitions))
        self.ledger.settle((state.producer_id, state.epoch), commit=commit)
        return super().end(state, commit=commit)

    def _marker_delay(self) -> float:
        mean_s = 0.0 if self.faults.calm else self.faults.weather.marker_delay_s
        delay = self.faults.span(mean_s)
        self.world.later(delay + 1e-6, self.world.changed)
        return delay


class SimLog(MemoryLog):
    """See `MemoryLog`; each call passes the world."""

    def __init__(self, cluster: SimCluster, process: Process) -> None:
        super().__init__(cluster, process.name)
        self.sim = cluster
        self.owner = process
        self.detail = ""
        self.round: Native = (-1, -1)  # the native transaction of the last status rows

    def called(self, name: str) -> None:
        """Pass the world's point; whoever waits is woken behind an effect."""
        call, point, phase = name.partition(".")
        after = point + phase
        if call in ("commit", "abort"):
            call = f"end:{call}"
        elif self.detail and call in ("fetch", "append", "send", "producer", "produce"):
            call = f"{call}:{self.detail}"
        if after and call.startswith(_CHANGES):
            self.sim.world.changed()
        self.sim.world.point(call + after)

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: MutableMapping[TopicPartition, LogError] | None = None,
    ) -> dict[TopicPartition, Fetched]:
        """See `anabranch.ports.Log.fetch`."""
        self.detail = _kinds(positions)
        known = self._known(positions, failed)
        if self.owner.kind in ("reader", "worker"):
            max_bytes = self.sim.world.random.choice((300, 3000, max_bytes))
        found = super().fetch(
            {place: positions[place] for place in known},
            max_wait=max_wait,
            max_bytes=max_bytes,
            committed=committed,
            failed=failed,
        )
        if len(positions) > 1:
            found = self._hide(found)
        if self.owner.kind in ("client", "worker") and self.detail == "replies":
            return {place: self._lose_replies(fetched) for place, fetched in found.items()}
        return found

    def _hide(self, found: dict[TopicPartition, Fetched]) -> dict[TopicPartition, Fetched]:
        """What is new on some partitions comes later than what is new on others."""
        faults, weather = self.sim.faults, self.sim.faults.weather
        rates = {True: max(weather.hide, weather.hide_journals), False: weather.hide}
        return {
            place: fetched
            for place, fetched in found.items()
            if not faults.strikes(rates[place.topic.endswith(".journal")], "hidden partition")
        }

    def _lose_replies(self, fetched: Fetched) -> Fetched:
        faults = self.sim.faults
        batches = [
            batch
            for batch in fetched.batches
            if not faults.strikes(faults.weather.lose_reply, "lost reply")
        ]
        return replace(fetched, batches=batches)

    def producer(self, transactional_id: str, *, timeout: float) -> MemoryProducer:
        """See `anabranch.ports.Log.producer`."""
        self.detail = transactional_id.rpartition(".")[2]
        faults, weather = self.sim.faults, self.sim.faults.weather
        is_b = self.detail == "b" and ".carrier." not in transactional_id
        if is_b and faults.strikes(weather.torn_lead, "torn lead"):
            self.sim.world.sleep(faults.span(weather.torn_lead_s))
        made = super().producer(transactional_id, timeout=timeout)
        with suppress(LogFenced):  # an answer that comes late, as this process was frozen
            self.sim.current(transactional_id, made.producer_id, made.producer_epoch)
            self.sim.owners[transactional_id] = self.owner
        return SimProducer(self, transactional_id, made.producer_id, made.producer_epoch)

    def _find(self, places: Iterable[TopicPartition]) -> None:
        """`TopicGone` if this process's broker does not know one of them."""
        self.sim.hands.check(self.owner, places)

    def _known(
        self,
        places: Iterable[TopicPartition],
        failed: MutableMapping[TopicPartition, LogError] | None,
    ) -> list[TopicPartition]:
        """`_find`; with ``failed`` the places that this process's broker knows."""
        known = []
        for place in places:
            try:
                self._find([place])
                known.append(place)
            except TopicGone as error:
                if failed is None:
                    raise
                failed[place] = error
        return known

    def end_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        committed: bool,
        failed: MutableMapping[TopicPartition, LogError] | None = None,
        sure: bool = False,
    ) -> dict[TopicPartition, int]:
        """See `anabranch.ports.Log.end_offsets`."""
        known = self._known(partitions, failed)
        if sure:
            known = self._led(known, failed)
        return super().end_offsets(known, committed=committed, failed=failed, sure=sure)

    def _led(self, places: Iterable[TopicPartition], failed: Failed | None) -> list[TopicPartition]:
        """The partitions for which the new leader answers, not an old one; the others may be refused."""
        led = []
        for place in places:
            stale = self.sim.troubles.of([place], self.process, Kind.STALE)
            if not stale or not self.sim.faults.strikes(_NOT_SURE, "not sure of an end"):
                led.append(place)
                continue
            error = error_of(place, Trouble(Kind.LEADERLESS))
            if failed is None:
                raise error
            failed[place] = error
        return led

    def start_offsets(
        self,
        partitions: Iterable[TopicPartition],
        *,
        failed: MutableMapping[TopicPartition, LogError] | None = None,
    ) -> dict[TopicPartition, int]:
        """See `anabranch.ports.Log.start_offsets`."""
        return super().start_offsets(self._known(partitions, failed), failed=failed)

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        """See `anabranch.ports.Log.offsets_for_time`."""
        places = list(partitions)
        self._find(places)
        return super().offsets_for_time(places, timestamp_ms)

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """See `anabranch.ports.Log.delete_records`."""
        self._find(before)
        super().delete_records(before)

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """See `anabranch.ports.Log.describe_topics`; brokers may lag behind."""
        known = {}
        for name, info in super().describe_topics(names).items():
            partitions = self.sim.hands.described(self.owner, name, info.partitions)
            if partitions:
                known[name] = replace(info, partitions=partitions)
        return known

    def produce(self, partition: TopicPartition, records: Sequence[Record]) -> int:
        """See `MemoryLog`: a client's commands and journal writes, which may be lost, late or in doubt."""
        self.detail = _kinds([partition])
        self._find([partition])
        faults, weather = self.sim.faults, self.sim.faults.weather
        journal = self.detail == "journal"
        if faults.strikes(weather.late_write if journal else weather.late_command, "late send"):
            self.sim.produce_late(partition, records)
            raise LogUncertain("no answer in time; it is on its way")
        lost = faults.strikes(
            weather.write_uncertain if journal else weather.lose_command, "uncertain send"
        )
        offset = -1
        if not lost or self.sim.world.random.random() < 0.3:
            offset = super().produce(partition, records)
        if lost:
            raise LogUncertain("no answer in time")
        if not journal and faults.strikes(weather.double_command, "double command"):
            self.sim.ledger.double(records)
            self.sim.produce_late(partition, records)
        return offset

    def send(
        self,
        batches: Sequence[tuple[TopicPartition, bytes]],
        failed: MutableMapping[TopicPartition, LogError],
    ) -> bool:
        """See `anabranch.ports.Log.send`: answers, and messages to other leaders, which may come late, or twice.

        Messages may be lost, too.
        """
        self.detail = _kinds([place for place, _ in batches])
        faults, weather = self.sim.faults, self.sim.faults.weather
        sent = []
        for place, data in batches:
            is_message = place.topic == control_topic(self.sim.ledger.prefix)
            what, least = ("message", weather.messages) if is_message else ("answer", 0.0)
            self._see_sent(place, data, what)
            lost = max(least, weather.lose_command)
            if is_message and faults.strikes(lost, "lost message"):
                continue
            late = faults.strikes(max(least, weather.late_command), f"late {what}")
            if late or faults.strikes(max(least, weather.double_command), f"double {what}"):
                self.sim.produce_late(place, decode_records(data))
            if self.sim.hands.lacks(self.owner, place):
                failed[place] = TopicGone(f"there is no topic {place.topic}", place.topic)
            elif not late:
                sent.append((place, data))
        return super().send(sent, failed)

    def _see_sent(self, partition: TopicPartition, data: bytes, what: str) -> None:
        """It is of a round that has happened. An answer comes in the lane that asked, in no other one."""
        ledger = self.sim.ledger
        if self.round not in ledger.happened:
            self.sim.world.fail(f"a {what} of a round that has not happened")
        if what == "message":
            return
        lane = partition.topic[len(replies_topic(ledger.prefix)) + 1 :] or OPEN_LANE
        for record in decode_records(data):
            asked = ledger.asked.get(record.key or b"")
            if asked != lane:
                self.sim.world.fail(f"lane {asked!r} asked, and {lane!r} is answered")

    def produce_batch(self, partition: TopicPartition, data: bytes) -> int:
        """See `MemoryLog`; without faults of its own."""
        self.detail = _kinds([partition])
        self._find([partition])
        return super().produce_batch(partition, data)


class SimProducer(MemoryProducer):
    """See `MemoryProducer`; an end may arrive after its caller gave up."""

    def __init__(self, log: SimLog, transactional_id: str, producer_id: int, epoch: int) -> None:
        super().__init__(log, transactional_id, producer_id, epoch)
        self._sim = log

    def appending(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> Steps[list[int]]:
        """See `anabranch.ports.Producer`; of several partitions some may have it, and nobody knows which."""
        self._sim.detail = _kinds([partition for partition, _ in batches])
        faults = self._sim.sim.faults
        self._check_usable()
        yield from self._find(batches)
        if len(batches) > 1 and faults.strikes(faults.weather.uncertain, "half an append"):
            done = self._sim.sim.world.random.randrange(1, len(batches))
            yield from super().appending(batches[:done])
            what = "no answer in time to some of it"
            if faults.strikes(0.5, "half an append is aborted"):
                topics = {place.topic for place, _ in batches[done:]}
                self._refusal = LogRefused(what, 0, topics)
                raise LogUnavailable(what, topics)
            raise self._over(LogUncertain(what))
        return (yield from super().appending(batches))

    def is_answered(self) -> bool:
        """See `anabranch.ports.Producer`."""
        return self._sim.sim.world.random.random() < self._sim.sim.faults.weather.answered

    def _is_slow(self) -> bool:
        return self._sim.sim.world.random.random() < _SLOW

    def _pause(self, name: str) -> Steps[None]:
        """See `MemoryProducer`; the answer to the request may be late, or never come."""
        detail = self._sim.detail
        yield
        self._sim.detail = detail  # the leader has made other calls meanwhile
        self._called(f"{name}.sent")

    def _find(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> Steps[None]:
        """A topic that is gone is refused at once, or found to be so when other partitions have their part."""
        hands, owner = self._sim.sim.hands, self._sim.owner
        gone = [place for place, _ in batches if hands.lacks(owner, place)]
        if not gone:
            return
        what = f"append to {gone[0].topic}[{gone[0].partition}]: there is no such topic"
        if self._sim.sim.faults.strikes(0.3, "topic uncertain"):
            found = [(place, data) for place, data in batches if place not in gone]
            if found:
                yield from super().appending(found)
            raise self._over(LogUncertain(what, (gone[0].topic,)))
        self._refusal = TopicGone(what, gone[0].topic)
        raise self._refusal

    def _append(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> list[int]:
        offsets = super()._append(batches)
        native = self.producer_id, self.producer_epoch
        if ".carrier." in self._id:
            self._sim.sim.ledger.carriers.add(self.producer_id)
        elif any(place.topic == status_topic(self._sim.sim.ledger.prefix) for place, _ in batches):
            self._sim.round = native
            self._sim.sim.ledger.happened.discard(native)  # an older protocol uses it again
        for partition, data in batches:
            self._sim.sim.ledger.see_status(self._sim.sim.world.now, native, partition, bytes(data))
        return offsets

    def _end(self, name: str) -> Steps[None]:
        try:
            yield from super()._end(name)
        except LateEnd:
            self._arrive_late(commit=name == "commit")
            raise

    def _arrive_late(self, *, commit: bool) -> None:
        cluster, mine = self._sim.sim, (self.producer_id, self.producer_epoch)

        def land() -> None:
            try:
                state = cluster.current(self._id, *mine)
            except LogFenced:
                return
            if state.started is not None:
                cluster.world.note("brokers", f"late end of {self._id}")
                cluster.end(state, commit=commit)
                cluster.world.changed()

        cluster.world.later(cluster.faults.span(_LATE_S), land)


def open_table(
    store: MemoryStore, process: Process, world: World, check_room: Callable[[], None]
) -> MemoryTable:
    """A process's table; only writes are points (reads change nothing).

    ``check_room``: raises `TableError` if the disk is full. Behind the effect too: a write may be whole on disk
    though it was reported as failed.
    """

    def on_call(_: str, name: str) -> None:
        if name.startswith("table.write"):
            world.point(name.replace("table.write", "table:rows"))
            check_room()

    return store.open(process.name, on_call=on_call)


# -- client ports -------------------------------------------------------------------------------------


class MixedJournals(MemoryJournals):
    """Journals whose writers share one producer, and so batches, as a client in another language may do."""

    def __init__(self, log: SimLog, clock: SimClock, batch_records: int) -> None:
        super().__init__(log, clock, batch_records)
        self._made = log, clock, batch_records
        self._shared = _Shared()

    def writer(self) -> MemoryJournal:
        """A writer on the shared producer; on a new one if that failed."""
        if self._shared.failure is not None:
            self._shared = _Shared()
        return _MixedJournal(*self._made, self._shared)


class _Shared:
    def __init__(self) -> None:
        self.queued: dict[TopicPartition, list[Record]] = {}
        self.failure: str | None = None
        self.is_busy = False


class _MixedJournal(MemoryJournal):
    def __init__(self, log: SimLog, clock: SimClock, batch_records: int, shared: _Shared) -> None:
        super().__init__(log, clock, batch_records)
        self._queued = shared.queued
        self._shared = shared

    def _write_batch(self, place: TopicPartition) -> None:
        while self._shared.is_busy:  # one batch at a time: nothing overtakes
            self._clock.sleep(0.001)
        self._check()
        self._shared.is_busy = True
        try:
            super()._write_batch(place)
        except WriteFailed as error:
            self._shared.failure = str(error)
            raise
        finally:
            self._shared.is_busy = False

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        """See `JournalWriter`; another writer may be about to send what is waited for."""
        while self._shared.is_busy:
            self._clock.sleep(0.001)
        return super().flush(written, deadline)

    def discard(self) -> None:
        """What is queued stays: it may be others', and what is on its way may arrive."""
        self._failure = self._failure or "the writer was discarded"

    def _check(self) -> None:
        self._failure = self._failure or self._shared.failure
        super()._check()


def client_ports(
    cluster: SimCluster, process: Process, prefix: str, lane: str = OPEN_LANE
) -> ClientPorts:
    """All ports of a client process."""
    random = cluster.world.random
    log = cluster.log_of(process)
    clock = SimClock(cluster.world, process)
    journals = MixedJournals if cluster.faults.weather.mixed_batches else MemoryJournals
    return ClientPorts(
        bus=MemoryBus(log, clock, random.randbytes, prefix, lane),
        journals=journals(log, clock, random.choice((1, 2, 5))),
        clock=clock,
        entropy=random.randbytes,
        lane=lane,
        prefix=prefix,
        log=lambda _: nullcontext(log),
    )


def _kinds(places: Iterable[TopicPartition]) -> str:
    """commands, history, journal, replies, status or stream, those that occur; of whichever lane."""
    known = ("commands", "replies", "status", "journal", "history")
    parts = [place.topic.split(".") for place in places]
    last = {part[1] if part[1] in known else part[-1] for part in parts}
    return "+".join(sorted({name if name in known else "stream" for name in last}))
