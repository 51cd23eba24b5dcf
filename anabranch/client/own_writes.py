"""The rows that a transaction on tables wrote, which its reads see instead of the snapshot's.

`Local` has the writes of this process. `ReadBack` reads them from journals, and so also has the writes of the
transaction's other processes. The controller lists the accepted records and their places: a scan of the journal
would also find rejected records, and take a moved copy for the newest.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

from anabranch.backoff import Backoff
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.records import Record, decode_records
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.errors import NotReady
from anabranch.ports import (
    Log,
    LogDenied,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    RecordsGone,
    TopicPartition,
)
from anabranch.protocol.ids import TXN_HEADER, TXN_ID_SIZE, pack_txn_header
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import WriterAt
from anabranch.reading.committed_log import ReaderPorts, client_errors
from anabranch.tables.store import DELETED, THERE, Rows, Seen, Store
from anabranch.topics.names import journal_topic

Writers = Literal["own", "all"]
OWN_BYTES = 64 << 20  # rows in memory, about; more rows go to a temporary folder
_ROW_BYTES = 150
_AT_ONCE = 4096  # rows
_BATCH_BYTES = 8 << 20
_NEWEST = (1 << 63) - 1
# In place of a row's transaction id: a writer and its receipt's sequence; zeros for this process.
_BY = struct.Struct(">qq")
_ANSWER_S = 5.0  # the longest wait for one answer of a broker
_FIRST_PAUSE_S = 0.02  # before moved runs are looked up again
_LONGEST_PAUSE_S = 0.5
_BEFORE_EPOCH = TXN_ID_SIZE + 8  # bytes of a header: transaction id, writer
T = TypeVar("T")


class Written(NamedTuple):
    """A row that the transaction wrote. ``value`` None: deleted. ``by``: the writer, if not of this process."""

    value: bytes | None
    by: WriterAt | None = None


class OwnRows(Protocol):
    """A transaction's own writes, of this process and of others."""

    def get(self, table: str, key: bytes) -> Written | None:
        """The last write to a key, or None."""

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        """The written keys of [low, high), in their order. Later writes are not seen."""

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Note a write of this process."""

    def refresh(self) -> None:
        """Let the next read see the writes of writers that have finished since."""

    def close(self) -> None:
        """Free everything. Repeating the call is harmless."""


class Scratch:
    """Rows in a temporary folder, as a replica keeps them: the highest version of a key counts."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="anabranch-own-")
        self._store = Store(Path(self._folder), "own")
        self._rows = Rows()

    def add(
        self,
        table: str,
        by: WriterAt | None,
        version: int,
        keys: Iterable[bytes | None],
        values: Iterable[bytes | None],
    ) -> None:
        """Add rows; rows without a value are deletions. They can be read after `write`."""
        stored = (DELETED if value is None else THERE + value for value in values)
        whose = _BY.pack(by.writer, by.sequence) if by is not None else bytes(_BY.size)
        self._rows.add(self._number(table), whose, version, keys, stored)
        if self._rows.size >= _BATCH_BYTES:
            self.write()

    def write(self) -> None:
        """Store all added rows, so that they can be read."""
        self._store.write(self._rows)
        self._rows = Rows()

    def get(self, table: str, key: bytes) -> Written | None:
        found = self._store.get(self._number(table), key, _NEWEST)
        return None if found.value is None else _written(found)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        found = self._store.scan(self._number(table), low, high, _NEWEST, reverse=reverse)
        return ((seen.key, _written(seen)) for seen in found)

    def close(self) -> None:
        """Delete the folder, unless this is a forked child."""
        if self._store.forked:
            return
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _number(self, table: str) -> int:
        return (self._store.marks.get(table) or self._store.begin(table, "")).number


def _written(seen: Seen) -> Written:
    by, data = WriterAt(*_BY.unpack(seen.txn_id)), seen.value or DELETED
    return Written(data[1:] if data[:1] == THERE else None, by if by.writer else None)


class Local:
    """The writes of this process: in memory, and beyond `OWN_BYTES` in a temporary folder."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, bytes | None]] = {}
        self._keys: dict[str, list[bytes]] = {}  # rising
        self._bytes = 0
        self._spilled: Scratch | None = None
        self._spills = 0

    def get(self, table: str, key: bytes) -> Written | None:
        rows = self._rows.get(table, {})
        if key in rows:
            return Written(rows[key])
        return None if self._spilled is None else self._spilled.get(table, key)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        keys = self._keys.get(table, [])
        if not keys and self._spilled is None:
            return iter(())
        end = len(keys) if high is None else bisect_left(keys, high)
        found = keys[bisect_left(keys, low) : end]
        rows = self._rows.get(table, {})
        mine = iter([(key, Written(rows[key])) for key in (found[::-1] if reverse else found)])
        if self._spilled is None:
            return mine
        return merged(self._spilled.scan(table, low, high, reverse=reverse), mine, reverse)

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        rows = self._rows.setdefault(table, {})
        self._bytes += len(value or b"") - len(rows.get(key) or b"")
        if key not in rows:
            insort(self._keys.setdefault(table, []), key)
            self._bytes += len(key) + _ROW_BYTES
        rows[key] = value
        if self._bytes > OWN_BYTES:
            self._spill()

    def refresh(self) -> None:
        """Do nothing: only writes of this process are here."""

    def _spill(self) -> None:
        self._spilled = self._spilled or Scratch()
        self._spills += 1
        for table, rows in self._rows.items():
            keys = list(rows)
            for at in range(0, len(keys), _AT_ONCE):
                some = keys[at : at + _AT_ONCE]
                self._spilled.add(table, None, self._spills, some, (rows[key] for key in some))
        self._spilled.write()
        self._rows.clear()
        self._keys.clear()
        self._bytes = 0

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()
            self._spilled = None


def merged(
    under: Iterator[tuple[bytes, T]], over: Iterator[tuple[bytes, T]], reverse: bool
) -> Iterator[tuple[bytes, T]]:
    """The rows of both in order; of equal keys the row of ``over``."""
    theirs, ours = next(under, None), next(over, None)
    while theirs is not None or ours is not None:
        if theirs is not None and (ours is None or _first(theirs[0], ours[0], reverse)):
            yield theirs
            theirs = next(under, None)
        elif ours is not None:
            if theirs is not None and theirs[0] == ours[0]:
                theirs = next(under, None)
            yield ours
            ours = next(over, None)


def _first(one: bytes, other: bytes, reverse: bool) -> bool:
    return one > other if reverse else one < other


class ReadBack:
    """The last row of each key that a transaction wrote, from journals. One thread at a time.

    A table's journal is read when the table is first asked for, and again after more writes of the handle.
    ``writers`` "all": also rows of other writers that had finished by then, or by the last `refresh`.
    """

    def __init__(
        self,
        handle: Transaction | Writer,
        session: Session,
        ports: ReaderPorts,
        deadline: Callable[[], float],
        writers: Writers = "all",
    ) -> None:
        """``deadline``: returns the deadline, monotonic seconds, of a read that begins now."""
        self._handle = handle
        self._session = session
        self._ports = ports
        self._deadline = deadline
        self._others = writers == "all"
        self._rows: Scratch | None = None
        self._log: Log | None = None
        self._readers: JournalReaders | None = None
        self._known: dict[str, int] = {}  # events of the handle in a table when it was read last
        self._ends: dict[tuple[str, int, int], int] = {}  # table, writer, partition -> read up to

    def get(self, table: str, key: bytes) -> Written | None:
        """The row of a key, if the transaction wrote it.

        A commit has to take the writer in ``by``, with that receipt or a later receipt.

        Raises: NotReady (ask again), NotAuthorized (the right Read on the journal is missing; with other writers
        the token's right state), TransactionAborted and others as of a flush.
        """
        return self._read(table).get(table, key)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        """The rows of [low, high) written so far, in order; ``high`` None: to the end. Raises: as `get`."""
        return self._read(table).scan(table, low, high, reverse=reverse)

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Do nothing: the write is in a journal."""

    def refresh(self) -> None:
        """Let the next read of each table include writers that have finished since."""
        self._known.clear()

    def close(self) -> None:
        """Free everything. Repeating the call is harmless."""
        if self._rows is not None:
            self._rows.close()
        if self._log is not None:
            self._log.close()
        self._rows = self._log = self._readers = None

    # -- reading --------------------------------------------------------------------------------------

    def _read(self, table: str) -> Scratch:
        """Read what is new since the last read."""
        rows = self._rows = self._rows or Scratch()
        count = self._handle.written_to(table)
        if self._known.get(table) != count:
            deadline = self._deadline()
            token, own = self._handle.acknowledged(deadline)
            taken = [own]
            if self._others:
                state = self._session.state(own.txn_id, token, deadline)
                taken += [x for x in state.writers if x.finished and x.writer != own.writer]
            for receipt in taken:
                by = None if receipt is own else WriterAt(receipt.writer, receipt.sequence)
                self._take(rows, token, receipt, by, table, deadline)
            self._known[table] = count
        return rows

    def _take(
        self,
        rows: Scratch,
        token: bytes,
        receipt: r.Receipt,
        by: WriterAt | None,
        table: str,
        deadline: float,
    ) -> None:
        """Read a writer's rows up to its receipt."""
        extents = [extent for extent in receipt.extents if extent.stream == table]
        places = {(table, receipt.writer, e.partition): e for e in extents}
        wanted = tuple(
            r.RunsWanted(receipt.writer, e.partition, self._ends.get(place, e.first), e.end)
            for place, e in places.items()
            if self._ends.get(place, e.first) < e.end
        )
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._ports.clock)
        while wanted:
            found = self._session.list_runs(token, table, wanted, deadline)
            try:
                with client_errors():
                    self._load(rows, receipt, by, table, found.runs)
            except _Moved as moved:
                # The next answer has the new place.
                if not pauses.sleep(deadline):
                    raise NotReady(f"rows of {table} can't be read back: {moved}") from moved
            else:
                wanted = found.more
        self._ends.update({place: e.end for place, e in places.items()})

    def _load(
        self,
        rows: Scratch,
        receipt: r.Receipt,
        by: WriterAt | None,
        table: str,
        runs: Iterable[r.RunPlace],
    ) -> None:
        """Read runs and add their rows. Raise `_Moved` if a run was moved; adding all again is harmless."""
        if self._log is None:
            self._log = self._ports.open_log(_ANSWER_S)
        readers = self._readers = self._readers or JournalReaders(self._log)
        topic = journal_topic(table)
        last: RawBatch | None = None
        records: list[Record] = []
        for run in sorted(runs, key=lambda run: (run.partition, run.batch_base, run.at)):
            try:
                batch = readers.of(TopicPartition(topic, run.partition)).batch(run.batch_base)
            except (OffsetOutOfRange, RecordsGone, LogUnavailable) as error:
                if isinstance(error, LogDenied):
                    raise
                raise _Moved(error) from error
            if last is None or batch.data is not last.data:
                last, records = batch, decode_records(batch.data)
            at = bisect_left(records, run.at, key=lambda record: record.offset)
            there = records[at : at + run.records]
            if len(there) < run.records or not _is_of(there[0], receipt):
                raise _Moved(f"other records are at {run.at} of {topic}[{run.partition}]")
            rows.add(table, by, run.first + 1, (x.key for x in there), (x.value for x in there))
        rows.write()


class _Moved(Exception):
    """Records are not at the listed place any more."""


def _is_of(record: Record, receipt: r.Receipt) -> bool:
    own = pack_txn_header(receipt.txn_id, receipt.writer, 0)[:_BEFORE_EPOCH]
    return any(
        name == TXN_HEADER and (value or b"").startswith(own) for name, value in record.headers
    )
