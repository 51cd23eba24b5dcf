"""A derived table under SIGKILLs of workers and leaders, and scalings: as of each time, a fold of its source."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

import anabranch
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.core.derived_rows import is_entry, of_value
from anabranch.errors import AnabranchError, NotReady, SnapshotExpired
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot
from anabranch.topics.names import journal_topic
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.processing.workers import WorkerProcess

SEED = int(os.environ.get("ANABRANCH_SEED", time.time_ns() % 1_000_000))
SOURCE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "derived") + "/orders"
STRUCK_S = 60.0
PATIENCE_S = 60.0
KEYS = [b"k%d" % n for n in range(40)]
CITIES = [b"oslo", b"rome", b"bonn", b"", b"a\0b"]


def cities(_: bytes, row: bytes) -> list[bytes]:
    """The words of a row before the first dot."""
    return row.split(b".")[0].split(b" ")


app = anabranch.DerivedTable(SOURCE, "by-city", cities, tasks=4)


def fold(rows: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {of_value(v) + key: b"" for key, row in rows.items() for v in cities(key, row)}


def row_of(chance: random.Random, number: int) -> bytes | None:
    words = b" ".join(chance.sample(CITIES, chance.randint(1, 2)))
    return chance.choice([None, words, words, words + b".%d" % number])


def check(view: TableSnapshot, source: str) -> int:
    """Raises: AssertionError. Returns the number of entries."""
    derived = view.scan(f"{source}-by-city-v1")
    found = {key: row for key, row in derived if is_entry(key)}
    assert found == fold(dict(view.scan(source))), view.timestamp
    return len(found)


class Looking:
    """Reads a replica as of now and of the past, in a thread, until it is left."""

    def __init__(self, replica: ReadReplica, source: str) -> None:
        self._replica, self._source, self._over = replica, source, threading.Event()
        self.looked, self.error = 0, list[BaseException]()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        chance, past = random.Random(SEED), list[int]()
        while not self._over.is_set():
            try:
                at = chance.choice([None, *past[-50:]])
                with self._replica.snapshot(at, fresh=False, timeout=5.0) as view:
                    self.looked += check(view, self._source) > 0
                    past.append(view.timestamp - chance.randint(0, 4_000_000))
            except (NotReady, SnapshotExpired, AnabranchError):
                time.sleep(0.1)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                self.error.append(error)
                return


def plain_write(
    producer: Producer, client: Client, source: str, key: bytes, row: bytes | None
) -> None:
    segments = client.describe(source).segments
    place = next(s.partition for s in segments if s.low <= position_of(key) < s.high)
    with suppress(
        KafkaException
    ):  # it learns a little later of partitions that a scaling has added
        producer.produce(journal_topic(source), row, key, place)
        producer.flush(10)


def strikes(
    chance: random.Random, processes: list[ControllerProcess | WorkerProcess]
) -> Iterator[None]:
    """Kills one process after another, each some seconds after the last, and starts it again."""
    strike = time.monotonic() + 8.0
    while True:
        if time.monotonic() > strike:
            strike = time.monotonic() + chance.uniform(2.0, 5.0)
            process = chance.choice(processes)
            process.kill()
            process.start()
        yield


def write_on(
    client: Client, bootstrap: str, source: str, chance: random.Random, struck: Iterator[None]
) -> None:
    """Transactions, plain writes and scalings, for a time."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": 1000}
    )
    until, number, scale = time.monotonic() + STRUCK_S, 0, time.monotonic() + 6.0
    while time.monotonic() < until:
        next(struck)
        number += 1
        rows = {chance.choice(KEYS): row_of(chance, number) for _ in range(chance.randint(1, 4))}

        def put(txn: Transaction, rows: dict[bytes, bytes | None] = rows) -> None:
            for key, row in rows.items():
                txn.write(source, row, key)

        client.transact(put, name=f"commit-{number}", scope=source.partition("/")[0], timeout=60.0)
        with suppress(AnabranchError):  # no leader answers, for a while
            if number % 3 == 0:
                plain_write(producer, client, source, chance.choice(KEYS), row_of(chance, number))
            if time.monotonic() > scale:
                scale = time.monotonic() + 6.0
                table = chance.choice([source, f"{source}-by-city-v1"])
                client.scale(table, segments=chance.randint(1, 4), timeout=20.0)
        time.sleep(0.01)


def kill(process: ControllerProcess | WorkerProcess) -> None:
    """Kill it, if it runs."""
    if process.running:
        process.kill()


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(175)
def test_a_derived_table_is_a_fold_under_kills(broker: Broker, tmp_path: Path) -> None:
    print(f"ANABRANCH_SEED={SEED}")
    chance, prefix = random.Random(SEED), f"pd{uuid.uuid4().hex[:6]}"
    source = f"{prefix}-s/orders"
    environment = {"ANABRANCH_PREFIX": prefix, "ANABRANCH_TRIAL_SCOPE": f"{prefix}-s"}
    controllers = [
        ControllerProcess(broker.bootstrap, tmp_path / f"c{n}", prefix) for n in range(2)
    ]
    group = ("-X", "session.timeout.ms=2000", "-X", "heartbeat.interval.ms=300")
    workers = [
        WorkerProcess(
            tmp_path / f"w{n}",
            ("--bootstrap", broker.bootstrap, *group),
            environment,
            program=f"{__name__}:app",
        )
        for n in range(2)
    ]
    processes: list[ControllerProcess | WorkerProcess] = [*controllers, *workers]
    with ExitStack() as stack:
        for process in processes:
            stack.callback(kill, process)
        controllers[0].start()
        controllers[0].wait_leading()  # the topics are there
        controllers[1].start()
        connected = partial(anabranch.connect, broker.bootstrap, prefix=prefix, timeout=20.0)
        with connected(lane=ADMIN_LANE) as operator:
            operator.feature_level(raise_to=LEVEL)
        client = stack.enter_context(connected())
        client.create_table(source, segments=2)
        derived = client.derive(source, "by-city", cities, asynchronous=True)
        for worker in workers:
            worker.start()
        replica = stack.enter_context(client.replica(source, derived))
        struck = strikes(chance, processes)
        with Looking(replica, source) as looking:
            write_on(client, broker.bootstrap, source, chance, struck)
        assert not looking.error, looking.error
        assert looking.looked > 50
        for process in processes:
            if not process.running:
                process.start()
        with client.replica(source, derived) as again, again.snapshot(timeout=PATIENCE_S) as view:
            assert check(view, source)
            last = view.timestamp
            for _ in range(50):
                time_of = last - (int(chance.uniform(0, STRUCK_S) * 1e6) << 12)
                with again.snapshot(at=time_of) as then:
                    check(then, source)
        assert client.check_derivation(source, "by-city", cities) == []
        for worker in workers:
            worker.check()
            worker.end()
