"""The intake of a leader: fetches commands and journals together, queues the commands and indexes the journals."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.framing import Run as FramingRun
from anabranch.batches.packer import PACKED_TIMES, batch_limit, worth_packing, worth_splicing
from anabranch.batches.records import Record, decode_records
from anabranch.controller.lanes import (
    Command,
    Lane,
    Lanes,
    Meter,
    command_of,
    messages_in,
    weight_of,
)
from anabranch.core import work
from anabranch.core.across.messages import MAC_HEADER
from anabranch.core.decisions.across.holding import is_plain_held
from anabranch.core.decisions.lanes import quarantine
from anabranch.core.decisions.merge import RECHECK_MS
from anabranch.core.decisions.turn import Settings, Turn
from anabranch.core.journal_index import JournalIndex, Place, takes_plain
from anabranch.core.journal_runs import NEVER, Run
from anabranch.core.journal_runs import REFUSED as PLAIN_WRITE
from anabranch.core.memory import LeaderMemory
from anabranch.core.rejections import RejectedRun, are_kept, counted_until, cut_key, kept
from anabranch.core.rows import HISTORY
from anabranch.core.state import Overlay, State
from anabranch.core.stream_settings import MAX_MESSAGE, is_table, latest_time
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
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_ms
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    NO_TXN,
    REPLY_HEADER,
    TIME_HEADER,
    unpack_txn_header,
)
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.protocol.limits import FRAMING, MESSAGE, NO_TIME, UNPACKED, Room
from anabranch.protocol.schemas.records import RejectedRecord, SegmentRange, StreamRow
from anabranch.topics.names import control_topic, journal_topic, status_topic

log = logging.getLogger("anabranch.controller")

FETCH_BYTES = 4 << 20
# If the journal index has more changes, a round is made for them.
INDEX_ROWS = 5_000
INDEX_BYTES = 8 << 20
_WARN_MS = 60_000
_KEYS_A_UNIT = 4  # records of a batch that are decoded for their keys
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
    _may_warn_of: dict[str, int] = field(default_factory=dict)  # by stream
    _calm_from: float = 0.0  # when journals in debt are indexed, if no command comes before
    # By lane: `CALM_S` after its last command.
    _needed_until: dict[str, float] = field(default_factory=dict)
    _control_at: int = 0  # how far the control topic is read
    _known_until: dict[tuple[str, int], int] = field(default_factory=dict)
    # The journals that are read, and the streams from which that follows.
    _read: dict[TopicPartition, Place] = field(default_factory=dict)
    _read_of: tuple[Mapping[str, StreamRow], Set[str]] = ({}, frozenset())
    _control_place: TopicPartition = field(init=False)

    def __post_init__(self) -> None:
        topic = control_topic(self.settings.prefix)
        self._control_place = TopicPartition(topic, self.settings.control_partition)
        self.journals = JournalBacklog(self.clock)
        self.rows = Overlay(self.table)
        self.index = JournalIndex(self.rows)

    def begin(self, state: State) -> None:
        """Start from the state that the leader has read, and drop all former data. Call `find_ends` next."""
        self.journals = JournalBacklog(self.clock)
        self.rows.take()  # made with an old state, if another controller led since
        for stream, row in state.forgotten.items():
            self.table.write(self.index.drop_former(stream, row.times))
        self.index.load()
        self.table.write(self.index.sweep(state))
        self.index.rejected.clear()
        self.index.unsaid.clear()
        for place, low in state.low_water.items():
            # Records below the low water are not needed, so a status table without them may skip them.
            if place[1] != HISTORY:
                self.index.positions[place] = max(low, self.index.positions.get(place, 0))
        self.lanes.begin(state)
        self._needed_until.clear()
        self.passed_over.clear()
        self._control_at = state.round.control_offset

    @property
    def is_full(self) -> bool:
        """Whether the changes of the index should get a round of their own."""
        return self.rows.size > INDEX_ROWS or self.rows.bytes > INDEX_BYTES

    def plain_wait(
        self, state: State, memory: LeaderMemory, usable: Callable[[str], bool]
    ) -> float:
        """Seconds until plain writes can be committed; 0: now. A short time while they wait for other commits."""
        places = [
            place
            for place in self.index.plain_waiting(state)
            if usable(place[0]) and place[0] not in state.locked
        ]
        held, now = memory.holds, state.round.hybrid_time
        for place in places:
            if memory.merging.waiting.get(place, None) is None and not (
                held.in_use and is_plain_held(held, place[0], now)
            ):
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

        Returns the errors of journals whose end can't be found. Call this again without the streams of these
        journals.
        """
        journals = self._journals(state)
        failed: dict[TopicPartition, LogError] = {}
        ends = self.log.end_offsets(journals, committed=False, failed=failed)
        self._known_until = {journals[tp]: end for tp, end in ends.items()}
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
        done = messages_in(commands)
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
                extra={"stream": stream},
            )

    def fetch(self, state: State, max_wait: float, *, index: bool = True) -> list[LogError]:
        """Fetch commands and journals together; queue the commands, index the journals.

        ``index``: False while a round is under way: the state is not on the log then, and if the round were not
        written, records would have been judged by states of transactions that never were.

        Returns the errors of journals that can't be read now.
        """
        control, journals = self._control_place, self._journals(state)
        indexed = self.index.positions
        positions = {**self.lanes.wanted(), control: self._control_at}
        positions.update({tp: indexed.get(place, 0) for tp, place in journals.items()})
        if self.journals.fetched:
            self.journals.only({stream for stream, _ in journals.values()})
            for tp, place in journals.items():
                if self.journals.has(*place):
                    del positions[tp]
        failed: dict[TopicPartition, LogError] = {}
        fetched = self.log.fetch(
            positions, max_wait=max_wait, max_bytes=FETCH_BYTES, committed=False, failed=failed
        )
        problem = failed.pop(control, None)
        if isinstance(problem, OffsetOutOfRange):
            self._control_at = self._after_deleted(problem)
        elif problem is not None:
            # Nothing can be decided without the control topic, so wait for its leader.
            alone = {control: self._control_at}
            fetched |= self.log.fetch(alone, max_wait=0, max_bytes=FETCH_BYTES, committed=False)
        if control in fetched:
            self._queue_control(fetched[control])
        for tp, got in fetched.items():
            if tp in journals:
                self.journals.add(*journals[tp], got)
        room = self.lanes.room
        for lane in self.lanes.among(fetched):
            room -= self._queue_commands(lane, fetched[lane.place], room)
        if index:
            self._index_journals(state)
        errors = []
        for tp, error in failed.items():
            try:
                if not isinstance(error, OffsetOutOfRange):
                    raise error
                at = self._after_deleted(error)
                if tp in journals:
                    indexed[journals[tp]] = at
                else:
                    self.lanes.move(tp, at)
            except LogError as still:
                if tp in journals:
                    errors.append(still)
                else:
                    self.lanes.trouble.note("lane", tp.topic, str(still))
        return errors

    def _after_deleted(self, error: OffsetOutOfRange) -> int:
        """The log's start, if it is after the position because retention has deleted records that were not read.

        Raises:
            TopicGone: a journal seems to end before the position; this is not certain.
            LogUnavailable: a topic of commands, or the control topic, seems to end before it; or a broker lags.
        """
        place = error.partition
        is_control = place == self._control_place
        found = self.log.start_offsets([place], failed=None if is_control else {})
        start = found.get(place, error.position)
        if start > error.position:
            return start
        if is_control or self.lanes.has(place):
            way = f"delete {status_topic(self.settings.prefix)} too, or let the position pass"
            way = way if is_control else "block the lane and unblock it: it continues at the end"
            raise LogUnavailable(
                f"{error}: a broker that lags answers so; if the topic was deleted and made again, {way}"
            )
        ends = answered(
            lambda failed: self.log.end_offsets([place], committed=False, failed=failed)
        )
        if ends[place] < error.position:
            raise TopicGone.replaced(place, ends[place], error.position, certain=False)
        raise LogUnavailable(str(error), (place.topic,))

    def _journals(self, state: State) -> Mapping[TopicPartition, Place]:
        """The journals to read. They are kept while the streams and their trouble stay the same."""
        streams, left_out = self._read_of
        if state.streams != streams or self.waiting.keys() != left_out:
            self._read_of = dict(state.streams), set(self.waiting)
            self._read = {
                TopicPartition(journal_topic(name), partition): (name, partition)
                for name, row in state.streams.items()
                if row.state == ACTIVE and name not in self.waiting
                for partition in range(row.partitions)
            }
        return self._read

    def _index_journals(self, state: State) -> None:
        """Index waiting journal batches, up to a limit of work, so that the next pass can begin with commands."""
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
        self.journals.end_pass()

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

        ``room``: the bytes that are left for all lanes. A lane may use its own share even if no bytes are left.
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
        records = [
            record
            for record in self._records(lane.place, batch, lane.name)
            if record.offset >= lane.at
        ]
        if self.lanes.served is not None:
            for record in records:
                self.lanes.served.arrived(lane.name, dict(record.headers))
        return [command_of(record, native, lane.name, partitions) for record in records]

    def _queue_control(self, fetched: Fetched) -> None:
        """Queue the messages of other leaders.

        Leaders send them when their rounds are on the log, outside of native transactions. So they are read
        uncommitted, and a native transaction that stays open stops none of them; records in one are passed over.
        """
        for batch in fetched.batches:
            for record in self._messages(batch):
                if record.offset >= self._control_at:
                    headers = dict(record.headers)
                    self.lanes.control.append(
                        Command(
                            record.offset,
                            None,
                            record.value or b"",
                            False,
                            control=True,
                            seen=headers.get(TIME_HEADER),
                            mac=headers.get(MAC_HEADER),
                        )
                    )
        self._control_at = fetched.next_offset

    def _messages(self, batch: RawBatch) -> list[Record]:
        with suppress(CorruptBatch):
            if read_header(batch.data).is_transactional:
                return []
        return self._records(self._control_place, batch)

    def _records(
        self, place: TopicPartition, batch: RawBatch, lane: str | None = None
    ) -> list[Record]:
        """A batch's records. An unreadable batch is skipped, because it must not block all other commands."""
        limit = max(limits.BATCH.value, self.settings.command_bytes)
        try:
            if read_header(batch.data).record_count > limits.BATCH_RECORDS.value:
                raise CorruptBatch(f"more than {limits.BATCH_RECORDS.value} records")
            return decode_records(batch.data, limit=limit)
        except CorruptBatch as error:
            self.unreadable[lane or OPEN_LANE] += 1
            if lane is not None:
                self.lanes.charge({lane: work.of_batch(0, 0, limit)})
                self.passed_over[lane, batch.base_offset] = str(error)
            if len(self.passed_over) > limits.QUARANTINED.value:
                del self.passed_over[next(iter(self.passed_over))]
            log.error(
                "%s[%d]: the batch at offset %d is passed over: %s",
                place.topic,
                place.partition,
                batch.base_offset,
                error,
                extra={"lane": lane} if lane is not None else None,
            )
            return []


# -- journals: batches that wait, and what indexing them takes -----------------------------------------

_PLAIN_HEADER = (NO_TXN, 0, -1)  # plain writes have no ab.txn header
_UNPACKED_TIMES = 16
QUANTUM = 500  # units of work in one turn of a stream
WAITING_BYTES = 32 << 20

# (stream, partition, fetch, about how many units it may take) -> units taken, and the rest of the fetch.
Index: TypeAlias = Callable[[str, int, Fetched, int], tuple[int, Fetched | None]]


@dataclass(slots=True)
class JournalBacklog:
    """Batches of journals that were fetched and are not indexed yet, and the meter of each stream's journals.

    Streams take turns; the stream that was charged least comes first. While other lanes need the leader, a stream
    waits if it is in debt, or if its owner has nothing to spare: the streams of a lane share the lane's allowance
    with its commands, which come first. If the waiting batches exceed `WAITING_BYTES`, the most charged stream
    drops some of its batches, which are fetched again later.

    ``owners``: the meter of the lane that owns a stream. ``shared``: streams that draw from their owner's
    allowance, because other lanes need the leader. ``_reached``: the charge of the stream that had the last turn; a
    new stream starts there. ``_fresh``: places whose batches still share memory with the rest of their fetch.
    """

    clock: Clock
    meters: dict[str, Meter] = field(default_factory=dict)
    fetched: dict[str, dict[int, Fetched]] = field(default_factory=dict)  # by stream and partition
    owners: dict[str, Meter] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    _reached: int = 0
    _size: int = 0
    _fresh: set[Place] = field(default_factory=set)

    def has(self, stream: str, partition: int) -> bool:
        """Whether batches of a journal partition wait."""
        return partition in self.fetched.get(stream, ())

    def add(self, stream: str, partition: int, fetched: Fetched) -> None:
        """Queue a fetch of a journal partition."""
        meter = self.meters.get(stream)
        if meter is None:
            meter = self.meters[stream] = Meter(self.clock)
            meter.set_rate(limits.JOURNAL_WORK.value)
        if stream not in self.fetched:
            meter.served = max(meter.served, self._reached)
        self._put(stream, partition, fetched)
        self._fresh.add((stream, partition))

    def only(self, streams: Container[str]) -> None:
        """Keep only the batches of these streams. The others are fetched again if their streams are read again."""
        for stream in [stream for stream in self.fetched if stream not in streams]:
            for partition in list(self.fetched[stream]):
                self._take(stream, partition)

    def turns(self, *, in_debt: bool = False) -> list[str]:
        """The streams that may have a turn now. ``in_debt``: instead, the streams that have to wait."""
        streams = [one for one in self.fetched if self._has_to_wait(one) is in_debt]
        return sorted(streams, key=lambda stream: (self.meters[stream].served, stream))

    def waits_s(self) -> list[float]:
        """For each stream with waiting batches: seconds until it may have a turn."""
        return [
            max(
                0.0,
                self.meters[stream].wait_s(1),
                self.owners[stream].spare_in_s() if stream in self.shared else 0.0,
            )
            for stream in self.fetched
        ]

    def _has_to_wait(self, stream: str) -> bool:
        if self.meters[stream].debt > 0:
            return True
        return stream in self.shared and self.owners[stream].spare < 1

    def serve(self, stream: str, index: Index, *, free: bool = False) -> int:
        """Give a stream its turn: index its waiting batches, for about one `QUANTUM` of units of work.

        Returns the units that this took. ``free``: count the units, but don't take them off the allowance of the
        stream, because no other stream or lane needs the leader.
        """
        meter, spent = self.meters[stream], 0
        self._reached = max(self._reached, meter.served)
        for partition in list(self.fetched[stream]):
            if spent >= QUANTUM:
                break
            fetched = self._take(stream, partition)
            units, left = index(stream, partition, fetched, QUANTUM - spent)
            spent += units
            if left is not None:
                self._put(stream, partition, left)
        meter.charge(spent, free=free)
        if (owner := self.owners.get(stream)) is not None:
            owner.draw(spent, free=stream not in self.shared)
        return spent

    def end_pass(self) -> None:
        """End a pass: copy waiting batches, which frees the memory of their fetches, and keep to the limit."""
        for stream, partition in self._fresh:
            if self.has(stream, partition):
                fetched = self._take(stream, partition)
                own = [b._replace(data=memoryview(bytes(b.data))) for b in fetched.batches]
                self._put(stream, partition, replace(fetched, batches=own))
        self._fresh.clear()
        while self._size > WAITING_BYTES:
            most = max(self.fetched, key=lambda stream: (self.meters[stream].served, stream))
            self._take(most, next(reversed(self.fetched[most])))

    def forget_stream(self, stream: str) -> None:
        self.only(self.fetched.keys() - {stream})
        self.meters.pop(stream, None)

    def _put(self, stream: str, partition: int, fetched: Fetched) -> None:
        self.fetched.setdefault(stream, {})[partition] = fetched
        self._size += sum(len(batch.data) for batch in fetched.batches)

    def _take(self, stream: str, partition: int) -> Fetched:
        places = self.fetched[stream]
        fetched = places.pop(partition)
        if not places:
            del self.fetched[stream]
        self._size -= sum(len(batch.data) for batch in fetched.batches)
        return fetched


@dataclass(slots=True)
class Scanned:
    """The content of a batch: runs of WRITEs, of plain writes, and of rejected records, with counts by reason.

    ``work``: the cost of scanning the batch, in units.
    """

    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    refused: list[RejectedRun] = field(default_factory=list)
    work: int = work.BATCH

    def reject(self, reason: str, base: int, run: FramingRun) -> None:
        """Add a rejected run of a batch that begins at ``base``."""
        self.rejected[reason] += run.records
        self.refused.append(RejectedRun(reason, base + run.first_delta, run.records))


def index_fetched(
    changes: Overlay,
    index: JournalIndex,
    state: State,
    stream: str,
    partition: int,
    fetched: Fetched,
    *,
    known_until: int,
    wall_ms: int,
    most: int,
) -> tuple[int, Fetched | None]:
    """Index one fetch of a journal partition. The index's changed rows and the new position go to ``changes``.

    ``known_until``: rejected records below this offset were counted by a former leader. ``wall_ms``: the clock,
    Unix milliseconds. ``most``: units of work, which the last batch may exceed. Returns the units that indexing
    took, and the rest of the fetch.
    """
    settings = state.streams[stream].settings
    rules = rules_of(settings, max(wall_ms, to_ms(state.round.hybrid_time)))
    runs: list[Run] = []
    plain: list[Run] = []
    size = units = 0
    left = None
    for at, batch in enumerate(fetched.batches):
        if units >= most:
            left = replace(fetched, batches=fetched.batches[at:])
            break
        size += len(batch.data)
        copy = (stream, partition, batch.base_offset)
        if copy in index.copies:
            index.copies.discard(copy)
            continue  # the index knows it already
        scanned = scan(batch, rules, limit=unpacked_limit(settings, len(batch.data)))
        units += scanned.work + work.of_merge(
            _copied(batch, scanned, state.streams[stream].segments)
        )
        runs += scanned.runs
        plain += scanned.plain
        if are_kept(state):
            units += _keep_rejected(changes, state, (stream, partition), batch, scanned, wall_ms)
        if batch.base_offset >= known_until:
            for reason, count in scanned.rejected.items():
                index.reject(stream, partition, reason, count)
    next_offset = fetched.next_offset if left is None else left.batches[0].base_offset
    added = index.add(
        state, stream, partition, runs, next_offset, plain=plain,
        known_until=known_until, size=size,
    )  # fmt: skip
    for key, value in added.items():
        changes.set(key, value)
    return units, left


def _keep_rejected(
    changes: Overlay, state: State, place: Place, batch: RawBatch, scanned: Scanned, wall_ms: int
) -> int:
    """Keep the rejected records of a batch (`core.rejections`). Returns the units of work that it took."""
    refused = scanned.refused
    if scanned.plain and not takes_plain(state, place[0]):
        done = state.plain.get(place, 0)
        plain = [run for run in scanned.plain if run.first >= done]
        refused = refused + [RejectedRun(PLAIN_WRITE, run.first, run.records) for run in plain]
    until = counted_until(state, *place)
    if not (refused := [run for run in refused if run.first >= until]):
        return 0
    limit = unpacked_limit(state.streams[place[0]].settings, len(batch.data))
    keys: dict[int, bytes | None] = {}
    if any(run.reason != _REASONS[Kind.MALFORMED] for run in refused):
        with suppress(CorruptBatch):
            records = decode_records(batch.data, limit=limit)
            keys = {record.offset: record.key for record in records}
    found = (
        RejectedRecord(place[1], at, cut_key(keys.get(at)), run.reason, wall_ms)
        for run in refused
        for at in range(run.first, run.first + (run.records if keys else 1))
    )
    changes.set(*kept(*place, refused, found))
    return len(refused) * work.LOOK + len(keys) // _KEYS_A_UNIT


def _copied(batch: RawBatch, scanned: Scanned, segments: Sequence[SegmentRange]) -> int:
    """The bytes that merges of a batch will copy into new batches, and those of plain writes copied unchanged.

    Plain writes that are packed again count less, because fewer bytes are sent.
    """
    size = sum(run.batch_size for run in scanned.plain)
    packs = worth_packing(batch, size)

    def of_plain(run: Run) -> int:
        if run.pure and worth_splicing(batch, run.records, run.batch_size):
            one = any(s.low <= run.low and run.high < s.high for s in segments)
            if run.keyless == run.records or (one and not run.keyless):
                return len(batch.data)
        return run.batch_size // PACKED_TIMES if packs else run.batch_size

    return sum(run.batch_size for run in scanned.runs if not run.pure) + sum(
        map(of_plain, scanned.plain)
    )


def rules_of(settings: Mapping[str, str], now_ms: int) -> Room:
    """The rules by which a stream with these settings accepts journal records: the same as for one-shots.

    ``now_ms``: the later of the clock and the last commit's time, so that no leader rejects a timestamp as too
    late by its own slow clock alone.
    """
    most = int(settings.get(MAX_MESSAGE, MESSAGE.value)) - FRAMING
    return Room("", most, is_table(settings), latest_time(settings, now_ms))


def unpacked_limit(settings: Mapping[str, str], size: int) -> int:
    """The most bytes that a journal batch of ``size`` bytes may decompress to."""
    return min(UNPACKED.value, _UNPACKED_TIMES * max(batch_limit(settings), size))


def scan(batch: RawBatch, rules: Room, *, limit: int = UNPACKED.value) -> Scanned:
    """Divide a batch into runs.

    A batch of a native transaction has either ops of a controller, which are ignored, or records of another client,
    which are rejected: they are read before their native transaction ends, and that may abort. ``limit``:
    the most bytes that the batch may decompress to.
    """
    out = Scanned()
    native = splices = False
    try:
        header = read_header(batch.data)
        native = header.is_transactional
        # If the batch is copied, its header is copied too, and has a timestamp of its own.
        splices = header.is_dense and header.max_timestamp <= rules.latest
    except CorruptBatch:
        pass  # the scan below returns one run, with the reason
    found = scan_batch(batch, rules, limit=limit, digests=rules.is_table)
    unpacked = sum(limit if run.kind is Kind.MALFORMED else run.size for run in found)
    out.work = work.of_batch(len(found), sum(run.records for run in found), unpacked)
    for run in found:
        if run.kind is Kind.OP:
            if not native:
                out.reject("bad_header", batch.base_offset, run)
        elif native:
            out.reject("native_transaction", batch.base_offset, run)
        elif run.kind is Kind.WRITE:
            # A batch too small to be spliced is decompressed by its merge.
            pure = run.pure and worth_splicing(batch, run.records)
            size = len(batch.data) if pure else run.size
            out.runs.append(_run(batch, run, unpack_txn_header(run.txn), size, pure=pure))
        elif run.kind is Kind.PLAIN:
            whole = splices and len(found) == 1
            out.plain.append(_run(batch, run, _PLAIN_HEADER, run.size, pure=whole))
        else:
            out.reject(_REASONS.get(run.kind, "bad_header"), batch.base_offset, run)
    return out


def _run(
    batch: RawBatch, run: FramingRun, header: tuple[bytes, int, int], size: int, *, pure: bool
) -> Run:
    """A run for the index; its offsets are the journal's. ``size``: the bytes that its merge handles."""
    txn_id, writer, stream_epoch = header
    base = batch.base_offset
    latest = run.latest
    if pure:  # its batch header may be copied too, and has a timestamp of its own
        latest = max(latest, read_header(batch.data).max_timestamp)
    return Run(
        txn_id,
        writer,
        stream_epoch,
        first=base + run.first_delta,
        end=base + run.last_delta + 1,
        records=run.records,
        crc_sum=run.checksum,
        low=run.low,
        high=run.high,
        batch_base=base,
        batch_size=size,
        pure=pure,
        batch_crc=crc_of(batch.data),
        keyless=run.keyless,
        digest=run.digest,
        latest=NEVER if run.earliest < NO_TIME else latest,
    )


_REASONS = {
    Kind.MALFORMED: "malformed_batch",
    Kind.BAD_KEY: "bad_key",
    Kind.BAD_TIME: "bad_time",
    Kind.TOO_LARGE: "too_large",
}
