"""A transaction is its beginner's: public data, or a token that stands in an answer, moves nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.core.tokens import Token, operator_proof, prove, sign
from anabranch.schemas import records as r
from tests.core.harness import World, nyc
from tests.core.labels import KEY, MINUTE

OTHER = bytes(32)


@pytest.fixture
def world() -> World:
    return nyc()


def public(world: World, label: str) -> bytes:
    """The token as an answer shows it to everybody."""
    return sign(Token(world.id(label), MINUTE, "nyc"), KEY)


def test_a_stranger_who_repeats_begin_gets_no_token(world: World) -> None:
    world.begin("A", name="daily")
    world.wait(1_000)
    heard = world.heard()
    stranger = r.Begin(world.id("A"), "nyc", "daily", MINUTE, OTHER)
    for _ in range(2):
        assert world.ask("stranger", stranger) == "InvalidToken"
        assert "begun with another secret" in world.message
    assert world.heard() == heard
    assert world.begin("A", name="daily") == "begun A", "byte for byte it is answered again"
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    world.commit("A", own=[world.receipt("A", "w1")])
    assert world.ask("stranger", stranger) == "InvalidToken"
    world.abort("A", "why not")
    assert world.ask("stranger", stranger) == "TransactionAborted"


def test_what_a_stranger_is_told_of_a_finished_one_is_public(world: World) -> None:
    world.begin("A")
    world.commit("A")
    world.turn()
    stranger = r.Begin(world.id("A"), "nyc", None, MINUTE, OTHER)
    assert world.ask("stranger", stranger) == world.get("A") == "A COMMITTED 0"


# What each command that takes a token says to its owner; a stranger's is always InvalidToken.
COMMANDS: dict[str, tuple[Callable[[World, bytes], Any], str]] = {
    "touch": (lambda w, t: r.Touch(t, "nyc/a"), "touched nyc/a epoch 0 on 0,1"),
    "register": (lambda w, t: r.Register(t, w.receipt("A", "w1")), "registered 1"),
    "commit": (
        lambda w, t: r.Commit(t, (), None, None, 10_000),
        "[commit] A COMMITTED 0",
    ),
    "abort": (lambda w, t: r.Abort(t, "why"), "A ABORTED (why)"),
    "heartbeat": (lambda w, t: r.Heartbeat((t,)), ""),
    "settle": (lambda w, t: r.Settle(t, "why"), "IllegalState"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_with_a_token_asks_for_its_proof(world: World, name: str) -> None:
    make, answer = COMMANDS[name]
    world.begin("A")
    world.touch("A")
    signed = public(world, "A")
    heard = world.heard()
    world.now_ms += 1_000
    for data in (
        signed,
        prove(signed, OTHER),
        signed + operator_proof(signed, OTHER),
        prove(signed, KEY),
    ):
        assert world.ask(name, make(world, data)) == "InvalidToken"
        assert world.turn() == ""
    assert (world.get("A"), world.heard()) == ("A OPEN", heard)
    for data in (world.token("A"), signed + operator_proof(signed, KEY)):
        again = nyc()
        again.begin("A")
        again.touch("A")
        said = again.ask(name, make(again, data))
        if name == "commit":
            assert said == ""
            said = again.turn()
        assert said == answer


def test_an_id_without_a_secret_has_no_token_but_an_operators(world: World) -> None:
    """Of one that was resolved before it began, or of a one-shot."""
    world.resolve("A")
    world.one_shot("B")
    for label, answer in (("A", "A ABORTED"), ("B", "AlreadyCommitted")):
        signed = public(world, label)
        assert world.ask("abort", r.Abort(prove(signed, OTHER), "")) == "InvalidToken"
        asked = r.Abort(signed + operator_proof(signed, KEY), "")
        assert world.ask("abort", asked).startswith(answer)
    begin = r.Begin(world.id("B"), "nyc", None, MINUTE, OTHER)
    assert world.ask("stranger", begin) == "InvalidArgument"


@pytest.mark.parametrize("scope", ["anabranch", "own"])
def test_the_prefix_is_no_scope(scope: str) -> None:
    world = nyc(prefix="own")
    answer = "InvalidArgument" if scope == "own" else "UnknownScope"
    assert world.find_scope(scope, create=False) == answer
    assert world.create(f"{scope}/x") == answer
    assert world.begin("A", scope=scope) == answer
    assert world.adopt(scope) == ("InvalidArgument" if scope == "own" else f"{scope} at 0")
