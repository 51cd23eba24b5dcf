"""Settings of every Spark session here: of one that lives for minutes, or less, on two cores."""

from __future__ import annotations

# To compile the plan of every small query costs more than it brings, and so do more tasks.
PLANS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


def settings(folder: str) -> dict[str, str]:
    """``folder``: for everything that Spark writes by itself."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # As with the broker: in some minutes a second compiler costs more than it brings.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
        # With one compiler it is 48 MB, which hundreds of plans fill: then nothing more is compiled.
        "-XX:ReservedCodeCacheSize=240m",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": folder,
    }
