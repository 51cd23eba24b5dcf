"""``format("anabranch")``: the object that Spark asks for a source or a sink."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from anabranch.spark.api import DataSourceStreamArrowWriter
from anabranch.spark.options import Options


class AnabranchDataSource(DataSource):
    """Makes sources and sinks. Spark makes many of these objects; each has only the options."""

    @classmethod
    def name(cls) -> str:
        return "anabranch"

    def schema(self) -> StructType:
        """The columns of a committed event, or the columns that option ``columns`` names."""
        from anabranch.spark.columns import chosen

        return chosen(Options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from anabranch.spark.source.reader import SnapshotReader

        return SnapshotReader(Options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from anabranch.spark.source.stream_reader import StreamReader

        return StreamReader(Options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from anabranch.spark.sink.writer import BatchSink

        return BatchSink(Options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from anabranch.spark.sink.writer import StreamSink

        return StreamSink(Options(self.options), schema, overwrite)
