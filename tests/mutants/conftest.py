"""A warm process that forks controllers and clients, with planted bugs or without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """They end with it."""
    with Zygote() as warm:
        yield warm
