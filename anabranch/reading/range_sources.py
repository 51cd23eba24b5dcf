"""Where ranges are fetched from: the raw log, or a confluent-kafka consumer with the same result."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from confluent_kafka import KafkaError, Message
from confluent_kafka import TopicPartition as Place

from anabranch.batches.records import Record, encode_sparse
from anabranch.clock import SystemClock
from anabranch.errors import FixCallError, UnknownStream
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import make_consumer
from anabranch.librdkafka.group_member import HOPELESS, NO_GROUP, CommittedConsumer, partitions_of
from anabranch.librdkafka.options import Options
from anabranch.ports import Fetched, RawBatch, TopicPartition
from anabranch.reading.commit_index import CommitHistory, KafkaParts, LogParts
from anabranch.reading.headers import headers_of
from anabranch.reading.history_search import HistorySearch
from anabranch.reading.log_consumer import BEHIND_S, LogConsumer, expired, fetch_committed, raw_log

log = logging.getLogger("anabranch.client")

_MESSAGES = 10_000
_SLICE_S = 0.5
_UNKNOWN = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
)
_OUT_OF_RANGE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)  # noqa: SLF001
_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001


class Source(Protocol):
    """Committed batches of any partition, and the histories of streams."""

    def fetch(
        self, place: TopicPartition, position: int, wait: float, max_bytes: int
    ) -> Fetched | None:
        """What is committed from a position on; None if nothing came within ``wait`` seconds, or some of them.

        ``max_bytes``: so many are enough.
        """

    def commits(self, stream: str, partition: int) -> CommitHistory:
        """Reads the history for one partition; the one before is not used any more."""

    def close(self) -> None:
        """Free everything."""


class RawSource:
    """Over connections of our own."""

    def __init__(self, options: Options, timeout: float) -> None:
        """Raises: UnsupportedSetting, if an option can't be honoured there."""
        self._log = raw_log(options, timeout)
        self._history = LogConsumer(self._log)
        self._timeout = timeout

    def fetch(
        self, place: TopicPartition, position: int, wait: float, max_bytes: int
    ) -> Fetched | None:
        return fetch_committed(self._log, place, position, wait=wait, max_bytes=max_bytes)

    def commits(self, stream: str, partition: int) -> CommitHistory:
        search = HistorySearch(self._history, self._history, stream, self._timeout)
        return CommitHistory(LogParts(self._log), search, stream, partition, self._timeout)

    def close(self) -> None:
        """Close the connections."""
        self._log.close()


class KafkaSource:
    """Over librdkafka. Its messages are put into batches again, so that all that follows is the same."""

    def __init__(self, options: Options, timeout: float) -> None:
        self._timeout = timeout
        self._admin = KafkaAdmin(options, SystemClock())
        self._history = CommittedConsumer(options, group=None, eof=True)
        config = options.reader(NO_GROUP, "error") | {"enable.partition.eof": True}
        self._consumer = make_consumer(options, config, lambda _: None)
        self._next: tuple[TopicPartition, int] | None = None  # where the consumer stands

    def fetch(
        self, place: TopicPartition, position: int, wait: float, max_bytes: int
    ) -> Fetched | None:
        if self._next != (place, position):
            self._consumer.assign([Place(place.topic, place.partition, position)])
            self._next = place, position
        after = position
        records: list[Record] = []
        first = self._consumer.poll(max(0.0, min(wait, _SLICE_S)))
        if first is not None:
            for message in [first, *self._consumer.consume(_MESSAGES, 0)]:
                after = max(after, self._take(message, place, position, records))
        if after == position:
            return None
        self._next = place, after
        batches = []
        if records:
            base, end = records[0].offset, records[-1].offset + 1
            data = encode_sparse(records, base_offset=base, next_offset=end)
            batches.append(RawBatch(base, end, memoryview(data)))
        return Fetched(batches, after, -1, -1, -1)

    def _take(
        self, message: Message, place: TopicPartition, position: int, records: list[Record]
    ) -> int:
        """Where to read on behind a message; it is added to the records if it is one."""
        error = message.error()
        offset = message.offset()
        if error is None and offset is not None:
            if offset < position:
                return position
            _, milliseconds = message.timestamp()
            headers = headers_of(message)
            records.append(Record(offset, milliseconds, message.key(), message.value(), headers))
            return offset + 1
        code = error.code() if error is not None else None
        if code == _EOF:
            return offset or 0
        what = f"{message.topic()}[{message.partition()}]: {error}"
        if code in _OUT_OF_RANGE:
            self._out_of_range(place, position)
        if code in _UNKNOWN:
            raise UnknownStream(f"{what}: create the stream first")
        if code in HOPELESS:
            raise FixCallError(f"can't read {what}")
        log.info("reading: %s", what)
        return position

    def _out_of_range(self, place: TopicPartition, position: int) -> None:
        """Too low; else its broker is behind, or the range ends too high, and it is asked again."""
        start = self._admin.start_offsets([place], time.monotonic() + self._timeout)[place]
        if position < start:
            raise expired(f"{place.topic}[{place.partition}] has no offset {position}")
        self._next = None
        time.sleep(BEHIND_S)

    def commits(self, stream: str, partition: int) -> CommitHistory:
        partitions_of(self._admin, [stream], time.monotonic() + self._timeout)
        search = HistorySearch(self._history, self._admin, stream, self._timeout)
        return CommitHistory(KafkaParts(self._history), search, stream, partition, self._timeout)

    def close(self) -> None:
        """Leave no handle behind."""
        self._consumer.close()
        self._history.close()
