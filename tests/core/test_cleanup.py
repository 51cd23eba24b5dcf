"""How far journals may be cut, and how much may lie in them."""

from __future__ import annotations

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.cleanup import clean_up
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.journal.index import JournalIndex
from tests.core.cleaning import PLACE, begin, end, low, opened, rebuild
from tests.core.harness import index_rows


def test_where_nothing_is_open_everything_read_goes() -> None:
    world = opened("A", "B")
    world.write("A", "w1", count=3)
    world.write("B", "w2", count=4)
    assert low(world) == 0
    end(world, "A")
    assert low(world) == 3
    end(world, "B")
    assert low(world) == 7


def test_what_is_not_read_stays() -> None:
    world = opened("A")
    world.write("A", "w1", count=3)
    end(world, "A")
    world.held = True
    world.write("A", "w1", count=4)
    assert low(world) == 3


def test_an_abort_frees_as_a_commit_does() -> None:
    world = opened("A")
    world.write("A", "w1", count=3)
    world.turn()
    world.abort("A")
    assert low(world) == 3


def test_what_a_decided_commit_leaves_out_stays_until_it_ends() -> None:
    world = opened("A")
    world.write("A", "left out", count=3)
    world.write("A", "w1", count=4)
    world.commit("A", own=[world.receipt("A", "w1")])
    assert world.row("A").state == "COMMIT_IN_PROGRESS"
    assert world.state.low_water == {}


def test_plain_writes_stay_until_they_are_committed() -> None:
    world = opened("A")
    world.write("A", "w1", count=3)
    end(world, "A")
    assert low(world) == 3
    world.write_plainly(count=5)
    run = world.write("A", "w1", count=1)
    world.read_journals()
    turn = world.new_turn()
    assert world.index.plain_from(turn.state, *PLACE) == 3
    assert low(world) == run.end, "committed by then"


def test_plain_writes_that_wait_for_a_later_round_stay() -> None:
    world = opened(round_bytes=100)
    for _ in range(3):
        world.write_plainly(count=5)
    assert [low(world) for _ in range(3)] == [5, 10, 15]


@pytest.mark.parametrize(
    ("records", "size", "changes", "cut"),
    [
        (10, 100, {"clean_records": 10, "clean_bytes": 1 << 30}, True),
        (9, 100, {"clean_records": 10, "clean_bytes": 1 << 30}, False),
        (2, 1_000, {"clean_records": 100, "clean_bytes": 1_000}, True),
        (2, 999, {"clean_records": 100, "clean_bytes": 1_000}, False),
    ],
)
def test_only_what_pays(records: int, size: int, changes: dict[str, int], cut: bool) -> None:
    world = opened("A", **changes)
    world.write("A", "w1", count=records, size=size)
    end(world, "A")
    assert (low(world) == records) is cut


def test_little_goes_too_after_a_while() -> None:
    world = opened("A", clean_records=100, clean_bytes=1 << 30, clean_after_ms=60_000)
    world.write("A", "w1", count=2)
    end(world, "A")
    assert low(world) == 0
    world.wait(59_000)
    assert low(world) == 0
    world.wait(1_000)
    assert low(world) == 2
    world.wait(60_000)
    assert len([row for row in world.log if k.low_water_key(*PLACE) in dict(row)]) == 1, "once"


def test_it_is_looked_at_now_and_then_only() -> None:
    world = opened("A", "B", clean_ms=10_000)
    world.wait(10_000)
    world.write("A", "w1")
    end(world, "A")
    world.write("B", "w2")
    end(world, "B")
    assert low(world) == 0
    world.wait(10_000)
    assert low(world) == 2


def test_a_round_that_comes_to_nothing_cuts_nothing() -> None:
    """Nor does the index forget what its transactions have."""
    world = opened("A")
    world.write("A", "w1", count=3)
    world.turn()
    turn = world.new_turn()
    abort_txn(turn, world.id("A"), "tried")
    clean_up(turn)
    assert turn.cut == {PLACE: 3}
    world.state = type(world.state)(world.table)  # what was not written is forgotten
    assert low(world) == 0
    end(world, "A")
    assert world.row("A").committed == 3


def test_rejected_records_below_are_counted_in_the_row() -> None:
    world = opened("A")
    for _ in range(3):
        world.write("A", "w1", count=2, epoch=1)
    kept = world.write("A", "w2", count=1)
    world.write("A", "w1", count=4, epoch=1)
    assert low(world) == kept.first == 6
    assert world.row("A").rejected == 6
    for _ in range(2):
        rebuild(world)
        world.turn()
        end_of = world.index.rejected_of(world.id("A"))
        assert (world.row("A").rejected, end_of) == (6, 4)
    assert world.abort("A") == "A ABORTED, 10 rejected (aborted by a client)"
    assert index_rows(world) == {}


def test_a_table_that_was_not_kept_up_goes_on_at_the_low_water() -> None:
    world = opened("A", "B")
    world.write("B", "w1", count=2, epoch=1)
    world.write("A", "w1", count=3)
    world.turn()
    table = dict(world.table.rows)
    end(world, "A")
    kept = world.write("B", "w2", count=4)
    assert low(world) == kept.first
    now = index_rows(world)
    stale = type(world.table)(table)
    for rows in world.log:
        world.state.__class__(stale)
        for key, value in rows:
            state = type(world.state)(stale)
            state.fold_row(key, value)
            state.rederive()
            stale.write(state.take_changes())
    world.table = stale
    world.state = type(world.state)(stale)
    world.index = JournalIndex(stale)
    world.index.load()
    begin(world)
    world.read_journals()
    assert index_rows(world) == now


def test_uncommitted_bytes_are_counted_by_stream() -> None:
    world = opened("A", "B")
    world.create("nyc/b")
    world.created("nyc/b", 0, 0)
    world.touch("A", "nyc/b")
    world.write("A", "w1", size=70)
    world.write("A", "w1", "nyc/b", size=5, partition=1)
    world.write("B", "w2", size=200)
    world.write("B", "w2", size=1_000, epoch=1)  # rejected
    world.turn()
    world.describe()
    told = {s.stream: s.uncommitted_bytes for s in world.result.streams}
    assert told == {"nyc/a": 270, "nyc/b": 5}
    assert world.index.uncommitted.total == 275
    world.abort("B")
    assert world.index.uncommitted.total == 75


@pytest.mark.parametrize("keep_table", [True, False])
def test_too_much_is_refused_until_some_ends(keep_table: bool) -> None:
    world = opened("A", "B", max_uncommitted_bytes=1_000)
    world.begin("C")
    world.write("A", "w1", size=400)
    world.write("B", "w2", size=599)
    world.turn()
    assert world.begin("D") == "begun D"
    world.write("B", "w2", size=1)
    world.lead(keep_table=keep_table)
    world.turn()
    assert world.begin("E") == "TooManyUncommittedBytes"
    assert "1,000 bytes" in world.message
    assert world.touch("C") == "TooManyUncommittedBytes"
    assert world.begin("D") == "begun D", "again"
    assert world.touch("A").startswith("touched"), "again"
    assert world.register("A", world.receipt("A", "w1")) == "registered 1"
    world.abort("A")
    assert world.begin("E") == "begun E"
    assert world.touch("C").startswith("touched")
