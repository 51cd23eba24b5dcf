"""A leader's work outside of its rounds: staged merges, topics, truncation, foreign records, lost markers.

On Kafka, helper threads do this work, so that a slow broker delays no round. In the simulator it runs inside of the
calls that begin it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from anabranch.batches.format import read_header
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.controller.carrier import Carriers, carriers_of
from anabranch.controller.cleanup import Truncator
from anabranch.controller.durability import Appended
from anabranch.controller.jobs import Jobs
from anabranch.controller.leadership import Lease
from anabranch.controller.stream_topics import StreamTopics
from anabranch.controller.topic_trouble import TopicTrouble, places_of
from anabranch.core.decisions.turn import Settings
from anabranch.core.journal_index import JournalIndex
from anabranch.core.memory import LeaderMemory
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import (
    Clock,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    Table,
    TopicPartition,
    answered,
)
from anabranch.topics.names import status_topic, stream_topic

log = logging.getLogger("anabranch.controller")

QUIET_MS = 3_000  # since the last round to a stream
LOOK_EVERY_MS = 1_000
AGAIN_MS = 10_000  # if a native transaction is open there, or partitions can't be reached
_MOST_PLACES = 500  # partitions in one comparison


class BackgroundWork:
    """The parts that do the work outside of rounds for one leadership. They are closed when it ends."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        settings: Settings,
        *,
        lease: Lease,
        trouble: TopicTrouble,
        state: State,
        threads: bool,
    ) -> None:
        self._clock = clock
        self._trouble = trouble
        status = TopicPartition(status_topic(settings.prefix), settings.control_partition)
        carriers = carriers_of(log, status, lease.carriers, settings.chunk_bytes)
        self.carriers = Carriers(carriers, threads=threads)
        jobs = self._jobs = Jobs(threads=threads)
        every_ms = settings.clean_history_ms
        self.truncator = Truncator(log, jobs, trouble, histories_ms=every_ms)
        self.foreign_records = ForeignRecordScan(log, jobs)
        self.journals = JournalReaders(log, ahead=threads)
        self.lost_markers = LostMarkerSweep(log, jobs, trouble, state, self._now_ms())
        self.topics = StreamTopics(
            log, clock, jobs, trouble, self.truncator, record_bytes=settings.record_bytes
        )

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def close(self) -> None:
        """Stop all parts. None of them writes afterwards."""
        for part in (self.carriers, self._jobs, self.journals):
            part.close()

    def stage(
        self,
        state: State,
        table: Table,
        memory: LeaderMemory,
        index: JournalIndex,
        usable: Callable[[str], bool],
    ) -> None:
        """Apply the rows that carriers have logged since the last call, to the table as well."""
        if not state.committing and self.carriers.idle:
            return
        wall_ms = int(self._clock.wall() * 1000)
        failed = self.carriers.take_up(state, table, memory.merging, wall_ms, self._now_ms())
        if failed:
            self._trouble.find(state, *failed)
        self.carriers.sync(state, index, wall_ms, usable)

    def shorten(self, memory: LeaderMemory, kept: Callable[[], dict[str, int]]) -> None:
        """Delete records below the logged low waters.

        ``kept``: returns the streams whose histories may be truncated, with their numbers of partitions.
        """
        self.truncator.truncate()
        for stream, offset in self.truncator.spare(self._now_ms(), kept).items():
            memory.cleaning.spare.put(stream, offset)
        self.foreign_records.look(self._now_ms(), self._trouble.waiting)

    def forget_stream(self, stream: str) -> None:
        for part in (self.truncator, self.foreign_records, self.lost_markers):
            part.forget_stream(stream)


# -- markers that brokers lost ------------------------------------------------------------------------


class LostMarkerSweep:
    """Ends native transactions that brokers left open in streams to which no round writes.

    A producer looks for a lost marker in a partition before it appends there. Nothing is appended to a quiet
    stream, so its readers would wait without end. If a last stable offset stays below the log's end there, the
    sweep checks all transactional ids, including the carriers' ids. A stream's offsets are compared once in a
    leadership, and once after rounds to the stream, so the rounds bound the work of the sweep. Streams that
    continue after trouble are checked without such a comparison. Times are monotonic milliseconds.
    """

    def __init__(
        self, source: Log, jobs: Jobs, trouble: TopicTrouble, state: State, now_ms: int
    ) -> None:
        self._log = source
        self._jobs = jobs
        self._trouble = trouble
        self._due: dict[str, int] = {}  # when to compare a stream's offsets
        self._next_ms = 0
        self.touched(state.streams, now_ms)  # a former leader may have left transactions open

    def touched(self, streams: Iterable[str], now_ms: int) -> None:
        """Note that a native transaction writes to these streams, or tries to."""
        self._due.update(dict.fromkeys(streams, now_ms + QUIET_MS))

    def forget_stream(self, stream: str) -> None:
        self._due.pop(stream, None)

    def step(self, state: State, lease: Lease, carriers: Carriers, now_ms: int) -> list[str]:
        """End native transactions that lack markers. Returns the streams that were checked.

        Raises: LogError: become leader again.
        """
        recovered, self._trouble.recovered = self._trouble.recovered, []
        streams = [*recovered, *(s for s in self._found(now_ms) if s not in recovered)]
        for stream in streams:
            if stream not in state.streams or stream in self._trouble.waiting:
                continue
            places = places_of(state, stream)
            carriers.check(places)
            try:
                lease.check(places)
            except (LogRefused, LogUnavailable) as error:
                if not self._trouble.find(state, error):
                    raise
        if not self._jobs.is_under_way("markers", "") and now_ms >= self._next_ms:
            self._next_ms = now_ms + LOOK_EVERY_MS
            self._begin_comparing(state, now_ms)
        return streams

    def _found(self, now_ms: int) -> list[str]:
        """The streams where the last comparison found an open native transaction, and no round wrote since."""
        if not self._jobs.is_under_way("markers", ""):
            return []
        job = self._jobs.take("markers", "")
        if job is None:
            return []
        unclean: dict[str, bool] = job.result()
        again = {stream: is_open for stream, is_open in unclean.items() if stream not in self._due}
        self._due.update(dict.fromkeys(again, now_ms + AGAIN_MS))
        return [stream for stream, is_open in again.items() if is_open]

    def _begin_comparing(self, state: State, now_ms: int) -> None:
        """Begin to compare the offsets of the streams that are due."""
        places: dict[TopicPartition, str] = {}
        for stream in [stream for stream, due_ms in self._due.items() if due_ms <= now_ms]:
            if len(places) >= _MOST_PLACES:
                break
            del self._due[stream]
            row = state.streams.get(stream)
            if row is not None and row.state == ACTIVE and stream not in self._trouble.waiting:
                places |= dict.fromkeys(places_of(state, stream), stream)
        if places:
            self._jobs.begin("markers", "", partial(self._compare, places))

    def _compare(self, places: Mapping[TopicPartition, str]) -> dict[str, bool]:
        """The streams to compare again: those with an open native transaction (True), or that can't be read now."""
        failed: dict[TopicPartition, LogError] = {}
        try:
            ends = self._log.end_offsets(places, committed=False, failed=failed)
            stable = self._log.end_offsets(ends, committed=True, failed=failed)
        except LogError as error:
            log.info("can't find out whether readers can read past it: %s", error)
            return dict.fromkeys(places.values(), False)
        unclean = {places[place]: False for place in failed}
        open_ = [place for place, end in ends.items() if stable.get(place, end) < end]
        return unclean | {places[place]: True for place in open_}


# -- foreign records -----------------------------------------------------------------------------------

READ_EVERY_MS = 200
READ_BYTES = 256 << 10
# The most gaps that wait to be read, and the most gaps of one partition that can't be judged yet. More are skipped.
MOST_WAITING = 1000
MOST_TRIES = 25
_TELL_EVERY_MS = 60_000
_FIRST_MARKERS = 2  # markers of former leaders that may precede this leader's first data


class _Gap(NamedTuple):
    """Offsets [first, end) between the data of two rounds. ``tries``: reads in a row that got nothing of it."""

    stream: str
    partition: int
    first: int
    end: int
    tries: int = 0


@dataclass(slots=True)
class _Partition:
    """``markers``: how many markers may still be unseen. ``gaps``: the gaps found since ``markers`` was last 0."""

    markers: int = 0
    gaps: deque[_Gap] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))


class ForeignRecordScan:
    """Counts foreign records. ``found``: stream -> how many were found in this leadership.

    Between the data of two rounds a partition has only markers, one for each round that wrote there. If a gap is
    longer than the markers that may be in it, it is read.
    """

    def __init__(self, source: Log, jobs: Jobs) -> None:
        self._log = source
        self._jobs = jobs
        self.found: Counter[str] = Counter()
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._waiting: deque[_Gap] = deque()
        self._gap: _Gap | None = None  # under way
        self._look_ms = 0
        self._tell_ms: dict[str, int] = {}

    def appended(self, data: Iterable[Appended]) -> None:
        """Note the data of a committed round. Each partition with data gets one marker for the round."""
        touched = set()
        for stream, number, known, first in data:
            touched.add((stream, number))
            at = self._partitions.get((stream, number))
            if at is None:
                at = self._partitions[stream, number] = _Partition()
                if known and first - known <= _FIRST_MARKERS:
                    continue
            if first > known:
                at.gaps.append(_Gap(stream, number, known, first))
                at.markers -= first - known
            if at.markers < 0 and len(self._waiting) < MOST_WAITING:
                self._waiting.extend(at.gaps)
            if at.markers <= 0:
                at.gaps.clear()
                at.markers = 0
        for place in touched:
            self._partitions[place].markers += 1

    def look(self, now_ms: int, in_trouble: Container[str] = ()) -> None:
        """Count what was read of a gap, and begin to read the next one. Skip gaps of streams in trouble."""
        self._take_back(now_ms)
        if self._gap is not None or now_ms < self._look_ms:
            return
        gap = next((gap for gap in self._waiting if gap.stream not in in_trouble), None)
        if gap is not None:
            self._look_ms = now_ms + READ_EVERY_MS
            self._waiting.remove(gap)
            self._gap = gap
            self._jobs.begin("foreign", "", partial(self._read, gap))
            self._take_back(now_ms)

    def forget_stream(self, stream: str) -> None:
        """Drop everything about a stream: a new stream may get its name."""
        self._waiting = deque(gap for gap in self._waiting if gap.stream != stream)
        self._partitions = {at: p for at, p in self._partitions.items() if at[0] != stream}
        if self._gap is not None and self._gap.stream == stream:
            self._gap = None  # its result must not count for the new stream
            self._jobs.drop("foreign", "")
        self.found.pop(stream, None)
        self._tell_ms.pop(stream, None)

    def _read(self, gap: _Gap) -> tuple[int, int]:
        """Read the first part of a gap. Returns its number of records, and where the rest of the gap begins."""
        place = TopicPartition(stream_topic(gap.stream), gap.partition)
        try:
            found = answered(
                lambda failed: self._log.fetch(
                    {place: gap.first},
                    max_wait=0,
                    max_bytes=READ_BYTES,
                    committed=True,
                    failed=failed,
                )
            ).get(place)
        except LogUnavailable:
            found = None
        except LogError as error:
            log.info("a gap of %s is not looked into: %s", place.topic, error)
            return 0, gap.end
        if found is None:
            return 0, gap.first
        headers = [
            read_header(b.data, whole=False) for b in found.batches if b.base_offset < gap.end
        ]
        return sum(header.record_count for header in headers), found.next_offset

    def _take_back(self, now_ms: int) -> None:
        """Count the records of a finished read."""
        gap = self._gap
        job = None if gap is None else self._jobs.take("foreign", "")
        if gap is None or job is None:
            return
        self._gap = None
        records, after = job.result()
        if after < gap.end and gap.tries < MOST_TRIES:
            tries = gap.tries + 1 if after == gap.first else 0
            self._waiting.appendleft(gap._replace(first=after, tries=tries))
        if not records:
            return
        self.found[gap.stream] += records
        if now_ms >= self._tell_ms.get(gap.stream, now_ms):
            self._tell_ms[gap.stream] = now_ms + _TELL_EVERY_MS
            log.warning(
                "%s[%d] has records of others at offset %d, %d so far: readers of this library leave them out, "
                "others do not; let only controllers write to that topic",
                stream_topic(gap.stream),
                gap.partition,
                gap.first,
                self.found[gap.stream],
                extra={"stream": gap.stream},
            )
