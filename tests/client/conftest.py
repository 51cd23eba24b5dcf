"""A client on an in-memory log, with a stream."""

from __future__ import annotations

import pytest

from tests.client.answers import STREAM
from tests.client.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.client.create_stream(STREAM, segments=2)
    return world
