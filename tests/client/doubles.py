"""A clock and a command bus whose every answer a test decides."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.batches.columns_write import EventColumns, Placing
from anabranch.client.ports import ClientPorts, Journals
from anabranch.errors import AnabranchError, EventTooLarge, NotReady, WriteFailed
from anabranch.ports import Entropy, JournalRecord, Opened, RecordHeaders, TopicPartition
from anabranch.protocol.ids import command_digest
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.reading.history import SafeTimeOf
from anabranch.testing.memory.cluster import SteppedClock

START_S = 1_700_000_000.0
HYBRID_TIME = 7

# An answer: a record; a text is dropped silence; (seconds, record) comes later; several are a list.
Answer = Any
Script = Callable[[Any], Answer]


class ManualClock(SteppedClock):
    """Time passes only by waiting."""

    def __init__(self) -> None:
        super().__init__(1000.0, START_S)


def _no_question(_at: int | None, _until: float) -> int:
    raise AssertionError("one control partition serves all streams: no controller need be asked")


NEVER_ASKED = SafeTimeOf(False, _no_question)


def counted() -> Entropy:
    """Bytes that differ at each call, and never by chance."""
    numbers = itertools.count(1)
    return lambda n: next(numbers).to_bytes(8, "big").rjust(n, b"\0")[-n:]


@dataclass
class Sent:
    """A command as it left the client."""

    at: float
    partition: int
    correlation_id: bytes
    command: Any


@dataclass
class ScriptedBus:
    """See `CommandBus`. ``script`` answers each command; None is silence."""

    clock: ManualClock
    script: Script = lambda command: None
    sent: list[Sent] = field(default_factory=list)
    max_bytes: int = 1 << 20
    is_ready: bool = True
    partitions: int = 1
    grows_to: int = 8  # the answer when it is asked again
    too_large: bool = False
    _due: list[tuple[float, bytes, bytes | AnabranchError]] = field(default_factory=list)
    _slots: dict[bytes, deque[bytes | AnabranchError]] = field(default_factory=dict)

    def ready(self, deadline: float) -> None:
        if not self.is_ready:
            self.clock.now = max(self.clock.now, deadline)
            raise NotReady("no topics")

    def control_partitions(self, deadline: float, least: int = 0, *, afresh: bool = False) -> int:
        if self.partitions < least <= self.grows_to:
            self.partitions = least
        return self.partitions

    def cluster_id(self, deadline: float) -> str:
        return "memory"

    def max_command_bytes(self) -> int:
        return self.max_bytes

    def send(
        self,
        control_partition: int,
        correlation_id: bytes,
        payload: bytes,
        more: RecordHeaders = (),
        *,
        waits: bool = True,
    ) -> None:
        command = decode(payload)
        if waits:
            self._slots.setdefault(correlation_id, deque())
        self.sent.append(Sent(self.clock.now, control_partition, correlation_id, command))
        answers = self.script(command)
        for answer in answers if isinstance(answers, list) else [answers]:
            delay, result = answer if type(answer) is tuple else (0.0, answer)
            if result is not None:
                digest = command_digest(payload)
                # A reply is sent as it is: forged, perhaps.
                forged = isinstance(result, r.Reply)
                whole = result if forged else r.Reply(correlation_id, digest, HYBRID_TIME, result)
                reply = result if isinstance(result, AnabranchError) else encode(whole)
                self._due.append((self.clock.now + delay, correlation_id, reply))
        self._due.sort(key=lambda due: due[0])

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        if self.too_large:
            raise EventTooLarge("the broker said so")
        slot = self._slots.get(correlation_id)
        if slot is None:
            return None
        while not slot and self._due and self._due[0][0] <= deadline:
            at, to, reply = self._due.pop(0)
            self.clock.now = max(self.clock.now, at)
            if to in self._slots:
                self._slots[to].append(reply)
        if slot:
            answer = slot.popleft()
            if isinstance(answer, AnabranchError):
                raise answer
            return answer
        self.clock.now = max(self.clock.now, deadline)
        return None

    def forget(self, correlation_id: bytes) -> None:
        self._slots.pop(correlation_id, None)

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def after_fork(self) -> None:
        pass

    def names(self) -> list[str]:
        """The commands sent, by name."""
        return [type(sent.command).__name__ for sent in self.sent]

    def of(self, kind: type) -> list[Any]:
        """The commands of one kind."""
        return [sent.command for sent in self.sent if isinstance(sent.command, kind)]


@dataclass
class ListJournal:
    """A `JournalWriter` that keeps its records."""

    limit: int = 1000
    written: list[tuple[str, int, bytes | None, bytes | None, RecordHeaders, int]] = field(
        default_factory=list
    )
    fails: bool = False
    state: str = "open"

    def open(self, topic: str, partitions: Iterable[int], deadline: float) -> Opened:
        return Opened(dict.fromkeys(partitions, 5), self.limit)

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        timestamp_ms: int,
    ) -> None:
        if not isinstance(value, bytes | None):
            raise TypeError("as confluent-kafka does")
        self.written.append((topic, partition, key, value, list(headers), timestamp_ms))

    def write_many(self, topic: str, records: Iterable[JournalRecord]) -> None:
        for record in records:
            self.write(topic, *record)

    def write_columns(self, topic: str, placing: Placing, columns: EventColumns) -> None:
        """Takes none."""

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        if self.fails:
            raise WriteFailed("not acknowledged")
        return {
            place: 5 + sum(1 for w in self.written if (w[0], w[1]) == place) for place in written
        }

    def discard(self) -> None:
        self.state = "discarded"


@dataclass
class ListJournals:
    """See `Journals`."""

    limit: int = 1000
    made: list[ListJournal] = field(default_factory=list)

    def writer(self) -> ListJournal:
        self.made.append(ListJournal(self.limit))
        return self.made[-1]

    def close(self) -> None:
        pass

    def after_fork(self) -> None:
        pass


def scripted_ports(
    script: Script, *, journals: Journals | None = None
) -> tuple[ScriptedBus, ManualClock, ClientPorts]:
    """All ports of a client that talks to a script."""
    clock = ManualClock()
    bus = ScriptedBus(clock, script)
    return bus, clock, ClientPorts(bus, journals or ListJournals(), clock, counted())
