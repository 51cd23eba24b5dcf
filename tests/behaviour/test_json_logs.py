"""With `--log-format json` each line of standard error is one object, of every command that runs for long."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import anabranch
from anabranch.cli.cluster import child_environment
from anabranch.ledger import Ledger
from tests.cluster import Cluster

pytestmark = [pytest.mark.broker, pytest.mark.long]

WAIT_S = 100.0
# The command line, in a process in which a library warns and a thread fails once the log has begun.
PLANTED = """
import threading, time, warnings
from anabranch import logs
def plant():
    while not logs.is_json():
        time.sleep(0.02)
    time.sleep(0.5)
    warnings.warn("planted warning\\nof a library", UserWarning)
    raise ValueError("planted error\\nof a thread")
threading.Thread(target=plant, daemon=True).start()
from anabranch.cli import app
app()
"""
PROGRAM = """
import warnings
import anabranch
warnings.warn("planted warning\\nof a module", UserWarning)
app = anabranch.Processor("{scope}/p", tasks=2, dead_letter="{scope}/dead", retries=0)
@app.on(app.input("{scope}/s"))
def handle(event):
    raise RuntimeError("planted error\\nof a handler")
"""


class Running:
    """A command in a process of its own; with its log."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / f"{'-'.join(arguments[:2])}.log".replace("/", "-")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PLANTED, *arguments, "--log-format", "json"],
                cwd=folder, env=child_environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines until now, each of which must be an object."""
        text = self._log.read_text(encoding="utf-8")
        whole = text.rpartition("\n")[0]
        return [self._checked(json.loads(line)) for line in whole.splitlines()]

    @staticmethod
    def _checked(line: dict[str, Any]) -> dict[str, Any]:
        assert line.keys() >= {"time", "level", "logger", "message"}
        assert line.keys() <= {"time", "level", "logger", "message", "fields", "exception"}
        return line

    def wait_for(self, is_there: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first line of a kind."""
        until = time.monotonic() + WAIT_S
        while True:
            found = [line for line in self.lines() if is_there(line)]
            if found:
                return found[0]
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)

    def wait_for_planted(self) -> None:
        self.wait_for(lambda line: "planted warning\nof a library" in line["message"])
        failed = self.wait_for(lambda line: "planted error" in line.get("exception", ""))
        assert failed["exception"].startswith("Traceback")

    def end(self) -> int:
        """SIGTERM, and check the whole log. Returns the exit code."""
        self.process.terminate()
        code = self.process.wait(WAIT_S)
        assert self._log.read_text().endswith("\n")
        assert self.lines()
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def test_every_line_of_the_services_is_json(
    run: Any, cluster: Cluster, client: anabranch.Client, unique: str, tmp_path: Path
) -> None:
    scope, at = f"j{unique}", ("-b", cluster.bootstrap)
    for name in ("s", "dead", "copy"):
        client.create_stream(f"{scope}/{name}")
    client.create_table(f"{scope}/rows")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(f"{scope}.plain", 1, 1)])[f"{scope}.plain"].result(30)
    (tmp_path / "watched.py").write_text(PROGRAM.format(scope=scope))

    Ledger(lambda: sqlite3.connect(tmp_path / "ledger.db")).create(client)

    controller = run("controller", *at, "--cluster-prefix", f"p{unique}", "--data-dir", "data")
    workers = run("processor", "run", "watched:app", "--workers", "2", *at)
    others = [
        run("web", "--port", "0", *at),
        run("bridge", f"{scope}.plain", "--stream", f"{scope}/copy", *at),
        run("table", "compact", "--watch", "--plain-readers-lose-history", "--every", "0.2", *at),
        run("table", "changes", f"{scope}/rows", *at),
        run("read", f"{scope}/s", *at),
    ]
    ledger = run("ledger", "recover", "-d", str(tmp_path / "ledger.db"), "--every", "1s", *at)

    leads = controller.wait_for(lambda line: "leading, term" in line["message"])
    assert leads["fields"] == {"control_partition": 0, "term": 1}
    with client.begin(scope) as txn:
        txn.write(f"{scope}/s", b"v", key=b"k")
        txn.commit()
    failed = workers.wait_for(
        lambda line: "planted error\nof a handler" in line.get("exception", "")
    )
    assert failed["fields"] == {"processor": f"{scope}/p"}
    workers.wait_for(lambda line: "planted warning\nof a module" in line["message"])
    for each in (controller, workers, ledger, *others):
        each.wait_for_planted()
    assert [each.end() for each in (workers, ledger)] == [143, 143]
    assert controller.end() == 0
    assert {each.end() for each in others} <= {0, 143}


def test_every_line_of_a_broker_and_of_dev_is_json(run: Any, tmp_path: Path) -> None:
    for words in (("broker", "--port", "0"), ("dev", "--port", "0", "--folder", "data")):
        started = run(*words)
        started.wait_for_planted()
        assert started.end() == 143


def test_every_line_of_spark_is_json(
    run: Any, cluster: Cluster, client: anabranch.Client, unique: str
) -> None:
    """Also those of Java and of Spark's workers, which write to the same standard error."""
    client.create_stream(f"j{unique}/s")
    export = ("spark", "export", "-s", f"j{unique}/s", "--to", "out", "--continuous", "-v")
    started = run(*export, "-b", cluster.bootstrap)
    started.wait_for(lambda line: line["logger"].startswith("org.apache."))
    started.wait_for(lambda line: line["logger"] == "anabranch.spark.processes")
    started.wait_for_planted()
    assert started.end() == 143
