"""Processors on a real broker: outputs and stores are a plain fold of the input, whatever happens to workers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.core.rows import split_key
from anabranch.errors import IllegalState, UnknownStream
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.processing import worker as worker_module
from anabranch.processing.app import Processor
from anabranch.processing.failures import HandlerFailed
from anabranch.processing.table import Table
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.reading import task_reader as reader
from anabranch.topics.names import stream_topic
from tests.cluster import Cluster
from tests.crash.oracle import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

TASKS = 4
COMMITS = 50
KEYS = [b"key-%d" % i for i in range(20)]
WAIT_S = 60.0


class Place:
    """A scope with two inputs and an output; what was written to the inputs."""

    def __init__(self, client: anabranch.Client, bootstrap: str) -> None:
        self.client, self.bootstrap = client, bootstrap
        self.scope = f"p{uuid.uuid4().hex[:8]}"
        self.inputs = [f"{self.scope}/a", f"{self.scope}/b"]
        self.output, self.errors = f"{self.scope}/out", f"{self.scope}/errors"
        client.create_stream(self.inputs[0], segments=3)
        client.create_stream(self.inputs[1], segments=1)
        client.create_stream(self.output, segments=2)
        client.create_stream(self.errors, segments=1)
        self.written: dict[bytes, list[int]] = {}
        self._number = itertools.count()

    def write(self, *counts: int) -> None:
        """A transaction over both inputs for each count."""
        for count in counts:
            with self.client.begin(self.scope) as txn:
                for i in range(count):
                    key, number = KEYS[i % len(KEYS)], next(self._number)
                    txn.write(self.inputs[i % 2], json.dumps({"n": number}).encode(), key=key)
                    self.written.setdefault(key, []).append(number)
                txn.commit()

    def app(self, inputs: int = 2, **options: Any) -> Processor:
        """Counts and sums by key; an output for each event."""
        options = {"commit_interval": 0.02} | options
        app = Processor(f"{self.scope}/sums", tasks=TASKS, **options)
        some = [app.input(stream, value=json) for stream in self.inputs[:inputs]]
        output, sums = app.output(self.output, value=json), app.store("sums", value=json)

        @app.on(*some)
        def count(event: Any) -> None:
            seen, total = sums.get(event.key, (0, 0))
            sums[event.key] = seen + 1, total + event.value["n"]
            output.write([*sums[event.key], event.value["n"]], key=event.key)

        return app

    def out(self) -> dict[bytes, list[list[int]]]:
        found: dict[bytes, list[list[int]]] = {}
        for event in self.committed(self.output):
            assert event.key is not None
            found.setdefault(event.key, []).append(json.loads(event.value or b""))
        return found

    def committed(self, stream: str) -> list[anabranch.Event]:
        return list(self.client.snapshot(stream).read(stream))

    def wait(self) -> None:
        """Until there are as many outputs as inputs."""
        wanted = sum(map(len, self.written.values()))
        with self.client.read(self.output, timeout=WAIT_S) as reader:
            assert sum(1 for _ in itertools.islice(reader, wanted)) == wanted

    def check(self) -> None:
        """Each input event once; the sums rise one event at a time. (a and b may come in any order by key.)"""
        found = self.out()
        assert {k: Counter(n for *_, n in v) for k, v in found.items()} == {
            k: Counter(v) for k, v in self.written.items() if v
        }
        for key, rows in found.items():
            total = 0
            for i, (seen, summed, number) in enumerate(rows, 1):
                total += number
                assert (seen, summed) == (i, total), key

    def state(self, incarnation: int | None = None) -> dict[bytes, list[int]]:
        """The store, read by Kafka's own consumer from the state's topic; None: that of now."""
        from confluent_kafka import Consumer, TopicPartition

        info = self.client.processor(f"{self.scope}/sums")
        topic = stream_topic(f"{self.scope}/sums.state")
        incarnation = info.incarnation if incarnation is None else incarnation
        prefix = incarnation.to_bytes(2, "big") + (2).to_bytes(2, "big")
        bootstrap = self.bootstrap
        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "none", "enable.partition.eof": True}
        )
        consumer.assign([TopicPartition(topic, task, 0) for task in range(TASKS)])
        found: dict[bytes, list[int]] = {}
        ended = 0
        while ended < TASKS:
            message = consumer.poll(10.0)
            assert message is not None
            if message.error() is not None:
                ended += 1
                continue
            key = message.key() or b""
            if key.startswith(prefix) and message.value() is None:
                found.pop(key[4:], None)
            elif key.startswith(prefix):
                assert message.partition() == position_of(key[4:]) * TASKS // SPACE
                found[key[4:]] = json.loads(message.value() or b"")
        consumer.close()
        return found


@pytest.fixture
def place(client: anabranch.Client, cluster: Cluster) -> Place:
    return Place(client, cluster.bootstrap)


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Callable[[], anabranch.Client]]:
    made: list[anabranch.Client] = []

    def make() -> anabranch.Client:
        made.append(anabranch.connect(cluster.bootstrap))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Running:
    """A worker in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.error = error

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def end(self) -> None:
        """Stop it, as SIGTERM does."""
        self.worker.stop.set()
        self.join()
        self.worker.close()


def test_a_count_by_key_is_that_of_a_fold_with_scalings_and_rolling_commits(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    place.write(1, 40, 3)
    running = Running(Worker(place.app(), connect(), tmp_path, tasks=AllTasks(range(TASKS))))
    slow = place.client.begin(place.scope)
    slow.token()
    for i in range(30):
        slow.write(place.inputs[0], b'{"n": %d}' % (10_000 + i), key=KEYS[i % 20])
        place.written[KEYS[i % 20]].append(10_000 + i)
    slow.flush()
    for segments in (5, 2):
        place.write(7, 30)
        place.client.scale(place.inputs[0], segments=segments)
    slow.commit()
    place.write(11)
    place.wait()
    running.end()
    assert running.error is None
    place.check()
    assert place.state() == {k: [len(v), sum(v)] for k, v in place.written.items()}
    stands = [task.sequence for task in place.client.processor(f"{place.scope}/sums").tasks]
    time.sleep(0.5)
    assert stands == [t.sequence for t in place.client.processor(f"{place.scope}/sums").tasks]


@pytest.mark.soak
def test_state_is_the_same_after_a_restart_whatever_the_folder_is(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    """The folder is a copy: the log decides."""
    all_tasks = AllTasks(range(TASKS))

    def session(at: Path, *counts: int) -> int:
        place.write(*counts)
        running = Running(Worker(place.app(), connect(), at, tasks=all_tasks))
        place.wait()
        running.end()
        assert running.error is None
        return int(running.worker.metrics.total("processor_restored_rows"))

    session(tmp_path / "kept", 40)
    shutil.copytree(tmp_path / "kept", tmp_path / "older")
    session(tmp_path / "kept", 25, 3)
    shutil.copytree(tmp_path / "kept", tmp_path / "of another task")
    table = Table(tmp_path / "of another task")
    wrong = table.mark(0)
    assert wrong is not None
    table.write(
        [(1, [*table.scan(0, b"", b"\xff")])], {1: wrong, 2: wrong._replace(sequence=1 << 40)}
    )
    table.close()
    for folder in ("kept", "wiped", "older", "of another task"):
        read = session(tmp_path / folder, 33)
        assert (read == 0) == (folder == "kept"), folder
        place.check()
        assert place.state() == {k: [len(v), sum(v)] for k, v in place.written.items()}, folder


@pytest.mark.soak
def test_rows_of_a_former_incarnation_go(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    """The first restore that meets them lets the next commits delete them."""

    def session(folder: str, events: int) -> dict[bytes, list[int]]:
        place.write(20)
        worker = Worker(place.app(), connect(), tmp_path / folder, tasks=AllTasks(range(TASKS)))
        running = Running(worker)
        wait_until(lambda: worker.metrics.total("processor_events_in") >= events)
        running.end()
        return place.state(0)

    before = session("a", 20)
    assert before.keys() == set(KEYS)
    place.client.reset_processor(f"{place.scope}/sums", "begin")
    assert session("b", 40) == before
    assert session("c", 20) == {}
    assert place.state() == {k: [len(v), sum(v)] for k, v in place.written.items()}


@pytest.mark.soak
def test_an_idle_worker_follows_a_reset_and_a_store_of_another_kind_is_refused(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    place.write(20)
    running = Running(Worker(place.app(), connect(), tmp_path, tasks=AllTasks(range(TASKS))))
    place.wait()
    other = Processor(f"{place.scope}/sums", tasks=TASKS)
    for stream in place.inputs:
        other.on(other.input(stream))(lambda event: None)
    other.store("sums", value=str)
    with pytest.raises(IllegalState, match=r"'sums' of .* is a store of json, not a store of str"):
        Worker(other, connect(), tmp_path / "other", tasks=AllTasks(range(TASKS)))
    other.output(f"{place.scope}/ouput")
    with pytest.raises(UnknownStream, match="/ouput"):
        Worker(other, connect(), tmp_path / "other", tasks=AllTasks(range(TASKS)))
    place.client.reset_processor(f"{place.scope}/sums", "begin")  # nothing new comes
    wait_until(lambda: len(place.committed(place.output)) == 40)
    running.end()
    described = running.worker.described
    assert described(WAIT_S) is described(WAIT_S) is not described(0.0)


@pytest.mark.soak
def test_two_workers_share_the_tasks_and_one_takes_over(
    place: Place,
    connect: Callable[[], anabranch.Client],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An end passes over a release that takes longer.
    monkeypatch.setattr(worker_module, "_HANDOVER_S", 30.0)
    first = Running(Worker(place.app(), connect(), tmp_path / "1"))
    place.write(20, 20)
    second = Running(Worker(place.app(), connect(), tmp_path / "2", standby=True))

    def holders() -> set[str]:
        return {task.holder for task in place.client.processor(f"{place.scope}/sums").tasks}

    def shared() -> bool:
        place.write(5)
        return len(holders()) == 2

    wait_until(shared)
    place.write(40)
    first.end()
    place.write(40)
    wait_until(lambda: len(holders()) == 1)
    place.write(17)
    place.wait()
    second.end()
    assert (first.error, second.error) == (None, None)
    place.check()
    assert holders() == {""}


@pytest.mark.soak
def test_a_worker_that_loses_its_tasks_while_it_reads_their_state_takes_them_again(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    """It finds later commits in the log than its rows told: another one's, and no damage."""
    all_tasks = AllTasks(range(TASKS))

    def session(*counts: int) -> None:
        place.write(*counts)
        running = Running(Worker(place.app(), connect(), tmp_path / "1", tasks=all_tasks))
        place.wait()
        running.end()

    session(20)
    slow = Worker(place.app(), connect(), tmp_path / "2", tasks=all_tasks)
    restore = slow._commits.state.restore

    def frozen(*given: Any) -> int:
        slow._commits.state.restore = restore  # type: ignore[method-assign]
        session(20)
        return restore(*given)

    slow._commits.state.restore = frozen  # type: ignore[method-assign, assignment]
    running = Running(slow)
    wait_until(lambda: 0 in slow.tasks or running.error is not None)
    place.write(10)
    place.wait()
    running.end()
    assert running.error is None
    place.check()


@pytest.mark.parametrize("dead_letter", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_handler_that_fails_leaves_no_trace(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path, dead_letter: bool
) -> None:
    """`stop`: nothing of its commit is there. `dead_letter`: that event alone goes elsewhere."""
    app = place.app(retries=1, dead_letter=place.errors if dead_letter else None)
    calls: Counter[int] = Counter()

    @app.on(app.inputs[place.inputs[0]])
    def fail(event: Any) -> None:
        calls[event.value["n"]] += 1
        if event.value["n"] in (4, 12):
            raise ValueError("no")

    place.write(20)
    worker = Worker(app, connect(), tmp_path, tasks=AllTasks(range(TASKS)))
    running = Running(worker)
    if not dead_letter:
        running.join()
        running.worker.close()
        assert isinstance(running.error, HandlerFailed)
        assert running.error.error.__context__ is None, "the tries before are no part of it"
        assert place.out() == {}
        assert sorted((calls[4], calls[12])) == [0, 2]
        return
    for number in (4, 12):
        place.written[KEYS[number]].remove(number)
    place.wait()
    running.end()
    place.check()
    found = {
        json.loads(e.value or b"")["n"]: dict(e.headers) for e in place.committed(place.errors)
    }
    assert found.keys() == {4, 12}
    assert found[4]["error"] == b"ValueError: no"
    assert (found[4]["from"] or b"").startswith(place.inputs[0].encode())
    assert worker.metrics.total("processor_dead_letters") == 2


@pytest.mark.soak
def test_handlers_side_by_side_keep_each_key_s_order(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    import asyncio

    app = Processor(f"{place.scope}/async", tasks=TASKS)
    inputs = [app.input(stream, value=json) for stream in place.inputs]
    output, sums = app.output(place.output, value=json), app.store("sums", value=json)
    most = at_once = 0

    @app.on(*inputs)
    async def count(event: Any) -> None:
        nonlocal most, at_once
        at_once += 1
        most = max(most, at_once)
        seen, total = sums.get(event.key, (0, 0))
        await asyncio.sleep(0.001)
        sums[event.key] = seen + 1, total + event.value["n"]
        await asyncio.sleep(0)
        output.write([*sums[event.key], event.value["n"]], key=event.key)
        at_once -= 1

    place.write(100, 100)
    running = Running(Worker(app, connect(), tmp_path, tasks=AllTasks(range(TASKS))))
    place.wait()
    running.end()
    assert running.error is None
    assert most > 5
    place.check()


def test_batches_in_and_batches_out(
    place: Place, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    import pyarrow as pa

    app = Processor(f"{place.scope}/batches", tasks=TASKS)
    output = app.output(place.output)

    @app.on(*[app.input(stream) for stream in place.inputs], batch=True)
    def double(batch: pa.RecordBatch) -> None:
        values = [b"%s%s" % (v, v) for v in batch["value"].to_pylist()]
        output.write_batch(
            pa.record_batch({"key": batch["key"], "value": pa.array(values, pa.binary())})
        )

    place.write(500, 1)
    running = Running(Worker(app, connect(), tmp_path, tasks=AllTasks(range(TASKS))))
    place.wait()
    running.end()
    assert running.error is None
    found = Counter((e.key, e.value) for e in place.committed(place.output))
    assert found == Counter(
        (key, 2 * json.dumps({"n": n}).encode())
        for key, some in place.written.items()
        for n in some
    )


@pytest.mark.soak
def test_the_programs_of_the_page_run(
    client: anabranch.Client, connect: Callable[[], anabranch.Client], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "processing.md").read_text(encoding="utf-8")
    scope = f"p{uuid.uuid4().hex[:8]}"
    programs = page[: page.index("## Workers")].replace("nyc/", f"{scope}/")
    code = "\n".join(re.findall(r"```python\n(.*?)```", programs, re.DOTALL))
    assert code.count("@app") == 3
    names: dict[str, Any] = {}
    exec(compile(code, "docs/processing.md", "exec"), names)  # noqa: S102
    for stream in ("flights", "hours", "late"):
        client.create_stream(f"{scope}/{stream}", segments=1)
    with client.begin(scope) as txn:
        for hour, key in ((1, b"a"), (1, b"a"), (2, b"a"), (9, b"a"), (1, b"a")):
            txn.write(f"{scope}/flights", b"{}", key, timestamp=hour * 3_600_000)
        txn.commit()
    with client.begin(scope) as txn:
        txn.write(f"{scope}/flights", b"{}", b"a", timestamp=3_600_000)
        txn.commit()
    worker = Worker(names["app"], connect(), tmp_path, tasks=AllTasks(range(16)))
    while worker.metrics.total("processor_events_in") < 6:
        worker.step()
    worker.close()
    done = client.snapshot([f"{scope}/hours", f"{scope}/late"])
    hours = [json.loads(event.value or b"") for event in done.read(f"{scope}/hours")]
    assert [one["n"] for one in hours if one.keys() == {"n"}] == [1, 2, 3, 4, 5, 6]
    assert [one for one in hours if "from" in one] == [
        {"from": 3_600_000, "n": 3}, {"from": 7_200_000, "n": 1}
    ]  # fmt: skip
    assert len(list(done.read(f"{scope}/late"))) == 1


@pytest.mark.soak
def test_an_idle_processor_writes_nothing_and_a_busy_one_adds_no_rows(
    place: Place,
    connect: Callable[[], anabranch.Client],
    cluster: Cluster,
    log: KafkaLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many commits later the status table has the same rows, but those of the input's transactions."""
    monkeypatch.setattr(reader, "_ALL_S", 0.3)
    app = place.app(inputs=1, commit_interval=0.0)
    running = Running(Worker(app, connect(), tmp_path, tasks=AllTasks(range(TASKS))))
    topics = [f"{cluster.prefix}.status"]
    topics += [stream_topic(f"{place.scope}/{name}") for name in ("out", "sums.state")]

    def rows() -> Counter[str]:
        kinds = read_status(log, cluster.prefix).rows
        return Counter(split_key(key)[1].name for key in kinds)

    def settled() -> dict[TopicPartition, int]:
        """The topics' ends, once they stand still for longer than all tasks take to move."""
        places = [TopicPartition(topics[0], 0)]
        places += [TopicPartition(topic, 0) for topic in topics[1:]]
        ends: dict[TopicPartition, int] = {}
        while ends != (ends := log.end_offsets(places, committed=False)):
            time.sleep(0.6)
        return ends

    place.write(*[1] * 40)
    place.wait()
    settled()
    before = rows()

    def commits() -> float:
        return running.worker.metrics.total("processor_commits")

    wanted = commits()
    for _ in range(COMMITS):
        place.write(1)
        wanted += 1
        wait_until(lambda least=wanted: commits() >= least, WAIT_S, 0.001)  # type: ignore[misc]
    settled()
    after = rows()
    running.end()
    assert running.error is None
    assert after == before + Counter(TXN=COMMITS)
