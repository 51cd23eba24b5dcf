"""The makes of each port, behind one fixture each."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from anabranch.controller.rocksdb_table import RocksTable
from anabranch.kafka import transactional_producer
from anabranch.kafka.calls import Api
from anabranch.kafka.connection import Connection
from anabranch.kafka.log import KafkaLog
from anabranch.ports import Log, Producer, Table, TopicPartition, TopicSpec
from anabranch.testing.memory.cluster import SteppedClock
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics import rights
from anabranch.topics.rights import Right
from tests.contract.proxy import Proxy
from tests.secured import CONTROLLER, entrance, grant


@dataclass
class Maker:
    """Logs of one make, all on the same cluster."""

    name: str
    open: Callable[[], Log]
    now_ms: int
    delete: Callable[[str], None]  # a topic, as an operator does by hand
    bootstrap: str = ""
    logs: list[Log] = field(default_factory=list)
    producers: list[Producer] = field(default_factory=list)

    def log(self) -> Log:
        """A new handle, closed after the test."""
        self.logs.append(self.open())
        return self.logs[-1]

    def producer(self, name: str | None = None, timeout: float = 60) -> Producer:
        """A producer from a log of its own, closed after the test."""
        made = self.log().producer(name or self.new_id(), timeout=timeout)
        self.producers.append(made)
        return made

    def allow(self, wanted: Iterable[Right]) -> None:
        """Grant a controller rights, where brokers ask for them."""
        grant(self.bootstrap, CONTROLLER, wanted)

    def topic(self, partitions: int = 1, **config: str) -> list[TopicPartition]:
        """A new topic's partitions."""
        name = f"contract.{uuid.uuid4().hex[:12]}"
        # The records' times lie in the past, and a broker's retention goes by them.
        settings = {"retention.ms": "-1"}
        settings |= {key.replace("_", "."): value for key, value in config.items()}
        self.log().create_topics([TopicSpec(name, partitions, settings)])
        return [TopicPartition(name, number) for number in range(partitions)]

    def new_id(self) -> str:
        """A transactional id that nothing else uses."""
        return f"contract.control.{uuid.uuid4().hex[:12]}"

    def close(self) -> None:
        """Close all handles and producers."""
        for producer in self.producers:
            producer.close()
        for log in self.logs:
            log.close()


def _kafka(bootstrap: str, name: str) -> Maker:
    import time

    address, options = entrance(bootstrap, CONTROLLER)
    made = Maker(
        name,
        lambda: KafkaLog(address, options, in_sessions=True),
        int(time.time() * 1000),
        deleter(bootstrap),
        bootstrap,
    )
    made.allow(rights.controller_rights("contract", "contract"))
    return made


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops for a second costs no append: nobody repeats a round here."""
    monkeypatch.setattr(transactional_producer, "LEADER_S", 15.0)


def deleter(bootstrap: str) -> Callable[[str], None]:
    """Deletes topics of a broker."""

    def delete(topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.delete_topics([topic])[topic].result(30)

    return delete


def _memory(name: str, version: int) -> Maker:
    clock = SteppedClock(1_700_000_000.0)
    cluster = MemoryBrokers(clock, transaction_version=version, marker_delay=0.002)
    return Maker(name, lambda: cluster.log("process"), int(clock.now * 1000), cluster.delete_topic)


@pytest.fixture(
    params=[
        "memory-v2",
        "memory-v0",
        pytest.param("kafka-v2", marks=pytest.mark.broker),
        pytest.param("kafka-v0", marks=[pytest.mark.broker, pytest.mark.soak]),
    ]
)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Every make of the log."""
    name: str = request.param
    version = int(name[-1])
    if name.startswith("memory"):
        made = _memory(name, version)
    else:
        fixture = "broker" if version == 2 else "broker_tv0"
        made = _kafka(request.getfixturevalue(fixture).bootstrap, name)
    yield made
    made.close()


@pytest.fixture
def log(maker: Maker) -> Log:
    """A handle of the make under test."""
    return maker.log()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """All connections of the test go through it."""
    made = Proxy(socket.create_connection)
    monkeypatch.setattr(
        "anabranch.kafka.connection.socket.create_connection", made.create_connection
    )
    yield made
    made.close()


@pytest.fixture
def lowest_versions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Brokers are spoken to in the lowest versions of the code: (api key, version) of the calls that are made."""
    asked: set[tuple[int, int]] = set()
    real = Connection.version

    def lowest(self: Connection, api: Api, highest: int | None = None) -> int:
        version = max(api.lowest, self.versions.get(api.key, (0, 0))[0])
        asked.add((api.key, version))
        return real(self, api, version)

    monkeypatch.setattr(Connection, "version", lowest)
    return asked


@pytest.fixture(params=["memory", "rocksdb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    """Every make of the table."""
    made: Table
    if request.param == "memory":
        made = MemoryStore().open("process")
    else:
        made = RocksTable(tmp_path / "table")
    yield made
    made.close()
