"""Grants set and listed, those of a scope's creator, and what operators leave in the audit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.authorize import ALL, CREATORS, Right
from anabranch.core.decisions import transactions
from anabranch.core.decisions.streams import give_up_stream, stream_recovered
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, nyc
from tests.core.labels import SECRET

FROM_THE_START = "admin * 511, open * 319"
WITHOUT_TRUST = "admin * 511, open * 271"  # it may neither scale nor set series


def listed(world: World) -> str:
    return world.ask("list", r.ListGrants(), lane=ADMIN_LANE)


def audit(world: World) -> list[str]:
    """Who did what, the newest first."""
    world.ask("audit", r.ListAudit(None), lane=ADMIN_LANE)
    return [f"{e.lane}: {e.command} {e.what}" for e in world.result.entries]


# -- grants --------------------------------------------------------------------------------------


def test_grants_are_set_listed_and_read_by_a_successor(world: World) -> None:
    assert listed(world) == FROM_THE_START
    assert listed(nyc(trusts_open=False)) == WITHOUT_TRUST
    assert world.grant("etl", "nyc/*", 5) == "etl nyc/* 5"
    assert world.grant("etl", "nyc/a", 0) == "etl nyc/a 0"
    assert world.grant(OPEN_LANE, "*", 1) == "open * 1"
    for _ in range(2):
        assert listed(world) == "admin * 511, etl nyc/* 5, etl nyc/a 0, open * 1"
        world.lead(keep_table=False)
    assert world.grant("etl", "nyc/*", 5) == "etl nyc/* 5"
    assert world.round.rows.keys() == {k.ROUND_KEY}, "it stands already"
    assert [row.split(": ", 1)[1] for row in audit(world)] == [
        "SetGrant open on *: describe",
        "SetGrant etl on nyc/a: nothing",
        "SetGrant etl on nyc/*: describe, write",
    ]


def test_no_more_grants_than_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRANTS", limits.GRANTS._replace(value=2))
    world.grant("etl", "nyc/a", 1)
    world.grant("etl", "nyc/b", 1)
    assert world.grant("etl", "nyc/c", 1) == "InvalidArgument"
    assert world.grant("etl", "nyc/b", 2) == "etl nyc/b 2", "no new one"


def test_scopes_use_up_no_grants(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRANTS", limits.GRANTS._replace(value=3))
    world.grant("etl", "*", Right.CREATE)
    with world.by("etl"):
        for number in range(5):
            world.find_scope(f"s{number}")
    assert world.grant("other", "nyc/*", 1) == "other nyc/* 1"


# -- the creator of a scope ----------------------------------------------------------------------


def test_a_scope_is_its_creators() -> None:
    world = nyc()
    world.grant("etl", "*", Right.CREATE)
    assert world.ask("find", r.FindScope("lax", True), lane="etl") == "lax at 0"
    assert listed(world) == f"admin * 511, etl * 8, etl lax/* {CREATORS:d}, open * 319"
    world.grant("etl", "*", 0)
    for _ in range(2):
        with world.by("etl"):
            assert world.find_scope("lax") == "lax at 0"
            assert world.begin("A", scope="lax") == "begun A"
            assert world.begin("B") == "NotAuthorized"
        world.lead(keep_table=False)


@pytest.mark.parametrize("lane", [OPEN_LANE, ADMIN_LANE])
def test_but_not_of_open_or_admin(lane: str) -> None:
    world = nyc()
    with world.by(lane):
        world.find_scope("lax")
    assert listed(world) == FROM_THE_START


def test_the_partition_that_serves_a_scope_gets_its_creator() -> None:
    """Also if another lane asks again, as the first message may be lost."""
    directory = World(control_partitions=64)
    directory.find_scope("nyc")  # the directory serves it itself
    for lane, right in (("etl", Right.CREATE), ("other", Right.DESCRIBE | Right.CREATE)):
        directory.grant(lane, "*", right)
    served, said = 0, r.AdoptScope("", "")
    for lane in ("etl", "other", "open", "etl"):
        with directory.by(lane):
            directory.find_scope("lax")
        ((served, said, _),) = directory.round.messages
        assert said == r.AdoptScope("lax", "etl")
    assert served != 0
    world = World(control_partition=served, control_partitions=64)
    world.ask("adopt", said)
    assert f"etl lax/* {CREATORS:d}" in listed(world)
    world.grant("etl", "lax/*", 0)
    world.ask("adopt", said)
    assert "etl lax/* 0" in listed(world), "a later word stands"
    directory.grant("etl", "lax/*", 0)
    directory.find_scope("lax")
    assert directory.round.messages == [(served, r.AdoptScope("lax", OPEN_LANE), None)]


@pytest.mark.parametrize("left", [0, CREATORS & ~Right.OPERATE])
def test_rights_taken_before_the_message_comes_are_not_given_back(left: int) -> None:
    """An operator takes them in each control partition, and the one that serves the scope hears of that first."""
    directory = World(control_partitions=64)
    directory.find_scope("nyc")  # the directory serves it itself
    directory.grant("etl", "*", Right.CREATE)
    directory.ask("find", r.FindScope("lax", True), lane="etl")
    ((served, said, _),) = directory.round.messages
    world = World(control_partition=served, control_partitions=64)
    for each in (directory, world):
        each.grant("etl", "lax/*", left)
    world.ask("adopt", said)
    assert f"etl lax/* {left:d}, " in listed(world)
    world.lead(keep_table=False)
    assert f"etl lax/* {left:d}, " in listed(world)


def test_what_an_operator_said_of_a_scope_stays_when_it_is_made() -> None:
    """Likewise in the directory: the control partitions have the same."""
    world = nyc()
    world.grant("etl", "lax/*", Right.CREATE | Right.WRITE)
    assert world.ask("find", r.FindScope("lax", True), lane="etl") == "lax at 0"
    assert "etl lax/* 12, " in listed(world)


# -- the audit -----------------------------------------------------------------------------------


def test_each_operators_command_leaves_one_row_once_it_is_done() -> None:
    world = nyc("nyc/a", "nyc/b")
    world.grant("ops", "*", ALL & ~Right.ADMIN)
    turn = world.new_turn()
    give_up_stream(turn, "nyc/a", "gone")
    give_up_stream(turn, "nyc/b", "gone")
    world.close(turn)
    commands = {
        "ForgetStream nyc/b": r.ForgetStream("nyc/b"),
        "SetSeries nyc 's\\n': None becomes 5": r.SetSeries("nyc", "s\n", None, 5),
        "SetGrant ops on nyc/a: operate": r.SetGrant("ops", "nyc/a", 64),
    }
    expected = [
        "admin: SetGrant ops on *: describe, safe-time, write, create, scale, series, operate, process"
    ]
    for said, command in commands.items():
        lane = ADMIN_LANE if isinstance(command, r.SetGrant) else "ops"
        for _ in range(2):
            world.ask(said, command, lane=lane)
        expected.insert(0, f"{lane}: {said}")
    assert [row.lane for round_ in world.rounds for row in round_.audit] == [
        "admin",
        "ops",
        "ops",
        "admin",
    ]
    assert world.ask("refused", r.SetSeries("nyc", "s", 4, 6), lane="ops") == "IllegalState"
    assert audit(world) == expected
    world.lead(keep_table=False)
    assert audit(world) == expected
    assert all(row.at_ms == world.wall_ms for row in world.result.entries)


def test_a_recovery_a_force_and_an_operators_abort_are_in_it(opened: World) -> None:
    world, torn = opened, opened.row("A")._replace(state="FINALIZE_IN_PROGRESS")
    for label in "BCDE":
        world.begin(label)
    decided = r.PendingCommitRow((), True, (), None, None, 0, None, None)
    world.log_rows([(k.txn_key(world.id("A")), torn), (k.pending_key(world.id("A")), decided)])
    turn = world.new_turn()
    give_up_stream(turn, "nyc/a", "gone")
    world.close(turn)
    known = replace(world.state.streams["nyc/a"], topic_ids=("1", "2", "3"))
    world.log_rows([(k.stream_key("nyc/a"), known)])
    for _ in range(2):
        with world.by(ADMIN_LANE):
            world.ask("force", r.Force(world.id("A"), "torn"))
            world.ask("recover", r.RecoverStream("nyc/a"))
            world.ask("abort", r.Abort(world.id("B"), "why\n"))
            world.ask("abort", r.Abort(world.id("D"), "with a secret", bytes(32)))
        world.ask("abort", r.Abort(world.token("C"), "my own"))
        world.ask("abort", r.Abort(world.token("E"), "by its token"), lane="etl")
    turn = world.new_turn()
    stream_recovered(turn, "nyc/a")
    world.close(turn)
    assert audit(world) == [
        "admin: RecoverStream nyc/a",
        f"etl: Abort {world.id('E').hex()} of open: 'by its token'",
        f"admin: Abort {world.id('D').hex()} of open: 'with a secret'",
        f"admin: Abort {world.id('B').hex()} of open: 'why\\n'",
        f"admin: Force {world.id('A').hex()} of open: 'torn'",
    ]


def test_one_lane_does_not_bury_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after the leader was replaced: of each lane the newest rows are kept."""
    monkeypatch.setattr(limits, "AUDIT", limits.AUDIT._replace(value=3))
    world = nyc("nyc/a")
    world.grant("ops", "nyc/*", CREATORS)
    for number in range(8):
        world.wait(1)
        world.ask(f"set {number}", r.SetSeries("nyc", f"s{number}", None, number), lane="ops")
        if number == 4:
            world.lead(keep_table=False)
    said = audit(world)
    assert [each.partition(":")[0] for each in said] == ["ops"] * 3 + ["admin"]
    assert [each[-1] for each in said[:3]] == ["7", "6", "5"]


def test_neither_secrets_nor_long_texts_are_in_it(world: World) -> None:
    world.ask("set", r.SetSeries("nyc", "x" * 256, None, 5), lane=ADMIN_LANE)
    turn = world.new_turn()
    turn.audit(r.ListAudit(None), "y" * 5_000)
    world.close(turn)
    rows = world.log[-1] + world.log[-2]
    assert not any(SECRET in (value or b"") for _, value in rows)
    assert len(audit(world)[0]) < 1_100


def test_it_is_listed_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIST_ROWS", limits.LIST_ROWS._replace(value=3))
    for number in range(8):  # some in the same millisecond, by several leaders
        if number % 3 == 0:
            world.lead()
            world.wait(1)
        world.grant("etl", "nyc/a", number + 1)
    found, before, parts = [], None, 0
    while parts == 0 or before is not None:
        world.ask("audit", r.ListAudit(before), lane=ADMIN_LANE)
        found += world.result.entries
        before, parts = world.result.more, parts + 1
    assert parts == 3
    whole = [world.state.grants["etl"]["nyc/a"], len(found), len({id(e) for e in found})]
    assert whole == [8, 8, 8]
    assert [e.at_ms for e in found] == sorted((e.at_ms for e in found), reverse=True)
    for place in (b"", b"\xff" * 40, b"\0"):
        said = world.ask("audit", r.ListAudit(place), lane=ADMIN_LANE)
        assert (said == "none") == (place != b"\xff" * 40)


def test_it_is_forgotten_after_its_time_in_pieces(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "_AUDIT_ROWS", 2)
    for number in range(5):
        world.grant("etl", "nyc/a", number + 1)
    world.wait(transactions.AUDIT_MS - DAY)
    world.grant("etl", "nyc/a", 9)
    left = []
    world.wait(DAY)
    for _ in range(4):
        left.append(len(audit(world)))
        world.wait(1_000)
    assert left == [6, 4, 2, 1]
    assert audit(world) == ["admin: SetGrant etl on nyc/a: describe, create"]
    assert world.one_shot("A", event()) == "A COMMITTED 1"
