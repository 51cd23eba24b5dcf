"""Fixtures of the core's tests."""

import pytest

from tests.core.harness import World, nyc


@pytest.fixture
def world() -> World:
    """A control partition that serves the scope nyc with the stream nyc/a of two segments."""
    return nyc()


@pytest.fixture
def opened(world: World) -> World:
    """A is open and touched nyc/a."""
    world.begin("A")
    world.touch("A")
    return world
