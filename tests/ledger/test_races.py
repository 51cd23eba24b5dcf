"""Races between a slow process and recovery: the database's word wins, and each is told the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from anabranch.errors import TransactionAborted
from anabranch.ledger import book, ledger
from anabranch.ledger.book import Book, Meta, Row
from tests.ledger.places import Place, SQLitePlace
from tests.ledger.races import Race, differences, settle, start
from tests.mutants import prepared

MANY = {"sqlite": 300, "postgresql": 100}
EACH = 50  # that share a cluster


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread plays all processes: the one that waits for a lock waits in vain."""
    monkeypatch.setattr(book, "LOCK_S", 0.001)
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


def test_no_race_of_some_ends_differently_on_both_sides(quick_path: Path) -> None:
    check(SQLitePlace(quick_path / "shop.db").made(), EACH)


@pytest.mark.long
@pytest.mark.timeout(300)  # hundreds, beside others on two cores
def test_no_race_ends_differently_on_both_sides(place: Place) -> None:
    check(place, MANY["sqlite" if isinstance(place, SQLitePlace) else "postgresql"])


def check(place: Place, seeds: int) -> None:
    told: Counter[str] = Counter()
    for first in range(0, seeds, EACH):
        some, wrong = races(place, range(first, first + EACH))
        assert wrong == [], f"seeds {first} to {first + EACH}"
        told += some
    assert set(told) == {"committed", "not committed", "dead"}
    assert min(told.values()) >= 5, told


# -- planted bugs: each takes away what one rule rests on ------------------------------------------------


def reads_only(self: Book, txn_id: bytes) -> Row:
    """Recovery decides without writing."""
    self.open()
    row = self._row(txn_id)
    self.connection.rollback()
    return row if row and row.outcome == "commit" else Row(txn_id, "abort", b"", 0, False)


def nothing_first(self: Book, txn_id: bytes, attempt: bytes) -> Meta:
    """No row comes first …"""
    return self.open()


def inserted_last(self: Book, txn_id: bytes, attempt: bytes) -> None:
    """… and the one at the end is a new one: an `abort` row that was forgotten is missed."""
    if not self._insert(txn_id.hex(), "commit", attempt):
        raise TransactionAborted("there is a row")


def reading_only() -> AbstractContextManager[object]:
    return patch.object(Book, "decide", reads_only)


@contextmanager
def row_last() -> Iterator[None]:
    with patch.multiple(Book, begin=nothing_first, check_same=lambda _: None, end=inserted_last):
        yield


BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "recovery reads only": reading_only,
    "the row comes last": row_last,
    "no answer is no commit": prepared.no_answer_is_no_commit,  # found in the simulator, too
    "rows go too early": prepared.rows_go_too_early,
}


QUICK = "the row comes last", "rows go too early"


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug in QUICK else pytest.mark.long) for bug in BUGS]
)
def test_planted_bugs_are_found(bug: str, quick_path: Path) -> None:
    place = SQLitePlace(quick_path / "shop.db").made()
    with BUGS[bug](), pytest.raises(AssertionError):
        hunt(place)


def hunt(place: Place) -> None:
    for first in range(0, 300, EACH):
        assert races(place, range(first, first + EACH))[1] == []
