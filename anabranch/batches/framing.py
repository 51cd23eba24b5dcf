"""Dividing journal batches into runs: consecutive records of one kind and, for WRITEs, of one writer.

A batch is spliced only if each of its records was checked, so compiled code walks the framing of all of them: about
10 million records/s of 100 bytes. numba takes a second to load, so small batches are walked in plain Python until a
big batch comes, or `warm` is called.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.batches import framing_plain
from anabranch.batches.compression import MAX_UNPACKED_BYTES, decompress_scratch
from anabranch.batches.format import HEADER_SIZE, BatchHeader, Buffer, read_header
from anabranch.batches.records import decode_body
from anabranch.core.locks.table_writes import FEW_KEYS, Keys
from anabranch.errors import InvariantViolation
from anabranch.ports import CorruptBatch, RawBatch
from anabranch.protocol import limits
from anabranch.protocol.ids import TXN_HEADER_SIZE

if TYPE_CHECKING:
    from types import ModuleType

# Up to this many records, plain Python is faster than loading numba.
_SMALL = 256
_FIRST_ROWS = 256
# Keys are collected from batches with up to this many records.
_MOST_READ = 1 << 10  # in plain Python: more records would take too long
_MOST_NOTED = 1 << 20  # by compiled code: more records would take much memory
MAX_RUNS = limits.RUNS.value  # a small batch can unpack to millions of records
_ANY = limits.Room()
_NO_LIMIT = (1 << 63) - 1


class Kind(IntEnum):
    """The kind of a run's records. Records of `MALFORMED` and later kinds are rejected, and counted by kind."""

    WRITE = 0  # one ab.txn header of 28 bytes
    PLAIN = 1  # no header that starts with ab.
    OP = 2  # one ab.op header
    MALFORMED = 3  # the batch can't be read, or has over `MAX_RUNS` runs: one run for all of it
    DOUBLE_TXN = 4  # several ab.txn headers
    TXN_AND_OP = 5  # ab.txn and ab.op
    DOUBLE_OP = 6  # several ab.op headers
    TXN_LENGTH = 7  # an ab.txn header of other than 28 bytes
    RESERVED = 8  # another header that starts with ab., or too many headers
    # A header whose name is not UTF-8: Python consumers over librdkafka could not read past it.
    NO_TEXT = 9
    # A WRITE or plain record that the stream does not accept.
    BAD_KEY = 10  # of a table: a key that no row can have
    BAD_TIME = 11  # a plain record whose time is out of range; WRITEs are checked at their commit
    TOO_LARGE = 12  # an event that is bigger than the stream accepts


class Run(NamedTuple):
    """Consecutive records of one kind. Offset deltas count from the batch's base offset.

    A malformed batch has one run, over all its offsets, with the record count that the header claims and zeros.
    """

    kind: Kind
    first_delta: int
    last_delta: int
    records: int
    # The sum of the records' checksums (`anabranch.protocol.partitioner.record_checksum`) modulo 2^63.
    checksum: int
    # The value of the ab.txn header (`anabranch.protocol.ids.unpack_txn_header`); empty unless the kind is WRITE.
    txn: bytes
    # The lowest and the highest position of the keys (`anabranch.protocol.partitioner.position_of`);
    # -1 without keys.
    low: int
    high: int
    # The number of records without a key.
    keyless: int
    # Bytes of the records, unpacked.
    size: int
    # The run is the whole batch, of one writer, without gaps: it may be spliced.
    pure: bool
    # The digest of its keys (`anabranch.core.locks.table_writes.Keys`); empty if not requested, or not known.
    digest: bytes = b""
    # The times of its records, in Unix milliseconds.
    earliest: int = 0
    latest: int = 0


class Kernels(NamedTuple):
    """The compiled walks: the modules `scan`, `copy` and `events` of `anabranch.batches.kernels`."""

    scan: ModuleType
    copy: ModuleType
    events: ModuleType


_kernels: Kernels | None = None


def warm(folder: Path | None = None) -> None:
    """Load the compiled code, which is compiled once on a machine (1 s; 20 s the first time).

    Call it where waiting is harmless: when a process starts. ``folder``: a folder of this process, for compiled
    code that can't be stored with the package.
    """
    if folder is not None:
        from anabranch.batches.kernels import parts as kernel_parts

        kernel_parts.own_folders.append(folder)
    _load()


def _load() -> Kernels | None:
    global _kernels
    # The kernels read numbers in the order of memory.
    if _kernels is None and sys.byteorder == "little":
        from anabranch.batches.kernels import copy, events, scan

        _kernels = Kernels(scan, copy, events)
    return _kernels


def kernels() -> Kernels:
    """The compiled code, which is loaded if it is not yet (`warm`)."""
    found = _kernels or _load()
    if found is None:
        raise InvariantViolation("compiled code is for machines with little-endian numbers")
    return found


def kernels_for(records: int) -> Kernels | None:
    """The compiled code, if it is loaded or worth loading for this number of records."""
    if _kernels is not None or records <= _SMALL:
        return _kernels
    return _load()


def scan_batch(
    batch: RawBatch,
    rules: limits.Room = _ANY,
    *,
    limit: int = MAX_UNPACKED_BYTES,
    digests: bool = False,
) -> list[Run]:
    """The runs of a batch, in order; empty if compaction left it empty.

    An error in the batch's content becomes a bad run; nothing is raised. ``rules``: what the stream accepts.
    ``limit``: the most bytes that it may unpack to. ``digests``: whether runs get digests of their keys.
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
    if rules.most is None:
        rules = rules._replace(most=_NO_LIMIT)
    kernels = kernels_for(header.record_count)
    if kernels is None:
        rows = framing_plain.scan(
            body, header.record_count, header.last_offset_delta, header.base_timestamp, rules
        )
        found = _keys(body, header, rows) if digests and rows is not None else []
    else:
        rows, found = _scan_compiled(kernels.scan, body, header, rules, digests)
    if rows is None or len(rows) > MAX_RUNS:
        return [_malformed(header.last_offset_delta, header.record_count)]
    runs = [_run(row, body, header) for row in rows]
    if not found:
        return runs
    return [run._replace(digest=its.to_bytes()) for run, its in zip(runs, found, strict=True)]


def _keys(body: Buffer, header: BatchHeader, rows: list[list[int]]) -> list[Keys]:
    """The keys of each run, in plain Python; empty for batches with many records."""
    if header.record_count > _MOST_READ:
        return []
    records = decode_body(bytes(body), header)
    deltas = [record.offset - header.base_offset for record in records]
    spans = [(bisect_left(deltas, row[0]), bisect_right(deltas, row[1])) for row in rows]
    return [Keys.of(record.key for record in records[a:b]) for a, b in spans]


def _scan_compiled(
    kernel: ModuleType, body: Buffer, header: BatchHeader, rules: limits.Room, digests: bool
) -> tuple[list[list[int]] | None, list[Keys]]:
    import numpy as np

    bytes_in = np.frombuffer(body, dtype=np.uint8)
    most = header.record_count if digests and 0 < header.record_count <= _MOST_NOTED else 0
    keys = np.empty((3, most), dtype=np.int64)
    room = _FIRST_ROWS
    while True:
        rows = np.empty((room, kernel.COLUMNS), dtype=np.int64)
        bounds = np.empty((room, 4), dtype=np.int64)
        found = kernel.scan(
            bytes_in,
            header.record_count,
            header.last_offset_delta,
            header.base_timestamp,
            np.array(rules[1:], dtype=np.int64),  # most, is_table, latest
            rows,
            keys,
            bounds,
        )
        if found >= 0:
            listed: list[list[int]] = rows[:found].tolist()
            return listed, _found_keys(kernel, body, listed, keys, bounds) if most else []
        if found == kernel.MALFORMED_RESULT or room == MAX_RUNS:
            return None, []
        # There is at most one run for each record, so this ends.
        room = min(room * 8, header.record_count, MAX_RUNS)


def _found_keys(
    kernel: ModuleType, body: Buffer, rows: list[list[int]], keys: Any, bounds: Any
) -> list[Keys]:
    """The keys of each run, from the compiled walk's arrays."""
    view, end, out = memoryview(body), 0, []
    for row, (least, its_size, greatest, size) in zip(
        rows, bounds[: len(rows)].tolist(), strict=True
    ):
        begin, end = end, end + row[kernel.COUNT] - row[kernel.KEYLESS]
        places = [(least, its_size), (greatest, size)]
        if end - begin <= FEW_KEYS:
            places = keys[kernel.KEY_AT :, begin:end].T.tolist()
        few = sorted({bytes(view[at : at + size]) for at, size in places})
        out.append(Keys.packed([keys[kernel.POINT, begin:end]], few))
    return out


def _run(row: list[int], body: Buffer, header: BatchHeader) -> Run:
    first, last, count, checksum, txn_at, low, high, keyless, size, kind, *times = row
    txn = bytes(memoryview(body)[txn_at : txn_at + TXN_HEADER_SIZE]) if txn_at >= 0 else b""
    pure = kind == Kind.WRITE and count == header.record_count and header.is_dense
    pure = pure and not header.is_control
    return Run(
        Kind(kind), first, last, count, checksum, txn, low, high, keyless, size, pure, b"", *times,
    )  # fmt: skip


def _malformed(last_delta: int, count: int) -> Run:
    return Run(Kind.MALFORMED, 0, max(last_delta, 0), max(count, 0), 0, b"", -1, -1, 0, 0, False)
