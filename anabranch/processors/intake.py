"""The intake of a leader: fetches commands and journals together, queues the commands and indexes the journals."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.batches.format import read_header
from anabranch.batches.records import Record, decode_records
from anabranch.core import limits, work
from anabranch.core.decisions.commits.merge import RECHECK_MS
from anabranch.core.decisions.quarantine import quarantine
from anabranch.core.decisions.turn import Settings, Turn
from anabranch.core.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.core.journal.index import JournalIndex
from anabranch.core.legal_names import OPEN_LANE
from anabranch.core.memory import Merging
from anabranch.core.overlay import Overlay
from anabranch.core.rows import HISTORY
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import (
    Clock,
    CorruptBatch,
    Fetched,
    Log,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    Table,
    TopicGone,
    TopicPartition,
    answered,
)
from anabranch.processors.command import Command, command_of, weight_of
from anabranch.processors.index_journals import JournalBacklog, index_fetched
from anabranch.processors.lanes import Lane, Lanes
from anabranch.topics.names import control_topic, journal_topic, status_topic

log = logging.getLogger("anabranch.controller")

FETCH_BYTES = 4 << 20
# If the journal index has more changes, a round is made for them.
INDEX_ROWS = 5_000
INDEX_BYTES = 8 << 20
_WARN_MS = 60_000
CALM_S = 1.0  # after this long without a command, journals in debt are indexed, since no lane needs the leader


@dataclass(slots=True)
class Intake:
    """Reads commands and journals together.

    ``rows``: changes of the journal index that wait for the next round. Its commit proves that there was no other
    leader while they were made. ``unreadable``: by lane, how many batches of commands were skipped because they
    can't be read or are too big. ``passed_over``: the skipped batches that are not logged yet, by lane and offset,
    with the reason.
    """

    log: Log
    table: Table
    clock: Clock
    settings: Settings
    waiting: Mapping[str, str]  # streams whose journals are not read
    lanes: Lanes
    journals: JournalBacklog = field(init=False)
    rows: Overlay = field(init=False)
    index: JournalIndex = field(init=False)
    unreadable: Counter[str] = field(default_factory=Counter)
    passed_over: dict[tuple[str, int], str] = field(default_factory=dict)
    _may_warn_ms: int = 0
    _may_warn_of: dict[str, int] = field(default_factory=dict)  # the same, by stream
    _calm_from: float = 0.0  # when journals in debt are indexed, if no command comes before
    # By lane: `CALM_S` after its last command.
    _needed_until: dict[str, float] = field(default_factory=dict)
    _control_at: int = 0  # how far committed records of the control topic are read
    _control_seen: int = 0  # how far the control topic is known to have records
    _known_until: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journals = JournalBacklog(self.clock)
        self.rows = Overlay(self.table)
        self.index = JournalIndex(self.rows)

    def begin(self, state: State) -> None:
        """Start from the state that the leader has read; drop all that was known before. Call `find_ends` next."""
        self.journals = JournalBacklog(self.clock)
        self.rows.take()  # they follow from an old state, if there was another leader meanwhile
        for stream, row in state.forgotten.items():
            self.table.write(self.index.drop_former(stream, row.times))
        self.index.load()
        self.table.write(self.index.sweep(state))
        self.index.rejected.clear()
        self.index.unsaid.clear()
        for place, low in state.low_water.items():
            # A table that is new or old need not index what is below: it is not needed any more.
            if place[1] != HISTORY:
                self.index.positions[place] = max(low, self.index.positions.get(place, 0))
        self.lanes.begin(state)
        self._needed_until.clear()
        self.passed_over.clear()
        self._control_at = self._control_seen = state.round.control_offset

    @property
    def is_full(self) -> bool:
        """Whether the changes of the index should get a round of their own."""
        return self.rows.size > INDEX_ROWS or self.rows.bytes > INDEX_BYTES

    def plain_wait(self, state: State, merging: Merging, usable: Callable[[str], bool]) -> float:
        """Seconds until plain writes can be committed: 0 if some can be now, a short time if frozen locks block."""
        places = [place for place in self.index.plain_waiting(state) if usable(place[0])]
        if any(merging.waiting.get(place, None) is None for place in places):
            return 0.0
        return RECHECK_MS / 1000 if places else math.inf

    @property
    def busy(self) -> bool:
        """Whether a command came within `CALM_S`. Journals and merges then leave time for the next one."""
        return self.clock.monotonic() < self._calm_from

    @property
    def journal_wait_s(self) -> float:
        """Seconds until some of the waiting journal batches may be indexed."""
        calm_s = max(0.0, self._calm_from - self.clock.monotonic())
        return min([calm_s, *self.journals.waits_s()]) if self.journals.fetched else math.inf

    def find_ends(self, state: State) -> list[LogError]:
        """Find the journals' ends as of now. Rejected records below them were counted by a former leader.

        Returns the errors of journals whose end can't be found: call this again without their streams.
        """
        journals = {tp: stream for tp, (stream, _) in self._journal_positions(state)}
        failed: dict[TopicPartition, LogError] = {}
        ends = self.log.end_offsets(journals, committed=False, failed=failed)
        self._known_until = {(journals[tp], tp.partition): end for tp, end in ends.items()}
        return list(failed.values())

    def forget_stream(self, stream: str) -> None:
        """Drop a forgotten stream from memory and the table's index."""
        self.index.forget_stream(stream)
        self.journals.forget_stream(stream)
        for place in [place for place in self._known_until if place[0] == stream]:
            del self._known_until[place]
        self._may_warn_of.pop(stream, None)

    def positions(
        self, state: State, commands: Sequence[Command]
    ) -> tuple[int, int, dict[str, int]]:
        """The positions in lane `open`, the control topic and other lanes, once these commands are decided."""
        lanes = self.lanes.positions(commands)
        done = len(commands) if commands and commands[0].control else 0
        left = self.lanes.control[done : done + 1]
        control = left[0].offset if left else self._control_at
        return lanes.pop(OPEN_LANE, state.round.commands_offset), control, lanes

    def quarantine(self, turn: Turn) -> None:
        """Log the batches of commands that were skipped."""
        for (lane, offset), why in self.passed_over.items():
            quarantine(turn, lane, offset, "unreadable", why)

    def warn_unanswered(self, commands: Iterable[Command], now_ms: int) -> None:
        """Warn of commands whose reply can't be addressed, at most once a minute."""
        unanswered = next((command for command in commands if command.unanswered), None)
        if unanswered is not None and now_ms >= self._may_warn_ms:
            self._may_warn_ms = now_ms + _WARN_MS
            log.warning(
                "the command at offset %d, and perhaps more, can't be answered: header %s has 1 to %d bytes, %s "
                "has 4, the number of a partition of the replies",
                unanswered.offset, CORRELATION_HEADER, limits.CORRELATION_ID.value, REPLY_HEADER,
            )  # fmt: skip

    def warn_rejected(self, now_ms: int) -> None:
        """Warn of rejected journal records, at most once a minute for each stream."""
        for stream in list(self.index.unsaid):
            if now_ms < self._may_warn_of.get(stream, 0):
                continue
            self._may_warn_of[stream] = now_ms + _WARN_MS
            log.warning(
                '%s: records rejected: %s; they are in no commit: operations.md, "Rejected records"',
                journal_topic(stream),
                ", ".join(
                    f"{count} of partition {partition} as {reason}"
                    for (partition, reason), count in sorted(self.index.unsaid.pop(stream).items())
                ),
            )

    @property
    def _control_partition(self) -> TopicPartition:
        return TopicPartition(control_topic(self.settings.prefix), self.settings.control_partition)

    def fetch(self, state: State, max_wait: float) -> list[LogError]:
        """Fetch commands and journals together; index the journals, queue the commands.

        Returns the errors of journals that can't be read now.
        """
        control = self._control_partition
        journals = dict(self._journal_positions(state))
        positions = {**self.lanes.wanted(), control: self._control_seen}
        positions.update({tp: at for tp, (_, at) in journals.items()})
        if self.journals.fetched:
            self.journals.only({stream for stream, _ in journals.values()})
            for tp, (stream, _) in journals.items():
                if self.journals.has(stream, tp.partition):
                    del positions[tp]
        failed: dict[TopicPartition, LogError] = {}
        fetched = self.log.fetch(
            positions, max_wait=max_wait, max_bytes=FETCH_BYTES, committed=False, failed=failed
        )
        problem = failed.pop(control, None)
        if isinstance(problem, OffsetOutOfRange):
            self._control_at = self._control_seen = self._after_deleted(problem)
        elif problem is not None:
            # Nothing can be decided without the control topic, so wait for its leader.
            alone = {control: self._control_seen}
            fetched |= self.log.fetch(alone, max_wait=0, max_bytes=FETCH_BYTES, committed=False)
        if control in fetched:
            self._control_seen = fetched[control].next_offset
        if self._control_at < self._control_seen:
            self._queue_control()
        for tp, (stream, _) in journals.items():
            if tp in fetched:
                self.journals.add(stream, tp.partition, fetched[tp])
        room = self.lanes.room
        for lane in self.lanes.among(fetched):
            room -= self._queue_commands(lane, fetched[lane.place], room)
        self._index_journals(state)
        errors = []
        for tp, error in failed.items():
            try:
                if not isinstance(error, OffsetOutOfRange):
                    raise error
                at = self._after_deleted(error)
                if tp in journals:
                    self.index.positions[journals[tp][0], tp.partition] = at
                else:
                    self.lanes.move(tp, at)
            except LogError as still:
                if tp in journals:
                    errors.append(still)
                else:
                    self.lanes.trouble.note(tp.topic, str(still))
        return errors

    def _after_deleted(self, error: OffsetOutOfRange) -> int:
        """The log's start, if it is after the position because retention has deleted records that were not read.

        Raises:
            TopicGone: a journal seems to end before the position; this is not certain.
            LogUnavailable: a topic of commands, or the control topic, seems to end before it; or a broker lags.
        """
        place = error.partition
        is_control = place == self._control_partition
        found = self.log.start_offsets([place], failed=None if is_control else {})
        start = found.get(place, error.position)
        if start > error.position:
            return start
        if is_control or self.lanes.has(place):
            way = f"delete {status_topic(self.settings.prefix)} too, or let the position pass"
            way = way if is_control else "block the lane and unblock it: it continues at the end"
            raise LogUnavailable(
                f"{error}: a broker that is behind answers so; if the topic was deleted and made again, {way}"
            )
        ends = answered(
            lambda failed: self.log.end_offsets([place], committed=False, failed=failed)
        )
        if ends[place] < error.position:
            raise TopicGone.replaced(place, ends[place], error.position, certain=False)
        raise LogUnavailable(str(error), (place.topic,))

    def _journal_positions(self, state: State) -> list[tuple[TopicPartition, tuple[str, int]]]:
        found = []
        for name, row in state.streams.items():
            if row.state != ACTIVE or name in self.waiting:
                continue
            for partition in range(row.partitions):
                at = self.index.positions.get((name, partition), 0)
                found.append((TopicPartition(journal_topic(name), partition), (name, at)))
        return found

    def _index_journals(self, state: State) -> None:
        """Index waiting journal batches, with a limit of work: commands come first again in the next pass."""
        if not self.journals.fetched:
            return

        def index(
            stream: str, partition: int, fetched: Fetched, most: int
        ) -> tuple[int, Fetched | None]:
            return index_fetched(
                self.rows, self.index, state, stream, partition, fetched,
                known_until=self._known_until.get((stream, partition), 0),
                wall_ms=int(self.clock.wall() * 1000), most=most,
            )  # fmt: skip

        active = self.lanes.active
        soon = self.clock.monotonic() + CALM_S
        self._needed_until.update({lane.name: soon for lane in active})
        self._find_owners(state)
        left = most = (limits.BUSY_PASS_WORK if self.busy else limits.PASS_WORK).value
        while left > 0 and (streams := self.journals.turns()):
            for stream in streams:
                left -= self.journals.serve(stream, index)
                if left <= 0:
                    break
        if self.lanes.control or active:
            self._calm_from = soon
        elif left == most and not self.busy:
            for stream in self.journals.turns(in_debt=True)[:1]:
                self.journals.serve(stream, index, free=True)
        self.journals.settle()

    def _find_owners(self, state: State) -> None:
        """Find the lanes that own the waiting journals.

        A journal draws from its lane's allowance if the lane has a rate and other lanes need the leader.
        """
        now, journals = self.clock.monotonic(), self.journals
        needed = [name for name, until in self._needed_until.items() if until > now]
        journals.owners.clear()
        journals.shared.clear()
        for stream in journals.fetched:
            owner = self.lanes.on.get(state.streams[stream].owner)
            if owner is not None:
                journals.owners[stream] = owner.meter
                if owner.meter.rate and needed not in ([], [owner.name]):
                    journals.shared.add(stream)

    def _queue_commands(self, lane: Lane, fetched: Fetched, room: int) -> int:
        """Queue a lane's commands, as many as it may have. Returns the bytes queued.

        ``room``: the bytes that are left for all lanes. A lane may have its own share even if none are left.
        """
        before = lane.size
        lane.end = fetched.high_watermark
        partitions = self.settings.reply_partitions if lane.name == OPEN_LANE else 1
        for batch in fetched.batches:
            full = lane.size - before > room
            over = lane.size > self.lanes.share or lane.meter.debt > 0
            cut = over or (full and lane.waits > 0)
            commands = [] if cut else self._commands(lane, batch, partitions)
            if cut or (full and lane.size + weight_of(commands) > self.lanes.share):
                lane.waits += full and not over
                lane.at = max(lane.at, batch.base_offset)  # the rest is fetched again
                return lane.size - before
            lane.waits = 0
            self.lanes.add(lane, commands)
        lane.at = fetched.next_offset
        return lane.size - before

    def _commands(self, lane: Lane, batch: RawBatch, partitions: int) -> list[Command]:
        native = read_header(batch.data).is_transactional
        return [
            command_of(record, native, lane.name, partitions)
            for record in self._records(lane.place, batch, lane.name)
            if record.offset >= lane.at
        ]

    def _queue_control(self) -> None:
        """Read the committed records of the control topic.

        The fetch together with commands is read_uncommitted, so it only shows that something was appended, perhaps
        just the marker after earlier records.
        """
        place = self._control_partition
        failed: dict[TopicPartition, LogError] = {}
        fetched = self.log.fetch(
            {place: self._control_at},
            max_wait=0.0,
            max_bytes=FETCH_BYTES,
            committed=True,
            failed=failed,
        ).get(place)
        problem = failed.get(place)
        if isinstance(problem, OffsetOutOfRange):
            self._control_at = self._after_deleted(problem)
        if fetched is None:
            return  # the next pass fetches again
        for batch in fetched.batches:
            for record in self._records(place, batch):
                if record.offset >= self._control_at:
                    command = Command(record.offset, None, record.value or b"", True, control=True)
                    self.lanes.control.append(command)
        self._control_at = fetched.next_offset

    def _records(
        self, place: TopicPartition, batch: RawBatch, lane: str | None = None
    ) -> list[Record]:
        """A batch's records. A batch that can't be read is skipped, as it must not block all other commands."""
        limit = max(limits.BATCH.value, self.settings.command_bytes)
        try:
            if read_header(batch.data).record_count > limits.BATCH_RECORDS.value:
                raise CorruptBatch(f"more than {limits.BATCH_RECORDS.value} records")
            return decode_records(batch.data, limit=limit)
        except CorruptBatch as error:
            self.unreadable[lane or OPEN_LANE] += 1
            if lane is not None:
                self.lanes.charge({lane: work.of_batch(0, 0, limit)})
            if lane is not None:
                self.passed_over[lane, batch.base_offset] = str(error)
            if len(self.passed_over) > limits.QUARANTINED.value:
                del self.passed_over[next(iter(self.passed_over))]
            log.error(
                "%s[%d]: the batch at offset %d is passed over: %s",
                place.topic,
                place.partition,
                batch.base_offset,
                error,
            )
            return []
