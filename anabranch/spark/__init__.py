"""Spark sources and sinks for streams, and pipelines made of them (`docs/spark.md`).

``register(spark)`` adds the format "anabranch" to a session. Importing this needs PySpark:
``pip install 'anabranch[spark]'``.
"""

from __future__ import annotations

from anabranch.extras import need

need("pyspark", "pyarrow", "numba", extra="spark")

from anabranch.spark.progress import (  # noqa: E402 - a refusal comes first
    Progress,
    ProgressListener,
    measured,
)
from anabranch.spark.session import register, spark_session  # noqa: E402
from anabranch.spark.sink.avro_rows import avro_schema  # noqa: E402
from anabranch.spark.source.positions import lag  # noqa: E402

__all__ = [
    "Progress",
    "ProgressListener",
    "avro_schema",
    "lag",
    "measured",
    "register",
    "spark_session",
]
