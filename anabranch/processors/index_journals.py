"""Reading journals into the index: raw batches -> runs, and counts of rejected records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.framing import Run as FramingRun
from anabranch.batches.packer import batch_limit, worth_splicing
from anabranch.core.hybrid_time import to_ms
from anabranch.core.ids import NO_TXN, unpack_txn_header
from anabranch.core.journal.index import JournalIndex
from anabranch.core.journal.runs import NEVER, Run
from anabranch.core.limits import FRAMING, MESSAGE, NO_TIME, UNPACKED, Room
from anabranch.core.overlay import Overlay
from anabranch.core.state import State
from anabranch.core.stream_settings import MAX_MESSAGE, is_table, latest_time
from anabranch.ports import CorruptBatch, Fetched, RawBatch

_PLAIN_HEADER = (NO_TXN, 0, -1)  # in place of a missing ab.txn header
_UNPACKED_TIMES = 16


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
    wall_ms: int,
) -> None:
    """Index one fetch of a journal partition; rows and position are put on ``changes``.

    ``known_until``: a former leader has counted those before. ``wall_ms``: the clock, Unix milliseconds.
    """
    settings = state.streams[stream].settings
    rules = rules_of(settings, max(wall_ms, to_ms(state.round.hybrid_time)))
    runs: list[Run] = []
    plain: list[Run] = []
    size = 0
    for batch in fetched.batches:
        size += len(batch.data)
        copy = (stream, partition, batch.base_offset)
        if copy in index.copies:
            index.copies.discard(copy)
            continue  # the index knows it already
        scanned = scan(batch, rules, limit=unpacked_limit(settings, len(batch.data)))
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


def rules_of(settings: Mapping[str, str], now_ms: int) -> Room:
    """What a stream with these settings takes of a journal's records, as single requests judge it.

    ``now_ms``: the later of the clock and the last commit's time: no leader decides by its own clock alone that a
    time is too late.
    """
    most = int(settings.get(MAX_MESSAGE, MESSAGE.value)) - FRAMING
    return Room("", most, is_table(settings), latest_time(settings, now_ms))


def unpacked_limit(settings: Mapping[str, str], size: int) -> int:
    """The most bytes that a journal's batch of ``size`` packed bytes may unpack to."""
    return min(UNPACKED.value, _UNPACKED_TIMES * max(batch_limit(settings), size))


def scan(batch: RawBatch, rules: Room, *, limit: int = UNPACKED.value) -> Scanned:
    """Cut a batch into runs.

    Batches of native transactions hold the controller's participant ops, which decide nothing, or a raw
    client's records, which are rejected: they may be aborted after they were read. ``limit``: the bytes that the
    batch may unpack to.
    """
    out = Scanned()
    native = splices = False
    try:
        header = read_header(batch.data)
        native = header.is_transactional
        # A copy of the batch has its header, which has a time, too.
        splices = header.is_dense and header.max_timestamp <= rules.latest
    except CorruptBatch:
        pass  # its one run has the reason
    found = scan_batch(batch, rules, limit=limit, digests=rules.is_table)
    for run in found:
        if run.kind is Kind.OP:
            if not native:
                out.rejected["bad_header"] += run.records
        elif native:
            out.rejected["native_transaction"] += run.records
        elif run.kind is Kind.WRITE:
            # One that is too small to be spliced costs a merge what it unpacks to.
            pure = run.pure and worth_splicing(batch, run.records)
            size = len(batch.data) if pure else run.size
            out.runs.append(_run(batch, run, unpack_txn_header(run.txn), size, pure=pure))
        elif run.kind is Kind.PLAIN:
            whole = splices and len(found) == 1
            out.plain.append(_run(batch, run, _PLAIN_HEADER, run.size, pure=whole))
        else:
            out.rejected[_REASONS.get(run.kind, "bad_header")] += run.records
    return out


def _run(
    batch: RawBatch, run: FramingRun, header: tuple[bytes, int, int], size: int, *, pure: bool
) -> Run:
    """A run as the index takes it; offsets are the journal's. ``size``: the bytes that a merge of it handles."""
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
        batch_size=size,
        pure=pure,
        batch_crc=crc_of(batch.data),
        keyless=run.keyless,
        digest=run.digest,
        latest=NEVER if run.earliest < NO_TIME else latest,
    )


_REASONS = {
    Kind.MALFORMED: "malformed_batch",
    Kind.BAD_KEY: "bad_key",
    Kind.BAD_TIME: "bad_time",
    Kind.TOO_LARGE: "too_large",
}
