"""Rolling commits among others: who waits, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions import merge
from anabranch.core.decisions.turn import Turn
from anabranch.core.state import OpenTxn
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc

CHUNK = 1000  # bytes


def scaled(*streams: str, old: tuple[str, ...], **changes: int) -> World:
    """A world in which these transactions touched the streams before a scaling to one segment."""
    world = nyc(*streams, round_bytes=CHUNK, chunk_bytes=CHUNK, **changes)
    for label in old:
        world.begin(label)
        for stream in streams:
            world.touch(label, stream)
    for stream in streams:
        answer = world.ask("scale", r.Scale(stream, 1, (), ()))
        assert answer == f"{stream} ACTIVE 1"
    return world


def test_partitions_that_are_wanted_already_are_counted_once() -> None:
    world = nyc(max_partitions=8)
    row = replace(world.state.streams["nyc/a"], wanted_partitions=4)
    world.log_rows([(k.stream_key("nyc/a"), row)])
    assert world.ask("more", r.Scale("nyc/a", 5, (), ())) == "TooManyStreams"
    assert world.ask("scale", r.Scale("nyc/a", 4, (), ())) == "", "it waits for them"


def write_and_commit(world: World, label: str, stream: str, epoch: int, size: int = 100) -> str:
    """A transaction that touched already writes once and commits."""
    world.write(label, f"w{label}", stream, epoch=epoch, size=size)
    return world.commit(label, own=[world.receipt(label, f"w{label}")])


def test_a_rolling_commit_is_not_held_up_by_a_flood_of_regular_ones() -> None:
    world = scaled("nyc/a", old=("old",))
    fresh = [f"fresh{n}" for n in range(30)]
    for label in fresh:
        world.begin(label)
        world.touch(label)
        world.write(label, label, epoch=1, size=CHUNK)
    world.write("old", "old")
    for n in range(10):
        # In every turn more regular merges are asked for than fit into a round.
        flood = fresh[3 * n : 3 * n + 3]
        asked = [(x, world.committing(x, own=[world.receipt(x, x)])) for x in flood]
        if n == 2:
            asked.append(("old", world.committing("old", own=[world.receipt("old", "old")])))
        world.turn(*asked)
        assert (
            sum(run.batch_size for c in world.round.commits for p in c.parts for run in p.runs)
            <= 2 * CHUNK
        )
    assert world.row("old").state == "COMMITTED"
    assert sum(world.row(label).state == "COMMITTED" for label in fresh) >= 7


def test_a_rolling_commit_of_two_streams_waits_once_to_be_collated() -> None:
    labels = tuple(f"{stream}{n}" for n in range(8) for stream in "ab")
    world = scaled("nyc/a", "nyc/b", old=("both", *labels), collate_ms=200)
    begun = world.now_ms
    for n in range(8):
        for stream in "ab":
            label = f"{stream}{n}"
            write_and_commit(world, label, f"nyc/{stream}", 0)
            if (stream, n) == ("a", 0):
                world.write("both", "both", "nyc/a")
                world.write("both", "both", "nyc/b")
                world.commit("both", own=[world.receipt("both", "both")])
            # The streams roll in turn, each as often as it may.
            for _ in range(4):
                world.wait(25)
            if world.row("both").state == "COMMITTED":
                break
        else:
            continue
        break
    assert world.row("both").state == "COMMITTED"
    assert world.now_ms - begun <= 300


def test_a_big_merge_that_waits_for_another_is_not_planned_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = nyc(chunk_bytes=CHUNK, round_bytes=CHUNK)
    for label in ("first", "second"):
        world.begin(label)
        world.touch(label)
        world.write(label, label, size=2 * CHUNK)
    world.ask("scale", r.Scale("nyc/a", 1, (), ()))
    for label in ("first", "second"):
        world.commit(label, own=[world.receipt(label, label)])
    world.wait(60)
    states = [world.row(label).state for label in ("first", "second")]
    assert states == ["FINALIZE_IN_PROGRESS", "COMMIT_IN_PROGRESS"]
    planned = []
    plan_of = merge.plan_of

    def counted(turn: Turn, txn_id: bytes, txn: OpenTxn) -> merge.Plan:
        planned.append(world.label(txn_id))
        return plan_of(turn, txn_id, txn)

    monkeypatch.setattr(merge, "plan_of", counted)
    for _ in range(10):
        world.wait(60)
    assert planned == []
    # Carried to its place, the first one makes way.
    ((key, row),) = world.state.open[world.id("first")].staged_merges.items()
    done = replace(row, cursor=9, first=0, end=1, count=1, done=True)
    world.log_rows([(k.staged_merge_key(world.id("first"), *key), done)])
    for _ in range(4):
        world.wait(60)
    states = [world.row(label).state for label in ("first", "second")]
    assert states == ["COMMITTED", "FINALIZE_IN_PROGRESS"]
