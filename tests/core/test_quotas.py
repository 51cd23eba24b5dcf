"""Quotas of lanes: what counts, and what is never refused; what each refuses first is in `test_refusals`."""

from __future__ import annotations

from anabranch.core.authorize import Right
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, nyc

ETL, OTHER = "etl", "web"
RIGHTS = Right.DESCRIBE | Right.WRITE | Right.CREATE | Right.SCALE


def made(**own: int) -> World:
    """Two lanes that may do the same; the first one has quotas of its own."""
    world = nyc()
    for lane in (ETL, OTHER):
        world.grant(lane, "nyc/*", RIGHTS)
    assert set_quotas(world, **own) is None
    return world


def set_quotas(world: World, **own: int) -> str | None:
    """A refusal's name."""
    ids = world.state.lanes[ETL].topic_ids
    said = world.ask("set", r.SetLane(ETL, False, ids, own), lane=ADMIN_LANE)
    return None if isinstance(world.result, r.LaneList) else said


def opens(world: World, lane: str, label: str, keepalive_ms: int = 60_000) -> str:
    with world.by(lane):
        return world.begin(label, keepalive_ms=keepalive_ms)


def test_quota_of_open_transactions() -> None:
    world = made(open=2)
    assert [opens(world, ETL, label) for label in "ABC"] == [
        "begun A",
        "begun B",
        "TooManyTransactions",
    ]
    assert "anabranch lane add etl --quota open=3" in world.message
    assert opens(world, ETL, "A") == "begun A", "a repetition makes none"
    assert [opens(world, OTHER, label) for label in "DEF"][-1] == "begun F"
    with world.by(ETL):
        assert world.abort("A").startswith("A ABORTED")
        assert world.begin("G") == "begun G"
        assert world.one_shot("H") == "H COMMITTED 0", "a one-shot is never open"


def test_a_transaction_that_replaces_another_needs_no_room() -> None:
    world = made(open=1)
    with world.by(ETL):
        assert world.begin("A", name="daily") == "begun A"
        assert world.begin("B", name="other") == "TooManyTransactions"
        assert world.begin("C", name="daily") == "begun C", "it ends the one before"


def test_quota_of_staged_bytes() -> None:
    world = made(staged=1_000)
    with world.by(ETL):
        world.begin("A")
        world.touch("A")
        world.begin("B")
        world.write("A", "w1")
        world.turn()
    world.index.uncommitted.add(world.id("A"), ("nyc/a", 0), 0, 2_000)
    with world.by(ETL):
        assert world.begin("C") == "TooManyUncommittedBytes"
        assert world.touch("B") == "TooManyUncommittedBytes"
        assert world.touch("A").startswith("touched"), "it was there before"
        receipt = world.receipt("A", "w1")
        assert world.register("A", receipt) == "TooManyUncommittedBytes", "the first of a writer"
        begins = r.Touch(world.token("A"), "nyc/a", world.writer("w1"))
        assert world.ask("touch", begins) == "TooManyUncommittedBytes", "the same"
        assert world.heartbeat("A") == ""
        assert world.abort("B").startswith("B ABORTED")
        assert world.commit("A", own=[receipt]).startswith("A COMMITTED") or world.turn()
    assert opens(world, OTHER, "D") == "begun D"


def test_quota_of_scopes() -> None:
    world = made(scopes=2)
    for lane in (ETL, OTHER):
        world.grant(lane, "*", Right.CREATE)
    with world.by(ETL):
        world.create("nyc/x")
        assert [world.find_scope(f"s{n}") for n in range(3)][1:] == ["s1 at 0", "TooManyStreams"]
        assert "anabranch lane add etl --quota scopes=3" in world.message
        assert world.find_scope("s1") == "s1 at 0", "it is there"
        assert world.create("s0/x") == ""
    with world.by(OTHER):
        assert world.find_scope("s2") == "s2 at 0"


def test_quota_of_series() -> None:
    world = made(series=2)
    for number, name in enumerate(("s", "t", "s", "u")):
        with world.by(ETL):
            world.begin(name + str(number))
            said = world.commit(name + str(number), name=name, number=number)
            assert said == ("InvalidArgument" if name == "u" else ""), name
            world.turn()
    assert world.state.series_of(ETL) == 2
    world.lead(keep_table=False)
    assert world.state.series_of(ETL) == 2
    with world.by(OTHER):
        world.begin("x")
        assert world.commit("x", name="u", number=0) == ""
    world.turn()
    world.ask("set", r.SetSeries("nyc", "s", 2, -1))
    assert (world.state.series_of(ETL), world.state.series_of(OTHER)) == (1, 1)


def test_bytes_of_one_transaction() -> None:
    """A transaction has a limit of its own, whatever its lane may have."""
    world = made(staged=1 << 40)
    with world.by(ETL):
        world.begin("A")
        world.touch("A")
        world.index.uncommitted.add(world.id("A"), ("nyc/a", 0), 0, limits.UNCOMMITTED.value)
        world.create("nyc/b", 1)
        world.created("nyc/b", 0)
        assert world.touch("A", "nyc/b") == "TooManyUncommittedBytes"
        assert world.register("A", world.receipt("A", "w1")) == "TooManyUncommittedBytes"
        begins = r.Touch(world.token("A"), "nyc/a", world.writer("w1"))
        assert world.ask("touch", begins) == "TooManyUncommittedBytes"
        assert world.begin("B") == "begun B"
        assert world.touch("B") == "touched nyc/a epoch 0 on 0,1"


def test_quotas_from_the_start_and_as_set() -> None:
    world = made()
    lanes = {}
    for own, expected in (({}, 1_000), ({"open": 7}, 7), ({"open": 1_000}, 1_000)):
        assert set_quotas(world, **own) is None
        world.ask("list", r.ListLanes(), lane=ADMIN_LANE)
        lanes = {info.lane: info for info in world.result.lanes}
        assert lanes[ETL].quotas["open"] == expected
        assert (world.state.lanes[ETL].quotas == {}) == (expected == 1_000), "no default is kept"
    assert lanes[ADMIN_LANE].quotas == {}, "it has to get through"
    assert lanes[ETL].quotas == {name: limit.value for name, limit in limits.QUOTAS.items()}
    assert lanes["open"].quotas == {}, "its senders are trusted here"


def test_open_has_quotas_and_may_not_scale_where_it_is_not_trusted() -> None:
    world = nyc(trusts_open=False)
    world.ask("list", r.ListLanes(), lane=ADMIN_LANE)
    (info,) = [info for info in world.result.lanes if info.lane == "open"]
    assert info.quotas == {name: limit.value for name, limit in limits.QUOTAS.items()}
    assert world.ask("scale", r.Scale("nyc/a", 3, (), ())) == "NotAuthorized"
    assert world.ask("set", r.SetSeries("nyc", "s", None, 3)) == "NotAuthorized"
    world.grant("open", "*", Right.SCALE)
    assert world.ask("scale", r.Scale("nyc/a", 65, (), ())) == "InvalidArgument"
    assert "at most 64" in world.message
    assert world.ask("scale", r.Scale("nyc/a", 64, (), ())) == "", "it waits for partitions"
    world = nyc(trusts_open=False)
    world.grant("open", "nyc/*", Right.SCALE | Right.OPERATE)
    assert world.ask("scale", r.Scale("nyc/a", 65, (), ())) == ""


def test_open_may_have_a_quota_of_scopes() -> None:
    """It may make scopes from the start; each is counted once, where the directory is."""
    world = nyc()
    command = r.SetLane("open", False, (), {"scopes": 1})
    world.ask("set", command, lane=ADMIN_LANE)
    assert world.result.lanes[0].usage["scopes"] == 1
    assert world.find_scope("lax") == "TooManyStreams"
    other = World(control_partition=1, control_partitions=2)
    other.adopt("sfo")
    other.ask("list", command, lane=ADMIN_LANE)
    assert other.result.lanes[0].usage.get("scopes", 0) == 0


def test_a_blocked_lane_is_never_refused_for_what_it_has() -> None:
    world = made(open=5)
    for label in "AB":
        opens(world, ETL, label)
    ids = world.state.lanes[ETL].topic_ids
    for blocked, own in ((True, {"open": 1}), (False, {})):
        world.ask("block", r.SetLane(ETL, blocked, ids, own), lane=ADMIN_LANE)
        assert isinstance(world.result, r.LaneList), "whatever it has"
    assert set_quotas(world, open=2) is None
    world.ask("list", r.ListLanes(), lane=ADMIN_LANE)
    (info,) = [info for info in world.result.lanes if info.lane == ETL]
    assert (info.usage["open"], info.usage["staged"]) == (2, 0)
    world.lead(keep_table=False)
    assert opens(world, ETL, "C") == "TooManyTransactions", "a successor counts the same"
