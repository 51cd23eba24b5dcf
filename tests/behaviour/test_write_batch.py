"""`write_batch` on a real cluster, over raw connections and without them: the same events, once, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anabranch
from anabranch import errors
from anabranch.batches import columns_write
from anabranch.batches.compression import NAMES
from anabranch.batches.format import read_header
from anabranch.client.receipts import RECORD_OVERHEAD
from anabranch.client.writer import Writer
from anabranch.kafka import data
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.partitioner import position_of
from anabranch.protocol.schemas.records import Extent
from anabranch.topics.names import journal_topic
from tests.cluster import Cluster
from tests.contract.helpers import read_all

pytestmark = pytest.mark.broker

ROWS = 20_000
# Fills requests of several batches, keys of which some are null, headers here and there, every time given.
TABLE = pa.table(
    {
        "value": pa.array([b"%d " % i + b"v" * (i % 90) for i in range(ROWS)]),
        "key": pa.array([None if i % 9 == 0 else f"key-{i % 500}" for i in range(ROWS)]),
        "headers": pa.array(
            [[{"key": "source", "value": b"%d" % i}] if i % 4 == 0 else None for i in range(ROWS)],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        "timestamp": pa.array(
            [1_750_000_000_000 + i // 7 for i in range(ROWS)], pa.timestamp("ms")
        ),
    }
)
RAW: dict[str, Any] = {"batch_size": 20_000}
SLOW = RAW | {"queuing_strategy": "fifo"}  # an option of producers that raw connections do not have


@pytest.fixture
def streams(client: anabranch.Client, unique: str) -> list[str]:
    names = [f"s{unique}/{name}" for name in ("one", "two")]
    for name in names:
        client.create_stream(name, segments=3)
    return names


@pytest.fixture
def raw(cluster: Cluster) -> Iterator[anabranch.Client]:
    columns_write.warm()
    with anabranch.connect(cluster.bootstrap, **RAW) as connected:
        yield connected


def is_raw(writer: Writer) -> bool:
    """Whether it has written over raw connections."""
    columns = writer._account.journal._columns  # type: ignore[attr-defined]
    return columns is not None and columns._producer is not None


def events(client: anabranch.Client, stream: str, count: int) -> list[anabranch.Event]:
    """The first so many."""
    with client.read(stream, timeout=30) as reader:
        return list(islice(reader, count))


def fields(found: list[anabranch.Event]) -> list[tuple[Any, ...]]:
    """Events with keys in the order of each key; those without in any."""
    plain = [(one.key or b"", one.value, one.headers, one.timestamp) for one in found]
    keyless = [one for one in plain if not one[0]]
    return sorted(keyless) + sorted((one for one in plain if one[0]), key=lambda one: one[0])


def extents(receipt: anabranch.Receipt) -> tuple[Extent, ...]:
    return receipt.record.extents


def test_both_ways_give_the_same_events(
    cluster: Cluster, client: anabranch.Client, raw: anabranch.Client, streams: list[str]
) -> None:
    counts = []
    with anabranch.connect(cluster.bootstrap, **SLOW) as slow:
        for connected, stream in zip((raw, slow), streams, strict=True):
            with client.begin(stream.partition("/")[0]) as txn:
                writer = connected.join(txn.token())
                assert writer.write_batch(stream, TABLE) == ROWS
                assert is_raw(writer) == (connected is raw)
                receipt = writer.finish()
                assert txn.commit(receipts=[receipt]).counts.committed == ROWS
                counts.append(sum(one.count for one in extents(receipt)))
                assert all(one.end - one.first == one.count for one in extents(receipt))
    assert counts == [ROWS, ROWS]
    found = [events(client, stream, ROWS) for stream in streams]
    assert fields(found[0]) == fields(found[1])
    rows = TABLE.to_pylist()
    for key in ("key-7", "key-499"):
        assert [e.value for e in found[0] if e.key == key.encode()] == [
            row["value"] for row in rows if row["key"] == key
        ]
    segments = client.describe(streams[0]).segments
    for event in found[0]:
        if event.key is not None:
            (place,) = [s for s in segments if s.low <= position_of(event.key) < s.high]
            assert event.segment_id == place.segment_id


@pytest.mark.long
def test_journals_have_packed_batches_of_one_idempotent_producer(
    cluster: Cluster, client: anabranch.Client, streams: list[str]
) -> None:
    options = RAW | {"compression_type": "zstd"}
    producers = set()
    with (
        anabranch.connect(cluster.bootstrap, **options) as own,
        closing(KafkaLog(cluster.bootstrap)) as log,
        client.begin(streams[0].partition("/")[0]) as txn,
    ):
        for _ in range(2):  # the second one uses the first one's producer
            writer = own.join(txn.token())
            writer.write_batch(streams[0], TABLE)
            writer.finish()
        for partition in range(3):  # while it is open: the journals of ended ones are cleaned
            place = TopicPartition(journal_topic(streams[0]), partition)
            headers = [read_header(b.data) for b in read_all(log, place, committed=False)[0]]
            written = [
                header for header in headers if header.producer_id >= 0 and header.record_count > 9
            ]
            assert {NAMES[header.compression] for header in written} == {"zstd"}
            assert written[0].base_sequence == 0
            assert sum(header.record_count for header in written) > ROWS // 3
            producers |= {header.producer_id for header in written}
        txn.abort()
    assert len(producers) == 1


def test_a_key_keeps_its_order_between_write_and_write_batch(
    client: anabranch.Client, raw: anabranch.Client, streams: list[str]
) -> None:
    stream = streams[0]
    with client.begin(stream.partition("/")[0]) as txn:
        writer = raw.join(txn.token())
        want = []
        for turn in range(3):
            batch = [b"%d batch %d" % (turn, i) for i in range(1000)]
            single = [b"%d single %d" % (turn, i) for i in range(50)]
            writer.write_batch(stream, pa.table({"value": batch, "key": [b"k"] * 1000}))
            for value in single[:25]:
                writer.write(stream, value, b"k")
            writer.write_many(stream, ((value, b"k") for value in single[25:]))
            want += batch + single
        assert is_raw(writer)
        assert txn.commit(receipts=[writer.finish()]).counts.committed == 3150
    assert [event.value for event in events(client, stream, 3150)] == want


def test_a_transaction_takes_batches_before_and_after_it_is_opened(
    raw: anabranch.Client, streams: list[str]
) -> None:
    with raw.begin(streams[0].partition("/")[0]) as txn:
        txn.write_batch(streams[0], TABLE.slice(0, 5))
        assert txn.txn_id is None
        txn.write_batch(streams[0], TABLE.slice(5))
        txn.write_batch(streams[1], TABLE)
        txn.flush()
        txn.write_batch(streams[1], TABLE)
        assert txn.commit().counts.committed == 3 * ROWS


@pytest.mark.soak
def test_the_largest_row_fits_a_small_topic(
    client: anabranch.Client, raw: anabranch.Client, unique: str
) -> None:
    stream, limit = f"s{unique}/small", 20_000
    client.create_stream(stream, segments=2, settings={"max.message.bytes": limit})
    room = limit - RECORD_OVERHEAD
    rows = [os.urandom(i) for i in range(1000)] + [os.urandom(room - 4)]
    table = pa.table({"value": rows, "key": [b"%04d" % i for i in range(1001)]})
    more = pa.table({"value": [b"v"] * 999 + [os.urandom(room + 1)]})
    with client.begin(f"s{unique}") as txn:
        writer = raw.join(txn.token())
        writer.write_batch(stream, table)
        with pytest.raises(errors.EventTooLarge, match=f"{room + 1} bytes"):
            writer.write_batch(stream, more)
        assert is_raw(writer)
        assert txn.commit(receipts=[writer.finish()]).counts.committed == 1001


@pytest.mark.long
def test_a_failed_write_ends_the_writer_and_the_next_one_starts_afresh(
    client: anabranch.Client,
    raw: anabranch.Client,
    streams: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = data.produce_answer

    def refused(*args: Any) -> Any:
        return {place: data.Produced(45, -1, None) for place in real(*args)}

    with client.begin(streams[0].partition("/")[0]) as txn:
        writer = raw.join(txn.token())
        with monkeypatch.context() as patch:
            patch.setattr(data, "produce_answer", refused)
            with pytest.raises(errors.WriteFailed, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
                writer.write_batch(streams[0], TABLE)
        for call in (writer.finish, lambda: writer.write(streams[0], b"v")):
            with pytest.raises(errors.WriteFailed, match="OUT_OF_ORDER"):
                call()
        writer.discard()
        again = raw.join(txn.token())
        again.write_batch(streams[0], TABLE)
        result = txn.commit(receipts=[again.finish()])
    assert result.counts.committed == ROWS
    assert result.counts.left_out > 0


@pytest.mark.soak
def test_the_client_closes_its_connections(
    cluster: Cluster, client: anabranch.Client, streams: list[str]
) -> None:
    own = anabranch.connect(cluster.bootstrap, **RAW)
    with client.begin(streams[0].partition("/")[0]) as txn:
        used, idle, dropped = (own.join(txn.token()) for _ in range(3))
        for writer in (used, idle, dropped):
            writer.write_batch(streams[0], TABLE)
        idle.finish()
        dropped.discard()
        pool = used._account.journal._pool._columns  # type: ignore[attr-defined]
        producers = [*pool._used, *pool._spare]
        links = [link for one in producers for link in one._pipeline.links.values()]
        assert links
        own.close()
        assert all(link.connection.broken for link in links)
        with pytest.raises(errors.IllegalState, match="closed"):
            used.write_batch(streams[0], TABLE)
        txn.abort()


FORK = """
import os, sys, anabranch, pyarrow as pa
from anabranch import errors
from anabranch.batches import columns_write
columns_write.warm()
client = anabranch.connect(sys.argv[1], batch_size=20_000)
stream = sys.argv[2]
scope = stream.partition("/")[0]
table = pa.table({"value": [b"v" * 50] * 5000, "key": [b"%d" % i for i in range(5000)]})
txn = client.begin(scope)
txn.token()
txn.write_batch(stream, table)

def sockets():
    return sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}"))

raw = [link for one in txn._writer._account.journal._pool._columns._used for link in one._pipeline.links.values()]
assert raw
open_before = sockets()
pid = os.fork()
if pid == 0:
    try:
        assert all(link.connection.broken for link in raw)
        assert sockets() <= open_before - len(raw)
        try:
            txn.write_batch(stream, table)
        except errors.NotForkSafe:
            pass
        else:
            os._exit(2)
        with anabranch.connect(sys.argv[1]) as own, own.begin(scope) as mine:
            mine.write_batch(stream, table)
            assert mine.commit().counts.committed == 5000
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    del txn, client
    sys.exit(0)  # through all finalisers
_, status = os.waitpid(pid, 0)
assert status == 0, status
txn.write_batch(stream, table)
assert txn.commit().counts.committed == 10_000
client.close()
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts sockets as Linux shows them")
def test_a_forked_child_keeps_no_connection(cluster: Cluster, streams: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, cluster.bootstrap, streams[0]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
