"""Record batches into columns: compiled code walks each body once, without a Python object for each record.

Columns are numpy arrays in Arrow's layout (`Columns`): pyarrow wraps them without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from anabranch.batches.compression import MAX_UNPACKED_BYTES, decompress_scratch
from anabranch.batches.format import HEADER_SIZE, read_header
from anabranch.batches.records import MIN_RECORD_BYTES
from anabranch.ports import CorruptBatch, RawBatch
from anabranch.protocol.ids import TXN_ID_SIZE

Longs: TypeAlias = NDArray[np.int64]
Ints: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = NDArray[np.uint8]

# A chunk is full at this many rows, or bytes; its last batch may exceed them.
MAX_ROWS = 32_768
MAX_BYTES = 8 << 20
_USUAL_HEADERS = MAX_ROWS  # initial room; a batch with more headers gets more

_kernel: ModuleType | None = None


def warm() -> None:
    """Load the compiled code (1 s; 10 s the first time on a machine). Call it where waiting is harmless."""
    _load()


def is_warm() -> bool:
    return _kernel is not None


def _load() -> ModuleType:
    global _kernel
    if _kernel is None:
        from anabranch.batches.kernels import columns_read as columns_read_kernel

        _kernel = columns_read_kernel
    return _kernel


@dataclass(frozen=True, slots=True)
class Binary:
    """A column of bytes in Arrow's layout: ``ends`` has one entry more than the values, the first one 0.

    ``valid``: 0 where the value is null; None without nulls.
    """

    ends: Ints
    data: Bytes
    valid: Bytes | None
    nulls: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Records in the order of their offsets.

    ``timestamps``: Unix milliseconds, the batch's where the broker sets them. ``txns``: the transaction id in the
    header ab.txn, null without that header. ``header_ends``: the end of each record's headers in ``names`` and
    ``header_values``; ab.txn and ab.op are omitted. ``ascii_names``: whether all names are ASCII. Names that are
    not ASCII may not be text.
    """

    offsets: Longs
    timestamps: Longs
    keys: Binary
    values: Binary
    txns: Binary
    header_ends: Ints
    names: Binary
    header_values: Binary
    ascii_names: bool

    def __len__(self) -> int:
        return len(self.offsets)


class ColumnsBuilder:
    """Collects batches into chunks of columns. One thread at a time."""

    def __init__(self, rows: int = MAX_ROWS, size: int = MAX_BYTES) -> None:
        """A chunk is full at ``rows`` rows, or ``size`` bytes of keys, values and headers."""
        self._rows = rows
        self._bytes = size
        self._kernel = _load()
        self._room: _Room | None = None

    def add(
        self, batch: RawBatch, wanted: Longs, *, limit: int = MAX_UNPACKED_BYTES
    ) -> Columns | None:
        """Add a batch's records at the ``wanted`` offsets. Returns a chunk when one is full.

        ``wanted``: rising, disjoint ranges of offsets: a row of firsts, and a row of ends (not included). Raises
        `CorruptBatch`, and adds no record, if the batch is malformed in any way, or unpacks to more than ``limit``
        bytes.
        """
        header = read_header(batch.data)
        if header.record_count == 0 and len(batch.data) == HEADER_SIZE:
            return None  # compaction left it empty
        body = decompress_scratch(
            header.compression, memoryview(batch.data)[HEADER_SIZE:], limit=limit
        )
        count, size = header.record_count, len(body)
        if not 0 <= count <= size // MIN_RECORD_BYTES:
            raise CorruptBatch(f"{count} records don't fit into {size} bytes")
        done = None
        if self._room is not None and not self._room.fits(count, size):
            done = self.finish()
        headers = _USUAL_HEADERS
        while True:
            if self._room is None:
                self._room = _Room(
                    max(2 * self._rows, count), max(2 * self._bytes, size), headers, self._kernel
                )
            room = self._room
            result = self._kernel.columns(
                np.frombuffer(body, dtype=np.uint8),
                count,
                header.last_offset_delta,
                header.base_offset,
                header.base_timestamp,
                header.max_timestamp,
                header.is_log_append_time,
                wanted,
                *room.columns,
            )
            if result == 0:
                break
            if result != self._kernel.NO_ROOM:
                raise CorruptBatch(
                    f"the records of the batch at offset {header.base_offset} are malformed"
                )
            done = done or self.finish()
            self._room = None
            headers = size // 2  # each header takes two bytes at least
        if room.rows >= self._rows or room.bytes >= self._bytes:
            # One batch never fills two chunks: a new chunk has room for more than this batch.
            return done or self.finish()
        return done

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left for `finish`."""
        return self._room is None or not self._room.rows

    def finish(self) -> Columns | None:
        """The last chunk; None if nothing is left."""
        room, self._room = self._room, None
        return room.take() if room is not None and room.rows else None


class _Room:
    """The columns of a chunk while it is filled."""

    def __init__(self, rows: int, size: int, headers: int, kernel: ModuleType) -> None:
        # Unwritten pages take no memory.
        self._kernel = kernel
        self._most_rows, self._most_bytes = rows, size
        self._longs = np.empty((2, rows), dtype=np.int64)
        self._ends = np.empty((3, rows + 1), dtype=np.int32)
        self._flags = np.empty((3, rows), dtype=np.uint8)
        self._keys = np.empty(size, dtype=np.uint8)
        self._values = np.empty(size, dtype=np.uint8)
        self._txns = np.empty(rows * TXN_ID_SIZE, dtype=np.uint8)
        self._header_ends = np.empty((2, headers + 1), dtype=np.int32)
        self._header_flags = np.empty(headers, dtype=np.uint8)
        self._names = np.empty(size, dtype=np.uint8)
        self._header_values = np.empty(size, dtype=np.uint8)
        self._state = np.zeros(kernel.STATE_SIZE, dtype=np.int64)
        self._ends[:, 0] = 0
        self._header_ends[:, 0] = 0
        self.columns = (
            self._longs,
            self._ends,
            self._flags,
            self._keys,
            self._values,
            self._txns,
            self._header_ends,
            self._header_flags,
            self._names,
            self._header_values,
            self._state,
        )

    @property
    def rows(self) -> int:
        return int(self._state[self._kernel.ROWS])

    @property
    def bytes(self) -> int:
        k, filled = self._kernel, self._state.tolist()
        sizes = filled[k.KEY_BYTES], filled[k.VALUE_BYTES], filled[k.NAME_BYTES]
        return int(sum(sizes)) + int(filled[k.HEADER_BYTES])

    def fits(self, count: int, size: int) -> bool:
        """Whether ``count`` records of ``size`` bytes in all have room."""
        return self.rows + count <= self._most_rows and self.bytes + size <= self._most_bytes

    def take(self) -> Columns:
        k = self._kernel
        state = [int(number) for number in self._state]
        rows, headers = state[k.ROWS], state[k.HEADERS]
        ends, flags = self._ends[:, : rows + 1], self._flags[:, :rows]
        header_ends, header_flags = (
            self._header_ends[:, : headers + 1],
            self._header_flags[:headers],
        )

        def binary(ends: Ints, data: Bytes, size: int, valid: Bytes, nulls: int) -> Binary:
            return Binary(ends, data[:size], valid if nulls else None, nulls)

        return Columns(
            offsets=self._longs[k.OFFSET, :rows],
            timestamps=self._longs[k.TIMESTAMP, :rows],
            keys=binary(
                ends[k.KEY], self._keys, state[k.KEY_BYTES], flags[k.KEY], state[k.NULL_KEYS]
            ),
            values=binary(
                ends[k.VALUE],
                self._values,
                state[k.VALUE_BYTES],
                flags[k.VALUE],
                state[k.NULL_VALUES],
            ),
            txns=binary(
                np.arange(0, (rows + 1) * TXN_ID_SIZE, TXN_ID_SIZE, dtype=np.int32),
                self._txns,
                rows * TXN_ID_SIZE,
                flags[k.TXN],
                state[k.NULL_TXNS],
            ),
            header_ends=ends[k.HEADER_LIST],
            names=Binary(header_ends[k.HEADER_NAME], self._names[: state[k.NAME_BYTES]], None, 0),
            header_values=binary(
                header_ends[k.HEADER_VALUE],
                self._header_values,
                state[k.HEADER_BYTES],
                header_flags,
                state[k.NULL_HEADERS],
            ),
            ascii_names=not state[k.NOT_ASCII],
        )
