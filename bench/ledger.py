"""A row in PostgreSQL and its event by the ledger, against an outbox with a relay, and against the row alone.

Each transaction inserts one row and has one event of 100 bytes. *Ledger*: the database's commit decides. *Outbox*:
the event is a row, too; a relay in a thread of its own polls that table every 100 ms, produces what it finds
(idempotent, all acks, one flush a poll) and deletes it. *Bare*: the row alone. A connection for each client, fsync
on, all on one machine. A plain consumer, read committed, says when an event is readable; times run from the moment
that the database's commit was answered. Rates: 16 clients, as threads of one process. A first round is not counted:
the broker's JVM compiles in it.
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from confluent_kafka import Consumer, Producer

import anabranch
from anabranch.ledger import Ledger
from anabranch.topics.names import stream_topic
from bench.oneshot import measure
from bench.setting import Place, percentile
from tests.postgres import server

CLIENTS = 16
POLL_S = 0.1
VALUE = b"v" * 100
Kinds = dict[str, Callable[[psycopg.Connection[Any]], str]]


class Noting(psycopg.Connection[Any]):
    """A connection that notes when its last commit was answered."""

    answered = 0.0

    def commit(self) -> None:
        super().commit()
        self.answered = time.perf_counter()


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of interleaved rounds, and the goals' ratios."""
    rounds, seconds, singles = (1, 3.0, 50) if quick else (3, 10.0, 200)
    stream, topic = place.new_stream(segments=2), place.new_topic(partitions=2)
    rates: dict[str, list[float]] = {name: [] for name in ("bare", "outbox", "ledger")}
    delays: dict[str, list[float]] = {"outbox": [], "ledger": []}
    with ExitStack() as stack:
        database = stack.enter_context(server())
        client = stack.enter_context(anabranch.connect(place.bootstrap))
        connections = [
            stack.enter_context(Noting.connect(database.dsn())) for _ in range(CLIENTS + 1)
        ]
        first, *clients = connections
        first.execute("create table orders (id text primary key, n int)")
        first.execute("create table outbox (id text primary key, value bytea)")
        first.commit()
        Ledger(first).create(client)
        stack.enter_context(_relay(place.bootstrap, topic, database.dsn()))
        kinds = _kinds(client, stream)
        for number in range(rounds + 1):
            for name in delays:
                seen = stream_topic(stream) if name == "ledger" else topic
                found = _delays(place.bootstrap, seen, kinds[name], first, singles)
                delays[name] += found if number else []
            for name, counted in rates.items():
                calls = [_call(kinds[name], one) for one in clients]
                rate = measure(calls, seconds)["per_s"]
                counted += [rate] if number else []
    p50 = {name: percentile(sorted(found), 0.5) * 1000 for name, found in delays.items()}
    p99 = {name: percentile(sorted(found), 0.99) * 1000 for name, found in delays.items()}
    per_s = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "clients": CLIENTS,
        "poll_ms": POLL_S * 1000,
        "rounds": rounds,
        "per_s": per_s,
        "readable_p50_ms": p50,
        "readable_p99_ms": p99,
        "goals": {
            "readable_at_most_0.2_of_outbox": p50["ledger"] / p50["outbox"],
            "rate_at_least_0.5_of_bare": per_s["ledger"] / per_s["bare"],
        },
    }


def _call(kind: Callable[[psycopg.Connection[Any]], str], own: Any) -> Callable[[], None]:
    def call() -> None:
        kind(own)

    return call


def _kinds(client: anabranch.Client, stream: str) -> Kinds:
    """A transaction of each kind; returns the key of its row and event."""

    def bare(own: psycopg.Connection[Any]) -> str:
        key = uuid.uuid4().hex
        own.execute("insert into orders values (%s, 1)", (key,))
        own.commit()
        return key

    def outbox(own: psycopg.Connection[Any]) -> str:
        key = uuid.uuid4().hex
        own.execute("insert into orders values (%s, 1)", (key,))
        own.execute("insert into outbox values (%s, %s)", (key, VALUE))
        own.commit()
        return key

    def ledger(own: psycopg.Connection[Any]) -> str:
        key = uuid.uuid4().hex
        with client.begin(stream.partition("/")[0]) as txn, Ledger(own).commit(txn) as cursor:
            txn.write(stream, VALUE, key=key.encode())
            cursor.execute("insert into orders values (%s, 1)", (key,))
        return key

    return {"bare": bare, "outbox": outbox, "ledger": ledger}


@contextmanager
def _relay(bootstrap: str, topic: str, dsn: str) -> Iterator[None]:
    """The outbox's relay, at its pace."""
    over = threading.Event()

    def work() -> None:
        producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0}
        )
        with psycopg.connect(dsn) as own:
            while not over.wait(POLL_S):
                rows = own.execute("select id, value from outbox").fetchall()
                for key, value in rows:
                    producer.produce(topic, value, key.encode())
                    producer.poll(0)
                producer.flush(30)
                keys = [key for key, _ in rows]
                own.execute("delete from outbox where id = any(%s)", (keys,))
                own.commit()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _delays(
    bootstrap: str,
    topic: str,
    kind: Callable[[psycopg.Connection[Any]], str],
    own: Noting,
    count: int,
) -> list[float]:
    """Seconds from the database's answer until the event was read, one transaction after the other."""
    seen: dict[bytes, float] = {}
    over = threading.Event()
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
        }
    )
    consumer.subscribe([topic])

    def read() -> None:
        while not over.is_set():
            message = consumer.poll(0.05)
            if message is not None and not message.error():
                seen[message.key() or b""] = time.perf_counter()

    thread = threading.Thread(target=read)
    thread.start()
    found = []
    try:
        for number in range(count + 1):
            key = kind(own).encode()
            while key not in seen:
                time.sleep(0.0002)
            if number:  # the first one waited for the consumer's group
                found.append(seen[key] - own.answered)
            time.sleep(0.003 * (number % 30))  # at all phases of the relay
    finally:
        over.set()
        thread.join()
        consumer.close()
    return found


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["", "transactions /s", "of bare", "readable p50 / p99 ms", "of outbox"]
    rows = []
    for name, rate in result["per_s"].items():
        p50 = result["readable_p50_ms"].get(name)
        times = ["-", "-"]
        if p50 is not None:
            share = p50 / result["readable_p50_ms"]["outbox"]
            times = [f"{p50:.1f} / {result['readable_p99_ms'][name]:.1f}", f"{share:.2f} ×"]
        rows.append([name, f"{rate:,.0f}", f"{rate / result['per_s']['bare']:.2f} ×", *times])
    return head, rows
