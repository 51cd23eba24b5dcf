"""Packing records into batches up to a limit: records of other batches, rows, and whole batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anabranch.batches.builder import COPY_GROWTH, BatchBuilder, Row
from anabranch.batches.compression import NAMES
from anabranch.batches.format import HEADER_SIZE, read_header
from anabranch.batches.journal_refetch import JournalReader
from anabranch.batches.one_shots import EventCopies, EventPart
from anabranch.core.journal_runs import StoredRun
from anabranch.errors import check
from anabranch.ports import RawBatch

# Below about 100 records, storing a batch costs the broker more than packing its records does (measured).
MIN_SPLICED_RECORDS = 100
# A batch of this size, packed or unpacked, is copied as it is, however few records it has.
SPLICED_BYTES = 64 << 10
BATCH_BYTES = 512 << 10
# A batch that unpacks to this many times its bytes, and at least `SPLICED_BYTES`, is compressed again when split.
PACKED_TIMES = 4
DEFAULT_LIMIT = 1_000_000  # below the broker's default for max.message.bytes


def batch_limit(settings: Mapping[str, str]) -> int:
    """The most bytes of a batch that is packed for a stream with these settings."""
    return int(settings.get("max.message.bytes", DEFAULT_LIMIT))


def worth_splicing(batch: RawBatch, records: int, unpacked: int = 0) -> bool:
    """Whether to copy a batch as it is, if all its records go to one target. ``unpacked``: bytes; 0: not known."""
    return records >= MIN_SPLICED_RECORDS or max(len(batch.data), unpacked) >= SPLICED_BYTES


def worth_packing(batch: RawBatch, unpacked: int) -> bool:
    """Whether to compress a batch again when it is split, because appending it unpacked takes longer."""
    return unpacked >= max(SPLICED_BYTES, PACKED_TIMES * len(batch.data))


class Made(NamedTuple):
    """A batch, and its parts in order: the caller's number (``of``), and the number of records."""

    data: bytes | memoryview
    parts: list[tuple[int, int]]


class Packer:
    """Fills one batch after the other. Each method yields the batches that it completes; append them in that order.

    ``of``: the caller's number for the added records.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        """``limit``: the most bytes of a batch that is put together (the topic's max.message.bytes)."""
        self._limit = limit
        self._full = min(BATCH_BYTES, limit)
        self._codec: str | None = None
        self._builder = BatchBuilder()
        self._parts: list[tuple[int, int]] = []

    @property
    def empty(self) -> bool:
        """Whether all records are in batches that were yielded."""
        return not self._parts

    def flush(self) -> Iterator[Made]:
        """End the batch that is being filled."""
        if self._builder.count:
            made = Made(self._builder.build(), self._parts)
            self._parts = []
            yield made
        self._builder = BatchBuilder(self._codec)

    def pack(self, codec: str | None) -> Iterator[Made]:
        """Compress records that are added from now on with this codec; None: don't compress them."""
        if codec != self._codec:
            self._codec = codec
            yield from self.flush()

    def whole(self, of: int, batch: RawBatch, records: int) -> Iterator[Made]:
        """Add a batch as it is, after the batch that is being filled."""
        yield from self.flush()
        yield Made(batch.data, [(of, records)])

    def run(
        self, of: int, run: StoredRun, reader: JournalReader, *, divisible: bool = True
    ) -> Iterator[Made]:
        """Add a journal's run. Raises `InvariantViolation` for another number of records, and errors of reading."""
        batch = reader.batch(run.batch_base, run.batch_crc)
        if run.pure and worth_splicing(batch, run.records):
            yield from self.whole(of, batch, run.records)
            return
        first = run.at - run.batch_base
        last = first + run.end - run.first - 1
        taken = yield from self.copy(of, batch, first, last, divisible=divisible)
        check(taken == run.records, f"a run of {run.records} records at {run.first} has {taken}")

    def copy(
        self, of: int, batch: RawBatch, first: int, last: int, *, divisible: bool = True
    ) -> Generator[Made, None, int]:
        """Add records of a batch, by offset deltas. Returns their number.

        Records that make the batch too big go into a batch of their own, or if ``divisible`` into several.
        """
        mark = self._builder.mark()
        taken = self._builder.add_from_batch(batch, first, last)
        if self._builder.size_estimate > self._limit:
            self._builder.rewind(mark)
            if mark.records:
                yield from self.flush()
                return (yield from self.copy(of, batch, first, last, divisible=divisible))
            if divisible and first < last:
                middle = (first + last) // 2
                taken = yield from self.copy(of, batch, first, middle)
                yield from self.flush()
                return taken + (yield from self.copy(of, batch, middle + 1, last))
            self._builder = _as_it_came(read_header(batch.data).compression)
            taken = self._builder.add_from_batch(batch, first, last)
        self._count(of, taken)
        if self._builder.size_estimate >= self._full:
            yield from self.flush()
        return taken

    def rows(self, of: int, rows: Sequence[Row], codec: int | None = None) -> Iterator[Made]:
        """Add rows. ``codec``: compresses a row that is too big by itself."""
        rest, at = iter(rows), 0
        while at < len(rows):
            mark = self._builder.mark()
            added = self._builder.add_all(rest, self._full)
            too_big = self._builder.size_estimate > self._limit
            cut = too_big and self._builder.count > 1
            if cut:
                # The last row did not fit: it begins the next batch.
                self._builder.rewind(mark)
                added = self._builder.add_all(rows[at : at + added - 1])
            elif too_big and codec is not None:
                self._builder = _as_it_came(codec)
                self._builder.add(*rows[at])
            self._count(of, added)
            at += added
            if cut:
                rest = iter(rows[at:])
            if cut or self._builder.size_estimate >= self._full:
                yield from self.flush()

    def placed(
        self, of: int, copy: Callable[[Any, Any], int], starts: Any, at: int, end: int, codec: int
    ) -> Iterator[Made]:
        """Let compiled code add some of a batch's records, from record number ``at`` to before ``end``.

        ``copy``: as for `BatchBuilder.add_encoded`. ``starts``: an array of the records' starts. ``codec``:
        compresses a record that is too big by itself. Raises `CorruptBatch` if the records can't be split.
        """
        while True:
            left = int(starts[end] - starts[at]) + (end - at) * COPY_GROWTH
            at = self._encoded(of, copy, at, min(left, self._full - self._builder.size_estimate))
            if at == end:
                return
            if self._builder.count:
                yield from self.flush()
                continue
            alone = int(starts[at + 1] - starts[at]) + COPY_GROWTH
            if HEADER_SIZE + alone > self._limit:
                self._builder = _as_it_came(codec)
            at = self._encoded(of, copy, at, alone)
            yield from self.flush()

    def events(self, parts: Sequence[tuple[int, EventPart]], copies: EventCopies) -> Iterator[Made]:
        """Add the events of commits, each part with the caller's number for it."""
        copy, ends = copies.copy_of([part for _, part in parts])
        at = 0
        while at < ends[-1]:
            begin, used = at, self._builder.size_estimate
            some = partial(copy, self._full - used, self._limit - used)
            at = self._builder.add_encoded(some, at, copies.out)
            first = 0
            for (of, _), end in zip(parts, ends, strict=True):
                self._count(of, max(0, min(end, at) - max(first, begin)))
                first = end
            if at < ends[-1] or self._builder.size_estimate >= self._full:
                yield from self.flush()

    def _encoded(self, of: int, copy: Callable[[Any, Any], int], at: int, room: int) -> int:
        import numpy as np

        before = self._builder.count
        at = self._builder.add_encoded(copy, at, np.empty(max(room, 0), dtype=np.uint8))
        self._count(of, self._builder.count - before)
        return at

    def _count(self, of: int, records: int) -> None:
        if not records:
            return
        if self._parts and self._parts[-1][0] == of:
            records += self._parts.pop()[1]
        self._parts.append((of, records))


def _as_it_came(codec: int) -> BatchBuilder:
    """A builder for a record that is too big by itself, unless it is compressed by the codec with which it came."""
    return BatchBuilder(NAMES[codec])
