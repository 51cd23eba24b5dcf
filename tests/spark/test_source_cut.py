"""Sources over a history of which the beginning is deleted: no unasked null, and no silent loss.

On a real broker, without Spark: the planner's side, and what its tasks read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, LessThan
from pyspark.sql.streaming.datasource import ReadMaxRows

import anabranch
from anabranch.errors import SnapshotExpired
from anabranch.spark.columns import EVENT_SCHEMA
from anabranch.spark.options import Options
from anabranch.spark.source.plan import EventRange
from anabranch.spark.source.positions import from_json
from anabranch.spark.source.reader import SnapshotReader
from anabranch.spark.source.stream_reader import StreamReader
from anabranch.topics.names import history_topic, stream_topic
from tests.cluster import Cluster
from tests.spark.source_world import seen_by_tasks

pytestmark = pytest.mark.broker

SOON_S = 60
COMMITS, CUT = 5, 2
UNTOLD = r"does not tell .* of offset 0: it was cut, .*; set option failOnDataLoss=false"

Row = tuple[bytes | None, int | None, int | None]


class Cut(NamedTuple):
    """A stream of one partition with commits 0 to 4, of an event each; the history tells of 2 to 4 only.

    ``positions``: of a query of one event each, before that: after 0, 1, … commits.
    """

    bootstrap: str
    client: anabranch.Client
    stream: str
    times: list[int]
    positions: list[dict[str, Any]]

    def rows(self, *numbers: int) -> list[Row]:
        """The rows that a source gives of these commits."""
        return [
            (b"%d" % n, 0, self.times[n]) if n >= CUT else (b"%d" % n, None, None) for n in numbers
        ]

    def delete(self, topic: str, before: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in admin.delete_records([TopicPartition(topic, 0, before)]).values():
            future.result(SOON_S)


@pytest.fixture(scope="module")
def cut(cluster: Cluster, client: anabranch.Client) -> Cut:
    stream = "cut/events"
    client.create_stream(stream)
    topic = history_topic(stream)
    made = Cut(cluster.bootstrap, client, stream, [], [])
    reader = StreamReader(Options({"bootstrap": made.bootstrap, "stream": stream}), EVENT_SCHEMA)
    made.positions.append(reader.initialOffset())
    ends = []
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "none"})
    for i in range(COMMITS):
        with client.begin("cut") as txn:
            txn.write(stream, b"%d" % i, key=b"k")
            made.times.append(txn.commit().commit_timestamp)
        until = time.monotonic() + SOON_S  # markers land soon after the answer
        while (found := reader.latestOffset(made.positions[-1], ReadMaxRows(1))) in made.positions:
            assert time.monotonic() < until, "the commit is not shown"
        made.positions.append(found)
        ends.append(consumer.get_watermark_offsets(TopicPartition(topic, 0), SOON_S)[1])
    consumer.close()
    reader.stop()
    made.delete(topic, ends[CUT - 1])
    return made


def read(reader: StreamReader | SnapshotReader, tasks: Any) -> list[Row]:
    return [
        (e.value, e.segment, e.commit_timestamp)
        for rows in seen_by_tasks(reader, tasks)
        for e in rows
    ]


def batch(cut: Cut, *filters: Filter, **options: str) -> list[Row]:
    given = {"bootstrap": cut.bootstrap, "stream": cut.stream} | options
    reader = SnapshotReader(Options(given), EVENT_SCHEMA)
    list(reader.pushFilters(list(filters)))
    return read(reader, reader.partitions())


def everything(reader: StreamReader) -> list[Row]:
    """From the start of its query to the present end."""
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    return read(reader, reader.partitions(start, end))


def test_a_query_that_begins_before_the_cut(cut: Cut, source: Callable[..., StreamReader]) -> None:
    with pytest.raises(SnapshotExpired, match=UNTOLD):
        everything(source(stream=cut.stream))
    assert everything(source(stream=cut.stream, failondataloss="false")) == cut.rows(0, 1, 2, 3, 4)
    assert everything(source(stream=cut.stream, start=str(cut.times[CUT]))) == cut.rows(3, 4)


def test_a_query_that_continues(cut: Cut, source: Callable[..., StreamReader]) -> None:
    for first, strict in ((1, False), (CUT, True), (3, True)):
        reader = source(stream=cut.stream, failondataloss=str(strict).lower())
        tasks = reader.partitions(cut.positions[first], cut.positions[-1])
        assert read(reader, tasks) == cut.rows(*range(first, COMMITS))
    reader = source(stream=cut.stream)
    with pytest.raises(SnapshotExpired, match="failOnDataLoss=false"):
        read(reader, reader.partitions(cut.positions[1], cut.positions[-1]))


def test_a_snapshot_of_a_cut_history_is_refused_unless_loss_is_allowed(
    cut: Cut, source: Callable[..., StreamReader]
) -> None:
    lenient = {"failondataloss": "false"}
    with pytest.raises(SnapshotExpired, match=UNTOLD):
        batch(cut)
    assert batch(cut, **lenient) == cut.rows(0, 1, 2, 3, 4)
    # Filters by what the history still says are safe; others would leave out rows that they may want.
    after = GreaterThanOrEqual(("commit_timestamp",), cut.times[CUT])
    assert batch(cut, after) == cut.rows(2, 3, 4)
    for wide in (EqualTo(("segment",), 0), LessThan(("commit_timestamp",), cut.times[4])):
        with pytest.raises(SnapshotExpired, match=UNTOLD):
            batch(cut, wide)
    assert batch(cut, EqualTo(("segment",), 0), **lenient) == cut.rows(2, 3, 4)
    assert batch(
        cut, GreaterThanOrEqual(("offset",), offset_of(cut, source(stream=cut.stream), CUT))
    ) == cut.rows(2, 3, 4)


def test_events_that_are_gone_together_with_their_history(
    cut: Cut, source: Callable[..., StreamReader]
) -> None:
    """The last test of the stream: what is left of the history can't tell that an event stood there."""
    reader = source(stream=cut.stream)
    cut.delete(stream_topic(cut.stream), offset_of(cut, reader, CUT))
    with pytest.raises(
        SnapshotExpired, match=r"retention removed offsets .* before they were read"
    ):
        reader.partitions(cut.positions[1], cut.positions[-1])
    assert read(reader, reader.partitions(cut.positions[CUT], cut.positions[-1])) == cut.rows(
        2, 3, 4
    )
    assert batch(cut) == cut.rows(2, 3, 4)
    # A query that begins now has lost nothing.
    assert everything(reader) == cut.rows(2, 3, 4)


def offset_of(cut: Cut, reader: StreamReader, number: int) -> int:
    """The place of a commit's event."""
    (task,) = reader.partitions(cut.positions[number], cut.positions[number + 1])
    assert isinstance(task, EventRange)
    after = from_json(cut.positions[number + 1])[cut.stream].vector[0]
    assert task.first < task.end == after
    return after - 1
