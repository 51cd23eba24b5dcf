"""The kit's place between a client and the controllers: it sees each command, and decides about each answer.

A client under test uses a prefix of its own, whose topics no controller reads. A `Wire` passes its commands on to
the controllers' topics, byte for byte, and their replies back. A script may hold commands back, drop or delay
answers, and add false ones.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from anabranch.batches.format import read_header
from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.errors import AnabranchError
from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogError, TopicPartition, TopicSpec
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    DECIDED_HEADER,
    REPLY_HEADER,
    TIME_HEADER,
    WAIT_HEADER,
    command_digest,
)
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, decode_as, encode
from anabranch.topics.names import commands_topic, replies_topic

REPLIES = 2  # partitions of a client's replies
# Added to the hybrid time of replies to FindScope, which a client must not keep: an hour.
FOREIGN_TIME = 3_600_000_000 << 12
_PASSED_ON = (TIME_HEADER, WAIT_HEADER, DECIDED_HEADER)
_WAIT_S = 0.02
_FETCH_BYTES = 8 << 20
_SETTLE_S = 10.0


@dataclass(slots=True)
class Sent:
    """A copy of a command as the client sent it.

    ``command``: the decoded record; None if it is not one, and ``fault`` says why. ``copy``: its number among the
    copies of its correlation id, from 1. ``at``: monotonic seconds. ``floor``: the highest time in replies that the
    client had surely taken in before. ``producer``: the id of the producer; below 0 if it is not idempotent.
    """

    partition: int
    payload: bytes
    headers: dict[str, bytes]
    at: float
    command: Any = None
    fault: str = ""
    copy: int = 1
    floor: int = 0
    producer: int = -1
    transactional: bool = False

    @property
    def cid(self) -> bytes:
        """The correlation id."""
        return self.headers.get(CORRELATION_HEADER, b"")

    @property
    def kind(self) -> str:
        """The name of the command's record."""
        return type(self.command).__name__

    @property
    def time(self) -> int:
        """Its ``ab.ht``; -1 if it has none."""
        return int.from_bytes(self.headers.get(TIME_HEADER, b"\xff" * 8), "big", signed=True)


@dataclass(slots=True)
class Treatment:
    """A script's decision about a copy of a command, and about its answers.

    ``forward``: pass it on to the controllers. ``answer``: pass their answer back, after ``delay`` seconds and as
    ``change`` makes it. ``false``: (key, value) of replies that are made up; they come at once, before any other.
    ``sure``: whether the client has to take the true answer, and so its time.
    """

    forward: bool = True
    answer: bool = True
    delay: float = 0.0
    false: Sequence[tuple[bytes | None, bytes | None]] = ()
    change: Callable[[r.Reply], r.Reply] = lambda reply: reply
    sure: bool = True


PASS = Treatment()
Script = Callable[[Sent], Treatment]


@dataclass
class Wire:
    """The topics of one client, and the thread that passes records between them and the controllers' topics.

    ``lane``: the controllers' lane to which commands go. ``sent``: all copies of commands, in their order.
    """

    log: KafkaLog  # of this wire alone
    real_prefix: str
    lane: str
    prefix: str = field(default_factory=lambda: f"conformance-{os.urandom(5).hex()}")
    script: Script = lambda _: PASS
    sent: list[Sent] = field(default_factory=list)
    touched: dict[tuple[bytes, str], r.Touched] = field(default_factory=dict)
    begun: dict[bytes, r.Begun] = field(default_factory=dict)
    highest: int = 0  # the highest time in true answers passed on
    certain: int = 0  # the same of those that the client has to take
    floor: int = 0
    trouble: str = ""

    def __post_init__(self) -> None:
        real = commands_topic(self.real_prefix, self.lane)
        self.partitions = self.log.partition_counts([real])[real]
        commands, replies = commands_topic(self.prefix), replies_topic(self.prefix)
        self.log.create_topics(
            [
                TopicSpec(commands, self.partitions, {"max.message.bytes": "2097152"}),
                TopicSpec(replies, REPLIES, {}),
            ]
        )
        self._real_commands = real
        self._real_replies = TopicPartition(replies_topic(self.real_prefix, self.lane), 0)
        self._commands = {TopicPartition(commands, n): 0 for n in range(self.partitions)}
        self._at = dict.fromkeys(self._commands, 0)
        self._at |= self.log.end_offsets([self._real_replies], committed=False)
        self._copies: dict[bytes, list[tuple[Sent, Treatment]]] = {}
        self._held: list[Sent] = []
        self._taken: set[bytes] = set()  # ids with an answer that the client has to take
        self._due: list[tuple[float, int, TopicPartition, Record]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conformance-wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and delete the client's topics."""
        self._closed.set()
        self._thread.join(_SETTLE_S)
        names = [commands_topic(self.prefix), replies_topic(self.prefix)]
        with suppress(LogError):
            self.log.delete_topics(list(self.log.describe_topics(names).values()))
        self.log.close()

    # -- what was sent ----------------------------------------------------------------------------------

    def of(self, kind: type) -> list[Sent]:
        """All copies of commands of a kind."""
        return [sent for sent in self.sent if isinstance(sent.command, kind)]

    def first_copies(self) -> list[Sent]:
        """The first copy of each command."""
        return [sent for sent in self.sent if sent.copy == 1]

    def await_sent(self, wanted: Callable[[Sent], bool], seconds: float) -> Sent | None:
        """The first copy that fits, once it is there; None after ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for sent in list(self.sent):
                if wanted(sent):
                    return sent
            self._closed.wait(_WAIT_S)
        return None

    def mark(self) -> None:
        """Note that the client has taken in all answers so far: later commands have their times."""
        self.floor = self.certain

    def release(self) -> int:
        """Pass on all copies that were held back. Returns their number."""
        with self._lock:
            held, self._held = self._held, []
            for sent in held:
                self._forward(sent)
        return len(held)

    def reply(self, sent: Sent, value: bytes | None, key: bytes | None = None) -> None:
        """Send the client a reply, under the command's id unless another key is given."""
        with self._lock:
            self._put(sent, sent.cid if key is None else key, value, 0.0)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                fetched = self.log.fetch(
                    self._at, max_wait=_WAIT_S, max_bytes=_FETCH_BYTES, committed=False
                )
                for place, part in fetched.items():
                    for batch in part.batches:
                        self._take(place, bytes(batch.data))
                    self._at[place] = part.next_offset
                self._flush()
            except LogError as error:
                self.trouble = str(error)
                self._closed.wait(_WAIT_S)

    def _take(self, place: TopicPartition, batch: bytes) -> None:
        header = read_header(batch)
        for record in decode_records(batch):
            if record.offset < self._at[place]:
                continue
            with self._lock:
                if place == self._real_replies:
                    self._answered(record)
                    continue
                headers = {name: value or b"" for name, value in record.headers}
                sent = Sent(
                    place.partition,
                    record.value or b"",
                    headers,
                    time.monotonic(),
                    floor=self.floor,
                )
                sent.producer, sent.transactional = header.producer_id, header.is_transactional
                self._sent(sent)

    def _sent(self, sent: Sent) -> None:
        try:
            sent.command = decode(sent.payload)
        except AnabranchError as error:
            sent.fault = str(error)
        copies = self._copies.setdefault(sent.cid, [])
        sent.copy = len(copies) + 1
        self.sent.append(sent)
        treatment = self.script(sent)
        copies.append((sent, treatment))
        for key, value in treatment.false:
            self._put(sent, key, value, 0.0)
        if treatment.forward:
            self._forward(sent)
        else:
            self._held.append(sent)

    def _forward(self, sent: Sent) -> None:
        partition = self._real_replies.partition.to_bytes(4, "big")
        headers: list[tuple[str, bytes | None]] = [
            (CORRELATION_HEADER, sent.cid),
            (REPLY_HEADER, partition),
        ]
        headers += [(n, sent.headers[n]) for n in _PASSED_ON if n in sent.headers]
        record = Record(0, int(time.time() * 1000), None, sent.payload, tuple(headers))
        place = TopicPartition(self._real_commands, sent.partition)
        heapq.heappush(self._due, (0.0, next(self._order), place, record))

    def _answered(self, record: Record) -> None:
        copies = self._copies.get(record.key or b"")
        if not copies:
            return  # another client's
        sent, treatment = next((pair for pair in reversed(copies) if pair[1].forward), copies[-1])
        reply = decode_as(r.Reply, record.value or b"")
        if isinstance(reply.result, r.Touched):
            self.touched[sent.command.token, reply.result.stream] = reply.result
        if isinstance(reply.result, r.Begun):
            self.begun[reply.result.txn_id] = reply.result
        if not treatment.answer:
            return
        reply = treatment.change(reply)
        if isinstance(reply.result, r.ScopeInfo):
            reply = reply._replace(hybrid_time=reply.hybrid_time + FOREIGN_TIME)
        else:
            self.highest = max(self.highest, reply.hybrid_time)
            if treatment.sure and sent.cid not in self._taken:
                self._taken.add(sent.cid)
                self.certain = max(self.certain, reply.hybrid_time)
        self._put(sent, sent.cid, encode(reply), treatment.delay)

    def _put(self, sent: Sent, key: bytes | None, value: bytes | None, delay: float) -> None:
        partition = int.from_bytes(sent.headers.get(REPLY_HEADER, b""), "big")
        if partition < REPLIES:
            record = Record(0, int(time.time() * 1000), key, value)
            place = TopicPartition(replies_topic(self.prefix), partition)
            due = time.monotonic() + delay if delay else 0.0
            heapq.heappush(self._due, (due, next(self._order), place, record))

    def _flush(self) -> None:
        batches: dict[TopicPartition, list[Record]] = {}
        with self._lock:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, place, record = heapq.heappop(self._due)
                batches.setdefault(place, []).append(record)
        ready = [(place, encode_batch(records)) for place, records in batches.items()]
        failed: dict[TopicPartition, LogError] = {}
        self.log.send(ready, failed)
        for place, error in failed.items():
            self.trouble = f"{place}: {error}"


def answer_to(sent: Sent, result: Any, hybrid_time: int = 0) -> bytes:
    """A reply as a controller would frame it."""
    return encode(r.Reply(sent.cid, command_digest(sent.payload), hybrid_time, result))


def broken_replies(sent: Sent) -> Iterator[tuple[str, bytes | None]]:
    """Replies under the right id that are no `Reply` of this protocol, each with its fault."""
    whole = answer_to(sent, r.Refusal("TransactionAborted", "made up by the conformance kit"))
    yield "without a value", None
    yield "empty", b""
    yield "of level 7f", b"\x7f" + whole[1:]
    yield "of an unknown type", whole[:1] + b"\x7e" + whole[2:]
    yield "of a command's type", whole[:1] + b"\x04" + whole[2:]
    yield "cut", whole[:-3]
    yield "too long", whole + b"\0"
    yield "with a length beyond its end", whole[:2] + b"\xfe\xff\xff\xff\x0f" + whole[3:]
    branch = 2 + 1 + len(sent.cid) + 1 + len(command_digest(b"")) + 1
    yield "with an unknown branch", whole[:branch] + b"\x7e" + whole[branch + 1 :]
    yield "with the result of another command", answer_to(sent, r.Registered(1))
