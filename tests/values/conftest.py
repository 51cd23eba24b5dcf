"""A schema registry for the session, whose address the codecs of tests/values/kinds.py find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.values.kinds import REGISTRY
from tests.values.registry import Registry


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    with Registry() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv(REGISTRY, running.url)
        yield running
