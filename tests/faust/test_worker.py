"""`faust worker` on a real broker: killed and started again, its outputs are a plain fold of the input."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch
from tests.cluster import Cluster

pytestmark = pytest.mark.broker
KEYS = [b"key-%d" % i for i in range(20)]
WAIT_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


class Place:
    """A scope with two inputs and outputs; what was written to the inputs."""

    def __init__(self, client: anabranch.Client) -> None:
        self.client = client
        self.scope = f"f{uuid.uuid4().hex[:8]}"
        for name, segments in (
            ("a", 3),
            ("b", 1),
            ("out", 2),
            ("even", 1),
            ("ticks", 1),
            ("dead", 1),
        ):
            client.create_stream(f"{self.scope}/{name}", segments=segments)
        self.written: dict[bytes, list[int]] = {}
        self._number = itertools.count()

    def write(self, count: int) -> None:
        """A transaction over both inputs."""
        with self.client.begin(self.scope) as txn:
            for i in range(count):
                key, number = KEYS[i % len(KEYS)], next(self._number)
                data = json.dumps({"n": number}).encode()
                txn.write(f"{self.scope}/{'ab'[i % 2]}", data, key=key)
                self.written.setdefault(key, []).append(number)
            txn.commit()

    def read(self, name: str) -> list[anabranch.Event]:
        with self.client.read(f"{self.scope}/{name}", timeout=0.6) as reader:
            return list(reader)

    def is_whole(self) -> bool:
        return len(self.read("out")) >= sum(map(len, self.written.values()))

    def check(self) -> None:
        """Each input event once; the sums rise one event at a time."""
        found: dict[bytes, list[tuple[int, int, int]]] = {}
        for event in self.read("out"):
            row = json.loads(event.value or b"")
            found.setdefault(event.key or b"", []).append((row["seen"], row["total"], row["n"]))
        assert {k: Counter(n for *_, n in rows) for k, rows in found.items()} == {
            k: Counter(v) for k, v in self.written.items() if v
        }
        for key, rows in found.items():
            total = 0
            for i, (seen, summed, number) in enumerate(rows, 1):
                total += number
                assert (seen, summed) == (i, total), key


@pytest.fixture
def place(client: anabranch.Client) -> Place:
    return Place(client)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def test_a_worker_that_is_killed(place: Place, cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL three times, SIGTERM in the end; web, metrics and timers meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"SCOPE": place.scope, "BOOTSTRAP": cluster.bootstrap}
    arguments = [sys.executable, "-m", "faust", "-A", "tests.faust.counting", "--datadir"]
    arguments += [str(tmp_path / "data"), "worker", "-l", "info", "--web-port", str(port)]

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "worker.log").open("ab") as log:
            return subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)

    for _ in range(3):
        before = len(place.read("out"))
        worker = start()
        try:
            for _ in range(10):
                place.write(30)
            while len(place.read("out")) == before:
                assert worker.poll() is None
            place.write(200)
        finally:
            worker.kill()
            worker.wait()
    worker = start()
    try:
        wait_for(place.is_whole)
        assert json.loads(get(port, "/hello")) == {"tasks": [0, 1, 2, 3]}
        assert f"{place.scope}_sums_total_events" in get(port, "/metrics")
        worker.terminate()
        assert worker.wait(15) == 0
    finally:
        worker.kill()
        worker.wait()
    place.check()
    assert place.read("ticks")
    numbers = (n for some in place.written.values() for n in some)
    found = Counter(json.loads(e.value or b"")["n"] for e in place.read("even"))
    assert found == Counter(n for n in numbers if n % 2 == 0)
    holders = {task.holder for task in place.client.processor(f"{place.scope}/sums").tasks}
    assert holders == {""}
