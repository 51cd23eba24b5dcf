"""One stream of a reader: returns its events in stream order, and keeps events that have to wait."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import length_hint

from anabranch.backoff import Backoff
from anabranch.errors import AnabranchError, RetryError
from anabranch.ports import GroupMember, TopicPartition
from anabranch.reading.committed_log import CommittedLog, Foreign
from anabranch.reading.decoded import Block, Stretch, events_of
from anabranch.reading.feed import Feed
from anabranch.reading.fetched import Portion
from anabranch.reading.history_index import DELETED, FOREIGN, NO_SEGMENT, HistoryIndex, Span
from anabranch.topics.names import stream_topic
from anabranch.types import Event

log = logging.getLogger("anabranch.client")

EVERYTHING = range(1 << 31)  # all partitions, including future ones
_AT_ONCE_S = 0.2  # the history arrives with the data; longer waits do not block the reader
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_STARTS_EVERY_S = 5.0


class Step:
    """Events of one partition that may be returned, in order."""

    __slots__ = ("_floor", "_left", "offsets", "place", "rest")

    def __init__(
        self,
        place: TopicPartition,
        offsets: list[int],
        make: Callable[[Iterator[int]], Iterator[Event]],
    ) -> None:
        """``make``: makes the events; each takes its offset when it is made."""
        self.place = place
        self.offsets = offsets
        self._left = iter(offsets)
        self.rest = make(self._left)  # the events that are not returned yet
        self._floor = 0

    def asked_for_more(self) -> None:
        """Note that all events returned so far are processed."""
        self._floor = self._given

    @property
    def _given(self) -> int:
        return len(self.offsets) - length_hint(self._left)

    @property
    def given_to(self) -> int:
        """The offset after the last returned event; 0 without one."""
        return self.offsets[self._given - 1] + 1 if self._given else 0

    @property
    def processed_to(self) -> int | None:
        """The offset after the last processed event: all returned ones except the last."""
        count = max(self._floor, self._given - 1)
        return self.offsets[count - 1] + 1 if count > 0 else None


class OrderedStream:
    """The records of one stream from a reader's feed, and the order in which their events may be returned.

    Events that have to wait are kept here, and their partition is not fetched meanwhile.
    """

    def __init__(
        self,
        source: CommittedLog,
        feed: Feed,
        member: GroupMember | None,
        stream: str,
        timeout: float,
    ) -> None:
        """``feed``: the reader's; ``member``: its member of the group. ``timeout``: seconds, of each question."""
        self.stream = stream
        self.topic = stream_topic(stream)
        self.index = HistoryIndex(source, stream, timeout)
        self._clock = source.clock
        self._foreign = Foreign(self.topic, source.clock)
        self._source = source
        self._feed = feed
        self._member = member
        self._timeout = timeout
        self._alone = False
        self._own: set[int] = set()
        self._known: set[int] = set()
        self._begun: Mapping[int, int] | None = None
        self._from: dict[int, int] = {}
        self._backlog: dict[int, deque[Portion]] = {}
        self._held: dict[int, int] = {}  # partition -> the next offset, which has to wait
        self._questions = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._clock)
        self._next_starts = 0.0

    def begin(self, positions: Mapping[int, int], own: Collection[int] | None) -> None:
        """Read the own partitions (None: all present and future ones) from these positions on.

        ``positions``: partition -> offset, of all partitions.
        """
        self._forget()
        self._alone = own is None
        self._own = set(positions if own is None else own)
        self._known = set(positions)
        self._begun = self._from = dict(positions)
        self._next_starts = self._clock.monotonic() + _STARTS_EVERY_S

    def stop(self) -> None:
        """Stop reading: the partitions are revoked."""
        self._forget()
        self._own = set()
        self._begun = None

    def _forget(self) -> None:
        # New objects, not cleared ones: a thread that closes the reader must not change what this one is using.
        self._backlog = {}
        self._held = {}

    @property
    def holds(self) -> bool:
        """Whether fetched events have to wait."""
        return bool(self._held)

    def waiting(self) -> set[TopicPartition]:
        """Partitions with fetched events that are not returned yet."""
        return {TopicPartition(self.topic, partition) for partition in self._backlog}

    # -- events ---------------------------------------------------------------------------------------

    def put(self, portion: Portion) -> None:
        """Add records that follow the earlier ones of their partition."""
        self._backlog.setdefault(portion.place.partition, deque()).append(portion)

    def step(self, limit: int) -> Step | None:
        """The next events that may be returned, at most ``limit``; None at the end, or if they have to wait.

        The caller returns the events of steps in their order.
        """
        backlog = self._backlog
        for partition in [p for p in backlog if p not in self._held]:
            portions = backlog[partition]
            while portions:
                found = self._step(partition, portions[0], limit)
                if self._backlog is not backlog:
                    # Another thread closed the reader: the group's next member reads these events.
                    return None
                if found is not None:
                    # The other partitions come first next time.
                    backlog[partition] = backlog.pop(partition)
                    return found
                if partition in self._held:
                    break
                portions.popleft()
            else:
                del backlog[partition]
        return None

    def release(self) -> None:
        """Check again whether waiting events may be returned."""
        for partition, offset in list(self._held.items()):
            if self._turn(partition, offset, 0) is not None:
                self._held.pop(partition, None)

    def _step(self, partition: int, portion: Portion, limit: int) -> Step | None:
        """The next events of a portion; None if it is empty, or the next event has to wait, which is noted."""
        while (offset := portion.first()) is not None:
            span = self._turn(partition, offset, _AT_ONCE_S)
            if span is None:
                self._held[partition] = offset
                return None
            block, low = portion.next_of_block()
            offsets = block.offsets
            at, most = low, min(low + limit, len(offsets))
            stretches = []
            passed = 0
            while span is not None and not passed:
                end = bisect_left(offsets, min(span.end, portion.end), at, most)
                ours = _ours(span, block, at, end)
                if ours > at:
                    stretches.append(
                        Stretch(ours - at, span.txn_id, span.commit_timestamp, span.segment_id)
                    )
                at, passed = ours, end - ours
                if passed or at == most or offsets[at] >= portion.end:
                    break
                try:
                    # Later events may need more of the history: don't wait for that now.
                    span = self._turn(partition, offsets[at], 0)
                except AnabranchError:
                    break  # it is found again with the next step, when the index has advanced
            if stretches:
                make = partial(events_of, self.stream, partition, block, low, stretches)
                step = Step(TopicPartition(self.topic, partition), offsets[low:at], make)
                portion.advance(at)
                return step
            if span is not None and span.segment_id == DELETED:
                start = self._start_of(partition)
                if start is None:
                    self._held[partition] = offset
                    return None
                if start <= offset:
                    self.index.keep(partition)
                    continue
                passed = bisect_left(offsets, min(start, span.end, portion.end), at, most) - at
                log.warning(
                    "retention has deleted events of %s[%d] that were fetched and not given yet: reading goes on "
                    "after offset %d",
                    self.topic,
                    partition,
                    offsets[at + passed - 1],
                )
            else:
                if span is not None and span.segment_id != FOREIGN:
                    passed = 1  # a foreign record within a commit's range: the next record may belong to the commit
                self._foreign.count_skipped(partition, offset, passed)
            portion.advance(at + passed)
        return None

    def _start_of(self, partition: int) -> int | None:
        """The first undeleted offset; None if no broker answers now."""
        place = TopicPartition(self.topic, partition)
        try:
            return self._source.start_offsets([place], self._clock.monotonic() + _AT_ONCE_S)[place]
        except RetryError as error:
            log.info("%s: %s", self.topic, error)
            return None

    def _turn(self, partition: int, offset: int, wait: float) -> Span | None:
        self._cover()
        span = self.index.find(partition, offset, wait)
        order = self.index.order
        order.moved({partition: offset})  # all events before it are returned, or deleted
        if span is None or not order.readable(span.segment_id):
            return None
        return span

    def _cover(self) -> None:
        if self._begun is not None:
            self.index.cover(self._begun, EVERYTHING if self._alone else self._own)
            self._begun = None

    # -- progress -------------------------------------------------------------------------------------

    def settle(self, idle: bool) -> dict[int, int]:
        """Update positions between steps. Call it only when all returned events are processed.

        Returns positions to commit that do not follow from processed events: up to waiting events, and after what
        retention deleted. ``idle``: nothing else is to be done, so read more of the history.
        """
        if idle:
            self._cover()
            self.index.read_on()
        order = self.index.order
        told = dict(self._held)
        watched = order.watched & self._own
        if watched or self._held:
            order.moved(self._positions())
            self._ask_others()
            if self._clock.monotonic() >= self._next_starts:
                told |= self._deleted((order.watched & self._own) - self._backlog.keys())
        self._take_new()
        return told

    def _positions(self) -> dict[int, int]:
        """Partition -> offset up to which all events are returned."""
        ahead = {}
        for partition, portions in self._backlog.items():
            firsts = (portion.first() for portion in portions)
            offset = next((first for first in firsts if first is not None), None)
            if offset is not None:
                ahead[partition] = offset
        return self._feed.positions(self.topic, self._own - ahead.keys()) | ahead

    def _ask_others(self) -> None:
        """Ask now and then for the group's positions on the partitions that events here wait for."""
        if self._member is None or self._alone or not self._questions.is_over:
            return
        awaited = self._awaited() - self._own
        if not awaited:
            return
        places = [TopicPartition(self.topic, partition) for partition in awaited]
        found = self._member.committed(places)
        before = len(awaited)
        self.index.order.moved({partition: offset for (_, partition), offset in found.items()})
        if len(self._awaited() - self._own) < before:
            self._questions.reset()
        self._questions.begin()

    def _awaited(self) -> set[int]:
        """Partitions that have to be read before the waiting events."""
        awaited = set()
        for partition, offset in self._held.items():
            span = self.index.find(partition, offset, 0)
            if span is not None and not self.index.order.readable(span.segment_id):
                awaited |= self.index.order.awaited(span.segment_id)
        return awaited

    def _deleted(self, watched: set[int]) -> dict[int, int]:
        """The beginnings of partitions on which retention deleted the end of a segment, so that no reader
        reaches it.
        """
        self._next_starts = self._clock.monotonic() + _STARTS_EVERY_S
        asked = self._own | self._awaited()
        try:
            found = self._source.start_offsets(
                [TopicPartition(self.topic, p) for p in asked],
                self._clock.monotonic() + self._timeout,
            )
        except RetryError as error:
            log.info("%s: %s", self.topic, error)
            return {}
        starts = {partition: offset for (_, partition), offset in found.items()}
        self.index.order.moved(starts)
        for partition in self._own:
            self.index.drop(partition, starts[partition])
        known = self._from | self._feed.positions(self.topic, watched)
        return {p: starts[p] for p in watched if starts[p] > known.get(p, 0)}

    def _take_new(self) -> None:
        """Read partitions that the history names for the first time; a group assigns them soon."""
        new = self.index.partitions - self._known
        self._known |= new
        if new and self._alone:
            self._own |= new
            self._feed.add(self.topic, dict.fromkeys(new, 0))
        elif new and self._member is not None:
            self._member.look()


def _ours(span: Span, block: Block, low: int, high: int) -> int:
    """The place in a block up to which records belong to the commit in whose range they are."""
    if span.segment_id in (FOREIGN, DELETED):
        return low
    return high if span.segment_id == NO_SEGMENT else block.of_txn(low, high, span.txn_id)
