"""The cache of the broker's jars, against a small repository on the loopback interface."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anabranch.infra import fetch
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.errors import CacheBusy, DownloadFailed, HashMismatch
from anabranch.infra.fetch import (
    KAFKA_VERSION,
    LOCK_VARIABLE,
    BrokerLock,
    LockedJar,
    Progress,
    broker_lock,
    ensure_broker,
)
from tests.containers import versions

# jgo leaves the connection of a refused download to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

CONTENT = {"a": b"first " * 1000, "b": b"second " * 2000, "c": b"third"}
PATHS = {f"/org/example/{name}/1.0/{name}-1.0.jar": CONTENT[name] for name in CONTENT}
LOCK = BrokerLock(
    "0",
    (),
    tuple(
        LockedJar(f"org.example:{n}:1.0", f"{n}-1.0.jar", hashlib.sha256(it).hexdigest(), len(it))
        for n, it in CONTENT.items()
    ),
)


class Repository:
    """Serves `PATHS`; ``answers`` maps a path to the answers to give first, one a request.

    An answer is a status, or bytes to send instead; None sends half of the announced length.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.answers: dict[str, list[int | bytes | None]] = {}
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path
        if path.endswith(".jar"):
            self.requests[path.rsplit("/", 1)[1]] += 1
        first = self.answers.get(path)
        answer = first.pop(0) if first else PATHS.get(path, 404)
        if isinstance(answer, int):
            request.send_error(answer)
            return
        body = PATHS[path] if answer is None else answer
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if answer is None else body)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setattr(fetch, "broker_lock", lambda: LOCK)
    monkeypatch.setattr(fetch, "_BACKOFF_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Repository()
    monkeypatch.setenv(fetch.REPOSITORY_VARIABLE, served.url)
    yield served
    served.close()
    gc.collect()  # here, where the warning is expected, not in another test


def whole(folder: Path) -> bool:
    return {p.name: p.read_bytes() for p in folder.glob("*.jar")} == {
        f"{name}-1.0.jar": content for name, content in CONTENT.items()
    }


def test_a_first_fetch_reports_its_progress_and_a_second_needs_no_network(
    repository: Repository, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    paths = ensure_broker(seen.append, folder=tmp_path)
    assert [path.name for path in paths] == ["a-1.0.jar", "b-1.0.jar", "c-1.0.jar"]
    assert whole(tmp_path)
    assert [p.done_files for p in seen] == [1, 2, 3]
    assert seen[-1].done_bytes == seen[-1].total_bytes == LOCK.size
    repository.close()
    fetch._verified.clear()
    assert ensure_broker(seen.append, folder=tmp_path) == paths
    assert len(seen) == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(fetch._STAGING)] == []


@pytest.mark.parametrize("fresh_process", [True, False])
@pytest.mark.parametrize("damage", ["tampered", "truncated", "missing"])
def test_a_damaged_jar_is_found_and_fetched_again(
    repository: Repository, tmp_path: Path, damage: str, fresh_process: bool
) -> None:
    for _ in range(2):  # the second one remembers what it verified
        ensure_broker(folder=tmp_path)
    jar = tmp_path / "b-1.0.jar"
    stat = jar.stat()
    if damage == "missing":
        jar.unlink()
    else:
        jar.write_bytes(CONTENT["b"][:-1] + (b"" if damage == "truncated" else b"!"))
        os.utime(jar, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if fresh_process:
        fetch._verified.clear()
    ensure_broker(folder=tmp_path)
    assert whole(tmp_path)
    assert repository.requests == {"a-1.0.jar": 1, "b-1.0.jar": 2, "c-1.0.jar": 1}


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"<html>log in</html>", HashMismatch, r"b-1\.0\.jar has SHA-256 .* served another file"),
        (404, DownloadFailed, r"b-1\.0\.jar could not be fetched"),
    ],
)
def test_a_wrong_answer_is_a_named_error_and_not_kept(
    repository: Repository, tmp_path: Path, answer: int | bytes, error: type[Exception], says: str
) -> None:
    repository.answers["/org/example/b/1.0/b-1.0.jar"] = [answer] * 3
    with pytest.raises(error, match=says):
        ensure_broker(folder=tmp_path)
    assert not (tmp_path / "b-1.0.jar").exists()
    assert repository.requests["b-1.0.jar"] == 3
    ensure_broker(folder=tmp_path)
    assert whole(tmp_path)


@pytest.mark.parametrize("answer", [503, None, b"torn"])
def test_passing_failures_are_tried_again(
    repository: Repository, tmp_path: Path, answer: int | bytes | None
) -> None:
    repository.answers["/org/example/a/1.0/a-1.0.jar"] = [answer, answer]
    ensure_broker(folder=tmp_path)
    assert whole(tmp_path)
    assert repository.requests["a-1.0.jar"] == 3


def test_a_repository_that_refuses_is_a_named_error(repository: Repository, tmp_path: Path) -> None:
    repository.close()
    with pytest.raises(DownloadFailed, match=r"could not be fetched, after 3 attempts: .*refused"):
        ensure_broker(folder=tmp_path)
    assert list(tmp_path.glob("*.jar")) == []


def test_the_rest_of_a_killed_fetch_is_cleared_away(repository: Repository, tmp_path: Path) -> None:
    left_over = tmp_path / f"{fetch._STAGING}dead"
    left_over.mkdir()
    (left_over / "half.jar").write_bytes(b"x")
    ensure_broker(folder=tmp_path)
    assert not left_over.exists()


FETCH_IN_CHILD = """
import sys
from pathlib import Path
from anabranch.infra import fetch
from tests.infra.test_fetch import LOCK
fetch.broker_lock = lambda: LOCK
fetch.ensure_broker(folder=Path(sys.argv[1]))
"""


def test_processes_that_fetch_at_once_fetch_once(repository: Repository, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    children = [
        subprocess.Popen([sys.executable, "-c", FETCH_IN_CHILD, str(tmp_path)], cwd=root)
        for _ in range(3)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert whole(tmp_path)
    assert set(repository.requests.values()) == {1}


def test_a_lock_that_is_never_released_is_a_named_error(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_LOCK_DEADLINE_S", 0.2)
    with fetch._locked(tmp_path / ".lock"), pytest.raises(CacheBusy):
        ensure_broker(folder=tmp_path)


def test_the_cache_is_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    assert fetch.broker_cache() == tmp_path / f"kafka-{KAFKA_VERSION}"
    monkeypatch.delenv(fetch.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_root() == tmp_path / ".cache" / "anabranch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert fetch.cache_root() == tmp_path / ".cache" / "anabranch"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert fetch.cache_root() == Path("/var/cache/me/anabranch")


def test_another_lock_is_another_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its jars have a folder of their own, and what it can't format is not asked of it."""
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(versions.VERSION_VARIABLE, "3.9.2")
    monkeypatch.setenv(LOCK_VARIABLE, "")  # and as it was at the end
    versions.embed_wanted()
    assert broker_lock().kafka_version == "3.9.2"
    assert fetch.broker_cache() == tmp_path / "kafka-3.9.2"
    assert EmbeddedBroker().transaction_version == 0
    monkeypatch.setenv(versions.VERSION_VARIABLE, "1.0")
    with pytest.raises(ValueError, match=r"1\.0: must be one of 3\.9\.2, .*, 4\.3\.1"):
        versions.embed_wanted()
    monkeypatch.delenv(LOCK_VARIABLE)
    assert EmbeddedBroker().transaction_version == 2


def test_the_shipped_lock_is_sound() -> None:
    lock = broker_lock()
    assert lock.kafka_version == KAFKA_VERSION
    files = [jar.file for jar in lock.jars]
    assert len(files) == len(set(files)) == 46
    assert f"kafka-clients-{KAFKA_VERSION}.jar" in files
    # Without a binding of SLF4J the broker would log nothing.
    assert any(file.startswith("log4j-slf4j-impl-") for file in files)
    assert all(len(bytes.fromhex(jar.sha256)) == 32 and jar.size > 1000 for jar in lock.jars)
    assert all(len(jar.coordinate.split(":")) == 3 for jar in lock.jars)
    assert BrokerLock.from_json(lock.to_json()) == lock
