"""Fixtures of the tests that kill: a warm process that forks controllers, and a log to read with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
