"""Readers that record: in stream order, whole transactions, raw, alone and in groups; and snapshots.

A reader goes on until it is told to end. SIGUSR2 comes when the reader, or its group, has been given everything,
or has had the time for it: then it says that it has caught up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

import anabranch
from anabranch.errors import RetryError
from anabranch.topics.names import stream_topic
from checker.recorder import Recorder
from tests.crash.zygote import Spec, say
from tests.faults.acting import CALL_S, PATIENCE, Ending
from tests.faults.groups import note_resumes, note_resumes_of_history

QUIET_S = 0.3  # a poll ends when nothing came for so long
POLL_EVENTS = 200
_FORSAKEN_S = 10.0  # without an answer of any broker
# As soon as a broker allows by default, a killed member is out of the group.
GROUP = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 1_500, **PATIENCE}


@dataclass(frozen=True)
class Read(Spec):
    """A reader. ``mode``: ``ordered``, ``transactions``, ``raw`` or ``snapshots``."""

    mode: str = "ordered"
    streams: tuple[str, ...] = ()
    group: str | None = None
    spool: str = ""

    run = "tests.faults.reading:read"


def read(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM."""
    spec = Read(**told | {"streams": tuple(told["streams"])})
    ending = Ending()
    recorder = Recorder(Path(spec.spool) / f"{spec.name}.history")
    ways: dict[str, Callable[[_Reading], None]] = {
        "ordered": _ordered,
        "transactions": _transactions,
        "raw": _raw,
        "snapshots": _snapshots,
    }
    ways[spec.mode](_Reading(number, spec, ending, recorder))
    return 0


@dataclass
class _Reading:
    number: int
    spec: Read
    ending: Ending
    recorder: Recorder
    lives: int = 0
    reader: str = ""
    starts: str = field(default="start")

    def is_over(self) -> bool:
        return self.ending.event.is_set()

    def connect(self) -> anabranch.Client:
        spec = self.spec
        return anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S, config=GROUP)

    def opens(self) -> None:
        """Another reader begins, as far as the history goes."""
        self.lives += 1
        self.reader = f"{self.spec.name}.{self.lives}"
        self.recorder.note(
            "open",
            reader=self.reader,
            mode=self.spec.mode,
            streams=list(self.spec.streams),
            group=self.spec.group,
            starts="position" if self.spec.group else "start",
        )

    def polled(self, op: int, events: Iterable[list[Any]]) -> None:
        self.recorder.told(op, "ok", events=list(events))

    def ask(self) -> int:
        return self.recorder.ask("poll", reader=self.reader)

    def trouble(self, error: Exception) -> None:
        say(self.number, "trouble", kind=self.spec.mode, why=str(error)[:300])

    def caught_up(self) -> None:
        if self.ending.at_end:
            self.recorder.note("caught_up", reader=self.reader)


def seen(event: anabranch.Event) -> list[Any]:
    """An event as the history has it."""
    return [
        event.stream,
        event.partition,
        event.offset,
        event.key.decode() if event.key is not None else None,
        id_of(event.value),
        event.txn_id.hex() if event.txn_id is not None else None,
        event.commit_timestamp,
    ]


def id_of(value: bytes | None) -> str:
    """The beginning of a value."""
    return (value or b"").split(b" ", 1)[0].decode()


def _ordered(reading: _Reading) -> None:
    """A member of a group notes each event before it asks for the next one, which counts as processed then."""
    most = 1 if reading.spec.group else POLL_EVENTS
    with reading.connect() as client:
        while not reading.is_over():
            try:
                reader = client.read(list(reading.spec.streams), reading.spec.group, QUIET_S)
            except RetryError as error:
                reading.trouble(error)
                continue
            reading.opens()
            if reading.spec.group:
                note_resumes(reading.recorder, reading.reader, reader)
            if reading.lives == 1:
                say(reading.number, "works")
            with reader:
                while not reading.is_over():
                    _poll_ordered(reading, reader, most)
                reading.caught_up()


def _poll_ordered(reading: _Reading, reader: Any, most: int) -> None:
    events: list[anabranch.Event] = []
    op = reading.ask()
    try:
        for event in reader:
            events.append(event)
            if len(events) >= most:
                if most > 1:
                    break
                reading.polled(op, map(seen, events))
                events = []
                if reading.is_over():
                    return
                op = reading.ask()
    except RetryError as error:  # going on is safe
        reading.trouble(error)
    reading.polled(op, map(seen, events))


def _transactions(reading: _Reading) -> None:
    with reading.connect() as client:
        while not reading.is_over():
            try:
                reader = client.read_transactions(
                    reading.spec.streams[0], reading.spec.group, QUIET_S
                )
            except RetryError as error:
                reading.trouble(error)
                continue
            reading.opens()
            if reading.spec.group:
                note_resumes_of_history(reading.recorder, reading.reader, reader)
            if reading.lives == 1:
                say(reading.number, "works")
            with reader:
                while not reading.is_over():
                    _poll_transactions(reading, reader)
                reading.caught_up()


def _poll_transactions(reading: _Reading, reader: Any) -> None:
    op = reading.ask()
    try:
        for transaction in reader:
            reading.polled(op, [seen(event) for event in transaction.events])
            if reading.is_over():
                return
            op = reading.ask()
        reading.polled(op, [])
    except RetryError as error:  # going on is safe
        reading.trouble(error)
        reading.polled(op, [])


def _plain_consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "nobody",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
            **GROUP,
        }
    )


def _raw(reading: _Reading) -> None:
    """Any consumer, with partitions assigned by hand; it looks for new ones now and then.

    Who runs a plain consumer has to make it anew when it finds no brokers any more (decision 0010).
    """
    topics = {stream_topic(stream): stream for stream in reading.spec.streams}
    consumer = _plain_consumer(reading.spec.bootstrap)
    reading.opens()
    places: dict[tuple[str, int], int] = {}
    looked = 0.0
    answered = time.monotonic()
    say(reading.number, "works")
    while not reading.is_over():
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            if _add_new(consumer, topics, places):
                answered = looked
            elif looked - answered > _FORSAKEN_S:
                answered = looked
                consumer.close()
                consumer = _plain_consumer(reading.spec.bootstrap)
                consumer.assign([TopicPartition(*place, at) for place, at in places.items()])
        op = reading.ask()
        messages = consumer.consume(POLL_EVENTS, QUIET_S)
        good = [m for m in messages if m.error() is None]
        places |= {(str(m.topic()), m.partition() or 0): (m.offset() or 0) + 1 for m in good}
        reading.polled(
            op,
            [
                [
                    topics[str(m.topic())],
                    m.partition(),
                    m.offset(),
                    key.decode() if isinstance(key := m.key(), bytes) else None,
                    id_of(m.value()),
                    txn_of(m.headers()),
                    None,
                ]
                for m in good
            ],
        )
    reading.caught_up()
    consumer.close()


def _add_new(
    consumer: Consumer, topics: dict[str, str], places: dict[tuple[str, int], int]
) -> bool:
    """Whether any broker answered."""
    answered = False
    for topic in topics:
        try:
            found = consumer.list_topics(topic, timeout=5.0).topics[topic]
        except KafkaException:
            continue
        answered = True
        new = [p for p in found.partitions if (topic, p) not in places]
        if new:
            consumer.incremental_assign([TopicPartition(topic, p, 0) for p in new])
            places |= {(topic, p): 0 for p in new}
    return answered


def txn_of(headers: Any) -> str | None:
    """The transaction id in the header ab.txn."""
    value = dict(headers or ()).get("ab.txn")
    return value[:16].hex() if value else None


def _snapshots(reading: _Reading) -> None:
    """One after the other, now and then of an earlier time; it works for a fifth of the time at most."""
    recorder, streams = reading.recorder, list(reading.spec.streams)
    earlier: int | None = None
    with reading.connect() as client:
        say(reading.number, "works")
        while not reading.is_over():
            reading.lives += 1
            name = f"{reading.spec.name}.{reading.lives}"
            asked_for = earlier if reading.lives % 3 == 0 else None
            began = time.monotonic()
            try:
                with recorder.asking(
                    "snapshot", snapshot=name, streams=streams, asked_for=asked_for
                ) as told:
                    snapshot = client.snapshot(streams, asked_for)
                    told["timestamp"] = earlier = snapshot.timestamp
                for stream in streams:
                    with (
                        recorder.asking("snapshot_read", snapshot=name, stream=stream) as of_it,
                        snapshot.read(stream) as events,
                    ):
                        of_it["events"] = [seen(event) for event in events]
            except RetryError as error:
                reading.trouble(error)
            reading.ending.event.wait(max(1.0, 4 * (time.monotonic() - began)))
