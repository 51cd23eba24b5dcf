"""Plain writes on a real cluster, by a producer that knows nothing: each event once, in its key's segment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

import anabranch
from anabranch.batches.compression import NONE
from anabranch.batches.format import Packed
from anabranch.batches.records import Record, encode_record
from anabranch.kafka.cluster import Cluster as Wire
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import parse_settings
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord
from tests.cluster import Cluster
from tests.conftest import Broker
from tests.crash.oracle import StreamLog, check_epochs, check_stream, read_stream
from tests.schemas.protocol_page import VECTORS

pytestmark = pytest.mark.broker

SOON_S = 20.0


@pytest.fixture
def feed(broker: Broker) -> Iterator[Producer]:
    """A program that has never heard of anabranch; librdkafka's own partitioner."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "acks": "all"})
    yield producer
    assert producer.flush(10) == 0


def journal(stream: str) -> str:
    return stream.replace("/", ".") + ".journal"


def wait_for(log: KafkaLog, stream: str, count: int) -> StreamLog:
    """The stream, once its history has so many events; both agree."""
    until = time.monotonic() + SOON_S
    while True:
        found = read_stream(log, stream)
        told = sum(
            part.count
            for _, record in found.history
            if isinstance(record, CommitRecord)
            for part in record.segments
        )
        if told >= count or time.monotonic() > until:
            assert told == len(found.events) == count
            check_stream(found)
            return found
        time.sleep(0.05)


def plain_commits(found: StreamLog) -> list[CommitRecord]:
    return [
        record
        for _, record in found.history
        if isinstance(record, CommitRecord) and record.txn_id == NO_TXN
    ]


def on_page() -> list[tuple[bytes, int]]:
    """(key, segment of 4) of the test vectors of docs/protocol.md."""
    found = json.loads(VECTORS.read_text("utf-8"))["key_positions"]
    return [(bytes.fromhex(each["key"]), each["segment_of_4"]) for each in found]


def test_keys_of_the_page_land_where_it_says(
    client: anabranch.Client, feed: Producer, log: KafkaLog, unique: str
) -> None:
    stream = f"p{unique}/vectors"
    client.create_stream(stream, segments=4)
    vectors = on_page()
    assert len(vectors) >= 15
    headers: list[tuple[str, str | bytes | None]] = [("source", b"here"), ("empty", None)]
    for n, (key, _) in enumerate(vectors):
        feed.produce(
            journal(stream), key=key, value=str(n).encode(), headers=headers, timestamp=1_000 + n
        )
    feed.flush(10)
    found = wait_for(log, stream, len(vectors))
    assert {e.value: e.partition for e in found.events} == {
        str(n).encode(): segment for n, (_, segment) in enumerate(vectors)
    }
    read = client.snapshot(stream).read(stream)
    events = sorted(read, key=lambda e: int(e.value or b""))
    assert [(e.key, e.timestamp, e.txn_id) for e in events] == [
        (key, 1_000 + n, None) for n, (key, _) in enumerate(vectors)
    ]
    assert all(e.headers == [("source", b"here"), ("empty", None)] for e in events)
    assert client.describe(stream).rejected == {}


def test_records_without_a_key_stay_on_their_partition(
    client: anabranch.Client, feed: Producer, log: KafkaLog, unique: str
) -> None:
    stream = f"p{unique}/nokeys"
    client.create_stream(stream, segments=3)
    for n in range(9):
        feed.produce(journal(stream), value=b"%d" % n, partition=n % 3)
    feed.flush(10)
    found = wait_for(log, stream, 9)
    assert all(e.partition == int(e.value) % 3 for e in found.events)
    client.scale(stream, segments=1)
    active = client.describe(stream).segments[0].partition
    for n in range(9):
        feed.produce(journal(stream), value=b"1%d" % n, partition=n % 3)
    feed.flush(10)
    found = wait_for(log, stream, 18)
    assert all(e.partition == active for e in found.events if len(e.value) == 2)


def test_header_names_that_are_no_text_are_rejected(
    client: anabranch.Client, feed: Producer, log: KafkaLog, broker: Broker, unique: str
) -> None:
    """In the stream, each such record would stop every plain consumer on librdkafka in Python for good."""
    stream = f"p{unique}/names"
    client.create_stream(stream)
    place, deadline = TopicPartition(journal(stream), 0), time.monotonic() + 20
    brokers = Wire(parse_settings(broker.bootstrap, {}))
    try:
        producer = JournalProducer(brokers, deadline)
        body = bytearray()
        for n, name in enumerate(("\udcff", "naïve", "\udced\udca0\udc80")):
            encode_record(body, Record(0, 5, b"k", b"%d" % n, ((name, b"x"),)), n, 0)
        producer.append(place, Packed(bytes(body), NONE, 3, 1_000, 1_000), deadline)
        producer.flush(deadline)
        producer.close()
    finally:
        brokers.close()
    feed.produce(journal(stream), key=b"k", value=b"3")
    feed.flush(10)
    wait_for(log, stream, 2)
    events = list(client.snapshot(stream).read(stream))
    assert [(e.value, e.headers) for e in events] == [(b"1", [("naïve", b"x")]), (b"3", [])]
    assert client.describe(stream).rejected == {"bad_header": 2}


def test_they_are_commits_without_a_transaction(
    client: anabranch.Client, feed: Producer, log: KafkaLog, unique: str
) -> None:
    """Transactions beside them stay whole; reading transactions gives both, in commit order."""
    stream = f"p{unique}/mixed"
    client.create_stream(stream, segments=2)
    for n in range(20):
        feed.produce(journal(stream), key=b"k%d" % (n % 5), value=b"plain %02d" % n)
        if n % 4 == 0:
            feed.flush(10)
            with client.begin(f"p{unique}") as txn:
                txn.token()  # so it is no one-shot
                for i in range(3):
                    txn.write(stream, b"txn %d %d" % (n, i), key=b"k%d" % i)
                txn.commit()
    feed.flush(10)
    found = wait_for(log, stream, 35)
    assert plain_commits(found)
    with client.read_transactions(stream, timeout=1.0) as reader:
        commits = [
            (c.txn_id, c.commit_timestamp, [e.value or b"" for e in c.events]) for c in reader
        ]
    assert [time for _, time, _ in commits] == sorted({time for _, time, _ in commits})
    assert sum(len(values) for txn_id, _, values in commits if txn_id is None) == 20
    whole = [sorted(values) for txn_id, _, values in commits if txn_id is not None]
    assert whole == [[b"txn %d %d" % (n, i) for i in range(3)] for n in range(0, 20, 4)]


def in_order(found: StreamLog, prefix: bytes) -> dict[bytes, list[int]]:
    """key -> the numbers of its plain events, as epochs and offsets order them."""
    return {
        key: [int(v.split()[1]) for v in values if v.startswith(prefix)]
        for key, values in check_epochs(found).items()
    }


@pytest.mark.soak
def test_over_a_scaling(
    client: anabranch.Client, feed: Producer, log: KafkaLog, unique: str
) -> None:
    """They go to their keys' new segments, whatever journal partition they are in; rolling commits between."""
    stream = f"p{unique}/scaled"
    client.create_stream(stream, segments=2)
    keys = [b"key-%d" % i for i in range(20)]
    numbers = iter(range(10_000))
    old = client.begin(f"p{unique}")
    old.write(stream, b"old", key=b"key-1")
    old.flush()

    def burst() -> None:
        for _ in range(100):
            n = next(numbers)
            # By key, whatever partitions are added: that is what the order needs.
            feed.produce(journal(stream), b"plain %d" % n, keys[n % 20], partition=n % 20 % 2)
        feed.flush(10)

    burst()
    client.scale(stream, segments=3)
    burst()
    old.commit()  # rolls
    burst()
    client.scale(stream, segments=1)
    burst()
    found = wait_for(log, stream, 401)
    assert in_order(found, b"plain") == {key: list(range(i, 400, 20)) for i, key in enumerate(keys)}
    assert {c.stream_epoch for c in plain_commits(found)} >= {0, 1, 4}
    assert len(list(client.snapshot(stream).read(stream))) == 401


@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 8])
def test_a_killed_controller_loses_and_doubles_none(
    own_cluster: Cluster, feed: Producer, log: KafkaLog, unique: str, kills: int
) -> None:
    own, stream = own_cluster, f"p{unique}/killed"
    keys = [b"key-%d" % i for i in range(50)]
    sent = committed = 0
    with anabranch.connect(own.bootstrap, prefix=own.prefix) as client:
        client.create_stream(stream, segments=3)
        for kill in range(kills):
            until = time.monotonic() + 0.4 + kill / 10
            # Plain commits come before the first kill and between any two.
            while (
                time.monotonic() < until or len(plain_commits(read_stream(log, stream))) < kill + 2
            ):
                for _ in range(50):
                    feed.produce(journal(stream), b"plain %d" % sent, keys[sent % 50])
                    sent += 1
                feed.poll(0)
                time.sleep(0.005)
            own.controller.kill()
            own.controller.start().wait_leading()
            with client.begin(f"p{unique}") as txn:
                txn.token()
                txn.write(stream, b"txn", key=keys[kill])
                txn.commit()
            committed += 1
        feed.flush(10)
        found = wait_for(log, stream, sent + committed)
        assert in_order(found, b"plain") == {
            key: list(range(i, sent, 50)) for i, key in enumerate(keys)
        }
        assert len(plain_commits(found)) > kills
