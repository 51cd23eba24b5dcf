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

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType(), False), StructField("value", BinaryType())]), False
)
EVENT_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS_TYPE, False),
        StructField("timestamp", TimestampType(), False),
        StructField("stream", StringType(), False),
        StructField("segment", LongType(), False),
        StructField("partition", IntegerType(), False),
        StructField("offset", LongType(), False),
        StructField("txn_id", BinaryType()),
        StructField("commit_timestamp", LongType(), False),
    ]
)
