"""The state of a control partition: the fold of its status log.

A leader reads the status log into a `State` (`fold_row`), and then changes it by its own rows (`apply`). Both
upsert whole rows and never check a transition, because compaction removes rows in between. The decoded views derive
from the rows alone, so a log gives the same state whether it is compacted or not.

The file is long because each view is derived here, from each kind of row, so that no view can be forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import merge
from itertools import islice
from typing import Any, Generic, TypeVar

from anabranch.core import rows as k
from anabranch.core.journal_runs import extents_of
from anabranch.core.locks.lock_table import LockTable
from anabranch.core.locks.wait_die import Held, Span, Spans
from anabranch.core.rows import Entry, Rows
from anabranch.core.stream_settings import EXCLUSIVE, derivations_at
from anabranch.core.stream_states import changes_topics
from anabranch.core.transaction_states import FINISHED
from anabranch.errors import (
    FeatureNotEnabled,
    InvariantViolation,
    MalformedRecord,
    UnsupportedVersion,
    check,
)
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE, segment_number
from anabranch.protocol.legal_names import OPEN_LANE, as_kafka_compares
from anabranch.protocol.messages import size_of
from anabranch.protocol.partitioner import Layout
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, decode, encode, name_of, unsupported_level

_SERIES = NO_TXN + bytes((Entry.SERIES,))
_NO_ROUND = r.RoundRow(0, 0, 0, 0, 0)
_BY_NAME = {Entry.FORGOTTEN: "forgotten", Entry.LANE: "lanes"}
_BY_NAME |= {Entry.TABLE: "tables", Entry.BASE: "bases", Entry.AUDIT_DUE: "audit_due"}
_BY_NAME |= {Entry.REJECTED: "rejected"}
_ALONE = {
    Entry.TERM: "term",
    Entry.ROUND: "round",
    Entry.SUSPECT: "suspect",
    Entry.FEATURE: "feature",
}
_BY_NUMBER = {Entry.RETIRED: "_retired", Entry.TASK: "tasks"}
K = TypeVar("K")
V = TypeVar("V")
N = TypeVar("N", bytes, str)


class Ordered(Generic[N]):
    """A sorted set of names, or of transaction ids; these are roughly in the order of their creation."""

    def __init__(self) -> None:
        self._all: list[N] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[N]:
        return iter(self._all)

    def __contains__(self, one: N) -> bool:
        at = bisect_left(self._all, one)
        return self._all[at : at + 1] == [one]

    def put(self, one: N, there: object) -> None:
        """Add an item, or remove the item if ``there`` is false."""
        at = bisect_left(self._all, one)
        has = at < len(self._all) and self._all[at] == one
        if there and not has:
            self._all.insert(at, one)
        elif has and not there:
            del self._all[at]

    def clear(self) -> None:
        self._all.clear()

    def since(self, one: N) -> Iterator[N]:
        """All items from this item on, in order."""
        return (self._all[at] for at in range(bisect_left(self._all, one), len(self._all)))


@dataclass(slots=True)
class OpenTxn:
    """An open transaction, with its rows decoded."""

    row: r.TxnRow
    participants: dict[str, int] = field(default_factory=dict)  # stream -> reference epoch
    writers: dict[int, r.Receipt] = field(default_factory=dict)
    lanes: dict[int, str] = field(default_factory=dict)  # writer -> lane
    receipt_bytes: int = 0  # bytes of the writers' receipts, about
    pending: r.PendingCommitRow | None = None
    prepared_ms: int = 0  # when it was prepared, Unix milliseconds; 0 if it was not
    due: dict[tuple[int, str, int], r.Extent] = field(default_factory=dict)  # of the pending commit
    # The journal partition that the pending commit waited for last, and the offset up to which it waited.
    lacks: tuple[tuple[str, int], int] | None = field(default=None, compare=False)
    # By stream and segment number.
    staged_merges: dict[tuple[str, int], r.StagedMergeRow] = field(default_factory=dict)
    # By stream, journal partition and offset.
    moved: dict[tuple[str, int, int], r.MovedRow] = field(default_factory=dict)
    # At its coordinator: the round of votes, and the participants by their control partition.
    votes_row: r.VotesRow | None = None
    partitions: dict[int, r.PartitionRow] = field(default_factory=dict)
    # At a participant: what it has promised to the coordinator.
    promised: r.CoordinatorRow | None = None

    @property
    def is_across(self) -> bool:
        """Whether other control partitions take part."""
        return bool(self.partitions) or self.promised is not None

    @property
    def lacks_time(self) -> bool:
        """Whether it commits with other control partitions, and its timestamp follows: merges are staged first."""
        final = self.row.state == "FINALIZE_IN_PROGRESS"
        return final and not self.row.commit_timestamp and self.is_across


class State:
    """The rows, and decoded views of rows that commands need often.

    ``rows``: the table as of the last `take_changes`; later changes are kept in an overlay until they are written.
    ``trusts_open``: as in `decisions.turn.Settings`. ``decode``: reads the rows that have events.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        trusts_open: bool = False,
        decode: Callable[[bytes], Any] = decode,
    ) -> None:
        self._trusts_open = trusts_open
        self._decode = decode
        self._table = Overlay(rows)
        self.term: r.TermRow | None = None
        self.round = _NO_ROUND
        self.scopes: dict[str, int] = {}
        self.scope_owners: dict[str, str] = {}
        self.streams: dict[str, r.StreamRow] = {}
        self.changing: dict[str, r.StreamRow] = {}  # the streams with work on their topics
        self.stream_names = Ordered[str]()
        self.names: dict[str, str] = {}  # name as Kafka compares it -> stream
        # Scope -> the least `table.history.ms` of its tables; cached until a stream changes.
        self.histories_ms: dict[str, int] = {}
        # The derivations of which a table is a source or that it is derived by.
        self.derivations: dict[str, tuple[r.Derivation, ...]] = {}
        self.layouts: dict[str, Layout] = {}  # active epochs only
        self.exclusive: dict[str, bool] = {}  # exclusive streams,
        self.locked: dict[str, dict[bytes, r.ParticipantRow]] = {}  # … their locks by transaction
        self.held: dict[str, Held] = {}  # … and by key
        # (stream, reference epoch) -> number of a segment -> its keys; cached until the epoch changes.
        self._ranges: dict[tuple[str, int], dict[int, Span]] = {}
        self.epochs: dict[str, dict[int, tuple[r.SegmentRange, ...]]] = {}  # reference epochs only
        # (stream, reference epoch) -> partition -> segment.
        self.places: dict[tuple[str, int], dict[int, r.SegmentRange]] = {}
        self.pins: dict[str, Counter[int]] = {}  # stream -> reference epoch -> open transactions
        # Journal partition -> the end of committed plain writes, and the number of refused plain writes.
        self.plain: dict[tuple[str, int], int] = {}
        self.plain_refused: dict[tuple[str, int], int] = {}
        self.low_water: dict[tuple[str, int], int] = {}
        self.forgotten: dict[str, r.ForgottenRow] = {}
        self._retired: dict[tuple[str, int], r.RetiredRow] = {}
        self.suspect: r.SuspectRow | None = None
        self.feature: r.FeatureRow | None = None
        self.quarantined: dict[bytes, r.QuarantineRow] = {}  # the oldest first
        self.lanes: dict[str, r.LaneRow] = {}
        self.lane_positions: dict[str, int] = {}  # of lanes other than `open`
        self.grants: dict[str, dict[str, int]] = {}  # lane -> pattern -> rights
        # (lane, stream or pattern) -> rights; cached by `authorize` until a grant changes.
        self.rights: dict[tuple[str, str], int] = {}
        self.audits: dict[str, dict[bytes, bool]] = {}  # by lane, the oldest first
        self.audit_due: dict[str, r.AuditRow] = {}  # to add when a stream's topics are changed
        self.processors: dict[str, r.ProcessorRow] = {}
        self.tasks: dict[tuple[str, int], r.TaskRow] = {}
        self.tables: dict[str, r.TableRow] = {}
        self.locks = LockTable()
        self.bases: dict[str, r.BaseRow] = {}  # of tables
        self.rejected: dict[str, r.RejectedRow] = {}  # of streams
        self.open: dict[bytes, OpenTxn] = {}
        self.open_of: dict[str, Ordered[bytes]] = {}  # by the lane that began them
        self.open_in: dict[str, Ordered[bytes]] = {}  # … and by their scope
        # Open transactions with a pending commit, without PREPARED ones, as these wait for no round.
        self.committing: dict[bytes, bool] = {}
        self.prepared = Ordered[bytes]()  # PREPARED transactions
        self.coordinated: dict[bytes, bool] = {}  # open transactions with participants elsewhere
        self.asking: dict[bytes, bool] = {}  # … of these, those that may have messages to send
        self.promised: dict[bytes, bool] = {}  # open transactions of which this is a participant
        # Key -> the error of its folded row; a later row of the key removes the error.
        self.unreadable: dict[bytes, MalformedRecord | UnsupportedVersion] = {}
        self.finished = 0  # transactions that ended since this object was made
        self.committed = 0  # those of them that were committed
        self.outcomes = int.from_bytes(rows.get(k.OUTCOMES) or b"", "big")  # finished ones in rows
        self._oldest = k.FINISHED  # a lower bound of the keys of finished transactions
        self.rederive()

    def rederive(self) -> None:
        """Derive the decoded views from the rows again. Call this after calls of `fold_row`.

        `MalformedRecord`: no controller wrote a row. `UnsupportedVersion`: a newer controller wrote a row.
        """
        # First, because rows of a higher level may have entry types that this release does not know.
        value = self._table.get(k.STATUS + k.FEATURE_KEY)
        self.feature = None if value is None else k.read_row(k.FEATURE_KEY, value)
        if self.feature_level > LEVEL:
            raise unsupported_level(self.feature_level, "the status log")
        if self.feature_level < 1:
            raise k.foreign(k.FEATURE_KEY, f"feature level {self.feature_level}")
        for error in self.unreadable.values():
            raise error
        self.term, self.round, self.suspect = None, _NO_ROUND, None
        for view in (
            self.scopes, self.scope_owners, self.streams, self.changing, self.stream_names, self.names,
            self.histories_ms, self.derivations, self.layouts, self.exclusive, self.locked, self.epochs,
            self.held, self._ranges, self.places, self.pins, self.plain, self.plain_refused, self.low_water,
            self.forgotten, self._retired, self.quarantined,
            self.lanes, self.lane_positions, self.grants, self.rights, self.audits, self.audit_due, self.processors,
            self.tasks, self.tables, self.locks, self.bases, self.rejected, self.open, self.open_of, self.open_in,
            self.committing, self.prepared, self.coordinated, self.asking, self.promised,
        ):  # fmt: skip
            view.clear()
        for key, value in k.rows_of_views(self._table.scan):
            self._rederive(key[1:], value)
        for open_key in [key for key, _ in self._table.scan(k.OPEN)]:
            # The transaction's own row has the lowest entry type: it comes first.
            for key, value in self._table.scan(k.STATUS + open_key[1:]):
                self._rederive(key[1:], value)

    def _rederive(self, key: bytes, value: bytes) -> None:
        row = k.read_row(key, value)
        self._check_row_level(key, value)
        try:
            self._derive(key, row)
        except UnicodeDecodeError as error:
            raise k.foreign(key, error) from error

    def _check_row_level(self, key: bytes, value: bytes) -> None:
        # The leader would fail later, when it has to change the row.
        if value[0] > self.feature_level:
            what = f"it has feature level {value[0]}, and the log has {self.feature_level}"
            raise k.foreign(key, what)

    @property
    def feature_level(self) -> int:
        """The highest feature level of which records may be written."""
        return 1 if self.feature is None else self.feature.level

    # -- changing it ---------------------------------------------------------------------------------

    def apply(self, key: bytes, row: Any) -> bytes | None:
        """Upsert one row (None: delete it). Returns its encoded value, for the log.

        Raises: FeatureNotEnabled (the row has a higher feature level than the log; nothing was changed).
        """
        value = None if row is None else encode(row)
        if value is not None and value[0] > 1:
            self.check_level(value, "a")
        self._upsert(key, row, value)
        self._derive(key, row)
        return value

    def check_level(self, record: bytes, what: str) -> None:
        """Raise `FeatureNotEnabled` if an encoded record has a higher feature level than the log.

        ``what``: the words before its type. Levels that this release does not know are left to `decode`, whose
        error names them.
        """
        if record and self.feature_level < record[0] <= LEVEL:
            raise FeatureNotEnabled(
                f"{what} {name_of(record)} needs feature level {record[0]}, and this cluster has "
                f"{self.feature_level}: upgrade all controllers, then run `anabranch cluster feature --raise "
                f"{record[0]}`"
            )

    def check_enabled(self, level: int, what: str) -> None:
        """Raise `FeatureNotEnabled` if the log has a lower feature level than ``what`` needs."""
        if self.feature_level < level:
            raise FeatureNotEnabled(
                f"{what} needs feature level {level}, and this cluster has {self.feature_level}: upgrade all "
                f"controllers, then run `anabranch cluster feature --raise {level}`"
            )

    def fold_row(self, key: bytes, value: bytes | None) -> None:
        """Upsert one record read from the log. Call `rederive` after the last record."""
        is_txn = len(key) == TXN_ID_SIZE + 1 and key[-1] == Entry.TXN
        row = None
        if is_txn:
            self.open.pop(key[:TXN_ID_SIZE], None)  # this view is older than the rows
        if is_txn or key.startswith(_SERIES):
            self.unreadable.pop(key, None)
            try:
                row = None if value is None else k.read_row(key, value)
            except (MalformedRecord, UnsupportedVersion) as error:
                self.unreadable[key] = error
                return
        self._upsert(key, row, value)

    def _upsert(self, key: bytes, row: Any, value: bytes | None) -> None:
        self._set_derived(key, row)
        self._table.set(k.STATUS + key, value)

    def _set_derived(self, key: bytes, row: Any) -> None:
        """Update the table keys that derive from rows of transactions (`OPEN`, `FINISHED`) and series (`OWNED`)."""
        if len(key) <= TXN_ID_SIZE or key[TXN_ID_SIZE] != Entry.TXN:
            if key.startswith(_SERIES):
                former = self._row(key, r.SeriesRow)
                if (former and former.owner) != (row and row.owner):
                    self._own_series(key, former, -1)
                    self._own_series(key, row, 1)
            return
        txn_id = key[:TXN_ID_SIZE]
        old = self.txn_row(txn_id)
        had = old is not None and old.state in FINISHED
        has = row is not None and row.state in FINISHED
        if had != has:
            self.outcomes += has - had
            kept = self.outcomes.to_bytes(8, "big") if self.outcomes else None
            self._table.set(k.OUTCOMES, kept)
        if old is not None:
            was = k.finished_key(old.finished_ms, txn_id)
            self._table.set(was if had else k.OPEN + txn_id, None)
        if row is not None:
            now = k.OPEN + txn_id
            if has:
                now = k.finished_key(row.finished_ms, txn_id)
                self.finished += not had
                if not had and row.state == "COMMITTED":
                    self.committed += 1
                self._oldest = min(self._oldest, now)
            self._table.set(now, b"")

    def _own_series(self, key: bytes, row: r.SeriesRow | None, by: int) -> None:
        if row is not None:
            self._table.set(k.owned_key(row.owner, key), b"" if by > 0 else None)
            count = max(0, self.series_of(row.owner) + by)
            kept = count.to_bytes(8, "big") if count else None
            self._table.set(k.SERIES_OF + row.owner.encode(), kept)

    def _derive(self, key: bytes, row: Any) -> None:
        txn_id, entry, identifier = k.split_key(key)
        if Entry.TXN <= entry < Entry.GRANT:
            self._derive_txn(txn_id, entry, identifier, row)
        elif entry in _ALONE:
            setattr(self, _ALONE[entry], row)
        elif entry in _BY_NAME:
            _put(getattr(self, _BY_NAME[entry]), identifier.decode(), row)
        elif entry is Entry.SCOPE:
            _put(self.scopes, identifier.decode(), row and row.control_partition)
            _put(self.scope_owners, identifier.decode(), row and row.owner)
        elif entry is Entry.STREAM:
            stream = identifier.decode()
            _put(self.streams, stream, row)
            _put(self.changing, stream, row if row and changes_topics(row) else None)
            self.stream_names.put(stream, row)
            _put(self.names, as_kafka_compares(stream), row and stream)
            self.histories_ms.clear()
            _put(self.derivations, stream, row and derivations_at(stream, row.settings))
            _put(self.layouts, identifier.decode(), row and Layout(row.segments))
            _put(self.exclusive, stream, row and (EXCLUSIVE in row.settings or None))
            if row is None:  # a prepared transaction may outlive a stream that was lost
                self.locked.pop(stream, None)
                self.held.pop(stream, None)
        elif entry is Entry.EPOCH:
            stream, epoch = k.numbered(identifier)
            self._ranges.pop((stream, epoch), None)
            _put(self.epochs.setdefault(stream, {}), epoch, row and row.segments)
            _put(self.places, (stream, epoch), row and {s.partition: s for s in row.segments})
        elif entry is Entry.PLAIN:
            _put(self.plain, k.numbered(identifier), row and row.offset)
            _put(self.plain_refused, k.numbered(identifier), (row and row.refused) or None)
        elif entry is Entry.LOW_WATER:
            _put(self.low_water, k.numbered(identifier), row and row.offset)
        elif entry is Entry.QUARANTINED:
            _put(self.quarantined, identifier, row)
        elif entry is Entry.LANE_POSITION:
            _put(self.lane_positions, identifier.decode(), row and row.commands_offset)
        elif entry is Entry.GRANT:
            lane, _, pattern = identifier.decode().partition(" ")
            _put(self.grants.setdefault(lane, {}), pattern, row and row.rights)
            self.rights.clear()
        elif entry is Entry.AUDIT:
            for kept in self.audits.values() if row is None else ():
                kept.pop(identifier, None)
            if row is not None:
                self.audits.setdefault(row.lane, {})[identifier] = True
        elif entry is Entry.PROCESSOR:
            _put(self.processors, identifier.decode(), row)
        elif entry in _BY_NUMBER:
            _put(getattr(self, _BY_NUMBER[entry]), k.numbered(identifier), row)

    def _derive_txn(self, txn_id: bytes, entry: Entry, identifier: bytes, row: Any) -> None:
        if entry is Entry.TXN:
            if row is None or row.state in FINISHED:
                gone = self.open.pop(txn_id, None)
                if gone is None:
                    return  # it was not open: most one-shots are not
                self.committing.pop(txn_id, None)
                self.prepared.put(txn_id, there=False)
                self.coordinated.pop(txn_id, None)
                self.asking.pop(txn_id, None)
                self.promised.pop(txn_id, None)
                self.locks.end(txn_id)
                self.open_of[gone.row.owner].put(txn_id, there=False)
                self.open_in[gone.row.scope].put(txn_id, there=False)
                for stream, epoch in gone.participants.items():
                    self._unpin(stream, epoch)
                    self._lock(txn_id, stream, None)
            elif txn_id in self.open:
                self.open[txn_id].row = row
            else:
                self.open[txn_id] = OpenTxn(row)
                self.open_of.setdefault(row.owner, Ordered[bytes]()).put(txn_id, there=True)
                self.open_in.setdefault(row.scope, Ordered[bytes]()).put(txn_id, there=True)
        txn = self.open.get(txn_id)
        if txn is None:
            return  # finished: its rows are kept, but there is no view of them
        if entry is Entry.TXN:
            self._note_commit(txn_id, txn)
            self._note_asking(txn_id, txn)
            self._follow_locks(txn_id, txn)
        elif entry is Entry.PARTICIPANT:
            self._pin(txn, identifier.decode(), row)
        elif entry is Entry.WRITER:
            writer = int.from_bytes(identifier, "big", signed=True)
            former = txn.writers.get(writer)
            txn.receipt_bytes -= size_of(() if former is None else (former,))
            txn.receipt_bytes += size_of(() if row is None else (row.receipt,))
            _put(txn.writers, writer, row and row.receipt)
            _put(txn.lanes, writer, row and row.lane)
        elif entry is Entry.PENDING_COMMIT:
            txn.pending, txn.lacks = row, None
            txn.due = extents_of(row.writers) if row is not None and row.decided else {}
            self._note_commit(txn_id, txn)
        elif entry is Entry.PREPARED:
            txn.prepared_ms = 0 if row is None else row.prepared_ms
        elif entry is Entry.STAGED_MERGE:
            _put(txn.staged_merges, k.numbered(identifier), row)
        elif entry is Entry.MOVED:
            _put(txn.moved, k.numbered_at(identifier), row)
        elif entry is Entry.READ_LOCK:
            self.locks.derive(txn_id, identifier, row)
        elif entry is Entry.READS:
            self.locks.name(txn_id, {} if row is None else row.tables)
        elif entry is Entry.VOTES:
            txn.votes_row = row
            self._note_asking(txn_id, txn)
            self._follow_locks(txn_id, txn)
        elif entry is Entry.PARTITION:
            _put(txn.partitions, k.partition_of(identifier), row)
            _put(self.coordinated, txn_id, bool(txn.partitions) or None)
            self._note_asking(txn_id, txn)
        elif entry is Entry.COORDINATOR:
            txn.promised = row
            _put(self.promised, txn_id, row and True)

    def _note_commit(self, txn_id: bytes, txn: OpenTxn) -> None:
        prepared = txn.row.state == "PREPARED"
        if prepared or self.prepared:
            self.prepared.put(txn_id, prepared)
        _put(self.committing, txn_id, (txn.pending and not prepared) or None)

    def _follow_locks(self, txn_id: bytes, txn: OpenTxn) -> None:
        merged = txn.votes_row is not None and txn.votes_row.own_merged
        self.locks.follow(txn_id, txn.row, merged=merged)

    def _note_asking(self, txn_id: bytes, txn: OpenTxn) -> None:
        # A prepared one has all votes, and sends nothing until its commit or abort.
        state = txn.row.state
        asks = (
            txn.partitions
            and state != "PREPARED"
            and (txn.votes_row is not None or state != "OPEN")
        )
        _put(self.asking, txn_id, bool(asks) or None)

    def _pin(self, txn: OpenTxn, stream: str, row: r.ParticipantRow | None) -> None:
        pins = self.pins.setdefault(stream, Counter())
        if stream in txn.participants:
            self._unpin(stream, txn.participants[stream])
        if row is not None:
            pins[row.reference_epoch] += 1
        _put(txn.participants, stream, None if row is None else row.reference_epoch)
        self._lock(txn.row.txn_id, stream, row)

    def _unpin(self, stream: str, epoch: int) -> None:
        pins = self.pins[stream]
        pins[epoch] -= 1
        if not pins[epoch]:
            del pins[epoch]

    def _lock(self, txn_id: bytes, stream: str, row: r.ParticipantRow | None) -> None:
        """Note the segments of an exclusive stream that a transaction has locked."""
        if stream in self.locked and self.locked[stream].pop(txn_id, None) is not None:
            self.held[stream].free(txn_id)
        if row is not None and row.locked and stream in self.exclusive:
            self.locked.setdefault(stream, {})[txn_id] = row
            spans = self.spans(stream, row.reference_epoch, row.locked)
            self.held.setdefault(stream, Held()).lock(txn_id, spans)
        elif stream in self.locked and not self.locked[stream]:
            del self.locked[stream], self.held[stream]

    # -- reading --------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Any:
        """The row of a status key, or None."""
        value = self._table.get(k.STATUS + key)
        return None if value is None else decode(value)

    def _row(self, key: bytes, cls: type[V]) -> V | None:
        row = self.get(key)
        return row if isinstance(row, cls) else None

    def txn_row(self, txn_id: bytes) -> r.TxnRow | None:
        """The row of an open or finished transaction; None if the transaction has no row."""
        txn = self.open.get(txn_id)
        row = txn.row if txn is not None else self.get(k.txn_key(txn_id))
        if row is not None and not isinstance(row, r.TxnRow):
            raise InvariantViolation(f"a TXN key holds a {type(row).__name__}")
        return row

    def participants(self, txn_id: bytes) -> dict[str, int]:
        """stream -> reference epoch, of any transaction."""
        if txn_id in self.open:
            return dict(self.open[txn_id].participants)
        prefix = k.STATUS + txn_id + bytes((Entry.PARTICIPANT,))
        return {
            row.stream: row.reference_epoch for _, row in self._decoded(prefix, r.ParticipantRow)
        }

    def receipt(self, txn_id: bytes, writer: int) -> r.Receipt | None:
        row = self._row(k.writer_key(txn_id, writer), r.WriterRow)
        return None if row is None else row.receipt

    def writers_after(
        self, txn_id: bytes, after: int | None = None, most: int | None = None
    ) -> list[r.Receipt]:
        """Receipts of up to ``most`` writers of any transaction, after the writer ``after``, in row order."""
        prefix = k.STATUS + k.writer_key(txn_id, 0)[:-8]
        first = b"" if after is None else k.STATUS + k.writer_key(txn_id, after) + b"\0"
        rows = [row for _, row in islice(self._decoded(prefix, r.WriterRow, first), most)]
        return [row.receipt for row in rows]

    def layout(self, stream: str, epoch: int) -> tuple[r.SegmentRange, ...]:
        """The segments of a reference epoch; empty if its row is deleted."""
        return self.epochs.get(stream, {}).get(epoch, ())

    def spans(self, stream: str, epoch: int, numbers: Iterable[int]) -> Spans:
        """The keys of segments of a reference epoch, by their numbers."""
        ranges = self._ranges.get((stream, epoch))
        if ranges is None:
            layout = self.layout(stream, epoch)
            ranges = {segment_number(each.segment_id): (each.low, each.high) for each in layout}
            self._ranges[stream, epoch] = ranges
        return tuple([ranges[number] for number in numbers if number in ranges])

    def reserved(self, stream: str) -> set[int]:
        """Partitions of a stream that are reserved by staged merges."""
        return {
            staged.partition
            for txn_id in self.committing
            for (name, _), staged in self.open[txn_id].staged_merges.items()
            if name == stream
        }

    def retired(self, stream: str) -> set[int]:
        """Partitions of a stream with chunks of forced transactions; they are never used again."""
        return {partition for name, partition in self._retired if name == stream}

    def holder(self, scope: str, name: str) -> bytes | None:
        """The transaction that has a name; None if it is free."""
        row = self._row(k.name_key(scope, name), r.NameRow)
        return None if row is None else row.txn_id

    def series(self, scope: str, series: str) -> r.SeriesRow | None:
        """The row of a series; None if it has no commit and no owner."""
        return self._row(k.series_key(scope, series), r.SeriesRow)

    def trusts(self, lane: str) -> bool:
        """Whether the lane is `open` and its senders are trusted."""
        return self._trusts_open and lane == OPEN_LANE

    def series_of(self, lane: str) -> int:
        """The number of series that belong to a lane."""
        return int.from_bytes(self._table.get(k.SERIES_OF + lane.encode()) or b"", "big")

    def last_change(self, thing: bytes) -> r.ChangedRow | None:
        """The last change of the thing with this key (`rows.changed_key`); None if it was never changed."""
        return self._row(k.changed_key(thing), r.ChangedRow)

    def rows_below(self, start: bytes, below: bytes) -> Iterator[tuple[bytes, Any]]:
        """(rest of the key, row) of status keys that begin with ``start``, the last first, from ``below`` down."""
        for rest, value in self._table_below(k.STATUS + start, below):
            yield rest, decode(value)

    def series_below(
        self, lane: str, scope: str, below: bytes
    ) -> Iterator[tuple[bytes, r.SeriesRow]]:
        """(name, row) of a scope's series that a lane, or no lane, owns, the last first, from ``below`` down."""
        start = k.series_key(scope, "")
        owned = [self._table_below(k.owned_key(who, start), below) for who in (lane, "")]
        for name, _ in merge(*owned, reverse=True):
            row = self._row(start + name, r.SeriesRow)
            if row is None:
                raise InvariantViolation("a series that a lane owns has no row")
            yield name, row

    def _table_below(self, start: bytes, below: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._table.scan_back(start + below):
            if not key.startswith(start):
                return
            yield key[len(start) :], value

    def yielded(self, txn_id: bytes) -> r.YieldedRow | None:
        """The claim to which an aborted transaction's commit gave way; None if it was aborted otherwise."""
        return self._row(k.yielded_key(txn_id), r.YieldedRow)

    def prepared_row(self, txn_id: bytes) -> r.PreparedRow | None:
        value = self._table.get(k.STATUS + k.prepared_key(txn_id))
        row = None if value is None else _decode_often(self._decode, value)
        return row if isinstance(row, r.PreparedRow) else None

    def votes_row(self, txn_id: bytes) -> r.VotesRow | None:
        """The round of votes of a transaction; None: this is not its coordinator, or it was not committed."""
        txn = self.open.get(txn_id)
        return self._row(k.votes_key(txn_id), r.VotesRow) if txn is None else txn.votes_row

    def partition_rows(self, txn_id: bytes) -> Mapping[int, r.PartitionRow]:
        """The participants of a transaction by their control partition; empty if this is not its coordinator."""
        txn = self.open.get(txn_id)
        if txn is not None:
            return txn.partitions
        prefix = k.STATUS + k.partition_key(txn_id, 0)[:-2]
        rows = self._decoded(prefix, r.PartitionRow)
        return {k.partition_of(key[len(prefix) :]): row for key, row in rows}

    def coordinator_row(self, txn_id: bytes) -> r.CoordinatorRow | None:
        """The promise of this control partition to a transaction's coordinator; None: it is no participant."""
        txn = self.open.get(txn_id)
        return (
            self._row(k.coordinator_key(txn_id), r.CoordinatorRow) if txn is None else txn.promised
        )

    def finished_before(self, unix_ms: int, limit: int) -> list[bytes]:
        """Up to ``limit`` transactions that ended before a time, in the order in which they ended."""
        found: list[bytes] = []
        due = k.finished_key(max(0, unix_ms), b"")
        if self._oldest >= due:
            return found
        oldest = k.FINISHED + b"\xff" * 9  # higher than all keys
        for key, _ in self._table.scan(k.FINISHED, self._oldest):
            oldest = min(oldest, key)
            if key >= due or len(found) == limit:
                break
            found.append(key[9:])
        self._oldest = oldest
        return found

    def txn_rows_below(self, key: bytes | None) -> Iterator[tuple[bytes, r.TxnRow | None]]:
        """The status keys of transactions below ``key`` (None: all), the newest id first.

        A transaction's own key comes with its row, the keys of its writers and streams with None. A transaction may
        have many keys, so a caller that limits its work counts keys.
        """
        above = k.STATUS + (b"\xff" * (TXN_ID_SIZE + 1) if key is None else key)
        for found, value in self._table.scan_back(above):
            if not found.startswith(k.STATUS) or found[1 : 1 + TXN_ID_SIZE] == NO_TXN:
                return
            is_row = len(found) == 1 + TXN_ID_SIZE + 1 and found[-1] == Entry.TXN
            yield found[1:], decode(value) if is_row else None

    def row_keys(self, start: bytes, most: int | None = None) -> list[bytes]:
        """The first ``most`` (None: all) status keys with this start, which may be a transaction's id."""
        return [key[1:] for key, _ in islice(self._table.scan(k.STATUS + start), most)]

    def _decoded(self, prefix: bytes, cls: type, first: bytes = b"") -> Iterator[tuple[bytes, Any]]:
        for key, value in self._table.scan(prefix, first):
            row = decode(value)
            if isinstance(row, cls):
                yield key, row

    def keep(self, table_key: bytes, value: bytes | None) -> None:
        """Put, or delete (None), a derived table key together with this round's rows."""
        self._table.set(table_key, value)

    def seal_changes(self) -> None:
        """Keep the changes so far for `take_changes`, apart from later changes."""
        self._table.seal()

    def take_changes(self) -> dict[bytes, bytes | None]:
        """The sealed table changes, or all since the last call; the caller writes them before it continues."""
        return self._table.take()


@lru_cache(1 << 3)
def _decode_often(decode: Callable[[bytes], Any], value: bytes) -> Any:
    """A row that one command reads several times, though it may be big."""
    return decode(value)


def _put(into: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        into.pop(key, None)
    else:
        into[key] = value


# -- pending changes -----------------------------------------------------------------------------------


_FEW = 32  # up to this many fresh keys are inserted one by one; for more, all are sorted


class Overlay:
    """The table's rows as they will be when the pending changes are written.

    The changes of a round that is being written are *sealed*: later changes don't mix with them.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.sealed: Overlay | None = None
        self.changes: dict[bytes, bytes | None] = {}
        self.bytes = 0  # of values that were set since the last `take`
        self.order: list[bytes] = []  # the changed keys, sorted, without the fresh ones
        self.fresh: list[bytes] = []
        # The last key that was not found: a new row is looked up before `set`, and again in `set`.
        self._missed: bytes | None = None

    def get(self, key: bytes) -> bytes | None:
        if key in self.changes:
            return self.changes[key]
        if key == self._missed:
            return None
        value = self.rows.get(key)
        if value is None:
            self._missed = key
        return value

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        over = self._changed_keys(prefix, first)
        at = 0
        for key, value in self.rows.scan(prefix, first):
            while at < len(over) and over[at] < key:
                yield from self._changed(over[at])
                at += 1
            if at < len(over) and over[at] == key:
                yield from self._changed(key)
                at += 1
            else:
                yield key, value
        for key in over[at:]:
            yield from self._changed(key)

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._put_in_order()
        over = self.order[: bisect_left(self.order, before)]
        for key, value in self.rows.scan_back(before):
            while over and over[-1] > key:
                yield from self._changed(over.pop())
            if over and over[-1] == key:
                yield from self._changed(over.pop())
            else:
                yield key, value
        while over:
            yield from self._changed(over.pop())

    def _put_in_order(self) -> None:
        """Add the fresh keys to the sorted ones."""
        if len(self.fresh) > _FEW:
            self.order = sorted((*self.order, *self.fresh))
        else:
            for key in self.fresh:
                insort(self.order, key)
        self.fresh.clear()

    def _changed_keys(self, prefix: bytes, first: bytes) -> list[bytes]:
        self._put_in_order()
        begin = end = bisect_left(self.order, max(prefix, first))
        while end < len(self.order) and self.order[end].startswith(prefix):
            end += 1
        return self.order[begin:end]

    def _changed(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        value = self.changes.get(key)
        if value is not None:
            yield key, value

    def set(self, key: bytes, value: bytes | None) -> None:
        """Put a value; None deletes the key."""
        if key not in self.changes:
            self.fresh.append(key)
        self.changes[key] = value
        if value is not None:
            self.bytes += len(value)

    @property
    def size(self) -> int:
        return len(self.changes)

    def seal(self) -> None:
        """Keep the changes so far for `take`, apart from later changes."""
        check(self.sealed is None, "changes are sealed while earlier ones were not taken")
        sealed = self.sealed = Overlay(self.rows)
        sealed.changes, self.changes = self.changes, {}
        sealed.order, self.order = self.order, []
        sealed.fresh, self.fresh = self.fresh, []
        self.rows, self.bytes = sealed, 0
        self._missed = None

    def take(self) -> dict[bytes, bytes | None]:
        """The changes for `State.take_changes`."""
        sealed = self.sealed
        if sealed is not None:
            self.rows, self.sealed = sealed.rows, None
            return sealed.changes
        taken, self.changes, self.bytes = self.changes, {}, 0
        self.order.clear()
        self.fresh.clear()
        self._missed = None
        return taken
