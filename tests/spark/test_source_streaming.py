"""Streaming source: what is committed, once and in order, whatever the limits, and across restarts."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

import anabranch
from anabranch.errors import SnapshotExpired, UnknownStream
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.spark.source.histories import HistoryTail
from anabranch.spark.source.plan import EventRange
from anabranch.spark.source.positions import from_json
from anabranch.spark.source.stream_reader import StreamReader
from anabranch.topics.names import stream_topic
from tests.cluster import Cluster
from tests.spark.source_world import Seen, World, in_key_order, seen_by_spark, seen_by_tasks
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

SOON_S = 60


# -- the planner's side, and what its tasks read, without Spark ---------------------------------------------


def read(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[list[Seen]]:
    """The rows of each task between two positions."""
    return seen_by_tasks(reader, reader.partitions(start, end))


def micro_batches(reader: StreamReader, start: dict[str, Any] | None = None) -> list[list[Seen]]:
    """All there is, as Spark would get it."""
    position = reader.initialOffset() if start is None else start
    found = []
    while (end := reader.latestOffset(position, reader.getDefaultReadLimit())) != position:
        found.append([event for task in read(reader, position, end) for event in task])
        position = end
    return found


def moved(reader: StreamReader, position: dict[str, Any]) -> dict[str, Any]:
    """The end of the next event's micro-batch, which may become visible after its commit is answered."""
    until = time.monotonic() + SOON_S
    while (end := reader.latestOffset(position, ReadMaxRows(1))) == position:
        assert time.monotonic() < until
    return end


def commits(batch: list[Seen]) -> dict[int | None, int]:
    """Commit timestamp -> events of it."""
    found: dict[int | None, int] = {}
    for event in batch:
        found[event.commit_timestamp] = found.get(event.commit_timestamp, 0) + 1
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"maxeventspertrigger": 100}, marks=pytest.mark.soak),
        pytest.param({"maxeventspertrigger": 350}, marks=pytest.mark.soak),
        {"maxeventspertrigger": 10, "transactions": "whole"},
        pytest.param({"order": "epoch"}, marks=pytest.mark.soak),
        {"order": "epoch", "maxeventspertrigger": 10, "transactions": "whole"},
        pytest.param({"maxeventspertrigger": 100, "rowsperpartition": 7}, marks=pytest.mark.soak),
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "no options",
)
def test_every_event_once_whole_commits_in_commit_order(
    world: World, source: Callable[..., StreamReader], options: dict[str, Any]
) -> None:
    batches = micro_batches(source(**options))
    assert sorted(e for b in batches for e in b) == sorted(world.expected)
    sizes = commits(world.expected)
    most = options.get("maxeventspertrigger", 1 << 30)
    whole = options.get("transactions") == "whole"
    last = 0
    for batch in batches:
        found = commits(batch)
        assert len(batch) <= most or (whole and len(found) == 1)
        parts = [t for t, count in found.items() if count < sizes[t]]
        assert parts == [] or (
            not whole and len(found) <= 2 and all(sizes[t] > most for t in parts)
        )
        assert min(t or 0 for t in found) >= last
        last = max(t or 0 for t in found)
    if "maxeventspertrigger" not in options and "order" not in options:
        assert len(batches) == 1


@pytest.mark.soak
def test_epochs_end_micro_batches(world: World, source: Callable[..., StreamReader]) -> None:
    reader = source(order="epoch", stream=world.events)
    batches = micro_batches(reader)
    # Created, scaled, rolled and back, scaled: what comes one after the other is in the order of all keys.
    epochs = [{(event.segment or 0) >> 32 for event in batch} for batch in batches]
    assert epochs == [{0}, {1}, {2}, {3}, {4}]
    for batch in batches:
        holders: dict[bytes | None, set[int | None]] = {}
        for event in batch:
            if event.key:
                holders.setdefault(event.key, set()).add(event.segment)
        assert all(len(segments) == 1 for segments in holders.values())
    assert in_key_order(event for batch in batches for event in batch)
    # All of a partition is one task's, in the order of its offsets.
    reader = source(order="epoch", stream=world.events, rowsperpartition=2)
    position = reader.initialOffset()
    tasks = reader.partitions(position, reader.latestOffset(position, reader.getDefaultReadLimit()))
    assert len({t.partition for t in tasks if isinstance(t, EventRange)}) == len(tasks) == 2


@pytest.mark.parametrize(
    "number", [4, *(pytest.param(number, marks=pytest.mark.soak) for number in (0, 11))]
)
def test_start_after_a_result(
    world: World, source: Callable[..., StreamReader], number: int
) -> None:
    at = world.results[number].commit_timestamp
    batches = micro_batches(source(start=at, maxeventspertrigger=50))
    wanted = [event for event in world.expected if (event.commit_timestamp or 0) > at]
    assert sorted(e for b in batches for e in b) == sorted(wanted)


def test_start_at_the_end_is_kept_at_once(
    world: World, source: Callable[..., StreamReader]
) -> None:
    reader = source(start="end")
    start = reader.initialOffset()
    first = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert first != start  # Spark logs it, and a restart does not begin at a later end
    assert reader.partitions(start, first) == []
    assert reader.latestOffset(first, reader.getDefaultReadLimit()) == first


def test_a_query_continues_from_any_batch_s_position(
    world: World, source: Callable[..., StreamReader]
) -> None:
    """As after a restart: another planner, and Spark asks for the last batch's ranges again."""
    position = source().initialOffset()
    found: list[Seen] = []
    for _ in range(12):
        reader = source(maxeventspertrigger=80)
        end = reader.latestOffset(position, reader.getDefaultReadLimit())
        again = source(maxeventspertrigger=80)
        assert again.partitions(position, end) == reader.partitions(position, end)
        found += [event for task in read(again, position, end) for event in task]
        position = end
        reader.stop()
        again.stop()
    found += [event for batch in micro_batches(source(), position) for event in batch]
    assert sorted(found) == sorted(world.expected)


@pytest.mark.soak
def test_streams_of_several_scopes(
    world: World, source: Callable[..., StreamReader], client: anabranch.Client, unique: str
) -> None:
    far = f"t{unique}/far"
    client.create_stream(far)
    for i in range(3):
        with client.begin(f"t{unique}") as txn:
            txn.write(far, b"f:%d" % i, key=b"f")
            txn.commit()
    assert len(list(client.snapshot(far).read(far))) == 3  # by now anybody sees them
    batches = micro_batches(source(streams=f"{far},{world.other}", maxeventspertrigger=20))
    found = [event for batch in batches for event in batch]
    assert [event.value for event in found if event.stream == far] == [b"f:0", b"f:1", b"f:2"]
    others = sorted(event for event in found if event.stream != far)
    assert others == sorted(event for event in world.expected if event.stream == world.other)


@pytest.mark.soak
def test_the_end_of_a_long_history_is_found_without_reading_it(
    world: World, source: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = source().latestOffset(source().initialOffset(), ReadAllAvailable())
    reader = source()
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.spark.source.stream_reader._FAR", 5)
        patch.setattr(HistoryTail, "peek", lambda _: pytest.fail("a record is read"))
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end == walked
    assert reader.latestOffset(end, ReadAllAvailable()) is end


@pytest.mark.soak
def test_what_retention_removed(
    cluster: Cluster, source: Callable[..., StreamReader], client: anabranch.Client, unique: str
) -> None:
    stream = f"s{unique}/short"
    client.create_stream(stream)
    options = {"streams": stream, "maxeventspertrigger": 1}
    places = [source(**options).initialOffset()]
    for i in range(4):
        with client.begin(f"s{unique}") as txn:
            txn.write(stream, b"%d" % i)
            txn.commit()
        places.append(moved(source(**options), places[-1]))
    ends = [from_json(at)[stream].vector.get(0, 0) for at in places]

    def remove(before: int) -> None:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        place = TopicPartition(stream_topic(stream), 0, before)
        for future in admin.delete_records([place]).values():
            future.result(SOON_S)

    # The marker of the first one is gone too; who has read that one lost nothing.
    remove(ends[1] + 1)
    reader = source(**options)
    found = [e.value for task in read(reader, places[1], places[4]) for e in task]
    assert found == [b"1", b"2", b"3"]
    remove(ends[4] - 1)
    with pytest.raises(SnapshotExpired, match="failOnDataLoss=false") as raised:
        reader.partitions(places[1], places[4])
    lost = f"{ends[1] + 1} to {ends[4] - 2} before they were read"
    assert f"{stream}, partition 0: retention removed offsets {lost}" in str(raised.value)
    lenient = source(**options, failondataloss="false")
    assert [e.value for task in read(lenient, places[1], places[4]) for e in task] == [b"3"]
    assert lenient.partitions(places[0], places[1]) == []
    # Events that were gone before the query began are no loss.
    assert [[e.value for e in batch] for batch in micro_batches(source(**options))] == [[b"3"]]


def write(client: anabranch.Client, stream: str, *values: bytes) -> None:
    """A commit each."""
    for value in values:
        with client.begin(stream.partition("/")[0]) as txn:
            txn.write(stream, value)
            txn.commit()
    with client.read(
        stream, timeout=SOON_S
    ) as reader:  # a commit is answered before its events are visible
        assert all(next(reader).value for _ in values)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(0, marks=pytest.mark.soak),
        pytest.param(2, marks=pytest.mark.long),
        3,
        pytest.param(7, marks=pytest.mark.soak),
    ],
    ids=["empty", "shorter", "equal", "longer"],
)
def test_a_checkpoint_is_of_its_own_stream_alone(
    cluster: Cluster,
    client: anabranch.Client,
    source: Callable[..., StreamReader],
    monkeypatch: pytest.MonkeyPatch,
    unique: str,
    count: int,
) -> None:
    """A stream that is made again under its name is not read, whichever part of the source meets it first."""
    monkeypatch.setattr("anabranch.spark.source.histories._CHECK_S", 0.0)
    stream, other = f"s{unique}/again", f"s{unique}/other"
    for made in (stream, other):
        client.create_stream(made)
        write(client, made, b"1", b"2", b"3")
    options = {"streams": f"{stream},{other}"}
    strict, target = source(**options), source(**options)
    lenient = source(**options, failondataloss="false")
    begin = strict.initialOffset()
    place = moved(strict, begin)
    end = strict.latestOffset(place, ReadAllAvailable())
    assert len(micro_batches(lenient)) == 1
    planned = strict.partitions(begin, end)
    target.prepareForTriggerAvailableNow()
    with anabranch.connect(cluster.bootstrap, lane=ADMIN_LANE) as operator:
        operator.delete_stream(stream)
    client.create_stream(stream)
    new = [b"new %d" % n for n in range(count)]
    write(client, stream, *new)
    anew = source(**options)

    def whole(reader: StreamReader) -> None:
        read(reader, end, reader.latestOffset())

    def all_now(reader: StreamReader) -> None:
        reader.prepareForTriggerAvailableNow()
        reader.latestOffset(end, ReadAllAvailable())

    for use in (
        lambda: anew.latestOffset(end, ReadAllAvailable()),
        lambda: anew.latestOffset(begin, ReadMaxRows(1)),
        lambda: all_now(anew),
        lambda: strict.latestOffset(end, ReadAllAvailable()),
        lambda: target.latestOffset(end, ReadAllAvailable()),
        lambda: source(**options).partitions(place, end),
        lambda: whole(source(**options)),
    ):
        began = time.monotonic()
        with pytest.raises(UnknownStream, match=f"former stream {stream}.*failOnDataLoss=false"):
            use()
        assert time.monotonic() - began < SOON_S / 6
    for task in planned:
        if isinstance(task, EventRange) and task.stream == stream:
            with pytest.raises(UnknownStream, match="another one"):
                list(strict.read(task))
    for reader in (lenient, source(**options, failondataloss="false")):
        batches = micro_batches(reader, end)
        assert [event.value for batch in batches for event in batch] == new
        assert all(event.stream == stream for batch in batches for event in batch)
        left = reader.partitions(begin, place)  # as for a batch that was interrupted
        assert all(isinstance(task, EventRange) and task.stream == other for task in left)
        assert [e.value for task in read(reader, end, reader.latestOffset()) for e in task] == new


@pytest.mark.soak
def test_stop_frees_all_connections(world: World, source: Callable[..., StreamReader]) -> None:
    def connections() -> int:
        gc.collect()  # what others have left is not closed in between
        files = Path("/proc/self/fd").iterdir()
        return sum("socket" in str(path.readlink()) for path in files if path.is_symlink())

    before = connections()
    reader = source()
    assert len(micro_batches(reader)) == 1
    assert connections() > before
    reader.stop()
    assert connections() <= before


# -- queries -------------------------------------------------------------------------------------------------


class Queries:
    """Queries of one checkpoint, and what their micro-batches had, by id."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self.batches: dict[int, list[Seen]] = {}
        self._lock = threading.Lock()

    @property
    def events(self) -> list[Seen]:
        with self._lock:
            return [event for _, batch in sorted(self.batches.items()) for event in batch]

    def start(self, trigger: dict[str, Any], **options: Any) -> StreamingQuery:
        def take(frame: DataFrame, number: int) -> None:
            found = seen_by_spark(frame)
            with self._lock:
                self.batches[number] = found

        frame = self._spark.readStream.format("anabranch").options(**options).load()
        writer = frame.writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        return writer.trigger(**trigger).start()

    def run(self, trigger: dict[str, Any], **options: Any) -> StreamingQuery:
        query = self.start(trigger, **options)
        assert query.awaitTermination(SOON_S)
        return query

    def wait_for(self, query: StreamingQuery, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or query.exception())
        assert query.exception() is None


@pytest.mark.soak
def test_the_end_at_which_a_query_began_is_kept(
    spark: SparkSession, tmp_path: Path, client: anabranch.Client, bootstrap: str, unique: str
) -> None:
    small = World(bootstrap, client, f"end{unique}")
    client.create_stream(small.events, segments=2)
    client.create_stream(small.other)
    small.commit(5)
    small.read()  # the end is after the markers, which may be late
    queries = Queries(spark, tmp_path)
    options = {"bootstrap": bootstrap, "stream": small.events, "start": "end"}
    queries.run({"availableNow": True}, **options)
    assert queries.events == []
    after = small.commit(7).commit_timestamp  # while no query reads
    small.read()
    queries.run({"availableNow": True}, **options)
    assert sorted(queries.events) == sorted(e for e in small.read() if e.commit_timestamp == after)


@pytest.mark.soak
def test_available_now_and_again(
    spark: SparkSession, tmp_path: Path, client: anabranch.Client, bootstrap: str, unique: str
) -> None:
    """Triggers that end by themselves, on one checkpoint: what is there, what is new, and what is not limited."""
    small = World(bootstrap, client, f"now{unique}")
    client.create_stream(small.events, segments=2)
    client.create_stream(small.other)
    for _ in range(6):
        small.commit(20, others=5)
    options = {"bootstrap": bootstrap, "streams": f"{small.events},{small.other}"}
    queries = Queries(spark, tmp_path)
    small.read()
    query = queries.run({"availableNow": True}, **options, maxEventsPerTrigger=40)
    assert sorted(queries.events) == sorted(small.read())
    assert [len(batch) for _, batch in sorted(queries.batches.items())] == [40, 40, 40]
    (progress,) = query.recentProgress[-1].sources
    assert from_json(json.loads(progress.endOffset or "")) == from_json(
        json.loads(progress.latestOffset or "")
    )

    client.scale(small.events, segments=5)  # new partitions
    for _ in range(3):
        small.commit(20)
    small.read()
    queries.run({"availableNow": True}, **options, maxEventsPerTrigger=40)
    assert sorted(queries.events) == sorted(small.read())
    assert sorted(queries.batches) == [0, 1, 2, 3, 4]

    for _ in range(3):
        small.commit(20)
    small.read()
    queries.run({"once": True}, **options, maxEventsPerTrigger=1)
    assert sorted(queries.events) == sorted(small.read())
    assert len(queries.batches[5]) == 60


@pytest.mark.soak
def test_each_key_in_order_while_the_stream_is_scaled(
    spark: SparkSession, tmp_path: Path, client: anabranch.Client, bootstrap: str, unique: str
) -> None:
    small = World(bootstrap, client, f"live{unique}")
    client.create_stream(small.events, segments=2)
    client.create_stream(small.other)
    queries = Queries(spark, tmp_path)
    options = {"bootstrap": bootstrap, "stream": small.events, "order": "epoch"}
    query = queries.start({"processingTime": "0 seconds"}, **options)
    try:
        for segments in (5, 1, 3):
            old = client.begin(small.scope)
            old.token()
            small.write(old, small.events, 30, "r")
            old.flush()
            small.commit(20)
            client.scale(small.events, segments=segments)
            small.commit(20)
            old.commit()  # rolls
            small.commit(20)
            wanted = len(small.read())
            queries.wait_for(query, lambda: len(queries.events) >= wanted)  # noqa: B023
    finally:
        query.stop()
    assert sorted(queries.events) == sorted(small.read())
    assert in_key_order(queries.events)
    assert len({(event.segment or 0) >> 32 for event in queries.events}) >= 7


@pytest.mark.long
def test_an_error_of_the_planner_ends_the_query(
    spark: SparkSession, tmp_path: Path, bootstrap: str
) -> None:
    queries = Queries(spark, tmp_path)
    query = queries.start({"availableNow": True}, bootstrap=bootstrap, stream="source/missing")
    with pytest.raises(StreamingQueryException, match="UnknownStream: there is no stream"):
        query.awaitTermination(SOON_S)
