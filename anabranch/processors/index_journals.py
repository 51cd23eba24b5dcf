"""Reading journals into the index: raw batches -> runs, and counts of rejected records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.framing import Run as FramingRun
from anabranch.batches.records import Record, decode_records
from anabranch.core.ids import NO_TXN, unpack_txn_header
from anabranch.core.journal.index import JournalIndex
from anabranch.core.journal.receipts import CRC_MODULUS
from anabranch.core.journal.runs import Run
from anabranch.core.journal.table_writes import Keys
from anabranch.core.limits import ROW_KEY
from anabranch.core.overlay import Overlay
from anabranch.core.partitioner import position_of, record_checksum
from anabranch.core.state import State
from anabranch.ports import CorruptBatch, Fetched, RawBatch

_PLAIN_HEADER = (NO_TXN, 0, -1)  # in place of a missing ab.txn header


@dataclass(slots=True)
class Scanned:
    """The content of a batch: runs of WRITEs, runs of plain records, and records to reject by reason."""

    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


def index_fetched(
    changes: Overlay,
    index: JournalIndex,
    state: State,
    stream: str,
    partition: int,
    fetched: Fetched,
    *,
    known_until: int,
) -> None:
    """Index one fetch of a journal partition; rows and position are put on ``changes``.

    ``known_until``: a former leader counted the records before it.
    """
    runs: list[Run] = []
    plain: list[Run] = []
    size = 0
    for batch in fetched.batches:
        size += len(batch.data)
        copy = (stream, partition, batch.base_offset)
        if copy in index.copies:
            index.copies.discard(copy)
            continue  # the index knows it already
        is_table = stream in state.tables
        scanned = scan(batch, digests=is_table)
        if is_table:
            _leave_out(batch, scanned)
        runs += scanned.runs
        plain += scanned.plain
        if batch.base_offset >= known_until:
            for reason, count in scanned.rejected.items():
                index.reject(stream, reason, count)
    added = index.add(
        state, stream, partition, runs, fetched.next_offset, plain=plain,
        known_until=known_until, size=size,
    )  # fmt: skip
    for key, value in added.items():
        changes.set(key, value)


def scan(batch: RawBatch, *, digests: bool = False) -> Scanned:
    """Cut a batch into runs.

    Batches of native transactions hold the controller's participant ops, which decide nothing, or a raw
    client's records, which are rejected: they may be aborted after they were read. ``digests``: of a table.
    """
    out = Scanned()
    native = dense = False
    try:
        header = read_header(batch.data)
        native, dense = header.is_transactional, header.is_dense
    except CorruptBatch:
        pass  # its one run has the reason
    found = scan_batch(batch, digests=digests)
    for run in found:
        if run.kind is Kind.OP:
            if not native:
                out.rejected["bad_header"] += run.records
        elif native:
            out.rejected["native_transaction"] += run.records
        elif run.kind is Kind.WRITE:
            out.runs.append(_run(batch, run, unpack_txn_header(run.txn), pure=run.pure))
        elif run.kind is Kind.PLAIN:
            whole = dense and len(found) == 1
            out.plain.append(_run(batch, run, _PLAIN_HEADER, pure=whole))
        else:
            out.rejected[_REASONS.get(run.kind, "bad_header")] += run.records
    return out


def _leave_out(batch: RawBatch, scanned: Scanned) -> None:
    """Reject records whose keys no row of a table can have, and cut the runs there."""
    for runs in (scanned.runs, scanned.plain):
        unfit = sum(run.unfit for run in runs)
        if not unfit:
            continue
        scanned.rejected["bad_key"] += unfit
        kept: list[Run] = []
        records = decode_records(batch.data)
        for run in runs:
            if not run.unfit:
                kept.append(run)
                continue
            its = (record for record in records if run.first <= record.offset < run.end)
            for fits, found in groupby(its, lambda x: 0 < len(x.key or b"") <= ROW_KEY.value):
                if fits:
                    kept.append(_part(run, list(found)))
        runs[:] = kept


def _part(run: Run, records: Sequence[Record]) -> Run:
    """Records of a run that follow each other."""
    sums = [record_checksum(record.key, record.value) for record in records]
    positions = [position_of(record.key or b"") for record in records]
    return run._replace(
        first=records[0].offset,
        end=records[-1].offset + 1,
        records=len(records),
        crc_sum=sum(sums) % CRC_MODULUS,
        low=min(positions),
        high=max(positions),
        batch_size=run.batch_size * len(records) // run.records,
        pure=False,
        keyless=0,
        unfit=0,
        digest=Keys.of(record.key for record in records).to_bytes(),
    )


def _run(batch: RawBatch, run: FramingRun, header: tuple[bytes, int, int], *, pure: bool) -> Run:
    """A run as the index takes it; offsets are the journal's."""
    txn_id, writer, stream_epoch = header
    base = batch.base_offset
    return Run(
        txn_id,
        writer,
        stream_epoch,
        first=base + run.first_delta,
        end=base + run.last_delta + 1,
        records=run.records,
        crc_sum=run.checksum,
        low=run.low,
        high=run.high,
        batch_base=base,
        # Plain records are mostly taken apart: their size is the unpacked one.
        batch_size=len(batch.data) if run.pure else run.size,
        pure=pure,
        batch_crc=crc_of(batch.data),
        keyless=run.keyless,
        unfit=run.unfit,
        digest=run.digest,
    )


_REASONS = {Kind.MALFORMED: "malformed_batch"}
