"""Cutting record batches into runs: consecutive records of one kind and, for WRITEs, of one writer.

A batch is spliced only if each of its records was looked at, so compiled code walks the framing of all of them:
about 10 million records/s of 100 bytes. numba takes a second to load, so small batches are walked in plain Python
until a big one comes, or `warm` was called.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from anabranch.batches import framing_oracle
from anabranch.batches.compression import MAX_UNPACKED_BYTES, decompress_scratch
from anabranch.batches.format import HEADER_SIZE, BatchHeader, Buffer, read_header
from anabranch.core.ids import TXN_HEADER_SIZE
from anabranch.ports import CorruptBatch, RawBatch

if TYPE_CHECKING:
    from types import ModuleType

# Up to this many records, plain Python is quicker than loading numba.
_SMALL = 256
_FIRST_ROWS = 256
# A small batch can unpack to millions of records; a run each would cost the reader a GB and many seconds.
MAX_RUNS = 100_000


class Kind(IntEnum):
    """The kind of a run's records. From `MALFORMED` on they are bad: to be rejected and counted."""

    WRITE = 0  # one ab.txn header of 28 bytes
    PLAIN = 1  # no header that starts with ab.
    OP = 2  # one ab.op header
    MALFORMED = 3  # the batch can't be read, or has over `MAX_RUNS` runs; this run is for all
    DOUBLE_TXN = 4  # several ab.txn headers
    TXN_AND_OP = 5  # ab.txn and ab.op
    DOUBLE_OP = 6  # several ab.op headers
    TXN_LENGTH = 7  # an ab.txn header of other than 28 bytes
    RESERVED = 8  # another header that starts with ab.
    NO_TEXT = 9  # a header whose name is no UTF-8: librdkafka's readers in Python could not go on behind it


class Run(NamedTuple):
    """Consecutive records of one kind. Offset deltas count from the batch's base offset.

    A malformed batch has one run, over all its offsets, with the record count that the header claims and zeros.
    """

    kind: Kind
    first_delta: int
    last_delta: int
    records: int
    # Sum of the records' checksums (`anabranch.core.partitioner.record_checksum`) modulo 2^63.
    checksum: int
    # The ab.txn header's value (`anabranch.core.ids.unpack_txn_header`); empty unless WRITE.
    txn: bytes
    # Lowest and highest position (`anabranch.core.partitioner.position_of`) of the keys; -1: no key.
    low: int
    high: int
    # How many records have no key.
    keyless: int
    # Bytes of the records, unpacked.
    size: int
    # The run is the whole batch, of one writer, without gaps: it may be spliced.
    pure: bool
    # How many records have a key that no row of a table can have: null, empty or too long.
    unfit: int


class Kernels(NamedTuple):
    """The compiled walks: `anabranch.batches.kernels.scan` and `anabranch.batches.kernels.copy`."""

    scan: ModuleType
    copy: ModuleType


_kernels: Kernels | None = None


def warm(folder: Path | None = None) -> None:
    """Load the compiled code, which is compiled once on a machine (1 s; 15 s the first time).

    Call it where a wait does no harm: when a process is set up. ``folder``: one of the process's own, for compiled
    code that can't be kept with the package.
    """
    if folder is not None:
        from anabranch.batches.kernels import parts as kernel_parts

        kernel_parts.own_folders.append(folder)
    _load()


def _load() -> Kernels | None:
    global _kernels
    # The kernels read numbers as they lie in memory.
    if _kernels is None and sys.byteorder == "little":
        from anabranch.batches.kernels import copy, scan

        _kernels = Kernels(scan, copy)
    return _kernels


def kernels_for(records: int) -> Kernels | None:
    """The compiled code, if it is loaded or worth loading for this number of records."""
    if _kernels is not None or records <= _SMALL:
        return _kernels
    return _load()


def scan_batch(batch: RawBatch, *, limit: int = MAX_UNPACKED_BYTES) -> list[Run]:
    """The runs of a batch, in order; none if compaction left it empty.

    A fault in the batch's content becomes a bad run; nothing is raised.
    ``limit``: the bytes that it may unpack to.
    """
    try:
        header = read_header(batch.data)
    except CorruptBatch:
        deltas = batch.next_offset - batch.base_offset
        return [_malformed(max(deltas - 1, 0), max(deltas, 0))]
    if header.record_count == 0 and len(batch.data) == HEADER_SIZE:
        return []
    try:
        body = decompress_scratch(
            header.compression, memoryview(batch.data)[HEADER_SIZE:], limit=limit
        )
    except CorruptBatch:
        return [_malformed(header.last_offset_delta, header.record_count)]
    return scan_body(body, header)


def scan_body(body: Buffer, header: BatchHeader) -> list[Run]:
    """`scan_batch` of an unpacked body."""
    kernels = kernels_for(header.record_count)
    if kernels is None:
        rows = framing_oracle.scan(
            body, header.record_count, header.last_offset_delta, header.base_timestamp
        )
    else:
        rows = _scan_compiled(kernels.scan, body, header)
    if rows is None or len(rows) > MAX_RUNS:
        return [_malformed(header.last_offset_delta, header.record_count)]
    return [_run(row, body, header) for row in rows]


def _scan_compiled(kernel: ModuleType, body: Buffer, header: BatchHeader) -> list[list[int]] | None:
    import numpy as np

    bytes_in = np.frombuffer(body, dtype=np.uint8)
    room = _FIRST_ROWS
    while True:
        rows = np.empty((room, kernel.COLUMNS), dtype=np.int64)
        found = kernel.scan(
            bytes_in,
            header.record_count,
            header.last_offset_delta,
            header.base_timestamp,
            True,
            rows,
        )
        if found >= 0:
            listed: list[list[int]] = rows[:found].tolist()
            return listed
        if found == kernel.MALFORMED_RESULT or room == MAX_RUNS:
            return None
        # At most one run a record, so this ends.
        room = min(room * 8, header.record_count, MAX_RUNS)


def _run(row: list[int], body: Buffer, header: BatchHeader) -> Run:
    first, last, count, checksum, txn_at, low, high, keyless, size, kind, unfit = row
    txn = bytes(memoryview(body)[txn_at : txn_at + TXN_HEADER_SIZE]) if txn_at >= 0 else b""
    pure = kind == Kind.WRITE and count == header.record_count and header.is_dense
    pure = pure and not header.is_control
    return Run(Kind(kind), first, last, count, checksum, txn, low, high, keyless, size, pure, unfit)


def _malformed(last_delta: int, count: int) -> Run:
    return Run(Kind.MALFORMED, 0, max(last_delta, 0), max(count, 0), 0, b"", -1, -1, 0, 0, False, 0)
