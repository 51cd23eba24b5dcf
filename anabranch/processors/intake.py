"""The intake: commands, queued in order, and journals, indexed as they are read."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from anabranch.batches.format import read_header
from anabranch.batches.records import Record, decode_records
from anabranch.core import limits
from anabranch.core.decisions.decide import decide
from anabranch.core.decisions.turn import Settings, Turn, refuse
from anabranch.core.ids import CORRELATION_HEADER, OPEN_LANE, REPLY_HEADER, command_digest
from anabranch.core.journal.index import JournalIndex
from anabranch.core.overlay import Overlay
from anabranch.core.round import ReplyTo
from anabranch.core.rows import HISTORY
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import AnabranchError, InvalidArgument
from anabranch.ports import (
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
)
from anabranch.processors.index_journals import index_fetched
from anabranch.schemas.codec import TYPES, decode
from anabranch.schemas.records import AdoptScope
from anabranch.topics.names import commands_topic, control_topic, journal_topic, status_topic

log = logging.getLogger("anabranch.controller")

FETCH_BYTES = 4 << 20
# The most bytes queued at once: any client may write commands, and a small batch can unpack to much.
QUEUED_BYTES = 32 << 20
_WARN_MS = 60_000
_RECORD_BYTES = 300  # bytes of a queued command, beyond its payload


@dataclass(slots=True)
class Command:
    """A record of the commands topic."""

    offset: int
    to: ReplyTo | None
    payload: bytes = field(repr=False)
    native: bool  # sent inside a native transaction
    lane: str = OPEN_LANE
    control: bool = False  # a record of the control topic, which only controllers write
    unheard: bool = False  # its headers for the answer are unusable

    @property
    def key(self) -> int:
        """The command's offset; below 0 for one of the control topic."""
        return -1 - self.offset if self.control else self.offset


def decide_command(turn: Turn, command: Command) -> None:
    """Decide it. A payload that is no command is answered, too."""
    turn.at, turn.lane, turn.command_bytes = command.key, command.lane, len(command.payload)
    try:
        _check_size(turn, command.payload)
        record = decode(command.payload)
    except AnabranchError as error:
        turn.reply(command.to, refuse(error))
        return
    refusal = None
    if isinstance(record, AdoptScope) != command.control:
        refusal = InvalidArgument("controllers send each other AdoptScope only, clients never do")
    elif command.native and not command.control:
        # Read before its transaction ends, it could take effect and yet be aborted.
        refusal = InvalidArgument("send commands outside of native transactions")
    if refusal is not None:
        turn.reply(command.to, refuse(refusal))
        return
    decide(turn, record, command.to)


def _check_size(turn: Turn, payload: bytes) -> None:
    if len(payload) <= limits.COMMAND.value:
        return
    big = TYPES.get(payload[1]) in limits.BIG
    limit = limits.COMMAND._replace(value=turn.settings.command_bytes) if big else limits.COMMAND
    limit.check(len(payload), f"a command {name_of(payload)}")


def name_of(payload: bytes) -> str:
    """The type of a command that is not decoded."""
    found = TYPES.get(payload[1]) if len(payload) > 1 else None
    return "unreadable" if found is None else found.__name__


@dataclass(slots=True)
class Intake:
    """Reads commands and journals together.

    ``rows``: changes of the journal index that wait for the next round; its commit proves that no other leader
    led while they were made. ``unreadable``: batches of commands that were passed over, as they can't be read or
    are too big; ``passed_over``: those that are not logged yet, by offset, and why.
    ``commands_end``: end offset of the commands, as read last.
    """

    log: Log
    table: Table
    settings: Settings
    waiting: Mapping[str, str]  # streams whose journals are not read
    rows: Overlay = field(init=False)
    index: JournalIndex = field(init=False)
    queue: list[Command] = field(default_factory=list)
    unreadable: int = 0
    passed_over: dict[int, str] = field(default_factory=dict)
    commands_end: int = 0
    _may_warn_ms: int = 0
    _commands_at: int = 0
    _control_at: int = 0  # how far the control topic is read, committed
    _control_seen: int = 0  # … and how far it is known to have records
    _known_until: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = Overlay(self.table)
        self.index = JournalIndex(self.rows)

    def begin(self, state: State) -> None:
        """Go on where the folded state says; drop what this process knew from before. Then `find_ends`."""
        self.rows.take()  # a successor may have led meanwhile: these were made with an old state
        for stream, row in state.forgotten.items():
            self.table.write(self.index.drop_former(stream, row.times))
        self.index.load()
        self.table.write(self.index.sweep(state))
        self.index.rejected.clear()
        for place, low in state.low_water.items():
            # A new table, or one not kept up, need not read below: that was dealt with.
            if place[1] != HISTORY:
                self.index.positions[place] = max(low, self.index.positions.get(place, 0))
        self.queue.clear()
        self.passed_over.clear()
        self._commands_at = state.round.commands_offset
        self._control_at = self._control_seen = state.round.control_offset

    def find_ends(self, state: State) -> list[LogError]:
        """Find the journals' ends as of now: a former leader judged the records before them.

        Returns the errors of those that can't be asked: do it again without their streams.
        """
        journals = {tp: stream for tp, (stream, _) in self._journal_positions(state)}
        failed: dict[TopicPartition, LogError] = {}
        ends = self.log.end_offsets(journals, committed=False, failed=failed)
        self._known_until = {(journals[tp], tp.partition): end for tp, end in ends.items()}
        return list(failed.values())

    def forget_stream(self, stream: str) -> None:
        """Drop a forgotten stream from memory and the table's index."""
        self.index.forget_stream(stream)
        for place in [place for place in self._known_until if place[0] == stream]:
            del self._known_until[place]

    def done(self, commands: Sequence[Command]) -> tuple[int, int]:
        """The positions in commands and control once these, the first of the queue, are decided."""
        # Controllers' messages are first: they are queued only when the queue is empty.
        at = len(commands)
        if at == len(self.queue):
            return self._commands_at, self._control_at
        left = islice(self.queue, at, None)
        return (
            next((command.offset for command in left if not command.control), self._commands_at),
            next((c.offset for c in self.queue[at : at + 1] if c.control), self._control_at),
        )

    def warn_unheard(self, commands: Iterable[Command], now_ms: int) -> None:
        """Warn now and then of commands that can't be answered."""
        unheard = next((command for command in commands if command.unheard), None)
        if unheard is not None and now_ms >= self._may_warn_ms:
            self._may_warn_ms = now_ms + _WARN_MS
            log.warning(
                "the command at offset %d, and perhaps more, can't be answered: header %s has 1 to %d bytes, %s "
                "has 4, the number of a partition of the replies",
                unheard.offset, CORRELATION_HEADER, limits.CORRELATION_ID.value, REPLY_HEADER,
            )  # fmt: skip

    @property
    def lag(self) -> int:
        """Records of the commands that are not decided, as far as is known."""
        return max(0, self.commands_end - self.done(())[0])

    def all_read(self) -> bool:
        """Whether the commands are read to their end: silence may be a heartbeat that was not read."""
        commands = self._commands_partition
        return self.log.end_offsets([commands], committed=False)[commands] == self._commands_at

    @property
    def _commands_partition(self) -> TopicPartition:
        return TopicPartition(commands_topic(self.settings.prefix), self.settings.control_partition)

    @property
    def _control_partition(self) -> TopicPartition:
        return TopicPartition(control_topic(self.settings.prefix), self.settings.control_partition)

    def fetch(self, state: State, max_wait: float) -> list[LogError]:
        """Fetch commands and journals together; index the journals, queue the commands.

        Returns the errors of journals that can't be read now.
        """
        commands = self._commands_partition
        control = self._control_partition
        positions = {commands: self._commands_at, control: self._control_seen}
        journals = dict(self._journal_positions(state))
        positions.update({tp: at for tp, (_, at) in journals.items()})
        failed: dict[TopicPartition, LogError] = {}
        fetched = self.log.fetch(
            positions, max_wait=max_wait, max_bytes=FETCH_BYTES, committed=False, failed=failed
        )
        for place in (commands, control):
            problem = failed.pop(place, None)
            if isinstance(problem, OffsetOutOfRange):
                positions[place] = self._after_deleted(problem)
                if place == commands:
                    self._commands_at = positions[place]
                else:
                    self._control_at = self._control_seen = positions[place]
            elif problem is not None:
                # Nothing goes on without these: wait for their leaders.
                alone = {place: positions[place]}
                fetched |= self.log.fetch(alone, max_wait=0, max_bytes=FETCH_BYTES, committed=False)
        if control in fetched:
            self._control_seen = fetched[control].next_offset
        if self._control_at < self._control_seen:
            self._queue_control()
        for tp, (stream, _) in journals.items():
            if tp in fetched:
                self._index_journal(state, stream, tp.partition, fetched[tp])
        if commands in fetched:
            self._queue_commands(fetched[commands])
        errors = []
        for tp, error in failed.items():
            try:
                if isinstance(error, OffsetOutOfRange):
                    at = self._after_deleted(error)
                    self.index.positions[journals[tp][0], tp.partition] = at
                else:
                    errors.append(error)
            except LogError as still:
                errors.append(still)
        return errors

    def _after_deleted(self, error: OffsetOutOfRange) -> int:
        """The log's beginning, if that is behind the position: retention took records that were not read.

        Raises: TopicGone, not certain: the journal seems to end before it. LogUnavailable: commands, or control.
        """
        place = error.partition
        everybodys = place in (self._commands_partition, self._control_partition)
        failed: dict[TopicPartition, LogError] = {}
        found = self.log.start_offsets([place], failed=None if everybodys else failed)
        start = found.get(place, error.position)
        if start > error.position:
            return start
        if everybodys:
            raise LogUnavailable(
                f"{error}: a broker that is behind answers so; if the topic was deleted and made again, delete "
                f"{status_topic(self.settings.prefix)} too, or let the position pass"
            )
        ends = self.log.end_offsets([place], committed=False, failed=failed)
        for problem in failed.values():
            raise problem
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

    def _index_journal(self, state: State, stream: str, partition: int, fetched: Fetched) -> None:
        # A former leader counted the records from before this one's begin.
        known_until = self._known_until.get((stream, partition), 0)
        index_fetched(
            self.rows,
            self.index,
            state,
            stream,
            partition,
            fetched,
            counting=fetched.next_offset > known_until,
        )

    def _queue_commands(self, fetched: Fetched) -> None:
        size = 0
        place = self._commands_partition
        self.commands_end = fetched.high_watermark
        for batch in fetched.batches:
            if size > QUEUED_BYTES:
                self._commands_at = batch.base_offset  # the rest is fetched again
                return
            native = read_header(batch.data).is_transactional
            for record in self._records(place, batch):
                if record.offset >= self._commands_at:
                    self.queue.append(self._command(record, native))
                    size += len(record.value or b"") + _RECORD_BYTES
        self._commands_at = fetched.next_offset

    def _queue_control(self) -> None:
        """Read the committed records of the control topic.

        The fetch beside the commands is read_uncommitted: it tells that something came, be it only the marker
        after earlier records.
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
            return  # the next pass looks again
        for batch in fetched.batches:
            for record in self._records(place, batch):
                if record.offset >= self._control_at:
                    command = Command(record.offset, None, record.value or b"", True, control=True)
                    self.queue.append(command)
        self._control_at = fetched.next_offset

    def _records(self, place: TopicPartition, batch: RawBatch) -> list[Record]:
        """A batch's records; none if it can't be read: it must not stop all other commands."""
        try:
            if read_header(batch.data).record_count > limits.BATCH_RECORDS.value:
                raise CorruptBatch(f"more than {limits.BATCH_RECORDS.value} records")
            limit = max(limits.BATCH.value, self.settings.command_bytes)
            return decode_records(batch.data, limit=limit)
        except CorruptBatch as error:
            self.unreadable += 1
            if place == self._commands_partition:
                self.passed_over[batch.base_offset] = str(error)
            if len(self.passed_over) > limits.SET_ASIDE.value:
                del self.passed_over[next(iter(self.passed_over))]
            log.error(
                "%s[%d]: the batch at offset %d is passed over: %s",
                *place,
                batch.base_offset,
                error,
            )
            return []

    def _command(self, record: Record, native: bool) -> Command:
        """The command in a record; without its two headers no client waits for an answer."""
        headers = dict(record.headers)
        correlation_id = headers.get(CORRELATION_HEADER)
        partition = headers.get(REPLY_HEADER)
        to = None
        if correlation_id and partition is not None and len(partition) == 4:
            number = struct.unpack(">i", partition)[0]
            known = 0 <= number < self.settings.reply_partitions
            if known and len(correlation_id) <= limits.CORRELATION_ID.value:
                to = ReplyTo(correlation_id, number, command_digest(record.value or b""))
        unheard = to is None and (correlation_id is not None or partition is not None)
        return Command(record.offset, to, record.value or b"", native, unheard=unheard)
