"""Reading whole transactions: `Client.read_transactions`."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import chain

from anabranch.core.ids import NO_TXN
from anabranch.core.legal_names import split_stream
from anabranch.errors import (
    DeadlineExceeded,
    IllegalState,
    MalformedRecord,
    RetryError,
    SnapshotExpired,
)
from anabranch.ports import TopicPartition
from anabranch.reading.committed_log import (
    CommittedLog,
    Foreign,
    ReaderPorts,
    partitions_of,
)
from anabranch.reading.decoded import Portion, Run, Stretch
from anabranch.reading.feed import Feed
from anabranch.reading.history import Found, HistoryCursor, HistorySearch, Start, check_start
from anabranch.reading.iteration import Iteration, check_group, check_timeout
from anabranch.schemas.records import CommitRecord, SegmentCommit
from anabranch.topics.names import stream_topic
from anabranch.types import Committed, Event

log = logging.getLogger("anabranch.client")

IN_HAND = 10_000  # transactions of up to this many events are read before they are returned; bigger ones lazily
_SKIP_BY_READING = 1_000  # a smaller gap is read and skipped, a bigger one is jumped over
_PACE_S = 0.25  # how often the group is served while nothing comes
_TICK_S = 0.5  # … and while transactions are processed


class TransactionReader(Iteration[Committed]):
    """Whole transactions in commit order. An iterator; close it, or use it as a context manager.

    A group has one active member; another one resumes where it stopped. A transaction counts as processed when the
    next one is requested, and the position is committed then. So each comes at least once. One thread at a time.
    """

    def __init__(
        self,
        ports: ReaderPorts,
        stream: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        ask_timeout: float,
        *,
        whole: bool = False,
    ) -> None:
        """``whole``: `SnapshotExpired` where events are deleted; else such transactions are skipped."""
        super().__init__()
        split_stream(stream)
        self._clock = ports.clock
        self._ask_timeout = ask_timeout
        self._stream = stream
        check_group(group)
        self._timeout = check_timeout(timeout)
        self._start = check_start(start)
        self._done: int | None = None
        self._term = 0  # raised when the history partition is revoked
        self._assigned_by = self._clock.monotonic() + ask_timeout
        self._assigned = group is None
        self._gains = group is None  # the history is assigned, and its reading has not begun yet
        self._owned = False  # the history is assigned, and is being read
        self._next_tick = 0.0
        self._batch: deque[Found] = deque()
        self._given: int | None = None
        self._member = None if group is None else ports.member(group)
        self._source = ports.committed_log(ask_timeout)
        self._history = HistoryCursor(self._source, stream, whole=whole)
        self._whole = whole
        self._parts = StreamParts(self._source, stream, ask_timeout)
        self._closed = False
        partitions_of(self._source, [stream], self._assigned_by)
        if self._member is None:
            self._begin()
        else:
            self._member.join([self._history.place.topic], self._gained, self._lost)

    def _free(self) -> None:
        self._commit(wait=True)
        self._source.close()
        if self._member is not None:
            self._member.close()

    # -- transactions ---------------------------------------------------------------------------------

    def _run(self) -> Generator[Committed, None, None]:
        if self._given is not None:
            self._processed(self._given)
            self._given = None
        while not self._closed:
            try:
                if not self._tick() or not (self._batch or self._read_on()):
                    break
                offset, record = self._batch[0]
                # If the events of a commit can't be read now, it stays the next one.
                committed = self._committed(record) if isinstance(record, CommitRecord) else None
            except (RuntimeError, RetryError):  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                break
            self._batch.popleft()
            term = self._term
            if committed is not None:
                if self._done is None:
                    self._processed(offset)  # so that other readers see the group's position
                try:
                    yield committed
                except GeneratorExit:
                    self._given = offset + 1
                    raise
            if term != self._term:
                continue  # another member resumes at the committed position
            if isinstance(record, CommitRecord):
                self._processed(offset + 1)
            elif (
                not self._whole or self._done is not None
            ):  # a call that returns nothing commits nothing
                self._done = offset + 1

    def _committed(self, record: CommitRecord) -> Committed | None:
        events = self._parts.events(record)
        if events is None and self._whole:
            raise SnapshotExpired(f"events of a transaction in {self._stream} are deleted")
        if events is None:
            log.warning("passed over: %s", self._parts.expired(record))
            return None
        txn_id = None if record.txn_id == NO_TXN else record.txn_id
        return Committed(txn_id, record.timestamp, self._stream, events)

    def _processed(self, after: int) -> None:
        self._done = after
        self._commit(wait=False)

    def _tick(self) -> bool:
        """Serve the group now and then, also within long transactions. Returns whether the reader is open."""
        now = self._clock.monotonic()
        if self._member is not None and now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._member.serve(0.0)
        return not self._closed

    def _read_on(self) -> bool:
        """Read more of the history. False if nothing came for the reader's timeout, or it is closed."""
        give_up = None
        while not self._closed:
            if self._gains:
                self._begin()
            now = self._clock.monotonic()
            if give_up is None and (self._assigned or now >= self._assigned_by):
                give_up = math.inf if self._timeout is None else now + self._timeout
            until = min(math.inf if give_up is None else give_up, now + _PACE_S)
            if self._owned:
                self._batch.extend(self._history.next(until))
            if self._member is not None:
                self._member.serve(0.0 if self._owned else max(0.0, until - now))
            if self._batch:
                return True
            if give_up is not None and self._clock.monotonic() >= give_up:
                self._commit(wait=True)
                break
        return False

    # -- positions ------------------------------------------------------------------------------------

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """Note whether the history is assigned to this member. Reading begins outside of this callback."""
        self._owned = False
        self._gains = bool(partitions)
        self._assigned = True

    def _begin(self) -> None:
        """Begin at the group's position, or at the start."""
        place = self._history.place
        known = self._member.committed([place]) if self._member is not None else {}
        first = known[place] if place in known else self._first()
        self._history.seek(first)
        self._gains, self._owned = False, True
        if self._start == "end" and place not in known:
            self._done = first  # so that the next member does not skip what comes from now on
            self._commit(wait=True)

    def _first(self) -> int:
        """The offset in the history at which a reader without a group's position begins."""
        if self._start == "end":
            place = self._history.place
            deadline = self._clock.monotonic() + self._ask_timeout
            return self._source.end_offsets([place], deadline)[place]
        search = HistorySearch(self._source, self._stream, self._ask_timeout)
        found = search.as_of(self._start)
        return 0 if found is None else found.offset + 1

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        if may_commit:
            self._commit(wait=True)
        self._done = None
        self._given = None
        self._gains = self._owned = False
        self._batch.clear()
        self._term += 1

    def _commit(self, *, wait: bool) -> None:
        if self._member is not None and self._done is not None and not self._source.is_gone:
            self._member.commit({self._history.place: self._done}, wait=wait)


class StreamParts:
    """Reads the stream's partitions by the ranges of COMMIT records. Their offsets rise with the history."""

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
        """`events`, run by run."""
        in_hand: list[Run] = []
        rest = chain.from_iterable(self._runs(part, record) for part in record.segments)
        there = self._is_there(record, lambda: in_hand.extend(rest))
        return chain(in_hand, rest) if there else None

    def _is_there(self, record: CommitRecord, take_in_hand: Callable[[], None]) -> bool:
        """Whether retention has kept all of a commit. A small one is read at once."""
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
        """`SnapshotExpired` if retention has deleted the offset meanwhile."""
        self._look_up_starts([partition])
        if offset < self._starts[partition]:
            raise self.expired(record)

    def expired(self, record: CommitRecord) -> SnapshotExpired:
        """The error for a commit with deleted events."""
        return SnapshotExpired(
            f"retention has deleted events of transaction {record.txn_id.hex()} in {self._stream}"
        )

    def _stand_at(self, partition: int, offset: int) -> deque[Portion]:
        """The fetched portions of a partition, from this offset on."""
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
        """Fetch more of a part. Returns whether there is more."""
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
    """The events of a transaction. Iterate as often as you like; ``len`` is their number.

    Up to 10,000 are in memory; more are read while you iterate, one partition after the other. `SnapshotExpired` if
    retention deletes them meanwhile. Events of one key are in order.
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
        """Read all of them now."""
        self._in_hand = list(self._read())

    def _read(self) -> Iterator[Event]:
        for part in self._record.segments:
            yield from self._parts.read(part, self._record)
