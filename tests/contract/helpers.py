"""Short ways to write and read, for the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.kafka import data
from anabranch.ports import Log, Producer, RawBatch, TopicPartition
from tests.contract.conftest import Maker
from tests.waiting import wait_until

TIME_MS = 1_690_000_000_000
PATIENCE_S = 30.0


def batch(
    *texts: str, timestamps: Sequence[int] | None = None, compression: str | None = None
) -> bytes:
    """A batch of these values, with keys."""
    times = timestamps or [TIME_MS] * len(texts)
    records = [
        Record(i, times[i], b"k", text.encode(), (("h", b"x"),)) for i, text in enumerate(texts)
    ]
    return encode_batch(records, compression)


def append_and_commit(
    producer: Producer, batches: Sequence[tuple[TopicPartition, bytes]]
) -> list[int]:
    """In one native transaction; the base offsets."""
    offsets = producer.append(batches)
    producer.commit()
    return offsets


def write(log: Log, maker: Maker, batches: Sequence[tuple[TopicPartition, bytes]]) -> list[int]:
    """Append in one native transaction of a new id; the base offsets."""
    offsets = append_and_commit(maker.producer(), batches)
    wait_stable(log, {tp for tp, _ in batches})
    return offsets


def wait_stable(log: Log, partitions: set[TopicPartition]) -> None:
    """Until all markers have landed."""
    waiting = dict.fromkeys(partitions, -1)
    for _ in range(10_000):
        ends = log.end_offsets(waiting, committed=False)
        stable = log.end_offsets(waiting, committed=True)
        if ends == stable:
            return
        # The memory log's clock moves only while a caller waits.
        log.fetch(ends, max_wait=0.005, max_bytes=1, committed=False)
    raise AssertionError("native transactions stay open")


def read_all(
    log: Log,
    partition: TopicPartition,
    *,
    committed: bool,
    start: int = 0,
    max_bytes: int = 1 << 20,
) -> tuple[list[RawBatch], int]:
    """All batches there are now, and where reading ended."""
    position = start
    batches: list[RawBatch] = []
    while True:
        found = log.fetch(
            {partition: position}, max_wait=0, max_bytes=max_bytes, committed=committed
        )
        if partition not in found:
            return batches, position
        assert found[partition].next_offset > position
        position = found[partition].next_offset
        batches += found[partition].batches


def values(batches: Sequence[RawBatch]) -> list[str]:
    """The values of all records."""
    return [(r.value or b"").decode() for b in batches for r in decode_records(b.data)]


def committed_values(log: Log, partition: TopicPartition) -> list[str]:
    """The records that a reader of committed data sees now."""
    return values(read_all(log, partition, committed=True)[0])


def stable_values(log: Log, partition: TopicPartition) -> list[str]:
    """The same, once all markers have landed."""
    wait_stable(log, {partition})
    return committed_values(log, partition)


def answers(monkeypatch: pytest.MonkeyPatch, code: int, times: int, only: int = -1) -> list[int]:
    """Make the next Produce answers say ``code``, of all partitions or one; the broker did store them."""
    real = data.produce_answer
    left = [times]

    def changed(*args: object) -> dict[TopicPartition, data.Produced]:
        found = real(*args)  # type: ignore[arg-type]
        if left[0]:
            left[0] -= 1
            for partition in found:
                if only in (-1, partition.partition):
                    found[partition] = data.Produced(code, -1, None)
        return found

    monkeypatch.setattr(data, "produce_answer", changed)
    return left


def until(is_so: Callable[[], object], failure: Callable[[], object] = lambda: None) -> None:
    """Wait: a broker shows a change a moment after it took it."""
    wait_until(is_so, PATIENCE_S, pause=0.01, what=failure)


def delete(log: Log, *topics: str) -> None:
    """Until the broker shows them no more."""
    log.delete_topics(list(log.describe_topics(topics).values()))
    until(lambda: not log.describe_topics(topics))
