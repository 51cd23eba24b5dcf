"""A Spark session that knows the format "anabranch"."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from anabranch.spark.datasource import AnabranchDataSource
from anabranch.spark.java import check_java
from anabranch.spark.worker_python import use_installed_pyspark

# Spark refuses sources that take filters unless this is on.
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}


def register(spark: SparkSession) -> None:
    """Add ``format("anabranch")`` to a session, and let Spark push filters down to it.

    The executors' Python needs anabranch installed, as it needs any other package.
    """
    spark.conf.set(_PUSHDOWN, "true")
    spark.dataSource.register(AnabranchDataSource)


def spark_session(
    app: str = "anabranch",
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """This process's session with the format registered; made if there is none.

    ``master``: Spark's master URL; None: the one of spark-submit or the configuration, else ``local[*]``.
    ``settings``: further settings of Spark. Workers run this Python unless PYSPARK_PYTHON names another;
    on this machine they start quickly.

    Raises:
        NoJdk: there is no JDK 17 or later; the message says how to get one.
    """
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.Builder().appName(app)
    if master is not None:
        builder = builder.master(master)
    for name, value in (_DEFAULTS | dict(settings or {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if isinstance(
        spark, SparkSession
    ):  # under SPARK_REMOTE it is Spark Connect's, with workers elsewhere
        use_installed_pyspark(spark.sparkContext)
    register(spark)
    return spark
