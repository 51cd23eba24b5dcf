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


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda m: m.name)
def test_a_bug_can_be_planted(mutant: Mutant) -> None:
    """Its place is still there: the long hunts are not run after each change."""
    with mutant.plant():
        pass
