"""Truncates journals and histories, and moves runs that keep journals long (`core.decisions.cleanup`).

Records are deleted only after their low waters are logged; `durability` explains the order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.packer import Made, Packer, batch_limit
from anabranch.batches.records import decode_records
from anabranch.controller.durability import native_transaction
from anabranch.controller.jobs import Jobs
from anabranch.controller.topic_trouble import TopicTrouble
from anabranch.core.decisions.cleanup import (
    Copied,
    PlacedRun,
    has_moved,
    moved,
    not_now,
    runs_to_move,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import Place
from anabranch.core.rows import HISTORY
from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.ports import (
    CORRUPT_MESSAGE,
    CorruptBatch,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    OffsetOutOfRange,
    Producer,
    TopicPartition,
    answered,
)
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.schemas.codec import decode
from anabranch.protocol.schemas.records import EpochRecord
from anabranch.topics.names import history_topic, journal_topic, stream_topic

log = logging.getLogger("anabranch.controller")

_FETCH_BYTES = 1 << 20
_MOST_FETCHES = 64  # per history in one check; the next check continues there


class Truncator:
    """Deletes records below logged low waters, and finds how far histories may be truncated.

    A failed deletion is harmless, and is tried again.
    """

    def __init__(
        self, source: Log, jobs: Jobs, trouble: TopicTrouble, *, histories_ms: int
    ) -> None:
        """``histories_ms``: the time between two checks of the histories."""
        self._log = source
        self._jobs = jobs
        self._trouble = trouble
        self._due: dict[TopicPartition, int] = {}
        self._at: frozenset[str] = frozenset()  # topics of the deletion under way
        self._histories = Histories(source)
        self._histories_ms = histories_ms
        self._next_look_ms = 0
        self._forgotten: set[str] = set()  # streams that were forgotten during the check under way
        self.missed: set[str] = set()  # streams whose topics could not be checked

    def logged(self, low_waters: Mapping[Place, int]) -> None:
        """Note low waters that are logged."""
        for (stream, partition), offset in low_waters.items():
            self._due[_place(stream, partition)] = offset

    def truncate(self) -> None:
        """Begin to delete what may be deleted, except from topics of streams in trouble, and take the result."""
        if not self._jobs.is_under_way("truncation", ""):
            own = (journal_topic, history_topic)
            waiting = {topic(stream) for stream in self._trouble.waiting for topic in own}
            due = {
                place: at
                for place, at in self._due.items()
                if place.topic not in waiting
                and not self._trouble.is_pausing("truncation", place.topic)
            }
            if not due:
                return
            self._due = {place: at for place, at in self._due.items() if place not in due}
            self._at = frozenset(place.topic for place in due)
            self._jobs.begin("truncation", "", partial(self._delete, due))
        job = self._jobs.take("truncation", "")
        if job is None:
            return
        failed: _Failed = job.result()
        for topic in self._at - {place.topic for place in failed.errors}:
            self._trouble.end("truncation", topic)
        for place, error in failed.errors.items():
            self._trouble.note("truncation", place.topic, str(error))
        self._due = failed.again | self._due  # where both have one, the newer low water is higher

    def spare(self, now_ms: int, streams: Callable[[], Mapping[str, int]]) -> dict[str, int]:
        """Check from time to time, in a job, how far histories may be truncated. Call this in each turn.

        If a check has just ended, returns stream -> the history's offset below which all records are of events that
        retention has deleted; otherwise {}. ``streams``: returns the number of partitions by stream; it is called
        when a check begins, and when a check ends.
        """
        if not self._jobs.is_under_way("histories", ""):
            if now_ms < self._next_look_ms:
                return {}
            self._next_look_ms = now_ms + self._histories_ms
            self._jobs.begin("histories", "", partial(self._histories.spare, streams()))
        job = self._jobs.take("histories", "")
        if job is None:
            return {}
        found: dict[str, int] = job.result()
        self.missed |= self._histories.missed
        there = streams() if found else {}
        forgotten, self._forgotten = self._forgotten, set()
        for stream in forgotten:  # a new stream may have its name by now
            self._histories.forget_stream(stream)
        return {s: at for s, at in found.items() if s in there and s not in forgotten}

    def is_at(self, stream: str) -> bool:
        """Whether records of this stream's journal or history are being deleted."""
        topics = {journal_topic(stream), history_topic(stream)}
        return self._jobs.is_under_way("truncation", "") and not topics.isdisjoint(self._at)

    def forget_stream(self, stream: str) -> None:
        """Drop everything about a forgotten stream: its low waters must not apply to a new stream of its name."""
        topics = {journal_topic(stream), history_topic(stream)}
        self._due = {place: at for place, at in self._due.items() if place.topic not in topics}
        if self._jobs.is_under_way("histories", ""):
            self._forgotten.add(stream)
        else:
            self._histories.forget_stream(stream)

    def _delete(self, due: dict[TopicPartition, int]) -> _Failed:
        """Delete records below these offsets. If brokers refuse that, each partition is tried alone."""
        try:
            self._log.delete_records(due)
        except LogRefused as error:
            if len(due) > 1:
                each = [self._delete({place: at}) for place, at in due.items()]
                return _Failed(
                    {place: e for one in each for place, e in one.errors.items()},
                    {place: at for one in each for place, at in one.again.items()},
                )
            return _Failed(dict.fromkeys(due, error), {})  # the next low water tries again
        except LogError as error:
            return _Failed(dict.fromkeys(due, error), due)
        return _Failed({}, {})


class _Failed(NamedTuple):
    """Why records could not be deleted, and the low waters that are tried again."""

    errors: dict[TopicPartition, LogError]
    again: dict[TopicPartition, int]


def _place(stream: str, partition: int) -> TopicPartition:
    """The partition of a low water."""
    if partition == HISTORY:
        return TopicPartition(history_topic(stream), 0)
    return TopicPartition(journal_topic(stream), partition)


# -- moving runs that keep journals long --------------------------------------------------------------


def move_next(
    source: Log,
    turn: Turn,
    next_producer: Callable[[], Producer],
    write: Callable[[Producer], object],
) -> None:
    """Move the next chunk of runs that keep the first crowded journal partition long.

    ``write``: makes this turn's round durable in the native transaction of that producer. `LogRefused`: nothing
    happened, and the leader has to read its state again.
    """
    place = turn.cleaning.crowded[0]
    placed = runs_to_move(turn, place)
    if not placed:
        not_now(turn, place)
        return
    producer = next_producer()
    limit = batch_limit(turn.state.streams[place[0]].settings)
    try:
        with native_transaction(producer, commit=False):
            copies = copy_runs(source, producer, place, placed, limit)
    except (LogRefused, LogUnavailable):
        # This process stays leader, as a new leader would get the same error.
        not_now(turn, place)
        return
    moved(turn, place, placed, copies)
    try:
        write(producer)
    except (LogRefused, LogUnavailable):
        not_now(turn, place)
        raise
    has_moved(turn, place, placed, copies)


def copy_runs(
    source: Log, producer: Producer, place: Place, placed: Sequence[PlacedRun], limit: int
) -> list[Copied]:
    """Append copies of these runs to their own journal partition; returns their places.

    ``limit``: the most bytes of a batch. The caller ends the native transaction. Raises the errors of fetching and
    of `Producer.append_stream`, and `LogRefused` if a batch can't be read.
    """
    target = TopicPartition(journal_topic(place[0]), place[1])
    readers = JournalReaders(source)
    packer = Packer(limit)
    parts: list[list[tuple[int, int]]] = []  # for each batch: (index of the run, records)

    def made() -> Iterator[Made]:
        reader = readers.of(target)
        for index, one in enumerate(placed):
            yield from packer.run(index, one.run, reader, divisible=False)
        yield from packer.flush()

    def batches() -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        for batch in made():
            parts.append(batch.parts)
            yield target, batch.data

    try:
        bases = producer.append_stream(batches())
    except CorruptBatch as error:
        raise LogRefused(str(error), CORRUPT_MESSAGE, error.topics) from error
    finally:
        readers.close()
    copies = []
    for base, runs in zip(bases, parts, strict=True):
        at = base
        for _, records in runs:
            copies.append(Copied(base, at, pure=len(runs) == 1))
            at += records
    return copies


# -- how far histories may be truncated ---------------------------------------------------------------


class Histories:
    """Finds how far histories may be truncated, by comparing brokers' first offsets with vectors of EPOCH records.

    Each history is read once, from its beginning, up to the first record whose events are not deleted. If the
    stream has all its events, its history is not read. Only one thread at a time may use this.
    """

    def __init__(self, source: Log) -> None:
        self._log = source
        self._walks: dict[str, _Walk] = {}
        self.missed: set[str] = set()  # by the last call of `spare`

    def forget_stream(self, stream: str) -> None:
        self._walks.pop(stream, None)

    def spare(self, streams: Mapping[str, int]) -> dict[str, int]:
        """Stream -> the offset of an EPOCH record before which its history names no events that still exist.

        ``streams``: the number of partitions by stream. Streams that can't be checked now are added to `missed`.
        """
        found = {}
        self.missed = set()
        for stream, partitions in streams.items():
            try:
                at = self._spare_up_to(stream, partitions)
            except (LogError, CorruptBatch, OffsetOutOfRange) as error:
                log.info(
                    "can't find out up to where the history of %s may be truncated: %s",
                    stream,
                    error,
                )
                self._walks.pop(stream, None)
                self.missed.add(stream)
                continue
            if at is not None:
                found[stream] = at
        return found

    def _spare_up_to(self, stream: str, partitions: int) -> int | None:
        topic = stream_topic(stream)
        history = TopicPartition(history_topic(stream), 0)
        places = [TopicPartition(topic, p) for p in range(partitions)]
        starts = answered(lambda failed: self._log.start_offsets([*places, history], failed=failed))
        begins = starts.pop(history)
        if is_state(stream):  # it is read as a whole, and no reader needs its history
            starts = dict.fromkeys(starts, sys.maxsize)
        if not any(starts.values()):
            return None
        firsts = {place.partition: start for place, start in starts.items()}
        walk = self._walks.get(stream)
        if walk is None or walk.read_to < begins:
            walk = _Walk(begins, begins)
        self._walks[stream] = walk = self._walk(history, firsts, walk)
        return walk.spare if walk.spare > begins else None

    def _walk(self, history: TopicPartition, firsts: Mapping[int, int], walk: _Walk) -> _Walk:
        """Read further while all events before the next EPOCH record are deleted."""
        position, spare, commits, _ = walk
        if walk.ahead is not None and not _passed(walk.ahead, firsts):
            return walk
        for _ in range(_MOST_FETCHES):
            failed: dict[TopicPartition, LogError] = {}
            fetched = self._log.fetch(
                {history: position},
                max_wait=0.0,
                max_bytes=_FETCH_BYTES,
                committed=True,
                failed=failed,
            ).get(history)
            for error in failed.values():
                raise error
            if fetched is None:
                break
            for batch in fetched.batches:
                for record in decode_records(batch.data):
                    if record.offset < position or record.key:
                        commits |= record.offset >= position
                        continue
                    vector = _vector(record.value)
                    if vector is not None and not _passed(vector, firsts):
                        return _Walk(record.offset, spare, commits, vector)
                    if vector is not None and commits:
                        spare, commits = record.offset, False
            position = fetched.next_offset
        return _Walk(position, spare, commits)


class _Walk(NamedTuple):
    """How far a history was read. ``spare``: the last EPOCH record at which the history may begin.

    Such a record is the first EPOCH record after a COMMIT: its `previous` shows readers that nothing is lost.
    ``commits``: whether a COMMIT came after that record. ``ahead``: the vector of the EPOCH record at ``read_to``,
    if some events below that vector are not deleted yet.
    """

    read_to: int
    spare: int
    commits: bool = False
    ahead: Mapping[int, int] | None = None


def _vector(value: bytes | None) -> Mapping[int, int] | None:
    """The vector of an EPOCH record; None if the value is no EPOCH record."""
    try:
        record = decode(value or b"")
    except (MalformedRecord, UnsupportedVersion):
        return None  # foreign
    if not isinstance(record, EpochRecord):
        return None
    return {position.partition: position.offset for position in record.vector}


def _passed(vector: Mapping[int, int], firsts: Mapping[int, int]) -> bool:
    """Whether all events below a vector were deleted."""
    return all(firsts.get(partition, 0) >= end for partition, end in vector.items())
