"""Fixtures of the tests that kill: a warm process that forks controllers, and a log to read with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.topics.kafka_log import KafkaLog
from tests.conftest import Broker
from tests.crash.zygote import Zygote


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when this folder is named on the command line, as `scripts/soak` does."""
    parser.addoption(
        "--all-failpoints",
        action="store_true",
        help="kill at every call, not at the first of a kind",
    )


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks controllers; they end with it."""
    with Zygote() as warm:
        yield warm


@pytest.fixture(scope="session")
def log(broker: Broker) -> Iterator[KafkaLog]:
    """The broker's log, for reading what is there."""
    kafka = KafkaLog(broker.bootstrap)
    yield kafka
    kafka.close()
