"""A producer with Write on one journal, whose batches unpack to 30,000 times their size: others go on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from threading import Thread

import cramjam
import pytest

import anabranch
from anabranch.batches.compression import ZSTD
from anabranch.batches.format import HEADER_SIZE, Packed, read_header
from anabranch.batches.records import Record, encode_batch
from anabranch.errors import BatchTooLarge
from anabranch.kafka.cluster import Cluster as Wire
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.settings import parse_settings
from anabranch.ports import TopicPartition
from anabranch.topics.names import stream_topic
from tests.behaviour.steps import commit
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

MIB = 1 << 20
BATCHES = 20
MOST_MEMORY = 500 * MIB
COMMITS = 40
SOON_S = 60.0


def zeros(mib: int) -> Packed:
    """A batch of one event with so much of zeros, which are never in memory at once."""
    size = mib * MIB
    head = b"\0\0\0\2k" + number(size)  # attributes, time, offset, key, and how long the value is
    packer = cramjam.zstd.Compressor()
    packer.compress(number(len(head) + size + 1) + head)
    for _ in range(mib):
        packer.compress(bytes(MIB))
    packer.compress(b"\0")  # no headers
    return Packed(bytes(packer.finish()), ZSTD, 1, 5, 5)


def packed(records: list[Record]) -> Packed:
    data = encode_batch(records, "zstd")
    header = read_header(data)
    times = header.base_timestamp, header.max_timestamp
    return Packed(data[HEADER_SIZE:], header.compression, len(records), *times)


def number(value: int) -> bytes:
    """A varint of Kafka's records."""
    value, found = value << 1, bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


@contextmanager
def journal_producer(bootstrap: str) -> Iterator[JournalProducer]:
    with (
        closing(Wire(parse_settings(bootstrap, {}))) as wire,
        closing(JournalProducer(wire, time.monotonic() + SOON_S)) as producer,
    ):
        yield producer


def peak(pid: int) -> int:
    """The most memory that a process ever had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.long
def test_packed_batches_cost_no_other_stream(own_cluster: Cluster, unique: str) -> None:
    """Each has 15 KB and unpacks to 480 MiB. The leader neither grows nor stops; other commits succeed."""
    cluster, mine, other = own_cluster, f"a{unique}/events", f"b{unique}/events"
    pid, batch = cluster.controller.pid, zeros(480)
    journal = TopicPartition(f"{stream_topic(mine)}.journal", 0)

    def attack() -> None:
        deadline = time.monotonic() + SOON_S
        with journal_producer(cluster.bootstrap) as producer:
            for _ in range(BATCHES):
                producer.append(journal, batch, deadline)
            producer.flush(deadline)

    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix) as client:
        for stream in (mine, other):
            client.create_stream(stream)
        attacker = Thread(target=attack)
        attacker.start()
        for n in range(COMMITS):
            commit(client, other, b"%d" % n)
        attacker.join()
        wait_until(lambda: client.describe(mine).rejected == {"malformed_batch": BATCHES}, SOON_S)
        commit(client, mine, b"after")
        with client.read(mine, timeout=5.0) as events:
            assert [event.value for event in events] == [b"after"]
        with client.read(other, timeout=5.0) as events:
            assert len(list(events)) == COMMITS
        legal = [Record(n, 5, b"k", bytes(1000)) for n in range(200)]
        with journal_producer(cluster.bootstrap) as producer:
            producer.append(journal, packed(legal), time.monotonic() + SOON_S)
            producer.flush(time.monotonic() + SOON_S)
        with client.read(mine, timeout=20.0) as events:
            assert len(list(islice(events, 201))) == 201
    small = {"max.event.bytes": 100_000}
    with (
        anabranch.connect(cluster.bootstrap, prefix=cluster.prefix, config=small) as client,
        client.read(mine, timeout=20.0) as events,
    ):
        assert next(events).value == b"after"
        with pytest.raises(BatchTooLarge, match="unpacks to more than 100,000"):
            next(events)
    assert (cluster.controller.pid, cluster.controller.running) == (pid, True)
    assert peak(pid) < MOST_MEMORY
