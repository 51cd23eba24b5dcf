"""The web process on the session's cluster, as a person starts it, and a browser to look at it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from tests.cluster import Cluster, words
from tests.owned import send_signal, start_module
from tests.secured import CLIENT, entrance

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@dataclass
class WebProcess:
    """`anabranch web` in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def host(self) -> str:
        """``127.0.0.1:port``."""
        return self.url.split("/")[2]

    def ask(
        self,
        path: str,
        form: dict[str, str] | None = None,
        method: str = "",
        **headers: str | None,
    ) -> tuple[int, str]:
        """Status and text of a request; as a form of its own pages, if there is one. None takes a header away."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        body = None if form is None else urlencode(form)
        sent: dict[str, str | None] = {"host": self.host}
        if form is not None:
            sent |= {"origin": self.url.rstrip("/"), "sec-fetch-site": "same-origin"}
            sent |= {"content-type": "application/x-www-form-urlencoded"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method or ("GET" if body is None else "POST"), path, skip_host=True)
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(None if body is None else body.encode())
        answer = connection.getresponse()
        told = answer.status, answer.read().decode()
        connection.close()
        return told

    def secret(self, path: str) -> str:
        """The secret of a confirmation page."""
        status, text = self.ask(path)
        assert status == 200, text
        return text.partition('name="secret" value="')[2].partition('"')[0]

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.process.pid, number)


def start_web(bootstrap: str, folder: Path, *arguments: str) -> WebProcess:
    """Start it and wait for its address."""
    folder.mkdir(parents=True, exist_ok=True)
    address, options = entrance(bootstrap, CLIENT)
    line = ["web", "--bootstrap", address, *words(options), "--port", "0", "--json", *arguments]
    log = folder / "web.log"
    with log.open("wb") as out:
        process = start_module("anabranch.cli", line, output=out, environment=os.environ)
    until = time.monotonic() + 30
    while '"url"' not in (said := log.read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < until, said
        time.sleep(0.05)
    document = json.loads(next(line for line in said.splitlines() if '"url"' in line))
    return WebProcess(document["url"], process, log)


@pytest.fixture(scope="session")
def web(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebProcess]:
    """The session's web process; it may act."""
    running = start_web(cluster.bootstrap, tmp_path_factory.mktemp("web"), "--allow-actions")
    yield running
    running.process.kill()
    running.process.wait(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, for one file: its driver keeps the thread's event loop."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "Debian's chromium is missing: apt-get install chromium (scripts/setup does it)"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()
