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
from anabranch.spark.codecs import Codecs
from anabranch.spark.options import Options

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


def chosen(options: Options) -> StructType:
    """The columns that option ``columns`` names, in its order; by default all. Codecs give key and value a type.

    Raises: InvalidArgument (a column is unknown, or a codec).
    """
    names = dict.fromkeys(options.words("columns")) or EVENT_SCHEMA.names
    unknown = [name for name in names if name not in EVENT_SCHEMA.names]
    if unknown:
        raise InvalidArgument(
            f"option columns: no column {', '.join(unknown)}; there are {', '.join(EVENT_SCHEMA.names)}"
        )
    codecs = Codecs.of(options)
    decoded = {name: StructField(name, codecs.shape(name).kind) for name in ("key", "value")}
    return StructType([decoded.get(name, EVENT_SCHEMA[name]) for name in names])


def check_schema(schema: StructType, options: Options) -> None:
    """Raise `InvalidArgument` unless a schema that the user gave has exactly these columns."""
    wanted = chosen(options)
    given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    ours = [(field.name, field.dataType.simpleString()) for field in wanted.fields]
    if given != ours:
        raise InvalidArgument(
            f"schema({schema.simpleString()}): the columns are {wanted.simpleString()}; "
            "leave schema() out, and give option columns=key,value"
        )
