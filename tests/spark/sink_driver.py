"""A Spark driver that will be killed: a batch job, if one is asked for, then a streaming query.

Run with the settings as JSON: bootstrap, stream, folder, batch (its stream, or null), rows, partitions.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import functions as F

from anabranch.spark import spark_session
from tests.spark import small_jvm
from tests.spark.disturbed import DisturbedSource
from tests.spark.sink_place import numbers

MAX_FAILURES = 4


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    spark = spark_session(
        "disturbed",
        f"local[2,{MAX_FAILURES}]",
        small_jvm.settings(str(folder)),
    )
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(DisturbedSource)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    # In this order: when its JVM is gone the driver could still say so.
    pids = [os.getpid(), int(jvm.java.lang.ProcessHandle.current().pid())]
    (folder / "driver.json").write_text(json.dumps(pids))
    options = {"bootstrap": settings["bootstrap"], "keepalive": "30"}

    if settings["batch"]:
        rows = numbers(spark, settings["rows"], settings["partitions"])
        rows = rows.withColumn("value", F.concat("value", F.lit("-" * 100)))
        batch = rows.write.format("disturbed").mode("append").options(**options)
        batch.option("stream", settings["batch"]).save()

    source = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
    writer = source.text(str(folder / "in")).writeStream.format("disturbed").options(**options)
    query = (
        writer.option("stream", settings["stream"])
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
