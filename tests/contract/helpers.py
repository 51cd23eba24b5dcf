"""Short ways to write and read, for the contract suite."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.ports import Log, RawBatch, TopicPartition
from tests.contract.conftest import Maker

TIME_MS = 1_690_000_000_000


def batch(
    *texts: str, timestamps: Sequence[int] | None = None, compression: str | None = None
) -> bytes:
    """A batch of these values, with keys."""
    times = timestamps or [TIME_MS] * len(texts)
    records = [
        Record(i, times[i], b"k", text.encode(), (("h", b"x"),)) for i, text in enumerate(texts)
    ]
    return encode_batch(records, compression)


def write(log: Log, maker: Maker, batches: Sequence[tuple[TopicPartition, bytes]]) -> list[int]:
    """Append in one native transaction of a new id; the base offsets."""
    producer = maker.producer()
    offsets = producer.append(batches)
    producer.commit()
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
