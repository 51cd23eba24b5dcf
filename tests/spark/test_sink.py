"""``df.write`` and ``df.writeStream``: each batch once, whole, or not at all, and nothing stays staged.

On a real broker; what is visible is asked of a plain read_committed consumer.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

import anabranch
from anabranch.errors import (
    AlreadyCommitted,
    InvalidArgument,
    InvariantViolation,
    NotReady,
    OutcomeUnknown,
    TransactionAborted,
)
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import LOCAL_DIRS, BatchSink, NothingWritten, StreamSink, Written
from tests.cluster import start_cluster
from tests.conftest import Broker
from tests.spark.sink_place import (
    DEADLINE_S,
    Place,
    numbers,
    place_in,
    put_file,
    stream_files,
    texts,
)

pytestmark = pytest.mark.broker

COLUMNS = pa.schema([("key", pa.string()), ("value", pa.string())])
HOURS_S = "36000"
QUERY = {"checkpointlocation": "/checkpoints/a"}
OTHER_QUERY = {"checkpointlocation": "/checkpoints/b"}
SCHEMA = StructType([StructField("key", StringType()), StructField("value", StringType())])


# -- a batch --------------------------------------------------------------------------------------------


def test_a_batch_is_one_transaction(spark: SparkSession, place: Place) -> None:
    place.save(numbers(spark, 1000, 4))
    assert place.values() == texts(1000)
    (info,) = place.transactions()
    assert (info.state, info.counts.committed) == ("COMMITTED", 1000)
    assert len(place.client.state(info.txn_id).writers) == 4


@pytest.mark.parametrize(
    "suffix",
    [pytest.param("", marks=pytest.mark.long), pytest.param("near", marks=pytest.mark.soak)],
    ids=["of one scope", "of two scopes"],
)
def test_several_streams_in_one_transaction(spark: SparkSession, place: Place, suffix: str) -> None:
    place.client.create_stream(f"{place.scope}{suffix}/other", 3, near=place.scope)
    other = place_in(place.bootstrap, place.client, f"{place.scope}{suffix}", name="other")
    rows = numbers(spark, 100).withColumn(
        "stream", F.when(F.col("value") < "5", place.stream).otherwise(other.stream)
    )
    place.save(rows, stream=None, scope=place.scope)
    place.save(rows.withColumn("key", F.lit(1)), stream=None, scope=place.scope, encoding="json")
    assert sorted(place.values() + other.values()) == sorted(
        texts(100) + [b'{"key":1,"value":"%d"}' % i for i in range(100)]
    )
    assert all(value < b"5" for value in place.values() if value.isdigit())
    assert [info.counts.committed for info in place.transactions()] == [100, 100]


@pytest.mark.long
def test_without_a_row_nothing_is_begun(spark: SparkSession, place: Place) -> None:
    place.save(numbers(spark, 100).where("value = 'x'"), name="nothing")
    assert place.transactions() == []
    place.save(numbers(spark, 3), name="nothing")  # so the name is free
    assert place.values() == texts(3)


@pytest.mark.long
def test_a_name_is_committed_once(spark: SparkSession, place: Place) -> None:
    place.save(numbers(spark, 1000), name="2025-01-01")
    place.save(numbers(spark, 50_000, start=7), name="2025-01-01")  # other rows, and more
    place.save(numbers(spark, 10, start=5000), name="2025-01-02")
    assert place.values() == sorted(texts(1000) + texts(10, 5000))
    assert [info.state for info in place.transactions()] == ["COMMITTED"] * 2  # no third one


def test_a_failed_job_leaves_nothing(spark: SparkSession, place: Place) -> None:
    late = F.when(F.col("value") == "4999", F.raise_error(F.lit("no such flight")))
    rows = numbers(spark, 5000).withColumn("value", late.otherwise(F.col("value")))
    with pytest.raises(PySparkException, match="no such flight"):
        place.save(rows)
    assert place.values() == []
    place.nothing_staged()
    assert {(i.state, i.reason) for i in place.transactions()} <= {
        ("ABORTED", "Spark aborted the job"),
        ("ABORTED", "it was resolved before any other command of it arrived"),  # no task began it
    }


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_a_task_that_waits_for_rows_keeps_the_transaction(
    spark: SparkSession, place: Place
) -> None:
    """One task ends at once; the other has its first row when the keepalive has passed twice."""

    def slow_half(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if "0" not in batch.column("value").to_pylist():
                time.sleep(7)
            yield batch

    rows = numbers(spark, 100)
    place.save(rows.mapInArrow(slow_half, rows.schema), keepalive=3)
    assert place.values() == texts(100)


@pytest.mark.soak
def test_spark_keeps_the_log_of_its_workers(spark: SparkSession, place: Place) -> None:
    """Spark's table of its Python workers' log has a line for each commit, if it is turned on."""
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        place.save(numbers(spark, 20))
        logs = spark.tvf.python_worker_logs().where("logger = 'anabranch.spark'")
        lines = [row.msg for row in logs.select("msg").collect()]
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    (info,) = place.transactions()
    assert f"committed 20 events in transaction {info.txn_id.hex()}" in lines


# -- micro-batches --------------------------------------------------------------------------------------


@pytest.mark.long
def test_each_micro_batch_is_a_transaction(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    for i, lines in enumerate((100, 0, 300)):
        put_file(tmp_path, i, lines, 1000 * i)
    query = stream_files(spark, place, tmp_path)
    assert query.exception() is None
    assert place.values() == sorted(texts(100) + texts(300, 2000))
    assert [info.counts.committed for info in place.transactions()] == [300, 100]  # newest first
    assert [p.sink.numOutputRows for p in query.recentProgress if p.numInputRows] == [100, 300]

    put_file(tmp_path, 3, 5, 9000)
    again = stream_files(spark, place, tmp_path)
    assert (again.id, again.exception()) == (query.id, None)
    assert place.values() == sorted(texts(100) + texts(300, 2000) + texts(5, 9000))


def test_a_replayed_micro_batch_has_one_effect(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    """Spark forgets that batches 1 and 2 are done, and finds other rows in their files."""
    for i in range(3):
        put_file(tmp_path, i, 100, 1000 * i)
    stream_files(spark, place, tmp_path)
    for i in (1, 2):
        for suffix in (f"{i}", f".{i}.crc"):
            (tmp_path / "checkpoint" / "commits" / suffix).unlink()
    for i in (1, 2):
        put_file(tmp_path, i, 200, 5000 * i)
    put_file(tmp_path, 3, 7, 9000)
    query = stream_files(spark, place, tmp_path)
    assert query.exception() is None
    expected = texts(100) + texts(100, 1000) + texts(100, 2000) + texts(7, 9000)
    assert place.values() == sorted(expected)
    place.nothing_staged()


@pytest.mark.soak
def test_foreach_batch_is_exactly_once_by_name(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    """As docs/spark.md says, with a crash between the write and Spark's own commit."""
    crash = [True]

    def write(batch: DataFrame, batch_id: int) -> None:
        place.save(batch, name=f"orders/{batch_id}")
        if batch_id == 1 and crash:
            crash.clear()
            raise RuntimeError("crashed after the write")

    for i in range(3):
        put_file(tmp_path, i, 10, 100 * i)
    for ended in ("crashed", "done"):
        source = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
        query = (
            source.text(str(tmp_path / "in"))
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        if ended == "crashed":
            with pytest.raises(PySparkException, match="crashed after the write"):
                query.awaitTermination(int(DEADLINE_S))
        else:
            assert query.awaitTermination(int(DEADLINE_S))
    assert place.values() == sorted(texts(10) + texts(10, 100) + texts(10, 200))


# -- the commit -----------------------------------------------------------------------------------------


def attempt(
    sink: BatchSink | StreamSink, count: int, start: int = 0, query_id: str = "q", batch_id: int = 4
) -> Written:
    """A task attempt of this sink, as Spark runs it: on a copy. Batch sinks ignore the query and its batch."""
    copy = pickle.loads(pickle.dumps(sink))
    columns = [[str(i) for i in range(start, start + count)]] * 2
    rows = pa.record_batch([pa.array(column) for column in columns], COLUMNS)
    written = copy._target.write(copy._reservation, iter([rows]), streaming=False)
    assert isinstance(written, Written)
    return replace(written, query_id=query_id, batch_id=str(batch_id))


def batch_sink(place: Place, **options: str) -> BatchSink:
    given = {"bootstrap": place.bootstrap, "stream": place.stream} | options
    return BatchSink(Options(given), SCHEMA, False)


def stream_sink(place: Place, **options: str) -> StreamSink:
    given = {"bootstrap": place.bootstrap, "stream": place.stream} | options
    return StreamSink(Options(given), SCHEMA, False)


def test_only_accepted_attempts_count(place: Place) -> None:
    sink = batch_sink(place)
    failed, accepted, speculative = (attempt(sink, 50, start) for start in (0, 100, 100))
    assert failed.receipt != accepted.receipt != speculative.receipt
    sink.commit([None, accepted, NothingWritten()])
    assert place.values() == texts(50, 100)
    with pytest.raises(AlreadyCommitted):  # a zombie
        attempt(sink, 50, 200)
    with pytest.raises(AlreadyCommitted, match="its rows are visible, don't run it again"):
        sink.abort([])
    assert place.values() == texts(50, 100)


def test_abort_before_any_task_began(place: Place) -> None:
    sink = batch_sink(place)
    sink.abort([])
    with pytest.raises(TransactionAborted):
        attempt(sink, 1)
    assert place.values() == []


@pytest.mark.soak
def test_an_abandoned_transaction_is_aborted_after_its_keepalive(place: Place) -> None:
    """Neither commit nor abort comes: after the keepalive nothing is staged."""
    sink = batch_sink(place, keepalive="5")
    written = attempt(sink, 1000)
    assert place.client.state(written.reservation).state == "OPEN"
    place.nothing_staged()
    info = place.client.state(written.reservation)
    assert info.state == "ABORTED"
    assert place.values() == []


@pytest.mark.soak
def test_numbers_of_a_series(place: Place) -> None:
    """Commits of query "q" in this order: sink, batch, and whether its rows show."""
    expected: list[bytes] = []
    commits = [
        ("0", 0, True), ("0", 0, False), ("0", 2, True), ("other", 0, True), ("0", 2, False), ("other", 1, True),
    ]  # fmt: skip
    for i, (name, batch, shows) in enumerate(commits):
        sink = stream_sink(place, sink=name)
        messages = [attempt(sink, 3, start, batch_id=batch) for start in (100 * i, 100 * i + 50)]
        stream_sink(place, sink=name).commit([*messages, None], batch)  # afresh, as Spark does
        expected += texts(3, 100 * i) + texts(3, 100 * i + 50) if shows else []
        assert place.values() == sorted(expected), (name, batch)
    place.nothing_staged()


@pytest.mark.soak
def test_a_series_that_was_moved_fails_the_query(place: Place) -> None:
    """Its batches must not be taken for committed ones, and dropped."""

    def commit(batch: int) -> None:
        message = attempt(stream_sink(place), 3, batch, query_id="moved", batch_id=batch)
        stream_sink(place).commit([message], batch)

    def take(number: int) -> None:
        with place.client.begin(place.scope) as txn:
            txn.commit(name="spark/moved/0", number=number)

    commit(0)
    commit(1)
    take(9)
    before = place.values()
    for batch in (9, 5, 2):
        with pytest.raises(AlreadyCommitted) as caught:
            commit(batch)
        text = str(caught.value)
        assert f"anabranch series set {place.scope} spark/moved/0 {batch - 1}`" in text
        assert f"no row of batch {batch} is visible" in text
    commit(1)
    commit(0)  # its own, however long ago
    assert place.values() == before
    commit(10)
    with pytest.raises(InvalidArgument, match="series set"):
        take(11 + (1 << 32))
    place.nothing_staged()


def test_messages_have_to_agree(place: Place) -> None:
    sink = stream_sink(place)
    one = attempt(sink, 3)
    for other in (
        attempt(sink, 3, batch_id=5),
        attempt(sink, 3, query_id="p"),
        attempt(stream_sink(place), 3),
    ):
        with pytest.raises(InvariantViolation, match=r"messages of (one )?batch"):
            stream_sink(place).commit([one, other], 4)
    with pytest.raises(InvariantViolation, match="messages of batch 5"):
        stream_sink(place).commit([one], 5)
    assert place.values() == []
    stream_sink(place).abort([one, None], 4)
    assert place.client.state(one.reservation).state == "ABORTED"


@pytest.mark.soak
def test_an_abort_while_controllers_are_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark would tell its error in the place of the batch's; only tasks need a new reservation."""
    one = attempt(stream_sink(place), 3)

    def away(*_: object, **__: object) -> None:
        raise NotReady("no controller answered")

    monkeypatch.setattr(anabranch.Client, "abort", away)
    monkeypatch.setattr(anabranch.Client, "reserve", away)
    sink = stream_sink(place)
    sink.abort([one, None], 4)
    assert f"transaction {one.reservation} is not aborted: no controller answered" in caplog.text
    with pytest.raises(NotReady):
        pickle.dumps(sink)


@pytest.mark.parametrize("arrived", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_commit_without_an_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    """The outcome is made known: an error means that no row is visible."""
    real = anabranch.Client.commit

    def unanswered(*args: Any, **options: Any) -> None:
        if arrived:
            real(*args, **options)
        raise OutcomeUnknown("no answer")

    sink = batch_sink(place)
    message = attempt(sink, 3)
    monkeypatch.setattr(anabranch.Client, "commit", unanswered)
    if arrived:
        sink.commit([message])
    else:
        with pytest.raises(TransactionAborted, match="no row is visible, run it again; no answer"):
            sink.commit([message])
    assert place.values() == (texts(3) if arrived else [])


@pytest.mark.soak
def test_a_controller_that_does_not_answer(broker: Broker, tmp_path: Path) -> None:
    prefix = f"frozen{time.time_ns():x}"
    cluster = start_cluster(broker.bootstrap, tmp_path, prefix)
    with anabranch.connect(cluster.bootstrap, prefix=prefix) as client:
        place = place_in(cluster.bootstrap, client, f"to-{prefix}")
        sink = batch_sink(place, prefix=prefix, timeout="3")
        message = attempt(sink, 3)
        cluster.controller.signal(signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown) as unknown:
            sink.commit([message])
        assert f"`anabranch txn describe {sink._reservation}`" in str(unknown.value)
        cluster.controller.signal(signal.SIGCONT)
        with contextlib.suppress(AlreadyCommitted):
            sink.abort([])  # as Spark does
        state = client.state(sink._reservation).state
        assert (state, place.values()) in (("ABORTED", []), ("COMMITTED", texts(3)))
    cluster.controller.stop()


# -- aborts of micro-batches without any task's message ---------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a driver, as Spark names it to its Python workers."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv(LOCAL_DIRS, f"{folder},/nowhere")
    return folder


def query_sink(place: Place, **options: str) -> StreamSink:
    """Of a query with these options, which keeps its transactions for hours."""
    return stream_sink(place, keepalive=HOURS_S, **options)


def test_an_abort_without_messages_finds_its_transaction(place: Place, driver: Path) -> None:
    lost = attempt(query_sink(place, **QUERY), 10)
    other = attempt(query_sink(place, **OTHER_QUERY), 10, start=100)
    query_sink(place, **QUERY).abort([None, None], 4)
    info = place.client.state(lost.reservation)
    assert (info.state, info.reason) == ("ABORTED", "Spark aborted batch 4")
    assert place.client.state(other.reservation).state == "OPEN"  # another query's

    # Spark makes a sink for the commit, too: the abort after it is still about the tasks' transaction.
    again = attempt(query_sink(place, **QUERY), 10, start=200)
    query_sink(place, **QUERY)
    query_sink(place, **QUERY).abort([], 4)
    assert place.client.state(again.reservation).state == "ABORTED"

    # What is committed stays so.
    done = attempt(query_sink(place, **QUERY), 10, start=300)
    query_sink(place, **QUERY).commit([done], 4)
    query_sink(place, **QUERY).abort([], 5)
    query_sink(place, **OTHER_QUERY).abort([None], 4)
    assert place.values() == texts(10, 300)
    place.nothing_staged()


def test_a_task_cannot_begin_what_was_aborted_before(place: Place, driver: Path) -> None:
    """A task that is slow to be killed, and has its first row after the abort."""
    planned = pickle.dumps(query_sink(place, queryname="orders"))
    query_sink(place, queryname="orders").abort([None], 0)
    with pytest.raises(TransactionAborted):
        attempt(pickle.loads(planned), 1)
    assert place.values() == []


def test_a_query_without_a_name_aborts_no_other_s_transaction(place: Place, driver: Path) -> None:
    """Two queries may have all the same options then. Then only the keepalive helps."""
    message = attempt(query_sink(place), 10)
    assert list(driver.iterdir()) == []
    query_sink(place).abort([None], 4)
    assert place.client.state(message.reservation).state == "OPEN"
    query_sink(place).abort([message], 4)
    assert place.client.state(message.reservation).state == "ABORTED"


@pytest.mark.parametrize("broken", ["no folder", "torn"])
def test_the_handover_never_fails_a_query(place: Place, driver: Path, broken: str) -> None:
    message = attempt(query_sink(place, **QUERY), 10)
    (file,) = driver.iterdir()
    if broken == "torn":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.unlink()
        driver.rmdir()
        message = attempt(query_sink(place, **QUERY), 10)
    query_sink(place, **QUERY).abort([None], 4)
    query_sink(place, **QUERY).commit([message], 4)
    assert place.values() == texts(10)
    query_sink(place, **QUERY).abort([], 5)


@pytest.mark.long
def test_a_query_whose_only_task_fails_leaves_nothing_staged(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    """It fails after it has written some megabytes; the keepalive is hours."""
    put_file(tmp_path, 0, 20_000, 0)
    late = F.when(F.col("value") == "19999", F.raise_error(F.lit("no such flight")))
    rows = spark.readStream.schema("value string").text(str(tmp_path / "in"))
    long = F.concat("value", F.lit("-" * 200))
    rows = rows.select(late.otherwise(long).alias("value"))
    writer = rows.writeStream.format("anabranch").option("bootstrap", place.bootstrap)
    writer = writer.option("stream", place.stream).option("keepalive", HOURS_S)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
    try:
        query = writer.trigger(availableNow=True).start()
        with pytest.raises(PySparkException, match="no such flight"):
            query.awaitTermination(int(3 * DEADLINE_S))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    (info,) = place.transactions()
    assert (info.state, info.reason) == ("ABORTED", "Spark aborted batch 0")
    place.nothing_staged()
    assert place.values() == []
