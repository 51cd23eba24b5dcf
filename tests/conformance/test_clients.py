"""The clients in Go and for the JVM keep all rules; and one-shots by each client, as many as it can."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch
from anabranch.conformance.child import Child
from anabranch.conformance.play import Target
from anabranch.conformance.run import run
from anabranch.conformance.scenarios import SCENARIOS
from tests.cluster import Cluster

pytestmark = [pytest.mark.broker, pytest.mark.unsecured, pytest.mark.long]

CLIENTS = Path(__file__).parents[2] / "clients"
BUILD_S = 600
IN_FLIGHT = 64
LOAD_S = 5.0
PYTHON = [sys.executable, "-m", "anabranch.conformance.python_client"]


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def build(folder: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the Go client."""
    need("go")
    program = tmp_path_factory.mktemp("go") / "child"
    build(CLIENTS / "go", "go", "build", "-o", str(program), "./conformance")
    return [str(program)]


@pytest.fixture(scope="module")
def jvm() -> list[str]:
    """The command of the JVM client."""
    need("mvn", "java")
    folder = CLIENTS / "jvm"
    build(folder, "mvn", "-q", "compile", "dependency:copy-dependencies")
    places = f"{folder}/target/classes:{folder}/target/dependency/*"
    return ["java", "-XX:+UseSerialGC", "-cp", places, "anabranch.Conformance"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", ["go", "jvm"])
def test_it_keeps_all_rules(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path, client: str
) -> None:
    command = request.getfixturevalue(client)
    report = run(Target(cluster.bootstrap, cluster.prefix, "open", command, tmp_path))
    assert report.failures == [], report.lines()
    assert set(report.skipped) == {one.name for one in SCENARIOS.values() if one.own}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", ["python", "go", "jvm"])
def test_one_shots_in_flight(
    request: pytest.FixtureRequest, cluster: Cluster, unique: str, tmp_path: Path, client: str,
    measured: Callable[[str], None],
) -> None:  # fmt: skip
    command = PYTHON if client == "python" else request.getfixturevalue(client)
    scope = f"load{unique}"
    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix) as kit:
        kit.create_stream(f"{scope}/shots", segments=4)
        child = Child(command, tmp_path / "client.log")
        try:
            where = {"bootstrap": cluster.bootstrap, "prefix": cluster.prefix}
            child.ask("connect", 60, **where, timeout_ms=30_000)
            about = {"scope": scope, "stream": f"{scope}/shots", "value_bytes": 100}
            load = {**about, "in_flight": IN_FLIGHT, "duration_s": LOAD_S}
            child.ask("load", 120, **load)  # the first one compiles, and connects
            found = child.ask("load", 120, **load)
        finally:
            child.close()
        rate = found["committed"] / found["seconds"]
        measured(f"{client}: {rate:,.0f} one-shots a second, {IN_FLIGHT} in flight")
        assert rate > IN_FLIGHT / 4
        time.sleep(0.1)
        assert kit.count_events(f"{scope}/shots").events >= found["committed"]
