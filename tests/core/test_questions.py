"""Heartbeats, states, lists, and RESOLVE: the question that settles."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.core.decisions.questions import MAX_LISTED
from anabranch.errors import MalformedRecord
from anabranch.protocol import limits
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights
from tests.core.cleaning import crowd, opened, relocate
from tests.core.harness import DAY, World, event, nyc

# -- open ones ---------------------------------------------------------------------------------


def test_an_open_transaction_is_listed_with_its_claims_and_keepalive(world: World) -> None:
    world.created("nyc/a", 0)
    for label, ms in (("A", 400), ("B", 300), ("C", 200)):
        world.begin(label)
        world.touch(label)
        world.write(label, "w")
        world.wait(ms)
    world.abort("C")

    def listed(after: bytes | None = None, limit: int = 1) -> r.OpenList:
        world.ask("list", r.ListOpen("nyc", None, limit, after))
        (found,) = (x for _, x in world.said if isinstance(x, r.OpenList))
        return found

    first = listed()
    second = listed(first.more)
    assert listed(second.more) == r.OpenList(()) if second.more else True
    paged = [*first.transactions, *second.transactions]
    assert [world.label(one.outcome.txn_id) for one in paged] == ["A", "B"]
    assert [one.left_ms for one in paged] == [59_100, 59_500]
    world.commit("B", own=[world.receipt("B", "w")])
    found = listed(limit=9).transactions
    assert [world.label(one.outcome.txn_id) for one in found] == ["A", "B"]
    assert [(one.age_ms, one.silent_ms) for one in found] == [(900, 900), (500, 0)]
    assert [one.left_ms for one in found] == [found[0].outcome.keepalive_ms - 900, -1]
    assert all(one.uncommitted_bytes > 0 and one.outcome.streams == ("nyc/a",) for one in found)
    assert all(not one.writers for one in found), "only of one that is asked for by its id"
    world.ask("one", r.ListOpen(None, world.id("C"), 1))
    assert world.result.transactions[0].outcome.state == "ABORTED"


# -- where its records lie ---------------------------------------------------------------------


def test_runs_are_those_that_a_merge_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, after moves, without what is rejected, and no sooner than the journal is read."""
    world = opened("A", "B", move_bytes=25_000)
    runs = [world.write("A", w, count=n) for w, n in (("w1", 2), ("w2", 3), ("w1", 4))]
    world.write("A", "w1", epoch=7)  # rejected
    world.write("B", "w1", count=9)
    for _ in range(4):
        crowd(world)
    assert relocate(world) >= 3
    end = world.ends["nyc/a", 0]
    wanted = tuple(r.RunsWanted(world.writer(w), 0, 0, end) for w in ("w2", "w1"))

    def ask(*wanted: r.RunsWanted, token: bytes | None = None, stream: str = "nyc/a") -> str:
        return world.ask("runs", r.ListRuns(token or world.token("A"), stream, wanted))

    for size in (1, 2, 4, 100):
        monkeypatch.setattr(limits, "LIST_ROWS", limits.LIST_ROWS._replace(value=size))
        found: list[r.RunPlace] = []
        left = wanted
        while left:
            ask(*left)
            found += world.result.runs
            assert len(world.result.runs) <= size
            left = world.result.more
        assert [(x.writer, x.first, x.end, x.records) for x in found] == [
            (x.writer, x.first, x.end, x.records) for x in (runs[1], runs[0], runs[2])
        ], size
        stored = {x.first: x for x in world.index.runs(world.id("A"), "nyc/a", 0)}
        assert all((x.at, x.batch_base) == (stored[x.first].at,) * 2 for x in found)
        assert all(x.at > x.first for x in found), "they have moved"
    inside = r.RunsWanted(world.writer("w1"), 0, runs[0].end, runs[2].end)
    assert ask(inside) == "1 runs, 0 more"
    assert ask(replace(inside, end=inside.end - 1)) == "0 runs, 0 more"
    world.held = True
    later = world.write("A", "w1")
    due = replace(inside, end=later.end)
    assert ask(due) == "NotReady"
    world.held = False
    world.turn()
    assert ask(due) == "2 runs, 0 more"
    with pytest.raises(MalformedRecord):
        ask(*(inside,) * 20_001)
    rights = {
        Rights.WRITE: "2 runs, 0 more",
        Rights.STATE: "2 runs, 0 more",
        Rights.ABORT: "NotAuthorized",
    }
    for right, said in rights.items():
        assert ask(due, token=world.token("A", rights=right)) == said, right
    world.abort("A", "why")
    assert ask(inside) == "TransactionAborted"


# -- heartbeat ---------------------------------------------------------------------------------


def test_a_heartbeat_is_answered_only_if_one_is_not_open(world: World) -> None:
    for label in "ABC":
        world.begin(label)
    logged = len(world.log)
    assert world.heartbeat("A", "B") == world.heartbeat() == ""
    assert len(world.log) == logged, "nothing is written"
    world.commit("C")
    assert world.heartbeat("C") == "[commit C] C COMMITTED 0", "it was still alive"
    world.abort("A", "why")
    assert world.heartbeat("A", "B", "C") == "not open: A ABORTED (why), C COMMITTED 0"
    world.wait(100)
    assert world.memory.keepalives.last(world.id("B")) == world.now_ms - 100, (
        "B counts all the same"
    )
    assert world.heartbeat("unknown", "A", "unknown") == "not open: A ABORTED (why)"
    assert world.heartbeat("unknown") == "UnknownTransaction"
    assert world.heard().keys() == {world.id("B")}, "of an unknown one nothing is kept"


def test_a_bad_token_among_them_is_refused_and_the_others_count(world: World) -> None:
    world.begin("A")
    world.begin("B")
    world.wait(1_000)
    tokens = (world.token("A"), b"bad", world.token("B"))
    assert world.ask("heartbeat", r.Heartbeat(tokens)) == "InvalidToken"
    assert [world.memory.keepalives.last(world.id(x)) for x in "AB"] == [world.now_ms] * 2


# -- get ---------------------------------------------------------------------------------------


def test_the_state_as_it_is(world: World) -> None:
    assert world.get("A") == "UnknownTransaction"
    world.begin("A", name="daily")
    world.touch("A")
    assert world.get("A") == "A OPEN"
    assert world.result.streams == ("nyc/a",)
    world.held = True
    world.write("A", "w1")
    world.commit("A", own=[world.receipt("A", "w1")])
    waits = "its commit is not decided: it waits for the journal to cover the receipts"
    assert world.get("A") == f"A COMMIT_IN_PROGRESS ({waits})"
    assert world.resolve("A") == f"A COMMIT_IN_PROGRESS ({waits})"
    world.held = False
    assert world.turn() == ""
    assert world.get("A") == "A COMMIT_IN_PROGRESS (but 1 committed at 0); [commit A] A COMMITTED 1"
    assert world.get("A") == "A COMMITTED 1"
    outcome = world.result
    assert (outcome.scope, outcome.name, outcome.keepalive_ms) == ("nyc", "daily", 60_000)
    assert outcome.commit_timestamp == world.row("A").commit_timestamp > 0


# -- resolve -----------------------------------------------------------------------------------


def test_resolve_aborts_a_transaction_that_never_arrived(world: World) -> None:
    world.id("A")
    world.wait(5_000)
    settled = "A ABORTED (it was resolved before any other command of it arrived)"
    assert world.resolve("A") == settled
    row = world.row("A")
    assert (row.state, row.finished_ms, row.begun_ms) == ("ABORTED", world.wall_ms, world.wall_ms)
    assert (row.scope, row.owner) == ("nyc", "open")
    assert (row.name, row.keepalive_ms, row.commit_timestamp) == (None, 0, 0)
    assert (row.committed, row.rejected, row.left_out) == (0, 0, 0)
    assert world.resolve("A") == settled
    assert world.get("A") == settled
    assert world.begin("A") == "TransactionAborted"
    assert world.begin("A", name="daily") == "TransactionAborted"
    assert world.one_shot("A", event()) == "TransactionAborted"
    # It has no secret, so nothing that claims to be its token is.
    assert world.touch("A") == world.commit("A") == world.abort("A") == "UnknownTransaction"
    assert world.resolve("A") == settled, "for ever the same"


def test_resolve_leaves_an_open_one_open(world: World) -> None:
    world.begin("A")
    assert world.resolve("A") == "A OPEN"
    assert world.row("A").state == "OPEN"


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_resolve_of_an_ended_one(world: World, end: str) -> None:
    world.begin("A")
    if end == "abort":
        world.abort("A", "why")
        assert world.resolve("A") == "A ABORTED (why)"
        return
    world.commit("A")
    assert world.resolve("A") == ("A COMMIT_IN_PROGRESS; [commit A] A COMMITTED 0"), "on its way"
    assert world.resolve("A") == "A COMMITTED 0"


def test_resolve_of_ids_that_can_have_no_row(world: World) -> None:
    world.log_rows([(k.ROUND_KEY, replace(world.state.round, expired_ms=world.wall_ms))])
    assert world.resolve(world.new_id("old", made_ms=world.wall_ms)) == "Expired"
    assert "outcome is older than the retention" in world.message
    assert world.resolve(world.new_id("new", made_ms=world.wall_ms + 1)).startswith("new ABORTED")
    assert world.resolve(world.new_id("far", made_ms=world.wall_ms + DAY + 1)) == "ClockSkew"


# -- list --------------------------------------------------------------------------------------


RESOLVED = "E ABORTED (it was resolved before any other command of it arrived)"


@pytest.fixture
def several(world: World) -> World:
    """A committed, B open in another scope, C aborted, D open, E resolved."""
    world.find_scope("sfo")
    for label in "ABCDE":
        world.id(label)
    for label in "DCA":
        world.begin(label)
    world.begin("B", scope="sfo")
    world.touch("A")
    world.register("A", r.Receipt(world.id("A"), 1, 1, True, ()))
    world.commit("A")
    world.turn()
    world.abort("C", "why")
    world.resolve("E")
    return world


@pytest.mark.parametrize(
    ("scope", "finished", "limit", "answer"),
    [
        (None, False, 100, "B OPEN, D OPEN"),
        ("nyc", False, 100, "D OPEN"),
        ("nyc", True, 100, f"{RESOLVED}, D OPEN, C ABORTED (why), A COMMITTED 0"),
        ("sfo", True, 100, "B OPEN"),
        ("none", True, 100, "none"),
        (None, True, 2, f"{RESOLVED}, D OPEN"),
        (None, False, 1, "B OPEN"),
        (None, False, MAX_LISTED, "B OPEN, D OPEN"),
    ],
)
def test_a_list_has_the_transactions_of_its_scope_newest_first(
    several: World, scope: str | None, finished: bool, limit: int, answer: str
) -> None:
    assert several.list(scope=scope, finished=finished, limit=limit) == answer


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("scope", [None, "nyc"])
def test_a_list_continues_where_its_last_part_ended(
    several: World, monkeypatch: pytest.MonkeyPatch, scope: str | None, most: int, limit: int
) -> None:
    """However few rows are looked at each time; a writer's and a stream's row of A lie between."""
    monkeypatch.setattr(limits, "LIST_ROWS", limits.LIST_ROWS._replace(value=most))
    found: list[str] = []
    before = None
    for _ in range(20):
        several.list(scope=scope, limit=limit, before=before)
        answer = several.result
        assert len(answer.transactions) <= min(limit, most)
        found += [several.label(outcome.txn_id) for outcome in answer.transactions]
        before = answer.more
        if before is None:
            break
    assert "".join(found) == ("EDCBA" if scope is None else "EDCA")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_the_place_where_a_list_continues_has_no_id_of_other_lanes(
    monkeypatch: pytest.MonkeyPatch, most: int, finished: bool
) -> None:
    """Also where it stops among the rows of a transaction that the lane may not see."""
    monkeypatch.setattr(limits, "LIST_ROWS", limits.LIST_ROWS._replace(value=most))
    world, rng = nyc(), random.Random(1)
    for lane in ("etl", "web"):
        world.grant(lane, "nyc/*", Right.WRITE | Right.DESCRIBE)
    lanes = {}
    for label in "ABCDEFGHIJKLMNOP":
        lanes[label] = rng.choice(["etl", "web"])
        world.ids[label] = make_txn_id(0, world.wall_ms, rng.getrandbits(64))
        with world.by(lanes[label]):
            world.begin(label)
            world.touch(label)
            world.register(label, r.Receipt(world.id(label), 1, 1, True, ()))
        world.wait(rng.choice([0, 1]))
    found, before, parts = [], None, 0
    while parts == 0 or before is not None:
        listing = r.ListTransactions(None, finished, 100, before)
        world.ask("list", listing, lane="etl")
        found += [world.label(outcome.txn_id) for outcome in world.result.transactions]
        before, parts = world.result.more, parts + 1
        for label, lane in lanes.items():
            assert lane == "etl" or world.id(label)[:12] not in (before or b"")
    mine = sorted((world.id(label), label) for label in lanes if lanes[label] == "etl")
    assert found == [label for _, label in mine][:: -1 if finished else 1]


def test_a_list_is_not_changed_by_what_ends_meanwhile(several: World) -> None:
    several.list(limit=2)
    before = several.result.more
    several.abort("D")
    several.begin("F")
    assert several.list(before=before) == "C ABORTED (why), B OPEN, A COMMITTED 0"


@pytest.mark.parametrize("before", [b"", b"\0" * 17, b"\xff" * 300])
def test_a_list_may_continue_at_any_place(several: World, before: bytes) -> None:
    everything = several.list()
    assert several.list(before=before) == (everything if before > b"\1" else "none")
    assert several.list(finished=False, before=before) == (
        "none" if before > b"\1" else "B OPEN, D OPEN"
    )


def test_a_list_has_no_details(several: World) -> None:
    several.list()
    assert [(o.streams, o.writers) for o in several.result.transactions] == [((), ())] * 5


def test_a_list_sees_what_the_same_round_did(world: World) -> None:
    listing = r.ListTransactions(None, True, 10)
    assert world.turn(("1", world.beginning("A")), ("2", listing)) == "[1] begun A; [2] A OPEN"
