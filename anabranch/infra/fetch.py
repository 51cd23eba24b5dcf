"""Fetches the broker's jars once and keeps them in a cache.

The lock file names the jars, each with its SHA-256 and size; ``python -m tests.containers.versions`` writes it,
after resolving the broker's dependencies. Every jar is checked against it before it comes into the cache, and when
a process first uses the cache (46 files, 45 MB: about 40 ms); later the process hashes a file again only if its
size or times changed. A file that does not match is fetched again. A full cache needs neither the network nor jgo.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.extras import need
from anabranch.infra.errors import CacheBusy, DownloadFailed, HashMismatch

if TYPE_CHECKING:
    from jgo.maven import MavenContext

CACHE_VARIABLE = "ANABRANCH_CACHE"
REPOSITORY_VARIABLE = "ANABRANCH_MAVEN_REPOSITORY"
_STAGING = ".fetch-"
_ATTEMPTS = 3
_BACKOFF_S = 0.5
_HTTP_TIMEOUT_S = 60
_LOCK_DEADLINE_S = 600.0
_LOCK_POLL_S = 0.1

# The stat of each jar when this process last found its hash right.
_verified: dict[Path, tuple[int, int, int, int]] = {}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a fetch. ``file``: the last file that was fetched."""

    file: str
    done_files: int
    total_files: int
    done_bytes: int
    total_bytes: int


def cache_root() -> Path:
    """The folder of all caches: ``$ANABRANCH_CACHE``, ``$XDG_CACHE_HOME/anabranch`` or ``~/.cache/anabranch``."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = shared if shared.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return home / "anabranch"


def broker_cache() -> Path:
    return cache_root() / f"kafka-{broker_lock().kafka_version}"


def report(progress: Progress) -> None:
    """Print the progress of a fetch to standard error."""
    end = "\n" if progress.done_files == progress.total_files else ""
    start = "\r" if sys.stderr.isatty() else ""
    if start or end or progress.done_files == 1:
        sys.stderr.write(
            f"{start}Kafka {broker_lock().kafka_version}: {progress.done_files}/"
            f"{progress.total_files} files, {progress.done_bytes / 1e6:.1f}/"
            f"{progress.total_bytes / 1e6:.1f} MB{end or ('' if start else chr(10))}"
        )
        sys.stderr.flush()


def ensure_broker(
    progress: Callable[[Progress], None] | None = None,
    *,
    folder: Path | None = None,
    lock: BrokerLock | None = None,
) -> list[Path]:
    """The broker's class path, after jars that are missing or damaged in the cache are fetched.

    Several processes may call this concurrently: one fetches, the others wait for it.
    ``$ANABRANCH_MAVEN_REPOSITORY``: the address of a Maven repository to use instead of Maven Central.

    Args:
        progress: called after each fetched file, in the caller's thread.
        folder: the cache; `broker_cache` by default.
        lock: the jars of another version of the broker, which need another folder.

    Raises:
        DownloadFailed: a file could not be fetched, after three attempts.
        HashMismatch: the repository served another file than the lock file names.
        CacheBusy: another process fetched for more than ten minutes.
    """
    lock = lock or broker_lock()
    folder = folder or broker_cache()
    paths = [folder / jar.file for jar in lock.jars]
    if all(_is_good(folder, jar) for jar in lock.jars):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        # Another process may have fetched them during the wait.
        missing = [jar for jar in lock.jars if not _is_good(folder, jar)]
        if missing:
            repository = os.environ.get(REPOSITORY_VARIABLE) or None
            _fetch(lock, missing, folder, repository, progress)
    return paths


def _is_good(folder: Path, jar: LockedJar) -> bool:
    path = folder / jar.file
    try:
        stat = path.stat()
        if stat.st_size != jar.size:
            return False
        # The change time, too: it can't be set back, as the modification time can.
        mark = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        if _verified.get(path) == mark:
            return True
        if sha256_of(path) != jar.sha256:
            return False
    except OSError:
        return False
    _verified[path] = mark
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock ``path``; the kernel frees it if the process dies. Raises: CacheBusy."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CacheBusy(
                        f"another process has held {path} for {_LOCK_DEADLINE_S:.0f} s: "
                        "end it, then call again"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


def _fetch(
    lock: BrokerLock,
    missing: Sequence[LockedJar],
    folder: Path,
    repository: str | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    need("jgo", extra="local")
    from jgo.maven import MavenContext

    for left_over in folder.glob(f"{_STAGING}*"):
        # A killed process left it: this one has the lock, so no process uses it.
        shutil.rmtree(left_over, ignore_errors=True)
    # Inside the cache folder, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder) as staging:
        maven = MavenContext(
            repo_cache=Path(staging),
            remote_repos={"given": repository.rstrip("/")} if repository else None,
            timeout=_HTTP_TIMEOUT_S,
        )
        absent = {jar.file for jar in missing}
        done_files = len(lock.jars) - len(missing)
        done_bytes = sum(jar.size for jar in lock.jars if jar.file not in absent)
        pool = ThreadPoolExecutor(DOWNLOADS_AT_ONCE, thread_name_prefix="anabranch-fetch")
        try:
            tasks = {pool.submit(_fetch_one, maven, jar, folder): jar for jar in missing}
            for task in as_completed(tasks):
                task.result()
                done_files += 1
                done_bytes += tasks[task].size
                if progress is not None:
                    progress(
                        Progress(
                            tasks[task].file, done_files, len(lock.jars), done_bytes, lock.size
                        )
                    )
        finally:
            # After the first failure, no further file is fetched.
            pool.shutdown(wait=True, cancel_futures=True)


def _fetch_one(maven: MavenContext, jar: LockedJar, folder: Path) -> None:
    artifact = maven.create_dependency(jar.coordinate).artifact
    for attempt in range(1, _ATTEMPTS + 1):
        # jgo takes an existing file for complete: an interrupted download must not stay.
        if artifact.cached_path is not None:
            artifact.cached_path.unlink(missing_ok=True)
        try:
            fetched = artifact.resolve()
            found = sha256_of(fetched)
        # jgo and requests raise these for any failure of a download.
        except (OSError, RuntimeError, AssertionError) as error:
            if attempt == _ATTEMPTS:
                raise DownloadFailed(
                    f"{jar.file} could not be fetched, after {_ATTEMPTS} attempts: {error}"
                ) from error
        else:
            if found == jar.sha256:
                os.replace(fetched, folder / jar.file)
                return
            if attempt == _ATTEMPTS:
                raise HashMismatch(jar.file, jar.sha256, found)
        time.sleep(_BACKOFF_S * attempt)


KAFKA_VERSION = "4.3.1"
DOWNLOADS_AT_ONCE = 4
LOCK_NAME = f"kafka-{KAFKA_VERSION}.lock.json"
LOCK_VARIABLE = "ANABRANCH_KAFKA_LOCK"


@dataclass(frozen=True, slots=True)
class LockedJar:
    """A jar. ``coordinate``: Maven's, ``group:artifact:version``. ``size``: bytes."""

    coordinate: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class BrokerLock:
    """The jars of a broker version, in the order of the class path."""

    kafka_version: str
    roots: tuple[str, ...]
    jars: tuple[LockedJar, ...]

    @property
    def size(self) -> int:
        return sum(jar.size for jar in self.jars)

    @property
    def transaction_version(self) -> int:
        """The highest level of ``transaction.version`` for formatting: 0 with Kafka 3, else 2."""
        return 0 if self.kafka_version.startswith("3.") else 2

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BrokerLock:
        loaded = json.loads(text)
        return cls(
            kafka_version=loaded["kafka_version"],
            roots=tuple(loaded["roots"]),
            jars=tuple(LockedJar(**jar) for jar in loaded["jars"]),
        )


def broker_lock() -> BrokerLock:
    """The lock file of this version of anabranch, or that of ``$ANABRANCH_KAFKA_LOCK``. Raises: OSError."""
    return _read_lock(os.environ.get(LOCK_VARIABLE) or None)


@cache
def _read_lock(path: str | None) -> BrokerLock:
    if path is not None:
        return BrokerLock.from_json(Path(path).read_text(encoding="utf-8"))
    text = resources.files("anabranch.infra").joinpath(LOCK_NAME).read_text(encoding="utf-8")
    return BrokerLock.from_json(text)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
