"""What clients have seen: commits exceed it, whoever leads; it raises the clock as far as the skew allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import make, peek
from tests.core.harness import START_MS, World, event, nyc
from tests.core.labels import SECRET

NOW = hybrid_time.from_us(
    START_MS * 1000
)  # when nyc/a was asked for; its topics were there at NOW + 1
MS = 1000 << hybrid_time.LOGICAL_BITS
US = 1 << hybrid_time.LOGICAL_BITS
SKEW = 10_000 * MS
BROKEN = hybrid_time.MAX


def shot(world: World, label: str, seen: int) -> str | int:
    """What is told to a one-shot of a client that has seen this: its timestamp above now, or the refusal."""
    world.seen = seen
    said = world.one_shot(label, event())
    world.seen = 0
    return world.row(label).commit_timestamp - NOW if "COMMITTED" in said else said


@pytest.mark.parametrize(
    ("error_ms", "own", "seen", "told"),
    [
        (None, 0, -SKEW, 2),
        (None, 0, 0, 2),
        (None, 0, 5 * MS, 5 * MS + 1),
        (None, 0, SKEW, SKEW + 1),
        (None, 0, SKEW + US, "ClockSkew"),
        (None, 0, BROKEN - NOW, "ClockSkew"),
        (None, 2 * SKEW, 2 * SKEW, 2 * SKEW + 1),  # a former leader's clock was fast: no outage
        (None, 2 * SKEW, 2 * SKEW + 1, "ClockSkew"),
        (50, 0, 50 * MS, 50 * MS + 1),  # commit wait: answers wait for the clock
        (50, 0, 50 * MS + US, "NotReady"),
        (50, 0, SKEW + US, "ClockSkew"),
    ],
)
def test_a_commit_exceeds_what_its_sender_has_seen(
    error_ms: int | None, own: int, seen: int, told: int | str
) -> None:
    world = nyc(clock_error_ms=error_ms)
    if own:
        world.log_rows([(k.ROUND_KEY, replace(world.state.round, hybrid_time=NOW + own))])
    before = world.state.round.hybrid_time
    assert shot(world, "A", NOW + seen) == told
    if isinstance(told, str):
        assert world.state.round.hybrid_time == before, "a refused command raises nothing"
        world.wait(20_001)
        assert shot(world, "A", NOW + min(seen, SKEW + US)) != told, "the clock came there"


def test_the_wall_limits_it_so_it_does_not_creep(world: World) -> None:
    assert shot(world, "A", NOW + SKEW) == SKEW + 1
    assert shot(world, "B", NOW + SKEW + MS) == "ClockSkew"
    world.wait(1)
    assert shot(world, "C", NOW + SKEW + MS) == SKEW + MS + 1


def test_it_outlives_the_leader_and_its_clock(opened: World) -> None:
    """A writer registers, the next leader's clock is minutes behind, and the committer has seen nothing."""
    opened.write("A", "w1")
    opened.seen = NOW + 5 * MS
    opened.finish("A", "w1")
    opened.seen = 0
    opened.wall_us -= 300_000_000
    opened.lead(keep_table=False)
    opened.commit("A")
    assert opened.turn() == "[commit A] A COMMITTED 1"
    assert opened.row("A").commit_timestamp == NOW + 5 * MS + 1


@pytest.mark.parametrize("told_by", ["receipt", "own", "registered", "token", "touch"])
def test_it_comes_with_receipts_and_tokens(opened: World, told_by: str) -> None:
    opened.write("A", "w1")
    seen = NOW + 5 * MS
    receipt = replace(opened.receipt("A", "w1"), seen=seen)
    token = make(SECRET, replace(peek(opened.token("A")), seen=seen))
    plain = replace(receipt, seen=0)
    if told_by == "registered":
        opened.register("A", receipt)
    if told_by == "touch":
        opened.ask("touch", r.Touch(token, "nyc/a"))
    command = {
        "receipt": r.Commit(opened.token("A"), (), (receipt,), None, 1000),
        "own": r.Commit(opened.token("A"), (receipt,), None, None, 1000),
        "registered": r.Commit(opened.token("A"), (), None, None, 1000),
        "token": r.Commit(token, (plain,), None, None, 1000),
        "touch": r.Commit(opened.token("A"), (plain,), None, None, 1000),
    }[told_by]
    opened.ask("commit", command)
    assert opened.turn() == "[commit] A COMMITTED 1"
    assert opened.row("A").commit_timestamp == seen + 1


def test_what_needs_no_timestamp_is_carried_out(opened: World) -> None:
    opened.seen = BROKEN
    before = opened.state.round.hybrid_time
    assert opened.get("A") == "A OPEN"
    assert opened.commit("A") == "ClockSkew"
    assert opened.abort("A", "so") == "A ABORTED (so)"
    assert opened.state.round.hybrid_time == before
    opened.ask("sets", r.SetGrant("open", "nyc/a", 1), lane="admin")
    assert opened.state.grants["open"] == {"nyc/a": 1}, opened.result
    assert opened.state.round.hybrid_time < before + MS


def test_what_leads_to_no_commit_raises_nothing(world: World) -> None:
    """Nor does what a lane asks that may not write; its snapshot waits for the clock, as it would not see all."""
    world.grant("reader", "nyc/*", Right.SAFE_TIME | Right.DESCRIBE)
    world.grant("writer", "nyc/a", Right.WRITE | Right.SAFE_TIME)
    world.grant("gone", "nyc/*", Right.WRITE)
    with world.by("gone"):
        assert world.one_shot("G", event()) == "G COMMITTED 1"
    world.grant("gone", "nyc/*", 0)
    seen = world.seen = NOW + 5 * MS
    again = r.OneShot(world.id("G"), "nyc", None, (event(),))
    for lane, command, answer in (
        ("reader", r.ListTransactions(None, False, 10, None), "TransactionList"),
        ("open", r.DescribeStreams(None, None), "StreamList"),
        ("gone", again, "Outcome"),
    ):
        world.ask("asks", command, lane=lane)
        assert type(world.result).__name__ == answer
        assert world.state.round.hybrid_time < seen, command
    world.ask("reads", r.SafeTime("nyc", None), lane="reader")
    assert world.result.code == "NotReady"
    ahead = NOW + 2 * MS
    world.seen = ahead
    world.ask("sets", r.SetGrant("reader", "nyc/a", 1), lane="admin")
    assert world.state.round.hybrid_time > ahead, "a copy that had seen this must not set it again"
    world.seen = seen
    world.wait(5)
    world.ask("reads", r.SafeTime("nyc", None), lane="reader")
    assert world.result.timestamp >= seen, "the clock came there"
    world.seen = seen = seen + 5 * MS
    world.ask("reads", r.SafeTime("nyc", None), lane="writer")
    assert world.result.timestamp == seen


def test_a_refused_command_raises_nothing(world: World) -> None:
    before = world.state.round.hybrid_time
    world.seen = NOW + 5 * MS
    assert world.one_shot("A", event("nyc/none")) == "UnknownStream"
    assert world.state.round.hybrid_time == before


def test_safe_time_has_what_its_asker_has_seen(world: World) -> None:
    world.seen = NOW + 5 * MS
    world.ask("safe", r.SafeTime("nyc", None))
    assert world.result.timestamp == NOW + 5 * MS
    world.ask("safe", r.SafeTime("nyc", NOW + 6 * MS))
    assert world.result.code == "NotReady", "what is asked for has not been seen"


def test_who_asked_for_commit_wait_is_known_to_the_next_leader() -> None:
    world = nyc(clock_error_ms=50)
    world.begin("A")
    world.touch("A")
    world.write("A", "w1")
    own = [world.receipt("A", "w1")]
    world.held = world.waits = True
    world.commit("A", own=own, asker="waits")
    world.waits = False
    world.commit("A", own=own, asker="not")
    world.lead(keep_table=False)
    world.held = False
    world.turn()
    world.turn()
    assert {to.correlation_id: to.held for to, _ in world.said} == {b"waits": True, b"not": False}


def test_commit_wait_needs_the_clocks_error(world: World) -> None:
    world.waits = True
    assert world.one_shot("A", event()) == "InvalidArgument"
    assert "--clock-error-ms" in world.message
