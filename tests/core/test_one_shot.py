"""One-shots: a whole transaction in one command, placed by key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.protocol.partitioner import SPACE, position_of
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, nyc

HALF = SPACE // 2
LOW = next(bytes([n]) for n in range(256) if position_of(bytes([n])) < HALF)
HIGH = next(bytes([n]) for n in range(256) if position_of(bytes([n])) >= HALF)


def test_it_takes_one_round(world: World) -> None:
    before = world.state.round.hybrid_time
    assert world.one_shot("A", event(value=b"x")) == "A COMMITTED 1"
    (commit,) = world.round.commits
    assert commit.timestamp == world.result.commit_timestamp == world.state.round.hybrid_time
    assert commit.timestamp > before
    assert world.ops() == "", "no journal knows of it"
    row = world.row("A")
    assert (row.state, row.committed, row.scope) == ("COMMITTED", 1, "nyc")
    assert row.begun_ms == row.finished_ms == world.wall_ms
    assert (row.keepalive_ms, row.rejected, row.left_out, row.reason) == (0, 0, 0, "")
    assert row.commit_timestamp == commit.timestamp
    first = world.result
    world.wait(1_000)
    assert world.one_shot("A", event(value=b"events are not compared")) == "A COMMITTED 1"
    assert (world.result, world.plan()) == (first, ""), "once"
    world.get("A")
    assert world.result == first


def test_events_are_placed_by_key_in_their_order(world: World) -> None:
    events = [
        event(key=HIGH, value=b"h1"),
        event(key=LOW, value=b"l1"),
        event(key=HIGH, value=b"h2", segment_id=0),
        event(key=LOW, value=b"l2", segment_id=1),
    ]
    assert world.one_shot("A", *events) == "A COMMITTED 4"
    assert world.plan() == "A nyc/a 0: l1 l2, 1: h1 h2"
    assert [p.segment_id for p in world.round.commits[0].parts] == [0, 1]
    assert [e for p in world.round.commits[0].parts for e in p.events] == [
        events[i] for i in (1, 3, 0, 2)
    ]


def test_the_bounds_of_a_range(world: World) -> None:
    """A segment holds its low position, and not its high one."""
    position = position_of(b"k")
    segments = (
        r.SegmentRange(0, 0, position, 0),
        r.SegmentRange(1, position, position + 1, 1),
        r.SegmentRange(2, position + 1, SPACE, 2),
    )
    row = world.state.streams["nyc/a"]
    world.log_rows([(k.stream_key("nyc/a"), replace(row, segments=segments))])
    assert world.one_shot("A", event(key=b"k", value=b"x")) == "A COMMITTED 1"
    assert world.plan() == "A nyc/a 1: x"
    world.log_rows([(k.stream_key("nyc/a"), replace(row, segments=segments[::2]))])
    assert world.one_shot("B", event(key=b"k")) == "InvalidArgument"


@pytest.mark.parametrize(
    ("segment_id", "partition"), [(0, 0), (1, 1), (-1, 0), (2, 0), (1 << 32, 0)]
)
def test_a_null_key_stays_where_the_client_put_it(
    world: World, segment_id: int, partition: int
) -> None:
    assert world.one_shot("A", event(key=None, value=b"x", segment_id=segment_id)) == (
        "A COMMITTED 1"
    )
    assert world.plan() == f"A nyc/a {partition}: x"


def test_an_empty_key_is_a_key_and_no_events_are_a_commit(world: World) -> None:
    world.one_shot("A", event(key=b"", value=b"x", segment_id=1 - (position_of(b"") >= HALF)))
    assert world.plan() == f"A nyc/a {int(position_of(b'') >= HALF)}: x"
    assert (world.one_shot("B"), world.plan()) == ("B COMMITTED 0", "")


def test_several_streams_are_committed_at_one_timestamp() -> None:
    world = nyc("nyc/a", "nyc/b", "nyc/c")
    events = [event("nyc/b", LOW, b"1"), event("nyc/a", LOW, b"2"), event("nyc/b", HIGH, b"3")]
    assert world.one_shot("A", *events) == "A COMMITTED 3"
    assert world.plan() == "A nyc/b 0: 1, 1: 3; A nyc/a 0: 2"
    assert len({c.timestamp for c in world.round.commits}) == 1


def test_the_epoch_of_the_active_segments(world: World) -> None:
    row = world.state.streams["nyc/a"]
    segments = tuple(replace(s, segment_id=7 << 32 | s.segment_id) for s in row.segments)
    changed = replace(row, stream_epoch=7, reference_epoch=7, segments=segments)
    world.log_rows([(k.stream_key("nyc/a"), changed)])
    world.one_shot("A", event())
    assert [c.stream_epoch for c in world.round.commits] == [7]


# -- again, and by name ------------------------------------------------------------------------


def test_twice_in_one_round(world: World) -> None:
    command = r.OneShot(world.id("A"), "nyc", None, (event(value=b"x"),))
    assert world.turn(("1", command), ("2", command)) == "[1] A COMMITTED 1; [2] A COMMITTED 1"
    assert world.plan() == "A nyc/a " + world.plan()[-4:]
    assert len(world.round.commits) == 1


def test_what_was_answered_with_anothers_outcome_never_commits() -> None:
    """The same command again, once the name is forgotten. Found by simulation."""
    world = nyc(retention_ms=DAY)
    world.one_shot("A", event(), name="daily")
    world.wait(DAY // 2)
    assert world.one_shot("B", event(), name="daily") == "A COMMITTED 1"
    world.wait(DAY // 2 + 1000)
    assert world.get("A") == "Expired"
    assert world.one_shot("B", event(), name="daily") == "TransactionAborted"
    assert world.one_shot("C", event(), name="daily") == "C COMMITTED 1"


def test_a_name_being_committed(world: World) -> None:
    world.begin("A", name="daily")
    world.commit("A")
    assert world.one_shot("B", event(), name="daily") == "NotReady; [commit A] A COMMITTED 0"
    assert world.one_shot("B", event(), name="daily") == "A COMMITTED 0"


@pytest.mark.parametrize("here", [0, 1])
def test_scopes_of_one_control_partition_commit_together_and_no_others(here: int) -> None:
    world = World(control_partition=here, control_partitions=2)
    if here:
        world.adopt("nyc")
        world.adopt("sfo")
    else:
        assert world.find_scope("nyc") + world.find_scope("ber") == "nyc at 0ber at 1"
        world.find_scope("sfo", near="nyc")
    for stream in ("nyc/a", "sfo/a"):
        world.create(stream)
        world.created(stream, 0, 0)
    assert world.one_shot("A", event(), event("sfo/a")) == "A COMMITTED 2"
    first, second = world.round.commits
    assert (first.stream, second.stream, second.timestamp) == ("nyc/a", "sfo/a", first.timestamp)
    assert world.one_shot("B", event(), event("ber/a")) == "CrossScope"
    world.begin("C")
    assert world.touch("C", "sfo/a") == "touched sfo/a epoch 0 on 0,1"
    assert world.touch("C", "ber/a") == "CrossScope"
    assert f"control partition {here}" in world.message
