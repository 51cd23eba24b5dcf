"""Events that are packed into a batch of much more than its reader allows: each reader names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.batches import columns_read
from anabranch.batches.records import Record, encode_batch
from anabranch.errors import BatchTooLarge, InvalidArgument
from anabranch.librdkafka.options import Options
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.ranges import RangeReader
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.topics.names import journal_topic
from tests.client.world import World

STREAM, COUNT, SIZE = "nyc/a", 100, 1_000


def events(ports: ReaderPorts) -> int:
    with Reader(ports, [STREAM], None, 1.0, "begin", 5.0) as reader:
        return len(list(reader))


def transactions(ports: ReaderPorts) -> int:
    with TransactionReader(ports, STREAM, None, 1.0, "begin", 5.0) as reader:
        return sum(len(list(txn.events)) for txn in reader)


def ranges(ports: ReaderPorts) -> int:
    with RangeReader(ports, 5.0) as reader:
        return sum(batch.num_rows for batch in reader.read(STREAM, 0, 0, COUNT))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("read", [events, transactions, ranges])
def test_a_batch_beyond_the_limit_is_named_by_each_reader(
    read: Callable[[ReaderPorts], int], loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_read, "is_warm", lambda: loaded)
    world = World()
    world.client.create_stream(STREAM, segments=1)
    batch = encode_batch([Record(i, 5, b"k", bytes(SIZE)) for i in range(COUNT)], "zstd")
    world.cluster.produce_batch(TopicPartition(journal_topic(STREAM), 0), batch)
    while len(world.events(STREAM)) < COUNT:
        world.step()

    def ports(most: int) -> Any:
        member: Any = lambda *_: None  # noqa: E731
        log = world.cluster.log("reader")
        return ReaderPorts(lambda _: log, member, world.clock, max_event_bytes=most)

    assert read(ports(2 * COUNT * SIZE)) == COUNT
    says = (
        rf"nyc\.a\[0\]: the batch of the offsets 0 to 99 has {len(batch)} bytes and unpacks to more than 10,000: "
        r"to read it, set the option max\.event\.bytes .* or begin at offset 100"
    )
    with pytest.raises(BatchTooLarge, match=says):
        read(ports(10 * SIZE))


@pytest.mark.parametrize("given", ["0", "-1", "x", 1 << 30, "1.5"])
def test_the_option_is_a_number_of_bytes(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max\.event\.bytes="):
        Options("h:1", {"max.event.bytes": given})
    options = Options("h:1", {"max.event.bytes": "1000", "client.id": "x"})
    assert options.max_event_bytes == 1000
    assert "max.event.bytes" not in options.admin() | options.raw_reader() | options.journal(5000)
