"""Columns of events into record batches, without a Python object for each row.

Compiled code walks the rows once: 13 million rows/s of 100 bytes on one core. The walk places each row by its key,
encodes its record in the batch of its journal partition, and sums the checksums of receipts. numba takes half a
second to load, so a few rows are written faster as events (`worth_it`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from anabranch.batches.compression import NONE, compress
from anabranch.batches.format import HEADER_SIZE, Packed
from anabranch.batches.records import put_varint
from anabranch.extras import has
from anabranch.protocol.ids import TXN_HEADER
from anabranch.protocol.limits import ROW_KEY

if TYPE_CHECKING:
    from types import ModuleType

Numbers: TypeAlias = "npt.NDArray[np.int64]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Headers: TypeAlias = "list[tuple[str, bytes | None]]"

# Up to this many rows, plain Python is faster than loading numba.
_FEW = 500
# The limit of all batches together that an encoder is filling, unless single rows are bigger.
_ROOM_BYTES = 64 << 20
_LEAST_SLOT_BYTES = 4 << 10
_HEADER_FRAMING_BYTES = 6  # counted by the size limit for a header, in addition to name and value

_NO_NUMBERS: Numbers = np.empty(0, dtype=np.int64)
_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)

_kernel: ModuleType | None = None


def warm() -> None:
    """Load the compiled code, which is compiled once on a machine (0.5 s; 4 s the first time)."""
    global _kernel
    if _kernel is None:
        from anabranch.batches.kernels import columns_write as columns_kernel

        _kernel = columns_kernel


def worth_it(rows: int) -> bool:
    """Whether compiled code is faster for this number of rows, including the time to load it."""
    # The kernel reads numbers in memory order.
    return sys.byteorder == "little" and (_kernel is not None or (rows > _FEW and has("numba")))


class BytesColumn(NamedTuple):
    """Bytes of each row: their start in ``data``, and their size; -1 is null."""

    starts: Numbers = _NO_NUMBERS
    sizes: Numbers = _NO_NUMBERS
    data: Bytes = _NO_BYTES

    def at(self, row: int) -> bytes | None:
        size = int(self.sizes[row])
        if size < 0:
            return None
        start = int(self.starts[row])
        return self.data[start : start + size].tobytes()


_NO_COLUMN = BytesColumn()


def bytes_column(values: Sequence[bytes | None]) -> BytesColumn:
    """A column of these values."""
    try:
        sizes = np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]
        data = b"".join(values)  # type: ignore[arg-type]
    except TypeError:
        sizes = np.array([-1 if value is None else len(value) for value in values], np.int64)
        data = b"".join(value for value in values if value is not None)
    lengths = np.maximum(sizes, 0)
    return BytesColumn(np.cumsum(lengths) - lengths, sizes, np.frombuffer(data, dtype=np.uint8))


class HeadersColumn(NamedTuple):
    """Headers of each row: their start in ``names`` (UTF-8) and ``values``, and their number."""

    starts: Numbers = _NO_NUMBERS
    counts: Numbers = _NO_NUMBERS
    names: BytesColumn = _NO_COLUMN
    values: BytesColumn = _NO_COLUMN


_NO_HEADERS = HeadersColumn()


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events in columns, checked: fields are within their data, no header is null or has a reserved name.

    Without sizes all ``keys`` are null; without counts no event has ``headers``. ``timestamps``: Unix milliseconds;
    0 means now, and an empty column means now for all rows.
    """

    values: BytesColumn
    keys: BytesColumn = _NO_COLUMN
    headers: HeadersColumn = _NO_HEADERS
    timestamps: Numbers = field(default_factory=lambda: _NO_NUMBERS)

    @property
    def rows(self) -> int:
        return len(self.values.sizes)

    @property
    def has_row_keys(self) -> bool:
        """Whether all events have a key that a table's row can have; False without events."""
        keys = self.keys.sizes
        return bool(len(keys)) and 0 < int(keys.min()) <= int(keys.max()) <= ROW_KEY.value

    def with_header(self, name: str, value: bytes | None) -> EventColumns:
        """The same events with one more header; unchanged if events have headers of their own."""
        if len(self.headers.counts):
            return self
        zeros, ones = np.zeros(self.rows, dtype=np.int64), np.ones(self.rows, dtype=np.int64)
        names, values = bytes_column([name.encode()]), bytes_column([value])
        return replace(self, headers=HeadersColumn(zeros, ones, names, values))

    def sizes(self) -> Numbers:
        """The bytes of each event's key, value and headers, as the size limit counts them."""
        total = np.maximum(self.values.sizes, 0)
        if len(self.keys.sizes):
            total = total + np.maximum(self.keys.sizes, 0)
        starts, counts, names, values = self.headers
        if len(counts):
            one = np.maximum(names.sizes, 0) + np.maximum(values.sizes, 0) + _HEADER_FRAMING_BYTES
            sums = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(one)))
            total = total + sums[starts + counts] - sums[starts]
        return total

    def events(
        self,
    ) -> Iterator[tuple[bytes | None, bytes | None, Headers | None, int | None]]:
        """Each event by itself: value, key, headers, timestamp (None: now). This is slow."""
        keyed, timed = len(self.keys.sizes) > 0, len(self.timestamps) > 0
        headed = len(self.headers.counts) > 0
        for row in range(self.rows):
            yield (
                self.values.at(row),
                self.keys.at(row) if keyed else None,
                self._headers_at(row) if headed else None,
                int(self.timestamps[row]) or None if timed else None,
            )

    def _headers_at(self, row: int) -> Headers:
        starts, counts, names, values = self.headers
        first = int(starts[row])
        return [
            ((names.at(i) or b"").decode(), values.at(i))
            for i in range(first, first + int(counts[row]))
        ]


class Placing(NamedTuple):
    """The placing of a writer's events: the beginnings of key ranges, rising from 0, and the partition of each.

    ``txn``: the value of the ab.txn header. Rows without a key go to one range for about ``sticky_bytes``, counting
    ``overhead`` bytes for each, then to the next range; ``first_range`` is the first one.
    """

    lows: Sequence[int]
    partitions: Sequence[int]
    txn: bytes
    first_range: int
    sticky_bytes: int
    overhead: int


class Counted(NamedTuple):
    """The number of rows written to a journal partition, and the sum of their checksums."""

    partition: int
    rows: int
    crc_sum: int


class ColumnEncoder:
    """Fills one batch for each journal partition, over any number of calls. One thread at a time."""

    def __init__(self, placing: Placing, *, batch_bytes: int, codec: int) -> None:
        """``batch_bytes``: the limit of a batch before compression; a bigger row gets a batch of its own."""
        warm()
        partitions = sorted(set(placing.partitions))
        slot_of = {partition: slot for slot, partition in enumerate(partitions)}
        self._partitions = partitions
        self._codec = codec
        self._placing = placing
        self._lows = np.array(placing.lows, dtype=np.int64)
        self._slots_of = np.array([slot_of[p] for p in placing.partitions], dtype=np.int64)
        self._constant = np.frombuffer(_encoded_header(placing.txn), dtype=np.uint8)
        share = max(_ROOM_BYTES // len(partitions), _LEAST_SLOT_BYTES)
        self._slot_bytes = min(batch_bytes - HEADER_SIZE, share)
        self._room = np.empty(self._slot_bytes * len(partitions), dtype=np.uint8)
        self._slots = np.zeros((len(partitions), _kernel_now().SLOT_SIZE), dtype=np.int64)
        self._walk = np.array((0, placing.first_range, placing.sticky_bytes, 0), dtype=np.int64)
        self._lent = -1  # the slot that uses the room for big rows; -1: none does
        for slot in range(len(partitions)):
            self._empty(slot)

    def encode(self, columns: EventColumns, now_ms: int) -> Iterator[tuple[int, Packed]]:
        """Encode all rows; yields full batches, each with its partition. Consume all of them.

        ``now_ms``: Unix milliseconds, for rows without a timestamp.
        """
        kernel, place, walk = _kernel_now(), self._placing, self._walk
        headers = columns.headers
        walk[kernel.ROW] = 0
        while True:
            full = kernel.lay(
                *columns.keys,
                *columns.values,
                columns.timestamps,
                now_ms,
                headers.starts,
                headers.counts,
                *headers.names,
                *headers.values,
                self._constant,
                self._lows,
                self._slots_of,
                place.sticky_bytes,
                place.overhead,
                self._room,
                self._slots,
                walk,
            )
            if full == kernel.DONE:
                return
            if self._slots[full, kernel.COUNT]:
                yield self._seal(full)
            else:
                if self._lent >= 0:
                    yield self._seal(self._lent)
                self._lend(full, int(walk[kernel.NEEDED]))

    def rest(self) -> Iterator[tuple[int, Packed]]:
        """The batches that are not full yet. Consume all of them."""
        kernel = _kernel_now()
        for slot in range(len(self._partitions)):
            if self._slots[slot, kernel.COUNT]:
                yield self._seal(slot)

    def counted(self) -> list[Counted]:
        """The counts of rows encoded since the last call."""
        kernel = _kernel_now()
        sums = self._slots[:, [kernel.ROWS, kernel.CRC_SUM]].tolist()
        self._slots[:, [kernel.ROWS, kernel.CRC_SUM]] = 0
        return [
            Counted(partition, rows, crc_sum)
            for partition, (rows, crc_sum) in zip(self._partitions, sums, strict=True)
            if rows
        ]

    def _seal(self, slot: int) -> tuple[int, Packed]:
        base, at, _, rows, base_timestamp, max_timestamp, _, _ = self._slots[slot].tolist()
        records = self._room[base:at].data
        codec, packed = self._codec, compress(self._codec, records)
        if len(packed) > len(records):
            # Compression must not make a batch bigger than its limit.
            codec, packed = NONE, bytes(records)
        self._empty(slot)
        return self._partitions[slot], Packed(packed, codec, rows, base_timestamp, max_timestamp)

    def _empty(self, slot: int) -> None:
        start = slot * self._slot_bytes
        self._give(slot, start, start + self._slot_bytes)
        if slot == self._lent:
            self._lent = -1

    def _give(self, slot: int, start: int, stop: int) -> None:
        kernel = _kernel_now()
        row = self._slots[slot]
        row[kernel.BASE] = row[kernel.AT] = start
        row[kernel.STOP] = stop
        row[kernel.COUNT] = 0

    def _lend(self, slot: int, size: int) -> None:
        """Give a slot room for one record that is bigger than its own."""
        start = self._slot_bytes * len(self._partitions)
        if len(self._room) < start + size:
            room = np.empty(start + size, dtype=np.uint8)
            room[:start] = self._room[:start]
            self._room = room
        self._give(slot, start, start + size)
        self._lent = slot


def _kernel_now() -> Any:
    return _kernel


def _encoded_header(txn: bytes) -> bytes:
    out = bytearray()
    for part in (TXN_HEADER.encode(), txn):
        put_varint(out, len(part))
        out += part
    return bytes(out)
