"""A partition's part of one fetch, decoded block by block when it is about to be returned."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anabranch.batches.records import Record, decode_records
from anabranch.core.limits import READ
from anabranch.errors import NotInstalled
from anabranch.extras import need
from anabranch.ports import CorruptBatch, RawBatch, TopicPartition
from anabranch.reading.committed_log import unreadable
from anabranch.reading.decoded import Block, ColumnsBlock, RecordsBlock

if TYPE_CHECKING:
    from anabranch.batches.columns_read import ColumnsBuilder

log = logging.getLogger("anabranch.client")

_BLOCK_ROWS = 4096  # few enough to stay in a CPU core's cache
_BLOCK_BYTES = 1 << 20
_BLOCK_RECORDS = 256
# Up to this many records of a fetch are decoded one by one, and of a process before it loads the compiled code.
_FEW = 32
_FEW_AT_ALL = 5000
_NO_END = (1 << 63) - 1


class Portion:
    """Committed records of one partition, consumed in the order of their offsets. One thread at a time."""

    def __init__(self, place: TopicPartition, blocks: Iterator[Block]) -> None:
        """``blocks``: all have records."""
        self.place = place
        self.end = _NO_END  # records from this offset on are skipped
        self._blocks = blocks
        self._block: Block | None = None
        self._at = 0

    def first(self) -> int | None:
        """The offset of the next record; None at the end.

        Raises: MalformedRecord, BatchTooLarge, again at each call.
        """
        if self._block is None:
            self._block, self._at = next(self._blocks, None), 0
            if self._block is None:
                return None
        offset = self._block.offsets[self._at]
        return offset if offset < self.end else None

    def next_of_block(self) -> tuple[Block, int]:
        """The block of the next record, and its place there. Only after `first` returned an offset."""
        if self._block is None:
            raise ValueError("ask for the first offset first")
        return self._block, self._at

    def advance(self, at: int) -> None:
        """Make the record at this place of the block the next one, or the first of the following block."""
        self._at = at
        if self._block is not None and at == len(self._block.offsets):
            self._block = None


def portion_of_batches(
    place: TopicPartition, batches: Sequence[RawBatch], first: int, limit: int = READ
) -> Portion:
    """A portion of the batches' records from offset ``first`` on.

    ``limit``: the most bytes that a batch may unpack to.
    """
    return Portion(place, _BatchBlocks(place, batches, first, limit))


class _Loading:
    """Loads the compiled code in the background when it is worth it; no reader waits for it.

    Compiling may take many seconds. The end of the process waits for it: otherwise the compiler's state would be
    corrupt, and the next process would find nothing in the cache.
    """

    def __init__(self) -> None:
        self.records = 0  # decoded without compiled code
        self._lock = threading.Lock()
        self._begun = False
        # A child that is forked in mid-import could never import it; Windows has no forks.
        if not hasattr(os, "register_at_fork"):
            return
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )

    def worth_it(self, records: int) -> bool:
        """Whether to decode this number of records with compiled code."""
        # Looked up in `sys.modules`, not imported, which would load numpy; another thread may be importing it.
        walks = sys.modules.get("anabranch.batches.columns_read")
        is_warm = getattr(walks, "is_warm", None)
        if is_warm is not None and is_warm():
            return records > _FEW
        self.records += records
        if self.records > _FEW_AT_ALL and not self._begun:
            self._begun = True
            threading.Thread(target=self._load, name="compile").start()
        return False

    def _load(self) -> None:
        with self._lock:
            try:
                need("numpy", "numba")
                from anabranch.batches import columns_read

                columns_read.warm()
            except NotInstalled as error:
                log.info("reading without compiled code, slower: %s", error)
            except Exception as error:  # noqa: BLE001 - reading works without it
                log.warning("reading without compiled code, slower: %r", error)


_loading = _Loading()


class _BatchBlocks(Iterator[Block]):
    """Blocks of batches. A batch that fails once fails at each call: nothing is skipped."""

    def __init__(
        self, place: TopicPartition, batches: Sequence[RawBatch], first: int, limit: int
    ) -> None:
        self._place = place
        self._limit = limit
        self._batches = deque(batches)
        self._first = first
        self._builder: ColumnsBuilder | None = None
        if _loading.worth_it(sum(b.next_offset - b.base_offset for b in self._batches)):
            import numpy as np

            from anabranch.batches.columns_read import ColumnsBuilder

            self._wanted = np.array([[first], [_NO_END]], dtype=np.int64)
            self._builder = ColumnsBuilder(_BLOCK_ROWS, _BLOCK_BYTES)

    def __next__(self) -> Block:
        try:
            builder = self._builder
            block = self._next_records() if builder is None else self._next_columns(builder)
        except CorruptBatch as error:
            raise unreadable(self._place, self._batches[0], error, self._limit) from error
        if block is None:
            raise StopIteration
        return block

    def _next_records(self) -> Block | None:
        records: list[Record] = []
        while self._batches and len(records) < _BLOCK_RECORDS:
            try:
                decoded = decode_records(self._batches[0].data, limit=self._limit)
            except CorruptBatch:
                if records:
                    break  # what came before is good
                raise
            self._batches.popleft()
            records += [record for record in decoded if record.offset >= self._first]
        return RecordsBlock(records) if records else None

    def _next_columns(self, builder: ColumnsBuilder) -> Block | None:
        columns = None
        while columns is None and self._batches:
            try:
                columns = builder.add(self._batches[0], self._wanted, limit=self._limit)
            except CorruptBatch:
                columns = builder.finish()  # what came before is good
                if columns is None:
                    raise
            else:
                self._batches.popleft()
        if columns is None:
            columns = builder.finish()
        return None if columns is None else ColumnsBlock(columns)
