"""Scopes and streams: the directory, and what becomes of a request for a stream."""

from __future__ import annotations

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.streams import stream_created
from anabranch.errors import TopicMisconfigured
from anabranch.protocol.ids import AS_NOW
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event

# -- scopes ------------------------------------------------------------------------------------


def test_the_directory_stores_where_a_scope_is_served() -> None:
    world = World(control_partitions=4)
    assert world.find_scope("nyc", create=False) == "UnknownScope"
    placed = [world.find_scope(scope) for scope in ("nyc", "sfo", "ber", "par")]
    assert placed == ["nyc at 0", "sfo at 1", "ber at 2", "par at 3"]
    assert len(world.state.scopes) == 4
    assert world.find_scope("ber", create=False) == "ber at 2"


@pytest.mark.parametrize(
    ("scope", "near", "answer"),
    [
        ("new", None, "new at 2"),  # where the fewest are
        ("new", "nyc", "new at 0"),
        ("new", "sfo", "new at 1"),
        ("sfo", "ber", "sfo at 1"),  # it is there already
        ("nyc", "sfo", "InvalidArgument"),
        ("new", "none", "UnknownScope"),
    ],
)
def test_a_scope_near_another(scope: str, near: str | None, answer: str) -> None:
    world = World(control_partitions=3)
    for known, beside in (("nyc", None), ("sfo", None), ("ber", "sfo")):
        world.find_scope(known, near=beside)
    scopes = dict(world.state.scopes)
    assert world.find_scope(scope, near=near) == answer
    assert world.find_scope(scope, near=near) == answer, "again the same"
    assert answer.startswith("new") or world.state.scopes == scopes


def test_each_creation_of_a_scope_is_answered_with_its_control_partition() -> None:
    """Again, too: retention may have taken what was told before, unread, and nobody else would ever say it."""
    world = World(control_partitions=4)
    world.find_scope("par")
    for _ in range(2):
        world.find_scope("nyc")
        assert world.round.messages == [(1, r.AdoptScope("nyc", "open"), None)]
    world.find_scope("nyc", create=False)
    assert world.round.messages == [], "who only asks changes nothing"
    world.find_scope("par")
    assert world.round.messages == [], "the directory serves it itself"


def test_a_scope_stays_where_it_is_when_partitions_are_added() -> None:
    world = World(control_partitions=4)
    world.find_scope("par")
    world.find_scope("nyc")
    world.settings = World(control_partitions=64).settings
    world.lead(keep_table=False)
    assert world.find_scope("nyc") == "nyc at 1"
    assert world.find_scope("sfo") == "sfo at 2"


def test_new_scopes_get_the_control_partitions_that_are_in_use() -> None:
    """Whatever number a controller finds when it starts: those that were added may lack lanes and grants."""
    world = World(control_partitions=1)

    def in_use(count: int) -> object:
        world.ask("grow", r.SetFeatureLevel(None, count), lane=ADMIN_LANE)
        return getattr(world.result, "control_partitions", None) or world.result.code

    assert in_use(AS_NOW) == "FeatureNotEnabled"
    world.ask("level", r.SetFeatureLevel(4), lane=ADMIN_LANE)
    world.find_scope("nyc")
    assert [in_use(AS_NOW), in_use(AS_NOW)] == [1, 1]
    world.settings = World(control_partitions=3).settings
    world.lead(keep_table=False)
    assert world.find_scope("sfo") == "sfo at 0", "they were added, and are not in use"
    assert in_use(AS_NOW) == 1
    assert [in_use(3), in_use(3), in_use(AS_NOW)] == [3, 3, 3]
    assert in_use(2) == "IllegalState"
    assert [in_use(0x10001), in_use(-2)] == ["InvalidArgument"] * 2
    assert world.ask("both", r.SetFeatureLevel(4, 9), lane=ADMIN_LANE) == "InvalidArgument"
    world.ask("level", r.SetFeatureLevel(4), lane=ADMIN_LANE)
    placed = [world.find_scope(scope) for scope in ("ber", "par", "nyc")]
    assert placed == ["ber at 1", "par at 2", "nyc at 0"]
    elsewhere = World(control_partition=1, control_partitions=3)
    elsewhere.ask("level", r.SetFeatureLevel(4), lane=ADMIN_LANE)
    for count, then in ((5, 5), (4, 5)):
        elsewhere.ask("grow", r.SetFeatureLevel(None, count), lane=ADMIN_LANE)
        assert (
            elsewhere.result.control_partitions == elsewhere.new_turn().control_partitions == then
        )


def test_a_scope_is_adopted_unless_it_is_served_elsewhere() -> None:
    world = World(control_partition=3, control_partitions=4)
    assert world.adopt("nyc") == world.adopt("nyc") == "nyc at 3"
    assert world.begin("A") == "begun A"
    directory = World(control_partitions=4)
    directory.find_scope("par")
    directory.find_scope("nyc")
    assert directory.adopt("nyc") == "nyc at 1"
    assert directory.state.scopes == {"par": 0, "nyc": 1}


def test_control_partitions_other_than_the_directory_refuse_to_find_scopes() -> None:
    world = World(control_partition=1, control_partitions=4)
    assert world.find_scope("nyc") == "InvalidArgument"
    assert "control partition 0" in world.message


# -- streams -----------------------------------------------------------------------------------


@pytest.fixture
def city() -> World:
    """The scope nyc, without streams."""
    world = World()
    world.find_scope("nyc")
    return world


@pytest.mark.parametrize(
    ("there", "stream"),
    [
        ("nyc/a", "nyc/a_journal"),
        ("nyc/a_history", "nyc/a"),
        ("nyc/a_b", "nyc_a/b"),
        ("nyc_a/b_history", "nyc/a_b"),
        ("", "team/a_commands"),  # lane `x` has the topic team_a.commands.x
        ("", "team/a_x"),
    ],
)
@pytest.mark.parametrize("is_made", [False, True])
def test_a_name_that_kafka_takes_for_a_topic_that_is_there(
    there: str, stream: str, is_made: bool
) -> None:
    """It is refused before anything is logged, whether the topics are made already or not."""
    world = World(prefix="team_a")
    for scope in ("nyc", "nyc_a", "team"):
        world.find_scope(scope)
    if there:
        world.create(there)
    if there and is_made:
        world.created(there, 0)
    for _ in range(2):
        assert world.create(stream) == "InvalidArgument"
        assert world.round.rows.keys() == {k.ROUND_KEY}
        world.lead(keep_table=False)
    if there:
        assert there in world.message
    for free in ("nyc/a_journals", "nyc/a-journal", "team/a", "team/ab_commands"):
        assert world.create(free) != "InvalidArgument"


def test_create_is_logged_and_answered_when_the_topics_exist(city: World) -> None:
    assert city.create("nyc/a", 2, retention_ms="1") == ""
    row = city.state.streams["nyc/a"]
    assert (row.state, row.segment_count, dict(row.settings)) == (
        "CREATING",
        2,
        {"retention.ms": "1"},
    )
    assert row.segments == ()
    assert city.created("nyc/a", 0, 5) == "[create] nyc/a ACTIVE 2"
    assert city.state.streams["nyc/a"].segments == (
        r.SegmentRange(0, 0, SPACE // 2, 0),
        r.SegmentRange(1, SPACE // 2, SPACE, 1),
    )
    (new,) = city.round.epochs
    assert new.stream == "nyc/a"
    assert new.segments == city.state.streams["nyc/a"].segments
    assert (new.stream_epoch, new.reference_epoch, new.sealed) == (0, 0, ())
    assert new.starts == {0: 0, 1: 5}
    assert new.timestamp == city.state.round.hybrid_time > 0
    assert city.created("nyc/a", 9, 9) == "", "once"
    assert city.round.epochs == []


def test_a_repeated_request_is_answered_once_the_topics_exist_also_by_a_successor(
    city: World,
) -> None:
    city.create("nyc/a", 2, retention_ms="1")
    assert city.create("nyc/a", 2, retention_ms="1") == "", "it is being made"
    city.lead(keep_table=False)
    assert city.state.streams["nyc/a"].state == "CREATING"
    assert city.created("nyc/a", 0, 0) == "[create] nyc/a ACTIVE 2"
    assert city.create("nyc/a", 2, retention_ms="1") == "nyc/a ACTIVE 2"


def test_created_and_written_to_in_one_round(city: World) -> None:
    city.create("nyc/a", 1)
    turn = city.new_turn()
    stream_created(turn, "nyc/a", {0: 0})
    command = r.OneShot(city.id("A"), "nyc", None, (event(value=b"x"),))
    city._decide(turn, command, city.asker("shot"))
    assert city.close(turn) == "[create] nyc/a ACTIVE 1; [shot] A COMMITTED 1"
    assert city.round.epochs[0].timestamp < city.round.commits[0].timestamp


def test_a_request_that_the_brokers_refuse_leaves_nothing(city: World) -> None:
    city.create("nyc/a")
    assert city.refused("nyc/a", TopicMisconfigured("min.insync.replicas is 1")) == (
        "[create] TopicMisconfigured"
    )
    assert city.message == "min.insync.replicas is 1"
    assert city.state.streams == {}
    assert city.create("nyc/a", 3) == "", "it may be asked for again, otherwise"


def test_describe(city: World) -> None:
    city.find_scope("sfo")
    for stream in ("sfo/a", "nyc/b", "nyc/a"):
        city.create(stream, 1)
    city.created("nyc/b", 0)
    city.created("sfo/a", 0)
    assert city.describe() == "nyc/a CREATING 0, nyc/b ACTIVE 1, sfo/a ACTIVE 1"
    assert city.describe(scope="nyc") == "nyc/a CREATING 0, nyc/b ACTIVE 1"
    assert city.describe(scope="ny") == "none"
    assert city.describe(stream="nyc/b") == "nyc/b ACTIVE 1"
    assert city.describe(stream="nyc/a") == "NotReady"
    assert city.describe(stream="nyc/c") == "UnknownStream"


def test_describe_has_the_rejected_records_and_the_positions_in_journals(world: World) -> None:
    world.begin("A")
    world.touch("A")
    world.write("A", "w1", count=2)
    world.write("A", "w1", count=3, epoch=9, partition=1)
    world.write("B", "w2", count=4, partition=1)
    world.turn()
    world.describe(stream="nyc/a")
    (info,) = world.result.streams
    assert info.rejected == {"wrong_stream_epoch": 3, "unknown_transaction": 4}
    assert info.journal == {"0": 2, "1": 7}
    assert (info.stream_epoch, info.reference_epoch, dict(info.settings)) == (0, 0, {})
    assert info.segments == world.state.streams["nyc/a"].segments
    world.create("nyc/b")
    world.created("nyc/b", 0, 0)
    world.describe(stream="nyc/b")
    (info,) = world.result.streams
    assert (info.rejected, info.journal) == ({}, {})
