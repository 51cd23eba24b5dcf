"""Fixtures for all tests: a broker, started when the first test asks for one.

With ``--bootstrap HOST:PORT`` (or ``$ANABRANCH_BOOTSTRAP``) ``broker`` is that cluster instead.
Tests share it: give topics names of your own (the ``unique`` fixture), and don't stop it. A test
that kills or pauses a broker starts one of its own with `EmbeddedBroker`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pytest

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from tests.cluster import Cluster, start_cluster


class Broker(Protocol):
    """What tests may rely on, whichever broker it is."""

    @property
    def bootstrap(self) -> str:
        """``host:port``, for clients."""
        ...


@dataclass(frozen=True)
class GivenBroker:
    """A cluster that runs already."""

    bootstrap: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bootstrap",
        metavar="HOST:PORT",
        default=os.environ.get("ANABRANCH_BOOTSTRAP"),
        help="run against this cluster instead of the embedded broker",
    )


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker for the whole session, with transactions of the current protocol."""
    given = request.config.getoption("--bootstrap")
    if given:
        yield GivenBroker(given)
        return
    with EmbeddedBroker() as embedded:
        yield embedded


@pytest.fixture(scope="session")
def broker_tv0() -> Iterator[Broker]:
    """An embedded broker with transaction.version=0: the protocol before KIP-890's second part."""
    with EmbeddedBroker(transaction_version=0) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def cluster(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The session's broker with a controller that leads. Tests share it and must not stop it."""
    running = start_cluster(broker.bootstrap, tmp_path_factory.mktemp("cluster"))
    yield running
    running.controller.stop()


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[anabranch.Client]:
    """A client of the session's cluster."""
    with anabranch.connect(cluster.bootstrap) as connected:
        yield connected


@pytest.fixture
def unique() -> str:
    """A name that nothing else uses: 8 hex digits."""
    return uuid.uuid4().hex[:8]
