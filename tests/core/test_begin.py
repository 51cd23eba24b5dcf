"""Begin: new, repeated, by name; and everything it refuses. Read as transcripts."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.turn import DAY_MS
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, nyc
from tests.core.labels import MINUTE


def test_begin(world: World) -> None:
    assert world.begin("A", name="daily", keepalive_ms=5_000) == "begun A"
    begun = world.result
    assert begun == r.Begun(world.id("A"), 5_000, world.wall_ms)
    row = world.row("A")
    assert (row.scope, row.name, row.state, row.keepalive_ms) == ("nyc", "daily", "OPEN", 5_000)
    assert (row.begun_ms, row.finished_ms, row.commit_timestamp) == (world.wall_ms, 0, 0)
    assert world.holder("daily") == "A"
    assert world.ops() == ""


def test_repeating_it_gives_the_same_answer_and_changes_nothing(world: World) -> None:
    world.begin("A", name="daily")
    first = world.result
    world.wait(1_000)
    before = dict(world.table.rows)
    assert world.begin("A", name="daily") == "begun A"
    assert world.result == first
    assert {key for key, v in world.table.rows.items() if before.get(key) != v} == {
        k.STATUS + k.ROUND_KEY
    }


@pytest.mark.parametrize(
    "other",
    [{"name": "weekly"}, {"name": None}, {"keepalive_ms": 2 * MINUTE}, {"scope": "sfo"}],
    ids=lambda other: next(iter(other)),
)
def test_the_same_id_with_other_arguments(world: World, other: dict[str, Any]) -> None:
    world.find_scope("sfo")
    world.begin("A", name="daily")
    assert world.begin("A", **({"name": "daily"} | other)) == "InvalidArgument"
    assert "in use with other arguments" in world.message


def test_repeating_it_after_the_end(world: World) -> None:
    world.begin("A")
    world.commit("A")
    assert world.turn() == "[commit A] A COMMITTED 0"
    assert world.begin("A") == "A COMMITTED 0"
    assert world.id("A") not in world.heard(), "what has ended is not waited for"
    world.begin("B")
    world.abort("B", "why not")
    assert world.begin("B") == "TransactionAborted"
    assert "why not" in world.message


def test_repeating_it_while_it_commits(world: World) -> None:
    world.begin("A")
    world.commit("A")
    assert world.begin("A") == "begun A; [commit A] A COMMITTED 0"


def test_a_committed_name_gives_its_outcome(world: World) -> None:
    world.begin("A", name="daily")
    world.commit("A")
    world.turn()
    assert world.begin("B", name="daily") == "A COMMITTED 0"
    assert world.begin("B", name="daily") == "A COMMITTED 0"
    assert world.get("B") == "UnknownTransaction"
    assert world.holder("daily") == "A"


def test_an_open_name_goes_to_the_newcomer(world: World) -> None:
    world.begin("A", name="daily")
    world.touch("A")
    assert world.begin("B", name="daily") == "begun B"
    assert world.ops() == "ABORT_TXN A nyc/a:0"
    assert world.get("A") == ("A ABORTED (superseded by a newer transaction named 'daily')")
    assert world.holder("daily") == "B"
    assert world.begin("A", name="daily") == "TransactionAborted"
    assert world.get("B") == "B OPEN"


def test_an_aborted_name_is_free(world: World) -> None:
    world.begin("A", name="daily")
    world.abort("A")
    assert world.begin("B", name="daily") == "begun B"
    assert world.get("A") == "A ABORTED (aborted by a client)"


def test_the_same_name_in_another_scope_is_another_name(world: World) -> None:
    world.find_scope("sfo")
    assert world.begin("A", name="daily", scope="nyc") == "begun A"
    assert world.begin("B", name="daily", scope="sfo") == "begun B"
    assert world.list() == "B OPEN, A OPEN"


def test_a_name_being_committed(world: World) -> None:
    world.begin("A", name="daily")
    world.commit("A")
    assert world.begin("B", name="daily") == "NotReady; [commit A] A COMMITTED 0"
    assert world.begin("B", name="daily") == "A COMMITTED 0"


def test_a_name_whose_commit_still_waits_can_be_taken(world: World) -> None:
    world.begin("A", name="daily")
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    assert world.commit("A", own=[world.receipt("A", "w1")]) == ""
    assert world.begin("B", name="daily") == "[commit A] TransactionAborted; begun B"
    assert world.get("A").startswith("A ABORTED (superseded")


@pytest.mark.parametrize(
    ("ahead_ms", "answer"),
    [(0, "begun A"), (DAY_MS, "begun A"), (DAY_MS + 1, "ClockSkew"), (-3 * DAY_MS, "begun A")],
)
def test_the_clock_of_an_id(world: World, ahead_ms: int, answer: str) -> None:
    world.new_id("A", made_ms=world.wall_ms + ahead_ms)
    assert world.begin("A") == answer


@pytest.mark.parametrize(("retention_ms", "allowed_ms"), [(3_600_000, 1_800_000), (7, 3)])
def test_a_short_retention_allows_less_skew(retention_ms: int, allowed_ms: int) -> None:
    world = nyc(retention_ms=retention_ms)
    assert world.begin(world.new_id("A", made_ms=world.wall_ms + allowed_ms)) == "begun A"
    assert world.begin(world.new_id("B", made_ms=world.wall_ms + allowed_ms + 1)) == "ClockSkew"


@pytest.mark.parametrize("label", ["by its clock", "by a right clock"])
def test_a_controller_whose_clock_is_behind_forgotten_ids_names_its_clock(label: str) -> None:
    """`Expired` would mean "begin again", and the next transaction would get it, too."""
    world = nyc()
    world.one_shot("A")
    world.wait(7 * DAY_MS + 1)
    world.wait(250)
    right_ms = world.wall_ms
    assert world.get("A") == "Expired"
    world.wall_us -= 8 * DAY_MS * 1000
    made_ms = world.wall_ms if label == "by its clock" else right_ms
    assert world.begin(world.new_id("B", made_ms=made_ms)) == "ClockSkew"
    assert "the controller's clock is" in world.message
    world.wall_us = right_ms * 1000
    assert world.begin(world.new_id("C", made_ms=right_ms - 8 * DAY_MS)) == "Expired"


def test_an_id_made_at_the_beginning_of_time_is_expired(world: World) -> None:
    world.new_id("A", made_ms=0)
    assert world.begin("A") == "Expired"


def test_an_id_of_another_control_partition(world: World) -> None:
    world.new_id("A", partition=7)
    assert world.begin("A") == "InvalidArgument"
    assert "control partition 7; this is 0" in world.message


@pytest.mark.parametrize(
    ("scope", "answer"),
    [("nyc", "begun A"), ("sfo", "UnknownScope"), ("n.y.c", "InvalidArgument")],
)
def test_scopes(world: World, scope: str, answer: str) -> None:
    assert world.begin("A", scope=scope) == answer


def test_a_scope_that_another_control_partition_serves() -> None:
    world = World(control_partitions=2)
    world.find_scope("nyc")
    assert world.find_scope("sfo") == "sfo at 1"
    assert world.begin("A", scope="sfo") == "UnknownScope"
    assert "served by control partition 1" in world.message


@pytest.mark.parametrize(
    ("keepalive_ms", "answer"),
    [
        (999, "InvalidArgument"),
        (1_000, "begun A"),
        (MINUTE, "begun A"),
        (MINUTE + 1, "InvalidArgument"),
        (0, "InvalidArgument"),
        (-1, "InvalidArgument"),
    ],
)
def test_the_range_of_the_keepalive(keepalive_ms: int, answer: str) -> None:
    world = nyc(max_keepalive_ms=MINUTE)
    assert world.begin("A", keepalive_ms=keepalive_ms) == answer


def test_the_longest_keepalive_of_the_wire_is_allowed(world: World) -> None:
    assert world.settings.max_keepalive_ms < 1 << 31, "a token can't carry more"
    assert world.begin("A", keepalive_ms=world.settings.max_keepalive_ms) == "begun A"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("", "InvalidArgument"),
        ("n", "begun A"),
        ("é" * 256, "begun A"),
        ("n" * 257, "InvalidArgument"),
        ("a/b\0c", "begun A"),
    ],
    ids=["empty", "1", "256", "257", "any characters"],
)
def test_the_range_of_the_name(world: World, name: str, answer: str) -> None:
    assert world.begin("A", name=name) == answer


def test_too_many_open_ones() -> None:
    world = nyc(max_open=2)
    assert world.begin("A") == "begun A"
    assert world.begin("B") == "begun B"
    assert world.begin("C") == "TooManyTransactions"
    assert world.begin("A") == "begun A", "a repeated begin needs no room"
    world.abort("A")
    assert world.begin("C") == "begun C"


def test_a_newcomer_needs_no_more_room_than_the_one_it_replaces() -> None:
    world = nyc(max_open=1)
    assert world.begin("A", name="daily") == "begun A"
    assert world.begin("B", name="daily") == "begun B"
    assert world.begin("C", name="other") == "TooManyTransactions"
    assert world.list(finished=False) == "B OPEN"


def test_several_in_one_round_see_each_other(world: World) -> None:
    assert (
        world.turn(
            ("1", world.beginning("A", name="daily")),
            ("2", world.beginning("B", name="daily")),
            ("3", world.beginning("A", name="daily")),
        )
        == "[1] begun A; [2] begun B; [3] TransactionAborted"
    )
    assert world.list() == "B OPEN, A ABORTED (superseded by a newer transaction named 'daily')"


def test_a_day_is_a_day() -> None:
    assert DAY_MS == DAY
