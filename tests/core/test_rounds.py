"""Rounds, and forgetting: what every round logs, and how old outcomes go."""

from __future__ import annotations

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions import decide as decide_module
from anabranch.core.decisions import transactions
from anabranch.core.decisions.decide import decide, decide_due
from anabranch.core.decisions.turn import Turn, attempt, close_round
from anabranch.core.journal_index import JournalIndex
from anabranch.core.memory import Keepalives, LeaderMemory
from anabranch.core.round import ReplyTo
from anabranch.core.state import State
from anabranch.errors import InvariantViolation, NotReady
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.testing.memory.table import MemoryStore
from tests.core.harness import DAY, START_MS, World, event, nyc, settings

# -- rounds ------------------------------------------------------------------------------------


def test_every_round_says_how_far_it_came(world: World) -> None:
    world.begin("A")
    world.one_shot("B", event())
    row = decode(world.round.rows[k.ROUND_KEY] or b"")
    assert row == r.RoundRow(
        term=1,
        hybrid_time=world.result.commit_timestamp,
        commands_offset=world.offset,
        control_offset=0,
        expired_ms=0,
    )
    assert world.state.round == row
    assert list(world.round.rows)[-1] == k.ROUND_KEY


def test_a_round_with_nothing_but_a_refusal_is_logged_too(world: World) -> None:
    """The answer leaves through a fenced round."""
    world.begin("A", scope="none")
    assert list(world.round.rows) == [k.ROUND_KEY]


def test_an_empty_turn_writes_nothing(world: World) -> None:
    logged = len(world.log)
    assert (world.turn(), world.round.empty, len(world.log)) == ("", True, logged)


def test_messages_to_other_control_partitions_are_something() -> None:
    turn = World(control_partitions=4).new_turn()
    turn.send(1, r.AdoptScope("nyc", "open"), None)
    assert list(close_round(turn, 1, 0).rows) == [k.ROUND_KEY]


def test_each_new_leader_has_the_next_term(world: World) -> None:
    world.lead()
    world.lead()
    world.begin("A")
    assert world.state.round.term == 3


def test_only_the_last_row_of_a_key_is_logged_and_at_its_last_place(world: World) -> None:
    turn = world.new_turn()
    for key, term in (k.scope_key("x"), 1), (k.scope_key("y"), 2), (k.scope_key("x"), 3):
        turn.put(key, r.ScopeRow("x", term, ""))
    assert list(turn.round.rows) == [k.scope_key("y"), k.scope_key("x")]
    assert decode(turn.round.rows[k.scope_key("x")] or b"").control_partition == 3


def test_a_command_without_asker_is_decided_and_not_answered(world: World) -> None:
    turn = world.new_turn()
    decide(turn, world.beginning("A"), None)
    decide(turn, world.beginning("B", scope="none"), None)
    assert turn.round.replies == []
    assert world.state.open.keys() == {world.id("A")}


@pytest.mark.parametrize("thing", [r.NameRow(bytes(16)), r.Registered(1), None, 7])
def test_what_is_no_command(world: World, thing: object) -> None:
    turn = world.new_turn()
    decide(turn, thing, ReplyTo(b"c", 0, b"d"))
    ((_, answer),) = turn.round.replies
    assert answer.code == "MalformedRecord"
    assert turn.round.rows == {}


def test_a_refusal_that_changed_something_is_a_defect(world: World) -> None:
    def put() -> None:
        turn.put(k.scope_key("x"), r.ScopeRow("x", 0, ""))
        raise NotReady("too late")

    def tell_time() -> None:
        turn.next_timestamp()
        raise NotReady("too late")

    def answer() -> None:
        turn.reply(ReplyTo(b"c", 0, b"d"), r.Registered(1))
        raise NotReady("too late")

    for decision in (put, tell_time, answer):
        turn = world.new_turn()
        with pytest.raises(InvariantViolation, match="changed something"):
            attempt(turn, None, decision)


def test_a_defect_is_not_taken_for_a_bug_of_the_caller(world: World) -> None:
    """Errors of other kinds come through: the controller must not answer as if nothing happened."""

    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        attempt(world.new_turn(), None, broken)


# -- forgetting --------------------------------------------------------------------------------

WEEK = 7 * DAY


def leftovers(world: World, *labels: str) -> list[bytes]:
    """Table keys that speak of these transactions."""
    ids = [world.id(label) for label in labels]
    return [
        key
        for key, value in world.table.rows.items()
        if any(txn_id in key or txn_id in value for txn_id in ids)
    ]


def test_an_old_outcome_is_forgotten_with_all_its_rows() -> None:
    world = nyc()
    world.begin("A", name="daily")
    world.touch("A")
    world.write("A", "w1", count=2)
    world.write("A", "w2", epoch=3)
    world.finish("A", "w1")
    world.commit("A")
    world.turn()
    made_ms = world.wall_ms
    assert len(leftovers(world, "A")) > 3
    world.wait(WEEK)
    assert world.get("A") == "A COMMITTED 2, 1 rejected", "not yet"
    world.wait(251)
    assert leftovers(world, "A") == []
    assert world.holder("daily") == "nobody"
    assert world.state.round.expired_ms == made_ms
    assert world.get("A") == "Expired"
    assert world.resolve("A") == "Expired"
    assert world.begin("A") == "Expired"
    assert world.one_shot("A", event()) == "Expired"
    assert world.commit("A") == "Expired"
    assert world.abort("A") == "Expired"
    assert world.touch("A") == "Expired"
    assert world.finish("A", "w1") == "Expired"
    assert world.resolve(world.new_id("older", made_ms=made_ms - 1)) == "Expired"
    assert world.resolve(world.new_id("newer", made_ms=made_ms + 1)) == "Expired"
    kept = world.new_id("kept", made_ms=world.wall_ms - WEEK + 1)
    assert world.resolve(kept).startswith("kept ABORTED")


def test_the_horizon_is_logged_with_the_deletions() -> None:
    world = nyc()
    world.one_shot("A", event())
    made_ms = world.wall_ms
    world.wait(WEEK + 1)
    assert world.round.rows[k.txn_key(world.id("A"))] is None
    assert decode(world.round.rows[k.ROUND_KEY] or b"").expired_ms == made_ms
    world.begin("B")
    assert world.state.round.expired_ms == made_ms, "it stays"
    world.lead(keep_table=False)
    assert world.state.round.expired_ms == made_ms
    assert world.get("A") == "Expired"


@pytest.mark.parametrize("given_on", [True, False])
def test_a_round_keeps_the_horizon_of_what_it_forgets(given_on: bool) -> None:
    """Whatever comes first in a turn, commands or what is due: an id never gets a second life."""
    world = nyc()
    world.one_shot("A", event())
    made_ms = world.wall_ms
    world.wall_us += (WEEK + 1) * 1000
    world.now_ms += WEEK + 1
    turn = world.new_turn()
    expired_ms = decide_module.decide_due(turn, judge_silence=True)
    if given_on:
        again = r.OneShot(world.id("A"), "nyc", None, (event(),))
        decide(turn, again, world.asker("again"))
        assert world.close(turn, expired_ms) == "[again] Expired"
    else:
        world.close(turn)
    assert world.state.round.expired_ms == made_ms


def test_the_horizon_never_goes_back() -> None:
    world = nyc()
    world.one_shot("late", event())
    world.one_shot(world.new_id("early", made_ms=world.wall_ms - 1_000), event())
    horizon = world.wall_ms
    world.wait(WEEK + 1)
    assert world.state.round.expired_ms == horizon
    world.one_shot("next", event())
    world.wait(1_000)
    assert world.state.round.expired_ms == horizon


def test_open_ones_are_not_forgotten() -> None:
    world = nyc()
    world.begin("A", keepalive_ms=20 * DAY)
    world.begin("B")
    world.abort("B")
    world.wait(WEEK + 1)
    assert world.get("B") == "Expired"
    assert world.get("A") == "A OPEN"
    assert world.begin("A", keepalive_ms=20 * DAY) == "begun A", "older than the horizon, but known"
    world.commit("A")
    assert world.turn() == "[commit A] A COMMITTED 0"
    assert world.get("A") == "A COMMITTED 0"


def test_they_are_forgotten_in_the_order_of_their_ends_a_few_at_a_time() -> None:
    world = nyc(purge_per_look=2)
    for label in "ABCDE":
        world.id(label)
    for label in "EACBD":
        world.one_shot(label, event())
        world.wait(1)
    world.wait(WEEK)
    assert world.list() == "D COMMITTED 1, C COMMITTED 1, B COMMITTED 1"
    world.wait(250)
    assert world.list() == "D COMMITTED 1"
    world.wait(250)
    assert world.list() == "none"


def test_a_name_that_passed_on_is_not_taken_from_its_holder() -> None:
    world = nyc()
    world.begin("A", name="daily")
    world.abort("A")
    world.wait(DAY)
    world.one_shot("B", event(), name="daily")
    world.wait(WEEK - DAY + 1)
    assert world.get("A") == "Expired"
    assert world.holder("daily") == "B"
    assert world.one_shot("C", event(), name="daily") == "B COMMITTED 1"
    world.wait(DAY + 1)
    assert world.holder("daily") == "nobody"
    assert world.one_shot("D", event(), name="daily") == "D COMMITTED 1"


def test_resolved_ids_are_forgotten_too() -> None:
    world = nyc()
    world.resolve("A")
    world.wait(WEEK + 1)
    assert leftovers(world, "A") == []
    assert world.begin("A") == "Expired"


@pytest.mark.parametrize("retention_ms", [1_000, 3_600_000, DAY, 2 * DAY, WEEK])
def test_a_client_whose_clock_is_ahead_does_not_shut_the_others_out(retention_ms: int) -> None:
    """The horizon comes from the ids' own clocks; it must stay in the past of right ones."""
    world = nyc(retention_ms=retention_ms)
    for ahead_ms in (DAY, 3_600_000, 1_000, 1):
        fast = world.new_id(f"fast {ahead_ms}", made_ms=world.wall_ms + ahead_ms)
        assert world.one_shot(fast, event()) in (f"{fast} COMMITTED 1", "ClockSkew")
    world.wait(retention_ms + 1)
    world.wait(250)
    assert world.state.round.expired_ms < world.wall_ms
    assert world.begin("right") == "begun right"


def test_a_turn_knows_only_unfinished_transactions_as_open(world: World) -> None:
    world.begin("A")
    world.begin("B")
    world.abort("B")
    turn = world.new_turn()
    assert turn.open(world.id("A")).row.state == "OPEN"
    for label in "BC":
        with pytest.raises(InvariantViolation):
            turn.open(world.id(label))


def test_outcomes_are_forgotten_as_fast_as_they_are_made() -> None:
    """5,000 commits per second of simulated time: the table stays where the retention puts it."""
    rate, retention_ms = 5_000, 1_000
    store = MemoryStore()
    table, given = store.open("c"), settings(retention_ms=retention_ms)
    state, index = State(table), JournalIndex(table)
    memory = LeaderMemory(Keepalives(0))
    most = []
    for number in range(30):
        now_ms = number * 100
        turn = Turn(state, index, given, memory, (START_MS + now_ms) * 1000, now_ms)
        for one in range(rate // 10):
            txn_id = make_txn_id(0, START_MS + now_ms, one)
            name = f"n{number}-{one}"
            row = r.TxnRow(
                txn_id,
                "nyc",
                name,
                "COMMITTED",
                0,
                now_ms,
                START_MS + now_ms,
                7,
                1,
                0,
                0,
                "",
                None,
                "open",
            )
            turn.put(k.name_key("nyc", name), r.NameRow(txn_id))
            turn.put(k.txn_key(txn_id), row)
        close_round(turn, 0, 0, expired_ms=decide_due(turn, judge_silence=True))
        turn.done()
        table.write(state.take_changes())
        most.append(len(store.snapshot()))
    level = 3 * rate * (retention_ms + 300) // 1000  # of each: its row, its name, its derived key
    assert max(most) <= level
    assert most[-1] == most[20] > rate * retention_ms // 1000


def test_one_with_many_writers_is_forgotten_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round deletes some rows: all other commands wait meanwhile. Until its last one it can be asked for."""
    monkeypatch.setattr(transactions, "PURGE_ROWS", 3)
    world = nyc(purge_per_look=1)
    world.begin("A")
    world.touch("A")
    for number in range(1, 12):
        receipt = r.Receipt(world.id("A"), number, 1, True, ())
        assert world.register("A", receipt) == "registered 1"
    world.abort("A")
    left = [len(world.state.row_keys(world.id("A")))]
    world.wait(WEEK)
    while left[-1]:
        left.append(len(world.state.row_keys(world.id("A"))))
        assert left[-2] - left[-1] <= 5
        assert world.get("A").startswith("A ABORTED") == bool(left[-1])
        world.wait(250)
    assert len(left) > 3
