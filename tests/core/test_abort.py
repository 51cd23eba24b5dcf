"""Abort: by a client, and by silence. Read as transcripts."""

from __future__ import annotations

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.transactions import silent_lanes
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc
from tests.core.labels import MINUTE


def index_keys(world: World) -> list[bytes]:
    return [key for key in world.table.rows if key[:1] in (k.INDEX, k.REJECTED)]


# -- by a client -------------------------------------------------------------------------------


def test_an_open_one(opened: World) -> None:
    opened.write("A", "w1", count=3)
    opened.write("A", "w1", count=2, epoch=1)
    opened.finish("A", "w1")
    opened.wait(1_000)
    assert len(index_keys(opened)) == 2
    assert opened.abort("A", "changed my mind") == "A ABORTED, 2 rejected (changed my mind)"
    assert opened.ops() == "ABORT_TXN A nyc/a:0"
    assert opened.plan() == ""
    assert (opened.result.streams, len(opened.result.writers)) == (("nyc/a",), 1)
    assert opened.row("A").finished_ms == opened.wall_ms
    assert index_keys(opened) == [], "its journal records are forgotten"
    assert opened.id("A") not in opened.heard()
    assert not opened.state.open


def test_without_a_reason(opened: World) -> None:
    assert opened.abort("A") == "A ABORTED (aborted by a client)"


def test_again(opened: World) -> None:
    opened.abort("A", "first")
    finished_ms = opened.row("A").finished_ms
    opened.wait(1_000)
    assert opened.abort("A", "second") == "A ABORTED (first)"
    assert opened.ops() == ""
    assert opened.row("A").finished_ms == finished_ms


def test_of_a_committed_one(opened: World) -> None:
    opened.commit("A")
    opened.turn()
    assert opened.abort("A") == "AlreadyCommitted"
    assert opened.get("A") == "A COMMITTED 0"


def test_one_whose_commit_waits(opened: World) -> None:
    """Who waits for the commit is told, and only once."""
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    opened.commit("A", asker="1", own=own)
    opened.commit("A", asker="2", own=own)
    assert opened.abort("A", "why") == (
        "[1] TransactionAborted; [2] TransactionAborted; A ABORTED (why)"
    )
    assert "why" in opened.message
    opened.held = False
    assert opened.turn() == ""
    assert opened.commit("A", own=own) == "TransactionAborted"


def test_one_that_is_decided_and_not_merged(opened: World) -> None:
    """COMMIT_IN_PROGRESS is not yet past the point of no return; nothing of it is merged, ever."""
    opened.write("A", "w1", count=3)
    opened.write("A", "w2")
    opened.commit("A", own=[opened.receipt("A", "w1")])
    assert opened.row("A").state == "COMMIT_IN_PROGRESS"
    assert opened.abort("A", "why") == "[commit A] TransactionAborted; A ABORTED (why)"
    assert opened.ops() == "ABORT_TXN A nyc/a:0"
    assert opened.plan() == ""
    row = opened.row("A")
    assert (row.committed, row.left_out, row.commit_timestamp) == (0, 0, 0)
    assert opened.turn() == ""
    assert opened.plan() == ""


def test_abort_and_commit_in_one_round(opened: World) -> None:
    abort, commit = r.Abort(opened.token("A"), "why"), opened.committing("A")
    assert opened.turn(("1", abort), ("2", commit)) == "[1] A ABORTED (why); [2] TransactionAborted"
    opened.begin("A2")
    abort, commit = r.Abort(opened.token("A2"), "why"), opened.committing("A2")
    assert opened.turn(("1", commit), ("2", abort)) == (
        "[1] TransactionAborted; [2] A2 ABORTED (why)"
    )


def test_every_participant_is_told(opened: World) -> None:
    opened.create("nyc/b")
    opened.created("nyc/b", 0, 0)
    opened.touch("A", "nyc/b")
    opened.abort("A")
    assert opened.ops() == "ABORT_TXN A nyc/a:0; ABORT_TXN A nyc/b:0"


def test_what_it_wrote_later_is_rejected_and_counted(opened: World) -> None:
    opened.abort("A")
    opened.write("A", "w1", count=3)
    opened.turn()
    assert index_keys(opened) == []
    opened.describe(stream="nyc/a")
    assert opened.result.streams[0].rejected == {"late": 3}


# -- by silence --------------------------------------------------------------------------------


STALE = "A ABORTED (stale: no heartbeat for 5001 ms)"


def quiet(**changes: int) -> World:
    """A has just begun, with a keepalive of 5 s."""
    world = nyc(**changes)
    world.wait(60_000)
    world.begin("A", keepalive_ms=5_000)
    return world


def test_silence() -> None:
    world = quiet()
    assert world.wait(5_000) == ""
    assert world.row("A").state == "OPEN"
    assert world.wait(250) == "", "nobody waits for an answer"
    assert world.get("A") == "A ABORTED (stale: no heartbeat for 5250 ms)"


def test_whoever_still_waits_is_told_of_the_end_by_the_next_heartbeat() -> None:
    world = quiet()
    world.wait(5_001)
    assert world.heartbeat("A") == f"not open: {STALE}"


@pytest.mark.parametrize("sign_of_life", ["heartbeat", "begin", "touch", "register", "commit"])
def test_what_counts_as_a_sign_of_life(sign_of_life: str) -> None:
    world = quiet()
    world.wait(4_000)
    if sign_of_life == "heartbeat":
        assert world.heartbeat("A") == ""
    elif sign_of_life == "begin":
        assert world.begin("A", keepalive_ms=5_000) == "begun A"
    elif sign_of_life == "touch":
        assert world.touch("A").startswith("touched")
    elif sign_of_life == "register":
        world.register("A", r.Receipt(world.id("A"), 1, 1, False, ()))
    else:
        world.register("A", r.Receipt(world.id("A"), 1, 1, False, ()))
        world.wait(1_000)
        assert world.commit("A") == "WritersUnfinished", "even if it is refused"
    world.wait(4_500)
    assert world.row("A").state == "OPEN"
    world.wait(501)
    assert world.row("A").state == "ABORTED"


@pytest.mark.parametrize("question", ["get", "list", "resolve"])
def test_questions_are_none(question: str) -> None:
    world = quiet()
    world.wait(4_000)
    if question == "get":
        world.get("A")
    elif question == "list":
        world.list()
    else:
        world.resolve("A")
    world.wait(1_001)
    assert world.get("A") == STALE


def test_only_when_the_commands_are_read_to_their_end() -> None:
    """A heartbeat may wait unread."""
    world = quiet()
    world.judge_silence = False
    world.wait(60_000)
    assert world.row("A").state == "OPEN"
    world.judge_silence = True
    assert world.heartbeat("A") == ""
    world.wait(5_000)
    assert world.row("A").state == "OPEN"


def test_it_starts_afresh_with_a_takeover() -> None:
    world = quiet()
    world.wait(4_000)
    world.lead()
    world.wait(5_000)
    assert world.row("A").state == "OPEN"
    world.wait(250)
    assert world.row("A").state == "ABORTED"


def test_it_stops_at_a_received_commit() -> None:
    world = quiet()
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    world.commit("A", own=[world.receipt("A", "w1")], wait_ms=10 * MINUTE)
    assert world.wait(9 * MINUTE) == ""
    world.lead()
    assert world.wait(MINUTE - 1) == ""
    world.held = False
    world.turn()
    assert world.turn() == "[commit A] A COMMITTED 1"


def test_a_decided_one_is_never_stale() -> None:
    world = nyc(round_bytes=1)
    for label in "AB":
        world.begin(label, keepalive_ms=1_000)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "AB"}
    world.turn(*((x, world.committing(x, own=own[x])) for x in "AB"))
    assert world.wait(60_000) == "[A] A COMMITTED 1"
    assert world.wait(60_000) == "[B] B COMMITTED 1"


def test_it_is_looked_for_from_time_to_time_only() -> None:
    world = quiet()
    world.wait(4_900)
    world.wait(101)
    assert world.row("A").state == "OPEN", "looked for 101 ms ago"
    world.wait(149)
    assert world.row("A").state == "ABORTED"


def test_whether_anything_is_stale_is_known_before_the_commands_are_read() -> None:
    """So a controller asks for the commands' end only when it matters."""
    world = quiet()

    def stale() -> bool:
        return silent_lanes(world.state, world.memory.keepalives, world.now_ms) == {"open"}

    world.begin("B", keepalive_ms=60_000)
    world.judge_silence = False
    for waited_ms, expected in (5_000, False), (250, True):
        world.now_ms += waited_ms
        assert stale() is expected
    world.turn()
    assert world.row("A").state == "OPEN"
    assert not stale(), "not again at once"
    world.now_ms += 250
    assert stale()
    world.commit("A")
    world.now_ms += 10_000
    assert not stale(), "its commit was received"
    world.turn()
    assert not stale()


def test_several_end_in_the_order_of_their_ids() -> None:
    world = nyc()
    for label in "ABC":
        world.id(label)
    for label in "CAB":
        world.begin(label, keepalive_ms=1_000)
        world.touch(label)
    world.wait(2_000)
    assert world.ops() == "ABORT_TXN A nyc/a:0; ABORT_TXN B nyc/a:0; ABORT_TXN C nyc/a:0"


def test_a_wall_clock_that_jumps_ends_nothing() -> None:
    world = quiet()
    world.wall_us += 3_600_000_000
    world.wait(1_000)
    assert world.row("A").state == "OPEN"
