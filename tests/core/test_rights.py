"""Each command by each lane: it is carried out, or it is `NotAuthorized` and nothing changed.

`World` checks, byte for byte, that what is refused changes nothing. Commands that come with a token are
`tests/core/test_owners.py`'s.
"""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from anabranch.core import authorize
from anabranch.core import rows as k
from anabranch.core.authorize import ALL, CREATORS, RULES, Right
from anabranch.core.decisions import decide
from anabranch.core.decisions.streams import give_up_stream
from anabranch.errors import InvariantViolation
from anabranch.protocol.ids import make_marked_id
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES
from tests.core.harness import World, event, nyc
from tests.core.labels import MINUTE, SECRET

REFUSED = "NotAuthorized"
TAKEN = "NameTaken"
UNKNOWN = "UnknownTransaction"  # or one that this lane may not see: it reads the same
SINGLE = {str(right.name).lower().replace("_", "-"): right for right in Right}
# lane -> what it has, and where; `removed` owns what it did before its grant was taken away
LANES: dict[str, tuple[str, int]] = {
    "own": ("nyc/*", CREATORS & ~Right.OPERATE),
    "none": ("nyc/*", 0),
    "reader": ("nyc/*", Right.DESCRIBE | Right.SAFE_TIME),
    "stream": ("nyc/a", ALL),
    "removed": ("nyc/*", Right.WRITE),
    **{f"{name}-only": ("*", right) for name, right in SINGLE.items()},
}  # fmt: skip
COLUMNS = (*LANES, "open", "admin")


@cache
def pickled() -> bytes:
    """`own` and `removed` each own a transaction, a one-shot, a committed and an open name, and a series."""
    world = nyc("nyc/a", "nyc/lost")
    for lane, (pattern, rights) in LANES.items():
        world.grant(lane, pattern, rights)
    world.log_rows([(k.FEATURE_KEY, r.FeatureRow(3, 1))])
    world.ask("make", r.CreateProcessor("nyc/a", 1, INPUTS))
    for lane in ("own", "removed"):
        with world.by(lane):
            world.begin(lane, name=f"open-{lane}")
            world.one_shot(f"shot-{lane}", event(), name=f"done-{lane}")
            world.begin(f"series-{lane}")
            world.commit(f"series-{lane}", name=f"s-{lane}", number=1)
            world.turn()
    world.grant("removed", "nyc/*", 0)
    turn = world.new_turn()
    give_up_stream(turn, "nyc/lost", "gone")
    world.close(turn)
    return pickle.dumps(world)


def made() -> World:
    """That world, for one test: thousands are asked for, and a copy takes a tenth of the time."""
    world: World = pickle.loads(pickled())
    return world


def prepare_shot(world: World, stream: str) -> r.PrepareEvents:
    prepare = r.Prepare(b"", b"")
    events = (event(stream),) if stream else ()
    return r.PrepareEvents(world.id("new"), "nyc", None, events, SECRET, prepare)


def shot(world: World, label: str, stream: str = "nyc/a", name: str | None = None) -> r.OneShot:
    return r.OneShot(world.id(label), "nyc", name, (event(stream),))


# what is asked, the lanes that may (all others are refused)
Row = tuple[Callable[[World], Any], str]
EVERYBODY = " ".join(COLUMNS)
ADMINS = "admin-only admin"
OPERATORS = "operate-only admin"
DESCRIBERS = "own reader stream describe-only open admin"
WRITERS = "own write-only open admin"
PROCESSORS = "own process-only open admin"
INPUTS = (r.ProcessorInput("nyc/a", "", 0, 0),)
CONSUMED = r.Consumed("nyc/a", bytes(16), (r.TaskStep((0,), 1, (r.TaskPosition(0, 1, 0),)),))
MATRIX: dict[str, Row] = {
    "find a scope": (lambda w: r.FindScope("nyc", False), DESCRIBERS),
    "find no scope": (lambda w: r.FindScope("lax", False), "describe-only open admin"),
    "make a scope": (lambda w: r.FindScope("lax", True), "create-only open admin"),
    "make a scope again": (lambda w: r.FindScope("nyc", True), f"{DESCRIBERS} create-only"),
    "adopt": (lambda w: r.AdoptScope("lax", "own"), EVERYBODY),  # by the control topic alone
    "create": (lambda w: r.CreateStream("nyc/b", 1, {}), "own create-only open admin"),
    "create again": (lambda w: r.CreateStream("nyc/a", 2, {}), "own stream create-only open admin"),
    "adopt a topic": (lambda w: r.CreateStream("nyc/a", 1, {}, adopt=True), "admin"),
    "describe": (lambda w: r.DescribeStreams(None, "nyc/a"), DESCRIBERS),
    "describe another": (lambda w: r.DescribeStreams(None, "nyc/lost"), "own reader describe-only open admin"),
    "describe nothing": (lambda w: r.DescribeStreams(None, "nyc/no"), "own reader describe-only open admin"),
    "describe a scope": (lambda w: r.DescribeStreams("nyc", None), DESCRIBERS),
    "describe all": (lambda w: r.DescribeStreams(None, None), EVERYBODY),
    "forget": (lambda w: r.ForgetStream("nyc/lost"), OPERATORS),
    "forget nothing": (lambda w: r.ForgetStream("nyc/no"), OPERATORS),
    "delete a stream": (lambda w: r.DeleteStream("nyc/lost"), OPERATORS),
    "alter": (lambda w: r.AlterStream("nyc/lost", {}, ()), OPERATORS),
    "truncate": (lambda w: r.TruncateStream("nyc/lost", 0), OPERATORS),
    "publish a base": (lambda w: r.PublishBase("nyc/lost", 0, bytes(16)), OPERATORS),
    "recover": (lambda w: r.RecoverStream("nyc/lost"), OPERATORS),
    "scale": (lambda w: r.Scale("nyc/a", 4, (), ()), "own stream scale-only open admin"),
    "scale nothing": (lambda w: r.Scale("nyc/no", 4, (), ()), "own scale-only open admin"),
    "begin": (lambda w: w.beginning("new"), f"{WRITERS} stream"),
    "begin in no scope": (lambda w: w.beginning("new", scope="lax"), "write-only open admin"),
    "begin again": (lambda w: w.beginning("own", name="open-own"), "own"),
    "begin again without a grant": (lambda w: w.beginning("removed", name="open-removed"), "removed"),
    "supersede": (lambda w: w.beginning("new", name="open-own"), "own"),
    "begin what is committed": (lambda w: w.beginning("new", name="done-own"), "own"),
    "one-shot": (lambda w: shot(w, "new"), f"{WRITERS} stream"),
    "prepared in one command": (lambda w: prepare_shot(w, "nyc/a"), f"{WRITERS} stream"),
    "the same, of no stream": (lambda w: prepare_shot(w, ""), f"{WRITERS} stream"),
    "the same, of another stream": (lambda w: prepare_shot(w, "nyc/lost"), WRITERS),
    "one-shot of another stream": (lambda w: shot(w, "new", "nyc/lost"), WRITERS),
    "one-shot of no stream": (lambda w: shot(w, "new", "nyc/no"), WRITERS),
    "one-shot again": (lambda w: shot(w, "shot-own", name="done-own"), "own"),
    "one-shot again without a grant": (lambda w: shot(w, "shot-removed", name="done-removed"), "removed"),
    "begin under a free name": (lambda w: w.beginning("new", name="free"), WRITERS),
    "one-shot under a free name": (lambda w: shot(w, "new", name="free"), WRITERS),
    "one-shot, superseding": (lambda w: shot(w, "new", name="open-own"), "own"),
    "one-shot of a committed name": (lambda w: shot(w, "new", name="done-own"), "own"),
    "get state": (lambda w: r.GetState(w.id("own")), f"own {OPERATORS}"),
    "get state without a grant": (lambda w: r.GetState(w.id("removed")), f"removed {OPERATORS}"),
    "resolve": (lambda w: r.Resolve(w.id("own"), "nyc"), f"own {OPERATORS}"),
    "resolve without a grant": (lambda w: r.Resolve(w.id("shot-removed"), "nyc"), f"removed {OPERATORS}"),
    "resolve nothing": (lambda w: r.Resolve(w.id("new"), "nyc"), f"{WRITERS} stream"),
    "resolve of no scope": (lambda w: r.Resolve(w.id("new"), ""), "write-only open admin"),
    "list": (lambda w: r.ListTransactions("nyc", True, 9), DESCRIBERS),
    "list locks": (lambda w: r.ListTableLocks("nyc", 9), DESCRIBERS),
    "list all locks": (lambda w: r.ListTableLocks(None, 9), EVERYBODY),
    "list open": (lambda w: r.ListOpen("nyc", None, 9), DESCRIBERS),
    "list all open": (lambda w: r.ListOpen(None, None, 9), EVERYBODY),
    "tell one": (lambda w: r.ListOpen("nyc", w.id("own"), 9), f"own {OPERATORS}"),
    "list all": (lambda w: r.ListTransactions(None, True, 9), EVERYBODY),
    "turn": (lambda w: r.TakeTurn(w.id("new"), None, "nyc/a", 1, (), 1), "own stream open admin"),
    "give a turn up": (lambda w: r.TakeTurn(w.id("new"), None, "nyc/a", 1, (), 0), "own stream open admin"),
    "safe time": (lambda w: r.SafeTime("nyc", None), "own reader stream safe-time-only open admin"),
    "list series": (lambda w: r.ListSeries("nyc", None, None), DESCRIBERS),
    "set a series": (lambda w: r.SetSeries("nyc", "s", None, 1), "own series-only open admin"),
    "set another's series": (lambda w: r.SetSeries("nyc", "s-own", 1, 2), "own series-only open admin"),
    "make a processor": (lambda w: r.CreateProcessor("nyc/p", 1, INPUTS), "own open admin"),
    "make a processor of another's stream": (
        lambda w: r.CreateProcessor("nyc/a", 1, (*INPUTS, r.ProcessorInput("lax/a", "", 0, 0))),
        "open admin",
    ),
    "make a processor of a topic": (
        lambda w: r.CreateProcessor("nyc/p", 1, (r.ProcessorInput("topic:t", "", 0, 0),)),
        PROCESSORS,
    ),
    "make a processor again": (lambda w: r.CreateProcessor("nyc/a", 1, INPUTS), "own open admin stream"),
    "take": (lambda w: r.TakeTasks("nyc/a", bytes(16), "me", (0,), (0,)), "own open admin stream"),
    "take of nothing": (lambda w: r.TakeTasks("nyc/no", bytes(16), "me", (0,), (0,)), PROCESSORS),
    "release": (lambda w: r.ReleaseTasks("nyc/a", bytes(16), (0,)), f"{PROCESSORS} stream"),
    "alter a processor": (lambda w: r.AlterProcessor("nyc/a", 0, (), INPUTS), "own open admin stream"),
    "copy a processor": (
        lambda w: r.CopyProcessor("nyc/copy", "nyc/a", 0, 0, "copying"), "own open admin",
    ),
    "reset": (lambda w: r.ResetProcessor("nyc/a", 0, (), True), f"{PROCESSORS} stream"),
    "delete": (lambda w: r.DeleteProcessor("nyc/a", 0), f"{PROCESSORS} stream"),
    "make a processor's state": (
        lambda w: r.CreateStream("nyc/a.state", 1, {"processor": "nyc/a"}),
        f"{PROCESSORS} stream",
    ),
    "describe a processor": (lambda w: r.DescribeProcessors("nyc", "nyc/a"), DESCRIBERS),
    "describe no processor": (
        lambda w: r.DescribeProcessors("nyc", "nyc/no"),
        "own reader describe-only open admin",
    ),
    "describe processors": (lambda w: r.DescribeProcessors("nyc"), "own reader describe-only open admin"),
    "one-shot that moves positions": (
        lambda w: (
            w.ask("take", r.TakeTasks("nyc/a", bytes(16), "me", (0,), (0,)), lane="admin")
            and r.OneShot(make_marked_id(0, w.wall_ms, 1), "nyc", None, (), CONSUMED)
        ),
        f"{PROCESSORS} stream",
    ),
    "begin what moves positions": (
        lambda w: replace(w.beginning("new"), fencing_hash=bytes(16)),
        f"{WRITERS} process-only stream",
    ),
    "list commands": (lambda w: r.ListCommands(), OPERATORS),
    "describe the leader": (lambda w: r.DescribeLeader(), OPERATORS),
    "raise the feature level": (lambda w: r.SetFeatureLevel(1), OPERATORS),
    "set a lane": (lambda w: r.SetLane("new", False, ("1", "2"), {}), ADMINS),
    "list lanes": (lambda w: r.ListLanes(), ADMINS),
    "grant": (lambda w: r.SetGrant("none", "nyc/*", 4), ADMINS),
    "list grants": (lambda w: r.ListGrants(), ADMINS),
    "list audit": (lambda w: r.ListAudit(None), ADMINS),
}  # fmt: skip
BY_TOKEN = {
    r.Touch, r.Register, r.LabelWriter, r.ListRuns, r.LockReads, r.ListLocks, r.Heartbeat, r.Commit, r.Abort,
    r.Force,
}  # fmt: skip


def verdicts(name: str) -> dict[str, bool]:
    """lane -> whether the command of this row is not refused for a right.

    A world that refused is as it was, and is asked again.
    """
    make, _ = MATRIX[name]
    found: dict[str, bool] = {}
    world, carried_out = made(), False
    for lane in COLUMNS:
        if carried_out:
            world = made()
        said = world.ask(name, make(world), lane=lane)
        begins = {REFUSED: f"lane {lane!r} has no right ", UNKNOWN: "there is no such "}
        begins[TAKEN] = "another lane has the name "
        found[lane] = carried_out = said not in begins
        if not carried_out:
            assert world.message.startswith(begins[said])
            assert world.round.rows.keys() == {k.ROUND_KEY}
    return found


def test_no_lane_but_those_of_the_matrix_may_send_a_command() -> None:
    assert {name: verdicts(name) for name in MATRIX} == {
        name: {lane: lane in may.split() for lane in COLUMNS} for name, (_, may) in MATRIX.items()
    }


def test_every_command_is_in_the_matrix() -> None:
    commands = {cls for number, cls in TYPES.items() if number < 64}
    commands -= {r.Reply, r.Receipt, r.Consumed}
    # Messages between leaders (docs/inside/across.md): no client sends them.
    commands -= {r.Enlist, r.Enlisted, r.AskVote, r.Vote, r.Decide, r.Done, r.AskDecision}
    world = made()
    assert {type(make(world)) for make, _ in MATRIX.values()} | BY_TOKEN == commands
    assert RULES.keys() == commands


@pytest.mark.parametrize(
    "command", [c for c in RULES if c not in BY_TOKEN | {r.AdoptScope, r.GetState, r.Resolve}]
)
def test_without_its_rule_a_row_of_the_command_is_wrong(command: type) -> None:
    """The planted bug: nothing is judged before the decision."""
    world = made()
    rows = [name for name, (make, _) in MATRIX.items() if type(make(world)) is command]
    with patch.dict(RULES, {command: lambda *_: None}):
        assert any(
            verdicts(name) != {lane: lane in MATRIX[name][1].split() for lane in COLUMNS}
            for name in rows
        )


def test_names_are_not_kept_however_long_they_are() -> None:
    """Whoever may send a command, without any right, chooses what is asked about."""
    world = made()
    for number in range(20):
        what = f"nyc/{number}-" + "x" * 10_000
        for command in (r.DescribeStreams(None, what), r.DescribeStreams(what[4:], None)):
            assert world.ask("long", command, lane="nobody") == "NotAuthorized"
    kept = sum(len(what) for _, what in world.state.rights)
    assert kept < 1_000


def test_a_command_without_a_rule_does_not_import() -> None:
    rules = {command: rule for command, rule in RULES.items() if command is not r.Scale}
    try:
        with (
            patch.object(authorize, "RULES", rules),
            pytest.raises(InvariantViolation, match="who may send it"),
        ):
            importlib.reload(decide)
    finally:
        importlib.reload(decide)


# What is there and what is not, as pairs of rows with the same arguments but for the names.
PAIRS = [
    ("find a scope", "find no scope"),
    ("make a scope", "make a scope again"),
    ("create", "create again"),
    ("describe another", "describe nothing"),
    ("forget", "forget nothing"),
    ("scale", "scale nothing"),
    ("begin", "begin in no scope"),
    ("begin", "begin again"),
    ("begin", "supersede"),
    ("begin", "begin what is committed"),
    ("one-shot of another stream", "one-shot of no stream"),
    ("one-shot", "one-shot again"),
    ("one-shot", "one-shot, superseding"),
    ("one-shot", "one-shot of a committed name"),
    ("resolve", "resolve nothing"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("lane", ["none", "reader", "stream"])
def test_a_refusal_is_the_same_whether_the_stream_exists_or_not(
    pair: tuple[str, str], lane: str
) -> None:
    said = []
    for name in pair:
        world = made()
        if world.ask(name, MATRIX[name][0](world), lane=lane) == REFUSED:
            said.append(re.sub(r"lax|nyc", "S", re.sub(r"/(a|b|no|lost)\b", "/X", world.message)))
    assert len(set(said)) <= 1
    assert lane != "none" or len(said) == 2


def test_a_lane_that_may_create_and_not_see_gets_no_settings_of_what_exists() -> None:
    """Its own streams it may create again."""
    world, told = made(), []
    for segments, settings in ((2, {}), (3, {}), (2, {"retention.ms": "12345678"})):
        command = r.CreateStream("nyc/a", segments, settings)
        assert world.ask("create", command, lane="create-only") == "StreamExists"
        told.append(world.message)
    assert len(set(told)) == 1
    other = r.CreateStream("nyc/a", 3, {})
    assert world.ask("create", other, lane="own") == "StreamExists"
    assert "segments are 2" in world.message
    with world.by("create-only"):
        world.create("nyc/mine")
        world.created("nyc/mine", 0, 0)
        assert world.create("nyc/mine") == "nyc/mine ACTIVE 2"


# -- patterns ------------------------------------------------------------------------------------

# the grants of a lane, and what it may write to then
PATTERNS: list[tuple[dict[str, int], str]] = [
    ({}, ""),
    ({"nyc/a": 4}, "nyc/a"),
    ({"nyc/*": 4}, "nyc/a nyc/b"),
    ({"*": 4}, "nyc/a nyc/b sfo/a"),
    ({"nyc/b": 4, "sfo/a": 4}, "nyc/b sfo/a"),
    ({"nyc/*": 3, "nyc/b": 4}, "nyc/b"),
    ({"*": 4, "nyc/*": 0, "nyc/a": 0}, "nyc/a nyc/b sfo/a"),  # rights add up: none takes away
    ({"ny/*": 4, "nyc2/*": 4, "sfo/aa": 4}, ""),
]


@pytest.mark.parametrize(("grants", "may"), PATTERNS)
def test_patterns(grants: dict[str, int], may: str) -> None:
    world = nyc("nyc/a", "nyc/b")
    world.find_scope("sfo")
    world.create("sfo/a")
    world.created("sfo/a", 0, 0)
    for again in range(2):  # as they were granted, and as a successor reads them
        found = []
        for stream in ("nyc/a", "nyc/b", "sfo/a"):
            with world.by("etl"):
                label = f"before {stream} {again}"
                assert world.one_shot(label, event(stream), scope=stream[:3]) == REFUSED
        for pattern, rights in grants.items():
            world.grant("etl", pattern, rights)
        for stream in ("nyc/a", "nyc/b", "sfo/a"):
            with world.by("etl"):
                said = world.one_shot(f"{stream} {again}", event(stream), scope=stream[:3])
            found += [stream] if said != REFUSED else []
        assert " ".join(found) == may
        world.lead(keep_table=False)
        for pattern in grants:
            world.grant("etl", pattern, 0)


def test_one_event_without_the_right_refuses_a_one_shot_whole() -> None:
    world = nyc("nyc/a", "nyc/b")
    world.grant("etl", "nyc/a", Right.WRITE)
    with world.by("etl"):
        assert world.one_shot("A", event("nyc/a"), event("nyc/b")) == REFUSED
        assert "on nyc/b" in world.message
        assert world.one_shot("A", event("nyc/a"), event("nyc/a")) == "A COMMITTED 2"


def test_what_open_has_from_the_start_can_be_taken_away() -> None:
    world = nyc()
    assert world.one_shot("A", event()) == "A COMMITTED 1"
    world.grant(OPEN_LANE, "*", Right.DESCRIBE)
    assert world.one_shot("B", event()) == REFUSED
    assert world.one_shot("A", event()) == "A COMMITTED 1", "answered from its row"
    world.grant(OPEN_LANE, "*", 0)
    assert world.describe(stream="nyc/a") == REFUSED
    world.grant(OPEN_LANE, "nyc/a", Right.DESCRIBE)
    assert world.describe(stream="nyc/a") == "nyc/a ACTIVE 2"


def test_lists_show_what_the_lane_may_see() -> None:
    world = made()
    seen = {
        "own": "series-own shot-own own",
        "describe-only": "",
        "removed": "series-removed shot-removed removed",
    }
    for lane, labels in seen.items():
        world.ask("list", r.ListTransactions(None, True, 99), lane=lane)
        assert [world.label(o.txn_id) for o in world.result.transactions] == labels.split()
    for lane in ("operate-only", "admin"):
        world.ask("list", r.ListTransactions(None, True, 99), lane=lane)
        assert len(world.result.transactions) == 6
    for lane, streams in {"own": "nyc/a nyc/lost", "stream": "nyc/a", "none": ""}.items():
        world.ask("describe", r.DescribeStreams(None, None), lane=lane)
        assert [s.stream for s in world.result.streams] == streams.split()
    for lane, series in {
        "own": "s-removed s-own",  # own has the right series
        "reader": "",
        "admin": "s-removed s-own",
    }.items():
        world.ask("series", r.ListSeries("nyc", None, None), lane=lane)
        assert [s.series for s in world.result.series] == series.split()
    world.grant("removed", "nyc/*", Right.DESCRIBE)
    for name, found in {"s-removed": ["s-removed"], "s-own": [], "s-none": []}.items():
        world.ask("series", r.ListSeries("nyc", name, None), lane="removed")
        assert [s.series for s in world.result.series] == found


def test_a_repeated_begin_of_another_lane_is_refused_with_the_secret_too() -> None:
    world = made()
    command = r.Begin(world.id("own"), "nyc", "open-own", MINUTE, SECRET)
    assert world.ask("again", command, lane="admin") == REFUSED
    assert world.ask("again", command, lane="own") == "begun own"
