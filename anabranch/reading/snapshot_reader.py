"""Reading a stream as of a snapshot: in the order of the ordered reader, up to given offsets."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

from anabranch.errors import AnabranchError, DeadlineExceeded, RetryError, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import UNKNOWN_IDS, CommittedLog, ReaderPorts, StreamIds
from anabranch.reading.feed import Feed
from anabranch.reading.iteration import Iteration
from anabranch.reading.stream_order import OrderedStream, Step
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Event

_BEYOND = 1 << 62  # above all offsets
_IDLE_S = 0.25  # without events for this long, more of the history is read
_HELD_S = (0.02, 0.1)  # the same at first and later, while events wait for their turn
_STEP = 1024


class StreamCut(NamedTuple):
    """A stream as of a timestamp.

    ``offsets``: partition -> end offset; a partition without one is empty. ``start_offsets``: the first undeleted
    offsets when the snapshot was taken, at most the end offsets. ``history``: the offset after the last record of
    the stream's history that belongs to it. ``ids``: topic ids of these offsets; empty in data of an older version.
    """

    offsets: Mapping[int, int]
    start_offsets: Mapping[int, int]
    history: int
    ids: StreamIds = UNKNOWN_IDS


class Given:
    """How far a snapshot's reader has returned events, by partition."""

    def __init__(self, starts: Mapping[int, int]) -> None:
        self._done = dict(starts)
        self._step: Step | None = None

    def begins(self, step: Step | None) -> None:
        """Note that the step before is returned completely; None: all steps are."""
        self._done = self.positions()
        self._step = step

    def positions(self) -> dict[int, int]:
        """Partition -> the offset after the last returned event, or at which reading began."""
        step = self._step
        if step is None or not step.given_to:
            return dict(self._done)
        return self._done | {step.place.partition: step.given_to}


class SnapshotReader(Iteration[Event]):
    """The events of a stream as of a snapshot, each key in commit order. An iterator that ends by itself.

    Everything is freed at the end, by closing it, and by leaving the loop. One thread at a time.
    """

    _resumes_after = AnabranchError  # the next call continues after an error

    def __init__(self, ports: ReaderPorts, stream: str, cut: StreamCut, timeout: float) -> None:
        """``timeout``: seconds without new records until it gives up.

        Raises: SnapshotExpired, UnknownStream (the stream was deleted), NotReady.
        """
        super().__init__()
        self._clock = ports.clock
        self._stream = stream
        self._topic = stream_topic(stream)
        self._ends = cut.offsets
        self._timeout = timeout
        # Partitions that are not fetched to their ends yet.
        self._unread = {p for p, end in cut.offsets.items() if cut.start_offsets[p] < end}
        self._rest: Iterator[Event] = iter(())
        self.given = Given(cut.start_offsets)
        self._source = source = ports.committed_log(timeout)
        source.expect(stream, cut.ids)
        self._feed = Feed(source, gone=self._gone)
        self._ordered = OrderedStream(source, self._feed, None, stream, timeout)
        self._closed = False
        if self._unread:
            try:
                _check_history(source, stream, cut, timeout)
            except BaseException:
                source.close()
                raise
        self._ordered.begin(cut.start_offsets, cut.offsets)
        self._feed.assign(
            {TopicPartition(self._topic, p): cut.start_offsets[p] for p in self._unread}
        )

    def _free(self) -> None:
        self._rest = iter(())
        self._source.close()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        while not self._closed:
            rest = self._rest
            yield from rest
            if self._rest is not rest:
                continue  # another thread iterates, too, and was faster
            try:
                step = self._next_step()
            except RetryError:  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                break
            self.given.begins(step)
            if step is None:
                self.close()
                break
            self._rest = step.rest

    def _next_step(self) -> Step | None:
        """The next events; None when all of the snapshot is returned, or the reader is closed."""
        give_up = self._clock.monotonic() + self._timeout
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
            self._forget({place.partition for place in waiting})
            if not self._unread and not waiting:
                break
            now = self._clock.monotonic()
            if now >= give_up:
                raise DeadlineExceeded(
                    f"{self._topic} did not show in {self._timeout:g} s all that the snapshot has of it: "
                    "read it again"
                )
            pause = patience if self._ordered.holds else _IDLE_S
            patience = min(1.5 * patience, _HELD_S[1])
            waiting |= {TopicPartition(self._topic, p) for p in self._ends if p not in self._unread}
            portions = self._feed.next(min(give_up, now + pause), waiting)
            for portion in portions:
                portion.end = self._ends[portion.place.partition]
                self._ordered.put(portion)
            idle = not portions
        return None

    def _forget(self, waiting: set[int]) -> None:
        """Forget partitions that are read to their ends."""
        for partition in self._ends:
            if partition not in self._unread and partition not in waiting:
                self._ordered.index.drop(partition, _BEYOND)

    def _gone(self, place: TopicPartition, offset: int) -> None:
        raise _expired(self._stream)


def _expired(stream: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"retention has deleted events of {stream} that the snapshot has: take a later one"
    )


def _check_history(source: CommittedLog, stream: str, cut: StreamCut, timeout: float) -> None:
    """`SnapshotExpired` unless the snapshot's last record still exists."""
    place = TopicPartition(history_topic(stream), 0)
    if source.start_offsets([place], source.clock.monotonic() + timeout)[place] >= cut.history:
        raise SnapshotExpired(
            f"the history of {stream} does not reach back to the snapshot any more: take a later one"
        )
