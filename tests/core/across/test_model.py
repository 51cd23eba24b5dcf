"""The random model of transactions across control partitions, and its planted bugs."""

from __future__ import annotations

import pytest

from tests.conftest import some
from tests.core.across.part import Bad
from tests.core.across.planted import PLANTED, SEEDS
from tests.core.across.world import World, search


def test_nothing_that_must_hold_is_broken() -> None:
    """``python -m tests.core.across.world FIRST LAST`` plays more seeds."""
    assert search(World, range(some(40))) is None, "the seed, and what it shows"


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises(Bad):
        World(SEEDS[name]).run()
