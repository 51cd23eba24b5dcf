"""Spark sources and sinks, and the pipelines made of them (`docs/spark.md`).

``register(spark)`` adds the format "anabranch" to a session. Importing this needs PySpark:
``pip install anabranch[spark]``.
"""

from __future__ import annotations

from anabranch.spark.session import register, spark_session
from anabranch.spark.sink.avro_rows import avro_schema
from anabranch.spark.source.positions import lag

__all__ = ["avro_schema", "lag", "register", "spark_session"]
