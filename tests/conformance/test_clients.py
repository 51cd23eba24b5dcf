"""The clients in Go and for the JVM keep all rules; and one-shots by each client, as many as it can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import anabranch
from anabranch.conformance.child import Child
from anabranch.conformance.play import Target
from anabranch.conformance.run import run
from anabranch.conformance.scenarios import SCENARIOS
from bench.clients import EVENTS, IN_FLIGHT, KINDS, built, missing
from tests.cluster import Cluster

pytestmark = [pytest.mark.broker, pytest.mark.unsecured, pytest.mark.long]

LOAD_S = 5.0
COORDINATORS = {"prepared", "lost-answers-of-a-coordinator"}
OFFERED_BY_PYTHON = {
    "decided",
    "sessions",
}  # neither the Go nor the JVM client has these operations


@pytest.fixture(scope="module")
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a client, which is built."""
    client: str = request.param
    if programs := missing(client):
        pytest.skip(f"{', '.join(programs)} not installed")
    return built(client, tmp_path_factory.mktemp(client))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["go", "jvm"], indirect=True)
def test_it_keeps_all_rules(cluster: Cluster, tmp_path: Path, command: list[str]) -> None:
    report = run(Target(cluster.bootstrap, cluster.prefix, "open", command, tmp_path))
    assert report.failures == [], report.lines()
    lacks = (
        OFFERED_BY_PYTHON if "java" in command[0] else OFFERED_BY_PYTHON | COORDINATORS
    )  # Go can't prepare
    assert set(report.skipped) == {one.name for one in SCENARIOS.values() if one.own} | lacks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", list(KINDS), indirect=True)
def test_one_shots_in_flight(
    cluster: Cluster,
    unique: str,
    tmp_path: Path,
    command: list[str],
    measured: Callable[[str], None],
) -> None:
    scope = f"load{unique}"
    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix) as kit:
        kit.create_stream(f"{scope}/shots", segments=4)
        with closing(Child(command, tmp_path / "client.log")) as child:
            where = {"bootstrap": cluster.bootstrap, "prefix": cluster.prefix}
            child.ask("connect", 60, **where, timeout_ms=30_000)
            load = {"scope": scope, "stream": f"{scope}/shots", "count": EVENTS, "value_bytes": 100}
            child.ask("load", 120, **load, in_flight=1, duration_s=1.0)  # it loads its code
            found = child.ask("load", 120, **load, in_flight=IN_FLIGHT, duration_s=LOAD_S)
        rate = found["committed"] / found["seconds"]
        measured(f"{child.about['client']}: {rate:,.0f} one-shots a second, {IN_FLIGHT} in flight")
        assert rate > IN_FLIGHT / 4
        assert kit.count_events(f"{scope}/shots").events >= EVENTS * found["committed"]
