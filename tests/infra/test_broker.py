"""The embedded broker: its life, its end with its owner, and how it says that it can't start."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.infra import broker as broker_module
from anabranch.infra.broker import STOP_TIMEOUT_S, EmbeddedBroker
from anabranch.infra.errors import (
    BrokerDied,
    BrokerNotRunning,
    FolderInUse,
    FolderMismatch,
    NoJava,
    PortTaken,
    StartDeadlinePassed,
)
from anabranch.infra.sockets import HOST, free_port, is_free, is_ready
from anabranch.infra.storage import ensure_formatted
from tests.infra.kafka import finalized_features
from tests.infra.test_process import Owner, state
from tests.plain_reader import values
from tests.waiting import wait_until

pytestmark = pytest.mark.broker
QUIET = {"log_level": 0}


def create_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    for done in admin.create_topics([NewTopic(name, 1, 1)]).values():
        done.result(20)


def produce(bootstrap: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **QUIET})
    errors: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error)

    for value in values:
        producer.produce(topic, value, on_delivery=delivered)
    assert producer.flush(20) == 0
    assert errors == []


def test_a_broker_starts_stops_and_keeps_its_topics(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "folder with é", quick_start=True)
    with pytest.raises(BrokerNotRunning):
        _ = broker.port
    with broker:
        bootstrap, first_pid = broker.bootstrap, broker.pid
        assert state(first_pid) is not None
        create_topic(bootstrap, "kept")
        produce(bootstrap, "kept", b"1")

        broker.start()  # it runs: nothing happens
        assert broker.pid == first_pid

        broker.kill()
        assert not broker.running
        with pytest.raises(BrokerNotRunning, match=r"broker\.log:\n +20\d\d-.* INFO "):
            broker.pause()
        broker.start()
        assert broker.bootstrap == bootstrap
        assert values(bootstrap, "kept") == [b"1"]

        last_pid, port = broker.pid, broker.port
        cluster = re.findall(r'"cluster_id": "(.+)"', (broker.folder / "broker.json").read_text())
        assert is_ready(HOST, port, cluster[0])
        # Another broker on our port is not taken for ours.
        assert not is_ready(HOST, port, "another")
        broker.pause()
        wait_until(lambda: state(last_pid) == "T", 30)
        assert not is_ready(HOST, port, cluster[0], timeout_s=0.2)
        broker.resume()
        wait_until(lambda: is_ready(HOST, port, cluster[0]), 30)
        # Stopping one that is paused works, too, and at once.
        broker.pause()
        stopped_at = time.monotonic()
    assert time.monotonic() - stopped_at < STOP_TIMEOUT_S
    assert state(last_pid) is None
    assert not broker.running
    assert is_free(port)
    assert (tmp_path / "folder with é" / "data").is_dir()
    assert "starting Kafka" in broker.log.read_text()
    broker.stop()  # it is stopped: nothing happens


@pytest.mark.long
def test_a_restart_keeps_port_and_topics(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "b", quick_start=True) as broker:
        bootstrap, first_pid = broker.bootstrap, broker.pid
        create_topic(bootstrap, "kept")
        produce(bootstrap, "kept", b"1")
        broker.restart()
        assert broker.bootstrap == bootstrap
        assert broker.pid != first_pid
        assert state(first_pid) is None
        produce(bootstrap, "kept", b"2")
        assert values(bootstrap, "kept") == [b"1", b"2"]


def test_the_transaction_version(request: pytest.FixtureRequest) -> None:
    """Of the newest protocol; of the older one tests/faults/test_held_end.py asks."""
    if request.config.getoption("--bootstrap"):
        pytest.skip("a cluster of one's own may be of any version")
    bootstrap = request.getfixturevalue("broker").bootstrap
    assert finalized_features(bootstrap)["transaction.version"] == 2


OWNER = """
import sys, time
from anabranch.infra.broker import EmbeddedBroker
broker = EmbeddedBroker({folder!r}, quick_start=True)
broker.start()
print(broker.pid, broker.folder, flush=True)
{then}
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("exits", marks=pytest.mark.soak)])
def test_it_ends_with_its_owner(end: str) -> None:
    owner = Owner(OWNER.format(folder=None, then="" if end == "killed" else "sys.exit()"))
    words = owner.words()
    pid, folder = int(words[0]), Path(words[1])
    if end == "killed":
        assert state(pid) is not None
        assert folder.is_dir()
        owner.kill()
    else:
        owner.exits()
    wait_until(lambda: state(pid) is None)
    wait_until(lambda: not folder.exists())


@pytest.fixture
def no_temporary_folder_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which another process listens."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("no_temporary_folder_left")
def test_a_port_that_is_taken(listener: int) -> None:
    broker = EmbeddedBroker(port=listener)
    with pytest.raises(PortTaken, match=f"port {listener} is in use"):
        broker.start()
    assert not broker.running


@pytest.mark.soak
@pytest.mark.usefixtures("no_temporary_folder_left")
def test_a_port_lost_between_the_choice_and_the_start(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter([listener, free_port()])

    def lose_once(avoid: frozenset[int] = frozenset()) -> int:
        return next(chosen) if not avoid else free_port(avoid)

    monkeypatch.setattr(broker_module, "free_port", lose_once)
    # Along the way: both compilers, and a collector of one's own in place of ours.
    with EmbeddedBroker(java_options=["-XX:+UseParallelGC"]) as broker:
        assert broker.port != listener
        assert broker.running


@pytest.mark.usefixtures("no_temporary_folder_left")
@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ({"num.io.threads": "none"}, "num.io.threads"),
        # It dies after formatting, which is left out here.
        pytest.param({}, "meta.properties", marks=pytest.mark.soak),
    ],
)
def test_a_broker_that_dies_says_why(
    properties: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "elsewhere" / "log"
    if not properties:
        monkeypatch.setattr(broker_module, "ensure_formatted", lambda *_, **__: "none")
    broker = EmbeddedBroker(log=log, properties=properties, quick_start=True)
    with pytest.raises(BrokerDied, match=r"exit code 1\b") as caught:
        broker.start()
    if properties:
        assert any(says in line for line in caught.value.log_tail)
        assert says in str(caught.value)
    else:
        assert "ended while starting" in str(caught.value)
    assert says in log.read_text()


@pytest.mark.soak
@pytest.mark.usefixtures("no_temporary_folder_left")
@pytest.mark.parametrize("timeout_s", [0.1, 1.2])
def test_a_start_that_takes_too_long(timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "is_ready", lambda *_: False)
    started = time.monotonic()
    with pytest.raises(StartDeadlinePassed):
        EmbeddedBroker(start_timeout_s=timeout_s).start()
    assert time.monotonic() - started < timeout_s + 5


def test_a_broker_without_java_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NoJava("none")

    monkeypatch.setattr(broker_module, "find_java", refuse)
    with pytest.raises(NoJava):
        EmbeddedBroker().start()


class Formatted(Exception):
    """A folder is formatted, and no broker is started in it."""


@pytest.mark.soak
def test_kafkas_tool_formats_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second folder is made of what the tool wrote into the first one, with ids of its own."""

    def formatted(folder: Path, **given: Any) -> str:
        ensure_formatted(folder, **given | {"kept_in": tmp_path})
        raise Formatted

    monkeypatch.setattr(broker_module, "ensure_formatted", formatted)
    ran, features, ids = [], [], []
    for name in ("one", "two"):
        broker = EmbeddedBroker(tmp_path / name)
        with pytest.raises(Formatted):
            broker.start()
        data = tmp_path / name / "data"
        files = {path.name: path.read_bytes() for path in data.iterdir()}
        ran.append(broker.log.exists())
        features.append(files.pop("bootstrap.checkpoint"))
        text = files.pop("meta.properties").decode()
        ids.append(dict(line.split("=") for line in text.splitlines() if line[:1] != "#"))
        assert not files
    assert ran == [True, False]
    assert features[0] == features[1]
    assert ids[0].keys() == ids[1].keys()
    same = {name for name in ids[0] if ids[0][name] == ids[1][name]}
    assert same == {"version", "node.id"}


def test_a_folder_of_another_broker_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "data" / "precious"
    theirs.parent.mkdir()
    theirs.write_text("x")
    with pytest.raises(FolderMismatch, match="files of somebody else"):
        EmbeddedBroker(tmp_path).start()
    assert theirs.read_text() == "x"
    (tmp_path / "broker.json").write_text(
        '{"formatted": true, "transaction_version": 0, "cluster_id": "x"}'
    )
    with pytest.raises(FolderMismatch, match=r"transaction\.version=0, not 2"):
        EmbeddedBroker(tmp_path).start()


@pytest.mark.parametrize(
    "arguments",
    [
        {"transaction_version": 3},
        {"port": 65536},
        {"port": -1},
        {"heap_mb": 1},
        {"properties": {"listeners": "PLAINTEXT://0.0.0.0:9092"}},
        {"properties": {"log.dirs": "/var/lib"}},
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        EmbeddedBroker(**arguments)  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("command", ["broker", "dev"])
def test_a_folder_that_kafka_would_misread_is_named(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [command, "--folder", str(tmp_path / "one,two")])
    assert done.exit_code == 6
    assert done.stderr.startswith("FolderUnusable: ")
    assert "comma" in done.stderr


@pytest.mark.soak
def test_a_folder_is_of_one_process_as_long_as_its_broker_runs(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    owner = Owner(OWNER.format(folder=str(folder), then=""))
    try:
        pid = int(owner.words()[0])
        second = EmbeddedBroker(folder, quick_start=True)
        with pytest.raises(FolderInUse, match=rf"{folder} is in use by pid {owner.process.pid}:"):
            second.start()
        assert state(pid) is not None, "the first broker still runs"
        assert folder.stat().st_mode & 0o777 == 0o700
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait(30)

        def starts() -> bool:
            with contextlib.suppress(FolderInUse):
                second.start()
            return second.running

        wait_until(starts, 60)
        second.stop()
    finally:
        owner.kill()
