"""One value by each codec: written by the client and read by Spark, and written by Spark and read by the client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import InvalidArgument, UndecodableValue
from anabranch.spark.failures import named_failures
from anabranch.values import codec_of
from tests.cluster import Cluster
from tests.spark.sink_place import Place
from tests.values.conftest import registry  # noqa: F401 - a fixture
from tests.values.kinds import KINDS, REGISTRY

pytestmark = [pytest.mark.broker, pytest.mark.long]

MODULE = "codecs_of_the_job"
# Kind -> the type of the column.
COLUMNS = {
    "bytes": "binary",
    "str": "string",
    "json": "string",
    "pair": "bigint",
    "pydantic": "struct<item:string,count:bigint>",
    "msgspec": "struct<item:string,count:bigint>",
    "avro": "string",
    "protobuf": "string",
}


@pytest.fixture(scope="session")
def module(
    spark: SparkSession, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A module of codecs that only Spark's workers have: by `addPyFile`."""
    url = request.getfixturevalue("registry").url
    file = tmp_path_factory.mktemp("codecs") / f"{MODULE}.py"
    file.write_text(
        f"import os\nos.environ[{REGISTRY!r}] = {url!r}\n"
        "from tests.values.kinds import PAIR, Line, Order, avro, protobuf\n"
        "AVRO, PROTOBUF = avro(), protobuf()\n"
    )
    spark.sparkContext.addPyFile(str(file))
    return MODULE


def word_of(kind: str, module: str) -> str:
    return KINDS[kind].word.replace("tests.values.kinds", module)


def plain(found: Any) -> Any:
    """A cell of a row as JSON."""
    if isinstance(found, bytes | bytearray):
        return bytes(found).decode()
    return found.asDict() if hasattr(found, "asDict") else found


@pytest.mark.parametrize("kind", KINDS)
def test_spark_reads_what_the_client_wrote(
    kind: str,
    spark: SparkSession,
    client: anabranch.Client,
    cluster: Cluster,
    unique: str,
    module: str,
) -> None:
    stream, codec = f"x{unique}/{kind}", KINDS[kind]
    client.create_stream(stream)
    with client.begin(f"x{unique}") as txn:
        txn.write(client.stream(stream, str, codec.spec), codec.value, key="ann")
        txn.commit()
    options = {"bootstrap": cluster.bootstrap, "stream": stream}
    reader = spark.read.format("anabranch").options(**options)
    (raw,) = reader.load().collect()
    assert codec_of(codec.spec, stream.replace("/", ".")).decode(bytes(raw.value)) == codec.value
    frame = reader.options(key="str", value=word_of(kind, module)).load()
    assert frame.schema["value"].dataType.simpleString() == COLUMNS[kind]
    (row,) = frame.collect()
    assert row.key == "ann"
    found = plain(row.value)
    is_json = COLUMNS[kind] == "string" and kind != "str"
    assert (json.loads(found) if is_json else found) == codec.plain


@pytest.mark.parametrize("kind", KINDS)
def test_the_client_reads_what_spark_wrote(
    kind: str, spark: SparkSession, place: Place, module: str
) -> None:
    codec, word = KINDS[kind], word_of(kind, module)
    cell = codec.plain if kind in ("bytes", "str") else json.dumps(codec.plain)
    rows = [f"select 'ann' key, '{cell}' value"]
    if kind in ("pydantic", "msgspec"):
        rows.append("select 'ann' key, named_struct('count', 5, 'item', 'apple') value")
    if kind == "avro":
        rows.append("select 'ann' key, named_struct('item', 'apple', 'count', 5) value")
    for row in rows:
        if kind == "protobuf":
            with (
                pytest.raises(InvalidArgument, match="does not encode the value"),
                named_failures(),
            ):
                place.save(spark.sql(row), key="str", value=word)
            return
        place.save(spark.sql(row), key="str", value=word)
    typed = place.client.stream(place.stream, str, codec.spec)
    found = [(e.key, e.value) for e in place.client.snapshot(typed).read(typed)]
    assert found == [("ann", codec.value)] * len(rows)


def test_each_stream_of_a_batch_has_its_subject(
    spark: SparkSession, place: Place, module: str, request: pytest.FixtureRequest
) -> None:
    names = (place.stream, f"{place.scope}/other")
    place.client.create_stream(names[1])
    rows = [
        f"select '{name}' stream, named_struct('item', 'apple', 'count', 5) value" for name in names
    ]
    frame = spark.sql(" union all ".join(rows))
    place.save(frame, stream=None, scope=place.scope, value=f"{module}:AVRO")
    for name in names:
        assert f"{name.replace('/', '.')}-value" in request.getfixturevalue("registry").subjects
        (event,) = place.client.snapshot(name).read(name)
        assert (event.value or b"")[:1] == b"\0"


def test_what_can_not_be_decoded(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    dead = f"{place.scope}/dead"
    place.client.create_stream(dead)
    with place.client.begin(place.scope) as txn:
        for value in (b"1", b"x", b"3"):
            txn.write(place.stream, value, key=b"k", headers={"from": b"here"})
        txn.commit()
    options = {"bootstrap": place.bootstrap, "stream": place.stream, "value": "json"}
    reader = spark.read.format("anabranch").options(**options)
    with (
        pytest.raises(UndecodableValue, match=f"{place.stream}.*codec json does not decode"),
        named_failures(),
    ):
        reader.load().collect()
    for way in ("skip", dead):
        found = reader.option("undecodable", way).load().select("value").collect()
        assert sorted(row.value for row in found) == ["1", "3"]
    (letter,) = place.client.snapshot(dead).read(dead)
    assert (letter.key, letter.value, letter.headers[0]) == (b"k", b"x", ("from", b"here"))
    query = (
        spark.readStream.format("anabranch")
        .options(**options, undecodable="skip")
        .load()
        .select("value")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(60)
    assert sorted(row.value for row in spark.read.parquet(str(tmp_path / "out")).collect()) == [
        "1",
        "3",
    ]


def test_a_codec_that_is_not_there_is_refused_by_name(spark: SparkSession, place: Place) -> None:
    reader = spark.read.format("anabranch").option("stream", place.stream)
    reader = reader.option("bootstrap", place.bootstrap).option("value", "no_such_module:Order")
    with pytest.raises(
        AnalysisException, match="InvalidArgument: option value: codec 'no_such_module:Order'"
    ):
        reader.load()
