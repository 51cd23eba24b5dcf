"""The roles that only look: a plain Kafka consumer, a reader of events, a reader of whole transactions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anabranch.cli.quickstart.child import Orders, Say
from anabranch.cli.quickstart.events import Kind, Small, kind_of, stream_of, writer_of
from anabranch.cli.quickstart.source import TABLES
from anabranch.cli.quickstart.ticker import END, END_EVENTS
from anabranch.cli.quickstart.writers import target_from
from anabranch.cli.session import connected

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

REPORT_EVERY_S = 0.25
DEADLINE_S = 900.0
_POLL_S = 0.02
_BATCH = 2_000
_QUIET_S = 0.7
_LAYOUT_EVERY_S = 1.0


class Sightings:
    """What an observer saw: counts and times by stream and kind, writers, and delays."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.first: dict[tuple[str, str], float] = {}
        self.last: dict[tuple[str, str], float] = {}
        self.writers: Counter[str] = Counter()
        self.delays: list[tuple[float, float]] = []
        self._smalls: set[tuple[str, int]] = set()

    def see(
        self,
        stream: str,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None,
        now: float,
    ) -> Small | None:
        """Takes an event; the small one that it is, if it is one."""
        kind = kind_of(value)
        small = None
        if kind is Kind.SMALL and value is not None:
            small = Small.from_bytes(value)
            if small.number == END:
                return small
            if (stream, small.number) not in self._smalls:
                self._smalls.add((stream, small.number))
                self.delays.append((small.sent, now - small.sent))
        elif kind is Kind.BIG:
            self.writers[writer_of(headers)] += 1
        at = (stream, kind.value)
        self.counts[at] += 1
        self.first.setdefault(at, now)
        self.last[at] = now
        return small

    def totals(self) -> dict[str, int]:
        """Counts by kind."""
        found: Counter[str] = Counter()
        for (_, kind), count in self.counts.items():
            found[kind] += count
        return dict(found)

    def report(self) -> dict[str, Any]:
        """All of it, for the parent."""
        return {
            "seen": [
                {
                    "stream": stream,
                    "kind": kind,
                    "count": count,
                    "first": self.first[stream, kind],
                    "last": self.last[stream, kind],
                }
                for (stream, kind), count in sorted(self.counts.items())
            ],
            "writers": dict(self.writers),
            "delays": [[sent, round(delay, 4)] for sent, delay in self.delays],
        }


def watch_plain(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """A plain consumer with isolation.level=read_committed: nothing of anabranch in its way."""
    from confluent_kafka import Consumer

    scope = parameters["scope"]
    target = target_from(parameters)
    consumer = Consumer(
        dict(target.kafka)
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
    try:
        _consume_plain(consumer, streams, say, orders)
    finally:
        consumer.close()


def _consume_plain(
    consumer: Consumer, streams: Mapping[str, str], say: Say, orders: Orders
) -> None:
    sightings = Sightings()
    at_end: dict[tuple[str, int], bool] = {}
    next_layout = next_report = 0.0
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
            place = (message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is not None:
                if error.name() != "_PARTITION_EOF":
                    raise RuntimeError(f"the plain consumer failed: {error}")
                at_end[place] = True
                continue
            now = time.monotonic()
            at_end[place] = False
            quiet_since = now
            sightings.see(streams[place[0]], message.value(), _headers(message), now)
        if now >= next_report:
            say("seen", **sightings.totals())
            next_report = now + REPORT_EVERY_S
        quiet = time.monotonic() - quiet_since > _QUIET_S
        if orders.finish.is_set() and quiet and all(at_end.values()):
            say("report", **sightings.report())
            return
        if now > deadline:
            raise TimeoutError("nobody wanted the report")


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    # Consumed headers are a list of names and bytes; the type allows for what can be produced.
    headers: Any = message.headers()
    return headers or []


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


def read_events(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """The library's reader of one stream, event by event, until the last transaction's events."""
    sightings = Sightings()
    latest: dict[int, int] = {}
    backwards = ends = 0
    next_report = 0.0
    with connected(target_from(parameters)) as client:
        say("ready")
        for event in client.read(
            parameters["stream"], group=f"{parameters['scope']}.events", timeout=DEADLINE_S
        ):
            now = time.monotonic()
            small = sightings.see(event.stream, event.value, event.headers, now)
            backwards += event.commit_timestamp < latest.get(event.partition, 0)
            latest[event.partition] = event.commit_timestamp
            if now >= next_report:
                say("seen", **sightings.totals())
                next_report = now + REPORT_EVERY_S
            if small is not None and small.number == END:
                ends += 1
                if ends == END_EVENTS:
                    break
    say("report", backwards=backwards, **sightings.report())


def read_whole(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """The library's reader of whole transactions of one stream."""
    stream = parameters["stream"]
    transactions: list[dict[str, Any]] = []
    with connected(target_from(parameters)) as client:
        say("ready")
        for committed in client.read_transactions(
            stream, group=f"{parameters['scope']}.transactions", timeout=DEADLINE_S
        ):
            sightings = Sightings()
            smalls: Counter[int] = Counter()
            sizes: dict[int, int] = {}
            for event in committed.events:
                small = sightings.see(event.stream, event.value, event.headers, time.monotonic())
                if small is not None:
                    smalls[small.number] += 1
                    sizes[small.number] = small.of
            if END in smalls:
                break
            transactions.append(
                {
                    "txn_id": committed.txn_id.hex() if committed.txn_id else None,
                    "commit_timestamp": committed.commit_timestamp,
                    "kinds": sightings.totals(),
                    "smalls": [[n, count, sizes[n]] for n, count in sorted(smalls.items())],
                    "at": time.monotonic(),
                }
            )
            if "big" in sightings.totals():
                say("big", count=sightings.totals()["big"])
    say("report", transactions=transactions)
