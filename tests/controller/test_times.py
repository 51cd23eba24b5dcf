"""Commit wait, the header of what a client has seen, and what operators see of clocks that differ."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from anabranch.controller.controller import Controller
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import TIME_HEADER, WAIT_HEADER
from anabranch.protocol.schemas.records import Outcome, Refusal
from tests.controller.test_controller import STREAM, one_shot
from tests.controller.world import World

WAITS = ((WAIT_HEADER, b""),)
ERROR_S = 0.05


def led(world: World, name: str = "c", **settings: Any) -> Controller:
    controller = world.controller(name, **settings)
    controller.lead()
    return controller


def waiting() -> tuple[World, Controller, Any, bytes]:
    """A commit that is made, and whose asker wants commit wait."""
    world = World()
    controller = led(world, clock_error_ms=int(ERROR_S * 1000))
    world.stream(controller, STREAM)
    command = one_shot(world, 3)
    return world, controller, command, world.send(command, more=WAITS)


def test_an_answer_waits_for_the_clocks_and_no_other_one_does() -> None:
    world, controller, _, asked = waiting()
    for _ in range(3):
        other = world.send(one_shot(world, 3))
        controller.step(0)
        assert isinstance(world.reply(other), Outcome), "not held up"
    world.clock.now += 2 * ERROR_S - 0.001
    controller.step(0)
    assert world.reply(asked) is None, "another clock may be behind by the error, this one ahead"
    begun = world.clock.now
    controller.step(5.0)
    controller.step(0)
    found = world.reply(asked)
    assert isinstance(found, Outcome)
    assert world.clock.now - begun < 0.1, "the loop does not sleep over it"
    passed_us = int(world.clock.now * 1e6) - hybrid_time.to_us(found.commit_timestamp)
    assert passed_us > 2e6 * ERROR_S


def test_a_successor_lets_it_wait_for_what_is_left() -> None:
    world, controller, command, asked = waiting()
    controller.step(0)
    successor = led(world, "d", clock_error_ms=int(ERROR_S * 1000))
    world.clock.now += ERROR_S
    world.send(command, again=asked, more=WAITS)
    successor.step(0)
    assert world.reply(asked) is None
    world.clock.now += ERROR_S + 0.001
    successor.step(0)
    assert isinstance(world.reply(asked), Outcome)


@pytest.mark.parametrize("header", [b"", b"1234567", b"123456789", b"\x80" + bytes(7)])
def test_a_malformed_time_is_refused(header: bytes) -> None:
    world = World()
    controller = led(world)
    asked = world.send(one_shot(world, 1), more=((TIME_HEADER, header),))
    controller.step(0)
    answer = world.reply(asked)
    assert isinstance(answer, Refusal)
    assert (answer.code, "8 bytes" in answer.message) == ("InvalidArgument", True)


def test_a_time_that_is_far_ahead_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    controller = led(world)
    world.stream(controller, STREAM)
    for ahead_s in (0.5, 5.0, 6.0):
        seen = hybrid_time.from_us(int((world.clock.now + ahead_s) * 1e6))
        header = (TIME_HEADER, hybrid_time.to_bytes(seen))
        asked = world.send(one_shot(world, 1), more=(header,))
        controller.step(0)
        assert world.reply(asked).commit_timestamp == seen + 1
        controller.update_metrics()
        assert controller.metrics.total("seconds_ahead") == pytest.approx(ahead_s, abs=0.002)
        told = [x for x in caplog.records if x.levelno == logging.WARNING]
        assert len(told) == (ahead_s > 1), "told once"
    world.clock.now += 60
    controller.update_metrics()
    assert controller.metrics.total("seconds_ahead") == 0
