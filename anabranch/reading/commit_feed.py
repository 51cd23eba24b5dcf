"""Commits of a stream in order, each with its events, for readers of whole commits.

`CommitFeed` has the records of the history that are read and not passed yet. `StreamParts` reads the partitions by
the offset ranges that a COMMIT record names: run by run, or as the events of one transaction.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from anabranch.errors import DeadlineExceeded, IllegalState, MalformedRecord, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import CommitRecord, SegmentCommit
from anabranch.reading.committed_log import CommittedLog, Foreign
from anabranch.reading.decoded import Portion, Run, Stretch
from anabranch.reading.feed import Feed
from anabranch.reading.history import Found, HistoryCursor
from anabranch.topics.names import stream_topic
from anabranch.types import Event

log = logging.getLogger("anabranch.client")

IN_HAND = (
    10_000  # transactions of up to this many events are read at once, bigger ones piece by piece
)
_AT_ONCE = 2000  # history records
_SKIP_BY_READING = 1_000  # a smaller gap is read and skipped, a bigger one is jumped over


class CommitFeed:
    """The records of a stream's history, in order, and the events of the first record. One thread at a time.

    A record stays the first one until `advance`: after an error its events are read again.
    """

    def __init__(
        self, source: CommittedLog, stream: str, timeout: float, *, whole: bool = False
    ) -> None:
        """``timeout``: seconds without new events. ``whole``: as of `HistoryCursor`."""
        self.history = HistoryCursor(source, stream, whole=whole)
        self.parts = StreamParts(source, stream, timeout)
        self.records: deque[Found] = deque()  # read, and not passed yet
        self._runs: Iterator[Run] | None = None

    @property
    def first(self) -> Found:
        """The first record that is read and not passed. Call it only if there is one."""
        return self.records[0]

    def seek(self, offset: int) -> None:
        """Continue at this offset of the history."""
        self.clear()
        self.history.seek(offset)

    def clear(self) -> None:
        """Forget what was read and not passed."""
        self.records.clear()
        self._runs = None

    def read_on(
        self, deadline: float, limit: int = _AT_ONCE, check: Callable[[Found], None] | None = None
    ) -> list[Found]:
        """Read more of the history. Returns the new records; empty at the deadline (monotonic seconds) or the end.

        ``check``: called with the first new record; if it raises, the new records are dropped.
        """
        found = self.history.next(deadline, limit)
        if found and check is not None:
            check(found[0])
        self.records.extend(found)
        return found

    def runs(self) -> Iterator[Run] | None:
        """The events of the first record, a commit, run by run; None if retention has deleted some of the events.

        A later call returns the rest.
        """
        if self._runs is None:
            self._runs = self.parts.runs(_commit(self.first))
        return self._runs

    def events(self) -> TransactionEvents | None:
        """The events of the first record, a commit; None if retention has deleted some of them."""
        return self.parts.events(_commit(self.first))

    def advance(self) -> Found:
        """Pass the first record, and return it."""
        self._runs = None
        return self.records.popleft()

    def positions(self) -> dict[TopicPartition, int]:
        """The places to wait at for new records: the history, and each partition without fetched records."""
        return {self.history.place: self.history.position} | self.parts.places()


def _commit(found: Found) -> CommitRecord:
    if not isinstance(found.record, CommitRecord):
        raise TypeError(f"the record at offset {found.offset} has no events")
    return found.record


class StreamParts:
    """Reads the stream's partitions by the ranges of COMMIT records, given in the order of the history."""

    def __init__(self, source: CommittedLog, stream: str, timeout: float) -> None:
        self._stream = stream
        self._topic = stream_topic(stream)
        self._source = source
        self._timeout = timeout
        self._foreign = Foreign(self._topic, source.clock)
        self._feed = Feed(source)
        self._fetched: dict[int, deque[Portion]] = {}
        self._next: dict[int, int] = {}  # partition -> offset below which all is taken or skipped
        self._starts: dict[int, int] = {}

    def events(self, record: CommitRecord) -> TransactionEvents | None:
        """The events of a commit; None if retention has deleted some of them."""
        events = TransactionEvents(self, record)
        return events if self._is_there(record, events.take_in_hand) else None

    def runs(self, record: CommitRecord) -> Iterator[Run] | None:
        """As `events`, run by run."""
        in_hand: list[Run] = []
        rest = chain.from_iterable(self._runs(part, record) for part in record.segments)
        there = self._is_there(record, lambda: in_hand.extend(rest))
        return chain(in_hand, rest) if there else None

    def _is_there(self, record: CommitRecord, take_in_hand: Callable[[], None]) -> bool:
        """Whether retention has kept all of a commit. ``take_in_hand`` reads a small commit at once."""
        unknown = [p.partition for p in record.segments if p.partition not in self._starts]
        if unknown:
            self._look_up_starts(unknown)
        try:
            if any(part.first < self._starts[part.partition] for part in record.segments):
                raise self.expired(record)
            if sum(part.count for part in record.segments) <= IN_HAND:
                take_in_hand()
        except SnapshotExpired:
            return False
        return True

    def _look_up_starts(self, partitions: list[int]) -> None:
        places = [TopicPartition(self._topic, p) for p in partitions]
        found = self._source.start_offsets(places, self._source.clock.monotonic() + self._timeout)
        self._starts |= {place.partition: offset for place, offset in found.items()}

    def places(self) -> dict[TopicPartition, int]:
        """The partitions without fetched records, with the offset of each one's next fetch."""
        known = self._feed.positions(
            self._topic, [p for p, some in self._fetched.items() if not some]
        )
        return {TopicPartition(self._topic, p): offset for p, offset in known.items()}

    def read(self, part: SegmentCommit, record: CommitRecord) -> Iterator[Event]:
        """The events of one segment of a commit."""
        for run in self._runs(part, record):
            yield from run.events(self._stream)

    def _runs(self, part: SegmentCommit, record: CommitRecord) -> Iterator[Run]:
        partition = part.partition
        txn_id = None if record.txn_id == NO_TXN else record.txn_id
        portions = self._stand_at(partition, part.first)
        count = 0
        while self._upcoming(portions, part, record):
            block, low = portions[0].next_of_block()
            offsets = block.offsets
            high = bisect_left(offsets, part.end, low)
            low = bisect_left(offsets, part.first, low, high)
            portions[0].advance(high)
            # An iteration that stops in the middle of a block reads the block again.
            self._next[partition] = offsets[high - 1] + 1
            while low < high:
                ours = block.of_txn(low, high, txn_id)
                if ours == low:
                    self._foreign.count_skipped(partition, offsets[low], 1)
                    low += 1
                    continue
                stretch = Stretch(ours - low, txn_id, record.timestamp, part.segment_id)
                yield Run(block, partition, low, stretch)
                count += ours - low
                low = ours
            if high < len(offsets):
                break  # the next records follow this part
        if count != part.count:
            self._check_there(partition, part.first, record)
            raise MalformedRecord(
                f"{self._topic}[{partition}] shows {count} events of {part.count} in "
                f"[{part.first}, {part.end}): the topic was tampered with"
            )

    def _check_there(self, partition: int, offset: int, record: CommitRecord) -> None:
        """Raise `SnapshotExpired` if retention has deleted the offset meanwhile."""
        self._look_up_starts([partition])
        if offset < self._starts[partition]:
            raise self.expired(record)

    def expired(self, record: CommitRecord) -> SnapshotExpired:
        """The error for a commit with deleted events."""
        return SnapshotExpired(
            f"retention has deleted events of transaction {record.txn_id.hex()} in {self._stream}"
        )

    def _stand_at(self, partition: int, offset: int) -> deque[Portion]:
        """The fetched portions of a partition, for reading from this offset on; a far offset is jumped to."""
        taken = self._next.get(partition)
        if taken is None or not (
            taken <= offset <= taken + _SKIP_BY_READING
            or taken <= offset <= self._feed.positions(self._topic, [partition]).get(partition, 0)
        ):
            self._fetched[partition] = deque()
            self._feed.add(self._topic, {partition: offset})
        self._next[partition] = offset
        return self._fetched[partition]

    def _upcoming(
        self, portions: deque[Portion], part: SegmentCommit, record: CommitRecord
    ) -> bool:
        """Fetch more of a part if needed. Returns whether it has another record."""
        clock, partition = self._source.clock, part.partition
        deadline = clock.monotonic() + self._timeout
        while True:
            while portions:
                offset = portions[0].first()
                if offset is not None:
                    return offset < part.end
                portions.popleft()
            if self._feed.positions(self._topic, [partition])[partition] >= part.end:
                return False
            if self._source.closed:
                raise IllegalState("the reader is closed")
            if clock.monotonic() >= deadline:
                self._check_there(partition, part.first, record)
                raise DeadlineExceeded(
                    f"{self._topic}[{partition}] did not show offset {self._next[partition]} in time"
                )
            # Portions of other partitions wait for their turn.
            held = {TopicPartition(self._topic, p) for p, some in self._fetched.items() if some}
            for portion in self._feed.next(deadline, held):
                self._fetched[portion.place.partition].append(portion)


class TransactionEvents:
    """The `Events` of a `Committed`. More than `IN_HAND` events are read while iterating, partition by partition.

    Iterating raises `SnapshotExpired` if retention has deleted events meanwhile.
    """

    def __init__(self, parts: StreamParts, record: CommitRecord) -> None:
        self._parts = parts
        self._record = record
        self._in_hand: list[Event] | None = None

    def __len__(self) -> int:
        return sum(part.count for part in self._record.segments)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._in_hand) if self._in_hand is not None else self._read()

    def take_in_hand(self) -> None:
        """Read all events now."""
        self._in_hand = list(self._read())

    def _read(self) -> Iterator[Event]:
        for part in self._record.segments:
            yield from self._parts.read(part, self._record)
