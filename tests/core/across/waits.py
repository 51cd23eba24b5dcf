"""How long one-shots wait beside transactions over two control partitions, by the real decisions in virtual time.

A round takes 4 ms, a message or a client's way 1 ms, each give or take 30 %, and decisions take nothing. So the
figures don't depend on the machine: they show the waits for rounds and holds alone. Each client commits one-shots
without a pause. ``python -m tests.core.across.waits`` prints what docs/performance.md has.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from anabranch.core.decisions.across import holding, receiving
from anabranch.core.decisions.decide import catch_up, decide, decide_due
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from tests.core.across.leaders import SCOPES, SHOT_SECRET, Leader, Leaders, Sent
from tests.core.harness import World, event

ROUND_MS, WAY_MS, PASS_MS, AGAIN_MS = 4.0, 1.0, 0.3, 20.0
OVER = ("nyc/a", "ber/a")  # the coordinator's stream comes first
OTHERS = ("nyc/b", "ber/b")
WARM = 5  # commits of a client that don't count


class Waits:
    """Two leaders, clients, and a clock."""

    def __init__(self, seed: int = 0) -> None:
        self.leaders, self.rnd = Leaders(2), Random(seed)
        self.now, self.order = 0.0, itertools.count()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.inbox: list[list[Any]] = [[], []]
        self.busy = [False, False]
        self.asking: dict[bytes, Callable[[Any], None]] = {}
        self.began = [(one.wall_us, one.now_ms) for one in self.leaders.all]
        for one, stream in zip(self.leaders.all, OTHERS, strict=True):
            one.create(stream)
            one.created(stream, 0, 0)

    def run(self, until_ms: float) -> None:
        while self.due and self.due[0][0] <= until_ms:
            self.now, _, do = heapq.heappop(self.due)
            do()

    def later(self, ms: float, do: Callable[[], None]) -> None:
        at = self.now + ms * self.rnd.uniform(0.7, 1.3)
        heapq.heappush(self.due, (at, next(self.order), do))

    # -- leaders -------------------------------------------------------------------------------------

    def give(self, number: int, item: Any) -> None:
        self.inbox[number].append(item)
        self.wake(number)

    def wake(self, number: int) -> None:
        if not self.busy[number]:
            self.busy[number] = True
            self.later(PASS_MS, lambda: self.step(number))

    def step(self, number: int) -> None:
        """A pass: messages, then commands, then what is due. Its round is written if it has anything."""
        one, (wall_us, now_ms) = self.leaders[number], self.began[number]
        one.wall_us, one.now_ms = wall_us + int(1000 * self.now), now_ms + int(self.now)
        given, self.inbox[number] = self.inbox[number], []
        turn = one.new_turn()
        for each in given:
            if isinstance(each, Sent):
                receiving.receive(turn, decode(each.payload), each.payload, each.mac, each.seen)
        for each in given:
            if not isinstance(each, Sent):
                name, payload = each
                catch_up(turn, payload)
                turn.lane, turn.seen = one.lane, None
                decide(turn, decode(payload), one.asker(name))
        decide_due(turn, judge_silence=False)
        World.close(one, turn)
        self.write(one, number, turn.hybrid_time)

    def write(self, one: Leader, number: int, seen: int) -> None:
        round_ = one.rounds.pop()
        one.log.clear()
        self.say(number, round_.questions, round_.facts, seen)

        def written() -> None:
            self.say(number, round_.messages, round_.replies, seen)
            self.busy[number] = False
            if self.inbox[number]:
                self.wake(number)
            else:
                self.wake_when_due(one, number)

        self.later(0.0 if round_.empty else ROUND_MS, written)

    def wake_when_due(self, one: Leader, number: int) -> None:
        waits = (
            one.memory.holds.due_ms(one.now_ms),
            receiving.next_due_ms(one.memory.across, one.now_ms),
        )
        if pauses := [ms for ms in waits if ms is not None]:
            self.later(max(1, min(pauses)), lambda: self.wake(number))

    def say(self, number: int, messages: Any, answers: Any, seen: int) -> None:
        sent = [Sent(number, message, seen) for message in messages]
        if sent:
            self.later(WAY_MS, lambda: self.deliver(sent))
        for to, result in answers:
            if (then := self.asking.pop(to.correlation_id, None)) is not None:
                self.later(WAY_MS, partial(then, result))

    def deliver(self, sent: list[Sent]) -> None:
        for one in sent:
            self.give(one.receiver, one)

    # -- clients -------------------------------------------------------------------------------------

    def client(self, *streams: str) -> list[float]:
        """Commit one-shots to these streams, one after the other; how long each takes, ms."""
        took: list[float] = []

        def begin() -> None:
            at = self.now

            def done(result: Any) -> None:
                assert result.state == "COMMITTED", result
                took.append(self.now - at)
                begin()

            self.commit(streams, done)

        begin()
        return took

    def commit(self, streams: tuple[str, ...], done: Callable[[Any], None]) -> None:
        label = f"L{next(self.order)}"
        places = [SCOPES.index(stream.partition("/")[0]) for stream in streams]
        home, *others = places
        txn_id = self.leaders[home].id(self.leaders[home].new_id(label, partition=home))
        for number, stream in zip(places, streams, strict=True):
            command = r.OneShot(txn_id, SCOPES[number], None, (event(stream, b"k"),))
            if others:
                to = tuple(others) if number == home else ()
                command = command._replace(secret=SHOT_SECRET, places=to)
            self.send(
                number, f"{label}@{number}", encode(command), done if number == home else None
            )

    def send(self, number: int, name: str, payload: bytes, done: Any) -> None:
        def answered(result: Any) -> None:
            if getattr(result, "code", "") == "NotReady":
                self.later(AGAIN_MS, lambda: self.send(number, name, payload, done))
            else:
                done(result)

        if done is not None:
            self.asking[name.encode()] = answered
        self.later(WAY_MS, lambda: self.give(number, (name, payload)))


def figures(stream: str, beside: int, clients: int, ms: float) -> tuple[float, float, float]:
    """p50, mean and p99 of one-shots to a stream, ms. ``beside``: transactions over two partitions at once."""
    waits = Waits()
    for _ in range(beside):
        waits.client(*OVER)
    each = [waits.client(stream) for _ in range(clients)]
    waits.run(ms)
    took = [ms for one in each for ms in one[WARM:]]
    cuts = statistics.quantiles(took, n=100)
    return cuts[49], statistics.mean(took), cuts[98]


def main() -> None:
    print(
        "| at once; beside | at the coordinator | at the participant | … not ahead | another stream |"
    )
    for clients, beside in ((1, 1), (1, 8), (8, 8), (8, 32)):
        found = []
        for stream, ahead_ms in ((OVER[0], 50), (OVER[1], 50), (OVER[1], 0), (OTHERS[1], 50)):
            with patch.object(holding, "AHEAD_MS", ahead_ms):
                its = figures(stream, beside, clients, 2_000)
            found.append(", ".join(f"{ms:.1f}" for ms in its))
        print(f"| {clients}; {beside} |", " | ".join(found), "|", flush=True)


if __name__ == "__main__":
    main()
