"""Fixtures of the core's tests."""

import pytest

from tests.core.harness import World, nyc


@pytest.fixture
def world() -> World:
    """A control partition that serves the scope nyc with the stream nyc/a of two segments."""
    return nyc()
