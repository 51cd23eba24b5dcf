"""Processors as tools see them: the command line, and consumer groups of Kafka that show them or become them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

import anabranch
from anabranch.cli.main import app
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.protocol.legal_names import state_stream
from anabranch.protocol.partitioner import position_of
from anabranch.reading.store_lookup import state_key
from anabranch.topics.rights import reader_rights
from tests.behaviour.test_tasks import KEYS, QUIET_S, Place, copy
from tests.cluster import Cluster
from tests.secured import CLIENT, entrance, grant

pytestmark = pytest.mark.broker


class Group:
    """A consumer group of Kafka's own on a stream's topic."""

    def __init__(self, cluster: Cluster, name: str, stream: str, partitions: int = 2) -> None:
        address, options = entrance(cluster.bootstrap, CLIENT)
        settings = {"group.id": name, "enable.auto.commit": False, "bootstrap.servers": address}
        self._admin = AdminClient({"bootstrap.servers": address, **options})
        self._name = name
        self.consumer = Consumer(settings | {"auto.offset.reset": "earliest"} | dict(options))
        topic = stream.replace("/", ".")
        self.places = [Partition(topic, p) for p in range(partitions)]
        self.history = Partition(f"{topic}.history", 0)

    def lags(self) -> list[int]:
        """As `kafka-consumer-groups` shows them: of the history, then of each partition."""
        found = self.consumer.committed([self.history, *self.places], timeout=30)
        ends = [self.consumer.get_watermark_offsets(place, timeout=30)[1] for place in found]
        return [end - max(place.offset, 0) for end, place in zip(ends, found, strict=True)]

    def state(self) -> ConsumerGroupState:
        asked = self._admin.describe_consumer_groups([self._name])
        found: ConsumerGroupState = asked[self._name].result(30).state
        return found

    def consume(self, count: int) -> list[bytes | None]:
        """Read so many events, and commit them as any program does."""
        self.consumer.assign([Partition(p.topic, p.partition, 0) for p in self.places])
        found: list[bytes | None] = []
        while len(found) < count:
            for message in self.consumer.consume(count - len(found), timeout=10):
                assert message.error() is None
                found.append(message.value())
        self.consumer.commit(asynchronous=False)
        return found


@pytest.fixture
def place(client: anabranch.Client) -> Place:
    return Place(client)


@pytest.fixture
def groups(cluster: Cluster, place: Place) -> Iterator[Any]:
    made: list[Group] = []

    def group(name: str) -> Group:
        made.append(Group(cluster, name, place.input))
        return made[-1]

    yield group
    for each in made:
        each.consumer.close()


def command(cluster: Cluster, *arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(
        app, [*arguments, "--json"], env={"ANABRANCH_BOOTSTRAP": cluster.bootstrap}
    )
    assert done.exit_code == code, (done.stdout, done.stderr)
    return json.loads(done.stdout if code == 0 else done.stderr)


def idle(client: anabranch.Client, place: Place) -> None:
    """Move all tasks up to the end, those without events too, as a worker does that has nothing to do."""
    ownership = client.take_tasks(place.processor, holder="idle")
    with client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader:
        assert list(reader) == []
        with client.begin(place.scope, ownership=ownership) as txn:
            txn.commit(consumed=reader.consumed())


def test_the_lag_falls_as_tasks_commit(
    client: anabranch.Client, cluster: Cluster, place: Place, groups: Any
) -> None:
    """The command line, and the mirror."""
    group = groups(place.processor.replace("/", "."))
    mirror = client.mirror(place.processor)
    place.write(5, 40)
    behind = command(cluster, "processor", "describe", place.processor)
    assert [(one["events_behind"], one["exact"]) for one in behind["inputs"]] == [(45, True)]
    assert 0 < behind["inputs"][0]["seconds_behind"] < 60
    assert mirror.step()
    first = group.lags()
    assert sum(first[1:]) >= 45

    assert copy(client, place, client.take_tasks(place.processor), every=9, most=45) == 45
    place.write(30)
    idle_lag = command(cluster, "processor", "list", place.scope)["processors"][0]["inputs"][0]
    assert 30 <= idle_lag["events_behind"] <= 75
    assert copy(client, place, client.take_tasks(place.processor), every=100) == 30
    idle(client, place)
    assert mirror.step()
    assert not mirror.step(), "nothing has moved"
    assert group.lags() == [0, 0, 0], "markers are no lag"
    assert group.state() == ConsumerGroupState.EMPTY, "tools list it, without members"
    done = command(cluster, "processor", "describe", place.processor)
    assert (done["inputs"][0]["events_behind"], done["inputs"][0]["seconds_behind"]) == (0, 0.0)
    assert {(task["holder"], task["in_progress"]) for task in done["held_by"]} == {("idle", None)}
    (stands,) = done["positions"]
    assert (stands["tasks"], stands["input"]) == ([0, 1, 2, 3], place.input)

    place.write(7)
    idle_before = client.processor(place.processor).tasks[0].positions[0].record
    assert (
        command(cluster, "processor", "list", place.scope)["processors"][0]["inputs"][0][
            "events_behind"
        ]
        == 7
    )
    released = command(cluster, "processor", "release", place.processor, "--task", "2", "--yes")
    assert released["tasks"] == [2]
    holders = [task.holder for task in client.processor(place.processor).tasks]
    assert holders == ["idle", "idle", "", "idle"]
    assert idle_before > 0
    mirror.close()


@pytest.mark.soak
def test_a_group_becomes_a_processor(
    client: anabranch.Client, cluster: Cluster, place: Place, groups: Any
) -> None:
    place.write(4, 5)
    read = groups(f"{place.scope}-g").consume(9)
    place.write(6, 6)
    made = f"{place.scope}/imported"
    importing = ("processor", "import-group", made, "--group", f"{place.scope}-g")
    command(cluster, *importing, "--input", place.input, "--tasks", "4")
    ownership = client.take_tasks(made)
    with client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader:
        rest = [event.value for event in reader]
    assert sorted(read + rest) == sorted(value for _, value in place.written)
    assert made in str(command(cluster, "processor", "list", place.scope))

    client.take_tasks(place.processor)
    moved = command(
        cluster, "processor", "import-group", place.processor, "--group", f"{place.scope}-g", "-y"
    )
    assert moved["starts"][0]["record"] == client.processor(made).inputs[0].record
    tasks = client.processor(place.processor).tasks
    assert {(task.holder, task.positions) for task in tasks} == {("", ())}

    groups(f"{place.scope}-none")
    with pytest.raises(InvalidArgument, match="has no offset in the topic"):
        client.import_group(f"{place.scope}/more", f"{place.scope}-none", place.input)
    with pytest.raises(InvalidArgument, match="is the mirror of"):
        client.import_group(made, made.replace("/", "."), place.input)
    groups(f"{place.scope}-g").consume(21)
    with pytest.raises(IllegalState, match="is there already"):
        client.import_group(made, f"{place.scope}-g", place.input, 4)
    told = command(cluster, "processor", "describe", f"{place.scope}/none", code=2)
    assert told["error"]["name"] == "UnknownProcessor"


@pytest.mark.long
def test_stores_are_read_reset_and_deleted(
    client: anabranch.Client, cluster: Cluster, place: Place
) -> None:
    counting = f"{place.scope}/counting"
    client.create_processor(counting, place.input, 4, stores=["counts", "other"])
    grant(cluster.bootstrap, CLIENT, reader_rights([], state_stream(counting)))
    place.write(8)
    ownership = client.take_tasks(counting)
    key = KEYS[0]
    task = position_of(key) * 4 >> 32
    for number, value in enumerate((b"1", b"\xff", b"3")):
        with (
            client.read(place.input, timeout=QUIET_S, ownership=ownership) as reader,
            client.begin(place.scope, ownership=ownership) as txn,
        ):
            list(reader)
            head = state_key(0, 0, b""), (number + 1).to_bytes(8, "big")
            txn.write_state(task, [(state_key(0, 3, key), value), head])
            txn.commit(consumed=reader.consumed())
        shown = command(cluster, "processor", "get", counting, "other", key.decode())
        field = "value" if value != b"\xff" else "value_base64"
        assert shown[field] == (value.decode() if value != b"\xff" else "/w==")
        ownership = client.take_tasks(counting)
    text = CliRunner().invoke(
        app,
        ["processor", "get", counting, "other", key.decode()],
        env={"ANABRANCH_BOOTSTRAP": cluster.bootstrap},
    )
    assert text.stdout == "3\n"
    for code, *absent in ((1, "counts", key.decode()), (1, "other", "none"), (2, "more", "none")):
        assert "error" in command(cluster, "processor", "get", counting, *absent, code=code)
    program = anabranch.Processor(counting, tasks=4).store("other", value=json)
    assert client.stored(counting, program, key) == 3
    get = ("processor", "get", counting, "other", key.decode())
    assert command(cluster, *get, "--task", str(task ^ 1), code=1)["error"]["name"] == "NotFound"

    middle = client.processor(counting).tasks[task].commit_timestamp
    reset = ("processor", "reset", counting)
    assert command(cluster, *reset, "-y", code=2)["error"]["name"] == "InvalidArgument"
    kept = command(cluster, *reset, "--keep-state", "--to", str(middle), "-y")
    assert kept["starts"][0]["record"] > 0
    assert command(cluster, *get)["value"] == "3"
    again = command(cluster, *reset, "--to", "begin", "-y")
    assert again["starts"][0]["record"] == 0
    assert command(cluster, *get, code=1)["error"]["name"] == "NotFound"
    assert command(cluster, "processor", "delete", counting, "-y") == {"processor": counting}
    listed = command(cluster, "processor", "list", place.scope)["processors"]
    assert [one["processor"] for one in listed] == [place.processor]
