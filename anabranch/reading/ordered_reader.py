"""Reading committed events in stream order: `Client.read`.

A `Reader` fetches records, serves its group, and commits positions. For each stream it has an `OrderedStream`,
which keeps fetched events until they may be returned, and returns them in steps.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import length_hint
from typing import Any, Generic

from anabranch.backoff import Backoff
from anabranch.errors import AnabranchError, NotReady, RetryError
from anabranch.ports import Clock, GroupMember, TopicPartition
from anabranch.reading.commit_index import DELETED, FOREIGN, NO_SEGMENT, CommitIndex, Span
from anabranch.reading.committed_log import (
    CommittedLog,
    Foreign,
    ReaderPorts,
    first_offsets,
    partitions_of,
)
from anabranch.reading.decoded import Block, Portion, Stretch, events_of
from anabranch.reading.feed import Feed
from anabranch.reading.history import HistorySearch, Start, check_start
from anabranch.reading.iteration import Iteration, check_group, check_timeout
from anabranch.topics.names import stream_topic
from anabranch.types import Event, K, V
from anabranch.values import Decode, Decoder, Held

log = logging.getLogger("anabranch.client")

EVERYTHING = range(1 << 31)  # all partitions, including future ones
_BEYOND = 1 << 62  # above all offsets
# Without events for this time, more of the history is read: it may name new partitions.
IDLE_S = 0.25
# The same while events have to wait: the pause begins with `_TURN_S`, and grows.
_TURN_S = 0.02
_LONGEST_TURN_S = 0.1
_TURN_GROWTH = 1.5
_AT_ONCE_S = 0.2  # the history arrives with the data; longer waits do not block the reader
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_STARTS_EVERY_S = 5.0  # between questions for what retention has deleted


def turn_pauses(clock: Clock) -> Backoff:
    """The pauses after which waiting events are checked again."""
    return Backoff(_TURN_S, _LONGEST_TURN_S, clock, growth=_TURN_GROWTH)


class Step(Held):
    """Events of one partition that may be returned, in order."""

    __slots__ = ("_floor", "_left", "_made", "_make", "offsets", "place")

    def __init__(
        self,
        place: TopicPartition,
        offsets: list[int],
        make: Callable[..., Iterator[Event]],
    ) -> None:
        """``make``: makes the events on demand, as `events_of` from its argument ``offsets`` on."""
        super().__init__(None)
        self.place = place
        self.offsets = offsets
        self._left = iter(offsets)
        self._make = make
        self._made: Iterator[Event[Any, Any]] | None = None
        self._floor = 0

    @property
    def rest(self) -> Iterator[Event]:
        """The events that are not taken yet. The iterator of `decoded`, which another loop may have, ends."""
        if self._rest is None:
            taken, left = self._taken, list(self._left)
            self._left = iter(left)
            rest: Iterator[Event] = iter(())
            if left:
                rest = self._make(chain(self.offsets[:taken], self._left))
                next(islice(rest, taken, taken), None)
            self._rest = rest
        return self._rest

    def decoded(self, key: Decode, value: Decode) -> Iterator[Event[Any, Any]] | None:
        if self._rest is not None:
            return None
        if self._made is None and not self._taken:
            self._made = self._make(self._left, key=key, value=value)
        return self._made

    @property
    def _taken(self) -> int:
        return len(self.offsets) - length_hint(self._left)

    def asked_for_more(self) -> None:
        """Note that all events returned so far are processed."""
        self._floor = self._given

    @property
    def _given(self) -> int:
        return self._taken - (self.kept is not None)

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
        """``feed``: the reader's. ``member``: the reader's in its group. ``timeout``: seconds of each question."""
        self.stream = stream
        self.topic = stream_topic(stream)
        self.index = CommitIndex(source, stream, timeout)
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
        # New objects: a thread that closes the reader must not change those that the iterating thread uses.
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
        """Add records that follow the earlier records of their partition."""
        self._backlog.setdefault(portion.place.partition, deque()).append(portion)

    def step(self, limit: int) -> Step | None:
        """The next events that may be returned, at most ``limit``; None at the end, or if they have to wait."""
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
                    break  # the next step begins there, and raises it again
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
                    "retention has deleted events of %s[%d] that were fetched and not given yet: reading continues "
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
        """The first undeleted offset of a partition; None if no broker answers now."""
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

    def update_positions(self, idle: bool) -> dict[int, int]:
        """Update positions between steps. Call it only when all returned events are processed.

        Returns positions to commit that do not follow from processed events: up to waiting events, and after events
        that retention deleted. ``idle``: read more of the history, because there is nothing else to do.
        """
        if idle:
            self._cover()
            self.index.read_on()
        order = self.index.order
        positions = dict(self._held)
        watched = order.watched & self._own
        if watched or self._held:
            order.moved(self._positions())
            self._ask_others()
            if self._clock.monotonic() >= self._next_starts:
                positions |= self._deleted((order.watched & self._own) - self._backlog.keys())
        self._take_new()
        return positions

    def take_finished(self) -> bool:
        """Whether a sealed segment was read to its end since the last call: other readers may wait for it."""
        return self.index.order.take_finished()

    def forget(self, partitions: Iterable[int]) -> None:
        """Drop the commits of partitions that are read to their ends."""
        for partition in partitions:
            self.index.drop(partition, _BEYOND)

    def _positions(self) -> dict[int, int]:
        """Own partition -> offset up to which all events are returned."""
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
        """The partitions that have to be read before the waiting events."""
        awaited = set()
        for partition, offset in self._held.items():
            span = self.index.find(partition, offset, 0)
            if span is not None and not self.index.order.readable(span.segment_id):
                awaited |= self.index.order.awaited(span.segment_id)
        return awaited

    def _deleted(self, watched: set[int]) -> dict[int, int]:
        """Partition -> its first offset, where retention deleted a sealed segment's end that no reader reached."""
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
        """Take in partitions that the history names for the first time.

        A reader without a group reads them from offset 0. A group's member looks for them, so that the group
        assigns them.
        """
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


COMMIT_EVERY_S = 1.0
_SETTLE_S = 0.25  # positions are updated this often while events come
_ASK_EVERY_S = 0.1  # for the group's positions
_TICK_S = 0.5  # how often the group is served while events are processed
# A step should be processed within these seconds: then the next one may be bigger, otherwise it is smaller.
_QUICK_S = 0.05
_SLOW_S = 0.25
_FIRST_STEP = 64
_BIGGEST_STEP = 1024


_NOTHING = Step(TopicPartition("", 0), [], lambda *_, **__: iter(()))


class Reader(Iteration[Event[K, V]], Generic[K, V]):
    """Committed events, one after the other. An iterator; close it, or use it as a context manager.

    Events of one key come in commit order, however the stream is scaled meanwhile. The members of a group share the
    partitions, and a member resumes a partition at the group's position. An event counts as processed when the
    next one is requested. Positions are committed about every second, when a sealed segment is read to its end,
    when partitions move to another member, and at `close`. So each event comes at least once. One thread at a time.
    """

    def __init__(
        self,
        ports: ReaderPorts,
        streams: Sequence[str],
        group: str | None,
        timeout: float | None,
        start: Start,
        ask_timeout: float,
        *,
        decoders: Mapping[str, Decoder] | None = None,
    ) -> None:
        """``decoders``: stream -> its decoder, for streams that were given by a handle."""
        super().__init__()
        self._decoders = {stream_topic(name): each for name, each in (decoders or {}).items()}
        self._clock = ports.clock
        self._names = {stream_topic(stream): stream for stream in streams}
        self._group = check_group(group)
        self._timeout = check_timeout(timeout)
        checked = check_start(start)
        self._ask_timeout = ask_timeout
        self._processed: dict[TopicPartition, int] = {}
        self._next_commit = self._clock.monotonic() + COMMIT_EVERY_S
        self._assigned_by = self._clock.monotonic() + ask_timeout
        self._assigned = False
        # Partitions assigned to this member whose reading has not begun yet.
        self._gains: dict[str, set[int]] | None = None
        self._begin_by = self._ask_at = 0.0
        self._term = 0  # rises when the assignment changes
        self._step = _NOTHING
        self._step_size = _FIRST_STEP
        self._step_began = self._next_tick = self._next_settle = 0.0
        self._member = member = None if group is None else ports.member(group)
        self._source = source = ports.committed_log(ask_timeout)
        self._feed = Feed(source, member)
        self._streams = {
            topic: OrderedStream(source, self._feed, member, stream, ask_timeout)
            for topic, stream in self._names.items()
        }
        self._starting = {
            topic: Starting(source, stream, checked, ask_timeout)
            for topic, stream in self._names.items()
        }
        self._closed = False
        partitions_of(source, list(streams), self._clock.monotonic() + ask_timeout)
        if member is None:
            self._begin({topic: starting.alone() for topic, starting in self._starting.items()})
        else:
            member.join(list(self._names), self._gained, self._lost)

    @property
    def skipped(self) -> int:
        """How many undecodable events this reader skipped, or wrote as dead letters."""
        return sum(decoder.skipped for decoder in self._decoders.values())

    def commit(self) -> None:
        """Commit in the group what is processed, and wait for it. Without a group it does nothing."""
        self._commit(wait=True)

    def _free(self) -> None:
        self._next_tick = 0.0  # so that another thread that iterates stops at the next event
        self._commit(wait=True)
        if self._member is not None:
            self._member.close()
        self._source.close()

    # -- events ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event[Any, Any], None, None]:
        now = self._clock.monotonic
        self._step.asked_for_more()
        while not self._closed:
            step = self._step
            decoder = self._decoders.get(step.place.topic)
            events = step.rest if decoder is None else decoder.decoded(step)
            if self._member is None:
                yield from events
            else:
                for event in events:
                    yield event
                    if now() >= self._next_tick and not self._tick(step):
                        break
            if self._step is not step:
                continue  # the partition was revoked, or another thread iterates, too, and was faster
            try:
                following = self._next_step()
            except (RuntimeError, RetryError):  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                break
            if following is None:
                break
            self._step = following

    def _tick(self, step: Step) -> bool:
        """Serve the group within a step; returns False if its partition is revoked, or the reader closed."""
        step.asked_for_more()
        now = self._clock.monotonic()
        self._next_tick = now + _TICK_S
        try:
            if not self._closed and now >= self._next_commit:
                self._commit(wait=False)
            if not self._closed:
                self._feed.serve()
        except (RuntimeError, RetryError):  # as above
            if not self._is_closed():
                raise
        return not self._closed and self._step is step

    def _next_step(self) -> Step | None:
        """The next events; None when nothing came for the reader's timeout, or once it is closed."""
        self._end_step()
        if self._member is not None:
            self._feed.serve()
        step = self._ready_step() if self._clock.monotonic() < self._next_settle else None
        give_up = None
        idle = False
        pauses = turn_pauses(self._clock)
        while step is None and not self._closed:
            now = self._clock.monotonic()
            self._begin_with_gains(now)
            waiting = self._settle(idle)
            step = self._ready_step()
            if step is not None:
                break
            spent = self._clock.monotonic() - now  # searching positions does not count as waiting
            now += spent
            if give_up is not None:
                give_up += spent
            elif self._assigned or now >= self._assigned_by:
                give_up = math.inf if self._timeout is None else now + self._timeout
            pause = pauses.begin()
            if not waiting and self._gains is None:
                pause = IDLE_S
            if self._fetch(min(give_up or math.inf, now + pause)):
                idle, give_up = False, None
                pauses.reset()
                continue
            idle = True
            if give_up is not None and self._clock.monotonic() >= give_up:
                self._commit(wait=True)
                break
        if step is not None:
            self._step_began = self._clock.monotonic()
            self._next_tick = self._step_began + _TICK_S
        return None if self._closed else step

    def _ready_step(self) -> Step | None:
        for stream in self._streams.values():
            step = stream.step(self._step_size)
            if step is not None:
                return step
        return None

    def _fetch(self, deadline: float) -> bool:
        """Fetch more. Returns whether something came until the deadline (monotonic seconds)."""
        waiting: set[TopicPartition] = set()
        for stream in self._streams.values():
            waiting |= stream.waiting()
        term = self._term
        portions = self._feed.next(deadline, waiting)
        if term != self._term:
            return False
        for portion in portions:
            self._streams[portion.place.topic].put(portion)
        return bool(portions)

    def _end_step(self) -> None:
        """Note that the step is processed, and adapt the size of the next one."""
        step, self._step = self._step, _NOTHING
        if not step.offsets or self._closed:
            return
        if self._member is not None:
            self._processed[step.place] = step.offsets[-1] + 1
        # Adapt to the pace of the caller.
        spent = self._clock.monotonic() - self._step_began
        if spent > _SLOW_S:
            self._step_size = max(1, self._step_size // 2)
        elif spent < _QUICK_S:
            self._step_size = min(_BIGGEST_STEP, self._step_size * 2)

    # -- positions ------------------------------------------------------------------------------------

    def _settle(self, idle: bool) -> bool:
        """Update positions between steps. Returns whether events wait for their turn."""
        self._next_settle = self._clock.monotonic() + _SETTLE_S
        finished = False
        for topic, stream in self._streams.items():
            for partition, position in stream.update_positions(idle).items():
                place = TopicPartition(topic, partition)
                self._processed[place] = max(position, self._processed.get(place, 0))
            finished |= stream.take_finished()
        if finished or self._clock.monotonic() >= self._next_commit:
            self._commit(wait=False)
        for stream in self._streams.values():
            stream.release()
        return any(stream.holds for stream in self._streams.values())

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """Note all partitions assigned now. Reading them begins outside of this callback of the member."""
        self._term += 1
        self._feed.assign({})
        self._gains = {topic: set() for topic in self._names}
        for place in partitions:
            self._gains[place.topic].add(place.partition)
        self._ask_at = self._clock.monotonic()
        self._begin_by = self._ask_at + self._ask_timeout

    def _begin_with_gains(self, now: float) -> None:
        """Begin at the group's positions, once these are known. Raises `NotReady` if that takes too long."""
        if self._gains is None or now < self._ask_at:
            return
        self._ask_at = now + _ASK_EVERY_S
        positions = {}
        for topic, own in self._gains.items():
            if own and self._member is not None:
                found = self._starting[topic].in_group(self._member, own)
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
        """Read the assigned partitions (without a group: all). ``positions``: topic -> partition -> offset."""
        gains, self._gains = self._gains, None
        places: dict[TopicPartition, int] = {}
        for topic, offsets in positions.items():
            own = None if gains is None else gains[topic]
            self._streams[topic].begin(offsets, own)
            mine = offsets if own is None else own
            places |= {TopicPartition(topic, p): offsets[p] for p in mine}
        self._feed.assign(places)
        self._assigned = True

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        """Stop reading all partitions. If commits are still allowed, commit first what is processed."""
        self._term += 1
        if may_commit:
            self._commit(wait=True)
        self._gains = None
        self._processed.clear()
        self._step = _NOTHING
        self._feed.assign({})
        for stream in self._streams.values():
            stream.stop()

    def _commit(self, *, wait: bool) -> None:
        self._next_commit = self._clock.monotonic() + COMMIT_EVERY_S
        if self._member is not None and not self._source.is_gone:
            done = dict(self._processed)
            step = self._step
            offset = step.processed_to
            if offset is not None:
                done[step.place] = offset
            self._member.commit(done, wait=wait)
            if wait:
                for place, offset in done.items():
                    if self._processed.get(place) == offset:
                        del self._processed[place]


class Starting:
    """Finds the positions to begin at, for all partitions of a stream."""

    def __init__(
        self,
        source: CommittedLog,
        stream: str,
        start: str | int,
        timeout: float,
    ) -> None:
        """``start``: as checked by `check_start`. ``timeout``: seconds, of each question."""
        self._source = source
        self._search = HistorySearch(source, stream, timeout)
        self._stream = stream
        self._topic = stream_topic(stream)
        self._start = start
        self._timeout = timeout
        # The positions of a new group, until all of them are committed.
        self._making: dict[TopicPartition, int] = {}

    def alone(self) -> dict[int, int]:
        """Partition -> offset for a reader without a group, also of partitions that a broker does not show yet."""
        found = self._search.as_of(self._start)
        vector = {} if found is None else found.vector()
        return {p: max(first, vector.get(p, 0)) for p, first in self._first_offsets(vector).items()}

    def in_group(self, member: GroupMember, own: Collection[int]) -> dict[int, int] | None:
        """Partition -> offset for a member with these partitions; None until the group has positions: ask again.

        A group with any position in the stream, even of a plain Kafka consumer, counts as initialised: partitions
        without a position are new, and begin at their beginning. Only the member with partition 0 initialises a
        group, by committing a position for every partition in one request. No other mark is possible, because
        brokers drop a group's offsets of topics that its members do not subscribe to.
        """
        firsts = self._first_offsets(own)
        committed = member.committed(
            [TopicPartition(self._topic, partition) for partition in firsts]
        )
        if 0 in own and (self._making or not committed):
            made = {TopicPartition(self._topic, p): at for p, at in self.alone().items()}
            self._making = committed = made | self._making
            if not member.commit(committed, wait=True):
                return None
            self._making = {}
        if not committed:
            return None
        return {
            p: max(first, committed.get(TopicPartition(self._topic, p), 0))
            for p, first in firsts.items()
        }

    def _first_offsets(self, known: Collection[int]) -> dict[int, int]:
        """The first undeleted offset of each partition, also of ``known`` ones that a broker does not show yet."""
        deadline = self._source.clock.monotonic() + self._timeout
        return first_offsets(self._source, self._stream, deadline, max(known, default=-1) + 1)
