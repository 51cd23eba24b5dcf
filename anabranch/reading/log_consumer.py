"""Reading committed records over the raw log, and its errors as those of the client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from anabranch.batches.records import Record, decode_records
from anabranch.errors import (
    FixCallError,
    MalformedRecord,
    NotAuthorized,
    NotReady,
    SnapshotExpired,
    UnknownStream,
)
from anabranch.kafka.log import KafkaLog
from anabranch.librdkafka.options import Options
from anabranch.ports import (
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
    CorruptBatch,
    Fetched,
    Log,
    LogDenied,
    LogError,
    LogRefused,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    TopicPartition,
)

_SLICE_S = 0.5  # an answer without news comes after so long
BEHIND_S = 0.2  # before a broker that is behind is asked again
_FEW_BYTES = 1 << 10  # to be fetched where few records are asked for; one batch comes at least
_MANY_BYTES = 1 << 20
_FEW = 16


def raw_log(options: Options, timeout: float) -> KafkaLog:
    """A log over connections of our own. ``timeout``: seconds that an answer may take.

    Raises: UnsupportedSetting, if an option can't be honoured there.
    """
    wait = {"request.timeout.ms": max(1, int(timeout * 1000))}
    return KafkaLog(options.bootstrap, wait | options.raw_reader())


def expired(what: str) -> SnapshotExpired:
    """The error for an offset that is not there any more."""
    return SnapshotExpired(f"{what}: retention has removed it; read what is newer, or keep more")


@contextmanager
def named_errors() -> Iterator[None]:
    """Errors of the log, raised again as those that say what to do."""
    try:
        yield
    except LogDenied as error:
        raise NotAuthorized(str(error)) from error
    except LogUnavailable as error:
        raise NotReady(f"the brokers can't be read: {error}") from error
    except LogRefused as error:
        if error.error == UNKNOWN_TOPIC_OR_PARTITION:
            raise UnknownStream(f"{error}: create the stream first") from error
        if error.error == TOPIC_AUTHORIZATION_FAILED:
            raise NotAuthorized(f"the right Read on the topic is missing: {error}") from error
        raise FixCallError(f"the brokers refuse: {error}") from error
    except CorruptBatch as error:
        raise MalformedRecord(str(error)) from error
    except LogError as error:
        raise NotReady(f"the brokers can't be read: {error}") from error


def fetch_committed(
    log: Log, place: TopicPartition, position: int, *, wait: float, max_bytes: int
) -> Fetched | None:
    """What is committed from a position on; None if nothing came. ``wait``: seconds, at most 0.5 at a time."""
    with named_errors():
        try:
            found = log.fetch(
                {place: position},
                max_wait=max(0.0, min(wait, _SLICE_S)),
                max_bytes=max_bytes,
                committed=True,
            )
        except OffsetOutOfRange as error:
            if position < log.start_offsets([place])[place]:
                raise expired(str(error)) from error
            time.sleep(
                max(0.0, min(wait, BEHIND_S))
            )  # its broker is behind, or the range ends too high
            return None
    return found.get(place)


class LogMessage(NamedTuple):
    """A record as confluent-kafka's consumer would give it."""

    place: TopicPartition
    record: Record

    def topic(self) -> str:
        return self.place.topic

    def offset(self) -> int:
        return self.record.offset

    def value(self) -> bytes | None:
        return self.record.value


class LogConsumer:
    """What a history is searched with (`HistoryConsumer`, `HistoryEnds`), over the raw log. For one thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._place = TopicPartition("", 0)
        self._position = self._first = 0
        self._high: int | None = None  # of the partition, as last seen
        self._batches: deque[RawBatch] = deque()
        self._messages: list[LogMessage] = []
        self.ended_at = -1

    def assign(self, places: Mapping[tuple[str, int], int]) -> None:
        """Read one partition from an offset on."""
        (((topic, partition), offset),) = places.items()
        self._place = TopicPartition(topic, partition)
        self._position = offset
        self._high = None
        self._batches.clear()
        self._messages = []
        self.ended_at = -1

    def next_batch(self, deadline: float, limit: int = 2000) -> Sequence[LogMessage]:
        """Records, at least one unless the deadline (monotonic seconds) passes or the end is met."""
        while not self._messages:
            if self._batches:
                self._messages = self._decoded(self._batches.popleft())
                continue
            at_end = self._high is not None and self._position >= self._high
            if at_end and self.ended_at != self._position:
                self.ended_at = self._position
                return []
            left = deadline - time.monotonic()
            few = _FEW_BYTES if limit < _FEW else _MANY_BYTES
            found = fetch_committed(
                self._log, self._place, self._position, wait=left, max_bytes=few
            )
            if found is None:
                if left <= 0:
                    return []
                continue
            self._first = self._position
            self._batches.extend(found.batches)
            self._position, self._high = found.next_offset, found.high_watermark
        out, self._messages = self._messages[:limit], self._messages[limit:]
        return out

    def _decoded(self, batch: RawBatch) -> list[LogMessage]:
        """Its records from the position on that was fetched from."""
        with named_errors():
            records = decode_records(batch.data)
        return [LogMessage(self._place, r) for r in records if r.offset >= self._first]

    def offset_for_time(self, topic: str, unix_ms: int, timeout: float) -> int | None:
        """The first offset of partition 0 at or after a millisecond, None if there is none."""
        place = TopicPartition(topic, 0)
        with named_errors():
            return self._log.offsets_for_time([place], unix_ms)[place]

    def start_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float
    ) -> dict[tuple[str, int], int]:
        """The first offsets that are still there."""
        with named_errors():
            found = self._log.start_offsets([TopicPartition(t, p) for t, p in partitions])
        return {(place.topic, place.partition): offset for place, offset in found.items()}

    def end_offsets(
        self, partitions: Iterable[tuple[str, int]], deadline: float
    ) -> dict[tuple[str, int], int]:
        """The high watermarks."""
        with named_errors():
            found = self._log.end_offsets(
                [TopicPartition(t, p) for t, p in partitions], committed=False
            )
        return {(place.topic, place.partition): offset for place, offset in found.items()}
