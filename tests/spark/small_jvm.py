"""Settings of every Spark session here: of one that lives for minutes, or less, on two cores."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

# To compile the plan of every small query costs more than it brings, and so do more tasks.
PLANS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def settings(folder: str) -> dict[str, str]:
    """``folder``: for everything that Spark writes by itself."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # As with the broker: in some minutes a second compiler costs more than it brings.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": folder,
    }


def quick_python(folder: str) -> str:
    """A launcher of this Python for Spark's workers ($PYSPARK_PYTHON), in ``folder``.

    Spark puts pyspark.zip before everything else, in which nothing is compiled: each worker would compile all
    that it imports, a second of its time. This one takes the package that is installed, the same one.
    """
    launcher = Path(folder, "python")
    path = shlex.quote(os.environ.get("PYTHONPATH", ""))
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
    launcher.chmod(0o755)
    return str(launcher)
