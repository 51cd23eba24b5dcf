"""Indexing journals: fetched batches become runs in the index, and rejected records are counted.

`JournalBacklog` has the batches that are fetched and not indexed yet. Streams take turns by the work that their
journals cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from anabranch.batches.format import crc_of, read_header
from anabranch.batches.framing import Kind, scan_batch
from anabranch.batches.framing import Run as FramingRun
from anabranch.batches.packer import PACKED_TIMES, batch_limit, worth_packing, worth_splicing
from anabranch.core import limits, work
from anabranch.core.hybrid_time import to_ms
from anabranch.core.ids import NO_TXN, unpack_txn_header
from anabranch.core.journal_index import JournalIndex
from anabranch.core.journal_runs import NEVER, Run
from anabranch.core.limits import FRAMING, MESSAGE, NO_TIME, UNPACKED, Room
from anabranch.core.state import Overlay, State
from anabranch.core.stream_settings import MAX_MESSAGE, is_table, latest_time
from anabranch.ports import Clock, CorruptBatch, Fetched, RawBatch
from anabranch.processors.lanes import Meter
from anabranch.schemas.records import SegmentRange

_PLAIN_HEADER = (NO_TXN, 0, -1)  # plain writes have no ab.txn header
_UNPACKED_TIMES = 16
QUANTUM = 500  # units of work in one turn of a stream
WAITING_BYTES = 32 << 20

Place = tuple[str, int]  # stream, journal partition
# (stream, partition, fetch, about how many units it may take) -> units taken, and the rest of the fetch.
Index: TypeAlias = Callable[[str, int, Fetched, int], tuple[int, Fetched | None]]


@dataclass(slots=True)
class JournalBacklog:
    """Batches of journals that were fetched and are not indexed yet, and the meter of each stream's journals.

    Streams take turns; the one that was charged least comes first. While other lanes need the leader, a stream
    waits if it is in debt, or if its owner has nothing to spare: the streams of a lane share the lane's allowance
    with its commands, which come first. Waiting batches are fetched again only if they exceed `WAITING_BYTES`:
    then the most charged stream drops some of its own.

    ``owners``: the meter of the lane that owns a stream. ``shared``: streams that draw from their owner's
    allowance, because other lanes need the leader. ``_reached``: the charge of the stream that had the last turn; a
    new stream starts there. ``_fresh``: places whose batches still share memory with the rest of their fetch.
    """

    clock: Clock
    meters: dict[str, Meter] = field(default_factory=dict)
    fetched: dict[str, dict[int, Fetched]] = field(default_factory=dict)  # by stream and partition
    owners: dict[str, Meter] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    _reached: int = 0
    _size: int = 0
    _fresh: set[Place] = field(default_factory=set)

    def has(self, stream: str, partition: int) -> bool:
        """Whether batches of a journal partition wait."""
        return partition in self.fetched.get(stream, ())

    def add(self, stream: str, partition: int, fetched: Fetched) -> None:
        """Queue a fetch of a journal partition."""
        meter = self.meters.get(stream)
        if meter is None:
            meter = self.meters[stream] = Meter(self.clock)
            meter.set_rate(limits.JOURNAL_WORK.value)
        if stream not in self.fetched:
            meter.served = max(meter.served, self._reached)
        self._put(stream, partition, fetched)
        self._fresh.add((stream, partition))

    def only(self, streams: Container[str]) -> None:
        """Keep only the batches of these streams. The others are fetched again if their streams are read again."""
        for stream in [stream for stream in self.fetched if stream not in streams]:
            for partition in list(self.fetched[stream]):
                self._take(stream, partition)

    def turns(self, *, in_debt: bool = False) -> list[str]:
        """The streams that may have a turn now. ``in_debt``: instead, those that have to wait."""
        streams = [one for one in self.fetched if self._has_to_wait(one) is in_debt]
        return sorted(streams, key=lambda stream: (self.meters[stream].served, stream))

    def waits_s(self) -> list[float]:
        """For each stream with waiting batches: seconds until it may have a turn."""
        return [
            max(
                0.0,
                self.meters[stream].wait_s(1),
                self.owners[stream].spare_in_s() if stream in self.shared else 0.0,
            )
            for stream in self.fetched
        ]

    def _has_to_wait(self, stream: str) -> bool:
        if self.meters[stream].debt > 0:
            return True
        return stream in self.shared and self.owners[stream].spare < 1

    def serve(self, stream: str, index: Index, *, free: bool = False) -> int:
        """Give a stream its turn, of about one `QUANTUM`. Returns the units of work that it took.

        ``free``: don't take them off its allowance, because no other stream or lane needs the leader.
        """
        meter, spent = self.meters[stream], 0
        self._reached = max(self._reached, meter.served)
        for partition in list(self.fetched[stream]):
            if spent >= QUANTUM:
                break
            fetched = self._take(stream, partition)
            units, left = index(stream, partition, fetched, QUANTUM - spent)
            spent += units
            if left is not None:
                self._put(stream, partition, left)
        meter.charge(spent, free=free)
        if (owner := self.owners.get(stream)) is not None:
            owner.draw(spent, free=stream not in self.shared)
        return spent

    def settle(self) -> None:
        """End a pass: copy the batches that still wait, so their fetch's memory is freed, and keep to the limit."""
        for stream, partition in self._fresh:
            if self.has(stream, partition):
                fetched = self._take(stream, partition)
                own = [b._replace(data=memoryview(bytes(b.data))) for b in fetched.batches]
                self._put(stream, partition, replace(fetched, batches=own))
        self._fresh.clear()
        while self._size > WAITING_BYTES:
            most = max(self.fetched, key=lambda stream: (self.meters[stream].served, stream))
            self._take(most, next(reversed(self.fetched[most])))

    def forget_stream(self, stream: str) -> None:
        """Drop all about a forgotten stream."""
        self.only(self.fetched.keys() - {stream})
        self.meters.pop(stream, None)

    def _put(self, stream: str, partition: int, fetched: Fetched) -> None:
        self.fetched.setdefault(stream, {})[partition] = fetched
        self._size += sum(len(batch.data) for batch in fetched.batches)

    def _take(self, stream: str, partition: int) -> Fetched:
        places = self.fetched[stream]
        fetched = places.pop(partition)
        if not places:
            del self.fetched[stream]
        self._size -= sum(len(batch.data) for batch in fetched.batches)
        return fetched


@dataclass(slots=True)
class Scanned:
    """The content of a batch: runs of WRITEs, runs of plain writes, and counts of rejected records by reason.

    ``work``: what scanning it cost, in units.
    """

    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    work: int = work.BATCH


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
    most: int,
) -> tuple[int, Fetched | None]:
    """Index one fetch of a journal partition. The index's changed rows and the new position go to ``changes``.

    ``known_until``: rejected records below it were counted by a former leader. ``wall_ms``: the clock, Unix
    milliseconds. ``most``: units of work, which the last batch may exceed. Returns the units of work that this
    took, and the rest of the fetch.
    """
    settings = state.streams[stream].settings
    rules = rules_of(settings, max(wall_ms, to_ms(state.round.hybrid_time)))
    runs: list[Run] = []
    plain: list[Run] = []
    size = units = 0
    left = None
    for at, batch in enumerate(fetched.batches):
        if units >= most:
            left = replace(fetched, batches=fetched.batches[at:])
            break
        size += len(batch.data)
        copy = (stream, partition, batch.base_offset)
        if copy in index.copies:
            index.copies.discard(copy)
            continue  # the index knows it already
        scanned = scan(batch, rules, limit=unpacked_limit(settings, len(batch.data)))
        units += scanned.work + work.of_merge(
            _copied(batch, scanned, state.streams[stream].segments)
        )
        runs += scanned.runs
        plain += scanned.plain
        if batch.base_offset >= known_until:
            for reason, count in scanned.rejected.items():
                index.reject(stream, partition, reason, count)
    next_offset = fetched.next_offset if left is None else left.batches[0].base_offset
    added = index.add(
        state, stream, partition, runs, next_offset, plain=plain,
        known_until=known_until, size=size,
    )  # fmt: skip
    for key, value in added.items():
        changes.set(key, value)
    return units, left


def _copied(batch: RawBatch, scanned: Scanned, segments: Sequence[SegmentRange]) -> int:
    """The bytes that merges of a batch will copy into new batches, and those of plain writes copied unchanged.

    Plain writes that are packed again count less, because fewer bytes are sent.
    """
    size = sum(run.batch_size for run in scanned.plain)
    packs = worth_packing(batch, size)

    def of_plain(run: Run) -> int:
        if run.pure and worth_splicing(batch, run.records, run.batch_size):
            one = any(s.low <= run.low and run.high < s.high for s in segments)
            if run.keyless == run.records or (one and not run.keyless):
                return len(batch.data)
        return run.batch_size // PACKED_TIMES if packs else run.batch_size

    return sum(run.batch_size for run in scanned.runs if not run.pure) + sum(
        map(of_plain, scanned.plain)
    )


def rules_of(settings: Mapping[str, str], now_ms: int) -> Room:
    """The rules by which a stream with these settings accepts journal records: the same as for one-shots.

    ``now_ms``: the later of the clock and the last commit's time, so that no leader rejects a timestamp as too
    late by its own slow clock alone.
    """
    most = int(settings.get(MAX_MESSAGE, MESSAGE.value)) - FRAMING
    return Room("", most, is_table(settings), latest_time(settings, now_ms))


def unpacked_limit(settings: Mapping[str, str], size: int) -> int:
    """The most bytes that a journal batch of ``size`` bytes may decompress to."""
    return min(UNPACKED.value, _UNPACKED_TIMES * max(batch_limit(settings), size))


def scan(batch: RawBatch, rules: Room, *, limit: int = UNPACKED.value) -> Scanned:
    """Divide a batch into runs.

    A batch of a native transaction holds either participant ops of a controller, which are ignored, or records of
    another client, which are rejected: they are read before their transaction ends, and it may abort. ``limit``:
    the most bytes that the batch may decompress to.
    """
    out = Scanned()
    native = splices = False
    try:
        header = read_header(batch.data)
        native = header.is_transactional
        # If the batch is copied, its header is copied too, and has a timestamp of its own.
        splices = header.is_dense and header.max_timestamp <= rules.latest
    except CorruptBatch:
        pass  # the scan below returns one run, with the reason
    found = scan_batch(batch, rules, limit=limit, digests=rules.is_table)
    unpacked = sum(limit if run.kind is Kind.MALFORMED else run.size for run in found)
    out.work = work.of_batch(len(found), sum(run.records for run in found), unpacked)
    for run in found:
        if run.kind is Kind.OP:
            if not native:
                out.rejected["bad_header"] += run.records
        elif native:
            out.rejected["native_transaction"] += run.records
        elif run.kind is Kind.WRITE:
            # A batch too small to be spliced is decompressed by its merge.
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
    """A run for the index; its offsets are the journal's. ``size``: the bytes that its merge handles."""
    txn_id, writer, stream_epoch = header
    base = batch.base_offset
    latest = run.latest
    if pure:  # its batch header may be copied too, and has a timestamp of its own
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
