"""Random correct histories are found correct; one lie in them is always found."""

from __future__ import annotations

import copy
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checker import judge_entries
from tests.checker.corruptions import LIES, History
from tests.checker.serial import generate
from tests.conftest import some

SEEDS = st.integers(0, 1 << 32)


@given(SEEDS, st.booleans())
@example(
    706, True
)  # two commits of one transaction, one of them names writers of a stream that was not read
@example(
    2371, False
)  # in stream order: a poll without an answer, and what it may have given is given again later
@example(
    420, False
)  # a poll without an answer gave what a member that had lost the partition gave again
@example(1054408120, True)  # a dead member is dealt a place that another one's position speaks of
@example(25085, True)  # so is one whose last poll is answered late
@example(
    467689054, False
)  # a poll without an answer gave what another member, that does not know, gives again
@example(
    19925, True
)  # a poll without an answer gave two gaps, and what lies between them is given again
@settings(max_examples=some(100), deadline=None, print_blob=True)
def test_correct_histories_are_found_correct(seed: int, is_ragged: bool) -> None:
    """Whatever crashes, races or is never answered, and whatever could not be read at the end."""
    report = judge_entries(generate(seed, is_ragged=is_ragged))
    assert report.ok, f"seed {seed}: {report.anomalies}"


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_lie_is_found(name: str) -> None:
    """In each of some histories in which it can be told."""
    lie, kinds = LIES[name]
    told = 0
    for seed in range(60):
        entries = copy.deepcopy(_history(seed))
        if not lie(History(entries, Random(seed))):
            continue
        told += 1
        report = judge_entries(entries)
        assert report.kinds & kinds, f"seed {seed}: {report.kinds}"
        if told == 5:
            break
    assert told >= 3, f"it could be told {told} times only"


@pytest.mark.parametrize("seed", [563, 650, 723])
def test_what_members_take_up_excuses_who_does_not_know_yet(seed: int) -> None:
    """Members read on what they have lost: right by what they had taken up, and wrong without that.

    Among 1,500 seeds these and two more have such members: if the toy changes, look for others.
    """
    entries = generate(seed)
    taken_up = {(file, one["op"]) for file, _, one in entries if one.get("what") == "resume"}
    assert judge_entries(copy.deepcopy(entries)).ok
    rest = [entry for entry in entries if (entry[0], entry[2]["op"]) not in taken_up]
    assert "duplicate" in judge_entries(rest).kinds


_made: dict[int, list[tuple[str, int, dict[str, object]]]] = {}


def _history(seed: int) -> list[tuple[str, int, dict[str, object]]]:
    if seed not in _made:
        _made[seed] = generate(seed)
    return _made[seed]
