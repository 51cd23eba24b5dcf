"""One value by each codec, written by the client, as Spark reads it: bytes, which SQL or the codec decodes."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.values import codec_of
from tests.cluster import Cluster
from tests.values.conftest import registry  # noqa: F401 - a fixture
from tests.values.kinds import KINDS

pytestmark = pytest.mark.broker


@pytest.mark.usefixtures("registry")
def test_spark_reads_what_the_client_wrote(
    spark: SparkSession, client: anabranch.Client, cluster: Cluster, unique: str
) -> None:
    scope = f"x{unique}"
    for name, kind in KINDS.items():
        client.create_stream(f"{scope}/{name}")
        with client.begin(scope) as txn:
            txn.write(client.stream(f"{scope}/{name}", str, kind.spec), kind.value, key="ann")
            txn.commit()
    streams = ",".join(f"{scope}/{name}" for name in KINDS)
    options = {"bootstrap": cluster.bootstrap, "streams": streams}
    frame = spark.read.format("anabranch").options(**options).load()
    texts = frame.selectExpr(
        "stream", "CAST(key AS STRING) key", "value", "CAST(value AS STRING) text"
    )
    found = {row.stream.partition("/")[2]: row for row in texts.collect()}
    assert found.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        row = found[name]
        assert row.key == "ann"
        topic = f"{scope}.{name}"
        assert codec_of(kind.spec, topic).decode(bytes(row.value)) == kind.value
        if name in ("json", "pydantic", "msgspec"):
            assert json.loads(row.text) == kind.plain
    assert found["str"].text == KINDS["str"].value
