"""Reading whole transactions: `Client.read_transactions`."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Self

from confluent_kafka import TopicPartition

from anabranch.core.ids import NO_TXN
from anabranch.errors import (
    DeadlineExceeded,
    IllegalState,
    MalformedRecord,
    RetryError,
    SnapshotExpired,
)
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.group_member import (
    CommittedConsumer,
    CommittedMessage,
    check_group,
    check_timeout,
    partitions_of,
)
from anabranch.librdkafka.options import Options
from anabranch.reading.decoded import split_headers
from anabranch.reading.headers import headers_of
from anabranch.reading.history_search import HistorySearch, Start, check_start, history_record
from anabranch.reading.spans import Foreign
from anabranch.schemas.records import CommitRecord, SegmentCommit
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Committed, Event

log = logging.getLogger("anabranch.client")

IN_HAND = 10_000  # transactions of so many events are read before they are given out; bigger ones as they are read
_MOST_WAITING = 20_000  # messages of a partition kept for later; then it pauses
_SKIP_BY_READING = 1_000  # a smaller gap is read over, a bigger one jumped
_PACE_S = 0.25


class TransactionReader(Iterator[Committed]):
    """Whole transactions in commit order. An iterator; close it, or use it as a context manager.

    A group has one active member; another takes over where it stopped. A transaction counts as processed when
    the next one is asked for, and the position is committed then. So each comes at least once. One thread at a
    time.
    """

    def __init__(
        self,
        options: Options,
        admin: KafkaAdmin,
        stream: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        ask_timeout: float,
    ) -> None:
        self._closed = True  # until all is made
        self._options = options
        self._admin = admin
        self._ask_timeout = ask_timeout
        self._stream = stream
        self._group = check_group(group)
        self._timeout = check_timeout(timeout)
        self._start = check_start(start)
        self._place = (history_topic(stream), 0)
        partitions_of(admin, [stream], time.monotonic() + ask_timeout)
        self._feeds = _Feeds(options, admin, stream, ask_timeout)
        self._done: int | None = None
        self._term = 0  # raised when the history partition goes
        self._assigned_by = time.monotonic() + ask_timeout
        self._assigned = False
        self._gains = False  # the history is ours, and not begun with yet
        self._batch: Iterator[CommittedMessage] = iter(())
        self._given: int | None = None
        self._transactions: Generator[Committed, None, None] | None = None
        self._history = CommittedConsumer(options, group=group)
        self._closed = False
        if group is None:
            self._assigned = True
            self._begin()
        else:
            self._history.subscribe([self._place[0]], self._gained, self._lost)

    # A loop holds only the generator, and that the reader: leaving the loop frees both, at once.

    def __iter__(self) -> Generator[Committed, None, None]:
        return self._run()

    def __next__(self) -> Committed:
        if self._transactions is None:
            self._transactions = self._run()
        try:
            return next(self._transactions)
        except RetryError:
            self._transactions = None  # the next call goes on
            raise

    def __del__(self) -> None:
        # Of a process that ends its client takes care, as long as modules are there to do it with.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
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

    def close(self) -> None:
        """Commit the position and free everything. Harmless if closed already."""
        if not self._closed:
            self._closed = True
            self._commit(wait=True)
            self._batch = iter(())
            self._history.close()
            self._feeds.close()

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        self._history.leak()
        self._feeds.leak()

    def _run(self) -> Generator[Committed, None, None]:
        if self._given is not None:
            self._processed(self._given)
            self._given = None
        while not self._closed:
            for message in self._batch:
                after = message.offset() + 1
                record = history_record(message)
                term = self._term
                if isinstance(record, CommitRecord):
                    try:
                        events = self._feeds.events(record)
                    except RetryError:
                        # Whoever goes on begins with it.
                        self._batch = chain((message,), self._batch)
                        raise
                    if events is not None:
                        txn_id = None if record.txn_id == NO_TXN else record.txn_id
                        try:
                            yield Committed(txn_id, record.timestamp, self._stream, events)
                        except GeneratorExit:
                            self._given = after
                            raise
                    if (
                        term == self._term
                    ):  # else another member goes on from the committed position
                        self._processed(after)
                else:
                    self._done = after
            batch = self._next_batch()
            if not batch:
                break
            self._batch = iter(batch)

    def _processed(self, after: int) -> None:
        self._done = after
        self._commit(wait=False)

    def _next_batch(self) -> list[CommittedMessage]:
        give_up = None
        while not self._closed:
            if self._gains:
                self._begin()
            now = time.monotonic()
            if give_up is None and (self._assigned or now >= self._assigned_by):
                give_up = math.inf if self._timeout is None else now + self._timeout
            term = self._term
            batch = self._history.next_batch(min(give_up or math.inf, now + _PACE_S))
            if batch and term == self._term:
                return batch
            if give_up is not None and time.monotonic() >= give_up:
                self._commit(wait=True)
                break
        return []

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """The history is ours, or another's. It is begun with outside of this callback."""
        self._history.assign({})
        self._gains = bool(partitions)
        self._assigned = True

    def _begin(self) -> None:
        """Stand where the group has come to, or at the start."""
        known = self._history.committed([self._place]) if self._group is not None else {}
        offset = known[self._place] if self._place in known else self._first()
        self._history.assign({self._place: offset})
        self._gains = False

    def _first(self) -> int:
        """Where to begin in the history without a position of the group."""
        if self._start == "end":
            ends = self._admin.end_offsets([self._place], time.monotonic() + self._ask_timeout)
            return ends[self._place]
        consumer = CommittedConsumer(self._options, group=None, eof=True)
        try:
            search = HistorySearch(consumer, self._admin, self._stream, self._ask_timeout)
            found = search.as_of(self._start)
        finally:
            consumer.close()
        return 0 if found is None else found.offset + 1

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        if may_commit:
            self._commit(wait=True)
        self._done = None
        self._given = None
        self._gains = False
        self._batch = iter(())
        self._term += 1
        self._history.unassign()

    def _commit(self, *, wait: bool) -> None:
        if self._group is not None and self._done is not None:
            self._history.commit({self._place: self._done}, wait=wait)


@dataclass(slots=True)
class _Feed:
    """A partition of the stream, read in order."""

    next_offset: int
    waiting: deque[CommittedMessage]
    paused: bool = False


class _Feeds:
    """Reads the stream's partitions by the ranges of COMMIT records. Their offsets rise with the history."""

    def __init__(self, options: Options, admin: KafkaAdmin, stream: str, timeout: float) -> None:
        self._stream = stream
        self._topic = stream_topic(stream)
        self._foreign = Foreign(self._topic)
        self._admin = admin
        self._timeout = timeout
        self._consumer = CommittedConsumer(options, group=None)
        self._feeds: dict[int, _Feed] = {}
        self._starts: dict[int, int] = {}
        self._closed = False

    def events(self, record: CommitRecord) -> TransactionEvents | None:
        """The events of a commit; None if retention has deleted some of them."""
        unknown = [p.partition for p in record.segments if p.partition not in self._starts]
        if unknown:
            self._look_up_starts(unknown)
        events = TransactionEvents(self, record)
        try:
            if any(part.first < self._starts[part.partition] for part in record.segments):
                raise self._expired(record)
            if len(events) <= IN_HAND:
                events.take_in_hand()
        except SnapshotExpired as error:
            log.warning("passed over: %s", error)
            return None
        return events

    def _look_up_starts(self, partitions: list[int]) -> None:
        found = self._admin.start_offsets(
            [(self._topic, p) for p in partitions], time.monotonic() + self._timeout
        )
        self._starts |= {partition: offset for (_, partition), offset in found.items()}

    def read(self, part: SegmentCommit, record: CommitRecord) -> Iterator[Event]:
        """The events of one segment of a commit."""
        feed = self._stand_at(part.partition, part.first)
        count = 0
        while feed.next_offset < part.end:
            if not feed.waiting:
                self._fill(part.partition, feed, record)
            message = feed.waiting.popleft()
            offset = message.offset()
            if offset < part.first:
                continue
            if offset >= part.end:
                feed.waiting.appendleft(message)
                break
            feed.next_offset = offset + 1
            headers, txn_id = split_headers(headers_of(message))
            if (txn_id or NO_TXN) != record.txn_id:
                self._foreign.passed_over(part.partition, offset, 1)
                continue
            count += 1
            yield Event(
                self._stream,
                message.key(),
                message.value(),
                headers,
                message.timestamp()[1],
                txn_id,
                record.timestamp,
                part.segment_id,
                part.partition,
                offset,
            )
        if count != part.count:
            self._check_there(part.partition, part.first, record)
            raise MalformedRecord(
                f"{self._topic}[{part.partition}] shows {count} events of {part.count} in "
                f"[{part.first}, {part.end}): the topic was tampered with"
            )

    def _check_there(self, partition: int, offset: int, record: CommitRecord) -> None:
        """`SnapshotExpired` if retention has come so far meanwhile."""
        self._look_up_starts([partition])
        if offset < self._starts[partition]:
            raise self._expired(record)

    def _expired(self, record: CommitRecord) -> SnapshotExpired:
        return SnapshotExpired(
            f"retention has deleted events of transaction {record.txn_id.hex()} in {self._stream}"
        )

    def _stand_at(self, partition: int, offset: int) -> _Feed:
        """The feed, with all from this offset on still to come."""
        feed = self._feeds.get(partition)
        native = self._consumer.native
        if feed is None:
            feed = self._feeds[partition] = _Feed(offset, deque())
            self._consumer.add(self._topic, {partition: offset})
        elif not feed.next_offset <= offset <= feed.next_offset + _SKIP_BY_READING:
            feed.waiting.clear()
            self._resume(partition, feed)
            native.seek(TopicPartition(self._topic, partition, offset))
        feed.next_offset = offset
        return feed

    def _resume(self, partition: int, feed: _Feed) -> None:
        if feed.paused:
            feed.paused = False
            self._consumer.native.resume([TopicPartition(self._topic, partition)])

    def _fill(self, partition: int, feed: _Feed, record: CommitRecord) -> None:
        """Read until this partition has something; other partitions' messages wait for their turn."""
        self._resume(partition, feed)
        deadline = time.monotonic() + self._timeout
        while not feed.waiting:
            if self._closed:
                raise IllegalState("the reader is closed")
            batch = self._consumer.next_batch(deadline)
            if not batch:
                self._check_there(partition, feed.next_offset, record)
                raise DeadlineExceeded(
                    f"{self._topic}[{partition}] did not show offset {feed.next_offset} in time"
                )
            for message in batch:
                self._feeds[message.partition()].waiting.append(message)
            for number, other in self._feeds.items():
                if other is not feed and not other.paused and len(other.waiting) > _MOST_WAITING:
                    other.paused = True
                    self._consumer.native.pause([TopicPartition(self._topic, number)])

    def close(self) -> None:
        self._closed = True
        self._consumer.close()

    def leak(self) -> None:
        self._consumer.leak()


class TransactionEvents:
    """The events of a transaction: iterate, as often as you like; ``len`` is their number.

    Up to 10,000 are in hand; more are read while you iterate, from partition after partition; `SnapshotExpired`
    if retention has come to them meanwhile. Events of one key are in order.
    """

    def __init__(self, feeds: _Feeds, record: CommitRecord) -> None:
        self._feeds = feeds
        self._record = record
        self._in_hand: list[Event] | None = None

    def __len__(self) -> int:
        return sum(part.count for part in self._record.segments)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._in_hand) if self._in_hand is not None else self._read()

    def take_in_hand(self) -> None:
        """Read all of them now."""
        self._in_hand = list(self._read())

    def _read(self) -> Iterator[Event]:
        for part in self._record.segments:
            yield from self._feeds.read(part, self._record)
