"""Plain topics of Kafka as a processor's inputs, and the bridge from a topic into a stream."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import anabranch
from anabranch.errors import IllegalState, InvalidArgument, SnapshotExpired
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition as Place
from anabranch.processing.app import Processor
from anabranch.processing.plain import import_group
from anabranch.processing.worker import AllTasks, Worker, make_processor
from tests.cluster import Cluster
from tests.contract.helpers import wait_stable

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]
TASKS = 4


class Topic:
    """A topic of two partitions, and what was written."""

    def __init__(self, bootstrap: str) -> None:
        self.name, self.bootstrap = f"plain-{uuid.uuid4().hex[:8]}", bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        # Records of 1970 would be deleted at the broker's next look.
        topic = NewTopic(self.name, 2, config={"retention.ms": "-1"})
        self.admin.create_topics([topic])[self.name].result()
        self.written: Counter[tuple[bytes, bytes]] = Counter()

    def write(self, count: int, partitions: int = 2, *, aborted: bool = False) -> None:
        """Records in a transaction of Kafka's."""
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "transactional.id": uuid.uuid4().hex}
        )
        producer.init_transactions()
        producer.begin_transaction()
        for i in range(count):
            key, value = b"k%d" % (i % 5), uuid.uuid4().bytes
            producer.produce(self.name, value, key, i % partitions, timestamp=1_000_000 + i)
            if not aborted:
                self.written[key, value] += 1
        (producer.abort_transaction if aborted else producer.commit_transaction)()
        with closing(KafkaLog(self.bootstrap)) as log:
            wait_stable(log, {Place(self.name, p) for p in range(min(count, partitions))})


@pytest.fixture
def topic(cluster: Cluster) -> Topic:
    return Topic(cluster.bootstrap)


def program(
    scope: str, topic: Topic, name: str = "copy", **options: Any
) -> tuple[Processor, list[Any]]:
    """Copies, and counts each key in a store."""
    app = Processor(f"{scope}/{name}", tasks=TASKS, **options)
    records = app.topic(topic.name, bootstrap=topic.bootstrap)
    out, seen, counts = app.output(f"{scope}/out"), app.store("seen"), []

    @app.on(records)
    def copy(event: anabranch.Event) -> None:
        assert event.key is not None
        seen[event.key] = b"%d" % (int(seen.get(event.key, b"0")) + 1)
        counts.append((event.partition, event.key, seen[event.key]))
        out.write(event.value, event.key)

    return app, counts


def until_copied(worker: Worker, events: int) -> None:
    found = 0.0
    for _ in range(200):
        worker.step()
        found = worker.metrics.total("processor_events_in")
        if found >= events:
            worker.close()
            return
    raise AssertionError(f"{found} of {events} events")


def copied(client: anabranch.Client, stream: str) -> Counter[tuple[bytes, bytes]]:
    return Counter((e.key or b"", e.value or b"") for e in client.snapshot(stream).read(stream))


def test_records_of_a_plain_topic_are_taken_once_with_more_partitions_and_restarts(
    client: anabranch.Client, topic: Topic, tmp_path: Path
) -> None:
    scope = f"p{uuid.uuid4().hex[:8]}"
    client.create_stream(f"{scope}/out", segments=2)
    tasks, counts = AllTasks(range(TASKS)), list[Any]()
    for number, (count, partitions) in enumerate(((30, 2), (20, 2), (12, 3))):
        if partitions > 2:
            topic.admin.create_partitions([NewPartitions(topic.name, 3)])[topic.name].result()
        topic.write(count, partitions)
        topic.write(5, 2, aborted=True)
        app, counts = program(scope, topic)
        until_copied(Worker(app, client, tmp_path / str(number), tasks=tasks), count)
    assert copied(client, f"{scope}/out") == topic.written
    assert {(p, k): n for p, k, n in counts}[0, b"k0"] == b"6"
    for behind, oldest in (
        (0, 0),
        (3, 1_000_000),
    ):  # markers count, but for those that end what is there
        (lag,) = client.lag(client.processor(f"{scope}/copy"))
        tells = {task: (told.events, told.oldest_ms) for task, (_, told) in lag.tasks.items()}
        assert tells == {task: (behind, oldest and oldest + task) for task in range(3)}, lag
        topic.write(6, 3)
    topic.admin.create_partitions([NewPartitions(topic.name, 5)])[topic.name].result()
    too_many = "5 partitions, more than the processor has tasks"
    (lag,) = client.lag(client.processor(f"{scope}/copy"))
    assert too_many in lag.trouble, lag
    with pytest.raises(IllegalState, match=too_many):
        make_processor(client, program(scope, topic)[0])


@pytest.mark.soak
def test_what_retention_deleted_is_raised_or_passed_over(
    client: anabranch.Client, topic: Topic, tmp_path: Path
) -> None:
    scope = f"p{uuid.uuid4().hex[:8]}"
    client.create_stream(f"{scope}/out")
    make_processor(client, program(scope, topic)[0])
    tasks = AllTasks(range(TASKS))
    topic.write(20)
    until_copied(Worker(program(scope, topic)[0], client, tmp_path / "0", tasks=tasks), 20)
    topic.write(20)
    ((_, future),) = topic.admin.delete_records([TopicPartition(topic.name, 0, 15)]).items()
    future.result()
    worker = Worker(program(scope, topic)[0], client, tmp_path / "1", tasks=tasks)
    with pytest.raises(SnapshotExpired, match="has lost offset 10"):
        until_copied(worker, 20)
    worker.close()
    app = program(scope, topic, on_lost="skip")[0]
    worker = Worker(app, client, tmp_path / "1", tasks=tasks)
    until_copied(worker, 16)
    assert worker.metrics.values["processor_lost"] == {(f"topic:{topic.name}",): 5}, "a marker, too"
    assert copied(client, f"{scope}/out").total() == 36


@pytest.mark.soak
def test_a_consumer_group_s_place_is_imported_before_the_first_commit(
    client: anabranch.Client, topic: Topic, tmp_path: Path
) -> None:
    scope, group = f"p{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    client.create_stream(f"{scope}/out", segments=2)
    topic.write(10)
    app, _ = program(scope, topic)
    make_processor(client, app)
    ports = client.reader_ports()
    with pytest.raises(InvalidArgument, match="no offsets"):
        import_group(client, ports, app.name, group, 10.0)
    consumer = Consumer({"bootstrap.servers": topic.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic.name, 1, 4)], asynchronous=False)
    consumer.close()
    assert import_group(client, ports, app.name, group, 10.0) == 1
    with pytest.raises(IllegalState, match="has begun already"):
        import_group(client, ports, app.name, group, 10.0)
    until_copied(Worker(app, client, tmp_path, tasks=AllTasks(range(TASKS))), 6)
    assert sum(copied(client, f"{scope}/out").values()) == 6  # 5 of partition 0, 1 of the other


@pytest.mark.soak
def test_the_bridge_copies_a_topic_into_a_stream(client: anabranch.Client, topic: Topic) -> None:
    stream = f"p{uuid.uuid4().hex[:8]}/orders"
    client.create_stream(stream, segments=3)
    command = [sys.executable, "-m", "anabranch.cli", "bridge", topic.name, "--stream", stream]
    command += ["--bootstrap", topic.bootstrap, "--tasks", "4"]
    topic.write(700)
    for _ in range(2):
        bridge = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timer = threading.Timer(60.0, bridge.kill)
        timer.start()
        deadline = time.monotonic() + 60
        while copied(client, stream) != topic.written and time.monotonic() < deadline:
            assert bridge.poll() is None, bridge.communicate()
            time.sleep(0.2)
        bridge.terminate()
        assert bridge.wait(30) == 0, bridge.communicate()
        bridge.communicate()
        timer.cancel()
        assert copied(client, stream) == topic.written
        topic.write(60)


@pytest.mark.long
def test_a_bridge_ends_once_all_is_copied(client: anabranch.Client, topic: Topic) -> None:
    stream = f"p{uuid.uuid4().hex[:8]}/orders"
    client.create_stream(stream, segments=2)
    producer = Producer({"bootstrap.servers": topic.bootstrap, "queue.buffering.max.kbytes": 65536})
    for number in range(24_000):  # some commits' worth
        producer.produce(topic.name, b"%d" % number * 150, b"%d" % (number % 5), number % 2)
    assert producer.flush(30) == 0
    topic.write(5, aborted=True)  # its markers are no work left
    command = ["bridge", topic.name, "--stream", stream, "--tasks", "4", "--once"]
    command += ["--bootstrap", topic.bootstrap]
    done = subprocess.run([sys.executable, "-m", "anabranch.cli", *command], timeout=90)
    assert done.returncode == 0
    assert copied(client, stream).total() == 24_000


@pytest.mark.soak
def test_a_bridge_of_a_topic_that_lost_what_its_group_had_not_read(
    client: anabranch.Client, topic: Topic
) -> None:
    stream, group = f"p{uuid.uuid4().hex[:8]}/orders", uuid.uuid4().hex
    client.create_stream(stream)
    topic.write(20)
    consumer = Consumer({"bootstrap.servers": topic.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic.name, p, 2) for p in (0, 1)], asynchronous=False)
    consumer.close()
    (deleted,) = topic.admin.delete_records([TopicPartition(topic.name, 0, 7)]).values()
    deleted.result()
    command = ["bridge", topic.name, "--stream", stream, "--tasks", "4", "--once"]
    command += ["--group", group, "--bootstrap", topic.bootstrap]

    def bridge(*more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "anabranch.cli", *command, *more]
        return subprocess.run(words, timeout=90, capture_output=True, text=True)

    done = bridge()
    assert done.returncode == 2
    assert "has lost offset 2, which is not consumed yet" in done.stderr
    assert "anabranch bridge --lossy" in done.stderr
    done = bridge("--lossy")
    assert done.returncode == 0, done.stderr
    assert copied(client, stream).total() == 3 + 8
