"""The roles that read and take notes: a plain Kafka consumer, and three readers of the library."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from anabranch.cli.options import connected
from anabranch.errors import NotReady
from anabranch.librdkafka.options import for_librdkafka
from examples.flights.child import Say
from examples.flights.notes import END, Notebook, Small, stream_of
from examples.flights.source import TABLES
from examples.flights.ticker import END_EVENTS
from examples.flights.writers import target_from

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    import anabranch
    from anabranch import Client

DEADLINE_S = 900.0
_POLL_S = 0.02
_BATCH = 2_000
_QUIET_S = 0.7
_LAYOUT_EVERY_S = 1.0
# After this time without an event, a member checks whether it has the order to finish.
_SILENCE_S = 0.5


def watch_plain(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """A plain consumer with isolation.level=read_committed, without any code of anabranch.

    After the order to finish, it reads everything to the end.
    """
    from confluent_kafka import Consumer

    scope = parameters["scope"]
    target = target_from(parameters)
    consumer = Consumer(
        for_librdkafka(target.kafka)
        | {
            "bootstrap.servers": target.bootstrap,
            "group.id": f"{scope}.plain",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    streams = {stream_of(scope, t).replace("/", "."): stream_of(scope, t) for t in TABLES}
    with closing(consumer), _notebook(parameters) as notes:
        _consume_plain(consumer, streams, notes, say, finish)
    say("report")


def _consume_plain(
    consumer: Consumer, streams: Mapping[str, str], notes: Notebook, say: Say, finish: Event
) -> None:
    at_end: dict[tuple[str, int], bool] = {}
    next_layout = 0.0
    quiet_since = time.monotonic()
    deadline = quiet_since + DEADLINE_S
    while True:
        now = time.monotonic()
        if now >= next_layout:
            # A rolling commit may add partitions to a topic.
            _assign_new(consumer, list(streams), at_end)
            if next_layout == 0.0:
                say("ready")
            next_layout = now + _LAYOUT_EVERY_S
        for message in consumer.consume(_BATCH, _POLL_S):
            topic, partition = message.topic() or "", message.partition() or 0
            error = message.error()
            if error is not None:
                if error.name() != "_PARTITION_EOF":
                    raise RuntimeError(f"the plain consumer failed: {error}")
                at_end[topic, partition] = True
                continue
            at_end[topic, partition] = False
            quiet_since = time.monotonic()
            # Consumed headers are a list of names and bytes; the type also allows the forms for producing.
            headers: Any = message.headers()
            notes.add(
                *(streams[topic], message.key(), message.value(), headers, message.timestamp()[1]),
                partition=partition,
                offset=message.offset() or 0,
            )
        quiet = time.monotonic() - quiet_since > _QUIET_S
        if finish.is_set() and quiet and all(at_end.values()):
            return
        if now > deadline:
            raise TimeoutError("nobody wanted the report")


def _assign_new(
    consumer: Consumer, topics: Sequence[str], known: dict[tuple[str, int], bool]
) -> None:
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition

    new = []
    for topic in topics:
        metadata = consumer.list_topics(topic, timeout=10.0).topics[topic]
        if metadata.error is not None:
            raise RuntimeError(f"topic {topic}: {metadata.error}")
        for partition in metadata.partitions:
            if (topic, partition) not in known:
                known[topic, partition] = False
                new.append(TopicPartition(topic, partition, OFFSET_BEGINNING))
    if new:
        consumer.incremental_assign(new)


def read_events(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """The library's reader of one stream, event by event, until the last transaction's events."""
    ends = 0
    with _noting(parameters) as (client, notes):
        say("ready")
        for event in client.read(
            parameters["stream"], group=f"{parameters['scope']}.events", timeout=DEADLINE_S
        ):
            small = _note(notes, event)
            if small is not None and small.number == END:
                ends += 1
                if ends == END_EVENTS:
                    break
    say("report")


def read_whole(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """The library's reader of whole transactions of one stream."""
    txn_ids: list[str | None] = []
    with _noting(parameters) as (client, notes):
        say("ready")
        for committed in client.read_transactions(
            parameters["stream"], group=f"{parameters['scope']}.transactions", timeout=DEADLINE_S
        ):
            events = [_note(notes, e._replace(segment_id=len(txn_ids))) for e in committed.events]
            if any(small is not None and small.number == END for small in events):
                break
            txn_ids.append(committed.txn_id.hex() if committed.txn_id else None)
    say("report", txn_ids=txn_ids)


def read_in_order(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """A member of a group, which reports the last transaction's events that it gets, until the order to finish."""
    group = f"{parameters['scope']}.ordered"
    with (
        _noting(parameters) as (client, notes),
        client.read(parameters["stream"], group=group, timeout=_SILENCE_S) as reader,
    ):
        say("ready")
        while not finish.is_set():
            try:
                for event in reader:
                    small = _note(notes, event)
                    if small is not None and small.number == END:
                        say("end", index=small.within)
            except NotReady:
                continue  # the group has not caught up
    say("report")


@contextmanager
def _notebook(parameters: Mapping[str, Any]) -> Iterator[Notebook]:
    with closing(Notebook(Path(parameters["notes"]), parameters["scope"])) as notes:
        yield notes


@contextmanager
def _noting(parameters: Mapping[str, Any]) -> Iterator[tuple[Client, Notebook]]:
    with _notebook(parameters) as notes, connected(target_from(parameters)) as client:
        yield client, notes


def _note(notes: Notebook, event: anabranch.Event) -> Small | None:
    return notes.add(
        *(event.stream, event.key, event.value, event.headers, event.timestamp),
        partition=event.partition,
        offset=event.offset,
        segment=event.segment_id,
        committed=event.commit_timestamp,
    )
