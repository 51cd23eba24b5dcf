"""What each version of PySpark has to do, as a program: `python -m tests.spark.contract BOOTSTRAP SCOPE FOLDER`.

It writes and reads ``SCOPE/events`` (which is there), and prints what this version can as JSON. A first argument
``connect`` does so through Spark Connect.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch.spark
from anabranch.errors import UnsupportedSetting
from anabranch.spark import api
from anabranch.spark.export import export
from anabranch.spark.options import Connection
from tests.spark import small_jvm
from tests.waiting import wait_until

ROWS = 500


def session(folder: Path, *, connect: bool) -> SparkSession:
    """A session of this PySpark, by Connect or not."""
    settings = small_jvm.settings(str(folder)) | small_jvm.PLANS
    if not connect:
        return anabranch.spark.spark_session("contract", "local[2]", settings)
    builder = SparkSession.Builder().remote("local[2]").config(map={**settings})
    spark = builder.getOrCreate()
    anabranch.spark.register(spark)
    return spark


def contract(spark: SparkSession, bootstrap: str, stream: str, folder: Path) -> dict[str, Any]:
    """Batch and stream, in and out; what does not hold is an AssertionError."""
    given = {"bootstrap": bootstrap, "stream": stream}
    rows = spark.range(0, ROWS, 1, 2).select(
        F.col("id").cast("string").alias("key"), F.col("id").cast("string").alias("value")
    )
    for _ in range(2):  # the same job twice
        rows.write.format("anabranch").mode("append").options(**given, name="once").save()

    def read(**options: object) -> Any:
        chosen = given | {name: str(value) for name, value in options.items()}
        return spark.read.format("anabranch").options(**chosen).load()

    first = read(columns="key,value,commit_timestamp,partition").collect()
    assert sorted(int(row.value) for row in first) == list(range(ROWS))
    (at,) = {row.commit_timestamp for row in first}
    assert read().where(f"commit_timestamp = {at} and partition >= 0").count() == ROWS
    assert read(columns="partition").count() == ROWS
    assert read(start=at).count() == 0 == read(end=at - 1).count()

    told: list[anabranch.spark.Progress] = []

    def copy(**options: object) -> Any:
        """All that is there, into another stream, through a query."""
        more = {name: str(value) for name, value in options.items()}
        source = spark.readStream.format("anabranch").options(**given, **more).load()
        place = {"checkpointLocation": str(folder / "checkpoint"), "stream": f"{stream}-copy"}
        counted = anabranch.spark.measured(source)
        writer = counted.select("key", "value").writeStream.format("anabranch")
        query = writer.options(**(given | place)).trigger(availableNow=True).start()
        with suppress(StreamingQueryException):
            query.awaitTermination(120)
        return query

    spark.streams.addListener(anabranch.spark.ProgressListener(told.append))
    query = copy()
    assert query.exception() is None, query.exception()
    assert read(stream=f"{stream}-copy").count() == ROWS
    wait_until(lambda: any(one.rows for one in told), 30)
    (one,) = (one for one in told if one.rows)
    counted = (one.rows, one.transactions, one.bytes)
    assert counted == (ROWS, 1, 2 * sum(len(str(n)) for n in range(ROWS))), one
    rows.write.format("anabranch").mode("append").options(**given).save()
    query = copy()  # from the checkpoint: what is new alone
    assert query.exception() is None, query.exception()
    assert read(stream=f"{stream}-copy", columns="offset").count() == 2 * ROWS
    progress = query.lastProgress["sources"][0]
    rows.write.format("anabranch").mode("append").options(**given).save()
    limited = str(copy(maxeventspertrigger=100).exception() or "")
    assert limited == "" or "PySpark 4.2" in limited, limited
    return {
        "version": pyspark.__version__,
        "limits": not limited,
        "lag": anabranch.spark.lag(progress),
        "pushdown": hasattr(pyspark.sql.datasource, "Filter"),
        "admission": api.HAS_ADMISSION,
    }


def main(arguments: list[str]) -> None:
    connect = arguments[0] == "connect"
    bootstrap, stream, folder = arguments[connect:]
    spark = session(Path(folder), connect=connect)
    try:
        said = contract(spark, bootstrap, stream, Path(folder))
        if connect:
            with suppress(UnsupportedSetting):  # it needs the driver's JVM
                export(spark, Connection(bootstrap, "anabranch", 60.0, ()), [stream], folder)
                raise AssertionError("exported through Connect")
        print(json.dumps(said))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
