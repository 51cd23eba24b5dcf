"""The lag of a query, from what Spark reports of it; and its progress, as the listener gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from anabranch.errors import MalformedRecord
from anabranch.spark import Progress, ProgressListener, lag, measured
from anabranch.spark.source.positions import Position, to_json
from tests.spark.sink_place import DEADLINE_S, Place, numbers
from tests.waiting import wait_until


def source(at: Any, latest: Any) -> dict[str, Any]:
    return {"endOffset": at, "latestOffset": latest, "numInputRows": 1}


def test_the_lag_is_the_offsets_left_to_read_by_stream() -> None:
    at = to_json({"s/a": Position(5, {0: 10, 1: 7}), "s/left": Position(1, {0: 3})})
    latest = to_json(
        {
            "s/a": Position(9, {0: 15, 1: 7, 2: 4}),  # a partition that a scaling added
            "s/new": Position(0, {0: 2}),
        }
    )
    assert lag(source(json.dumps(at), json.dumps(latest))) == {"s/a": 9, "s/new": 2}
    assert lag(source(at, latest)) == {"s/a": 9, "s/new": 2}
    assert lag(source(str(at), str(latest))) == {"s/a": 9, "s/new": 2}  # PySpark 4.0, 4.1
    # What was read when the ends were asked for may be beyond them.
    assert lag(source(latest, at)) == {"s/a": 0, "s/left": 3}


@pytest.mark.parametrize("gone", ["endOffset", "latestOffset"])
@pytest.mark.parametrize("nothing", [None, "", "null"])
def test_without_offsets_there_is_no_lag(gone: str, nothing: str | None) -> None:
    assert lag(source("{}", "{}") | {gone: nothing}) is None


@pytest.mark.parametrize("other", ["7", '"x"', "[1]", "{", '{"topic":{"0":7}}'])
def test_the_offsets_of_another_source_are_refused(other: str) -> None:
    with pytest.raises(MalformedRecord):
        lag(source(other, other))


@pytest.mark.broker
@pytest.mark.soak
def test_the_listener_reports_rows_lag_and_the_transaction(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    place.client.create_stream(f"{place.scope}/copy")
    place.save(numbers(spark, 30))
    place.save(numbers(spark, 12, start=30))
    told: list[Progress] = []
    listener = ProgressListener(told.append, place.client, place.scope)
    spark.streams.addListener(listener)
    try:
        source = spark.readStream.format("anabranch").option("bootstrap", place.bootstrap)
        copy = measured(source.option("stream", place.stream).load()).select("key", "value")
        given = {"bootstrap": place.bootstrap, "checkpointLocation": str(tmp_path)}
        writer = copy.writeStream.format("anabranch").options(**given, stream=f"{place.scope}/copy")
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(int(DEADLINE_S))
        wait_until(lambda: any(progress.rows for progress in told))  # Spark tells listeners later
    finally:
        spark.streams.removeListener(listener)
    (found,) = (progress for progress in told if progress.rows)
    assert (found.query_id, found.batch, found.rows) == (query.id, 0, 42)
    assert found.lag == {place.stream: 0}
    assert 0 < found.writing <= found.seconds
    assert found.committed is not None
    assert found.committed.counts.committed == 42
    assert found.committed.txn_id == place.transactions()[0].txn_id
    assert (found.transactions, found.bytes) == (2, 2 * (10 + 2 * 32))
    assert "42 rows" in str(found)
    assert "2 transactions, 0.0 MB" in str(found)
    assert "0 offsets behind" in str(found)
