"""Late and repeated copies of commands that set something: a table of all of these commands.

A row has what exists before, a command, and what other clients, or the controller itself, change after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.authorize import ADD, RULES, TAKE, Right
from anabranch.core.decisions.decide import decide_due
from anabranch.core.decisions.scale import (
    duplicate_active,
    partitions_added,
    partitions_refused,
    start,
)
from anabranch.core.decisions.streams import (
    forget_refused,
    give_up_stream,
    recovery_refused,
    stream_changed,
    stream_created,
    stream_forgotten,
    stream_recovered,
    stream_refused,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.segments import even_plan
from anabranch.core.stream_settings import BASE, TABLE
from anabranch.errors import AnabranchError, InvalidArgument
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.messages import SETS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from tests.core.harness import World
from tests.core.test_ownership import INPUTS

A, X, T, P, LANE = "nyc/a", "nyc/x", "nyc/t", "nyc/p", "etl"
ENTRIES = (k.Entry.ROUND, k.Entry.AUDIT, k.Entry.CHANGED)  # of rows that tell of the command alone
# These commands set nothing, or something that no other command sets back.
OTHERS = {
    r.FindScope, r.AdoptScope, r.DescribeStreams, r.Begin, r.OneShot, r.PrepareEvents, r.Touch, r.Register,
    r.Heartbeat, r.Commit, r.Abort, r.Force, r.GetState, r.Resolve, r.ListTransactions, r.ListOpen,
    r.LabelWriter, r.LockReads, r.ListLocks, r.ListRuns, r.ListTableLocks, r.TakeTasks, r.ReleaseTasks,
    r.DescribeProcessors, r.ListCommands, r.SafeTime, r.ListSeries, r.ListLanes, r.ListGrants, r.ListAudit,
    r.SetFeatureLevel, r.DescribeLeader, r.TakeTurn,
}  # fmt: skip


def created(turn: Turn, stream: str) -> None:
    """Report that the topics exist."""
    count = turn.state.streams[stream].segment_count
    stream_created(turn, stream, dict.fromkeys(range(count), 0), ("1", "2", "3"))


# What the shell reports when its work on topics is done, or refused.
WORKS: dict[str, tuple[Callable[[Turn, str], object], Callable[..., object]]] = {
    "CREATING": (created, stream_refused),
    "FORGETTING": (stream_forgotten, forget_refused),
    "RECOVERING": (stream_recovered, recovery_refused),
}


class Copies(World):
    """A control partition whose topics are made at once, or later, or not at all."""

    follows = True
    refuses: AnabranchError | None = None

    def act(self, what: Callable[[Turn], object]) -> None:
        """The controller does something by itself."""
        turn = self.new_turn()
        what(turn)
        self.close(turn)

    def _follow(self, turn: Turn, row: r.StreamRow) -> None:
        stream, error = row.stream, self.refuses
        if row.state in WORKS:
            done, refused = WORKS[row.state]
            if error is None:
                done(turn, stream)
            else:
                refused(turn, stream, error)
        elif row.change is not None:
            stream_changed(turn, stream, error)
        elif row.wanted_partitions > row.partitions:
            if error is None:
                partitions_added(turn, stream, row.wanted_partitions)
            else:
                partitions_refused(turn, stream, error)

    def say(self, asker: str, command: Any, seen: int | None) -> list[Any]:
        """The answers to a command whose sender has received this time; refusals as their names."""
        with self.by(ADMIN_LANE):
            turn = self.new_turn()
            turn.seen = seen
            self._decide(turn, decode(encode(command)), self.asker(asker))
            decide_due(turn, judge_silence=False)
            self.close(turn)
        answers = list(self.said)
        for row in list(self.state.streams.values()) * self.follows:
            self.act(partial(self._follow, row=row))
            answers += self.said
        mine = [result for to, result in answers if to.correlation_id == asker.encode()]
        return [x.code if isinstance(x, r.Refusal) else _without_time(x) for x in mine]

    @property
    def now(self) -> int:
        """The hybrid time of an answer."""
        return self.state.round.hybrid_time

    @property
    def things(self) -> dict[bytes, bytes]:
        """All rows, except those about the command itself."""
        skipped = {k.STATUS + bytes(16) + bytes((entry,)) for entry in ENTRIES}
        return {key: v for key, v in self.table.rows.items() if key[:18] not in skipped}


def _without_time(result: Any) -> Any:
    """An answer without the fields that depend on time."""
    if not isinstance(result, r.StreamList):
        return result
    return replace(result, streams=tuple(replace(one, oldest_snapshot=0) for one in result.streams))


Step = Any  # a command, or what the controller does


@dataclass
class Row:
    """``before``: what exists. ``command``: sent with a copy. ``after``: what others do then."""

    name: str
    before: Sequence[Step]
    command: Any
    after: Sequence[Step]
    extra: dict[bytes, Any] = field(default_factory=dict)


def create(stream: str = X, **settings: str) -> r.CreateStream:
    return r.CreateStream(stream, 2, settings)


def alter(stream: str, ms: str) -> r.AlterStream:
    return r.AlterStream(stream, {"retention.ms": ms}, ())


def grant(rights: int) -> r.SetGrant:
    return r.SetGrant(LANE, "nyc/*", int(rights))


def lane(blocked: bool, **quotas: int) -> r.SetLane:
    return r.SetLane(LANE, blocked, ("c", "r"), quotas)


def lose(turn: Turn) -> None:
    give_up_stream(turn, X, "its topic is away")


def autoscale(turn: Turn) -> None:
    row = turn.state.streams[A]
    start(turn, row, *even_plan(row.segments, 1), to=None)


def roll(turn: Turn) -> None:
    """A rolling commit opens the same segments in a later epoch."""
    row = turn.state.streams[A]
    epoch = row.stream_epoch + 2
    turn.put(
        k.stream_key(A),
        replace(row, stream_epoch=epoch, segments=duplicate_active(row, epoch)),
    )


def hand_plan(world: World) -> r.Scale:
    """Split the first segment of nyc/a."""
    first = world.state.streams[A].segments[0]
    middle = (first.low + first.high) // 2
    ranges = (r.KeyRange(first.low, middle), r.KeyRange(middle, first.high))
    return r.Scale(A, 0, (first.segment_id,), ranges)


PROCESSOR = r.CreateProcessor(P, 4, INPUTS)
Q = "nyc/q"
COPY = r.CopyProcessor(Q, P, 0, 0, "copying")
MORE = r.ProcessorInput("nyc/more", "", 0, 0)
STORES = r.CreateProcessor(P, 4, INPUTS, ("counts",))
PUBLISHED = r.BaseRow(1 << 40, b"b" * 16, 5, 0, 0, 0)
TABLES = (create(T, **{TABLE: "true"}), create(f"{T}-base", **{BASE: T}))
ROWS = [
    Row("a creation", [], create(), [r.DeleteStream(X)]),
    Row("a deletion", [create()], r.DeleteStream(X), [create()]),
    Row("a deletion, done already", [create(), r.DeleteStream(X)], r.DeleteStream(X), [create()]),
    Row("a lost one forgotten", [create(), lose], r.ForgetStream(X), [create(), lose]),
    Row("taken back", [create(), lose], r.RecoverStream(X), [lose]),
    Row("settings", [], alter(A, "1000000"), [alter(A, "2000000")]),
    Row("settings of the row alone", [], r.AlterStream(A, {"scale.cooldown.ms": "90000"}, ()),
        [r.AlterStream(A, {}, ("scale.cooldown.ms",))]),
    Row("settings of one before", [create()], alter(X, "1000000"), [r.DeleteStream(X), create()]),
    Row("a truncation", [create()], r.TruncateStream(X, 1), [r.DeleteStream(X), create()]),
    Row("a base", TABLES, r.PublishBase(T, PUBLISHED.timestamp, PUBLISHED.txn_id),
        [r.AlterStream(T, {"segment.bytes": "2000000"}, ())], {k.base_key(T): PUBLISHED}),
    Row("a scaling", [], r.Scale(A, 4, (), ()), [r.Scale(A, 2, (), ())]),
    Row("a scaling that changes nothing", [], r.Scale(A, 2, (), ()), [r.Scale(A, 4, (), ())]),
    Row("a scaling, then the controller's own", [], r.Scale(A, 4, (), ()), [autoscale]),
    Row("a scaling of one before", [create()], r.Scale(X, 4, (), ()), [r.DeleteStream(X), create()]),
    Row("a scaling by hand", [], hand_plan, [r.Scale(A, 1, (), ()), r.Scale(A, 2, (), ())]),
    Row("a lane, unblocked", [lane(True)], lane(False), [lane(True)]),
    Row("a lane, blocked", [lane(False)], lane(True), [lane(False)]),
    Row("quotas", [lane(False)], lane(False, open=5), [lane(False, open=1)]),
    Row("a right given", [lane(False)], grant(ADD | Right.WRITE), [grant(TAKE | Right.WRITE)]),
    Row("a right taken", [lane(False), grant(4)], grant(TAKE | 4), [grant(ADD | 4)]),
    Row("rights set", [lane(False)], grant(5), [grant(1)]),
    Row("a processor", [], PROCESSOR, [r.DeleteProcessor(P, 0)]),
    Row("stores", [PROCESSOR], STORES, [r.DeleteProcessor(P, 0), PROCESSOR]),
    Row("a processor deleted", [PROCESSOR], r.DeleteProcessor(P, 0), [PROCESSOR]),
    Row("a processor reset", [PROCESSOR], r.ResetProcessor(P, 0, (), True),
        [r.DeleteProcessor(P, 1), PROCESSOR]),
    Row("a copy begun", [PROCESSOR], COPY, [r.CopyProcessor(Q, P, 0, 0, ""), r.DeleteProcessor(Q, 1)]),
    Row("a copy ended", [PROCESSOR, COPY], r.CopyProcessor(Q, P, 0, 0, ""), [r.DeleteProcessor(Q, 1)]),
    Row("an input more", [PROCESSOR], r.AlterProcessor(P, 0, (), (MORE,)),
        [r.AlterProcessor(P, 1, (MORE.stream,), ())]),
    Row("a series", [r.SetSeries("nyc", "s", None, 3)], r.SetSeries("nyc", "s", 3, 5),
        [r.SetSeries("nyc", "s", 5, 3)]),
    Row("a series that is there already", [r.SetSeries("nyc", "s", None, 5)],
        r.SetSeries("nyc", "s", 3, 5), [r.SetSeries("nyc", "s", 5, 3)]),
    Row("a series taken away", [r.SetSeries("nyc", "s", None, 3)], r.SetSeries("nyc", "s", 3, -1),
        [r.SetSeries("nyc", "s", None, 3)]),
]  # fmt: skip


def played(row: Row) -> tuple[Copies, Any, int]:
    """What exists before, the command, and the time that its sender has received."""
    world = Copies()
    world.find_scope("nyc")
    world.log_rows([(k.FEATURE_KEY, r.FeatureRow(3, 1))])
    for number, step in enumerate([create(A), *row.before]):
        carry_out(world, f"before {number}", step)
    world.log_rows(list(row.extra.items()))
    return world, row.command(world) if callable(row.command) else row.command, world.now


def carry_out(world: Copies, asker: str, step: Step) -> None:
    if callable(step):
        world.act(step)
        return
    (answer,) = world.say(asker, step, world.now)
    assert not isinstance(answer, str), f"{asker}: {answer}"


def test_each_command_that_sets_something_has_a_row() -> None:
    assert not OTHERS & set(SETS)
    assert OTHERS | set(SETS) == set(RULES)
    commands = {type(played(row)[1]) for row in ROWS}
    assert commands == set(SETS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("anew", [False, True], ids=["one leader", "a new leader"])
def test_a_late_copy_changes_nothing(row: Row, anew: bool) -> None:
    world, command, told = played(row)
    (first,) = world.say("first", command, told)
    assert not isinstance(first, str), first
    for number, step in enumerate(row.after):
        carry_out(world, f"after {number}", step)
    if anew:
        world.lead(keep_table=False)
    before = world.things
    assert world.say("first", command, told) == ["NotReady"]
    assert world.things == before
    told_now = world.now
    answers = world.say("again", command, told_now)
    assert answers != ["NotReady"], (
        "a new command with the time of the refusal is not refused for the same reason"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_copy_at_once_has_the_same_answer(row: Row) -> None:
    world, command, told = played(row)
    answers = world.say("first", command, told)
    before = world.things
    assert world.say("first", command, told) == answers
    assert world.things == before


WORK = [
    row
    for row in ROWS
    if row.name in ("a creation", "a deletion", "settings", "a scaling", "a scaling by hand")
]
TAKEN_BACK = [row for row in ROWS if row.name == "taken back"]


@pytest.mark.parametrize("row", WORK + TAKEN_BACK, ids=lambda row: row.name)
def test_a_copy_of_what_the_brokers_refused_is_tried_again(row: Row) -> None:
    """The refusal may be lost, so a copy must not be answered as if the command had been carried out."""
    world, command, told = played(row)
    world.refuses = InvalidArgument("so say the brokers")
    for _ in range(2):
        assert world.say("first", command, told) == ["InvalidArgument"]
    world.refuses = None
    (answer,) = world.say("first", command, told)
    assert isinstance(answer, r.StreamList)


def test_a_copy_of_a_refused_scaling_is_not_answered_as_done() -> None:
    """A rolling commit in between gives the segments, which are as they were, other ids."""
    world, command, told = played(next(row for row in ROWS if row.name == "a scaling by hand"))
    world.refuses = InvalidArgument("so say the brokers")
    world.say("first", command, told)
    world.refuses = None
    world.act(roll)
    assert world.say("first", command, told) == ["InvalidArgument"]


@pytest.mark.parametrize("row", WORK, ids=lambda row: row.name)
def test_a_copy_that_comes_during_the_work_waits_for_the_same_answer(row: Row) -> None:
    world, command, told = played(row)
    world.follows = False
    for _ in range(2):
        assert world.say("first", command, told) == []
    assert world.say("other", command, world.now) == ["NotReady"]
    world.follows = True
    (answer,) = world.say("first", command, told)
    assert isinstance(answer, r.StreamList)


def test_a_command_without_its_senders_time_is_not_judged() -> None:
    world, command, _ = played(next(row for row in ROWS if row.name == "a right given"))
    world.say("first", command, None)
    world.say("other", grant(TAKE | Right.WRITE), None)
    assert world.state.grants[LANE]["nyc/*"] == 0
    world.say("first", command, None)
    assert world.state.grants[LANE]["nyc/*"] == Right.WRITE
