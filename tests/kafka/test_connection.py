"""No socket stays open after an error, or after its owner was closed."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from anabranch.kafka.calls import FETCH, METADATA, PRODUCE, ConnectionBroken
from anabranch.kafka.cluster import Cluster, Leader, Topic
from anabranch.kafka.codes import UNSUPPORTED_VERSION
from anabranch.kafka.connection import Connection
from anabranch.kafka.coordinator import Coordinator
from anabranch.kafka.fetch import Fetcher
from anabranch.kafka.produce import ProducePipeline
from anabranch.kafka.settings import parse_settings
from anabranch.ports import LogError, LogRefused, LogUnavailable, TopicPartition, all_steps

API_VERSIONS = 18
SOON_S = 10.0


class Broker:
    """A broker that only says which calls it knows (ApiVersions 0), and counts its open connections."""

    def __init__(self) -> None:
        self.known = {API_VERSIONS: (0, 0)}
        self._server = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.address: tuple[str, int] = self._server.getsockname()

    def _accept(self) -> None:
        while True:
            try:
                peer = self._server.accept()[0]
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
            self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as requests:
            while head := requests.read(12):
                size, key, version, correlation = struct.unpack(">ihhi", head)
                requests.read(size - 8)
                if key != API_VERSIONS:
                    continue
                code = UNSUPPORTED_VERSION if version else 0
                rows = [struct.pack(">hhh", key, *known) for key, known in self.known.items()]
                answer = struct.pack(">ihi", correlation, code, len(rows)) + b"".join(rows)
                peer.sendall(struct.pack(">i", len(answer)) + answer)

    def open(self) -> int:
        """The number of connections that the client has not closed; waits a little for 0."""
        until = time.monotonic() + 2.0
        while (count := sum(each.is_alive() for each in self._threads[1:])) and (
            time.monotonic() < until
        ):
            time.sleep(0.01)
        return count

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def cluster(broker: Broker) -> Cluster:
    """A cluster whose only broker leads ``t[0]``, and does not answer about topics."""
    host, port = broker.address
    made = Cluster(parse_settings(f"{host}:{port}", {}))
    made._brokers = {1: broker.address}
    made._topics = {"t": Topic("t", bytes(16), {0: Leader(1, 1)}, 1, 1, 1)}
    made.health.confirmed["t"] = time.monotonic()
    return made


def soon() -> float:
    return time.monotonic() + SOON_S


def test_an_interrupted_handshake(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl.SSLSocket, "do_handshake", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        Connection(
            *broker.address, client_id="c", deadline=soon(), tls=ssl.create_default_context()
        )
    assert broker.open() == 0


def test_a_failed_handshake(broker: Broker) -> None:
    tls = ssl.create_default_context()
    with pytest.raises(ConnectionBroken):
        Connection(*broker.address, client_id="c", deadline=time.monotonic() + 0.2, tls=tls)
    assert broker.open() == 0


@pytest.mark.parametrize("step", ["greet", "authenticate"])
def test_an_interrupt_before_the_connection_is_ready(
    cluster: Cluster, broker: Broker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(Connection, step, _interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.pool.open(broker.address, soon())
    assert broker.open() == 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("problem", ["no such call", "no request can be made"])
def test_a_fetch_that_is_not_sent(
    cluster: Cluster, broker: Broker, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    if problem == "no request can be made":
        broker.known[FETCH.key] = FETCH.lowest, FETCH.highest
        monkeypatch.setattr(cluster, "epoch", _interrupt)
    with pytest.raises((LogRefused, KeyboardInterrupt)):
        Fetcher(cluster).fetch(
            {TopicPartition("t", 0): 0}, max_wait=0.0, max_bytes=1, committed=False
        )
    cluster.close()
    assert broker.open() == 0


def test_a_pool_that_is_closed_while_it_reads_late_answers(
    cluster: Cluster, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, late, last = (cluster.pool.open(broker.address, soon()) for _ in range(3))
    for connection in (late, last):
        connection.send(METADATA.key, 5, (b"",), flexible=False, deadline=soon())
    for connection in (idle, late):
        cluster.pool.give(connection, broker.address)
    monkeypatch.setattr(Connection, "drain", lambda _: cluster.close())
    with pytest.raises(LogUnavailable, match="closed"):
        cluster.pool.take(broker.address, soon())
    cluster.pool.give(last, broker.address)
    assert broker.open() == 0


def test_a_producer_whose_broker_refuses_the_version(cluster: Cluster, broker: Broker) -> None:
    pipeline = ProducePipeline(cluster)
    for _ in range(2):
        with pytest.raises(LogRefused):
            pipeline.connect(pipeline.link(1), soon())
    pipeline.close()
    assert broker.open() == 0


def test_a_producer_that_is_closed_connects_no_more(cluster: Cluster, broker: Broker) -> None:
    broker.known[PRODUCE.key] = PRODUCE.lowest, PRODUCE.highest
    pipeline = ProducePipeline(cluster)
    pipeline.connect(pipeline.link(1), soon())
    pipeline.close()
    with pytest.raises(ConnectionBroken, match="closed"):
        pipeline.connect(pipeline.link(1), soon())
    assert broker.open() == 0


def test_a_coordinator_that_is_closed_connects_no_more(
    cluster: Cluster, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.kafka.coordinator.coordinator_of", lambda *_: broker.address)
    monkeypatch.setattr(Coordinator, "_init", Coordinator._connect)
    coordinator = Coordinator(cluster, "id", 1.0)
    coordinator.close()
    with pytest.raises(LogError, match="closed"):
        all_steps(coordinator.end(commit=True))
    assert broker.open() == 0
