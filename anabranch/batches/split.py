"""Splitting record batches by key: each record goes to the segment of its key, in the order of the records.

Only plain writes need this, because any producer writes them to any journal partition. A batch with records of one
segment is copied as it is, if a copy is worth it (`anabranch.batches.packer`); other batches are split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.batches.compression import NAMES, decompress
from anabranch.batches.format import HEADER_SIZE, BatchHeader, Buffer, read_header
from anabranch.batches.framing import kernels_for
from anabranch.batches.packer import DEFAULT_LIMIT, Made, Packer, worth_packing, worth_splicing
from anabranch.batches.records import Record, decode_body
from anabranch.core.journal_runs import StoredRun
from anabranch.errors import check
from anabranch.ports import CorruptBatch, RawBatch
from anabranch.protocol.partitioner import Layout
from anabranch.protocol.schemas.records import SegmentRange

if TYPE_CHECKING:
    from types import ModuleType


class Split:
    """Batches of records for each segment of a layout, made from runs of journal batches.

    Everything stays in memory: the caller bounds what it adds.
    """

    def __init__(self, segments: Sequence[SegmentRange], limit: int = DEFAULT_LIMIT) -> None:
        """``limit``: the most bytes of a batch that is put together (the topic's max.message.bytes)."""
        self._segments = segments
        self._layout = Layout(segments)
        self._by_partition = {s.partition: i for i, s in enumerate(segments)}
        self._outs = [_Out(limit) for _ in segments]
        self._last: _Compiled | _Plain | None = None

    def keyless(self, partition: int) -> int:
        """The index of the segment for a journal partition's keyless records: the partition's segment, else 0."""
        return self._by_partition.get(partition, 0)

    def add(self, batch: RawBatch, run: StoredRun, keyless: int) -> None:
        """Add a run of a batch. ``keyless``: the index of the segment for records without a key.

        Raises: CorruptBatch (the batch can't be read), InvariantViolation (it has other records than the run).
        """
        # The runs of one batch are added one after the other.
        if self._last is None or self._last.batch.data is not batch.data:
            self._last = self._placed(batch, keyless)
        placed = self._last
        begin, end = placed.numbers(run.first - batch.base_offset, run.end - batch.base_offset)
        check(
            end - begin == run.records,
            f"a run of {run.records} records at {run.first} has {end - begin}",
        )
        indexes = placed.segments(begin, end)
        if len(indexes) == 1 and run.pure and worth_splicing(batch, run.records, run.batch_size):
            out = self._outs[indexes[0]]
            out.take(out.packer.flush())
            out.batches.append(batch)
            return
        for index in indexes:
            out = self._outs[index]
            out.take(out.packer.pack(placed.codec))
            out.take(placed.copy(out.packer, index, begin, end))

    def done(self) -> list[list[RawBatch]]:
        """The batches of each segment, in the order of the layout; empty for segments without records."""
        for out in self._outs:
            out.take(out.packer.flush())
        return [out.batches for out in self._outs]

    def _placed(self, batch: RawBatch, keyless: int) -> _Compiled | _Plain:
        header = read_header(batch.data)
        body = decompress(header.compression, memoryview(batch.data)[HEADER_SIZE:])
        kernels = kernels_for(header.record_count)
        if kernels is not None:
            return _compiled(kernels.copy, batch, header, body, self._segments, keyless)
        records = decode_body(body, header)
        find = self._layout.find
        places = [keyless if r.key is None else find(r.key) for r in records]
        deltas = [r.offset - header.base_offset for r in records]
        return _Plain(batch, header, _codec(batch, header, len(body)), records, deltas, places)


class _Out:
    """The batches of one segment."""

    def __init__(self, limit: int) -> None:
        self.batches: list[RawBatch] = []
        self.packer = Packer(limit)

    def take(self, made: Iterable[Made]) -> None:
        for data, ((_, records),) in made:
            self.batches.append(RawBatch(0, records, memoryview(data)))


class _Plain(NamedTuple):
    """A batch with the segment of each record (``places``), found in plain Python."""

    batch: RawBatch
    header: BatchHeader
    codec: str | None  # compresses its records again
    records: list[Record]
    deltas: list[int]
    places: list[int]

    def numbers(self, first: int, end: int) -> tuple[int, int]:
        """The numbers of the records with these offset deltas."""
        return bisect_left(self.deltas, first), bisect_left(self.deltas, end)

    def segments(self, begin: int, end: int) -> list[int]:
        """The indexes of the segments that records of these numbers go to."""
        return sorted(set(self.places[begin:end]))

    def copy(self, packer: Packer, index: int, begin: int, end: int) -> Iterator[Made]:
        """Put the records of a segment into the packer."""
        rows = [
            (record.key, record.value, record.headers, record.timestamp_ms)
            for record, place in zip(self.records[begin:end], self.places[begin:end], strict=True)
            if place == index
        ]
        return packer.rows(0, rows, self.header.compression)


class _Compiled(NamedTuple):
    """A batch with the segment of each record, in numpy arrays, found by compiled code.

    ``kernel``: the compiled functions. ``body``: the unpacked batch. ``starts``: where each record starts in it.
    """

    batch: RawBatch
    header: BatchHeader
    codec: str | None  # compresses its records again
    kernel: ModuleType
    body: Any
    starts: Any
    deltas: Any
    places: Any

    def numbers(self, first: int, end: int) -> tuple[int, int]:
        begin, stop = self.deltas.searchsorted((first, end)).tolist()
        return begin, stop

    def segments(self, begin: int, end: int) -> list[int]:
        import numpy as np

        found: list[int] = np.unique(self.places[begin:end]).tolist()
        return found

    def copy(self, packer: Packer, index: int, begin: int, end: int) -> Iterator[Made]:
        header = self.header

        def some(into: Any, state: Any) -> int:
            found: int = self.kernel.copy_placed(
                self.body,
                self.starts,
                self.places,
                index,
                end,
                header.base_timestamp,
                header.max_timestamp,
                header.is_log_append_time,
                into,
                state,
            )
            return found

        return packer.placed(0, some, self.starts, begin, end, header.compression)


def _compiled(
    kernel: ModuleType,
    batch: RawBatch,
    header: BatchHeader,
    body: Buffer,
    segments: Sequence[SegmentRange],
    keyless: int,
) -> _Compiled:
    import numpy as np

    count = header.record_count
    bytes_in = np.frombuffer(body, dtype=np.uint8)
    order = sorted(range(len(segments)), key=lambda i: segments[i].low)
    lows = np.array([segments[i].low for i in order], dtype=np.int64)
    starts = np.empty(count + 1, dtype=np.int64)
    deltas = np.empty(count, dtype=np.int64)
    places = np.empty(count, dtype=np.int64)
    result = kernel.place(
        bytes_in, count, lows, np.array(order, dtype=np.int64), keyless, starts, deltas, places
    )
    if result != 0:
        raise CorruptBatch(f"the batch at offset {header.base_offset} can't be split")
    codec = _codec(batch, header, len(bytes_in))
    return _Compiled(batch, header, codec, kernel, bytes_in, starts, deltas, places)


def _codec(batch: RawBatch, header: BatchHeader, unpacked: int) -> str | None:
    """The codec for compressing a batch's records again (its own codec, which the broker accepts), or None."""
    return NAMES[header.compression] if worth_packing(batch, unpacked) else None
