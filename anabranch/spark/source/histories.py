"""The histories of the streams that a source reads: their begins, ends and records.

A stream's *history* is its topic with one record for each commit.

The planner's process has one `Histories`, with connections of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from anabranch.ports import TopicPartition
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.committed_log import CommittedLog, StreamIds, ids_of, partitions_of
from anabranch.reading.history import Found, HistoryCursor, HistorySearch, heads
from anabranch.spark.clients import client_of
from anabranch.spark.options import Connection
from anabranch.spark.source.admission import NotYet
from anabranch.spark.source.positions import BEGIN, Position, raised
from anabranch.topics.names import history_topic, stream_topic

_CHECK_S = 2.0  # how often brokers are asked whether these are still the same streams
# How long to wait for committed records: a partition's leader may be moving. The next trigger asks again.
_PATIENCE_S = 2.0


class Histories:
    """The histories of a source's streams. For one thread; `close` it. ``timeout``: seconds for a request."""

    def __init__(
        self, connection: Connection, streams: Collection[str], *, agreed: bool = False
    ) -> None:
        """``agreed``: all brokers have to agree on the topics' ids.

        Raises: UnknownStream, NotReady, DeadlineExceeded, UnsupportedSetting.
        """
        self.streams = tuple(streams)
        self._connection = connection
        self.timeout = connection.timeout
        self._source = connection.reader_ports().committed_log(connection.timeout)
        self._searches: dict[str, HistorySearch] = {}
        self._tails: dict[str, HistoryTail] = {}
        self._asked_at = self._source.clock.monotonic()
        self._safe_time = (
            0  # of streams of several control partitions: the last that was waited for
        )
        try:
            self.ids = ids_of(self._source, self.streams, self._deadline(), agreed=agreed)
        except BaseException:
            self.close()
            raise
        self.expect(self.ids)

    def expect(self, ids: Mapping[str, StreamIds]) -> None:
        """Accept only these ids of the streams: reading another stream of such a name raises `UnknownStream`."""
        for stream, own in ids.items():
            self._source.expect(stream, own)

    def are_current(self) -> bool:
        """Whether these are still the same streams as at the start. Brokers are asked every two seconds."""
        now = self._source.clock.monotonic()
        if now < self._asked_at + _CHECK_S:
            return True
        self._asked_at = now
        return ids_of(self._source, self.streams, self._deadline()) == self.ids

    @cached_property
    def apart(self) -> bool:
        """Whether several control partitions serve the streams, as a controller answered once."""
        numbers = client_of(self._connection).control_partitions(self.streams)
        return len(set(numbers.values())) > 1

    def close(self) -> None:
        self._source.close()

    def search(self, stream: str) -> HistorySearch:
        if stream not in self._searches:
            self._searches[stream] = HistorySearch(self._source, stream, self.timeout)
        return self._searches[stream]

    def tail(self, stream: str) -> HistoryTail:
        if stream not in self._tails:
            self._tails[stream] = HistoryTail(self._source, stream)
        return self._tails[stream]

    def begin(self, start: str | int) -> dict[str, Position]:
        """The positions at which a query begins: 'begin', 'end', or after all commits up to a hybrid time.

        Events that retention has removed count as read.
        """
        if start == "begin":
            return {stream: self.first(stream) for stream in self.streams}
        positions = {}
        for stream, at in self._heads(start).items():
            if at is None:
                positions[stream] = self.first(stream)
            else:
                removed = self.removed(stream)
                vector = raised(at.vector(), removed)
                positions[stream] = Position(at.offset, vector, self.ids[stream])
        return positions

    def first(self, stream: str) -> Position:
        """The stream's beginning. Events that retention has removed count as read."""
        removed, ids = self.removed(stream), self.ids[stream]
        if not removed:
            return BEGIN._replace(ids=ids)
        found = self.search(stream).not_beyond(removed)
        return Position(found.offset - 1 if found is not None else -1, removed, ids)

    def removed(self, stream: str) -> dict[int, int]:
        """Partition -> first offset that is still there, for partitions from which retention removed events."""
        topic = stream_topic(stream)
        count = partitions_of(self._source, [stream], self._deadline())[topic]
        firsts, _ = self.starts((stream, partition) for partition in range(count))
        return {partition: first for (_, partition), first in firsts.items() if first}

    def starts(
        self, places: Iterable[tuple[str, int]]
    ) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
        """Log start offsets: of the (stream, partition) pairs, and of the histories of their streams."""
        topics = {TopicPartition(stream_topic(stream), p): (stream, p) for stream, p in places}
        histories = {
            TopicPartition(history_topic(stream), 0): stream for stream, _ in topics.values()
        }
        found = self._source.start_offsets([*topics, *histories], self._deadline())
        return (
            {place: found[topic] for topic, place in topics.items()},
            {stream: found[topic] for topic, stream in histories.items()},
        )

    def is_cut(self, stream: str, after: int) -> bool:
        """Whether records after the record ``after`` are deleted."""
        place = TopicPartition(history_topic(stream), 0)
        if self._source.start_offsets([place], self._deadline())[place] <= after + 1:
            return False
        oldest = self.search(stream).not_beyond({})
        return oldest is None or oldest.before > after

    def heads(self) -> dict[str, Found | None]:
        """The last record of each history; together they have all or nothing of every transaction."""
        if not self.apart:
            return self._heads("end")
        ends = [self.search(stream).last() for stream in self.streams]
        newest = max((at.record.timestamp for at in ends if at is not None), default=0)
        if newest > self._safe_time:  # a time that is safe once remains so
            self._safe_time = client_of(self._connection).safe_time(self.streams, newest)
        return self._heads(self._safe_time)

    def _heads(self, start: str | int) -> dict[str, Found | None]:
        searches = {stream: self.search(stream) for stream in self.streams}
        if self.apart and start == "end":
            start = client_of(self._connection).safe_time(self.streams)
        return heads(searches, start)

    def ends(self) -> dict[str, tuple[int, int]]:
        """(committed end, end) of each history. If a record is below the committed end, its transaction is decided
        in all its streams, and its records there are below the ends."""
        topics = {TopicPartition(history_topic(stream), 0): stream for stream in self.streams}
        committed = self._source.end_offsets(topics, self._deadline(), committed=True)
        alone = len(self.streams) == 1
        ends = committed if alone else self._source.end_offsets(topics, self._deadline())
        return {stream: (committed[place], ends[place]) for place, stream in topics.items()}

    def _deadline(self) -> float:
        return self._source.clock.monotonic() + self.timeout


class HistoryTail:
    """The records after a position, one by one. For one thread."""

    def __init__(self, source: CommittedLog, stream: str) -> None:
        self._clock = source.clock
        self._cursor = HistoryCursor(source, stream)
        self._base = -2  # all commits between it and `_read` are in `_ahead`
        self._read = -1
        self._ahead: deque[Found] = deque()
        self._until = 0
        self.bound = 0

    def begin(self, after: int, bound: int, until: int) -> None:
        """Move to after the record ``after``. `peek` reads up to ``until``; `pop` takes records below ``bound``."""
        self.bound, self._until = bound, until
        if self._base <= after < self._read:
            while self._ahead and self._ahead[0].offset <= after:
                self._ahead.popleft()
        else:
            self._ahead.clear()
            self._read = after + 1
            self._cursor.seek(after + 1)
        self._base = after

    def peek(self, patience: float = _PATIENCE_S) -> Found | None:
        """The next record, or None. Raises: NotYet (the history can't be read this far in ``patience`` seconds)."""
        deadline = self._clock.monotonic() + patience
        while not self._ahead and self._read < self._until:
            batch = self._cursor.next(deadline)
            self._ahead.extend(batch)
            if batch:
                self._read = batch[-1].offset + 1
            elif self._cursor.ended_at > self._read:
                self._read = self._cursor.ended_at
            elif self._clock.monotonic() >= deadline:
                raise NotYet(f"{self._cursor.place.topic} can't be read up to {self._until}")
        return self._ahead[0] if self._ahead and self._ahead[0].offset < self._until else None

    def pop(self) -> None:
        found = self._ahead.popleft()
        if isinstance(found.record, CommitRecord):
            self._base = found.offset  # an epoch without later events may be read twice
