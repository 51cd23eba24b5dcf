"""Transactions, names, series and writers are their lane's; and grants are judged until a commit is decided."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core.authorize import ALL, Right
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, nyc, states

REFUSED = "NotAuthorized"
TAKEN = "NameTaken"
UNKNOWN = "UnknownTransaction"  # or one that this lane may not see: it reads the same
WAITS = (
    "COMMIT_IN_PROGRESS (its commit is not decided: it waits for the journal to cover the receipts)"
)


def shared() -> World:
    """Lanes `a` and `b` may both write to nyc/a and nyc/b."""
    world = nyc("nyc/a", "nyc/b")
    for lane in "ab":
        world.grant(lane, "nyc/*", Right.WRITE | Right.DESCRIBE)
    return world


def written(world: World, label: str = "A", lane: str = "a") -> r.Receipt:
    """A transaction of a lane, with an event in nyc/a; its writer's receipt."""
    with world.by(lane):
        world.begin(label)
        world.touch(label)
    world.write(label, f"w{label}")
    return world.receipt(label, f"w{label}")


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_name_is_its_lanes_while_it_is_open_or_committed(end: str) -> None:
    world = shared()
    with world.by("a"):
        world.begin("A", name="daily")
        assert world.begin("A2", name="daily") == "begun A2", "one's own is superseded"
        assert world.get("A").startswith("A ABORTED")
    other = 0

    def b_may(said: str) -> None:
        nonlocal other
        other += 1
        with world.by("b"):
            assert world.begin(f"B{other}", name="daily").startswith(said)
            if said == TAKEN:
                assert world.one_shot(f"S{other}", event(), name="daily") == TAKEN
                assert "`anabranch txn list --finished`" in world.message
                world.begin(f"C{other}")
                assert world.commit(f"C{other}", name="daily") == TAKEN
                assert world.get(f"C{other}") == f"C{other} OPEN"

    b_may(TAKEN)
    assert world.holder("daily") == "A2"
    with world.by("a"):
        if end == "commit":
            world.commit("A2")
            assert world.turn() == "[commit A2] A2 COMMITTED 0"
            assert world.begin("A3", name="daily") == "A2 COMMITTED 0"
        else:
            assert world.abort("A2").startswith("A2 ABORTED")
    if end == "commit":
        b_may(TAKEN)
        world.wait(8 * DAY)  # forgotten
        world.turn()
    b_may("begun")


# -- series --------------------------------------------------------------------------------------


def test_a_series_is_its_lanes() -> None:
    world = shared()
    for number, lane, said in ((1, "a", ""), (2, "b", TAKEN), (3, "a", "")):
        with world.by(lane):
            label = f"T{number}"
            world.begin(label)
            if lane == "b":  # where the series stands is not told
                assert world.commit(label, name="s", number=1 << 40) == said
            assert world.commit(label, name="s", number=number) == said
            world.turn()
            assert world.get(label) == f"{label} {'OPEN' if said else 'COMMITTED 0'}"
    assert world.series("s") == "3 by T3"
    with world.by("b"):
        assert world.commit("T2", name="s", number=1 << 40) == TAKEN, "its number is not told"
        assert "`anabranch series set nyc 's' NUMBER --owner b`" in world.message
        assert world.get("T2") == "T2 OPEN"
    world.ask("validation", r.ListSeries("nyc", None, None), lane="admin")
    assert [(s.series, s.owner) for s in world.result.series] == [("s", "a")]
    assert world.ask("move", r.SetSeries("nyc", "s", 3, 3, "c"), lane="admin") == "UnknownLane"
    world.ask("move", r.SetSeries("nyc", "s", 3, 3, "b"), lane="admin")
    assert "of lane b" in world.round.audit[-1].what
    for number, lane, said in ((4, "a", TAKEN), (4, "b", "")):
        with world.by(lane):
            world.begin(f"{lane}{number}")
            assert world.commit(f"{lane}{number}", name="s", number=number) == said
    world.turn()
    assert world.series("s") == "4 by b4"


def test_a_lane_of_a_part_of_a_scope_takes_no_free_name() -> None:
    """A lane that may write to a part of a scope takes no name of the whole scope, but for what it was given."""
    world = shared()
    for pattern in ("nyc/a", "nyc/t"):
        world.grant("part", pattern, Right.WRITE | Right.DESCRIBE)
    with world.by("part"):
        assert world.begin("A", name="daily") == REFUSED
        assert "nyc/*" in world.message
        assert world.one_shot("B", event(), name="daily") == REFUSED
        assert world.begin("C") == "begun C"
        assert world.commit("C", name="s", number=0) == REFUSED
        assert "`anabranch series set nyc 's' -1 --owner part`" in world.message
        assert world.commit("C", name="daily") == REFUSED
        assert world.get("C") == "C OPEN"
    assert world.holder("daily") == "nobody"
    world.ask("give", r.SetSeries("nyc", "s", None, -1, "part"), lane="admin")
    (given,) = world.result.series
    assert (given.number, given.owner, given.runs) == (-1, "part", ())
    with world.by("b"):
        world.begin("D")
        assert world.commit("D", name="s", number=0) == TAKEN
    with world.by("part"):
        world.commit("C", name="s", number=0)
        assert world.turn() == "[commit C] C COMMITTED 0"
        world.begin("E")
        world.ask("free", r.SetSeries("nyc", "s", 0, 0, ""), lane="admin")
        assert world.commit("E", name="s", number=1) == REFUSED, (
            "it is of all who may write everywhere"
        )
    world.ask("take away", r.SetSeries("nyc", "s", 0, -1), lane="admin")
    assert world.state.series("nyc", "s") is None
    with world.by("a"):  # named before its right was taken away
        world.begin("N", name="daily")
        world.grant("a", "nyc/*", 0)
        world.grant("a", "nyc/a", Right.WRITE)
        assert world.begin("N2", name="daily") == "begun N2"


def test_a_series_that_an_operator_made_is_every_lanes() -> None:
    """A series that an operator made is of all who may write."""
    world = shared()
    world.ask("set", r.SetSeries("nyc", "s", None, 1), lane="admin")
    for number, lane in ((2, "a"), (3, "b")):
        with world.by(lane):
            world.begin(f"T{number}")
            world.commit(f"T{number}", name="s", number=number)
            assert world.turn() == f"[commit T{number}] T{number} COMMITTED 0"
    for label, said in {"b": "T3 COMMITTED 0", "a": "AlreadyCommitted"}.items():
        with world.by(label):
            world.begin(label)
            assert world.commit(label, name="s", number=3) == said, "another's is not shown"
            assert world.get(label).startswith(f"{label} ABORTED")
            assert world.commit(label, name="s", number=3) == said


# -- one-shots -----------------------------------------------------------------------------------


def test_a_repeated_one_shot_is_answered_to_its_lane() -> None:
    """Repeated, it is answered from its row: to its lane, whatever that may now."""
    world = shared()
    with world.by("a"):
        assert world.one_shot("A", event()) == "A COMMITTED 1"
    with world.by("b"):
        assert world.one_shot("A", event()) == REFUSED
        assert world.resolve("A") == world.get("A") == UNKNOWN
    world.grant("a", "nyc/*", 0)
    with world.by("a"):
        assert world.one_shot("A", event()) == "A COMMITTED 1"
        assert world.one_shot("B", event()) == REFUSED
        assert world.resolve("A") == world.get("A") == "A COMMITTED 1"


# -- writers -------------------------------------------------------------------------------------


def test_a_writer_is_of_the_lane_that_registered_it_first() -> None:
    """A writer is the lane's that registered it first, by a touch or a receipt."""
    world = shared()
    receipt = written(world)
    with world.by("b"):
        assert world.register("A", receipt) == "registered 1", "by the token"
        touch = r.Touch(world.token("A"), "nyc/b", world.writer("w2"))
        assert world.ask("touch", touch) == "touched nyc/b epoch 0 on 0,1"
    empty = r.Receipt(world.id("A"), world.writer("w2"), 1, True, ())
    again = r.Receipt(world.id("A"), world.writer("wA"), 2, True, receipt.extents)
    with world.by("a"):
        assert world.register("A", empty) == world.register("A", again) == REFUSED
    lanes = world.state.open[world.id("A")].lanes
    assert lanes == {world.writer("wA"): "b", world.writer("w2"): "b"}
    with world.by("b"):
        assert world.register("A", empty) == "registered 1"
        assert world.register("A", again) == "registered 2"
    with world.by("a"):
        world.commit("A")
    assert world.turn() == "[commit A] A COMMITTED 1", "all came by a token"


# -- grants that are taken away meanwhile --------------------------------------------------------


def test_a_touch_needs_the_owners_grant() -> None:
    world = shared()
    with world.by("a"):
        world.begin("A")
    world.grant("a", "nyc/*", 0)
    world.grant("a", "nyc/b", Right.WRITE)
    for lane in "ab":  # whoever has the token acts for the owner
        with world.by(lane):
            assert world.touch("A") == REFUSED
            assert world.touch("A", "nyc/no") == REFUSED
            assert world.touch("A", "nyc/b") == "touched nyc/b epoch 0 on 0,1"


def test_a_registration_needs_the_owners_grant() -> None:
    world = shared()
    receipt = written(world)
    world.grant("a", "nyc/*", 0)
    for lane in "ab":
        with world.by(lane):
            assert world.register("A", receipt) == REFUSED


def test_a_commit_needs_the_owners_grant() -> None:
    world = shared()
    receipt = written(world)
    world.grant("a", "nyc/*", 0)
    world.grant("a", "nyc/b", Right.WRITE)
    with world.by("a"):
        assert world.commit("A", own=[receipt]) == REFUSED
        assert world.get("A") == "A OPEN"
        assert world.abort("A", "then not") == "A ABORTED (then not)"


def test_a_commit_of_nothing_needs_a_grant() -> None:
    """A commit of nothing still claims a number of the lane's own series."""
    world = shared()
    with world.by("a"):
        world.begin("S")
        world.commit("S", name="s", number=0)
        world.turn()
        world.begin("A")
    world.grant("a", "nyc/*", 0)
    with world.by("a"):
        assert world.commit("A", name="s", number=1) == REFUSED


def test_a_commit_that_waits_is_refused_without_its_grant() -> None:
    """The commit is refused, the transaction stays open; what waits twice is answered twice."""
    world = shared()
    receipt = written(world)
    world.held = True
    with world.by("a"):
        assert world.commit("A", own=[receipt]) == ""
        world.grant("a", "nyc/*", 0)
        assert world.get("A") == f"A {WAITS}"
        assert world.commit("A", own=[receipt]) == "", "repeated: it waits already"
        assert world.commit("A", own=[receipt], asker="other") == REFUSED
        world.held = False
        world.turn()
        assert world.turn() == ""
        assert world.get("A") == "A OPEN"
    world.grant("a", "nyc/a", Right.WRITE)
    with world.by("a"):
        world.commit("A", own=[receipt], asker="again")
    assert world.turn() == "[again] A COMMITTED 1"


def test_a_decided_commit_needs_no_grant() -> None:
    world = shared()
    receipt = written(world)
    with world.by("a"):
        assert world.commit("A", own=[receipt]) == ""
    assert states(world) == ("COMMIT_IN_PROGRESS", True)
    assert world.grant("a", "nyc/*", 0).endswith("[commit A] A COMMITTED 1")
    with world.by("a"):
        assert world.touch("A") == "AlreadyCommitted"
        assert world.commit("A", own=[receipt]) == "A COMMITTED 1", "answered from its row"


def test_tokens_of_a_blocked_lane_do_nothing() -> None:
    """Others act by its token for a lane: not for one that is blocked."""
    world = shared()
    receipt = written(world)
    token = world.token("A")
    for blocked, said in ((True, REFUSED), (False, "")):
        world.ask("lane", r.SetLane("a", blocked, ("1", "2"), {}), lane="admin")
        with world.by("b"):
            assert world.touch("A", "nyc/b").startswith(said or "touched")
            assert world.register("A", receipt).startswith(said or "registered")
            assert world.ask("commit", r.Commit(token, (receipt,), None, None, 1000)) == said
        assert world.turn() == ("" if said else "[commit] A COMMITTED 1")


# -- who waits -----------------------------------------------------------------------------------


def test_an_equal_correlation_id_of_another_lane_is_another_asker() -> None:
    """Correlation ids are chosen by clients: another lane's equal one is another asker."""
    world = shared()
    receipt = written(world)
    world.held = True
    for lane in "aabb":
        with world.by(lane):
            assert world.commit("A", own=[receipt]) == ""
    world.held = False
    world.turn()
    world.turn()
    assert [to.lane for round_ in world.rounds for to, what in round_.replies if _ended(what)] == [
        "a",
        "b",
    ]


def _ended(what: Any) -> bool:
    return isinstance(what, r.Outcome) and what.state == "COMMITTED"


def test_a_scaling_is_answered_to_its_lane_alone() -> None:
    world = shared()
    for lane in "ab":
        world.grant(lane, "nyc/*", ALL)
    command = r.Scale("nyc/a", 3, (), ())
    assert world.ask("scale", command, lane="a") == "", "it waits for a partition"
    assert world.ask("scale", command, lane="a") == ""
    assert world.ask("scale", command, lane="b") == "NotReady"


# -- lists ---------------------------------------------------------------------------------------


def test_lists_and_states_show_a_lane_its_own() -> None:
    world = shared()
    for lane, label in (("a", "A"), ("b", "B")):
        with world.by(lane):
            world.begin(label)
            world.commit(label, name=f"s-{label}", number=1)
            world.turn()
    with world.by("a"):
        assert world.list() == world.list(scope="nyc") == "A COMMITTED 0"
        assert world.ask("series", r.ListSeries("nyc", None, None)) == "s-A 1 by A"
        assert world.get("B") == world.resolve("B") == UNKNOWN
    world.grant("a", "nyc/*", Right.DESCRIBE | Right.OPERATE)
    with world.by("a"):
        assert world.list() == "B COMMITTED 0, A COMMITTED 0"
        assert world.ask("series", r.ListSeries("nyc", None, None)) == "s-B 1 by B, s-A 1 by A"
        assert world.get("B") == world.resolve("B") == "B COMMITTED 0"
