"""The orders in which rounds, carried chunks and moved runs become durable.

A round:

1. *append* stream data, journal ops and status rows. Nothing of it is visible yet. Data come first, because step 2
   needs their offsets.
2. *append* the history records, which name the offsets that step 1 returned. They can't be known before, because
   the markers of the last round may be appended in between. In most cases they are appended before, so a small
   round is first tried with guessed offsets (`OffsetGuess`), data and history in one request. If the broker returns
   other offsets, that native transaction is aborted, and the round is written step by step.
3. *commit* the native transaction. From here on, the whole round has happened.
4. *answer*: send the replies, and messages to other leaders, outside of any native transaction, and wait for none
   of them.
5. *write* the status table: the rows, and the position in the status log after them, in one batch. A crash before
   this loses nothing: the rows are read again from the log.
6. Only then change memory, which is also a copy of the log, and append the next round.

The next round is decided while brokers work on steps 1 to 3, but nothing of it is sent before step 6. So if this
round fails, dropping the decisions of the next one is enough. Changes of rows by the next round are kept apart
(`State.seal_changes`), and so are changes of memory (drafts).

The status table and the answers come after the commit, so that neither shows a round that never happened. Answers
need no native transaction. A round with answers has at least one row, so there is a commit, and it has proved that
this process was leader. Once EndTxn is acknowledged, each answer is true for good, or was true while its client
waited, however late it is sent, even by a process that is no longer leader. If EndTxn failed or is uncertain, no
answer is sent. If a crash or an unreachable broker loses answers, their clients ask again, as every command can be
repeated. So topics of replies are not part of a round, and can't stop one.

A chunk of a staged merge (`carrier`): *append* its data; *append* the STAGED_MERGE row, which moves the cursor over
the chunk and names its offsets; *commit* both; *report* to the leader, which writes its status table. So the logged
cursor agrees with the partition, and the next carrier continues from that cursor.

Runs that are moved (`cleanup`): *append* copies to their journal; then write the rows with their places, as a round
of the same native transaction. Its commit moves all of them at once. The low water rises in a later round. Records
are deleted only below a logged low water, so that a successor can delete them again.

If an append is refused, or its outcome is unknown and an abort makes it harmless (KIP-890), the native transaction
is aborted, and nothing has happened. If anything else before the commit is uncertain, the leader drops everything
that is not logged, and becomes leader again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from anabranch.batches.builder import BatchBuilder, Row
from anabranch.batches.format import read_header
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.one_shots import EventCopies
from anabranch.batches.packer import BATCH_BYTES, DEFAULT_LIMIT, batch_limit
from anabranch.batches.splice import Piece, Splice
from anabranch.batches.split import Split
from anabranch.controller.history_tail import check_unread
from anabranch.controller.leadership import STATUS_POSITION
from anabranch.core.across.messages import MAC_HEADER, mac_of, time_of
from anabranch.core.history_records import Tail, anchored, history_records
from anabranch.core.round import Answer, Landed, Message, NewEpoch, Part, Round, StreamCommit
from anabranch.core.state import Overlay, State
from anabranch.errors import InvariantViolation
from anabranch.ports import (
    Clock,
    Log,
    LogError,
    LogFenced,
    LogUncertain,
    OffsetOutOfRange,
    Producer,
    RawBatch,
    RecordsGone,
    Steps,
    Table,
    TopicGone,
    TopicPartition,
)
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import OP_HEADER, TIME_HEADER, pack_txn_header
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import EpochRecord, Reply
from anabranch.topics.names import (
    control_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
)

MOST_SKIPPED = 1024  # rounds without a guess while guesses keep failing
_MARKER = 1  # offsets that a marker takes
Placed = tuple[TopicPartition, bytes | memoryview]
SMALL_BYTES = 1 << 20  # merged data below this goes into one request with the records
# Per batch of a history, besides keys and framing; a round may have several. No record of a history has more.
HISTORY_BYTES = 1 << 20
_OP_BYTES = 64  # an op's record without its value: key, header, framing
_Place = tuple[TopicPartition, bytes]


class Appended(NamedTuple):
    """The data that a round appended to a partition of a stream.

    ``first``: the data's first offset. ``known``: the end of the events before the data. Between these offsets are
    markers, and foreign records if there are any.
    """

    stream: str
    partition: int
    known: int
    first: int


class Durable(NamedTuple):
    """The topics and parts that rounds of one control partition are written with."""

    log: Log
    send: Callable[[Iterable[_Place]], None]  # answers, as `anabranch.ports.Log.send`
    table: Table
    clock: Clock
    prefix: str
    control_partition: int
    journals: JournalReaders
    offset_guess: OffsetGuess | None = None  # write the history together with the data
    # Gets the places of a committed round's data.
    appended: Callable[[Sequence[Appended]], None] | None = None


@contextmanager
def native_transaction(producer: Producer, *, commit: bool = True) -> Iterator[None]:
    """Commit everything that is appended inside. ``commit``: False: leave it to the caller.

    A failure inside aborts it, except `LogFenced` and `LogUncertain`: then the caller has to become leader again.

    Raises: RecordsGone, for an `OffsetOutOfRange`; other errors unchanged.
    """
    try:
        yield
    except (LogFenced, LogUncertain):
        raise
    except OffsetOutOfRange as error:
        producer.abort()
        raise RecordsGone(error) from error
    except Exception:
        producer.abort()  # nothing happened: a broker refused or was not reached, or the data could not be made
        raise
    if commit:
        producer.commit()


def write_round(
    to: Durable,
    producer: Producer,
    round_: Round,
    state: State,
    index_rows: Overlay,
    tails: MutableMapping[str, Tail],
    *,
    wall_ms: int,
    staging: bool = False,
) -> Steps[None]:
    """Take steps 1 to 5, and move ``tails`` to the new end of each history.

    A step ends whenever brokers work on a request, so that the next round can be decided. The changes of the state
    so far belong to this round, later changes to the next one.

    ``staging``: carriers append to the status log too, and the state may lack some of their rows. So the status
    table keeps its position in that log: applying rows again is harmless, but a row must not be skipped.

    ``index_rows``: changes of the journal index since the last round. The changes wait for this round, because its
    commit proves that no other controller led while they were made, so that they were not made with an old state.

    Raises:
        LogRefused: the broker refused a part of the round, or records to be merged are gone from a journal. The
            native transaction is aborted, and nothing has happened.
        LogUnavailable: a broker can't be reached, or a journal can't be read. Nothing has happened, as before.
        LogUncertain, LogFenced: become leader again.
        TableError: the round has happened, but the status table could not be written.
    """
    time = state.round.hybrid_time
    answers = list(answers_of(to.prefix, round_.replies, time, wall_ms))
    answers += messages_of(to.prefix, to.control_partition, round_.messages, time, wall_ms)
    state.seal_changes()
    sizes = _batch_limits(state, round_.touched)
    with native_transaction(producer, commit=False):
        _find_starts(to.log, round_, tails)
        done = yield from _append(
            to, producer, round_, sizes, tails, wall_ms=wall_ms, offset_guess=to.offset_guess
        )
        if done is None:
            producer.abort()
            done = yield from _append(
                to, producer, round_, sizes, tails, wall_ms=wall_ms, offset_guess=None
            )
        if done is None:
            raise InvariantViolation("offsets that were not guessed can't come out otherwise")
    yield from producer.committing()
    try:
        to.send(answers)
        tails.update(done.tails)
        if to.offset_guess is not None and done.history:
            to.offset_guess.committed(done.data, done.bases)
        if to.appended is not None:
            to.appended(done.appended)
    except Exception as error:  # the round has happened, and memory is from before it
        raise LogUncertain(f"a defect after a commit: {error!r}") from error
    # This also deletes the rows of ended transactions.
    changes = index_rows.take() | state.take_changes()
    if done.status_end is not None and not staging:
        changes[STATUS_POSITION] = done.status_end.to_bytes(8, "big")
    to.table.write(changes)


def _find_starts(log: Log, round_: Round, tails: Mapping[str, Tail]) -> None:
    """Find where new segments begin in partitions without a controller's events: after foreign records, if any."""
    for i, step in enumerate(round_.history):
        if isinstance(step, NewEpoch):
            known = tails[step.stream].vector.keys() | step.starts.keys()
            new = [s.partition for s in step.segments if s.partition not in known]
            if new:
                topic = stream_topic(step.stream)
                places = [TopicPartition(topic, p) for p in new]
                failed: dict[TopicPartition, LogError] = {}
                ends = log.end_offsets(places, committed=False, failed=failed)
                for error in failed.values():
                    raise error
                found = {place.partition: end for place, end in ends.items()}
                round_.history[i] = step._replace(starts={**step.starts, **found})


class _Appended(NamedTuple):
    """A round's native transaction before its commit.

    ``data``, ``bases``: the data batches of a small round and their offsets. ``history``: whether it has history
    records. ``status_end``: the end of the status log; None: no row was appended. ``appended``: the places of all
    its data. ``tails``: the histories' tails after the commit.
    """

    data: list[Placed]
    bases: list[int]
    history: bool
    status_end: int | None
    appended: list[Appended]
    tails: Mapping[str, Tail]


def _append(
    to: Durable,
    producer: Producer,
    round_: Round,
    sizes: Mapping[str, int],
    tails: Mapping[str, Tail],
    *,
    wall_ms: int,
    offset_guess: OffsetGuess | None,
) -> Steps[_Appended | None]:
    """Take steps 1 and 2, in one request if offsets are guessed. None: the guess was wrong.

    ``sizes``: the most bytes of a batch, by stream.
    """
    try:
        streams = round_.streams
        merge = Merge(to.journals, round_, sizes)
        status = TopicPartition(status_topic(to.prefix), to.control_partition)
        small = _append_if_big(producer, merge)
        records = list(_records(to, round_, sizes, status, wall_ms))
        guessed = offset_guess.guess(small) if offset_guess is not None and small else None
        history = None
        first: list[_Batch] = []
        if guessed is not None:
            merge.note(guessed)
            history = _HistoryRecords(round_, streams, merge, tails)
            first = history.next()
        bases = yield from producer.appending(
            [*small, *(record[:2] for record in (*records, *first))]
        )
        data = bases[: len(small)]
        if history is None:
            merge.note(data)
            history = _HistoryRecords(round_, streams, merge, tails)
        elif offset_guess is not None:
            if data != guessed:
                offset_guess.miss()
                return None
            offset_guess.hit()
            history.place(bases[len(small) + len(records) :])
        while more := history.next():
            added = yield from producer.appending([record[:2] for record in more])
            history.place(added)
            bases += added
        # Checked now, not for guesses: guessed offsets may be from before another leader, and prove nothing.
        appended = _check_behind(round_, history.landed, tails)
    finally:
        to.journals.trim()
    ends = {
        partition: base + count
        for (partition, _, count), base in zip(records, bases[len(small) :], strict=False)
    }
    for stream, offsets in history.places():
        place = TopicPartition(history_topic(stream), 0)
        begins, before = offsets[0], tails[stream]
        if begins <= before.last:
            raise TopicGone.replaced(place, offsets[-1] + 1, before.last + 1, certain=True)
        if before.read_to is not None and begins > before.read_to:
            # This is the leader's first record here: only markers may come before it.
            check_unread(to.log, to.clock, place, before.read_to, begins)
    moved = history.moved()
    return _Appended(small, data, bool(round_.history), ends.get(status), appended, moved)


def _batch_limits(state: State, streams: Sequence[str]) -> dict[str, int]:
    """The most bytes of a batch of each stream."""
    rows = {stream: state.streams.get(stream) for stream in streams}
    return {stream: batch_limit(row.settings) for stream, row in rows.items() if row is not None}


def _append_if_big(producer: Producer, merge: Merge) -> list[Placed]:
    """Append the merged batches one by one while they are made, if they have many bytes.

    Otherwise return the batches: the data of a small round goes into one request with its records.
    """
    batches = merge.batches()
    head: list[Placed] = []
    size = 0
    for placed in batches:
        head.append(placed)
        size += len(placed[1])
        if size >= SMALL_BYTES:
            merge.note(producer.append_stream(chain(head, batches)))
            return []
    return head


_Batch = tuple[TopicPartition, bytes, int]  # partition, batch, number of its records
_Pairs = Iterable[tuple[bytes, bytes | None]]


def _records(
    to: Durable, round_: Round, sizes: Mapping[str, int], status: TopicPartition, wall_ms: int
) -> Iterator[_Batch]:
    """All records whose content does not depend on offsets."""
    yield from _batches(status, round_.rows.items(), wall_ms)
    ops: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}
    for stream, partition, op in round_.ops:
        ops.setdefault((stream, partition), []).append((op.txn_id, encode(op)))
    for (stream, partition), pairs in ops.items():
        where = TopicPartition(journal_topic(stream), partition)
        # A stream may take small batches only, and its journal no bigger ones.
        room = sizes[stream] - max(len(op) for _, op in pairs) - _OP_BYTES
        limit = max(1, min(BATCH_BYTES, room))
        yield from _batches(where, pairs, wall_ms, ((OP_HEADER, b""),), limit)


def answers_of(prefix: str, of: Iterable[Answer], time: int, wall_ms: int) -> Iterator[_Place]:
    """The replies of a round at this hybrid time, as batches."""
    replies: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}
    for to, result in of:
        reply = Reply(to.correlation_id, to.command, time, result)
        replies.setdefault((to.lane, to.partition), []).append((to.correlation_id, encode(reply)))
    for (lane, partition), pairs in replies.items():
        where = TopicPartition(replies_topic(prefix, lane), partition)
        yield from (batch[:2] for batch in _batches(where, pairs, wall_ms))


def messages_of(
    prefix: str, sender: int, messages: Iterable[Message], time: int, wall_ms: int
) -> Iterator[_Place]:
    """A round's messages to other leaders, as batches. ``time``: the hybrid time of the ``sender``.

    A message that is lost, or comes late or twice, changes nothing: its sender repeats it, and it states what was
    logged (`docs/inside/across.md`, M1 and M2).
    """
    rows: dict[int, list[Row]] = {}
    brings = hybrid_time.to_bytes(time_of(time, wall_ms * 1000))
    for receiver, record, secret in messages:
        payload = encode(record)
        headers: list[tuple[str, bytes | None]] = [(TIME_HEADER, brings)]
        if secret is not None:
            headers.append((MAC_HEADER, mac_of(secret, sender, receiver, payload)))
        rows.setdefault(receiver, []).append((b"", payload, tuple(headers), wall_ms))
    for receiver, its in rows.items():
        where, waiting = TopicPartition(control_topic(prefix), receiver), iter(its)
        builder = BatchBuilder()
        while builder.add_all(waiting, BATCH_BYTES):
            yield where, builder.build()
            builder = BatchBuilder()


def _batches(
    where: TopicPartition,
    pairs: _Pairs,
    wall_ms: int,
    headers: tuple[tuple[str, bytes | None], ...] = (),
    limit: int | None = None,
) -> Iterator[_Batch]:
    """Put records of one time into as few batches as possible. The last record of a batch may exceed ``limit``."""
    rows = ((key, value, headers, wall_ms) for key, value in pairs)
    builder = BatchBuilder()
    while builder.add_all(rows, limit or BATCH_BYTES):
        yield where, builder.build(), builder.count
        builder = BatchBuilder()


def _check_behind(
    round_: Round, landed: Mapping[tuple[int, int], Landed], tails: Mapping[str, Tail]
) -> list[Appended]:
    """The places of a round's events. `TopicGone`: a place is below committed events: the topic was replaced."""
    appended = []
    ends: dict[tuple[str, int], int] = {}
    for i, commit in enumerate(round_.history):
        if isinstance(commit, NewEpoch):
            continue
        known = tails[commit.stream].vector
        for j, part in enumerate(commit.parts):
            at = part.staged or landed.get((i, j))
            if at is None or not at.records:
                continue
            if at.first < known.get(part.partition, 0):
                topic = TopicPartition(stream_topic(commit.stream), part.partition)
                raise TopicGone.replaced(topic, at.first, known[part.partition], certain=True)
            place = commit.stream, part.partition
            if ends.get(place) != at.first:  # if equal, this part continues the one before
                behind = ends.get(place, known.get(part.partition, 0))
                appended.append(Appended(commit.stream, part.partition, behind, at.first))
            ends[place] = at.end
    return appended


class _HistoryRecords:
    """The history records of a round, batch by batch, because some name the offsets of records in earlier batches.

    ``landed``: the places of the parts' events, as appended or as guessed.
    """

    def __init__(
        self, round_: Round, streams: Sequence[str], merge: Merge, tails: Mapping[str, Tail]
    ) -> None:
        self._moved = {stream: tails[stream].copy() for stream in streams}
        self.landed = merge.landed()
        self._records = history_records(round_, self.landed, self._moved)
        self._offsets: dict[str, list[int]] = {stream: [] for stream in self._records}
        self._next: list[tuple[str, int]] = []  # stream, number of records

    def next(self) -> list[_Batch]:
        """The next batch of each stream that has more records."""
        batches = []
        self._next = []
        for stream, records in self._records.items():
            offsets = self._offsets[stream]
            if len(offsets) == len(records):
                continue
            rows: list[Row] = []
            size = 0
            for number in range(len(offsets), len(records)):
                record = anchored(records[number], number, offsets)
                value = encode(record)
                size += len(value)
                if rows and size > HISTORY_BYTES:
                    break
                key = b"" if isinstance(record, EpochRecord) else record.txn_id
                rows.append((key, value, (), hybrid_time.to_ms(record.timestamp)))
            builder = BatchBuilder()
            builder.add_all(rows)
            place = TopicPartition(history_topic(stream), 0)
            batches.append((place, builder.build(), builder.count))
            self._next.append((stream, builder.count))
        return batches

    def place(self, bases: Sequence[int]) -> None:
        """Note the offsets at which the last batches were appended."""
        for (stream, count), base in zip(self._next, bases, strict=True):
            self._offsets[stream] += range(base, base + count)

    def places(self) -> Iterable[tuple[str, list[int]]]:
        """(stream, offsets of its records)."""
        return self._offsets.items()

    def moved(self) -> Mapping[str, Tail]:
        """The tails, at the new ends."""
        for stream, tail in self._moved.items():
            tail.place(self._offsets[stream])
        return self._moved


# -- the data that a round merges ---------------------------------------------------------------------


class Merge:
    """The data batches of a round: its events and journal runs, as batches of the streams in commit order.

    `anabranch.batches.splice` copies batches or puts them together; this class decides what goes where, and notes
    the offsets that the batches got. Batches are made one after the other, so that a big merge is never in memory
    as a whole. Plain writes are in memory as a whole; the round limits their size.

    Append the batches that `batches` yields in their order, and give `note` the base offsets in that order.
    """

    def __init__(
        self, readers: JournalReaders, round_: Round, limits: Mapping[str, int] | None = None
    ) -> None:
        """``limits``: the most bytes of a batch, by stream; streams that it lacks have the default."""
        queues: dict[tuple[str, int], list[tuple[tuple[int, int], Piece]]] = {}
        limits, copies = limits or {}, EventCopies()
        for i, commit in enumerate(round_.history):
            if isinstance(commit, NewEpoch):
                continue
            pieces = _pieces(readers, copies, commit, limits.get(commit.stream, DEFAULT_LIMIT))
            for j, part, piece in pieces:
                queue = queues.setdefault((commit.stream, part.partition), [])
                queue.append(((i, j), piece))
        self._splices = [
            (
                [place for place, _ in queue],
                Splice(
                    readers,
                    TopicPartition(stream_topic(stream), partition),
                    [piece for _, piece in queue],
                    copies=copies,
                    limit=limits.get(stream, DEFAULT_LIMIT),
                ),
            )
            for (stream, partition), queue in queues.items()
        ]
        self._yielded: list[Splice] = []

    def batches(self) -> Iterator[Placed]:
        """Yield the batches partition by partition, each in commit order. Each is made when it is taken."""
        for _, splice in self._splices:
            for placed in splice.batches():
                self._yielded.append(splice)
                yield placed

    def note(self, base_offsets: Sequence[int]) -> None:
        """Note the base offsets of the batches that were appended."""
        done, self._yielded = (
            self._yielded[: len(base_offsets)],
            self._yielded[len(base_offsets) :],
        )
        for splice, base in zip(done, base_offsets, strict=True):
            splice.note((base,))

    def landed(self) -> dict[tuple[int, int], Landed]:
        """(index of the commit in the round's history, index of its part) -> its place."""
        found: dict[tuple[int, int], Landed] = {}
        for places, splice in self._splices:
            found.update(zip(places, splice.landed(), strict=True))
        return found


def _pieces(
    readers: JournalReaders, copies: EventCopies, commit: StreamCommit, limit: int
) -> Iterator[tuple[int, Part, Piece]]:
    """The pieces to append for a commit's parts, by the parts' indexes."""
    if commit.plain:
        for j, batches in enumerate(_split(readers, commit, limit)):
            if batches:
                yield j, commit.parts[j], Piece(batches=batches)
        return
    journal = journal_topic(commit.stream)
    txn = pack_txn_header(commit.txn_id, 0, commit.stream_epoch)
    now_ms = hybrid_time.to_ms(commit.timestamp)
    for j, part in enumerate(commit.parts):
        if part.runs:
            yield j, part, Piece(source=TopicPartition(journal, part.source), runs=part.runs)
        elif part.staged is None:  # a staged part is in the stream already
            yield j, part, Piece(events=copies.part(part.events, now_ms, txn))


def _split(readers: JournalReaders, commit: StreamCommit, limit: int) -> list[list[RawBatch]]:
    """The batches that plain writes bring to each segment."""
    split = Split(commit.layout, limit)
    for writes in commit.plain:
        reader = readers.of(TopicPartition(journal_topic(commit.stream), writes.source))
        keyless = split.keyless(writes.source)
        for run in writes.runs:
            split.add(reader.batch(run.batch_base, run.batch_crc), run, keyless)
    return split.done()


# -- where the next batches land ----------------------------------------------------------------------


class OffsetGuess:
    """Guesses where a stream's next batches land, so that the history can be written together with the data.

    A leader appends to a stream's partitions in one native transaction after the other, and each leaves one marker
    after its data. So the next batch lands right after the marker, unless the marker is late or another program
    wrote. Then the broker returns other offsets, and the attempt is aborted. A wrong guess does no harm, so guesses
    are kept from term to term.
    """

    def __init__(self) -> None:
        self._next: dict[TopicPartition, int] = {}
        self._skip = 0
        self._failures = 0
        self.misses = 0  # in all

    def guess(self, batches: Sequence[Placed]) -> list[int] | None:
        """The offsets that the batches should get, in their order. None: there is no guess."""
        if self._skip:
            self._skip -= 1
            return None
        coming: dict[TopicPartition, int] = {}
        bases = []
        for partition, data in batches:
            base = coming.get(partition, self._next.get(partition))
            if base is None:
                return None
            bases.append(base)
            coming[partition] = base + read_header(data, whole=False).record_count
        return bases

    def hit(self) -> None:
        """Note that a guess was right."""
        self._failures = 0

    def miss(self) -> None:
        """Note that a guess was wrong. Guesses become rarer then, as each failure costs an aborted transaction."""
        self._failures += 1
        self.misses += 1
        self._skip = min(1 << self._failures, MOST_SKIPPED)

    def committed(self, batches: Sequence[Placed], bases: Sequence[int]) -> None:
        """Note the data of a small committed round. No batches: its data was big, so all guesses are dropped."""
        if not batches:
            self._next.clear()
        for (partition, data), base in zip(batches, bases, strict=True):
            records = read_header(data, whole=False).record_count
            self._next[partition] = base + records + _MARKER
