"""No secret of an option, and none of a transaction, stands in Spark's plans, errors or checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.batches.records import decode_records
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import Begin
from anabranch.spark.clients import close_clients
from anabranch.topics import rights
from anabranch.topics.names import commands_topic
from tests.secured import PASSWORD
from tests.secured_lanes import LanesPlace, lanes_place
from tests.spark.sink_place import numbers

pytestmark = [pytest.mark.broker, pytest.mark.slow(30)]
LANE, STREAM = "etl", "shop/a"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LanesPlace]:
    grants = {LANE: {STREAM: ["describe", "write", "safe-time"]}}
    with lanes_place(tmp_path, grants, [STREAM]) as made:
        made.secured.grant(LANE, rights.reader_rights([], STREAM))
        yield made
        close_clients()


def secrets_of(place: LanesPlace) -> list[bytes]:
    """Those by which the lane's transactions were begun."""
    at = TopicPartition(commands_topic(lane=LANE), 0)
    fetched = place.log.fetch({at: 0}, max_wait=1, max_bytes=1 << 24, committed=False)[at]
    records = [decode(x.value) for b in fetched.batches for x in decode_records(b.data) if x.value]
    return [record.secret for record in records if isinstance(record, Begin)]


def sql_tab(spark: SparkSession, first: int) -> str:
    """What Spark's own page tells of its queries from this one on: plans, options, errors."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList().drop(first)
    return "\n".join(
        f"{one.physicalPlanDescription()} {one.details()} {one.modifiedConfigs()} {one.errorMessage()}"
        for one in map(found.apply, range(found.size()))
    )


@pytest.mark.soak
def test_no_secret_is_shown(spark: SparkSession, place: LanesPlace, tmp_path: Path) -> None:
    secured = place.secured
    options = {f"kafka.{name}": value for name, value in secured.options(LANE).items()}
    options |= {"bootstrap": secured.bootstrap, "stream": STREAM, "lane": LANE, "timeout": "20"}
    said: list[str] = []
    before = spark._jsparkSession.sharedState().statusStore().executionsCount()

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(PySparkException) as caught:
            call()
        said.append(f"{caught.value!r} {caught.value}")

    def save(rows: DataFrame, **more: str) -> None:
        rows.write.format("anabranch").mode("append").options(**options | more).save()

    def follow(rows: DataFrame, name: str) -> None:
        writer = rows.writeStream.format("anabranch").options(**options)
        at = str(tmp_path / "spark" / name)
        query = writer.option("checkpointLocation", at).trigger(availableNow=True).start()
        said.append(str(query.lastProgress))
        assert query.awaitTermination(60)

    boom = F.concat("value", F.raise_error(F.col("key").cast("string"))).alias("value")
    save(numbers(spark, 5))
    rows = spark.read.format("anabranch").options(**options).load()
    assert rows.count() == 5
    plan = rows._jdf.queryExecution()
    assert spark._jvm is not None
    said += [spark._jvm.PythonSQLUtils.explainString(plan, how) for how in ("extended", "cost")]
    failing = rows.select(boom)
    refused(failing.collect)
    refused(lambda: save(failing))
    refused(lambda: save(spark.range(1).select(F.expr("repeat('x', 3000000)").alias("value"))))
    refused(lambda: save(numbers(spark, 2), token=PASSWORD))
    wrong = {"kafka.sasl.password": f"{PASSWORD} again"}
    refused(lambda: save(numbers(spark, 2), **wrong))
    stream = spark.readStream.format("anabranch").options(**options).load()
    follow(stream.select("key", "value"), "good")
    refused(lambda: follow(stream.select(boom), "bad"))
    said.append(sql_tab(spark, before))
    said += [
        f.read_bytes().decode("latin-1") for f in (tmp_path / "spark").rglob("*") if f.is_file()
    ]
    text = "\n".join(said)
    assert "BatchScan anabranch" in text
    planted = secrets_of(place)
    assert len(planted) > 2
    forms = [
        form for one in planted for form in (one.hex(), repr(one)[2:-1], one.decode("latin-1"))
    ]
    assert [
        line[:300] for line in text.splitlines() if any(f in line for f in [PASSWORD, *forms])
    ] == []
