"""A leader's work outside of its rounds: big merges, topics, truncation, foreign records, lost markers.

On Kafka, helper threads do it, so that a slow broker delays no round. In the simulator it runs inside of the calls
that ask for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from anabranch.batches.journal_refetch import JournalReaders
from anabranch.core.decisions.turn import Settings
from anabranch.core.journal.index import JournalIndex
from anabranch.core.memory import LeaderMemory
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import Clock, Log, LogError, LogRefused, LogUnavailable, Table, TopicPartition
from anabranch.processors.carrier import Carriers, carriers_of
from anabranch.processors.leadership import Lease
from anabranch.processors.streams.cleanup import Truncator
from anabranch.processors.streams.foreign_records import ForeignRecordScan
from anabranch.processors.streams.helper_thread import helper
from anabranch.processors.streams.topics import StreamTopics
from anabranch.processors.topic_trouble import StreamTrouble, places_of
from anabranch.topics.names import history_topic, journal_topic, status_topic

log = logging.getLogger("anabranch.controller")

QUIET_MS = 3_000  # since the last round to a stream
LOOK_EVERY_MS = 1_000
AGAIN_MS = 10_000  # where something is open, or partitions can't be reached
_MOST_PLACES = 500  # in one look


class BackgroundWork:
    """The parts that do such work for one leadership. They are closed when it ends."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        settings: Settings,
        *,
        lease: Lease,
        trouble: StreamTrouble,
        state: State,
        threads: bool,
    ) -> None:
        self._clock = clock
        self._trouble = trouble
        status = TopicPartition(status_topic(settings.prefix), settings.control_partition)
        carriers = carriers_of(
            log, status, lease.carriers, settings.chunk_bytes, read_ahead=threads
        )
        self.carriers = Carriers(carriers, threads=threads)
        every_ms = settings.clean_history_ms
        self.truncator = Truncator(log, threads=threads, histories_ms=every_ms)
        self.foreign_records = ForeignRecordScan(log, threads=threads)
        self.journals = JournalReaders(log, ahead=threads)
        self.lost_markers = LostMarkerSweep(log, trouble, state, self._now_ms(), threads=threads)
        self.topics = StreamTopics(
            log,
            clock,
            status.topic,
            self.truncator,
            threads=threads,
            record_bytes=settings.record_bytes,
        )

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def close(self) -> None:
        """Stop all parts. None of them writes afterwards."""
        parts = (
            self.carriers,
            self.topics,
            self.truncator,
            self.foreign_records,
            self.lost_markers,
            self.journals,
        )
        for part in parts:
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
        own = (journal_topic, history_topic)
        topics = {topic(s) for s in self._trouble.waiting for topic in own}
        self.truncator.truncate(self._now_ms(), topics)
        for stream, offset in self.truncator.spare(self._now_ms(), kept).items():
            memory.cleaning.spare.put(stream, offset)
        self.foreign_records.look(self._now_ms(), self._trouble.waiting)

    def forget_stream(self, stream: str) -> None:
        """Drop what is known of a forgotten stream."""
        for part in (self.truncator, self.foreign_records, self.lost_markers):
            part.forget_stream(stream)


# -- markers that brokers lost ------------------------------------------------------------------------


class LostMarkerSweep:
    """Ends native transactions that brokers left open in streams to which no round writes.

    A producer looks for a lost marker in a partition before it appends there. Nothing is appended to a quiet
    stream, so its readers would wait without end. So where a last stable offset stays below the log's end, all
    transactional ids look, those of carriers too. A stream's offsets are compared once in a leadership, and once
    after rounds to it, so this work is bounded by that of the rounds. At streams that continue after trouble all
    ids look without such a comparison. Times are monotonic milliseconds.
    """

    def __init__(
        self, source: Log, trouble: StreamTrouble, state: State, now_ms: int, *, threads: bool
    ) -> None:
        self._log = source
        self._trouble = trouble
        self._helper = helper("anabranch-markers", threads=threads)
        self._due: dict[str, int] = {}  # when to look at a stream
        self._next_ms = 0
        self._looking: Future[dict[str, bool]] | None = None
        self.touched(state.streams, now_ms)  # a former leader may have left it so

    def touched(self, streams: Iterable[str], now_ms: int) -> None:
        """A native transaction writes to these streams, or tries to."""
        self._due.update(dict.fromkeys(streams, now_ms + QUIET_MS))

    def forget_stream(self, stream: str) -> None:
        """Drop a stream."""
        self._due.pop(stream, None)

    def close(self) -> None:
        """Leave a look under way."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def step(self, state: State, lease: Lease, carriers: Carriers, now_ms: int) -> list[str]:
        """End what lacks markers; returns the streams where it was looked for.

        Raises: LogError: the leader must lead again.
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
        if self._looking is None and now_ms >= self._next_ms:
            self._next_ms = now_ms + LOOK_EVERY_MS
            self._look(state, now_ms)
        return streams

    def _found(self, now_ms: int) -> list[str]:
        """The streams where the last look found something open, and no round came since."""
        if self._looking is None or not self._looking.done():
            return []
        unclean, self._looking = self._looking.result(), None
        again = {stream: is_open for stream, is_open in unclean.items() if stream not in self._due}
        self._due.update(dict.fromkeys(again, now_ms + AGAIN_MS))
        return [stream for stream, is_open in again.items() if is_open]

    def _look(self, state: State, now_ms: int) -> None:
        """Begin to compare the ends of streams that are due."""
        places: dict[TopicPartition, str] = {}
        for stream in [stream for stream, due_ms in self._due.items() if due_ms <= now_ms]:
            if len(places) >= _MOST_PLACES:
                break
            del self._due[stream]
            row = state.streams.get(stream)
            if row is not None and row.state == ACTIVE and stream not in self._trouble.waiting:
                places |= dict.fromkeys(places_of(state, stream), stream)
        if places:
            self._looking = self._helper.submit(self._compare, places)

    def _compare(self, places: Mapping[TopicPartition, str]) -> dict[str, bool]:
        """Streams to look at again, and whether something is open there."""
        failed: dict[TopicPartition, LogError] = {}
        try:
            ends = self._log.end_offsets(places, committed=False, failed=failed)
            stable = self._log.end_offsets(ends, committed=True, failed=failed)
        except LogError as error:
            log.info("it can't be told whether readers get by: %s", error)
            return dict.fromkeys(places.values(), False)
        unclean = {places[place]: False for place in failed}
        open_ = [place for place, end in ends.items() if stable.get(place, end) < end]
        return unclean | {places[place]: True for place in open_}
