"""A row in PostgreSQL and its event by the ledger, against an outbox with a relay, and against the row alone.

Each transaction inserts one row and has one event of 100 bytes. *Ledger*: the database's commit decides. *Outbox*:
the event is a row, too; a relay in a process of its own polls that table every 100 ms, produces what it finds
(idempotent, all acks, one flush a poll) and deletes it. *Bare*: the row alone. A connection for each client, fsync
on, all on one machine. A plain consumer, read committed, says when an event is readable; those times run from the
moment that the database's commit was answered. Rates: 64 clients, as threads of one process. They count until the
events are readable: a ledger's block ends then, and the outbox's time ends when the relay has delivered all. CPU is
that of a transaction, by process. The broker's JVM is warmed up first.

Not equal: after a crash the relay may produce events twice, readers may see a part of a transaction's events, and
only one relay can run. The ledger's events come exactly once and all together, in any number of streams.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg
from confluent_kafka import Consumer, Producer

import anabranch
from anabranch.ledger import Ledger
from anabranch.topics.names import stream_topic
from bench.setting import WARM_S, Place, percentile, side_by_side
from tests.postgres import server

CLIENTS = 64
POLL_S = 0.1
VALUE = b"v" * 100
GOALS = {"of bare": 0.2, "of outbox": 1.0}  # least rates
PARTS = ("client", "relay", "controller", "broker", "PostgreSQL")
Kinds = dict[str, Callable[[psycopg.Connection[Any]], str]]


class Noting(psycopg.Connection[Any]):
    """A connection that notes when its last commit was answered."""

    answered = 0.0

    def commit(self) -> None:
        super().commit()
        self.answered = time.perf_counter()


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of interleaved rounds, and the goals' ratios."""
    rounds, seconds, singles, warm_s = (1, 3.0, 50, 5.0) if quick else (3, 6.0, 60, WARM_S)
    stream, topic = place.new_stream(segments=2), place.new_topic(partitions=2)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("bare", "outbox", "ledger")}
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
        relay = stack.enter_context(_relay(place.bootstrap, topic, database.dsn()))
        kinds = _kinds(client, stream)
        _measure(kinds["ledger"], clients, warm_s, {})
        for _ in range(rounds):
            for name in delays:
                seen = stream_topic(stream) if name == "ledger" else topic
                delays[name] += _delays(place.bootstrap, seen, kinds[name], first, singles)
            for name, measured in found.items():
                parts = {place.controller: "controller", relay: "relay"}
                measured.append(_measure(kinds[name], clients, seconds, parts))
    p50 = {name: percentile(sorted(took), 0.5) * 1000 for name, took in delays.items()}
    p99 = {name: percentile(sorted(took), 0.99) * 1000 for name, took in delays.items()}
    medians = {
        name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        for name, measured in found.items()
    }
    per_s = {name: one.pop("per_s") for name, one in medians.items()}
    return {
        "clients": CLIENTS,
        "poll_ms": POLL_S * 1000,
        "rounds": rounds,
        "per_s": per_s,
        "cpu_us": medians,
        "readable_p50_ms": p50,
        "readable_p99_ms": p99,
        "goals": {
            "readable_at_most_0.2_of_outbox": p50["ledger"] / p50["outbox"],
            "rate_at_least_0.2_of_bare": per_s["ledger"] / per_s["bare"],
            "rate_at_least_1_of_outbox": per_s["ledger"] / per_s["outbox"],
        },
    }


def _measure(
    kind: Callable[[psycopg.Connection[Any]], str],
    clients: list[Noting],
    seconds: float,
    parts: dict[int, str],
) -> dict[str, float]:
    """Run transactions of one kind for a time; their rate, and the CPU of one in each of `PARTS`, in µs.

    ``parts``: process id -> part; other processes are known by their names.
    """
    counts = [0] * len(clients)
    before = _cpu_s(parts)
    start = time.perf_counter()

    def work(number: int) -> None:
        while time.perf_counter() < start + seconds:
            kind(clients[number])
            counts[number] += 1

    side_by_side(work, len(clients))
    while _waiting(clients[0]):
        time.sleep(POLL_S / 10)
    elapsed, count = time.perf_counter() - start, sum(counts)
    spent = _cpu_s(parts)
    cpu = {part: (spent[part] - before[part]) / count * 1e6 for part in PARTS}
    return {"per_s": count / elapsed, **cpu}


def _waiting(own: psycopg.Connection[Any]) -> int:
    """How many rows the relay has not delivered."""
    row = own.execute("select count(*) from outbox").fetchone()
    own.commit()
    return row[0] if row else 0


def _cpu_s(parts: dict[int, str]) -> Counter[str]:
    """Seconds of CPU so far, by part."""
    own = psutil.Process()
    found: Counter[str] = Counter()
    for process in (own, *own.children(recursive=True)):
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.Error:  # it has just ended
            continue
        part = "client" if process == own else parts.get(process.pid)
        part = part or {"java": "broker", "postgres": "PostgreSQL"}.get(name, "")
        found[part] += times.user + times.system
    return found


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
def _relay(bootstrap: str, topic: str, dsn: str) -> Iterator[int]:
    """The outbox's relay, at its pace; the id of its process."""
    start_new = multiprocessing.get_context("spawn")
    over = start_new.Event()
    process = start_new.Process(target=_deliver, args=(bootstrap, topic, dsn, over), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        over.set()
        process.join()


def _deliver(bootstrap: str, topic: str, dsn: str, over: Event) -> None:
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
    per_s, p50, p99 = result["per_s"], result["readable_p50_ms"], result["readable_p99_ms"]
    goals = ", ".join(f"≥ {least} × {what}" for what, least in GOALS.items())
    rows = [
        ["transactions /s", *[f"{rate:,.0f}" for rate in per_s.values()], ""],
        [
            "the ledger's rate is",
            *[f"{per_s['ledger'] / rate:.2f} ×" for rate in per_s.values()],
            goals,
        ],
        [
            "readable after, p50 ms",
            "-",
            *[f"{took:.1f}" for took in p50.values()],
            "≤ 0.2 × of outbox",
        ],
        ["… p99 ms", "-", *[f"{took:.1f}" for took in p99.values()], ""],
        ["CPU of one, µs", *[f"{sum(cpu.values()):,.0f}" for cpu in result["cpu_us"].values()], ""],
    ]
    for part in PARTS:
        spent = [f"{cpu[part]:,.0f}" for cpu in result["cpu_us"].values()]
        rows.append([f"… {part}", *spent, ""])
    return ["", *per_s, "goal"], rows
