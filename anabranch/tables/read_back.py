"""Rows that an open transaction wrote to tables, read back from journals (docs/inside/tables.md, Own writes).

The controller lists the accepted records and their places; a scan of the journal would also find rejected records,
and take a moved copy for the newest. Rows are kept in a temporary folder as in a replica. Their version is the
offset that their writer saw: that is the order of the merge, in whichever order they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from anabranch.backoff import Backoff
from anabranch.batches.journal_refetch import JournalReaders
from anabranch.batches.records import Record, decode_records
from anabranch.core.ids import TXN_HEADER, TXN_ID_SIZE, pack_txn_header
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
from anabranch.reading.committed_log import ReaderPorts, client_errors
from anabranch.schemas import records as r
from anabranch.tables.own_writes import Scratch, Writers, Written
from anabranch.topics.names import journal_topic

_ANSWER_S = 5.0  # the longest wait for one answer of a broker
_FIRST_PAUSE_S = 0.02  # before runs are asked for again
_LONGEST_PAUSE_S = 0.5
_BEFORE_EPOCH = TXN_ID_SIZE + 8  # bytes of a header: transaction id, writer


class Handle(Protocol):
    """One writer of a transaction, which `Client.begin` and `Client.join` make."""

    def written_to(self, stream: str) -> int:
        """The number of events that it wrote to a stream so far."""

    def acknowledged(self, deadline: float) -> tuple[bytes, r.Receipt]:
        """A token, and the receipt of all that it wrote, after all is acknowledged. Raises: as its flush."""


class Places(Protocol):
    """Questions to the controller, as a client sends them. Deadlines are monotonic seconds."""

    def list_runs(
        self, token: bytes, stream: str, wanted: Sequence[r.RunsWanted], deadline: float
    ) -> r.RunList:
        """Places of some of the wanted accepted records, and the rest that is still wanted. `NotReady`."""

    def state(self, txn_id: bytes, token: bytes | None, deadline: float) -> r.Outcome:
        """A transaction with the receipts of its writers."""


class ReadBack:
    """The last row of each key that a transaction wrote, from journals. One thread at a time.

    A table is read at the first question about it, and again after more writes of the handle. ``writers`` "all":
    also rows of other writers that had finished at the first read of the table, or at the last `refresh`.
    """

    def __init__(
        self,
        handle: Handle,
        places: Places,
        ports: ReaderPorts,
        deadline: Callable[[], float],
        writers: Writers = "all",
    ) -> None:
        """``deadline``: gives the end of a read that begins now, monotonic seconds."""
        self._handle = handle
        self._places = places
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

        A commit has to take the writer in ``by``, with that receipt or a later one.

        Raises: NotReady (ask again), NotAuthorized (the right Read on the journal is missing; with other writers
        the token's right state), TransactionAborted and others as of a flush.
        """
        return self._read(table).get(table, key)

    def scan(
        self, table: str, low: bytes, high: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Written]]:
        """The rows of [low, high) that it wrote so far, in order; ``high`` None: to the end. Raises: as `get`."""
        return self._read(table).scan(table, low, high, reverse=reverse)

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Do nothing: the write is in a journal."""

    def refresh(self) -> None:
        """Let the next read of each table include writers that have finished since."""
        self._known.clear()

    def close(self) -> None:
        """Free all. Repeating the call is fine."""
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
                state = self._places.state(own.txn_id, token, deadline)
                taken += [x for x in state.writers if x.finished and x.writer != own.writer]
            for receipt in taken:
                by = None if receipt is own else r.WriterAt(receipt.writer, receipt.sequence)
                self._take(rows, token, receipt, by, table, deadline)
            self._known[table] = count
        return rows

    def _take(
        self,
        rows: Scratch,
        token: bytes,
        receipt: r.Receipt,
        by: r.WriterAt | None,
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
            told = self._places.list_runs(token, table, wanted, deadline)
            try:
                with client_errors():
                    self._lay(rows, receipt, by, table, told.runs)
            except _Moved as moved:
                # The next answer has the new place.
                if not pauses.sleep(deadline):
                    raise NotReady(f"rows of {table} can't be read back: {moved}") from moved
            else:
                wanted = told.more
        self._ends.update({place: e.end for place, e in places.items()})

    def _lay(
        self,
        rows: Scratch,
        receipt: r.Receipt,
        by: r.WriterAt | None,
        table: str,
        runs: Iterable[r.RunPlace],
    ) -> None:
        """Read runs and add their rows.

        `_Moved`: one of them is not there any more; adding all again is harmless.
        """
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
                raise _Moved(f"others stand at {run.at} of {topic}[{run.partition}]")
            rows.add(table, by, run.first + 1, (x.key for x in there), (x.value for x in there))
        rows.write()


class _Moved(Exception):
    """Records are not at the listed place any more."""


def _is_of(record: Record, receipt: r.Receipt) -> bool:
    own = pack_txn_header(receipt.txn_id, receipt.writer, 0)[:_BEFORE_EPOCH]
    return any(
        name == TXN_HEADER and (value or b"").startswith(own) for name, value in record.headers
    )
