"""The end of a run: what the log holds, read raw, and what readers have been given so far."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition as Place
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.topics.names import history_topic, stream_topic
from checker.recorder import SUFFIX, Recorder
from tests.workload.recording import id_of, key_of, txn_of

READ_S = 60.0

# Stream -> partition -> (start, end, events as a history has them).
Events = dict[str, dict[int, tuple[int, int, list[Any]]]]


class Log:
    """A plain consumer of committed data that knows nothing of the product."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"judge-{uuid.uuid4().hex}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "log_level": 0,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def partitions(self, topic: str) -> list[int]:
        return sorted(self._consumer.list_topics(topic, timeout=20).topics[topic].partitions)

    def read(self, topic: str, partition: int) -> tuple[int, int, list[Message]]:
        """First offset, end offset, messages."""
        place = TopicPartition(topic, partition)
        start, end = self._consumer.get_watermark_offsets(place, timeout=20)
        self._consumer.assign([TopicPartition(topic, partition, start)])
        found: list[Message] = []
        at, until = start, time.monotonic() + READ_S
        while at < end:
            assert time.monotonic() < until, (
                f"{topic}[{partition}] can't be read from {at} to {end}"
            )
            found += [m for m in self._consumer.consume(10_000, 0.2) if m.error() is None]
            at = max(at, self._consumer.position([place])[0].offset)
        self._consumer.unassign()
        return start, end, [m for m in found if (m.offset() or 0) < end]


def read_events(log: Log, streams: Sequence[str], *, tables: bool = False) -> Events:
    """Read streams to their ends. Of ``tables`` no value is a deletion."""
    found: Events = {}
    for stream in streams:
        topic = stream_topic(stream)
        found[stream] = {}
        for partition in log.partitions(topic):
            start, end, messages = log.read(topic, partition)
            events = [
                [
                    m.offset(),
                    key_of(m),
                    None if tables and m.value() is None else id_of(m.value()),
                    txn_of(m.headers()),
                ]
                for m in messages
            ]
            found[stream][partition] = start, end, events
    return found


def read_entries(log: Log, tables: Sequence[str]) -> Events:
    """Read derived tables to their ends: whole keys and rows, as texts whose order is that of bytes."""
    found: Events = {}
    for table in tables:
        topic = stream_topic(table)
        found[table] = {}
        for partition in log.partitions(topic):
            start, end, messages = log.read(topic, partition)
            events = [
                [m.offset(), _text(m.key()), _text(m.value()), txn_of(m.headers())]
                for m in messages
            ]
            found[table][partition] = start, end, events
    return found


def _text(data: bytes | str | None) -> str | None:
    return data.decode("latin-1") if isinstance(data, bytes) else data


def read_with_plain(log: Log, streams: Sequence[str], plain: set[str], until: float) -> Events:
    """`read_events` when all acknowledged plain writes are in it; as it is at ``until`` (monotonic)."""
    while True:
        found = read_events(log, streams)
        if plain <= set().union(*map(ids_of, found.values())) or time.monotonic() > until:
            return found
        time.sleep(0.5)


def ids_of(parts: dict[int, tuple[int, int, list[Any]]]) -> set[str]:
    """The ids of a stream's events."""
    return {event[2] for _, _, events in parts.values() for event in events}


def record_log(recorder: Recorder, log: Log, found: Events, **more: Any) -> None:
    """Record what was read, and the streams' histories too. ``more``: fields of each log."""
    for stream, parts in found.items():
        for partition, (start, end, events) in parts.items():
            with recorder.asking("log", stream=stream, partition=partition, **more) as answer:
                answer |= {"start": start, "end": end, "events": events}
        with recorder.asking("commits", stream=stream) as answer:
            _, _, messages = log.read(history_topic(stream), 0)
            answer["records"] = [
                [
                    m.offset(),
                    record.timestamp,
                    [record.txn_id.hex()] if any(record.txn_id) else [],
                    [[s.partition, s.first, s.end] for s in record.segments],
                ]
                for m in messages
                if isinstance(record := decode(m.value() or b""), CommitRecord)
            ]


def undecided(bootstrap: str, prefix: str) -> list[str]:
    """Partitions of a run's topics where an open native transaction keeps committed readers from the end."""
    log = KafkaLog(bootstrap)
    try:
        topics = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(
            timeout=20
        )
        places = [
            Place(name, number)
            for name, topic in topics.topics.items()
            if prefix in name
            for number in topic.partitions
        ]
        ends = log.end_offsets(places, committed=False)
        stable = log.end_offsets(places, committed=True)
    finally:
        log.close()
    return [
        f"{p.topic}[{p.partition}] from {stable[p]} to {ends[p]}"
        for p in places
        if stable[p] < ends[p]
    ]


def under_way(path: Path) -> str:
    """The operations of a history that have no answer yet, and for how many seconds."""
    open_ones: dict[int, tuple[str, float]] = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            entry = json.loads(line)
            since = (time.monotonic_ns() - entry["at"]) / 1e9
            name = f"{entry.get('what')} {entry.get('txn') or entry.get('stream') or ''}".strip()
            if entry["kind"] == "ask":
                open_ones[entry["op"]] = name, since
            else:
                open_ones.pop(entry["op"], None)
    return ", ".join(f"{what} for {s:.0f} s" for what, s in open_ones.values()) or "nothing"


class Given:
    """What histories say so far: events that readers were given, transactions, and plain writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._asked: dict[tuple[Path, int], dict[str, Any]] = {}
        self._groups: dict[str, str] = {}  # reader -> its group, or itself
        self._last: dict[tuple[str, str, tuple[str, ...]], str] = {}
        # Group, or reader without one -> stream -> ids.
        self._given: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.plain: set[str] = set()  # ids of acknowledged plain writes
        self.begun: set[str] = set()
        self.commits = 0

    def look(self) -> None:
        """Read what was added since."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            for entry in self._lines(path):
                if entry["kind"] == "ask":
                    self._asked[path, entry["op"]] = entry
                    continue
                asked = self._asked.pop((path, entry["op"]))
                if entry["outcome"] == "ok":
                    self._take(path.stem, asked, entry)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read[path] = self._read.get(path, 0) + len(line)
                yield json.loads(line)

    def _take(self, process: str, asked: dict[str, Any], answer: dict[str, Any]) -> None:
        match asked["what"]:
            case "open":
                self._groups[asked["reader"]] = asked["group"] or asked["reader"]
                place = process, asked["mode"], tuple(asked["streams"])
                self._last[place] = asked["reader"]
            case "poll":
                given = self._given[self._groups[asked["reader"]]]
                for event in answer["events"]:
                    given[event[0]].add(event[4])
            case "plain":
                self.plain.update(event[1] for event in asked["events"])
            case "commit":
                self.commits += 1
            case "begin" if answer["txn_id"] is not None:
                self.begun.add(answer["txn_id"])

    def missing(
        self, process: str, mode: str, streams: tuple[str, ...], wanted: dict[str, set[str]]
    ) -> int:
        """How many events this process's last reader of that mode, or its group, was not given yet."""
        reader = self._last.get((process, mode, streams), "")
        given = self._given[self._groups.get(reader, "")]
        return sum(len(wanted[stream] - given[stream]) for stream in streams)
