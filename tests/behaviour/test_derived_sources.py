"""Who may write the source of a derived table, on a real broker: as docs/how-to/derived-tables.md says of each.

Processors with `app.table` derive, which tests/processing/test_tables.py has.
"""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

import anabranch
from anabranch.cli.cluster import child_environment
from anabranch.cli.main import app as command
from anabranch.errors import DerivationMissing
from anabranch.ledger import Ledger
from anabranch.processing.app import Processor
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import journal_topic
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]


@dataclass
class Source:
    """A source, and a client that has no function of its derivation."""

    name: str
    client: anabranch.Client
    bootstrap: str
    folder: Path

    @property
    def scope(self) -> str:
        return self.name.partition("/")[0]

    def run(self, *arguments: str) -> str:
        """What a command that fails says."""
        environment = child_environment({"ANABRANCH_BOOTSTRAP": self.bootstrap})
        done = CliRunner().invoke(command, arguments, env=environment)
        assert done.exit_code, done.stdout
        return done.stderr

    def produce(self, topic: str) -> None:
        """One record, by a Kafka producer."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        producer.produce(topic, b"oslo", b"k")
        assert producer.flush(30) == 0


@pytest.fixture
def source(
    client: anabranch.Client, operator: anabranch.Client, cluster: Cluster, unique: str,
    tmp_path: Path,
) -> Source:  # fmt: skip
    operator.feature_level(raise_to=LEVEL)
    client.create_table(f"{unique}/orders", 1)
    operator.grant("open", f"{unique}/*", "operate")
    with anabranch.connect(cluster.bootstrap) as deriving:
        deriving.derive(f"{unique}/orders", "by-city", lambda _, row: row)
    return Source(f"{unique}/orders", client, cluster.bootstrap, tmp_path)


def by_load(source: Source) -> str:
    path = source.folder / "rows.csv"
    path.write_text("key,city\nk,oslo\n")
    return source.run("load", str(path), "--stream", source.name, "--key", "key")


def by_a_bridge(source: Source) -> str:
    topic = f"{source.scope}-plain"
    admin = AdminClient({"bootstrap.servers": source.bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    source.produce(topic)
    return source.run("bridge", topic, "--stream", source.name, "--tasks", "1", "--once")


def by_a_processor_s_output(source: Source) -> str:
    given = f"{source.scope}/given"
    source.client.create_stream(given)
    with source.client.begin(source.scope) as txn:
        txn.write(given, b"oslo", key=b"k")
        txn.commit()
    app = Processor(f"{source.scope}/p", tasks=1)
    orders = app.output(source.name)
    app.on(app.input(given))(lambda event: orders.write(event.value, event.key))
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(
            Worker(app, source.client, Path(folder), tasks=AllTasks([0]), threads=False)
        ) as worker,
        pytest.raises(DerivationMissing) as refused,
    ):
        worker.run()
    return repr(refused.value)


def by_a_ledger(source: Source) -> str:
    path = source.folder / "orders.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (id text)")
    ledger = Ledger(lambda: sqlite3.connect(path))
    ledger.create(source.client)
    with (
        pytest.raises(DerivationMissing) as refused,
        source.client.begin(source.scope) as txn,
        ledger.commit(txn) as cursor,
    ):
        cursor.execute("insert into orders values ('k')")
        txn.write(source.name, b"oslo", key=b"k")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select * from orders").fetchall() == []
    return repr(refused.value)


@pytest.mark.parametrize(
    "write",
    [
        by_a_bridge,
        by_a_ledger,
        *(pytest.param(one, marks=pytest.mark.long) for one in (by_load, by_a_processor_s_output)),
    ],
)
def test_who_lacks_the_function_is_refused_by_name(
    source: Source, write: Callable[[Source], str]
) -> None:
    said = write(source)
    assert "DerivationMissing" in said
    assert f"is the source of derivation 'by-city' of {source.name}, version 1" in said
    assert list(source.client.snapshot(source.name).read(source.name)) == []


def test_a_plain_write_is_rejected(source: Source) -> None:
    """As of a Kafka producer, or Kafka Connect."""
    source.produce(journal_topic(source.name))

    def rejected() -> dict[str, int]:
        return dict(source.client.describe(source.name).rejected)

    wait_until(lambda: rejected() == {"plain_write": 1}, what=rejected)
    assert list(source.client.snapshot(source.name).read(source.name)) == []
