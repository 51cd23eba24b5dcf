"""Transactions over control partitions: two controllers, and the messages that they send each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.core.across.messages import MAC_HEADER
from anabranch.core.rows import FEATURE_KEY
from anabranch.ports import MESSAGE_TOO_LARGE, LogRefused, TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, encode
from anabranch.testing.memory.partition import Partition
from anabranch.topics.names import control_topic, journal_topic, status_topic, stream_topic
from tests.controller.world import World
from tests.core.labels import SECRET

STREAMS = ("nyc/a", "ber/a")


@dataclass
class Pair:
    """Scope nyc at control partition 0 and ber at 1, and a transaction that has written to both."""

    world: World = field(default_factory=lambda: World(control_partitions=2))
    leaders: list[Controller] = field(default_factory=list)
    commit: r.Commit = field(init=False)
    asked: bytes = b""
    names: int = 0

    def __post_init__(self) -> None:
        row = Record(0, 0, FEATURE_KEY, encode(r.FeatureRow(LEVEL, 1)))
        for number in (0, 1):
            self.world.cluster.produce(TopicPartition(status_topic(), number), [row])
            self.leaders.append(self.new(number))
        for number, stream in enumerate(STREAMS):
            scope = stream.partition("/")[0]
            self.ask(r.FindScope(scope, True))
            assert isinstance(self.ask(r.CreateStream(stream, 1, {}), number), r.StreamList)
        txn_id = self.world.txn_id()
        begun = self.ask(r.Begin(txn_id, "nyc", None, 60_000, SECRET))
        receipt = r.Receipt(txn_id, 1, 1, True, ())
        extents: list[r.Extent] = []
        for number, stream in enumerate(STREAMS):
            touched = self.ask(r.Touch(begun.token, stream), number)
            assert isinstance(touched, r.Touched), touched
            receipt = self.world.write(txn_id, 1, stream, touched.segments, [(b"k", b"v")])
            extents += receipt.extents
        self.commit = r.Commit(
            begun.token, (), (replace(receipt, extents=tuple(extents)),), None, 20_000
        )

    def new(self, number: int) -> Controller:
        """A controller that takes the control partition over, with an empty table."""
        self.names += 1
        return self.world.led(f"c{self.names}", number)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for one in self.leaders:
                one.step(0)
            self.world.clock.sleep(0.05)

    def ask(self, command: Any, number: int = 0) -> Any:
        asked = self.world.send(command, number)
        for _ in range(20):
            self.step()
            answer = self.world.reply(asked)
            if answer is not None:
                return answer
        raise AssertionError(f"no answer to {command}")

    def outcome(self, count: int = 200) -> Any:
        """The answer to the commit."""
        for _ in range(count):
            answer = self.world.reply(self.asked)
            if answer is not None:
                return answer
            self.step()
        raise AssertionError("the commit is not answered")

    def values(self) -> list[list[bytes | None]]:
        """What readers see of each stream."""
        places = [TopicPartition(stream_topic(stream), 0) for stream in STREAMS]
        return [[event.value for event in self.world.committed(place)] for place in places]


def test_a_commit_over_two_controllers_is_in_both_streams_at_one_time() -> None:
    pair = Pair()
    pair.asked = pair.world.send(pair.commit)
    outcome = pair.outcome()
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2)
    assert pair.values() == [[b"v"], [b"v"]]
    txn_id = outcome.txn_id
    rows = [one.state.txn_row(txn_id) for one in pair.leaders]
    assert {(row.state, row.commit_timestamp) for row in rows if row} == {
        ("COMMITTED", outcome.commit_timestamp)
    }
    assert [one.metrics.total("messages_ignored") for one in pair.leaders] == [0, 0]


# A successor takes over after so many passes of both controllers.
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", range(4))
def test_a_controller_that_dies_at_any_time_changes_no_outcome(number: int, after: int) -> None:
    pair = Pair()
    pair.asked = pair.world.send(pair.commit)
    pair.step(after)
    pair.leaders[number].resign()
    pair.leaders[number] = pair.new(number)
    outcome = pair.outcome()
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2)
    assert pair.values() == [[b"v"], [b"v"]]


def test_m4_a_message_is_decided_before_the_commands_that_wait_for_it() -> None:
    """The decision, a one-shot and a question for the stream are read in one pass: they wait for no hold."""
    pair = Pair()
    pair.asked = pair.world.send(pair.commit)
    coordinator, participant = pair.leaders
    (txn_id,) = participant.state.promised
    while coordinator.state.open[txn_id].row.state != "FINALIZE_IN_PROGRESS":
        participant.step(0)
        coordinator.step(0)
    event = r.Event(STREAMS[1], -1, b"k", b"later", (), -1)
    asked = pair.world.send(r.OneShot(pair.world.txn_id(1), "ber", None, (event,)), 1)
    question = pair.world.send(r.SafeTime("ber", None, (), (STREAMS[1],)), 1)
    for _ in range(3):
        participant.step(0)
        assert not participant._memory.holds.shots
    assert pair.world.reply(asked).state == "COMMITTED"
    assert pair.world.reply(question).safe
    assert pair.values()[1] == [b"v", b"later"]


def test_a_forged_message_is_counted_and_not_acted_on() -> None:
    pair = Pair()
    (txn_id,) = pair.leaders[1].state.promised
    row = pair.leaders[1].state.txn_row(txn_id)
    assert row is not None
    head = r.TxnHead("nyc", "open", 60_000, 1, row.secret or b"", 0)
    abort = encode(r.Decide(txn_id, head, "ABORT", 0, "no"))
    place = TopicPartition(control_topic(), 1)
    pair.world.cluster.produce(place, [Record(0, 0, b"", abort, ((MAC_HEADER, bytes(32)),))])
    pair.step(3)
    assert pair.leaders[1].metrics.total("messages_ignored") == 1
    pair.asked = pair.world.send(pair.commit)
    assert pair.outcome().state == "COMMITTED"


def refuse_big(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """Let brokers refuse batches of more than 1,000 bytes of a stream."""
    place, check = TopicPartition(stream_topic(stream), 0), Partition.check

    def refusing(self: Partition, data: bytes, now_ms: int) -> list[Record]:
        if self.name == place and len(data) > 1_000:
            raise LogRefused("too big", MESSAGE_TOO_LARGE, {place.topic})
        return check(self, data, now_ms)

    monkeypatch.setattr(Partition, "check", refusing)


def one_shot(pair: Pair, value: bytes, key: bytes = b"k") -> tuple[bytes, bytes]:
    """Send a one-shot with this value at control partition 0. Returns its id, and what its answer has."""
    txn_id, found = pair.world.txn_id(), b""
    for number, stream in enumerate(STREAMS):
        event = r.Event(stream, -1, key, b"v" if number else value, (), -1)
        scope, places = stream.partition("/")[0], () if number else (1,)
        command = r.OneShot(txn_id, scope, None, (event,), secret=SECRET, places=places)
        asked = pair.world.send(command, number)
        found = found or asked
    return txn_id, found


@pytest.mark.parametrize("beside", ["nothing", "plain writes", "another one-shot"])
def test_a_one_shot_whose_events_a_broker_refuses_is_refused_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """The events of control partition 0 are in the round of the decision; 1 has voted, and is told."""
    pair = Pair()
    refuse_big(monkeypatch, STREAMS[0])
    txn_id, pair.asked = one_shot(pair, Random(1).randbytes(5_000))
    other = one_shot(pair, b"w")[1] if beside == "another one-shot" else b""
    if beside == "plain writes":
        journal = TopicPartition(journal_topic(STREAMS[0]), 0)
        for _ in range(30):
            pair.world.cluster.produce(journal, [Record(0, 0, b"k", b"plain")])
            pair.step()
    # Beside plain writes it is logged before it is its turn to be tried alone.
    assert pair.outcome().code in ("InvalidArgument", "TransactionAborted")
    pair.step(20)
    rows = [one.state.txn_row(txn_id) for one in pair.leaders]
    assert [row and row.state for row in rows] == ["ABORTED", "ABORTED"]
    if other:
        pair.asked = other
        assert pair.outcome().state == "COMMITTED"
    pair.asked = pair.world.send(pair.commit)
    assert pair.outcome().state == "COMMITTED"
    assert pair.values()[1] == [b"v"] * (2 if other else 1)


def test_a_held_one_shot_whose_events_a_broker_refuses_is_refused_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits in memory for a part that is prepared, and is decided with that part's merge."""
    pair = Pair()
    refuse_big(monkeypatch, STREAMS[1])
    pair.asked = pair.world.send(pair.commit)
    coordinator, participant = pair.leaders
    while not participant._memory.holds.in_use:
        coordinator.step(0)
        participant.step(0)
    event = r.Event(STREAMS[1], -1, b"k", Random(1).randbytes(5_000), (), -1)
    command = r.OneShot(pair.world.txn_id(1), "ber", None, (event,))
    pair.world.send(command, 1)
    participant.step(0)
    assert participant._memory.holds.shots
    for _ in range(20):  # no time passes, so it does not give up
        coordinator.step(0)
        participant.step(0)
    assert pair.outcome().state == "COMMITTED"
    codes: list[str] = []
    while "EventTooLarge" not in codes:
        assert len(codes) < 20, "each copy gives up"
        codes.append(pair.ask(command, 1).code)
    assert pair.values()[1] == [b"v"]
