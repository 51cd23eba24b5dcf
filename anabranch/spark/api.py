"""Parts of the Python data source API that PySpark 4.0 and 4.1 lack (`docs/spark.md`, "Versions")."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource
from pyspark.sql.pandas import types as arrow_types
from pyspark.sql.types import StructType

# Whether Spark passes to a source where a micro-batch begins, and how much it may contain.
HAS_ADMISSION = (
    "limit" in inspect.signature(datasource.DataSourceStreamReader.latestOffset).parameters
)

if TYPE_CHECKING or hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:  # 4.0 passes Arrow batches to each Arrow writer, also to one of a stream

    class DataSourceStreamArrowWriter(
        datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    ):
        """A stream's writer that takes Arrow batches."""


if TYPE_CHECKING or HAS_ADMISSION:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """A placeholder: this version of Spark passes no limits to a source."""

    class ReadAllAvailable(ReadLimit):
        """A placeholder, as `ReadLimit`."""

    class ReadMaxRows(ReadLimit):
        """A placeholder, as `ReadLimit`."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """A placeholder: this version of Spark asks for the end once, and then ends the query."""


def arrow_schema(schema: StructType) -> Any:
    """The Arrow schema that Spark expects of rows with these columns."""
    make: Any = arrow_types.to_arrow_schema
    if "timezone" in inspect.signature(make).parameters:
        return make(schema, timezone="UTC")
    return make(schema)  # before Spark 4.2, times are always UTC


__all__ = [
    "HAS_ADMISSION",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
]
