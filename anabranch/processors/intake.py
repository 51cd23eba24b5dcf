"""What comes in: commands, queued in order, and journals, indexed as they are read."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from anabranch.core.decide import decide
from anabranch.core.decide_admin import ACTIVE
from anabranch.core.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.core.journal_index import JournalIndex
from anabranch.core.overlay import Overlay
from anabranch.core.plan import ReplyTo
from anabranch.core.state import State
from anabranch.core.turn import Settings, Turn, refuse
from anabranch.errors import AnabranchError, InvalidArgument, check
from anabranch.ports import (
    CorruptBatch,
    Fetched,
    Log,
    OffsetOutOfRange,
    RawBatch,
    Table,
    TopicGone,
    TopicPartition,
)
from anabranch.processors.journals import index_fetched
from anabranch.schemas.codec import decode
from anabranch.schemas.records import AdoptScope
from anabranch.topics.batch import read_header
from anabranch.topics.names import commands_topic, journal_topic
from anabranch.topics.records import Record, decode_records

log = logging.getLogger("anabranch.controller")

FETCH_BYTES = 4 << 20
# Anybody may write commands, and a small batch can unpack to much: what one may have, and what is queued at once.
MAX_UNPACKED_BYTES = 128 << 20
MAX_BATCH_RECORDS = 100_000
QUEUED_BYTES = 32 << 20
_RECORD_BYTES = 300  # what a queued command takes, beyond its payload


def made_anew(place: TopicPartition, end: int, known: int, *, certain: bool) -> TopicGone:
    """What a partition is that holds less than it once did: another one of the same name. See `TopicGone`."""
    return TopicGone(
        f"{place.topic}[{place.partition}] ends at {end} and was known up to {known}: it was made anew",
        place.topic,
        lost=True,
        certain=certain,
    )


@dataclass(slots=True)
class Command:
    """A record of the commands topic."""

    offset: int
    to: ReplyTo | None
    payload: bytes
    native: bool  # sent inside a native transaction


def decide_command(turn: Turn, command: Command) -> None:
    """Decide it. What is no command is answered, too."""
    try:
        record = decode(command.payload)
    except AnabranchError as error:
        turn.reply(command.to, refuse(error))
        return
    if command.native and not isinstance(record, AdoptScope):
        # It is read before its transaction ends, so it could take effect and yet be aborted.
        refusal = InvalidArgument("send commands outside of native transactions")
        turn.reply(command.to, refuse(refusal))
        return
    decide(turn, record, command.to)


@dataclass(slots=True)
class Intake:
    """Reads commands and journals together.

    ``rows``: changes of the journal index that wait for the next round; its commit proves that nobody else
    led while they were made. ``unreadable``: batches of commands that were passed over, as nothing can be read in
    them, or too much.
    """

    log: Log
    table: Table
    settings: Settings
    rows: Overlay = field(init=False)
    index: JournalIndex = field(init=False)
    queue: list[Command] = field(default_factory=list)
    missing: Mapping[str, str] = field(default_factory=dict)  # streams whose journals are not read
    unreadable: int = 0
    _commands_at: int = 0
    _known_until: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = Overlay(self.table)
        self.index = JournalIndex(self.rows)

    def begin(self, state: State) -> None:
        """Go on where the folded state says; forget what a former leader's time left here. Then `find_ends`."""
        self.rows.take()  # a successor may have led meanwhile: it was read with an old state
        for stream, row in state.forgotten.items():
            self.table.write(self.index.drop_former(stream, row.times))
        self.index.load()
        self.table.write(self.index.sweep(state))
        self.index.rejected.clear()
        for place, low in state.low_water.items():
            # What lies below was dealt with; a table that was not kept up, or is new, need not read it.
            self.index.positions[place] = max(low, self.index.positions.get(place, 0))
        self.queue.clear()
        self._commands_at = state.round.commands_offset

    def find_ends(self, state: State) -> None:
        """Find where the journals end now: what stands before that was judged by a former leader.

        `TopicGone`: one is not there. Do it again without that stream.
        """
        journals = {tp: stream for tp, (stream, _) in self._journal_positions(state)}
        ends = self.log.end_offsets(journals, committed=False)
        self._known_until = {(journals[tp], tp.partition): end for tp, end in ends.items()}

    def forget_stream(self, stream: str) -> None:
        """It is no more, and its index is dropped from the table."""
        self.index.forget_stream(stream)
        for place in [place for place in self._known_until if place[0] == stream]:
            del self._known_until[place]

    def done(self, commands: Iterable[Command]) -> int:
        """The position in the commands once these, the first of the queue, are decided."""
        last = max((command.offset for command in commands), default=None)
        if last is not None:
            return last + 1
        return self.queue[0].offset if self.queue else self._commands_at

    def all_read(self) -> bool:
        """Whether the commands are read to their end: silence may be a heartbeat that was not read."""
        commands = self._commands_partition
        return self.log.end_offsets([commands], committed=False)[commands] <= self._commands_at

    @property
    def _commands_partition(self) -> TopicPartition:
        return TopicPartition(commands_topic(self.settings.prefix), self.settings.control_partition)

    def fetch(self, state: State, max_wait: float) -> None:
        """Fetch commands and journals together; index the journals, queue the commands."""
        commands = self._commands_partition
        positions = {commands: self._commands_at}
        journals = dict(self._journal_positions(state))
        positions.update({tp: at for tp, (_, at) in journals.items()})
        try:
            fetched = self.log.fetch(
                positions, max_wait=max_wait, max_bytes=FETCH_BYTES, committed=False
            )
        except OffsetOutOfRange as error:
            self._skip_deleted(error, commands, journals)
            return
        for tp, (stream, _) in journals.items():
            if tp in fetched:
                self._index_journal(state, stream, tp.partition, fetched[tp])
        if commands in fetched:
            self._queue_commands(fetched[commands])

    def _skip_deleted(
        self,
        error: OffsetOutOfRange,
        commands: TopicPartition,
        journals: dict[TopicPartition, tuple[str, int]],
    ) -> None:
        """Retention took records that were not read: go on where the log begins now."""
        start = self.log.start_offsets([error.partition])[error.partition]
        if start <= error.position and error.partition != commands:
            end = self.log.end_offsets([error.partition], committed=False)[error.partition]
            if end < error.position:
                raise made_anew(error.partition, end, error.position, certain=False)
        check(start > error.position, f"{error} but it begins at {start}")
        if error.partition == commands:
            self._commands_at = start
        else:
            stream, _ = journals[error.partition]
            self.index.positions[stream, error.partition.partition] = start

    def _journal_positions(self, state: State) -> list[tuple[TopicPartition, tuple[str, int]]]:
        found = []
        for name, row in state.streams.items():
            if row.state != ACTIVE or name in self.missing:
                continue
            for partition in range(row.partitions):
                at = self.index.positions.get((name, partition), 0)
                found.append((TopicPartition(journal_topic(name), partition), (name, at)))
        return found

    def _index_journal(self, state: State, stream: str, partition: int, fetched: Fetched) -> None:
        # What stood there when this leader began was judged by a former one: don't count it again.
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
        for batch in fetched.batches:
            if size > QUEUED_BYTES:
                self._commands_at = batch.base_offset  # the rest is fetched again
                return
            native = read_header(batch.data).is_transactional
            for record in self._records(batch):
                if record.offset >= self._commands_at:
                    self.queue.append(self._command(record, native))
                    size += len(record.value or b"") + _RECORD_BYTES
        self._commands_at = fetched.next_offset

    def _records(self, batch: RawBatch) -> list[Record]:
        """A batch's records; none of one that nobody can read: it must not stop everybody else's commands."""
        try:
            if read_header(batch.data).record_count > MAX_BATCH_RECORDS:
                raise CorruptBatch(f"more than {MAX_BATCH_RECORDS} records")
            return decode_records(batch.data, limit=MAX_UNPACKED_BYTES)
        except CorruptBatch as error:
            self.unreadable += 1
            log.warning(
                "%s[%d]: the batch at offset %d is passed over: %s",
                *self._commands_partition,
                batch.base_offset,
                error,
            )
            return []

    def _command(self, record: Record, native: bool) -> Command:
        """The command in a record; without its two headers nobody waits for an answer."""
        headers = dict(record.headers)
        correlation_id = headers.get(CORRELATION_HEADER)
        partition = headers.get(REPLY_HEADER)
        to = None
        if correlation_id and partition is not None and len(partition) == 4:
            number = struct.unpack(">i", partition)[0]
            if 0 <= number < self.settings.reply_partitions and len(correlation_id) <= 64:
                to = ReplyTo(correlation_id, number)
        return Command(record.offset, to, record.value or b"", native)
