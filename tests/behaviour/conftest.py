"""Names of a test's own, further clients, and a cluster whose controller a test may kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.protocol.legal_names import ADMIN_LANE
from tests.aio import driven
from tests.cluster import Cluster, start_cluster
from tests.conftest import Broker

QUICK = ("--session-timeout", "2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A file that names ``OVER_ASYNCIO``, the marks of those tests, runs over both clients.

    `scripts/soak` runs it in uvloop's loop, too.
    """
    marks = getattr(metafunc.module, "OVER_ASYNCIO", None)
    if "client" in metafunc.fixturenames and marks is not None:
        uvloop = pytest.param("uvloop", marks=pytest.mark.soak)
        clients = ["blocking", pytest.param("aio", marks=marks), uvloop]
        metafunc.parametrize("client", clients, indirect=True, scope="session")


@pytest.fixture(scope="session")
def client(
    request: pytest.FixtureRequest, cluster: Cluster
) -> Iterator[anabranch.Client | driven.Driven]:
    """A client of the session's cluster."""
    kind = getattr(request, "param", "blocking")
    if kind == "blocking":
        with anabranch.connect(cluster.bootstrap) as connected:
            yield connected
        return
    loops = asyncio if kind == "aio" else pytest.importorskip(kind)
    thread = driven.LoopThread(loops.new_event_loop)
    with driven.connect(thread, cluster.bootstrap) as connected_there:
        yield connected_there
    thread.close()


@pytest.fixture
def scope(unique: str) -> str:
    return f"s{unique}"


@pytest.fixture
def group(unique: str) -> str:
    return f"g{unique}"


@pytest.fixture
def other(cluster: Cluster) -> Iterator[anabranch.Client]:
    """A client of another process, as far as controllers see."""
    with anabranch.connect(cluster.bootstrap) as connected:
        yield connected


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[anabranch.Client]:
    with anabranch.connect(cluster.bootstrap, lane=ADMIN_LANE) as connected:
        yield connected


@pytest.fixture
def own_cluster(
    request: pytest.FixtureRequest, broker: Broker, unique: str, tmp_path: Path
) -> Iterator[Cluster]:
    """A controller of the test's own, on the session's broker; its arguments may be a parameter."""
    arguments = getattr(request, "param", QUICK)
    own = start_cluster(broker.bootstrap, tmp_path, f"own-{unique}", arguments)
    yield own
    own.controller.kill()
