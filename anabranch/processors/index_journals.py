"""Reading journals into the index: raw batches -> runs, and counts of rejected records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.framing import Run as FramingRun
from anabranch.batches.records import Record, decode_records
from anabranch.core.hybrid_time import to_ms
from anabranch.core.ids import NO_TXN, unpack_txn_header
from anabranch.core.journal.index import JournalIndex
from anabranch.core.journal.receipts import CRC_MODULUS
from anabranch.core.journal.runs import NEVER, Run
from anabranch.core.journal.table_writes import Keys
from anabranch.core.limits import NO_TIME, ROW_KEY
from anabranch.core.overlay import Overlay
from anabranch.core.partitioner import position_of, record_checksum
from anabranch.core.state import State
from anabranch.core.stream_settings import latest_time
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
    wall_ms: Callable[[], int],
) -> None:
    """Index one fetch of a journal partition; rows and position are put on ``changes``.

    ``known_until``: a former leader has counted those before. ``wall_ms``: the clock, Unix milliseconds.
    """
    limit = _TimeLimit(state, stream, wall_ms)
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
        _leave_out(batch, scanned, limit, is_table=is_table)
        runs += scanned.runs
        plain += scanned.plain
        if batch.base_offset >= known_until:
            for reason, count in scanned.rejected.items():
                index.reject(stream, partition, reason, count)
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


class _TimeLimit:
    """The latest time that a stream accepts in plain records.

    The commits' time decides first. The clock may be later, so it is asked about times after that. Thus no
    leader decides by its own clock alone. Transactions are checked at commit (`core.decisions.commits.commit`).
    """

    def __init__(self, state: State, stream: str, wall_ms: Callable[[], int]) -> None:
        self._settings = state.streams[stream].settings
        self._wall_ms = wall_ms
        self._latest = latest_time(self._settings, to_ms(state.round.hybrid_time))
        self._looked = False

    def passed_by(self, time: int) -> bool:
        """Whether a time is too late."""
        if time > self._latest and not self._looked:
            self._looked = True
            self._latest = max(self._latest, latest_time(self._settings, self._wall_ms()))
        return time > self._latest


def _leave_out(batch: RawBatch, scanned: Scanned, limit: _TimeLimit, *, is_table: bool) -> None:
    """Reject records with keys that no row can have, and plain records with bad times; split the runs there."""

    def may_stay(run: Run) -> bool:
        good_keys = not (is_table and run.unfit)
        return good_keys and not (run.txn_id == NO_TXN and limit.passed_by(run.latest))

    def reason(record: Record) -> str:
        if is_table and not 0 < len(record.key or b"") <= ROW_KEY.value:
            return "bad_key"
        time = record.timestamp_ms
        return "bad_time" if plain and (time < NO_TIME or limit.passed_by(time)) else ""

    for plain, runs in ((False, scanned.runs), (True, scanned.plain)):
        if all(map(may_stay, runs)):
            continue
        kept: list[Run] = []
        records: list[Record] = []
        for run in runs:
            if may_stay(run):
                kept.append(run)
            elif plain and limit.passed_by(run.earliest):  # all records of the run
                scanned.rejected["bad_time"] += run.records
            else:
                records = records or decode_records(batch.data)
                its = (record for record in records if run.first <= record.offset < run.end)
                for why, found in groupby(its, reason):
                    if why:
                        scanned.rejected[why] += len(list(found))
                    else:
                        kept.append(_part(run, list(found), digest=is_table))
        runs[:] = kept


def _part(run: Run, records: Sequence[Record], *, digest: bool) -> Run:
    """Records of a run that follow each other."""
    sums = [record_checksum(record.key, record.value) for record in records]
    positions = [position_of(record.key) for record in records if record.key is not None]
    times = [record.timestamp_ms for record in records]
    return run._replace(
        first=records[0].offset,
        end=records[-1].offset + 1,
        records=len(records),
        crc_sum=sum(sums) % CRC_MODULUS,
        low=min(positions, default=-1),
        high=max(positions, default=-1),
        batch_size=run.batch_size * len(records) // run.records,
        pure=False,
        keyless=len(records) - len(positions),
        unfit=0,
        digest=Keys.of(record.key for record in records).to_bytes() if digest else b"",
        earliest=min(times),
        latest=_latest(min(times), max(times)),
    )


def _run(batch: RawBatch, run: FramingRun, header: tuple[bytes, int, int], *, pure: bool) -> Run:
    """A run as the index takes it; offsets are the journal's."""
    txn_id, writer, stream_epoch = header
    base = batch.base_offset
    latest = run.latest
    if pure:  # it may be copied with its batch header, which has a time, too
        latest = max(latest, read_header(batch.data).max_timestamp)
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
        earliest=run.earliest,
        latest=_latest(run.earliest, latest),
    )


def _latest(earliest: int, latest: int) -> int:
    return NEVER if earliest < NO_TIME else latest


_REASONS = {Kind.MALFORMED: "malformed_batch"}
