"""Stream order on a real broker: streams that scale, roll and carry, written by the tests themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import anabranch
from tests.client.written import WrittenStream
from tests.conftest import Broker


@pytest.fixture
def client(broker: Broker) -> Iterator[anabranch.Client]:
    """A client where no controller is needed."""
    with anabranch.connect(broker.bootstrap) as connected:
        yield connected


@pytest.fixture
def written(broker: Broker, unique: str) -> Iterator[WrittenStream]:
    stream = WrittenStream(broker.bootstrap, f"w{unique}/events", 3)
    yield stream
    stream.close()
