"""Runs of journal records, how the status table keeps them, and the comparison of receipts.

A *run* is consecutive records of one writer in a journal partition.

Table keys: ``i | stream | 00 | partition (4) | txn id (16) | writer (8) | first offset (8)``. Plain runs have
the transaction id of zeros and the writer 0. A run that was moved to the end of the journal keeps its key, with the
offset that its writer saw; its value has its present offset.

Digests of the keys that runs write to tables: ``d``, then the run's key without its ``i``
(`core.locks.table_writes`).

Rejected records of open transactions: ``x | txn id (16) | stream | 00 | partition (4) | first offset (8)``. Records
below the journal's low water are counted in the transaction's row instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.core import rows as k
from anabranch.core.rows import Rows
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.protocol.schemas.records import Extent, MovedRow, MovedRun, Receipt, RunsWanted

# The fields of a `StoredRun` from `end` on, `moved_to` before `pure`.
_VALUE = struct.Struct(">qqqqqq?Iq")
REFUSED = "plain_write"  # the reason under which records that the broker refuses are counted
FORM = 6  # version of these rows, `rows.OUTCOMES` and `OWNED`; other versions' tables are rebuilt
NEVER = (1 << 63) - 1  # a time that no stream accepts
_AFTER_PARTITION = TXN_ID_SIZE + 16  # bytes of an index key: transaction id, writer, first offset


class Run(NamedTuple):
    """Consecutive records of one writer inside one batch.

    ``low``/``high``: lowest and highest key position of its records, -1 if no record has a key. ``pure``: the run
    is the whole batch, and the batch may be copied as it is. ``batch_crc``: from the batch's header, to recognise
    the batch; 0 if it is not known.
    """

    txn_id: bytes
    writer: int
    stream_epoch: int
    first: int
    end: int
    records: int
    crc_sum: int
    low: int
    high: int
    batch_base: int
    batch_size: int
    pure: bool
    batch_crc: int = 0
    keyless: int = 0  # records without a key
    # A digest of its keys, for tables (`core.locks.table_writes.Keys`); empty: not known.
    digest: bytes = b""
    # Latest time of its records, Unix milliseconds; `NEVER` if a record's time is below the legal range.
    latest: int = 0


class StoredRun(NamedTuple):
    """A run as the index keeps it.

    ``first``/``end``: the offsets that its writer saw, and that receipts name. ``moved_to``: the present offset of
    its first record; 0 if it was not moved. The batch fields describe the batch that contains it now.
    """

    writer: int
    first: int
    end: int
    records: int
    crc_sum: int
    batch_base: int
    batch_size: int
    pure: bool
    moved_to: int = 0
    batch_crc: int = 0
    latest: int = 0

    @property
    def at(self) -> int:
        """The present offset of its first record."""
        return self.moved_to or self.first


def runs_prefix(stream: str, partition: int) -> bytes:
    return k.INDEX + stream.encode() + b"\0" + partition.to_bytes(4, "big")


def place_of(key: bytes) -> tuple[str, int]:
    """(stream, partition) of a run's key."""
    place = key[len(k.INDEX) : -_AFTER_PARTITION]
    return place[:-5].decode(), int.from_bytes(place[-4:], "big")


def txn_of(key: bytes) -> bytes:
    return key[-_AFTER_PARTITION : -_AFTER_PARTITION + TXN_ID_SIZE]


def rejected_key(txn_id: bytes, stream: str, partition: int, first: int) -> bytes:
    """Table key of rejected records. ``first``: the offset of the first one."""
    place = rejected_prefix(txn_id, stream) + partition.to_bytes(4, "big")
    return place + first.to_bytes(8, "big")


def rejected_prefix(txn_id: bytes, stream: str) -> bytes:
    return k.REJECTED + txn_id + stream.encode() + b"\0"


def rejected_place(key: bytes) -> tuple[str, int, int]:
    """(stream, partition, offset of the first record) of a key of `rejected_key`."""
    name = key[len(k.REJECTED) + TXN_ID_SIZE : -1 - 4 - 8]
    return name.decode(), int.from_bytes(key[-12:-8], "big"), int.from_bytes(key[-8:], "big")


def moved_run(txn_id: bytes, row: MovedRow, run: MovedRun) -> tuple[bytes, bytes]:
    """Table key and value of a run that was moved. ``row``: the status row with its new place."""
    key = runs_prefix(row.stream, row.partition) + txn_id + _run_id(run)
    value = _VALUE.pack(
        run.end,
        run.count,
        run.crc_sum,
        run.batch_base,
        run.batch_size,
        run.at,
        run.pure,
        0,
        row.latest,
    )
    return key, value


def run_key(prefix: bytes, run: Run) -> bytes:
    return prefix + run.txn_id + _run_id(run)


def digest_key(key: bytes) -> bytes:
    """Table key of the digest of the run with this key."""
    return k.DIGEST + key[len(k.INDEX) :]


def stored_run_key(stream: str, partition: int, txn_id: bytes, run: StoredRun) -> bytes:
    """Table key of a run that is in the index."""
    return runs_prefix(stream, partition) + txn_id + _run_id(run)


def wanted_runs(rows: Rows, stream: str, txn_id: bytes, wanted: RunsWanted) -> Iterator[StoredRun]:
    """The runs of a writer between two offsets of a journal partition, in their order, read lazily."""
    first = runs_prefix(stream, wanted.partition) + txn_id + _run_id(wanted)
    for key, value in rows.scan(first[:-8], first):
        run = unpack_run(key, value)
        if run.end > wanted.end:
            return
        yield run


def _run_id(run: Run | StoredRun | MovedRun | RunsWanted) -> bytes:
    return struct.pack(">Qq", run.writer + (1 << 63), run.first)


def pack_run(run: Run) -> bytes:
    """The value of a run in the status table. The run was not moved."""
    return _VALUE.pack(
        run.end,
        run.records,
        run.crc_sum,
        run.batch_base,
        run.batch_size,
        0,
        run.pure,
        run.batch_crc,
        run.latest,
    )


def unpack_run(key: bytes, value: bytes) -> StoredRun:
    end, count, crc_sum, base, size, moved_to, pure, crc, latest = _VALUE.unpack(value)
    writer, first = struct.unpack(">Qq", key[-16:])
    writer -= 1 << 63
    return StoredRun(writer, first, end, count, crc_sum, base, size, pure, moved_to, crc, latest)


def extents_of(receipts: Sequence[Receipt]) -> dict[tuple[int, str, int], Extent]:
    """(writer, stream, partition) -> extent."""
    return {
        (receipt.writer, extent.stream, extent.partition): extent
        for receipt in receipts
        for extent in receipt.extents
    }


# -- receipts: clients and controllers compare them with the same code ----------------------------------


CRC_MODULUS = 1 << 63


def covers(one: Receipt | None, other: Receipt) -> bool:
    """Whether a receipt has all events of another receipt of the same writer.

    The order of their sequences does not matter: a flush without new writes raises the sequence, and also the ends
    of extents if other writers wrote to the journal.
    """
    if not other.extents:
        return True
    if one is None:
        return False
    has = {(extent.stream, extent.partition): extent for extent in one.extents}
    return all(
        (whole := has.get((part.stream, part.partition))) is not None and _is_within(part, whole)
        for part in other.extents
    )


def _is_within(part: Extent, whole: Extent) -> bool:
    """Whether one extent has all records of another extent. Both count from the writer's first record."""
    if whole.first > part.first:
        return False
    if whole.count == part.count:
        return whole.crc_sum == part.crc_sum
    return whole.count > part.count and whole.end >= part.end


def not_covered(wanted: Iterable[Receipt], taken: Mapping[int, Receipt]) -> list[int]:
    """Writers of ``wanted`` whose events are not all taken."""
    return [each.writer for each in wanted if not covers(taken.get(each.writer), each)]
