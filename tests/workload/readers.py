"""Readers: in stream order, whole transactions, raw, alone and in groups; and snapshots.

A reader reads until SIGTERM or SIGUSR2. SIGUSR2 comes when it, or its group, was given all that the log has, or had
the time for that: then it notes that it has caught up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

import anabranch
from anabranch.errors import RetryError
from anabranch.reading.ordered_reader import Reader as OrderedReader
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.topics.names import stream_topic
from checker.recorder import SUFFIX, Recorder
from tests.workload.children import Ending, run_threads
from tests.workload.groups import note_resumes, note_resumes_of_history
from tests.workload.recording import PATIENCE, seen, seen_raw, take_snapshot
from tests.workload.zygote import Spec, say

QUIET_S = 0.3  # a poll without events ends after it
POLL_EVENTS = 200
FORSAKEN_S = 10.0  # without an answer of any broker
PAUSE_S = 0.1  # after trouble
LOOK_S = 0.5  # between two looks for new partitions
# As soon as a broker allows by default, a killed member is out of the group.
GROUP = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 1_500, **PATIENCE}

Opened = TypeVar("Opened", OrderedReader, TransactionReader)


@dataclass(frozen=True)
class Read(Spec):
    """A process of readers, each in a thread. ``reads``: mode (a key of `MODES`) and streams of each.

    ``rests``: a snapshot is followed by a pause of four times its length.
    """

    reads: tuple[tuple[str, tuple[str, ...]], ...] = ()
    group: str | None = None
    spool: str = ""
    call: float = 30.0
    rests: bool = True

    run = "tests.workload.readers:read"


def read(number: int, given: dict[str, Any]) -> int:
    """Run the process of a `Read`."""
    reads = tuple((mode, tuple(streams)) for mode, streams in given["reads"])
    spec = Read(**given | {"reads": reads})
    ending = Ending()
    recorder = Recorder(Path(spec.spool) / f"{spec.name}{SUFFIX}")
    with anabranch.connect(
        spec.bootstrap, prefix=spec.prefix, timeout=spec.call, config=GROUP
    ) as client:
        readers = [
            Reader(number, client, recorder, spec, place) for place in range(len(spec.reads))
        ]
        return run_threads(number, [partial(reader.run, ending) for reader in readers])


@dataclass
class Reader:
    """One thread of a process. ``place``: of its mode and streams in the specification."""

    number: int
    client: anabranch.Client
    recorder: Recorder
    spec: Read
    place: int
    lives: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        self.mode, self.streams = self.spec.reads[self.place]

    def run(self, ending: Ending) -> None:
        MODES[self.mode](self, ending)

    def next_name(self) -> str:
        self.lives += 1
        return f"{self.spec.name}.{self.place}.{self.lives}"

    def opens(self) -> None:
        """To the history, another reader begins."""
        self.name = self.next_name()
        self.recorder.note(
            "open",
            reader=self.name,
            mode=self.mode,
            streams=list(self.streams),
            group=self.spec.group,
            starts="position" if self.spec.group else "start",
        )

    def ask(self) -> int:
        return self.recorder.ask("poll", reader=self.name)

    def polled(self, op: int, events: list[list[Any]]) -> None:
        self.recorder.told(op, "ok", events=events)

    def trouble(self, error: Exception, ending: Ending) -> None:
        """Say it, and pause: reading may continue."""
        say(self.number, "trouble", kind=self.mode, why=str(error)[:300])
        ending.wait(PAUSE_S)

    def caught_up(self, ending: Ending) -> None:
        if ending.at_end:
            self.recorder.note("caught_up", reader=self.name)

    def poll_each(self, items: Iterator[list[list[Any]]], ending: Ending, most: int) -> None:
        """Poll until nothing comes for a while: an answer has at most ``most`` items.

        A member of a group notes each item before it asks for the next, which counts as processed then.
        """
        got: list[list[Any]] = []
        op, count = self.ask(), 0
        try:
            for events in items:
                got += events
                count += 1
                if count >= most:
                    self.polled(op, got)
                    if ending.is_set():
                        return
                    got, op, count = [], self.ask(), 0
        except RetryError as error:
            self.trouble(error, ending)
        self.polled(op, got)


def _ordered(reader: Reader, ending: Ending) -> None:
    opens = partial(reader.client.read, list(reader.streams), reader.spec.group, QUIET_S)
    most = 1 if reader.spec.group else POLL_EVENTS
    _read_opened(
        reader, ending, opens, note_resumes, lambda got: ([seen(event)] for event in got), most
    )


def _transactions(reader: Reader, ending: Ending) -> None:
    opens = partial(reader.client.read_transactions, reader.streams[0], reader.spec.group, QUIET_S)
    _read_opened(
        reader,
        ending,
        opens,
        note_resumes_of_history,
        lambda got: ([seen(event) for event in txn.events] for txn in got),
        1,
    )


def _read_opened(
    reader: Reader,
    ending: Ending,
    opens: Callable[[], Opened],
    notes: Callable[[Recorder, str, Opened], None],
    items: Callable[[Opened], Iterator[list[list[Any]]]],
    most: int,
) -> None:
    """Open a reader, again after trouble, and poll it until the end; a member of a group notes where it begins."""
    while not ending.is_set():
        try:
            opened = opens()
        except RetryError as error:
            reader.trouble(error, ending)
            continue
        reader.opens()
        if reader.spec.group:
            notes(reader.recorder, reader.name, opened)
        with opened:
            while not ending.is_set():
                reader.poll_each(items(opened), ending, most)
            reader.caught_up(ending)


def _raw(reader: Reader, ending: Ending) -> None:
    """Read as any consumer does, with partitions assigned by hand, also those that come later.

    A plain consumer that finds no brokers any more has to be replaced (decision 0010).
    """
    topics = {stream_topic(stream): stream for stream in reader.streams}
    consumer = _plain_consumer(reader.spec.bootstrap)
    reader.opens()
    places: dict[tuple[str, int], int] = {}
    asked = 0.0
    answered = time.monotonic()
    while not ending.is_set():
        if time.monotonic() - asked > LOOK_S:
            asked = time.monotonic()
            if _add_new(consumer, topics, places):
                answered = asked
            elif asked - answered > FORSAKEN_S:
                answered = asked
                consumer.close()
                consumer = _plain_consumer(reader.spec.bootstrap)
                consumer.assign([TopicPartition(*place, at) for place, at in places.items()])
        op = reader.ask()
        messages = consumer.consume(POLL_EVENTS, QUIET_S)
        good = [message for message in messages if message.error() is None]
        places |= {(str(m.topic()), m.partition() or 0): (m.offset() or 0) + 1 for m in good}
        reader.polled(op, [seen_raw(topics[str(message.topic())], message) for message in good])
    reader.caught_up(ending)
    consumer.close()


def _plain_consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "raw",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
            **GROUP,
        }
    )


def _add_new(
    consumer: Consumer, topics: dict[str, str], places: dict[tuple[str, int], int]
) -> bool:
    """Assign partitions that are new. Returns whether any broker answered."""
    answered = False
    for topic in topics:
        try:
            found = consumer.list_topics(topic, timeout=5.0).topics[topic]
        except KafkaException:
            continue
        answered = True
        new = [number for number in found.partitions if (topic, number) not in places]
        if new:
            consumer.incremental_assign([TopicPartition(topic, number, 0) for number in new])
            places |= {(topic, number): 0 for number in new}
    return answered


def _snapshots(reader: Reader, ending: Ending) -> None:
    """Read one after the other, each third one of an earlier time."""
    earlier: int | None = None
    while not ending.is_set():
        name = reader.next_name()
        asked_for = earlier if reader.lives % 3 == 0 else None
        began = time.monotonic()
        try:
            earlier = take_snapshot(reader.recorder, reader.client, name, reader.streams, asked_for)
        except RetryError as error:
            reader.trouble(error, ending)
        pause = max(1.0, 4 * (time.monotonic() - began)) if reader.spec.rests else 0.1
        ending.wait(pause)


MODES: dict[str, Callable[[Reader, Ending], None]] = {
    "ordered": _ordered,
    "transactions": _transactions,
    "raw": _raw,
    "snapshots": _snapshots,
}
