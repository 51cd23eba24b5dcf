"""Each limit of an open transaction is held after each round (`tests/sim/held.py`), or named as missing."""

from __future__ import annotations

import re

from anabranch.core import limits
from tests.sim.held import KINDS, THINGS, UNLIMITED

# Limits that speak of a transaction, and not of what it holds in rows.
_OTHERS = {"HELPERS", "NAME", "STAGED", "UNREAD"}
_OF_ONE = re.compile(r"\ban? (open )?transaction\b")


def test_each_limit_of_a_transaction_is_held() -> None:
    known = {name: found for name, found in vars(limits).items() if isinstance(found, limits.Limit)}
    of_one = {name for name, found in known.items() if _OF_ONE.search(found.bounds)} - _OTHERS
    held = {thing.limit for name, thing in THINGS.items() if name not in UNLIMITED}
    assert of_one <= held, "count it in tests/sim/held.py"
    assert held <= known.keys()
    assert {name for its in KINDS.values() for name in its} <= THINGS.keys()


def test_what_is_named_as_unlimited_has_no_limit() -> None:
    shared = {thing.limit for name, thing in THINGS.items() if name not in UNLIMITED}
    alone = [name for name in UNLIMITED if THINGS[name].limit not in shared]
    assert not [name for name in alone if hasattr(limits, THINGS[name].limit)]
