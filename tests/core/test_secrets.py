"""A transaction is its beginner's: each command about it, by tokens, bare ids and lanes. A refusal changes nothing.

`World` compares the whole state before and after each refused command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.core.authorize import Right
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import make, narrow, peek
from tests.core.harness import World, nyc
from tests.core.labels import MINUTE

OTHER = bytes(32)
UNKNOWN, DENIED = "UnknownTransaction", "NotAuthorized"

Named = Callable[[World], bytes]

# What each command about A says if it is allowed. A commit's answer comes a turn later.
COMMANDS: dict[str, tuple[Callable[[World, bytes], Any], str]] = {
    "touch": (lambda w, t: r.Touch(t, "nyc/a"), "touched nyc/a epoch 0 on 0,1"),
    "register": (lambda w, t: r.Register(t, w.receipt("A", "w1")), "registered 1"),
    "heartbeat": (lambda w, t: r.Heartbeat((t,)), ""),
    "commit": (lambda w, t: r.Commit(t, (), None, None, 10_000), "[commit] A COMMITTED 0"),
    "abort": (lambda w, t: r.Abort(t, "why"), "A ABORTED (why)"),
    "get": (lambda w, t: r.GetState(w.id("A"), shown(t)), "A OPEN"),
    "resolve": (lambda w, t: r.Resolve(w.id("A"), "nyc", shown(t)), "A OPEN"),
    "force": (lambda w, t: r.Force(t, "why"), "IllegalState"),
}  # fmt: skip


def shown(named: bytes) -> bytes | None:
    """A question has the id anyway."""
    return None if len(named) == 16 else named


def token(**more: Any) -> Named:
    return lambda world: world.token("A", **more)


def bare(world: World) -> bytes:
    return world.id("A")


def expired(world: World) -> bytes:
    return world.token("A", not_after_ms=world.wall_ms - 1)


def with_other_secret(world: World) -> bytes:
    return make(OTHER, peek(world.token("A")))


def of_another(world: World) -> bytes:
    """B's token, with the id of A."""
    return b"\2" + world.id("A") + world.token("B")[17:]


def widened(world: World) -> bytes:
    """A token of one right, with the head and the caveats of one of all rights."""
    return world.token("A")[:-32] + narrow(world.token("A"), rights=1)[-32:]


# (owner, sender, how A is named): + allowed, - NotAuthorized, ? UnknownTransaction; for each command in turn:
# touch, register, heartbeat, commit, abort, get, resolve, settle.
TABLE: dict[str, tuple[str, str, Named, str]] = {
    "all": ("open", "open", token(), "+++++++?"),
    "write": ("open", "open", token(rights=1), "++-----?"),
    "heartbeat": ("open", "open", token(rights=2), "--+----?"),
    "commit": ("open", "open", token(rights=4), "---+-++?"),
    "abort": ("open", "open", token(rights=8), "----+--?"),
    "state": ("open", "open", token(rights=16), "-----++?"),
    "two rights": ("open", "open", token(rights=9), "++--+--?"),
    "narrowed": ("open", "open", lambda w: narrow(w.token("A"), rights=1), "++-----?"),
    "narrowed twice": ("open", "open", lambda w: narrow(narrow(w.token("A"), rights=7), rights=4), "---+-++?"),
    "ends now": ("open", "open", lambda w: w.token("A", not_after_ms=w.wall_ms), "+++++++?"),
    "expired": ("open", "open", expired, "-------?"),
    "expired by caveat": ("open", "open", lambda w: narrow(w.token("A"), not_after_ms=w.wall_ms - 1), "-------?"),
    "expired, the owner's": ("etl", "etl", expired, "-------?"),
    "of this lane": ("etl", "web", token(lanes=frozenset({"web"})), "+++++++?"),
    "of another lane": ("etl", "etl", token(lanes=frozenset({"web"})), "-------?"),
    "of two lanes": ("etl", "etl", token(lanes=frozenset({"etl", "web"})), "-------?"),
    "of any lane": ("etl", "web", token(), "+++++++?"),
    "another secret": ("open", "open", with_other_secret, "????????"),
    "another secret, the owner's": ("etl", "etl", with_other_secret, "????????"),
    "of another transaction": ("open", "open", of_another, "????????"),
    "widened": ("open", "open", widened, "????????"),
    "an operator's token": ("etl", "ops", token(rights=1), "++-----+"),
    "bare id": ("open", "open", bare, "?????++?"),
    "bare id, the owner's": ("etl", "etl", bare, "+++++++?"),
    "bare id, of open by another": ("open", "etl", bare, "????????"),
    "bare id, of another by open": ("etl", "open", bare, "????????"),
    "bare id, of another": ("etl", "web", bare, "????????"),
    "bare id, an operator's": ("etl", "ops", bare, "++++++++"),
    "bare id, admin's": ("etl", "admin", bare, "++++++++"),
    "bare id, an operator's elsewhere": ("etl", "sfo-ops", bare, "????????"),
}  # fmt: skip


def with_a(owner: str, *, begun: bool = True) -> World:
    """A world where A is open, and registered in nyc/a."""
    world = nyc()
    world.lanes.clear()
    for lane in ("etl", "web", "ops", "sfo-ops"):
        world.grant(lane, "nyc/*", Right.WRITE | (Right.OPERATE if lane == "ops" else 0))
    world.grant("sfo-ops", "sfo/*", int(Right.OPERATE))
    world.lane = owner
    world.begin("B")
    if begun:
        world.begin("A")
        world.ask("touch", r.Touch(world.token("A"), "nyc/a"))
    world.now_ms += 1_000
    return world


def tell(world: World, command: str, named: bytes) -> str:
    said = world.ask(command, COMMANDS[command][0](world, named))
    return world.turn() if command == "commit" and not said else said


@pytest.mark.parametrize("case", TABLE)
def test_each_command_is_answered_by_what_its_token_and_lane_allow(case: str) -> None:
    owner, sender, named, signs = TABLE[case]
    for command, sign in zip(COMMANDS, signs, strict=True):
        world = with_a(owner)
        world.lane = sender
        heard = world.heard()
        said = tell(world, command, named(world))
        if sign == "+":
            assert (command, said) == (command, COMMANDS[command][1])
            continue
        assert (command, said) == (command, DENIED if sign == "-" else UNKNOWN)
        refused = world.message
        assert world.heard() == heard
        world.lane = "admin"
        assert world.get("A") == "A OPEN"
        if command != "resolve":
            nothing = with_a(owner, begun=False)
            nothing.lane = sender
            assert tell(nothing, command, named(nothing)) == said
            assert nothing.message == refused, "the same, whether it exists or not"


def test_a_question_with_the_token_of_another() -> None:
    world = with_a("open")
    for command in ("get", "resolve"):
        assert tell(world, command, world.token("B")) == "InvalidArgument"


def test_a_forgotten_one_is_expired_however_it_is_named() -> None:
    world = with_a("open")
    world.abort("A")
    world.wait(8 * 86_400_000)
    world.turn()
    for named in (bare, expired, token(), with_other_secret):
        assert tell(world, "touch", named(world)) == "Expired"


# -- a commit whose token's time is over, and that came before in time -------------------------------


def late(world: World, asker: str = "commit A", named: Named = expired) -> str:
    return world.ask(asker, r.Commit(named(world), (), None, None, 10_000))


def test_a_late_commit_is_answered_if_it_is_committed_or_waits() -> None:
    world = with_a("open")
    world.held = True
    world.write("A", "w1")
    world.finish("A", "w1")
    assert late(world) == DENIED
    assert world.commit("A") == ""
    assert late(world) == "", "it waits already: it is not told that nothing changed"
    assert late(world, "another") == DENIED, "this one never came before"
    assert late(world, named=with_other_secret) == UNKNOWN
    world.held = False
    world.turn()
    world.turn()
    assert late(world, "another") == late(world) == "A COMMITTED 1"
    for named, said in (
        (lambda w: w.token("A", not_after_ms=1, rights=27), DENIED),
        (lambda w: w.token("A", not_after_ms=1, lanes=frozenset({"web"})), DENIED),
        (lambda w: make(OTHER, peek(expired(w))), DENIED),
        (with_other_secret, UNKNOWN),
    ):
        assert late(world, named=named) == said
    assert world.ask("late", r.Abort(expired(world), "")) == DENIED


def test_a_late_commit_joins_one_that_is_decided() -> None:
    world = with_a("open")
    world.commit("A")
    assert world.row("A").state == "COMMIT_IN_PROGRESS"
    assert late(world, "another") == "[commit A] A COMMITTED 0; A COMMITTED 0"


# -- those that never began ------------------------------------------------------------------------


def test_what_never_began_has_no_token_and_is_its_lane_s_by_id() -> None:
    """Of one that was resolved before it began, or of a one-shot."""
    world = nyc()
    world.grant("etl", "nyc/*", int(Right.WRITE))
    world.lane = "etl"
    world.resolve("A")
    world.one_shot("B")
    aborted = "A ABORTED (it was resolved before any other command of it arrived)"
    for label, answer, aborting in (
        ("A", aborted, aborted),
        ("B", "B COMMITTED 0", "AlreadyCommitted"),
    ):
        for named in (world.token(label), world.id(label)):
            asked = r.GetState(world.id(label), shown(named))
            world.lane = "etl"
            assert world.ask("get", asked) == answer
            assert world.ask("abort", r.Abort(named, "")) == aborting
            world.lane = "web"
            assert world.ask("get", asked) == world.ask("abort", r.Abort(named, "")) == UNKNOWN


def test_a_stranger_who_repeats_begin_gets_nothing() -> None:
    world = nyc()
    world.begin("A", name="daily")
    world.wait(1_000)
    heard = world.heard()
    stranger = r.Begin(world.id("A"), "nyc", "daily", MINUTE, OTHER)
    for _ in range(2):
        assert world.ask("stranger", stranger) == DENIED
        assert "begun with another secret" in world.message
    assert world.heard() == heard
    assert world.begin("A", name="daily") == "begun A", "byte for byte it is answered again"
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    world.commit("A", own=[world.receipt("A", "w1")])
    assert world.ask("stranger", stranger) == DENIED
    world.abort("A", "why not")
    assert world.ask("stranger", stranger) == "TransactionAborted"


def test_a_stranger_gets_only_the_public_outcome_of_a_finished_transaction() -> None:
    world = nyc()
    world.begin("A")
    world.commit("A")
    world.turn()
    stranger = r.Begin(world.id("A"), "nyc", None, MINUTE, OTHER)
    assert world.ask("stranger", stranger) == world.get("A") == "A COMMITTED 0"
