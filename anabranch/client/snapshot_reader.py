"""Reading a stream as of a snapshot: the ordered reader's way through the epochs, up to given offsets."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import KafkaError, Message, TopicPartition

from anabranch.client.history import Span
from anabranch.client.kafka_admin import KafkaAdmin
from anabranch.client.kafka_consumer import CommittedConsumer, CommittedMessage
from anabranch.client.options import Options
from anabranch.client.ordered import OrderedStream
from anabranch.client.reader import split_headers
from anabranch.client.types import Event
from anabranch.errors import AnabranchError, DeadlineExceeded, SnapshotExpired
from anabranch.topics.names import history_topic, stream_topic

_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
_GONE = KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001
_BEYOND = 1 << 62  # no offset
_IDLE_S = 0.25  # then the history is read on
_HELD_S = (0.02, 0.1)  # and so soon, at first and later, if something waits for its turn
_NOWHERE = Span(0, 0, None, 0, 0)


class StreamCut(NamedTuple):
    """A stream as of a timestamp.

    ``offsets``: partition -> end offset; a partition that is not named has nothing. ``start_offsets``: what
    retention had left when the snapshot was taken, at most the end offset. ``history``: the offset after the last
    record of the stream's history that belongs to it.
    """

    offsets: Mapping[int, int]
    start_offsets: Mapping[int, int]
    history: int


class SnapshotReader(Iterator[Event]):
    """The events of a stream as of a snapshot, each key in commit order. An iterator that ends by itself.

    It frees what it holds at its end, or when it is closed or left. One thread at a time.
    """

    def __init__(
        self, options: Options, admin: KafkaAdmin, stream: str, cut: StreamCut, timeout: float
    ) -> None:
        """``timeout``: seconds until it gives up where the brokers show nothing more. `SnapshotExpired`."""
        self._closed = True  # until all is made
        self._stream = stream
        self._topic = stream_topic(stream)
        self._ends = cut.offsets
        self._timeout = timeout
        # What is not got to its end yet; of the rest no more is fetched.
        self._unread = {p for p, end in cut.offsets.items() if cut.start_offsets[p] < end}
        self._stopped: set[int] = set()
        self._spans: dict[int, Span] = {}
        self._batch: Iterator[CommittedMessage] = iter(())
        self._events: Generator[Event, None, None] | None = None
        if self._unread:
            _check_history(admin, stream, cut, timeout)
        self._consumer = _CutConsumer(options, stream)
        self._ordered = OrderedStream(options, admin, self._consumer, stream, timeout)
        self._closed = False
        self._ordered.begin(cut.start_offsets, cut.offsets)
        self._consumer.learn(self._topic)  # else the first fetch may take a second
        self._consumer.assign({(self._topic, p): cut.start_offsets[p] for p in self._unread})

    # A loop holds only the generator, and that the reader: leaving the loop frees both, at once.

    def __iter__(self) -> Generator[Event, None, None]:
        return self._run()

    def __next__(self) -> Event:
        if self._events is None:
            self._events = self._run()
        try:
            return next(self._events)
        except AnabranchError:
            self._events = None  # the next call goes on: an error is no end
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

    def close(self) -> None:
        """Free everything. Harmless if closed already."""
        if not self._closed:
            self._closed = True
            self._batch = iter(())
            self._consumer.close()
            self._ordered.close()

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        self._consumer.leak()
        self._ordered.leak()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        new = tuple.__new__
        ends, spans = self._ends, self._spans
        while not self._closed:
            for message in self._batch:
                partition, offset = message.partition(), message.offset()
                if offset + 1 >= ends[partition]:
                    self._stop(partition)
                    if offset >= ends[partition]:
                        continue
                span = spans.get(partition, _NOWHERE)
                if not span.first <= offset < span.end:
                    found = self._ordered.admit(message)
                    if found is None:  # it waits for its turn, and what follows it too
                        spans[partition] = _NOWHERE
                        continue
                    span = spans[partition] = found
                headers, txn_id = split_headers(message.headers())
                yield new(
                    Event,
                    (
                        self._stream,
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
            try:
                batch = self._next_batch()
            except RuntimeError:  # closed by another thread, with its consumers
                if not self._is_closed():
                    raise
                break
            if not batch:
                self.close()
            self._batch = iter(batch)

    def _is_closed(self) -> bool:
        return self._closed

    def _next_batch(self) -> list[CommittedMessage]:
        """Messages; none when all that the snapshot has is given out, or once it is closed."""
        give_up = time.monotonic() + self._timeout
        patience = _HELD_S[0]
        idle = False
        while not self._closed:
            met = self._consumer.ends
            for partition in [p for p in self._unread if met.get(p, -1) >= self._ends[p]]:
                self._stop(partition)
            self._forget(self._ordered.settle(idle))
            ready = self._ordered.released()
            if ready:
                self._stopped -= {m.partition() for m in ready}  # they may be fetched again
                return ready
            if not self._unread and not self._ordered.holds:
                break
            now = time.monotonic()
            if now >= give_up:
                raise DeadlineExceeded(
                    f"{self._topic} did not show in {self._timeout:g} s all that the snapshot has of it: "
                    "read it again"
                )
            pause = patience if self._ordered.holds else _IDLE_S
            patience = min(1.5 * patience, _HELD_S[1])
            batch = self._consumer.next_batch(min(give_up, now + pause))
            if batch:
                return batch
            idle = True
        return []

    def _stop(self, partition: int) -> None:
        """All of this partition is got: what stands behind is not wanted."""
        self._unread.discard(partition)
        if partition not in self._stopped:
            self._stopped.add(partition)
            self._consumer.native.pause([TopicPartition(self._topic, partition)])

    def _forget(self, held: Collection[int]) -> None:
        """The history needs to know nothing more of partitions that are read to their ends."""
        for partition in self._ends:
            if partition not in self._unread and partition not in held:
                self._ordered.index.drop(partition, _BEYOND)


class _CutConsumer(CommittedConsumer):
    """Knows where each partition's end was met, and refuses to pass over what was deleted."""

    def __init__(self, options: Options, stream: str) -> None:
        super().__init__(options, group=None, eof=True, special={"auto.offset.reset": "error"})
        self._stream = stream
        self.ends: dict[int, int] = {}

    def _pass_over(self, message: Message) -> bool:
        error = message.error()
        if error is not None and error.code() == _GONE:
            raise SnapshotExpired(
                f"retention has deleted events of {self._stream} that the snapshot has: take a later one"
            )
        if error is not None and error.code() == _EOF:
            self.ends[message.partition() or 0] = message.offset() or 0
        return super()._pass_over(message)


def _check_history(admin: KafkaAdmin, stream: str, cut: StreamCut, timeout: float) -> None:
    """The snapshot's last record is still there."""
    place = (history_topic(stream), 0)
    if admin.start_offsets([place], time.monotonic() + timeout)[place] >= cut.history:
        raise SnapshotExpired(
            f"the history of {stream} does not reach back to the snapshot any more: take a later one"
        )
