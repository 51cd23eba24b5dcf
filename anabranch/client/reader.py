"""Reading committed events: `Client.read`."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import TopicPartition

from anabranch.client.history import HistoryIndex, Span
from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import (
    CommittedConsumer,
    CommittedMessage,
    check_group,
    check_start,
    check_timeout,
    partitions_of,
)
from anabranch.client.options import Options
from anabranch.client.types import Event
from anabranch.core.ids import TXN_HEADER, TXN_ID_SIZE
from anabranch.topics.names import stream_topic

COMMIT_EVERY_S = 1.0


class Reader(Iterator[Event]):
    """Committed events, one after the other. An iterator; close it, or use it as a context manager.

    With a group, its members share the partitions, and each goes on where the group has come to. An event
    counts as processed when the next one is asked for; positions are committed every second or so, when
    partitions move to another member, and at `close`. So each event comes at least once. One thread at a time.
    """

    def __init__(
        self,
        options: Options,
        admin: KafkaAdmin,
        streams: Sequence[str],
        group: str | None,
        timeout: float | None,
        start: str,
        ask_timeout: float,
    ) -> None:
        self._closed = True  # until all is made
        self._streams = {stream_topic(stream): stream for stream in streams}
        self._group = check_group(group)
        self._timeout = check_timeout(timeout)
        self._start = check_start(start)
        counts = partitions_of(admin, list(streams), time.monotonic() + ask_timeout)
        self._indexes = {
            topic: HistoryIndex(options, admin, stream, ask_timeout)
            for topic, stream in self._streams.items()
        }
        self._positions: dict[str, dict[int, int]] = {}
        self._to_cover: set[str] = set()
        self._spans: dict[tuple[str, int], Span] = {}
        self._processed: dict[tuple[str, int], int] = {}
        self._next_commit = time.monotonic() + COMMIT_EVERY_S
        self._assigned_by = time.monotonic() + ask_timeout
        self._assigned = False
        self._batch: Iterator[CommittedMessage] = iter(())
        self._given: tuple[tuple[str, int], int] | None = None
        self._events: Generator[Event, None, None] | None = None
        self._consumer = CommittedConsumer(options, admin, group=group, start=start)
        self._closed = False
        if group is None:
            self._gained([TopicPartition(t, p) for t, n in counts.items() for p in range(n)])
        else:
            self._consumer.subscribe(list(counts), self._gained, self._lost)

    # A loop holds only the generator, and that the reader: leaving the loop frees both, at once.

    def __iter__(self) -> Generator[Event, None, None]:
        return self._run()

    def __next__(self) -> Event:
        if self._events is None:
            self._events = self._run()
        return next(self._events)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def commit(self) -> None:
        """Commit in the group what is processed so far, and wait for it. Without a group: nothing."""
        self._commit(wait=True)

    def close(self) -> None:
        """Commit what is processed and free everything. Harmless if closed already."""
        if not self._closed:
            self._closed = True
            self._commit(wait=True)
            self._batch = iter(())
            self._consumer.close()
            for index in self._indexes.values():
                index.close()

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        self._consumer.leak()
        for index in self._indexes.values():
            index.leak()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        nowhere = Span(0, 0, None, 0, 0)
        new = tuple.__new__
        streams, spans, processed = self._streams, self._spans, self._processed
        in_group = self._group is not None
        now = time.monotonic
        if self._given is not None:
            processed[self._given[0]] = self._given[1]
            self._given = None
        while not self._closed:
            for message in self._batch:
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                place = (topic, partition)
                span = spans.get(place, nowhere)
                if not span.first <= offset < span.end:
                    span = spans[place] = self._find(topic, partition, offset)
                headers, txn_id = split_headers(message.headers())
                try:
                    yield new(
                        Event,
                        (
                            streams[topic],
                            message.key(),
                            message.value(),
                            headers,
                            message.timestamp()[1],
                            txn_id or span.txn_id,
                            span.commit_timestamp,
                            span.segment_id,
                            partition,
                            offset,
                        ),
                    )
                except GeneratorExit:
                    self._given = (place, offset + 1)
                    raise
                if in_group:
                    processed[place] = offset + 1
                    if now() >= self._next_commit:
                        self._commit(wait=False)
            batch = self._next_batch()
            if not batch:
                break
            self._batch = iter(batch)

    def _next_batch(self) -> list[CommittedMessage]:
        """Messages; none when nothing came for the reader's timeout, or once it is closed."""
        give_up = None
        while not self._closed:
            now = time.monotonic()
            if give_up is None and (self._assigned or now >= self._assigned_by):
                give_up = math.inf if self._timeout is None else now + self._timeout
            batch = self._consumer.next_batch(min(give_up or math.inf, now + COMMIT_EVERY_S))
            if batch:
                return batch
            if time.monotonic() >= self._next_commit:
                self._commit(wait=False)
            if give_up is not None and time.monotonic() >= give_up:
                self._commit(wait=True)
                break
        return []

    def _find(self, topic: str, partition: int, offset: int) -> Span:
        index = self._indexes[topic]
        if topic in self._to_cover:
            self._to_cover.discard(topic)
            index.cover(self._positions[topic])
        return index.find(partition, offset)

    # -- positions ------------------------------------------------------------------------------------

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """New partitions: stand where the group has come to, or at the start."""
        placed = self._consumer.start_offsets(
            partitions, self._start, of_group=self._group is not None
        )
        self._positions.clear()
        for place in placed:
            self._positions.setdefault(place.topic, {})[place.partition] = place.offset
        self._to_cover = set(self._positions)
        self._consumer.native.assign(placed)
        self._assigned = True

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        """All partitions go; what is processed is committed if they are still ours."""
        if may_commit:
            self._commit(wait=True)
        self._processed.clear()
        self._spans.clear()
        self._batch = iter(())
        self._consumer.native.unassign()

    def _commit(self, *, wait: bool) -> None:
        self._next_commit = time.monotonic() + COMMIT_EVERY_S
        if self._group is not None:
            done = dict(self._processed)
            self._consumer.commit(done, wait=wait)
            if wait:
                for place, offset in done.items():
                    if self._processed.get(place) == offset:
                        del self._processed[place]


def split_headers(
    headers: list[tuple[str, bytes | None]] | None,
) -> tuple[list[tuple[str, bytes | None]], bytes | None]:
    """The caller's headers, and the transaction id of the ab.txn header."""
    if not headers:
        return [], None
    name, value = headers[-1]
    if name != TXN_HEADER:  # of another client, that puts it elsewhere
        ours = [v for n, v in headers if n == TXN_HEADER]
        rest = [pair for pair in headers if pair[0] != TXN_HEADER]
        return rest, ours[0][:TXN_ID_SIZE] if ours and ours[0] else None
    return headers[:-1], value[:TXN_ID_SIZE] if value else None
