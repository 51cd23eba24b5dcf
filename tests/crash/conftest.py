"""Fixtures of the tests that kill: a warm process that forks controllers, and a log to read with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks controllers; they end with it."""
    with Zygote() as warm:
        yield warm
