"""One value by each codec, written by the client, and read by each reader with the same codec."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.serialization import MessageField, SerializationContext
from typer.main import get_command

import anabranch
from anabranch.cli.main import app as commands
from anabranch.processing.app import Processor
from anabranch.processing.worker import AllTasks, Worker
from anabranch.topics.names import stream_topic
from anabranch.values import codec_of
from tests.cluster import Cluster
from tests.values.kinds import KINDS, Kind
from tests.values.registry import Registry

pytestmark = pytest.mark.broker


def only(*quick: str) -> list[pytest.ParameterSet]:
    """All kinds; the tests of the others are of the long suite."""
    return [pytest.param(kind, marks=[] if kind in quick else pytest.mark.long) for kind in KINDS]


WAIT_S = 60.0
KEY = "ann"
Read = Callable[[anabranch.Client, Cluster, str, Kind], list[tuple[Any, Any]]]


def by_reader(client: anabranch.Client, _: Cluster, name: str, kind: Kind) -> list[tuple[Any, Any]]:
    with client.read(client.stream(name, str, kind.spec), timeout=WAIT_S) as reader:
        event = next(reader)
    return [(event.key, event.value)]


def by_snapshot(
    client: anabranch.Client, _: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    stream = client.stream(name, str, kind.spec)
    return [(event.key, event.value) for event in client.snapshot(stream).read(stream)]


def by_transactions(
    client: anabranch.Client, _: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    with client.read_transactions(client.stream(name, str, kind.spec), timeout=WAIT_S) as reader:
        return [(event.key, event.value) for event in next(reader).events]


def by_table(client: anabranch.Client, _: Cluster, name: str, kind: Kind) -> list[tuple[Any, Any]]:
    table = client.stream(name, str, kind.spec)
    with client.replica(table) as replica, replica.begin() as txn:
        assert list(txn.scan(table)) == [(KEY, kind.value)]
        return [(KEY, txn.get(table, KEY))]


def by_changes(
    client: anabranch.Client, _: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    table = client.stream(name, str, kind.spec)
    with client.changes(table, timeout=WAIT_S) as changes:
        change = next(changes)
    return [(change.key, change.after)]


def by_processor(
    client: anabranch.Client, cluster: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    seen = threading.Event()
    scope = name.partition("/")[0]
    app = Processor(f"{scope}/p", tasks=1, commit_interval=0.02)

    @app.on(app.input(name, key=str, value=kind.spec))
    def see(event: anabranch.Event[Any, Any]) -> None:
        found.append((event.key, event.value))
        seen.set()

    with anabranch.connect(cluster.bootstrap) as own, TemporaryDirectory() as made:
        folder = Path(made)
        worker = Worker(app, own, folder, tasks=AllTasks(range(1)))
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert seen.wait(WAIT_S)
        worker.stop.set()
        thread.join(WAIT_S)
        worker.close()
    return found


def by_command(
    client: anabranch.Client, cluster: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    arguments = ["read", name, "--key", "str", "--value", kind.word, "--to", "end", "--json"]
    command: Any = get_command(commands)
    done = CliRunner().invoke(command, arguments, env={"ANABRANCH_BOOTSTRAP": cluster.bootstrap})
    assert done.exit_code == 0, (done.stdout, done.stderr)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["value"] == kind.plain
    return [(line["key"], kind.value)]


def by_consumer(
    _: anabranch.Client, cluster: Cluster, name: str, kind: Kind
) -> list[tuple[Any, Any]]:
    """confluent-kafka alone; of serializers, its deserializer with the message's topic."""
    topic = stream_topic(name)
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "none"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = consumer.poll(WAIT_S)
    consumer.close()
    assert message is not None
    assert message.error() is None
    if kind.word.endswith(("AVRO", "PROTOBUF")):
        context = SerializationContext(topic, MessageField.VALUE)
        value = kind.spec[1](message.value(), context)
    else:
        value = codec_of(kind.spec).decode(message.value() or b"")
    return [((message.key() or b"").decode(), value)]


READERS: dict[str, Read] = {
    "reader": by_reader,
    "snapshot": by_snapshot,
    "transactions": by_transactions,
    "table": by_table,
    "changes": by_changes,
    "processor": by_processor,
    "command": by_command,
    "consumer": by_consumer,
}


@pytest.fixture(scope="module")
def written(client: anabranch.Client, registry: Registry) -> dict[str, str]:
    """A table for each codec, with one row. Kind -> its name."""
    names = {}
    for kind, codec in KINDS.items():
        names[kind] = name = f"v{uuid.uuid4().hex[:8]}/orders"
        client.create_table(name)
        table = client.stream(name, key=str, value=codec.spec)
        with client.begin(name.partition("/")[0]) as txn:
            txn.write(table, codec.value, key=KEY)
            txn.commit()
    return names


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", only("str", "pydantic", "avro"))
def test_each_reader_reads_what_the_client_wrote(
    kind: str, reader: str, written: dict[str, str], client: anabranch.Client, cluster: Cluster
) -> None:
    found = READERS[reader](client, cluster, written[kind], KINDS[kind])
    assert found == [(KEY, KINDS[kind].value)]


def test_the_subject_is_the_streams(written: dict[str, str], registry: Registry) -> None:
    for kind in ("avro", "protobuf"):
        assert f"{stream_topic(written[kind])}-value" in registry.subjects


@pytest.mark.parametrize("kind", only("msgspec"))
def test_every_way_to_write(
    kind: str, client: anabranch.Client, registry: Registry, unique: str, tmp_path: Path
) -> None:
    codec = KINDS[kind]
    name = f"w{unique}/orders"
    client.create_table(name)
    table = client.stream(name, key=str, value=codec.spec)
    with client.begin(f"w{unique}") as txn:
        token = txn.token()
        assert txn.write_many(table, [(codec.value, "many"), (None, "gone")]) == 2
        writer = client.join(token)
        writer.write(table, codec.value, key="joined")
        txn.commit([writer.finish()])
    with client.replica(table, folder=tmp_path / "replica") as replica:

        def rows(work: Any) -> None:
            work.put(table, "put", codec.value)
            work.insert(table, "inserted", codec.value)
            work.replace(table, "many", codec.value)
            work.delete(table, "joined")
            assert work.get(table, "put") == codec.value

        replica.transact(rows)
        with replica.snapshot() as view:
            wanted = {"inserted": codec.value, "many": codec.value, "put": codec.value}
            assert dict(view.scan(table)) == wanted
            assert view.get_many(table, ["put", "joined"]) == {"put": codec.value}
