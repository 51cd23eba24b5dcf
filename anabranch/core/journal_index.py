"""The journal index: which writer of which transaction wrote what, where.

The shell reads the journals and divides each batch into *runs*, consecutive records of one writer. The index keeps
the runs of transactions that may still commit, and counts the records that it rejects, by reason. Plain writes
belong to no transaction: their runs are kept until they are committed (`core.decisions.merge`). The index follows
from the journals and the status rows alone, so it can be rebuilt at any time.

Commits compare their receipts with the index (`JournalIndex.weigh`). Below are the counts of bytes that open
transactions have in journals (`Uncommitted`, `Read`), which limits and truncation use.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from anabranch.core import rows as k
from anabranch.core.journal_runs import (
    CRC_MODULUS,
    Run,
    StoredRun,
    digest_key,
    extents_of,
    moved_run,
    pack_run,
    place_of,
    rejected_key,
    rejected_place,
    rejected_prefix,
    run_key,
    runs_prefix,
    stored_run_key,
    txn_of,
    unpack_run,
)
from anabranch.core.rows import Rows
from anabranch.core.state import OpenTxn, State
from anabranch.errors import count_of
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE, segment_number
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.schemas.records import Extent, Receipt, SegmentRange

_COUNT = struct.Struct(">q")
AFTER_NO_TXN = NO_TXN[:-1] + b"\1"  # every transaction's id is above that of zeros

REASONS = (
    "unknown_transaction",
    "untouched_stream",
    "wrong_stream_epoch",
    "wrong_segment",
    "late",
    "bad_header",
    "plain_write",
    "native_transaction",
    "malformed_batch",
    "bad_key",
    "bad_time",
    "too_large",
    "not_locked",
)


@dataclass(slots=True)
class Weighed:
    """The result of comparing a commit's receipts with the index."""

    covered: bool  # the journal is indexed up to the end of every extent
    wrong: str  # the first disagreement; empty if there is no disagreement
    committed: int  # records in the receipts
    left_out: int  # indexed records that no receipt takes
    size: int  # bytes of the batches to merge, about
    state: int = 0  # how many of these bytes belong to states of processors
    biggest: dict[str, int] = field(default_factory=dict)  # stream -> bytes of its biggest batch
    latest: dict[str, int] = field(default_factory=dict)  # stream -> latest time of an event, ms


@dataclass(slots=True)
class JournalIndex:
    """The index. Its rows are in the status table; this object has the reading positions and counts of rejections.

    ``rejected``: rejected records of a stream since this leader began, by reason. ``unsaid``: those that the
    controller's own log does not report yet. ``plain_ends``: journal partition -> end of the last indexed plain
    run. ``read``: journal partition -> bytes by offset. ``copies``: base offsets of batches that this leader moved
    and has not read again yet.
    """

    rows: Rows
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    rejected: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unsaid: dict[str, Counter[tuple[int, str]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    plain_ends: dict[tuple[str, int], int] = field(default_factory=dict)
    read: dict[tuple[str, int], Read] = field(default_factory=dict)
    copies: set[tuple[str, int, int]] = field(default_factory=set)
    _uncommitted: Uncommitted | None = field(default=None, init=False)

    def load(self) -> None:
        """Read the positions and the ends of plain runs from the table, and drop everything else that is cached."""
        self.positions.clear()
        self.plain_ends.clear()
        self.read.clear()
        self.copies.clear()
        self._uncommitted = None
        for key, value in self.rows.scan(k.POSITION + b"j"):
            stream, partition = key[2:-4].decode(), int.from_bytes(key[-4:], "big")
            self.positions[stream, partition] = int.from_bytes(value, "big")
            for run in self._stored(runs_prefix(stream, partition) + NO_TXN):
                self.plain_ends[stream, partition] = run.end

    def add(
        self,
        state: State,
        stream: str,
        partition: int,
        runs: Iterable[Run],
        next_offset: int,
        *,
        plain: Iterable[Run] = (),
        known_until: int = 0,
        size: int = 0,
    ) -> dict[bytes, bytes | None]:
        """Index runs of one journal partition, read up to ``next_offset``. Returns the table changes,
        which must be written before the next call.

        ``plain``: runs of plain writes, in order; committed ones are skipped. ``known_until``: records before this
        offset were indexed, and rejections counted, by former leaders. ``size``: bytes read.
        """
        place = (stream, partition)
        changes: dict[bytes, bytes | None] = {}
        uncommitted = self.uncommitted
        moved: dict[bytes, set[tuple[int, int]]] = {}
        prefix = runs_prefix(stream, partition)
        for run in runs:
            reason = self.verdict(state, stream, partition, run)
            if reason:
                if run.first >= known_until:
                    self.reject(stream, partition, reason, run.records)
                # A late run may have been counted as left out at the decision.
                if run.txn_id in state.open and (run.first >= known_until or reason != "late"):
                    key = rejected_key(run.txn_id, stream, partition, run.first)
                    changes[key] = _COUNT.pack(run.records)
                    uncommitted.refused.add(run.txn_id)
                continue
            if state.open[run.txn_id].moved:
                if run.txn_id not in moved:
                    moved[run.txn_id] = _moved_runs(state.open[run.txn_id], place)
                if (run.writer, run.first) in moved[run.txn_id]:
                    continue  # it was read before; the status table has its new place
            _put(changes, prefix, run)
            uncommitted.add(run.txn_id, place, run.batch_base, run.batch_size)
        plain_done = state.plain.get((stream, partition), 0)
        for run in plain:
            if run.first < plain_done:
                continue
            if not takes_plain(state, stream):
                if run.first >= known_until:
                    self.reject(stream, partition, "plain_write", run.records)
            else:
                _put(changes, prefix, run)
                self.plain_ends[stream, partition] = run.end
        read = self.read.get(place)
        if read is None:
            read = self.read[place] = Read(self.positions.get(place, 0))
        read.add(next_offset, size)
        self.positions[place] = next_offset
        changes[position_key(stream, partition)] = next_offset.to_bytes(8, "big")
        return changes

    def verdict(self, state: State, stream: str, partition: int, run: Run) -> str:
        """The reason for rejecting the run; empty if it is accepted."""
        if run.writer == 0:
            return "bad_header"
        txn = state.open.get(run.txn_id)
        if txn is None:
            return "unknown_transaction" if state.txn_row(run.txn_id) is None else "late"
        if stream not in txn.participants:
            return "untouched_stream"
        if txn.participants[stream] != run.stream_epoch:
            return "wrong_stream_epoch"
        segment = segment_on(state, stream, run.stream_epoch, partition)
        placed = run.low < 0 or (segment and segment.low <= run.low and run.high < segment.high)
        if is_state(stream):  # its segment is chosen by the task, not by the key
            placed = not run.keyless
        if segment is None or not placed:
            return "wrong_segment"
        if stream in state.exclusive and not _has_locked(state, stream, run.txn_id, segment):
            return "not_locked"
        pending = txn.pending
        if pending is not None and pending.decided and not _takes(txn, stream, partition, run):
            return "late"
        return ""

    def reject(self, stream: str, partition: int, reason: str, count: int) -> None:
        self.rejected[stream][reason] += count
        self.unsaid[stream][partition, reason] += count

    def rejected_of(self, txn_id: bytes) -> int:
        """How many journal records of an open transaction were rejected, at or above the low waters.

        The transaction's row counts the rejected records below the low waters.
        """
        return sum(count for _, count in self._rejections(txn_id))

    def rejected_below(
        self, txn_id: bytes, stream: str, partition: int, offset: int
    ) -> list[tuple[bytes, int]]:
        """(table key, count) of a transaction's rejected records in a journal partition before an offset."""
        first, end = (rejected_key(txn_id, stream, partition, at) for at in (0, offset))
        return list(takewhile(lambda row: row[0] < end, self._rejections(txn_id, first)))

    def _rejections(self, txn_id: bytes, first: bytes = b"") -> Iterator[tuple[bytes, int]]:
        if txn_id in self.uncommitted.refused:
            for key, value in self.rows.scan(k.REJECTED + txn_id, first):
                yield key, _COUNT.unpack(value)[0]

    @property
    def uncommitted(self) -> Uncommitted:
        """The bytes of the kept runs: counted at the first use, then updated."""
        if self._uncommitted is None:
            found = Uncommitted()
            for key, value in self.rows.scan(k.INDEX):
                txn_id = txn_of(key)
                if txn_id != NO_TXN:
                    run = unpack_run(key, value)
                    found.add(txn_id, place_of(key), run.batch_base, run.batch_size)
            for key, _ in self.rows.scan(k.REJECTED, k.REJECTED + AFTER_NO_TXN):
                found.refused.add(key[1 : 1 + TXN_ID_SIZE])
            self._uncommitted = found
        return self._uncommitted

    def runs(self, txn_id: bytes, stream: str, partition: int) -> list[StoredRun]:
        """A transaction's runs in a journal partition, by writer and offset."""
        return list(self._stored(runs_prefix(stream, partition) + txn_id))

    def _stored(self, prefix: bytes) -> Iterator[StoredRun]:
        for key, value in self.rows.scan(prefix):
            yield unpack_run(key, value)

    def plain_waiting(self, state: State) -> list[tuple[str, int]]:
        """The journal partitions with uncommitted plain writes. The partition whose turn was last comes last."""
        return [place for place, end in self.plain_ends.items() if end > state.plain.get(place, 0)]

    def plain_runs(self, state: State, stream: str, partition: int) -> Iterator[StoredRun]:
        """The uncommitted plain runs of a journal partition, in order, read lazily."""
        done = state.plain.get((stream, partition), 0)
        for run in self._stored(runs_prefix(stream, partition) + NO_TXN):
            if run.first >= done:
                yield run

    def plain_from(self, state: State, stream: str, partition: int) -> int | None:
        """Base offset of the first batch with uncommitted plain writes; None if all are committed."""
        place = (stream, partition)
        if self.plain_ends.get(place, 0) <= state.plain.get(place, 0):
            return None
        return next((run.batch_base for run in self.plain_runs(state, stream, partition)), None)

    def forget(self, state: State, txn_id: bytes) -> list[bytes]:
        """The table keys of a finished transaction's runs, to be dropped with the round."""
        keys = [key for key, _ in self._rejections(txn_id)]
        for stream, partition in self.uncommitted.stays.get(txn_id, {}):
            found = [key for key, _ in self.rows.scan(runs_prefix(stream, partition) + txn_id)]
            keys += found
            if stream in state.tables:  # digests are big: they are not scanned
                keys += map(digest_key, found)
        return keys

    def digests(
        self, stream: str, partition: int, txn_id: bytes, runs: Iterable[StoredRun]
    ) -> Iterator[bytes]:
        """The digests of runs of a table; empty for a run without one."""
        for run in runs:
            key = digest_key(stored_run_key(stream, partition, txn_id, run))
            yield self.rows.get(key) or b""

    def drop_former(self, stream: str, times: int) -> dict[bytes, bytes | None]:
        """Table changes that drop the rows of a former stream of this name; empty if these rows are dropped
        already.

        ``times``: how often the name was forgotten. The status table keeps this number once the rows are dropped.
        """
        mark = k.POSITION + b"f" + stream.encode()
        noted = times.to_bytes(8, "big")
        if self.rows.get(mark) == noted:
            return {}
        positions = position_key(stream, 0)
        name = stream.encode() + b"\0"
        keys = [key for kind in (k.INDEX, k.DIGEST) for key, _ in self.rows.scan(kind + name)]
        found = [key for key, _ in self.rows.scan(positions[:-4])]
        # Keys of another length belong to a stream with a longer name.
        keys += [key for key in found if len(key) == len(positions)]
        keys += [key for key, _ in self.rows.scan(rejected_prefix(NO_TXN, stream))]
        return {mark: noted, **dict.fromkeys(keys)}

    def forget_stream(self, stream: str) -> None:
        """Drop the counts and positions of a forgotten stream from memory."""
        for kept in (self.positions, self.plain_ends, self.read):
            for place in [place for place in kept if place[0] == stream]:
                del kept[place]
        self.copies = {copy for copy in self.copies if copy[0] != stream}
        self.rejected.pop(stream, None)
        self.unsaid.pop(stream, None)

    def round_done(
        self,
        ended: Iterable[bytes],
        cut: Mapping[tuple[str, int], int],
        served: Iterable[tuple[str, int]],
    ) -> None:
        """Follow a round that is on the log.

        ``ended``: transactions. ``cut``: new low waters. ``served``: journal partitions whose plain writes were
        committed; they come last in `plain_waiting` now.
        """
        for place in served:
            self.plain_ends[place] = self.plain_ends.pop(place)
        self.uncommitted.ended(ended)
        for place, offset in cut.items():
            if place in self.read:
                self.read[place].forget(offset)

    def covers(self, receipts: Sequence[Receipt], txn: OpenTxn | None = None) -> bool:
        """Whether the journals are indexed up to all receipts. ``txn``: as for `lacking`."""
        return self.lacking(receipts, txn) is None

    def lacking(
        self, receipts: Sequence[Receipt], txn: OpenTxn | None = None
    ) -> tuple[str, int] | None:
        """A journal partition that is not indexed up to all receipts, or None.

        ``txn``: the transaction whose commit waits. The result is cached in ``txn``, because each turn asks again.
        """
        positions = self.positions
        if txn is not None and txn.lacks is not None:
            place, end = txn.lacks
            if positions.get(place, 0) < end:
                return place
        for receipt in receipts:
            for extent in receipt.extents:
                place = extent.stream, extent.partition
                if positions.get(place, 0) < extent.end:
                    if txn is not None:
                        txn.lacks = place, extent.end
                    return place
        return None

    def sweep(self, state: State) -> dict[bytes, bytes | None]:
        """Changes for transactions that ended, and runs that moved, while this status table was not in use."""
        gone: dict[bytes, bytes | None] = {}
        for key, _ in self.rows.scan(k.INDEX):
            txn_id, place = txn_of(key), place_of(key)
            is_gone = txn_id not in state.open
            if txn_id == NO_TXN:
                is_gone = int.from_bytes(key[-8:], "big") < state.plain.get(place, 0)
            if is_gone:
                gone[key] = None
                if place[0] in state.tables:
                    gone[digest_key(key)] = None
        for key, _ in self.rows.scan(k.REJECTED, k.REJECTED + AFTER_NO_TXN):
            if _is_counted(state, key):
                gone[key] = None
        for txn_id, txn in state.open.items():
            for row in txn.moved.values():
                for run in row.runs:
                    gone.update((moved_run(txn_id, row, run),))
        return gone

    def weigh(self, state: State, txn_id: bytes, receipts: Sequence[Receipt]) -> Weighed:
        """Compare the receipts of a commit with the index."""
        due = extents_of(receipts)
        out = Weighed(self.covers(receipts), wrong="", committed=0, left_out=0, size=0)
        participants = state.participants(txn_id)
        for writer, stream, _ in due:
            if stream not in participants:
                out.wrong = f"writer {writer:x} names {stream}, which the transaction never touched"
        total = 0
        seen: dict[tuple[int, str, int], list[int]] = {key: [0, 0] for key in due}
        for stream, epoch in participants.items():
            for segment in state.layout(stream, epoch):
                for run in self.runs(txn_id, stream, segment.partition):
                    total += run.records
                    key = (run.writer, stream, segment.partition)
                    wanted = due.get(key)
                    if wanted is not None and wanted.first <= run.first and run.end <= wanted.end:
                        seen[key][0] += run.records
                        seen[key][1] = (seen[key][1] + run.crc_sum) % CRC_MODULUS
                        out.size += run.batch_size
                        if run.pure:  # only a run that is not pure can be divided
                            out.biggest[stream] = max(out.biggest.get(stream, 0), run.batch_size)
                        out.latest[stream] = max(out.latest.get(stream, 0), run.latest)
                        out.state += run.batch_size if is_state(stream) else 0
        for key, (count, crc_sum) in seen.items():
            out.committed += count
            extent = due[key]
            if (count, crc_sum) != (extent.count, extent.crc_sum):
                kind = "count" if count != extent.count else "checksum"
                out.wrong = out.wrong or (
                    f"writer {key[0] & (1 << 64) - 1:016x}, {key[1]} journal partition {key[2]}: the "
                    f"receipt says {count_of(extent.count, 'record')}, the journal shows {count:,} ({kind} differs)"
                )
        out.left_out = total - out.committed
        return out


def takes_plain(state: State, stream: str) -> bool:
    """Whether a stream takes plain writes: only certain commits write to some."""
    return not (is_state(stream) or stream in state.derivations)


def extents_by_place(receipts: Sequence[Receipt]) -> dict[tuple[str, int], dict[int, Extent]]:
    """journal partition -> writer -> extent."""
    found: dict[tuple[str, int], dict[int, Extent]] = defaultdict(dict)
    for (writer, stream, partition), extent in extents_of(receipts).items():
        found[stream, partition][writer] = extent
    return found


def segment_on(state: State, stream: str, epoch: int, partition: int) -> SegmentRange | None:
    """The segment of a reference epoch on a partition, or None."""
    return state.places.get((stream, epoch), {}).get(partition)


def position_key(stream: str, partition: int) -> bytes:
    """Table key of a journal partition's reading position."""
    return k.POSITION + b"j" + stream.encode() + partition.to_bytes(4, "big")


def taken_runs(runs: Iterable[StoredRun], extents: Mapping[int, Extent]) -> list[StoredRun]:
    """The runs inside the extents of their writers, in journal order."""
    inside = [
        run
        for run in runs
        if run.writer in extents
        and extents[run.writer].first <= run.first
        and run.end <= extents[run.writer].end
    ]
    return sorted(inside, key=lambda run: run.first)


def _put(changes: dict[bytes, bytes | None], prefix: bytes, run: Run) -> None:
    key = run_key(prefix, run)
    changes[key] = pack_run(run)
    if run.digest:
        changes[digest_key(key)] = run.digest


def _takes(txn: OpenTxn, stream: str, partition: int, run: Run) -> bool:
    extent = txn.due.get((run.writer, stream, partition))
    return extent is not None and extent.first <= run.first and run.end <= extent.end


def _has_locked(state: State, stream: str, txn_id: bytes, segment: SegmentRange) -> bool:
    row = state.locked.get(stream, {}).get(txn_id)
    return row is not None and segment_number(segment.segment_id) in row.locked


def _is_counted(state: State, key: bytes) -> bool:
    """Whether the rejected records of a key can be dropped, because the transaction's row counts them."""
    if key[1 : 1 + TXN_ID_SIZE] not in state.open or len(key) <= 1 + TXN_ID_SIZE + 8:
        return True
    stream, partition, first = rejected_place(key)
    return first < state.low_water.get((stream, partition), 0)


def _moved_runs(txn: OpenTxn, place: tuple[str, int]) -> set[tuple[int, int]]:
    return {
        (run.writer, run.first)
        for (stream, partition, _), row in txn.moved.items()
        if (stream, partition) == place
        for run in row.runs
    }


# -- bytes in the journals, counted in memory, so that limits and truncation need no scan --------------


Place = tuple[str, int]  # stream, journal partition

_STEP_BYTES = 4 << 10
_STEPS = 2_048


@dataclass(slots=True)
class Stay:
    """A transaction's data in a journal partition: the lowest base offset of its batches now, and their bytes."""

    low: int
    size: int


@dataclass(slots=True)
class Uncommitted:
    """The data of open transactions in the journals.

    Call ``ended`` only when the end of a transaction is on the log: until then its round may fail.
    """

    stays: dict[bytes, dict[Place, Stay]] = field(default_factory=dict)
    by_stream: Counter[str] = field(default_factory=Counter)  # bytes
    total: int = 0  # bytes
    refused: set[bytes] = field(default_factory=set)  # transactions with rejected records

    def add(self, txn_id: bytes, place: Place, batch_base: int, size: int) -> None:
        """Count a run that the index keeps."""
        stays = self.stays.setdefault(txn_id, {})
        stay = stays.get(place)
        if stay is None:
            stays[place] = Stay(batch_base, size)
        else:
            stay.low = min(stay.low, batch_base)
            stay.size += size
        self.by_stream[place[0]] += size
        self.total += size

    def size_of(self, txn_ids: Iterable[bytes]) -> int:
        stays = (self.stays.get(txn_id, {}) for txn_id in txn_ids)
        return sum(stay.size for found in stays for stay in found.values())

    def moved(self, txn_id: bytes, place: Place, low: int) -> None:
        """Note that runs of a transaction moved. ``low``: the lowest base offset of all its runs there now."""
        self.stays[txn_id][place].low = low

    def ended(self, txn_ids: Iterable[bytes]) -> None:
        """Drop transactions that ended."""
        for txn_id in txn_ids:
            self.refused.discard(txn_id)
            for place, stay in self.stays.pop(txn_id, {}).items():
                self.by_stream[place[0]] -= stay.size
                self.total -= stay.size


class Read:
    """Counts the bytes between two offsets of a journal partition, of the part that this leader has read.

    A count is exact to 4 KiB, or to a two-thousandth of the whole. Bytes before ``start`` are not counted, so
    data may be moved later than necessary, but never sooner.
    """

    def __init__(self, start: int) -> None:
        """``start``: the offset from which this leader reads."""
        self._ends = [start]
        self._totals = [0]

    def add(self, next_offset: int, size: int) -> None:
        """Count ``size`` bytes more, up to ``next_offset``."""
        total = self._totals[-1] + size
        step = max(_STEP_BYTES, (total - self._totals[0]) // _STEPS)
        if len(self._ends) > 1 and total - self._totals[-2] < step:
            self._ends[-1], self._totals[-1] = next_offset, total
        else:
            self._ends.append(next_offset)
            self._totals.append(total)

    def between(self, first: int, end: int) -> int:
        """About how many bytes are from one offset up to another offset."""
        return max(0, self._total(end) - self._total(first))

    def _total(self, offset: int) -> int:
        at = bisect_right(self._ends, offset) - 1
        return self._totals[at] if at >= 0 else self._totals[0]

    def forget(self, below: int) -> None:
        """Drop the counts of offsets below this one, which no caller needs any more."""
        at = bisect_right(self._ends, below) - 1
        if at > 0:
            del self._ends[:at], self._totals[:at]


@dataclass(slots=True)
class Use:
    """The part of a journal partition that open transactions need: its first offset, and their bytes."""

    low: int
    size: int = 0


def uses(uncommitted: Uncommitted, open_txns: Iterable[bytes]) -> dict[Place, Use]:
    """The use of each journal partition in which one of these transactions has data."""
    found: dict[Place, Use] = {}
    for txn_id in open_txns:
        for place, stay in uncommitted.stays.get(txn_id, {}).items():
            use = found.get(place)
            if use is None:
                found[place] = Use(stay.low, stay.size)
            else:
                use.low = min(use.low, stay.low)
                use.size += stay.size
    return found
