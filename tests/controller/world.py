"""A controller over the in-memory log, driven by hand: send commands, step, read what it said."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.batches.records import Record, decode_records
from anabranch.controller.controller import Controller
from anabranch.core.authorize import ALL
from anabranch.core.decisions.turn import Settings
from anabranch.core.rows import grant_key
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    REPLY_HEADER,
    TXN_HEADER,
    make_txn_id,
    pack_txn_header,
)
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.partitioner import position_of, record_checksum
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.protocol.schemas.records import (
    Begin,
    CreateStream,
    Event,
    Extent,
    FindScope,
    GrantRow,
    OneShot,
    Receipt,
    Reply,
    SegmentRange,
    SetLane,
    Touch,
    Touched,
)
from anabranch.testing.memory.cluster import SteppedClock
from anabranch.testing.memory.log import MemoryBrokers
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.creation import create_control_topics
from anabranch.topics.names import commands_topic, journal_topic, replies_topic, status_topic
from tests.core.labels import SECRET, Begun, proved


@dataclass
class World:
    """A cluster in memory with any number of controllers, stepped by the test."""

    control_partitions: int = 1
    clock: SteppedClock = field(default_factory=SteppedClock)
    cluster: MemoryBrokers = field(init=False)
    lane_of: dict[bytes, str] = field(default_factory=dict)  # by correlation id
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.cluster = MemoryBrokers(self.clock)
        create_control_topics(
            self.cluster.log("setup"), "anabranch", control_partitions=self.control_partitions
        )
        # Operators ask by lane open, too: the rights of lanes have tests of their own (tests/core).
        row = Record(
            0, 0, grant_key(OPEN_LANE, "*"), encode(GrantRow(OPEN_LANE, "*", int(ALL))), ()
        )
        for partition in range(self.control_partitions):
            self.cluster.produce(TopicPartition(status_topic(), partition), [row])

    def controller(
        self,
        name: str = "c",
        partition: int = 0,
        *,
        store: MemoryStore | None = None,
        **settings: Any,
    ) -> Controller:
        """A controller that does not lead yet."""
        return Controller(
            self.cluster.log(name),
            (store or MemoryStore()).open(name),
            self.clock,
            Settings(
                partition,
                self.control_partitions,
                "anabranch",
                reply_partitions=8,
                **({"trusts_open": True} | settings),
            ),
            leader=name,
        )

    def led(self, name: str = "c", partition: int = 0, **how: Any) -> Controller:
        """A controller that leads."""
        controller = self.controller(name, partition, **how)
        controller.lead()
        return controller

    def send(
        self,
        command: Any,
        partition: int = 0,
        *,
        headers: bool = True,
        again: bytes | None = None,
        lane: str = OPEN_LANE,
        more: tuple[tuple[str, bytes | None], ...] = (),
    ) -> bytes:
        """Append a command; returns its correlation id. ``again``: that of the command that is repeated."""
        correlation_id = again or struct.pack(">QQ", 7, next(self._ids))
        payload = command if isinstance(command, bytes) else encode(command)
        sent = ((CORRELATION_HEADER, correlation_id), (REPLY_HEADER, bytes(4))) if headers else ()
        record = Record(0, 0, b"", payload, (*sent, *more))
        self.lane_of[correlation_id] = lane
        self.cluster.produce(TopicPartition(commands_topic(lane=lane), partition), [record])
        return correlation_id

    def reply(self, correlation_id: bytes) -> Any:
        """The answer to a command, or None; answers of aborted native transactions don't count."""
        found = self.replies(correlation_id)
        assert len(found) < 2, "answered twice"
        return found[0] if found else None

    def replies(self, correlation_id: bytes) -> list[Any]:
        """The answers to a command that was repeated."""
        found = []
        lane = self.lane_of.get(correlation_id, OPEN_LANE)
        for record in self.committed(TopicPartition(replies_topic(lane=lane), 0), correlation_id):
            if record.key == correlation_id:
                answer = decode(record.value or b"")
                assert isinstance(answer, Reply)
                found.append(proved(answer.result))
        return found

    def ask(
        self, controller: Controller, command: Any, steps: int = 4, lane: str = OPEN_LANE
    ) -> Any:
        """Send, step until it is answered, and return the answer."""
        correlation_id = self.send(command, controller.settings.control_partition, lane=lane)
        for _ in range(steps):
            controller.step(0)
            answer = self.reply(correlation_id)
            if answer is not None:
                return answer
        raise AssertionError(f"no answer to {command}")

    def steps(self, controller: Controller, count: int, seconds: float = 0.0) -> None:
        """Passes of the controller's loop. ``seconds``: pass after each."""
        for _ in range(count):
            controller.step(0)
            self.clock.sleep(seconds)

    def committed(self, partition: TopicPartition, having: bytes = b"") -> list[Record]:
        """The records that a read_committed reader sees; ``having``: only of batches with these bytes in them."""
        log = self.cluster.log("reader")
        position = log.start_offsets([partition])[partition]
        out: list[Record] = []
        while True:
            got = log.fetch({partition: position}, max_wait=0, max_bytes=1 << 24, committed=True)
            if partition not in got or got[partition].next_offset == position:
                return out
            for batch in got[partition].batches:
                if having in bytes(batch.data):
                    out += [r for r in decode_records(batch.data) if r.offset >= position]
            position = got[partition].next_offset

    def stream(self, controller: Controller, stream: str, segments: int = 2) -> None:
        """Create a stream and its scope."""
        self.ask(controller, FindScope(stream.partition("/")[0], True))
        self.ask(controller, CreateStream(stream, segments, {}))

    def begin(
        self,
        controller: Controller,
        stream: str,
        *,
        name: str | None = None,
        keepalive_ms: int = 60_000,
    ) -> tuple[bytes, bytes, Touched]:
        """(id, token, where to write) of a transaction that has touched the stream."""
        txn_id = self.txn_id()
        scope = stream.partition("/")[0]
        begun = self.ask(controller, Begin(txn_id, scope, name, keepalive_ms, SECRET))
        assert isinstance(begun, Begun)
        touched = self.ask(controller, Touch(begun.token, stream))
        assert isinstance(touched, Touched)
        return txn_id, begun.token, touched

    def lane(self, controller: Controller, lane: str, blocked: bool = False) -> Any:
        """Make a lane, with its topics, or change it; the answer."""
        names = commands_topic(lane=lane), replies_topic(lane=lane)
        log = self.cluster.log("operator")
        if not log.describe_topics(names):
            counts = self.control_partitions, 1
            log.create_topics(list(map(TopicSpec, names, counts)))
        ids = tuple(log.describe_topics([name])[name].topic_id for name in names)
        return self.ask(controller, SetLane(lane, blocked, ids, {}), lane=ADMIN_LANE)

    def txn_id(self, partition: int = 0) -> bytes:
        return make_txn_id(partition, int(self.clock.wall() * 1000), next(self._ids))

    def take_away(self, topic: str) -> Callable[[], None]:
        """Delete a topic; what is returned brings it back as it was."""
        cluster = self.cluster
        info = cluster.topics[topic]
        kept = {place: log for place, log in cluster.partitions.items() if place.topic == topic}
        cluster.delete_topic(topic)

        def bring_back() -> None:
            cluster.topics[topic] = info
            cluster.partitions.update(kept)

        return bring_back

    def one_shot(
        self,
        stream: str,
        key: bytes = b"k",
        value: bytes = b"v",
        *,
        partition: int = -1,
        name: str | None = None,
    ) -> OneShot:
        """The command for a transaction of one event."""
        event = Event(stream, partition, key, value, (), -1)
        return OneShot(self.txn_id(), stream.partition("/")[0], name, (event,))

    def write(
        self,
        txn_id: bytes,
        writer: int,
        stream: str,
        segments: tuple[SegmentRange, ...],
        events: list[tuple[bytes, bytes]],
        *,
        epoch: int = 0,
        one_batch: bool = True,
    ) -> Receipt:
        """Journal writes of (key, value) by one writer, and their receipt."""
        header = ((TXN_HEADER, pack_txn_header(txn_id, writer, epoch)),)
        extents = []
        for segment in segments:
            mine = [e for e in events if segment.low <= position_of(e[0]) < segment.high]
            if not mine:
                continue
            tp = TopicPartition(journal_topic(stream), segment.partition)
            records = [Record(0, 1, key, value, header) for key, value in mine]
            groups = [records] if one_batch else [[record] for record in records]
            bases = [self.cluster.produce(tp, group) for group in groups]
            crc_sum = sum(record_checksum(key, value) for key, value in mine) % (1 << 63)
            end = bases[-1] + len(groups[-1])
            extents.append(Extent(stream, segment.partition, bases[0], end, len(mine), crc_sum))
        return Receipt(txn_id, writer, 1, True, tuple(extents))


def leading(stream: str, segments: int = 2, **settings: Any) -> tuple[World, Controller]:
    """A world, and a controller that leads in it and has created the stream."""
    world = World()
    controller = world.led(**settings)
    world.stream(controller, stream, segments)
    return world, controller
