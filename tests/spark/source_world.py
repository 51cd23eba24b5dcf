"""Two streams of one scope with everything in them that a source has to get right, and what readers see of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import Producer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import InputPartition

import anabranch
from anabranch.spark.source.reader import SnapshotReader
from anabranch.spark.source.stream_reader import StreamReader
from anabranch.topics.names import journal_topic

SOON_S = 60.0
BIG = 400  # events of the biggest transaction


class Seen(NamedTuple):
    """An event, equal for every kind of reader."""

    stream: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int  # Unix milliseconds
    segment: int | None
    txn_id: bytes | None
    commit_timestamp: int | None


def seen_by_client(events: Iterable[anabranch.Event]) -> list[Seen]:
    """The events that `client.read` gives."""
    return [
        Seen(
            e.stream, e.partition, e.offset, e.key, e.value, tuple(e.headers), e.timestamp,
            e.segment_id, e.txn_id, e.commit_timestamp,
        )
        for e in events
    ]  # fmt: skip


def seen_by_spark(frame: DataFrame) -> list[Seen]:
    """The rows of a frame, in its order."""
    rows = frame.withColumn("timestamp", F.unix_millis("timestamp")).collect()
    return [seen_in(row.asDict(recursive=True)) for row in rows]


def seen_in(row: dict[str, Any]) -> Seen:
    """A row with the timestamp in milliseconds."""
    headers = tuple((h["key"], _bytes(h["value"])) for h in row["headers"])
    return Seen(
        row["stream"], row["partition"], row["offset"], _bytes(row["key"]), _bytes(row["value"]),
        headers, row["timestamp"], row["segment"], _bytes(row["txn_id"]), row["commit_timestamp"],
    )  # fmt: skip


def seen_by_tasks(
    reader: StreamReader | SnapshotReader, tasks: Iterable[InputPartition]
) -> list[list[Seen]]:
    """The rows of each task, read without Spark."""
    return [
        [
            seen_in(row | {"timestamp": row["timestamp"].timestamp() * 1000})
            for batch in reader.read(task)
            for row in batch.to_pylist()
        ]
        for task in tasks
    ]


def _bytes(value: bytes | bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


@dataclass
class World:
    """``expected``: all events as `client.read` gives them, each key's in commit order."""

    bootstrap: str
    client: anabranch.Client
    scope: str
    results: list[anabranch.Result] = field(default_factory=list)
    expected: list[Seen] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)

    @property
    def events(self) -> str:
        """A stream that is scaled from two segments to four and to one."""
        return f"{self.scope}/events"

    @property
    def other(self) -> str:
        """A stream of one segment; some transactions write to it too."""
        return f"{self.scope}/other"

    def write(self, handle: anabranch.Transaction, stream: str, count: int, tag: str = "k") -> None:
        """Numbered events of nine keys."""
        for i in range(count):
            key = f"{tag}{i % 9}".encode()
            number = self._numbers[key] = self._numbers.get(key, -1) + 1
            handle.write(stream, b"%s:%d" % (key, number), key=key)

    def commit(self, count: int, others: int = 0) -> anabranch.Result:
        """A transaction with so many events, some of them in the other stream."""
        with self.client.begin(self.scope) as txn:
            self.write(txn, self.events, count - others)
            if others:
                self.write(txn, self.other, others, "o")
            self.results.append(txn.commit())
        return self.results[-1]

    def plain(self, count: int) -> None:
        """Plain writes, and wait until they are committed."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for i in range(count):
            producer.produce(journal_topic(self.other), value=b"p:%d" % i, key=b"plain")
        assert producer.flush(30) == 0
        until = time.monotonic() + SOON_S
        found = 0
        with self.client.read(self.other, timeout=SOON_S) as reader:
            for event in reader:
                found += event.txn_id is None
                if found == count:
                    return
                assert time.monotonic() < until

    def read(self) -> list[Seen]:
        """All that is committed, by the client: each key's events in commit order."""
        snapshot = self.client.snapshot([self.events, self.other])
        return [e for stream in snapshot.streams for e in seen_by_client(snapshot.read(stream))]


def build(bootstrap: str, client: anabranch.Client, scope: str) -> World:
    """Commits of all kinds."""
    world = World(bootstrap, client, scope)
    client.create_stream(world.events, segments=2)
    client.create_stream(world.other)
    with client.begin(scope) as txn:
        headers = [("h", b"1"), ("h", None), ("ünicode", b"")]
        txn.write(world.events, b"-:0", key=b"-", headers=headers, timestamp=1_600_000_000_123)
        txn.write(world.events, None, key=b"gone")
        txn.write(world.events, b"", key=None)
        txn.write(world.events, "zwölf".encode(), key=b"", timestamp=1)
        txn.write(world.other, None, key=None, headers=[("only", None)])
        world.results.append(txn.commit())
    for _ in range(5):
        world.commit(6, others=2)
    old = client.begin(scope)
    old.token()
    world.write(old, world.events, 30, "r")
    old.flush()
    client.scale(world.events, segments=4)
    for _ in range(5):
        world.commit(7)
    world.results.append(old.commit())  # rolls
    world.plain(10)
    for _ in range(5):
        world.commit(8, others=3)
    world.commit(BIG, others=160)
    client.scale(world.events, segments=1)
    world.commit(9, others=1)
    world.expected = world.read()
    return world


def in_key_order(found: Iterable[Seen]) -> bool:
    """Whether the numbered events of each key rise."""
    last: dict[tuple[str, bytes | None], int] = {}
    for event in found:
        if event.value and b":" in event.value:
            number = int(event.value.split(b":")[1])
            if number <= last.get((event.stream, event.key), -1):
                return False
            last[event.stream, event.key] = number
    return True
