"""Offset ranges as Arrow batches, on a real cluster: what `Client.read` gives, raw and over librdkafka."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.client.connect import reader_ports
from anabranch.errors import (
    DeadlineExceeded,
    InvalidArgument,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.reading.event_columns import SCHEMA
from anabranch.reading.ranges import RangeReader
from anabranch.topics.names import stream_topic
from tests.cluster import Cluster

pytestmark = pytest.mark.broker

QUIET_S = 1.0
LONG_S = 60.0


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[RangeReader]:
    with RangeReader(reader_ports(cluster.bootstrap, {}), LONG_S) as made:
        yield made


def events(batches: Iterator[pa.RecordBatch]) -> list[anabranch.Event]:
    """The rows of batches, each of which must be sound."""
    found = []
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA, check_metadata=True)
        assert batch.num_rows
        table = batch.set_column(3, "timestamp", batch["timestamp"].cast(pa.int64()))
        for row in table.to_pylist():
            found.append(
                anabranch.Event(
                    row["stream"],
                    row["key"],
                    row["value"],
                    [(header["key"], header["value"]) for header in row["headers"]],
                    row["timestamp"] // 1000,
                    row["txn_id"],
                    row["commit_timestamp"],
                    row["segment"],
                    row["partition"],
                    row["offset"],
                )
            )
    return found


class Scenario:
    """A stream that was scaled, with rolled transactions, one-shots, plain writes and an aborted native one."""

    def __init__(self, cluster: Cluster, client: anabranch.Client) -> None:
        self.stream = "ranges/events"
        client.create_stream(self.stream, segments=2)
        self.write(client, 3)
        old = client.begin("ranges")
        old.write_many(self.stream, [(b"old %d" % i, b"o%d" % i) for i in range(40)])
        old.flush()
        client.scale(self.stream, segments=3)
        self.write(client, 2)
        old.commit()
        self.abort_natively(cluster)
        plain = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
        for i in range(5):
            plain.produce(f"{stream_topic(self.stream)}.journal", b"plain %d" % i, partition=0)
        assert plain.flush(LONG_S) == 0
        found: list[anabranch.Event] = []
        for event in client.read(self.stream, timeout=LONG_S):
            found.append(event)
            if sum(event.txn_id is None for event in found) == 5:
                break
        self.write(client, 2)
        self.events = list(client.read(self.stream, timeout=QUIET_S))
        self.ends = {
            partition: 1 + max(e.offset for e in self.events if e.partition == partition)
            for partition in {e.partition for e in self.events}
        }

    def write(self, client: anabranch.Client, transactions: int) -> None:
        for number in range(transactions):
            headers = [("one", b"1"), ("zwölf", None)] if number % 2 else []
            with client.begin("ranges") as txn:
                for i in range(30):
                    value = None if i == 7 else b"%d" % i * (i % 5)
                    txn.write(self.stream, value, key=b"k%d" % i, headers=headers, timestamp=i + 1)
                txn.commit()

    def abort_natively(self, cluster: Cluster) -> None:
        """The records of a controller that died in mid-round."""
        dead = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "ranges-dead"})
        dead.init_transactions(LONG_S)
        dead.begin_transaction()
        for i in range(20):
            dead.produce(stream_topic(self.stream), b"never %d" % i, partition=i % 2)
        dead.flush(LONG_S)
        dead.abort_transaction(LONG_S)

    def of(self, partition: int, first: int = 0, end: int = 1 << 60) -> list[anabranch.Event]:
        """The events of a range, as the reader gave them."""
        found = [e for e in self.events if e.partition == partition and first <= e.offset < end]
        return sorted(found, key=lambda e: e.offset)


@pytest.fixture(scope="module")
def scenario(cluster: Cluster, client: anabranch.Client) -> Scenario:
    return Scenario(cluster, client)


def test_whole_partitions_are_what_the_reader_gives(
    reader: RangeReader, scenario: Scenario
) -> None:
    assert sorted(scenario.ends) == [0, 1, 2]
    assert any(e.txn_id is None for e in scenario.of(0))
    for partition, end in scenario.ends.items():
        found = events(reader.read(scenario.stream, partition, 0, end))
        assert found == scenario.of(partition)
    assert events(reader.read(scenario.stream, 0, 5, 5)) == []


def test_parts_with_markers_at_their_ends(reader: RangeReader, scenario: Scenario) -> None:
    end = scenario.ends[0]
    offsets = {e.offset for e in scenario.of(0)}
    gaps = [o for o in range(end) if o not in offsets]
    assert len(gaps) > 10  # markers, and aborted events
    cuts = [0, gaps[0], gaps[0] + 1, gaps[5], gaps[-1] + 1, end]
    for first, stop in itertools.pairwise(cuts):
        assert events(reader.read(scenario.stream, 0, first, stop)) == scenario.of(0, first, stop)
    # The last offset of a range may begin a batch.
    for last in [o for o in sorted(offsets) if o - 1 in gaps][:6]:
        first = max(0, last - 3)
        found = events(reader.read(scenario.stream, 0, first, last + 1))
        assert found == scenario.of(0, first, last + 1)
        assert found[-1].offset == last
    # Up to the partition's very end, where a marker stands.
    assert events(reader.read(scenario.stream, 0, 0, end + 1)) == scenario.of(0)


def test_a_part_of_the_history_may_be_given(reader: RangeReader, scenario: Scenario) -> None:
    end = scenario.ends[0]
    assert events(reader.read(scenario.stream, 0, 0, end, history=(0, None))) == scenario.of(0)
    with pytest.raises(InvalidArgument, match="does not reach"):
        list(reader.read(scenario.stream, 0, 0, end, history=(0, 3)))


def test_events_of_a_range_are_filtered_by_their_commits(
    reader: RangeReader, scenario: Scenario
) -> None:
    for partition, end in scenario.ends.items():
        mine = scenario.of(partition)
        times = sorted({e.commit_timestamp for e in mine})
        low, high = times[1], times[-2]
        found = events(reader.read(scenario.stream, partition, 0, end, low=low, high=high))
        assert found == [e for e in mine if low <= e.commit_timestamp <= high]
        segments = {mine[0].segment_id, mine[-1].segment_id}
        found = events(reader.read(scenario.stream, partition, 0, end, segments=segments))
        assert found == [e for e in mine if e.segment_id in segments]
        assert events(reader.read(scenario.stream, partition, 0, end, high=times[0] - 1)) == []
        assert events(reader.read(scenario.stream, partition, 0, end, segments=())) == []


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no such stream": ({"stream": "ranges/none"}, UnknownStream),
    "below nothing": ({"first": -1}, InvalidArgument),
    "backwards": ({"first": 4, "end": 3}, InvalidArgument),
    "ends too high": ({"end": 1 << 40}, DeadlineExceeded),
    "begins too high": ({"first": 1 << 40, "end": 1 << 41, "history": (0, None)}, DeadlineExceeded),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("no such stream", marks=pytest.mark.unsecured),
        *(case for case in WRONG if case != "no such stream"),
    ],
)
def test_errors_say_what_to_do(cluster: Cluster, scenario: Scenario, case: str) -> None:
    changes, error = WRONG[case]
    call: dict[str, Any] = {
        "stream": scenario.stream,
        "partition": 0,
        "first": 0,
        "end": 5,
    } | changes
    seconds = 1.0 if error is DeadlineExceeded else 30.0
    with RangeReader(reader_ports(cluster.bootstrap, {}), seconds) as reader, pytest.raises(error):
        list(reader.read(**call))


def test_what_retention_removed_is_a_named_error(
    reader: RangeReader, cluster: Cluster, client: anabranch.Client, unique: str
) -> None:
    stream = f"{unique}/cut"
    client.create_stream(stream)
    with client.begin(unique) as txn:
        for i in range(10):
            txn.write(stream, b"%d" % i)
        txn.commit()
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    cut = TopicPartition(stream_topic(stream), 0, 4)
    for future in admin.delete_records([cut]).values():
        future.result(LONG_S)
    with pytest.raises(SnapshotExpired):
        list(reader.read(stream, 0, 0, 10))
    assert [e.value for e in events(reader.read(stream, 0, 4, 10))] == [
        b"%d" % i for i in range(4, 10)
    ]
