"""A control partition with streams whose topics are deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.schemas.records import (
    Begin,
    Commit,
    DescribeStreams,
    GetState,
    Outcome,
    Receipt,
    Refusal,
    StreamList,
    Touch,
    Touched,
)
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.world import World
from tests.core.labels import SECRET, Begun

GONE, OTHER = "nyc/gone", "nyc/other"
TOPICS = (stream_topic, journal_topic, history_topic)
KEYS = tuple(b"k%d" % n for n in range(8))
LOST_S = 30.0


class Killed(BaseException):
    """The process ends here."""


class Play:
    """A control partition with two streams; one loses a topic."""

    def __init__(self, **settings: Any) -> None:
        self.world = World()
        self.store = MemoryStore()
        self.controller = self.world.led(store=self.store, **settings)
        self.world.stream(self.controller, GONE)
        self.world.stream(self.controller, OTHER)
        assert self.one_shot(GONE) == self.one_shot(OTHER) == "COMMITTED"

    def lead_anew(self, *, keeps_table: bool = True, **settings: Any) -> None:
        """Another process takes over."""
        self.controller.table.close()
        self.store = self.store if keeps_table else MemoryStore()
        self.controller = self.world.controller(store=self.store, **settings)
        self.controller.lead()  # which may fail

    def ask(self, command: Any, *, seconds: float = 0.0) -> Any:
        """The answer. ``seconds``: pass between the steps."""
        correlation_id = self.world.send(command)
        for _ in range(20):
            self.play(1, seconds)
            answer = self.world.reply(correlation_id)
            if answer is not None:
                return answer
        raise AssertionError(f"no answer to {command}")

    def play(self, steps: int, seconds: float = 0.0) -> None:
        """Steps of the controller; a stream's trouble must not end its lead."""
        for _ in range(steps):
            self.controller.step(0)
            self.world.clock.sleep(seconds / steps)

    def one_shot(self, stream: str) -> str:
        """The state of a one-shot's transaction, or what it was refused with."""
        answer = self.ask(self.world.one_shot(stream, partition=0))
        return answer.code if isinstance(answer, Refusal) else str(answer.state)

    def begun(self, *streams: str, size: int = 8) -> tuple[bytes, bytes, Receipt]:
        """(id, token, receipt) of a transaction that has written to these streams."""
        txn_id = self.world.txn_id()
        begun = self.ask(Begin(txn_id, "nyc", None, 600_000, SECRET))
        assert isinstance(begun, Begun)
        extents: list[Any] = []
        for stream in streams:
            touched = self.ask(Touch(begun.token, stream))
            assert isinstance(touched, Touched)
            events = [(key, b"x" * size) for key in KEYS]
            receipt = self.world.write(
                txn_id,
                1,
                stream,
                touched.segments,
                events,
                epoch=touched.stream_epoch,
                one_batch=False,
            )
            extents += receipt.extents
        self.play(3)
        return txn_id, begun.token, Receipt(txn_id, 1, 1, True, tuple(extents))

    def send_commit(self, token: bytes, receipt: Receipt) -> bytes:
        """The command's correlation id."""
        return self.world.send(Commit(token, (receipt,), None, None, 600_000))

    def commit(self, token: bytes, receipt: Receipt) -> Outcome:
        """Commit a transaction."""
        outcome = self.ask(Commit(token, (receipt,), None, None, 60_000), seconds=0.2)
        assert isinstance(outcome, Outcome), outcome
        assert outcome.state == "COMMITTED"
        return outcome

    def check_committed(self, commit: bytes, count: int) -> None:
        """The answer to a commit that was sent."""
        outcome = self.world.reply(commit)
        assert isinstance(outcome, Outcome), outcome
        assert (outcome.state, outcome.committed) == ("COMMITTED", count)

    def stream_state(self, stream: str) -> str:
        found = self.ask(DescribeStreams(None, stream))
        assert isinstance(found, StreamList)
        return found.streams[0].state

    def state(self, txn_id: bytes) -> tuple[str, str]:
        outcome = self.ask(GetState(txn_id))
        assert isinstance(outcome, Outcome)
        return outcome.state, outcome.reason

    def make_anew(self, topic: str) -> None:
        info = self.world.cluster.topics[topic]
        self.world.cluster.delete_topic(topic)
        spec = TopicSpec(topic, info.partitions, dict(info.config))
        self.world.cluster.log("somebody").create_topics([spec])

    def begins(self, stream: str) -> list[int]:
        """The first offset of each partition."""
        topic = stream_topic(stream)
        places = [
            TopicPartition(topic, p) for p in range(self.world.cluster.topics[topic].partitions)
        ]
        starts = self.world.cluster.log("reader").start_offsets(places)
        return [starts[place] for place in places]

    def dies(self, call: str, nth: int = 1) -> bool:
        """Steps until the leader is killed at the n-th such call, or made no more such calls."""
        count = 0

        def called(_: str, what: str) -> None:
            nonlocal count
            count += what == call
            if count == nth:
                raise Killed

        self.world.cluster.on_call = called
        try:
            self.play(20, 4.0)
        except Killed:
            return True
        finally:
            self.world.cluster.on_call = None
        return False

    def events(self, stream: str) -> int:
        places = [TopicPartition(stream_topic(stream), p) for p in (0, 1)]
        return sum(len(self.world.committed(place)) for place in places)


P = TypeVar("P", bound=Play)


def killed_at(
    call: str, start: Callable[[], tuple[P, Any]], check_log: Callable[[P], None] = lambda _: None
) -> Iterator[tuple[P, bytes]]:
    """A leader that carries out a command is killed at its first such call, at its second, and so on.

    Each play, and the command's correlation id, once a successor has answered; every other successor begins
    with an empty table. ``check_log``: what holds before it leads. ``start``: a new play, and the command.
    """
    for nth in range(1, 20):
        play, command = start()
        asked = play.world.send(command)
        if not play.dies(call, nth):
            assert nth > 1, f"{call} is never called"
            return
        check_log(play)
        play.lead_anew(keeps_table=bool(nth % 2))
        play.play(20, 4.0)
        if play.world.reply(asked) is None:  # lost with its leader
            play.world.send(command, again=asked)
            play.play(2, 0.2)
        yield play, asked
    raise AssertionError(f"there is no end of calls of {call}")
