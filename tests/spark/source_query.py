"""A streaming query that will be killed: each micro-batch becomes a file, by its id and the attempt.

Run with the settings as JSON: bootstrap, streams, folder. It goes on for ever; a query that fails is started again.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.spark import spark_session
from tests.spark import small_jvm


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    spark = spark_session(
        "killed",
        "local[2,4]",
        small_jvm.settings(str(folder)),
    )
    spark.sparkContext.setLogLevel("OFF")
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    pids = [os.getpid(), int(jvm.java.lang.ProcessHandle.current().pid())]
    (folder / "pids.new").write_text(json.dumps(pids))
    (folder / "pids.new").replace(folder / "pids")

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
    while True:
        frame = spark.readStream.format("anabranch").options(**options).load()
        writer = frame.writeStream.foreachBatch(write).trigger(processingTime="0 seconds")
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            print(str(error).partition("\n")[0], flush=True)


if __name__ == "__main__":
    main()
