"""The event of a row, by ``encoding``: on a real broker, seen by a plain consumer."""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DateType, StructField, StructType, TimestampType

from anabranch.errors import InvalidArgument
from anabranch.spark import avro_schema
from anabranch.spark.options import Options
from anabranch.spark.sink.avro_rows import AvroRows
from anabranch.spark.sink.encoding import encoding_of
from tests.plain_reader import Seen
from tests.spark.sink_place import Place

pytestmark = [pytest.mark.broker, pytest.mark.slow(20)]

AT = datetime(2025, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
AT_MS = 1735734600123


@pytest.mark.long
def test_raw_columns_are_the_event(spark: SparkSession, place: Place) -> None:
    columns = (
        "key string, value binary, headers array<struct<key: string, value: binary>>, "
        "timestamp timestamp"
    )
    rows = [
        ("ann", b"1", [("a", b"x"), ("a", None)], AT),
        ("bob", None, [], AT),
        ("é", b"", None, AT),
        (None, b"\x00\xff", None, AT),
    ]
    place.save(spark.createDataFrame(rows, columns).coalesce(1))
    assert sorted(place.seen(), key=repr) == sorted(
        (
            Seen(b"1", b"ann", (("a", b"x"), ("a", None)), AT_MS),
            Seen(None, b"bob", (), AT_MS),
            Seen(b"", "é".encode(), (), AT_MS),
            Seen(b"\x00\xff", None, (), AT_MS),
        ),
        key=repr,
    )
    before = int(time.time() * 1000)
    place.save(spark.createDataFrame([("new",)], "value string"))
    (new,) = (event for event in place.seen() if event.value == b"new")
    assert new.key is None
    assert before <= new.timestamp <= int(time.time() * 1000)


WIDE = (
    "i int, l long, b byte, flag boolean, f float, d double, dec decimal(20,10), s string, bin binary, "
    'day date, at timestamp, local timestamp_ntz, `odd "name\\` string, list array<int>, '
    "deep array<array<string>>, map map<string, double>, "
    "row struct<x: int, y: struct<z: string>>, rows array<struct<x: int, at: timestamp>>"
)
LOCAL = datetime(2025, 3, 1, 1, 2, 3, 4000)  # noqa: DTZ001
WIDE_ROWS: list[tuple[Any, ...]] = [
    (1, 1 << 62, -3, True, 1.5, 0.1, Decimal("12.5"), "a", b"ab", AT.date(), AT, LOCAL, "o", [1, 2],
     [["a", None], [], None], {"a": 1.0, 'b"\\': None}, (1, ("z",)), [(1, AT), (None, None), None]),
    (-1, 0, 0, False, -0.0, -12345.678, Decimal(0), 'q"\\/\b\f\n\r\t\x00\x1f\x7f\u2028é😀', b"", AT.date(),
     AT.replace(microsecond=999), LOCAL.replace(year=1950), "", [], [], {}, (None, (None,)), []),
    (0, -1, 1, None, 1e-3, 9999999.0, Decimal("-0.0000001"), "", None, None, None, None, None, [None], None,
     None, (None, None), None),
    (None,) * 18,
]  # fmt: skip


@pytest.mark.long
def test_json_is_what_to_json_gives(spark: SparkSession, place: Place) -> None:
    df = spark.createDataFrame(WIDE_ROWS * 3, WIDE).coalesce(1)
    expected = [row[0].encode() for row in df.select(F.to_json(F.struct("*"))).collect()]
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 5)  # batches that are slices
    try:
        place.save(df, encoding="json")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert place.values() == sorted(expected)


@pytest.mark.soak
def test_numbers_that_json_spells_in_another_way(spark: SparkSession, place: Place) -> None:
    numbers_ = [1e7, 1e300, 1e-300, 1 / 3, float("nan"), float("inf"), float("-inf")]
    df = spark.createDataFrame([(n, n) for n in numbers_], "d double, f float").coalesce(1)
    spelled = [json.loads(row[0]) for row in df.select(F.to_json(F.struct("d"))).collect()]
    place.save(df, encoding="json")
    ours = [json.loads(value) for value in place.values()]
    assert sorted((row["d"] for row in ours), key=str) == sorted(
        (row["d"] for row in spelled), key=str
    )
    assert {row["f"] for row in ours} >= {1e7, 0.33333334, "NaN", "Infinity", "-Infinity"}


@pytest.mark.long
def test_avro_reads_back(spark: SparkSession, place: Place) -> None:
    df = spark.createDataFrame(WIDE_ROWS, WIDE).drop('odd "name\\').coalesce(1)
    place.save(df, encoding="avro")
    schema = fastavro.parse_schema(json.loads(avro_schema(df.schema)))
    read = [fastavro.schemaless_reader(io.BytesIO(v), schema, None) for v in place.values()]
    # As Spark gives them: times with a zone, as of the session; Decimals of the column's scale.
    wanted = [as_avro(row.asDict(recursive=True)) for row in df.collect()]
    assert sorted(read, key=repr) == sorted(wanted, key=repr)


def as_avro(value: Any, name: str = "") -> Any:
    if isinstance(value, datetime) and name != "local":
        return value.astimezone(UTC)
    if isinstance(value, float) and name == "f":
        return pa.scalar(value, pa.float32()).as_py()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return {key: as_avro(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [as_avro(item) for item in value]
    return value


ORDER = """{"type": "record", "name": "Order", "fields": [
    {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["BUY", "SELL"]}},
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
    {"name": "count", "type": "long"},
    {"name": "note", "type": "string", "default": "-"}]}"""


@pytest.mark.soak
def test_avro_by_a_given_schema(spark: SparkSession, place: Place) -> None:
    df = spark.createDataFrame(
        [(3, "BUY", AT), (4, "SELL", None)], "count int, kind string, at timestamp"
    )
    place.save(df, encoding="avro", avroschema=ORDER)
    schema = fastavro.parse_schema(json.loads(ORDER))
    read = [fastavro.schemaless_reader(io.BytesIO(v), schema, None) for v in place.values()]
    assert sorted(read, key=repr) == [
        {"kind": "BUY", "at": AT.replace(microsecond=123000), "count": 3, "note": "-"},
        {"kind": "SELL", "at": None, "count": 4, "note": "-"},
    ]
    with pytest.raises(
        PySparkException, match="InvalidArgument: a row does not fit the Avro schema"
    ):
        place.save(df.withColumn("kind", F.lit("KEEP")), encoding="avro", avroschema=ORDER)
    assert len(place.values()) == 2


def test_avro_has_no_year_10000() -> None:
    schema = StructType([StructField("day", DateType())])
    with pytest.raises(InvalidArgument, match="does not fit the Avro schema: date value"):
        AvroRows(avro_schema(schema), schema.fields)([pa.array([2932897], pa.date32())], 1)


# columns of one row; key, keepkey; the event's key, its value
KEYS = [
    ("'UA' k, 7 n", "k", None, b"UA", b'{"k":"UA","n":7}'),
    ("'UA' k, 7 n", "K", "false", b"UA", b'{"n":7}'),
    ("'UA' k, 7 n", "n", "false", b"7", b'{"k":"UA"}'),
    ("'UA' k, 7 n", "k,n", "false", b'["UA",7]', b"{}"),
    ("'UA' k, 7 n", "n, k", None, b'[7,"UA"]', b'{"k":"UA","n":7}'),
    ("string(null) k, 7 n", "k", None, None, b'{"n":7}'),
    ("string(null) k, 7 n", "k,n", None, b"[null,7]", b'{"n":7}'),
    ("X'00ff' k", "k", None, b"\x00\xff", b'{"k":"AP8="}'),
    ("date'2025-01-01' k", "k", None, b"2025-01-01", b'{"k":"2025-01-01"}'),
    ("timestamp'2025-01-01 00:00:00' k", "k", None, b"2025-01-01T00:00:00.000Z",
     b'{"k":"2025-01-01T00:00:00.000Z"}'),
    ("true k", "k", None, b"true", b'{"k":true}'),
    ("double('NaN') k", "k", None, b"NaN", b'{"k":"NaN"}'),
    ("named_struct('x', 1) k", "k", None, b'{"x":1}', b'{"k":{"x":1}}'),
    ("'UA' k", None, None, None, b'{"k":"UA"}'),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "key", "keep", "made", "value"), KEYS)
def test_a_key_is_made_from_its_column(
    spark: SparkSession,
    columns: str,
    key: str | None,
    keep: str | None,
    made: bytes | None,
    value: bytes,
) -> None:
    rows = spark.sql(f"select {columns}")
    given = {
        name: text for name, text in (("keycolumn", key), ("keepkey", keep)) if text is not None
    }
    encoding = encoding_of(Options({"encoding": "json"} | given), rows.schema, by_column=False)
    (batch,) = rows.toArrow().to_batches()
    ((stream, events),) = encoding.encoder("a/b")(batch)
    assert stream == "a/b"
    found = {name: events.column(name).cast(pa.large_binary()) for name in events.schema.names}
    assert found.pop("value").to_pylist() == [value]
    assert {name: column.to_pylist() for name, column in found.items()} == (
        {"key": [made]} if key else {}
    )


@pytest.mark.soak
def test_a_column_may_be_the_timestamp(spark: SparkSession, place: Place) -> None:
    df = spark.createDataFrame([(1, AT)], "n int, at timestamp")
    place.save(df, encoding="json", timestampcolumn="at")
    (event,) = place.seen()
    assert (event.value, event.timestamp) == (b'{"n":1,"at":"2025-01-01T12:30:00.123Z"}', AT_MS)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "GMT+8", "+02:00"])
def test_instants_are_in_utc_whatever_the_session_has(zone: str) -> None:
    schema = StructType(
        [
            StructField("at", TimestampType()),
            StructField("deep", ArrayType(StructType([StructField("at", TimestampType())]))),
        ]
    )
    kind = pa.timestamp("us", zone)
    instant = pa.array([int(AT.timestamp() * 1e6)]).cast(kind)
    inner = pa.StructArray.from_arrays([instant], ["at"])
    batch = pa.record_batch(
        [instant, pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), inner)], ["at", "deep"]
    )
    values = {}
    for name in ("json", "avro"):
        options = Options({"encoding": name, "keycolumn": "at"})
        encoder = encoding_of(options, schema, by_column=False).encoder("a/b")
        ((_, events),) = encoder(batch)
        assert events.column("key").to_pylist() == ["2025-01-01T12:30:00.123Z"]
        values[name] = events.column("value")[0].as_py()
    text = "2025-01-01T12:30:00.123Z"
    assert json.loads(values["json"]) == {"at": text, "deep": [{"at": text}]}
    avro = fastavro.parse_schema(json.loads(avro_schema(schema)))
    read = fastavro.schemaless_reader(io.BytesIO(values["avro"]), avro, None)
    assert read == {"at": AT, "deep": [{"at": AT}]}
