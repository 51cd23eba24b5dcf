"""A Spark driver that will be killed: a query that reads, then a batch job and queries that write.

Run with the settings as JSON: bootstrap, streams (to be read), batch (a stream, or null: no batch job), sinks
(accident -> stream), folder. What it writes begins when the file "go" is there.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.spark import spark_session
from tests.spark import small_jvm
from tests.spark.disturbed import DisturbedSource, wait_for
from tests.spark.sink_place import numbers

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

MAX_FAILURES = 4
PARTITIONS, ROWS = 6, 6_000
SUFFIX = "-" * 500  # a megabyte a task: more than a writer keeps


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    spark = spark_session(
        "killed", f"local[2,{MAX_FAILURES}]", small_jvm.settings(str(folder)) | small_jvm.PLANS
    )
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(DisturbedSource)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    # In this order: when its JVM is gone the driver could still say so.
    pids = [os.getpid(), int(jvm.java.lang.ProcessHandle.current().pid())]
    (folder / "pids.new").write_text(json.dumps(pids))
    (folder / "pids.new").replace(folder / "pids")

    threading.Thread(target=keep_reading, args=(spark, settings), daemon=True).start()
    wait_for("the word to go", (folder / "go").exists)
    options = {"bootstrap": settings["bootstrap"], "keepalive": "200"}  # a machine that is busy
    if settings["batch"]:
        rows = numbers(spark, ROWS, PARTITIONS).withColumn(
            "value", F.concat("value", F.lit(SUFFIX))
        )
        batch = rows.write.format("disturbed").mode("append").options(**options)
        batch.option("stream", settings["batch"]).save()
        (folder / "batch-done").touch()
    queries = [
        start_sink(
            spark, "disturbed", folder / accident, options | {"accident": accident, "stream": to}
        )
        for accident, to in settings["sinks"].items()
    ]
    for query in queries:
        query.awaitTermination()


# -- queries, of a driver that will be killed and of one that survives ------------------------------------


def start_sink(
    spark: SparkSession, form: str, folder: Path, options: dict[str, str]
) -> StreamingQuery:
    """Each file of ``folder``/in is a micro-batch."""
    source = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
    writer = source.text(str(folder / "in")).writeStream.format(form).options(**options)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(availableNow=True).start()


def start_reading(spark: SparkSession, settings: dict[str, Any]) -> StreamingQuery:
    """Each micro-batch becomes a file of ``folder``/out, by its id and the attempt."""
    folder = Path(settings["folder"])

    def write(frame: DataFrame, number: int) -> None:
        columns = "stream", "partition", "offset", F.decode("value", "UTF-8").alias("value")
        rows = [list(row) for row in frame.select(*columns).collect()]
        for attempt in itertools.count():
            path = folder / "out" / f"{number}-{attempt}"
            if not path.exists():
                path.with_suffix(".new").write_text(json.dumps(rows))
                path.with_suffix(".new").replace(path)
                return

    options = {
        "bootstrap": settings["bootstrap"],
        "streams": settings["streams"],
        "maxEventsPerTrigger": "500",
        "minPartitions": "2",
    }
    frame = spark.readStream.format("anabranch").options(**options).load()
    writer = frame.writeStream.foreachBatch(write).trigger(processingTime="200 milliseconds")
    return writer.option("checkpointLocation", str(folder / "reading")).start()


def keep_reading(spark: SparkSession, settings: dict[str, Any]) -> None:
    """Run without end; a query that fails is started again."""
    while True:
        try:
            start_reading(spark, settings).awaitTermination()
        except StreamingQueryException as error:
            print(str(error).partition("\n")[0], flush=True)


if __name__ == "__main__":
    main()
