"""Spark's daemon of Python workers, which has loaded what they load: each one that it forks is there at once."""

from __future__ import annotations

import gc
import os
import runpy

# No thread may run in a process that forks: pyarrow's allocator has one, NumPy's algebra one for each core.
os.environ |= {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}

if __name__ == "__main__":
    import pandas as pd  # noqa: F401

    import anabranch.audit.run
    import anabranch.spark.sink.writer
    import anabranch.spark.source.reader
    import anabranch.spark.source.stream_reader  # noqa: F401
    from anabranch.batches import columns_read, columns_write

    columns_read.warm()
    columns_write.warm()
    gc.collect()
    gc.freeze()  # a worker collects after each of its tasks, and would walk through all of it
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
