"""Commands of a higher feature level than the cluster has: refused before they are decoded, charged like others."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.controller import lanes
from anabranch.controller.controller import Controller
from anabranch.ports import TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, encode
from anabranch.topics.names import status_topic
from tests.controller.world import World

STREAM = "nyc/a"


class Play:
    """A stream, and commands as a hostile client may frame them."""

    def __init__(self) -> None:
        self.world = World()
        self.leader: Controller = self.world.led()
        self.world.stream(self.leader, STREAM, 1)

    def raise_level(self) -> None:
        answer = self.world.ask(self.leader, r.SetFeatureLevel(2), lane=ADMIN_LANE)
        assert answer == r.FeatureLevel(2, LEVEL)

    def framed(self, level: int) -> bytes:
        """A one-shot of many events, with this as its feature level."""
        events = tuple(r.Event(STREAM, -1, b"k%d" % n, b"v", (), -1) for n in range(200))
        command = r.OneShot(self.world.txn_id(), "nyc", None, events)
        return bytes((level,)) + encode(command)[1:]

    def ask(self, payload: bytes) -> Any:
        return self.world.ask(self.leader, payload)

    def charge(self, payload: bytes) -> float:
        meter = self.leader._lanes.on[OPEN_LANE].meter
        before = meter.used
        assert self.ask(payload).state == "COMMITTED"
        return meter.used - before


def test_nothing_above_the_level_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    frames = [play.framed(2), b"\x02\x08" + b"\xff" * 1_000, b"\x02\x08"]
    rounds = play.leader.rounds

    def decoding(payload: bytes) -> Any:
        raise AssertionError(f"decoded: {payload[:2].hex()}")

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "decode_lazily", decoding)
        for frame in frames:
            answer = play.ask(frame)
            assert answer.code == "FeatureNotEnabled"
            assert "the command OneShot needs feature level 2" in answer.message
    assert play.world.ask(play.leader, r.ListCommands()).quarantined == ()
    play.raise_level()
    assert play.ask(frames[0]).state == "COMMITTED"
    assert [play.ask(frame).code for frame in frames[1:]] == ["MalformedRecord"] * 2
    assert play.leader.rounds > rounds


def test_a_description_is_logged_at_level_2_alone() -> None:
    play = Play()
    status = TopicPartition(status_topic(), 0)
    command = r.CreateStream("nyc/described", 1, {}, description="Flights from JFK")
    assert play.world.ask(play.leader, command).code == "FeatureNotEnabled"
    assert "nyc/described" not in play.leader.state.streams
    levels = {(record.value or b"\1")[0] for record in play.world.committed(status)}
    assert levels == {1}
    play.raise_level()
    (made,) = play.world.ask(play.leader, command).streams
    assert made.description == command.description
    successor = play.world.led("successor")
    assert successor.state.streams["nyc/described"].description == command.description


@pytest.mark.parametrize("level", [0, LEVEL + 1, 255])
@pytest.mark.parametrize("raised", [False, True])
def test_levels_that_no_release_has_are_refused_by_name(level: int, raised: bool) -> None:
    play = Play()
    if raised:
        play.raise_level()
    for payload in (play.framed(level), bytes((level, 8)), bytes((level, 200)) + b"\xff" * 50):
        answer = play.ask(payload)
        assert answer.code == "UnsupportedVersion"
        assert f"feature level {level}, " in answer.message
    assert play.world.ask(play.leader, r.ListCommands()).quarantined == ()


@pytest.mark.parametrize("raised", [False, True])
def test_frames_of_any_level_stop_no_other_client(raised: bool) -> None:
    """They come in one round with its commands: of each type, some without a way to answer."""
    play = Play()
    if raised:
        play.raise_level()
    status = TopicPartition(status_topic(), 0)
    good = []
    for number in range(256):
        for level in (0, 2, 3, 255):
            play.world.send(
                bytes((level, number)) + b"\xff" * (number % 7), headers=bool(number % 3)
            )
        if number % 32 == 0:
            good.append(play.world.send(play.framed(1)))
    play.world.steps(play.leader, 8)
    assert [play.world.reply(each).state for each in good] == ["COMMITTED"] * len(good)
    assert play.world.ask(play.leader, r.ListCommands()).quarantined == ()
    levels = {(record.value or b"\1")[0] for record in play.world.committed(status)}
    assert levels == {1}
    play.world.led("successor")


def test_a_frame_of_level_2_is_charged_as_one_of_level_1() -> None:
    play = Play()
    play.raise_level()
    assert play.charge(play.framed(2)) == play.charge(play.framed(1)) > 20
