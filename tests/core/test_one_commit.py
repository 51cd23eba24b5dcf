"""Parts of one commit together: locks, positions, names and numbers, a coordinator (decision 0054)."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.protocol.ids import hash_of
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.labels import MINUTE, SECRET
from tests.core.test_frozen_locks import Big
from tests.core.test_ownership import ALL, INPUTS, NAME, Workers
from tests.core.test_table_locks import A, B, told


class Both(Big, Workers):
    """Two tables, and a processor of four tasks that worker a owns."""

    def __init__(self, level: int = LEVEL) -> None:
        super().__init__()
        self.log_rows([(k.FEATURE_KEY, r.FeatureRow(level, 1))])
        self.make("nyc/in")
        self.ask("create", r.CreateProcessor(NAME, 4, INPUTS))
        self.take("a")

    def shot(
        self, label: str, *rows: tuple[str, bytes], who: str = "a", sequence: int = 1, **given: Any
    ) -> str:
        """A one-shot of these rows that moves the tasks of a worker: how it was answered."""
        if label not in self.ids:
            self.marked(label)
        events = tuple(r.Event(table, -1, key, b"v", (), -1) for table, key in rows)
        consumed = self.consumed(who, sequence, 10 + sequence)
        locks = given.get("locks", ())
        self.ask(label, r.OneShot(self.id(label), "nyc", None, events, consumed, locks))
        return told(self.result)


def test_a_one_shot_has_locks_and_positions() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    assert bank.shot("X", (A, b"k"), (B, b"x"), locks=(lock,)) == "COMMITTED"
    assert bank.result.tables == (r.TableTime(A, bank.result.commit_timestamp),)
    assert [bank.task(task) for task in ALL] == ["1 a 1:11"] * 4
    assert bank.state.txn_row(bank.id("X")) is None, "the tasks' rows prove it"
    assert bank.shot("X", (A, b"k"), (B, b"x"), locks=(lock,)) == "COMMITTED", "repeated"
    assert bank.task() == "1 a 1:11"


def test_its_locks_are_revalidated_before_anything_moves() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    assert bank.put((A, b"k")) == "COMMITTED"
    before = len(bank.log)
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "Revalidate"
    assert bank.result.tables == (r.TableTime(A, bank.state.tables[A].last),)
    assert bank.task() == "1 a 0:-"
    assert {key[16] for key, _ in bank.log[before]} == {2}, "nothing is logged but the round"
    assert bank.shot("X", (A, b"k"), locks=(bank.lock(A, b"k"),)) == "COMMITTED"
    assert bank.put((B, b"x"), locks=(lock,)) == "Revalidate", "its write breaks locks of others"


def test_a_former_owner_is_refused_though_its_locks_hold() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    bank.take("b")
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "OwnershipLost"
    assert bank.shot("Y", (A, b"k"), who="b", locks=(lock,)) == "COMMITTED"


@pytest.mark.parametrize("level", [1, 2])
def test_below_the_level_nothing_is_together(level: int) -> None:
    bank = Both(level)
    assert bank.shot("X", (A, b"k"), locks=(bank.lock(A, b"k"),)) == "FeatureNotEnabled"
    assert bank.shot("X", (A, b"k")) == "COMMITTED"


@pytest.mark.parametrize("ends", ["holds", "broken", "fenced"])
def test_a_transaction_with_registered_locks_moves_positions(ends: str) -> None:
    """Nothing new: level 1 has it."""
    bank = Both(1)
    bank.new_id("J")
    hash_ = hash_of(NAME, bank.token_of("a"))
    begin = r.Begin(bank.id("J"), "nyc", None, MINUTE, SECRET, hash_, bank.told()[0])
    assert bank.ask("begin", begin) == "begun J"
    bank.reads("J", b"k")
    bank.writes("J", B, b"x", size=10)
    bank.finish("J", "J")
    if ends == "broken":
        assert bank.put((A, b"k")) == "COMMITTED"
    if ends == "fenced":
        bank.take("b")
    command = bank.committing("J")
    consumed = bank.consumed("a", 1, 11)
    bank.ask("commit", r.Commit(command.token, (), None, None, 10_000, None, consumed))
    bank.wait(60)
    state = bank.row("J").state
    assert (state, bank.task()) == {
        "holds": ("COMMITTED", "1 a 1:11"),
        "broken": ("ABORTED", "1 a 0:-"),
        "fenced": ("ABORTED", "2 b 0:-"),
    }[ends]
