"""The web process among others: its port, its end, and that nothing depends on it."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import anabranch
from tests.cluster import Cluster
from tests.web.conftest import WebProcess, start_web

pytestmark = pytest.mark.broker


@contextmanager
def looking(web: WebProcess, path: str) -> Iterator[http.client.HTTPResponse]:
    """A browser that follows the page."""
    with closing(http.client.HTTPConnection(web.host, timeout=10)) as browser:
        browser.request("GET", path, headers={"Accept": "text/event-stream"})
        yield browser.getresponse()


def test_a_port_in_use_is_named(cluster: Cluster) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        line = [
            sys.executable,
            "-m",
            "anabranch.cli",
            "web",
            "-b",
            cluster.bootstrap,
            "--port",
            port,
        ]
        began = time.monotonic()
        ended = subprocess.run(line, capture_output=True, text=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout) == (6, "")
    assert ended.stderr.startswith(f"PortTaken: port {port} is in use")
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_stuck_or_killed_it_changes_nothing_for_others(
    cluster: Cluster, client: anabranch.Client, tmp_path: Path, unique: str
) -> None:
    stream = f"{unique}/s"
    client.create_stream(stream)
    web = start_web(cluster.bootstrap, tmp_path)

    def commit() -> float:
        began = time.monotonic()
        with client.begin(unique) as txn:
            txn.write(stream, b"v")
            txn.commit(timeout=20)
        return time.monotonic() - began

    with looking(web, f"/streams/{stream}") as answer:
        assert answer.readline().startswith(b"data: ")
        commit()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            web.signal(number)
            assert sorted(commit() for _ in range(20))[10] < 2
            client.scale(stream, 1 + len(client.describe(stream).segments))
        web.process.wait(10)
    with client.read(stream, timeout=2) as events:
        assert sum(1 for _ in events) == 41


def test_pages_are_read_only_without_a_secret_and_the_process_ends_while_browsers_poll(
    cluster: Cluster, client: anabranch.Client, tmp_path: Path, unique: str
) -> None:
    web = start_web(cluster.bootstrap, tmp_path, "--host-name", "Proxy.example")
    client.create_stream(f"{unique}/s")
    path = f"/streams/{unique}/s"
    status, text = web.ask(path, host="proxy.example:80")
    assert (status, f"{path}/" in text, "read only" in text) == (200, False, True)
    for form in (None, {"secret": "x"}):
        status, text = web.ask(f"{path}/delete", form)
        assert (status, "--allow-actions" in text) == (403, True)
    with looking(web, path) as answer:
        assert answer.status == 200
        web.signal(signal.SIGTERM)
        assert web.process.wait(10) == 143
    assert "Traceback" not in web.log.read_text()
