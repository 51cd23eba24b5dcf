"""The Python of Spark's workers on this machine, made to start a second sooner.

Spark puts its pyspark.zip before all other imports of a worker, and the zip holds no compiled code: each worker
process and each planner compiles the modules it imports. The installed package holds the same modules, compiled.
"""

from __future__ import annotations

import os
import shlex
import site
import sys
from pathlib import Path

import pyspark
from pyspark import SparkContext, SparkFiles

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


def use_installed_pyspark(context: SparkContext) -> None:
    """Let workers import the installed pyspark, if they surely have it: those of a local master.

    A cluster's workers may lack the path. Nothing changes either if another Python is chosen, or if Spark does not
    run out of the installed package.
    """
    master = context.master or ""
    local = master == "local" or master.startswith("local[")
    package = Path(pyspark.__file__).parent
    if not local or context.pythonExec != sys.executable or not _is_found_by_itself(package):
        return
    launcher = Path(SparkFiles.getRootDirectory(), _NAME)  # Spark removes the folder
    try:
        launcher.write_text(launcher_of(package), encoding="utf-8")
        launcher.chmod(0o700)
    except OSError:
        return
    if os.access(launcher, os.X_OK):  # not on a file system without execution
        context.pythonExec = str(launcher)


def launcher_of(package: Path) -> str:
    """A shell script that runs this Python without the package's zip first in its path."""
    archive = package / "python" / "lib" / "pyspark.zip"
    return _LAUNCHER.format(zip=shlex.quote(str(archive)), python=shlex.quote(sys.executable))


def _is_found_by_itself(package: Path) -> bool:
    """Whether any process of this Python imports the package, without changes to its path."""
    if os.name != "posix":
        return False
    places = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    return package.parent.resolve() in {Path(place).resolve() for place in places}
