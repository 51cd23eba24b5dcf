"""A client in one file that shares no code with the library's: docs/protocol.md by hand.

The caller makes the steps; nothing else is sent or asked, and every id can be given. While it
waits for an answer it calls ``idle``, so that a test can start the next controller there.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from anabranch.batches.records import decode_records
from anabranch.ports import Log, TopicPartition
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.protocol.schemas.records import Extent, Receipt, Refusal, Reply, SegmentRange
from anabranch.topics.names import commands_topic, replies_topic
from tests.core.labels import proved

REPEAT_S = 1.0
REPEAT_ALL_S = 5.0
POLL_S = 0.1
DEADLINE_S = 20.0


class Refused(Exception):
    """The controller refused a command: ``code`` is the name of the error."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.message}")
        self.code = refusal.code


class NoAnswer(Exception):
    """No answer came before the deadline."""


def position(key: bytes) -> int:
    """A key's position among 2^32 (protocol, section 7)."""
    h = zlib.crc32(key)
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def partition_of(key: bytes, segments: Iterable[SegmentRange]) -> int:
    """The partition of the segment that holds a key."""
    at = position(key)
    return next(s.partition for s in segments if s.low <= at < s.high)


def make_txn_id(control_partition: int = 0) -> bytes:
    """A new transaction id (section 5)."""
    now = int(time.time() * 1000)
    return control_partition.to_bytes(2, "big") + now.to_bytes(6, "big") + os.urandom(8)


def make_writer() -> int:
    """64 random bits, signed."""
    return int.from_bytes(os.urandom(8), "big", signed=True)


@dataclass
class Written:
    """A writer's account of one journal partition."""

    first: int = -1
    end: int = -1
    count: int = 0
    crc_sum: int = 0


@dataclass
class Pen:
    """One writer of one transaction."""

    client: Raw
    txn_id: bytes
    epoch: int = 0
    writer: int = field(default_factory=make_writer)
    sequence: int = 0
    accounts: dict[tuple[str, int], Written] = field(default_factory=dict)

    @property
    def header(self) -> tuple[str, bytes]:
        """Its ab.txn header."""
        value = self.txn_id + self.writer.to_bytes(8, "big", signed=True)
        return "ab.txn", value + self.epoch.to_bytes(4, "big", signed=True)

    def write(
        self,
        stream: str,
        segments: Sequence[SegmentRange],
        events: Iterable[tuple[bytes, bytes]],
        timestamp: int = 0,
    ) -> None:
        """Write events and wait for their acknowledgements."""
        events = list(events)
        places = [(stream, partition_of(key, segments)) for key, _ in events]
        journal = stream.replace("/", ".") + ".journal"
        records = [
            (journal, p, k, v, [self.header]) for (_, p), (k, v) in zip(places, events, strict=True)
        ]
        offsets = self.client.produce(records, timestamp)
        for place, offset, (key, value) in zip(places, offsets, events, strict=True):
            account = self.accounts.setdefault(place, Written())
            account.first = offset if account.count == 0 else min(account.first, offset)
            account.end = max(account.end, offset + 1)
            account.count += 1
            account.crc_sum = (account.crc_sum + zlib.crc32(value, zlib.crc32(key))) % (1 << 63)

    def receipt(self, *, finished: bool = True) -> Receipt:
        """The receipt of all that was written."""
        self.sequence += 1
        extents = tuple(
            Extent(stream, partition, a.first, a.end, a.count, a.crc_sum)
            for (stream, partition), a in self.accounts.items()
        )
        return Receipt(self.txn_id, self.writer, self.sequence, finished, extents)


_Record = tuple[str, int, bytes | None, bytes | None, list[tuple[str, bytes]]]


class Raw:
    """Speaks with the controller of one control partition. One thread at a time."""

    def __init__(
        self,
        bootstrap: str,
        prefix: str,
        log: Log,
        producer: Producer | None = None,
        *,
        reply_partition: int = 0,
        lane: str = OPEN_LANE,
        partition: int = 0,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """``log``: a `KafkaLog` to read replies with. ``producer`` can be shared by many."""
        self.prefix = prefix
        self.commands = commands_topic(prefix, lane)
        self.log = log
        self.producer = producer or quick_producer(bootstrap)
        self.idle = idle
        self.partition = partition
        self.hybrid_time = 0
        self.answers: dict[bytes, list[Any]] = {}
        self._replies = TopicPartition(replies_topic(prefix, lane), reply_partition)
        self._position = -1

    def start(self) -> Raw:
        """Stand at the end of the replies (section 3)."""
        self._position = self.log.end_offsets([self._replies], committed=False)[self._replies]
        return self

    def correlation_id(self) -> bytes:
        """16 random bytes."""
        return os.urandom(16)

    # -- commands -------------------------------------------------------------------------------------

    def send(self, command: Any, correlation_id: bytes) -> None:
        """Send a command (a record, or bytes) once, without waiting for anything."""
        payload = command if isinstance(command, bytes) else encode(command)
        headers = [
            ("ab.cid", correlation_id),
            ("ab.reply", self._replies.partition.to_bytes(4, "big")),
        ]
        self.producer.produce(
            self.commands,
            payload,
            None,
            self.partition,
            headers=headers,  # type: ignore[arg-type]
        )

    def ask(
        self, command: Any, *, deadline_s: float = DEADLINE_S, correlation_id: bytes | None = None
    ) -> Any:
        """Send until it is answered (section 11); a refusal is raised as `Refused`."""
        cid = correlation_id or self.correlation_id()
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            self.send(command, cid)
            result = self.wait(cid, min(REPEAT_S, until - time.monotonic()))
            if result is not None:
                if isinstance(result, Refusal):
                    raise Refused(result)
                return result
        raise NoAnswer(f"{type(command).__name__} was not answered in {deadline_s:g} s")

    def ask_all(self, commands: Sequence[Any], *, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Many at once; refusals are among the answers."""
        waiting = {self.correlation_id(): command for command in commands}
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            for cid, command in waiting.items():
                if cid not in self.answers:
                    self.send(command, cid)
            again = min(until, time.monotonic() + REPEAT_ALL_S)
            while time.monotonic() < again:
                if self.answers.keys() >= waiting.keys():
                    return [self.answers[cid][0] for cid in waiting]
                self.poll()
        raise NoAnswer(f"{len(commands)} commands were not all answered in {deadline_s:g} s")

    def wait(self, correlation_id: bytes, seconds: float) -> Any | None:
        """The first answer under a correlation id, or None."""
        until = time.monotonic() + seconds
        while correlation_id not in self.answers:
            if time.monotonic() >= until:
                return None
            self.poll()
        return self.answers[correlation_id][0]

    def poll(self, seconds: float = POLL_S) -> None:
        """Take in replies."""
        self.producer.poll(0)
        self.idle()
        fetched = self.log.fetch(
            {self._replies: self._position}, max_wait=seconds, max_bytes=4 << 20, committed=True
        ).get(self._replies)
        if fetched is None:
            return
        for batch in fetched.batches:
            for record in decode_records(batch.data):
                if record.offset >= self._position and record.key is not None:
                    reply: Reply = decode(record.value or b"")
                    self.hybrid_time = max(self.hybrid_time, reply.hybrid_time)
                    self.answers.setdefault(record.key, []).append(proved(reply.result))
        self._position = fetched.next_offset

    # -- journals -------------------------------------------------------------------------------------

    def produce(self, records: Sequence[_Record], timestamp: int = 0) -> list[int]:
        """Produce records and wait for their offsets. ``timestamp``: Unix milliseconds; 0: now."""
        offsets: list[int] = [-1] * len(records)
        left = len(records)
        lock = threading.Lock()
        problems: list[KafkaError] = []

        def delivered(at: int) -> Callable[[KafkaError | None, Message], None]:
            def note(error: KafkaError | None, message: Message) -> None:
                nonlocal left
                with lock:
                    left -= 1
                    if error is not None:
                        problems.append(error)
                    else:
                        offsets[at] = message.offset() or 0

            return note

        for at, (topic, partition, key, value, headers) in enumerate(records):
            self.producer.produce(
                topic,
                value,
                key,
                partition,
                on_delivery=delivered(at),
                timestamp=timestamp,
                headers=headers,  # type: ignore[arg-type]
            )
        until = time.monotonic() + DEADLINE_S
        while left and time.monotonic() < until:
            self.producer.poll(0.05)
            self.idle()
        if problems or left:
            raise AssertionError(f"{left} of {len(records)} not delivered: {problems[:3]}")
        return offsets


def quick_producer(bootstrap: str, **more: Any) -> Producer:
    """An idempotent producer that sends at once."""
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 2,
            "retry.backoff.ms": 20,
            "log_level": 0,
            "topic.metadata.refresh.fast.interval.ms": 20,
            **more,
        }
    )
