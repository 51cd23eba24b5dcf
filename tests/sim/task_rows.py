"""Tables that a worker's stretches read with locks and write, with what a processor has for that.

A stretch's rows are read at one snapshot of the worker's replica, and written with its commit. Each transaction is
recorded under the name of its deal. Some stretches count their events in a row that all workers change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import AnabranchError
from anabranch.processing.batch import BatchTables, HandlerContext, Reads, WorkBatch
from anabranch.processing.tables import TaskTables, WorkerTables, write_rows
from anabranch.reading.slices import Piece
from anabranch.types import Event, TaskOwnership
from tests.sim.check_log import hold
from tests.sim.tables import Uses, number_of
from tests.sim.writers import SCOPE, TABLES
from tests.tables.recorded import RecordedTransaction, id_of, telling, text

if TYPE_CHECKING:
    from anabranch.client.table_transaction import TableTransaction
    from tests.sim.ledger import Deal, Ledger
    from tests.sim.picture import Picture
    from tests.sim.recording import History, MemoryRecorder
    from tests.sim.tables import Noted
    from tests.sim.world import World

TALLY = b"tally"  # a row of the first table: 1, and the events of stretches that counted here
_LOCK_BYTES = 100


class StretchTables:
    """The tables of a worker's process. Its replica has no thread: one stretch at a time uses it."""

    def __init__(
        self, world: World, history: History, noted: Noted, client: Client, folder: Path,
        inputs: Sequence[str],
    ) -> None:  # fmt: skip
        """Raises: as `Client.replica`."""
        self._world, self._history, self._noted = world, history, noted
        self._random = Random(f"{world.seed}/{world.running_name}/rows")
        self._shared = WorkerTables(client, folder, TABLES, (), inputs, threads=False)
        self._tables = TaskTables(self._shared)
        self._uses = Uses(self._random, noted)
        self._busy = False

    def close(self) -> None:
        """Close the rows, once no task of the process runs any more."""
        replica: Any = self._shared.replica
        replica._store.close()
        replica._closed = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other stretch uses the replica in here."""
        while self._busy:
            self._world.sleep(0.05)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def handle(self, deal: Deal, ownership: TaskOwnership, events: Sequence[Event]) -> BatchTables:
        """Read and write rows for the events of a stretch; nothing is sent. Raises: as `BatchTables.check`."""
        batch = WorkBatch(cast("Any", _Nothing()), ownership.task_count)
        source = _Source(self._tables, ownership, self._history, deal.label)
        batch.tables = tables = BatchTables(source, _LOCK_BYTES)
        tables.note(Piece(e.stream, e.commit_timestamp, [e], [0]) for e in events)
        try:
            self._handle(deal, _Handler(HandlerContext(batch), tables, self._random), events)
        except AnabranchError:
            tables.close()
            raise
        deal.rows = sum(len(rows) for rows in tables.rows.values())
        return tables

    def _handle(self, deal: Deal, rows: _Handler, events: Sequence[Event]) -> None:
        if self._random.random() < 0.8:
            self._uses.any(cast("Any", rows))
        if self._random.random() < 0.5:
            before = number_of(rows.read(TABLES[0], TALLY, lock=True))
            rows.put(TABLES[0], TALLY, self._noted.value(before + len(events)))
            deal.tallied = len(events)
        if self._random.random() < 0.1:
            self._world.sleep(self._random.expovariate(2.0))

    def write(self, deal: Deal, txn: Transaction | TableTransaction, tables: BatchTables) -> None:
        """Write the rows of a stretch in its transaction."""
        blind = _Blind(self._history.here, txn, deal.label)
        write_rows(cast("Any", blind if tables.reads is None else tables.reads), tables)


class _Nothing:
    """No rows of stores."""

    def __init__(self) -> None:
        self.due: dict[tuple[int, bytes], int] = {}
        self.known: dict[bytes, int] = {}


class _Source:
    """Begins a stretch's reads, and records them under a name."""

    def __init__(
        self, tables: TaskTables, ownership: TaskOwnership, history: History, label: str
    ) -> None:
        self._tables, self._ownership = tables, ownership
        self._history, self._label = history, label
        self.near = tables.near

    @property
    def committed_at(self) -> int:
        return self._tables.committed_at

    @committed_at.setter
    def committed_at(self, timestamp: int) -> None:
        self._tables.committed_at = timestamp

    def begin(self, least: int) -> Reads:
        self._tables.of_batch(self._ownership, 0)
        txn, here = self._tables.begin(least), self._history.here
        return cast("Reads", RecordedTransaction.begun(here, txn, self._label, SCOPE, least))

    def get_at(self, table: str, key: bytes, at: int | datetime) -> bytes | None:
        return self._tables.get_at(table, key, at)


class _Handler:
    """Rows as a handler has them; some are read without a lock."""

    is_alone = True  # it sees its own writes

    def __init__(self, at: HandlerContext, tables: BatchTables, random: Random) -> None:
        self._at, self._tables, self._random = at, tables, random

    @property
    def _locks(self) -> bool:
        return self._random.random() < 0.9

    def read(self, table: str, key: bytes, *, lock: bool) -> bytes | None:
        return self._tables.get(self._at, table, key, lock=lock)

    def get(self, table: str, key: bytes) -> bytes | None:
        return self.read(table, key, lock=self._locks)

    def scan(
        self, table: str, low: bytes, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        lock = self._locks
        return self._tables.scan(self._at, table, low, high, reverse=reverse, lock=lock)

    def put(self, table: str, key: bytes, row: bytes | None) -> None:
        self._tables.put(self._at, table, key, row)

    insert = put

    def delete(self, table: str, key: bytes) -> None:
        self.put(table, key, None)


class _Blind:
    """A transaction that has read no rows: its writes of rows are recorded."""

    def __init__(
        self, recorder: MemoryRecorder, txn: Transaction | TableTransaction, label: str
    ) -> None:
        self._recorder, self._txn, self._label = recorder, txn, label

    def write(self, table: str, value: bytes | None, *, key: bytes) -> None:
        asked = {"stream": table, "events": [[text(key), id_of(value)]]}
        with telling(self._recorder, "own", self._label, **asked):
            self._txn.write(table, value, key=key)


def check_tally(picture: Picture, ledger: Ledger) -> None:
    """Each stretch that counted its events has made one row, of that just below it."""
    counted = {deal.txn_id: deal for deal in ledger.deals.values() if deal.tallied}
    records = [record for stream, _, record in picture.commits() if stream == TABLES[0]]
    value: bytes | None = None
    for record in sorted(records, key=lambda record: record.timestamp):
        for part in record.segments:
            for event in picture.events[TABLES[0], part.partition]:
                if not part.first <= event.offset < part.end or event.record.key != TALLY:
                    continue
                deal = counted.get(record.txn_id)
                due = number_of(value) + (0 if deal is None else deal.tallied)
                value = event.record.value
                what = f"{record.txn_id.hex()} made {value!r} of the tally at {record.timestamp}"
                hold(number_of(value) == due, f"{what}: {due} is due")
