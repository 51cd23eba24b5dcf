"""Micro-batches that Spark aborts with no task's message: nothing stays staged until the keepalive has passed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from anabranch.errors import TransactionAborted
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import LOCAL_DIRS, StreamSink, Written
from tests.spark.sink_place import DEADLINE_S, Place, put_file, texts

pytestmark = pytest.mark.broker

COLUMNS = StructType([StructField("value", StringType())])
HOURS_S = "36000"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a driver, as Spark names it to its Python workers."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv(LOCAL_DIRS, f"{folder},/nowhere")
    return folder


def sink(place: Place, **options: str) -> StreamSink:
    given = {"bootstrap": place.bootstrap, "stream": place.stream, "keepalive": HOURS_S}
    return StreamSink(Options(given | options), COLUMNS, False)


def written(sink: StreamSink, rows: int, start: int = 0) -> Written:
    """A task attempt on a copy, as Spark runs it."""
    copy = pickle.loads(pickle.dumps(sink))
    batch = pa.record_batch({"value": [str(i) for i in range(start, start + rows)]})
    message = copy._target.write(copy._reservation, iter([batch]), streaming=False)
    assert isinstance(message, Written)
    return replace(message, query_id="q", batch_id="4")


def test_an_abort_without_messages_finds_its_transaction(place: Place, driver: Path) -> None:
    own = {"checkpointlocation": "/checkpoints/a"}
    lost = written(sink(place, **own), 10)
    other = written(sink(place, checkpointlocation="/checkpoints/b"), 10, start=100)
    sink(place, **own).abort([None, None], 4)
    info = place.client.state(lost.reservation)
    assert (info.state, info.reason) == ("ABORTED", "Spark aborted batch 4")
    assert place.client.state(other.reservation).state == "OPEN"  # another query's

    # Spark makes a sink for the commit, too: the abort after it is still about the tasks' transaction.
    again = written(sink(place, **own), 10, start=200)
    sink(place, **own)
    sink(place, **own).abort([], 4)
    assert place.client.state(again.reservation).state == "ABORTED"

    # What is committed stays so.
    done = written(sink(place, **own), 10, start=300)
    sink(place, **own).commit([done], 4)
    sink(place, **own).abort([], 5)
    sink(place, checkpointlocation="/checkpoints/b").abort([None], 4)
    assert place.values() == texts(10, 300)
    place.nothing_staged()


def test_nobody_can_begin_what_was_aborted_unseen(place: Place, driver: Path) -> None:
    """A task that is slow to be killed, and has its first row after the abort."""
    planned = sink(place, queryname="orders")
    copy = pickle.dumps(planned)
    sink(place, queryname="orders").abort([None], 0)
    with pytest.raises(TransactionAborted):
        written(pickle.loads(copy), 1)
    assert place.values() == []


def test_without_a_name_of_its_own_a_query_leaves_others_alone(place: Place, driver: Path) -> None:
    """Two queries may have all the same options then. Then only the keepalive helps."""
    message = written(sink(place), 10)
    assert list(driver.iterdir()) == []
    sink(place).abort([None], 4)
    assert place.client.state(message.reservation).state == "OPEN"
    sink(place).abort([message], 4)
    assert place.client.state(message.reservation).state == "ABORTED"


@pytest.mark.parametrize("broken", ["no folder", "torn"])
def test_the_handover_never_fails_a_query(place: Place, driver: Path, broken: str) -> None:
    own = {"checkpointlocation": "/checkpoints/a"}
    message = written(sink(place, **own), 10)
    (file,) = driver.iterdir()
    if broken == "torn":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.unlink()
        driver.rmdir()
        message = written(sink(place, **own), 10)
    sink(place, **own).abort([None], 4)
    sink(place, **own).commit([message], 4)
    assert place.values() == texts(10)
    sink(place, checkpointlocation="/checkpoints/a").abort([], 5)


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
