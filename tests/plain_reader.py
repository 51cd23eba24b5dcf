"""A plain Kafka consumer's view of a stream. It knows nothing of the library but the topic's name."""

from __future__ import annotations

import time
from typing import NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

DEADLINE_S = 60.0
_PASSING = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


class Seen(NamedTuple):
    """An event."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


def read_all(bootstrap: str, stream: str) -> list[Seen]:
    """All committed events, by partition and offset; without the library's own headers."""
    topic = stream.replace("/", ".")
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "plain",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
    }
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    # Markers land a little after a commit: until then a partition seems shorter to who reads what is committed.
    unmarked = Consumer({**settings, "isolation.level": "read_uncommitted"})
    try:
        partitions = consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
        ends = {}
        for partition in partitions:
            low, high = _watermarks(unmarked, TopicPartition(topic, partition))
            if high > low:
                ends[partition] = high
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        seen: dict[int, list[Seen]] = {partition: [] for partition in ends}
        until = time.monotonic() + DEADLINE_S
        while ends:
            assert time.monotonic() < until, f"{topic} can't be read to its end: {ends}"
            for message in consumer.consume(1000, timeout=0.2):
                assert message.error() is None, message.error()
                headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
                own = tuple((name, v) for name, v in headers if name not in ("ab.txn", "ab.op"))
                seen[cast("int", message.partition())].append(
                    Seen(message.value(), message.key(), own, message.timestamp()[1])
                )
            for place in consumer.position([TopicPartition(topic, p) for p in ends]):
                # A position is after control records, too.
                if place.offset >= ends[place.partition]:
                    del ends[place.partition]
        return [event for _, events in sorted(seen.items()) for event in events]
    finally:
        unmarked.close()
        consumer.close()


def _watermarks(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """Start and end of a partition, whose leader may have changed a moment ago."""
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
        except KafkaException as error:
            if error.args[0].code() not in _PASSING or time.monotonic() > until:
                raise
            time.sleep(0.2)


def values(bootstrap: str, stream: str) -> list[bytes]:
    """The values, sorted; none may be null."""
    found = [event.value for event in read_all(bootstrap, stream)]
    assert None not in found
    return sorted(value for value in found if value is not None)
