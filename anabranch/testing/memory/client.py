"""The client's ports over the in-memory log, so that a simulator can drive clients in one thread.

These ports have no thread: the caller that waits for a reply reads the replies itself. At each call to the
log the simulator may switch, inject an error, or end the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from anabranch.batches.records import Record, decode_records
from anabranch.client.client import Client
from anabranch.client.ports import ClientPorts
from anabranch.errors import DeadlineExceeded, NotReady, WriteFailed
from anabranch.ports import (
    Clock,
    Entropy,
    JournalRecord,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    Opened,
    RecordHeaders,
    TopicGone,
    TopicPartition,
)
from anabranch.protocol import defaults
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.reading.iteration import Readers
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.names import DEFAULT_PREFIX, commands_topic, replies_topic

if TYPE_CHECKING:
    from anabranch.batches.columns_write import EventColumns, Placing

_SLICE_S = 0.25
_PAUSE_S = 0.01
_FETCH_BYTES = 1 << 20
_FRAMING = 512
_LIMIT = "max.message.bytes"


def memory_client(
    log: MemoryLog,
    clock: Clock,
    entropy: Entropy,
    *,
    prefix: str = DEFAULT_PREFIX,
    lane: str = OPEN_LANE,
    timeout: float = defaults.TIMEOUT_S,
    one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
    batch_records: int = 100,
    readers: Readers | None = None,
) -> Client:
    """A client on an in-memory log. Drive its heartbeats with `Client.heart`: ``step``, then ``hear``."""
    bus = MemoryBus(log, clock, entropy, prefix, lane)
    journals = MemoryJournals(log, clock, batch_records)
    ports = ClientPorts(
        bus, journals, clock, entropy, readers, prefix, lane, lambda _: nullcontext(log)
    )
    return Client(ports, timeout=timeout, one_shot_bytes=one_shot_bytes, threads=False)


class MemoryBus:
    """Commands and replies as records of the in-memory log."""

    def __init__(
        self,
        log: MemoryLog,
        clock: Clock,
        entropy: Entropy,
        prefix: str,
        lane: str = OPEN_LANE,
    ) -> None:
        self._log = log
        self._clock = clock
        self._entropy = entropy
        self._commands = commands_topic(prefix, lane)
        self._replies = replies_topic(prefix, lane)
        self._slots: dict[bytes, deque[bytes]] = {}
        self._place: TopicPartition | None = None
        self._position = 0
        self._partitions = 0
        self._max_bytes = 0
        self._trouble = ""
        self._closed = False

    def ready(self, deadline: float) -> None:
        while not self._started():
            if self._clock.monotonic() >= deadline:
                raise NotReady("the topics do not exist: start `anabranch controller`")
            self._clock.sleep(_SLICE_S)

    def _started(self) -> bool:
        if self._place is None:
            try:
                self._start()
            except LogError as error:
                self._trouble = str(error)
        return self._place is not None

    def _start(self) -> None:
        found = self._log.describe_topics([self._commands, self._replies])
        if len(found) == 2:
            number = int.from_bytes(self._entropy(4), "big") % found[self._replies].partitions
            place = TopicPartition(self._replies, number)
            self._position = self._log.end_offsets([place], committed=True)[place]
            self._partitions = found[self._commands].partitions
            self._max_bytes = int(found[self._commands].config.get(_LIMIT, 1 << 20))
            self._place = place

    def control_partitions(self, deadline: float, least: int = 0, *, afresh: bool = False) -> int:
        known = self._log.cluster.topics.get(self._commands)
        if known is not None and (afresh or self._partitions < least):
            self._partitions = known.partitions
        return self._partitions

    def cluster_id(self, deadline: float) -> str:
        return "memory"

    def max_command_bytes(self) -> int:
        return self._max_bytes - _FRAMING

    def send(
        self,
        control_partition: int,
        correlation_id: bytes,
        payload: bytes,
        more: RecordHeaders = (),
        *,
        waits: bool = True,
    ) -> None:
        if self._closed or self._place is None:
            return
        if waits:
            self._slots.setdefault(correlation_id, deque())
        headers = (
            (CORRELATION_HEADER, correlation_id),
            (REPLY_HEADER, self._place.partition.to_bytes(4, "big")),
            *more,
        )
        record = Record(0, _now_ms(self._clock), None, payload, headers)
        try:
            self._log.produce(TopicPartition(self._commands, control_partition), [record])
        except LogError as error:
            self._trouble = str(error)  # the command may have been stored: only an answer shows it

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        slot = self._slots.setdefault(correlation_id, deque())
        while True:
            if slot:
                return slot.popleft()
            if self._closed or self._slots.get(correlation_id) is not slot:
                return None
            left = deadline - self._clock.monotonic()
            self._receive(max(0.0, min(left, _SLICE_S)))
            if left <= 0 and not slot:
                return None

    def _receive(self, max_wait: float) -> None:
        if self._place is None:
            self._clock.sleep(max_wait)
            return
        try:
            fetched = self._log.fetch(
                {self._place: self._position},
                max_wait=max_wait,
                max_bytes=_FETCH_BYTES,
                committed=True,
            ).get(self._place)
        except OffsetOutOfRange:
            self._go_to_the_end(self._place)
            return
        except LogError as error:
            self._trouble = str(error)
            self._clock.sleep(_PAUSE_S)
            return
        if fetched is None:
            return
        for batch in fetched.batches:
            for record in decode_records(batch.data):
                # Another caller of this process may have read the same records meanwhile.
                if record.offset >= self._position and record.key and record.value:
                    slot = self._slots.get(record.key)
                    if slot is not None:
                        slot.append(record.value)
        self._position = max(self._position, fetched.next_offset)

    def _go_to_the_end(self, place: TopicPartition) -> None:
        """Skip unread replies that retention removed: their commands are sent again."""
        try:
            end = self._log.end_offsets([place], committed=True)[place]
        except LogError as error:
            self._trouble = str(error)
            self._clock.sleep(_PAUSE_S)
        else:
            self._position = max(self._position, end)

    def forget(self, correlation_id: bytes) -> None:
        self._slots.pop(correlation_id, None)

    def trouble(self) -> str:
        return self._trouble

    def close(self) -> None:
        self._closed = True

    def after_fork(self) -> None:
        """Nothing to do: the simulator does not fork."""


class MemoryJournals:
    """Makes journal writers on the in-memory log."""

    def __init__(self, log: MemoryLog, clock: Clock, batch_records: int) -> None:
        self._log = log
        self._clock = clock
        self._batch_records = batch_records

    def writer(self) -> MemoryJournal:
        return MemoryJournal(self._log, self._clock, self._batch_records)

    def close(self) -> None:
        """Nothing to free."""

    def after_fork(self) -> None:
        """Nothing to do: the simulator does not fork."""


class MemoryJournal:
    """One writer's records. A batch is written when it is full, and by `flush`."""

    def __init__(self, log: MemoryLog, clock: Clock, batch_records: int) -> None:
        self._log = log
        self._clock = clock
        self._batch_records = batch_records
        self._queued: dict[TopicPartition, list[Record]] = {}
        self._failure: str | None = None

    def open(self, topic: str, partitions: Sequence[int], deadline: float) -> Opened:
        while True:
            try:
                places = [TopicPartition(topic, p) for p in partitions]
                ends = self._log.end_offsets(places, committed=False)
                info = self._log.describe_topics([topic]).get(topic)
                if info is None:
                    raise TopicGone(f"there is no topic {topic}", topic)
            except LogError as error:
                self._pause(deadline, error)
            else:
                limit = int(info.config.get(_LIMIT, 1 << 20))
                return Opened({place.partition: ends[place] for place in places}, limit)

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        timestamp_ms: int,
    ) -> None:
        self._check()
        place = TopicPartition(topic, partition)
        stamp = timestamp_ms or _now_ms(self._clock)
        queued = self._queued.setdefault(place, [])
        queued.append(Record(0, stamp, key, value, tuple(headers)))
        if len(queued) >= self._batch_records:
            self._write_batch(place)

    def write_many(self, topic: str, records: Iterable[JournalRecord]) -> None:
        for record in records:
            self.write(topic, *record)

    def write_columns(self, topic: str, placing: Placing, columns: EventColumns) -> None:
        """None: the caller writes the rows as events."""

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        self._check()
        for place in list(self._queued):
            self._write_batch(place)
        while True:
            try:
                ends = self._log.end_offsets(written, committed=False)
                for place, least in written.items():
                    if ends[place] < least:
                        raise LogUnavailable(f"{place} ends at {ends[place]}: its leader is behind")
                return ends
            except LogError as error:
                self._pause(deadline, error)

    def _write_batch(self, place: TopicPartition) -> None:
        records = self._queued.pop(place, [])
        if not records:
            return
        try:
            self._log.produce(place, records)
        except LogError as error:
            self._failure = f"a write to {place.topic}[{place.partition}] failed: {error}"
            self._check()

    def _pause(self, deadline: float, error: LogError) -> None:
        if self._clock.monotonic() >= deadline:
            raise DeadlineExceeded(f"the log can't be asked; call again: {error}") from error
        self._clock.sleep(_PAUSE_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise WriteFailed(f"{self._failure}; join again and rewrite")

    def discard(self) -> None:
        self._queued.clear()
        self._failure = self._failure or "the writer was discarded"


def _now_ms(clock: Clock) -> int:
    return int(clock.wall() * 1000)
