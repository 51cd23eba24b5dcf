"""Reading journals into the index: raw batches -> runs, and counts of what is rejected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabranch.core.ids import unpack_txn_header
from anabranch.core.journal_index import JournalIndex, Run
from anabranch.core.overlay import Overlay
from anabranch.core.state import State
from anabranch.ports import CorruptBatch, Fetched, RawBatch
from anabranch.topics.batch import read_header
from anabranch.topics.framing import Kind, scan_batch


@dataclass(slots=True)
class Scanned:
    """What a batch holds: runs of WRITEs, and records to reject by reason."""

    runs: list[Run] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


def index_fetched(
    changes: Overlay,
    index: JournalIndex,
    state: State,
    stream: str,
    partition: int,
    fetched: Fetched,
    *,
    counting: bool,
) -> None:
    """Index what one fetch brought of a journal partition; rows and position are put on ``changes``."""
    runs: list[Run] = []
    for batch in fetched.batches:
        scanned = scan(batch)
        runs += scanned.runs
        if counting:
            for reason, count in scanned.rejected.items():
                index.reject(stream, reason, count)
    added = index.add(state, stream, partition, runs, fetched.next_offset, counting=counting)
    for key, value in added.items():
        changes.set(key, value)


def scan(batch: RawBatch) -> Scanned:
    """Cut a batch into runs.

    Batches of native transactions hold the controller's participant ops, which decide nothing, or a raw
    client's records, which are rejected: they may be aborted after they were read.
    """
    out = Scanned()
    try:
        native = read_header(batch.data).is_transactional
    except CorruptBatch:
        native = False
    for run in scan_batch(batch):
        if run.kind is Kind.OP:
            if not native:
                out.rejected["bad_header"] += run.records
        elif native:
            out.rejected["native_transaction"] += run.records
        elif run.kind is Kind.WRITE:
            txn_id, writer, stream_epoch = unpack_txn_header(run.txn)
            base = batch.base_offset
            out.runs.append(
                Run(
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
                    batch_size=len(batch.data) if run.pure else run.size,
                    pure=run.pure,
                )
            )
        else:
            out.rejected[_REASONS.get(run.kind, "bad_header")] += run.records
    return out


_REASONS = {Kind.PLAIN: "plain_write", Kind.MALFORMED: "malformed_batch"}
