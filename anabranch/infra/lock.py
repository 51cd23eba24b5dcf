"""The lock file: which jars make up the broker, each with its SHA-256 and size.

``python -m anabranch.infra.lock`` resolves the broker's dependencies and rewrites the file. Run it by hand when the
version changes, with the network, and read the difference before you commit it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

KAFKA_VERSION = "4.3.1"
DOWNLOADS_AT_ONCE = 4
LOCK_NAME = f"kafka-{KAFKA_VERSION}.lock.json"
LOCK_VARIABLE = "ANABRANCH_KAFKA_LOCK"

# The broker logs through SLF4J, but its POM names no binding: the second root is one.
ROOTS = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)


@dataclass(frozen=True, slots=True)
class LockedJar:
    """One jar: its Maven coordinate (``group:artifact:version``), file name, hash, bytes."""

    coordinate: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class BrokerLock:
    """The jars of one broker version, in the order of the class path."""

    kafka_version: str
    roots: tuple[str, ...]
    jars: tuple[LockedJar, ...]

    @property
    def size(self) -> int:
        """Bytes of all jars."""
        return sum(jar.size for jar in self.jars)

    @property
    def transaction_version(self) -> int:
        """The highest level of ``transaction.version`` that can be formatted: with Kafka 3 only 0."""
        return 0 if self.kafka_version.startswith("3.") else 2

    def to_json(self) -> str:
        """The lock file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BrokerLock:
        """The lock in a lock file's text."""
        loaded = json.loads(text)
        return cls(
            kafka_version=loaded["kafka_version"],
            roots=tuple(loaded["roots"]),
            jars=tuple(LockedJar(**jar) for jar in loaded["jars"]),
        )


def broker_lock() -> BrokerLock:
    """The lock of this version of anabranch, or of the file that ``$ANABRANCH_KAFKA_LOCK`` names.

    Raises:
        OSError: the named file can't be read.
    """
    return _read_lock(os.environ.get(LOCK_VARIABLE) or None)


@cache
def _read_lock(path: str | None) -> BrokerLock:
    if path is not None:
        return BrokerLock.from_json(Path(path).read_text(encoding="utf-8"))
    text = resources.files("anabranch.infra").joinpath(LOCK_NAME).read_text(encoding="utf-8")
    return BrokerLock.from_json(text)


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resolve(roots: tuple[str, ...] = ROOTS) -> BrokerLock:
    """Resolve Maven coordinates with jgo; download every jar into a temporary folder to hash it.

    Args:
        roots: Maven coordinates, the broker's first.
    """
    from jgo.maven import Artifact, MavenContext

    with tempfile.TemporaryDirectory(prefix="anabranch-lock-") as folder:
        maven = MavenContext(repo_cache=Path(folder), timeout=60)
        found: dict[str, Artifact] = {}
        for root in roots:
            # Each root alone: resolved together, each root's POM would manage the other's versions.
            inputs, transitive = maven.resolver.resolve([maven.create_dependency(root)])
            for dep in [*inputs, *(d for d in transitive if d.scope in ("compile", "runtime"))]:
                found.setdefault(f"{dep.groupId}:{dep.artifactId}", dep.artifact)
        with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
            paths = list(pool.map(lambda artifact: artifact.resolve(), found.values()))
        jars = tuple(
            LockedJar(f"{key}:{artifact.version}", path.name, sha256_of(path), path.stat().st_size)
            for (key, artifact), path in zip(found.items(), paths, strict=True)
        )
    return BrokerLock(roots[0].rsplit(":", 1)[1], roots, jars)


def main() -> None:
    """Rewrite the lock file beside this module."""
    lock = resolve()
    path = Path(__file__).with_name(LOCK_NAME)
    path.write_text(lock.to_json(), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(lock.jars)} jars, {lock.size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
