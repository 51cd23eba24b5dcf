"""The columns of committed events, as Spark sees them."""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.errors import InvalidArgument

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType(), False), StructField("value", BinaryType())])
)
# Equal to `anabranch.reading.event_columns.SCHEMA`, so that Spark takes its batches unchanged.
EVENT_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS_TYPE),
        StructField("timestamp", TimestampType()),
        StructField("stream", StringType()),
        StructField("segment", LongType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("txn_id", BinaryType()),
        StructField("commit_timestamp", LongType()),
    ]
)


def check_schema(schema: StructType) -> None:
    """Raise `InvalidArgument` for other columns: a user may give a schema, but not choose it."""
    given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    ours = [(field.name, field.dataType.simpleString()) for field in EVENT_SCHEMA.fields]
    if given != ours:
        raise InvalidArgument(
            f"schema({schema.simpleString()}): the columns are {EVENT_SCHEMA.simpleString()}; "
            "leave schema() out, and select() what you want"
        )
