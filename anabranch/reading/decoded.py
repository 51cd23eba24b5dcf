"""Decoded records of a partition, and their conversion to events without Python code for each record.

A block has the offsets of its records, and returns the fields of any consecutive ones. Callers see no difference
between blocks of columns and blocks of records that were decoded one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, repeat, starmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from anabranch.batches.records import Record, header_name
from anabranch.core.ids import OP_HEADER, TXN_HEADER, TXN_ID_SIZE
from anabranch.types import Event

if TYPE_CHECKING:
    from anabranch.batches.columns_read import Binary, Columns, Longs

_OURS = (TXN_HEADER, OP_HEADER)  # plain topics may have other names with this prefix
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
) -> Iterator[Event]:
    """The events from place ``low`` on, as many as the stretches have together.

    Each event is made on demand, and its offset taken from ``offsets`` then: making many at once would keep the
    garbage collector busy, which costs more than everything else.
    """
    high = low + sum(stretch.length for stretch in stretches)
    keys, values, headers, timestamps = block.rows(low, high)
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
    # Without any Python code for each: a named tuple's own `_make` costs as much as all of this.
    fields = zip(
        repeat(stream),
        keys,
        values,
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


class Run(NamedTuple):
    """Consecutive records from place ``low`` of a block on: all of one commit."""

    block: Block
    partition: int
    low: int
    stretch: Stretch

    @property
    def offsets(self) -> list[int]:
        """The offsets of the records."""
        return self.block.offsets[self.low : self.low + self.stretch.length]

    def events(self, stream: str) -> Iterator[Event]:
        """The records as events."""
        offsets = iter(self.offsets)
        return events_of(stream, self.partition, self.block, self.low, [self.stretch], offsets)


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
            [record.timestamp_ms for record in some],
        )

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
            columns.timestamps[low:high].tolist(),
        )

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
        # Each list is also made together with its event, from the next pairs.
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
        told = txns.valid[low:high].tolist()
        return [txn_id if is_told else default for txn_id, is_told in zip(found, told, strict=True)]

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
    """The caller's headers, and the transaction id of the ab.txn header. Headers ab.txn and ab.op are removed."""
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
