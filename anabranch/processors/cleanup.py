"""Cutting journals and histories, and moving what keeps journals long (`core.decide_cleanup`).

Both follow the log; their order stands in `durability`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future

from anabranch.batches.builder import BatchBuilder
from anabranch.batches.compression import NAMES
from anabranch.batches.format import read_header
from anabranch.batches.journal_refetch import JournalReader, JournalReaders
from anabranch.batches.splice import BATCH_BYTES, batch_limit, worth_splicing
from anabranch.core.decide_cleanup import Copied, Lying, has_moved, moved, not_now, runs_to_move
from anabranch.core.journal_usage import Place
from anabranch.core.rows import HISTORY
from anabranch.core.turn import Turn
from anabranch.errors import check
from anabranch.ports import (
    CorruptBatch,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    Producer,
    RawBatch,
    TopicPartition,
)
from anabranch.processors.beside import helper
from anabranch.processors.durability import undone_on_failure
from anabranch.processors.histories import Histories
from anabranch.topics.names import history_topic, journal_topic

log = logging.getLogger("anabranch.controller")

RETRY_MS = 30_000
CORRUPT_MESSAGE = 2  # of brokers' error codes


class Cutter:
    """Deletes what lies below logged low waters, and finds what histories may go.

    That it fails is nobody's trouble: it is tried again.
    """

    def __init__(self, source: Log, *, threads: bool, histories_ms: int) -> None:
        """``histories_ms``: how often to look at the histories."""
        self._log = source
        self._due: dict[TopicPartition, int] = {}
        self._not_before_ms = 0
        self._helper = helper("anabranch-cutter", threads=threads)
        self._under_way: Future[dict[TopicPartition, int]] | None = None
        self._at: frozenset[str] = frozenset()  # the streams of the request under way
        self._histories = Histories(source)
        self._histories_ms = histories_ms
        self._next_look_ms = 0
        self._looking: Future[dict[str, int]] | None = None
        self._looks_at: frozenset[str] = frozenset()

    def logged(self, low_waters: Mapping[Place, int]) -> None:
        """These are on the log."""
        for (stream, partition), offset in low_waters.items():
            self._due[_place(stream, partition)] = offset

    def cut(self, now_ms: int, waiting: Container[str] = ()) -> None:
        """Delete what may be deleted, or begin to; not of the ``waiting`` topics, which can't be reached."""
        self._take_back(now_ms)
        if self._under_way is not None or not self._due or now_ms < self._not_before_ms:
            return
        due = {place: at for place, at in self._due.items() if place.topic not in waiting}
        if not due:
            return
        self._due = {place: at for place, at in self._due.items() if place not in due}
        self._at = frozenset(place.topic for place in due)
        self._under_way = self._helper.submit(self._delete, due)
        self._take_back(now_ms)

    def spare(self, now_ms: int, streams: Callable[[], Mapping[str, int]]) -> dict[str, int]:
        """Stream -> offset below which its history speaks of no event that is left, as it was found.

        ``streams``: the partitions of each; they are looked at now and then.
        """
        if self._looking is None and now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + self._histories_ms
            looked_at = streams()
            self._looks_at = frozenset(looked_at)
            self._looking = self._helper.submit(self._histories.spare, looked_at)
        if self._looking is None or not self._looking.done():
            return {}
        found, self._looking = self._looking.result(), None
        there = streams() if found else {}
        return {stream: at for stream, at in found.items() if stream in there}

    def is_at(self, stream: str) -> bool:
        """Whether records of this stream's journal or history are being deleted, or looked for."""
        topics = {journal_topic(stream), history_topic(stream)}
        return (self._under_way is not None and not topics.isdisjoint(self._at)) or (
            self._looking is not None and stream in self._looks_at
        )

    def forget_stream(self, stream: str) -> None:
        """Low waters logged for the old journal and history do not apply to new ones of the same name."""
        topics = {journal_topic(stream), history_topic(stream)}
        self._due = {place: at for place, at in self._due.items() if place.topic not in topics}
        self._histories.forget_stream(stream)

    def close(self) -> None:
        """A request under way is not waited for: it says nothing that is not logged."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _take_back(self, now_ms: int) -> None:
        if self._under_way is None or not self._under_way.done():
            return
        failed, self._under_way = self._under_way.result(), None
        if failed:
            self._not_before_ms = now_ms + RETRY_MS
            self._due = failed | self._due  # what was logged meanwhile is higher

    def _delete(self, due: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """What could not be deleted."""
        try:
            self._log.delete_records(due)
        except LogRefused as error:
            if len(due) > 1:
                failed: dict[TopicPartition, int] = {}
                for place, at in due.items():
                    failed |= self._delete({place: at})
                return failed
            log.warning("a topic can't be cut: %s", error)  # the next low water tries again
        except LogError as error:
            log.warning("topics can't be cut now: %s", error)
            return due
        return {}


def _place(stream: str, partition: int) -> TopicPartition:
    """The key of a low water."""
    if partition == HISTORY:
        return TopicPartition(history_topic(stream), 0)
    return TopicPartition(journal_topic(stream), partition)


def move_next(
    source: Log,
    turn: Turn,
    next_producer: Callable[[], Producer],
    write: Callable[[Producer], object],
) -> None:
    """Move the next chunk of what keeps the first crowded journal partition long.

    ``write``: makes this turn's round durable in the native transaction of that producer. `LogRefused`: nothing
    happened, and the state has to be read again.
    """
    place = turn.cleaning.crowded[0]
    lying = runs_to_move(turn, place)
    if not lying:
        not_now(turn, place)
        return
    producer = next_producer()
    limit = batch_limit(turn.state.streams[place[0]].settings)
    try:
        with undone_on_failure(producer):
            copies = copy_runs(source, producer, place, lying, limit)
    except (LogRefused, LogUnavailable):  # not an end of leading: the same would come again
        not_now(turn, place)
        return
    moved(turn, place, lying, copies)
    try:
        write(producer)
    except (LogRefused, LogUnavailable):
        not_now(turn, place)
        raise
    has_moved(turn, place, lying, copies)


def copy_runs(
    source: Log, producer: Producer, place: Place, lying: Sequence[Lying], limit: int
) -> list[Copied]:
    """Append copies of these runs to their own journal partition; where each stands.

    ``limit``: the most bytes of a batch. The native transaction is left to the caller. `LogRefused` also for a
    batch that can't be read; other errors are those of the reading and of `Producer.append_stream`.
    """
    partition = TopicPartition(journal_topic(place[0]), place[1])
    readers = JournalReaders(source)
    try:
        copier = _Copier(readers.of(partition), partition, limit)
        bases = producer.append_stream(copier.batches(lying))
    except CorruptBatch as error:
        raise LogRefused(str(error), CORRUPT_MESSAGE, error.topics) from error
    finally:
        readers.close()
    return copier.copies(bases)


class _Copier:
    """Makes the batches: a run that is a whole batch worth it as it is, others put together, each undivided."""

    def __init__(self, reader: JournalReader, target: TopicPartition, limit: int) -> None:
        self._reader = reader
        self._target = target
        self._limit = limit
        self._full = min(BATCH_BYTES, limit)
        self._builder = BatchBuilder()
        self._building: list[int] = []  # offset deltas of the runs in the batch that is built
        self._yielded: list[list[int]] = []

    def batches(
        self, lying: Sequence[Lying]
    ) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        """Each is made when it is asked for."""
        for one in lying:
            batch = self._reader.batch(one.batch_base, one.run.batch_crc)
            if one.run.pure and worth_splicing(batch, one.run.records):
                yield from self._flush()
                self._yielded.append([0])
                yield self._target, batch.data
                continue
            if not self._add(batch, one):
                yield from self._flush()
                if not self._add(batch, one):
                    # It fits only as it came: packed.
                    codec = NAMES[read_header(batch.data).compression]
                    self._builder = BatchBuilder(codec)
                    self._take(batch, one)
                    yield from self._flush()
            if self._builder.size_estimate >= self._full:
                yield from self._flush()
        yield from self._flush()

    def copies(self, bases: Sequence[int]) -> list[Copied]:
        """Where the runs' copies stand, in order; ``bases``: of all batches."""
        return [
            Copied(base, base + delta, pure=len(deltas) == 1)
            for base, deltas in zip(bases, self._yielded, strict=True)
            for delta in deltas
        ]

    def _add(self, batch: RawBatch, one: Lying) -> bool:
        mark = self._builder.mark()
        self._take(batch, one)
        if self._builder.size_estimate > self._limit:
            self._builder.rewind(mark)
            self._building.pop()
            return False
        return True

    def _take(self, batch: RawBatch, one: Lying) -> None:
        run = one.run
        first = one.at - one.batch_base
        self._building.append(self._builder.count)
        taken = self._builder.add_from_batch(batch, first, first + run.end - run.first - 1)
        check(taken == run.records, f"a run of {run.records} records at {one.at} has {taken}")

    def _flush(self) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        if self._builder.count:
            data = self._builder.build()
            self._yielded.append(self._building)
            self._builder, self._building = BatchBuilder(), []
            yield self._target, data
