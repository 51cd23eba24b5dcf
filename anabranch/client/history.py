"""Tells of an event's offset which commit put it there, by the stream's history.

COMMIT records come in commit order, and so do the offsets on every partition: history and events are read side
by side. A COMMIT record is in the same native transaction as its data, so it is there, or arrives at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from confluent_kafka import TopicPartition

from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import CommittedConsumer, CommittedMessage
from anabranch.client.options import Options
from anabranch.core.ids import NO_TXN
from anabranch.errors import DeadlineExceeded
from anabranch.schemas.codec import decode
from anabranch.schemas.records import CommitRecord, EpochRecord
from anabranch.topics.names import history_topic

_PROBE_S = 10.0
_BACK = 16  # the first step back from the history's end, then 8 times as far, …
NO_SEGMENT = -1


class Span(NamedTuple):
    """Offsets [first, end) of a partition that one commit put there."""

    first: int
    end: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int


class HistoryIndex:
    """The commits of one stream, from given positions on. Used by one thread."""

    def __init__(self, options: Options, admin: KafkaAdmin, stream: str, timeout: float) -> None:
        self._stream = stream
        self._topic = history_topic(stream)
        self._admin = admin
        self._timeout = timeout
        self._consumer = CommittedConsumer(options, admin, group=None, start="begin", eof=True)
        self._spans: dict[int, deque[Span]] = {}
        self._covered_from: dict[int, int] = {}
        self._vector: dict[int, int] = {}
        self._last_timestamp = 0

    def cover(self, positions: Mapping[int, int]) -> None:
        """Be able to find every offset from these positions (partition -> offset) on."""
        self._spans = {partition: deque() for partition in positions}
        self._covered_from = dict(positions)
        self._vector = {}
        self._consumer.native.assign([TopicPartition(self._topic, 0, self._locate(positions))])

    def find(self, partition: int, offset: int) -> Span:
        """The commit of an offset. Ask in rising order for each partition.

        `DeadlineExceeded` if the history doesn't show it within the client's timeout.
        """
        if offset < self._covered_from.get(partition, offset + 1):
            self.cover({**self._covered_from, partition: offset})
        spans = self._spans[partition]
        deadline = time.monotonic() + self._timeout
        while True:
            while spans and spans[0].end <= offset:
                spans.popleft()
            if spans and spans[0].first <= offset:
                self._covered_from[partition] = offset
                return spans[0]
            if self._vector.get(partition, 0) > offset:
                # The history has passed it without naming it.
                return Span(offset, offset + 1, None, self._last_timestamp, NO_SEGMENT)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the history of {self._stream} does not show offset {offset} of partition {partition}"
                )
            self._read(min(deadline, time.monotonic() + 1.0))

    def _read(self, deadline: float) -> None:
        for message in self._consumer.next_batch(deadline):
            record = _record_of(message)
            if isinstance(record, CommitRecord):
                txn_id = None if record.txn_id == NO_TXN else record.txn_id
                for part in record.segments:
                    spans = self._spans.get(part.partition)
                    if spans is not None:
                        spans.append(
                            Span(part.first, part.end, txn_id, record.timestamp, part.segment_id)
                        )
            if isinstance(record, CommitRecord | EpochRecord):
                self._last_timestamp = record.timestamp
                for position in record.vector:
                    self._vector[position.partition] = position.offset

    # -- where to begin -------------------------------------------------------------------------------

    def _locate(self, positions: Mapping[int, int]) -> int:
        """The offset of the first history record that goes beyond any of the positions, or one before it.

        Vectors only grow, so the records can be searched by halving, from the end, where readers mostly are.
        """
        deadline = time.monotonic() + self._timeout
        start = self._admin.start_offsets([(self._topic, 0)], deadline)[self._topic, 0]
        high = self._admin.end_offsets([(self._topic, 0)], deadline)[self._topic, 0]
        if not any(positions.values()):
            return start
        step, low = _BACK, start
        probe = max(start, high - step)
        while probe > start:  # find a low that is not beyond yet
            if not self._is_beyond(probe, positions):
                low = probe
                break
            high, step = probe, step * 8
            probe = max(start, probe - step)
        while high - low > _BACK:
            middle = (low + high) // 2
            if self._is_beyond(middle, positions):
                high = middle
            else:
                low = middle
        return low

    def _is_beyond(self, offset: int, positions: Mapping[int, int]) -> bool:
        """Whether the first record at or after this offset goes beyond any position (or there is none)."""
        self._consumer.native.assign([TopicPartition(self._topic, 0, offset)])
        batch: list[CommittedMessage] = []
        deadline = time.monotonic() + _PROBE_S
        while not batch and not self._consumer.at_end and time.monotonic() < deadline:
            batch = self._consumer.next_batch(deadline, limit=1)
        if not batch:
            return True
        record = _record_of(batch[0])
        return any(p.offset > positions.get(p.partition, p.offset) for p in record.vector)

    def close(self) -> None:
        """Free everything."""
        self._consumer.close()

    def leak(self) -> None:
        """In a forked child: free nothing, ever."""
        self._consumer.leak()


def _record_of(message: CommittedMessage) -> Any:
    return decode(message.value() or b"")
