"""Reading journals into the index: raw batches -> runs, and counts of what is rejected."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.journal_index import JournalIndex, Run
from anabranch.core.state import State
from anabranch.ports import Fetched, RawBatch, Table
from anabranch.topics.batch import read_header


@dataclass(slots=True)
class Scanned:
    """What a batch holds: runs of WRITEs, and records to reject by reason."""

    runs: list[Run]
    rejected: dict[str, int]


def index_fetched(
    table: Table,
    index: JournalIndex,
    state: State,
    stream: str,
    partition: int,
    fetched: Fetched,
    *,
    counting: bool,
) -> None:
    """Index what one fetch brought of a journal partition; rows and position in one table write."""
    runs: list[Run] = []
    for batch in fetched.batches:
        scanned = scan(batch)
        runs += scanned.runs
        if counting:
            for reason, count in scanned.rejected.items():
                index.reject(stream, reason, count)
    changes = index.add(state, stream, partition, runs, fetched.next_offset, counting=counting)
    table.write(changes)


def scan(batch: RawBatch) -> Scanned:
    """Cut a batch into runs (temporary, in Python)."""
    from anabranch.core.ids import OP_HEADER, TXN_HEADER, unpack_txn_header
    from anabranch.core.keyspace import position_of, record_checksum
    from anabranch.errors import MalformedRecord
    from anabranch.topics.records import decode_records

    header = read_header(batch.data)
    records = decode_records(batch.data)
    out = Scanned([], {})
    for rec in records:
        ours = [h for h in rec.headers if h[0].startswith("ab.")]
        if ours and ours[0][0] == OP_HEADER and len(ours) == 1:
            continue
        if header.is_transactional:
            out.rejected["native_transaction"] = out.rejected.get("native_transaction", 0) + 1
            continue
        try:
            if len(ours) != 1 or ours[0][0] != TXN_HEADER:
                raise MalformedRecord("x")
            txn, writer, epoch = unpack_txn_header(ours[0][1] or b"")
        except MalformedRecord:
            why = "bad_header" if ours else "plain_write"
            out.rejected[why] = out.rejected.get(why, 0) + 1
            continue
        pos = position_of(rec.key) if rec.key is not None else -1
        crc = record_checksum(rec.key, rec.value)
        last = out.runs[-1] if out.runs else None
        if (
            last
            and (last.txn_id, last.writer, last.stream_epoch) == (txn, writer, epoch)
            and last.end == rec.offset
        ):
            out.runs[-1] = last._replace(
                end=rec.offset + 1,
                records=last.records + 1,
                crc_sum=(last.crc_sum + crc) % (1 << 63),
                low=pos if last.low < 0 else (min(last.low, pos) if pos >= 0 else last.low),
                high=max(last.high, pos),
            )
        else:
            out.runs.append(
                Run(
                    txn,
                    writer,
                    epoch,
                    rec.offset,
                    rec.offset + 1,
                    1,
                    crc,
                    pos,
                    pos,
                    batch.base_offset,
                    len(batch.data),
                    False,
                )
            )
    if len(out.runs) == 1 and out.runs[0].records == header.count and header.is_dense:
        out.runs[0] = out.runs[0]._replace(pure=True)
    return out
