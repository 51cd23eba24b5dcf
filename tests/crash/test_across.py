"""A transaction over two control partitions on a broker, whose controllers die between its messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.batches.records import decode_records
from anabranch.clock import SystemClock
from anabranch.controller.controller import Controller
from anabranch.controller.rocksdb_table import RocksTable
from anabranch.core.decisions.turn import Settings
from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogError
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, decode
from anabranch.topics.creation import create_control_topics
from tests.conftest import Broker
from tests.core.labels import SECRET
from tests.crash.oracle import check_stream, read_stream
from tests.crash.raw import Pen, Raw, make_txn_id
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.unsecured, pytest.mark.timeout(120)]

SCOPES = ("nyc", "ber")


class Dead(Exception):
    """The process is killed here."""


class Mortal:
    """A log whose process dies when it has sent a message of this kind, and nothing after it."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self.dies_after: type | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def send(self, batches: Any, failed: Any) -> bool:
        found = self._log.send(batches, failed)
        for place, data in batches:
            if "control" in place.topic and self.dies_after is not None:
                records = [decode(record.value or b"") for record in decode_records(bytes(data))]
                if any(isinstance(one, self.dies_after) for one in records):
                    raise Dead
        return bool(found)


@dataclass
class Process:
    """A controller of one control partition, in a thread of its own; after its death a successor leads."""

    bootstrap: str
    prefix: str
    number: int
    folder: Path
    deaths: int = 0
    log: Mortal = field(init=False)
    stopped: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.log = Mortal(KafkaLog(self.bootstrap))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        settings = Settings(self.number, 2, self.prefix, reply_partitions=8, trusts_open=True)
        while not self.stopped.is_set():
            table = RocksTable(self.folder / f"table{self.number}-{self.deaths}")
            controller = Controller(self.log, table, SystemClock(), settings, f"p{self.deaths}")
            with suppress(LogError):
                controller.lead()
                while not self.stopped.is_set():
                    controller.step(0.05)
            controller.resign()
            table.close()
            self.log.dies_after = None
            self.deaths += 1

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(30)
        self.log.close()


@dataclass
class Pair:
    """Two control partitions with a stream each, and a client."""

    bootstrap: str
    log: KafkaLog
    prefix: str
    processes: list[Process]
    clients: list[Raw]

    @property
    def streams(self) -> list[str]:
        return [f"{scope}-{self.prefix}/a" for scope in SCOPES]

    def make_streams(self) -> None:
        for number, stream in enumerate(self.streams):
            scope = stream.partition("/")[0]
            assert self.clients[0].ask(r.FindScope(scope, True)).control_partition == number
            self.clients[number].ask(r.CreateStream(stream, 1, {}))

    def short(self, client: anabranch.Client, value: bytes) -> None:
        """Write to both streams by one command to each; the first time by journals, as the client learns then."""

        def write(txn: anabranch.Transaction) -> None:
            for stream in self.streams:
                txn.write(stream, value, key=b"k")

        assert client.transact(write).counts.committed == 2

    def transaction(self, value: bytes) -> r.Outcome:
        """Write to both streams, and commit."""
        first = self.clients[0]
        begin = r.Begin(make_txn_id(), self.streams[0].partition("/")[0], None, 60_000, SECRET)
        token = first.ask(begin).token
        pen = Pen(first, begin.txn_id)
        for number, stream in enumerate(self.streams):
            touched = self.clients[number].ask(r.Touch(token, stream))
            pen.write(stream, touched.segments, [(b"k", value)])
        outcome: r.Outcome = first.ask(r.Commit(token, (), (pen.receipt(),), None, 10_000))
        return outcome


@pytest.fixture
def pair(broker: Broker, unique: str, tmp_path: Path) -> Iterator[Pair]:
    log, prefix = KafkaLog(broker.bootstrap), f"x{unique}"
    create_control_topics(log, prefix, control_partitions=2, replication_factor=1)
    processes = [Process(broker.bootstrap, prefix, number, tmp_path) for number in (0, 1)]
    clients = [
        Raw(broker.bootstrap, prefix, log, reply_partition=number, partition=number).start()
        for number in (0, 1)
    ]
    with anabranch.connect(broker.bootstrap, prefix=prefix, lane=ADMIN_LANE) as operator:
        operator.feature_level(raise_to=LEVEL)
    yield Pair(broker.bootstrap, log, prefix, processes, clients)
    for process in processes:
        process.stop()
    log.close()


@pytest.mark.slow(8)
def test_controllers_that_die_between_messages_change_no_outcome(pair: Pair) -> None:
    """One dies with its vote logged and sent, the other with its decision logged and sent, or not yet sent."""
    pair.make_streams()
    values = []
    for number, kind in ((0, None), (1, r.Vote), (0, r.Decide), (1, r.Done), (0, r.AskVote)):
        deaths = [process.deaths for process in pair.processes]
        pair.processes[number].log.dies_after = kind
        values.append(str(kind).encode())
        outcome = pair.transaction(values[-1])
        assert (outcome.state, outcome.committed) == ("COMMITTED", 2), kind
        deaths[number] += kind is not None
        wait_until(lambda: [process.deaths for process in pair.processes] == deaths)  # noqa: B023
    with anabranch.connect(pair.bootstrap, prefix=pair.prefix, timeout=60) as client:
        for number, kind in ((0, None), (1, r.Vote), (0, r.AskVote), (0, None)):
            pair.processes[number].log.dies_after = kind
            values.append(b"short " + str(kind).encode())
            pair.short(client, values[-1])
    logs = [read_stream(pair.log, stream) for stream in pair.streams]
    for one in logs:
        check_stream(one)
        assert [event.value for event in one.events] == values
    first, second = (
        [record.timestamp for _, record in one.history if isinstance(record, r.CommitRecord)]
        for one in logs
    )
    assert first == second
