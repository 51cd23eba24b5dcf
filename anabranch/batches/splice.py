"""Merging one partition's pieces, in commit order, into batches: spliced, taken apart, or made of events.

A journal batch that belongs to one writer whole is copied as it is (a splice); the rest of the runs, and
events, are put together into bigger batches. Everything is a stream: batches are fetched, checked and
patched while the broker stores those before, so a merge is about as quick as producing ready batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from anabranch.batches.builder import BatchBuilder, Row
from anabranch.batches.compression import NAMES
from anabranch.batches.format import read_header
from anabranch.batches.journal_refetch import JournalReader, JournalReaders
from anabranch.core.round import Landed
from anabranch.errors import InvariantViolation, check
from anabranch.ports import RawBatch, TopicPartition

# A smaller batch costs the broker more than it costs to take it apart (measured: about 100 records).
MIN_SPLICED_RECORDS = 100
# A bigger one is copied however few records it has.
SPLICED_BYTES = 64 << 10
BATCH_BYTES = 512 << 10
DEFAULT_LIMIT = 1_000_000  # below the broker's default for max.message.bytes


def batch_limit(settings: Mapping[str, str]) -> int:
    """The most bytes of a batch that is put together for a stream with these settings."""
    return int(settings.get("max.message.bytes", DEFAULT_LIMIT))


class JournalRun(Protocol):
    """Consecutive records of one writer in a journal's batch; offsets are the journal's.

    ``first`` and ``end`` are those that the writer saw.
    """

    @property
    def batch_base(self) -> int:
        """The base offset of the batch."""

    @property
    def first(self) -> int:
        """The run's first offset."""

    @property
    def end(self) -> int:
        """Its last offset + 1."""

    @property
    def at(self) -> int:
        """Where its first record lies now: it may have been moved."""

    @property
    def records(self) -> int:
        """How many records it has."""

    @property
    def pure(self) -> bool:
        """The run is the whole batch, which may be copied as it is."""

    @property
    def batch_crc(self) -> int:
        """What the batch's head says, by which it is known again; 0: not known."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one commit brings to the target: runs of a journal partition, in order, then events, then batches.

    ``batches``: of records that all go to the target (`anabranch.batches.split`).
    """

    source: TopicPartition | None = None
    runs: Sequence[JournalRun] = ()
    events: Sequence[Row] = ()
    batches: Sequence[RawBatch] = ()


def worth_splicing(batch: RawBatch, records: int) -> bool:
    """Whether a batch whose records all go to one target is copied as it is."""
    return records >= MIN_SPLICED_RECORDS or len(batch.data) >= SPLICED_BYTES


class Splice:
    """Merges pieces into one partition, for callers that may append to several partitions in one go.

    Append what `batches` yields, in that order, and hand the base offsets to `note` as they come.
    """

    def __init__(
        self,
        readers: JournalReaders,
        target: TopicPartition,
        pieces: Sequence[Piece],
        *,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        """``limit``: the most bytes of a batch that is put together (the topic's max.message.bytes)."""
        self._readers = readers
        self._limit = limit
        self._full = min(BATCH_BYTES, limit)
        self._taken = [0] * len(pieces)
        self._target = target
        self._pieces = pieces
        self._builder = BatchBuilder()
        # Of the batch being built, then of each batch yielded: (index of the piece, records) in order.
        self._building: list[list[int]] = []
        self._yielded: deque[list[list[int]]] = deque()
        self._landed = [Landed(0, 0, 0)] * len(pieces)

    def batches(self) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        """The batches, each made when it is asked for."""
        for index, piece in enumerate(self._pieces):
            if piece.runs:
                source = piece.source
                if source is None:
                    raise InvariantViolation("runs without the journal they are in")
                yield from self._take_runs(index, piece.runs, self._readers.of(source))
            yield from self._take_events(index, piece.events)
            for batch in piece.batches:
                records = read_header(batch.data).record_count
                if worth_splicing(batch, records):
                    yield from self._splice(index, batch, records)
                else:
                    yield from self._copy(index, batch, 0, records - 1)
        yield from self._flush()

    def note(self, base_offsets: Sequence[int]) -> None:
        """Where the next batches that were yielded stand."""
        for base in base_offsets:
            at = base
            for index, records in self._yielded.popleft():
                before = self._landed[index]
                first = before.first if before.records else at
                at += records
                self._landed[index] = Landed(first, at, before.records + records)

    def landed(self) -> list[Landed]:
        """Where each piece stands, once all base offsets were noted."""
        check(not self._yielded and not self._building, "batches whose offsets are not known yet")
        return list(self._landed)

    def _take_runs(
        self, index: int, runs: Sequence[JournalRun], reader: JournalReader
    ) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        for run in runs:
            batch = reader.batch(run.batch_base, run.batch_crc)
            if run.pure and worth_splicing(batch, run.records):
                yield from self._splice(index, batch, run.records)
                continue
            before = self._taken[index]
            first = run.at - run.batch_base
            yield from self._copy(index, batch, first, first + run.end - run.first - 1)
            taken = self._taken[index] - before
            check(
                taken == run.records, f"a run of {run.records} records at {run.first} has {taken}"
            )

    def _splice(
        self, index: int, batch: RawBatch, records: int
    ) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        """A batch as it is, behind what was built."""
        yield from self._flush()
        self._taken[index] += records
        self._yielded.append([[index, records]])
        yield self._target, batch.data

    def _copy(
        self, index: int, batch: RawBatch, first: int, last: int
    ) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        """Put records of a batch, by offset deltas, into the batch that is built.

        What would make that too big goes into one of its own: in halves, if it must be.
        """
        mark = self._builder.mark()
        taken = self._builder.add_from_batch(batch, first, last)
        if self._builder.size_estimate > self._limit:
            self._builder.rewind(mark)
            if mark.records:
                yield from self._flush()
                yield from self._copy(index, batch, first, last)
            elif first < last:
                middle = (first + last) // 2
                yield from self._copy(index, batch, first, middle)
                yield from self._flush()
                yield from self._copy(index, batch, middle + 1, last)
            else:
                # One record that fits only as it came: packed.
                self._builder = BatchBuilder(NAMES[read_header(batch.data).compression])
                self._count(index, self._builder.add_from_batch(batch, first, last))
                yield from self._flush()
            return
        self._count(index, taken)
        if self._builder.size_estimate >= self._full:
            yield from self._flush()

    def _take_events(
        self, index: int, events: Sequence[Row]
    ) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        rest = iter(events)
        at = 0
        while True:
            mark = self._builder.mark()
            added = self._builder.add_all(rest, self._full)
            if self._builder.size_estimate > self._limit and self._builder.count > 1:
                # The last one was too much: it begins the next batch.
                self._builder.rewind(mark)
                if added > 1:
                    self._builder.add_all(events[at : at + added - 1])
                self._count(index, added - 1)
                yield from self._flush()
                at += added - 1
                rest = iter(events[at:])
                continue
            if not added:
                return
            self._count(index, added)
            at += added
            if self._builder.size_estimate >= self._full:
                yield from self._flush()

    def _count(self, index: int, records: int) -> None:
        if not records:
            return
        self._taken[index] += records
        if self._building and self._building[-1][0] == index:
            self._building[-1][1] += records
        else:
            self._building.append([index, records])

    def _flush(self) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        if self._builder.count:
            data = self._builder.build()
            self._yielded.append(self._building)
            self._builder, self._building = BatchBuilder(), []
            yield self._target, data
