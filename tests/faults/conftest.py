"""Three brokers that replicate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.infra.cluster import EmbeddedCluster


@pytest.fixture(scope="module")
def three_brokers() -> Iterator[EmbeddedCluster]:
    """They replicate: one may be gone. For the tests of one file, which start again what they end."""
    with EmbeddedCluster(3, quick_start=True) as embedded:
        yield embedded
        embedded.kill()
