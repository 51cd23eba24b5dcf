"""Begin, abort and silence: whose name it is, what a repeated command is answered, what ends by silence.

What a begin is refused for by itself is in `test_refusals`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.transactions import silent_lanes
from anabranch.core.decisions.turn import DAY_MS
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, index_rows, nyc
from tests.core.labels import MINUTE

assert DAY_MS == DAY
SUPERSEDED = "A ABORTED (superseded by a newer transaction named 'daily')"

# -- begin -------------------------------------------------------------------------------------


def test_a_begin_is_logged_and_repeated_it_changes_nothing(world: World) -> None:
    assert world.begin("A", name="daily", keepalive_ms=5_000) == "begun A"
    begun = world.result
    assert begun == r.Begun(world.id("A"), 5_000, world.wall_ms)
    row = world.row("A")
    assert (row.scope, row.name, row.state, row.keepalive_ms) == ("nyc", "daily", "OPEN", 5_000)
    assert (row.begun_ms, row.finished_ms, row.commit_timestamp) == (world.wall_ms, 0, 0)
    assert (world.holder("daily"), world.ops()) == ("A", "")
    world.wait(1_000)
    before = dict(world.table.rows)
    assert world.begin("A", name="daily", keepalive_ms=5_000) == "begun A"
    assert world.result == begun
    changed = {key for key, v in world.table.rows.items() if before.get(key) != v}
    assert changed == {k.STATUS + k.ROUND_KEY}


def test_a_begin_repeated_after_the_decision_is_answered_with_the_outcome(world: World) -> None:
    world.begin("A")
    world.commit("A")
    assert world.begin("A") == "begun A; [commit A] A COMMITTED 0"
    assert world.begin("A") == "A COMMITTED 0"
    assert world.id("A") not in world.heard(), "no keepalive is kept of what has ended"


@pytest.mark.parametrize("by", ["begin", "one-shot"])
def test_a_name_is_an_open_transactions_until_a_newer_one_begins(world: World, by: str) -> None:
    def take(label: str) -> str:
        if by == "begin":
            return world.begin(label, name="daily")
        return world.one_shot(label, event(), name="daily")

    world.begin("A", name="daily")
    world.touch("A")
    assert take("B") == ("begun B" if by == "begin" else "B COMMITTED 1")
    assert world.ops() == "ABORT_TXN A nyc/a:0"
    assert (world.get("A"), world.holder("daily")) == (SUPERSEDED, "B")
    assert world.begin("A", name="daily") == "TransactionAborted"
    if by == "begin":
        world.commit("B")
        assert take("C") == "NotReady; [commit B] B COMMITTED 0", "the name is being committed"
    for _ in range(2):
        assert take("D").startswith("B COMMITTED"), "its outcome is the answer"
    assert world.plan() == ""
    assert world.holder("daily") == "B"
    unknown = by == "begin"
    assert world.get("D").startswith(
        "UnknownTransaction" if unknown else "D ABORTED (the name 'daily' was committed before"
    )
    assert world.begin("E", name="daily").startswith("B COMMITTED")


def test_a_name_is_free_again_after_an_abort_and_in_another_scope(world: World) -> None:
    world.begin("A", name="daily")
    world.abort("A")
    assert world.begin("B", name="daily") == "begun B"
    assert world.get("A") == "A ABORTED (aborted by a client)"
    world.find_scope("sfo")
    assert world.begin("C", name="daily", scope="sfo") == "begun C"
    assert world.list(finished=False) == "B OPEN, C OPEN"


def test_a_name_whose_commit_waits_can_be_taken(world: World) -> None:
    world.begin("A", name="daily")
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    assert world.commit("A", own=[world.receipt("A", "w1")]) == ""
    assert world.begin("B", name="daily") == "[commit A] TransactionAborted; begun B"
    assert world.get("A") == SUPERSEDED


def test_begins_of_one_round_see_each_other(world: World) -> None:
    asked = [
        (number, world.beginning(label, name="daily"))
        for number, label in zip("123", "ABA", strict=True)
    ]
    assert world.turn(*asked) == "[1] begun A; [2] begun B; [3] TransactionAborted"
    assert world.list() == f"B OPEN, {SUPERSEDED}"


@pytest.mark.parametrize("label", ["by its clock", "by a right clock"])
def test_a_controller_whose_clock_is_before_forgotten_ids_names_its_clock(label: str) -> None:
    """`Expired` would mean "begin again", and the next transaction would get it, too."""
    world = nyc()
    world.one_shot("A")
    world.wait(7 * DAY + 1)
    world.wait(250)
    right_ms = world.wall_ms
    assert world.get("A") == "Expired"
    world.wall_us -= 8 * DAY * 1000
    made_ms = world.wall_ms if label == "by its clock" else right_ms
    assert world.begin(world.new_id("B", made_ms=made_ms)) == "ClockSkew"
    assert "the controller's clock is" in world.message
    world.wall_us = right_ms * 1000
    assert world.begin(world.new_id("C", made_ms=right_ms - 8 * DAY)) == "Expired"


def test_room_for_open_transactions_is_limited() -> None:
    world = nyc(max_open=2)
    assert [world.begin("A", name="daily"), world.begin("B")] == ["begun A", "begun B"]
    assert world.begin("C", name="other") == "TooManyTransactions"
    assert world.begin("A", name="daily") == "begun A", "a repeated begin needs no room"
    assert world.begin("D", name="daily") == "begun D", "nor one that supersedes another"
    assert world.list(finished=False) == "B OPEN, D OPEN"
    world.abort("B")
    assert world.begin("C") == "begun C"


# -- abort by a client -------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["changed my mind", ""])
def test_an_abort_ends_it_in_each_stream_and_keeps_nothing_of_it(
    opened: World, reason: str
) -> None:
    opened.create("nyc/b")
    opened.created("nyc/b", 0, 0)
    opened.touch("A", "nyc/b")
    opened.write("A", "w1", count=3)
    opened.write("A", "w1", count=2, epoch=1)
    opened.finish("A", "w1")
    opened.wait(1_000)
    assert len(index_rows(opened)) == 2
    ended = f"A ABORTED, 2 rejected ({reason or 'aborted by a client'})"
    assert opened.abort("A", reason) == ended
    assert opened.ops() == "ABORT_TXN A nyc/a:0; ABORT_TXN A nyc/b:0"
    assert opened.plan() == ""
    assert (opened.result.streams, len(opened.result.writers)) == (("nyc/a", "nyc/b"), 1)
    finished_ms = opened.row("A").finished_ms
    assert finished_ms == opened.wall_ms
    assert index_rows(opened) == {}
    assert opened.id("A") not in opened.heard()
    assert not opened.state.open
    opened.wait(1_000)
    assert opened.abort("A", "second") == ended
    assert (opened.ops(), opened.row("A").finished_ms) == ("", finished_ms)
    opened.write("A", "w1", count=3)
    opened.turn()
    assert index_rows(opened) == {}, "what it writes later is rejected and counted"
    opened.describe(stream="nyc/a")
    assert opened.result.streams[0].rejected == {"wrong_stream_epoch": 2, "late": 3}


def test_an_abort_answers_each_commit_that_waits_and_only_once(opened: World) -> None:
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


def test_a_decided_commit_is_aborted_and_never_merged(opened: World) -> None:
    """COMMIT_IN_PROGRESS is not yet past the point of no return."""
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


def test_of_abort_and_commit_in_one_round_the_abort_counts(opened: World) -> None:
    opened.begin("B")
    aborts = {label: r.Abort(opened.token(label), "why") for label in "AB"}
    said = opened.turn(("1", aborts["A"]), ("2", opened.committing("A")))
    assert said == "[1] A ABORTED (why); [2] TransactionAborted"
    said = opened.turn(("1", opened.committing("B")), ("2", aborts["B"]))
    assert said == "[1] TransactionAborted; [2] B ABORTED (why)"


# -- abort by silence --------------------------------------------------------------------------


def quiet() -> World:
    """A has just begun, with a keepalive of 5 s."""
    world = nyc()
    world.wait(60_000)
    world.begin("A", keepalive_ms=5_000)
    return world


def test_silence_longer_than_the_keepalive_aborts() -> None:
    world = quiet()
    assert world.wait(5_000) == ""
    assert world.row("A").state == "OPEN"
    assert world.wait(249) == ""
    assert world.row("A").state == "OPEN", "silence is judged four times a second"
    assert world.wait(1) == ""
    stale = "A ABORTED (stale: no heartbeat for 5,250 ms)"
    assert world.get("A") == stale
    assert world.heartbeat("A") == f"not open: {stale}"


def register(world: World) -> None:
    world.register("A", r.Receipt(world.id("A"), 1, 1, False, ()))


def refused_commit(world: World) -> None:
    register(world)
    world.wait(1_000)
    assert world.commit("A") == "WritersUnfinished"


# What is asked, and whether it shows that the transaction's owner lives.
SIGNS: dict[str, tuple[Callable[[World], object], bool]] = {
    "heartbeat": (lambda world: world.heartbeat("A"), True),
    "begin": (lambda world: world.begin("A", keepalive_ms=5_000), True),
    "touch": (lambda world: world.touch("A"), True),
    "register": (register, True),
    "refused commit": (refused_commit, True),
    "get": (lambda world: world.get("A"), False),
    "list": (lambda world: world.list(), False),
    "resolve": (lambda world: world.resolve("A"), False),
    "a jump of the wall clock": (lambda world: setattr(world, "wall_us", world.wall_us + 10**12), False),
    "a takeover": (lambda world: world.lead(), True),
}  # fmt: skip


@pytest.mark.parametrize("sign", SIGNS)
def test_what_is_a_sign_of_life(sign: str) -> None:
    act, counts = SIGNS[sign]
    world = quiet()
    world.wait(4_000)
    act(world)
    world.wait(1_000)
    assert world.row("A").state == "OPEN"
    world.wait(1)
    world.wait(3_499)
    assert world.row("A").state == ("OPEN" if counts else "ABORTED")
    world.wait(501)
    world.wait(250)
    assert world.row("A").state == "ABORTED"


def test_silence_is_judged_only_when_the_commands_are_read_to_their_end() -> None:
    """A heartbeat may wait unread."""
    world = quiet()
    world.judge_silence = False
    world.wait(60_000)
    assert world.row("A").state == "OPEN"
    world.judge_silence = True
    assert world.heartbeat("A") == ""
    world.wait(5_000)
    assert world.row("A").state == "OPEN"


def test_a_received_commit_stops_the_keepalive() -> None:
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


def test_a_decided_commit_is_never_stale() -> None:
    world = nyc(round_bytes=1)
    for label in "AB":
        world.begin(label, keepalive_ms=1_000)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "AB"}
    world.turn(*((x, world.committing(x, own=own[x])) for x in "AB"))
    assert world.wait(60_000) == "[A] A COMMITTED 1"
    assert world.wait(60_000) == "[B] B COMMITTED 1"


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


def test_stale_ones_end_in_the_order_of_their_ids() -> None:
    world = nyc()
    for label in "ABC":
        world.id(label)
    for label in "CAB":
        world.begin(label, keepalive_ms=1_000)
        world.touch(label)
    world.wait(2_000)
    assert world.ops() == "ABORT_TXN A nyc/a:0; ABORT_TXN B nyc/a:0; ABORT_TXN C nyc/a:0"
