"""What has to move so that a journal may be cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions import cleanup
from anabranch.core.decisions.cleanup import runs_to_move
from anabranch.core.decisions.scale import partitions_added
from anabranch.protocol.schemas import records as r
from tests.core.cleaning import PLACE, crowd, end, low, opened, relocate
from tests.core.harness import World


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs are moved in one round."""
    monkeypatch.setattr(cleanup, "MAX_MOVED", 3)


def test_a_chunk_has_so_many_bytes() -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(4):
        crowd(world)
    world.settings = dataclasses.replace(world.settings, chunk_bytes=250)
    assert len(runs_to_move(world.new_turn(), PLACE)) == 3


def test_an_old_one_that_keeps_much_is_moved() -> None:
    world = opened("A", move_bytes=25_000)
    runs = [world.write("A", "w1", count=2), world.write("A", "w2", count=3)]
    for _ in range(2):
        crowd(world)
    assert list(world.memory.cleaning.crowded) == []
    crowd(world)
    assert list(world.memory.cleaning.crowded) == [PLACE]
    until = world.ends[PLACE]
    assert relocate(world) == 2
    stored = sorted(world.index.runs(world.id("A"), *PLACE), key=lambda run: run.first)
    assert [(x.first, x.end, x.crc_sum) for x in stored] == [
        (x.first, x.end, x.crc_sum) for x in runs
    ]
    assert [x.at for x in stored] == [until, until + 2]
    assert low(world) == until, "never above what it needs"
    assert low(world) == until
    end(world, "A")
    assert world.row("A").committed == 5
    assert low(world) == world.ends[PLACE]
    assert not [key for key in world.table.rows if key[17:18] == bytes((k.Entry.MOVED,))]


def test_the_next_chunk_follows_and_what_was_moved_is_not_moved_again(
    few: None,
) -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(4):
        crowd(world)
    moves: list[int] = []
    while (count := relocate(world)) and len(moves) < 9:
        moves.append(count)
        world.wait(300)
    assert moves == [3, 2]
    assert len(world.state.open[world.id("A")].moved) == 2


def test_one_that_is_moved_again_is_at_one_place(few: None) -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(3):
        for _ in range(4):
            crowd(world)
        while relocate(world):
            world.wait(300)
    rows = world.state.open[world.id("A")].moved.values()
    firsts = [run.first for row in rows for run in row.runs]
    assert sorted(firsts) == [0, 1, 2, 3, 4]
    end(world, "A")
    assert world.row("A").committed == 5


def decided(world: World) -> None:
    world.commit("A", own=[world.receipt("A", "w1")])


def carried(world: World) -> None:
    """Its chunks are put aside, and its carrier waits for one of its streams."""
    world.settings = dataclasses.replace(world.settings, chunk_bytes=10)
    decided(world)
    for stream in (PLACE[0], "nyc/b"):
        turn = world.new_turn()
        partitions_added(turn, stream, 4)
        world.close(turn)
    world.wait(300)
    world.settings = dataclasses.replace(world.settings, chunk_bytes=1 << 20)


def told_to_commit(world: World) -> None:
    prepare = r.Prepare(b"", b"1")
    own = [world.receipt("A", "w1")]
    world.ask("prepare", dataclasses.replace(world.committing("A", own=own), prepare=prepare))
    world.wait(1)
    assert world.row("A").state == "PREPARED"
    world.ask("commit", world.committing("A"))


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (decided, "COMMIT_IN_PROGRESS"),
        (carried, "FINALIZE_IN_PROGRESS"),
        (told_to_commit, "FINALIZE_IN_PROGRESS"),
    ],
)
def test_who_waits_for_one_stream_keeps_no_journal_of_another(
    ends: Callable[[World], None], state: str
) -> None:
    """Only what a carrier is at stays, with what lies behind it."""
    world = opened("A", "B", move_bytes=25_000)
    world.create("nyc/b", 2)
    world.created("nyc/b", 0, 0)
    world.touch("A", "nyc/b")
    world.write("A", "w1")
    world.write("A", "w1", "nyc/b")
    world.write("B", "w2")
    ends(world)
    world.memory.waiting = {"nyc/b": "a partition has no leader"}
    for _ in range(30):
        crowd(world)
        while relocate(world):
            pass
    assert world.row("A").state == state
    assert world.ends[PLACE] - low(world) < 20
    world.memory.staging = {world.id("A")}
    for _ in range(8):
        crowd(world)
    assert runs_to_move(world.new_turn(), PLACE) == []
    if state == "COMMIT_IN_PROGRESS" or ends is told_to_commit:
        world.memory.waiting, world.memory.staging = {}, ()
        world.wait(2_000)
        assert world.row("A").committed == 2
        assert world.row("A").state == "COMMITTED"


def test_only_as_much_is_moved_as_must_be() -> None:
    world = opened("A", "B", move_bytes=25_000)
    world.write("A", "w1")
    for _ in range(3):
        crowd(world)
    world.write("B", "w2")
    world.write("A", "w1")
    world.turn()
    assert [one.run.first for one in runs_to_move(world.new_turn(), PLACE)] == [0]


def test_nothing_is_moved_to_free_less() -> None:
    world = opened("A", move_bytes=25_000)
    world.write("A", "w1", size=40_000)
    for _ in range(3):
        crowd(world)
    assert runs_to_move(world.new_turn(), PLACE) == []
    for _ in range(2):
        crowd(world)
    assert len(runs_to_move(world.new_turn(), PLACE)) == 1


def test_where_nothing_can_move_it_is_tried_later() -> None:
    world = opened("A", move_bytes=25_000, clean_ms=1_000)
    world.write("A", "w1", size=40_000)
    for _ in range(3):
        crowd(world)
    world.wait(1_000)
    assert list(world.memory.cleaning.crowded) == [PLACE]
    assert relocate(world) == 0
    assert list(world.memory.cleaning.crowded) == []
    world.wait(1_000)
    assert list(world.memory.cleaning.crowded) == []
    world.wait(12_000)
    assert list(world.memory.cleaning.crowded) == [PLACE]
