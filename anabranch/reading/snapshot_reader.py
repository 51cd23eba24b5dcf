"""Reading a stream as of a snapshot: the ordered reader's way through the epochs, up to given offsets."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import KafkaError, Message
from confluent_kafka import TopicPartition as Place

from anabranch.errors import AnabranchError, DeadlineExceeded, SnapshotExpired
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.group_member import CommittedConsumer
from anabranch.librdkafka.options import Options
from anabranch.ports import TopicPartition
from anabranch.reading.feed import Feed, KafkaFeed, make_raw_feed
from anabranch.reading.stream_order import OrderedStream, Step
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Event

_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
_BEYOND = 1 << 62  # no offset
_IDLE_S = 0.25  # then the history is read on
_HELD_S = (0.02, 0.1)  # and so soon, at first and later, if something waits for its turn
_STEP = 1024
_STOPPED = 1 << 62  # bytes: surely too much for more


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
        self._rest: Iterator[Event] = iter(())
        self._events: Generator[Event, None, None] | None = None
        if self._unread:
            _check_history(admin, stream, cut, timeout)
        self._consumer: _CutConsumer | None = None
        feed: Feed | None = make_raw_feed(options, timeout, gone=self._gone)
        if feed is None:
            self._consumer = _CutConsumer(options, stream)
            self._consumer.learn(self._topic)  # else the first fetch may take a second
            feed = KafkaFeed(self._consumer)
        self._feed = feed
        self._ordered = OrderedStream(options, admin, feed, None, stream, timeout)
        self._closed = False
        self._ordered.begin(cut.start_offsets, cut.offsets)
        self._feed.assign({(self._topic, p): cut.start_offsets[p] for p in self._unread})

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
        """Free everything. Harmless if closed already."""
        if not self._closed:
            self._closed = True
            self._rest = iter(())
            if self._consumer is not None:
                self._consumer.close()
            self._feed.close()
            self._ordered.close()

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        if self._consumer is not None:
            self._consumer.leak()
        self._ordered.leak()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        while not self._closed:
            rest = self._rest
            yield from rest
            if self._rest is not rest:
                continue  # somebody iterates beside us and has gone on
            try:
                step = self._next_step()
            except RuntimeError:  # closed by another thread, with its consumers
                if not self._is_closed():
                    raise
                break
            if step is None:
                self.close()
                break
            self._rest = step.rest

    def _is_closed(self) -> bool:
        return self._closed

    def _next_step(self) -> Step | None:
        """The next events; None when all that the snapshot has is given out, or once it is closed."""
        give_up = time.monotonic() + self._timeout
        patience = _HELD_S[0]
        idle = False
        while not self._closed:
            step = self._ordered.step(_STEP)
            if step is not None:
                return step
            at = self._feed.positions(self._topic, self._unread)
            self._unread -= {p for p, offset in at.items() if offset >= self._ends[p]}
            self._ordered.settle(idle)
            self._ordered.release()
            waiting = self._ordered.waiting()
            self._forget({partition for _, partition in waiting})
            if not self._unread and not waiting:
                break
            now = time.monotonic()
            if now >= give_up:
                raise DeadlineExceeded(
                    f"{self._topic} did not show in {self._timeout:g} s all that the snapshot has of it: "
                    "read it again"
                )
            pause = patience if self._ordered.holds else _IDLE_S
            patience = min(1.5 * patience, _HELD_S[1])
            waiting |= {(self._topic, p): _STOPPED for p in self._ends if p not in self._unread}
            portions = self._feed.next(min(give_up, now + pause), waiting)
            for portion in portions:
                portion.end = self._ends[portion.place.partition]
                self._ordered.put(portion)
            idle = not portions
        return None

    def _forget(self, waiting: set[int]) -> None:
        """The history needs to know nothing more of partitions that are read to their ends."""
        for partition in self._ends:
            if partition not in self._unread and partition not in waiting:
                self._ordered.index.drop(partition, _BEYOND)

    def _gone(self, place: TopicPartition, offset: int) -> None:
        raise _expired(self._stream)


class _CutConsumer(CommittedConsumer):
    """Knows where each partition's end was met, and refuses to pass over what was deleted."""

    def __init__(self, options: Options, stream: str) -> None:
        super().__init__(options, group=None, eof=True)
        self._stream = stream
        self.ends: dict[int, int] = {}

    def _pass_over(self, message: Message) -> bool:
        error = message.error()
        if error is not None and error.code() == _EOF:
            self.ends[message.partition() or 0] = message.offset() or 0
        return super()._pass_over(message)

    def _gone(self, place: Place, start: int) -> None:
        raise _expired(self._stream)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """See `CommittedConsumer.positions`; also of partitions that end in what no event is."""
        found = super().positions(topic, partitions)
        return {p: max(found.get(p, -1), self.ends.get(p, -1)) for p in partitions}


def _expired(stream: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"retention has deleted events of {stream} that the snapshot has: take a later one"
    )


def _check_history(admin: KafkaAdmin, stream: str, cut: StreamCut, timeout: float) -> None:
    """The snapshot's last record is still there."""
    place = (history_topic(stream), 0)
    if admin.start_offsets([place], time.monotonic() + timeout)[place] >= cut.history:
        raise SnapshotExpired(
            f"the history of {stream} does not reach back to the snapshot any more: take a later one"
        )
