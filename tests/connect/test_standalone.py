"""Kafka Connect, of the embedded broker's version, writes into a stream with the settings of docs/how-to/moving.md.

Its jars are locked next to this file, as the broker's are; `tests.containers.versions.resolve` made the lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import anabranch
from anabranch.infra.fetch import BrokerLock, cache_root, ensure_broker
from anabranch.infra.java import find_java
from anabranch.infra.process import SupervisedProcess
from anabranch.infra.sockets import free_port
from tests.cluster import Cluster
from tests.pages import DOCS, blocks
from tests.postgres import Postgres

pytestmark = [pytest.mark.broker, pytest.mark.soak, pytest.mark.unsecured]
WORKER = """
bootstrap.servers={bootstrap}
listeners=HTTP://127.0.0.1:{port}
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=1000
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
topic.creation.enable=false
"""
DEBEZIUM = """
name=capture
connector.class=io.debezium.connector.postgresql.PostgresConnector
plugin.name=pgoutput
database.hostname=127.0.0.1
database.port={port}
database.user=root
database.password=
database.dbname=postgres
topic.prefix=shop
table.include.list=public.orders
"""
DEADLINE_S = 90.0


def events(client: anabranch.Client, stream: str, count: int) -> list[anabranch.Event]:
    """The stream's events, once there are so many."""
    until = time.monotonic() + DEADLINE_S
    while True:
        found = list(client.snapshot(stream).read(stream))
        if len(found) >= count or time.monotonic() > until:
            return found
        time.sleep(0.5)


def test_a_source_and_a_router_write_plainly(
    cluster: Cluster, client: anabranch.Client, unique: str, tmp_path: Path
) -> None:
    shown = [b.text for b in blocks(DOCS / "how-to" / "moving.md") if b.kind == "properties"]
    streams = [f"c{unique}/web", f"c{unique}/routed"]
    settings = []
    for number, stream in enumerate(streams):
        client.create_stream(stream, segments=2)
        text = shown[0].replace("orders.txt", f"{tmp_path}/lines-{number}")
        text = text.replace("name=orders", f"name=source-{number}")
        if number:  # as Debezium names its topics
            text = text.replace("web.orders.journal", "shop.public.orders") + shown[1]
        path = tmp_path / f"source-{number}.properties"
        path.write_text(text.replace("web.orders", stream.replace("/", ".")))
        settings.append(path)
        (tmp_path / f"lines-{number}").write_text("".join(f"line {n}\n" for n in range(500)))
    with connect(cluster, tmp_path, settings) as log:
        for stream in streams:
            found = events(client, stream, 500)
            assert [e.value for e in found] == [b"line %d" % n for n in range(500)], log.read_text()
            assert {event.txn_id for event in found} == {None}
            assert client.describe(stream).rejected == {}
        with (tmp_path / "lines-0").open("a") as lines:
            lines.write("one more\n")
        assert events(client, streams[0], 501)[-1].value == b"one more"


def test_debezium_writes_plainly(
    cluster: Cluster, client: anabranch.Client, unique: str, tmp_path: Path
) -> None:
    """Rows of PostgreSQL, those of before and those that change, by the page's router."""
    stream = f"c{unique}/orders"
    client.create_stream(stream, segments=2)
    router = [b.text for b in blocks(DOCS / "how-to" / "moving.md") if b.kind == "properties"][1]
    server = Postgres()
    server.port = free_port()
    path = tmp_path / "capture.properties"
    text = DEBEZIUM.format(port=server.port) + router
    path.write_text(text.replace("web.orders", stream.replace("/", ".")))
    try:
        server.start("wal_level=logical", "listen_addresses=127.0.0.1")
        with psycopg.connect(server.dsn(), autocommit=True) as rows:
            rows.execute("CREATE TABLE orders (id int PRIMARY KEY, what text)")
            rows.execute(
                "INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, 300) n"
            )
            with connect(cluster, tmp_path, [path]) as log:
                assert len(events(client, stream, 300)) == 300, log.read_text()
                rows.execute("UPDATE orders SET what = 'paid' WHERE id = 7")
                found = events(client, stream, 301)
                assert {event.txn_id for event in found} == {None}
                mine = [event.value for event in found if event.key == b"Struct{id=7}"]
                assert ["what=paid" in str(value) for value in mine] == [False, True], mine
                assert client.describe(stream).rejected == {}
    finally:
        server.remove()


@contextmanager
def connect(cluster: Cluster, folder: Path, settings: list[Path]) -> Iterator[Path]:
    """A standalone worker with these connectors; gives its log."""
    worker = folder / "worker.properties"
    worker.write_text(WORKER.format(bootstrap=cluster.bootstrap, port=free_port(), folder=folder))
    lock = BrokerLock.from_json(Path(__file__).with_name("connect-4.3.1.lock.json").read_text())
    jars = ensure_broker(lock=lock, folder=cache_root() / f"connect-{lock.kafka_version}")
    command = [str(find_java().path), "-Xmx256m", "-cp", ":".join(map(str, jars))]
    command += ["org.apache.kafka.connect.cli.ConnectStandalone", *map(str, [worker, *settings])]
    log = folder / "connect.log"
    process = SupervisedProcess.start(command, log=log, environment=os.environ)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30)
        process.close()
