"""`anabranch processor run --http`: two workers, and what their pages say together."""

from __future__ import annotations

import random
import re
import signal
import time
import uuid
from collections import defaultdict
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

import anabranch
from anabranch.processing.metrics import TABLE
from tests.cluster import Cluster
from tests.processing.program import TASKS
from tests.processing.workers import WorkerProcess
from tests.processing.writing import Writing

pytestmark = pytest.mark.broker
WAIT_S = 60.0


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except URLError:
        return 0, ""


def counted(*ports: int) -> dict[str, float]:
    """The workers' numbers in sum, whatever the labels."""
    found: dict[str, float] = defaultdict(float)
    for port in ports:
        text = page(port, "metrics")[1]
        for name, value in re.findall(r"^anabranch_processor_(\w+)\{\S*\} (\S+)$", text, re.M):
            found[name] += float(value)
    return found


@pytest.mark.soak
def test_the_pages_of_two_workers(
    client: anabranch.Client, cluster: Cluster, tmp_path: Path
) -> None:
    scope = f"w{uuid.uuid4().hex[:8]}"
    writing = Writing(cluster.bootstrap, "anabranch", scope, seed=1)
    writing.create(client)
    arguments = ("--bootstrap", cluster.bootstrap, "--workers", "2", "--http", "127.0.0.1:0")
    environment = {"ANABRANCH_TRIAL_SCOPE": scope}
    workers = WorkerProcess(tmp_path / "folder", arguments, environment)
    workers.start()
    try:
        until = time.monotonic() + WAIT_S
        seen = set[tuple[int, str]]()
        while len(ports := re.findall(r"/ready at port (\d+)", workers.tail())) < 2:
            seen.update(page(port, "ready") for port in ports)
            assert time.monotonic() < until, workers.tail()
            time.sleep(0.1)
        while counted(*ports)["tasks"] < TASKS or {page(p, "ready")[0] for p in ports} != {200}:
            seen.update(page(port, "ready") for port in ports)
            assert time.monotonic() < until, workers.tail()
            time.sleep(0.1)
        assert any(code == 503 and "tasks" in why for code, why in seen), seen
        chance = random.Random(1)
        while not writing.fold().late:
            writing.commit(client, writing.events(300, chance))
        writing.to_each_task(client)
        fold = writing.fold()
        wanted: dict[str, float] = {
            "events_in_total": writing.written,
            "events_out_total": fold.outputs,
        }
        wanted |= {"late_events_total": len(fold.late), "tasks": TASKS}
        while (
            "lag_seconds" not in (found := counted(*ports))
            or {name: found[name] for name in wanted} != wanted
        ):
            assert time.monotonic() < until, (found, wanted, workers.tail())
            time.sleep(0.1)
        assert found["commits_total"] == found["commit_seconds_count"] > 0
        text = page(ports[0], "metrics")[1]
        assert all(f"# HELP anabranch_{name}" in text for name in TABLE.numbers)
        assert {page(port, "live") for port in ports} == {(200, "ok\n")}
    finally:
        assert workers.process is not None
        workers.process.terminate()
        assert workers.process.wait(WAIT_S) == 128 + signal.SIGTERM
