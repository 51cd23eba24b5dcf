"""Readers of the recorded workload: in stream order, whole transactions, raw, and snapshots."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

import anabranch
from anabranch.errors import AnabranchError, RetryError
from checker.recorder import Recorder, Unknown

IDLE_S = 0.5
MOST = 50  # events of a poll
LAST_DEADLINE_S = 12.0
LAST = "last.json"  # stream -> ids of the events behind which nothing comes
Row = list[Any]


def id_of(value: bytes | None) -> str:
    """The id that an event's value begins with."""
    return (value or b"").partition(b" ")[0].decode()


def row_of(event: anabranch.Event) -> Row:
    """An event as histories have it."""
    key = event.key.decode() if event.key is not None else None
    txn_id = event.txn_id.hex() if event.txn_id else None
    place = [event.stream, event.partition, event.offset]
    return [*place, key, id_of(event.value), txn_id, event.commit_timestamp]


def raw_row(stream: str, message: Message) -> Row:
    """A consumer's message as histories have it."""
    key = message.key()
    headers: dict[str, Any] = dict(message.headers() or [])
    txn_id = headers["ab.txn"][:16].hex() if "ab.txn" in headers else None
    value = message.value()
    text = key.decode() if isinstance(key, bytes) else key
    place = [stream, message.partition(), message.offset()]
    return [*place, text, id_of(value if isinstance(value, bytes) else None), txn_id, None]


class Readers:
    """Each method is the body of a thread: it reads until it is told to end, and then to the last events."""

    def __init__(
        self,
        client: anabranch.Client,
        bootstrap: str,
        recorder: Recorder,
        name: str,
        ending: threading.Event,
    ) -> None:
        self._client = client
        self._bootstrap = bootstrap
        self._recorder = recorder
        self._name = name
        self._ending = ending
        self._folder: Path | None = None

    def ends_by(self, folder: Path) -> None:
        """Where it will be said which events are the last ones."""
        self._folder = folder

    def ordered(self, stream: str) -> None:
        """In stream order."""
        name = self._open("ordered", stream)
        seen: set[str] = set()
        with self._client.read(stream, timeout=IDLE_S) as reader:

            def some() -> Iterable[Row]:
                rows = []
                for event in reader:
                    rows.append(row_of(event))
                    if len(rows) == MOST:
                        break
                return rows

            self._until_last(name, stream, some, seen)

    def whole(self, stream: str) -> None:
        """One transaction after the other."""
        name = self._open("transactions", stream)
        seen: set[str] = set()
        with self._client.read_transactions(stream, timeout=IDLE_S) as reader:

            def one() -> Iterable[Row]:
                committed = next(iter(reader), None)
                return [] if committed is None else [row_of(event) for event in committed.events]

            self._until_last(name, stream, one, seen)

    def _open(self, mode: str, stream: str) -> str:
        name = f"{self._name}.{mode}.{stream}"
        what = {"reader": name, "mode": mode, "streams": [stream], "group": None, "starts": "start"}
        self._recorder.note("open", **what)
        return name

    def _until_last(
        self, name: str, stream: str, some: Callable[[], Iterable[Row]], seen: set[str]
    ) -> None:
        until = None
        wanted: set[str] = set()
        while until is None or time.monotonic() < until:
            with (
                contextlib.suppress(RetryError),
                self._recorder.asking("poll", reader=name) as told,
            ):
                told["events"] = rows = list(some())
                seen.update(row[4] for row in rows)
            if until is None and self._ending.is_set():
                until = time.monotonic() + LAST_DEADLINE_S
                wanted = self._last(stream)
            if until is not None and wanted <= seen:
                self._recorder.note("caught_up", reader=name)
                return

    def _last(self, stream: str) -> set[str]:
        assert self._folder is not None
        found: dict[str, list[str]] = json.loads((self._folder / LAST).read_text())
        return set(found[stream])

    # -- raw ------------------------------------------------------------------------------------------

    def raw(self, stream: str) -> None:
        """As any consumer reads a topic, partition by partition."""
        name = self._open("raw", stream)
        consumer = raw_consumer(self._bootstrap)
        follower = Follower(consumer, stream)
        until = None
        try:
            while until is None or time.monotonic() < until:
                with self._recorder.asking("poll", reader=name) as told:
                    told["events"] = follower.poll(IDLE_S / 2)
                if until is None and self._ending.is_set():
                    until = time.monotonic() + LAST_DEADLINE_S
                    follower.fix_ends()
                if until is not None and follower.is_at_ends():
                    self._recorder.note("caught_up", reader=name)
                    return
        finally:
            consumer.close()

    # -- snapshots ------------------------------------------------------------------------------------

    def snapshots(self, streams: tuple[str, ...]) -> None:
        """One after the other."""
        number = 0
        while not self._ending.wait(0.1):
            number += 1
            with contextlib.suppress(Unknown):
                take_snapshot(self._client, self._recorder, f"{self._name}.s{number}", streams)


def take_snapshot(
    client: anabranch.Client, recorder: Recorder, label: str, streams: tuple[str, ...]
) -> None:
    """As of now, and read it. Raises `Unknown` if a controller or broker was away."""
    with recorder.asking("snapshot", snapshot=label, streams=list(streams), asked_for=None) as told:
        try:
            snapshot = client.snapshot(streams)
        except AnabranchError as error:
            raise Unknown(str(error)) from error
        told["timestamp"] = snapshot.timestamp
    for stream in streams:
        with recorder.asking("snapshot_read", snapshot=label, stream=stream) as told:
            try:
                with snapshot.read(stream) as reader:
                    told["events"] = [row_of(event) for event in reader]
            except AnabranchError as error:
                raise Unknown(str(error)) from error


def raw_consumer(bootstrap: str) -> Consumer:
    """Reads committed, and tells the ends of partitions."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "raw",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )


class Follower:
    """A stream's topic, also the partitions that it gets later, each from its beginning."""

    def __init__(self, consumer: Consumer, stream: str) -> None:
        self._consumer = consumer
        self._stream = stream
        self._topic = stream.replace("/", ".")
        self._partitions = 0
        self._look_at = 0.0
        self._met: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def poll(self, seconds: float) -> list[Row]:
        """Events that came within that time."""
        if time.monotonic() >= self._look_at:
            self._look()
        rows = []
        for message in self._consumer.consume(MOST, seconds):
            error = message.error()
            if error is None:
                rows.append(raw_row(self._stream, message))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._met[message.partition() or 0] = message.offset() or 0
        return rows

    def _look(self) -> None:
        self._look_at = time.monotonic() + 0.5
        found = self._consumer.list_topics(self._topic, 10.0).topics[self._topic].partitions
        new = range(self._partitions, len(found))
        if new:
            self._partitions = len(found)
            self._consumer.incremental_assign([TopicPartition(self._topic, p, 0) for p in new])

    def fix_ends(self) -> None:
        """What stands in the topic now is all that is to be read."""
        self._look()
        for partition in range(self._partitions):
            place = TopicPartition(self._topic, partition)
            self._ends[partition] = self._consumer.get_watermark_offsets(place, 10.0)[1]

    @property
    def ends(self) -> dict[int, int]:
        """Partition -> end, as `fix_ends` found it."""
        return self._ends

    def is_at_ends(self) -> bool:
        """Whether all is read."""
        return all(self._met.get(p, 0) >= end for p, end in self._ends.items())
