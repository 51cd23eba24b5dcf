"""A stream of a test's own, and Spark's writes to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

import anabranch
from tests.plain_reader import Seen, read_all, values
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

DEADLINE_S = 60.0
_SOME_DAY = 1_735_689_600


@dataclass
class Place:
    """A stream of this test's own, and the ways to it."""

    bootstrap: str
    client: anabranch.Client
    scope: str
    stream: str

    def save(self, df: DataFrame, mode: str = "append", **options: object) -> None:
        writer = df.write.format("anabranch").mode(mode).option("bootstrap", self.bootstrap)
        for name, value in ({"stream": self.stream} | options).items():
            if value is not None:
                writer = writer.option(name, str(value))
        writer.save()

    def seen(self) -> list[Seen]:
        return read_all(self.bootstrap, self.stream)

    def values(self) -> list[bytes]:
        return values(self.bootstrap, self.stream)

    def transactions(self) -> list[anabranch.TransactionInfo]:
        return self.client.transactions(self.scope, finished=True)

    def nothing_staged(self) -> None:
        """Waits until no open transaction has anything in the journal."""
        wait_until(
            lambda: not self.client.describe(self.stream).uncommitted_bytes, what=self.transactions
        )


def place_in(bootstrap: str, client: anabranch.Client, scope: str, name: str = "events") -> Place:
    """A new stream of three segments."""
    client.create_stream(f"{scope}/{name}", segments=3)
    return Place(bootstrap, client, scope, f"{scope}/{name}")


def numbers(spark: SparkSession, count: int, partitions: int = 2, start: int = 0) -> DataFrame:
    """Rows with keys and values from ``start`` on."""
    return spark.range(start, start + count, 1, partitions).select(
        F.col("id").cast("string").alias("key"), F.col("id").cast("string").alias("value")
    )


def texts(count: int, start: int = 0) -> list[bytes]:
    """The values of `numbers`, sorted."""
    return sorted(str(i).encode() for i in range(start, start + count))


def schema_of(columns: str) -> StructType:
    """A schema as DDL. A Spark session has to be there."""
    return cast("StructType", StructType.fromDDL(columns))


def stream_files(spark: SparkSession, place: Place, folder: Path, **options: str) -> StreamingQuery:
    """Each file a micro-batch, till all there are are written."""
    source = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
    writer = source.text(str(folder / "in")).writeStream.format("anabranch")
    settings = {"bootstrap": place.bootstrap, "checkpointLocation": str(folder / "checkpoint")}
    query = (
        writer.options(**settings, **({"stream": place.stream} | options))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(int(DEADLINE_S))
    return query


def put_file(folder: Path, number: int, lines: int, start: int) -> None:
    """Put a file where `stream_files` looks; they are taken in the order of their numbers."""
    (folder / "in").mkdir(exist_ok=True)
    file = folder / f"{number}.txt"
    file.write_text("".join(f"{i}\n" for i in range(start, start + lines)))
    os.utime(file, (_SOME_DAY + number, _SOME_DAY + number))
    file.rename(folder / "in" / file.name)
