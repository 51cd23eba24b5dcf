"""Fetched records of a partition, decoded block by block just before the records are returned as events.

A `Portion` is a partition's part of one fetch. A block has the offsets of its records, and returns the fields of
any consecutive ones: `ColumnsBlock` of records in columns, `RecordsBlock` of records that were decoded one by one.
Events are made without Python code for each record.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, repeat, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from anabranch.batches.records import Record, decode_records, header_name
from anabranch.errors import NotInstalled
from anabranch.extras import need
from anabranch.ports import CorruptBatch, RawBatch, TopicPartition
from anabranch.protocol.ids import OP_HEADER, TXN_HEADER, TXN_ID_SIZE
from anabranch.protocol.limits import READ
from anabranch.reading.committed_log import unreadable
from anabranch.types import Event
from anabranch.values import Decode

if TYPE_CHECKING:
    from anabranch.batches.columns_read import Binary, Columns, ColumnsBuilder, Longs

# Records of plain topics may have other headers with this prefix.
_OURS = (TXN_HEADER, OP_HEADER)
_Headers = list[tuple[str, bytes | None]]


class Rows(NamedTuple):
    """The fields of consecutive records; headers without anabranch's own, timestamps in Unix milliseconds."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Iterable[_Headers]  # at least as many as records
    timestamps: Sequence[int]


class Block(Protocol):
    """Records of one partition, by their place in the block."""

    @property
    def offsets(self) -> list[int]:
        """The offsets of the records, rising."""

    def rows(self, low: int, high: int) -> Rows:
        """The records from place ``low`` up to ``high`` (not included)."""

    def keys(self, low: int, high: int) -> Sequence[bytes | None]:
        """Only the keys."""

    def sizes(self, low: int, high: int) -> Longs:
        """The bytes of key and value of each record."""

    def timestamps(self, low: int, high: int) -> list[int]:
        """The timestamps of the records, in Unix milliseconds."""

    def txn_ids(self, low: int, high: int, default: bytes | None) -> Iterable[bytes | None]:
        """The transaction ids of the records; ``default`` for a record without one."""

    def of_txn(self, low: int, high: int, txn_id: bytes | None) -> int:
        """The place up to which all records name this transaction (None: no transaction)."""


class Stretch(NamedTuple):
    """A number of consecutive records of one commit."""

    length: int
    txn_id: bytes | None
    commit_timestamp: int
    segment_id: int


def events_of(
    stream: str,
    partition: int,
    block: Block,
    low: int,
    stretches: Sequence[Stretch],
    offsets: Iterator[int],
    *,
    key: Decode = None,
    value: Decode = None,
    rows: Rows | None = None,
) -> Iterator[Event]:
    """The events from place ``low`` on, as many as the stretches have together.

    ``key``, ``value``: decode keys and values. None: they stay bytes. ``rows``: of these events, if they were read.
    Each event is made, and its offset taken from ``offsets``, on demand: many events at once would keep the garbage
    collector busy, which costs more than everything else.
    """
    high = low + sum(stretch.length for stretch in stretches)
    keys, values, headers, timestamps = rows or block.rows(low, high)
    commit_timestamps: Iterable[int]
    segment_ids: Iterable[int]
    if len(stretches) == 1:
        _, txn_id, commit_timestamp, segment_id = stretches[0]
        txn_ids = block.txn_ids(low, high, txn_id)
        commit_timestamps, segment_ids = repeat(commit_timestamp), repeat(segment_id)
    else:
        found = []
        at = low
        for stretch in stretches:
            found.append(block.txn_ids(at, at + stretch.length, stretch.txn_id))
            at += stretch.length
        txn_ids = chain.from_iterable(found)
        commit_timestamps = chain.from_iterable(
            repeat(s.commit_timestamp, s.length) for s in stretches
        )
        segment_ids = chain.from_iterable(repeat(s.segment_id, s.length) for s in stretches)
    # No Python code runs for each event: a named tuple's own `_make` would cost as much as all of this.
    fields = zip(
        repeat(stream),
        keys if key is None else _decoded(keys, key),
        values if value is None else _decoded(values, value),
        headers,
        timestamps,
        txn_ids,
        commit_timestamps,
        segment_ids,
        repeat(partition),
        offsets,
        strict=False,  # iterators of constant fields have no end
    )
    return map(tuple.__new__, repeat(Event), fields)


def _decoded(data: Sequence[bytes | None], decode: Callable[[bytes], Any]) -> Iterator[Any]:
    if all(data):
        return map(decode, data)  # type: ignore[arg-type] # there is no None
    return (None if each is None else decode(each) for each in data)


class Run(NamedTuple):
    """Consecutive records from place ``low`` of a block on: all of one commit."""

    block: Block
    partition: int
    low: int
    stretch: Stretch

    @property
    def offsets(self) -> list[int]:
        return self.block.offsets[self.low : self.low + self.stretch.length]

    def events(self, stream: str) -> Iterator[Event]:
        offsets = iter(self.offsets)
        return events_of(stream, self.partition, self.block, self.low, [self.stretch], offsets)

    def decoded(
        self, stream: str, key: Decode, value: Decode
    ) -> Iterator[tuple[Event, bytes | None, bytes | None]]:
        """The events, decoded, with their undecoded keys and values. ``key``, ``value``: as of `events_of`."""
        offsets, low = iter(self.offsets), self.low
        rows = self.block.rows(low, low + self.stretch.length)
        events = events_of(
            stream, self.partition, self.block, low, [self.stretch], offsets,
            key=key, value=value, rows=rows,
        )  # fmt: skip
        return zip(events, rows.keys, rows.values, strict=True)


class RecordsBlock:
    """At least one record, decoded one by one."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.offsets = [record.offset for record in records]
        self._records = records
        split = [split_headers(record.headers) for record in records]
        self._headers = [headers for headers, _ in split]
        self._txn_ids = [txn_id for _, txn_id in split]

    def rows(self, low: int, high: int) -> Rows:
        some = self._records[low:high]
        return Rows(
            [record.key for record in some],
            [record.value for record in some],
            self._headers[low:high],
            self.timestamps(low, high),
        )

    def timestamps(self, low: int, high: int) -> list[int]:
        return [record.timestamp_ms for record in self._records[low:high]]

    def keys(self, low: int, high: int) -> Sequence[bytes | None]:
        return [record.key for record in self._records[low:high]]

    def sizes(self, low: int, high: int) -> Longs:
        import numpy as np

        some = self._records[low:high]
        return np.array([len(r.key or b"") + len(r.value or b"") for r in some], dtype=np.int64)

    def txn_ids(self, low: int, high: int, default: bytes | None) -> Iterable[bytes | None]:
        return [txn_id or default for txn_id in self._txn_ids[low:high]]

    def of_txn(self, low: int, high: int, txn_id: bytes | None) -> int:
        return _same(self._txn_ids[low:high], low, txn_id)


class ColumnsBlock:
    """At least one record, in columns."""

    def __init__(self, columns: Columns) -> None:
        self.offsets: list[int] = columns.offsets.tolist()
        self.columns = columns

    def rows(self, low: int, high: int) -> Rows:
        columns = self.columns
        return Rows(
            _cut(columns.keys, low, high),
            _cut(columns.values, low, high),
            self._headers(low, high),
            self.timestamps(low, high),
        )

    def timestamps(self, low: int, high: int) -> list[int]:
        found: list[int] = self.columns.timestamps[low:high].tolist()
        return found

    def keys(self, low: int, high: int) -> Sequence[bytes | None]:
        return _cut(self.columns.keys, low, high)

    def sizes(self, low: int, high: int) -> Longs:
        return _sizes(self.columns.keys, low, high) + _sizes(self.columns.values, low, high)

    def _headers(self, low: int, high: int) -> Iterable[_Headers]:
        columns = self.columns
        ends = columns.header_ends[low : high + 1]
        first, last = int(ends[0]), int(ends[-1])
        if first == last:
            return starmap(list, repeat(()))  # a new list each time
        # Each list is made together with its event, from the next pairs.
        names = map(header_name, _cut(columns.names, first, last))
        pairs = zip(names, _cut(columns.header_values, first, last), strict=True)
        counts = ends[1:] - ends[:-1]
        number = int(counts[0])
        if bool((counts == number).all()):
            return map(list, zip(*repeat(pairs, number), strict=True))
        return map(list, map(islice, repeat(pairs), counts.tolist()))

    def txn_ids(self, low: int, high: int, default: bytes | None) -> Iterable[bytes | None]:
        txns = self.columns.txns
        data = txns.data[low * TXN_ID_SIZE : high * TXN_ID_SIZE]
        # Usually all records name the same transaction.
        if default is not None and data.tobytes() == default * (high - low):
            return repeat(default, high - low)
        found: list[bytes] = data.view(f"V{TXN_ID_SIZE}").tolist()
        if txns.valid is None:
            return found
        valid = txns.valid[low:high].tolist()
        return [txn_id if named else default for txn_id, named in zip(found, valid, strict=True)]

    def of_txn(self, low: int, high: int, txn_id: bytes | None) -> int:
        valid = self.columns.txns.valid
        if txn_id is None and valid is not None and not valid[low:high].any():
            return high
        if txn_id is not None and isinstance(self.txn_ids(low, high, txn_id), repeat):
            return high
        return _same(list(self.txn_ids(low, high, None)), low, txn_id)


def _same(txn_ids: Sequence[bytes | None], low: int, wanted: bytes | None) -> int:
    count = next((i for i, txn_id in enumerate(txn_ids) if txn_id != wanted), len(txn_ids))
    return low + count


def _sizes(column: Binary, low: int, high: int) -> Longs:
    return (column.ends[low + 1 : high + 1] - column.ends[low:high]).astype("int64")


def _cut(column: Binary, low: int, high: int) -> list[bytes | None]:
    """Values of a column of bytes as objects; ``low`` < ``high``."""
    ends = column.ends[low : high + 1]
    first, last = int(ends[0]), int(ends[-1])
    count = high - low
    size, rest = divmod(last - first, count)
    data = column.data[first:last]
    found: list[bytes | None]
    if size and not rest and bool((ends[1:] - ends[:-1] == size).all()):
        # All values have one size: this takes a fifth of the time.
        found = data.view(f"V{size}").tolist()
    else:
        whole = data.tobytes()
        cuts = (ends - first).tolist()
        found = [whole[a:b] for a, b in pairwise(cuts)]
    if column.valid is not None:
        valid = column.valid[low:high]
        if not valid.all():
            there = valid.tolist()
            return [
                value if is_there else None for value, is_there in zip(found, there, strict=True)
            ]
    return found


def split_headers(
    headers: Sequence[tuple[str, bytes | None]] | None,
) -> tuple[_Headers, bytes | None]:
    """The headers without ab.txn and ab.op, and the transaction id of the ab.txn header, or None."""
    if not headers:
        return [], None
    if len(headers) > 1:
        rest = [pair for pair in headers if pair[0] not in _OURS]
        ours = [
            v for n, v in headers if n == TXN_HEADER and v is not None and len(v) >= TXN_ID_SIZE
        ]
        return rest, ours[-1][:TXN_ID_SIZE] if ours else None
    name, value = headers[0]
    if name == TXN_HEADER and value is not None and len(value) >= TXN_ID_SIZE:
        return [], value[:TXN_ID_SIZE]
    return [] if name in _OURS else list(headers), None


log = logging.getLogger("anabranch.client")

_BLOCK_ROWS = 4096  # few enough to stay in a CPU core's cache
_BLOCK_BYTES = 1 << 20
_BLOCK_RECORDS = 256
_FEW = 32  # up to this many records of a fetch are decoded one by one
_FEW_AT_ALL = 5000  # records that a process decodes one by one before it loads the compiled code
_NO_END = (1 << 63) - 1


class Portion:
    """Committed records of one partition, consumed in the order of their offsets. One thread at a time."""

    def __init__(self, place: TopicPartition, blocks: Iterator[Block]) -> None:
        """``blocks``: none is empty."""
        self.place = place
        self.end = _NO_END  # records from this offset on are skipped
        self._blocks = blocks
        self._block: Block | None = None
        self._at = 0

    def first(self) -> int | None:
        """The offset of the next record; None at the end. Raises, at each call: MalformedRecord, BatchTooLarge."""
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
        """Make the record at this place of the block the next; at the block's end, the following block's first."""
        self._at = at
        if self._block is not None and at == len(self._block.offsets):
            self._block = None


def portion_of_batches(
    place: TopicPartition, batches: Sequence[RawBatch], first: int, limit: int = READ
) -> Portion:
    """The batches' records from offset ``first`` on. ``limit``: the most bytes that a batch may unpack to."""
    return Portion(place, _BatchBlocks(place, batches, first, limit))


class _Loading:
    """Loads the compiled code in the background when `worth_it` says so; no reader waits for the code.

    Compiling may take many seconds. The process waits for it before it ends. Otherwise the compiler's state could
    become corrupt, and the next process would find nothing in the cache.
    """

    def __init__(self) -> None:
        self.records = 0  # decoded without compiled code
        self._lock = threading.Lock()
        self._begun = False
        # A child that is forked during the import could never import it. Windows has no forks.
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
    """Makes blocks of batches. A batch that can't be decoded raises at each call: nothing is skipped."""

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
