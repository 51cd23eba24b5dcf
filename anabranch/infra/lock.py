"""The lock file: which jars make up the broker, each with its SHA-256 and size.

``python -m tests.containers.versions`` resolves the broker's dependencies and rewrites the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

KAFKA_VERSION = "4.3.1"
DOWNLOADS_AT_ONCE = 4
LOCK_NAME = f"kafka-{KAFKA_VERSION}.lock.json"
LOCK_VARIABLE = "ANABRANCH_KAFKA_LOCK"


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
