"""Work of a leader beside its rounds, perhaps by helper threads.

`Beside` carries big merges aside, cuts logs, looks for foreign records and for topics that are gone, makes topics.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.batches.journal_refetch import JournalReaders
from anabranch.core.decisions.turn import Settings
from anabranch.core.journal.index import JournalIndex
from anabranch.core.memory import LeaderMemory
from anabranch.core.state import State
from anabranch.ports import Clock, Log, Table, TopicPartition
from anabranch.processors.carrier import Carriers, carriers_of
from anabranch.processors.leadership import Lease
from anabranch.processors.streams.cleanup import Cutter
from anabranch.processors.streams.gaps import Gaps
from anabranch.processors.streams.quiet import Quiet
from anabranch.processors.streams.topics import StreamTopics
from anabranch.processors.streams.trouble import StreamTrouble
from anabranch.topics.names import history_topic, journal_topic, status_topic


class Beside:
    """The parts of one lead; closed with it."""

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
        self.cutter = Cutter(log, threads=threads, histories_ms=every_ms)
        self.gaps = Gaps(log, threads=threads)
        self.journals = JournalReaders(log, ahead=threads)
        self.quiet = Quiet(log, trouble, state, self._now_ms(), threads=threads)
        self.topics = StreamTopics(
            log,
            clock,
            status.topic,
            self.cutter,
            threads=threads,
            record_bytes=settings.record_bytes,
        )

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def close(self) -> None:
        """Stop them all; none writes any more."""
        parts = self.carriers, self.topics, self.cutter, self.gaps, self.quiet, self.journals
        for part in parts:
            part.close()

    def carry(
        self,
        state: State,
        table: Table,
        memory: LeaderMemory,
        index: JournalIndex,
        usable: Callable[[str], bool],
    ) -> None:
        """Take up the rows that carriers have logged since the last time; the table follows at once."""
        if not state.committing and self.carriers.idle:
            return
        wall_ms = int(self._clock.wall() * 1000)
        failed = self.carriers.take_up(state, table, memory.merging, wall_ms, self._now_ms())
        if failed:
            self._trouble.find(state, *failed)
        self.carriers.sync(state, index, wall_ms, usable)

    def shorten(self, memory: LeaderMemory, kept: Callable[[], dict[str, int]]) -> None:
        """Delete below the logged low waters. ``kept``: streams whose histories may be cut: partitions."""
        own = (journal_topic, history_topic)
        topics = {topic(s) for s in self._trouble.waiting for topic in own}
        self.cutter.cut(self._now_ms(), topics)
        for stream, offset in self.cutter.spare(self._now_ms(), kept).items():
            memory.cleaning.spare.put(stream, offset)
        self.gaps.look(self._now_ms(), self._trouble.waiting)

    def forget_stream(self, stream: str) -> None:
        """Drop what is known of a forgotten stream."""
        for part in (self.cutter, self.gaps, self.quiet):
            part.forget_stream(stream)
