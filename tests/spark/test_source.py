"""Batch source: a snapshot of streams, whole or filtered, however it is cut; compared with `client.read`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual

import anabranch
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, UnknownScope, UnknownStream
from anabranch.protocol.hybrid_time import to_datetime
from anabranch.protocol.ids import segment_epoch
from anabranch.reading.event_columns import PLACES
from anabranch.reading.ranges import RangeReader
from anabranch.spark.columns import EVENT_SCHEMA, chosen
from anabranch.spark.options import Options
from anabranch.spark.source.plan import EventRange
from anabranch.spark.source.reader import SnapshotReader
from tests.plain_reader import read_all
from tests.spark.source_world import Seen, World, in_key_order, seen_by_spark

pytestmark = pytest.mark.broker

Load = Callable[..., DataFrame]


@pytest.fixture
def load(spark: SparkSession, world: World) -> Load:
    def frame(**options: Any) -> DataFrame:
        given = {"bootstrap": world.bootstrap, "streams": f"{world.events},{world.other}"} | options
        return spark.read.format("anabranch").options(**given).load()

    return frame


def test_all_columns_of_all_events(load: Load, world: World) -> None:
    frame = load()
    assert frame.schema == EVENT_SCHEMA
    found = seen_by_spark(frame)
    assert sorted(found) == sorted(world.expected)
    by_value = {event.value: event for event in found if event.key in (b"-", b"", None)}
    assert by_value[b"-:0"].headers == (("h", b"1"), ("h", None), ("ünicode", b""))
    assert by_value[b"-:0"].timestamp == 1_600_000_000_123
    assert {event.txn_id for event in found if event.key == b"plain"} == {None}
    assert len({event.segment for event in found if event.stream == world.events}) > 10


@pytest.mark.soak
def test_a_plain_consumer_sees_the_same(load: Load, world: World) -> None:
    for stream in (world.events, world.other):
        rows = sorted(e for e in seen_by_spark(load(streams=None, stream=stream)))
        assert [(e.value, e.key, e.headers, e.timestamp) for e in rows] == [
            tuple(seen) for seen in read_all(world.bootstrap, stream)
        ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"rowsPerPartition": 30}, marks=pytest.mark.soak),
        pytest.param({"minPartitions": 12}, marks=pytest.mark.long),
        pytest.param({"rowsPerPartition": 5000}, marks=pytest.mark.soak),
    ],
)
def test_however_it_is_cut(load: Load, world: World, options: dict[str, int]) -> None:
    frame = load(**options)
    wanted = {"rowsPerPartition=30": 15, "minPartitions=12": 12, "rowsPerPartition=5000": 1}
    (case,) = (f"{name}={value}" for name, value in options.items())
    assert frame.rdd.getNumPartitions() >= wanted[case]
    assert sorted(seen_by_spark(frame)) == sorted(world.expected)


@pytest.mark.parametrize(
    "number",
    [
        3,
        pytest.param(-2, marks=pytest.mark.long),
        *(pytest.param(number, marks=pytest.mark.soak) for number in (0, 11)),
    ],
)
def test_as_of_a_result(load: Load, world: World, number: int) -> None:
    at = world.results[number].commit_timestamp
    wanted = sorted(e for e in world.expected if (e.commit_timestamp or 0) <= at)
    assert sorted(seen_by_spark(load(at=at))) == wanted
    moment = (to_datetime(at) + timedelta(microseconds=1)).isoformat()
    assert load(at=moment).count() == len(wanted)


@pytest.mark.parametrize("mode", ["snapshot", pytest.param("latest", marks=pytest.mark.soak)])
def test_a_load_since_a_time_has_the_later_events(load: Load, world: World, mode: str) -> None:
    since, at = (world.results[i].commit_timestamp for i in (3, -2))
    found = sorted(seen_by_spark(load(since=since, at=at, mode=mode)))
    assert found == sorted(e for e in world.expected if since < (e.commit_timestamp or 0) <= at)
    newer = [e for e in world.expected if (e.commit_timestamp or 0) > at]
    assert load(since=at, mode=mode).count() == len(newer)


# -- filters ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_filters_leave_what_spark_would_leave(load: Load, world: World) -> None:
    early, late = (world.results[i].commit_timestamp for i in (4, 10))
    segments = sorted({e.segment for e in world.expected if e.segment})
    some = (segments[2], segments[-1])
    cases: list[tuple[Any, Callable[[Seen], bool]]] = [
        (F.col("stream") == world.other, lambda e: e.stream == world.other),
        (F.col("partition").isin(0, 2), lambda e: e.partition in (0, 2)),
        (F.col("partition") != 0, lambda e: e.partition != 0),
        (F.col("offset").between(10, 40), lambda e: 10 <= e.offset <= 40),
        (F.col("offset").isin(3, 30), lambda e: e.offset in (3, 30)),
        (F.col("commit_timestamp") > early, lambda e: (e.commit_timestamp or 0) > early),
        (
            F.col("commit_timestamp").between(early, late),
            lambda e: early <= (e.commit_timestamp or 0) <= late,
        ),
        (F.col("commit_timestamp") == late, lambda e: e.commit_timestamp == late),
        (F.col("segment").isin(*some), lambda e: e.segment in some),
        (
            (F.col("segment") == some[0]) & (F.col("key") == b"k3") & (F.col("offset") > 20),
            lambda e: e.segment == some[0] and e.key == b"k3" and e.offset > 20,
        ),
        (F.col("timestamp") < F.timestamp_millis(F.lit(2)), lambda e: e.timestamp < 2),
    ]
    frame = load()
    for condition, holds in cases:
        wanted = sorted(event for event in world.expected if holds(event))
        assert wanted, condition
        assert sorted(seen_by_spark(frame.where(condition))) == wanted, condition


@pytest.mark.soak
def test_what_filters_leave_out_is_not_read(
    world: World, client: anabranch.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.spark.source.reader.client_of", lambda _: client)

    def planned(world: World, *filters: Filter) -> list[EventRange]:
        """The ranges that tasks would read."""
        options = {"bootstrap": world.bootstrap, "streams": f"{world.events},{world.other}"}
        reader = SnapshotReader(Options(options), EVENT_SCHEMA)
        assert list(reader.pushFilters(list(filters))) == []
        return [task for task in reader.partitions() if isinstance(task, EventRange)]

    def offsets(ranges: list[EventRange]) -> int:
        return sum(found.end - found.first for found in ranges)

    everything = planned(world)
    assert len(everything) == 5
    assert [f.stream for f in planned(world, EqualTo(("stream",), world.other))] == [world.other]
    assert {f.partition for f in planned(world, In(("partition",), (1, 3)))} == {1, 3}
    assert planned(world, EqualTo(("stream",), "source/none")) == []
    assert [
        (f.first, f.end)
        for f in planned(world, EqualTo(("stream",), world.other), EqualTo(("offset",), 30))
    ] == [(30, 31)]

    first, big = (world.results[i].commit_timestamp for i in (0, -2))
    assert offsets(planned(world, LessThanOrEqual(("commit_timestamp",), first))) <= 8
    assert offsets(planned(world, GreaterThan(("commit_timestamp",), big))) < 30
    (last,) = {e.commit_timestamp for e in world.expected if e.value == b"p:9"}
    only = planned(world, EqualTo(("commit_timestamp",), last))
    assert [found.stream for found in only] == [world.other]
    assert offsets(only) <= 11  # and a marker before

    # Each segment of a rolling commit is found, from its start to its end.
    rolled = {e.segment for e in world.expected if e.key is not None and e.key.startswith(b"r")}
    (epoch,) = {segment_epoch(segment or 0) for segment in rolled}
    ranges = planned(world, In(("segment",), tuple(rolled)))
    assert epoch == 2
    assert len(ranges) == len(rolled) == 2
    assert 30 <= offsets(ranges) < 36


# -- what may be missing, or wrong ----------------------------------------------------------------------------


def test_a_stream_without_events(
    load: Load, world: World, client: anabranch.Client, unique: str
) -> None:
    client.create_stream(f"{world.scope}/empty{unique}", segments=3)
    assert load(streams=None, stream=f"{world.scope}/empty{unique}").collect() == []
    assert load(at=world.results[0].commit_timestamp - (1 << 40)).collect() == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"streams": "source/missing"}, UnknownStream, "there is no stream"),
        ({"streams": "source/events,nyc/flights"}, UnknownScope, "nyc"),
        ({"streams": ""}, InvalidArgument, "give option stream=scope/name"),
        ({"at": "yesterday"}, InvalidArgument, "option at='yesterday': a commit timestamp"),
        ({"since": "then"}, InvalidArgument, "option since='then': a commit timestamp"),
        ({"since": str(7 << 60), "at": str(5 << 60)}, InvalidArgument, "later than"),
        ({"mode": "newest"}, InvalidArgument, "option mode='newest': one of snapshot, latest"),
        ({"rowsperpartition": "0"}, InvalidArgument, "a whole number, 1 or more"),
        ({"columns": "key,valu"}, InvalidArgument, "no column valu; there are key, value"),
        ({"at": "5", "end": "5"}, InvalidArgument, "options at and end mean the same"),
        ({"colour": "red"}, InvalidArgument, "unknown option colour; there are at, bootstrap"),
        ({"bootstrap": "127.0.0.1:1", "timeout": "1"}, NotReady, ""),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_errors_say_what_to_do(
    own_clients: None, world: World, options: dict[str, str], error: type[AnabranchError], says: str
) -> None:
    given = {"bootstrap": world.bootstrap, "streams": f"{world.events},{world.other}"} | options
    with pytest.raises(error) as raised:
        SnapshotReader(Options(given), chosen(Options(given))).partitions()
    assert says in str(raised.value)


def test_errors_come_through_spark_by_name(load: Load) -> None:
    with pytest.raises(
        PySparkException, match=r"anabranch\.errors\.UnknownStream: .*there is no stream"
    ):
        load(streams="source/missing").collect()


@pytest.mark.soak
def test_another_schema_is_refused(spark: SparkSession, world: World) -> None:
    reader = spark.read.format("anabranch").option("bootstrap", world.bootstrap)
    reader = reader.option("stream", world.other)
    with pytest.raises(PySparkException, match=r"leave schema\(\) out"):
        reader.schema("key string, value string").load().collect()
    # Ours is taken, whatever may be null there.
    ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in EVENT_SCHEMA)
    rows = reader.schema(ddl.replace("timestamp timestamp", "timestamp TIMESTAMP")).load()
    assert rows.count() == sum(event.stream == world.other for event in world.expected)


@pytest.mark.soak
def test_order_within_a_task(load: Load, world: World) -> None:
    tasks = load().rdd.glom().collect()
    for rows in tasks:
        assert [row["offset"] for row in rows] == sorted(row["offset"] for row in rows)
    assert in_key_order(e for e in world.expected)


# -- option columns: by the history alone where it suffices ------------------------------------------------------


def rows(world: World, **given: Any) -> list[tuple[Any, ...]]:
    """The rows of all tasks, without Spark."""
    streams = f"{world.events},{world.other}"
    options = Options(
        {name: str(v) for name, v in given.items()}
        | {"bootstrap": world.bootstrap, "streams": streams}
    )
    reader = SnapshotReader(options, chosen(options))
    return [
        tuple(row.values())
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]


def expected(events: list[Seen], columns: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(event, name) for name in columns.split(",")) for event in events]


@pytest.mark.parametrize(
    "cut",
    [{}, pytest.param({"rowsperpartition": 7}, marks=pytest.mark.soak)],
    ids=["whole", "in sevens"],
)
@pytest.mark.parametrize(
    ("columns", "fetched"),
    [
        (",".join(PLACES), None),  # where a marker lies among events, these are
        ("commit_timestamp,partition,txn_id", False),
        ("value,offset", True),
    ],
)
def test_fewer_columns_of_the_same_rows(
    world: World,
    columns: str,
    fetched: bool | None,
    cut: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    fetch = RangeReader._fetch

    def spied(self: RangeReader, *args: Any) -> Any:
        asked.append(args)
        return fetch(self, *args)

    monkeypatch.setattr(RangeReader, "_fetch", spied)
    low, high = (world.results[i].commit_timestamp for i in (3, -2))
    found = rows(world, columns=columns, **cut)
    part = rows(world, columns=columns, start=low, end=high, **cut)
    if fetched is not None and not cut:
        assert bool(asked) == fetched
    assert sorted(found, key=repr) == sorted(expected(world.expected, columns), key=repr)
    between = [e for e in world.expected if low < (e.commit_timestamp or 0) <= high]
    assert sorted(part, key=repr) == sorted(expected(between, columns), key=repr)


@pytest.mark.soak
def test_rows_with_fewer_columns_are_counted_by_spark(load: Load, world: World) -> None:
    frame = load(columns="stream")
    assert frame.columns == ["stream"]
    found = {row.stream: row["count"] for row in frame.groupBy("stream").count().collect()}
    assert found == {
        name: sum(e.stream == name for e in world.expected) for name in (world.events, world.other)
    }
