"""Reading committed events in stream order: `Client.read`."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import TopicPartition

from anabranch.client.history import Span
from anabranch.client.history_search import Start, check_start
from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import (
    CommittedConsumer,
    CommittedMessage,
    check_group,
    check_timeout,
    partitions_of,
)
from anabranch.client.options import Options
from anabranch.client.ordered import OrderedStream
from anabranch.client.starting import Starting
from anabranch.client.types import Event
from anabranch.core.ids import TXN_HEADER, TXN_ID_SIZE
from anabranch.errors import NotReady, RetryError
from anabranch.topics.names import stream_topic

COMMIT_EVERY_S = 1.0
_IDLE_S = 0.25  # then the history is read on, which may name new partitions
_HELD_S = (0.02, 0.1)  # and so soon, at first and later, if something is waited for
_ASK_EVERY_S = 0.1


class Reader(Iterator[Event]):
    """Committed events, one after the other. An iterator; close it, or use it as a context manager.

    Events of one key come in commit order, however the stream is scaled meanwhile. With a group, its members
    share the partitions, and each goes on where the group has come to. An event counts as processed when the
    next one is asked for; positions are committed every second or so, when a sealed segment is read to its
    end, when partitions move to another member, and at `close`. So each event comes at least once. One thread
    at a time.
    """

    def __init__(
        self,
        options: Options,
        admin: KafkaAdmin,
        streams: Sequence[str],
        group: str | None,
        timeout: float | None,
        start: Start,
        ask_timeout: float,
    ) -> None:
        self._closed = True  # until all is made
        self._names = {stream_topic(stream): stream for stream in streams}
        self._group = check_group(group)
        self._timeout = check_timeout(timeout)
        checked = check_start(start)
        partitions_of(admin, list(streams), time.monotonic() + ask_timeout)
        self._ask_timeout = ask_timeout
        self._spans: dict[tuple[str, int], Span] = {}
        self._processed: dict[tuple[str, int], int] = {}
        self._next_commit = time.monotonic() + COMMIT_EVERY_S
        self._assigned_by = time.monotonic() + ask_timeout
        self._assigned = False
        self._gains: dict[str, set[int]] | None = (
            None  # partitions given to us and not begun with yet
        )
        self._begin_by = self._ask_at = 0.0
        self._term = 0  # raised when partitions come or go
        self._batch: Iterator[CommittedMessage] = iter(())
        self._given: tuple[tuple[str, int], int] | None = None
        self._events: Generator[Event, None, None] | None = None
        self._consumer = CommittedConsumer(options, group=group)
        self._streams = {
            topic: OrderedStream(options, admin, self._consumer, stream, ask_timeout)
            for topic, stream in self._names.items()
        }
        self._starting = {
            topic: Starting(admin, stream.index.search, stream.stream, checked, ask_timeout)
            for topic, stream in self._streams.items()
        }
        self._closed = False
        if group is None:
            self._begin({topic: starting.alone() for topic, starting in self._starting.items()})
        else:
            self._consumer.subscribe(list(self._names), self._gained, self._lost)

    # A loop holds only the generator, and that the reader: leaving the loop frees both, at once.

    def __iter__(self) -> Generator[Event, None, None]:
        return self._run()

    def __next__(self) -> Event:
        if self._events is None:
            self._events = self._run()
        try:
            return next(self._events)
        except RetryError:
            self._events = None  # the next call goes on
            raise

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
            for stream in self._streams.values():
                stream.close()

    def _is_closed(self) -> bool:
        return self._closed

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        self._consumer.leak()
        for stream in self._streams.values():
            stream.leak()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        nowhere = Span(0, 0, None, 0, 0)
        new = tuple.__new__
        names, streams = self._names, self._streams
        spans, processed = self._spans, self._processed
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
                    found = streams[topic].admit(message)
                    if found is None:  # it waits for its turn, and what follows it too
                        spans[place] = nowhere
                        continue
                    span = spans[place] = found
                headers, txn_id = split_headers(message.headers())
                try:
                    yield new(
                        Event,
                        (
                            names[topic],
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
            try:
                batch = self._next_batch()
            except RuntimeError:  # closed by another thread, with its consumers
                if not self._is_closed():
                    raise
                break
            if not batch:
                break
            self._batch = iter(batch)

    def _next_batch(self) -> list[CommittedMessage]:
        """Messages; none when nothing came for the reader's timeout, or once it is closed."""
        give_up = None
        idle = False
        patience = _HELD_S[0]
        while not self._closed:
            now = time.monotonic()
            self._begin_with_gains(now)
            waiting = self._settle(idle)
            ready = [m for stream in self._streams.values() for m in stream.released()]
            if ready:
                return ready
            spent = time.monotonic() - now  # finding the way is no waiting
            now += spent
            if give_up is not None:
                give_up += spent
            elif self._assigned or now >= self._assigned_by:
                give_up = math.inf if self._timeout is None else now + self._timeout
            pause = patience if waiting or self._gains is not None else _IDLE_S
            patience = min(1.5 * patience, _HELD_S[1])
            term = self._term
            batch = self._consumer.next_batch(min(give_up or math.inf, now + pause))
            if batch and term == self._term:
                return batch
            idle = True
            if give_up is not None and time.monotonic() >= give_up:
                self._commit(wait=True)
                break
        return []

    # -- positions ------------------------------------------------------------------------------------

    def _settle(self, idle: bool) -> bool:
        """Between batches. Whether something is held that waits for its turn."""
        finished = False
        for topic, stream in self._streams.items():
            for partition, position in stream.settle(idle).items():
                place = (topic, partition)
                self._processed[place] = max(position, self._processed.get(place, 0))
            finished |= stream.index.order.take_finished()
        if finished or time.monotonic() >= self._next_commit:
            self._commit(wait=False)
        return any(stream.holds for stream in self._streams.values())

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """New partitions, all that are ours now. They are begun with outside of this callback."""
        self._term += 1
        self._consumer.assign({})
        self._gains = {topic: set() for topic in self._names}
        for place in partitions:
            self._gains[place.topic].add(place.partition)
        self._ask_at = time.monotonic()
        self._begin_by = self._ask_at + self._ask_timeout

    def _begin_with_gains(self, now: float) -> None:
        """Stand where the group has come to, once that is known. `NotReady` when it takes too long."""
        if self._gains is None or now < self._ask_at:
            return
        self._ask_at = now + _ASK_EVERY_S
        positions = {}
        for topic, own in self._gains.items():
            if own:
                found = self._starting[topic].in_group(self._consumer, own)
                if found is None:
                    if now >= self._begin_by:
                        self._begin_by = now + self._ask_timeout
                        raise NotReady(
                            f"the group {self._group} has no position in {topic} yet: the member with "
                            "partition 0 makes it; go on, or look at that one"
                        )
                    return
                positions[topic] = found
        self._begin(positions)

    def _begin(self, positions: dict[str, dict[int, int]]) -> None:
        """Read on from these positions (topic -> partition -> offset): our partitions; without a group all."""
        gains, self._gains = self._gains, None
        places: dict[tuple[str, int], int] = {}
        for topic, offsets in positions.items():
            own = None if gains is None else gains[topic]
            self._streams[topic].begin(offsets, own)
            places |= {(topic, p): offsets[p] for p in (offsets if own is None else own)}
            if own is None:
                self._consumer.learn(
                    topic
                )  # a member knows it; else the first fetch may take a second
        self._consumer.assign(places)
        self._assigned = True

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        """All partitions go; what is processed is committed if they are still ours."""
        self._term += 1
        if may_commit:
            self._commit(wait=True)
        self._gains = None
        self._processed.clear()
        self._spans.clear()
        self._batch = iter(())
        for stream in self._streams.values():
            stream.stop()
        self._consumer.unassign()

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
