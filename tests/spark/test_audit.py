"""The audit finds nothing in a real stream, and each kind of breach that is planted, under its name."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import anabranch
from anabranch.audit.report import AuditReport
from anabranch.audit.run import audit
from anabranch.cli.main import app
from anabranch.core import rows as k
from anabranch.kafka.log import KafkaLog
from anabranch.ledger import Ledger
from anabranch.protocol.ids import NO_TXN, make_txn_id, pack_txn_header
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, PlainRow, Receipt
from anabranch.spark.options import Connection
from anabranch.types import TransactionInfo
from tests.cluster import Cluster, start_cluster
from tests.conftest import Broker
from tests.crash.oracle import read_stream
from tests.crash.raw import position
from tests.spark.audit_forge import Clock, Forge, Rec
from tests.spark.audit_life import live
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

PREFIX = "audited"
SCOPE = "nyc"
MAIN, OTHER_STREAM = f"{SCOPE}/main", "near/other"  # of two scopes, which share transactions
LONG_AGO_MS = int(time.time() * 1000) - 10 * 86_400_000
SOON_S = 60.0
BY = b"\7" * 32
Plant = Callable[[Forge], object]


# -- planted faults, and their findings ------------------------------------------------------------------


def part(record: CommitRecord, **changes: int) -> CommitRecord:
    return record._replace(segments=(replace(record.segments[0], **changes),))


def extent(receipt: Receipt, **changes: Any) -> Receipt:
    return replace(receipt, extents=(replace(receipt.extents[0], **changes),))


def repeated_commit(forge: Forge) -> None:
    txn_id = forge.commit()
    pairs = [(b"k", value) for value in (b"a", b"b", b"c")]
    forge.append_commit(txn_id, forge.records(txn_id, pairs))


def spoiled(**how: Any) -> Plant:
    """A commit of which these parts are spoiled."""
    return lambda forge: forge.commit(**how)


def stray(txn: bytes | None, *headers: tuple[str, bytes]) -> Plant:
    return lambda forge: forge.put_records(forge.topic, [Rec(b"k", b"stray", txn, headers)])


def aborted_event(forge: Forge) -> None:
    gone = forge.new_id()
    forge.row(forge.row_of(gone, 0, state="ABORTED", committed=0), gone)
    forge.put_records(forge.topic, forge.records(gone, [(b"k", b"x")]))


def committed_nowhere(forge: Forge) -> None:
    txn_id = forge.new_id()
    forge.row(forge.row_of(txn_id), txn_id)
    forge.take_part(txn_id)


def copied_event(forge: Forge) -> None:
    txn_id = forge.commit()
    forge.put_records(forge.topic, forge.records(txn_id, [(b"k", b"b")]))


def wrong_segment(forge: Forge) -> None:
    """A one-shot's: it is in no journal."""
    keys = [b"key-%d" % n for n in range(99)]
    key = next(key for key in keys if position(key) >= 1 << 31)
    txn_id = forge.new_id()
    at = forge.append_commit(txn_id, [Rec(key, b"x", pack_txn_header(txn_id, 0, 0))])
    forge.row(forge.row_of(txn_id, at), txn_id)


def overlapping(forge: Forge) -> None:
    forge.commit()
    forge.commit(record=lambda r: part(r, first=r.segments[0].first - 1))


def plain_lost(forge: Forge) -> None:
    (at,) = forge.put_records(f"{forge.topic}.journal", [Rec(b"k", b"plain", None)])
    row = PlainRow(forge.stream, 0, at + 1, 0)
    forge.put(forge.status, [(k.plain_key(forge.stream, 0), encode(row))])


def scaled(forge: Forge) -> None:
    forge.commit()
    forge.new_epoch()
    forge.commit()


def journal_cut(forge: Forge) -> None:
    forge.commit()
    forge.cut(f"{forge.topic}.journal", 2)


def retention(forge: Forge) -> None:
    forge.commit()
    forge.commit()
    forge.cut(forge.topic, 2)


def history_cut(forge: Forge) -> None:
    """By hand: no EPOCH record is left."""
    for _ in range(3):
        forge.commit()
    forge.cut(f"{forge.topic}.history", forge.last)


def lean(forge: Forge) -> None:
    whole = forge.last
    for _ in range(2):
        forge.commit(record=lambda r: r._replace(vector=(), vector_at=whole))
    forge.commit()


def repeated_epoch(forge: Forge) -> None:
    forge.commit()
    forge.repeat_epoch()
    forge.commit()


def forgotten(forge: Forge) -> None:
    forge.forget(forge.commit(made_ms=LONG_AGO_MS))


def epoch_with_a_hole(record: EpochRecord) -> EpochRecord:
    return replace(record, segments=(replace(record.segments[0], high=1 << 31),))


OTHER = b"\0" * 8 + b"another!"
REORDERED: Callable[[list[Rec]], list[Rec]] = lambda e: [e[0], e[2], e[1]]  # noqa: E731

PLANTS: dict[str, tuple[Plant, dict[str, int]]] = {
    # Nothing is wrong, so nothing may be found.
    "honest": (spoiled(), {}),
    "an honest scaling": (scaled, {}),
    "a journal that was cut": (journal_cut, {}),
    "a stream that retention cut": (retention, {}),
    "rows that are forgotten": (forgotten, {}),
    "a history that was cut": (history_cut, {}),
    "a wide stream's history": (lean, {}),
    "an epoch that is repeated": (repeated_epoch, {}),
    # Events.
    "an event once more, after its commit": (copied_event, {"event-outside": 1}),
    "an event once more, inside": (
        spoiled(events=lambda e: [*e, e[1]]),
        {"status-count": 1, "receipt": 1, "journal-content": 1},
    ),
    "an event dropped": (spoiled(events=lambda e: e[:2]), {"status-count": 1, "receipt": 1}),
    "an event dropped, and the row agrees": (
        spoiled(events=lambda e: [e[0], e[2]], row=lambda r: r._replace(committed=2)),
        {"journal-content": 2},
    ),
    "two events of a key in the other order": (spoiled(events=REORDERED), {"journal-order": 2}),
    "another value": (
        spoiled(events=lambda e: [e[0], e[1]._replace(value=b"B"), e[2]]),
        {"receipt": 1, "journal-content": 2},
    ),
    "another header": (
        spoiled(events=lambda e: [e[0]._replace(headers=(("n", b"2"),)), *e[1:]]),
        {"journal-content": 2},
    ),
    "another time": (
        spoiled(events=lambda e: [e[0]._replace(timestamp=7), *e[1:]]),
        {"journal-content": 2},
    ),
    "an event of another transaction inside": (
        lambda f: f.commit(events=lambda e: [e[0], f.records(OTHER, [(b"k", b"b")])[0], e[2]]),
        {"event-transaction": 1, "journal-content": 2},
    ),
    "an event of an aborted transaction": (aborted_event, {"event-aborted": 1}),
    "an event of no known transaction": (
        lambda f: f.put_records(f.topic, f.records(f.new_id(), [(b"k", b"x")])),
        {"event-unknown": 1},
    ),
    "a plain event": (stray(None), {"event-plain": 1}),
    "a foreign record": (stray(None, ("ab.what", b"")), {"event-header": 1}),
    "a header that is too short": (stray(b"short"), {"event-header": 1}),
    "an event in the wrong segment": (wrong_segment, {"event-key": 1}),
    "events placed by another epoch": (
        spoiled(events=lambda e: [r._replace(txn=(r.txn or b"")[:24] + b"\0\0\0\5") for r in e]),
        {"event-epoch": 3},
    ),
    # History.
    "a foreign history record": (
        lambda f: f.put(f"{f.topic}.history", [(None, b"foreign")]),
        {"history-record": 1},
    ),
    "a COMMIT record under another key": (spoiled(key=lambda _: OTHER), {"history-record": 1}),
    "a COMMIT record with a wrong count": (
        spoiled(record=lambda r: part(r, count=2), row=lambda r: r._replace(committed=2)),
        {"event-count": 1},
    ),
    "a COMMIT record with a short range": (
        spoiled(
            record=lambda r: part(r, count=2, end=r.segments[0].end - 1)._replace(
                vector=tuple(p._replace(offset=p.offset - 1) for p in r.vector)
            )
        ),
        {"event-outside": 1, "status-count": 1, "receipt": 1},
    ),
    "ranges that overlap": (
        overlapping,
        {"commit-ranges": 1, "event-transaction": 1, "event-count": 2},
    ),
    "a commit that was done again": (
        repeated_commit,
        {"commit-once": 1, "status-count": 1, "status-time": 1, "receipt": 1, "journal-content": 3},
    ),
    "a timestamp that goes back": (
        spoiled(record=lambda r: r._replace(timestamp=r.timestamp - (1 << 40))),
        {"history-time": 1},
    ),
    "a chain that leads elsewhere": (
        spoiled(record=lambda r: r._replace(previous=r.previous - 1)),
        {"history-chain": 1},
    ),
    "a vector that is not the end": (
        spoiled(
            record=lambda r: r._replace(
                vector=tuple(p._replace(offset=p.offset + 1) for p in r.vector)
            )
        ),
        {"vectors": 1},
    ),
    "a vector that is elsewhere": (
        spoiled(record=lambda r: r._replace(vector=(), vector_at=r.previous + 1)),
        {"vectors": 1},
    ),
    "a commit in an epoch that is not active": (
        spoiled(record=lambda r: r._replace(stream_epoch=7)),
        {"commit-place": 2},
    ),
    "an epoch with a hole": (lambda f: f.new_epoch(epoch_with_a_hole), {"epochs": 1}),
    # Status.
    "a row flipped to ABORTED": (
        spoiled(row=lambda r: r._replace(state="ABORTED")),
        {"status-state": 1},
    ),
    "a row that is gone": (lambda f: f.row(None, f.commit()), {"status-missing": 1}),
    "a row flipped to COMMITTED": (committed_nowhere, {"status-history": 1}),
    "a row with another time": (
        spoiled(row=lambda r: r._replace(commit_timestamp=r.commit_timestamp - 1)),
        {"status-time": 1},
    ),
    "a row with another count": (
        spoiled(row=lambda r: r._replace(committed=4)),
        {"status-count": 1},
    ),
    "a writer that had seen more": (
        spoiled(receipt=lambda r: replace(r, seen=(1 << 63) - 1)),
        {"status-seen": 1},
    ),
    "a receipt with a higher count": (
        spoiled(receipt=lambda r: extent(r, count=4)),
        {"receipt": 1},
    ),
    "a receipt with another sum": (spoiled(receipt=lambda r: extent(r, crc_sum=1)), {"receipt": 1}),
    # Plain writes.
    "a plain write that was lost": (plain_lost, {"plain-content": 1}),
    "a plain event from nowhere": (
        lambda f: f.append_commit(NO_TXN, [Rec(b"k", b"from nowhere", None)]),
        {"plain-content": 1},
    ),
}

# Events without evidence are counted, and not as passed.
# Three one-shots that move positions have no rows.
OF_TASKS = {"status-missing": 3, "status-state": 3, "status-time": 3, "status-count": 3}
UNCHECKED = {
    "event-count": 2,  # retention took a part of the range; the history was cut after it
    "history-chain": 1,
    "history-time": 1,
    "commit-place": 1,
    "status-history": 4,  # two are one-shots into deleted streams
    "event-key": 3,  # of a commit in an epoch that is not active
    "journal-content": 1,
    "journal-order": 1,
    "receipt": 1,  # forgotten
    "status-missing": 1,
    "status-state": 1,
    "status-time": 1,
    "status-count": 3,  # two wrote to deleted streams, too
    "ledger": 1,  # it waits for its word
}
IN_LEDGER = {("commit", "unknown"), ("abort", "COMMITTED")}  # rows that are wrong: expected, found

EXAMINED = {"event-header", "journal-content", "history-chain", "status-missing", "receipt"}
# Of each kind one: the test command audits these alone.
FEW = (
    "honest",
    "an event once more, inside",
    "an event dropped, and the row agrees",
    "a foreign record",
    "a chain that leads elsewhere",
    "a row that is gone",
    "a receipt with another sum",
)


def name_of(number: int) -> str:
    return f"{SCOPE}/plant-{number:02}"


# -- the audits -----------------------------------------------------------------------------------------


class Lived(NamedTuple):
    """How many events two streams of a scope had at a moment of their life. ``ledger``: an SQLite file."""

    events: dict[str, int]
    moment: int
    ledger: Path
    prepared: TransactionInfo


@dataclass
class Planted:
    """The audit's findings of all that is planted."""

    report: dict[str, Any]
    exit_code: int
    error: str

    def found(self, stream: str) -> dict[str, int]:
        """The breaches in a stream, by check."""
        found: dict[str, int] = defaultdict(int)
        for check in self.report["checks"]:
            for example in check["examples"]:
                found[check["name"]] += example["stream"] == stream
        return {name: count for name, count in found.items() if count}


@pytest.fixture(scope="module")
def audited(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of its own: its controller is stopped before anything is planted. Small chunks: merges are carried."""
    folder = tmp_path_factory.mktemp("audited")
    running = start_cluster(broker.bootstrap, folder, PREFIX, ("--chunk-bytes", "65536"))
    yield running
    running.controller.kill()


@pytest.fixture(scope="module")
def log(audited: Cluster) -> Iterator[KafkaLog]:
    with closing(KafkaLog(audited.bootstrap)) as log:
        yield log


@pytest.fixture(scope="module")
def lived(audited: Cluster, log: KafkaLog, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """A real life, which continues after the moment; and an empty stream for each plant.

    A ledger has rows that are right, wrong (two), or wait.
    """
    path = tmp_path_factory.mktemp("ledger") / "x.db"
    with anabranch.connect(audited.bootstrap, prefix=PREFIX) as client:
        events = live(client, audited.bootstrap, MAIN, OTHER_STREAM)
        wait_for_events(log, MAIN, events[MAIN])
        with client.begin(SCOPE) as last:
            last.write(OTHER_STREAM, b"last", key=b"k")
            moment = last.commit().commit_timestamp
        events[OTHER_STREAM] += 1
        with client.begin(SCOPE) as later:
            later.write(MAIN, b"later", key=b"k")
            later.write(OTHER_STREAM, b"later", key=b"k")
            later.commit()
        with client.begin(SCOPE) as waiting:
            waiting.write(MAIN, b"waits", key=b"k")
            waits = waiting.prepare(by=BY)
        for name in ("deleted", "again"):
            delete_one(client, audited.bootstrap, f"{SCOPE}/{name}")
        client.create_stream(f"{SCOPE}/again")
        ledger = Ledger(lambda: sqlite3.connect(path))
        ledger.create(client)
        first, done = last.txn_id or b"", later.txn_id or b""
        unknown = make_txn_id(0, int(time.time() * 1000), 1)
        with closing(sqlite3.connect(path)) as database:
            for outcome, txn_id in (
                ("commit", first), ("commit", unknown), ("abort", done),
                ("commit", waits.txn_id), ("begun", done[:-1] + bytes([done[-1] ^ 1])),
            ):  # fmt: skip
                row = (txn_id.hex(), outcome)
                database.execute("insert into anabranch_ledger values (?, ?, '', 1, null)", row)
            database.commit()
        create_streams(client, PLANTS)
    return Lived(events, moment, path, waits)


@pytest.fixture(scope="module")
def clean(audited: Cluster, lived: Lived, spark: SparkSession) -> AuditReport:
    """As of the moment. Before anything is planted."""
    connection = Connection(audited.bootstrap, PREFIX, SOON_S, ())
    return audit(spark, connection, [MAIN, OTHER_STREAM], lived.moment)


@pytest.fixture(scope="module")
def planted(audited: Cluster, log: KafkaLog, lived: Lived, spark: SparkSession) -> Planted:
    """Every plant in a stream of its own, and an audit of the scope by the command."""
    audited.controller.stop()
    plant(log, audited, PLANTS)
    return audit_of(audited, "--stream", "near", "--database", str(lived.ledger))


def audit_of(cluster: Cluster, *more: str) -> Planted:
    """By the command, of the scope."""
    command = [
        "spark",
        "audit",
        "--stream",
        SCOPE,
        "--json",
        "--cluster-prefix",
        cluster.prefix,
        *more,
    ]
    result = CliRunner().invoke(app, [*command, "--bootstrap", cluster.bootstrap])
    return Planted(json.loads(result.stdout), result.exit_code, result.stderr)


def delete_one(client: anabranch.Client, bootstrap: str, stream: str) -> None:
    """A stream's life to its end: a transaction that also writes to another stream, and a one-shot."""
    client.create_stream(stream)
    with client.begin(SCOPE) as txn:
        txn.token()
        txn.write(stream, b"gone", key=b"k")
        txn.write(MAIN, b"left", key=b"k")
        txn.commit()
    with client.begin(SCOPE) as txn:
        txn.write(stream, b"gone", key=b"k")
        txn.commit()
    with anabranch.connect(bootstrap, prefix=PREFIX, lane="admin") as operator:
        operator.delete_stream(stream)


def create_streams(client: anabranch.Client, plants: Iterable[str]) -> None:
    """One for each plant."""
    with ThreadPoolExecutor(12) as pool:
        for created in [
            pool.submit(client.create_stream, name_of(n), 2 if "segment" in plant else 1)
            for n, plant in enumerate(plants)
        ]:
            created.result()


def plant(log: KafkaLog, cluster: Cluster, plants: Iterable[str]) -> None:
    """Each in its stream; then say that all of it is on the log."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 0})
    clock = Clock()
    names = [*plants]
    forges = [Forge(log, producer, cluster.prefix, name_of(n), clock) for n in range(len(names))]
    for forge, name in zip(forges, names, strict=True):
        PLANTS[name][0](forge)
    forges[-1].round(expired_ms=LONG_AGO_MS)


def wait_for_events(log: KafkaLog, stream: str, count: int) -> None:
    """Plain writes are committed soon, without an answer."""
    wait_until(lambda: len(read_stream(log, stream).events) >= count)


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_some_plants_are_found_and_nothing_in_a_real_stream(broker: Broker, tmp_path: Path) -> None:
    cluster = start_cluster(broker.bootstrap, tmp_path, "shortly")
    try:
        with anabranch.connect(broker.bootstrap, prefix=cluster.prefix) as client:
            client.create_stream(MAIN, 2)
            create_streams(client, FEW)
            for number in range(3):
                with client.begin(SCOPE) as txn:
                    for key in (b"k", b"l"):
                        txn.write(MAIN, b"%d" % number, key=key)
                    if number:
                        txn.token()  # by the journal
                    txn.commit()
        cluster.controller.stop()
        with closing(KafkaLog(broker.bootstrap)) as log:
            plant(log, cluster, FEW)
        planted = audit_of(cluster)
    finally:
        cluster.controller.kill()
    found = {name: planted.found(name_of(number)) for number, name in enumerate(FEW)}
    assert found == {name: PLANTS[name][1] for name in FEW}
    assert planted.found(MAIN) == {}
    assert all(
        check["examined"] > 0 for check in planted.report["checks"] if check["name"] in EXAMINED
    )
    assert planted.exit_code == 1


@pytest.mark.soak
def test_nothing_is_found_in_a_real_stream_as_of_a_moment(clean: AuditReport, lived: Lived) -> None:
    for check in clean.checks:
        assert not check.breaches, check
        assert check.unchecked == OF_TASKS.get(check.name, 0), check
        # How far plain writes were committed is known as of now only.
        assert bool(check.examined) == (check.name not in ("plain-content", "ledger")), check
    assert [(each.by, each.count) for each in clean.prepared] == [(BY.hex(), 1)]
    assert clean.events == sum(lived.events.values())


@pytest.mark.soak
@pytest.mark.parametrize("plant", PLANTS)
def test_each_plant_is_found_under_its_name(planted: Planted, plant: str) -> None:
    number = list(PLANTS).index(plant)
    assert planted.found(name_of(number)) == PLANTS[plant][1]


@pytest.mark.soak
def test_nothing_else_is_found_and_what_can_not_be_proved_is_counted(
    planted: Planted, lived: Lived
) -> None:
    report = planted.report
    assert planted.found(MAIN) == planted.found(OTHER_STREAM) == {}
    planted_ones = sum(sum(found.values()) for _, found in PLANTS.values())
    assert report["breaches"] == planted_ones + len(IN_LEDGER)
    assert planted.exit_code == 1
    assert json.loads(planted.error.strip().splitlines()[-1])["error"]["name"] == "CheckFailed"

    unchecked = {check["name"]: check["unchecked"] for check in report["checks"]}
    expected = Counter(UNCHECKED) + Counter(OF_TASKS)
    assert {name: n for name, n in unchecked.items() if n} == expected
    assert min(place["low"] for place in report["gone"]) > 0
    assert sum(place["events"] for place in report["gone"]) > 0

    assert lived.prepared.prepared_at is not None
    since_ms = round(lived.prepared.prepared_at.timestamp() * 1000)
    assert report["prepared"] == [{"by": BY.hex(), "count": 1, "since_ms": since_ms}]
    (check,) = (each for each in report["checks"] if each["name"] == "ledger")
    assert check["examined"] == 3
    assert {(each["expected"], each["found"]) for each in check["examples"]} == IN_LEDGER
