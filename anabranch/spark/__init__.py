"""Spark sources and sinks for streams, and jobs made of them (`docs/spark.md`).

``register(spark)`` adds the format "anabranch" to a session. Importing this needs PySpark: ``pip install
'anabranch[spark]'``.

- ``datasource``: start here, as Spark does: it asks for a source or a sink. ``options`` checks the options.
- ``source``: a snapshot of streams for one job (``plan``, ``reader``), or commits, micro-batch by micro-batch
  (``stream_reader``, which uses ``admission``, ``histories`` and ``positions``).
- ``sink``: ``writer`` writes a job or a micro-batch in one transaction; ``encoding`` makes rows into events.
- ``load``, ``export`` and ``compact`` are whole jobs; ``jobs`` is what they share.
- ``api``: parts of Spark that older versions lack. ``clients``: one client for each Python worker. ``columns``: the
  columns of events. ``failures``: finds anabranch's errors in the texts of Spark's. ``progress``: a listener to
  streaming queries. ``session``: a session with the format.

This folder may import the client and what is below it; from ``infra`` only the function that finds Java.
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
