"""Plays hold for the product, and fail under the bug that each is made for."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import CATALOGUE, Mutant


@pytest.mark.parametrize("mutant", [m for m in CATALOGUE if m.play], ids=lambda m: m.name)
def test_a_play_finds_its_bug(mutant: Mutant) -> None:
    assert mutant.play is not None
    mutant.play()
    with mutant.plant(), pytest.raises(AssertionError):
        mutant.play()
