"""`faust worker` on a real broker: killed and started again, its outputs are a plain fold of the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.infra.sockets import free_port
from tests.cluster import Cluster
from tests.faust.conftest import KEYS, WAIT_S, Place
from tests.owned import start_module

pytestmark = pytest.mark.broker


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def answer_of(port: int, path: str) -> object:
    """None if it does not answer."""
    try:
        return json.loads(get(port, path))
    except OSError:
        return None


def faust(app: str, folder: Path) -> list[str]:
    """The command of Faust's that runs a command of this app."""
    return [sys.executable, "-m", "faust", "-A", app, "--datadir", str(folder)]


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker, which is killed at the end if it still runs."""
    with log.open("ab") as output:
        worker = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output
        )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.long
def test_a_worker_that_is_killed(place: Place, cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL, then SIGTERM; web, metrics and timers meanwhile."""
    port, log = free_port(), tmp_path / "worker.log"
    environment = {"SCOPE": place.scope, "BOOTSTRAP": cluster.bootstrap}
    program = faust("tests.faust.counting", tmp_path / "data")
    arguments = [*program, "worker", "-l", "info", "--web-port", str(port)]
    with running(arguments, environment, log):
        for _ in range(10):
            place.write(30)
        place.wait(lambda: bool(place.read("out")))
        place.write(200)
    with running(arguments, environment, log) as worker:
        place.wait()
        place.wait(lambda: len(place.read("thirds")) == 500)
        place.wait(lambda: answer_of(port, "/hello") == {"tasks": [0, 1, 2, 3]})
        assert f"{place.scope}_sums_total_events" in get(port, "/metrics")
        worker.terminate()
        assert worker.wait(15) == 0
    with place.client.begin(place.scope) as txn:
        txn.write(f"{place.scope}/a", b"{", key=KEYS[0])
        txn.commit()
    with running(arguments, environment, log) as worker:
        assert worker.wait(60) != 0
    assert "ValueDecodeError" in log.read_text()
    place.check()
    subprocess.run([*program, "say"], env=os.environ | environment, check=True, timeout=60)
    assert {e.value for e in place.read("ticks")} - {b'"minute"'} == {b"1", b'"said"'}
    numbers = (n for some in place.written.values() for n in some)
    found = Counter(json.loads(e.value or b"")["n"] for e in place.read("even"))
    assert found == Counter(n for n in numbers if n % 2 == 0)
    listed = [json.loads(event.value or b"") for event in place.read("lists")]
    written = Counter(range(500))
    assert Counter(n for some in listed for n in some) == written
    counts: dict[bytes | None, list[int]] = {}
    for event in place.read("thirds"):
        n, seen = json.loads(event.value or b"")
        counts.setdefault(event.key, []).append(seen)
        written[n] -= 1
    assert not any(written.values())
    assert all(some == list(range(1, len(some) + 1)) for some in counts.values())
    holders = {task.holder for task in place.client.processor(f"{place.scope}/sums").tasks}
    assert holders == {""}


COMMANDS = {
    "agents": "/a and 1 more | Count and sum by key.",
    "models": "Flight",
    "model Flight": "n",
    "tables": "the sums of keys",
    "clean-versions": "",
    "say": "",
    "add --count 3": "",
}


@pytest.mark.long
def test_commands(place: Place, cluster: Cluster, tmp_path: Path) -> None:
    """All of Faust's; `send` writes in a transaction of its own."""
    environment = {"SCOPE": place.scope, "BOOTSTRAP": cluster.bootstrap, "TERM": "dumb"}
    program = faust("tests.faust.counting", tmp_path / "data")

    def run(words: str) -> str:
        done = subprocess.run(
            [*program, *words.split()], env=os.environ | environment, timeout=60,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    for words, said in COMMANDS.items():
        assert said in run(words), words
    run(f"send {place.scope}/ticks 5")
    assert {event.value for event in place.read("ticks")} == {b'"said"', b"3", b"5"}
    program[1:3] = ["-c", "from tests.faust.counting import app; app.main()"]
    del program[3:5]
    assert "the sums of keys" in run("tables")
    program[1:3] = ["-m", "faust", "-A", "tests.faust.counting"]
    with pytest.raises(AssertionError, match="processor reset"):
        run("reset")
    with pytest.raises(AssertionError, match="faust livecheck"):
        run("livecheck")
    with pytest.raises(AssertionError, match="pip install click_completion"):  # as Faust's own
        run("completion")


@pytest.mark.soak
def test_two_workers_while_the_input_is_scaled(
    place: Place, cluster: Cluster, tmp_path: Path
) -> None:
    """They share the tasks; one whose agent hangs ends at SIGTERM all the same, and the other continues."""
    hang, log = tmp_path / "hang", tmp_path / "worker.log"
    environment = {"SCOPE": place.scope, "BOOTSTRAP": cluster.bootstrap, "HANG": str(hang)}

    def start(name: str) -> subprocess.Popen[bytes]:
        arguments = ["-A", "tests.faust.several", "--datadir", str(tmp_path / name), "worker"]
        arguments += ["--without-web", "-l", "info"]
        with log.open("ab") as output:
            return start_module(
                "faust", arguments, output=output, environment=os.environ | environment
            )

    def holders() -> set[str]:
        return {task.holder for task in place.client.processor(f"{place.scope}/sums").tasks}

    workers = [start("one")]
    place.write(40)
    place.wait()
    workers.append(start("two"))
    for segments in (5, 2):
        place.client.scale(f"{place.scope}/a", segments=segments)
        place.write(100)
    place.wait(lambda: len(holders() - {""}) == 2 and place.is_whole())
    hang.touch()
    place.write(60)
    time.sleep(0.5)
    workers[0].terminate()
    assert workers[0].wait(20) == 0, log.read_text()[-3000:]
    assert workers[1].poll() is None
    hang.unlink()
    place.wait()
    assert len(holders()) == 1
    workers[1].terminate()
    assert workers[1].wait(20) == 0, log.read_text()[-3000:]
    place.check()
    copies = Counter(json.loads(event.value or b"")["n"] for event in place.read("even"))
    assert copies == Counter(n for some in place.written.values() for n in some)
    assert {event.value for event in place.read("ticks")} == {b'"cron"'}


@pytest.mark.soak
def test_the_example(client: anabranch.Client, cluster: Cluster, tmp_path: Path) -> None:
    """Three carriers' flights; the last total of each is their sum."""
    scope = f"e{uuid.uuid4().hex[:8]}"
    for name in ("flights", "delays"):
        client.create_stream(f"{scope}/{name}", segments=2)
    with client.begin(scope) as txn:
        for number in range(60):
            data = json.dumps({"number": number, "delay": number / 4}).encode()
            txn.write(f"{scope}/flights", data, key=(b"AA", b"B6", b"UA")[number % 3])
        txn.commit()
    program = faust("examples.faust_delays", tmp_path / "data")
    environment = {"SCOPE": scope, "ANABRANCH_BOOTSTRAP": cluster.bootstrap}
    arguments = [*program, "worker", "--without-web", "-l", "warn"]
    totals: dict[bytes | None, Any] = {}
    with running(arguments, environment, tmp_path / "worker.log") as worker:
        with client.read(f"{scope}/delays", timeout=WAIT_S) as reader:
            for _, event in zip(range(60), reader, strict=False):
                totals[event.key] = json.loads(event.value or b"")
        worker.terminate()
        assert worker.wait(20) == 0
    found = {key: (total["flights"], total["minutes"]) for key, total in totals.items()}
    assert found == {
        key: (20, sum(n / 4 for n in range(start, 60, 3)))
        for start, key in enumerate((b"AA", b"B6", b"UA"))
    }
