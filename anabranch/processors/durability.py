"""The one home of the order in which a round becomes durable.

1. *append* stream data, journal ops, status rows, replies and commands to other control partitions. Nothing
   of it is visible yet. Data first, because
2. *append* the history records, which name the offsets that step 1 returned. They can't be known before: the
   markers of the round before may land in between. Mostly they don't, so a small round is first tried with
   offsets that are foreseen (`foresight`), data and history in one request. If the broker returns others, that
   native transaction is aborted, and the round is written with the steps one after the other.
3. *commit* the native transaction. From here the round has happened, for everyone, whole.
4. *write* the table: the rows and how far the status log is folded, in one batch. A crash before it costs
   nothing: the rows are read again from the log.
5. only then look at the next command. Memory, too, is a copy of what is on the log.

Why not the table before the commit: a round that never happened would be believed. Why replies inside the
native transaction: an answer that leaves any other way could come from a process that leads no more.

If 1 is refused by the broker, the native transaction is aborted and nothing happened. If anything in 1 to 3
is uncertain, everything unlogged is dropped and leadership begins anew (`leadership`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from anabranch.core import hybrid_time
from anabranch.core.ids import OP_HEADER
from anabranch.core.overlay import Overlay
from anabranch.core.plan import Landed, NewEpoch, Round, Tail, history_records
from anabranch.core.state import State
from anabranch.errors import InvariantViolation
from anabranch.ports import Log, LogRefused, OffsetOutOfRange, Producer, Table, TopicPartition
from anabranch.processors.foresight import Foresight
from anabranch.processors.intake import made_anew
from anabranch.processors.leadership import STATUS_POSITION
from anabranch.processors.merge import Merge, Placed
from anabranch.schemas.codec import encode
from anabranch.schemas.records import EpochRecord, Reply
from anabranch.topics.builder import BatchBuilder
from anabranch.topics.journal_reader import JournalReaders, records_gone
from anabranch.topics.names import (
    commands_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
)
from anabranch.topics.splice import batch_limit

SMALL_BYTES = 1 << 20  # of merged data: one request together with the records
BATCH_BYTES = 512 << 10
_OP_BYTES = 64  # of an op's record, beside its value: key, header, framing


@dataclass(frozen=True, slots=True)
class Durable:
    """Where rounds of one control partition go."""

    log: Log
    table: Table
    prefix: str
    control_partition: int
    read_ahead: bool = False  # fetch journals on a helper thread while merging
    foresight: Foresight | None = None  # write the history together with the data


def write_round(
    to: Durable,
    producer: Producer,
    round_: Round,
    state: State,
    index_rows: Overlay,
    tails: MutableMapping[str, Tail],
    *,
    wall_ms: int,
    carrying: bool = False,
) -> None:
    """Steps 1 to 4. ``tails`` are moved to the new end of each history.

    ``carrying``: carriers append to the status log too, and the state does not know all of their rows yet.
    So the table's position in that log stays: to fold a stretch again is harmless, to skip a row is not.

    ``index_rows``: changes of the journal index since the last round. They wait for this one, because its
    commit proves that nobody else led while they were made; a zombie's are made with an old state.

    Raises:
        LogRefused: the broker refused some of it, or what it merges is gone from a journal; the native
            transaction is aborted, nothing happened.
        LogUncertain, LogFenced, LogUnavailable: lead anew.
        TableError: the round has happened; the table can't follow.
    """
    _find_starts(to.log, round_, tails)
    try:
        done = _append(to, producer, round_, state, tails, wall_ms, to.foresight)
        if done is None:
            producer.abort()
            done = _append(to, producer, round_, state, tails, wall_ms, None)
        if done is None:
            raise InvariantViolation("what is not foreseen can't come out otherwise")
    except LogRefused:
        producer.abort()
        raise
    except OffsetOutOfRange as error:
        producer.abort()
        raise records_gone(error) from error
    producer.commit()
    if to.foresight is not None and done.history:
        to.foresight.committed(done.data, done.bases)
    changes = index_rows.take() | state.take_changes()  # what ended with this round is forgotten
    if done.status_end is not None and not carrying:
        changes[STATUS_POSITION] = done.status_end.to_bytes(8, "big")
    to.table.write(changes)


def _find_starts(log: Log, round_: Round, tails: Mapping[str, Tail]) -> None:
    """Let segments on partitions that nothing of ours stands on begin behind what somebody else put there."""
    for i, step in enumerate(round_.history):
        if isinstance(step, NewEpoch):
            known = tails[step.stream].vector.keys() | step.starts.keys()
            new = [s.partition for s in step.segments if s.partition not in known]
            if new:
                topic = stream_topic(step.stream)
                ends = log.end_offsets([TopicPartition(topic, p) for p in new], committed=False)
                found = {place.partition: end for place, end in ends.items()}
                round_.history[i] = step._replace(starts={**step.starts, **found})


class _Appended(NamedTuple):
    """What a round's native transaction holds: small data batches and where they stand; the status log's end."""

    data: list[Placed]
    bases: list[int]
    history: bool
    status_end: int | None


def _append(
    to: Durable,
    producer: Producer,
    round_: Round,
    state: State,
    tails: MutableMapping[str, Tail],
    wall_ms: int,
    foresight: Foresight | None,
) -> _Appended | None:
    """Steps 1 and 2, at once where offsets are foreseen; None if they came out otherwise."""
    readers = JournalReaders(to.log, ahead=to.read_ahead)
    try:
        merge = Merge(readers, round_, _limits(state, round_))
        status = TopicPartition(status_topic(to.prefix), to.control_partition)
        small = _append_if_big(producer, merge)
        records = list(_records(to, round_, state, status, wall_ms))
        foreseen = foresight.bases(small) if foresight is not None and small else None
        history: list[_Batch] = []
        moved: dict[str, Tail] = {}
        if foreseen is not None:
            merge.note(foreseen)
            history, moved = _history(round_, merge, tails)
        batches = [*small, *(record[:2] for record in (*records, *history))]
        bases = producer.append(batches)
        data = bases[: len(small)]
        if foreseen is None:
            merge.note(data)
            history, moved = _history(round_, merge, tails)
            if history:
                bases += producer.append([record[:2] for record in history])
        elif foresight is not None:
            if data != foreseen:
                foresight.wrong()
                return None
            foresight.right()
        # Only now: offsets that were foreseen, perhaps before somebody else led, prove nothing.
        _check_behind(round_, merge.landed(), tails)
    finally:
        readers.close()
    ends = {
        partition: base + count
        for (partition, _, count), base in zip(
            (*records, *history), bases[len(small) :], strict=True
        )
    }
    for stream, tail in moved.items():
        place = TopicPartition(history_topic(stream), 0)
        tail.last = ends[place] - 1
        count = sum(record[2] for record in history if record[0] == place)
        if ends[place] - count <= tails[stream].last:  # where its first record stands
            raise made_anew(place, ends[place], tails[stream].last + 1, certain=True)
    tails.update(moved)
    return _Appended(small, data, bool(history), ends.get(status))


def _limits(state: State, round_: Round) -> dict[str, int]:
    """The most bytes of a batch of each stream."""
    rows = {stream: state.streams.get(stream) for stream in round_.streams}
    return {stream: batch_limit(row.settings) for stream, row in rows.items() if row is not None}


def _append_if_big(producer: Producer, merge: Merge) -> list[Placed]:
    """Append the merged batches as a stream, if they are many bytes.

    Else they are returned: a small round's data goes into one request with its records.
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


_Batch = tuple[TopicPartition, bytes, int]  # where, the batch, its number of records
_Pairs = Iterable[tuple[bytes, bytes | None]]


def _records(
    to: Durable, round_: Round, state: State, status: TopicPartition, wall_ms: int
) -> Iterator[_Batch]:
    """Everything whose content does not depend on offsets."""
    yield from _batches(status, round_.rows.items(), wall_ms)
    replies: dict[int, list[tuple[bytes, bytes | None]]] = {}
    time = state.round.hybrid_time
    for waiting, result in round_.replies:
        reply = Reply(waiting.correlation_id, time, result)
        replies.setdefault(waiting.partition, []).append((waiting.correlation_id, encode(reply)))
    for partition, answers in replies.items():
        yield from _batches(TopicPartition(replies_topic(to.prefix), partition), answers, wall_ms)
    ops: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}
    for stream, partition, op in round_.ops:
        ops.setdefault((stream, partition), []).append((op.txn_id, encode(op)))
    for (stream, partition), pairs in ops.items():
        where = TopicPartition(journal_topic(stream), partition)
        # A stream may take small batches only, and its journal no bigger ones.
        most = batch_limit(state.streams[stream].settings)
        room = most - max(len(op) for _, op in pairs) - _OP_BYTES
        limit = max(1, min(BATCH_BYTES, room))
        yield from _batches(where, pairs, wall_ms, ((OP_HEADER, b""),), limit)
    for partition, command in round_.commands:
        where = TopicPartition(commands_topic(to.prefix), partition)
        yield from _batches(where, [(b"", encode(command))], wall_ms)


def _batches(
    where: TopicPartition,
    pairs: _Pairs,
    wall_ms: int,
    headers: tuple[tuple[str, bytes | None], ...] = (),
    limit: int | None = None,
) -> Iterator[_Batch]:
    """Records of one time in as few batches as their sizes allow; the last one of each may go beyond ``limit``."""
    rows = ((key, value, headers, wall_ms) for key, value in pairs)
    builder = BatchBuilder()
    while builder.add_all(rows, limit or BATCH_BYTES):
        yield where, builder.build(), builder.count
        builder = BatchBuilder()


def _check_behind(
    round_: Round, landed: Mapping[tuple[int, int], Landed], tails: Mapping[str, Tail]
) -> None:
    """`TopicGone` if events came to stand before what was committed: then it is another topic."""
    for i, commit in enumerate(round_.history):
        if isinstance(commit, NewEpoch):
            continue
        known = tails[commit.stream].vector
        for j, part in enumerate(commit.parts):
            at = part.carried or landed.get((i, j))
            if at is not None and at.records and at.first < known.get(part.partition, 0):
                place = TopicPartition(stream_topic(commit.stream), part.partition)
                raise made_anew(place, at.first, known[part.partition], certain=True)


def _history(
    round_: Round, merge: Merge, tails: Mapping[str, Tail]
) -> tuple[list[_Batch], dict[str, Tail]]:
    """The histories' batches, and the tails that they leave but for the last offset."""
    moved = {s: replace(tails[s], vector=dict(tails[s].vector)) for s in round_.streams}
    batches = []
    landed = merge.landed()
    for stream, records in history_records(round_, landed, moved).items():
        builder = BatchBuilder()
        for record in records:
            key = b"" if isinstance(record, EpochRecord) else record.txn_id
            builder.add(key, encode(record), (), hybrid_time.to_ms(record.timestamp))
        batches.append((TopicPartition(history_topic(stream), 0), builder.build(), len(records)))
    return batches, moved
