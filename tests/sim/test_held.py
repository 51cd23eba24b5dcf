"""Each limit of an open transaction is held after each round (`tests/sim/held.py`)."""

from __future__ import annotations

import re

from anabranch.protocol import limits
from tests.sim.held import KINDS, THINGS

# Limits that speak of a transaction, and not of what it holds in rows.
_OTHERS = {"HELPERS", "NAME", "UNCOMMITTED", "UNREAD"}
_OF_ONE = re.compile(r"\ban? (open )?transaction\b")


def test_each_limit_of_a_transaction_is_held() -> None:
    known = {name: found for name, found in vars(limits).items() if isinstance(found, limits.Limit)}
    of_one = {name for name, found in known.items() if _OF_ONE.search(found.bounds)} - _OTHERS
    held = {thing.limit for thing in THINGS.values()}
    assert of_one <= held, "count it in tests/sim/held.py"
    assert held <= known.keys()
    assert {name for its in KINDS.values() for name in its} <= THINGS.keys()
