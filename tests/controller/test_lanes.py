"""Lanes: each is served in its turn, waits for its own trouble alone, and is judged by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.controller import lanes as lanes_module
from anabranch.controller import suspects
from anabranch.controller.controller import Controller
from anabranch.controller.lanes import Command
from anabranch.core.decisions import decide as entrance
from anabranch.core.decisions import transactions
from anabranch.core.decisions.turn import AT_END
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol import limits
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.testing.memory.table import MemoryStore
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    journal_topic,
    replies_topic,
    stream_topic,
)
from tests.controller.test_poison_commands import BAD, Killed, failing
from tests.controller.test_poison_commands import Play as Poisoned
from tests.core.labels import SECRET

A, B = "etl", "web"
STREAM = "nyc/a"


class Lanes(Poisoned):
    """A stream, and two lanes beside `open` and `admin`."""

    def __init__(self) -> None:
        super().__init__()
        for lane in (A, B):
            self.make(lane)

    def make(self, lane: str, blocked: bool = False) -> Any:
        answer = self.world.lane(self.leader, lane, blocked)
        grant = r.SetGrant(lane, "*", 127)
        self.world.ask(self.leader, grant, lane=ADMIN_LANE)
        return answer

    def send(self, lane: str, many: int = 1, command: Any = None) -> list[bytes]:
        return [self.world.send(command or self.shot(), lane=lane) for _ in range(many)]

    def fresh(self, **settings: Any) -> None:
        """Another process takes over, with an empty table."""
        self.deaths += 1
        self.leader = self.world.controller(f"c{self.deaths}", store=MemoryStore(), **settings)
        self.lead()

    def steps(self, many: int, seconds: float = 0.0) -> None:
        for _ in range(many):
            self.leader.step(0)
            self.world.clock.now += seconds / many

    def states(self, asked: list[bytes]) -> set[str]:
        answers = [self.world.reply(each) for each in asked]
        return {getattr(answer, "state", getattr(answer, "code", "none")) for answer in answers}

    def end(self, lane: str) -> int:
        place = TopicPartition(commands_topic(lane=lane), 0)
        return self.world.cluster.log("x").end_offsets([place], committed=False)[place]

    @property
    def events(self) -> int:
        return len(self.world.committed(TopicPartition(stream_topic(STREAM), 0)))

    def info(self, lane: str) -> r.LaneInfo:
        answer = self.world.ask(self.leader, r.ListLanes(), lane=ADMIN_LANE, steps=40)
        assert [info.lane for info in answer.lanes] == [ADMIN_LANE, A, OPEN_LANE, B]
        (found,) = (info for info in answer.lanes if info.lane == lane)
        assert isinstance(found, r.LaneInfo)
        return found

    def begin(self, lane: str, keepalive_ms: int = 5_000) -> tuple[bytes, bytes]:
        txn_id = self.world.txn_id()
        command = r.Begin(txn_id, "nyc", None, keepalive_ms, SECRET)
        return txn_id, self.world.ask(self.leader, command, lane=lane).token

    def is_open(self, txn_id: bytes) -> bool:
        return txn_id in self.leader.state.open


# -- turns --------------------------------------------------------------------------------------------


def test_each_lane_is_answered_in_its_own_topic_and_keeps_its_position() -> None:
    play = Lanes()
    asked = {
        lane: play.send(lane, n) for lane, n in ((A, 3), (B, 2), (OPEN_LANE, 4), (ADMIN_LANE, 1))
    }
    play.leader.step(0)
    assert [play.states(found) for found in asked.values()] == [{"COMMITTED"}] * 4
    assert play.leader.state.lane_positions == {A: 3, B: 2, ADMIN_LANE: 5}
    play.fresh()
    assert play.leader.state.lane_positions == {A: 3, B: 2, ADMIN_LANE: 5}
    more = play.send(A, 2) + play.send(B)
    play.steps(4)
    assert play.states(more) == {"COMMITTED"}
    assert play.events == 13
    assert play.info(A).position == play.info(A).end == 5


def test_a_flood_costs_its_own_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 40)
    monkeypatch.setattr(lanes_module, "QUANTUM", 20)
    play = Lanes()
    flood = play.send(A, 400)
    play.leader.step(0)
    for _ in range(5):
        asked = play.send(B) + play.send(OPEN_LANE) + play.send(ADMIN_LANE)
        play.leader.step(0)
        assert play.states(asked) == {"COMMITTED"}, "in the next round"
    assert play.world.reply(flood[-1]) is None
    play.leader.update_metrics()
    lag = play.leader.metrics.values["commands_lag"]
    assert (lag[A,] > 100, lag[B,], lag[OPEN_LANE,]) == (True, 0, 0)
    play.steps(10)
    assert play.states(flood) == {"COMMITTED"}
    assert play.events == 415


def test_room_for_a_flood_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 1)
    monkeypatch.setattr(limits, "QUEUED", limits.QUEUED._replace(value=40_000))
    play = Lanes()
    play.send(A, 500)
    lanes = play.leader._lanes
    for _ in range(10):
        play.send(B)
        play.steps(3)
        assert lanes.on[A].size <= lanes.share + 1_000 == 11_000
    assert len(lanes.on[B].queue) < 10


def test_room_for_all_floods_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has a batch beyond its share; they come in one after the other, and each has its turn."""
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 1)
    most = 40_000
    monkeypatch.setattr(limits, "QUEUED", limits.QUEUED._replace(value=most))
    play = Lanes()
    floods = [A, *(f"flood-{number}" for number in range(6))]
    for lane in floods[1:]:
        play.make(lane)
    lanes = play.leader._lanes
    (asked,) = play.send(B)
    for _ in range(4 * len(floods)):
        for lane in floods:
            play.send(lane, command=play.shot(value=bytes(30_000)))
        play.leader.step(0)
        assert sum(lane.size for lane in lanes.on.values()) < most + 31_000
    assert play.states([asked]) == {"COMMITTED"}
    served = {lane: play.leader.state.lane_positions.get(lane, 0) for lane in floods}
    assert min(served.values()) > 0, served


@pytest.mark.parametrize("size", [10, 30_000])
def test_a_batch_that_a_quota_holds_up_costs_its_own_lane(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others' commands go on, also those that are beyond their lane's share of the room."""
    monkeypatch.setattr(limits, "QUEUED", limits.QUEUED._replace(value=40_000))
    play = Lanes()
    slow = play.leader._lanes.on[A]
    slow.meter.rate, slow.meter.left = 10, 0.0
    flood = [(play.shot(), bytes((7, number)) * 8) for number in range(200)]
    headers = [((CORRELATION_HEADER, each), (REPLY_HEADER, bytes(4))) for _, each in flood]
    records = [
        Record(0, 0, b"", encode(shot), h) for (shot, _), h in zip(flood, headers, strict=True)
    ]
    play.world.cluster.produce(TopicPartition(commands_topic(lane=A), 0), records)
    play.steps(2)
    assert slow.size > 40_000
    for _ in range(3):
        asked = play.send(B, command=play.shot(value=bytes(size)))
        play.steps(3)
        assert play.states(asked) == {"COMMITTED"}
    assert play.leader.state.lane_positions.get(A, 0) == 0
    assert (slow.size > 40_000) == (size == 10)
    slow.meter.rate = 0
    play.steps(30)
    assert play.leader.state.lane_positions[A] == 200
    assert play.events == 203


def test_turns_go_by_what_commands_cost() -> None:
    """Nothing that is seen before: a command of few bytes may cost as much as 50 others."""
    play = Lanes()
    lanes = play.leader._lanes
    cost = {A: 500, B: 10}
    for lane, many in ((A, 200), (B, 10_000)):
        lanes.add(lanes.on[lane], [Command(i, None, b"", False, lane) for i in range(many)])
        lanes.on[lane].meter.rate = 0
    for _ in range(10):
        batch = lanes.next(700, lanes.active)
        allowed, decided = lanes.allowed(batch), []
        assert allowed == {A: lanes_module.QUANTUM, B: lanes_module.QUANTUM}
        for command in batch:
            if allowed[command.lane] > 0:
                command.charge = cost[command.lane]
                allowed[command.lane] -= command.charge
                decided.append(command)
        lanes.passed(decided)
    charged = {lane: lanes.on[lane].meter.used for lane in cost}
    assert 0.7 < charged[A] / charged[B] < 1.4


def test_turns_count_though_a_lane_ends_its_queue() -> None:
    play = Lanes()
    lanes, served = play.leader._lanes, {A: 0, B: 0}
    one, many = lanes.on[A], lanes.on[B]
    one.meter.rate = many.meter.rate = 0
    lanes.add(many, [Command(i, None, bytes(1_000), False, B) for i in range(100)])
    for i in range(40):
        if not one.queue:
            lanes.add(one, [Command(i, None, bytes(1_000), False, A)])
        (command,) = batch = lanes.next(1, lanes.active)
        served[command.lane] += 1
        lanes.passed(batch)
    assert served == {A: 20, B: 20}


def test_a_lane_gives_the_rest_of_a_dear_batch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another lane a flood of questions has a turn of work in a round; all are answered, in order."""
    play = Lanes()
    for _ in range(40):
        play.begin(B)
    monkeypatch.setattr(lanes_module, "QUANTUM", 200)
    flood = play.send(B, 50, r.ListOpen(None, None, 1_000))
    (asked,) = play.send(A)
    play.leader.step(0)
    assert play.states([asked]) == {"COMMITTED"}, "in the first round"
    done = [play.world.reply(each) is not None for each in flood]
    assert done == sorted(done, reverse=True)
    assert sum(done) < 10
    assert play.leader.state.lane_positions[B] == 40 + sum(done), "the rest is decided later"
    play.steps(5)
    assert all(play.world.reply(each) for each in flood), "alone it has the whole round"
    info = play.info(B)
    assert info.usage["work"] >= 50 * 40
    assert not info.usage["debt"]


def test_a_charge_beyond_the_quota_is_a_debt() -> None:
    """The command is carried out; the lane waits as long as its rate takes to pay it off."""
    play = Lanes()
    for _ in range(40):
        play.begin(B)
    meter = play.leader._lanes.on[B].meter
    meter.rate, meter.left = 20, 1.0
    first, second = play.send(B, 2, r.ListOpen(None, None, 1_000))
    play.steps(3)
    assert play.world.reply(first) is not None
    assert play.world.reply(second) is None
    assert 40 < meter.debt == play.info(B).usage["debt"]
    play.steps(3, seconds=meter.debt / 20)
    assert play.world.reply(second) is None
    play.steps(3, seconds=1)
    assert play.world.reply(second) is not None


def test_a_lane_in_debt_is_fetched_again_once_that_is_paid() -> None:
    """Nothing of it could be decided: what it sends meanwhile stays in its topic. Others are fetched."""
    play = Lanes()
    lanes = play.leader._lanes

    def fetched() -> set[str]:
        wanted = lanes.wanted()
        return {lane for lane in (A, B, OPEN_LANE) if lanes.on[lane].place in wanted}

    meter = lanes.on[A].meter
    meter.fill()
    meter.rate, meter.left = 1_000, -500.0
    asked = [play.send(lane)[0] for lane in (A, B)]
    assert fetched() == {B, OPEN_LANE}
    play.steps(3)
    assert play.states(asked) == {"none", "COMMITTED"}
    assert lanes.wait_s == pytest.approx(0.5), "the leader wakes up for it"
    play.steps(3, seconds=0.4)
    assert fetched() == {B, OPEN_LANE}
    play.world.clock.now += 0.2
    assert fetched() == {A, B, OPEN_LANE}
    play.steps(2)
    assert play.states(asked) == {"COMMITTED"}


def test_a_lane_and_its_streams_share_one_allowance() -> None:
    """Its commands come first: journals draw from what it has beyond half a second's worth, while others wait.

    A journal in which others write costs the owner's commands nothing.
    """
    play = Lanes()
    meter = play.leader._lanes.on[A].meter
    play.world.ask(play.leader, r.CreateStream("nyc/own", 1, {}), lane=A)
    journal = TopicPartition(journal_topic("nyc/own"), 0)
    batch = encode_batch([Record(0, 0, b"", b"", ())] * 1_000)

    def indexed(*asking: str) -> int:
        """Units of the journal's batch that a pass indexes, while these lanes ask. 0: it waits."""
        for lane in asking:
            play.send(lane)
        its = play.leader._intake.journals.meters.get("nyc/own")
        before = 0 if its is None else its.used
        play.world.cluster.produce_batch(journal, batch)
        play.leader.step(0)
        meter.fill()
        return play.leader._intake.journals.meters["nyc/own"].used - before

    half = meter.rate / 2
    meter.left = float(meter.rate)
    units = indexed(B)
    assert units > 10
    assert meter.left == meter.rate - units
    meter.left = half + 2
    assert indexed(B) == units
    assert meter.left == half, "its own work has the rest"
    assert indexed(B) == 0
    assert indexed(A) == 0, "another lane asked within the last second"
    assert 0 < play.leader._intake.journal_wait_s <= 1.0
    play.world.clock.now += 1.1
    meter.fill()
    meter.left, its_own = half, meter.used
    assert indexed(A) == units, "no other lane needs the leader"
    assert meter.left == half - (meter.used - its_own), "only the command was charged"
    assert play.info(A).usage["journals"] == 3 * units

    meter.rate, spent = 5, 0
    for _ in range(40):
        play.world.clock.now += 1.0
        spent += indexed(B)
    assert spent == pytest.approx(40 * 5, abs=2 * units), "what a turn takes beyond that is paid"


def test_batches_that_can_not_be_read_cost_their_own_lane() -> None:
    """Each is charged as much as it may unpack to. Once the lane is in debt, the rest of its fetch waits, too."""
    play = Lanes()
    bomb = encode_batch([Record(0, 0, b"", bytes(limits.BATCH.value + 1), ())], "zstd")
    for _ in range(40):
        play.world.cluster.produce_batch(TopicPartition(commands_topic(lane=A), 0), bomb)
    (asked,) = play.send(A)
    intake, meter = play.leader._intake, play.leader._lanes.on[A].meter
    for _ in range(3):
        before = intake.unreadable[A]
        (others,) = play.send(B)
        play.steps(2)
        assert play.states([others]) == {"COMMITTED"}
        assert intake.unreadable[A] - before in (9, 10)
        assert meter.debt > 0
        play.world.clock.now += 1.0
    for _ in range(3):
        play.steps(3, seconds=1.0)
    assert play.states([asked]) == {"COMMITTED"}
    assert intake.unreadable == {A: 40}


LISTS = (
    r.ListTransactions(None, True, 10, None),
    r.DescribeStreams(None, None),
)


@pytest.mark.parametrize("command", LISTS)
def test_long_lists_cost_their_own_lane(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that may see streams only asks for lists: little to send, and many rows to look at."""
    play = Lanes()
    for number in range(20):
        play.world.stream(play.leader, f"nyc/{number}", 1)
        _, token = play.begin(B)
        play.world.ask(play.leader, r.Commit(token, (), (), None, 1_000, None), lane=B)
    monkeypatch.setattr(limits, "ROUND_WORK", limits.ROUND_WORK._replace(value=5 * 20))
    play.world.ask(play.leader, r.SetGrant(A, "*", 0), lane=ADMIN_LANE)
    play.world.ask(play.leader, r.SetGrant(A, "nyc/*", 1), lane=ADMIN_LANE)
    flood = play.send(A, 60, command)
    for _ in range(3):
        asked = play.send(B)
        play.steps(2)
        assert play.states(asked) == {"COMMITTED"}, "in the next round but one"
    answered = [each for each in flood if play.world.reply(each) is not None]
    assert len(answered) < 50


def test_a_quota_lets_a_flood_go_in_chunks() -> None:
    """Others' commands wait for rounds of some commands, not for one of a whole second's."""
    play = Lanes()
    lane = play.leader._lanes.on[A]
    lane.meter.rate, lane.meter.left = 2_000, 0.0
    flood, done = play.send(A, 400), [0]
    for _ in range(40):
        play.steps(1, seconds=0.025)
        done.append(play.leader.state.lane_positions.get(A, 0))
    rounds = {after - before for before, after in pairwise(done)}
    assert rounds <= {0, 10, 11, 12, 13, 14, 15}
    assert 180 <= done[-1] <= 210
    play.steps(60, seconds=1.5)
    assert play.states(flood) == {"COMMITTED"}
    (late,) = play.send(A)  # below its rate: at once
    play.steps(1)
    assert play.states([late]) == {"COMMITTED"}


# -- poison -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, Killed])
def test_poison_in_one_lane(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "PIECE", 7)
    play = Lanes()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(error))
    others = play.send(A, 20) + play.send(B, 20) + play.send(OPEN_LANE, 20)
    (bad,) = play.send(B, command=r.GetState(BAD))
    others += play.send(B, 20) + play.send(A, 20)
    play.until(lambda: play.served([bad, *others]))
    assert play.states([bad]) == {"Quarantined"}
    assert play.states(others) == {"COMMITTED"}
    (row,) = play.list().quarantined
    assert (row.lane, row.offset, row.what) == (B, 20, "GetState")
    assert play.events == 100
    play.leader.update_metrics()
    if error is ValueError:
        assert play.leader.metrics.values["commands_quarantined"] == {(B,): 1}


@pytest.mark.parametrize("cause", ["raises", "refused"])
def test_poison_while_another_lane_is_busy(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lane's commands, at ever higher offsets, neither hold up the search nor end it."""
    play = Lanes()
    command: Any = r.GetState(BAD)
    if cause == "raises":
        monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(ValueError))
    else:
        command = play.too_big()
    others = play.send(A, 3)
    (bad,) = play.send(A, command=command)
    for _ in range(25):
        others += play.send(B, 5)
        play.steps(1)
    assert play.states([bad]) == {"Quarantined" if cause == "raises" else "EventTooLarge"}
    play.steps(5)
    assert play.states(others) == {"COMMITTED"}


@pytest.mark.parametrize("lane", [A, OPEN_LANE])
def test_an_operator_skips_a_command_of_one_lane(lane: str) -> None:
    play = Lanes()
    at = play.end(lane)
    skipped, *others = play.send(lane, 4)
    others += play.send(A, 2) + play.send(B, 2) + play.send(OPEN_LANE, 2)
    play.fresh(skip_commands=frozenset(((lane, at),)))
    play.until(lambda: play.served([skipped, *others]))
    answer = play.world.reply(skipped)
    assert (answer.code, "an operator skipped it" in answer.message) == ("Quarantined", True)
    assert play.states(others) == {"COMMITTED"}


def test_poison_in_two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kill, at the same offset; a successor must not take one's tries for the other's."""
    monkeypatch.setattr(suspects, "PIECE", 7)
    play = Lanes()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(Killed))
    bad = play.send(A, command=r.GetState(BAD)) + play.send(B, command=r.GetState(BAD))
    others = play.send(A, 5) + play.send(B, 5)
    play.until(lambda: play.served([*bad, *others]))
    assert (play.states(bad), play.states(others)) == ({"Quarantined"}, {"COMMITTED"})
    assert {(row.lane, row.offset) for row in play.list().quarantined} == {(A, 0), (B, 0)}
    assert play.deaths <= 2 * 6


# -- trouble ------------------------------------------------------------------------------------------


def replaced(play: Lanes, topic: str) -> Callable[[], None]:
    mend = play.world.take_away(topic)
    play.world.cluster.log("somebody").create_topics([TopicSpec(topic, 1)])
    return mend


def in_trouble(kind: Kind) -> Callable[[Lanes, str], Callable[[], None]]:
    def strike(play: Lanes, topic: str) -> Callable[[], None]:
        place = TopicPartition(topic, 0)
        play.world.cluster.troubles[place] = Trouble(kind)
        return lambda: play.world.cluster.troubles.clear()

    return strike


TROUBLES: dict[str, tuple[Callable[[Lanes, str], Callable[[], None]], str]] = {
    "deleted": (lambda play, topic: play.world.take_away(topic), "there is no topic"),
    "replaced": (replaced, "is another one"),
    "leaderless": (in_trouble(Kind.LEADERLESS), "no leader"),
    "forbidden": (in_trouble(Kind.DENYING), "refused"),
}


@pytest.mark.parametrize("leader", ["same", "new"])
@pytest.mark.parametrize("what", TROUBLES)
def test_a_lane_that_can_not_be_read_waits_alone(what: str, leader: str) -> None:
    play = Lanes()
    strike, why = TROUBLES[what]
    play.send(A, 3)
    play.steps(2)
    waiting = play.send(A, 2)
    mend = strike(play, commands_topic(lane=A))
    if leader == "new":
        play.fresh()
    term = play.leader.state.term
    for _ in range(4):
        play.steps(5, 5.0)
        assert play.states(play.send(B) + play.send(OPEN_LANE)) == {"none"}
        play.steps(1)
    assert play.events == 3 + 8
    assert why in play.info(A).trouble
    assert play.info(B).trouble == play.info(OPEN_LANE).trouble == ""
    assert play.leader.state.term == term, "the leader went on"
    mend()
    play.steps(30, 30.0)
    assert (play.states(waiting), play.info(A).trouble) == ({"COMMITTED"}, "")
    assert play.events == 3 + 8 + 2


def test_another_topic_of_the_same_name_is_never_read() -> None:
    """Its offsets go as far as those of the old one."""
    play = Lanes()
    play.send(A, 3)
    play.steps(2)
    replaced(play, commands_topic(lane=A))
    forged = [play.world.send(play.shot(), lane=A) for _ in range(10)]
    play.fresh()
    play.steps(20, 20.0)
    assert (play.states(forged), play.events) == ({"none"}, 3)


@pytest.mark.parametrize(
    ("what", "lane"),
    [("replaced", A)]
    + [
        (what, lane)
        for what in ("deleted", "leaderless", "forbidden")
        for lane in (OPEN_LANE, A, ADMIN_LANE)
    ],
)
def test_a_lane_that_can_not_be_answered_is_decided(what: str, lane: str) -> None:
    """Its decisions stand, the other lanes get their answers, and it gets its own again once brokers take them."""
    play = Lanes()
    mend = TROUBLES[what][0](play, replies_topic(lane=lane))
    term, shot = play.leader.state.term, play.shot()
    play.send(lane, command=shot)
    others = play.send(B, 3)
    play.until(lambda: play.served(others), 20)
    row = play.leader.state.txn_row(shot.txn_id)
    assert row is not None
    assert row.state == "COMMITTED"
    for _ in range(5):
        more = play.send(B)
        play.send(lane)
        play.steps(4)
        assert play.states(more) == {"COMMITTED"}, "in their rounds"
    assert play.leader.state.term == term
    assert play.leader.metrics.values["refused_rounds"] == {(): 0}
    mend()
    play.steps(30, 30.0)
    again = play.send(lane, command=shot)
    play.until(lambda: play.served(again), 10)
    assert play.states(again) == {"COMMITTED"}
    assert play.events == 1 + 3 + 10


# -- blocked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leader", ["same", "new"])
@pytest.mark.parametrize("lane", [OPEN_LANE, A])
def test_the_backlog_of_a_blocked_lane_is_never_run(lane: str, leader: str) -> None:
    play = Lanes()
    play.send(lane, 2)
    play.leader.step(0)
    assert play.make(lane, blocked=True).lanes[0].blocked
    never = play.send(lane, 5)
    play.steps(5)
    if leader == "new":
        play.fresh()
    play.steps(5)
    # As if the leader died before it found the end.
    assert play.make(lane).lanes[0].position == AT_END
    play.steps(2)
    if leader == "new":
        play.fresh()
    served = play.send(lane, 3) + play.send(B)
    play.steps(6)
    assert (play.states(never), play.states(served)) == ({"none"}, {"COMMITTED"})
    assert play.events == 2 + 4
    info = play.info(lane)
    assert (info.position, info.end) == (play.end(lane), play.end(lane))


def test_nothing_is_read_before_the_found_end_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader finds the end, and can't log it; more is sent; the next one looks for itself."""
    play = Lanes()
    play.make(A, blocked=True)
    play.world.ask(play.leader, _unblocking(play, A), lane=ADMIN_LANE)
    with monkeypatch.context() as patched:
        patched.setattr(Controller, "_written", lambda self, _: self._drop())
        play.steps(1)
        early = play.send(A, 2)
        play.steps(3)
    assert play.leader.state.lane_positions[A] == AT_END
    play.fresh()
    late = play.send(A, 2)
    play.leader.step(0)
    assert play.leader.state.lane_positions[A] == 4
    play.steps(3)
    assert play.states(early + late) == {"none"}
    assert play.events == 0


def _unblocking(play: Lanes, lane: str) -> r.SetLane:
    return r.SetLane(lane, False, play.leader.state.lanes[lane].topic_ids, {})


@pytest.mark.parametrize("blocked", [[True], [True, False]])
def test_commands_after_a_block_in_the_same_round_are_not_run(blocked: list[bool]) -> None:
    play = Lanes()
    ids = play.leader.state.lanes[A].topic_ids
    for each in blocked:
        play.world.send(r.SetLane(A, each, ids, {}), lane=ADMIN_LANE)
    never = play.send(A, 3)
    play.steps(3)
    assert (play.states(never), play.events) == ({"none"}, 0)
    later = play.send(A, 3)
    play.steps(3)
    assert play.states(later) == {"none" if blocked[-1] else "COMMITTED"}


def test_controllers_talk_while_open_is_blocked() -> None:
    play = Lanes()
    play.make(OPEN_LANE, blocked=True)
    said = Record(0, 0, b"", encode(r.AdoptScope("adopted", A)))
    play.world.cluster.produce(TopicPartition(control_topic(), 0), [said])
    play.steps(3)
    assert "adopted" in play.leader.state.scopes


def test_a_lane_of_its_own_only() -> None:
    play = Lanes()
    play.fresh(lanes_only=True)
    never = play.send(OPEN_LANE, 3)
    served = play.send(A, 3)
    play.steps(5)
    assert (play.states(never), play.states(served)) == ({"none"}, {"COMMITTED"})
    assert "--lanes-only" in play.info(OPEN_LANE).trouble
    play.fresh()
    play.steps(3)
    later = play.send(OPEN_LANE, 2)
    play.steps(3)
    assert (play.states(never), play.states(later)) == ({"none"}, {"COMMITTED"})


# -- silence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [OPEN_LANE, A])
def test_silence_while_other_lanes_are_blocked_or_lost(of: str) -> None:
    play = Lanes()
    txn_id, _ = play.begin(of)
    play.make(B, blocked=True)
    play.world.cluster.delete_topic(commands_topic(lane=ADMIN_LANE))
    play.steps(20, 4.9)
    assert play.is_open(txn_id)
    play.steps(4, 1.0)
    assert not play.is_open(txn_id)


def test_a_blocked_lanes_own_transactions_end() -> None:
    play = Lanes()
    txn_id, token = play.begin(A)
    play.make(A, blocked=True)
    for _ in range(6):
        play.send(A, command=r.Heartbeat((token,)))
        play.steps(4, 1.0)
    assert not play.is_open(txn_id)


def test_silence_during_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flooded lane's heartbeats wait behind its flood: its transactions live, others end in time."""
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 10)
    monkeypatch.setattr(limits, "UNREAD", limits.UNREAD._replace(value=3))
    monkeypatch.setattr(transactions, "UNREAD_MS", 0)
    play = Lanes()
    flooded, token = play.begin(A)
    hasty, hasty_token = play.begin(A, keepalive_ms=1_000)
    silent, _ = play.begin(A)
    other, _ = play.begin(B)
    worker, its_token = play.begin(B)
    play.world.ask(play.leader, r.Register(its_token, r.Receipt(worker, 7, 1, False, ())), lane=A)
    play.send(A, 300)
    play.send(A, command=r.Heartbeat((token, its_token, hasty_token)))
    play.steps(8, 5.2)
    play.steps(2, 0.5)
    assert not play.is_open(other)
    assert all(map(play.is_open, (flooded, silent, worker, hasty))), "not read to the end"
    play.until(lambda: not play.leader._lanes.on[A].queue, 60)
    play.steps(3, 1.0)
    assert (play.is_open(silent), play.is_open(flooded)) == (False, True)
    play.steps(10, 5.0)
    assert not play.is_open(flooded)


def test_a_flood_without_end_does_not_keep_its_own_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 10)
    play = Lanes()
    txn_id, _ = play.begin(A)
    play.send(A, 200)
    for _ in range(120):
        play.send(A, 10)
        play.steps(1, 0.1)
    assert len(play.leader._lanes.on[A].queue) > 100, "the flood goes on"
    assert not play.is_open(txn_id)


def test_a_helpers_heartbeats_count_after_its_own_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only ever sends heartbeats; the transaction is of `open`, and has no writer."""
    monkeypatch.setattr(suspects, "MAX_COMMANDS", 10)
    play = Lanes()
    txn_id, token = play.begin(OPEN_LANE)
    beat = r.Heartbeat((token,))
    for wait_s in (1.0, 0.1):
        play.send(A, command=beat)
        play.steps(4, wait_s)
    play.send(A, 300)
    play.send(A, command=beat)
    play.steps(10, 5.7)
    assert play.is_open(txn_id)
    play.until(lambda: not play.leader._lanes.on[A].queue, 60)
    play.steps(3, 1.0)
    assert play.is_open(txn_id), "it was heard"
    play.steps(10, 5.0)
    assert not play.is_open(txn_id)


def test_a_lane_that_can_not_be_read_keeps_nothing_alive_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Lanes()
    txn_id, _ = play.begin(A, keepalive_ms=1_000)
    other, _ = play.begin(B, keepalive_ms=1_000)
    in_trouble(Kind.LEADERLESS)(play, commands_topic(lane=A))
    play.send(A)
    play.steps(200, 599.0)
    assert (play.is_open(txn_id), play.is_open(other)) == (True, False)
    play.steps(8, 2.0)
    row = play.leader.state.txn_row(txn_id)
    assert row is not None
    assert row.reason.endswith("commands of etl can't be read")
    assert f"{txn_id.hex()} is aborted: stale" in caplog.text
    assert play.leader.metrics.values["expired_unread"] == {(): 1}
