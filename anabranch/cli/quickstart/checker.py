"""The role that compares streams with the source, after the fact, with a plain Kafka consumer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from anabranch.cli.quickstart.child import Orders, Say
from anabranch.cli.quickstart.events import Kind, Small, kind_of, stream_of, writer_of
from anabranch.cli.quickstart.rows import RowCheck, StreamReport
from anabranch.cli.quickstart.source import TABLES, Table, find_source
from anabranch.cli.quickstart.ticker import END
from anabranch.cli.quickstart.writers import target_from
from anabranch.cli.session import Target

_BATCH = 5_000
_POLL_S = 0.1
_DEADLINE_S = 300.0


class Where(NamedTuple):
    """Where an event lies."""

    topic: str
    partition: int | None
    offset: int | None

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def run(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """Reads the tables given, and when told to, says a report for each."""
    source = find_source(parameters["limit"])
    target = target_from(parameters)
    tables = [table for table in TABLES if table.name in parameters["tables"]]
    expected = [(table, RowCheck(source.rows(table))) for table in tables]
    if not orders.finish.wait(_DEADLINE_S):
        raise TimeoutError("nobody wanted the comparison")
    for table, check in expected:
        report = check_stream(check, table, stream_of(parameters["scope"], table), target)
        say("checked", **report.document())
    say("finished")


def check_stream(check: RowCheck, table: Table, stream: str, target: Target) -> StreamReport:
    """Compares one stream with its table's rows."""
    smalls: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    kinds: Counter[str] = Counter()
    writers: Counter[str] = Counter()
    compare_time = table.time is not None
    for key, value, headers, timestamp, where in _events(stream, target):
        kind = kind_of(value)
        kinds[kind.value] += 1
        if kind is Kind.BIG and value is not None:
            writers[writer_of(headers)] += 1
            check.take(key, value, timestamp if compare_time else None, where)
        elif kind is Kind.SMALL and value is not None:
            small = Small.from_bytes(value)
            smalls[small.number] += 1
            sizes[small.number] = small.of
        else:
            check.differences.add(f"{where}: an event that nobody committed: {value!r}")
    check.finish()
    return StreamReport(
        stream=stream,
        expected=check.expected,
        matched=check.matched,
        keys=check.keys,
        differences=tuple(check.differences.shown),
        difference_count=check.differences.count,
        smalls={number: (smalls[number], sizes[number]) for number in smalls if number != END},
        kinds=dict(kinds),
        writers=dict(writers),
    )


def _events(stream: str, target: Target) -> Any:
    """All committed events of a stream's topic: (key, value, headers, timestamp, where)."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    topic = stream.replace("/", ".")
    consumer = Consumer(
        dict(target.kafka)
        | {
            "bootstrap.servers": target.bootstrap,
            "group.id": f"{topic}.check",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        partitions = set(consumer.list_topics(topic, timeout=10.0).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in partitions])
        deadline = time.monotonic() + _DEADLINE_S
        while partitions:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} could not be read to its end in {_DEADLINE_S:.0f} s")
            for message in consumer.consume(_BATCH, _POLL_S):
                error = message.error()
                if error is None:
                    where = Where(topic, message.partition(), message.offset())
                    timestamp = message.timestamp()[1]
                    yield message.key(), message.value(), message.headers(), timestamp, where
                elif error.name() == "_PARTITION_EOF":
                    partitions.discard(message.partition() or 0)
                else:
                    raise RuntimeError(f"the check's consumer failed: {error}")
    finally:
        consumer.close()
