"""Processes that read while all goes on, each in a way of its own, with the library's readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Protocol

from anabranch.batches.records import decode_records
from anabranch.client.client import Client
from anabranch.errors import AnabranchError, SnapshotExpired, UnknownScope, UnknownStream
from anabranch.ports import LogError, OffsetOutOfRange, TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import NO_TXN, TXN_HEADER, unpack_txn_header
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.iteration import Readers
from anabranch.reading.snapshot import Snapshot
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Event
from tests.sim.faults import Faults
from tests.sim.groups import Member
from tests.sim.instants import Instants
from tests.sim.ledger import Ledger
from tests.sim.ports import SimCluster, client_ports
from tests.sim.recording import MemoryRecorder, event_id, text
from tests.sim.topics import BY_HAND
from tests.sim.world import Process, SimClock, World
from tests.sim.writers import FINE

SCOPE = "s"
_RESTART_S = 1.0
_TIMEOUT_S = 1.0  # a round of reading ends when nothing came for so long
_IDLE_ROUNDS = 3  # without an event, after all writing: it has caught up
_FAR_S = 10.0  # a clock so far ahead asks for times that do not come in the run
_ASK_S = 10.0
_WAIT = (UnknownScope, UnknownStream)  # it is not there yet


def reading_client(
    cluster: SimCluster, process: Process, prefix: str, lane: str = OPEN_LANE, **settings: Any
) -> Client:
    """A client that reads, too. ``settings``: of `Client`."""
    ports = client_ports(cluster, process, prefix, lane)
    log = cluster.log_of(process)
    member = partial(Member, cluster.groups, process=process)
    readers = Readers(ReaderPorts(lambda _: log, member, ports.clock), _ASK_S)
    return Client(replace(ports, readers=readers), **settings, threads=False)


class Worker(Protocol):
    """Reads in rounds; each returns whether there was anything."""

    def round(self) -> bool: ...

    def close(self) -> None: ...


class ReaderMachine:
    """A reader's machine: its process is started again when it dies, until all writing has ended and is read."""

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, number: int
    ) -> None:
        self.world, self.cluster, self.faults, self.ledger = world, cluster, faults, ledger
        self.name = f"r{number}"
        kinds = (
            "ordered",
            "group",
            "group",
            "transactions",
            "transaction group",
            "raw",
            "snapshots",
        )
        self.kind = world.random.choice(kinds)
        self.finishing = False  # all writing has ended
        self.idle = 0  # rounds in a row
        self.starts = 0
        self.reader: str | None = None  # the one that is open, as the history knows it
        self.streams: list[str] = []  # that it reads

    @property
    def done(self) -> bool:
        """It has seen everything; nobody waits for that where somebody spoiled a stream."""
        return self.idle >= _IDLE_ROUNDS or self.is_spoiled

    @property
    def is_spoiled(self) -> bool:
        """A topic of what it reads was deleted."""
        return any(stream in self.ledger.deleted for stream in self.streams)

    def start(self) -> None:
        """Start a process."""
        self.starts += 1
        self.idle = 0
        self.reader = None
        process = self.faults.process(f"{self.name}.{self.starts}", "reader")
        process.on_death.append(lambda: self.world.later(self.faults.span(_RESTART_S), self.start))
        self.world.spawn(process, self.kind.replace(" ", "-"), lambda: self._run(process))

    def catch_up(self) -> None:
        """Note that it has, at the very end."""
        if self.reader is not None and not self.is_spoiled:
            self.ledger.history.named(f"{self.name}.{self.starts}").note(
                "caught_up", reader=self.reader
            )

    def _run(self, process: Process) -> None:
        client = reading_client(self.cluster, process, self.ledger.prefix, timeout=_ASK_S)
        worker: Worker | None = None
        try:
            while True:
                try:
                    worker = worker or self._open(client, process)
                    went_on = worker.round()
                except AnabranchError as error:
                    if not (self.is_spoiled or isinstance(error, (*_WAIT, *FINE))):
                        raise
                    self.world.note(process.name, f"{type(error).__name__}: {error}")
                    went_on = not self.is_spoiled
                    self.world.sleep(0.3)
                    if self.is_spoiled and worker is not None:
                        worker.close()
                        worker = None
                self.idle = self.idle + 1 if self.finishing and not went_on else 0
        finally:
            if worker is not None:
                worker.close()

    def _open(self, client: Client, process: Process) -> Worker:
        recorder = self.ledger.history.named(process.name)
        streams = sorted(self.world.random.sample(self.ledger.streams, k=1))
        match self.kind:
            case "raw" | "transactions":
                self.streams = streams
            case "group":
                self.streams = [self.ledger.streams[0]]
            case "transaction group":
                self.streams = [self.ledger.streams[-1]]
            case _:
                self.streams = list(self.ledger.streams)
        match self.kind:
            case "raw":
                return RawReader(self, process, recorder, streams[0])
            case "snapshots":
                return SnapshotTaker(self, client, recorder)
            case "ordered":
                return OrderedReader(self, client, recorder, list(self.ledger.streams), None)
            case "group":
                first = [self.ledger.streams[0]]
                start = "end" if self.faults.weather.offsets_expire_s else "begin"
                return OrderedReader(self, client, recorder, first, "group", start)
            case "transactions":
                return TransactionsReader(self, client, recorder, streams[0], None)
            case _:
                one = self.ledger.streams[-1]
                return TransactionsReader(self, client, recorder, one, "transactions")

    def begin(self, mode: str, streams: Sequence[str], group: str | None, starts: str) -> str:
        """Note that a reader is opened; its name."""
        opened = len(self.ledger.readers)
        self.reader = f"{self.name}.{self.starts}/{opened}"
        self.ledger.readers.append(self.reader)
        self.ledger.history.here.note(
            "open",
            reader=self.reader,
            mode=mode,
            streams=list(streams),
            group=group,
            starts=starts,
        )
        return self.reader


class RawReader:
    """A program that knows nothing and reads committed records."""

    def __init__(
        self, machine: ReaderMachine, process: Process, recorder: MemoryRecorder, stream: str
    ) -> None:
        self._machine = machine
        self._recorder = recorder
        self._stream = stream
        self._log = machine.cluster.log_of(process)
        self._positions: dict[TopicPartition, int] = {}
        self._reader = ""

    def round(self) -> bool:
        topic = stream_topic(self._stream)
        rows: list[list[Any]] = []
        op = None
        try:
            info = self._log.describe_topics([topic]).get(topic)
            if info is None:
                raise UnknownStream(topic)
            if not self._reader:
                self._reader = self._machine.begin("raw", [self._stream], None, "start")
            for number in range(info.partitions):
                self._positions.setdefault(TopicPartition(topic, number), 0)
            op = self._recorder.ask("poll", reader=self._reader)
            found = self._log.fetch(
                self._positions,
                max_wait=_TIMEOUT_S,
                max_bytes=1 << 20,
                committed=True,
            )
        except LogError as error:
            if op is not None:
                self._recorder.told(op, "ok", events=[])
            self._go_on(error)
            return not self._machine.is_spoiled
        for place, fetched in found.items():
            for batch in fetched.batches:
                for record in decode_records(batch.data):
                    if record.offset < self._positions[place] or record.value == BY_HAND:
                        continue
                    ours = [v for name, v in record.headers if name == TXN_HEADER]
                    txn_id = unpack_txn_header(ours[0] or b"")[0] if ours else NO_TXN
                    rows.append(
                        [
                            self._stream,
                            place.partition,
                            record.offset,
                            text(record.key),
                            event_id(record.value),
                            None if txn_id == NO_TXN else txn_id.hex(),
                            None,
                        ]
                    )
            self._positions[place] = fetched.next_offset
        self._recorder.told(op, "ok", events=rows)
        return bool(found)

    def _go_on(self, error: LogError) -> None:
        """Go on where the log begins now, if that is ahead; otherwise (an old leader's end, say) retry later."""
        try:
            if isinstance(error, OffsetOutOfRange):
                start = self._log.start_offsets([error.partition])[error.partition]
                if start > error.position:
                    self._positions[error.partition] = start
                    return
        except LogError:
            pass
        self._machine.world.sleep(0.2)

    def close(self) -> None:
        pass


class OrderedReader:
    """`Client.read`. A member of a group counts as another reader whenever its partitions change."""

    def __init__(
        self,
        machine: ReaderMachine,
        client: Client,
        recorder: MemoryRecorder,
        streams: list[str],
        group: str | None,
        start: str = "begin",
    ) -> None:
        self._machine = machine
        self._recorder = recorder
        self._streams = streams
        self._group = group
        self._start = start
        self._reader = client.read(streams, group, _TIMEOUT_S, start=start)
        self._term = -1
        self._name = ""

    def _begin(self) -> None:
        if self._term != self._reader._term:
            self._term = self._reader._term
            starts = "position" if self._group else "start"
            starts = "end" if self._start == "end" else starts
            self._name = self._machine.begin("ordered", self._streams, self._group, starts)

    def round(self) -> bool:
        most = self._machine.world.random.choice((1, 3, 20))
        self._begin()
        op = self._recorder.ask("poll", reader=self._name)
        rows: list[list[Any]] = []
        count = 0
        try:
            for event in self._reader:
                if self._term != self._reader._term:
                    self._recorder.told(op, "ok", events=rows)
                    self._begin()
                    op, rows = self._recorder.ask("poll", reader=self._name), []
                if event.value != BY_HAND:
                    rows.append(_row(event))
                count += 1
                if count == most:
                    break
        finally:
            self._recorder.told(op, "ok", events=rows)
        if self._machine.world.random.random() < 0.1:
            self._reader.commit()
        return count > 0

    def close(self) -> None:
        self._reader.close()


class TransactionsReader:
    """`Client.read_transactions`."""

    def __init__(
        self,
        machine: ReaderMachine,
        client: Client,
        recorder: MemoryRecorder,
        stream: str,
        group: str | None,
    ) -> None:
        self._machine = machine
        self._recorder = recorder
        self._stream = stream
        self._group = group
        self._reader = client.read_transactions(stream, group, _TIMEOUT_S)
        self._term = -1
        self._name = ""

    def round(self) -> bool:
        if self._term != self._reader._term or not self._name:
            self._term = self._reader._term
            starts = "position" if self._group else "start"
            self._name = self._machine.begin("transactions", [self._stream], self._group, starts)
        op = self._recorder.ask("poll", reader=self._name)
        rows: list[list[Any]] = []
        found = False
        try:
            for committed in self._reader:
                found = True
                rows = [_row(event) for event in committed.events]
                break
        finally:
            if self._term == self._reader._term:
                self._recorder.told(op, "ok", events=rows)
            else:  # what came is of another term, and so of another reader
                self._recorder.told(op, "ok", events=[])
                if rows:
                    self._again(rows)
        return found

    def _again(self, rows: list[list[Any]]) -> None:
        self._term = self._reader._term
        self._name = self._machine.begin("transactions", [self._stream], self._group, "position")
        with self._recorder.asking("poll", reader=self._name) as told:
            told["events"] = rows

    def close(self) -> None:
        self._reader.close()


class SnapshotTaker:
    """`Client.snapshot`: now, or of a time near by; each is read whole, some twice."""

    def __init__(self, machine: ReaderMachine, client: Client, recorder: MemoryRecorder) -> None:
        self._machine = machine
        self._client = client
        self._recorder = recorder
        own = Random(f"{machine.world.seed}/{machine.name}.{machine.starts}/instants")
        self._instants = Instants(client, own, machine.ledger.instants)

    def round(self) -> bool:
        world = self._machine.world
        if not self._machine.finishing:
            world.sleep(self._machine.faults.span(1.5))
        random = world.random
        streams = list(self._machine.ledger.streams)
        asked_for = None
        if random.random() < 0.4:
            now_us = int((SimClock(world, world.current).wall() + random.uniform(-4, 1)) * 1e6)
            if world.current.skew < _FAR_S or not self._machine.finishing:
                asked_for = hybrid_time.from_us(now_us)
        mode = self._instants.mode() if asked_for is None else "snapshot"
        latest = mode == "latest"
        label = f"snapshot/{len(self._machine.ledger.readers)}"
        self._machine.ledger.readers.append(label)
        try:
            with self._recorder.asking(
                "snapshot", snapshot=label, streams=streams, asked_for=asked_for, latest=latest
            ) as told:
                snapshot = self._client.snapshot(streams, asked_for, mode=mode, timeout=5.0)
                told["timestamp"] = snapshot.timestamp
        except SnapshotExpired:
            self._expired(self._is_deleted(streams))
            return False
        for stream in streams:
            for _ in range(random.choice((1, 1, 2))):
                self._read(label, snapshot, stream)
        older = self._instants.older(label, snapshot)
        if older is not None:
            self._read(*older, streams[0])
            try:
                self._instants.difference(older[1], snapshot)
            except SnapshotExpired:
                self._expired(self._is_deleted(streams))
        if not self._machine.faults.weather.offsets_expire_s:
            offsets = partial(self._machine.cluster.groups.offsets, "group")
            try:
                self._instants.copy(streams[0], "group", offsets)
            except (
                SnapshotExpired
            ):  # in a partition that the group has not begun, unread events may be deleted
                self._expired(self._is_deleted(streams[:1]))
        return False

    def _is_deleted(self, streams: Sequence[str]) -> bool:
        places = self._machine.cluster.partitions
        topics = [name(stream) for stream in streams for name in (stream_topic, history_topic)]
        deleted = any(p.start_offset for at, p in places.items() if at.topic in topics)
        return deleted or self._machine.is_spoiled

    def _read(self, label: str, snapshot: Snapshot, stream: str) -> None:
        """Exactly what the plan says; refused, if some of it is deleted, and only then."""
        cut = snapshot.plan().cuts[stream]
        asked = {"snapshot": label, "stream": stream}
        try:
            with self._recorder.asking("snapshot_read", **asked) as read:
                found = self._instants.whole(snapshot, stream)
                read["events"] = [_row(event) for event in found if event.value != BY_HAND]
        except SnapshotExpired:
            self._expired(
                self._machine.is_spoiled
                or any(
                    self._start(stream_topic(stream), p) > at for p, at in cut.start_offsets.items()
                )
                or self._start(history_topic(stream), 0) >= cut.history
            )
        else:
            places = [(row[1], row[2]) for row in read["events"]]
            if stream not in self._machine.ledger.deleted:  # else it shows what is there now
                self._machine.ledger.snapshots.append((stream, cut, places))

    def _start(self, topic: str, partition: int) -> int:
        return self._machine.cluster.partition(TopicPartition(topic, partition)).start_offset

    def _expired(self, is_right: bool) -> None:
        if not is_right:
            self._machine.world.fail("SnapshotExpired, and nothing is deleted")

    def close(self) -> None:
        pass


def _row(event: Event) -> list[Any]:
    return [
        event.stream,
        event.partition,
        event.offset,
        text(event.key),
        event_id(event.value),
        None if event.txn_id is None else event.txn_id.hex(),
        event.commit_timestamp,
    ]
