"""Other versions of Kafka to test with: ``ANABRANCH_TEST_KAFKA`` names one, each has a lock file here.

It holds for embedded brokers and for the image that `tests.containers.image` makes.

``python -m tests.containers.versions VERSION...`` resolves their jars with the network and writes those files, the
embedded broker's own next to its code; read the difference before you commit it. ``--fetch`` only brings the jars
of the version named.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anabranch.infra import fetch as own
from anabranch.infra.fetch import (
    DOWNLOADS_AT_ONCE,
    KAFKA_VERSION,
    LOCK_NAME,
    LOCK_VARIABLE,
    BrokerLock,
    LockedJar,
    cache_root,
    ensure_broker,
    sha256_of,
)

VERSION_VARIABLE = "ANABRANCH_TEST_KAFKA"
LOCKS = Path(__file__).with_name("locks")
# The broker logs through SLF4J, but its POM names no binding: this is one.
_LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"
# Before 4.0 the broker itself calls Log4j 1: this takes the calls on.
_OLD_LOGGING = "org.apache.logging.log4j:log4j-1.2-api:2.25.4"


def lock_file(version: str) -> Path:
    """The path of a version's lock."""
    if version == KAFKA_VERSION:
        return Path(own.__file__).with_name(LOCK_NAME)
    return LOCKS / f"kafka-{version}.lock.json"


def wanted_version() -> str:
    """The version named in the environment, or the embedded broker's."""
    return os.environ.get(VERSION_VARIABLE) or KAFKA_VERSION


def jars_of(version: str) -> list[Path]:
    """The class path of a version's broker; fetches what the cache lacks.

    Raises:
        OSError: the version has no lock file.
        DownloadFailed, HashMismatch, CacheBusy: see `ensure_broker`.
    """
    if version == KAFKA_VERSION:
        return ensure_broker()
    lock = BrokerLock.from_json(lock_file(version).read_text("utf-8"))
    return ensure_broker(lock=lock, folder=cache_root() / f"kafka-{version}")


def embed_wanted() -> None:
    """Let embedded brokers of this process, and of those it starts, be of the version wanted.

    Raises:
        ValueError: it has no lock file.
    """
    version = wanted_version()
    if version == KAFKA_VERSION:
        return
    if not lock_file(version).exists():
        known = sorted(
            file.name.split("-")[1].removesuffix(".lock.json") for file in LOCKS.iterdir()
        )
        raise ValueError(
            f"{VERSION_VARIABLE}={version}: must be one of {', '.join([*known, KAFKA_VERSION])}"
        )
    os.environ[LOCK_VARIABLE] = str(lock_file(version))


def roots_of(version: str) -> tuple[str, ...]:
    """The Maven coordinates to resolve for a version."""
    old = (_OLD_LOGGING,) if version.startswith("3.") else ()
    return (f"org.apache.kafka:kafka_2.13:{version}", _LOGGING, *old)


def resolve(roots: tuple[str, ...]) -> BrokerLock:
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
    """Writes the lock files of the versions given; or, with ``--fetch``, fetches."""
    if sys.argv[1:] == ["--fetch"]:
        jars_of(wanted_version())
        return
    LOCKS.mkdir(exist_ok=True)
    for version in sys.argv[1:]:
        lock = resolve(roots_of(version))
        lock_file(version).write_text(lock.to_json(), "utf-8")
        sys.stdout.write(f"{version}: {len(lock.jars)} jars, {lock.size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
