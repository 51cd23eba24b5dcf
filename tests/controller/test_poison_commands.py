"""A command's trouble is that command's: it is quarantined after a few tries, and all others are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller import controller, durability, suspects
from anabranch.controller.lanes import Command
from anabranch.controller.stream_topics import TRIES
from anabranch.core import rows as k
from anabranch.core.decisions import decide as entrance
from anabranch.errors import InvariantViolation
from anabranch.ports import LogError, LogUnavailable, LogUncertain, Steps, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import commands_topic, control_topic, stream_topic, topics_of
from tests.controller.world import World

BAD = b"\0" * 15 + b"\x66"
STREAM = "nyc/a"


class Killed(BaseException):
    """The process dies."""


class Play:
    """A stream, and a command among others that every leader fails at."""

    def __init__(self) -> None:
        self.world = World()
        self.deaths = 0
        self.leader = self.world.led()
        self.world.stream(self.leader, STREAM, 1)

    def shot(self, stream: str = STREAM, value: bytes = b"v", headers: Any = ()) -> r.OneShot:
        event = r.Event(stream, -1, b"k", value, headers, -1)
        return r.OneShot(self.world.txn_id(), "nyc", None, (event,))

    def too_big(self) -> r.OneShot:
        """A command that only the broker refuses."""
        self.world.stream(self.leader, "nyc/small", 1)
        for topic in topics_of("nyc/small")[:2]:
            config = self.world.cluster.partition(TopicPartition(topic, 0)).config
            config["max.message.bytes"] = "20000"
        return self.shot("nyc/small", bytes(30_000))

    def among(self, command: Any, before: int, behind: int) -> tuple[bytes, list[bytes]]:
        """(the command's correlation id, those of the one-shots around it)."""
        others = [self.world.send(self.shot()) for _ in range(before)]
        asked = self.world.send(command)
        return asked, others + [self.world.send(self.shot()) for _ in range(behind)]

    def until(self, done: Callable[[], bool], passes: int = 400) -> None:
        for _ in range(passes):
            if done():
                return
            try:
                self.leader.step(0)
            except LogError:
                self.lead()
            except Killed:
                self.deaths += 1
                self.leader = self.world.controller(f"c{self.deaths}")
                self.lead()
            self.world.clock.now += 0.01
        raise AssertionError("it does not come to an end")

    def lead(self) -> None:
        for _ in range(50):
            try:
                return self.leader.lead()
            except LogError:
                self.world.clock.now += 0.2
        raise AssertionError("no lead")

    def served(self, asked: list[bytes]) -> bool:
        return all(self.world.reply(each) is not None for each in asked)

    def list(self) -> r.CommandList:
        answer = self.world.ask(self.leader, r.ListCommands(), steps=8)
        assert isinstance(answer, r.CommandList)
        return answer


def failing(raised: Callable[[], BaseException]) -> Callable[..., None]:
    def decide(turn: Any, command: Any, to: Any) -> None:
        turn.put(b"\0" * 16 + b"\x05nyc/x", r.NameRow(BAD))  # what it did before must not stay
        raise raised()

    return decide


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, InvariantViolation])
def test_a_decision_that_raises(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(lambda: error("a defect")))
    asked, others = play.among(r.GetState(BAD), 30, 30)
    play.until(lambda: play.served([asked, *others]), 20)
    answer = play.world.reply(asked)
    assert (answer.code, "a defect" in answer.message) == ("Quarantined", True)
    assert {play.world.reply(each).state for each in others} == {"COMMITTED"}
    assert play.leader.state.round.term == 1
    assert play.leader.state.holder("nyc", "x") is None
    (row,) = play.list().quarantined
    assert (row.what, "a defect" in row.reason) == ("GetState", True)


def test_writes_that_a_dropped_turn_computed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be those of a transaction that this turn prepared, and that may write more now."""
    play = Play()
    seen: list[bool] = []

    def decide(turn: Any, command: Any, to: Any) -> None:
        seen.append(BAD in turn.memory.written)
        turn.memory.written[BAD] = {}
        raise ValueError("a defect")

    monkeypatch.setitem(entrance._DECISIONS, r.GetState, decide)
    asked = play.world.send(r.GetState(BAD))
    play.until(lambda: play.served([asked]), 20)
    assert len(seen) > 1
    assert not any(seen)


def test_a_position_does_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarantine takes two rounds; the second one, with the answer, leaves the command behind, too."""
    play = Play()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(lambda: ValueError("a defect")))
    before = play.leader.state.round.commands_offset
    asked = play.world.send(r.GetState(BAD))
    play.until(lambda: play.served([asked]), 20)
    assert play.leader.state.round.commands_offset == before + 1


@pytest.mark.parametrize("fault", ["raises", "uncertain"])
def test_a_message_of_another_controller_stops_no_command(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of the control topic are no commands': nothing that stands there at the same ones is quarantined."""
    play = Play()
    real = entrance._DECISIONS[r.AdoptScope]

    def adopt(turn: Any, command: Any, to: Any) -> None:
        if command.scope == "bad" and fault == "raises":
            raise ValueError("a defect")
        real(turn, command, to)

    monkeypatch.setitem(entrance._DECISIONS, r.AdoptScope, adopt)
    if fault == "uncertain":
        uncertain(monkeypatch, lambda round_: k.scope_key("bad") in dict(round_.rows))
    said = [Record(0, 0, b"", encode(r.AdoptScope(scope, "open"))) for scope in ("a", "bad", "b")]
    play.world.cluster.produce(TopicPartition(control_topic(), 0), said)
    asked = [play.world.send(play.shot()) for _ in range(30)]
    play.until(lambda: play.served(asked) and play.leader.state.round.control_offset == 3)
    assert {play.world.reply(each).state for each in asked} == {"COMMITTED"}
    assert {"a", "b"} <= set(play.leader.state.scopes)
    assert "bad" not in play.leader.state.scopes
    assert play.list().quarantined == ()


@pytest.mark.parametrize("before", [0, 100])
def test_a_command_that_kills_each_leader_is_quarantined(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successors know from the log alone which one it was."""
    monkeypatch.setattr(suspects, "PIECE", 7)
    play = Play()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(Killed))
    asked, others = play.among(r.GetState(BAD), before, 30)
    play.until(lambda: play.served([asked, *others]))
    assert play.world.reply(asked).code == "Quarantined"
    assert {play.world.reply(each).state for each in others} == {"COMMITTED"}
    assert play.deaths == 6
    position = play.list()
    assert [row.what for row in position.quarantined] == ["GetState"]
    assert position.position == position.end


def uncertain(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Any], bool]) -> None:
    real = durability.write_round

    def write_round(to: Any, producer: Any, round_: Any, *rest: Any, **more: Any) -> Steps[None]:
        if fails(round_):
            raise LogUncertain("broken pipe")
        return real(to, producer, round_, *rest, **more)

    monkeypatch.setattr(controller, "write_round", write_round)


def test_a_command_whose_round_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    asked, others = play.among(play.shot("nyc/none"), 30, 30)
    uncertain(
        monkeypatch,
        lambda round_: any(
            to.correlation_id == asked and result.code != "Quarantined" for to, result in round_.replies
            if isinstance(result, r.Refusal)
        ),
    )  # fmt: skip
    play.until(lambda: play.served([asked, *others]))
    assert play.world.reply(asked).code == "Quarantined"
    assert {play.world.reply(each).state for each in others} == {"COMMITTED"}


@pytest.mark.parametrize("which", ["all", "of commands", "now and then"])
def test_an_outage_is_no_commands_fault(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long, and whichever rounds it is that fail meanwhile."""
    play = Play()
    others = [play.world.send(play.shot()) for _ in range(60)]
    left = iter([True] * 25 if which != "now and then" else [True, True, False] * 40)

    def fails(round_: Any) -> bool:
        return (which != "of commands" or bool(round_.history)) and next(left, False)

    if which == "of commands":
        left = iter([True] * limits.UNSURE.value)
    uncertain(monkeypatch, fails)
    play.until(lambda: play.served(others))
    assert {play.world.reply(each).state for each in others} == {"COMMITTED"}
    assert play.list().quarantined == ()


def test_a_command_that_brokers_refuse_is_found_by_halves() -> None:
    """One refused among five hundred took a round for each of them."""
    play = Play()
    command = play.too_big()
    before = play.leader.rounds
    asked, others = play.among(command, 300, 200)
    play.until(lambda: play.served([asked, others[-1]]), 100)
    assert play.world.reply(asked).code == "EventTooLarge"
    assert len(play.world.committed(TopicPartition(stream_topic(STREAM), 0))) == len(others)
    assert play.leader.rounds - before < 30


def test_a_refused_command_lets_messages_and_commands_take_turns() -> None:
    """There is a message in each pass, as on a busy cluster: if it went first each time, no command would go."""
    play, place = Play(), TopicPartition(control_topic(), 0)
    message = encode(r.Done(bytes(16), 1, 0, 0, 0, ""))
    asked, others = play.among(play.too_big(), 5, 5)

    def served() -> bool:
        play.world.cluster.produce(place, [Record(0, 0, b"", message)])
        return play.served([asked, *others])

    play.until(served, 60)
    assert play.world.reply(asked).code == "EventTooLarge"
    assert {play.world.reply(each).state for each in others} == {"COMMITTED"}


def test_batches_that_can_not_be_read_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_RECORDS", limits.BATCH_RECORDS._replace(value=1))
    play = Play()
    at = play.world.cluster.produce(
        TopicPartition(commands_topic(), 0), [Record(0, 0, b"", b"")] * 2
    )
    play.leader.step(0)
    assert [(row.offset, row.what) for row in play.list().quarantined] == [(at, "unreadable")]


def test_no_more_quarantined_commands_are_kept_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "QUARANTINED", limits.QUARANTINED._replace(value=3))
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(ValueError))
    play = Play()
    asked = [play.world.send(r.GetState(BAD)) for _ in range(5)]
    play.until(lambda: play.served(asked))
    kept = [row.offset for row in play.list().quarantined]
    assert (len(kept), kept) == (3, sorted(kept))
    fresh = play.world.led("fresh", store=MemoryStore())
    assert [row.offset for row in fresh.state.quarantined.values()] == kept


@pytest.mark.parametrize("error", [LogUnavailable("closed"), ValueError("int too large")])
def test_a_stream_that_can_not_be_made(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended each leader, and its successors; the intent is taken back after some tries."""
    play = Play()
    tries = []

    def create_topics(_: MemoryLog, specs: Any) -> None:
        tries.append(specs)
        raise error

    monkeypatch.setattr(MemoryLog, "create_topics", create_topics)
    asked = play.world.send(r.CreateStream("nyc/b", 1, {}))
    others: list[bytes] = []
    while play.world.reply(asked) is None and len(others) < 50:
        others.append(play.world.send(play.shot()))
        play.leader.step(0)
        play.leader.step(0)
        play.world.clock.now += 1.0
        assert play.served(others), "all others are served"
    assert (play.world.reply(asked).code, len(tries)) == ("NotReady", TRIES)
    assert "nyc/b" not in play.leader.state.streams


def test_a_client_that_can_not_be_answered_is_named_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play()
    for seconds in (0, 1, 61):
        play.world.clock.now += seconds
        command = r.GetState(BAD)
        play.world.send(command, again=b"c" * 65)
        play.leader.step(0)
    said = [each for each in caplog.messages if "can't be answered" in each]
    assert len(said) == 2


def test_big_answers_make_rounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROUND", limits.ROUND._replace(value=100_000))
    play = Play()
    before = play.leader.rounds
    asked = [play.world.send(play.shot(value=bytes(30_000))) for _ in range(20)]
    play.until(lambda: play.served(asked))
    assert 4 <= play.leader.rounds - before <= 8
    assert [play.world.reply(each).state for each in asked] == ["COMMITTED"] * 20


def test_a_command_is_as_big_as_its_kind_may_be() -> None:
    play = Play()
    leader = play.world.led("other", command_bytes=3 << 20)
    world = play.world
    world.cluster.partition(TopicPartition(commands_topic(), 0)).config["max.message.bytes"] = (
        "9999999"
    )
    place = TopicPartition(stream_topic(STREAM), 0)
    world.cluster.partition(place).config["max.message.bytes"] = "9999999"
    long = "x" * ((1 << 20) + 1)
    for command, answer in (
        (r.FindScope(long, True), "InvalidArgument"),
        (play.shot(value=bytes(2 << 20)), "COMMITTED"),
        (play.shot(value=bytes(4 << 20)), "InvalidArgument"),
    ):
        found = world.ask(leader, command)
        assert getattr(found, "code", None) == answer or getattr(found, "state", "") == answer
    asked = world.ask(leader, r.FindScope("x" * 900_000, True))
    assert (asked.code, len(asked.message)) == ("InvalidArgument", limits.TEXT.value)


def test_messages_of_controllers_go_together_again_after_a_doubtful_round() -> None:
    """Commands wait behind them: one message a round would hold up all lanes for as long as the process lives."""
    play = Play()
    said = [Record(0, 0, b"", encode(r.AdoptScope(f"s{n}", "open"))) for n in range(300)]
    play.world.cluster.produce(TopicPartition(control_topic(), 0), said)
    play.leader._suspects.failed(LogUncertain("?"), [Command(0, None, b"", True, control=True)])
    asked, before = play.world.send(play.shot()), play.leader.rounds
    play.until(lambda: play.served([asked]))
    assert play.leader.rounds - before < 20
