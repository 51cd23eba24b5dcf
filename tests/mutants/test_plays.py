"""Plays hold for the product, and fail under the bug that each is made for."""

from __future__ import annotations

import json

import pytest

from tests.mutants.__main__ import FOUND, PAGE, with_tables
from tests.mutants.catalogue import CATALOGUE, Mutant


@pytest.mark.parametrize("mutant", [m for m in CATALOGUE if m.play], ids=lambda m: m.name)
def test_a_play_finds_its_bug(mutant: Mutant) -> None:
    assert mutant.play is not None
    mutant.play()
    with mutant.plant(), pytest.raises(AssertionError):
        mutant.play()


def test_each_bug_can_be_planted() -> None:
    """Its place is still there: the long hunts are not run after each change."""
    for mutant in CATALOGUE:
        try:
            with mutant.plant():
                pass
        except Exception as error:
            error.add_note(mutant.name)
            raise


def test_the_page_has_the_tables_of_what_was_found() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page, json.loads(FOUND.read_text())), "run `scripts/mutants table`"
    assert page.count("\n| ") > len(CATALOGUE)
