"""No event's time prevents a stream's retention: which times a stream accepts now, and who decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.journal_runs import NEVER
from anabranch.protocol.limits import AHEAD_MS, LATEST, copied_time
from tests.core.cleaning import crowd, relocate
from tests.core.cleaning import opened as crowded
from tests.core.harness import DAY, World, event, nyc, states


def kept(world: World, retention_ms: int | None) -> World:
    """A world with stream nyc/a of this retention."""
    row = world.state.streams["nyc/a"]
    given = {} if retention_ms is None else {"retention.ms": str(retention_ms)}
    world.log_rows([(k.stream_key("nyc/a"), replace(row, settings={**row.settings, **given}))])
    return world


# Retention -> how far ahead an event may be; None: as far as the end of 9999.
ROOM: dict[int | None, int | None] = {
    None: None,
    -1: None,
    0: AHEAD_MS,
    1_000: AHEAD_MS,
    AHEAD_MS: AHEAD_MS,
    7 * DAY: 7 * DAY,
    1 << 62: None,
}


@pytest.mark.parametrize("retention_ms", ROOM)
@pytest.mark.parametrize("way", ["one-shot", "journal"])
def test_an_event_is_at_most_so_far_ahead(retention_ms: int | None, way: str) -> None:
    room = ROOM[retention_ms]
    for beyond in (0, 1, 1 << 40, 1 << 61):
        world = kept(nyc(), retention_ms)
        latest = (LATEST if room is None else world.wall_ms + room) + beyond
        if way == "one-shot":
            answer = world.one_shot("A", event(timestamp=latest))
        else:
            world.begin("A")
            world.touch("A")
            world.write("A", "w1", count=2)
            world.write("A", "w1", latest=latest)
            answer = world.commit("A", own=[world.receipt("A", "w1")])
        if beyond:
            assert answer.endswith("InvalidArgument")
            assert "nyc/a: an event's timestamp is" in world.message
            if way == "journal":
                assert states(world) == ("OPEN", None)
        else:
            assert "COMMITTED" in (answer or world.turn())


def test_what_is_refused_commits_once_its_time_is_near() -> None:
    world = kept(nyc(), 1_000)
    world.begin("A", keepalive_ms=DAY)
    world.touch("A")
    world.write("A", "w1", latest=world.wall_ms + AHEAD_MS + 60_000)
    own = [world.receipt("A", "w1")]
    assert world.commit("A", own=own) == "InvalidArgument"
    world.wait(60_000)
    assert world.commit("A", own=own) == ""
    assert world.turn() == "[commit A] A COMMITTED 1"


def test_what_no_receipt_takes_does_not_matter(opened: World) -> None:
    kept(opened, 1_000)
    opened.write("A", "w1")
    opened.write("A", "other", latest=NEVER)
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
    assert opened.turn() == "[commit A] A COMMITTED 1, 1 left out"


@pytest.mark.parametrize("keep_table", [False, True])
@pytest.mark.parametrize("then", ["its clock is a day behind", "the retention is shorter"])
def test_what_is_decided_stays_so_for_a_successor(
    opened: World, keep_table: bool, then: str
) -> None:
    kept(opened, 7 * DAY)
    opened.write("A", "w1", count=2, latest=opened.wall_ms + 7 * DAY)
    assert opened.commit("A", own=[opened.receipt("A", "w1")]) == ""
    assert states(opened) == ("COMMIT_IN_PROGRESS", True)
    if then == "the retention is shorter":
        kept(opened, 1_000)
    else:
        opened.wall_us -= DAY * 1000
    opened.lead(keep_table=keep_table)
    assert opened.turn() == "[commit A] A COMMITTED 2"


def test_a_successor_with_a_late_clock_accepts_what_the_leader_before_it_did(world: World) -> None:
    """The time of commits never goes back."""
    kept(world, 1_000)
    time = world.wall_ms + AHEAD_MS
    assert "COMMITTED" in world.one_shot("A", event(timestamp=time))
    world.wall_us -= DAY * 1000
    world.lead()
    assert "COMMITTED" in world.one_shot("B", event(timestamp=time))


@pytest.mark.parametrize("keep_table", [False, True])
def test_runs_that_are_moved_keep_their_time(keep_table: bool) -> None:
    world = crowded("A", move_bytes=25_000)
    kept(world, 1_000)
    world.write("A", "w1", latest=world.wall_ms + 7 * DAY)
    for _ in range(3):
        crowd(world)
    assert relocate(world) == 1
    if not keep_table:
        world.lead(keep_table=False)
        world.table.write(world.index.sweep(world.state))
    assert world.commit("A", own=[world.receipt("A", "w1")]) == "InvalidArgument"


@pytest.mark.parametrize(
    ("timestamp", "copied"),
    [
        (5, 5),
        (LATEST, LATEST),
        (LATEST + 1, None),
        (1 << 62, None),
        (0, None),
        (-1, None),
        (-(1 << 62), None),
        (None, None),
    ],
)
def test_a_copy_of_any_event_has_a_time_that_may_be_written(
    timestamp: int | None, copied: int | None
) -> None:
    assert copied_time(timestamp) == copied
