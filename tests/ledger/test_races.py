"""Races between a slow process and recovery: the database's word wins, and each is told the truth."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.ledger import book, ledger
from tests.ledger.places import Place, SQLitePlace
from tests.ledger.races import Race, differences, settle, start

SEEDS = {"sqlite": 1000, "postgresql": 60}
EACH = 50  # that share a cluster


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread plays all processes: the one that waits for a lock waits in vain."""
    monkeypatch.setattr(book, "LOCK_S", 0.01)
    monkeypatch.setattr(ledger, "_PAUSE_S", 0.0)


def races(place: Place, seeds: range) -> tuple[Counter[str], list[str]]:
    """How many were told what, and what is wrong."""
    place.run("delete from orders")
    world, told = start(place), {}
    for seed in seeds:
        race = Race(world, place, seed)
        told[race.key] = race.run()
    settle(world, place)
    rows = place.orders()
    wrong = sorted(differences(world, place))
    wrong += [
        k
        for k, t in told.items()
        if (t, k in rows) in (("committed", False), ("not committed", True))
    ]
    return Counter(told.values()), wrong


@pytest.mark.slow(15)
def test_races(place: Place, request: pytest.FixtureRequest) -> None:
    kind = "sqlite" if isinstance(place, SQLitePlace) else "postgresql"
    told: Counter[str] = Counter()
    for first in range(0, SEEDS[kind], EACH):
        some, wrong = races(place, range(first, first + EACH))
        assert wrong == [], f"seeds {first} to {first + EACH}"
        told += some
    assert set(told) == {"committed", "not committed", "dead"}
    assert min(told.values()) >= 5, told
