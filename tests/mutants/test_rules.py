"""Each rule of transactions over control partitions has a planted bug in the product that something finds."""

from __future__ import annotations

import json

import pytest

from tests.mutants.__main__ import FOUND
from tests.mutants.rules import bugs, finders, rules


@pytest.mark.parametrize("rule", rules())
def test_each_rule_has_a_bug_that_is_found(rule: str) -> None:
    found = json.loads(FOUND.read_text())
    assert any([*finders(mutant, found)] for mutant in bugs(rule)), (
        f"no planted bug breaks {rule}, or none is found: `scripts/mutants tests --json {FOUND}`"
    )
