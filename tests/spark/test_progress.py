"""The listener tells of a query what Spark and the controllers know."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from anabranch.spark import Progress, ProgressListener, measured
from tests.spark.sink_place import DEADLINE_S, Place, numbers

pytestmark = pytest.mark.broker


@pytest.mark.soak
def test_rows_lag_and_the_transaction(spark: SparkSession, place: Place, tmp_path: Path) -> None:
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
        until = time.monotonic() + DEADLINE_S
        while not any(progress.rows for progress in told):  # Spark tells listeners later
            assert time.monotonic() < until
            time.sleep(0.1)
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
