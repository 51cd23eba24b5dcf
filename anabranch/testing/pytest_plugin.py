"""Fixtures of pytest: a cluster for the session, a client of it, and a scope for each test (`docs/testing.md`).

pytest loads this module wherever anabranch is installed, so it imports nothing heavy until a fixture is used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from anabranch.client.client import Client

_OPTION = "--anabranch-bootstrap"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("anabranch").addoption(
        _OPTION,
        metavar="HOST:PORT",
        help="use this cluster for the fixtures of anabranch, instead of starting one",
    )


@pytest.fixture(scope="session")
def anabranch_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a broker with a controller. They start once in a session, and all tests share them.

    Raises: NotInstalled (the extra ``local`` is missing).
    """
    given: str | None = request.config.getoption(_OPTION)
    if given:
        yield given
        return
    from anabranch.cli.cluster import local_cluster

    with local_cluster(tmp_path_factory.mktemp("anabranch"), quick_start=True) as running:
        yield running.broker.bootstrap


@pytest.fixture(scope="session")
def anabranch_client(anabranch_cluster: str) -> Iterator[Client]:
    """A client of the session's cluster."""
    from anabranch.client.connect import connect

    with connect(anabranch_cluster) as client:
        yield client


@pytest.fixture
def anabranch_scope() -> str:
    """The name of a scope that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
