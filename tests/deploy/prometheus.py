"""Debian's Prometheus, downloaded and unpacked, not installed; a server that scrapes processes under test."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from anabranch.infra.fetch import cache_root
from anabranch.infra.sockets import HOST, free_port
from tests.owned import start_module

START_S = 60.0
MISSING = (
    "Prometheus is missing, and alerts and dashboard are tested on it. On Debian and Ubuntu it is downloaded by "
    "`apt-get download prometheus`, after an `apt-get update`; elsewhere put prometheus and promtool on the PATH"
)


@cache
def program(name: str) -> Path:
    """The path of ``prometheus`` or ``promtool``; a failure, never a skip, without them."""
    if found := shutil.which(name):
        return Path(found)
    folder = cache_root() / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "usr/bin" / name).exists():
            _unpack(folder)
    return folder / "usr/bin" / name


def _unpack(folder: Path) -> None:
    assert all(map(shutil.which, ("apt-get", "dpkg-deb"))), MISSING
    with tempfile.TemporaryDirectory(prefix="anabranch-deb-") as loaded:
        command = ["apt-get", "-qq", "download", "prometheus"]
        done = subprocess.run(command, cwd=loaded, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            subprocess.run(["apt-get", "-qq", "update"], capture_output=True, check=False)
            done = subprocess.run(command, cwd=loaded, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{MISSING}: {done.stderr}"
        (package,) = Path(loaded).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


class Prometheus:
    """A server in a folder of its own, as a context manager; it ends with its owner."""

    def __init__(self, folder: Path, jobs: Mapping[str, Iterable[str]], rules: str) -> None:
        """``jobs``: name -> targets, HOST:PORT. ``rules``: the text of a file of rules."""
        self.folder, self.port = folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "alerts.yml").write_text(rules)
        scraped = [
            {"job_name": name, "static_configs": [{"targets": list(targets)}]}
            for name, targets in jobs.items()
        ]
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": scraped,
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        words = [
            str(program("prometheus")),
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={HOST}:{self.port}",
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = start_module(
                "tests.deploy.prometheus", words, output=log, environment=os.environ
            )
        until = time.monotonic() + START_S
        while True:
            try:
                self.ask("query", query="1")
                return self
            except OSError:
                tail = (self.folder / "log").read_text()[-2000:]
                assert self._process.poll() is None, tail
                assert time.monotonic() < until, tail
                time.sleep(0.1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(START_S)

    def ask(self, what: str, **parameters: str) -> Any:
        """The ``data`` of an answer of its API."""
        url = f"http://{HOST}:{self.port}/api/v1/{what}?{urlencode(parameters)}"
        with urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[Any]:
        """The series that an instant query returns."""
        return list(self.ask("query", query=query)["result"])

    def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire; ``alertname`` is one of them."""
        alerts = self.ask("alerts")["alerts"]
        return [one["labels"] for one in alerts if one["state"] == "firing"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--fetch"]:
        program("prometheus")
    else:
        os.execv(sys.argv[1], sys.argv[1:])
