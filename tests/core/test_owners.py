"""Transactions, names, series and writers are their lane's; and grants are judged until a commit is decided.

Each scene is a short story that a planted bug, which leaves one check out, breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from anabranch.core import authorize
from anabranch.core.authorize import ALL, Right
from anabranch.core.decisions import (
    claims,
    commit,
    decide,
    one_shot,
    questions,
    transactions,
    writers,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
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


def names(end: str) -> None:
    """`a` holds a name with an open transaction, which is then committed or aborted."""
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


def names_committed() -> None:
    names("commit")


def names_aborted() -> None:
    names("abort")


# -- series --------------------------------------------------------------------------------------


def series() -> None:
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


def free_names() -> None:
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


def series_by_hand() -> None:
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


def one_shots() -> None:
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


def each_stream_of_a_one_shot() -> None:
    world = nyc("nyc/a", "nyc/b")
    world.grant("a", "nyc/a", Right.WRITE)
    with world.by("a"):
        assert world.one_shot("A", event(), event("nyc/b")) == REFUSED
        assert world.one_shot("B", event()) == "B COMMITTED 1"


# -- writers -------------------------------------------------------------------------------------


def receipts() -> None:
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


def grant_gone_at_touch() -> None:
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


def grant_gone_at_register() -> None:
    world = shared()
    receipt = written(world)
    world.grant("a", "nyc/*", 0)
    for lane in "ab":
        with world.by(lane):
            assert world.register("A", receipt) == REFUSED


def grant_gone_at_commit() -> None:
    world = shared()
    receipt = written(world)
    world.grant("a", "nyc/*", 0)
    world.grant("a", "nyc/b", Right.WRITE)
    with world.by("a"):
        assert world.commit("A", own=[receipt]) == REFUSED
        assert world.get("A") == "A OPEN"
        assert world.abort("A", "then not") == "A ABORTED (then not)"


def grant_gone_without_streams() -> None:
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


def grant_gone_while_it_waits() -> None:
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


def grant_gone_after_the_decision() -> None:
    world = shared()
    receipt = written(world)
    with world.by("a"):
        assert world.commit("A", own=[receipt]) == ""
    assert states(world) == ("COMMIT_IN_PROGRESS", True)
    assert world.grant("a", "nyc/*", 0).endswith("[commit A] A COMMITTED 1")
    with world.by("a"):
        assert world.touch("A") == "AlreadyCommitted"
        assert world.commit("A", own=[receipt]) == "A COMMITTED 1", "answered from its row"


def owner_blocked() -> None:
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


def askers() -> None:
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


def scalings() -> None:
    world = shared()
    for lane in "ab":
        world.grant(lane, "nyc/*", ALL)
    command = r.Scale("nyc/a", 3, (), ())
    assert world.ask("scale", command, lane="a") == "", "it waits for a partition"
    assert world.ask("scale", command, lane="a") == ""
    assert world.ask("scale", command, lane="b") == "NotReady"


# -- lists ---------------------------------------------------------------------------------------


def seen() -> None:
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


SCENES: list[Callable[[], None]] = [
    names_committed,
    names_aborted,
    series,
    series_by_hand,
    free_names,
    one_shots,
    each_stream_of_a_one_shot,
    receipts,
    grant_gone_at_touch,
    grant_gone_at_register,
    grant_gone_at_commit,
    grant_gone_without_streams,
    grant_gone_while_it_waits,
    grant_gone_after_the_decision,
    owner_blocked,
    askers,
    scalings,
    seen,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene(scene: Callable[[], None]) -> None:
    scene()


# -- planted bugs --------------------------------------------------------------------------------

Planted = Callable[[], AbstractContextManager[object]]


def _nothing(*_: object) -> None:
    """No check."""


def _in_command(command: type, change: Callable[[Turn, Any], Planted]) -> Planted:
    """A bug that is there only while commands of this type are decided."""

    def plant() -> AbstractContextManager[object]:
        real = decide._DECISIONS[command]

        def decision(turn: Turn, asked: Any, to: Any) -> None:
            with change(turn, asked)():
                real(turn, asked, to)

        return patch.dict(decide._DECISIONS, {command: decision})

    return plant


def _commit_unchecked(turn: Turn, asked: Any) -> Planted:
    """Grants are judged at the decision alone."""
    return lambda: patch.object(commit, "check_writes", _nothing)


def _only_when_received() -> AbstractContextManager[object]:
    """Grants are judged when a commit comes, not when it is decided."""
    real = commit._why_not

    def why_not(*given: Any) -> Any:
        with patch.object(commit, "check_writes", _nothing):
            return real(*given)

    return patch.object(commit, "_why_not", why_not)


def _only_with_streams() -> AbstractContextManager[object]:
    def check(state: Any, row: Any, streams: Any) -> None:
        if streams:
            authorize.check_writes(state, row, streams)

    return patch.object(commit, "check_writes", check)


def _as_writers_lane(turn: Turn, asked: r.Register) -> Planted:
    """A receipt replaces that of any lane's writer."""
    lanes = turn.open(asked.receipt.txn_id).lanes
    return lambda: patch.object(turn, "lane", lanes.get(asked.receipt.writer, turn.lane))


def _names_of_all() -> AbstractContextManager[object]:
    """The holder of a name is taken for the asker's own."""
    real = transactions.earlier_outcome

    def earlier(turn: Turn, scope: str, name: str | None, owner: str) -> r.TxnRow | None:
        holder = turn.state.holder(scope, name) if name is not None else None
        row = turn.state.txn_row(holder) if holder is not None else None
        return real(turn, scope, name, owner if row is None else row.owner)

    both = ExitStack()
    both.enter_context(patch.object(transactions, "earlier_outcome", earlier))
    both.enter_context(patch.object(commit, "earlier_outcome", earlier))
    both.enter_context(patch.object(one_shot, "earlier_outcome", earlier))
    return both


def _series_of_all() -> AbstractContextManager[object]:
    def series_of(turn: Turn, txn: r.TxnRow, series: str) -> r.SeriesRow | None:
        return turn.state.series(txn.scope, series)

    return patch.object(claims, "_series_of", series_of)


def _ids_alone(pending: r.PendingCommitRow | None, to: ReplyTo) -> bool:
    return pending is not None and to.correlation_id in {
        each.correlation_id for each in pending.askers
    }


BUGS: dict[str, tuple[Callable[[], None], Planted]] = {
    "names": (names_committed, _names_of_all),
    "series": (series, _series_of_all),
    "touch": (grant_gone_at_touch, lambda: patch.object(transactions, "check_writes", _nothing)),
    "register": (grant_gone_at_register, lambda: patch.object(writers, "check_writes", _nothing)),
    "receipts": (receipts, _in_command(r.Register, _as_writers_lane)),
    "commit": (grant_gone_while_it_waits, _in_command(r.Commit, _commit_unchecked)),
    "commit of nothing": (grant_gone_without_streams, _only_with_streams),
    "the decision": (grant_gone_while_it_waits, _only_when_received),
    "authority before waiting": (
        grant_gone_while_it_waits,
        lambda: patch.object(commit, "is_waiting", lambda *_: False),
    ),
    "streams of a one-shot": (
        each_stream_of_a_one_shot,
        lambda: patch.object(one_shot, "check_right", _nothing),
    ),
    "askers": (askers, lambda: patch.object(commit, "is_waiting", _ids_alone)),
    "scalings": (
        scalings,
        lambda: patch.object(ReplyTo, "asker", property(lambda to: to.correlation_id)),
    ),
    "state": (seen, lambda: patch.object(Turn, "_may_by_id", lambda *_: True)),
    "list": (seen, lambda: patch.object(questions, "sees", lambda *_: True)),
    "series in a list": (seen, lambda: patch.object(claims, "rights_of", lambda *_: int(ALL))),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_check_left_out_breaks_a_scene(name: str) -> None:
    scene, plant = BUGS[name]
    with plant(), pytest.raises(AssertionError):
        scene()
