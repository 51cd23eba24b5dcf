"""Events as Arrow batches: the schema that Spark asks for, and rare values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.batches.columns_read import Columns, ColumnsBuilder, Longs
from anabranch.batches.records import Record, encode_batch
from anabranch.reading.commit_columns import Joined, Spans
from anabranch.reading.event_columns import SCHEMA, EventBatches, batch_of
from anabranch.types import Event
from tests.batches.strategies import raw

HEADER = StructType([StructField("key", StringType(), False), StructField("value", BinaryType())])
SPARK: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "headers": ArrayType(HEADER),
    "timestamp": TimestampType(),
    "stream": StringType(),
    "segment": LongType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "txn_id": BinaryType(),
    "commit_timestamp": LongType(),
}
ALL = np.array([[0], [1 << 62]], dtype=np.int64)


def columns(records: list[Record]) -> Columns:
    """The records in columns."""
    builder = ColumnsBuilder(rows=1 << 20)
    found = builder.add(raw(encode_batch(records)), ALL) or builder.finish()
    assert found is not None
    return found


def joined_of(segments: Longs, times: Longs, at: Longs, known: NDArray[np.bool_] | None) -> Joined:
    """Commits of these segments and timestamps; ``at``: which is each record's."""
    other = np.zeros(len(segments), dtype=np.int64)
    return Joined(Spans(other, other, times, segments, other, other, other), at, known)


def batches(records: list[Record]) -> list[pa.RecordBatch]:
    """Their Arrow batches; every commit timestamp is 5, every segment 7."""
    made = columns(records)
    joined = joined_of(np.array([7]), np.array([5]), np.zeros(len(made), dtype=np.int64), None)
    return list(EventBatches("s/t", 3).of(made, joined))


def test_the_schema_is_what_spark_asks_for() -> None:
    schema = StructType([StructField(name, kind) for name, kind in SPARK.items()])
    asked = to_arrow_schema(schema, timezone="UTC")
    assert asked.equals(SCHEMA, check_metadata=True)
    assert str(asked) == str(SCHEMA)


def test_the_page_has_the_columns() -> None:
    page = Path(__file__).parents[2].joinpath("docs/spark.md").read_text("utf-8")
    table = page.partition("| column | type |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert [n for row in rows for n in re.findall(r"`(\w+)`", row.split("|")[1])] == SCHEMA.names


def test_names_that_are_no_utf8_become_text() -> None:
    (batch,) = batches(
        [
            Record(0, 0, None, None, (("zwölf", b"12"), ("\udcff\udcfe", None))),
            Record(1, 0, None, None, (("plain", b""),)),
        ]
    )
    batch.validate(full=True)
    assert batch["headers"].to_pylist() == [
        [{"key": "zwölf", "value": b"12"}, {"key": "\ufffd\ufffd", "value": None}],
        [{"key": "plain", "value": b""}],
    ]
    (fine,) = batches([Record(0, 0, None, None, (("zwölf", b"12"),))])
    assert fine["headers"].to_pylist() == [[{"key": "zwölf", "value": b"12"}]]


@pytest.mark.parametrize(
    ("milliseconds", "microseconds"),
    [
        (-1, -1000),
        (1 << 52, (1 << 52) * 1000),
        ((1 << 63) - 1, 9_223_372_036_854_775_000),
        (-(1 << 63), -9_223_372_036_854_775_000),
    ],
)
def test_times_beyond_the_columns_range_are_its_ends(milliseconds: int, microseconds: int) -> None:
    (batch,) = batches([Record(0, milliseconds, None, b"")])
    event = Event("s/t", None, b"", [], milliseconds, b"", 0, 0, 3, 0)
    for each in (batch, batch_of([event])):
        assert each["timestamp"].cast(pa.int64()).to_pylist() == [microseconds]


def test_unknown_commits_are_null() -> None:
    made = columns([Record(i, 0, None, b"") for i in range(3)])
    known = np.array([True, False, True])
    joined = joined_of(np.array([1, 2, 3]), np.array([4, 5, 6]), np.arange(3), known)
    (batch,) = EventBatches("s/t", 3).of(made, joined)
    batch.validate(full=True)
    assert batch["segment"].to_pylist() == [1, None, 3]
    assert batch["commit_timestamp"].to_pylist() == [4, None, 6]


def test_much_is_cut_into_batches() -> None:
    many = [Record(i, i, b"%d" % i, None, (("h", b"%d" % i),) * (i % 2)) for i in range(100_000)]
    found = batches(many)
    assert [batch.num_rows for batch in found] == [33_334, 33_334, 33_332]
    whole = pa.Table.from_batches(found).combine_chunks()
    whole.validate(full=True)
    assert whole["key"].to_pylist() == [record.key for record in many]
    assert whole["headers"].to_pylist()[-1] == [{"key": "h", "value": b"99999"}]
    assert whole["partition"].unique().to_pylist() == [3]
    assert whole["segment"].unique().to_pylist() == [7]
    big = batches([Record(i, 0, None, b"x" * (10 << 20)) for i in range(4)])
    assert [batch.num_rows for batch in big] == [2, 2]
