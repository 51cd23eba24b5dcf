"""Making the batches that a merge appends to one partition, from the pieces of its commits, in commit order.

A journal batch that belongs to one writer is copied as it is (a splice); other runs, and events, are packed into
bigger batches. Everything is streamed: batches are fetched, checked and patched while the broker stores earlier
ones, so a merge is about as fast as producing ready batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.batches.format import read_header
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.one_shots import EventCopies, EventPart
from anabranch.batches.packer import DEFAULT_LIMIT, Made, Packer, worth_splicing
from anabranch.core.journal_runs import StoredRun
from anabranch.core.round import Landed
from anabranch.errors import InvariantViolation, check
from anabranch.ports import RawBatch, TopicPartition


class Piece(NamedTuple):
    """The part of one commit in the target: runs of a journal partition, in order, or events, or batches.

    ``batches``: batches whose records all go to the target (`anabranch.batches.split`).
    """

    source: TopicPartition | None = None
    runs: Sequence[StoredRun] = ()
    events: EventPart | None = None
    batches: Sequence[RawBatch] = ()


class Splice:
    """Merges pieces into one partition, for callers that may append to several partitions in one go.

    Append what `batches` yields, in that order, and pass the base offsets to `note` as they come.
    """

    def __init__(
        self,
        readers: JournalReaders,
        target: TopicPartition,
        pieces: Sequence[Piece],
        *,
        copies: EventCopies | None = None,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        """``copies``: has the events of the pieces. ``limit``: the most bytes of a batch that is put together (the
        topic's max.message.bytes).
        """
        self._readers = readers
        self._target = target
        self._pieces = pieces
        self._copies = copies or EventCopies()
        self._packer = Packer(limit)
        # (index of the piece, records) in order, for each batch yielded.
        self._yielded: deque[list[tuple[int, int]]] = deque()
        self._landed = [Landed(0, 0, 0)] * len(pieces)

    def batches(self) -> Iterator[tuple[TopicPartition, bytes | memoryview]]:
        """The batches, each made on demand."""
        for data, parts in self._made():
            self._yielded.append(parts)
            yield self._target, data

    def _made(self) -> Iterator[Made]:
        packer = self._packer
        events: list[tuple[int, EventPart]] = []  # of consecutive pieces, which are copied at once
        for index, piece in enumerate(self._pieces):
            if piece.events is not None:
                events.append((index, piece.events))
                continue
            if events:
                yield from packer.events(events, self._copies)
                events = []
            if piece.runs:
                if piece.source is None:
                    raise InvariantViolation("runs without the journal they are in")
                reader = self._readers.of(piece.source)
                for run in piece.runs:
                    yield from packer.run(index, run, reader)
            for batch in piece.batches:
                header = read_header(batch.data)
                records = header.record_count
                # `Split` compressed the batch because that paid, or because a record fits no other way.
                if header.compression or worth_splicing(batch, records):
                    yield from packer.whole(index, batch, records)
                else:
                    yield from packer.copy(index, batch, 0, records - 1)
        if events:
            yield from packer.events(events, self._copies)
        yield from packer.flush()

    def note(self, base_offsets: Sequence[int]) -> None:
        """Note the base offsets of the next yielded batches."""
        for base in base_offsets:
            at = base
            for index, records in self._yielded.popleft():
                before = self._landed[index]
                first = before.first if before.records else at
                at += records
                self._landed[index] = Landed(first, at, before.records + records)

    def landed(self) -> list[Landed]:
        """The place of each piece. Call it after all base offsets are noted."""
        check(not self._yielded and self._packer.empty, "batches whose offsets are not known yet")
        return list(self._landed)
