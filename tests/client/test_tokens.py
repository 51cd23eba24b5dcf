"""Tokens that programs give away: as little as works, and narrowed without a question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import anabranch
from anabranch import errors
from anabranch.client.client import Client
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import peek
from tests.client.answers import STREAM, TXN, outcome, token_of
from tests.client.bench import Bench, override
from tests.client.world import World

GIVEN: list[tuple[dict[str, Any], str]] = [
    ({}, "write, heartbeat; no end"),
    ({"rights": "write"}, "write; no end"),
    ({"rights": ("commit", "state")}, "commit, state; no end"),
    ({"rights": "all"}, "write, heartbeat, commit, abort, state; no end"),
    ({"expires": 0.5, "lane": "etl"}, "write, heartbeat; until 2023-11-14T22:13:20Z; lane etl"),
]


@pytest.mark.parametrize(("given", "said"), GIVEN)
def test_a_token_says_what_it_is_good_for(given: dict[str, Any], said: str) -> None:
    bench = Bench()
    bench.clock.now = 0
    with bench.client.begin("nyc") as txn:
        token = txn.token(**given)
    assert repr(token) == f"token of {token[1:17].hex()} ({said})"
    assert bench.bus.names() == ["FindScope", "Begin", "Abort"], "asked for no token"


def test_a_token_is_narrowed_where_it_is() -> None:
    token = token_of()
    for narrowed in (
        anabranch.narrow(token, rights=("write", "abort"), expires=60, lane="etl"),
        anabranch.narrow(bytes(token), rights=("abort", "write"), expires=60, lane="etl"),
    ):
        found = peek(narrowed)
        assert (found.rights, found.lanes) == (9, frozenset({"etl"}))
        assert found.not_after_ms > 0
        for wider in ({"rights": "commit"}, {"rights": "all"}, {"expires": 120}, {"lane": "web"}):
            with pytest.raises(errors.InvalidArgument, match="never widened"):
                anabranch.narrow(narrowed, **wider)
    for wrong in ({"expires": 0}, {"expires": "1"}, {"expires": 1e12}, {"rights": "read"}):
        with pytest.raises(errors.InvalidArgument):
            anabranch.narrow(token, **wrong)


# Calls by a token, and the right that each needs.
CALLS: dict[str, tuple[Callable[[Client, bytes], Any], str]] = {
    "join": (lambda c, t: c.join(t).finish(), "write"),
    "join and beat": (lambda c, t: c.join(t, heartbeat=True).finish(), "write heartbeat"),
    "commit": (lambda c, t: c.commit(t), "commit"),
    "abort": (lambda c, t: c.abort(t), "abort"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_asks_for_its_rights_before_anything_is_sent(call: str) -> None:
    run, needed = CALLS[call]
    rights = ("write", "heartbeat", "commit", "abort", "state")
    for lacking in needed.split():
        bench = Bench()
        token = anabranch.narrow(token_of(), rights=[x for x in rights if x != lacking])
        with pytest.raises(errors.NotAuthorized, match=f"with right {lacking}"):
            run(bench.client, token)
        assert bench.bus.sent == []
    run(Bench().client, anabranch.narrow(token_of(), rights=needed.split()))


@pytest.mark.parametrize(("rights", "shown"), [("state", True), ("commit", True), ("write", False)])
def test_a_question_shows_a_token_that_may_see(rights: str, shown: bool) -> None:
    bench = Bench()
    token = anabranch.narrow(token_of(), rights=rights)
    bench.client.state(token)
    bench.client.resolve(token)
    (asked,), (resolved,) = bench.bus.of(r.GetState), bench.bus.of(r.Resolve)
    assert asked == r.GetState(TXN, token if shown else None)
    assert resolved == r.Resolve(TXN, "nyc", token if shown else None)


def test_a_reservation_s_token_is_its_own() -> None:
    bench = Bench()
    reserved = bench.client.reserve("nyc")
    bench.client.state(reserved)
    token = bench.bus.of(r.GetState)[0].token
    assert (peek(token).txn_id, peek(token).rights) == (reserved.txn_id, 31)
    assert reserved.secret not in token


def test_an_id_is_enough_to_abort_and_to_force() -> None:
    bench = Bench()
    bench.client.abort(TXN)
    assert bench.bus.of(r.Abort)[0].token == TXN
    bench.bus.script = override(Force=outcome(state="ABORTED"))
    bench.client.force(token_of())
    assert bench.bus.of(r.Force)[0].token == TXN, "an operator's lane counts, no token"
    with pytest.raises(errors.InvalidToken):
        bench.client.commit(TXN)


# -- with a controller ------------------------------------------------------------------------------


def test_each_gets_what_it_needs() -> None:
    world = World()
    world.client.create_stream(STREAM, segments=1)
    other = world.new_client()
    with world.client.begin("nyc") as txn:
        write, commit = txn.token(), txn.token("commit", expires=60)
        abort = anabranch.narrow(txn.token(("abort", "write")), rights="abort")
        world.part(write, b"v")
        with pytest.raises(errors.NotAuthorized):
            other.commit(write)
        with pytest.raises(errors.NotAuthorized):
            other.join(abort)
        late, elsewhere = txn.token("all", expires=0.001), txn.token("all", lane="etl")
        world.clock.sleep(1.0)
        for useless in (late, elsewhere):
            with pytest.raises(errors.NotAuthorized, match=r"time is over|in lane etl only"):
                other.commit(useless)
        assert other.state(commit).state == "OPEN"
        assert other.commit(commit).counts.committed == 1
        assert other.commit(late).counts.committed == 1, "the outcome stands, however late"
        assert txn.commit().counts.committed == 1
    with pytest.raises(errors.UnknownTransaction):
        other.state(make_txn_id(0, int(world.clock.wall() * 1000), 7))
