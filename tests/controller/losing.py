"""A control partition with streams whose topics are deleted."""

from __future__ import annotations

from typing import Any

from anabranch.batches.records import Record
from anabranch.core.authorize import ALL
from anabranch.core.rows import grant_key
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import (
    Begin,
    DescribeStreams,
    Event,
    GetState,
    GrantRow,
    OneShot,
    Outcome,
    Receipt,
    Refusal,
    StreamList,
    Touch,
    Touched,
)
from anabranch.topics.names import history_topic, journal_topic, status_topic, stream_topic
from tests.controller.world import World
from tests.core.labels import SECRET, Begun
from tests.memory.table import MemoryStore

GONE, OTHER = "nyc/gone", "nyc/other"
TOPICS = (stream_topic, journal_topic, history_topic)
KEYS = tuple(b"k%d" % n for n in range(8))
LOST_S = 30.0


class Play:
    """A control partition with two streams; one loses a topic."""

    def __init__(self, **settings: Any) -> None:
        self.world = World()
        self.store = MemoryStore()
        grant = GrantRow("open", "*", int(ALL))  # these clients are operators, too
        row = Record(0, 0, grant_key("open", "*"), encode(grant))
        self.world.cluster.produce(TopicPartition(status_topic("anabranch"), 0), [row])
        self.controller = self.world.controller(store=self.store, **settings)
        self.controller.lead()
        self.world.stream(self.controller, GONE)
        self.world.stream(self.controller, OTHER)
        assert self.one_shot(GONE) == self.one_shot(OTHER) == "COMMITTED"

    def lead_anew(self, *, keeps_table: bool = True, **settings: Any) -> None:
        """Another process takes over."""
        self.controller.table.close()
        self.store = self.store if keeps_table else MemoryStore()
        self.controller = self.world.controller(store=self.store, **settings)
        self.controller.lead()

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
        event = Event(stream, 0, b"k", b"v", (), -1)
        answer = self.ask(OneShot(self.world.txn_id(), "nyc", None, (event,)))
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

    def events(self, stream: str) -> int:
        places = [TopicPartition(stream_topic(stream), p) for p in (0, 1)]
        return sum(len(self.world.committed(place)) for place in places)
