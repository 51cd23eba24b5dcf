"""Commands of one client that travel together: when they gather, and who sends them."""

from __future__ import annotations

import os
from queue import SimpleQueue
from typing import Any, cast
from unittest.mock import MagicMock, Mock

from anabranch.librdkafka.command_bus import GAP_S, MOST_GATHERED, KafkaBus
from anabranch.protocol.ids import CORRELATION_HEADER
from tests.client.doubles import ManualClock


class Bus:
    """A bus whose producer only notes what it is given."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = KafkaBus(*cast("Any", (Mock(), Mock(), "p", "open", self.clock, os.urandom)))
        self.producer = MagicMock(__len__=lambda _: 0)
        self.bus._producer, self.bus._health = self.producer, Mock()

    def send(self, *names: bytes) -> None:
        for name in names:
            self.bus.send(0, name, b"command " + name)

    def sent(self) -> list[bytes]:
        """The correlation ids of what was sent since the last call."""
        calls, self.producer.produce.mock_calls = self.producer.produce.mock_calls, []
        return [dict(call.kwargs["headers"])[CORRELATION_HEADER] for call in calls]

    def answer(self, *names: bytes) -> None:
        """Answers that arrive together."""
        messages = [
            Mock(**{"error.return_value": None, "key.return_value": n, "value.return_value": b"y"})
            for n in names
        ]
        consumer = Mock()
        consumer.poll.return_value, consumer.consume.return_value = messages[0], messages[1:]
        self.bus._receive_some(consumer)

    def receive_nothing(self) -> None:
        """One turn of the replies thread without a message."""
        self.bus._receive_some(Mock(**{"poll.return_value": None}))

    def awake(self, *names: bytes) -> list[bytes]:
        """Those of these commands whose callers are awake."""
        slots = cast(dict[bytes, SimpleQueue[Any]], self.bus._slots)
        return [name for name in names if not slots[name].empty()]

    def wait(self, name: bytes, seconds: float = 0.0) -> bytes | None:
        return self.bus.wait(name, self.clock.now + seconds)


def ids(count: int, prefix: bytes = b"") -> list[bytes]:
    return [prefix + b"%03d" % n for n in range(count)]


def test_a_command_that_follows_no_answers_is_sent_at_once() -> None:
    bus = Bus()
    for name in ids(3):
        bus.send(name)
        assert bus.sent() == [name]


def test_a_lone_command_never_waits_for_others() -> None:
    bus = Bus()
    for name in ids(3):
        bus.send(name)
        assert bus.sent() == [name]
        bus.answer(name)
        assert bus.wait(name) == b"y"


def test_as_many_commands_as_were_answered_together_are_sent_together() -> None:
    bus, before, after = Bus(), ids(4), ids(4, b"next")
    bus.send(*before)
    assert bus.sent() == before
    bus.answer(*before)
    bus.send(*after[:-1])
    assert not bus.sent()
    bus.send(after[-1])
    assert bus.sent() == after
    bus.send(b"another")
    assert bus.sent() == [b"another"]


def test_a_command_for_which_nobody_waits_travels_with_the_next_one() -> None:
    bus, before, after = Bus(), ids(4), ids(4, b"next")
    for name in before:
        bus.bus.send(1, b"beside " + name, b"", waits=False)
        assert not bus.sent()
        bus.send(name)
        assert bus.sent() == [b"beside " + name, name]
    bus.answer(*before)
    for name in after:
        assert not bus.sent()
        bus.bus.send(1, b"beside " + name, b"", waits=False)
        bus.send(name)
    assert bus.sent() == [*[b"beside " + name for name in after], *after]
    assert not bus.bus._slots.keys() & {b"beside " + name for name in (*before, *after)}


def test_answers_of_other_clients_let_nothing_gather() -> None:
    bus = Bus()
    bus.send(b"own")
    bus.answer(b"own", *ids(9))
    bus.sent()
    bus.send(b"next")
    assert bus.sent() == [b"next"]


def test_the_first_caller_sends_what_gathered_when_no_more_come() -> None:
    bus, before = Bus(), ids(4)
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    bus.send(b"first", b"second")
    began = bus.clock.now
    bus.wait(b"second")
    assert not bus.sent()
    bus.wait(b"first", 1.0)
    assert bus.sent() == [b"first", b"second"]
    assert bus.clock.now - began <= 1.5 * GAP_S
    bus.send(b"third")
    assert bus.sent() == [b"third"], "nothing more is expected"


def test_each_command_that_comes_lets_the_first_caller_wait_longer() -> None:
    bus, before, more = Bus(), ids(9), ids(3, b"more")
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    bus.send(b"first")

    def come() -> None:
        if more:
            bus.clock.now -= GAP_S / 2  # it came while the first caller slept
            bus.send(more.pop())

    bus.clock.on_sleep = come
    bus.wait(b"first", 1.0)
    assert bus.sent() == [b"first", *reversed(ids(3, b"more"))]


def test_a_deadline_ends_the_wait_for_more_commands() -> None:
    bus, before = Bus(), ids(4)
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    bus.send(b"first")
    bus.wait(b"first")  # its deadline is now
    assert bus.sent() == [b"first"]


def test_a_command_long_after_the_answers_is_sent_at_once() -> None:
    bus, before = Bus(), ids(4)
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    bus.clock.now += 2 * GAP_S
    bus.send(b"late")
    assert bus.sent() == [b"late"]


def test_a_caller_that_does_not_wait_sends_what_gathered() -> None:
    """An interrupted call forgets its command, and so does one that is over."""
    bus, before = Bus(), ids(4)
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    bus.send(b"first", b"second")
    bus.bus.forget(b"second")
    assert not bus.sent()
    bus.bus.forget(b"first")
    assert bus.sent() == [b"first", b"second"]


def test_gathered_commands_have_a_limit() -> None:
    bus, before = Bus(), ids(3 * MOST_GATHERED)
    bus.send(*before)
    bus.answer(*before)
    bus.sent()
    for n in range(3):
        names = ids(MOST_GATHERED, b"%d" % n)
        bus.send(*names[:-1])
        assert not bus.sent()
        bus.send(names[-1])
        assert bus.sent() == names


def test_callers_of_answers_that_arrive_together_wake_one_after_another() -> None:
    bus, names = Bus(), ids(4)
    bus.send(*names)
    bus.answer(*names)
    for at, name in enumerate(names):
        assert bus.awake(*names[at:]) == [name]
        assert bus.wait(name) == b"y"


def test_a_command_that_is_forgotten_delays_no_other_answer() -> None:
    bus, names = Bus(), ids(3)
    bus.send(*names)
    bus.bus.forget(names[0])
    bus.answer(*names)
    assert bus.awake(*names[1:]) == [names[1]]


def test_callers_wake_though_the_one_before_does_nothing() -> None:
    bus, names = Bus(), ids(4)
    bus.send(*names)
    bus.answer(*names)
    bus.receive_nothing()
    assert bus.awake(*names) == names


def test_new_answers_wake_a_caller_though_the_one_before_does_nothing() -> None:
    bus, names = Bus(), ids(4)
    bus.send(*names)
    bus.answer(*names[:3])
    bus.answer(names[3])
    assert bus.awake(*names) == names[:2]


def test_a_caller_whose_time_is_over_wakes_the_next() -> None:
    bus, names = Bus(), ids(3)
    bus.send(*names)
    bus.answer(*names)
    assert bus.wait(names[2]) is None
    assert bus.awake(*names) == names[:2]
